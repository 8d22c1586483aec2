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
from torch.func import grad_and_value, jvp, vmap

from fairvar.engine.batches import RoundBatches
from fairvar.engine.pooled import PooledPass, observed_losses
from fairvar.engine.run import TILE, Run
from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Method, Replies
from fairvar.tree import Tree, add, expand, scale, squared_norm, subtract, tree_map


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
    """What the clients received beside x^t."""

    method: Method
    mean_loss: Tensor
    mean_gradient: Tree | None
    full_loss: Tensor | None  # per client, where the method uses f_i on all data


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
    method, batches = run.method.at_round(t), run.schedule.round(t)
    sent, loss_before = _receive(run, state, method, batches)
    n = run.clients
    loss = loss_before if loss_before is not None else torch.zeros_like(run.share)
    weights, memory = method.weigh(state.memory, Replies(loss, run.share, run.ids, n))

    sums = TileSums()
    norms, own, batch_loss = (torch.zeros_like(run.share) for _ in range(3))
    for chunk in run.chunks():
        trained = train_clients(run, state, sent, batches, chunk)
        if observe is not None:
            observe(trained)
        ids = trained.ids
        update = tree_map(lambda x, xi: x - xi, expand(state.x, len(ids)), trained.params)
        sums.add("update", weights[ids], update)
        if run.method.reports_gradient:
            sums.add("gradient", run.share[ids], trained.gradient)
        sums.add("buffers", run.share[ids], trained.buffers)
        norms[ids] = client_norms(update)
        own[ids], batch_loss[ids] = trained.own.double(), trained.loss.double()

    loss = sent.full_loss if sent.full_loss is not None else batch_loss
    replies = Replies(loss, run.share, run.ids, n)
    normaliser = torch.as_tensor(method.normaliser(replies, norms, run.lr), dtype=torch.float64)
    buffers = {k: sums.trees["buffers"][k].to(v.dtype) for k, v in state.buffers.items()}
    return Outcome(
        update=scale(sums.trees["update"], (1 / normaliser).to(run.device, run.dtype)),
        buffers=buffers,
        memory=memory,
        loss=loss,
        weights=weights / normaliser.to(run.device),
        mean_loss=run.share @ loss,
        mean_gradient=sums.trees.get("gradient"),
        ascended=(own < 0).double().mean(),
    )


def _receive(
    run: Run, state: State, method: Method, batches: RoundBatches
) -> tuple[Sent, Tensor | None]:
    """What the clients get before they train, and the losses if the server needs them by then."""
    full, needs_loss = None, method.uses_losses or method.uses_mean_loss
    forward = PooledPass(run, state, batches) if method.probes or needs_loss else None
    loss = None
    if forward is not None and needs_loss:
        loss = observed_losses(run, state, method, forward.loss)
        full = loss if method.loss_data == "full" else None
    mean_loss, mean_gradient = state.mean_loss, state.mean_gradient
    if method.probes and forward is not None:
        mean_loss = run.share @ (forward.loss if loss is None else loss)
        mean_gradient = forward.gradients([run.share])[0]
    return Sent(method, mean_loss.to(run.dtype), mean_gradient, full), loss


def train_clients(
    run: Run, state: State, sent: Sent, batches: RoundBatches, chunk: tuple[int, int]
) -> Trained:
    """All local steps of the clients in these places of the order."""
    first, last = chunk
    order = run.schedule.order
    steps = [run.schedule.steps[i] for i in order[first:last]]
    ids = torch.tensor(order[first:last], device=run.device)
    split = run.federation.train

    def step(number: int, some: slice, params: Tree, buffers: Tree, shared: bool) -> _Step:
        rows, real = batches.rows(number, ids[some])
        full = None if sent.full_loss is None else sent.full_loss[ids[some]].to(run.dtype)
        own, scalar = (None if shared else 0), (None if full is None else 0)
        together = vmap(_client_step(run, sent), in_dims=(own, own, 0, 0, 0, scalar))
        return together(params, buffers, split.x[rows], split.y[rows], real, full)

    everyone = slice(0, len(ids))
    start = step(0, everyone, state.x, state.buffers, True)
    params = tree_map(lambda x, d: x - run.lr * d, expand(state.x, len(ids)), start.direction)
    buffers = start.buffers
    for number in range(1, steps[0]):
        for some in _calls(sum(s > number for s in steps), len(ids)):
            part = tree_map(lambda leaf, s=some: leaf[s], params)
            kept = tree_map(lambda leaf, s=some: leaf[s], buffers)
            made = step(number, some, part, kept, False)
            for name, leaf in params.items():
                leaf[some] = part[name] - run.lr * made.direction[name]
            for name, leaf in buffers.items():
                leaf[some] = made.buffers[name]
    return Trained(ids, params, buffers, start.loss, start.gradient, start.own)


def _calls(active: int, width: int) -> list[slice]:
    """How the active prefix of a chunk is vectorised: all of it, or whole tiles and the rest apart.

    So the number of clients that compute together never depends on the chunk below one tile.
    """
    whole = active - active % TILE
    cuts = [0, active] if active in (0, width) else [0, whole, active]
    return [slice(a, b) for a, b in pairwise(cuts) if b > a]


class _Step(NamedTuple):  # a tuple, because vmap looks into those
    direction: Tree
    gradient: Tree
    buffers: Tree
    loss: Tensor
    own: Tensor


def _client_step(run: Run, sent: Sent) -> Callable[..., _Step]:
    """One local step of one client, as a pure function to be vmapped."""
    method, g = sent.method, sent.mean_gradient

    def client_step(
        params: Tree, buffers: Tree, x: Tensor, y: Tensor, real: Tensor, full: Tensor | None
    ) -> _Step:
        def loss_and_gradient(at: Tree) -> tuple[Tree, tuple[Tensor, Tree]]:
            return grad_and_value(run.task.client_loss, has_aux=True)(at, buffers, x, y, real)

        gradient, (loss, new_buffers) = loss_and_gradient(params)
        own, shared = method.coefficients(loss if full is None else full, sent.mean_loss)
        direction = scale(gradient, own)
        if g is not None:
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
        own = torch.as_tensor(own, dtype=loss.dtype, device=loss.device).expand_as(loss)
        return _Step(direction, gradient, new_buffers, loss, own)

    return client_step
