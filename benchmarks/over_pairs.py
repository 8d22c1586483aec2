"""Several methods on several pairs of (partition, seed): differences, intervals and p-values.

Each pair has clients of its own, so pairs are drawn with replacement and, within each, clients. All
methods share the draws, so that any difference of means over methods is paired. Resampling a few
pairs gives intervals that are too narrow: every comparison is also made by Student's t over the
differences of the pairs, and the larger p-value counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64

from fairvar.common import rng
from fairvar.errors import BadInput
from fairvar.metrics import binomial_noise, mean_and_variance

DRAWS = 10_000
Scores = Float[np.ndarray, "rounds n"]
QUANTITIES, CORRECTED = ("accuracy", "variance"), "corrected"


@dataclass(frozen=True, eq=False)
class Window:
    """One method on one pair: test accuracies of the window's rounds by client (fractions)."""

    scores: Scores
    samples: Int64[np.ndarray, " n"]
    partition: str  # sha256: pairs of one partition have the same clients


@dataclass(frozen=True)
class Tested:
    """A difference with its 95 % interval, which is the wider of both, and p-values of the tails:
    that it is not above, or not below, the bound. Tails are doubled, so that p ≤ 0.05 belongs to
    a 95 % interval."""

    value: float
    low: float
    high: float
    above: float
    below: float


@dataclass(frozen=True, eq=False)
class OverPairs:
    """Mean and variance over clients, averaged over the window, of every method on the common
    pairs; as they are (the variance also corrected) and redrawn."""

    seen: Mapping[str, Mapping[str, Float[np.ndarray, " pairs"]]]  # by quantity and method
    drawn: Mapping[str, Mapping[str, Float[np.ndarray, " draws"]]]

    @staticmethod
    def of(windows: Mapping[str, Mapping[int, Window]], draws: int = DRAWS) -> OverPairs:
        """`windows`: by method and pair. Only pairs that every method has are compared."""
        pairs = sorted(set.intersection(*(set(found) for found in windows.values())))
        if not pairs:
            raise BadInput("the methods have no pair of partition and seed in common")
        random = rng.stream(0, "over pairs", len(pairs))
        turns = _counts(random.integers(len(pairs), size=(draws, len(pairs))), len(pairs))
        turns /= len(pairs)
        quantities = (*QUANTITIES, CORRECTED)
        seen: dict[str, dict[str, list[float]]] = {q: {m: [] for m in windows} for q in quantities}
        drawn = {q: {m: np.zeros(draws) for m in windows} for q in QUANTITIES}
        clients: dict[tuple[str, int], Float[np.ndarray, "draws n"]] = {}
        for place, pair in enumerate(pairs):
            found = {method: by_pair[pair] for method, by_pair in windows.items()}
            common = _common(list(found.values()))
            key = next(iter(found.values())).partition, int(common.sum())
            if key not in clients:  # the same clients are drawn together
                chosen = random.integers(key[1], size=(draws, key[1]))
                clients = {key: _counts(chosen, key[1])}
            for method, window in found.items():
                scores = window.scores[:, common]
                redrawn = _redrawn(scores, clients[key])
                noise = float(binomial_noise(scores, window.samples[common]).mean())
                for quantity, now, again in zip(QUANTITIES, mean_and_variance(scores), redrawn,
                                                strict=True):  # fmt: skip
                    seen[quantity][method].append(float(now.mean()))
                    drawn[quantity][method] += turns[:, place] * again
                seen[CORRECTED][method].append(seen["variance"][method][-1] - noise)
        arrays = {
            q: {m: np.array(v) for m, v in by_method.items()} for q, by_method in seen.items()
        }
        return OverPairs(arrays, drawn)

    @property
    def methods(self) -> list[str]:
        return list(self.seen["accuracy"])

    @property
    def pairs(self) -> int:
        return len(next(iter(self.seen["accuracy"].values())))

    def mean(self, quantity: str, method: str) -> float:
        return float(self.seen[quantity][method].mean())

    def test(self, quantity: str, weights: Mapping[str, float], bound: float = 0.0) -> Tested:
        """The sum of weight × method, such as {"FairGrad": 1, "FedAvg": -1}, against a bound."""
        by_pair = sum((w * self.seen[quantity][m] for m, w in weights.items()), np.zeros(()))
        drawn = sum((w * self.drawn[quantity][m] for m, w in weights.items()), np.zeros(()))
        value, k = float(by_pair.mean()), len(by_pair)
        low, high = map(float, np.percentile(drawn, [2.5, 97.5]))
        above = (1 + int((drawn <= bound).sum())) / (1 + len(drawn))
        below = (1 + int((drawn >= bound).sum())) / (1 + len(drawn))
        if k == 1:  # nothing is known about other pairs
            return Tested(value, -math.inf, math.inf, 1.0, 1.0)
        error = float(by_pair.std(ddof=1)) / math.sqrt(k)
        wide = t_quantile(0.975, k - 1) * error
        tail = t_tail((value - bound) / max(error, 1e-12), k - 1)
        above, below = max(above, tail), max(below, 1 - tail)
        return Tested(value, min(low, value - wide), max(high, value + wide),
                      min(1.0, 2 * above), min(1.0, 2 * below))  # fmt: skip


def _counts(chosen: Int64[np.ndarray, "draws k"], size: int) -> Float[np.ndarray, "draws size"]:
    """How often each was drawn."""
    draws = len(chosen)
    flat = (chosen + size * np.arange(draws)[:, None]).ravel()
    return np.bincount(flat, minlength=draws * size).reshape(draws, size).astype(float)


def _common(windows: Sequence[Window]) -> np.ndarray:
    """The clients that were measured under every method."""
    first = windows[0]
    for window in windows:
        if window.partition != first.partition or (window.samples != first.samples).any():
            raise BadInput("methods of one pair have different partitions or test samples: their "
                           "clients cannot be paired")  # fmt: skip
    measured = np.all([np.isfinite(w.scores).all(0) for w in windows], axis=0) & (first.samples > 0)
    if measured.sum() < 2:
        raise BadInput("fewer than two clients of a pair were measured under every method")
    return np.asarray(measured)


def _redrawn(
    scores: Scores, times: Float[np.ndarray, "draws n"]
) -> tuple[Float[np.ndarray, " draws"], Float[np.ndarray, " draws"]]:
    """Mean and variance over redrawn clients, averaged over rounds."""
    n, centre = scores.shape[1], float(scores.mean())
    moved = scores - centre  # so that the difference of squares loses no digits
    mean, square = times @ moved.T / n, times @ (moved**2).T / n
    return mean.mean(1) + centre, ((square - mean**2) * n / (n - 1)).mean(1)


def t_tail(t: float, df: int) -> float:
    """P(T > t) of Student's t with a whole number of degrees of freedom (a finite sum)."""
    angle = math.atan(t / math.sqrt(df))
    term, total = (1.0, 1.0) if df % 2 == 0 else (math.cos(angle), math.cos(angle))
    for k in range(1 if df % 2 == 0 else 2, df - 2, 2):
        term *= math.cos(angle) ** 2 * k / (k + 1)
        total += term
    if df % 2:
        inside = 2 / math.pi * (angle + math.sin(angle) * total * (df > 1))
    else:
        inside = math.sin(angle) * total
    return (1 - inside) / 2


def t_quantile(share: float, df: int) -> float:
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - t_tail(middle, df) < share else (low, middle)
    return high


def simes(p: Sequence[float]) -> float:
    """That not all of several hypotheses are true."""
    return min((1.0, *(len(p) * each / (i + 1) for i, each in enumerate(sorted(p)))))


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the given order."""
    order, found, least = sorted(range(len(p)), key=lambda i: p[i]), [1.0] * len(p), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[place]))
        found[place] = least
    return found
