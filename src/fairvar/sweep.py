"""Computing the missing cells of a plan: one process or several, here or on a cluster.

There is no queue and no master: every worker walks over the cells and takes those that are neither
finished nor locked. So any number of `fairvar sweep` processes may work on one folder, and killing
any of them loses at most the rounds since its last checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch

from fairvar.config import Config
from fairvar.engine.train import run_rounds
from fairvar.errors import BadInput, FairvarError, IntegrityError, RunFailed
from fairvar.experiment import Interrupted, Watch, federation_of, model_of, run_cell, run_folder
from fairvar.plugin import load_plugin
from fairvar.progress import Report
from fairvar.store import is_complete

MOST_RESTARTS = 3
UNITS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Status:
    """How a sweep stands."""

    cells: int
    done: int
    elsewhere: int = 0  # being computed by another process
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


def missing(cells: Sequence[Config], out: Path) -> list[Config]:
    return [cell for cell in cells if not is_complete(run_folder(cell, out))]


def work(
    cells: Sequence[Config],
    out: Path,
    stopping: Callable[[], bool],
    save_every: int | None,
    rounds_done: Callable[[int], None],
) -> int:
    """One worker: compute what nobody else computes; returns how many cells others hold."""
    elsewhere = 0
    for cell in cells:
        if stopping():
            raise Interrupted("stopped between two runs; the same command continues")
        last = 0

        def progress(done: int, total: int) -> None:
            nonlocal last
            rounds_done(done - last if last else 1)
            last = done

        if run_cell(cell, out, Watch(progress, stopping, save_every)) is None:
            elsewhere += 1
    return elsewhere


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
) -> Status:
    """Compute the missing cells. Interrupted or out of budget, the same call continues."""
    if workers < 1 or (save_every is not None and save_every < 1):
        raise BadInput("--workers and --save-every must be at least 1")
    deadline = None if budget is None else time.monotonic() + budget
    todo = missing(cells, out)
    with stop_signals() as asked:
        spent = False

        def stopping() -> bool:
            nonlocal spent
            spent = spent or (deadline is not None and time.monotonic() > deadline)
            return spent or asked()

        meter = Meter(cells, out, report)
        try:
            if workers == 1:
                work(todo, out, stopping, save_every, meter.add)
            else:
                _run_workers(todo, out, stopping, save_every, workers, meter, plugin)
        except Interrupted:
            if asked():
                raise Interrupted("interrupted; the same command continues") from None
        meter.show(force=True)
        left = len(missing(cells, out))
        reason = "the budget is spent" if spent and left else ""
        return Status(len(cells), len(cells) - left, 0 if spent else left, reason)


class Meter:
    """Cells done and rounds per second, shown now and then."""

    def __init__(self, cells: Sequence[Config], out: Path, report: Report) -> None:
        self.cells, self.out, self.report = cells, out, report
        self.rounds, self.started, self.shown = 0, time.monotonic(), 0.0

    def add(self, rounds: int) -> None:
        self.rounds += rounds
        self.show()

    def show(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self.shown > 1.0:
            self.shown = now
            rate = self.rounds / max(now - self.started, 1e-9)
            done = len(self.cells) - len(missing(self.cells, self.out))
            self.report(done, len(self.cells), f"runs, {rate:.3g} rounds/s")


def _run_workers(
    cells: Sequence[Config],
    out: Path,
    stopping: Callable[[], bool],
    save_every: int | None,
    workers: int,
    meter: Meter,
    plugin: Path | None,
) -> None:
    """Spawned processes that all walk the same list; one that dies is started again."""
    context = multiprocessing.get_context("spawn")
    rounds, stop, errors = context.Value("q", 0), context.Event(), context.SimpleQueue()
    restarts = 0

    def start(number: int) -> Any:
        # Each starts at another place, so that they rarely ask for the same lock.
        shifted = [cell.to_dict() for cell in (*cells[number::workers], *cells)]
        told = (shifted, out, stop, rounds, errors, save_every, os.getpid(), plugin)
        process = context.Process(target=_worker, args=told)
        process.start()
        return process

    running = [start(number) for number in range(min(workers, len(cells)))]
    while running:
        time.sleep(0.2)
        if stopping():
            stop.set()
        meter.rounds = rounds.value
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
    cells: Sequence[dict[str, Any]],
    out: Path,
    stop: Any,
    rounds: Any,
    errors: Any,
    save_every: int | None,
    parent: int,
    plugin: Path | None,
) -> None:
    """A process of its own. Signals go to the parent, which sets `stop`, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def stopping() -> bool:
        return bool(stop.is_set()) or os.getppid() != parent

    def count(new: int) -> None:
        with rounds.get_lock():
            rounds.value += new

    try:
        load_plugin(plugin)
        work([Config.from_dict(cell) for cell in cells], out, stopping, save_every, count)
    except Interrupted:
        return
    except FairvarError as error:
        errors.put(str(error))
        raise SystemExit(error.exit_code) from None


def project(cells: Sequence[Config], out: Path, workers: int) -> float:
    """Seconds that the missing cells will take, from a few rounds of each kind of run."""
    todo = missing(cells, out)
    seconds: dict[tuple[Any, ...], float] = {}
    total = 0.0
    for cell in todo:
        kind = (cell.method.label, cell.data, cell.partition, cell.model, cell.train.batch_size)
        if kind not in seconds:
            seconds[kind] = _seconds_per_run(cell)
        total += seconds[kind]
    return total / workers


def _seconds_per_run(cell: Config) -> float:
    """Rounds with and without an evaluation, timed on a short run; the first ones warm up."""
    torch.set_num_threads(cell.train.threads)
    marks: list[float] = []
    short = msgspec.structs.replace(cell.train, rounds=8)
    often = msgspec.structs.replace(cell.evaluate, every=2)
    data = federation_of(cell)
    run_rounds(
        model_of(cell, data), data, cell.method, cell.model.loss, short, often,
        progress=lambda done, total: marks.append(time.perf_counter()),
    )  # fmt: skip
    steps = [b - a for a, b in pairwise(marks)][2:]  # rounds 4 … 8; the even ones evaluate
    with_evaluation, plain = min(steps[0::2], default=0.0), min(steps[1::2], default=0.0)
    evaluations = cell.train.rounds / cell.evaluate.every
    return cell.train.rounds * plain + evaluations * max(with_evaluation - plain, 0.0)
