"""What the command line says about arguments that it cannot use."""

from __future__ import annotations

from cyclopts import (
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnusedCliTokensError,
    ValidationError,
)

from fairvar.errors import shown, suggestion


def usage(error: BaseException) -> str | None:
    """cyclopts' messages, in other words where they do not say what to do; None for others."""
    if not isinstance(error, CycloptsError):
        return None
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
