"""How evenly a model serves its clients: numbers over clients, named so that they tell the axis.

Everything takes lists, numpy arrays or torch tensors and computes in float64. `DEFINITIONS` says
in one line what each number is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairvar import rng
from fairvar.errors import BadInput, unknown

Floats = NDArray[np.float64]
Numbers = ArrayLike | Any  # Any: a torch tensor; this file does not import torch
Number = float | int  # beartype, unlike mypy, does not take an int for a float

DEFINITIONS = {
    "clients": "K: clients with at least one test sample and a finite accuracy",
    "dropped_clients": "clients left out for want of test samples or of a finite accuracy",
    "mean": "(1/K) Σ p_k: every client counts the same",
    "mean_over_samples": "Σ n_k p_k / Σ n_k: every test sample counts the same",
    "variance_over_clients": "Σ (p_k − mean)² / (K − ddof), in fraction²; ddof 1 unless told",
    "noise_floor": "what finite test sets add to the variance: (1/K) Σ p_k(1 − p_k)/(n_k − 1)",
    "corrected_variance": "variance_over_clients − noise_floor: unbiased for the true accuracies",
    "variance_interval": "studentised bootstrap interval of variance_over_clients",
    "corrected_variance_interval": "studentised bootstrap interval of corrected_variance",
    "sd_over_clients": "square root of variance_over_clients",
    "coefficient_of_variation": "sd_over_clients / mean",
    "smallest": "min p_k: the worst-served client",
    "largest": "max p_k: the best-served client",
    "range_over_clients": "largest − smallest",
    "worst_10_percent": "mean of the ceil(K/10) lowest accuracies",
    "best_10_percent": "mean of the ceil(K/10) highest accuracies",
    "gini": "ΣΣ |p_j − p_k| / (2 K² mean): 0 if all are equal, at most 1 − 1/K",
    "jain": "(Σ p_k)² / (K Σ p_k²): 1 if all are equal, at least 1/K",
    "normalised_entropy": "−Σ s_k ln s_k / ln K with shares s_k = p_k / Σ p_j: 1 if all are equal",
    "kl_to_uniform": "Σ s_k ln(K s_k): 0 if all are equal, at most ln K",
    "cosine_to_ones": "cosine between (p_1 … p_K) and (1 … 1): 1 if all are equal",
    "loss_variance": "(1/n) Σ (f_i − F)²: what FairLoss regularises (it adds λ/2 of it)",
    "gradient_variance": "(1/n) Σ ‖∇f_i − ∇F‖²: what FairGrad regularises (it adds γ/2 of it)",
    "worse_than": "fraction of clients whose accuracy is lower than under the other model",
    "pareto_front": "the models that no other beats in accuracy and in variance together",
    "hypervolume": "area of the (accuracy, variance) pairs that some model beats, to a reference",
    "worst_class_of_client": "for each client the accuracy on its worst-served class",
    "epsilon_fair_order": "models with F ≤ min F + ε, by variance over clients, fairest first",
}


@dataclass(frozen=True)
class Fairness:
    """What `fairness` computes; a field is also an item, `f["mean"]`, and `dict(**f)` works.

    Conventions where a formula ends in 0/0:
    - one client: it differs from nobody, so every variance and noise_floor are 0;
    - all accuracies 0: all are equal, so gini, kl_to_uniform and coefficient_of_variation are 0,
      jain, normalised_entropy and cosine_to_ones are 1;
    - fewer than 5 clients: nothing to resample, both intervals are (nan, nan);
    - a client with one test sample: p(1 − p)/(n − 1) is 0/0; the mean of n p(1 − p)/(n − 1) over
      the clients with more samples stands in. If no client has two, noise and spread cannot be
      told apart and noise_floor, corrected_variance and its interval are nan;
    - `samples` not given: those three and mean_over_samples are nan.
    corrected_variance may be negative: that is what makes it unbiased.
    """

    clients: int
    dropped_clients: int
    mean: float
    mean_over_samples: float
    variance_over_clients: float
    noise_floor: float
    corrected_variance: float
    variance_interval: tuple[float, float]
    corrected_variance_interval: tuple[float, float]
    sd_over_clients: float
    coefficient_of_variation: float
    smallest: float
    largest: float
    range_over_clients: float
    worst_10_percent: float
    best_10_percent: float
    gini: float
    jain: float
    normalised_entropy: float
    kl_to_uniform: float
    cosine_to_ones: float

    def keys(self) -> list[str]:
        return [f.name for f in fields(self)]

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)


def fairness(
    accuracy: Numbers,
    samples: Numbers | None = None,
    *,
    ddof: int = 1,
    interval: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Fairness:
    """All fairness numbers of accuracies p_k measured on n_k test samples (`DEFINITIONS`).

        corrected_variance = Σ (p_k − p̄)²/(K − 1) − (1/K) Σ p_k(1 − p_k)/(n_k − 1)
        (ddof 0: both terms times 1 − 1/K)

    The intervals resample clients and studentise, t* = (v* − v)/se*, with se the standard error
    of a mean of (p_k − p̄)² K/(K − 1) − noise_k, and stretch t by 1 + 2/K for small K. Measured
    coverage of the nominal 95 % interval (true accuracies from eight Beta laws of mean 0.5 … 0.9
    and sd 0.05 … 0.2, n_k uniform on 50 … 200, 3000 federations each): K = 50: 93.6 – 95.1 %,
    K = 100: 93.9 – 95.6 %. Percentile intervals cover 82 – 93 %, basic ones 80 – 93 %.
    """
    _check_options(ddof, interval, resamples)
    p, n, dropped = _clients(accuracy, samples)
    K = len(p)
    scale = 1.0 if ddof == 1 and K > 1 else 1 - 1 / K
    noise = scale * _noise(p, n)
    variance = scale * float(_squares(p).mean()) if K > 1 else 0.0
    floor = float(noise.mean())
    few = K < 5
    draw = rng.stream(seed, "fairness", "bootstrap").integers(0, K, (0 if few else resamples, K))
    return Fairness(
        clients=K,
        dropped_clients=dropped,
        mean_over_samples=math.nan if n is None else float(n @ p / n.sum()),
        variance_over_clients=variance,
        noise_floor=floor,
        corrected_variance=variance - floor,
        variance_interval=_interval(p, np.zeros(K), scale, draw, interval),
        corrected_variance_interval=_interval(p, noise, scale, draw, interval),
        sd_over_clients=math.sqrt(variance),
        coefficient_of_variation=math.sqrt(variance) / p.mean() if p.any() else 0.0,
        **_by_rank(np.sort(p)),
        **_evenness(np.sort(p)),
    )


def _check_options(ddof: int, interval: float, resamples: int) -> None:
    if ddof not in (0, 1):
        raise BadInput(f"ddof = {ddof}: use 1 (sample variance) or 0 (population variance)")
    if not 0 < interval < 1:
        raise BadInput(f"interval = {interval}: must lie between 0 and 1, as in 0.95")
    if resamples < 0:
        raise BadInput(f"resamples = {resamples}: must be ≥ 0 (0 leaves the intervals out)")


def _by_rank(p: Floats) -> dict[str, float]:
    """Mean, ends and tenths of accuracies in rising order."""
    tenth = math.ceil(len(p) / 10)
    low, high = float(p[0]), float(p[-1])
    return {
        "mean": float(p.mean()),
        "smallest": low,
        "largest": high,
        "range_over_clients": high - low,
        "worst_10_percent": float(p[:tenth].mean()),
        "best_10_percent": float(p[-tenth:].mean()),
    }


def _evenness(p: Floats) -> dict[str, float]:
    """The indices that depend on shares s_k = p_k / Σ p_j only; p in rising order."""
    if p[0] == p[-1]:  # exactly 0 and 1, not up to rounding
        return {"gini": 0.0, "jain": 1.0, "normalised_entropy": 1.0, "kl_to_uniform": 0.0,
                "cosine_to_ones": 1.0}  # fmt: skip
    K, s = len(p), p / p.sum()
    entropy = float(-(s[s > 0] * np.log(s[s > 0])).sum())
    jain = min(1.0, 1 / (K * float(s @ s)))
    return {
        "gini": max(0.0, float((2 * np.arange(1, K + 1) - K - 1) @ s / K)),
        "jain": jain,
        "normalised_entropy": min(1.0, entropy / math.log(K)),
        "kl_to_uniform": max(0.0, math.log(K) - entropy),
        "cosine_to_ones": math.sqrt(jain),
    }


def _clients(accuracy: Numbers, samples: Numbers | None) -> tuple[Floats, Floats | None, int]:
    """Checked accuracies and sample counts of the clients that count, and how many do not."""
    p = _vector(accuracy, "accuracy")
    n = None if samples is None else _vector(samples, "samples", len(p))
    keep = np.isfinite(p)
    if n is not None:
        bad = ~(np.isfinite(n) & (n >= 0) & (n == np.round(n)))
        if bad.any():
            k = int(bad.argmax())
            raise BadInput(f"samples of client {k} = {n[k]}: give the number of its test samples")
        keep &= n > 0
    if not keep.any():
        raise BadInput("no client has test samples and a finite accuracy; nothing can be measured")
    outside = keep & ~((p >= -1e-6) & (p <= 1 + 1e-6))  # float32 sums may end a little above 1
    if outside.any():
        k = int(outside.argmax())
        raise BadInput(f"accuracy of client {k} = {p[k]}: give fractions in [0, 1] (percent / 100)")
    return np.clip(p[keep], 0, 1), None if n is None else n[keep], int((~keep).sum())


def _vector(values: Numbers, name: str, length: int | None = None) -> Floats:
    array = _array(values, name)
    if array.ndim != 1 or len(array) == 0:
        raise BadInput(f"{name} has shape {array.shape}: give one number per client")
    if length is not None and len(array) != length:
        raise BadInput(f"{name} has {len(array)} entries, not {length}; give one per client")
    return array


def _array(values: Numbers, name: str) -> Floats:
    values = values.detach().cpu().numpy() if hasattr(values, "detach") else values
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise BadInput(f"{name} cannot be read as an array of numbers") from None


def _noise(p: Floats, n: Floats | None) -> Floats:
    """Unbiased estimate of p_k(1 − p_k)/n_k, the binomial variance of each measured accuracy."""
    if n is None or (n < 2).all():
        return np.full(len(p), math.nan if len(p) > 1 else 0.0)
    several = n >= 2
    spread = np.zeros(len(p))
    spread[several] = n[several] * p[several] * (1 - p[several]) / (n[several] - 1)
    spread[~several] = spread[several].mean()
    return spread / n


def _squares(p: Floats) -> Floats:
    """(p_k − p̄)² K/(K − 1) along the last axis: their mean is the sample variance."""
    K = p.shape[-1]
    return np.square(p - p.mean(-1, keepdims=True)) * (K / (K - 1))


def _interval(
    p: Floats, noise: Floats, scale: float, draw: NDArray[np.int64], level: float
) -> tuple[float, float]:
    """Studentised bootstrap over clients for the mean of scale · squares − noise."""
    if len(draw) == 0 or np.isnan(noise).any():
        return math.nan, math.nan
    K = len(p)
    term = scale * _squares(p) - noise
    value, error = float(term.mean()), float(term.std()) / math.sqrt(K)
    if error <= 1e-12:  # all clients alike: every resample tells the same
        return value, value
    t = np.empty(len(draw))
    step = max(1, 4_000_000 // K)  # so that 10 000 clients need no gigabyte
    for start in range(0, len(draw), step):
        rows = draw[start : start + step]
        z = scale * _squares(p[rows]) - noise[rows]
        centre = z.mean(-1)
        spread = np.sqrt(np.square(z - centre[:, None]).mean(-1) / K)
        # a resample of nearly equal clients has se* ≈ 0 and tells nothing about the tails
        t[start : start + step] = (centre - value) / np.maximum(spread, 1e-3 * error)
    low, high = (1 + 2 / K) * np.quantile(t, [(1 - level) / 2, (1 + level) / 2])
    bottom = 0.0 if not noise.any() else -math.inf
    return (max(bottom, min(value, value - float(high) * error)),
            max(value, value - float(low) * error))  # fmt: skip


def variance_in_units(value: Number, unit: str) -> float:
    """A variance in fraction² as "fraction", "x100" (the paper's unit) or "percent" (percent²)."""
    factors = {"fraction": 1.0, "x100": 100.0, "percent": 10_000.0}
    if unit not in factors:
        raise unknown("unit", unit, factors)
    return float(value * factors[unit])


def loss_variance(losses: Numbers) -> float:
    """(1/n) Σ (f_i − F)²: the population variance in L_λ, without its factor ½."""
    return float(_vector(losses, "losses").var())


def gradient_variance(stacked_gradients: Numbers | Mapping[str, Any]) -> float:
    """(1/n) Σ ‖g_i − ḡ‖²: the population variance in J_γ, without its factor ½.

    One array with clients along the first axis, or a dict of such arrays, one per parameter.
    """
    given = stacked_gradients
    leaves = list(given.values()) if isinstance(given, Mapping) else [given]
    arrays = [_array(leaf, "stacked_gradients") for leaf in leaves]
    if not arrays or any(a.ndim < 1 or len(a) != len(arrays[0]) or len(a) == 0 for a in arrays):
        raise BadInput("stacked_gradients: every array needs clients, equally many, as first axis")
    return float(sum(a.reshape(len(a), -1).var(0).sum() for a in arrays))


class FairOrder(NamedTuple):
    """Which models are within ε of the best average loss, and which of them is fairest."""

    feasible: NDArray[np.bool_]  # by model
    order: NDArray[np.int64]  # feasible models, fairest first
    variance_over_clients: Floats  # by model, ddof 1


def epsilon_fair_order(performance: Numbers, average_loss: Numbers, epsilon: Number) -> FairOrder:
    """X = {x : F(x) − min F ≤ ε}; in X, x is fairer than y iff Var(p(x)) < Var(p(y)), ddof 1.

    `performance` is (models, clients); the smallest F given stands in for min F.
    """
    p = _array(performance, "performance")
    F = _vector(average_loss, "average_loss")
    if p.ndim != 2 or len(p) != len(F) or p.shape[1] == 0:
        raise BadInput(f"performance has shape {p.shape}: give ({len(F)} models, clients)")
    if not (np.isfinite(p).all() and np.isfinite(F).all()):
        raise BadInput("performance or average_loss is not finite; leave out untested clients")
    if not epsilon >= 0:
        raise BadInput(f"epsilon = {epsilon} must be ≥ 0 (0 keeps the smallest average loss only)")
    variance = p.var(1, ddof=1) if p.shape[1] > 1 else np.zeros(len(p))
    feasible = F - F.min() <= epsilon
    order = np.argsort(np.where(feasible, variance, math.inf), kind="stable")[: feasible.sum()]
    return FairOrder(feasible, order.astype(np.int64), variance)


def worse_than(a: Numbers, b: Numbers) -> float:
    """Fraction of clients with a_k < b_k, among those measured under both (nan: not measured)."""
    left = _vector(a, "a")
    right = _vector(b, "b", len(left))
    both = ~(np.isnan(left) | np.isnan(right))
    if not both.any():
        raise BadInput("no client has an accuracy under both models; nothing can be compared")
    return float((left[both] < right[both]).mean())


def pareto_front(accuracy: Numbers, variance: Numbers) -> NDArray[np.int64]:
    """Indices of models that no other beats (accuracy ≥, variance ≤, one of them strictly).

    By rising accuracy (hence rising variance); equal models stay together, nan is never in front.
    """
    a = _vector(accuracy, "accuracy")
    v = _vector(variance, "variance", len(a))
    by_accuracy = np.lexsort((v, -a))
    front: list[int] = []
    for i in by_accuracy[np.isfinite(a + v)[by_accuracy]]:
        if not front or v[i] < v[front[-1]] or (v[i] == v[front[-1]] and a[i] == a[front[-1]]):
            front.append(int(i))
    return np.array(front[::-1], dtype=np.int64)


def hypervolume(accuracy: Numbers, variance: Numbers, reference: Sequence[Number]) -> float:
    """Area of {(a, v) : ref_a ≤ a ≤ accuracy_i and variance_i ≤ v ≤ ref_v for some model i}.

    `reference` = (accuracy, variance) of a model that all should beat; larger area is better.
    """
    a, v = _vector(accuracy, "accuracy"), _vector(variance, "variance")
    if len(reference) != 2:
        raise BadInput("reference: give the pair (accuracy, variance)")
    low, top = map(float, reference)
    area = 0.0
    for i in pareto_front(a, v):  # rising accuracy: each adds the strip left of it
        if a[i] > low and v[i] < top:
            area += (a[i] - low) * (top - v[i])
            low = float(a[i])
    return float(area)


def worst_class_of_client(correct: Numbers, labels: Numbers, client: Numbers) -> Floats:
    """min over classes of the accuracy, by client 0 … max; a client without samples gets nan.

    One entry per test sample: was it right (0 or 1), its label, its client.
    """
    right = _vector(correct, "correct")
    label = _vector(labels, "labels", len(right)).astype(np.int64)
    owner = _vector(client, "client", len(right)).astype(np.int64)
    if owner.min() < 0 or label.min() < 0:
        raise BadInput("client and labels must be numbers from 0 on")
    shape = (int(owner.max()) + 1, int(label.max()) + 1)
    hits, seen = np.zeros(shape), np.zeros(shape)
    np.add.at(hits, (owner, label), right)
    np.add.at(seen, (owner, label), 1)
    share = np.divide(hits, seen, out=np.full(shape, math.inf), where=seen > 0).min(1)
    return np.where(np.isinf(share), math.nan, share)
