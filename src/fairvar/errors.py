"""All errors of fairvar. Every message is one line that says what to do."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 80  # characters of a value in a message
PLUGIN = "fairvar_plugin_"  # how names of modules from --plugin begin
_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "bad allocation")
# Characters that move the cursor, change colours or the reading direction, or cannot be encoded.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


class FairvarError(Exception):
    """Base of all errors that fairvar raises on purpose; `exit_code` is the command line's.

    A message may contain names from files and texts of other libraries, so it is made one
    printable line here.
    """

    exit_code = 3

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


class BadInput(FairvarError, ValueError):
    """Input that cannot work; nothing was computed and nothing written."""

    exit_code = 2


class RunFailed(FairvarError):
    """A run started and could not be finished."""

    exit_code = 3


class IntegrityError(FairvarError):
    """A file was changed or damaged: wrong checksum, missing part, unknown format."""

    exit_code = 4


class InternalError(FairvarError):
    """A defect of fairvar."""

    exit_code = 1


def suggestion(name: object, known: Iterable[str]) -> str:
    """The nearest known name, and all of them."""
    names = sorted(known)
    text = str(name)[:LONGEST]
    near = get_close_matches(text, names, n=1, cutoff=0.6)
    near = near or [each for each in names if text and each.startswith(text)]
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known are {', '.join(names)}" if names else "there is none"


def unknown(kind: str, name: object, known: Iterable[str]) -> BadInput:
    """The error for a name that is not in a list."""
    return BadInput(f"unknown {kind} {shown(name)}: {suggestion(name, known)}")


def shown(value: object) -> str:
    """A value as text of bounded length, for messages."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, deep nesting
        return f"<a large {type(value).__name__}>"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def plain(text: str) -> str:
    """Control characters as escapes: a name from a file must not control the terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """A message as one printable line; of a very long one, the beginning and the end."""
    line = plain(" ".join(text.split()))
    return line if len(line) <= 1200 else f"{line[:800]} … {line[-300:]}"


def cause(error: BaseException) -> str:
    """The message of another library's error, short enough to be quoted in one of ours."""
    text = one_line(str(error)) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def explained(error: BaseException) -> FairvarError:
    """The error to show to a user for any exception that ended a computation."""
    if os.environ.get("FAIRVAR_TRACEBACK"):
        traceback.print_exception(error)
    if isinstance(error, FairvarError):
        return error
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError):
        return BadInput(f"something in the input is nested too deeply ({what})")
    if isinstance(error, OSError):
        where = "" if error.filename is None else f" {error.filename}"
        return RunFailed(f"cannot read or write{where}: {error.strerror or error}")
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(part in str(error) for part in _NO_MEMORY)
    ):
        return RunFailed(
            f"out of memory ({what}); use fewer samples, a smaller model, fewer clients at a time "
            "(train.chunk) or fewer --workers"
        )
    where, in_plugin = _place(error)
    if in_plugin:
        return RunFailed(f"{where}: {what}")
    return InternalError(f"internal error in {where}: {what}; please report it "
                         "(FAIRVAR_TRACEBACK=1 shows more)")  # fmt: skip


def _place(error: BaseException) -> tuple[str, bool]:
    """Where an error comes from, and whether that is a plugin: the innermost line of a plugin, or
    otherwise of fairvar."""
    found, in_plugin = "another library", False
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        plugin = hasattr(frame.f_globals.get("__loader__"), "is_own")
        if plugin or (module.startswith("fairvar") and not in_plugin):
            found, in_plugin = f"{frame.f_code.co_filename if plugin else module}:{line}", plugin
    return found, in_plugin
