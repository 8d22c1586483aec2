"""The command line. A command parses its arguments, calls the library and prints one result.

Results go to stdout (`--json` for machines), progress to stderr. Exit codes: 0 fine, 1 an error
inside fairvar, 2 bad input (one line on stderr, nothing written), 3 run failed, 4 integrity failed,
130 interrupted. FAIRVAR_TRACEBACK=1 shows where an error comes from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from inspect import BoundArguments
from types import FrameType
from typing import Any

from fairvar.common.process import INTERRUPTED, command_signals, handled


def main(arguments: Sequence[str] | None = None, commands: str = "fairvar.cli.commands") -> None:
    """Entry point: errors become one line and an exit code. `commands`: the module with the app."""
    _prepare_streams()
    with command_signals() as command:
        try:
            with handled(_leave):
                work = _parsed(sys.argv[1:] if arguments is None else list(arguments), commands)
            work()
            sys.stdout.flush()
        except SystemExit as stop:
            # rich turns the end of the reader into exit code 1.
            if not isinstance(stop.__context__, BrokenPipeError):
                raise
        except BrokenPipeError:
            _flush_or_drop()  # the reader has ended, as in `fairvar theory | head`
        except BaseException as error:
            # An interrupted import or callback may end in any error.
            message, code = (
                ("interrupted", INTERRUPTED) if command.interrupted else _explained(error)
            )
            command.end(message)
            _flush_or_drop()
            sys.exit(code)


def _leave(number: int, frame: FrameType | None) -> None:
    """A signal while modules are imported ends the command at once: nothing has been started, and
    an exception in the middle of an import may be lost."""
    os.write(2, b"fairvar: interrupted\n")
    os._exit(INTERRUPTED)


def _parsed(arguments: list[str], commands: str) -> Callable[[], Any]:
    """The command that the arguments name, with its values; also imports what it calls."""
    from importlib import import_module

    from fairvar.errors import BadInput, shown

    for argument in arguments:
        if "\0" in argument:
            raise BadInput(f"the argument {shown(argument)} has a NUL byte in it; remove it")
    command, bound, _ = import_module(commands).app.parse_args(
        arguments, exit_on_error=False, print_error=False
    )
    if command.__module__.startswith("fairvar"):
        import_module("fairvar.cli.library")  # here, where a signal ends the command at once
    return lambda: _called(command, bound)


def _called(command: Callable[..., Any], bound: BoundArguments) -> None:
    from fairvar.cli.common import json_alone

    with json_alone() if bound.arguments.get("json") else nullcontext():
        command(*bound.args, **bound.kwargs)


def _prepare_streams() -> None:
    """Printing must never fail, whatever characters a name has and the terminal can show, nor run
    without end, as a help text does in fewer than five columns."""
    if os.environ.get("COLUMNS", "") in map(str, range(1, 20)):
        os.environ["COLUMNS"] = "20"
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _flush_or_drop() -> None:
    """Output that cannot be written (a full disk) must not make Python complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explained(error: BaseException) -> tuple[str, int]:
    from fairvar.cli.common import usage
    from fairvar.errors import explained, one_line

    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    message = usage(error)
    if message is not None:
        return one_line(message), 2
    found = explained(error)
    return str(found), found.exit_code
