"""The reference: client after client, a module, autograd and plain sums. The oracle of the tests.

Slow on purpose, and without the engine's tricks: own forward passes, torch's own batch norm,
Hessian-vector products by differentiating twice, the methods exactly as their papers' boxes.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State
from fairvar.engine.vmapped import Observer, Trained
from fairvar.methods.base import Method, Replies
from fairvar.tree import Tree, add, scale, squared_norm, stack, subtract, weighted_sum


def reference_round(run: Run, state: State, t: int, observe: Observer | None = None) -> Outcome:
    method, clients = run.method.at_round(t), range(run.clients)
    batches = [_client_batches(run, t, i) for i in clients]
    fresh = _load(run, state.x, state.buffers)

    # Before training: f_i and ∇f_i at x^t, on the first batch (exact methods average them now).
    first = [_loss_and_gradient(run, copy.deepcopy(fresh), *batches[i][0]) for i in clients]
    gradient = stack([g for _, g in first])
    loss = torch.stack([f for f, _ in first]).double()
    if method.loss_data == "full":
        loss = torch.stack([_full_loss(run, fresh, i) for i in clients]).double()
    mean_loss, mean_gradient = run.share @ loss, weighted_sum(run.share, gradient)
    a, g = (mean_loss, mean_gradient) if method.probes else (state.mean_loss, state.mean_gradient)

    # Local steps.
    modules, own = [], []
    for i in clients:
        module = copy.deepcopy(fresh)
        for number, (x, y) in enumerate(batches[i]):
            fixed = loss[i].to(run.dtype) if method.loss_data == "full" else None
            factor = _local_step(run, method, module, x, y, fixed, a.to(run.dtype), g)
            if number == 0:
                own.append(factor)
        modules.append(module)
    params = stack([_params(run, m) for m in modules])
    buffers = stack([_buffers(m) for m in modules]) if state.buffers else {}
    if observe is not None:
        observe(Trained(run.ids, params, buffers, loss, gradient, torch.stack(own)))

    # Server: x ← x − Σ_i w_i (x − x_i) / normaliser.
    updates = [subtract(state.x, _params(run, m)) for m in modules]
    replies = Replies(loss, run.share, run.ids, run.clients)
    weights, memory = method.weigh(state.memory, replies)
    norms = torch.stack([squared_norm(u) for u in updates]).double()
    weights = weights / method.normaliser(replies, norms, run.lr)
    return Outcome(
        update=weighted_sum(weights, stack(updates)),
        buffers={k: _average(run.share, v) for k, v in buffers.items()},
        memory=memory,
        loss=loss,
        weights=weights,
        mean_loss=mean_loss,
        mean_gradient=mean_gradient if run.method.reports_gradient else None,
        ascended=(torch.stack(own) < 0).double().mean(),
    )


def _local_step(
    run: Run,
    method: Method,
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    fixed_loss: Tensor | None,
    a: Tensor,
    g: Tree | None,
) -> Tensor:
    """x_i ← x_i − η (own ∇f_i + shared g + γ ∇²f_i (∇f_i − g)); returns own."""
    named = {k: p for k, p in module.named_parameters() if p.requires_grad}
    loss = run.task.loss(module(x), y).mean()
    graph = method.uses_curvature
    slopes = torch.autograd.grad(loss, list(named.values()), create_graph=graph)
    gradient = {k: s.detach() for k, s in zip(named, slopes, strict=True)}
    own, shared = method.coefficients(loss.detach() if fixed_loss is None else fixed_loss, a)
    direction = scale(gradient, own)
    if g is not None:
        direction = add(direction, g, shared)
    if graph:
        away = gradient if g is None else subtract(gradient, g)
        products = torch.autograd.grad(slopes, list(named.values()), list(away.values()))
        direction = add(direction, dict(zip(named, products, strict=True)), method.curvature)
    if run.clip_norm is not None:
        norm = float(squared_norm(direction).sqrt())
        direction = scale(direction, min(1.0, run.clip_norm / norm) if norm > 0 else 1.0)
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.sub_(run.lr * direction[name])
    return torch.as_tensor(own, dtype=loss.dtype, device=loss.device)


def _loss_and_gradient(run: Run, module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tree]:
    named = {k: p for k, p in module.named_parameters() if p.requires_grad}
    loss = run.task.loss(module(x), y).mean()
    found = torch.autograd.grad(loss, list(named.values()))
    return loss.detach(), dict(zip(named, found, strict=True))


def _full_loss(run: Run, module: nn.Module, client: int) -> Tensor:
    """f_i on all training samples, in evaluation mode."""
    evaluating = copy.deepcopy(module).eval()
    x, y = run.federation.train.of(client)
    with torch.no_grad():
        return run.task.loss(evaluating(x), y).mean()


def _client_batches(run: Run, t: int, client: int) -> list[tuple[Tensor, Tensor]]:
    drawn, split = run.schedule.round(t), run.federation.train
    found = []
    for step in range(run.schedule.steps[client]):
        rows, real = drawn.rows(step, run.ids[client : client + 1])
        found.append((split.x[rows[real]], split.y[rows[real]]))
    return found


def _load(run: Run, params: Tree, buffers: Tree) -> nn.Module:
    module = copy.deepcopy(run.task.original)
    module.load_state_dict({**params, **buffers}, strict=False)
    return module


def _params(run: Run, module: nn.Module) -> Tree:
    own = dict(module.named_parameters())
    return {name: own[name].detach() for name in run.task.params}


def _buffers(module: nn.Module) -> Tree:
    return {name: b.detach() for name, b in module.named_buffers()}


def _average(share: Tensor, stacked: Tensor) -> Tensor:
    return torch.tensordot(share, stacked.double(), dims=1).to(stacked.dtype)
