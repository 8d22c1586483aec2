"""The command line. Each command parses, makes one library call and prints one result.

Results go to stdout (`--json` for machines), progress to stderr. Exit codes: 0 fine, 2 bad input
(one line on stderr, nothing written), 3 run failed, 4 integrity failed, 130 interrupted.
"""

from __future__ import annotations

import os
import sys

from cyclopts import CycloptsError

# They register their commands.
from fairvar.cli import data, experiments, facts, flower, results  # noqa: F401
from fairvar.cli.common import app
from fairvar.errors import FairvarError


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors become one line and an exit code."""
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        _fail(" ".join(str(error).split()), 2)
    except FairvarError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader went away (`fairvar theory | head`); keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> None:
    print(f"fairvar: {message}", file=sys.stderr)
    sys.exit(code)
