"""What the commands share: the application, its common options, and how results are printed."""

from __future__ import annotations

import json as jsonlib
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console

from fairvar._version import __version__

if TYPE_CHECKING:
    from fairvar.config import Config
    from fairvar.report.gather import Rule
    from fairvar.select import Criterion

app = App(
    name="fairvar",
    version=__version__,
    help="Fair federated learning: train models whose quality is even across clients.",
)
Json = Annotated[bool, Parameter(negative="")]
Out = Annotated[Path, Parameter(help="folder for the files that are written")]


def show_report(tables: Any, files: Any, json: bool) -> None:
    from fairvar.report import to_rich
    from fairvar.report.results import shorten

    if json:
        return print_json([_table_dict(table) for table in tables])
    for table in tables:
        # The columns are explained once, under the last table.
        show(to_rich(shorten(table, explain=table is tables[-1])))
        print()
    page = next(f for f in files if f.name == "index.html")
    print(f"{len(files)} files in {page.parent}; open {page} in a browser")


def selection_rule(t: float, m: int | None, unit: str, model: str | None = None) -> Rule:
    """How to choose on validation data; by the model that a run's protocol is about, unless one is
    named."""
    from fairvar.config import Config
    from fairvar.select import Criterion

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


def show(thing: Any) -> None:
    Console(highlight=False).print(thing)


def tell(note: str | None) -> None:
    """Something to know before a long computation: to stderr."""
    if note is not None:
        print(note, file=sys.stderr)


def print_json(value: Any) -> None:
    print(jsonlib.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has no nan: what is not a number is null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
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
