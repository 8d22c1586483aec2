"""This process: its signals, its memory, and its progress on stderr.

Of Ctrl-C, SIGTERM and SIGHUP, the first asks a computation to save and stop, the second ends the
command at once. Importing this module loads the standard library only, so that signals are handled
before torch is imported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from fairvar.errors import plain

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
STOP_SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
INTERRUPTED = 130  # exit code
SECONDS_BETWEEN_LINES = 10.0
Report = Callable[[int, int, str], None]  # (done, total, description)
COMPILING = "compiling"  # a description that begins so is shown at once
SHOW_CURSOR = "\r\x1b[K\x1b[?25h"  # a progress bar hides it


class Command:
    """The state of one command of the command line."""

    def __init__(self) -> None:
        self.interrupted = False  # a KeyboardInterrupt was raised
        self.ending = self.printed = False
        self.kept: ExitStack | None = None  # handlers that outlive the command
        self._printing = threading.Lock()

    def end(self, message: str) -> None:
        """Print one line on stderr, once, even if two threads end the command."""
        self.ending = True
        free = self._printing.acquire(timeout=1.0)  # the other thread may be blocked by a full pipe
        if free and not self.printed:
            self.printed = True
            with suppress(OSError):  # the terminal may be gone
                print(f"fairvar: {message}", file=sys.stderr, flush=True)
        if free:
            self._printing.release()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self.interrupted and not self.ending:  # later signals are for `end_at_second`
            self.interrupted = True
            raise KeyboardInterrupt

    def end_at_second(self, arriving: int) -> None:
        """A thread: Python's handlers wait for the main thread, which may be in a long product, in
        the import of a library or in a lock. The numbers of all signals come through this pipe."""
        count = 0
        while numbers := os.read(arriving, 1):
            count += numbers[0] in STOP_SIGNALS
            if count == 2:
                for worker in multiprocessing.active_children():
                    worker.kill()
                if sys.stderr.isatty():
                    os.write(sys.stderr.fileno(), SHOW_CURSOR.encode())
                self.end("interrupted at once")
                os._exit(INTERRUPTED)
        os.close(arriving)


@contextmanager
def command_signals() -> Iterator[Command]:
    """Around a whole command: the first signal raises KeyboardInterrupt, unless `stop_signals` is
    active, the second kills the workers and ends the process."""
    command = Command()
    if threading.current_thread() is not threading.main_thread():
        yield command
        return
    arriving, sending = os.pipe()
    os.set_blocking(sending, False)
    threading.Thread(target=command.end_at_second, args=(arriving,), daemon=True).start()
    with ExitStack() as undo:
        undo.callback(os.close, sending)
        undo.callback(
            signal.set_wakeup_fd, signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
        )
        undo.enter_context(handled(command.interrupt))
        try:
            yield command
        except SystemExit as stop:
            if stop.code == INTERRUPTED:  # handle signals until the process has ended
                command.kept = undo.pop_all()
            raise


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function that is True after the first signal: the round loop calls it, and saves
    before it stops."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    with handled(ask):
        yield lambda: asked


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle these signals, except those that are ignored (nohup) or not set by Python. Python
    allows this in the main thread only."""
    main = threading.current_thread() is threading.main_thread()
    free = [s for s in STOP_SIGNALS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    before = {s: signal.signal(s, handler) for s in free} if main else {}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Processes started within this block receive the signals only after `unblock_signals`: a
    terminal sends Ctrl-C to all of them, and they need seconds to start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


# -- memory ----------------------------------------------------------------------------------------
def peak_bytes() -> int | None:
    """The most resident memory since the start of this process or since `reset_peak`."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    # Only the fallback: here a child process starts with the peak of its parent.
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def reset_peak() -> bool:
    """Set the peak to the present value; False if the system does not support it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def note(text: str | None) -> None:
    """A line on stderr, for example before a long computation."""
    if text is not None:
        print(plain(text), file=sys.stderr)


# -- progress --------------------------------------------------------------------------------------
@contextmanager
def progress(title: str) -> Iterator[Report]:
    """Yields `report(done, total, what)`, which may be called often and never writes to stdout. It
    shows a bar in a terminal, otherwise a line every ten seconds."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console, title = Console(stderr=True), plain(title)
    if not console.is_terminal:
        yield _lines(title)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn(), TextColumn("{task.fields[what]}", markup=False))  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, what="")
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, what=plain(what)
        )


def _lines(title: str) -> Report:
    started = time.monotonic()
    last = started

    def report(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        waits = what.startswith(COMPILING)
        if now - last < SECONDS_BETWEEN_LINES and done < total and not waits:
            return
        last = now
        spent = now - started
        left = f", about {spent / done * (total - done):.0f} s left" if 0 < done < total else ""
        line = f"{title}: {done}/{total} ({plain(what)}) after {spent:.0f} s{left}"
        with suppress(OSError):  # stderr was closed; the computation continues
            print(line, file=sys.stderr)

    return report
