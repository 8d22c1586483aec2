"""From trained runs to what a reader sees: choose on validation, report on test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from fairvar.metrics import variance_in_units
from fairvar.report.paired import compare
from fairvar.report.paper import Printed
from fairvar.report.table import Column, Estimate, Row, Table, mean_and_standard_error
from fairvar.report.trial import Trial
from fairvar.select import Choice, Criterion, best


@dataclass(frozen=True)
class Result:
    """The chosen trial of one method. `at` is None if all its configurations diverged."""

    trial: Trial
    at: int | None
    configurations: int

    @property
    def label(self) -> str:
        return self.trial.label

    def client_accuracy(self, model: str) -> Float64[np.ndarray, " n"] | None:
        """Test accuracy of every client, averaged over seeds."""
        if self.at is None:
            return None
        tables = [h.accuracy["test", model][self.at].numpy() for h in self.trial.histories]
        return np.mean(tables, axis=0)

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
        means, variances = np.nanmean(tables, axis=2), np.nanvar(tables, axis=2, ddof=1)
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
    """The best configuration of each method on validation data, in the order of the trials."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.label, []).append(trial)
    results = []
    for group in groups.values():
        choice: Choice = best([t.validation(criterion.model) for t in group], criterion)
        failed = choice.score == float("-inf")
        results.append(Result(group[choice.number], None if failed else choice.at, len(group)))
    return results


def result_columns(primary: str) -> tuple[Column, ...]:
    """Columns for the model that the protocol is about; the other model stands behind it."""
    which = {"global": "the global model", "local": "each client's own model after its local work"}
    other = "local" if primary == "global" else "global"
    short = {"global": "global", "local": "own"}[other]
    return (
        Column("accuracy", "accuracy %", 2, f"mean over clients, test data, of {which[primary]}"),
        Column("variance", "variance ×100", 3,
               "sample variance over clients (ddof 1) of that accuracy, fraction² × 100"),
        Column("noise_floor", "noise floor", 3, "what finite test sets add by chance"),
        Column("corrected", "corrected", 3, "the variance less its noise floor"),
        Column("interval", "95 % interval", 3,
               "bootstrap interval over clients of the corrected variance, mean over seeds"),
        Column("worst", "worst 10 %", 2, "mean accuracy of the worst tenth of the clients"),
        Column("other_accuracy", f"{short} acc. %", 2, f"test accuracy of {which[other]}"),
        Column("other_variance", f"{short} var.", 3, f"variance over clients for {which[other]}"),
        Column("window_accuracy", "window acc. %", 2,
               "the accuracy averaged over the evaluated rounds around the chosen one, a quarter "
               "of the run: how far the chosen round was lucky"),
        Column("window_variance", "window var.", 3, "the variance, averaged likewise"),
        Column("paper_accuracy", "paper acc. %", 2, "the accuracy that the paper prints"),
        Column("paper_variance", "paper var.", 2, "the variance that the paper prints"),
        Column("seeds", "seeds", 0, "runs behind the chosen configuration"),
        Column("tried", "tried", 0, "configurations among which it was chosen"),
        Column("chosen", "chosen", 0, "configuration and round chosen on validation data"),
    )  # fmt: skip


SHORT = ("accuracy", "variance", "corrected", "worst", "other_accuracy", "other_variance", "chosen")


def result_table(
    results: Sequence[Result],
    title: str,
    notes: Sequence[str] = (),
    primary: str = "global",
    paper: Mapping[str, Printed] | None = None,
) -> Table:
    """Mean ± standard error over seeds, marked where a method is clearly ahead of all others."""
    paper = paper or {}
    marks = _marks(results, primary)
    rows = [_row(r, primary, paper.get(r.label), marks) for r in results]
    used = {key for row in rows for key in row.cells}
    columns = [column for column in result_columns(primary) if column.key in used]
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
        return Row(result.label, {**cells, "accuracy": "div.", "chosen": "all diverged"})
    main = result.trial.test(primary, result.at)
    other = result.trial.test("local" if primary == "global" else "global", result.at)

    def x100(key: str, values: Iterable[float]) -> Estimate:
        marked = marks.get(key) == result.label
        return mean_and_standard_error((variance_in_units(v, "x100") for v in values), marked)

    low, high = np.mean([f.corrected_variance_interval for f in main], axis=0) * 100
    accuracy, variance = result.window(primary)
    best = marks.get("accuracy") == result.label
    return Row(
        result.label,
        {
            **cells,
            "accuracy": mean_and_standard_error((100 * f.mean for f in main), best),
            "variance": x100("variance", (f.variance_over_clients for f in main)),
            "noise_floor": x100("noise_floor", (f.noise_floor for f in main)),
            "corrected": x100("corrected", (f.corrected_variance for f in main)),
            "interval": f"{low:.3f} to {high:.3f}",
            "worst": mean_and_standard_error(100 * f.worst_10_percent for f in main),
            "other_accuracy": mean_and_standard_error(100 * f.mean for f in other),
            "other_variance": x100("other", (f.variance_over_clients for f in other)),
            "window_accuracy": mean_and_standard_error(100 * a for a in accuracy),
            "window_variance": x100("window", variance),
            "seeds": str(len(result.trial.histories)),
            "chosen": result.trial.describe(result.at),
        },
    )


def _marks(results: Sequence[Result], primary: str) -> dict[str, str | None]:
    """Per column the method that is ahead of every other one by more than the paired interval."""
    tables = {r.label: r.seed_accuracy(primary) for r in results if r.at is not None}
    found: dict[str, str | None] = {"accuracy": None, "variance": None, "corrected": None}
    for label, table in tables.items():
        rivals = [t for name, t in tables.items() if name != label and t.shape == table.shape]
        pairs = [compare(table, t, results[0].samples()) for t in rivals]
        ahead = {
            "accuracy": [d.accuracy.low > 0 for d in pairs],
            "variance": [d.variance.high < 0 for d in pairs],
            "corrected": [d.corrected_variance.high < 0 for d in pairs],
        }
        for key, won in ahead.items():
            if won and all(won):
                found[key] = label
    return found


def noise_floor(results: Sequence[Result], model: str = "global") -> float:
    """Mean noise floor of the variance over the chosen configurations, fraction²."""
    floors = [f.noise_floor for r in results if r.at is not None for f in r.trial.test(model, r.at)]
    return float(np.mean(floors)) if floors else float("nan")
