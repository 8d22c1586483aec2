"""Several processes on one folder: each run computed once, and readers never see half of one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock
from nursery import Nursery, run_folders, sweep_bytes

from fairvar.engine.keys import fingerprint
from fairvar.errors import BadInput
from fairvar.runs import formats, runner
from fairvar.runs.plan import Plan
from fairvar.runs.results import gather, stored_runs
from fairvar.runs.runner import Watch, run_cell, run_folder
from fairvar.runs.stored import StoredRun


@pytest.mark.slow
def test_four_processes_compute_each_run_once(children: Nursery, short: Path, tmp_path: Path):
    """Four times over; a reader gathers all the while."""
    reads = 0
    for number in range(4):
        out, log = tmp_path / str(number), tmp_path / f"log-{number}"
        command = ("sweep", short / "plan.toml", "--out", out, "--save-every", "3",
                   "--no-batch")  # fmt: skip
        pids = [children.start(*command, log=str(log)) for _ in range(4)]
        while not (seen := finished(out)) or len(seen) < 6:
            if seen:
                groups = gather(out)
                reads += 1
                assert len(seen) <= sum(len(g.provenances) for g in groups) <= 6
                assert all(t.histories for g in groups for t in g.trials)
        ends = [children.wait(pid) for pid in pids]
        assert [end.code for end in ends] == [0] * 4, ends
        computed = [line.split()[0] for line in log.read_text().splitlines()]
        assert sorted(computed) == [p.name for p in run_folders(short / "out")]
        assert sweep_bytes(out) == sweep_bytes(short / "out")
    assert reads >= 4


def finished(out: Path) -> list[Path]:
    return list(out.glob("*/manifest.json"))


def test_shards_on_one_folder_make_the_whole(children, short, tmp_path):
    for part in range(3):
        end = children.run("sweep", short / "plan.toml", "--out", tmp_path / "out",
                           "--shard", f"{part}/3", "--no-batch")  # fmt: skip
        assert "2 of 2 runs are done" in end.out
        assert len(finished(tmp_path / "out")) == 2 * (part + 1)
    assert sweep_bytes(tmp_path / "out") == sweep_bytes(short / "out")


def test_a_run_that_another_holds_is_left_to_it(children, short, tmp_path):
    out = tmp_path / "out"
    cell = Plan.load(short / "plan.toml").cells[0]
    (out / ".locks").mkdir(parents=True)
    with FileLock(out / ".locks" / run_folder(cell, out).name):
        assert run_cell(cell, out, Watch()) is None
        end = children.run("sweep", short / "plan.toml", "--out", out, "--no-batch")
        assert end.code == 0
        assert "5 of 6 runs are done" in end.out
        assert "1 are left to other processes" in end.out
    assert "6 of 6" in children.run("sweep", short / "plan.toml", "--out", out, "--no-batch").out
    assert sweep_bytes(out) == sweep_bytes(short / "out")


def test_a_run_finished_just_before_the_lock_is_not_repeated(short, monkeypatch):
    """Between looking and locking another process may have ended it: look again."""
    answers = iter([False, False])
    monkeypatch.setattr(formats, "is_complete", lambda folder: next(answers, True))
    monkeypatch.setattr(runner, "compute", None)
    cell = Plan.load(short / "plan.toml").cells[0]
    manifest = run_cell(cell, short / "out", Watch())
    assert manifest is not None
    assert manifest["fingerprint"] == fingerprint(cell)


def test_the_lock_of_a_dead_process_is_no_lock(children, short, tmp_path):
    """The file stays behind, with an owner of any age; only a living process holds a lock."""
    out = tmp_path / "out"
    (out / ".locks").mkdir(parents=True)
    for cell in Plan.load(short / "plan.toml").cells:
        lock = out / ".locks" / run_folder(cell, out).name
        lock.write_text("4711 otherhost")
        os.utime(lock, (2e9, 2e9))
    assert "6 of 6" in children.run("sweep", short / "plan.toml", "--out", out, "--no-batch").out
    assert sweep_bytes(out) == sweep_bytes(short / "out")


def test_readers_pass_by_what_is_unfinished(short, tmp_path):
    """A folder with everything but its manifest, an empty one and a stray file are no runs."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "stray").write_text("x")
    whole = next(p for p in (short / "out").iterdir() if (p / "manifest.json").exists())
    half = tmp_path / "half"
    half.mkdir()
    for file in whole.iterdir():
        if file.name != "manifest.json":
            (half / file.name).write_bytes(file.read_bytes())
    with pytest.raises(BadInput, match="no finished run yet"):
        gather(tmp_path)
    (half / "manifest.json").write_bytes((whole / "manifest.json").read_bytes())
    assert [run.folder.name for run in stored_runs(tmp_path)] == ["half"]
    assert StoredRun.open(half).history().rounds == 9


@pytest.mark.slow
def test_bad_input_that_only_a_worker_finds(children, short, tmp_path):
    """One line and exit 2, as with a single process; nothing is left behind."""
    command = ("sweep", short / "plan.toml", "model.loss=mse", "--out", tmp_path / "out")
    alone = children.run(*command)
    both = children.run(*command, "--workers", "2")
    assert (alone.code, alone.out) == (both.code, both.out) == (2, "")
    assert "mse" in alone.err
    assert both.complaints == alone.complaints
    assert len(alone.complaints) == 1
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
