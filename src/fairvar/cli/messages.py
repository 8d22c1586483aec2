"""What the command line says about an error: one line and an exit code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

from cyclopts import (
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnusedCliTokensError,
    ValidationError,
)

import fairvar
from fairvar.errors import FairvarError, failure_of_machine, shown, suggestion

HERE = Path(fairvar.__file__).parent


def told(error: BaseException) -> tuple[str, int]:
    """The line and the exit code for whatever ended a command."""
    if any(isinstance(e, KeyboardInterrupt) for e in _chain(error)):
        return "interrupted", 130
    if isinstance(error, CycloptsError):
        return _usage(error), 2
    known = error if isinstance(error, FairvarError) else failure_of_machine(error)
    if known is not None:
        return str(known), known.exit_code
    if isinstance(error, RecursionError):
        return "the input is nested too deeply", 2
    return _unexpected(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those it was raised for: an import that was interrupted may fail otherwise."""
    seen: set[int] = set()  # an error may have been raised from one that it caused
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _usage(error: CycloptsError) -> str:
    """cyclopts' messages, where they do not say what to do, in other words."""
    command = " ".join(["fairvar", *(error.command_chain or ())])
    more = f"see `{command} --help`"
    if isinstance(error, UnusedCliTokensError):
        tokens = ", ".join(shown(token) for token in (error.unused_tokens or ())[:3])
        return f"`{command}` does not take {tokens}; {more}"
    if isinstance(error, UnknownCommandError) and error.app is not None and error.unused_tokens:
        names = [name for name in error.app if not name.startswith("-")]
        text = error.unused_tokens[0]
        return f"there is no command {shown(text)}: {suggestion(text, names)}"
    if type(error) is MissingArgumentError and error.argument is not None:
        name, keyword = error.argument.name, error.keyword or error.argument.name
        if error.argument.field_info.is_positional:
            return f"`{command}` needs {name.lstrip('-').upper()}; {more}"
        given = any(t.keyword for t in error.argument.tokens) or error.keyword is not None
        return f"`{command}` needs a value after {keyword}; {more}" if given else (
            f"`{command}` needs {name}; {more}")  # fmt: skip
    if isinstance(error, ValidationError) and error.argument is not None:
        text = error.exception_message.rstrip(".")
        return f"{error.argument.name} = {error.argument.value}: {text[:1].lower()}{text[1:]}"
    error.verbose = False
    return f"{str(error).rstrip('.')}; {more}"


def _unexpected(error: BaseException) -> tuple[str, int]:
    """An error that nobody foresaw: in a plugin, or in fairvar itself."""
    what = f"{type(error).__name__}: {error}"
    places = [
        (Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)
    ]
    from fairvar.plugin import LOADED

    for path, line in reversed(places):
        if path in LOADED:
            return f"{path}, line {line}: {what}", 3
    ours = [f"{path.relative_to(HERE)}:{line}" for path, line in places if HERE in path.parents]
    where = f" in {ours[-1]}" if ours else ""
    return f"internal error{where}: {what}; please report it (FAIRVAR_TRACEBACK=1 shows more)", 1
