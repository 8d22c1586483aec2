"""Runs that train together, killed at any moment: the bytes are those of undisturbed runs."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
from nursery import KEPT, STEPS, End, Nursery, run_folders, sweep_bytes, visible, write_plan

from fairvar.runs.formats import MANIFEST, is_complete

GRID = "lr = [0.05, 0.1, 0.2]\nstrength = [0.01, 0.1]\n"
RUNS = {"FedAvg": 6, "AFL": 6, "FairGrad*": 12}  # of each kind: learning rates, strengths, seeds


def command(folder: Path, out: Path, *more: str) -> tuple[str | Path, ...]:
    return ("sweep", folder / "plan.toml", "--out", out, "--save-every", "5", *more)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, children: Nursery) -> tuple[Path, End]:
    """Three undisturbed groups, and their results."""
    folder = tmp_path_factory.mktemp("grid")
    write_plan(folder, 60, GRID)
    end = children.run(*command(folder, folder / "out"))
    assert end.code == 0, end.err
    return folder, end


def same_as_calm(out: Path, calm: Path) -> None:
    assert sweep_bytes(out) == sweep_bytes(calm / "out")
    assert {p.name for p in visible(out)} == {*KEPT, MANIFEST}
    assert not (out / ".groups").exists()


def test_runs_that_differ_in_numbers_train_together(calm):
    folder, _ = calm
    found = [json.loads((p / MANIFEST).read_text()) for p in run_folders(folder / "out")]
    assert {(m["method"], m["birth"]["together"]) for m in found} == set(RUNS.items())
    assert len(found) == sum(RUNS.values())


@pytest.mark.slow
def test_kills_at_any_moment_change_nothing(children, calm, tmp_path):
    folder, undisturbed = calm
    draw = random.Random(3)
    kills = 0
    for _ in range(12):
        pid = children.start(*command(folder, tmp_path / "out"))
        time.sleep(undisturbed.seconds * draw.uniform(0.02, 0.3))
        children.kill(pid)
        kills += children.wait(pid).code == -9
    assert kills >= 6
    end = children.run(*command(folder, tmp_path / "out"))
    assert (end.code, end.complaints) == (0, []), end
    same_as_calm(tmp_path / "out", folder)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["checkpoint-a", "checkpoint-b", *KEPT, MANIFEST])
def test_death_in_any_step_of_a_save(file, children, calm, tmp_path):
    """Of the group's own files, and of its first run's, while the others are still to come."""
    folder, _ = calm
    for step in STEPS:
        out = tmp_path / step
        assert children.run(*command(folder, out), file=file, step=step).code == -9
        stored = [p for p in run_folders(out) if is_complete(p)]
        assert len(stored) == (file == MANIFEST and step in ("replaced", "folder"))
        before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for f in stored for p in f.iterdir()}
        end = children.run(*command(folder, out))
        assert end.code == 0, end.err
        assert all((p.read_bytes(), p.stat().st_mtime_ns) == b for p, b in before.items())
        assert sweep_bytes(out) == sweep_bytes(folder / "out")
        assert not (out / ".groups").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_polite_signal_saves_the_group(name, children, calm, tmp_path):
    folder, _ = calm
    out = tmp_path / "out"
    arguments = ("sweep", folder / "plan.toml", "--out", out)
    pid = children.start(*arguments)
    deadline = time.monotonic() + 180
    while not any(out.glob(".locks/*")) and time.monotonic() < deadline:  # the first group begins
        time.sleep(0.01)
    children.kill(pid, getattr(signal, name))
    end = children.wait(pid)
    assert (end.code, end.out) == (130, "")
    assert end.complaints == ["fairvar: interrupted; the same command continues"]
    assert len(list(out.glob(".groups/*/checkpoint-a"))) <= 1
    assert children.run(*arguments).code == 0
    same_as_calm(out, folder)


def test_budgets_add_up(children, calm, tmp_path):
    folder, undisturbed = calm
    out = tmp_path / "out"
    first = children.run(*command(folder, out, "--budget", "0.01s"))
    arguments = command(folder, out, "--budget", f"{undisturbed.seconds / 4:.2f}s")
    assert "stopped because the budget is spent; the same command continues" in first.out
    for _ in range(20):
        end = children.run(*arguments)
        assert end.code == 0
        if "24 of 24 runs are done" in end.out:
            break
    same_as_calm(out, folder)


@pytest.mark.slow
def test_two_workers_killed_with_their_parent(children, calm, tmp_path):
    folder, _ = calm
    out = tmp_path / "out"
    arguments = command(folder, out, "--workers", "2")
    for whole in (True, False):
        before = {p: p.stat().st_mtime_ns for p in visible(out)}
        pid = children.start(*arguments)
        deadline = time.monotonic() + 180
        while {p: p.stat().st_mtime_ns for p in visible(out)} == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children.kill(pid, whole=whole)
        children.wait(pid)
    end = children.run(*arguments)
    assert end.code == 0, end.err
    same_as_calm(out, folder)


@pytest.mark.slow
def test_three_processes_compute_each_run_once(children, calm, tmp_path):
    folder, _ = calm
    out, log = tmp_path / "out", tmp_path / "log"
    pids = [children.start(*command(folder, out), log=str(log)) for _ in range(3)]
    assert [children.wait(pid).code for pid in pids] == [0] * 3
    computed = [line.split()[0] for line in log.read_text().splitlines()]
    assert sorted(computed) == [p.name for p in run_folders(folder / "out")]
    same_as_calm(out, folder)


def test_shards_and_workers_make_the_same_bytes(children, calm, tmp_path):
    folder, _ = calm
    for part in range(2):
        end = children.run(*command(folder, tmp_path / "out", "--shard", f"{part}/2"))
        assert end.code == 0, end.err
    same_as_calm(tmp_path / "out", folder)


def test_without_batches_every_run_is_by_itself(children, calm, tmp_path):
    folder, _ = calm
    out = tmp_path / "out"
    assert children.run(*command(folder, out, "--no-batch")).code == 0
    found = [json.loads((p / MANIFEST).read_text()) for p in run_folders(out)]
    assert not any("together" in m["birth"] for m in found)
    assert {p.name for p in run_folders(out)} == {p.name for p in run_folders(folder / "out")}
