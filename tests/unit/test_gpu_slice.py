"""Steps of "One loan of thirty minutes" (benchmarks/README.md) without a GPU: data in parts, what
comes back, the packages that a machine lacks."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

import gpu_slice


def test_data_that_travel_in_parts_arrive_as_they_were(tmp_path: Path) -> None:
    pack, arrived, store = (tmp_path / name for name in ("pack", "parts", "store"))
    contents = {"a/one.bin": bytes(range(256)) * 9000, "a/empty": b"", "two.bin": b"x" * 1_500_000}
    for name, content in contents.items():
        (pack / name).parent.mkdir(parents=True, exist_ok=True)
        (pack / name).write_bytes(content)
    gpu_slice.parts(pack, arrived, megabytes=1)
    numbers = sorted(folder.name for folder in arrived.iterdir())
    assert numbers == ["1", "2", "3", "4"]
    for number in numbers:  # one call each
        assert not (store / "data" / "pack" / "two.bin").exists()
        (tmp_path / "call" / number).parent.mkdir(exist_ok=True)
        (arrived / number).rename(tmp_path / "call" / number)
        gpu_slice.take(tmp_path / "call", store)
    assert {n: (store / "data" / "pack" / n).read_bytes() for n in contents} == contents
    damaged = next((tmp_path / "call" / "4").glob("two.bin.*"))
    damaged.write_bytes(damaged.read_bytes()[::-1].replace(b"x", b"y"))
    (store / "data" / "pack" / "two.bin").unlink()
    with pytest.raises(SystemExit, match="damaged"):
        gpu_slice.take(tmp_path / "call", store)


def test_what_comes_back_is_unpacked_and_listed(tmp_path: Path) -> None:
    results, arrived = tmp_path / "results", tmp_path / "arrived"
    for folder in (results, arrived):
        folder.mkdir()
    (results / "slices.json").write_text('[{"name": "mnist-boxes"}]')
    out = tmp_path / "out"
    tuning = out / "cifar10-boxes" / "tuning"
    tuning.mkdir(parents=True)
    (out / "cifar10-boxes" / "choices.json").write_text("[]")
    (tuning / "runs.json").write_text(json.dumps({"files": {"a/manifest.json": ""}}))
    sweeps = [{"name": "cifar10-boxes", "exit": 3}]
    (out / "slice.json").write_text(json.dumps({"commit": "1", "mps": True, "sweeps": sweeps}))
    with tarfile.open(tmp_path / "whole.tar", "w") as archive:
        archive.add(out, ".")
    whole = (tmp_path / "whole.tar").read_bytes()
    for name, piece in (("aa", whole[:5000]), ("ab", whole[5000:])):
        (arrived / f"out.tar.{name}").write_bytes(piece)
    gpu_slice.bring(arrived, results)
    assert (results / "cifar10-boxes" / "choices.json").read_text() == "[]"
    assert not (results / "slice.json").exists()
    assert json.loads((results / "slices.json").read_text()) == [
        {"name": "mnist-boxes"},
        {"commit": "1", "mps": True, "name": "cifar10-boxes", "exit": 3},
    ]
    with pytest.raises(SystemExit, match=r"no files out\.tar"):
        gpu_slice.bring(results, results)


def test_what_comes_back_from_another_machine_replaces_no_runs(tmp_path: Path) -> None:
    """An archive that lacks runs of the one that is there, or with them."""
    results, arrived = tmp_path / "results", tmp_path / "arrived"
    listed = results / "cifar10-boxes" / "tuning" / "runs.json"
    arrived.mkdir()
    for names, taken in (("ab", True), ("bc", False), ("abc", True)):
        out = tmp_path / names / "cifar10-boxes" / "tuning"
        out.mkdir(parents=True)
        (tmp_path / names / "slice.json").write_text('{"commit": "", "mps": true, "sweeps": []}')
        files = {f"{name}/manifest.json": "" for name in names}
        (out / "runs.json").write_text(json.dumps({"files": files}))
        with tarfile.open(arrived / "out.tar.aa", "w") as archive:
            archive.add(tmp_path / names, ".")
        before = listed.read_text() if listed.exists() else ""
        if taken:
            gpu_slice.bring(arrived, results)
            assert listed.read_bytes() == (out / "runs.json").read_bytes()
        else:
            with pytest.raises(SystemExit, match="lacks 1 of the runs"):
                gpu_slice.bring(arrived, results)
            assert listed.read_text() == before


def test_a_process_finds_packages_that_were_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "carried.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gpu_slice._python(["-c", "import carried, fairvar"], tmp_path) == 0
