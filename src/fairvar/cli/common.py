"""What the commands share: the application, its common options, and how results are printed."""

from __future__ import annotations

import json as jsonlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter, Token
from cyclopts.validators import Number
from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from fairvar._version import __version__
from fairvar.errors import BadInput, plain, shown

if TYPE_CHECKING:
    from fairvar.runs.config import Config
    from fairvar.runs.results import Rule
    from fairvar.runs.select import Criterion

app = App(
    name="fairvar",
    version=__version__,
    help="Fair federated learning: train models whose quality is even across clients.",
    suppress_keyboard_interrupt=False,  # `fairvar.cli.main` says one line
)
Json = Annotated[bool, Parameter(negative="")]
Out = Annotated[Path, Parameter(help="folder for the files that are written")]


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


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse what no command can use, before any is asked."""
    for argument in arguments:
        if "\0" in argument:
            raise BadInput(f"the argument {shown(argument)} has a NUL byte in it; remove it")


def show_report(tables: Any, files: Any, json: bool) -> None:
    from fairvar.report import to_rich
    from fairvar.report.result_tables import shorten

    if json:
        return print_json([_table_dict(table) for table in tables])
    for table in tables:
        # The columns are explained once, under the last table.
        show(to_rich(shorten(table, explain=table is tables[-1])))
        say("")
    page = next(f for f in files if f.name == "index.html")
    say(f"{len(files)} files in {page.parent}; open {page} in a browser")


def selection_rule(t: float, m: int | None, unit: str, model: str | None = None) -> Rule:
    """How to choose on validation data; by the model that a run's protocol is about, unless one is
    named."""
    from fairvar.runs.config import Config
    from fairvar.runs.select import Criterion

    def rule(config: Config) -> Criterion:
        return Criterion(t=t, m=m, unit=unit, model=model or config.select.model)  # type: ignore[arg-type]

    rule(Config())  # bad options are told before anything is read
    return rule


def cores() -> int:
    return max(1, min(8, os.cpu_count() or 1))


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class _Plain:
    """Something to print, with its control characters as escapes."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.thing, options):
            lines = "\n".join(map(plain, text.split("\n")))
            yield Segment(lines, style, control)


def show(thing: Any) -> None:
    # No markup: [/x] in a name is text. What is to be bold is a rich Text.
    Console(highlight=False, markup=False, emoji=False).print(_Plain(thing))


def say(*lines: object) -> None:
    """Lines to stdout, with names from files as plain text."""
    for line in lines:
        print(plain(str(line)))


def tell(note: str | None) -> None:
    """Something to know before a long computation: to stderr."""
    if note is not None:
        print(plain(note), file=sys.stderr)


def print_json(value: Any) -> None:
    print(jsonlib.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity: null, which readers of every language understand."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table_dict(table: Any) -> dict[str, Any]:
    from fairvar.report import Estimate

    rows = []
    for row in table.rows:
        cells = {
            k: {"value": c.value, "standard_error": c.standard_error}
            if isinstance(c, Estimate)
            else c
            for k, c in row.cells.items()
        }
        rows.append({"method": row.label, **cells})
    return {"title": table.title, "rows": rows, "notes": list(table.notes)}
