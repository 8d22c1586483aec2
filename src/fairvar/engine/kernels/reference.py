"""The reference loop: client after client, with modules and autograd. Tests compare with it.

Simple instead of fast: one forward pass per client, torch's own batch norm, Hessian-vector products
by differentiating twice, the methods as in their papers. The nodes of a deployment compute with the
same functions (`deploy/client.py`); there `run.federation` holds one client's samples only.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairvar.common.tree import Tree, add, scale, squared_norm, stack, subtract, weighted_sum
from fairvar.engine.batches import Batch
from fairvar.engine.kernels.vmapped import Observer, Trained
from fairvar.engine.run import Run
from fairvar.engine.server import Aggregator, Answers, aggregate
from fairvar.engine.settings import TrainSettings
from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Method
from fairvar.models.norm import apply, hessian_product


class Probed(NamedTuple):
    """A client's loss, gradient and buffers at x^t."""

    loss: Tensor  # f_i
    gradient: Tree  # ∇f_i
    buffers: Tree  # after a pass in training mode over the batch


def load(run: Run, params: Tree, buffers: Tree) -> nn.Module:
    """The model as the server sent it."""
    module = copy.deepcopy(run.task.original)
    module.load_state_dict({**params, **buffers}, strict=False)
    return module


def probe(run: Run, method: Method, sent: nn.Module, t: int, client: int) -> Probed:
    """f_i and ∇f_i at x^t, on the round's first batch; f_i on all samples if `losses = "full"`."""
    batch = _batches(run, t, client)[0]
    module = copy.deepcopy(sent)  # a pass changes batch norm's statistics
    named = _trainable(module)
    loss = _loss(run, module, batch)
    found = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    if method.loss_data == "full":
        loss = full_loss(run, sent, client)
    gradient = dict(zip(named, found, strict=True))
    return Probed(loss.detach().double(), gradient, buffers_of(run, module))


def full_loss(run: Run, sent: nn.Module, client: int) -> Tensor:
    """f_i on all training samples, in evaluation mode."""
    evaluating = copy.deepcopy(sent).eval()
    x, y = run.federation.train.of(client)
    with torch.no_grad():
        return _loss(run, evaluating, Batch(x, y))


def train(
    run: Run,
    method: Method,
    sent: nn.Module,
    t: int,
    client: int,
    loss: Tensor | None,
    a: Tensor,
    g: Tree | None,
    start: nn.Module | None = None,
) -> tuple[nn.Module, Tensor]:
    """The client's model after its local steps, and the factor of its own gradient in the first.

    `loss` is f_i for methods that take it once, at x^t on all samples; the batch's otherwise.
    `start`: where the steps start, if not from the model that was sent.
    """
    module, speed = copy.deepcopy(start or sent), dict[str, Tensor]()
    fixed = loss.to(run.dtype) if loss is not None and method.loss_data == "full" else None
    factors = []
    for batch in _batches(run, t, client):
        direction, own = _direction(run, method, module, batch, fixed, a.to(run.dtype), g)
        _move(run, method, module, sent, direction, speed, run.lr_of(t))
        factors.append(own)
    return module, factors[0]


def train_personal(run: Run, v: Tree, sent: nn.Module, t: int, client: int) -> Tree:
    """Parameters and buffers of the client's personal model after its steps of the round, with the
    proximal term to the model that the client received."""
    run, none = run.personal, torch.zeros((), dtype=torch.float64, device=run.device)
    start = load(run, v, {})
    module, _ = train(run, run.method, sent, t, client, None, none, None, start)
    return {**params_of(run, module), **buffers_of(run, module)}


def stepped(
    method: Method, x: Tree, probed: Probed, a: Tensor, g: Tree, train: TrainSettings, t: int
) -> Tree:
    """x_i after one step without curvature, from the client's probe, equal to that of `train`: so a
    server can take the step instead of the client."""
    dtype = next(iter(x.values())).dtype
    own, shared = method.coefficients(probed.loss.to(dtype), a.to(dtype))
    direction = _combined(probed.gradient, own, g, shared)
    direction, _ = _bounded(method, probed.gradient, direction, torch.as_tensor(own))
    direction = _clipped(direction, train.clip_norm)
    if train.weight_decay:
        direction = add(direction, x, train.weight_decay)
    return {name: leaf - train.lr_of(t) * direction[name] for name, leaf in x.items()}


def params_of(run: Run, module: nn.Module) -> Tree:
    own = dict(module.named_parameters())
    return {name: own[name].detach() for name in run.task.params}


def buffers_of(run: Run, module: nn.Module) -> Tree:
    own = dict(module.named_buffers())
    return {name: own[name].detach() for name in run.task.buffers}


def _direction(
    run: Run,
    method: Method,
    module: nn.Module,
    batch: Batch,
    fixed_loss: Tensor | None,
    a: Tensor,
    g: Tree | None,
) -> tuple[Tree, Tensor]:
    """own ∇f_i + shared g + γ ∇²f_i (∇f_i − g), with bound and clipping; and own."""
    named = _trainable(module)
    with run.kernels():
        loss = _loss(run, module, batch)
    graph, leaves = method.uses_curvature, list(named.values())
    slopes = torch.autograd.grad(loss, leaves, create_graph=graph, materialize_grads=True)
    gradient = {k: s.detach() for k, s in zip(named, slopes, strict=True)}
    own, shared = method.coefficients(loss.detach() if fixed_loss is None else fixed_loss, a)
    direction = _combined(gradient, own, g, shared)
    if graph:
        away = gradient if g is None else subtract(gradient, g)
        products = hessian_product(slopes, leaves, list(method.penalised(away).values()))
        direction = add(direction, dict(zip(named, products, strict=True)), method.curvature)
    own = torch.as_tensor(own, dtype=loss.dtype, device=loss.device)
    direction, own = _bounded(method, gradient, direction, own)
    return _clipped(direction, run.clip_norm), own


@torch.no_grad()
def _move(
    run: Run,
    method: Method,
    module: nn.Module,
    sent: nn.Module,
    direction: Tree,
    speed: Tree,
    lr: float | Tensor,
) -> None:
    """v ← momentum · v + d + pull (y − x) + weight_decay · y,   y ← y − η v;   `speed` holds v."""
    received = dict(sent.named_parameters())
    for name, parameter in _trainable(module).items():
        d = direction[name]
        if method.uses_pull:
            d = d + method.pull * (parameter - received[name])
        if run.weight_decay:
            d = d + run.weight_decay * parameter
        if run.momentum:
            d = speed[name] = d + run.momentum * speed[name] if name in speed else d
        parameter.sub_(lr * d)


def _combined(gradient: Tree, own: Tensor | float, g: Tree | None, shared: Tensor | float) -> Tree:
    direction = scale(gradient, own)
    return direction if g is None else add(direction, g, shared)


def _bounded(method: Method, gradient: Tree, direction: Tree, own: Tensor) -> tuple[Tree, Tensor]:
    """∇f + s (d − ∇f) with the largest s ≤ 1 that keeps the penalty within bound · ‖∇f‖."""
    if method.penalty_bound is None:
        return direction, own
    penalty = subtract(direction, gradient)
    length, most = (float(squared_norm(tree).sqrt()) for tree in (penalty, gradient))
    most *= float(method.penalty_bound)
    if length <= most:
        return direction, own
    s = most / length
    return add(gradient, penalty, s), 1 + s * (own - 1)


def _clipped(direction: Tree, clip_norm: float | None) -> Tree:
    if clip_norm is None:
        return direction
    norm = float(squared_norm(direction).sqrt())
    return scale(direction, min(1.0, clip_norm / norm) if norm > 0 else 1.0)


def _batches(run: Run, t: int, client: int) -> list[Batch]:
    drawn, who = run.schedule.round(t), torch.tensor([client], device=run.device)
    found = []
    for step in range(run.schedule.steps[client]):
        rows, real = drawn.rows(step, who)
        found.append(drawn.take(rows[real], step))
    return found


def _loss(run: Run, module: nn.Module, batch: Batch) -> Tensor:
    return run.task.loss(apply(module, batch.x, batch.keys), batch.y).mean()


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {k: p for k, p in module.named_parameters() if p.requires_grad}


def reference_round(run: Run, state: State, t: int, observe: Observer | None = None) -> Outcome:
    method, ids = run.method.at_round(t), run.participation.of_round(t)
    share = run.method.plain_weights(run.federation.sizes[ids]).to(run.device)
    sent = load(run, state.x, state.buffers)

    # Before training: f_i and ∇f_i at x^t, on the first batch (exact methods average them now).
    first = [probe(run, method, sent, t, i) for i in ids.tolist()]
    loss, gradient = torch.stack([f.loss for f in first]), stack([f.gradient for f in first])
    mean_loss, mean_gradient = share @ loss, weighted_sum(share, gradient)
    server = Aggregator(method, share, ids.to(run.device), run.clients)
    a, g = state.mean_loss, state.mean_gradient
    if method.probes:
        a, weights = server.broadcast(loss)
        g = method.smoothed(state.mean_gradient, weighted_sum(weights, gradient))

    # Local steps.
    trained = [
        train(run, method, sent, t, i, f, a, g) for i, f in zip(ids.tolist(), loss, strict=True)
    ]
    params = [params_of(run, module) for module, _ in trained]
    buffers = [buffers_of(run, module) for module, _ in trained]
    own = torch.stack([factor for _, factor in trained]).double()
    ids = ids.to(run.device)
    if observe is not None:
        after = stack(buffers) if state.buffers else {}
        observe(Trained(ids, stack(params), after, loss, gradient, own))

    # Server.
    kept = None
    if run.method.keeps_gradient:
        exact = run.method.probes
        kept = g if exact else method.smoothed(state.mean_gradient, mean_gradient)
    answers = Answers(loss, params, buffers, own)
    return aggregate(server, state, answers, mean_loss, kept, run.lr_of(t), g=g)
