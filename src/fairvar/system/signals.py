"""Ctrl-C, SIGTERM and SIGHUP: the first asks a computation to save and stop, the second ends the
command at once.

This module imports the standard library only, so that signals are handled before torch is imported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
STOP_SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
INTERRUPTED = 130  # exit code
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
