"""Progress on stderr: a bar in a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fairvar.errors import plain

SECONDS_BETWEEN_LINES = 10.0


Report = Callable[[int, int, str], None]  # (done, total, description)


@contextmanager
def progress(title: str, quiet: bool = False) -> Iterator[Report]:
    """Yields `report(done, total, what)`, which may be called often and never writes to stdout."""
    console, title = Console(stderr=True), plain(title)
    if quiet:
        yield lambda done, total, what: None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(),
                   MofNCompleteColumn(), TimeRemainingColumn(),
                   TextColumn("{task.fields[what]}", markup=False))  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, what="")
            yield lambda done, total, what: bar.update(
                task, completed=done, total=total, what=plain(what)
            )
    else:
        yield _lines(title)


def _lines(title: str) -> Report:
    started = time.monotonic()
    last = started

    def report(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < SECONDS_BETWEEN_LINES and done < total:
            return
        last = now
        spent = now - started
        left = f", about {spent / done * (total - done):.0f} s left" if 0 < done < total else ""
        line = f"{title}: {done}/{total} ({plain(what)}) after {spent:.0f} s{left}"
        with suppress(OSError):  # nobody reads stderr any more; the computation continues
            print(line, file=sys.stderr)

    return report
