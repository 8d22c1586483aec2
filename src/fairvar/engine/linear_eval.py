"""Scores of affine models: the shared one, and each client's own without ever forming it.

On a client's samples X̃_e its own model gives X̃_e x − η (C_i A_i + c_i X̃_e g), with C_i = X̃_e X̃_iᵀ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fairvar.engine.direction import per_run, squared_lengths
from fairvar.engine.dual import Batch, Dual, by_client, gram, sample_losses
from fairvar.engine.evaluate import Scores
from fairvar.engine.linear import Group, Work, squared_norms
from fairvar.engine.run import Run
from fairvar.engine.state import State
from fairvar.tree import Tree


class Watched(NamedTuple):
    """What the clients' own updates and models are like."""

    update_norm: Float64[Tensor, "runs n"]
    gradient_variance: Float64[Tensor, " runs"]
    local: dict[str, Scores]


def watch_clients(group: Group, before: State, work: Work, splits: tuple[str, ...]) -> Watched:
    """`before` is the state that the round started from."""
    batch, model = work.batch, group.dual.model
    mean = group.mean_gradient(batch, work.first)
    if work.shared is not None:
        g = mean if work.g is None else work.g  # an exact method's g is this round's mean
        work = replace(work, g=g, u=batch.logits(model, g))
    lengths = squared_lengths(batch.layout, batch.grams, work.first, None, None, None)
    return Watched(
        update_norm=group.lr * work.squared_norms.sqrt(),
        gradient_variance=lengths @ group.run.share - squared_norms(mean)[:, 0],
        local={name: _own_scores(group, before, work, name) for name in splits},
    )


def watch_single(run: Run, before: State, work: Work, splits: tuple[str, ...]) -> Watched:
    """The same for a single run: tables of one row."""
    return watch_clients(Group.single(run), before.map(lambda leaf: leaf[None]), work, splits)


def shared_scores(dual: Dual, params: Tree, name: str) -> Scores:
    """The shared models of all runs on the samples of a split."""
    split = dual.split(name)
    return _scores(split, split.logits(dual.model, params))


def _own_scores(group: Group, before: State, work: Work, name: str) -> Scores:
    dual, parts = group.dual, []
    split = dual.split(name)
    for number, tile in enumerate(work.batch.layout.tiles):
        fixed = work.batch is dual.train
        matrix = dual.cross(name)[number] if fixed else gram(work.batch, split, number)
        product = by_client(work.along, tile) @ matrix
        parts.append(product.transpose(0, 1).reshape(*work.along.shape[:2], -1))
    moved = torch.cat(parts, -1)
    if work.shared is not None and work.g is not None:
        along_g = split.logits(dual.model, work.g)
        moved = torch.addcmul(moved, along_g, split.layout.spread(work.shared))
    logits = split.logits(dual.model, before.x) - per_run(group.lr, moved.dtype) * moved
    return _scores(split, logits)


def _scores(split: Batch, logits: Float[Tensor, "runs outputs P"]) -> Scores:
    loss = split.layout.means(sample_losses(logits, split.target))
    if split.target.label is None:
        return Scores(loss, torch.full_like(loss, torch.nan))
    # The first of several largest, as argmax, which is five times slower over this axis.
    right = (logits.max(1).indices == split.target.label).to(logits.dtype)
    return Scores(loss, split.layout.means(right))
