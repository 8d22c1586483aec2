"""The vectorised path: every client has its own parameters, all clients step together.

Used for several local steps, for norms of client updates (q-FFL), for curvature (FairGrad) and to
see each client's own updated model. Clients are ordered by their number of steps, so those still
active form a prefix that shrinks as small clients finish: ragged data waste no work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fairvar.engine.batches import RoundBatches
from fairvar.engine.kernels.shared import (
    PooledPass,
    jvp,
    observed_losses,
    takes_batch_losses,
)
from fairvar.engine.run import TILE, Run
from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Method
from fairvar.tree import (
    Tree,
    add,
    concatenate,
    divide,
    expand,
    scale,
    squared_norm,
    subtract,
    tree_map,
    typed_as,
)


@dataclass(frozen=True)
class Trained:
    """Some clients after their local steps (leaves have the client as first axis)."""

    ids: Tensor
    params: Tree
    buffers: Tree
    loss: Tensor  # f_i(x^t) on the first batch
    gradient: Tree  # ∇f_i(x^t) on the first batch
    own: Tensor  # the factor of the client's own gradient in the first step


Observer = Callable[[Trained], None]


@dataclass(frozen=True)
class Sent:
    """What the clients received with x^t."""

    method: Method
    mean_loss: Tensor
    mean_gradient: Tree | None
    full_loss: Tensor | None  # by place, where the method uses f_i on all data


@dataclass
class TileSums:
    """Σ over clients in an order that does not depend on the chunks: tile after tile."""

    trees: dict[str, Tree] = field(default_factory=dict)

    def add(self, name: str, weights: Tensor, stacked: Tree) -> None:
        for start in range(0, len(weights), TILE):
            tile = slice(start, start + TILE)
            part = tree_map(lambda leaf, s=tile: _weighted(weights[s], leaf[s]), stacked)
            self.trees[name] = add(self.trees[name], part) if name in self.trees else part


def client_norms(stacked: Tree) -> Tensor:
    """‖·‖² of every client, tile by tile for the same reason."""
    clients = len(next(iter(stacked.values())))
    tiles = [slice(start, start + TILE) for start in range(0, clients, TILE)]
    parts = [squared_norm(tree_map(lambda leaf, s=t: leaf[s], stacked), True) for t in tiles]
    return torch.cat(parts).double()


def _weighted(weights: Tensor, leaf: Tensor) -> Tensor:
    leaf = leaf if leaf.is_floating_point() else leaf.double()
    return torch.tensordot(weights.to(leaf.dtype), leaf, dims=1)


def vmapped_round(run: Run, state: State, t: int, observe: Observer | None = None) -> Outcome:
    run = run.of_round(t)
    server = run.server(t)
    batches = run.cohort.round(t)
    sent, loss_before = _receive(run, state, server.method, batches)
    loss = loss_before if loss_before is not None else torch.zeros_like(run.share)
    weights, memory = server.weigh(state.memory, loss)

    sums = TileSums()
    norms, own, batch_loss = (torch.zeros_like(run.share) for _ in range(3))
    for chunk in run.chunks():
        with run.kernels():
            trained = train_clients(run, state, sent, batches, chunk)
        if observe is not None:
            observe(trained)
        places = run.cohort.order_on_device[slice(*chunk)]
        update = tree_map(lambda x, xi: x - xi, expand(state.x, len(places)), trained.params)
        sums.add("update", weights[places], update)
        if run.method.reports_gradient:
            sums.add("gradient", run.share[places], trained.gradient)
        sums.add("buffers", run.share[places], trained.buffers)
        norms[places] = client_norms(update)
        own[places], batch_loss[places] = trained.own.double(), trained.loss.double()

    loss = sent.full_loss if sent.full_loss is not None else batch_loss
    normaliser = server.normaliser(loss, norms, run.lr)
    return server.outcome(
        divide(sums.trees["update"], normaliser),
        loss,
        weights / normaliser,
        memory,
        typed_as(sums.trees["buffers"], state.buffers) if state.buffers else {},
        own,
        sums.trees.get("gradient"),
    )


def _receive(
    run: Run, state: State, method: Method, batches: RoundBatches
) -> tuple[Sent, Tensor | None]:
    """What the clients get before they train, and the losses if the server needs them by then."""
    full, loss = None, None
    forward, needs_loss = None, method.needs_losses
    if method.probes or (needs_loss and takes_batch_losses(run, method)):
        forward = PooledPass(run, state, batches, [run.share] if method.probes else None)
    if needs_loss:
        loss = observed_losses(run, state, method, None if forward is None else forward.loss)
        full = loss if method.loss_data == "full" else None
    mean_loss, mean_gradient = state.mean_loss, state.mean_gradient
    if method.probes and forward is not None:
        mean_loss = run.share @ (forward.loss if loss is None else loss)
        mean_gradient = forward.totals[0]
    return Sent(method, mean_loss.to(run.dtype), mean_gradient, full), loss


def train_clients(
    run: Run, state: State, sent: Sent, batches: RoundBatches, chunk: tuple[int, int]
) -> Trained:
    """All local steps of the clients in this part of the cohort's order."""
    cohort, split = run.cohort, run.federation.train
    order, places = cohort.order[slice(*chunk)], cohort.order_on_device[slice(*chunk)]
    steps = [cohort.steps[place] for place in order]

    def step(number: int, some: slice, params: Tree, buffers: Tree, shared: bool) -> _Step:
        rows, mask = batches.rows(number, places[some])
        real = mask if cohort.pads(number, order[some]) else None
        full = None if sent.full_loss is None else sent.full_loss[places[some]].to(run.dtype)
        own = None if shared else 0
        axes = (own, own, 0, 0, *(None if v is None else 0 for v in (real, full)))
        together = vmap(_client_step(run, sent), in_dims=axes)
        return together(params, buffers, split.x[rows], split.y[rows], real, full)

    start = step(0, slice(0, len(order)), state.x, state.buffers, True)
    x = expand(state.x, len(order))
    models = Prefix(tree_map(lambda at, d: at - run.lr * d, x, start.direction), start.buffers)
    for number in range(1, steps[0]):
        models.shrink(sum(s > number for s in steps))
        calls = _calls(models.active, len(order), run.device)
        parts = [(some, *models.part(some)) for some in calls]
        made = [step(number, some, params, buffers, False) for some, params, buffers in parts]
        moved = [
            (tree_map(lambda at, d: at - run.lr * d, params, one.direction), one.buffers)
            for (_, params, _), one in zip(parts, made, strict=True)
        ]
        models.replace(moved)
    return Trained(run.ids[places], *models.whole(), start.loss, start.gradient, start.own)


class Prefix:
    """The models of a chunk's clients while fewer and fewer of them are still training."""

    def __init__(self, params: Tree, buffers: Tree) -> None:
        self.params, self.buffers = params, buffers
        self.finished: list[tuple[Tree, Tree]] = []  # those with the fewest steps first

    @property
    def active(self) -> int:
        return len(next(iter(self.params.values())))

    def part(self, some: slice) -> tuple[Tree, Tree]:
        if some == slice(0, self.active):
            return self.params, self.buffers
        return tuple(tree_map(lambda leaf: leaf[some], t) for t in (self.params, self.buffers))  # type: ignore[return-value]

    def shrink(self, active: int) -> None:
        if active < self.active:
            done = self.part(slice(active, self.active))
            # Copies: a view would keep the models of all clients until the end.
            self.finished.append((tree_map(Tensor.clone, done[0]), tree_map(Tensor.clone, done[1])))
            self.params, self.buffers = self.part(slice(0, active))

    def replace(self, parts: list[tuple[Tree, Tree]]) -> None:
        self.params, self.buffers = _joined(parts)

    def whole(self) -> tuple[Tree, Tree]:
        return _joined([(self.params, self.buffers), *reversed(self.finished)])


def _joined(parts: list[tuple[Tree, Tree]]) -> tuple[Tree, Tree]:
    if len(parts) == 1:
        return parts[0]
    params, buffers = zip(*parts, strict=True)
    return concatenate(list(params)), concatenate(list(buffers))


def _calls(active: int, width: int, device: torch.device) -> list[slice]:
    """How the active prefix of a chunk is vectorised: all of it, or whole tiles and the rest apart.

    So the number of clients that compute together never depends on the chunk below one tile. (A GPU
    promises no such thing, and there a second call costs as much as the first.)
    """
    whole = active - active % TILE
    together = active in (0, width) or device.type == "cuda"
    cuts = [0, active] if together else [0, whole, active]
    return [slice(a, b) for a, b in pairwise(cuts) if b > a]


class _Step(NamedTuple):  # a tuple, because vmap looks into those
    direction: Tree
    gradient: Tree
    buffers: Tree
    loss: Tensor
    own: Tensor


def _client_step(run: Run, sent: Sent) -> Callable[..., _Step]:
    """One local step of one client, as a pure function to be vmapped."""
    method, g, task = sent.method, sent.mean_gradient, run.task.apart

    def client_step(
        params: Tree,
        buffers: Tree,
        x: Tensor,
        y: Tensor,
        real: Tensor | None,
        full: Tensor | None,
    ) -> _Step:
        def loss_and_gradient(at: Tree) -> tuple[Tree, tuple[Tensor, Tree]]:
            return grad_and_value(task.client_loss, has_aux=True)(at, buffers, x, y, real)

        gradient, (loss, new_buffers) = loss_and_gradient(params)
        own, shared = (
            c.to(loss.dtype) if isinstance(c, Tensor) else c
            for c in method.coefficients(loss if full is None else full, sent.mean_loss)
        )
        direction = gradient if isinstance(own, float) and own == 1 else scale(gradient, own)
        if g is not None and not (isinstance(shared, float) and shared == 0):
            direction = add(direction, g, shared)
        if method.uses_curvature:
            away = gradient if g is None else subtract(gradient, g)
            # Forward over reverse: right for every layer, batch norm included, and it gives each
            # client its own product, which local steps need.
            product = jvp(lambda at: loss_and_gradient(at)[0], (params,), (away,))[1]
            direction = add(direction, product, method.curvature)
        if run.clip_norm is not None:
            norm = squared_norm(direction).sqrt()
            direction = scale(direction, torch.clamp(run.clip_norm / norm, max=1.0))
        own = own if isinstance(own, Tensor) else torch.full_like(loss, own)
        return _Step(direction, gradient, new_buffers, loss, own)

    return client_step
