"""The pooled path: one forward pass over all clients' samples, one weighted backward pass.

With one local step, Σ_i w_i d_i = Σ_i (w_i own_i) ∇f_i + (Σ_i w_i shared_i) g: a single gradient of
a weighted sum of sample losses, whose weights come from the detached client losses. Exact methods
need no second pass, because their g = Σ_i r_i ∇f_i is such a sum as well.

Models with batch norm keep each client's own batch statistics: the data are vmapped over clients
while the parameters stay shared, so torch still folds the clients into one batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from fairvar.engine.batches import RoundBatches
from fairvar.engine.evaluate import client_losses
from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Method, Replies
from fairvar.tree import Tree, add, scale


@dataclass(frozen=True)
class Piece:
    """Part of the pooled batch: samples (batch norm: whole padded clients)."""

    x: Tensor
    y: Tensor
    real: Tensor | None  # (clients, width) for batch norm
    client: Tensor  # of each sample, flat
    share: Tensor  # of each sample in its client's mean, flat; 0 for padding


class PooledPass:
    """Client losses at x, and any weighted sums of client gradients, from the same forward pass."""

    def __init__(self, run: Run, state: State, batches: RoundBatches) -> None:
        self.run = run
        self.params = {k: v.detach().requires_grad_() for k, v in state.x.items()}
        self.given_buffers = state.buffers
        self.pieces = _pieces(run, batches)
        self.kept: Tensor | None = None  # the graph, if everything fits one piece
        self.loss = torch.zeros(run.clients, dtype=torch.float64, device=run.device)
        self.buffers = {k: torch.zeros_like(v, dtype=_wide(v)) for k, v in state.buffers.items()}
        for piece in self.pieces:
            with torch.set_grad_enabled(len(self.pieces) == 1):
                losses = self._forward(piece, remember_buffers=True)
            if len(self.pieces) == 1:
                self.kept = losses
            self.loss.index_add_(0, piece.client, losses.detach().double() * piece.share.double())
        self.buffers = {k: v.to(state.buffers[k].dtype) for k, v in self.buffers.items()}

    def gradients(self, coefficients: list[Tensor]) -> list[Tree]:
        """Σ_i c_i ∇f_i(x) for each vector c over clients."""
        totals: list[Tree] = []
        for piece in self.pieces:
            losses = self.kept if self.kept is not None else self._forward(piece)
            for number, c in enumerate(coefficients):
                weight = c.to(losses.dtype)[piece.client] * piece.share
                keep = number < len(coefficients) - 1
                found = torch.autograd.grad(
                    losses, list(self.params.values()), weight, retain_graph=keep
                )
                tree = dict(zip(self.params, found, strict=True))
                if number < len(totals):
                    totals[number] = add(totals[number], tree)
                else:
                    totals.append(tree)
        return totals

    def _forward(self, piece: Piece, remember_buffers: bool = False) -> Tensor:
        task = self.run.task
        if piece.real is None:
            return task.sample_losses(self.params, self.given_buffers, piece.x, piece.y, None)[0]
        real = None if self.run.schedule.even else piece.real  # no padding, no mask
        axes = (None, None, 0, 0, None if real is None else 0)
        losses, buffers = vmap(task.sample_losses, in_dims=axes)(
            self.params, self.given_buffers, piece.x, piece.y, real
        )
        if remember_buffers:
            clients = piece.client.reshape(piece.real.shape)[:, 0]
            self._remember(buffers, self.run.share[clients])
        return losses.flatten()

    def _remember(self, buffers: Tree, share: Tensor) -> None:
        """Running statistics are averaged with the plain client weights."""
        for name, stacked in buffers.items():
            total = self.buffers[name]
            total += torch.tensordot(
                share.to(total.dtype), stacked.detach().to(total.dtype), dims=1
            )


def _wide(buffer: Tensor) -> torch.dtype:
    """Counters are averaged as floats and rounded afterwards."""
    return buffer.dtype if buffer.is_floating_point() else torch.float64


def _pieces(run: Run, batches: RoundBatches) -> list[Piece]:
    split, first = run.federation.train, run.schedule.first
    if run.task.batch_norm:
        return [_padded_piece(run, batches, ids) for ids in run.ids.split(
            max(1, run.piece // run.schedule.width))]  # fmt: skip
    x, y, client = split.x, split.y, first.client
    if not run.schedule.full_batch:
        rows = batches.shuffled[0, first.place]
        x, y = split.x[rows], split.y[rows]
    share = (1 / first.length.to(run.dtype))[client]
    cut = range(0, len(client), run.piece)
    return [
        Piece(x[i : i + run.piece], y[i : i + run.piece], None,
              client[i : i + run.piece], share[i : i + run.piece])
        for i in cut
    ]  # fmt: skip


def _padded_piece(run: Run, batches: RoundBatches, ids: Tensor) -> Piece:
    split = run.federation.train
    rows, real = batches.rows(0, ids)
    weight = real.to(run.dtype)
    share = weight / weight.sum(1, keepdim=True)
    client = ids[:, None].expand_as(rows)
    return Piece(split.x[rows], split.y[rows], real, client.flatten(), share.flatten())


def per_client(run: Run, value: Tensor | float) -> Tensor:
    """A coefficient as one number per client; made on the device, since a captured round cannot
    fetch numbers from the host."""
    if isinstance(value, Tensor):
        return value.double().expand(run.clients)
    return torch.full_like(run.share, value)


def observed_losses(run: Run, state: State, method: Method, on_batch: Tensor) -> Tensor:
    """The f_i(x^t) that the method works with: on this round's batch, or on all training data."""
    same = run.schedule.full_batch and not run.task.batch_norm
    if method.loss_data == "batch" or same:
        return on_batch
    return client_losses(run.task, state.x, state.buffers, run.federation.train, run.piece)


def pooled_round(run: Run, state: State, t: int) -> Outcome:
    method = run.method.at_round(t)
    forward = PooledPass(run, state, run.schedule.round(t))
    loss = observed_losses(run, state, method, forward.loss)
    weights, memory = method.weigh(state.memory, Replies(loss, run.share, run.ids, run.clients))
    mean_loss = run.share @ loss
    a = mean_loss if method.probes else state.mean_loss
    own, shared = (per_client(run, c) for c in method.coefficients(loss, a))
    spill = (weights * shared).sum()  # how much of g the weighted sum of directions contains

    wanted = [weights * own + spill * run.share if method.probes else weights * own]
    if run.method.reports_gradient:
        wanted.append(run.share)
    direction, *mean_gradient = forward.gradients(wanted)
    if state.mean_gradient is not None and not method.probes:
        direction = add(direction, state.mean_gradient, spill.to(run.dtype))
    return Outcome(
        update=scale(direction, run.lr),
        buffers=forward.buffers,
        memory=memory,
        loss=loss,
        weights=weights,
        mean_loss=mean_loss,
        mean_gradient=mean_gradient[0] if run.method.reports_gradient else None,
        ascended=(own < 0).double().mean(),
    )
