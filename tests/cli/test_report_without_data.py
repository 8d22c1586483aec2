"""A report is made from stored runs alone; the data need not be there any more."""

from __future__ import annotations

from pathlib import Path

import pytest

import fairvar.runs.runner as experiment
from fairvar import cli
from fairvar.errors import IntegrityError
from fairvar.runs import formats
from fairvar.runs.plan import Plan
from fairvar.runs.results import stored_runs
from fairvar.runs.runner import Watch, run_cell
from fairvar.runs.stored import recorded_federation

PLAN = {
    "data": {"name": "digits", "clients": 6},
    "train": {"rounds": 2},
    "sweep": {"methods": ["fedavg"], "seeds": 1},
}


def test_the_partition_is_drawn_from_what_was_recorded(tmp_path, monkeypatch, capsys):
    for cell in Plan.from_dict(PLAN).cells:
        run_cell(cell, tmp_path, Watch())

    def no_data(*_arguments: object) -> None:
        raise AssertionError("a report must not read the data")

    monkeypatch.setattr(experiment, "federation_of", no_data)
    cli.main(["report", str(tmp_path)])
    assert list((tmp_path / "report").glob("partition-*.png"))
    assert "digits" in capsys.readouterr().out


def test_final_models_are_not_read(tmp_path, monkeypatch):
    """Neither by a report nor by a comparison; `verify` reads them."""
    (cell,) = Plan.from_dict(PLAN).cells
    run_cell(cell, tmp_path, Watch())
    run = stored_runs(tmp_path)[0].folder
    opened: list[str] = []
    read = formats.read_bytes

    def counted(path: Path, *arguments: object, **options: object) -> bytes:
        opened.append(path.name)
        return read(path, *arguments, **options)

    monkeypatch.setattr(formats, "read_bytes", counted)
    cli.main(["report", str(tmp_path)])
    cli.main(["compare", str(run), str(run)])
    assert {"manifest.json", "config.toml", "history.safetensors"} <= set(opened)
    assert "state.safetensors" not in opened
    opened.clear()
    cli.main(["verify", str(tmp_path), "--rerun", "0"])
    assert "state.safetensors" in opened


def test_a_damaged_record_is_named(tmp_path):
    for cell in Plan.from_dict(PLAN).cells:
        run_cell(cell, tmp_path, Watch())
    record: Path = next((tmp_path / "federations").glob("*.json"))
    content = bytearray(record.read_bytes())
    content[len(content) // 2] ^= 1
    record.write_bytes(bytes(content))
    with pytest.raises(IntegrityError, match=record.name):
        recorded_federation(stored_runs(tmp_path)[0])
