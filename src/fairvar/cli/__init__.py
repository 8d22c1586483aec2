"""The command line. Each command parses, makes one library call and prints one result.

Results go to stdout (`--json` for machines), progress to stderr. Exit codes: 0 fine, 2 bad input
(one line on stderr, nothing written), 3 run failed, 4 integrity failed, 130 interrupted.
"""

from __future__ import annotations

import os
import sys

from fairvar.errors import FairvarError
from fairvar.signals import INTERRUPTED, command_signals


class _Failure(Exception):
    """How a command ends: (one line, exit code)."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors become one line and an exit code."""
    with command_signals() as command:
        try:
            _run(arguments)
        except BaseException as error:
            # An interrupted import or callback may end in any error.
            asked = command.interrupted or isinstance(error, KeyboardInterrupt)
            end = _Failure("interrupted", INTERRUPTED) if asked else error
            if not isinstance(end, _Failure):
                raise
            message, code = end.args
            command.end(message)
            sys.exit(code)


def _run(arguments: list[str] | None) -> None:
    # Here, since it takes a while and signals are heard by now.
    from cyclopts import CycloptsError

    from fairvar.cli.commands import app

    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        _fail(" ".join(str(error).split()), 2)
    except FairvarError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader went away (`fairvar theory | head`); keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> None:
    raise _Failure(message, code) from None
