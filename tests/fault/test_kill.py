"""A sweep that is killed again and again ends with the bytes of one that was left alone."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest
from nursery import (
    KEPT,
    PLAN,
    End,
    Nursery,
    ends,
    run_folders,
    sweep_bytes,
    visible,
    wait_until,
    workers_of,
    write_plan,
)  # fmt: skip

from fairvar.report.files import FORMATS, group_table
from fairvar.report.table import render
from fairvar.runs.formats import is_complete, read_checkpoints
from fairvar.runs.results import gather

TABLES = ("md", "csv", "tex")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, children: Nursery) -> tuple[Path, End]:
    """The undisturbed sweep with its report, and how it ended."""
    folder = tmp_path_factory.mktemp("calm")
    end = children.run(
        "sweep", write_plan(folder, 45), "--out", folder / "out", "--save-every", "3"
    )
    assert end.code == 0, end.err
    assert "6 of 6 runs are done" in end.out
    return folder, end


def tables(out: Path) -> dict[str, str]:
    """The report's tables, without its pictures, which take seconds."""
    (group,) = gather(out)
    return {kind: render(group_table(group), FORMATS[kind]) for kind in TABLES}


def same_as_calm(out: Path, calm: Path) -> None:
    assert len(run_folders(out)) == 6
    assert sweep_bytes(out) == sweep_bytes(calm / "out")
    assert {p.name for p in visible(out)} == {*KEPT, "manifest.json"}
    assert tables(out) == tables(calm / "out")


@pytest.mark.slow
def test_sixteen_kills_of_one_process_change_nothing(children, calm, tmp_path):
    folder, undisturbed = calm
    draw = random.Random(1)
    command = ("sweep", folder / "plan.toml", "--out", tmp_path / "out", "--save-every", "3")
    kills = 0
    for _ in range(16):
        pid = children.start(*command)
        time.sleep(undisturbed.seconds * draw.uniform(0.005, 0.08))
        children.kill(pid)
        kills += children.wait(pid).code == -9
    assert kills == 16
    end = children.run(*command)
    assert (end.code, end.complaints) == (0, []), end
    same_as_calm(tmp_path / "out", folder)


@pytest.mark.slow
def test_kills_with_two_workers_change_nothing(children, calm, tmp_path):
    """Twice only the parent dies and its workers must notice; twice all die at once. The first two
    die while workers start, the others a little after they have begun to compute."""
    folder, _ = calm
    draw = random.Random(2)
    command = ("sweep", folder / "plan.toml", "--out", tmp_path / "out", "--save-every", "3",
               "--workers", "2")  # fmt: skip
    killed = []
    for number, whole in enumerate((False, True, False, True)):
        before = progress(tmp_path / "out")
        pid = children.start(*command)
        if number >= 2:
            wait_until(lambda before=before: progress(tmp_path / "out") != before)
        time.sleep(draw.uniform(0.0, 0.5))
        children.kill(pid, whole=whole)
        killed.append(children.wait(pid).code)
    end = children.run(*command)
    assert end.code == 0, end.err
    assert killed == [-9] * 4
    same_as_calm(tmp_path / "out", folder)


def progress(out: Path) -> dict[Path, int]:
    """Changes with every checkpoint and every finished run."""
    return {p: p.stat().st_mtime_ns for p in visible(out)}


@pytest.mark.slow
def test_workers_end_when_their_parent_was_killed_early(children, calm, tmp_path):
    """Killed while its workers still import: they must not compute the sweep as orphans."""
    folder, _ = calm
    out = tmp_path / "out"
    pid = children.start("sweep", folder / "plan.toml", "--out", out, "--workers", "2")
    wait_until(lambda: len(workers_of(pid)) == 2)  # so the first has its task
    children.kill(pid)
    assert children.wait(pid).code == -9
    assert ends(pid)
    assert not list(out.glob("*/manifest.json"))


@pytest.mark.slow
def test_a_killed_worker_is_replaced(children, calm, tmp_path):
    """One of two workers dies with SIGKILL; the sweep goes on and ends with the same bytes."""
    folder, _ = calm
    out = tmp_path / "out"
    pid = children.start("sweep", folder / "plan.toml", "--out", out, "--workers", "2")
    wait_until(lambda: list(out.glob(".locks/*")))
    workers = workers_of(pid)
    assert len(workers) == 2
    children.kill(workers[0])
    end = children.wait(pid)
    assert end.code == 0, end.err
    assert sweep_bytes(out) == sweep_bytes(folder / "out")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_polite_signal_saves_and_says_how_to_continue(name, children, calm, tmp_path):
    folder, _ = calm
    out = tmp_path / "out"
    pid = children.start("sweep", folder / "plan.toml", "--out", out)
    wait_until(lambda: list(out.glob(".locks/*")))  # the first group is under way
    children.kill(pid, getattr(signal, name))
    end = children.wait(pid)
    assert (end.code, end.out) == (130, "")
    assert end.complaints == ["fairvar: interrupted; the same command continues"]
    assert not [p for p in out.glob("*/*") if p.name.startswith(".")]
    # What was under way kept its last round; between two groups there is none.
    under_way = list(out.glob(".groups/*"))
    assert all(is_complete(p) for p in run_folders(out))
    assert len(run_folders(out)) <= 5
    assert len(under_way) <= 1
    assert all(len(read_checkpoints(p)) == 1 for p in under_way)
    assert children.run("sweep", folder / "plan.toml", "--out", out).code == 0
    same_as_calm(out, folder)


@pytest.mark.slow
def test_sigterm_with_two_workers(children, calm, tmp_path):
    folder, _ = calm
    command = ("sweep", folder / "plan.toml", "--out", tmp_path / "out")
    pid = children.start(*command, "--workers", "2")
    wait_until(lambda: list(tmp_path.glob("out/.locks/*")))
    children.kill(pid, signal.SIGTERM)
    end = children.wait(pid)
    assert end.code == 130
    assert end.complaints == ["fairvar: interrupted; the same command continues"]
    assert ends(pid)
    assert children.run(*command).code == 0
    same_as_calm(tmp_path / "out", folder)


def test_a_single_run_can_be_interrupted_too(children, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(PLAN.format(rounds=3000).partition("[sweep]")[0])
    pid = children.start("run", config, "--out", tmp_path / "out")
    wait_until(lambda: list(tmp_path.glob("out/.locks/*")))
    children.kill(pid, signal.SIGINT)
    end = children.wait(pid)
    assert end.code == 130
    assert re.fullmatch(
        r"fairvar: stopped after round \d+ of 3000; the same command continues from here\n",
        end.err,
    )
    assert not list(tmp_path.glob("out/*/manifest.json"))


def test_budget_ends_in_peace_and_continues(children, calm, tmp_path):
    """Exit 0, what is left is said, and any number of budgets give the same bytes."""
    folder, undisturbed = calm
    for part in (3, 9, 27, 81):  # the machine may be less busy than when `calm` was measured
        out, budget = tmp_path / f"out-{part}", f"{undisturbed.seconds / part:.2f}s"
        command = ("sweep", folder / "plan.toml", "--out", out, "--budget", budget)
        first = children.run(*command)
        assert first.code == 0, first.err
        if "6 of 6" not in first.out:
            break
    assert "stopped because the budget is spent; the same command continues" in first.out
    assert "6 of 6" not in first.out
    for _ in range(20 * part):
        end = children.run(*command)
        assert end.code == 0
        if "6 of 6 runs are done" in end.out:
            break
    assert "stopped" not in end.out
    same_as_calm(out, folder)
