"""Rounds of which the server learns sums over clients only, as secure aggregation gives them.

A client scales what it sends by itself: w(f_i) (x − x_i), its part of the normaliser, f_i and ∇f_i
as its method needs them. The server gets their means over those that took part, weighted by r_i.
That is enough for a method whose weights and normaliser are sums of what each client adds to them.
The server never sees a single reply, so limits on losses, weights and lengths do not apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fairvar.deploy.guard import Arrival, refusal
from fairvar.deploy.messages import (
    GRADIENT,
    LOSS,
    MEAN_LOSS,
    MODEL,
    Message,
    Number,
    Stamp,
    grouped,
)
from fairvar.deploy.server import Good, Server, TooFew, Transport, model_of, too_few
from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Method, Replies
from fairvar.tree import Tree, is_finite, scale, squared_norm, subtract

STEP = "step"  # a client's part of the normaliser


class Mean(NamedTuple):
    """Over those that took part. Empty if secure aggregation failed; `lost` says why."""

    ids: list[int]
    share: Tensor  # r_i, as far as it is known; float64
    arrays: Tree  # Σ r_i v_i, float64
    lost: Sequence[Arrival] = ()


@runtime_checkable
class MeanTransport(Transport, Protocol):
    """Brings nothing but the mean of the clients' contributions back, from evaluations apart."""

    def mean(self, requests: Sequence[Message], like: Tree, seconds: float) -> Mean:
        """Of arrays with these names and shapes."""


def contribution(request: Message, reply: Message, method: Method, lr: float) -> Tree:
    """All that a client may add to the sums, in float64: the model is not sent, its change is."""
    method = method.at_round(request.stamp.round)
    loss = torch.tensor([float(reply.numbers.get(LOSS, torch.nan))], dtype=torch.float64)
    found = grouped(**{GRADIENT: _double(reply.group(GRADIENT))})
    if method.uses_mean_loss:
        found[LOSS] = loss
    if request.stamp.exchange == "train":
        moved = subtract(_double(request.group(MODEL)), _double(reply.group(MODEL)))
        weight, step = _alone(method, loss, squared_norm(moved), lr)
        found |= grouped(**{MODEL: scale(moved, weight)})
        found[STEP] = step.reshape(1)
    return found


def is_additive(method: Method) -> bool:
    """Whether weights and normaliser are sums of clients' own parts: tried on three of them."""
    if not method.sums_suffice or method.initial_memory(3):
        return False
    loss, share, norms = torch.tensor(
        [[0.3, 1.1, 2.7], [0.2, 0.5, 0.3], [0.4, 0.01, 1.9]], dtype=torch.float64
    )
    together = Replies(loss, share, torch.arange(3), 3)
    weights, _ = method.weigh({}, together)
    parts = [_alone(method, loss[i : i + 1], norms[i], 0.1) for i in range(3)]
    own, steps = (torch.stack([torch.as_tensor(p[k]) for p in parts]).double() for k in (0, 1))
    norm = torch.as_tensor(method.normaliser(together, norms, 0.1)).double()
    return torch.allclose(weights, share * own) and torch.allclose(norm, share @ steps)


def _alone(method: Method, loss: Tensor, norm: Tensor, lr: float) -> tuple[float, Tensor]:
    """A client's weight and its part of the normaliser, if its plain weight were one."""
    one = Replies(loss, torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), 1)
    weight, _ = method.weigh({}, one)
    step = torch.as_tensor(method.normaliser(one, norm.double().reshape(1), lr)).double()
    return float(weight), step


def _double(tree: Tree) -> Tree:
    return {name: leaf.double() for name, leaf in tree.items()}


@dataclass
class SummingServer(Server):
    """A server whose transport delivers means only."""

    sums_only: ClassVar[bool] = True

    transport: MeanTransport

    def _attempt(self, state: State, attempt: int, score: bool) -> tuple[Outcome, Good]:
        method, ids = self.method.at_round(state.round), self._invited(state.round, attempt)
        a, g, rest = state.mean_loss, state.mean_gradient, _averages(self.method, method, state)
        if method.probes:
            found = self._mean(Stamp("probe", state.round, attempt), ids, model_of(state), {}, rest)
            ids, a, g, rest = found.ids, *_next(found, state), {}
        numbers: dict[str, Number] = {MEAN_LOSS: float(a)} if method.uses_mean_loss else {}
        sent = model_of(state) | grouped(**{GRADIENT: g if method.uses_mean_gradient else None})
        wanted = grouped(**{MODEL: state.x}) | rest
        scaled = type(method).normaliser is not Method.normaliser
        if scaled:
            wanted[STEP] = torch.zeros(1)
        found = self._mean(Stamp("train", state.round, attempt), ids, sent, numbers, wanted)
        if rest:
            a, g = _next(found, state)
        return self._outcome(state, found, method, a, g), {}

    def _outcome(
        self, state: State, found: Mean, method: Method, a: Tensor, g: Tree | None
    ) -> Outcome:
        step = found.arrays.get(STEP, torch.ones(1))
        update = _group(found.arrays, MODEL)
        unknown = torch.full_like(found.share, torch.nan)
        plain = type(method).weigh is Method.weigh  # weights by losses stay the clients' own
        return self.aggregator(method, found.share, found.ids).outcome(
            {k: (v / step).to(state.x[k].dtype) for k, v in update.items()},
            loss=unknown,
            weights=found.share if plain else unknown,
            memory=state.memory,
            buffers={},
            own=unknown if method.uses_mean_loss else None,
            mean_gradient=g if self.method.reports_gradient else None,
            mean_loss=a,
        )

    def _mean(
        self, stamp: Stamp, ids: list[int], sent: Tree, numbers: dict[str, Number], wanted: Tree
    ) -> Mean:
        requests = [Message(stamp, i, sent, numbers) for i in ids]
        found = self.transport.mean(requests, wanted, self.settings.deadline)
        self.notes.refuse(
            [refusal(stamp, lost.client, lost.reason, lost.detail) for lost in found.lost]
        )
        if len(found.ids) < self.settings.min_replies:
            raise too_few(len(found.ids), self.settings)
        if not is_finite(found.arrays):
            raise TooFew("the sum over clients is not finite")
        return found


def _averages(whole: Method, method: Method, state: State) -> Tree:
    """Averaged with the update: ∇f_i for this round's g or the next one's, f_i for a."""
    by_gradient = whole.reports_gradient or method.probes
    found = grouped(**{GRADIENT: state.x if by_gradient else None})
    if method.uses_mean_loss:
        found[LOSS] = torch.zeros(1)
    return found


def _next(found: Mean, state: State) -> tuple[Tensor, Tree | None]:
    """a and g of those that answered."""
    a = found.arrays[LOSS][0] if LOSS in found.arrays else state.mean_loss
    mean = _group(found.arrays, GRADIENT)
    return a, {k: v.to(state.x[k].dtype) for k, v in mean.items()} or None


def _group(arrays: Tree, name: str) -> Tree:
    mark = f"{name}/"
    return {k.removeprefix(mark): v for k, v in arrays.items() if k.startswith(mark)}
