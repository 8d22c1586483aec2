"""Two methods on the same clients and seeds: paired differences, who gains and who pays.

Unpaired intervals of two methods nearly always overlap, because clients differ far more from each
other than methods do. The same clients, test samples and seeds cancel that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from fairvar import rng
from fairvar.errors import BadInput


class Difference(NamedTuple):
    """A − B with a 95 % interval; `clear` if the interval leaves zero out."""

    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Paired:
    """A against B. Accuracies as fractions, variances over clients as fraction²."""

    accuracy: Difference
    variance: Difference
    corrected_variance: Difference
    worst_10_percent: Difference
    by_client: Float[np.ndarray, " n"]  # mean over seeds of A − B; NaN where not measured
    standard_error_by_client: Float[np.ndarray, " n"]  # over seeds; NaN for a single seed

    @property
    def gaining(self) -> list[int]:
        """Clients better off under A, most first."""
        return [int(i) for i in np.argsort(-self.by_client) if self.by_client[i] > 0]

    @property
    def paying(self) -> list[int]:
        """Clients worse off under A, most first."""
        return [int(i) for i in np.argsort(self.by_client) if self.by_client[i] < 0]


def compare(
    a: Float[np.ndarray, "seeds n"],
    b: Float[np.ndarray, "seeds n"],
    samples: Int64[np.ndarray, " n"],
    resamples: int = 2000,
    seed: int = 0,
) -> Paired:
    """Accuracies by (seed, client) of two methods; the same seeds and clients in the same order.

    Intervals by bootstrap: seeds and clients are drawn with replacement, the same draw for both.
    """
    if a.shape != b.shape:
        raise BadInput(f"cannot pair {a.shape} with {b.shape} (seeds, clients)")
    measured = np.isfinite(a).all(0) & np.isfinite(b).all(0) & (samples > 0)
    if measured.sum() < 2:
        raise BadInput("fewer than two clients were measured under both methods")
    p, q, n = a[:, measured], b[:, measured], samples[measured]
    generator = rng.stream(seed, "paired", *p.shape)
    rows = generator.integers(len(p), size=(resamples, len(p), 1))
    columns = generator.integers(p.shape[1], size=(resamples, 1, p.shape[1]))
    drawn = _numbers(p[rows, columns], n[columns]) - _numbers(q[rows, columns], n[columns])
    seen = _numbers(p[None], n[None, None]) - _numbers(q[None], n[None, None])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=1)
    found = [Difference(*map(float, t)) for t in zip(seen[:, 0], low, high, strict=True)]
    change = np.full(a.shape[1], np.nan)
    change[measured] = (p - q).mean(0)
    error = np.full(a.shape[1], np.nan)
    if len(p) > 1:
        error[measured] = (p - q).std(0, ddof=1) / np.sqrt(len(p))
    accuracy, variance, corrected, worst = found
    return Paired(accuracy, variance, corrected, worst, change, error)


def _numbers(
    p: Float[np.ndarray, "draws seeds n"], n: Int64[np.ndarray, "draws one n"]
) -> Float[np.ndarray, "4 draws"]:
    """(mean, variance, corrected variance, worst tenth) over clients, averaged over seeds."""
    variance = p.var(2, ddof=1)
    noise = (p * (1 - p) / np.maximum(n - 1, 1)).mean(2)
    tenth = -(-p.shape[2] // 10)
    worst = np.partition(p, tenth - 1, axis=2)[:, :, :tenth].mean(2)
    return np.stack([p.mean(2), variance, variance - noise, worst]).mean(2)
