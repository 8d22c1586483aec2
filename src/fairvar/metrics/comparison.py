"""Comparisons of models: ε-fairness, clients that are worse off, accuracy–variance front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairvar.errors import BadInput
from fairvar.metrics.evenness import mean_and_variance
from fairvar.metrics.inputs import Floats, Numbers, as_array, vector


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


def worse_than(a: Numbers, b: Numbers) -> float:
    """Fraction of clients with a_k < b_k, among those measured under both (nan: not measured)."""
    left = vector(a, "a")
    right = vector(b, "b", len(left))
    both = ~(np.isnan(left) | np.isnan(right))
    if not both.any():
        raise BadInput("no client has an accuracy under both models; nothing can be compared")
    return float((left[both] < right[both]).mean())


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
