"""Death inside every step of a save, and disks that refuse: nothing half-written ever counts."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from nursery import KEPT, STEPS, Nursery, run_bytes, run_folders, sweep_bytes, visible

from commands import call
from fairvar.common import files
from fairvar.runs import formats
from fairvar.runs.formats import MANIFEST, is_complete
from fairvar.runs.results import stored_runs
from fairvar.runs.stored import verify

FILES = (*KEPT, MANIFEST, "checkpoint-a", "checkpoint-b", "federation")
ONE_RUN = ("sweep.seeds=1", 'sweep.methods=["afl"]')


def command(short: Path, out: Path) -> tuple[str | Path, ...]:
    return ("sweep", short / "plan.toml", *ONE_RUN, "--out", out, "--save-every", "3")


def only_folder(out: Path) -> Path:
    (folder,) = run_folders(out)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_death_in_any_step_of_a_save(file: str, children: Nursery, short: Path, tmp_path: Path):
    (record,) = (short / "out" / "federations").iterdir()
    file = record.name if file == "federation" else file
    for step in STEPS:
        out = tmp_path / step
        assert children.run(*command(short, out), file=file, step=step).code == -9
        folder = only_folder(out)
        sealed = file == MANIFEST and step in ("replaced", "folder")
        assert is_complete(folder) == sealed
        assert (verify(folder) is not None) == sealed
        finished = {p: p.read_bytes() for p in visible(out)} if sealed else {}
        end = children.run(*command(short, out))
        assert end.code == 0, end.err
        assert "1 of 1 runs are done" in end.out
        assert run_bytes(folder) == run_bytes(short / "out" / folder.name)
        assert all(path.read_bytes() == content for path, content in finished.items())
        if not sealed:  # a finished run is never touched again, not even to tidy up
            assert {p.name for p in folder.iterdir()} == {*KEPT, MANIFEST}
        assert sweep_bytes(out)["federations"] == {record.name: record.read_bytes()}
        assert len(stored_runs(out)) == 1


WRITES = 8  # checkpoints of rounds 3, 6, 9; federation; config, history, state, manifest


@pytest.mark.parametrize("nth", range(1, WRITES + 1))
@pytest.mark.parametrize("stage", ["open", "write"])
def test_disk_full_at_any_write(stage, nth, short, tmp_path, capsys, monkeypatch):
    """Exit 3 and one line; what was there stays, and with space again the same command ends."""
    out, count = tmp_path / "out", 0

    def full(path: Path, mode: str) -> Any:
        nonlocal count
        count += 1
        if count == nth and stage == "open":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = path.open(mode)
        return FullFile(file) if count == nth else file

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", full, raising=False)
        code, _, err = call(capsys, *command(short, out))
    (line,) = [text for text in err.splitlines() if text]
    assert code == 3
    assert line.startswith("fairvar: cannot write ")
    assert "No space left on device" in line
    assert "bytes needed" in line
    folder = only_folder(out)
    assert not is_complete(folder)
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    assert len(visible(out)) == min(nth - 1, 2) + max(nth - 5, 0)  # two checkpoints, then files
    assert call(capsys, *command(short, out))[0] == 0
    assert run_bytes(folder) == run_bytes(short / "out" / folder.name)


class FullFile:
    """A file on a disk with a little space left."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> None:
        self.file.write(content[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("stage", ["lock", "folder"])
def test_disk_full_when_a_lock_or_a_folder_is_made(stage, short, tmp_path, capsys, monkeypatch):
    """Even an empty file needs an inode."""
    real = Path.mkdir

    def mkdir(path: Path, *a: Any, **k: Any) -> None:
        if (path.name == ".locks") == (stage == "lock") and path != tmp_path / "out":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, *a, **k)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        code, _, err = call(capsys, *command(short, tmp_path / "out"))
    assert code == 3
    assert len([text for text in err.splitlines() if text]) == 1
    assert "No space left" in err


@pytest.mark.parametrize("why", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_folder_that_cannot_be_written(why, short, tmp_path, capsys, monkeypatch):
    """Found before any work: exit 2 and one line. (Tests may run as root, whom no mode stops.)"""

    def refuse(*a: Any, **k: Any) -> Any:
        raise OSError(why, os.strerror(why))

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", refuse)
        code, _, err = call(capsys, *command(short, tmp_path / "out"))
    (line,) = [text for text in err.splitlines() if text]
    assert code == 2
    assert f"cannot write into {tmp_path / 'out'}: {os.strerror(why)}" in line
    assert visible(tmp_path) == []


@pytest.mark.parametrize("name", ["with space", "ünïcödé-√", "x" * 200])
def test_odd_folder_names_work(name, short, tmp_path, capsys):
    assert call(capsys, *command(short, tmp_path / name))[0] == 0
    assert len(stored_runs(tmp_path / name)) == 1


@pytest.mark.parametrize("kind", ["a file", "below a file", "too long"])
def test_impossible_folders_are_refused(kind, short, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    out = {"a file": "file", "below a file": "file/out", "too long": "x" * 300}[kind]
    code, _, err = call(capsys, *command(short, tmp_path / out))
    assert code == 2
    assert len([text for text in err.splitlines() if text]) == 1
    assert (tmp_path / "file").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_report_cannot_be_half_written(tmp_path, monkeypatch):
    """Text goes the same way as runs: the old file stays whole until the new one is."""
    path = tmp_path / "table.md"
    formats.write_text(path, "old")

    def full(*a: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(files.RunFailed, match="3 bytes needed"):
        formats.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["table.md"]
