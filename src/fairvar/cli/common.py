"""What the commands share: the application, common options, and how results are printed."""

from __future__ import annotations

import json as jsonlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownCommandError,
    UnusedCliTokensError,
    ValidationError,
)
from cyclopts.validators import Number
from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from fairvar._version import __version__
from fairvar.common.display import plural
from fairvar.errors import plain, shown, suggestion, unknown

if TYPE_CHECKING:
    from fairvar.cli import library
    from fairvar.runs.results import Rule

    lib = library
else:

    class _Library:
        """What the commands call, imported when the first of its names is used: help texts and
        usage errors need not wait for torch."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("fairvar.cli.library"), name)

    lib = _Library()

_json_goes_to: TextIO | None = None  # None: to stdout
app = App(
    name="fairvar",
    version=__version__,
    help="""Fair federated learning: train models whose quality is even across clients.

Example: fairvar demo, and then

- fairvar example mnist > mnist.toml
- fairvar sweep mnist.toml --scale small
- fairvar report runs/mnist""",
    suppress_keyboard_interrupt=False,  # `fairvar.cli.main` prints one line
)

# -- options of several commands -------------------------------------------------------------------
Flag = Annotated[bool, Parameter(negative="", show_default=False)]  # off unless it is given
Json = Annotated[Flag, Parameter(help="print the result as JSON")]
Out = Annotated[Path, Parameter(help="folder for the files that are written")]
Plugin = Annotated[
    Path | None,
    Parameter(
        help="Python file with your own methods, or a configuration that names own code, to load "
        "first; `method.plugin` in the configuration does the same"
    ),
]
ConfigFile = Annotated[Path, Parameter(help="TOML file; `fairvar example` prints one")]
Overrides = Annotated[str, Parameter(help="key=value pairs that change it, such as train.lr=0.5")]
Scale = Annotated[
    str | None, Parameter(help="use the file's [scale.NAME] overrides, such as small")
]
Methods = Annotated[
    str | None,
    Parameter(
        help="paper (the eight), extended (all further ones), all, or names such as term,afl"
    ),
]
Dry = Annotated[Flag, Parameter(help="check and print what would be done, and stop")]


def _whole(kind: Any, tokens: Sequence[Token]) -> int:
    """cyclopts would round 1.5 to 2."""
    text = tokens[0].value
    if not text.removeprefix("-").isdecimal() or len(text) > 18:
        raise ValueError(f"{shown(text)} is not a whole number.")
    return int(text)


def _from(least: int, most: int) -> Parameter:
    return Parameter(converter=_whole, validator=Number(gte=least, lte=most))


Count = Annotated[int, _from(1, 1_000_000_000)]
NonNegative = Annotated[int, _from(0, 1_000_000_000)]
Workers = Annotated[int, _from(1, 1024)]
Nodes = Annotated[int, _from(1, 100_000)]
Days = Annotated[int, _from(1, 36_500)]
PositiveFloat = Annotated[float, Parameter(validator=Number(gt=0, lte=1e9))]


def method_override(methods: str | None) -> tuple[str, ...]:
    """`--methods term,afl` as an override of a sweep."""
    if methods is None:
        return ()
    return (f"sweep.methods={jsonlib.dumps([name.strip() for name in methods.split(',')])}",)


def show_report(tables: Any, files: Any, json: bool) -> None:
    if json:
        return print_json([_table_dict(table) for table in tables])
    for table in tables:
        # The columns are explained once, under the last table.
        show(lib.to_rich(lib.result_tables.shorten(table, explain=table is tables[-1])))
        say("")
    page = next(f for f in files if f.name == "index.html")
    say(f"{plural(len(files), 'file')} in {page.parent}; open {page} in a browser")


@Parameter(name="*")
@dataclass(frozen=True)
class Selection:
    """How configurations and rounds are chosen on validation data.

    Args:
        t: choose by accuracy - t * sqrt(variance / m) on validation data; select.t of the runs by
            default, which is 1.96 as in the paper unless their configuration has another.
        unit: "fraction", or "mixed": percent accuracy with the variance x 100; select.unit by
            default.
        m: divisor of the variance; select.m by default, or the number of seeds, as in the paper.
    """

    t: float | None = None
    unit: str | None = None
    m: Count | None = None

    def rule(self, model: str | None = None) -> Rule:
        """By the model that a run's protocol is about, unless one is named."""
        return lib.in_python.rule_of(model, self.t, self.unit, self.m)


@contextmanager
def example_file(name: str) -> Iterator[Path]:
    """A configuration file inside the package."""
    folder = files("fairvar").joinpath("configs")
    found = {
        file.name.removesuffix(".toml"): file
        for place in (folder, folder.joinpath("paper"))
        for file in place.iterdir()
        if file.name.endswith(".toml")
    }
    if name not in found:
        raise unknown("example", name, found)
    with as_file(found[name]) as path:
        yield path


class _Plain:
    """Anything that rich prints, with control characters as escapes."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.thing, options):
            lines = "\n".join(map(plain, text.split("\n")))
            yield Segment(lines, style, control)


def show(thing: Any) -> None:
    # Without markup, [/x] in a name is text.
    Console(highlight=False, markup=False, emoji=False).print(_Plain(thing))


def say(*lines: object) -> None:
    """Lines to stdout, with names from files as plain text."""
    for line in lines:
        print(plain(str(line)))


@contextmanager
def json_alone() -> Iterator[None]:
    """Within it stdout gets JSON only; what the user's own code prints goes to stderr."""
    global _json_goes_to
    _json_goes_to = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _json_goes_to = None


def print_json(value: Any) -> None:
    print(jsonlib.dumps(_finite(value), indent=2, allow_nan=False), file=_json_goes_to)


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity: null, which readers of every language understand."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table_dict(table: Any) -> dict[str, Any]:
    rows = [{"method": row.label, **row.cells} for row in table.rows]
    for row in rows:
        for key, cell in row.items():
            if isinstance(cell, lib.Estimate):
                row[key] = {"value": cell.value, "standard_error": cell.standard_error}
    return {"title": table.title, "rows": rows, "notes": list(table.notes)}


def usage(error: BaseException) -> str | None:
    """The message for arguments that cannot be used; cyclopts' own one where it says what to do.
    None for other errors."""
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
