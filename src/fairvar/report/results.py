"""From trained runs to what a reader sees: choose on validation, report on test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from fairvar.history import History
from fairvar.methods.base import Method
from fairvar.metrics import Fairness, variance_in_units
from fairvar.report.table import Column, Row, Table, mean_and_standard_error
from fairvar.select import Choice, Criterion, Validation, best


@dataclass(frozen=True)
class Trial:
    """One configuration of one method, trained with every seed."""

    method: Method
    lr: float
    histories: Sequence[History]

    @property
    def label(self) -> str:
        return self.method.label

    @property
    def knob(self) -> tuple[str, Any] | None:
        """The method's fairness hyper-parameter and its value."""
        name = self.method.fairness_knob
        return None if name is None else (name, getattr(self.method, name))

    @property
    def diverged(self) -> bool:
        return any(h.diverged_at is not None for h in self.histories)

    def validation(self, model: str) -> Validation:
        """The part of the trial that selection may see."""
        strength = self.knob[1] if self.knob and isinstance(self.knob[1], float) else 0.0
        if self.diverged:
            return Validation((), None, strength)
        accuracy = np.stack([h.accuracy["valid", model].numpy() for h in self.histories])
        return Validation(self.histories[0].evaluated.tolist(), accuracy, strength)

    def test(self, model: str, at: int) -> list[Fairness]:
        """Test fairness of every seed at one evaluated round."""
        return [h.fairness("test", model, at) for h in self.histories]

    def describe(self, at: int | None = None) -> str:
        parts = [f"lr {self.lr:g}"]
        if self.knob is not None:
            name, value = self.knob
            parts.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
        if at is not None:
            parts.append(f"round {int(self.histories[0].evaluated[at])}")
        return ", ".join(parts)


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

    def samples(self) -> Int64[np.ndarray, " n"]:
        return self.trial.histories[0].samples["test"].numpy()


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


COLUMNS = (
    Column("accuracy", "accuracy %", 2, "mean over clients of the global model's test accuracy"),
    Column("variance", "variance ×100", 3,
           "sample variance over clients (ddof 1) of that accuracy, fraction² × 100"),
    Column("corrected", "corrected", 3,
           "the variance less its noise floor, i.e. what finite test sets add by chance"),
    Column("worst", "worst 10 %", 2, "mean accuracy of the worst tenth of the clients"),
    Column("own_accuracy", "own acc. %", 2,
           "the same for each client's own model after its local step, before averaging"),
    Column("own_variance", "own var.", 3, "variance over clients of the own models' accuracy"),
    Column("chosen", "chosen", 0, "configuration and round chosen on validation data"),
)  # fmt: skip


def result_table(results: Sequence[Result], title: str, notes: Sequence[str] = ()) -> Table:
    """Mean ± standard error over seeds; methods whose every configuration diverged say so."""
    return Table(title, COLUMNS, [_row(result) for result in results], notes)


def _row(result: Result) -> Row:
    if result.at is None:
        return Row(result.label, {"accuracy": "div.", "chosen": "every configuration diverged"})
    shared = result.trial.test("global", result.at)
    own = result.trial.test("local", result.at)

    def x100(values: Iterable[float]) -> Any:
        return mean_and_standard_error(variance_in_units(v, "x100") for v in values)

    return Row(
        result.label,
        {
            "accuracy": mean_and_standard_error(100 * f.mean for f in shared),
            "variance": x100(f.variance_over_clients for f in shared),
            "corrected": x100(f.corrected_variance for f in shared),
            "worst": mean_and_standard_error(100 * f.worst_10_percent for f in shared),
            "own_accuracy": mean_and_standard_error(100 * f.mean for f in own),
            "own_variance": x100(f.variance_over_clients for f in own),
            "chosen": result.trial.describe(result.at),
        },
    )


def noise_floor(results: Sequence[Result]) -> float:
    """Mean noise floor of the variance over the chosen configurations, fraction²."""
    floors = [
        f.noise_floor for r in results if r.at is not None for f in r.trial.test("global", r.at)
    ]
    return float(np.mean(floors)) if floors else float("nan")
