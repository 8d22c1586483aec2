"""How evenly a model serves its clients: numbers over clients, with the noise of finite test sets
taken out, and comparisons of models.

Everything takes lists, numpy arrays or torch tensors and computes in float64. `DEFINITIONS` says
in one line what each number is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairvar.common import display, rng
from fairvar.errors import BadInput, shown, unknown
from fairvar.scores import ACCURACY, ROUNDING, Floats, Metric, Numbers, metric_of
from fairvar.scores import as_array as as_array

RESAMPLES = 2000  # of a bootstrap interval
# Every number in one line: for footnotes, hover texts and the manual. p_k is the accuracy of client
# k, or its score by another metric.
DEFINITIONS = {
    "clients": "K: clients with at least one test sample and a finite accuracy",
    "dropped_clients": "clients left out because they have no test samples or no finite accuracy",
    "mean": "(1/K) Σ p_k: every client counts the same",
    "mean_over_samples": "Σ n_k p_k / Σ n_k: every test sample counts the same",
    "variance_over_clients": "Σ (p_k − mean)² / (K − ddof), in fraction²; ddof 1 by default",
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


@dataclass(frozen=True, repr=False)
class Fairness:
    """What `fairness` computes; a field is also an item, `f["mean"]`, and `dict(**f)` works.

    Conventions where a formula ends in 0/0:

    - one client: the sample variance (ddof 1) is undefined, so variance_over_clients,
      corrected_variance, sd_over_clients and coefficient_of_variation are nan (ddof 0: 0);
    - all accuracies 0: all are equal, so gini, kl_to_uniform and coefficient_of_variation are 0,
      jain, normalised_entropy and cosine_to_ones are 1;
    - fewer than 5 clients: nothing to resample, both intervals are (nan, nan);
    - a client with one test sample: p(1 − p)/(n − 1) is 0/0; the mean of n p(1 − p)/(n − 1) over
      the clients with more samples is used. If no client has two, noise and spread cannot be
      separated, and noise_floor, corrected_variance and its interval are nan;
    - `samples` not given: those three and mean_over_samples are nan;
    - scores other than accuracies have no known noise: those three are nan;
    - scores without bounds, or with negative ones: coefficient_of_variation and the indices from
      gini on are nan.

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

    def __repr__(self) -> str:
        main = ("mean", "variance_over_clients", "corrected_variance", "worst_10_percent")
        text = ", ".join(f"{name} {display.number(self[name])}" for name in main)
        return f"<Fairness of {display.plural(self.clients, 'client')}: {text}>"

    def _repr_html_(self) -> str:
        rows = []
        for name in self.keys():
            value = self[name]
            ends = value if isinstance(value, tuple) else (value,)
            rows.append((name, " to ".join(map(display.number, ends)), DEFINITIONS[name]))
        return display.card(
            f"Fairness of {display.plural(self.clients, 'client')}",
            display.table((), rows, left=[2]),
        )

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
    metric: str | Metric = ACCURACY,
    ddof: int = 1,
    interval: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Fairness:
    """All fairness numbers of accuracies p_k measured on n_k test samples (`DEFINITIONS`).

        corrected_variance = Σ (p_k − p̄)²/(K − 1) − (1/K) Σ p_k(1 − p_k)/(n_k − 1)
        (ddof 0: both terms times 1 − 1/K)

    The intervals resample clients and studentise, t* = (v* − v)/se*, with se the standard error
    of a mean of (p_k − p̄)² K/(K − 1) − noise_k, stretch t by 1 + 2/K for small K, and end where
    the number itself must end: K accuracies in [0, 1] have a variance of at most
    ⌊K/2⌋⌈K/2⌉ / (K (K − ddof)), and a corrected one of at least the negative of the largest noise
    floor, that of p_k = ½. Measured coverage of the 95 % interval (3000 federations of each of
    eight Beta laws): 93.6 – 95.1 % for K = 50, 93.9 – 95.6 % for K = 100; see docs/metrics.md.

    `metric`: what the numbers are, if they are no accuracies: "rmse", "auc", … or a Metric. It says
    which clients are the worst, and where scores end.
    """
    _check_options(ddof, interval, resamples, seed)
    kind = metric_of(metric)
    p, n, dropped = _clients(accuracy, samples, kind)
    with np.errstate(invalid="ignore"):  # a score may be infinite
        return _fairness(p, n, dropped, kind, ddof, interval, resamples, seed)


def _fairness(
    p: Floats,
    n: Floats | None,
    dropped: int,
    metric: Metric,
    ddof: int,
    interval: float,
    resamples: int,
    seed: int,
) -> Fairness:
    K = len(p)
    scale = 1.0 if ddof == 1 else 1 - 1 / K
    noisy = n is not None and metric.has_noise_floor
    noise = scale * binomial_noise(p, n) if noisy else np.full(K, math.nan)
    variance = scale * float(_squares(p).mean()) if K > 1 else (0.0 if ddof == 0 else math.nan)
    sd, floor = math.sqrt(variance), float(noise.mean())
    corrected = variance - floor
    draws = resamples if K >= 5 else 0
    ranked, served, tenth = np.sort(p), metric.worst_first(p), math.ceil(K / 10)
    low, high = float(ranked[0]), float(ranked[-1])
    most = math.inf
    if metric.bounds is not None:
        width = metric.bounds[1] - metric.bounds[0]
        most = width**2 * scale * (K // 2) * ((K + 1) // 2) / (K * max(K - 1, 1))
    least = -scale * float(binomial_noise(np.full(K, 0.5), n).mean()) if noisy else 0.0

    def ends(value: float, noise: Floats, least: float) -> tuple[float, float]:
        return _interval(value, p, noise, scale, draws, seed, interval, (least, most))

    return Fairness(
        clients=K,
        dropped_clients=dropped,
        mean_over_samples=math.nan if n is None else float(n @ p / n.sum()),
        variance_over_clients=variance,
        noise_floor=floor,
        corrected_variance=corrected,
        variance_interval=ends(variance, np.zeros(K), 0.0),
        corrected_variance_interval=ends(corrected, noise, least),
        sd_over_clients=sd,
        mean=float(ranked.mean()),
        smallest=low,
        largest=high,
        range_over_clients=high - low,
        worst_10_percent=float(served[:tenth].mean()),
        best_10_percent=float(served[-tenth:].mean()),
        **_ratios(p, sd, metric),
    )


def _check_options(ddof: int, interval: float, resamples: int, seed: int) -> None:
    whole, real = (int, np.integer), (int, float, np.number)
    for name, value, kinds in (("ddof", ddof, whole), ("resamples", resamples, whole),
                               ("seed", seed, whole), ("interval", interval, real)):  # fmt: skip
        if not isinstance(value, kinds) or isinstance(value, bool):
            kind = "whole number" if kinds is whole else "number"
            raise BadInput(f"{name} = {shown(value)}: give a {kind}")
    if ddof not in (0, 1):
        raise BadInput(f"ddof = {ddof}: use 1 (sample variance) or 0 (population variance)")
    if not 0 < interval < 1:
        raise BadInput(f"interval = {interval}: must lie between 0 and 1, as in 0.95")
    if resamples < 0:
        raise BadInput(f"resamples = {resamples}: must be ≥ 0 (0 leaves the intervals out)")


RATIOS = ("coefficient_of_variation", "gini", "jain", "normalised_entropy", "kl_to_uniform",
          "cosine_to_ones")  # fmt: skip


def _ratios(p: Floats, sd: float, metric: Metric) -> dict[str, float]:
    """What has no meaning for scores that may be negative or have no bounds."""
    if not metric.has_shares:
        return dict.fromkeys(RATIOS, math.nan)
    variation = sd / float(p.mean()) if p.any() else sd
    return {"coefficient_of_variation": variation, **_evenness(np.sort(p))}


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


def _clients(
    scores: Numbers, samples: Numbers | None, metric: Metric
) -> tuple[Floats, Floats | None, int]:
    """Checked scores and sample counts of the clients that count, and how many do not. A score
    without bounds may be infinite, which must not look as if it had not been measured."""
    p, title = vector(scores, metric.title), metric.title
    n = None if samples is None else vector(samples, "samples", len(p))
    keep = ~np.isnan(p) if metric.bounds is None else np.isfinite(p)
    if n is not None:
        bad = ~(np.isfinite(n) & (n >= 0) & (n == np.round(n)))
        if bad.any():
            k = int(bad.argmax())
            raise BadInput(f"samples of client {k} = {n[k]}: give the number of its test samples")
        keep &= n > 0
    if not keep.any():
        raise BadInput(f"no client has test samples and a finite {title}; nothing can be measured")
    if metric.bounds is not None:
        low, high = metric.bounds
        outside = keep & ~((p >= low - ROUNDING) & (p <= high + ROUNDING))
        if outside.any():
            k = int(outside.argmax())
            unit = "fractions" if metric.factor == 100 else "scores"
            hint = " (percent / 100)" if metric.factor == 100 else ""
            raise BadInput(
                f"{title} of client {k} = {p[k]}: give {unit} in [{low:g}, {high:g}]{hint}"
            )
        p = np.clip(p, low, high)
    return p[keep], None if n is None else n[keep], int((~keep).sum())


def binomial_noise(p: Floats, n: Numbers) -> Floats:
    """Unbiased estimate of p_k(1 − p_k)/n_k, the binomial variance of each measured accuracy.

    Clients along the last axis, with n_k ≥ 1 test samples. The only place where a noise floor is
    made. A client with one sample gets the mean of n p(1 − p)/(n − 1) over those that have more;
    nan if no client has.
    """
    n = np.asarray(n, dtype=np.float64)
    several = n >= 2
    if not several.any():
        return np.full(p.shape, math.nan)
    spread = n * p * (1 - p) / np.maximum(n - 1, 1)
    spread[..., ~several] = spread[..., several].mean(-1, keepdims=True)
    return spread / n


def mean_and_variance(p: Floats) -> tuple[Floats, Floats]:
    """Mean and sample variance (ddof 1) along the last axis over the clients that were measured.

    nan: the mean over no client, and the variance over fewer than two.
    """
    measured = np.isfinite(p).sum(-1)
    with warnings.catch_warnings():  # numpy warns; here nan is the result
        warnings.simplefilter("ignore", RuntimeWarning)
        mean, variance = np.nanmean(p, axis=-1), np.nanvar(p, axis=-1, ddof=1)
    return mean, np.where(measured > 1, variance, math.nan)


def _squares(p: Floats) -> Floats:
    """(p_k − p̄)² K/(K − 1) along the last axis: their mean is the sample variance."""
    K = p.shape[-1]
    return np.square(p - p.mean(-1, keepdims=True)) * (K / (K - 1))


def _interval(
    value: float,
    p: Floats,
    noise: Floats,
    scale: float,
    draws: int,
    seed: int,
    level: float,
    within: tuple[float, float],
) -> tuple[float, float]:
    """Studentised bootstrap over clients for `value`, the mean of scale · squares − noise, cut at
    the ends of what it can be."""
    if draws == 0 or np.isnan(noise).any() or not math.isfinite(value):
        return math.nan, math.nan
    K = len(p)
    term = scale * _squares(p) - noise
    error = float(term.std()) / math.sqrt(K)
    if error <= 1e-12:  # all clients alike: every resample is the same
        return value, value
    t = np.empty(draws)
    step = max(1, 4_000_000 // K)  # so that 10 000 clients need no gigabyte
    generator = rng.stream(seed, "fairness", "bootstrap")  # the same draws for every interval
    for start in range(0, draws, step):
        rows = generator.integers(0, K, (min(step, draws - start), K))
        z = scale * _squares(p[rows]) - noise[rows]
        centre = z.mean(-1)
        spread = np.sqrt(np.square(z - centre[:, None]).mean(-1) / K)
        # a resample of nearly equal clients has se* ≈ 0 and says nothing about the tails
        t[start : start + step] = (centre - value) / np.maximum(spread, 1e-3 * error)
    low, high = (1 + 2 / K) * np.quantile(t, [(1 - level) / 2, (1 + level) / 2])
    least, most = within  # a sum may end a rounding error outside: the value itself stays inside
    return (min(value, max(least, value - float(high) * error)),
            max(value, min(most, value - float(low) * error)))  # fmt: skip


def vector(values: Numbers, name: str, length: int | None = None) -> Floats:
    array = as_array(values, name)
    if array.ndim != 1 or len(array) == 0:
        raise BadInput(f"{name} has shape {array.shape}: give one number per client")
    if length is not None and len(array) != length:
        raise BadInput(f"{name} has {len(array)} entries, not {length}; give one per client")
    return array


def variance_in_units(value: float, unit: str) -> float:
    """A variance in fraction² as "fraction", "x100" (the paper's unit) or "percent" (percent²)."""
    factors = {"fraction": 1.0, "x100": 100.0, "percent": 10_000.0}
    if unit not in factors:
        raise unknown("unit", unit, factors)
    return float(value * factors[unit])


def loss_variance(losses: Numbers) -> float:
    """(1/n) Σ (f_i − F)²: the population variance in L_λ, without its factor ½."""
    return float(vector(losses, "losses").var())


def gradient_variance(stacked_gradients: Numbers | Mapping[str, Any]) -> float:
    """(1/n) Σ ‖g_i − ḡ‖²: the population variance in J_γ, without its factor ½.

    One array with clients along the first axis, or a dict of such arrays, one per parameter.
    """
    given = stacked_gradients
    leaves = list(given.values()) if isinstance(given, Mapping) else [given]
    arrays = [as_array(leaf, "stacked_gradients") for leaf in leaves]
    if not arrays or any(a.ndim < 1 or len(a) != len(arrays[0]) or len(a) == 0 for a in arrays):
        raise BadInput("stacked_gradients: every array needs clients, equally many, as first axis")
    return float(sum(a.reshape(len(a), -1).var(0).sum() for a in arrays))


# --- comparisons of models -----------------------------------------------------------------------
class FairOrder(NamedTuple):
    """Which models are within ε of the best average loss, and which of them is fairest."""

    feasible: NDArray[np.bool_]  # by model
    order: NDArray[np.int64]  # feasible models, fairest first
    variance_over_clients: Floats  # by model, ddof 1


def epsilon_fair_order(performance: Numbers, average_loss: Numbers, epsilon: float) -> FairOrder:
    """X = {x : F(x) − min F ≤ ε}; in X, x is fairer than y iff Var(p(x)) < Var(p(y)), ddof 1.

    `performance` is (models, clients); the smallest F given is used for min F.
    """
    p = as_array(performance, "performance")
    F = vector(average_loss, "average_loss")
    if p.ndim != 2 or len(p) != len(F) or p.shape[1] == 0:
        raise BadInput(f"performance has shape {p.shape}: give ({len(F)} models, clients)")
    if not (np.isfinite(p).all() and np.isfinite(F).all()):
        raise BadInput("performance or average_loss is not finite; leave out untested clients")
    if not epsilon >= 0:
        raise BadInput(f"epsilon = {epsilon} must be ≥ 0 (0 keeps the smallest average loss only)")
    _, variance = mean_and_variance(p)  # nan for a single client: then no model is fairer
    feasible = F - F.min() <= epsilon
    rank = np.where(feasible, np.nan_to_num(variance), math.inf)
    order = np.argsort(rank, kind="stable")[: feasible.sum()]
    return FairOrder(feasible, order.astype(np.int64), variance)


def worse_than(a: Numbers, b: Numbers, metric: str | Metric = ACCURACY) -> float:
    """Fraction of clients with a_k < b_k (a_k > b_k where lower is better), among those measured
    under both (nan: not measured)."""
    left = vector(a, "a")
    right = vector(b, "b", len(left))
    both = ~(np.isnan(left) | np.isnan(right))
    if not both.any():
        raise BadInput("no client has an accuracy under both models; nothing can be compared")
    sign = metric_of(metric).sign
    return float((sign * left[both] < sign * right[both]).mean())


def pareto_front(accuracy: Numbers, variance: Numbers) -> NDArray[np.int64]:
    """Indices of models that no other beats (accuracy ≥, variance ≤, one of them strictly).

    By rising accuracy (hence rising variance); equal models stay together, nan is never in front.
    """
    a = vector(accuracy, "accuracy")
    v = vector(variance, "variance", len(a))
    by_accuracy = np.lexsort((v, -a))
    front: list[int] = []
    for i in by_accuracy[np.isfinite(a + v)[by_accuracy]]:
        if not front or v[i] < v[front[-1]] or (v[i] == v[front[-1]] and a[i] == a[front[-1]]):
            front.append(int(i))
    return np.array(front[::-1], dtype=np.int64)


def hypervolume(accuracy: Numbers, variance: Numbers, reference: Sequence[float]) -> float:
    """Area of {(a, v) : ref_a ≤ a ≤ accuracy_i and variance_i ≤ v ≤ ref_v for some model i}.

    `reference` = (accuracy, variance) of a model that all should beat; larger area is better.
    """
    a, v = vector(accuracy, "accuracy"), vector(variance, "variance")
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
    right = vector(correct, "correct")
    label = vector(labels, "labels", len(right)).astype(np.int64)
    owner = vector(client, "client", len(right)).astype(np.int64)
    if owner.min() < 0 or label.min() < 0:
        raise BadInput("client and labels must be numbers from 0 on")
    shape = (int(owner.max()) + 1, int(label.max()) + 1)
    hits, seen = np.zeros(shape), np.zeros(shape)
    np.add.at(hits, (owner, label), right)
    np.add.at(seen, (owner, label), 1)
    share = np.divide(hits, seen, out=np.full(shape, math.inf), where=seen > 0).min(1)
    return np.where(np.isinf(share), math.nan, share)
