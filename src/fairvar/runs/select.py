"""Choosing hyper-parameters and the round on validation data.

Selection gets `Validation` records, which hold no test numbers, so it cannot depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64

from fairvar.common.validation import Checked, Count, NonNegative
from fairvar.errors import BadInput
from fairvar.metrics import mean_and_variance


class Criterion(Checked, frozen=True, kw_only=True):
    """Score of a round: mean accuracy − t·√(variance over clients / m), both averaged over seeds.
    Of a score where lower is better, curves are given with a minus.

    The paper's rule with t = 1.96 and m = the number of seeds. It divides a variance over clients
    by a number of seeds, so it is a heuristic and not a confidence bound; `m` replaces the divisor.
    `unit = "mixed"` is percent accuracy with the paper's ×100 variance: a ten times weaker penalty
    that ranks differently.
    """

    __where__: ClassVar[str | None] = "select"

    t: NonNegative = 1.96  # factor of the penalty; 0 chooses by the mean alone
    m: Count | None = None  # divisor of the variance; by default the number of seeds
    unit: Literal["fraction", "mixed"] = "fraction"  # mixed: percent and variance ×100
    model: Literal["global", "local", "personal"] = "global"  # whose scores choose
    over: tuple[str, ...] | None = None  # other keys that a sweep varied, to choose among values

    def score(self, curve: Curve, seeds: int) -> Float64[np.ndarray, " rounds"]:
        """One score per evaluated round. A single client has no variance and no penalty."""
        penalty = self.t * np.sqrt(np.nan_to_num(curve.variance) / (self.m or seeds))
        return curve.mean - penalty * (0.1 if self.unit == "mixed" else 1.0)


@dataclass(frozen=True)
class Curve:
    """Accuracy, or another score, by evaluated round: mean and sample variance over clients,
    averaged over seeds."""

    mean: Float64[np.ndarray, " rounds"]
    variance: Float64[np.ndarray, " rounds"]

    @staticmethod
    def of(accuracy: Float64[np.ndarray, "seeds rounds n"]) -> Curve:
        """Clients without samples (NaN) do not count."""
        mean, variance = mean_and_variance(accuracy)
        return Curve(mean.mean(0), variance.mean(0))


@dataclass(frozen=True)
class Validation:
    """All that selection sees of one configuration: its seeds on validation data."""

    rounds: Sequence[int]  # evaluated rounds, the same for all seeds
    curve: Curve | None  # higher is better; None: some seed diverged
    seeds: int
    strength: float = 0.0  # ties go to the weaker regularisation


class Choice(NamedTuple):
    """`candidates[number]` at `rounds[at]`; score −inf if every candidate diverged."""

    number: int
    at: int
    score: float


def best(candidates: Sequence[Validation], criterion: Criterion) -> Choice:
    """The round with the highest score, common to all seeds, of the best configuration.

    Ties: lower variance over clients, then the smaller strength, then the earlier round.
    """
    if not candidates:
        raise BadInput("nothing to choose from: no configuration was run")
    found = Choice(0, -1, float("-inf"))
    key: tuple[float, float, float, float] | None = None
    for number, candidate in enumerate(candidates):
        if candidate.curve is None:
            continue
        scores = criterion.score(candidate.curve, candidate.seeds)
        variance = np.nan_to_num(candidate.curve.variance)
        for at, score in enumerate(scores):
            rank = (-score, variance[at], candidate.strength, candidate.rounds[at])
            if np.isfinite(score) and (key is None or rank < key):
                key, found = rank, Choice(number, at, float(score))
    return found
