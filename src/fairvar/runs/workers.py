"""Worker processes of a sweep.

Any of these processes may be killed at any moment, so they share no lock and no queue. The parent
asks them to stop through one shared byte, each worker counts its rounds in shared numbers that only
it writes, and each has a pipe for the one line that says why it failed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
)
from fairvar.methods.plugin import load_plugin
from fairvar.runs.batch import Group, run_group
from fairvar.runs.config import Config
from fairvar.runs.runner import Interrupted, Watch, missing, run_folder
from fairvar.runs.store import is_complete
from fairvar.system.signals import INTERRUPTED, blocked_signals, handled, unblock_signals

MOST_RESTARTS = 3
LONGEST_LINE = 4000  # bytes; writing that many to a pipe never blocks
SECONDS_TO_END = 5.0  # for a worker without a parent to finish its round and save
PlainGroup = dict[str, dict[str, Any]]  # configurations as plain values, by folder name


class Pulse:
    """What a worker has done, as three numbers that its parent reads: rounds since it started, and
    rounds done and in all of the present group. A round of ten runs in one batch counts ten."""

    def __init__(self, numbers: Any, worker: int, after: Callable[[], None]) -> None:
        self.numbers, self.place, self.after, self.last = numbers, 3 * worker, after, 0

    def beat(self, runs: int, done: int, total: int) -> None:
        new = done - self.last if self.last else 1  # a resumed run starts at any round
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
    """Compute the groups that no other process computes."""
    for group in groups:
        if stopping():
            raise Interrupted("stopped between two runs; the same command continues")
        progress = partial(pulse.beat, len(missing(group, out)))
        run_group(group, out, Watch(progress, stopping, save_every))
        pulse.rest()


@dataclass(frozen=True)
class Task:
    """The argument of a worker process."""

    groups: Sequence[PlainGroup]
    out: Path
    numbers: Any  # shared; three for each worker's `Pulse`
    stop: Any  # shared byte: 1 asks all workers to save and stop
    workers: int
    save_every: int | None = None
    plugin: Path | None = None
    number: int = 0  # of this worker
    ready: Any = None  # shared byte of this worker: 1 when it has something to save
    failing: Any = None  # the writing end of this worker's pipe

    def todo(self) -> Iterator[Group]:
        """Groups with missing runs. Workers start at different places, so that they rarely ask for
        the same lock."""
        count = len(self.groups)
        for place in (*range(self.number, count, self.workers), *range(count)):
            group = self.groups[place]
            if not all(is_complete(self.out / name) for name in group):
                yield _configs(group)


def run_workers(task: Task, stopping: Callable[[], bool], show: Callable[[], None]) -> None:
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
    """A worker process, seen by its parent."""

    def __init__(self, task: Task, number: int) -> None:
        context = get_context("spawn")
        self.failing, writing = context.Pipe(duplex=False)
        self.ready = context.RawValue("b", 0)
        own = replace(task, number=number, ready=self.ready, failing=writing)
        self.process = context.Process(target=_worker, args=(own,))
        resource_tracker.ensure_running()  # it would unblock the signals if it started below
        with blocked_signals(), suppress(BrokenPipeError):  # killed before it got its argument
            self.process.start()
        writing.close()  # so that reading ends when the worker ends

    @property
    def exit_code(self) -> int | None:
        return -signal.SIGKILL if self.process.pid is None else self.process.exitcode

    @property
    def was_killed(self) -> bool:
        """By a signal, not by an error of its work."""
        return self.exit_code is not None and (self.exit_code < 0 or self.exit_code == INTERRUPTED)

    def failure(self) -> FairvarError:
        """The worker's error, with the same type and message."""
        code = self.exit_code or 0
        try:
            text = self.failing.recv_bytes(LONGEST_LINE).decode(errors="replace")
        except (EOFError, OSError):  # it ended before it could say why
            text = f"a worker ended with exit code {code}; the cells that are finished are kept"
            return RunFailed(text)
        kinds = {kind.exit_code: kind for kind in (BadInput, IntegrityError, InternalError)}
        return kinds.get(code, RunFailed)(text)

    def end_unless_ready(self) -> None:
        """While a worker imports modules it cannot stop, and has nothing to lose."""
        if not self.ready.value:
            self.end()

    def end(self) -> None:
        """At once."""
        if self.process.pid is not None:
            self.process.kill()
            self.process.join(SECONDS_TO_END)


def _worker(task: Task) -> None:
    """The worker process. Its parent, a signal or the end of its parent asks it to stop; Ctrl-C
    does not, because a terminal sends it to the parent as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leaving = threading.Event()
    threading.Thread(target=_stop_without_parent, args=(leaving,), daemon=True).start()
    with handled(lambda number, frame: leaving.set()):
        unblock_signals()
        try:
            load_plugin(task.plugin)
            task.ready.value = 1
            first = Config.from_dict(next(iter(task.groups[0].values())))
            _set_device(task.number, first.train.device)
            pulse = Pulse(task.numbers, task.number, lambda: None)
            stopping = lambda: bool(task.stop.value) or leaving.is_set()  # noqa: E731
            work(task.todo(), task.out, stopping, task.save_every, pulse)
        except Exception as error:
            found = explained(error)
            with suppress(OSError):  # the parent may have ended
                task.failing.send_bytes(str(found).encode()[:LONGEST_LINE])
            raise SystemExit(found.exit_code) from None


def _stop_without_parent(leaving: threading.Event) -> None:
    """A thread: without its parent a worker saves and stops, or is ended after some seconds."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        leaving.set()
        time.sleep(SECONDS_TO_END)
        os._exit(INTERRUPTED)


def plain_group(group: Group) -> PlainGroup:
    """A group as plain values, for another process."""
    return {run_folder(cell, Path()).name: cell.to_dict() for cell in group}


def _configs(group: PlainGroup) -> Group:
    cells = tuple(Config.from_dict(values) for values in group.values())
    if plain_group(cells).keys() != group.keys():
        raise RunFailed("the data or the plugin were changed since the sweep began; start it again")
    return cells


def device_for(worker: int, device: str, count: int) -> str:
    """Workers are distributed over the GPUs if the configuration says "cuda" without a number."""
    return f"cuda:{worker % count}" if device == "cuda" and count > 1 else device


def _set_device(worker: int, device: str) -> None:
    """Make "cuda" mean this worker's GPU. The configuration is not changed: only the provenance of
    a run records where it was computed."""
    mine = device_for(worker, device, torch.cuda.device_count())
    if mine != device:
        torch.cuda.set_device(mine)
