"""Compute the missing runs of a plan: in one process or several, on this machine or with Ray.

There is no master. Every worker goes through the groups of runs that train as one batch and takes
those that are neither finished nor locked. So any number of `fairvar sweep` processes may work on
one folder, and killing one loses at most the rounds since its last checkpoint. Workers share no
lock and no queue: the parent asks them to stop through one shared byte, each counts its rounds in
numbers that only it writes, and each has a pipe for the one line that says why it failed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import connection, get_context, parent_process, resource_tracker
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from fairvar.common import process
from fairvar.common.display import plural
from fairvar.common.process import COMPILING, INTERRUPTED, Report, stop_signals
from fairvar.engine.kernels.compiled import announcing
from fairvar.engine.keys import batch_key
from fairvar.errors import (
    BadInput,
    FairvarError,
    IntegrityError,
    InternalError,
    RunFailed,
    explained,
)
from fairvar.runs import own
from fairvar.runs.config import Config
from fairvar.runs.formats import is_complete
from fairvar.runs.identity import forget_files
from fairvar.runs.runner import (
    Interrupted,
    RunGroup,
    Watch,
    missing,
    run_folder,
    run_group,
    tidy,
    train_runs,
)

UNITS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}
MOST_RESTARTS = 3
LONGEST_LINE = 4000  # bytes; writing that many to a pipe never blocks
SECONDS_TO_END = 5.0  # for a worker without a parent to finish its round and save
SPAWN = get_context("spawn")
PULSE = 4  # numbers of a worker that its parent reads


@dataclass(frozen=True)
class Status:
    """How far a sweep is."""

    cells: int
    done: int
    elsewhere: int = 0  # runs that other processes compute
    reason: str = ""  # why the sweep stopped before the end


def parse_budget(text: str) -> float:
    """'30min' → 1800 seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|m|min|h)\s*", str(text))
    if not found or float(found[1]) <= 0:
        raise BadInput(f"budget {text!r} must look like 30min, 45s or 2h")
    return float(found[1]) * UNITS[found[2]]


def parse_shard(text: str) -> tuple[int, int]:
    """'0/4' is the first of four parts, as SLURM arrays count."""
    found = re.fullmatch(r"(\d+)/(\d+)", str(text))
    if not found or not int(found[1]) < int(found[2]):
        raise BadInput(f"shard {text!r} must look like 0/4 … 3/4")
    return int(found[1]), int(found[2])


def run_sweep(
    groups: Sequence[RunGroup],
    out: Path,
    report: Report,
    workers: int = 1,
    budget: float | None = None,
    save_every: int | None = None,
) -> Status:
    """Compute the missing runs of these groups (`arrange`). After an interruption or the end of the
    budget (seconds), the same call continues."""
    if workers < 1 or (save_every is not None and save_every < 1):
        raise BadInput("--workers and --save-every must be at least 1")
    forget_files()
    deadline = None if budget is None else time.monotonic() + budget
    cells, spent = [cell for group in groups for cell in group], False
    with stop_signals() as asked:

        def stopping() -> bool:
            nonlocal spent
            spent = spent or (deadline is not None and time.monotonic() > deadline)
            return spent or asked()

        meter = Meter(cells, out, report, workers, asked)
        todo = [group for group in groups if missing(group, out)]
        try:
            if workers == 1:
                work(todo, out, stopping, save_every, Pulse(meter.numbers, 0, meter.show))
            elif todo:
                plain, count = list(map(plain_group, todo)), min(workers, len(todo))
                stop = SPAWN.RawValue("b", 0)
                code = own.in_use(cells)
                task = WorkerTask(plain, out, meter.numbers, stop, count, save_every, code)
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


def crowding(workers: int, threads: int, device: str, cores: int) -> str | None:
    """A warning if the workers have more threads than the machine has cores."""
    if workers * threads <= cores or device != "cpu":
        return None
    those, each = plural(workers, "worker"), plural(threads, "thread")
    return (f"{those} of {each} share {plural(cores, 'core')} and will be slow: use fewer "
            "--workers or train.threads=1")  # fmt: skip


def project(groups: Sequence[RunGroup], out: Path, workers: int) -> float:
    """Seconds that the missing runs will take, from a few timed rounds of each kind of group."""
    seconds: dict[tuple[Any, ...], float] = {}
    costs = []
    for todo in filter(None, (missing(group, out) for group in groups)):
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
        self.started, self.shown, self.compiling = time.monotonic(), 0.0, 0
        self.numbers = SPAWN.RawArray("q", PULSE * workers)

    def show(self, force: bool = False) -> None:
        now, compiling = time.monotonic(), sum(self.numbers[3::PULSE])
        more, self.compiling = compiling > self.compiling, compiling
        if force or more or now - self.shown > 1.0:
            self.shown = now
            rounds, behind, total = (sum(self.numbers[i::PULSE]) for i in range(3))
            rate = f"{rounds / max(now - self.started, 1e-9):.3g} rounds/s"
            under_way = f", {behind / total:.0%} of those under way" if total else ""
            done = len(self.cells) - len(missing(self.cells, self.out))
            stop = "; stops after this round, at once if you ask again" if self.asked() else ""
            what = f"runs, {rate}{under_way}{stop}"
            if compiling:
                what = f"{COMPILING}; {what}" if more else f"{what}; {COMPILING}"
            self.report(done, len(self.cells), what)


class Pulse:
    """What a worker has done, as numbers that its parent reads: rounds since it started, rounds
    done and in all of the present group, and whether it waits for the compiler. A round of ten runs
    in one batch counts ten."""

    def __init__(self, numbers: Any, worker: int, after: Callable[[], None]) -> None:
        self.numbers, self.place, self.after, self.last = numbers, PULSE * worker, after, 0

    def beat(self, runs: int, done: int, total: int) -> None:
        new = done - self.last if self.last else 1  # a resumed run starts at any round
        self.last = done
        rounds = self.numbers[self.place] + runs * new
        self.numbers[self.place : self.place + PULSE] = rounds, runs * done, runs * total, 0
        self.after()

    def compiling(self, text: str) -> None:
        self.numbers[self.place + 3] = 1
        self.after()

    def rest(self) -> None:
        self.last = 0
        self.numbers[self.place + 1 : self.place + PULSE] = 0, 0, 0


def work(
    groups: Iterable[RunGroup],
    out: Path,
    stopping: Callable[[], bool],
    save_every: int | None,
    pulse: Pulse,
) -> None:
    """Compute the groups that no other process computes."""
    for group in groups:
        if stopping():
            raise Interrupted("stopped between two runs; the same command continues")
        progress = partial(pulse.beat, len(missing(group, out)))
        with announcing(pulse.compiling):
            run_group(group, out, Watch(progress, stopping, save_every))
        pulse.rest()


# -- worker processes ------------------------------------------------------------------------------
@dataclass(frozen=True)
class WorkerTask:
    """What all workers share."""

    groups: Sequence[dict[str, Any]]
    out: Path
    numbers: Any  # shared; some for each worker's `Pulse`
    stop: Any  # shared byte: 1 asks all workers to save and stop
    workers: int
    save_every: int | None = None
    code: Sequence[own.Own] = ()  # of the user's

    def todo(self, worker: int) -> Iterator[RunGroup]:
        """Groups with missing runs. Workers start at different places, so that they rarely ask for
        the same lock."""
        count = len(self.groups)
        for place in (*range(worker, count, self.workers), *range(count)):
            group = self.groups[place]
            if not all(is_complete(self.out / name) for name in group):
                yield _configs(group)


def run_workers(task: WorkerTask, stopping: Callable[[], bool], show: Callable[[], None]) -> None:
    """Start the workers, which all go through the same list; one that is killed is restarted."""
    running: dict[int, Worker] = {}
    absent, restarts, failure = list(range(task.workers)), 0, None
    try:
        while running or absent:
            for number in absent:
                running[number] = Worker(task, number)
            absent = []
            time.sleep(0.2)
            if failure or stopping():
                task.stop.value = 1
                for worker in running.values():
                    # A worker that still imports modules cannot stop, and has computed nothing.
                    if not worker.ready.value:
                        worker.end()
            show()
            for number, worker in list(running.items()):
                if worker.exit_code is None:
                    continue
                del running[number]
                if worker.was_killed and (task.stop.value or stopping()):
                    continue
                restarts += worker.was_killed
                if worker.was_killed and restarts <= MOST_RESTARTS:
                    absent.append(number)
                elif worker.exit_code != 0:
                    failure = failure or worker.failure()
    finally:
        for worker in running.values():  # after a second Ctrl-C
            worker.end()
    if failure:
        raise failure
    if task.stop.value:
        raise Interrupted("stopped")


class Worker:
    """A worker process, for its parent."""

    def __init__(self, task: WorkerTask, number: int) -> None:
        self.failing, writing = SPAWN.Pipe(duplex=False)
        self.ready = SPAWN.RawValue("b", 0)
        self.process = SPAWN.Process(target=_worker, args=(task, number, self.ready, writing))
        resource_tracker.ensure_running()  # it would unblock the signals if it started below
        # A broken pipe: it was killed before it got its argument.
        with process.blocked_signals(), suppress(BrokenPipeError):
            self.process.start()
        writing.close()  # so that reading ends when the worker ends

    @property
    def exit_code(self) -> int | None:
        return -signal.SIGKILL if self.process.pid is None else self.process.exitcode

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, and not an error in its work."""
        return self.exit_code is not None and (self.exit_code < 0 or self.exit_code == INTERRUPTED)

    def failure(self) -> FairvarError:
        """The worker's error, with the same type and message."""
        code = self.exit_code or 0
        try:
            text = self.failing.recv_bytes(LONGEST_LINE).decode(errors="replace")
        except (EOFError, OSError):  # it ended before it could say why
            text = f"a worker ended with exit code {code}; the cells that are finished are kept"
            return RunFailed(text)
        return failure_of(code, text)

    def end(self) -> None:
        """End the process at once."""
        if self.process.pid is not None:
            self.process.kill()
            self.process.join(SECONDS_TO_END)


def _worker(task: WorkerTask, number: int, ready: Any, failing: Any) -> None:
    """The worker process. Its parent, a signal or the end of its parent asks it to stop; Ctrl-C
    does not, because a terminal sends it to the parent as well. `ready` is a shared byte, 1 when
    the worker has something to save; `failing` is the writing end of its pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr  # for what the user's code prints: results are printed by the parent
    leaving = threading.Event()
    threading.Thread(target=_stop_without_parent, args=(leaving,), daemon=True).start()
    with process.handled(lambda signal_number, frame: leaving.set()):
        process.unblock_signals()
        try:
            own.load(task.code)
            ready.value = 1
            first = Config.from_dict(next(iter(task.groups[0].values())))
            mine = device_for(number, first.train.device, torch.cuda.device_count())
            if mine != first.train.device:  # then "cuda" means this worker's GPU
                torch.cuda.set_device(mine)
            pulse = Pulse(task.numbers, number, lambda: None)
            stopping = lambda: bool(task.stop.value) or leaving.is_set()  # noqa: E731
            work(task.todo(number), task.out, stopping, task.save_every, pulse)
        except Exception as error:
            found = explained(error)
            with suppress(OSError):  # the parent may have ended
                failing.send_bytes(str(found).encode()[:LONGEST_LINE])
            raise SystemExit(found.exit_code) from None


def _stop_without_parent(leaving: threading.Event) -> None:
    """A thread: without its parent a worker saves and stops, or is ended after some seconds."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        leaving.set()
        time.sleep(SECONDS_TO_END)
        os._exit(INTERRUPTED)


def plain_group(group: RunGroup) -> dict[str, Any]:
    """A group as plain values, for another process."""
    return {run_folder(cell, Path()).name: cell.to_dict() for cell in group}


def _configs(group: dict[str, Any]) -> RunGroup:
    cells = tuple(Config.from_dict(values) for values in group.values())
    if plain_group(cells).keys() != group.keys():
        raise RunFailed("the data or your code were changed since the sweep began; start it again")
    return cells


def failure_of(exit_code: int, text: str) -> FairvarError:
    """The error of another process, with the same type and message."""
    kinds = {kind.exit_code: kind for kind in (BadInput, IntegrityError, InternalError)}
    return kinds.get(exit_code, RunFailed)(text)


def device_for(worker: int, device: str, count: int) -> str:
    """Workers are distributed over the GPUs if the configuration says "cuda" without a number."""
    return f"cuda:{worker % count}" if device == "cuda" and count > 1 else device
