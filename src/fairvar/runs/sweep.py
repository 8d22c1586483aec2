"""Computing the missing cells of a plan: one process or several, here or on a cluster.

There is no queue and no master: every worker walks over the groups of cells that train together,
and takes those that are neither finished nor locked. So any number of `fairvar sweep` processes may
work on one folder, and killing any of them loses at most the rounds since its last checkpoint.
"""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

from fairvar.engine.grid import Member, train_grid
from fairvar.engine.train import run_rounds
from fairvar.errors import BadInput
from fairvar.runs.batch import Group, arrange, tidy
from fairvar.runs.config import Config
from fairvar.runs.identity import batch_key, forget_files
from fairvar.runs.runner import Interrupted, federation_of, missing, model_of, run_folder
from fairvar.runs.workers import Plain, Pulse, Task, run_workers, work
from fairvar.system.progress import Report
from fairvar.system.signals import stop_signals

UNITS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Status:
    """How a sweep stands."""

    cells: int
    done: int
    elsewhere: int = 0  # left to other processes, which hold them or others of their group
    reason: str = ""  # why it stopped before the end


def parse_budget(text: str) -> float:
    """'30min' → 1800 seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|m|min|h)\s*", text)
    if not found or float(found[1]) <= 0:
        raise BadInput(f"budget {text!r} must look like 30min, 45s or 2h")
    return float(found[1]) * UNITS[found[2]]


def parse_shard(text: str) -> tuple[int, int]:
    """'0/4' is the first of four parts, as SLURM arrays count."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise BadInput(f"shard {text!r} must look like 0/4 … 3/4")
    return int(found[1]), int(found[2])


def shard(cells: Sequence[Config], part: int, parts: int, batch: bool = True) -> list[Config]:
    """Part `part` of `parts`, in whole groups: what trains together does not depend on shards."""
    if parts == 1:
        return list(cells)
    return [cell for group in arrange(cells, batch)[part::parts] for cell in group]


def run_sweep(
    cells: Sequence[Config],
    out: Path,
    report: Report,
    workers: int = 1,
    budget: float | None = None,
    save_every: int | None = None,
    plugin: Path | None = None,
    batch: bool = True,
) -> Status:
    """Compute the missing cells. Interrupted or out of budget, the same call continues.

    batch: cells that differ in numbers only train together; else each by itself.
    """
    if workers < 1 or (save_every is not None and save_every < 1):
        raise BadInput("--workers and --save-every must be at least 1")
    forget_files()
    deadline = None if budget is None else time.monotonic() + budget
    with stop_signals() as asked:
        spent = False

        def stopping() -> bool:
            nonlocal spent
            spent = spent or (deadline is not None and time.monotonic() > deadline)
            return spent or asked()

        meter = Meter(cells, out, report, workers, asked)
        try:
            todo = groups_to_do(cells, out, batch)
            if workers == 1:
                work(todo, out, stopping, save_every, Pulse(meter.numbers, 0, meter.show))
            elif todo:
                stop = multiprocessing.get_context("spawn").RawValue("b", 0)
                task = Task(_plain(todo, out), out, meter.numbers, stop, save_every, plugin)
                run_workers(task, min(workers, len(todo)), stopping, meter.show)
        except Interrupted:
            pass
        if asked():
            raise Interrupted("interrupted; the same command continues")
        tidy(out)
        meter.show(force=True)
        left = len(missing(cells, out))
        reason = "the budget is spent" if spent and left else ""
        return Status(len(cells), len(cells) - left, 0 if spent else left, reason)


def groups_to_do(cells: Sequence[Config], out: Path, batch: bool) -> list[Group]:
    """Groups of the whole plan of which something is missing."""
    if not missing(cells, out):
        return []
    return [group for group in arrange(cells, batch) if missing(group, out)]


def _plain(groups: Sequence[Group], out: Path) -> list[Plain]:
    """For other processes."""
    return [{run_folder(cell, out).name: cell.to_dict() for cell in group} for group in groups]


class Meter:
    """Runs that are finished, rounds per second and what is under way, shown now and then."""

    def __init__(
        self,
        cells: Sequence[Config],
        out: Path,
        report: Report,
        workers: int,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.cells, self.out, self.report, self.asked = cells, out, report, asked
        self.started, self.shown = time.monotonic(), 0.0
        self.numbers = multiprocessing.get_context("spawn").RawArray("q", 3 * workers)

    def show(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self.shown > 1.0:
            self.shown = now
            rounds, behind, total = (sum(self.numbers[i::3]) for i in range(3))
            rate = f"{rounds / max(now - self.started, 1e-9):.3g} rounds/s"
            under_way = f", {behind / total:.0%} of those under way" if total else ""
            done = len(self.cells) - len(missing(self.cells, self.out))
            stop = "; stops after this round, at once if you ask again" if self.asked() else ""
            self.report(done, len(self.cells), f"runs, {rate}{under_way}{stop}")


def crowding(workers: int, threads: int, device: str, cores: int) -> str | None:
    """What to know if the workers have more threads than the machine has cores."""
    if workers * threads <= cores or device != "cpu":
        return None
    return (f"{workers} worker(s) x {threads} thread(s) share {cores} core(s) and will be slow: "
            f"use fewer --workers or train.threads=1")  # fmt: skip


def project(cells: Sequence[Config], out: Path, workers: int, batch: bool = True) -> float:
    """Seconds that the missing cells will take, from a few rounds of each kind of group."""
    seconds: dict[tuple[Any, ...], float] = {}
    costs = []
    for group in groups_to_do(cells, out, batch):
        todo = missing(group, out)
        sort = (*batch_key(todo[0]), len(todo))
        if sort not in seconds:
            seconds[sort] = _seconds_per_group(todo)
        costs.append(seconds[sort])
    return max(sum(costs) / workers, *costs, 0.0)


def _seconds_per_group(cells: Sequence[Config]) -> float:
    """Rounds with and without an evaluation, timed on short runs; the first three warm up."""
    first, marks = cells[0], list[float]()
    torch.set_num_threads(first.train.threads)
    data, loss = federation_of(first), first.model.loss
    often = msgspec.structs.replace(first.evaluate, every=3)
    short = [msgspec.structs.replace(cell.train, rounds=6) for cell in cells]
    models = [model_of(cell, data) for cell in cells]

    def mark(done: int, total: int) -> None:
        marks.append(time.perf_counter())

    if len(cells) == 1:
        run_rounds(models[0], data, first.method, loss, short[0], often, progress=mark)
    else:
        zipped = zip(models, cells, short, strict=True)
        members = [Member(model, cell.method, train) for model, cell, train in zipped]
        train_grid(members, data, loss, often, mark)
    steps = [b - a for a, b in pairwise(marks)][2:]  # rounds 4, 5, 6; the last one evaluates
    with_evaluation, plain = min(steps[2:], default=0.0), min(steps[:2], default=0.0)
    evaluations = first.train.rounds / first.evaluate.every
    return first.train.rounds * plain + evaluations * max(with_evaluation - plain, 0.0)
