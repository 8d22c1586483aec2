"""What a person writes by hand: the lean client loop, and one centralised step.

Nothing here comes from the engine, so that the benchmark compares two programs; a test shows that
both compute the same global model. `naive` has the loop with a framework's overheads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairvar.errors import BadInput
from fairvar.federation import Federation
from fairvar.methods import AFL, QFFL, AAggFF, FairGrad, FairLoss, FedAvg, Method, Replies

Rows = list[Tensor | None]  # a client's samples in each local step; None: all of them
Draw = Callable[[int], Rows]  # of client i in this round
Tensors = list[Tensor]
Weights = dict[str, Tensor]
KINDS = (FedAvg, FairLoss, FairGrad, QFFL, AFL, AAggFF)
LOSS_FLOOR = 1e-10  # as in fair_flearn


def everything(_client: int) -> Rows:
    """One local step on all of a client's samples."""
    return [None]


def shuffled(samples: int, batch: int) -> Draw:
    """One local epoch over a client's samples, in an order of its own."""
    generator = torch.Generator().manual_seed(0)
    return lambda _client: list(torch.randperm(samples, generator=generator).split(batch))


def check_method(method: Method) -> None:
    plain = method.client_weights == "uniform" and method.loss_data == "batch"
    if not isinstance(method, KINDS) or not plain:
        raise BadInput(f'{method!r} has no plain loop: use weights="uniform", losses="batch"')


def direction(
    method: Method, loss: Tensor, slopes: Tensors, params: Tensors, a: Tensor, g: Tensors
) -> Tensors:
    """d_i as the papers write it; `slopes` carry their graph where there is curvature."""
    gradient = [s.detach() for s in slopes]
    if isinstance(method, FairLoss):
        pull = method.strength * (loss.detach() - a)
        return [d + pull * (d - mean) for d, mean in zip(gradient, g, strict=True)]
    if isinstance(method, FairGrad):
        away = [d - mean for d, mean in zip(gradient, g, strict=True)]
        products = torch.autograd.grad(slopes, params, away)
        return [d + method.strength * h for d, h in zip(gradient, products, strict=True)]
    return gradient


def zeros(params: Tensors) -> Tensors:
    return [torch.zeros_like(p, requires_grad=False) for p in params]


class Lean:
    """Load the global model, forward, backward, SGD step, add up. No loader, no copies to spare."""

    def __init__(
        self, module: nn.Module, data: Federation, method: Method, lr: float, draw: Draw
    ) -> None:
        check_method(method)
        self.module = copy.deepcopy(module).train()
        self.names = [name for name, _ in self.module.named_parameters()]
        self.params: Tensors = list(self.module.parameters())
        self.clients = [data.train.of(i) for i in range(data.clients)]
        self.method, self.lr, self.draw = method, lr, draw
        self.mean_loss = torch.zeros((), dtype=self.params[0].dtype, device=self.params[0].device)
        self.mean_gradient = zeros(self.params)
        self.memory = {
            k: v.to(self.mean_loss.device)
            for k, v in method.initial_memory(data.clients).items()
        }  # fmt: skip

    def round(self) -> None:
        """The new global model is left in `module`."""
        n, method = len(self.clients), self.method
        rows = [self.draw(i) for i in range(n)]
        start = {k: v.clone() for k, v in self.module.state_dict().items()}
        a, g = self.mean_loss, self.mean_gradient
        if method.probes:
            a, g = self._probe(rows, start)
        reports = method.reports_gradient
        next_loss, next_gradient = torch.zeros_like(a), zeros(self.params) if reports else []
        server = _Server(method, start, self.names, n, self.lr)
        for i in range(n):
            self.module.load_state_dict(start)
            loss, gradient = self._train(i, rows[i], a, g)
            server.add(loss, self.module.state_dict())
            if reports:
                next_loss += loss / n
                torch._foreach_add_(next_gradient, gradient, alpha=1 / n)
        new, self.memory = server.finish(self.memory)
        self.module.load_state_dict(new)
        self.mean_loss, self.mean_gradient = next_loss, next_gradient

    def _batch(self, client: int, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        x, y = self.clients[client]
        return (x, y) if rows is None else (x[rows.to(x.device)], y[rows.to(y.device)])

    def _probe(self, rows: list[Rows], start: Weights) -> tuple[Tensor, Tensors]:
        """The first of two passes of the exact methods: mean loss and mean gradient at x^t."""
        n = len(self.clients)
        a, g = torch.zeros_like(self.mean_loss), zeros(self.params)
        for i in range(n):
            self.module.load_state_dict(start)  # running statistics must not see this pass
            x, y = self._batch(i, rows[i][0])
            loss = cross_entropy(self.module(x), y)
            a += loss.detach() / n
            torch._foreach_add_(g, torch.autograd.grad(loss, self.params), alpha=1 / n)
        return a, g

    def _train(self, client: int, rows: Rows, a: Tensor, g: Tensors) -> tuple[Tensor, Tensors]:
        """All local steps; the loss and the gradient at x^t come from the first."""
        seen: list[tuple[Tensor, Tensors]] = []
        for some in rows:
            x, y = self._batch(client, some)
            loss = cross_entropy(self.module(x), y)
            slopes = list(
                torch.autograd.grad(
                    loss, self.params, create_graph=isinstance(self.method, FairGrad)
                )
            )
            step = direction(self.method, loss, slopes, self.params, a, g)
            with torch.no_grad():
                for p, d in zip(self.params, step, strict=True):
                    p.sub_(d, alpha=self.lr)
            if not seen:
                seen.append((loss.detach(), [s.detach() for s in slopes]))
        return seen[0]


class _Server:
    """Adds client models up as they come; AFL and AAggFF must wait for all losses first."""

    def __init__(self, method: Method, start: Weights, names: list[str], n: int, lr: float) -> None:
        self.method, self.start, self.names, self.n, self.lr = method, start, names, n, lr
        self.total = {k: torch.zeros_like(v, dtype=_wide(v)) for k, v in start.items()}
        self.bound = torch.zeros((), dtype=torch.float64)  # Σ h_i of q-FFL
        self.losses: Tensors = []
        self.kept: list[Weights] = []

    def add(self, loss: Tensor, state: Weights) -> None:
        self.losses.append(loss)
        waits = isinstance(self.method, AFL | AAggFF)
        if waits:
            self.kept.append({k: v.clone() for k, v in state.items() if k in self.names})
        elif isinstance(self.method, QFFL):
            self._add_scaled(loss, state, self.method.q)
        for name, value in state.items():
            if name not in self.names or not (waits or isinstance(self.method, QFFL)):
                self.total[name].add_(value, alpha=1 / self.n)

    def _add_scaled(self, loss: Tensor, state: Weights, q: float) -> None:
        """Δ_i = f^q (x − x_i)/η and h_i = q f^(q−1) ‖(x − x_i)/η‖² + f^q/η"""
        f = loss + LOSS_FLOOR
        norm = torch.zeros_like(f)
        for name in self.names:
            change = (self.start[name] - state[name]) / self.lr
            norm += change.square().sum()
            self.total[name] += f**q * change
        self.bound = self.bound.to(f.device) + q * f ** (q - 1) * norm + f**q / self.lr

    def finish(self, memory: Weights) -> tuple[Weights, Weights]:
        """The new global model, and what the method remembers."""
        new = {k: v.to(self.start[k].dtype) for k, v in self.total.items()}
        if isinstance(self.method, QFFL):
            for name in self.names:
                new[name] = self.start[name] - (self.total[name] / self.bound).to(new[name].dtype)
        elif self.kept:
            weights, memory = self.method.weigh(memory, replies(self.losses))
            for w, state in zip(weights.tolist(), self.kept, strict=True):
                for name, value in state.items():
                    new[name] += w * (value - self.start[name])
            for name in self.names:
                new[name] += self.start[name]
        return new, memory


def _wide(value: Tensor) -> torch.dtype:
    """Counters of batch norm are averaged as floats."""
    return value.dtype if value.is_floating_point() else torch.float64


def replies(losses: Tensors) -> Replies:
    n, device = len(losses), losses[0].device
    share = torch.full((n,), 1 / n, dtype=torch.float64, device=device)
    return Replies(torch.stack(losses).double(), share, torch.arange(n, device=device), n)


class Central:
    """SGD on the pooled batch, as if nobody had private data: what the arithmetic itself costs.

    With batch norm its statistics are those of the pool, so it is a yardstick, not a method.
    """

    def __init__(self, module: nn.Module, data: Federation, lr: float, batch: int | None) -> None:
        self.module = copy.deepcopy(module).train()
        self.params: Tensors = list(self.module.parameters())
        self.x, self.y, self.lr = data.train.x, data.train.y, lr
        self.draw = everything if batch is None else shuffled(len(self.y), batch * data.clients)

    def round(self) -> None:
        for rows in self.draw(0):
            at = slice(None) if rows is None else rows.to(self.x.device)
            loss = cross_entropy(self.module(self.x[at]), self.y[at])
            slopes = torch.autograd.grad(loss, self.params)
            with torch.no_grad():
                for p, d in zip(self.params, slopes, strict=True):
                    p.sub_(d, alpha=self.lr)
