"""Tables of the chosen configurations: of one federation, of several, and of single clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from fairvar.metrics import Fairness, variance_in_units
from fairvar.report.compare import WHICH, paired
from fairvar.report.paired import Paired
from fairvar.report.table import (
    DIVERGED,
    UNDEFINED,
    Cell,
    Column,
    Row,
    Table,
    csv_rows,
    over_seeds,
    render,
    write_csv,
)
from fairvar.runs.trials import Group, Result


def _key(primary: str, model: str) -> str:
    """Columns of another model begin with its name; of the two that every run has, with "other"."""
    return "other" if {primary, model} == {"global", "local"} else model


def result_columns(primary: str, validation: bool = True) -> tuple[Column, ...]:
    """Columns for the model that the protocol evaluates, then two for each other model."""
    others = []
    for model in sorted(WHICH, key=lambda model: _key(primary, model) != "other"):
        key, of = _key(primary, model), WHICH[model]
        others += [
            Column(f"{key}_accuracy", f"{model} acc. %", 2, f"test accuracy of {of}", "mean"),
            Column(f"{key}_variance", f"{model} var.", 3, f"variance over clients for {of}",
                   "variance_over_clients"),
        ]  # fmt: skip
    return (
        Column("accuracy", "accuracy %", 2, f"mean over clients, test data, of {WHICH[primary]}",
               "mean"),
        Column("variance", "variance ×100", 3,
               "sample variance over clients (ddof 1) of that accuracy, fraction² × 100",
               "variance_over_clients"),
        Column("noise_floor", "noise floor", 3, "what finite test sets add by chance",
               "noise_floor"),
        Column("corrected", "corrected", 3, "the variance less its noise floor",
               "corrected_variance"),
        Column("interval", "95 % interval", 3,
               "bootstrap interval over clients of the corrected variance, mean over seeds",
               "corrected_variance_interval"),
        Column("worst", "worst 10 %", 2, "mean accuracy of the worst tenth of the clients",
               "worst_10_percent"),
        *others,
        Column("window_accuracy", "window acc. %", 2,
               "the accuracy averaged over the evaluated rounds around the chosen one, a quarter "
               "of the run: shows whether the chosen round was lucky", "mean"),
        Column("window_variance", "window var.", 3, "the variance, averaged in the same way",
               "variance_over_clients"),
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
    rows = [_row(r, primary, (paper or {}).get(r.label, {}), marks) for r in results]
    used = {key for row in rows for key in row.cells}
    columns = [column for column in result_columns(primary, validation) if column.key in used]
    if any(cell == UNDEFINED for row in rows for cell in row.cells.values()):
        notes = [*notes, WHEN_UNDEFINED]
    return Table(title, columns, rows, notes)


def shorten(table: Table, explain: bool) -> Table:
    """The columns that fit a terminal, with or without their definitions below."""
    kept = [c if explain else replace(c, definition="") for c in table.columns if c.key in SHORT]
    rows = [Row(r.label, {k: v for k, v in r.cells.items() if k in SHORT}) for r in table.rows]
    return Table(table.title, kept, rows, table.notes)


def _row(result: Result, primary: str, paper: Mapping[str, Cell], marks: Mapping[str, str]) -> Row:
    cells: dict[str, Any] = {"tried": str(result.configurations), **paper}
    if result.at is None:
        return Row(result.label, {**cells, "accuracy": DIVERGED, "chosen": "all diverged"})
    model = result.reported(primary)
    main = result.trial.test(model, result.at)
    accuracy, variance = result.window(model)
    ahead = {key for key, label in marks.items() if label == result.label}
    for other in (m for m in result.trial.models if m != model):
        key, others = _key(primary, other), result.trial.test(other, result.at)
        cells[f"{key}_accuracy"] = over_seeds(100 * f.mean for f in others)
        cells[f"{key}_variance"] = _x100(f.variance_over_clients for f in others)
    return Row(
        result.label,
        {
            **cells,
            "accuracy": over_seeds((100 * f.mean for f in main), "accuracy" in ahead),
            "variance": _x100((f.variance_over_clients for f in main), "variance" in ahead),
            "noise_floor": _x100(f.noise_floor for f in main),
            "corrected": _x100((f.corrected_variance for f in main), "corrected" in ahead),
            "interval": _interval(main),
            "worst": over_seeds(100 * f.worst_10_percent for f in main),
            "window_accuracy": over_seeds(100 * a for a in accuracy),
            "window_variance": _x100(variance),
            "seeds": str(len(result.trial.histories)),
            "chosen": result.trial.describe(result.at),
        },
    )


def _x100(values: Iterable[float], marked: bool = False) -> Cell:
    return over_seeds((variance_in_units(v, "x100") for v in values), marked)


def _interval(seeds: Sequence[Fairness]) -> str:
    low, high = np.mean([f.corrected_variance_interval for f in seeds], axis=0) * 100
    return f"{low:.3f} to {high:.3f}" if np.isfinite([low, high]).all() else UNDEFINED


def _marks(results: Sequence[Result], primary: str) -> dict[str, str]:
    """Per column the method that is ahead of every other one by more than the paired interval."""
    alive = [result for result in results if result.at is not None]
    found: dict[str, str] = {}
    for result in alive if len(alive) > 1 else ():
        ahead = {"accuracy", "variance", "corrected"}
        for other in alive:
            if (
                ahead and other is not result
            ):  # a comparison takes long where nothing is left to win
                ahead &= _ahead(paired(result, other, primary, False))
        found |= dict.fromkeys(ahead, result.label)
    return found


def _ahead(d: Paired | None) -> set[str]:
    """The columns in which the first of two is clearly better; none if they cannot be compared."""
    if d is None:
        return set()
    won = {"accuracy": d.accuracy.low > 0, "variance": d.variance.high < 0,
           "corrected": d.corrected_variance.high < 0}  # fmt: skip
    return {key for key, better in won.items() if better}


def noise_floor(results: Sequence[Result], model: str = "global") -> float:
    """Mean noise floor of the variance over the chosen configurations, fraction²."""
    floors = [f.noise_floor for r in results if r.at is not None
              for f in r.trial.test(r.reported(model), r.at)]  # fmt: skip
    return float(np.mean(floors)) if floors else float("nan")


# --- several federations -------------------------------------------------------------------------
SHOWN = (
    Column("accuracy", "acc. %", 2, "mean over clients on test data ± standard error over seeds",
           "mean"),
    Column("variance", "var. ×100", 3, "sample variance over clients, fraction² × 100",
           "variance_over_clients"),
    Column("corrected", "corr.", 3, "the variance less what finite test sets add by chance",
           "corrected_variance"),
)  # fmt: skip
WithTables = Sequence[tuple[Group, Table]]  # every group with its result table


def overviews(groups: WithTables) -> list[Table]:
    """A table for every data set, protocol and model that has several federations."""
    kinds: dict[tuple[str, ...], list[tuple[Group, Table]]] = {}
    for group, table in groups:
        kind = (group.dataset, *group.kind, group.criterion.model)
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
        for column in SHOWN:
            key, header = f"{column.key}-{place}", f"{name}: {column.header}"
            columns.append(replace(column, key=key, header=header, definition=""))
            for row in table.rows:
                cells.setdefault(row.label, {})[key] = row.cells.get(column.key)
    runs = sum(len(group.births) for group, _ in members)
    return Table(
        f"{first.dataset}, {'deployed, ' * ('deployed' in first.kind)}protocol "
        f"{first.config.protocol}: {WHICH[first.criterion.model]}",
        columns,
        [Row(label, found) for label, found in cells.items()],
        [*(f"{column.header}: {column.definition}" for column in SHOWN),
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
        "table.csv": write_csv(_all_rows(groups)),
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
    """Every client's test accuracy at the chosen round as an exact count of right answers."""
    known = {model for group in groups for r in group.results for model in r.trial.models}
    models = ["global", "local", *["personal"] * ("personal" in known)]
    head = (*HEAD, *(f"right_{model}" for model in models))
    return write_csv(chain([head], *(_rows(group, models) for group in groups)))


def _rows(group: Group, models: Sequence[str]) -> Iterator[tuple[object, ...]]:
    for result in group.results:
        if result.at is None:
            continue
        about = (group.dataset, group.config.protocol, _alpha(group), result.label)
        chosen, samples = result.trial.describe(result.at), result.samples()
        for seed, history in zip(result.trial.seeds, result.trial.histories, strict=True):
            nothing = np.full(len(samples), np.nan)  # of a model that was not measured
            tables = [
                history.accuracy["test", model][result.at].numpy()
                if ("test", model) in history.accuracy else nothing
                for model in models
            ]  # fmt: skip
            for client, count in enumerate(samples.tolist()):
                right = (_count(table[client], count) for table in tables)
                yield (*about, chosen, seed, client, count, *right)


def _count(accuracy: float, samples: int) -> int | str:
    """Empty for a client without test samples, or that did not take part."""
    return "" if accuracy != accuracy else round(float(accuracy) * samples)
