"""What can go wrong, as a small family. Every message is one line that tells the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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


def shown(value: object) -> str:
    """A value in a message: its repr on one line, cut where it is long (tensors, federations)."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def suggestion(name: object, known: Iterable[str]) -> str:
    """The nearest known name, and all of them."""
    names = sorted(known)
    near = get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known are {', '.join(names)}"


def unknown(kind: str, name: object, known: Iterable[str]) -> BadInput:
    """The error for a name that is not in a list."""
    return BadInput(f"unknown {kind} {shown(name)}: {suggestion(name, known)}")
