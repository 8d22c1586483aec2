"""What the server makes of the answers of some clients: x ← x − Σ_i w_i (x − x_i) / normaliser."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Method, Replies
from fairvar.tree import Tree, squared_norm, stack, subtract, typed_as, weighted_sum

Limit = Callable[[Tensor], Tensor]  # the weights, none of them too large
Combine = Callable[[Tensor, Tree], Tree]  # (weights, a tree with the clients first) → one tree


class Answers(NamedTuple):
    """Of the m clients that took part in a round, in the order of their ids."""

    ids: Int64[Tensor, " m"]
    share: Float64[Tensor, " m"]  # the plain weights r_i, summing to one over these clients
    loss: Float64[Tensor, " m"]  # f_i(x^t); nan where the method does not ask for it
    params: list[Tree]  # x_i
    buffers: list[Tree]
    mean_loss: Float64[Tensor, ""]  # a of this round
    mean_gradient: Tree | None  # g of this round, for the next one
    own: Float64[Tensor, " m"]  # the factors of their own gradients


def aggregate(
    method: Method,
    state: State,
    answers: Answers,
    clients: int,
    lr: float | Tensor,
    limit: Limit = lambda weights: weights,
    combine: Combine = weighted_sum,
) -> Outcome:
    """`method` as it acts in this round; the outcome is over all clients, present or not."""
    updates = [subtract(state.x, params) for params in answers.params]
    replies = Replies(answers.loss, answers.share, answers.ids, clients)
    weights, memory = method.weigh(state.memory, replies)
    norms = torch.stack([squared_norm(u) for u in updates]).double()
    weights = limit(weights) / method.normaliser(replies, norms, lr)
    buffers = stack(answers.buffers) if state.buffers else {}
    outcome = Outcome(
        update=combine(weights, stack(updates)),
        buffers=_average(answers.share, buffers, combine),
        memory=memory,
        loss=answers.loss,
        weights=weights,
        mean_loss=answers.mean_loss,
        mean_gradient=answers.mean_gradient,
        # Of factors that only the clients know, a server knows no share.
        ascended=torch.where(answers.own.isnan(), torch.nan, (answers.own < 0).double()).mean(),
    )
    return outcome.among(answers.ids, clients)


def _average(share: Tensor, stacked: Tree, combine: Combine) -> Tree:
    """In float64, whatever the buffers are: batch norm also counts."""
    mean = combine(share, {k: v.double() for k, v in stacked.items()})
    return typed_as(mean, stacked)
