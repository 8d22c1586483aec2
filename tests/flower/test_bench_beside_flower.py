"""`fairvar bench --case flower`: Flower's simulation runtime takes its turns beside the engine."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("flwr")
pytest.importorskip("ray", reason="Flower's simulation runtime needs ray")

from fairvar import cli

pytestmark = pytest.mark.deployment


def test_rounds_of_flower_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--method", "fairgrad*", "--clients", "3", "--batch", "4", "--repeat", "3")
    cli.main(["bench", "--case", "flower", *few, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["clock"] == "wall time"
    assert [row["model"] for row in found["rows"]] == ["multinomial", "avgcnn"]
    for row in found["rows"]:
        assert set(row["milliseconds"]) == {"flower", "reference", "bare", "fairvar"}
        assert row["times_faster_than"]["flower"]["low"] > 1  # two exchanges over processes
        busy = row["processor_milliseconds"]
        assert busy["flower"]["median"] > busy["fairvar"]["median"] > 0
