"""Computing the missing cells of a plan: one process or several, here or on a cluster.

There is no queue and no master: every worker walks over the groups of cells that train together,
and takes those that are neither finished nor locked. So any number of `fairvar sweep` processes may
work on one folder, and killing any of them loses at most the rounds since its last checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch

from fairvar.config import Config
from fairvar.engine.grid import Member, train_grid
from fairvar.engine.train import run_rounds
from fairvar.errors import BadInput, FairvarError, IntegrityError, RunFailed
from fairvar.experiment import (
    Interrupted,
    Watch,
    federation_of,
    missing,
    model_of,
    run_folder,
)
from fairvar.groups import Group, arrange, kind, run_group, tidy
from fairvar.identity import look_again
from fairvar.plugin import load_plugin
from fairvar.progress import Report
from fairvar.store import is_complete

MOST_RESTARTS = 3
Plain = dict[str, dict[str, Any]]  # a group's cells as plain values, by the names of their folders
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


def work(
    groups: Iterable[Group],
    out: Path,
    stopping: Callable[[], bool],
    save_every: int | None,
    pulse: Pulse,
) -> None:
    """One worker: compute what nobody else computes."""
    for group in groups:
        if stopping():
            raise Interrupted("stopped between two runs; the same command continues")
        progress = partial(pulse.beat, len(missing(group, out)))
        run_group(group, out, Watch(progress, stopping, save_every))
        pulse.rest()


class Pulse:
    """What a worker has done, as three numbers that its parent can read: rounds since it started,
    rounds behind and in all of what is under way. A round of ten runs that train together is ten.
    """

    def __init__(self, numbers: Any, worker: int, after: Callable[[], None]) -> None:
        self.numbers, self.place, self.after, self.last = numbers, 3 * worker, after, 0

    def beat(self, runs: int, done: int, total: int) -> None:
        new = done - self.last if self.last else 1  # a run that continues starts anywhere
        self.last = done
        self._write(self.numbers[self.place] + runs * new, runs * done, runs * total)
        self.after()

    def rest(self) -> None:
        self.last = 0
        self._write(self.numbers[self.place], 0, 0)

    def _write(self, *three: int) -> None:
        for i, number in enumerate(three):
            self.numbers[self.place + i] = number


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM become a question that the round loop asks, so that it can save first."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    look_again()
    deadline = None if budget is None else time.monotonic() + budget
    with stop_signals() as asked:
        spent = False

        def stopping() -> bool:
            nonlocal spent
            spent = spent or (deadline is not None and time.monotonic() > deadline)
            return spent or asked()

        meter = Meter(cells, out, report, workers)
        try:
            todo = groups_to_do(cells, out, batch)
            if workers == 1:
                work(todo, out, stopping, save_every, Pulse(meter.numbers, 0, meter.show))
            else:
                _run_workers(todo, out, stopping, save_every, workers, meter, plugin)
        except Interrupted:
            if asked():
                raise Interrupted("interrupted; the same command continues") from None
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


class Meter:
    """Runs that are finished, rounds per second and what is under way, shown now and then."""

    def __init__(self, cells: Sequence[Config], out: Path, report: Report, workers: int) -> None:
        self.cells, self.out, self.report = cells, out, report
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
            self.report(done, len(self.cells), f"runs, {rate}{under_way}")


def _run_workers(
    groups: Sequence[Group],
    out: Path,
    stopping: Callable[[], bool],
    save_every: int | None,
    workers: int,
    meter: Meter,
    plugin: Path | None,
) -> None:
    """Spawned processes that all walk the same list; one that dies is started again."""
    context = multiprocessing.get_context("spawn")
    stop, errors = context.Event(), context.SimpleQueue()
    restarts = 0
    plain: list[Plain] = [
        {run_folder(cell, out).name: cell.to_dict() for cell in group} for group in groups
    ]

    def start(number: int) -> Any:
        # Each starts at another place, so that they rarely ask for the same lock.
        order = [*range(number, len(plain), workers), *range(len(plain))]
        told = (number, plain, order, out, stop, meter.numbers, errors, save_every, os.getpid(),
                plugin)  # fmt: skip
        process = context.Process(target=_worker, args=told)
        process.start()
        return process

    running = [start(number) for number in range(min(workers, len(groups)))]
    while running:
        time.sleep(0.2)
        if stopping():
            stop.set()
        meter.show()
        for place, process in enumerate(running):
            if process.exitcode not in (None, 0) and not stop.is_set():
                restarts += 1
                if process.exitcode > 0 or restarts > MOST_RESTARTS:
                    stop.set()
                    raise _failure(process.exitcode, errors)
                running[place] = start(place)
        running = [p for p in running if p.exitcode is None]
    if stop.is_set():
        raise Interrupted("stopped")


def _failure(code: int, errors: Any) -> FairvarError:
    """A worker's own error as if it had happened here, or that it just ended."""
    if errors.empty():
        text = f"a worker ended with exit code {code}; the cells that are finished are kept"
        return RunFailed(text)
    kinds = {kind.exit_code: kind for kind in (BadInput, IntegrityError)}
    return kinds.get(code, RunFailed)(errors.get())


def _worker(
    number: int,
    groups: Sequence[Plain],
    order: Sequence[int],
    out: Path,
    stop: Any,
    numbers: Any,
    errors: Any,
    save_every: int | None,
    parent: int,
    plugin: Path | None,
) -> None:
    """A process of its own. Signals go to the parent, which sets `stop`, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def stopping() -> bool:
        return bool(stop.is_set()) or os.getppid() != parent

    try:
        load_plugin(plugin)
        first = Config.from_dict(next(iter(groups[0].values())))
        _take_device(number, first.train.device)
        todo = (_cells(groups[place]) for place in order if not _is_done(groups[place], out))
        work(todo, out, stopping, save_every, Pulse(numbers, number, lambda: None))
    except Interrupted:
        return
    except FairvarError as error:
        errors.put(str(error))
        raise SystemExit(error.exit_code) from None


def _is_done(group: Plain, out: Path) -> bool:
    return all(is_complete(out / name) for name in group)


def _cells(group: Plain) -> Group:
    cells = tuple(Config.from_dict(cell) for cell in group.values())
    if [run_folder(cell, Path()).name for cell in cells] != list(group):
        raise RunFailed("the data or the plugin were changed since the sweep began; start it again")
    return cells


def device_for(worker: int, device: str, count: int) -> str:
    """Workers take turns over the GPUs where the configuration says just "cuda"."""
    return f"cuda:{worker % count}" if device == "cuda" and count > 1 else device


def _take_device(worker: int, device: str) -> None:
    """From here on, "cuda" is this worker's GPU. The configuration still says "cuda": where a run
    happened stands in its birth certificate only."""
    mine = device_for(worker, device, torch.cuda.device_count())
    if mine != device:
        torch.cuda.set_device(mine)


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
        sort = (*kind(todo[0]), len(todo))
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
