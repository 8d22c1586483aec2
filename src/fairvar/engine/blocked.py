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
from torch.func import grad, grad_and_value, vmap

from fairvar.engine.batches import RoundBatches
from fairvar.engine.forward import jvp
from fairvar.engine.pooled import observed_losses, per_client
from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Replies
from fairvar.tree import Tree, add, scale, squared_norm, tree_map, typed_as, weighted_sum


@dataclass(frozen=True)
class Blocks:
    """All samples of a round, `width` to a block; leaves have the block as first axis."""

    x: Tensor
    y: Tensor
    real: Tensor | None  # None: no padding anywhere, so nothing has to be masked
    share: Tensor  # of each sample in its client's mean; 0 for padding
    place: Tensor  # of the block's client in the cohort

    @property
    def axes(self) -> tuple[int, int, int | None, int]:
        """vmap's axes of x, y, real and share."""
        return 0, 0, None if self.real is None else 0, 0


def blocked_round(run: Run, state: State, t: int) -> Outcome:
    run, method = run.of_round(t), run.method.at_round(t)
    blocks = _cut(run, run.cohort.round(t))
    on_batch, gradient, buffers = _client_gradients(run, state, blocks)
    loss = observed_losses(run, state, method, on_batch)
    replies = Replies(loss, run.share, run.ids, run.clients)
    weights, memory = method.weigh(state.memory, replies)
    mean_loss, a, g = run.share @ loss, state.mean_loss, state.mean_gradient
    fresh = weighted_sum(run.share, gradient) if run.method.uses_mean_gradient else None
    if method.probes:
        a, g = mean_loss, fresh
    own, shared = (per_client(run, c) for c in method.coefficients(loss, a))

    norms = torch.zeros_like(own)
    kept = weights  # of each client's direction, after clipping
    if method.uses_norms or run.clip_norm is not None:
        norms = _direction_norms(gradient, g, own, shared)
        if run.clip_norm is not None:
            cut = torch.clamp(run.clip_norm / norms.sqrt(), max=1.0)
            norms, kept = norms * cut**2, weights * cut
    normaliser = method.normaliser(replies, run.lr**2 * norms, run.lr)
    direction = weighted_sum(kept * own, gradient)
    if g is not None:
        direction = add(direction, g, (kept * shared).sum().to(run.dtype))
    if method.uses_curvature:
        with run.kernels():
            products = _weighted_curvature(run, state, blocks, gradient, g, weights)
        direction = add(direction, products, method.curvature)
    step = run.lr / normaliser
    outcome = Outcome(
        update=scale(direction, step.to(run.dtype) if isinstance(step, Tensor) else step),
        buffers=buffers,
        memory=memory,
        loss=loss,
        weights=weights / normaliser,
        mean_loss=mean_loss,
        mean_gradient=fresh if run.method.reports_gradient else None,
        ascended=(own < 0).double().mean(),
    )
    return outcome if run.drawn is None else outcome.among(run.ids, run.clients)


def _cut(run: Run, batches: RoundBatches) -> Blocks:
    split, width, n = run.federation.train, run.block, len(run.ids)
    if run.schedule.even and width == run.schedule.width:
        # The block is the client and nothing is padded; if it is all there is,
        # it is not even gathered.
        share = torch.full((n, width), 1 / width, dtype=run.dtype, device=run.device)
        if run.schedule.full_batch and run.cohort.everyone:
            x, y = (v.reshape(n, width, *v.shape[1:]) for v in (split.x, split.y))
        else:
            rows = batches.rows(0, run.cohort.places)[0]
            x, y = split.x[rows], split.y[rows]
        return Blocks(x, y, None, share, run.cohort.places)
    layout = run.layout
    rows = batches.shuffled[0, layout.slot]
    share = layout.share.to(run.dtype)
    return Blocks(split.x[rows], split.y[rows], layout.real, share, layout.place)


def _client_gradients(run: Run, state: State, blocks: Blocks) -> tuple[Tensor, Tree, Tree]:
    """f_i and ∇f_i of every client at x^t, and the averaged buffers after the batch."""

    def block_loss(
        params: Tree, x: Tensor, y: Tensor, real: Tensor | None, share: Tensor
    ) -> tuple[Tensor, Tree]:
        losses, buffers = run.task.apart.sample_losses(params, state.buffers, x, y, real)
        return (losses * share).sum(), buffers

    over_blocks = vmap(
        grad_and_value(block_loss, has_aux=True),
        (None, *blocks.axes),
        chunk_size=run.blocks_at_once,
    )
    gradients, (losses, buffers) = over_blocks(
        state.x, blocks.x, blocks.y, blocks.real, blocks.share
    )
    loss = torch.zeros_like(run.share).index_add_(0, blocks.place, losses.double())
    if len(blocks.place) > len(run.ids):
        gradients = tree_map(lambda leaf: _by_client(run, blocks, leaf), gradients)
    if not run.task.batch_norm:
        return loss, gradients, state.buffers
    wide = {name: leaf.double() for name, leaf in buffers.items()}
    return loss, gradients, typed_as(weighted_sum(run.share[blocks.place], wide), buffers)


def _by_client(run: Run, blocks: Blocks, leaf: Tensor) -> Tensor:
    total = leaf.new_zeros(len(run.ids), *leaf.shape[1:])
    return total.index_add_(0, blocks.place, leaf)


def _direction_norms(gradient: Tree, g: Tree | None, own: Tensor, shared: Tensor) -> Tensor:
    """‖own_i ∇f_i + shared_i g‖² of every client, without forming the directions."""
    squares = own**2 * squared_norm(gradient, batched=True).double()
    if g is None:
        return squares
    along = sum((gradient[name].flatten(1) @ leaf.flatten()).double() for name, leaf in g.items())
    return squares + 2 * own * shared * along + shared**2 * squared_norm(g).double()


def _weighted_curvature(
    run: Run, state: State, blocks: Blocks, gradient: Tree, g: Tree | None, weights: Tensor
) -> Tree:
    """Σ_i w_i ∇²f_i (∇f_i − g)"""
    away = gradient if g is None else tree_map(lambda leaf, mean: leaf - mean, gradient, g)
    if len(blocks.place) > len(run.ids):
        away = tree_map(lambda leaf: leaf[blocks.place], away)
    weight = weights.to(run.dtype)[blocks.place]

    def slope(params: Tree) -> Tensor:
        def along(v: Tree, x: Tensor, y: Tensor, real: Tensor | None, share: Tensor) -> Tensor:
            def block_loss(at: Tree) -> Tensor:
                return (
                    run.task.apart.sample_losses(at, state.buffers, x, y, real)[0] * share
                ).sum()

            return jvp(block_loss, (params,), (v,))[1]

        slopes = vmap(along, (0, *blocks.axes), chunk_size=run.blocks_at_once)(
            away, blocks.x, blocks.y, blocks.real, blocks.share
        )
        return (weight * slopes).sum()

    return grad(slope)(state.x)
