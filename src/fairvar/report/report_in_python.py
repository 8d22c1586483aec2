"""`fairvar.write_report`: what `fairvar report` writes, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairvar.errors import BadInput, shown
from fairvar.report.files import write_files
from fairvar.report.result_tables import shorten
from fairvar.report.table import Table, render
from fairvar.runs.config import Config
from fairvar.runs.experiments import Sweep, shown_if
from fairvar.runs.formats import check_writable
from fairvar.runs.own import load_plugin
from fairvar.runs.results import Rule, gather
from fairvar.runs.select import Criterion


@dataclass(frozen=True, eq=False)
class Report:
    """Tables, one for each federation, and files of a report; `page` is the one to open."""

    tables: Sequence[Table]
    files: Sequence[Path]

    @property
    def page(self) -> Path:
        return next(file for file in self.files if file.name == "index.html")

    def __repr__(self) -> str:
        return f"<Report: {len(self.files)} files in {self.page.parent}>"

    def __str__(self) -> str:
        return "\n".join(render(shorten(t, explain=True), "terminal") for t in self.tables)


def write_report(
    runs: Sweep | str | Path,
    *,
    out: str | Path | None = None,
    title: str | None = None,
    model: str | None = None,
    t: float = 1.96,
    unit: str = "fraction",
    m: int | None = None,
    plugin: str | Path | None = None,
    progress: bool = False,
) -> Report:
    """Choose on validation data, report on test data: tables, figures and a page from a sweep.

    runs: a `Sweep`, or the folder that a sweep or `fairvar condense` wrote.
    out: where the report goes; report inside of that folder by default.
    title: heading of the page.
    model: "global", "local" or "personal"; by default as for `fairvar.compare`.
    t, unit, m: the rule of selection (see `Criterion`), by accuracy − t·√(variance / m).
    plugin: a file with methods of your own.
    """
    if not isinstance(runs, Sweep | str | Path):
        raise BadInput(f"write_report takes a Sweep or the folder of one, not {shown(runs)}")
    load_plugin(None if plugin is None else Path(plugin))
    folder = runs.folder if isinstance(runs, Sweep) else Path(runs)
    only = runs.names if isinstance(runs, Sweep) else None
    target, rule = folder / "report" if out is None else Path(out), rule_of(model, t, unit, m)
    with shown_if(progress, "report") as report:
        report(0, 1, "reading runs")
        groups = gather(folder, rule=rule, model=model, only=only)
        check_writable(target)  # bad input must write nothing
        heading = title or f"fairvar: {groups[0].config.name}"
        tables, files = write_files(groups, target, heading, report)
        report(1, 1, "done")
    return Report(tables, files)


def rule_of(model: str | None, t: float, unit: str, m: int | None) -> Rule:
    """By the model that a run's protocol is about, unless one is named."""

    def rule(config: Config) -> Criterion:
        chosen: Any = model or config.select.model
        return Criterion(t=t, m=m, unit=unit, model=chosen)  # type: ignore[arg-type]

    rule(Config())  # bad options are refused before anything is read
    return rule
