"""Figures of the chosen configurations: the arrays for `figures` and `pareto`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fairvar.metrics import mean_and_variance
from fairvar.report import figures
from fairvar.report.compare import late_differences
from fairvar.report.pareto import Point, front
from fairvar.report.result_tables import noise_floor
from fairvar.report.style import Figure
from fairvar.report.table import mean_and_standard_error
from fairvar.runs.trials import Result, Trial

NAMES = {"local": "local models", "global": "global model"}


def accuracy_figure(results: Sequence[Result], model: str = "global") -> Figure:
    """Test accuracy from the worst to the best served client, a panel per method."""
    found = {r.label: r.seed_accuracy(model) for r in results}
    return figures.client_accuracies(found, f"test accuracy on the client (%), {NAMES[model]}")


def front_figure(
    trials: Sequence[Trial], results: Sequence[Result], model: str = "global"
) -> Figure:
    """Every configuration after its last round, and the chosen ones at the chosen round."""
    return front(list(_points(trials, results, model)), noise_floor(results, model), NAMES[model])


def _points(trials: Sequence[Trial], results: Sequence[Result], model: str) -> Iterator[Point]:
    for trial in trials:
        if not trial.diverged:
            yield Point(trial.label, *trial.summary.last[model], chosen=False)
    for result in results:
        if result.at is not None:
            yield _point(result.trial, result.at, model)


def curves_figure(results: Sequence[Result], model: str = "global") -> Figure:
    """Mean test accuracy over clients by round, with the range over seeds."""
    rounds = results[0].trial.histories[0].evaluated.numpy()
    mean, low, high = {}, {}, {}
    for result in results:
        tables = [h.accuracy["test", model].numpy() for h in result.trial.histories]
        by_seed = 100 * mean_and_variance(np.stack(tables))[0]
        mean[result.label] = by_seed.mean(0)
        low[result.label], high[result.label] = by_seed.min(0), by_seed.max(0)
    label = f"mean test accuracy over clients (%),\n{NAMES[model]}"
    return figures.learning_curves(rounds, mean, low, high, label)


def fedavg_figure(results: Sequence[Result]) -> Figure | None:
    """Every method − FedAvg, late; None if there is nothing to draw."""
    found = late_differences(results)
    panels, units = {}, {}
    for model in ("local", "global"):
        pairs = {label: pair for (label, seen), pair in found.items() if seen == model}
        if not pairs:
            continue
        for metric, unit in (("accuracy", "points"), ("variance", "variance × 100")):
            title = f"{NAMES[model]}, {metric}"
            values = {label: getattr(pair, metric) for label, pair in pairs.items()}
            panels[title] = {k: (100 * d.value, 100 * d.low, 100 * d.high)
                             for k, d in values.items()}  # fmt: skip
            units[title] = unit
    return figures.differences(panels, units) if found else None


def weights_figure(result: Result) -> Figure:
    """The server's weights of the first seed, in the rounds whose weights were stored."""
    history = result.trial.histories[0]
    title = f"{result.label}, weights, seed {result.trial.seeds[0]}"
    return figures.weights_over_rounds(history.weights.numpy(), title, history.observed.numpy() + 1)


def _point(trial: Trial, at: int, model: str) -> Point:
    found = trial.test(model, at)
    accuracy = mean_and_standard_error(f.mean for f in found)
    variance = mean_and_standard_error(f.variance_over_clients for f in found)
    errors = accuracy.standard_error, variance.standard_error
    return Point(trial.label, accuracy.value, variance.value, True, *errors)


def partition_figure(name: str, counts: np.ndarray, passport: Mapping[str, Any]) -> Figure:
    """Training samples of each class at each client, with the heterogeneity numbers."""
    sizes = counts.sum(1)
    numbers = {"training samples per client": f"{sizes.min()} to {sizes.max()}"}
    for key, label, form in (
        ("mean_total_variation", "total variation from pooled labels", "{:.2f}"),
        ("effective_classes", "effective classes per client", "{:.1f}"),
        ("majority_share", "share of the main class", "{:.0%}"),
    ):
        if key in passport:
            numbers[label] = form.format(passport[key])
    return figures.partition(counts, f"{name}, {len(counts)} clients", numbers)
