"""Reports from Python: `fairvar.compare`, tables, intervals and figures of methods, and
`fairvar.write_report`, which the command line calls, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace as with_fields

from fairvar.common import display
from fairvar.common.files import given_path
from fairvar.engine.history import BY_MODEL, Frame, History, sizes_of
from fairvar.errors import BadInput, shown, unknown
from fairvar.metrics import mean_and_variance
from fairvar.report import compare as pairs
from fairvar.report.files import FORMATS, group_table, result_figures, write_files
from fairvar.report.paired import Paired
from fairvar.report.result_tables import result_table, shorten
from fairvar.report.style import BASELINE, Figure
from fairvar.report.style import save as save_figure
from fairvar.report.table import Column, Row, Table, render, texts_of
from fairvar.runs.config import Config
from fairvar.runs.experiments import Sweep, shown_if
from fairvar.runs.formats import check_writable, write_text
from fairvar.runs.own import load_plugin
from fairvar.runs.results import Rule, gather
from fairvar.runs.select import Criterion
from fairvar.runs.trials import Result, Trial

Histories = Mapping[str, History | Sequence[History]]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Methods on the same clients and seeds. `print` shows its tables, a notebook too.

    table: one row per method, mean ± standard error over seeds; bold where a method is ahead of all
    others by more than the paired interval.
    differences: every method − `baseline`, paired over seeds and clients, with 95 % intervals.
    paired: the same as numbers, and who gains or pays, by method.
    """

    results: Sequence[Result]
    trials: Sequence[Trial]  # the results are chosen among them
    model: str
    baseline: str
    table: Table
    differences: Table
    paired: Mapping[str, Paired]

    def __repr__(self) -> str:
        seeds = len(self.results[0].trial.seeds)
        labels = ", ".join(result.label for result in self.results)
        return f"<Comparison of {labels} over {seeds} seed{'s' if seeds != 1 else ''}>"

    def __str__(self) -> str:
        return self.to_text("terminal")

    def to_text(self, format: str = "markdown") -> str:
        """Both tables: "terminal", "markdown", "latex" or "csv"."""
        first = shorten(self.table, explain=True) if format == "terminal" else self.table
        return "\n".join(render(t, format) for t in (first, self.differences) if t.rows)

    def _repr_html_(self) -> str:
        tables = []
        for table in (shorten(self.table, explain=False), self.differences):
            if not table.rows:  # there is one method, or only one did not diverge
                continue
            columns = [texts_of(table, column) for column in table.columns]
            rows = list(zip((row.label for row in table.rows), *columns, strict=True))
            head = (table.title, *(column.header for column in table.columns))
            tables.append(display.table(head, rows))
        rounds = [r.trial.summary.rounds for r in self.results if r.at is not None]
        curves = {r.label: self._curve(r) for r in self.results if r.at is not None}
        if rounds and len(rounds[0]) > 1:
            about = f"mean test {self.results[0].trial.metric.title} over clients"
            tables.insert(1, display.curves(about, list(rounds[0]), curves))
        return display.card(repr(self)[1:-1], *tables)

    def _curve(self, result: Result) -> list[float]:
        scores = result.trial.scores(result.reported(self.model))
        return [float(mean) for mean in mean_and_variance(scores)[0].mean(0)]

    def to_frame(self) -> Frame:
        """One row per method and seed with all fairness numbers, at the chosen round."""
        rows: list[dict[str, Any]] = []
        for result in self.results:
            if result.at is not None:
                model, round_ = result.reported(self.model), result.trial.summary.rounds[result.at]
                scores = result.trial.test(model, result.at)
                for seed, found in zip(result.trial.seeds, scores, strict=True):
                    numbers = {k: v for k, v in {**found}.items() if not k.endswith("_interval")}
                    rows.append({"method": result.label, "seed": seed, "model": model,
                                 "round": round_, **numbers})  # fmt: skip
        return Frame({key: np.array([row[key] for row in rows]) for key in rows[0]} if rows else {})

    def to_pandas(self) -> Any:
        """`to_frame` as a pandas.DataFrame."""
        return self.to_frame().to_pandas()

    def figures(self) -> dict[str, Figure]:
        """The report's figures by name."""
        found = dict(result_figures(self.trials, self.results, self.model))
        if len({tuple(r.trial.summary.rounds) for r in self.results if r.at is not None}) > 1:
            found.pop("curves", None)
        return found

    def save(self, folder: str | Path) -> list[Path]:
        """Write the tables in every format, and the figures as PNG and PDF."""
        out, written = given_path(folder), list[Path]()
        for name, table in (("table", self.table), ("differences", self.differences)):
            for end, kind in FORMATS.items():
                written.append(out / f"{name}.{end}")
                write_text(written[-1], render(table, kind))
        for name, figure in self.figures().items():
            written += save_figure(figure, out, name)
        return written


def compare(
    runs: Histories | Sweep | str | Path,
    *,
    baseline: str | None = None,
    model: str | None = None,
    late: bool = False,
    federation: str = "",
) -> Comparison:
    """Compare methods on test data.

    runs: {"FedAvg": histories, "TERM": histories}, one history per seed, on the same clients. Every
    run is taken after its last evaluation. Or a `Sweep`, or the folder of one: then the
    configuration and the round of each method are chosen on validation data.
    baseline: what the others are compared with; FedAvg, or otherwise the first.
    model: "global", "local" or "personal"; by default the global model, and personal ones of
    methods that have such.
    late: pair averages over the last quarter of the rounds, the same for all.
    federation: of a folder with several, such as "0.1" (its alpha).
    """
    if model not in (None, *pairs.NAMES):
        raise unknown("model", model, pairs.NAMES)
    if isinstance(runs, Mapping):
        found = _of_histories(runs, model)
    elif isinstance(runs, Sweep | str | Path):
        found = _of_folder(runs, model, federation)
    else:
        raise BadInput(f"compare takes {{label: histories}}, a Sweep or the folder of one, not a "
                       f"{type(runs).__name__}")  # fmt: skip
    return _comparison(*found, baseline=baseline, late=late)


def _of_histories(
    runs: Histories, model: str | None
) -> tuple[Sequence[Result], Sequence[Trial], str, Table, str]:
    trials, notes = _trials(runs)
    results, primary = [_last(trial, model) for trial in trials], model or "global"
    for result in results:
        which = result.reported(primary)
        if result.at is not None and which not in result.trial.models:
            _ = result.trial.histories[0].accuracy["test", which]  # raises, and says why
    methods = display.plural(len(results), "method")
    title = f"{methods}, {display.plural(trials[0].histories[0].clients, 'client')}"
    table = result_table(results, title, notes, primary, validation=False)
    return results, trials, primary, table, ""


def _of_folder(
    runs: Sweep | str | Path, model: str | None, federation: str
) -> tuple[Sequence[Result], Sequence[Trial], str, Table, str]:
    folder = runs.folder if isinstance(runs, Sweep) else given_path(runs)
    only = runs.names if isinstance(runs, Sweep) else None

    rule = rule_of(model, None, None, None)
    group = pairs.pick(gather(folder, rule=rule, model=model, only=only), folder, federation)
    passport = str(group.passport.get("sha256"))
    return group.results, group.trials, group.criterion.model, group_table(group), passport


def _comparison(
    results: Sequence[Result],
    trials: Sequence[Trial],
    model: str,
    table: Table,
    passport: str,
    *,
    baseline: str | None,
    late: bool,
) -> Comparison:
    """`passport`: SHA-256 of the partition, where it is known."""
    alive = {r.label: r for r in results if r.at is not None}
    labels = [r.label for r in results]
    if baseline is not None and baseline not in labels:
        raise unknown("baseline", baseline, labels)
    base = baseline or (BASELINE if BASELINE in alive else next(iter(alive), labels[0]))
    sides = {label: _side(r, model, late, passport) for label, r in alive.items()}
    found = {label: pairs.compare_sides(side, sides[base]) for label, side in sides.items()
             if base in sides and label != base}  # fmt: skip
    return Comparison(results, trials, model, base, table, _differences(found, base, late), found)


def _side(result: Result, model: str, late: bool, passport: str) -> pairs.Side:
    which = result.reported(model)
    scores = result.late(which) if late else result.seed_scores(which)
    trial = result.trial
    # Methods are reported by different models on purpose where one has personal ones.
    return pairs.Side(
        result.label, model, passport, scores, result.samples(), trial.seeds, trial.metric
    )


def _differences(paired: Mapping[str, Paired], base: str, late: bool) -> Table:
    names, rows = dict[str, str](), []
    for label, both in paired.items():
        cells = {}
        for key, (names[key], d) in pairs.numbers(both).items():
            value, interval = pairs.texts(both, key, 2)
            cells[key] = f"{value} ({interval})" + " *" * d.clear
        rows.append(Row(label, cells))
    when = "averaged over the last quarter of the rounds" if late else "at the chosen rounds"
    notes = [f"Test data, {when}; in brackets the 95 % interval, paired over seeds and clients. "
             "*: the interval excludes zero."]  # fmt: skip
    columns = [Column(key, name) for key, name in names.items()]
    return Table(f"Compared with {base}", columns, rows, notes)


def _trials(runs: Histories) -> tuple[list[Trial], list[str]]:
    """A trial for each label, all of the same seeds and clients."""
    by_label = {str(label): _by_seed(label, found) for label, found in runs.items()}
    if not by_label:
        raise BadInput("nothing to compare; give {label: histories}")
    common = set.intersection(*(set(found) for found in by_label.values()))
    seeds = sorted(common)
    if not seeds:
        each = ", ".join(f"{label}: {sorted(found)}" for label, found in by_label.items())
        raise BadInput(f"no seed is common to all ({each}); train them with the same seeds")
    notes = ["Every run after its last evaluation, on test data. ± is the standard error over "
             f"seeds ({', '.join(map(str, seeds))})."]  # fmt: skip
    if any(set(found) != common for found in by_label.values()):
        notes.append("Other seeds are left out: not all methods have them.")
    chosen = {label: [found[seed] for seed in seeds] for label, found in by_label.items()}
    every = [history for found in chosen.values() for history in found]
    first = every[0]
    for history in every:
        if sizes_of(history) != sizes_of(first):
            raise BadInput("the histories are of different clients, which cannot be paired: train "
                           "all methods on the same federation")  # fmt: skip
    if len({h.metric for h in every}) > 1:
        raise BadInput("the histories are scored by different metrics; train all with one")
    if len({tuple(h.evaluated.tolist()) for h in every if h.diverged_at is None}) > 1:
        chosen = {label: [_at_end(h) for h in found] for label, found in chosen.items()}
        notes.append("The runs were evaluated in different rounds, so that they have no curves.")
    trials = [Trial(of[0].method, nan, of, name=label) for label, of in chosen.items()]
    return trials, notes


def _by_seed(label: object, given: History | Sequence[History]) -> dict[int, History]:
    histories = [given] if isinstance(given, History) else given
    fine = isinstance(histories, list | tuple) and histories
    if not fine or not all(isinstance(h, History) for h in histories):
        raise BadInput(f"{shown(label)}: give a history or a list of histories, one per seed")
    found = {int(history.provenance.get("seed", 0)): history for history in histories}
    if len(found) < len(histories):
        raise BadInput(f"{shown(label)} has two histories of one seed; train with seed=0, 1, …")
    return found


def _at_end(history: History) -> History:
    """The history with its last evaluation only."""
    tables: dict[str, Any] = {
        quantity: {key: table[-1:] for key, table in getattr(history, quantity).items()}
        for quantity in (*BY_MODEL, "own_score")
    }
    rows = {name: getattr(history, name)[-1:]
            for name in ("evaluated", "gradient_variance", "update_norm")}  # fmt: skip
    return replace(history, **tables, **rows)


def _last(trial: Trial, model: str | None) -> Result:
    """After the last evaluation."""
    at = None if trial.diverged else len(trial.summary.rounds) - 1
    own = "personal" if model is None and "personal" in trial.models else ""
    return Result(trial, at, 1, own)


# -- the report ------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Report:
    """Tables, one for each federation, and files of a report; `page` is the one to open."""

    tables: Sequence[Table]
    files: Sequence[Path]

    @property
    def page(self) -> Path:
        return next(file for file in self.files if file.name == "index.html")

    def __repr__(self) -> str:
        return f"<Report: {display.plural(len(self.files), 'file')} in {self.page.parent}>"

    def __str__(self) -> str:
        return "\n".join(render(shorten(t, explain=True), "terminal") for t in self.tables)


def write_report(
    runs: Sweep | str | Path,
    *,
    out: str | Path | None = None,
    title: str | None = None,
    model: str | None = None,
    t: float | None = None,
    unit: str | None = None,
    m: int | None = None,
    plugin: str | Path | None = None,
    progress: bool = False,
) -> Report:
    """Choose on validation data, report on test data: tables, figures and a page from a sweep.

    runs: a `Sweep`, or the folder that a sweep or `fairvar condense` wrote.
    out: where the report goes; report inside of that folder by default.
    title: heading of the page.
    model: "global", "local" or "personal"; by default as for `fairvar.compare`.
    t, unit, m: the rule of selection (see `Criterion`), by accuracy − t·√(variance / m); by default
    that of [select] in the runs' configuration.
    plugin: a file with methods of your own.
    """
    if not isinstance(runs, Sweep | str | Path):
        raise BadInput(f"write_report takes a Sweep or the folder of one, not {shown(runs)}")
    load_plugin(None if plugin is None else Path(plugin))
    folder = runs.folder if isinstance(runs, Sweep) else given_path(runs)
    only = runs.names if isinstance(runs, Sweep) else None
    target, rule = folder / "report" if out is None else given_path(out), rule_of(model, t, unit, m)
    with shown_if(progress, "report") as report:
        report(0, 1, "reading runs")
        groups = gather(folder, rule=rule, model=model, only=only)
        check_writable(target)  # bad input must write nothing
        heading = title or f"fairvar: {groups[0].config.name}"
        tables, files = write_files(groups, target, heading, report)
        report(len(groups), len(groups), "done")
    return Report(tables, files)


def rule_of(model: str | None, t: float | None, unit: str | None, m: int | None) -> Rule:
    """The rule of a run's configuration, apart from what is given."""
    asked = {"model": model, "t": t, "unit": unit, "m": m}
    given: Any = {key: value for key, value in asked.items() if value is not None}

    def rule(config: Config) -> Criterion:
        return with_fields(config.select, **given)

    rule(Config())  # bad options are refused before anything is read
    return rule
