"""Worker processes of a sweep: what they do, how they are watched and how they end.

Any of these processes may be killed or stopped at any moment. So they share no lock and no queue:
the parent asks them to stop through one shared byte, they count their rounds in shared numbers that
only they write, and each has a pipe of its own for the one line that says why it failed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection, get_context, parent_process, resource_tracker
from pathlib import Path
from typing import Any

import torch

from fairvar.errors import (
    BadInput,
    FairvarError,
    IntegrityError,
    InternalError,
    RunFailed,
    explained,
    one_line,
)
from fairvar.methods.plugin import load_plugin
from fairvar.runs.batch import Group, run_group
from fairvar.runs.config import Config
from fairvar.runs.runner import Interrupted, Watch, missing, run_folder
from fairvar.runs.store import is_complete
from fairvar.system.signals import INTERRUPTED, handled, held_back, let_through

MOST_RESTARTS = 3
LONGEST_LINE = 4000  # bytes; a pipe takes that many though nobody reads
SECONDS_TO_END = 5.0  # for a worker without a parent: to finish its round and save
Plain = dict[str, dict[str, Any]]  # a group's cells as plain values, by the names of their folders


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


@dataclass(frozen=True)
class Task:
    """What a worker is told when it starts."""

    groups: Sequence[Plain]
    out: Path
    numbers: Any  # for its `Pulse`
    stop: Any  # one shared byte: 1 asks all workers to save and stop
    save_every: int | None = None
    plugin: Path | None = None
    number: int = 0
    ready: Any = None  # one shared byte: 1 when it has something to save
    order: Sequence[int] = ()  # in which it looks for work
    failing: Any = None  # the writing end of its pipe


def run_workers(
    task: Task,
    workers: int,
    stopping: Callable[[], bool],
    show: Callable[[], None],
) -> None:
    """Spawned processes that all walk the same list; one that dies is started again."""
    running: dict[int, Worker] = {}
    absent, restarts, failure = list(range(workers)), 0, None
    try:
        while running or absent:
            for number in absent:
                running[number] = Worker(task, number, workers)
            absent = []
            time.sleep(0.2)
            if failure or stopping():
                task.stop.value = 1
                for worker in running.values():
                    worker.end_unless_ready()
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
    """A worker as its parent sees it."""

    def __init__(self, task: Task, number: int, workers: int) -> None:
        context = get_context("spawn")
        self.failing, writing = context.Pipe(duplex=False)
        self.ready = context.RawValue("b", 0)
        # Each starts at another place, so that they rarely ask for the same lock.
        order = [*range(number, len(task.groups), workers), *range(len(task.groups))]
        told = replace(task, number=number, ready=self.ready, order=order, failing=writing)
        self.process = context.Process(target=_worker, args=(told,))
        resource_tracker.ensure_running()  # which would let the signals through
        with held_back(), suppress(BrokenPipeError):  # it was killed before it knew what to do
            self.process.start()
        writing.close()  # so that reading ends when the worker does

    @property
    def exit_code(self) -> int | None:
        return -signal.SIGKILL if self.process.pid is None else self.process.exitcode

    @property
    def was_killed(self) -> bool:
        """Or asked to stop by somebody else; there is nothing wrong with its work."""
        return self.exit_code is not None and (self.exit_code < 0 or self.exit_code == INTERRUPTED)

    def failure(self) -> FairvarError:
        """A worker's own error as if it had happened here, or that it just ended."""
        code = self.exit_code or 0
        try:
            text = self.failing.recv_bytes(LONGEST_LINE).decode(errors="replace")
        except (EOFError, OSError):  # it ended before it said all
            text = f"a worker ended with exit code {code}; the cells that are finished are kept"
            return RunFailed(text)
        kinds = {kind.exit_code: kind for kind in (BadInput, IntegrityError, InternalError)}
        return kinds.get(code, RunFailed)(text)

    def end_unless_ready(self) -> None:
        """While it imports it can neither stop nor lose anything."""
        if not self.ready.value:
            self.end()

    def end(self) -> None:
        """At once, also if it is stopped."""
        if self.process.pid is not None:
            self.process.kill()
            self.process.join(SECONDS_TO_END)


def _worker(task: Task) -> None:
    """A process of its own. Its parent or a signal asks it to stop, or the parent is gone. Not
    Ctrl-C, which a terminal sends to the parent, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leaving = threading.Event()
    threading.Thread(target=_leave_with_parent, args=(leaving,), daemon=True).start()
    with handled(lambda number, frame: leaving.set()):
        let_through()
        try:
            load_plugin(task.plugin)
            task.ready.value = 1
            first = Config.from_dict(next(iter(task.groups[0].values())))
            _take_device(task.number, first.train.device)
            todo = (task.groups[place] for place in task.order)
            cells = (_cells(group) for group in todo if not _is_done(group, task.out))
            pulse = Pulse(task.numbers, task.number, lambda: None)
            stopping = lambda: bool(task.stop.value) or leaving.is_set()  # noqa: E731
            work(cells, task.out, stopping, task.save_every, pulse)
        except Exception as error:
            found = explained(error)
            with suppress(OSError):  # the parent may be gone
                task.failing.send_bytes(one_line(str(found)).encode()[:LONGEST_LINE])
            raise SystemExit(found.exit_code) from None


def _leave_with_parent(leaving: threading.Event) -> None:
    """A thread: a worker without its parent saves and stops, and ends if it cannot."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        leaving.set()
        time.sleep(SECONDS_TO_END)
        os._exit(INTERRUPTED)


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
