"""Tables of the chosen configurations: of one federation, of several, and of single clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any

import numpy as np

from fairvar.common.files import csv_text
from fairvar.metrics import RESAMPLES, Fairness
from fairvar.report.compare import WHICH, data_title, paired, uncorrected
from fairvar.report.paired import Paired
from fairvar.report.table import (
    DIVERGED,
    Cell,
    Column,
    Estimate,
    Row,
    Table,
    csv_rows,
    over_seeds,
    render,
)
from fairvar.runs.trials import Group, Result
from fairvar.scores import ACCURACY, UNDEFINED, Metric


def _key(primary: str, model: str) -> str:
    """Columns of another model begin with its name; of the two that every run has, with "other"."""
    return "other" if {primary, model} == {"global", "local"} else model


def result_columns(
    primary: str, validation: bool = True, metric: Metric = ACCURACY
) -> tuple[Column, ...]:
    """Columns for the model that the protocol evaluates, then two for each other model."""
    name, title, counts = metric.name, metric.title, metric.has_noise_floor
    worst = "" if counts else f" (the {'lowest' if metric.higher_is_better else 'highest'})"
    squares = "variance_over_clients" if metric.factor == 100 else ""  # defined as fraction²
    better = "" if counts else f"; {'higher' if metric.higher_is_better else 'lower'} is better"
    others = []
    for model in sorted(WHICH, key=lambda model: _key(primary, model) != "other"):
        key, of = _key(primary, model), WHICH[model]
        others += [
            Column(f"{key}_{name}", f"{model} {metric.short}{metric.unit}", 2,
                   f"test {title} of {of}", "mean"),
            Column(f"{key}_variance", f"{model} var.", 3, f"variance over clients for {of}",
                   squares),
        ]  # fmt: skip
    return (
        Column(name, f"{title}{metric.unit}", 2,
               f"mean over clients, test data, of {WHICH[primary]}{better}", "mean"),
        Column("variance", f"variance{metric.squared}", 3,
               f"sample variance over clients (ddof 1) of that {title}, {metric.in_variances}",
               squares),
        Column("noise_floor", "noise floor", 3, "what finite test sets add by chance",
               "noise_floor"),
        Column("corrected", "corrected", 3, "the variance less its noise floor",
               "corrected_variance"),
        Column("interval", "95 % interval", 3,
               f"bootstrap interval over clients of the {'corrected ' * counts}variance, mean over "
               "seeds", "corrected_variance_interval" if counts else "variance_interval"),
        Column("worst", "worst 10 %", 2, f"mean {title} of the worst tenth of the clients{worst}",
               "worst_10_percent" if counts else ""),
        *others,
        Column(f"window_{name}", f"window {metric.short}{metric.unit}", 2,
               f"the {title} averaged over the evaluated rounds around the chosen one, a quarter "
               "of the run: shows whether the chosen round was lucky", "mean"),
        Column("window_variance", "window var.", 3, "the variance, averaged in the same way",
               squares),
        Column("paper_accuracy", "paper acc. %", 2, "the accuracy that the paper prints"),
        Column("paper_variance", "paper var.", 2, "the variance that the paper prints"),
        Column("seeds", "seeds", 0, "runs behind the chosen configuration"),
        Column("tried", "tried", 0, "configurations among which it was chosen"),
        Column("chosen", "chosen", 0, "configuration and round" + (
               " chosen on validation data" if validation else ": the only one, the last")),
    )  # fmt: skip


WHEN_UNDEFINED = (
    f"{UNDEFINED}: the formula has no value for these clients. A variance needs two clients with "
    "test samples, a noise floor a client with two of them, an interval five clients."
)
SHORT = ("accuracy", "variance", "corrected", "worst", "other_accuracy", "other_variance", "chosen")


def result_table(
    results: Sequence[Result],
    title: str,
    notes: Sequence[str] = (),
    primary: str = "global",
    paper: Mapping[str, Mapping[str, Cell]] | None = None,
    validation: bool = True,
) -> Table:
    """Mean ± standard error over seeds, marked where a method is clearly ahead of all others.

    `paper`: what the paper prints, by label. `validation`: whether there were validation data to
    choose by."""
    marks = _marks(results, primary)
    metric = results[0].trial.metric if results else ACCURACY
    rows = [_row(r, primary, (paper or {}).get(r.label, {}), marks) for r in results]
    used = {key for row in rows for key in row.cells}
    known = result_columns(primary, validation, metric)
    columns = [column for column in known if column.key in used]
    if any(cell == UNDEFINED for row in rows for cell in row.cells.values()):
        notes = [*notes, WHEN_UNDEFINED]
    if metric.factor != 100:
        columns = [replace(c, digits=_digits(row.cells.get(c.key) for row in rows))
                   for c in columns]  # fmt: skip
    return Table(title, columns, rows, [*notes, *_score_notes(results, primary, metric)])


def _digits(cells: Iterable[Cell]) -> int:
    """After the decimal point, so that the largest number has four significant ones."""
    known = [abs(cell.value) for cell in cells if isinstance(cell, Estimate) and not cell.diverged]
    largest = max(known, default=0.0)
    return int(np.clip(3 - np.floor(np.log10(largest)), 0, 9)) if largest > 0 else 2


def _score_notes(results: Sequence[Result], primary: str, metric: Metric) -> Iterator[str]:
    """What to know about a score that is not the accuracy."""
    if metric == ACCURACY:
        return
    yield uncorrected(metric)
    away = 0
    for result in (r for r in results if r.at is not None):
        scores = result.seed_scores(result.reported(primary))[:, result.samples() > 0]
        away = max(away, int(np.isnan(scores).sum(1).max()))
    if away:
        yield (f"Up to {away} clients with test samples have no {metric.title}: it is not defined "
               "for their samples, or they did not answer. They are left out.")  # fmt: skip


def shorten(table: Table, explain: bool) -> Table:
    """The columns that fit a terminal, with or without their definitions below."""
    score = table.columns[0].key
    short = {key.replace("accuracy", score) for key in SHORT}
    kept = [c if explain else replace(c, definition="") for c in table.columns if c.key in short]
    rows = [Row(r.label, {k: v for k, v in r.cells.items() if k in short}) for r in table.rows]
    return Table(table.title, kept, rows, table.notes)


def _row(result: Result, primary: str, paper: Mapping[str, Cell], marks: Mapping[str, str]) -> Row:
    metric = result.trial.metric
    name, factor = metric.name, metric.factor
    cells: dict[str, Any] = {"tried": str(result.configurations), **paper}
    if result.at is None:
        return Row(result.label, {**cells, name: DIVERGED, "chosen": "all diverged"})
    model = result.reported(primary)
    main = result.trial.test(model, result.at, RESAMPLES)
    score, variance = result.window(model)
    ahead = {key for key, label in marks.items() if label == result.label}

    def squares(values: Iterable[float], marked: bool = False) -> Cell:
        return over_seeds((factor * v for v in values), marked)  # × 100, as in the paper

    for other in (m for m in result.trial.models if m != model):
        key, others = _key(primary, other), result.trial.test(other, result.at)
        cells[f"{key}_{name}"] = over_seeds(factor * f.mean for f in others)
        cells[f"{key}_variance"] = squares(f.variance_over_clients for f in others)
    counts = metric.has_noise_floor  # otherwise a dash
    return Row(
        result.label,
        {
            **cells,
            name: over_seeds((factor * f.mean for f in main), "accuracy" in ahead),
            "variance": squares((f.variance_over_clients for f in main), "variance" in ahead),
            "noise_floor": squares(f.noise_floor for f in main) if counts else None,
            "corrected": squares((f.corrected_variance for f in main), "corrected" in ahead)
            if counts
            else None,
            "interval": _interval(main, metric),
            "worst": over_seeds(factor * f.worst_10_percent for f in main),
            f"window_{name}": over_seeds(factor * a for a in score),
            "window_variance": squares(variance),
            "seeds": str(len(result.trial.histories)),
            "chosen": result.trial.describe(result.at),
        },
    )


def _interval(seeds: Sequence[Fairness], metric: Metric) -> str:
    """Of the corrected variance, or of the variance where there is no correction."""
    corrected = metric.has_noise_floor
    low, high = np.mean([f.corrected_variance_interval if corrected else f.variance_interval
                         for f in seeds], axis=0) * metric.factor  # fmt: skip
    form = ".3f" if metric.factor == 100 else ".4g"
    return f"{low:{form}} to {high:{form}}" if np.isfinite([low, high]).all() else UNDEFINED


def _marks(results: Sequence[Result], primary: str) -> dict[str, str]:
    """Per column the method that is ahead of every other one by more than the paired interval."""
    alive = [result for result in results if result.at is not None]
    found: dict[str, str] = {}
    for result in alive if len(alive) > 1 else ():
        ahead = {"accuracy", "variance", "corrected"}
        for other in alive:
            if ahead and other is not result:  # a comparison takes long
                ahead &= _ahead(paired(result, other, primary, False))
        found |= dict.fromkeys(ahead, result.label)
    return found


def _ahead(d: Paired | None) -> set[str]:
    """The columns in which the first of two is clearly better; none if they cannot be compared."""
    if d is None:
        return set()
    better = d.accuracy.low > 0 if d.metric.higher_is_better else d.accuracy.high < 0
    won = {"accuracy": better, "variance": d.variance.high < 0,
           "corrected": d.corrected_variance.high < 0}  # fmt: skip
    return {key for key, better in won.items() if better}


def noise_floor(results: Sequence[Result], model: str = "global") -> float:
    """Mean noise floor of the variance over the chosen configurations, fraction²."""
    floors = [f.noise_floor for r in results if r.at is not None
              for f in r.trial.test(r.reported(model), r.at)]  # fmt: skip
    return float(np.mean(floors)) if floors else float("nan")


# --- several federations -------------------------------------------------------------------------
def _shown(metric: Metric) -> tuple[Column, ...]:
    squares = "variance_over_clients" if metric.factor == 100 else ""
    return (
        Column(metric.name, f"{metric.short}{metric.unit}", 2,
               "mean over clients on test data ± standard error over seeds", "mean"),
        Column("variance", f"var.{metric.squared}", 3,
               f"sample variance over clients, {metric.in_variances}", squares),
        Column("corrected", "corr.", 3, "the variance less what finite test sets add by chance",
               "corrected_variance"),
    )  # fmt: skip


WithTables = Sequence[tuple[Group, Table]]  # every group with its result table


def overviews(groups: WithTables) -> list[Table]:
    """A table for every data set, protocol and model that has several federations."""
    kinds: dict[tuple[str, ...], list[tuple[Group, Table]]] = {}
    for group, table in groups:
        kind = (group.dataset, *group.kind, group.criterion.model, group.metric.name)
        kinds.setdefault(kind, []).append((group, table))
    return [_overview(members) for members in kinds.values() if len(members) > 1]


def _overview(members: WithTables) -> Table:
    first = members[0][0]
    columns: list[Column] = []
    cells: dict[str, dict[str, Cell]] = {}
    alphas = [group.alpha for group, _ in members]
    for place, (group, table) in enumerate(members):
        unique = group.alpha is not None and alphas.count(group.alpha) == 1
        name = f"α {group.alpha:g}" if unique else f"federation {place + 1}"
        digits = {column.key: column.digits for column in table.columns}
        for column in _shown(first.metric):
            key, header = f"{column.key}-{place}", f"{name}: {column.header}"
            own = digits.get(column.key, column.digits)
            columns.append(replace(column, key=key, header=header, definition="", digits=own))
            for row in table.rows:
                cells.setdefault(row.label, {})[key] = row.cells.get(column.key)
    runs = sum(len(group.provenances) for group, _ in members)
    return Table(
        f"{data_title(first)}, {'deployed, ' * ('deployed' in first.kind)}protocol "
        f"{first.config.protocol}: {WHICH[first.criterion.model]}"
        + f", {first.metric.title}" * (first.metric != ACCURACY),
        columns,
        [Row(label, found) for label, found in cells.items()],
        [*(f"{column.header}: {column.definition}" for column in _shown(first.metric)),
         f"{runs} runs. Bold: ahead of every other method by more than the paired 95 % interval."],
    )  # fmt: skip


def overview_files(groups: WithTables) -> dict[str, str]:
    """`table.md` and `table.tex` in the form of a paper's table, `table.csv` with every number, one
    row for each federation and method."""
    found = overviews(groups)
    if not found:
        return {}
    return {
        "table.md": "\n".join(render(table, "markdown") for table in found),
        "table.tex": "\n".join(render(table, "latex") for table in found),
        "table.csv": csv_text(_all_rows(groups)),
    }


def _all_rows(groups: WithTables) -> Iterator[list[str]]:
    """The rows of all tables, with the columns of all of them, headed once."""
    keys = list(dict.fromkeys(column.key for _, table in groups for column in table.columns))
    for place, (group, table) in enumerate(groups):
        head, *rows = csv_rows(Table("", [Column(key, key) for key in keys], table.rows))
        if place == 0:
            yield ["dataset", "protocol", "model", "alpha", *head]
        about = [group.dataset, group.config.protocol, group.criterion.model, _alpha(group)]
        yield from ([*about, *row] for row in rows)


def _alpha(group: Group) -> str:
    return "" if group.alpha is None else f"{group.alpha:g}"


# --- single clients ------------------------------------------------------------------------------
HEAD = ("dataset", "protocol", "alpha", "method", "chosen", "seed", "client", "test_samples")


def clients_csv(groups: Sequence[Group]) -> str:
    """Every client's test accuracy at the chosen round as an exact count of right answers, and its
    score by another metric with all digits."""
    known = {model for group in groups for r in group.results for model in r.trial.models}
    models = ["global", "local", *["personal"] * ("personal" in known)]
    counts = ["right"] * any(_has_labels(group) for group in groups)
    others = [group.metric.name for group in groups if group.metric != ACCURACY]
    columns = list(product([*counts, *dict.fromkeys(others)], models))
    head = (*HEAD, *(f"{quantity}_{model}" for quantity, model in columns))
    return csv_text(chain([head], *(_rows(group, columns) for group in groups)))


def _has_labels(group: Group) -> bool:
    alive = [r.trial for r in group.results if r.at is not None]
    return group.metric == ACCURACY or any(trial.histories[0].accuracy for trial in alive)


def _rows(group: Group, columns: Sequence[tuple[str, str]]) -> Iterator[tuple[object, ...]]:
    for result in group.results:
        if result.at is None:
            continue
        about = (group.dataset, group.config.protocol, _alpha(group), result.label)
        chosen, samples = result.trial.describe(result.at), result.samples()
        for seed, history in zip(result.trial.seeds, result.trial.histories, strict=True):
            nothing = np.full(len(samples), np.nan)  # of a model that was not measured
            kinds = {"right": history.accuracy, group.metric.name: history.score}
            tables = [
                (quantity, kinds[quantity]["test", model][result.at].numpy())
                if ("test", model) in kinds.get(quantity, {}) else (quantity, nothing)
                for quantity, model in columns
            ]  # fmt: skip
            for client, count in enumerate(samples.tolist()):
                cells = (_cell(quantity, table[client], count) for quantity, table in tables)
                yield (*about, chosen, seed, client, count, *cells)


def _cell(quantity: str, value: float, samples: int) -> int | str:
    """Empty for a client without test samples, that did not take part, or without a score."""
    if value != value:
        return ""
    return round(float(value) * samples) if quantity == "right" else repr(float(value))
