"""A sweep that is killed again and again ends with the bytes of one that was left alone."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from nursery import KEPT, End, Nursery, sweep_bytes, visible, write_plan

TABLES = (".md", ".csv", ".tex")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, children: Nursery) -> tuple[Path, End]:
    """The undisturbed sweep with its report, and how it ended."""
    folder = tmp_path_factory.mktemp("calm")
    end = children.run(
        "sweep", write_plan(folder, 45), "--out", folder / "out", "--save-every", "3"
    )
    assert end.code == 0, end.err
    assert "6 of 6 runs are done" in end.out
    assert children.run("report", folder / "out").code == 0
    return folder, end


def tables(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (out / "report").iterdir() if p.suffix in TABLES}


def same_as_calm(children: Nursery, out: Path, calm: Path) -> None:
    assert len(sweep_bytes(out)) == 6
    assert sweep_bytes(out) == sweep_bytes(calm / "out")
    assert {p.name for p in visible(out)} == {*KEPT, "manifest.json"}
    assert children.run("report", out).code == 0
    assert len(tables(out)) == 3
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
    assert (end.code, end.err.count("\n")) == (0, 1), end
    same_as_calm(children, tmp_path / "out", folder)


@pytest.mark.slow
def test_kills_with_two_workers_change_nothing(children, calm, tmp_path):
    """Twice only the parent dies and its workers must notice; twice all die at once."""
    folder, _ = calm
    draw = random.Random(2)
    command = ("sweep", folder / "plan.toml", "--out", tmp_path / "out", "--save-every", "3",
               "--workers", "2")  # fmt: skip
    killed = []
    for whole in (False, True, False, True):
        pid = children.start(*command)
        time.sleep(draw.uniform(1.0, 4.5))
        children.kill(pid, whole=whole)
        killed.append(children.wait(pid).code)
    end = children.run(*command)
    assert end.code == 0, end.err
    assert killed.count(-9) >= 2, killed  # on a fast machine a late kill comes too late
    same_as_calm(children, tmp_path / "out", folder)
