"""Losses, accuracies and scores of every client: for one shared model, or for local models.

Losses and accuracies are means over samples. Other metrics are functions of all outputs of a
client, so its outputs are kept until all are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from torch.func import vmap

from fairvar.common.tree import Inputs, Tree, map_inputs
from fairvar.data.federation import Split
from fairvar.engine.batches import Cohort, Padded
from fairvar.engine.task import Task, channels_last
from fairvar.models.norm import plain_attention
from fairvar.scores import ACCURACY, Metric

BLOCK = 256  # samples per client in one call of its local model


class Scores(NamedTuple):
    """Means over a client's samples; NaN for a client without samples, and accuracies without
    labels. `score` is by the run's metric; NaN where that is not defined for a client."""

    loss: Float64[Tensor, "*runs n"]
    accuracy: Float64[Tensor, "*runs n"]  # of sequences: over all their positions
    score: Float64[Tensor, "*runs n"]

    @staticmethod
    def build(metric: Metric, loss: Tensor, accuracy: Tensor, made: Tensor | None) -> Scores:
        """`made`: scores by the metric's function, if it needs all outputs."""
        if made is None:
            known = {"accuracy": accuracy, "loss": loss, "perplexity": loss.exp()}
            made = known.get(metric.name, torch.full_like(loss, torch.nan))
        return Scores(loss, accuracy, made)

    @staticmethod
    def nothing(like: Tensor) -> Scores:
        """NaN for all clients."""
        return Scores(*(torch.full_like(like, torch.nan) for _ in Scores._fields))


def needs_outputs(metric: Metric) -> bool:
    return metric.function is not None and metric != ACCURACY


class ByFunction:
    """Scores by a function of all outputs of a client, which arrive in pieces."""

    def __init__(self, metric: Metric, split: Split) -> None:
        self.metric, self.split, self.waiting = metric, split, list[Tensor]()
        self.todo = deque(torch.nonzero(split.counts).flatten().tolist())
        self.scores = torch.full(split.counts.shape, torch.nan, dtype=torch.float64)

    def add(self, outputs: Tensor) -> None:
        self.waiting.append(outputs)
        there = sum(map(len, self.waiting))
        while self.todo and there >= (count := int(self.split.counts[self.todo[0]])):
            whole, client = torch.cat(self.waiting), self.todo.popleft()
            self.scores[client] = self.metric(whole[:count], self.split.targets(client))
            self.waiting, there = [whole[count:]], there - count


class Seen(NamedTuple):
    """Observations of an evaluated round: the clients' updates, gradients and local models."""

    update_norm: Float64[Tensor, "*runs n"]  # ‖x^t − x_i‖; NaN for clients that took no part
    gradient_variance: Float64[Tensor, "*runs"]  # Σ r_i ‖∇f_i − ∇F‖² over the participants
    local: dict[str, Scores]  # by split


def evaluate_shared(
    task: Task,
    params: Tree,
    buffers: Tree,
    split: Split,
    piece: int,
    cohort: Cohort | None = None,
) -> Scores:
    """One model on the samples of all clients, pooled, or client after client if it mixes samples.
    `cohort`: only these clients, on their training split, without scores by a function."""
    place, rows, real = split.client, None, None
    counts, answers = split.counts_there, split.answers
    if cohort is not None and not cohort.everyone:
        place, rows, real = cohort.slots.place, cohort.slots.row, cohort.slots.real
        counts, answers = cohort.counts, answers[cohort.ids]
    total = torch.zeros(2, len(counts), dtype=torch.float64, device=split.device)
    own = ByFunction(task.metric, split) if cohort is None and needs_outputs(task.metric) else None
    cuts = split.offsets if task.mixes else [*range(0, len(place), piece), len(place)]
    with torch.no_grad():
        for some in (slice(a, b) for a, b in pairwise(cuts) if b > a):
            x, y = split.take(some if rows is None else rows[some])
            outputs = task.predict(params, buffers, channels_last(x))
            found = _score(task, outputs, y)
            total.index_add_(1, place[some], found if real is None else found * real[some])
            if own is not None:
                own.add(outputs)
    return _means(task, total, counts, answers, None if own is None else own.scores)


def evaluate_local(
    task: Task, params: Tree, buffers: Tree, split: Split, ids: Int64[Tensor, " k"]
) -> Scores:
    """Each client's local model (stacked along the first axis) on that client's samples."""
    if task.mixes:
        return _without_padding(task, params, buffers, split, ids)
    counts = split.counts_there[ids]
    offsets = torch.tensor(split.offsets, device=ids.device)[ids]
    total = torch.zeros(2, len(ids), dtype=torch.float64, device=ids.device)
    width = min(BLOCK, int(split.counts.max()))
    predict = _one_by_one(task) if task.loop_only or task.in_turn else vmap(task.predict)
    own, kept = needs_outputs(task.metric), list[Tensor]()
    with torch.no_grad(), plain_attention(split.device):
        for start in range(0, int(counts.max()), width):
            rows, real = Padded.build(offsets + start, counts - start, width)
            rows = rows.clamp(max=len(split.y) - 1)  # of a client without samples here
            x, y = split.take(rows)
            outputs = predict(params, buffers, x)
            scores = _score(task, outputs.flatten(0, 1), y.flatten(0, 1))
            total += (scores.reshape(2, *real.shape) * real).sum(2)
            kept += [outputs] if own else []
    made = _by_client(task.metric, kept, split, ids) if own else None
    return _means(task, total, counts, split.answers[ids], made)


def _without_padding(
    task: Task, params: Tree, buffers: Tree, split: Split, ids: Int64[Tensor, " k"]
) -> Scores:
    """Client after client, each with all of its samples in one batch."""
    found = []
    for place, client in enumerate(ids.tolist()):
        own, kept = ({k: v[place] for k, v in tree.items()} for tree in (params, buffers))
        samples = Split(*split.of(client), split.counts[client : client + 1])
        found.append(evaluate_shared(task, own, kept, samples, piece=1))
    return Scores(*map(torch.cat, zip(*found, strict=True)))


def _by_client(
    metric: Metric, blocks: list[Tensor], split: Split, ids: Int64[Tensor, " k"]
) -> Float64[Tensor, " k"]:
    """Scores by a function. The outputs of these clients are padded, in blocks along axis one."""
    found = torch.full(ids.shape, torch.nan, dtype=torch.float64)
    for place, client in enumerate(ids.tolist()):
        count = int(split.counts[client])
        if count:
            outputs = torch.cat([block[place] for block in blocks])[:count]
            found[place] = metric(outputs, split.targets(client))
    return found


def _one_by_one(task: Task) -> Callable[[Tree, Tree, Inputs], Tensor]:
    """Client after client, for modules that vmap refuses and where it is slower."""

    def predict(params: Tree, buffers: Tree, x: Inputs) -> Tensor:
        def alone(i: int) -> Tensor:
            own, kept = ({k: v[i] for k, v in tree.items()} for tree in (params, buffers))
            return task.predict(own, kept, channels_last(map_inputs(lambda part: part[i], x)))

        return torch.stack([alone(i) for i in range(len(next(iter(params.values()))))])

    return predict


def _score(task: Task, outputs: Tensor, y: Tensor) -> Float64[Tensor, "2 b"]:
    """The loss of every sample and its right answers, of which a sequence has several."""
    loss = task.loss(outputs, y).double()
    if not task.classifies:
        return torch.stack([loss, torch.full_like(loss, torch.nan)])
    right = (outputs.argmax(-1) == y).double()
    return torch.stack([loss, right if y.dim() == 1 else right.flatten(1).sum(1)])


def _means(
    task: Task, total: Tensor, counts: Tensor, answers: Tensor, made: Tensor | None
) -> Scores:
    loss, accuracy = total[0] / counts, total[1] / answers
    made = None if made is None else made.to(loss.device)
    return Scores.build(task.metric, loss, accuracy, made)
