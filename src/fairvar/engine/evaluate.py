"""Losses and accuracies of every client: of one shared model, or of local models."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from torch.func import vmap

from fairvar.data.federation import Split
from fairvar.engine.batches import Cohort, Padded
from fairvar.engine.task import Task, channels_last
from fairvar.tree import Tree

BLOCK = 256  # samples of a client that its local model sees at once


class Scores(NamedTuple):
    """Means over a client's samples; NaN for a client without samples, or without classes."""

    loss: Float64[Tensor, "*runs n"]
    accuracy: Float64[Tensor, "*runs n"]


class Seen(NamedTuple):
    """What an evaluated round shows of the clients: their updates and local models."""

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
    """One model on the samples of all clients, pooled; `cohort`: of these clients only, whose
    training split this is."""
    place, rows, counts, real = split.client, None, split.counts_there, None
    if cohort is not None and not cohort.everyone:
        place, rows, real = cohort.slots.place, cohort.slots.row, cohort.slots.real
        counts = cohort.counts
    total = torch.zeros(2, len(counts), dtype=torch.float64, device=split.x.device)
    with torch.no_grad():
        for i in range(0, len(place), piece):
            some = slice(i, i + piece)
            taken = some if rows is None else rows[some]
            x, y = channels_last(split.x[taken]), split.y[taken]
            found = _score(task, task.predict(params, buffers, x), y)
            total.index_add_(1, place[some], found if real is None else found * real[some])
    return _means(total, counts)


def evaluate_local(
    task: Task, params: Tree, buffers: Tree, split: Split, ids: Int64[Tensor, " k"]
) -> Scores:
    """Each client's local model (stacked along the first axis) on that client's samples."""
    counts = split.counts_there[ids]
    offsets = torch.tensor(split.offsets, device=ids.device)[ids]
    total = torch.zeros(2, len(ids), dtype=torch.float64, device=ids.device)
    width = min(BLOCK, int(split.counts.max()))
    predict = _one_by_one(task) if task.loop_only or task.in_turn else vmap(task.predict)
    with torch.no_grad():
        for start in range(0, int(counts.max()), width):
            rows, real = Padded.build(offsets + start, counts - start, width)
            rows = rows.clamp(max=len(split.y) - 1)  # of a client without samples here
            y = split.y[rows]
            outputs = predict(params, buffers, split.x[rows])
            scores = _score(task, outputs.flatten(0, 1), y.flatten(0, 1))
            total += (scores.reshape(2, *real.shape) * real).sum(2)
    return _means(total, counts)


def _one_by_one(task: Task) -> Callable[[Tree, Tree, Tensor], Tensor]:
    """For modules that vmap refuses, and where it is slower."""

    def predict(params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        own = [({k: v[i] for k, v in params.items()}, {k: v[i] for k, v in buffers.items()})
               for i in range(len(x))]  # fmt: skip
        return torch.stack(
            [task.predict(p, b, channels_last(x[i])) for i, (p, b) in enumerate(own)]
        )

    return predict


def _score(task: Task, outputs: Tensor, y: Tensor) -> Float64[Tensor, "2 b"]:
    loss = task.loss(outputs, y).double()
    right = (
        (outputs.argmax(1) == y).double() if task.classifies else torch.full_like(loss, torch.nan)
    )
    return torch.stack([loss, right])


def _means(total: Tensor, counts: Tensor) -> Scores:
    loss, right = total / counts
    return Scores(loss, right)
