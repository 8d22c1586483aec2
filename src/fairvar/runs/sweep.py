"""Compute the missing runs of a plan: in one process or several, on this machine or with Ray.

There is no queue and no master. Every worker goes through the groups of runs that train as one
batch and takes those that are neither finished nor locked. So any number of `fairvar sweep`
processes may work on one folder, and killing one loses at most the rounds since its last
checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from fairvar.errors import BadInput
from fairvar.runs.batch import Group, arrange, parts_to_do, run_group, tidy
from fairvar.runs.config import Config
from fairvar.runs.identity import batch_key, forget_files
from fairvar.runs.runner import Interrupted, Watch, missing, train_runs
from fairvar.runs.store import LOCKS, MANIFEST, save_files
from fairvar.runs.workers import Pulse, Task, plain_group, run_workers, work
from fairvar.system.progress import Report
from fairvar.system.signals import stop_signals

UNITS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Status:
    """How far a sweep is."""

    cells: int
    done: int
    elsewhere: int = 0  # runs that other processes compute
    reason: str = ""  # why the sweep stopped before the end


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
    """Part `part` of `parts`, in whole groups, so that batches do not depend on shards."""
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
    """Compute the missing runs. After an interruption or the end of the budget (seconds), the same
    call continues.

    batch: runs that differ in numbers only train as one batch; otherwise each by itself.
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
                groups, count = list(map(plain_group, todo)), min(workers, len(todo))
                task = Task(groups, out, meter.numbers, stop, count, save_every, plugin)
                run_workers(task, stopping, meter.show)
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
    """Groups of the plan with missing runs."""
    if not missing(cells, out):
        return []
    return [group for group in arrange(cells, batch) if missing(group, out)]


class Meter:
    """Shows finished runs, rounds per second and the progress of runs under way, every second."""

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
    """A warning if the workers have more threads than the machine has cores."""
    if workers * threads <= cores or device != "cpu":
        return None
    return (f"{workers} worker(s) x {threads} thread(s) share {cores} core(s) and will be slow: "
            f"use fewer --workers or train.threads=1")  # fmt: skip


def project(cells: Sequence[Config], out: Path, workers: int, batch: bool = True) -> float:
    """Seconds that the missing runs will take, from a few timed rounds of each kind of group."""
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
    """Time of rounds with and without evaluation, from short runs; the first three rounds warm
    up."""
    marks: list[float] = []
    short = [
        replace(cell, train=replace(cell.train, rounds=6), evaluate=replace(cell.evaluate, every=3))
        for cell in cells
    ]
    train_runs(short, progress=lambda done, total: marks.append(time.perf_counter()))
    steps = [b - a for a, b in pairwise(marks)][2:]  # rounds 4, 5, 6; the last one evaluates
    with_evaluation, plain = min(steps[2:], default=0.0), min(steps[:2], default=0.0)
    rounds, every = cells[0].train.rounds, cells[0].evaluate.every
    return rounds * plain + rounds / every * max(with_evaluation - plain, 0.0)


# -- on a Ray cluster ------------------------------------------------------------------------------
def run_on_ray(
    cells: Sequence[Config], out: Path, address: str, report: Report, batch: bool = True
) -> None:
    """Compute the missing groups on a Ray cluster. It needs no shared disk: tasks return their
    files and this process stores them."""
    ray = _import_ray()
    todo = [part for group in arrange(cells, batch) for part in parts_to_do(group, out)]
    ray.init(address=address, log_to_driver=False)
    try:
        with stop_signals() as asked:  # after ray.init, which replaces the handler of SIGTERM
            task = ray.remote(max_retries=3)(compute_files)
            pending = [task.remote([cell.to_toml() for cell in part]) for part in todo]
            while pending:
                if asked():
                    raise Interrupted("interrupted; the same command continues")
                ready, _ = ray.wait(pending, num_returns=1, timeout=1.0)
                for reference in ready:
                    pending.remove(reference)
                    save_new(out, ray.get(reference))
                done = len(cells) - len(missing(cells, out))
                report(done, len(cells), f"runs, on Ray at {address}")
    finally:
        ray.shutdown()


def compute_files(group: Sequence[str]) -> dict[str, bytes]:
    """A Ray task: compute a batch of runs, given as TOML, and return the files of their folders."""
    with TemporaryDirectory() as name:
        out = Path(name)
        run_group(tuple(Config.from_toml(text) for text in group), out, Watch())
        kept = [f for f in sorted(out.glob("*/*")) if f.parent.name != LOCKS]
        return {str(f.relative_to(out)): f.read_bytes() for f in kept}


def save_new(out: Path, files: Mapping[str, bytes]) -> None:
    """Store these files, given as folder/name, except those of runs that are stored already."""
    done = {path.parent.name for path in out.glob(f"*/{MANIFEST}")}
    save_files(out, {n: f for n, f in files.items() if n.partition("/")[0] not in done}, depth=2)


def _import_ray() -> Any:
    # By default Ray listens on every network interface and sends usage statistics.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise BadInput('--ray needs Ray: pip install "fairvar[ray]"') from None
    return ray
