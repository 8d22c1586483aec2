"""The command line. Each command parses, makes one library call and prints one result.

Results go to stdout (`--json` for machines), progress to stderr. Exit codes: 0 fine, 1 an error
inside fairvar, 2 bad input (one line on stderr, nothing written), 3 run failed, 4 integrity failed,
130 interrupted. FAIRVAR_TRACEBACK=1 shows where an error comes from.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: errors become one line and an exit code."""
    _prepare_streams()
    try:
        with _interrupt_ends_at_once():
            command = _parsed(sys.argv[1:] if arguments is None else list(arguments))
        command()
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()  # the reader went away, as in `fairvar theory | head`
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if os.environ.get("FAIRVAR_TRACEBACK"):
            import traceback

            traceback.print_exception(error)
        _fail(error)


def _parsed(arguments: list[str]) -> Callable[[], Any]:
    """The command that the arguments name, with its values; what it needs is imported."""
    from importlib import import_module

    from fairvar.cli.common import app, check_arguments

    for name in ("data", "experiments", "facts", "flower", "results"):
        import_module(f"fairvar.cli.{name}")  # they register their commands
    check_arguments(arguments)
    command, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    if command.__module__.startswith("fairvar"):
        import_module("fairvar.api")
    return lambda: command(*bound.args, **bound.kwargs)


def _prepare_streams() -> None:
    """Whatever a name consists of, and whatever the terminal can show: printing never fails."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _interrupt_ends_at_once() -> Iterator[None]:
    """While modules are imported nothing has begun, and an exception in the middle of an import
    may be lost or leave half a module."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, b"fairvar: interrupted\n")
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody else's, or not the main thread's business
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _drop_output() -> None:
    """Keep Python from complaining at exit that what is left cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: BaseException) -> None:
    from fairvar.cli.messages import told
    from fairvar.errors import one_line

    message, code = told(error)
    print(f"fairvar: {one_line(message)}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # it was this that failed: a full disk
        _drop_output()
    sys.exit(code)
