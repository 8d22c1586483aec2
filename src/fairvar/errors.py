"""What can go wrong, as a small family. Every message is one line that tells the way out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 80  # characters of a value that a message repeats
# What moves the cursor, changes colours or the direction of reading, or cannot be encoded.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


class FairvarError(Exception):
    """Base of all errors that fairvar raises on purpose; `exit_code` is the command line's."""

    exit_code = 3


class BadInput(FairvarError, ValueError):
    """The caller gave something that cannot work; nothing was computed and nothing written."""

    exit_code = 2


class RunFailed(FairvarError):
    """A run started and could not be finished."""

    exit_code = 3


class IntegrityError(FairvarError):
    """A file is not what was written: wrong checksum, missing part, unknown format."""

    exit_code = 4


def suggestion(name: object, known: Iterable[str]) -> str:
    """The nearest known name, and all of them."""
    names = sorted(known)
    text = str(name)[:LONGEST]
    near = get_close_matches(text, names, n=1, cutoff=0.6)
    near = near or [each for each in names if text and each.startswith(text)]
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known are {', '.join(names)}"


def unknown(kind: str, name: object, known: Iterable[str]) -> BadInput:
    """The error for a name that is not in a list."""
    return BadInput(f"unknown {kind} {shown(name)}: {suggestion(name, known)}")


def shown(value: object) -> str:
    """A value as messages repeat it: short, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, deep nesting
        return f"<a large {type(value).__name__}>"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def plain(text: str) -> str:
    """Control characters as escapes: a name from a file must not command the terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """A message of any origin as one printable line; of a very long one, beginning and end."""
    line = plain(" ".join(text.split()))
    return line if len(line) <= 1200 else f"{line[:800]} … {line[-300:]}"


def failure_of_machine(error: BaseException) -> RunFailed | None:
    """The error for memory or disk that ran out, whoever noticed; None for everything else."""
    text = str(error)
    memory = ("not enough memory", "can't allocate memory", "out of memory", "Cannot allocate")
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(part in text for part in memory)
    ):
        return RunFailed(
            f"out of memory ({text.strip() or 'no more was given'}); use a smaller model, "
            "fewer clients at a time (train.chunk) or fewer --workers"
        )
    if isinstance(error, OSError):
        where = "" if error.filename is None else f" {error.filename}"
        return RunFailed(f"cannot read or write{where}: {error.strerror or error}")
    return None
