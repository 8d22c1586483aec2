"""From trained runs to what a reader sees: choose on validation, report on test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fairvar.errors import BadInput
from fairvar.metrics import Fairness, mean_and_variance, variance_in_units
from fairvar.report.paired import pair
from fairvar.report.paper import Printed
from fairvar.report.table import DIVERGED, UNDEFINED, Cell, Column, Estimate, Row, Table, over_seeds
from fairvar.report.trial import Trial
from fairvar.runs.select import Choice, Criterion, best


@dataclass(frozen=True)
class Result:
    """The chosen trial of one method. `at` is None if all its configurations diverged."""

    trial: Trial
    at: int | None
    configurations: int

    @property
    def label(self) -> str:
        return self.trial.label

    def seed_accuracy(self, model: str) -> Float64[np.ndarray, "seeds n"]:
        """Test accuracy by (seed, client) at the chosen round."""
        return np.stack([h.accuracy["test", model][self.at].numpy() for h in self.trial.histories])

    def window(
        self, model: str
    ) -> tuple[Float64[np.ndarray, " seeds"], Float64[np.ndarray, " seeds"]]:
        """Test mean and variance over clients, averaged over the evaluated rounds that lie within
        an eighth of the run from the chosen one."""
        rounds = np.array(self.trial.summary.rounds)
        assert self.at is not None
        near = np.abs(rounds - rounds[self.at]) <= rounds[-1] / 8
        tables = np.stack([h.accuracy["test", model].numpy() for h in self.trial.histories])
        means, variances = mean_and_variance(tables)
        return means[:, near].mean(1), variances[:, near].mean(1)

    def late(self, model: str) -> Float64[np.ndarray, "rounds seeds n"]:
        """Test accuracy in the last quarter of the rounds: the same rounds for every method."""
        tables = [h.accuracy["test", model].numpy() for h in self.trial.histories]
        return np.stack(tables, axis=1)[late_rounds(np.array(self.trial.summary.rounds))]

    def samples(self) -> Int64[np.ndarray, " n"]:
        return self.trial.histories[0].samples["test"].numpy()


def late_rounds(evaluated: Int64[np.ndarray, " rounds"]) -> Bool[np.ndarray, " rounds"]:
    """Those in the last quarter of the run."""
    return evaluated > 0.75 * evaluated[-1]


def choose(trials: Iterable[Trial], criterion: Criterion) -> list[Result]:
    """The best configuration of each method on validation data, in the order of the trials.

    Without validation data there is nothing to choose by: each method may have one configuration,
    and its last round counts."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.label, []).append(trial)
    blind = not validated([t for group in groups.values() for t in group], criterion.model)
    results = []
    for label, group in groups.items():
        if blind:
            results.append(_only(label, group))
            continue
        choice: Choice = best([t.validation(criterion.model) for t in group], criterion)
        failed = choice.score == float("-inf")
        results.append(Result(group[choice.number], None if failed else choice.at, len(group)))
    return results


def validated(trials: Sequence[Trial], model: str) -> bool:
    """Whether there are validation data to choose by (of trials that all diverged: nobody asks)."""
    return all(trial.validated(model) for trial in trials if not trial.diverged)


def _only(label: str, group: Sequence[Trial]) -> Result:
    """After the last round: what is left where nothing was validated."""
    if len(group) > 1:
        raise BadInput(
            f"no validation data to choose among the {len(group)} configurations of {label}: run "
            'with a validation part in data.split and evaluate.splits = ["valid", "test"], or one '
            "configuration of each method"
        )
    (trial,) = group
    return Result(trial, None if trial.diverged else len(trial.summary.rounds) - 1, 1)


def result_columns(primary: str, validation: bool = True) -> tuple[Column, ...]:
    """Columns for the model that the protocol is about; the other model stands behind it."""
    which = {"global": "the global model", "local": "each client's own model after its local work"}
    other = "local" if primary == "global" else "global"
    short = {"global": "global", "local": "own"}[other]
    return (
        Column("accuracy", "accuracy %", 2, f"mean over clients, test data, of {which[primary]}",
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
        Column("other_accuracy", f"{short} acc. %", 2, f"test accuracy of {which[other]}",
               "mean"),
        Column("other_variance", f"{short} var.", 3, f"variance over clients for {which[other]}",
               "variance_over_clients"),
        Column("window_accuracy", "window acc. %", 2,
               "the accuracy averaged over the evaluated rounds around the chosen one, a quarter "
               "of the run: how far the chosen round was lucky", "mean"),
        Column("window_variance", "window var.", 3, "the variance, averaged likewise",
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
    paper: Mapping[str, Printed] | None = None,
    validation: bool = True,
) -> Table:
    """Mean ± standard error over seeds, marked where a method is clearly ahead of all others.

    `validation`: whether there were validation data to choose by."""
    paper = paper or {}
    marks = _marks(results, primary)
    rows = [_row(r, primary, paper.get(r.label), marks) for r in results]
    used = {key for row in rows for key in row.cells}
    columns = [column for column in result_columns(primary, validation) if column.key in used]
    if any(cell == UNDEFINED for row in rows for cell in row.cells.values()):
        notes = [*notes, WHEN_UNDEFINED]
    return Table(title, columns, rows, notes)


def shorten(table: Table, keys: Sequence[str] = SHORT, explain: bool = True) -> Table:
    """The columns that fit a terminal, with or without their definitions below."""
    kept = [c if explain else replace(c, definition="") for c in table.columns if c.key in keys]
    rows = [Row(r.label, {k: v for k, v in r.cells.items() if k in keys}) for r in table.rows]
    return Table(table.title, kept, rows, table.notes)


def _row(
    result: Result, primary: str, printed: Printed | None, marks: Mapping[str, str | None]
) -> Row:
    cells: dict[str, Any] = {"tried": str(result.configurations)}
    if printed is not None:
        cells["paper_accuracy"] = Estimate(printed.accuracy, printed.accuracy_error)
        cells["paper_variance"] = Estimate(printed.variance, printed.variance_error)
    if result.at is None:
        return Row(result.label, {**cells, "accuracy": DIVERGED, "chosen": "all diverged"})
    main = result.trial.test(primary, result.at)
    accuracy, variance = result.window(primary)
    ahead = {key for key, label in marks.items() if label == result.label}
    other = "local" if primary == "global" else "global"
    if other in result.trial.models:
        beside = result.trial.test(other, result.at)
        cells["other_accuracy"] = over_seeds(100 * f.mean for f in beside)
        cells["other_variance"] = _x100(f.variance_over_clients for f in beside)
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


def _marks(results: Sequence[Result], primary: str) -> dict[str, str | None]:
    """Per column the method that is ahead of every other one by more than the paired interval."""
    tables = {r.label: r.seed_accuracy(primary) for r in results if r.at is not None}
    found: dict[str, str | None] = {"accuracy": None, "variance": None, "corrected": None}
    for label, table in tables.items():
        rivals = [t for name, t in tables.items() if name != label]
        pairs = [pair(table, t, results[0].samples()) for t in rivals]
        ahead = {  # nobody is ahead of a method that cannot be compared
            "accuracy": [d is not None and d.accuracy.low > 0 for d in pairs],
            "variance": [d is not None and d.variance.high < 0 for d in pairs],
            "corrected": [d is not None and d.corrected_variance.high < 0 for d in pairs],
        }
        for key, won in ahead.items():
            if won and all(won):
                found[key] = label
    return found


def noise_floor(results: Sequence[Result], model: str = "global") -> float:
    """Mean noise floor of the variance over the chosen configurations, fraction²."""
    floors = [f.noise_floor for r in results if r.at is not None for f in r.trial.test(model, r.at)]
    return float(np.mean(floors)) if floors else float("nan")
