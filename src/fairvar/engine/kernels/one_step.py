"""One local step from shared parameters: the forms "pooled" and "blocked"; and the update rule of
local steps for all vectorised kernels.

The pooled form: one forward pass over all clients' samples, one weighted backward pass.

With one local step, Σ_i w_i d_i = Σ_i (w_i own_i) ∇f_i + (Σ_i w_i shared_i) g: a single gradient of
a weighted sum of sample losses, whose weights come from the detached client losses. Exact methods
need no second pass, because their g = Σ_i r_i ∇f_i is such a sum as well.

Models with batch norm keep each client's own batch statistics: the data are vmapped over clients
while the parameters stay shared, so torch still folds the clients into one batch.

The blocked form: one local step with per-client gradients (q-FFL) or curvature (FairGrad).

Each client's samples are cut into blocks of one width, and the blocks are vectorised with shared
parameters; block gradients are added up per client. Ragged clients then cost at most one partly
filled block each, instead of padding all clients to the largest client. (Batch norm needs a
client's samples together: there the block is the client.)

Curvature needs only Σ_i w_i ∇²f_i v_i with v_i = ∇f_i − g. That is the gradient, at the shared x,
of Σ_i w_i ⟨∇f_i(x), v_i⟩, whose terms are forward derivatives of f_i along v_i: one reverse pass
over one forward pass, and no per-client Hessian products are stored.

Both forms can be compiled (`compiled.py`), in groups of clients whose block is their whole batch.
Parameters stay shared, so nothing is copied for each client.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, grad_and_value, vjp, vmap

from fairvar.common.tree import (
    Tree,
    add,
    rows,
    scale,
    squared_norm,
    subtract,
    tree_map,
    typed_as,
    weighted_sum,
)
from fairvar.engine.batches import Batch, RoundBatches
from fairvar.engine.evaluate import evaluate_shared
from fairvar.engine.kernels.compiled import group_width, in_groups, of_group
from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State
from fairvar.engine.task import Task, channels_last
from fairvar.methods.base import Method
from fairvar.models.norm import plain_attention


@dataclass(frozen=True)
class BlockSamples:
    """Samples of a round, `width` to a block; leaves have the block as first axis."""

    batch: Batch
    share: Tensor  # of each sample in its client's mean; 0 for padding
    place: Tensor  # of the block's client in the cohort

    @property
    def places(self) -> Tensor:
        """Of every sample's client, flat."""
        return self.place[:, None].expand_as(self.share).flatten()


def take_samples(
    run: Run, batches: RoundBatches, width: int, some: slice = slice(None)
) -> BlockSamples:
    """Of the first step in blocks of this width, or some of the blocks."""
    split, schedule = run.federation.train, run.schedule
    rows, share, place = run.cohort.blocks(width)
    place, share = place[some], share[some].to(run.dtype)
    unpadded = width == 1 or (schedule.even and width == schedule.width)
    in_order = unpadded and schedule.full_batch and run.cohort.everyone
    if in_order and batches.keys is None:
        whole = Batch(split.x, split.y)
        batch = whole.map(lambda part: part.unflatten(0, (-1, width))[some])
    else:
        taken = batches.shuffled[0, rows.slot[some]]
        batch = batches.take(taken, 0, None if unpadded else rows.real[some])
    return BlockSamples(batch, share, place)


class PooledPass:
    """Client losses at x and weighted sums of client gradients, from the same forward pass.

    The pass is made in pieces. If the `coefficients` of the sums are known before the losses, each
    piece is differentiated immediately, while it is in a CPU's caches. With `later`, the pieces
    keep their autograd graphs for `gradients` or, if these are too large or the pass is compiled,
    are computed again."""

    def __init__(
        self,
        run: Run,
        state: State,
        batches: RoundBatches,
        coefficients: list[Tensor] | None = None,
        later: bool = False,
    ) -> None:
        self.run = run
        self.params = {k: v.detach().requires_grad_() for k, v in state.x.items()}
        self.given_buffers = state.buffers
        self.pieces = _pieces(run, batches)
        self.totals: list[Tree] = []
        self.waiting: list[Tensor] = []  # sample losses with their graphs
        waits = later and run.graphs_fit and run.compiles != "pooled"
        self.loss = torch.zeros_like(run.share)
        self.buffers = state.buffers  # only batch norm changes them
        if run.task.batch_norm:
            self.buffers = {k: torch.zeros_like(v, dtype=_wide(v)) for k, v in self.buffers.items()}
        for piece in self.pieces:
            losses = self._compiled(piece, coefficients or [], remember_buffers=True)
            if losses is None:
                with torch.set_grad_enabled(coefficients is not None or waits):
                    losses = self._forward(piece, remember_buffers=True)
                if coefficients is not None:
                    self._differentiate(piece, losses, coefficients)
                elif waits:
                    self.waiting.append(losses)
            parts = losses.detach().double() * piece.share.flatten().double()
            self.loss.index_add_(0, piece.places, parts)
        self.buffers = typed_as(self.buffers, state.buffers)

    def gradients(self, coefficients: list[Tensor]) -> list[Tree]:
        """Σ_i c_i ∇f_i(x) for each vector c over the cohort. Can be called once, as it frees the
        graphs."""
        while self.pieces:
            piece = self.pieces.pop()
            if self._compiled(piece, coefficients) is None:
                losses = self.waiting.pop() if self.waiting else self._forward(piece)
                self._differentiate(piece, losses, coefficients)
        return self.totals

    def _differentiate(
        self, piece: BlockSamples, losses: Tensor, coefficients: list[Tensor]
    ) -> None:
        found = []
        for number, c in enumerate(coefficients):
            weight = c.to(losses.dtype)[piece.places] * piece.share.flatten()
            keep = number < len(coefficients) - 1
            leaves = torch.autograd.grad(
                losses,
                list(self.params.values()),
                weight,
                retain_graph=keep,
                materialize_grads=True,
            )
            found.append(dict(zip(self.params, leaves, strict=True)))
        self._add(found)

    def _add(self, found: list[Tree]) -> None:
        if self.totals:
            found = [add(a, b) for a, b in zip(self.totals, found, strict=True)]
        self.totals = found

    def _compiled(
        self, piece: BlockSamples, coefficients: list[Tensor], remember_buffers: bool = False
    ) -> Tensor | None:
        """The sample losses of a piece, whose gradients are added up, from one compiled graph; None
        if the pass is not compiled."""
        run = self.run
        if run.compiles != "pooled":
            return None
        task, axes = run.task.plain, (None, None, piece.batch.axes)

        def step(batch: Batch, weights: list[Tensor], model: tuple[Tree, Tree]) -> Any:
            def sample_losses(params: Tree) -> tuple[Tensor, Tree]:
                found: tuple[Tensor, Tree] = vmap(task.sample_losses, in_dims=axes)(
                    params, model[1], batch
                )
                return found

            losses, back, buffers = vjp(sample_losses, model[0], has_aux=True)  # type: ignore[misc]
            return (losses, buffers), [back(weight)[0] for weight in weights]

        weights = [c.to(run.dtype)[piece.place][:, None] * piece.share for c in coefficients]
        key = "pooled", bool(weights), run.task.kind, run.precision
        model = tree_map(Tensor.detach, self.params), self.given_buffers
        found = of_group(key, step, _together(run), piece.batch, weights, model)
        if found is None:
            return None
        (losses, buffers), sums = found
        if coefficients:
            self._add(sums)
        if remember_buffers and run.task.batch_norm:
            self._remember(buffers, run.share[piece.place])
        return losses.flatten()

    def _forward(self, piece: BlockSamples, remember_buffers: bool = False) -> Tensor:
        task = self.run.task
        if not task.batch_norm:
            flat = piece.batch._replace(real=None).map(lambda part: part.flatten(0, 1))
            return task.sample_losses(self.params, self.given_buffers, flat)[0]
        axes = (None, None, piece.batch.axes)
        with plain_attention(self.run.device):
            losses, buffers = vmap(task.sample_losses, in_dims=axes)(
                self.params, self.given_buffers, piece.batch
            )
        if remember_buffers:
            self._remember(buffers, self.run.share[piece.place])
        return losses.flatten()

    def _remember(self, buffers: Tree, share: Tensor) -> None:
        """Running statistics are averaged with the plain client weights."""
        for name, stacked in buffers.items():
            total = self.buffers[name]
            total += torch.tensordot(
                share.to(total.dtype), stacked.detach().to(total.dtype), dims=1
            )


def _wide(buffer: Tensor) -> torch.dtype:
    """Counters are averaged as floats (`typed_as`)."""
    return buffer.dtype if buffer.is_floating_point() else torch.float64


def _pieces(run: Run, batches: RoundBatches) -> list[BlockSamples]:
    """The cohort's samples in pieces; for models with batch norm, pieces of whole clients."""
    compiles = run.compiles == "pooled"
    width = run.schedule.width if run.task.batch_norm or compiles else 1
    together = _together(run) if compiles else max(1, run.piece // width)
    blocks = len(run.cohort.blocks(width).place)
    cuts = [slice(i, i + together) for i in range(0, blocks, together)]
    pieces = [take_samples(run, batches, width, some) for some in cuts]
    images = [piece.batch._replace(x=channels_last(piece.batch.x)) for piece in pieces]
    return [replace(piece, batch=batch) for piece, batch in zip(pieces, images, strict=True)]


def _together(run: Run) -> int:
    """Clients in a group whose steps are compiled."""
    return group_width(len(run.ids), run.piece // run.schedule.width)


def takes_batch_losses(run: Run, method: Method) -> bool:
    """Whether the batch's losses are the ones that the method uses: by its option, or because the
    batch is all training data (and training and evaluation mode are the same)."""
    return method.loss_data == "batch" or (run.schedule.full_batch and run.task.modes_agree)


def observed_losses(run: Run, state: State, method: Method, on_batch: Tensor | None) -> Tensor:
    """The f_i(x^t) that the method uses: on this round's batch, or on all training data."""
    if on_batch is not None and takes_batch_losses(run, method):
        return on_batch
    scores = evaluate_shared(
        run.task, state.x, state.buffers, run.federation.train, run.piece, run.cohort
    )
    return scores.loss


def pooled_round(run: Run, state: State, t: int) -> Outcome:
    run = run.of_round(t)
    server = run.server(t)
    method = server.method
    ahead = [run.share] * (1 + run.method.reports_gradient) if method.is_blind else None
    forward = PooledPass(run, state, run.cohort.round(t), ahead, later=True)
    loss = observed_losses(run, state, method, forward.loss)
    weights, memory = server.weigh(state.memory, loss)
    a, share = server.broadcast(loss) if method.probes else (state.mean_loss, run.share)
    own, shared = server.coefficients(loss, a)
    spill = (weights * shared).sum()  # how much of g the weighted sum of directions contains
    if not method.broadcasts_means:
        spill = spill + server.term(loss)

    wanted = [weights * own + spill * share if method.probes else weights * own]
    if run.method.reports_gradient:
        wanted.append(run.share)
    direction, *mean_gradient = forward.totals or forward.gradients(wanted)
    if state.mean_gradient is not None and not method.probes:
        direction = add(direction, state.mean_gradient, spill.to(run.dtype))
    kept = mean_gradient[0] if run.method.reports_gradient else None
    return server.finish(
        lambda *_: scale(_decayed(run, state, direction, weights), run.lr),
        loss,
        weights,
        memory,
        lr=run.lr,
        buffers=forward.buffers,
        own=own,
        mean_gradient=kept,
    )


def _decayed(run: Run, state: State, direction: Tree, weights: Tensor) -> Tree:
    """Every client adds weight_decay · x to its direction."""
    if not run.weight_decay:
        return direction
    return add(direction, state.x, (run.weight_decay * weights.sum()).to(run.dtype))


def blocked_round(run: Run, state: State, t: int) -> Outcome:
    run = run.of_round(t)
    server = run.server(t)
    method = server.method
    width = run.schedule.width if run.compiles == "blocked" else run.block
    blocks = take_samples(run, run.cohort.round(t), width)
    on_batch, gradient, buffers = _client_gradients(run, state, blocks)
    loss = observed_losses(run, state, method, on_batch)
    weights, memory = server.weigh(state.memory, loss)
    a, g = state.mean_loss, state.mean_gradient
    fresh = None
    if run.method.uses_mean_gradient:
        fresh = method.smoothed(g, weighted_sum(run.share, gradient))
    if method.probes:
        a, g = run.share @ loss, fresh
    own, shared = server.coefficients(loss, a)
    if method.penalty_bound is not None:
        own, shared = _within_bound(method.penalty_bound, gradient, g, own, shared)

    norms = torch.zeros_like(own)
    kept = weights  # of each client's direction, after clipping
    if method.uses_norms or run.clip_norm is not None:
        norms = _direction_norms(gradient, g, own, shared)
        if run.clip_norm is not None:
            cut = torch.clamp(run.clip_norm / norms.sqrt(), max=1.0)
            norms, kept = norms * cut**2, weights * cut
    direction = weighted_sum(kept * own, gradient)
    if g is not None:
        direction = add(direction, g, (kept * shared).sum().to(run.dtype))
    if method.uses_curvature:
        with run.kernels():
            products = _weighted_curvature(run, state, blocks, gradient, g, weights)
        direction = add(direction, products, method.curvature)
    direction = _decayed(run, state, direction, weights)

    def total(_: Tensor, normaliser: Tensor | float) -> Tree:
        step = run.lr / normaliser
        return scale(direction, step.to(run.dtype) if isinstance(step, Tensor) else step)

    return server.finish(
        total,
        loss,
        weights,
        memory,
        lr=run.lr,
        buffers=buffers,
        own=own,
        mean_gradient=fresh if run.method.keeps_gradient else None,
        squared_norms=run.lr**2 * norms,
    )


def _client_gradients(run: Run, state: State, blocks: BlockSamples) -> tuple[Tensor, Tree, Tree]:
    """f_i and ∇f_i of every client at x^t, and the averaged buffers after the batch."""

    def made(
        task: Task,
        some: tuple[Batch, Tensor],
        _: list[Tensor],
        model: tuple[Tree, Tree],
        chunk: int | None = None,
    ) -> Any:
        def block_loss(params: Tree, batch: Batch, share: Tensor) -> tuple[Tensor, Tree]:
            losses, buffers = task.sample_losses(params, model[1], batch)
            return (losses * share).sum(), buffers

        axes = (None, blocks.batch.axes, 0)
        over_blocks = vmap(grad_and_value(block_loss, has_aux=True), axes, chunk_size=chunk)
        return over_blocks(model[0], *some)

    some, model = (blocks.batch, blocks.share), (state.x, state.buffers)
    with plain_attention(run.device):
        found = _compiled_blocks(run, "gradients", lambda *of: (made(*of), ()), some, [], model)
        gradients, (losses, buffers) = (
            made(run.task.apart, some, [], model, run.blocks_at_once) if found is None else found[0]
        )
    loss = torch.zeros_like(run.share).index_add_(0, blocks.place, losses.double())
    if len(blocks.place) > len(run.ids):
        gradients = tree_map(lambda leaf: _by_client(run, blocks, leaf), gradients)
    if not run.task.batch_norm:
        return loss, gradients, state.buffers
    wide = {name: leaf.double() for name, leaf in buffers.items()}
    return loss, gradients, typed_as(weighted_sum(run.share[blocks.place], wide), buffers)


def _compiled_blocks(
    run: Run,
    what: str,
    step: Callable[..., Any],
    stacked: Any,
    weights: list[Tensor],
    model: tuple[Tree, Tree],
) -> tuple[Any, Any] | None:
    """`in_groups` of step(task, stacked, weights, model); None if it is not compiled."""
    if run.compiles != "blocked":
        return None
    task, key = run.task.plain, (what, run.task.kind, run.precision)
    return in_groups(key, partial(step, task), _together(run), stacked, weights, model)


def _by_client(run: Run, blocks: BlockSamples, leaf: Tensor) -> Tensor:
    total = leaf.new_zeros(len(run.ids), *leaf.shape[1:])
    return total.index_add_(0, blocks.place, leaf)


def _direction_norms(gradient: Tree, g: Tree | None, own: Tensor, shared: Tensor) -> Tensor:
    """‖own_i ∇f_i + shared_i g‖² of every client, without forming the directions."""
    squares = own**2 * squared_norm(gradient, batched=True).double()
    if g is None:
        return squares
    along = sum((rows(gradient[name]) @ leaf.flatten()).double() for name, leaf in g.items())
    return squares + 2 * own * shared * along + shared**2 * squared_norm(g).double()


def _within_bound(
    bound: float | Tensor, gradient: Tree, g: Tree | None, own: Tensor, shared: Tensor
) -> tuple[Tensor, Tensor]:
    """The factors with every penalty d_i − ∇f_i no longer than bound · ‖∇f_i‖."""
    penalty = _direction_norms(gradient, g, own - 1, shared).clamp(min=0)
    s = shortening(penalty, squared_norm(gradient, batched=True).double(), bound)
    return shortened(own, s), s * shared


def _weighted_curvature(
    run: Run, state: State, blocks: BlockSamples, gradient: Tree, g: Tree | None, weights: Tensor
) -> Tree:
    """Σ_i w_i ∇²f_i (∇f_i − g)"""
    away = gradient if g is None else tree_map(lambda leaf, mean: leaf - mean, gradient, g)
    away = run.method.penalised(away)
    if len(blocks.place) > len(run.ids):
        away = tree_map(lambda leaf: leaf[blocks.place], away)
    weight = weights.to(run.dtype)[blocks.place]

    def made(
        task: Task,
        some: tuple[Any, ...],
        weights: list[Tensor],
        model: tuple[Tree, Tree],
        chunk: int | None = None,
    ) -> Tree:
        def slope(params: Tree) -> Tensor:
            def along(v: Tree, batch: Batch, share: Tensor) -> Tensor:
                def block_loss(at: Tree) -> Tensor:
                    return (task.sample_losses(at, model[1], batch)[0] * share).sum()

                return jvp(block_loss, (params,), (v,))[1]

            axes = (0, blocks.batch.axes, 0)
            return (weights[0] * vmap(along, axes, chunk_size=chunk)(*some)).sum()

        found: Tree = grad(slope)(model[0])
        return found

    some, model = (away, blocks.batch, blocks.share), (state.x, state.buffers)
    found = _compiled_blocks(run, "curvature", lambda *of: ((), made(*of)), some, [weight], model)
    if found is not None:
        return found[1]
    return made(run.task.apart, some, [weight], model, run.blocks_at_once)


def jvp(function: Callable[..., Any], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """`torch.func.jvp`."""
    _load()
    value, tangent = torch.func.jvp(function, primals, tangents)[:2]
    return value, tangent


@cache
def _load() -> None:
    """Torch's first forward derivative loads rules that torch itself compiles with its deprecated
    `torch.jit.script`: a DeprecationWarning in 2.13, a FutureWarning, shown to users, in 2.15."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


# -- the local rule, in all vectorised kernels -----------------------------------------------------
def shortening(penalty: Tensor, gradient: Tensor, bound: float | Tensor) -> Tensor:
    """s with s ‖p‖ ≤ b ‖∇f‖, from both squared norms; one where the penalty is short enough."""
    most = bound**2 * gradient
    return torch.where(penalty > most, (most / penalty).sqrt(), 1.0)


def shortened(own: Tensor, factor: Tensor) -> Tensor:
    """The factor of a client's own gradient, 1 + s (own − 1), after its penalty was shortened."""
    return torch.where(factor < 1, 1 + factor * (own - 1), own)


def bounded(
    gradient: Tree, direction: Tree, own: Tensor, bound: float | Tensor
) -> tuple[Tree, Tensor]:
    """∇f + s p and its factor of the own gradient; d itself, bit by bit, where s is one."""
    penalty = subtract(direction, gradient)
    s = shortening(squared_norm(penalty), squared_norm(gradient), bound).to(own.dtype)
    found = tree_map(lambda d, g, p: torch.where(s < 1, g + s * p, d), direction, gradient, penalty)
    return found, shortened(own, s)


def velocity(
    run: Run, pull: float | Tensor, x: Tree, y: Tree, direction: Tree, before: Tree | None
) -> Tree:
    """v of the next step; `before` is that of the last one, None in the first. `x` is the model
    that the clients received; y, directions and velocities may have the client as first axis."""
    found = direction
    if isinstance(pull, Tensor) or pull != 0:
        found = tree_map(lambda d, yi, xi: d + pull * (yi - xi), found, y, x)
    if run.weight_decay:
        found = add(found, y, run.weight_decay)
    if before is not None and run.momentum:
        found = add(found, before, run.momentum)
    return found
