"""The vmapped path: every client has its own parameters, and all clients step together.

Used for several local steps, for norms of client updates (q-FFL), for curvature (FairGrad) and to
evaluate local models. Clients are ordered by their number of steps, so the active clients are a
prefix that shrinks as small clients finish, and no step is computed for finished clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fairvar.common.tree import (
    Tree,
    add,
    concatenate,
    divide,
    expand,
    gram,
    scale,
    squared_norm,
    stack,
    subtract,
    tree_map,
    typed_as,
)
from fairvar.engine.batches import Batch, RoundBatches
from fairvar.engine.kernels.compiled import group_width, of_group
from fairvar.engine.kernels.one_step import (
    PooledPass,
    bounded,
    jvp,
    observed_losses,
    takes_batch_losses,
    velocity,
)
from fairvar.engine.run import TILE, Run
from fairvar.engine.server import Aggregator
from fairvar.engine.state import Outcome, State
from fairvar.engine.task import Task, channels_last
from fairvar.methods.base import Method
from fairvar.models.norm import hessian_product, plain_attention


@dataclass(frozen=True)
class Trained:
    """Some clients after their local steps (leaves have the client as first axis)."""

    ids: Tensor
    params: Tree
    buffers: Tree
    loss: Tensor  # f_i(x^t) on the first batch
    gradient: Tree  # ∇f_i(x^t) on the first batch; empty if not requested
    own: Tensor  # the factor of the client's own gradient in the first step


Observer = Callable[[Trained], None]
OwnModels = tuple[Tree, Tree]  # parameters and buffers of clients, the client as first axis


@dataclass(frozen=True)
class Sent:
    """What the clients receive with x^t."""

    method: Method
    mean_loss: Tensor
    mean_gradient: Tree | None
    full_loss: Tensor | None  # by place, where the method uses f_i on all data


@dataclass
class TileSums:
    """Σ over clients in an order that does not depend on the chunks: tile after tile."""

    trees: dict[str, Tree] = field(default_factory=dict)

    def add(self, name: str, weights: Tensor, stacked: Tree) -> None:
        for tile in _tiles(weights):
            part = tree_map(lambda leaf, s=tile: _weighted(weights[s], leaf[s]), stacked)
            self.trees[name] = add(self.trees[name], part) if name in self.trees else part


def client_norms(stacked: Tree) -> Tensor:
    """‖·‖² of every client, tile by tile for the same reason."""
    tiles = _tiles(next(iter(stacked.values())))
    parts = [squared_norm(tree_map(lambda leaf, s=t: leaf[s], stacked), True) for t in tiles]
    return torch.cat(parts).double()


def _tiles(stacked: Tensor) -> list[slice]:
    """Tiles of the first axis. On a GPU one tile: its sums depend on the chunks anyway, and
    thousands of small kernels take longer than the sum."""
    width = max(1, len(stacked)) if stacked.is_cuda else TILE
    return [slice(start, start + width) for start in range(0, len(stacked), width)]


def _weighted(weights: Tensor, leaf: Tensor) -> Tensor:
    leaf = leaf if leaf.is_floating_point() else leaf.double()
    return torch.tensordot(weights.to(leaf.dtype), leaf, dims=1)


def vmapped_round(run: Run, state: State, t: int, observe: Observer | None = None) -> Outcome:
    run = run.of_round(t)
    server = run.server(t)
    batches = run.cohort.round(t)
    sent, loss_before = _receive(run, state, server, batches)
    loss = loss_before if loss_before is not None else torch.zeros_like(run.share)
    waits, kept = server.method.uses_gram, list[Tree]()  # weights that depend on all updates
    if not waits:
        weights, memory = server.weigh(state.memory, loss)

    sums = TileSums()
    norms, own, batch_loss = (torch.zeros_like(run.share) for _ in range(3))
    for chunk in run.chunks():
        with run.kernels():
            if run.in_turn:
                gradients = observe is not None or run.method.reports_gradient
                trained = train_in_turn(run, state, sent, batches, chunk, gradients)
            else:
                trained = train_stacked(run, state, sent, batches, chunk)
        if observe is not None:
            observe(trained)
        places = run.cohort.order_on_device[slice(*chunk)]
        update = tree_map(lambda x, xi: x - xi, expand(state.x, len(places)), trained.params)
        if waits:
            kept.append(update)
        else:
            sums.add("update", weights[places], update)
        if run.method.reports_gradient:
            sums.add("gradient", run.share[places], trained.gradient)
        sums.add("buffers", run.share[places], trained.buffers)
        if run.method.uses_norms:
            norms[places] = client_norms(update)
        own[places], batch_loss[places] = trained.own.double(), trained.loss.double()

    loss = sent.full_loss if sent.full_loss is not None else batch_loss
    if waits:
        update, order = concatenate(kept), run.cohort.order_on_device
        place = order.argsort()
        weights, memory = server.weigh(state.memory, loss, gram(update)[place][:, place])
        sums.add("update", weights[order], update)
    return server.finish(
        lambda _, normaliser: divide(sums.trees["update"], normaliser),
        loss,
        weights,
        memory,
        lr=run.lr,
        buffers=typed_as(sums.trees["buffers"], state.buffers) if state.buffers else {},
        own=own,
        mean_gradient=_next_mean_gradient(run, state, sent, sums.trees.get("gradient")),
        squared_norms=norms,
        g=sent.mean_gradient,
    )


def _next_mean_gradient(run: Run, state: State, sent: Sent, reported: Tree | None) -> Tree | None:
    """g for the next round, if the method keeps one."""
    if reported is not None:
        return sent.method.smoothed(state.mean_gradient, reported)
    return sent.mean_gradient if run.method.keeps_gradient else None


def _receive(
    run: Run, state: State, server: Aggregator, batches: RoundBatches
) -> tuple[Sent, Tensor | None]:
    """What the clients receive before they train, and the losses if the server needs them then."""
    method, full, loss = server.method, None, None
    forward, needs_loss = None, method.needs_losses
    if method.probes or (needs_loss and takes_batch_losses(run, method)):
        known = [run.share] if method.probes and method.broadcasts_means else None
        forward = PooledPass(run, state, batches, known, later=method.probes)
    if needs_loss:
        loss = observed_losses(run, state, method, None if forward is None else forward.loss)
        full = loss if method.loss_data == "full" else None
    mean_loss, mean_gradient = state.mean_loss, state.mean_gradient
    if method.probes and forward is not None:
        mean_loss, weights = server.broadcast(forward.loss if loss is None else loss)
        (fresh,) = forward.totals or forward.gradients([weights])
        mean_gradient = method.smoothed(state.mean_gradient, fresh)
    return Sent(method, mean_loss.to(run.dtype), mean_gradient, full), loss


def train_stacked(
    run: Run,
    state: State,
    sent: Sent,
    batches: RoundBatches,
    chunk: tuple[int, int],
    own: OwnModels | None = None,
) -> Trained:
    """All local steps of the clients in this part of the cohort's order, step by step. They start
    from x^t, or from models of their `own` in that order."""
    cohort = run.cohort
    order, places = cohort.order[slice(*chunk)], cohort.order_on_device[slice(*chunk)]
    steps = [cohort.steps[place] for place in order]
    compiles = run.compiles == "vmapped"

    def step(number: int, shared: bool, some: slice, models: Models) -> tuple[Models, _Step]:
        """These clients' models after a step, and the step's gradients and losses."""
        rows, mask = batches.rows(number, places[some])
        batch = batches.take(rows, number, mask if cohort.pads(number, order[some]) else None)
        full = None if sent.full_loss is None else sent.full_loss[places[some]].to(run.dtype)
        if compiles:
            found = _compiled_step(run, sent, state.x, models, batch, full)
            if found is not None:
                return found
        params, buffers, v = models
        one = state.x, state.buffers  # shared parameters need no copies in the first step
        own = None if shared else 0
        axes = (own, own, batch.axes, None if full is None else 0)
        together = vmap(_client_step(run, run.task.apart, sent), in_dims=axes)
        with plain_attention(run.device):
            made = together(*(one if shared else (params, buffers)), batch, full)
        return _moved(run, sent.method.pull, run.lr, state.x, params, v or None, made), made

    calls = [slice(0, len(order))]
    start = own or (expand(state.x, len(order)), expand(state.buffers, len(order)))
    v: Tree = {}
    if compiles:
        width = group_width(len(run.ids))
        calls = [slice(a, a + width) for a in range(0, len(order), width)]
        v = tree_map(torch.zeros_like, start[0]) if run.momentum else v  # one graph for all steps
    models = Prefix(*start, v)
    shown = models.step(calls, partial(step, 0, own is None))
    for number in range(1, steps[0]):
        models.shrink(sum(s > number for s in steps))
        if not compiles:
            calls = _calls(models.active, len(order), run.device)
        models.step(calls, partial(step, number, False))
    params, buffers, _ = models.whole()
    first = _of_all_calls(shown)
    return Trained(run.ids[places], params, buffers, first.loss, first.gradient, first.own)


Models = tuple[Tree, Tree, Tree]  # parameters, buffers, velocities (empty without momentum)


def _moved(
    run: Run,
    pull: float | Tensor,
    lr: float | Tensor,
    x: Tree,
    params: Tree,
    before: Tree | None,
    made: _Step,
) -> Models:
    """The clients' models after a step along their directions."""
    v = velocity(run, pull, x, params, made.direction, before)
    moved = tree_map(lambda at, d: at - lr * d, params, v)
    return moved, made.buffers, v if run.momentum else {}


class Prefix:
    """The models of a chunk's clients; the active clients are a prefix that shrinks."""

    def __init__(self, *models: Tree) -> None:
        self.models: Models = models  # type: ignore[assignment]
        self.finished: list[Models] = []  # those with the fewest steps first

    @property
    def active(self) -> int:
        return len(next(iter(self.models[0].values())))

    def part(self, some: slice) -> Models:
        if some == slice(0, self.active):
            return self.models
        return tuple(tree_map(lambda leaf: leaf[some], tree) for tree in self.models)  # type: ignore[return-value]

    def shrink(self, active: int) -> None:
        if active < self.active:
            params, buffers, _ = self.part(slice(active, self.active))
            # Copies: a view would keep the models of all clients until the end.
            self.finished.append(
                (tree_map(Tensor.clone, params), tree_map(Tensor.clone, buffers), {})
            )
            self.models = self.part(slice(0, active))

    def step(
        self, calls: list[slice], step: Callable[[slice, Models], tuple[Models, _Step]]
    ) -> list[_Step]:
        """All active clients take a step, call after call; returns each call's gradients and
        losses."""
        calls = [slice(c.start, min(c.stop, self.active)) for c in calls if c.start < self.active]
        made = [step(some, self.part(some)) for some in calls]
        self.models = _joined([models for models, _ in made])
        return [shown for _, shown in made]

    def whole(self) -> Models:
        params, buffers, _ = self.models
        return _joined([(params, buffers, {}), *reversed(self.finished)])


def _joined(parts: list[Models]) -> Models:
    if len(parts) == 1:
        return parts[0]
    return tuple(concatenate(list(trees)) for trees in zip(*parts, strict=True))  # type: ignore[return-value]


def _calls(active: int, width: int, device: torch.device) -> list[slice]:
    """The vectorised calls for the active prefix of a chunk: one call, or whole tiles and the rest.

    So the width of a call below one tile does not depend on the chunk, nor do the last bits. (On a
    GPU they do anyway, and a second call costs as much as the first.)
    """
    whole = active - active % TILE
    together = active in (0, width) or device.type == "cuda"
    cuts = [0, active] if together else [0, whole, active]
    return [slice(a, b) for a, b in pairwise(cuts) if b > a]


class _Step(NamedTuple):  # a tuple, because vmap maps over tuples
    direction: Tree
    gradient: Tree
    buffers: Tree
    loss: Tensor
    own: Tensor


def _of_all_calls(parts: list[_Step]) -> _Step:
    """Gradients, losses and factors of the clients of several calls."""
    if len(parts) == 1:
        return parts[0]
    gradient = concatenate([part.gradient for part in parts])
    loss, own = (torch.cat([getattr(part, name) for part in parts]) for name in ("loss", "own"))
    return _Step({}, gradient, {}, loss, own)


def _compiled_step(
    run: Run, sent: Sent, x: Tree, models: Models, batch: Batch, full: Tensor | None
) -> tuple[Models, _Step] | None:
    """One compiled local step of a group of clients; None if it does not compile."""
    method, task = sent.method, run.task.plain
    axes = (0, 0, batch.axes, None if full is None else 0)

    def step(
        some: tuple[Any, ...], _: list[Tensor], received: tuple[Any, ...]
    ) -> tuple[tuple[Models, _Step], tuple[()]]:
        (params, buffers, v), batch, full = some
        numbers, mean_loss, g, x, lr = received
        acting = replace(sent, method=method.with_numbers(numbers), mean_gradient=g)
        if mean_loss is not None:  # otherwise it is not used, and not part of the graph
            acting = replace(acting, mean_loss=mean_loss)
        made = vmap(_client_step(run, task, acting), in_dims=axes)(params, buffers, batch, full)
        after = _moved(run, acting.method.pull, lr, x, params, v or None, made)
        return (after, made._replace(direction={}, buffers={})), ()

    lr = torch.as_tensor(run.lr, dtype=torch.float64, device=run.device)
    form: object = "the gradient alone"  # of FedAvg, AFL, q-FFL and AAggFF: one graph for all
    received: tuple[Any, ...] = ({}, None, None, {}, lr)
    bends = method.uses_curvature or method.uses_pull
    if bends or type(method).coefficients is not Method.coefficients:
        numbers = {
            name: torch.as_tensor(value, dtype=torch.float64, device=run.device)
            for name, value in method.numbers.items()
        }
        form = type(method), repr(method.form)
        anchor = x if method.uses_pull else {}
        received = (numbers, sent.mean_loss, sent.mean_gradient, anchor, lr)
    rule = run.clip_norm, run.weight_decay, run.momentum, run.precision
    width = group_width(len(run.ids))
    key = (run.task.kind, form, rule)
    found = of_group(key, step, width, (models, batch, full), [], received)
    return None if found is None else found[0]


def _client_step(run: Run, task: Task, sent: Sent) -> Callable[..., _Step]:
    """One local step of one client, as a pure function to be vmapped."""

    def client_step(params: Tree, buffers: Tree, batch: Batch, full: Tensor | None) -> _Step:
        def loss_and_gradient(at: Tree) -> tuple[Tree, tuple[Tensor, Tree]]:
            found = grad_and_value(task.client_loss, has_aux=True)
            return found(at, buffers, batch)

        def product(away: Tree) -> Tree:
            # Forward over reverse: correct for every layer, batch norm included, and one product
            # per client, which local steps need.
            found: Tree = jvp(lambda at: loss_and_gradient(at)[0], (params,), (away,))[1]
            return found

        gradient, (loss, new_buffers) = loss_and_gradient(params)
        direction, own = _direction(run, sent, gradient, loss if full is None else full, product)
        return _Step(direction, gradient, new_buffers, loss, own)

    return client_step


def _direction(
    run: Run, sent: Sent, gradient: Tree, loss: Tensor, product: Callable[[Tree], Tree]
) -> tuple[Tree, Tensor]:
    """own ∇f_i + shared g + γ ∇²f_i (∇f_i − g), with bound and clipping; and own."""
    method, g = sent.method, sent.mean_gradient
    own, shared = (
        c.to(loss.dtype) if isinstance(c, Tensor) else c
        for c in method.coefficients(loss, sent.mean_loss)
    )
    direction = gradient if isinstance(own, float) and own == 1 else scale(gradient, own)
    if g is not None and not (isinstance(shared, float) and shared == 0):
        direction = add(direction, g, shared)
    if method.uses_curvature:
        away = gradient if g is None else subtract(gradient, g)
        direction = add(direction, product(method.penalised(away)), method.curvature)
    own = own if isinstance(own, Tensor) else torch.full_like(loss, own)
    if method.penalty_bound is not None:
        direction, own = bounded(gradient, direction, own, method.penalty_bound)
    if run.clip_norm is not None:
        norm = squared_norm(direction).sqrt()
        direction = scale(direction, torch.clamp(run.clip_norm / norm, max=1.0))
    return direction, own


def train_in_turn(
    run: Run,
    state: State,
    sent: Sent,
    batches: RoundBatches,
    chunk: tuple[int, int],
    gradients: bool,
    own: OwnModels | None = None,
) -> Trained:
    """The same, client after client, for convolutions on a CPU: under vmap those with weights per
    client are grouped convolutions, two to three times slower there."""
    some = slice(*chunk)
    order = run.cohort.order[some]
    if run.method.uses_curvature:
        run = replace(run, task=run.task.twice)

    def train(alone: Run, number: int) -> tuple[_Step, Tree, Tree]:
        start = state.x, state.buffers
        if own is not None:
            start = tuple(tree_map(lambda leaf: leaf[number], tree) for tree in own)  # type: ignore[assignment]
        return _train_client(alone, state, start, sent, batches, order[number], gradients)

    first, params, buffers = zip(*_in_threads(run, train, range(len(order))), strict=True)
    return Trained(
        run.ids[run.cohort.order_on_device[some]],
        stack(params),
        stack(buffers),
        torch.stack([step.loss for step in first]),
        stack([step.gradient for step in first]),
        torch.stack([step.own for step in first]),
    )


def _in_threads(run: Run, work: Callable[[Run, int], Any], items: Sequence[int]) -> list[Any]:
    """work(run, item) of all items in as many threads as torch may use. Each uses one thread of
    torch, so that its bits do not depend on their number, and its own module, because
    `functional_call` puts parameters into the module while it runs."""
    threads = torch.get_num_threads()
    if threads == 1:
        return [work(run, item) for item in items]
    free: SimpleQueue[Run] = SimpleQueue()
    for task in run.task.copies(threads):
        free.put(replace(run, task=task))

    def take(item: int) -> Any:
        own = free.get()
        try:
            return work(own, item)
        finally:
            free.put(own)

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(take, items))
    finally:
        torch.set_num_threads(threads)


def _train_client(
    run: Run,
    state: State,
    start: tuple[Tree, Tree],
    sent: Sent,
    batches: RoundBatches,
    place: int,
    gradients: bool,
) -> tuple[_Step, Tree, Tree]:
    """The client's first step, and its parameters and buffers after the last."""
    who = torch.tensor([place], device=run.device)
    full = None if sent.full_loss is None else sent.full_loss[place].to(run.dtype)
    params, buffers, first = tree_map(torch.clone, start[0]), start[1], None
    v: Tree | None = None
    for number in range(run.cohort.steps[place]):
        rows, real = batches.rows(number, who)
        batch = batches.take(rows[real], number)
        step = _step_alone(run, sent, params, buffers, batch, full)
        v = velocity(run, sent.method.pull, state.x, params, step.direction, v)
        for name, leaf in params.items():
            leaf.sub_(v[name], alpha=float(run.lr))
        buffers = step.buffers
        if first is None:
            first = step._replace(direction={}, gradient=step.gradient if gradients else {})
    assert first is not None
    return first, params, buffers


def _step_alone(
    run: Run, sent: Sent, params: Tree, buffers: Tree, batch: Batch, full: Tensor | None
) -> _Step:
    """One local step of one client with its own samples, without padding."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    batch = batch._replace(x=channels_last(batch.x))
    loss, after = run.task.client_loss(leaves, buffers, batch)
    bends = sent.method.uses_curvature
    slopes = torch.autograd.grad(
        loss, list(leaves.values()), create_graph=bends, materialize_grads=True
    )
    gradient = {name: s.detach() for name, s in zip(leaves, slopes, strict=True)}

    def product(away: Tree) -> Tree:
        found = hessian_product(slopes, list(leaves.values()), list(away.values()))
        return dict(zip(leaves, found, strict=True))

    seen = loss.detach()
    direction, own = _direction(run, sent, gradient, seen if full is None else full, product)
    after = {name: leaf.detach() for name, leaf in after.items()}
    return _Step(direction, gradient, after, seen, own)
