"""`benchmarks/bench.py --case flower`: Flower's simulation takes turns with the engine."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("flwr")
pytest.importorskip("ray", reason="Flower's simulation runtime needs ray")

from fairvar import cli

pytestmark = pytest.mark.deployment
COMMAND = "fairvar_bench.command"


def test_rounds_of_flower_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--method", "fairgrad*", "--clients", "3", "--batch", "4", "--repeat", "3")
    cli.main(["--case", "flower", *few, "--json"], COMMAND)
    found = json.loads(capsys.readouterr().out)
    assert found["clock"] == "wall time"
    assert [row["model"] for row in found["rows"]] == ["multinomial", "avgcnn"]
    for row in found["rows"]:
        assert set(row["milliseconds"]) == {"flower", "reference", "bare", "fairvar"}
        assert row["times_faster_than"]["flower"]["low"] > 0
        busy = row["processor_milliseconds"]
        assert busy["flower"]["median"] > busy["fairvar"]["median"] > 0
