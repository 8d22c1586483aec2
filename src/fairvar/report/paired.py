"""Two methods on the same clients and seeds: paired differences, who gains and who pays.

Unpaired intervals of two methods nearly always overlap, because clients differ far more from each
other than methods do. The same clients, test samples and seeds cancel that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64

from fairvar.common import rng
from fairvar.errors import BadInput
from fairvar.metrics import binomial_noise
from fairvar.scores import ACCURACY, Metric

DRAWN_AT_ONCE = 1 << 24  # clients: with many of them, 2000 draws at once do not fit in memory


class Difference(NamedTuple):
    """A − B with a 95 % interval; `clear` if the interval leaves zero out. nan: not defined."""

    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Paired:
    """A against B. Accuracies as fractions, variances over clients as fraction²; other scores in
    their own unit, without a corrected variance."""

    accuracy: Difference  # of the mean score
    variance: Difference
    corrected_variance: Difference
    by_client: Float[np.ndarray, " n"]  # mean of A − B; NaN where not measured
    standard_error_by_client: Float[np.ndarray, " n"]  # over seeds; NaN for a single seed
    worst_10_percent: Difference | None = None  # None for an average over rounds
    metric: Metric = ACCURACY

    @property
    def over_rounds(self) -> bool:
        return self.worst_10_percent is None

    @property
    def gaining(self) -> list[int]:
        """Clients better off under A, most first."""
        gain = self.metric.sign * self.by_client
        return [int(i) for i in np.argsort(-gain) if gain[i] > 0]

    @property
    def paying(self) -> list[int]:
        """Clients worse off under A, most first."""
        gain = self.metric.sign * self.by_client
        return [int(i) for i in np.argsort(gain) if gain[i] < 0]


def compare(
    a: Float[np.ndarray, "*rounds seeds n"],
    b: Float[np.ndarray, "*rounds seeds n"],
    samples: Int64[np.ndarray, " n"],
    resamples: int = 2000,
    seed: int = 0,
    metric: Metric = ACCURACY,
) -> Paired:
    """Scores by (seed, client) of two methods; the same seeds and clients in the same order.

    Intervals by bootstrap: seeds and clients are drawn with replacement, the same draw for both.
    With several rounds, by (round, seed, client), each number is made in every round, then averaged
    over them, because accuracies swing by points from one evaluation to the next. The rounds of a
    draw stay together.
    """
    measured = _measured(a, b, samples)
    p, q = (v[..., measured].reshape(-1, v.shape[-2], measured.sum()) for v in (a, b))
    n, (_, seeds, clients) = samples[measured], p.shape

    def differ(times: Float[np.ndarray, "draws n"]) -> Float[np.ndarray, "3 draws seeds"]:
        one, other = (np.stack(_over_rounds(v, n, times, metric)) for v in (p, q))
        return one - other

    def tenths(draw: object) -> Float[np.ndarray, " draws"]:
        sign = metric.sign  # the worst are the highest where lower is better
        return sign * (_worst(sign * p[0][draw]) - _worst(sign * q[0][draw]))

    drawn, worst_drawn = [], []
    for rows, columns in _draw(seeds, clients, resamples, seed):
        # How often each seed and client was drawn: resampled means are then matrix products.
        times, turns = _counts(columns[:, 0], clients), _counts(rows[:, :, 0], seeds) / seeds
        drawn.append((turns * differ(times)).sum(2))
        if a.ndim == 2:
            worst_drawn.append(tenths((rows, columns)))
    seen = differ(np.ones((1, clients))).mean((1, 2))
    change, error = np.full((2, len(samples)), np.nan)
    by_seed = (p - q).mean(0)
    change[measured] = by_seed.mean(0)
    if seeds > 1:
        error[measured] = by_seed.std(0, ddof=1) / np.sqrt(seeds)
    worst = None
    if a.ndim == 2:
        (worst,) = _differences(tenths(None), np.concatenate(worst_drawn)[None])
    accuracy, variance, corrected = _differences(seen, np.concatenate(drawn, 1))
    return Paired(accuracy, variance, corrected, change, error, worst, metric)


def _measured(
    a: Float[np.ndarray, ...],
    b: Float[np.ndarray, ...],
    samples: Int64[np.ndarray, " n"],
) -> Bool[np.ndarray, " n"]:
    """Clients that have an accuracy on both sides in every round and seed."""
    if a.shape != b.shape:
        raise BadInput(f"cannot pair {a.shape} with {b.shape} (seeds, clients)")
    axes = tuple(range(a.ndim - 1))
    found = np.isfinite(a).all(axes) & np.isfinite(b).all(axes) & (samples > 0)
    if found.sum() < 2:
        raise BadInput("fewer than two clients were measured under both methods")
    return found


def _draw(
    seeds: int, clients: int, resamples: int, seed: int
) -> Iterator[tuple[Int64[np.ndarray, "draws seeds one"], Int64[np.ndarray, "draws one n"]]]:
    """Seeds and clients of all resamples, some at a time."""
    generator = rng.stream(seed, "paired", seeds, clients)
    rows = generator.integers(seeds, size=(resamples, seeds, 1))
    step = max(1, DRAWN_AT_ONCE // clients)
    for some in np.split(rows, range(step, resamples, step)):
        yield some, generator.integers(clients, size=(len(some), 1, clients))


def _differences(
    seen: Float[np.ndarray, " k"], drawn: Float[np.ndarray, "k draws"]
) -> list[Difference]:
    low, high = np.percentile(drawn, [2.5, 97.5], axis=1)
    return [Difference(*map(float, t)) for t in zip(seen, low, high, strict=True)]


def _counts(drawn: Int64[np.ndarray, "draws k"], size: int) -> Float[np.ndarray, "draws size"]:
    places = drawn + size * np.arange(len(drawn))[:, None]
    counts = np.bincount(places.ravel(), minlength=len(drawn) * size)
    return counts.reshape(len(drawn), size).astype(float)


def _over_rounds(
    p: Float[np.ndarray, "rounds seeds n"],
    samples: Int64[np.ndarray, " n"],
    times: Float[np.ndarray, "draws n"],
    metric: Metric,
) -> list[Float[np.ndarray, "draws seeds"]]:
    """Mean, variance and corrected variance over clients, averaged over rounds."""
    rounds, seeds, n = p.shape

    def mean(x: Float[np.ndarray, "rounds seeds n"]) -> Float[np.ndarray, "draws rounds seeds"]:
        found: Float[np.ndarray, "draws k"] = times @ x.reshape(-1, n).T / n
        return found.reshape(-1, rounds, seeds)

    centre = p.mean()  # so that the difference of squares loses no digits
    average = mean(p - centre)
    variance = (mean((p - centre) ** 2) - average**2) * n / (n - 1)
    noise = mean(binomial_noise(p, samples)) if metric.has_noise_floor else np.nan
    return [v.mean(1) for v in (average + centre, variance, variance - noise)]


def _worst(p: Float[np.ndarray, "draws seeds n"]) -> Float[np.ndarray, " draws"]:
    """Mean of the lowest tenth of the clients, averaged over seeds."""
    tenth = -(-p.shape[2] // 10)
    return np.partition(p, tenth - 1, axis=2)[:, :, :tenth].mean((1, 2))
