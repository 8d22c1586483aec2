"""Losses and accuracies of every client: for one shared model, or for each client's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from torch.func import vmap

from fairvar.data.federation import Split
from fairvar.engine.batches import Cohort
from fairvar.engine.task import Task
from fairvar.tree import Tree

BLOCK = 256  # samples of a client that its own model sees at once


class Scores(NamedTuple):
    """Means over a client's samples; NaN for a client without samples, or without classes."""

    loss: Float64[Tensor, " n"]
    accuracy: Float64[Tensor, " n"]


def evaluate_shared(task: Task, params: Tree, buffers: Tree, split: Split, piece: int) -> Scores:
    """One model on all clients' samples, pooled."""
    total = torch.zeros(2, len(split.counts), dtype=torch.float64, device=split.x.device)
    with torch.no_grad():
        for i in range(0, len(split.y), piece):
            x, y, client = (v[i : i + piece] for v in (split.x, split.y, split.client))
            total.index_add_(1, client, _score(task, task.predict(params, buffers, x), y))
    return _means(total, split.counts_there)


def client_losses(
    task: Task, params: Tree, buffers: Tree, split: Split, piece: int
) -> Float64[Tensor, " n"]:
    """f_i on all of a client's samples, in evaluation mode."""
    return evaluate_shared(task, params, buffers, split, piece).loss


def losses_of_some(
    task: Task, params: Tree, buffers: Tree, split: Split, cohort: Cohort, piece: int
) -> Float64[Tensor, " m"]:
    """The same of the clients in a cohort."""
    slots, total = cohort.slots, torch.zeros_like(cohort.counts, dtype=torch.float64)
    with torch.no_grad():
        for i in range(0, len(slots.row), piece):
            some = slice(i, i + piece)
            rows = slots.row[some]
            losses = task.loss(task.predict(params, buffers, split.x[rows]), split.y[rows]).double()
            counted = losses if slots.real is None else losses * slots.real[some]
            total.index_add_(0, slots.place[some], counted)
    return total / cohort.counts


def evaluate_own(
    task: Task, params: Tree, buffers: Tree, split: Split, ids: Int64[Tensor, " k"]
) -> Scores:
    """Each client's own model (stacked along the first axis) on that client's samples."""
    counts = split.counts_there[ids]
    offsets = torch.tensor(split.offsets, device=ids.device)[ids]
    total = torch.zeros(2, len(ids), dtype=torch.float64, device=ids.device)
    column = torch.arange(min(BLOCK, int(split.counts.max())), device=ids.device)
    predict = _one_by_one(task) if task.loop_only else vmap(task.predict)
    with torch.no_grad():
        for start in range(0, int(counts.max()), len(column)):
            place = start + column
            real = place < counts[:, None]
            rows = torch.clamp(offsets[:, None] + torch.where(real, place, 0), max=len(split.y) - 1)
            y = split.y[rows]
            outputs = predict(params, buffers, split.x[rows])
            scores = _score(task, outputs.flatten(0, 1), y.flatten(0, 1))
            total += (scores.reshape(2, *real.shape) * real).sum(2)
    return _means(total, counts)


def _one_by_one(task: Task) -> Callable[[Tree, Tree, Tensor], Tensor]:
    """For modules that vmap refuses."""

    def predict(params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        own = [({k: v[i] for k, v in params.items()}, {k: v[i] for k, v in buffers.items()})
               for i in range(len(x))]  # fmt: skip
        return torch.stack([task.predict(p, b, x[i]) for i, (p, b) in enumerate(own)])

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
