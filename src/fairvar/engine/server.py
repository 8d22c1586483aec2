"""The server's half of a round, for one run or many: `weigh`, then `finish`.

    x ← x − Σ_i w_i (x − x_i) / normaliser − κ η g

Every kernel and every deployment computes Σ_i w_i (x − x_i) in its own way, between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from torch.func import vmap

from fairvar.common.tree import (
    Tree,
    gram,
    squared_norm,
    stack,
    subtract,
    tree_map,
    typed_as,
    weighted_sum,
)
from fairvar.engine.state import Outcome, State
from fairvar.errors import BadInput, shown
from fairvar.methods.base import Memory, Method, Replies

PerRun = Float64[Tensor, "runs 1"] | Float64[Tensor, ""] | float  # a number, or one of each run
Limit = Callable[[Tensor], Tensor]  # weights → weights within a limit
Combine = Callable[[Tensor, Tree], Tree]  # (weights, a tree with the clients first) → one tree
# (w_i / normaliser, normaliser) → Σ_i w_i (x − x_i) / normaliser
Total = Callable[[Tensor, Tensor | float], Tree]


def weighed(method: Method, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
    """What a method's `weigh` returns, if it is a weight for every reply and the same memory."""
    found: object = method.weigh(memory, replies)
    if not (isinstance(found, tuple) and len(found) == 2):
        raise BadInput(f"weigh of {method.label} must return two things: weights, memory")
    if getattr(found[0], "shape", None) != replies.share.shape:
        raise BadInput(f"weigh of {method.label} must return a tensor with one weight for each of "
                       f"the {len(replies.share)} replies, not {shown(found[0])}")  # fmt: skip
    names = sorted(found[1]) if isinstance(found[1], dict) else found[1]
    if names != sorted(memory):  # no state with it could be continued
        raise BadInput(f"weigh of {method.label} must return memory with the names that "
                       f"initial_memory gives, {sorted(memory)}, not {shown(names)}")  # fmt: skip
    return found


@dataclass(frozen=True)
class Aggregator:
    """The functions of a method for the participants of one round.

    Without `runs`, tables are those of one run. With it, they have the run as first axis, and
    `numbers` holds the methods' numbers of each run.
    """

    method: Method  # as it acts in this round; of several runs, that of the first
    share: Float64[Tensor, " m"]  # the plain weights r_i of the participants
    ids: Int64[Tensor, " m"]
    clients: int  # of the federation
    runs: int | None = None
    numbers: dict[str, Float64[Tensor, " runs"]] = field(default_factory=dict)
    everyone: bool = False  # `ids` are all clients in their order

    def each(self, function: Callable[..., Any], *tables: Any) -> Any:
        """function(method, *rows) of every run."""
        if self.runs is None:
            return function(self.method, *tables)
        if self.runs == 1:
            return _lift(function(self.method, *(_drop(table) for table in tables)))
        return vmap(lambda numbers, *rows: function(self.method.with_numbers(numbers), *rows))(
            self.numbers, *tables
        )

    @property
    def plain(self) -> bool:
        """Every direction is the client's own gradient (and curvature): own = 1, shared = 0."""
        return type(self.method).coefficients is Method.coefficients

    @cached_property
    def curvature(self) -> PerRun:
        """γ; of a captured run a tensor."""
        return self._of_each(lambda method: method.curvature)

    @cached_property
    def pull(self) -> PerRun:
        """Of the proximal term."""
        return self._of_each(lambda method: method.pull)

    @cached_property
    def penalty_bound(self) -> PerRun | None:
        """Of methods that bound their penalty."""
        if self.method.penalty_bound is None:
            return None
        return self._of_each(lambda method: cast(float | Tensor, method.penalty_bound))

    def _of_each(self, value: Callable[[Method], float | Tensor]) -> float | Tensor:
        if not self.numbers:
            return value(self.method)
        some = next(iter(self.numbers.values()))
        found: Tensor = self.each(lambda method, number: _like(value(method), number), some)
        return found[:, None]

    def coefficients(
        self, loss: Float64[Tensor, "*runs m"], mean_loss: Float64[Tensor, "*runs"]
    ) -> tuple[Float64[Tensor, "*runs m"], Float64[Tensor, "*runs m"]]:
        """(own, shared) of every client."""

        def both(method: Method, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, Tensor]:
            own, shared = method.coefficients(loss, mean_loss)
            return _like(own, loss), _like(shared, loss)

        found: tuple[Tensor, Tensor] = self.each(both, loss, mean_loss)
        return found

    def broadcast(
        self, loss: Float64[Tensor, " m"]
    ) -> tuple[Float64[Tensor, ""], Float64[Tensor, " m"]]:
        """a, and the weights of the clients' gradients in g. Not for grids, whose methods send
        plain means."""
        return self.method.broadcast(self._replies(loss))

    def term(self, loss: Float64[Tensor, " m"]) -> Float64[Tensor, ""]:
        """κ"""
        return torch.as_tensor(self.method.server_term(self._replies(loss)), dtype=loss.dtype)

    def with_term(
        self, update: Tree, loss: Float64[Tensor, "*runs m"], lr: float | Tensor, g: Tree | None
    ) -> Tree:
        """The update with the server's own step κ η g."""
        if self.method.broadcasts_means or g is None:
            return update
        factor = lr * self.term(loss)
        return tree_map(lambda u, leaf: u + factor.to(u.dtype) * leaf, update, g)

    def weigh(
        self,
        memory: Memory,
        loss: Float64[Tensor, "*runs m"],
        gram: Float64[Tensor, "m m"] | None = None,
    ) -> tuple[Float64[Tensor, "*runs m"], Memory]:
        """w_i, not yet divided by the normaliser, and the method's memory for the next round. There
        is no Gram matrix for the runs of a grid."""

        def weigh(method: Method, memory: Memory, loss: Tensor) -> tuple[Tensor, Memory]:
            found, after = weighed(method, memory, self._replies(loss)._replace(gram=gram))
            if gram is not None:  # products overflow before the updates do: such a run has diverged
                found = torch.where(torch.isfinite(gram).all(), found, torch.nan)
            return found, after

        found: tuple[Tensor, Memory] = self.each(weigh, memory, loss)
        return found

    def normaliser(
        self,
        loss: Float64[Tensor, "*runs m"],
        squared_norms: Float64[Tensor, "*runs m"] | None,
        lr: PerRun,
    ) -> PerRun:
        """What the weighted sum of updates is divided by; of several runs, (runs, 1). The norms are
        zero for methods that do not use them."""
        if type(self.method).normaliser is Method.normaliser:
            return 1.0
        if squared_norms is None:
            squared_norms = torch.zeros_like(loss)

        def normaliser(method: Method, loss: Tensor, norms: Tensor, lr: Tensor | float) -> Tensor:
            found = method.normaliser(self._replies(loss), norms, lr)
            return torch.as_tensor(found, dtype=loss.dtype, device=loss.device)

        found: Tensor = self.each(normaliser, loss, squared_norms, lr)
        return found if self.runs is None else found.reshape(-1, 1)

    def finish(
        self,
        total: Total,
        loss: Float64[Tensor, "*runs m"],
        weights: Float64[Tensor, "*runs m"],
        memory: Memory,
        *,
        lr: PerRun,
        buffers: Tree,
        own: Float64[Tensor, "*runs m"] | None,
        mean_gradient: Tree | None,
        mean_loss: Tensor | None = None,
        squared_norms: Float64[Tensor, "*runs m"] | None = None,
        normaliser: Tensor | None = None,
        g: Tree | None = None,
    ) -> Outcome:
        """The last part of every round: normaliser → update, with the server's own step → Outcome.

        `weights` and `memory` are those of `weigh`. `total` computes the update, because each
        kernel divides by the normaliser where that costs it least. `own`: the factors of the
        clients' own gradients (None: one; NaN: only the client knows it). `squared_norms`:
        ‖x − x_i‖², where the method uses them. `normaliser`: if it is known already. `g`: what the
        clients received, for methods whose server takes a step along it.
        """
        if normaliser is None:
            divisor = self.normaliser(loss, squared_norms, lr)
            weights = weights / divisor if isinstance(divisor, Tensor) else weights
        else:
            divisor = normaliser
        return Outcome(
            update=self.with_term(total(weights, divisor), loss, lr, g),
            buffers=buffers,
            memory=memory,
            loss=loss,
            weights=weights,
            mean_loss=loss @ self.share if mean_loss is None else mean_loss,
            mean_gradient=mean_gradient,
            ascended=torch.zeros_like(loss[..., 0])
            if own is None
            else torch.where(own.isnan(), torch.nan, (own < 0).double()).mean(-1),
            answered=None if self.everyone else self.ids,
        )

    def _replies(self, loss: Tensor) -> Replies:
        return Replies(loss, self.share, self.ids, self.clients)


class Answers(NamedTuple):
    """Results of m clients that were computed one by one, ids rising."""

    loss: Float64[Tensor, " m"]  # f_i(x^t); NaN if the method does not use it
    params: list[Tree]  # x_i
    buffers: list[Tree]
    own: Float64[Tensor, " m"]  # the factors of their own gradients


def aggregate(
    server: Aggregator,
    state: State,
    answers: Answers,
    mean_loss: Tensor,
    mean_gradient: Tree | None,
    lr: float | Tensor,
    limit: Limit = lambda weights: weights,
    combine: Combine = weighted_sum,
    g: Tree | None = None,
) -> Outcome:
    """The outcome from single local models, of the reference loop or a deployment. `g`: what the
    clients received; `mean_gradient`: for the next round."""
    updates = [subtract(state.x, params) for params in answers.params]
    products = gram(stack(updates)) if server.method.uses_gram else None
    weights, memory = server.weigh(state.memory, answers.loss, products)
    if products is not None:
        limit = _by_length(limit, products)
    norms = torch.stack([squared_norm(u) for u in updates]).double()
    buffers = stack(answers.buffers) if state.buffers else {}
    # In float64, because batch norm's counters are integers.
    mean = combine(server.share, {k: v.double() for k, v in buffers.items()})
    return server.finish(
        lambda divided, _: combine(divided, stack(updates)),
        answers.loss,
        limit(weights),
        memory,
        lr=lr,
        buffers=typed_as(mean, buffers),
        own=answers.own,
        mean_gradient=mean_gradient,
        mean_loss=mean_loss,
        squared_norms=norms,
        g=g,
    )


def _by_length(limit: Limit, gram: Float64[Tensor, "m m"]) -> Limit:
    """Limits w_i ‖x − x_i‖ instead of w_i: methods that weigh by products of updates may normalise
    their lengths, so that a short update has a large weight."""
    length = gram.diagonal().sqrt()

    def limited(weights: Tensor) -> Tensor:
        found = limit(weights * length)
        return torch.where(length > 0, found / length, weights)

    return limited


def _like(value: Tensor | float, other: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(other.dtype).expand_as(other)
    return torch.full_like(other, value)


def _drop(value: Any) -> Any:
    """Without the axis of runs, which floats do not have."""
    if isinstance(value, dict):
        return {name: leaf[0] for name, leaf in value.items()}
    return value[0] if isinstance(value, Tensor) and value.dim() else value


def _lift(value: Any) -> Any:
    """With an axis of one run."""
    if isinstance(value, tuple):
        return tuple(_lift(part) for part in value)
    if isinstance(value, dict):
        return {name: leaf[None] for name, leaf in value.items()}
    return value[None]
