"""The blocked path: one local step with per-client gradients (q-FFL) or curvature (FairGrad).

Each client's samples are cut into blocks of one width, and the blocks are vectorised with shared
parameters; block gradients are added up per client. Ragged clients then cost at most one partly
filled block each, instead of everybody's padding to the largest client. (Batch norm needs a
client's samples together: there the block is the client.)

Curvature needs only Σ_i w_i ∇²f_i v_i with v_i = ∇f_i − g. That is the gradient, at the shared x,
of Σ_i w_i ⟨∇f_i(x), v_i⟩, whose terms are forward derivatives of f_i along v_i: one reverse pass
over one forward pass, and no per-client Hessian products are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

from fairvar.engine.batches import RoundBatches
from fairvar.engine.pooled import observed_losses
from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Method, Replies
from fairvar.tree import Tree, add, scale, squared_norm, tree_map, weighted_sum


@dataclass(frozen=True)
class Blocks:
    """All samples of a round, `width` to a block; leaves have the block as first axis."""

    x: Tensor
    y: Tensor
    real: Tensor
    share: Tensor  # of each sample in its client's mean; 0 for padding
    client: Tensor


def blocked_round(run: Run, state: State, t: int) -> Outcome:
    method, n = run.method.at_round(t), run.clients
    blocks = _cut(run, run.schedule.round(t))
    on_batch, gradient, buffers = _client_gradients(run, state, blocks)
    loss = observed_losses(run, state, method, on_batch)
    replies = Replies(loss, run.share, run.ids, n)
    weights, memory = method.weigh(state.memory, replies)
    mean_loss, mean_gradient = run.share @ loss, weighted_sum(run.share, gradient)
    a, g = (mean_loss, mean_gradient) if method.probes else (state.mean_loss, state.mean_gradient)
    own, shared = (
        torch.as_tensor(c, dtype=torch.float64, device=run.device).expand(n)
        for c in method.coefficients(loss, a)
    )
    if method.uses_curvature:
        update = _with_curvature(run, method, state, blocks, gradient, g, (weights, own, shared))
        normaliser: Tensor | float = 1.0
    else:
        updates = _client_updates(run, gradient, g, own, shared)
        normaliser = method.normaliser(
            replies, squared_norm(updates, batched=True).double(), run.lr
        )
        update = weighted_sum(weights / normaliser, updates)
    return Outcome(
        update=update,
        buffers=buffers,
        memory=memory,
        loss=loss,
        weights=weights / normaliser,
        mean_loss=mean_loss,
        mean_gradient=mean_gradient if run.method.reports_gradient else None,
        ascended=(own < 0).double().mean(),
    )


def _cut(run: Run, batches: RoundBatches) -> Blocks:
    split, width = run.federation.train, run.block
    rows, real = batches.rows(0, run.ids)
    share = real.to(run.dtype) / real.sum(1, keepdim=True)
    across = -(-rows.shape[1] // width)
    missing = across * width - rows.shape[1]
    if missing:
        rows = torch.cat([rows, rows[:, :1].expand(-1, missing)], 1)
        real, share = (torch.nn.functional.pad(v, (0, missing)) for v in (real, share))
    rows, real, share = (v.reshape(-1, width) for v in (rows, real, share))
    filled = real[:, 0]  # samples come first in a row, so an empty start is an empty block
    rows, real, share = rows[filled], real[filled], share[filled]
    client = run.ids.repeat_interleave(across)[filled]
    return Blocks(split.x[rows], split.y[rows], real, share, client)


def _client_gradients(run: Run, state: State, blocks: Blocks) -> tuple[Tensor, Tree, Tree]:
    """f_i and ∇f_i of every client at x^t, and the averaged buffers after the batch."""

    def block_loss(
        params: Tree, x: Tensor, y: Tensor, real: Tensor, share: Tensor
    ) -> tuple[Tensor, Tree]:
        losses, buffers = run.task.sample_losses(params, state.buffers, x, y, real)
        return (losses * share).sum(), buffers

    over_blocks = vmap(grad_and_value(block_loss, has_aux=True), in_dims=(None, 0, 0, 0, 0))
    gradients, (losses, buffers) = over_blocks(
        state.x, blocks.x, blocks.y, blocks.real, blocks.share
    )
    loss = torch.zeros_like(run.share).index_add_(0, blocks.client, losses.double())
    if len(blocks.client) > run.clients:
        gradients = tree_map(lambda leaf: _by_client(run, blocks, leaf), gradients)
    averaged = {
        name: torch.tensordot(run.share[blocks.client], leaf.double(), dims=1).to(leaf.dtype)
        for name, leaf in buffers.items()
        if run.task.batch_norm
    }
    return loss, gradients, averaged or state.buffers


def _by_client(run: Run, blocks: Blocks, leaf: Tensor) -> Tensor:
    total = leaf.new_zeros(run.clients, *leaf.shape[1:])
    return total.index_add_(0, blocks.client, leaf)


def _client_updates(run: Run, gradient: Tree, g: Tree | None, own: Tensor, shared: Tensor) -> Tree:
    """x − x_i for every client, one plain step each, cut to `clip_norm`."""

    def per_client(factor: Tensor, leaf: Tensor) -> Tensor:
        return factor.to(leaf.dtype).reshape(-1, *[1] * (leaf.dim() - 1)) * leaf

    direction = tree_map(lambda leaf: per_client(own, leaf), gradient)
    if g is not None:
        direction = tree_map(lambda d, shift: d + per_client(shared, shift[None]), direction, g)
    if run.clip_norm is not None:
        norm = squared_norm(direction, batched=True).sqrt()
        cut = torch.clamp(run.clip_norm / norm, max=1.0)
        direction = tree_map(lambda leaf: per_client(cut, leaf), direction)
    return scale(direction, run.lr)


def _with_curvature(
    run: Run,
    method: Method,
    state: State,
    blocks: Blocks,
    gradient: Tree,
    g: Tree | None,
    factors: tuple[Tensor, Tensor, Tensor],
) -> Tree:
    """η Σ_i w_i (own_i ∇f_i + shared_i g + γ ∇²f_i (∇f_i − g))"""
    weights, own, shared = factors
    away = gradient if g is None else tree_map(lambda leaf, mean: leaf - mean, gradient, g)
    along_block = tree_map(lambda leaf: leaf[blocks.client], away)
    weight = weights.to(run.dtype)[blocks.client]

    def slope(params: Tree) -> Tensor:
        def along(v: Tree, x: Tensor, y: Tensor, real: Tensor, share: Tensor) -> Tensor:
            def block_loss(at: Tree) -> Tensor:
                return (run.task.sample_losses(at, state.buffers, x, y, real)[0] * share).sum()

            return jvp(block_loss, (params,), (v,))[1]

        slopes = vmap(along)(along_block, blocks.x, blocks.y, blocks.real, blocks.share)
        return (weight * slopes).sum()

    total = add(weighted_sum(weights * own, gradient), grad(slope)(state.x), method.curvature)
    if g is not None:
        total = add(total, g, (weights * shared).sum().to(run.dtype))
    return scale(total, run.lr)
