"""The client loop, tuned by hand: the strictest baseline that is still a loop over clients.

No optimiser object, no copy of a client's model, in-place steps, and sums kept while the clients go
by. Nobody's published code does this; `bare` is what people write.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fairvar.methods import AFL, QFFL, AAggFF, FairGrad, Method
from fairvar_bench.loops import (
    LOSS_FLOOR,
    Loop,
    Rows,
    Tensors,
    Weights,
    direction,
    replies,
    zeros,
)


class Lean(Loop):
    """Load the global model, forward, backward, SGD step, add up. No copies to spare."""

    @property
    def model(self) -> Weights:
        return self.module.state_dict()

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

    def _probe(self, rows: list[Rows], start: Weights) -> tuple[Tensor, Tensors]:
        """The first of two passes of the exact methods: mean loss and mean gradient at x^t."""
        n = len(self.clients)
        a, g = torch.zeros_like(self.mean_loss), zeros(self.params)
        for i in range(n):
            self.module.load_state_dict(start)  # running statistics must not see this pass
            x, y = self.batch(i, rows[i][0])
            loss = cross_entropy(self.module(x), y)
            a += loss.detach() / n
            torch._foreach_add_(g, torch.autograd.grad(loss, self.params), alpha=1 / n)
        return a, g

    def _train(self, client: int, rows: Rows, a: Tensor, g: Tensors) -> tuple[Tensor, Tensors]:
        """All local steps; the loss and the gradient at x^t come from the first."""
        seen: list[tuple[Tensor, Tensors]] = []
        for some in rows:
            x, y = self.batch(client, some)
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
