"""The bare client loop, as a person writes it: the baseline that the project's targets speak of.

For each client: load_state_dict, zero_grad, forward, backward, step of torch's SGD, a clone of the
model. The server then averages the list of models. No loader, no packages, no tricks either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairvar.data.federation import Federation
from fairvar.methods import AFL, QFFL, AAggFF, FairGrad, FairLoss, Method
from fairvar_bench.loops import (
    LOSS_FLOOR,
    Draw,
    Loop,
    Rows,
    Tensors,
    Weights,
    direction,
    replies,
)


class Reply(NamedTuple):
    """A client after its local steps; loss and gradient are those at x^t, on the first batch."""

    model: Weights
    loss: Tensor
    gradient: Tensors


class Bare(Loop):
    """One module and one optimiser for all clients; the global model is the dict `model`."""

    def __init__(
        self, module: nn.Module, data: Federation, method: Method, lr: float, draw: Draw
    ) -> None:
        super().__init__(module, data, method, lr, draw)
        self.optimizer = torch.optim.SGD(self.params, lr=lr)
        self.model: Weights = {k: v.clone() for k, v in self.module.state_dict().items()}

    def round(self) -> None:
        rows = [self.draw(i) for i in range(len(self.clients))]
        a, g = self.mean_loss, self.mean_gradient
        if self.method.probes:
            a, g = _mean([self._probe(i, some[0]) for i, some in enumerate(rows)])
        found = [self._train(i, some, a, g) for i, some in enumerate(rows)]
        if self.method.reports_gradient:
            self.mean_loss, self.mean_gradient = _mean([(r.loss, r.gradient) for r in found])
        self.model = self._server(found)

    def _probe(self, client: int, rows: Tensor | None) -> tuple[Tensor, Tensors]:
        """The first of two passes of the exact methods: loss and gradient at x^t."""
        self.module.load_state_dict(self.model)
        x, y = self.batch(client, rows)
        self.optimizer.zero_grad()
        loss = cross_entropy(self.module(x), y)
        loss.backward()
        return loss.detach(), self._slopes()

    def _train(self, client: int, rows: Rows, a: Tensor, g: Tensors) -> Reply:
        self.module.load_state_dict(self.model)
        seen: list[tuple[Tensor, Tensors]] = []
        for some in rows:
            x, y = self.batch(client, some)
            self.optimizer.zero_grad()
            loss = cross_entropy(self.module(x), y)
            gradient = self._backward(loss, a, g)
            self.optimizer.step()
            if not seen:
                seen.append((loss.detach(), gradient))
        model = {k: v.clone() for k, v in self.module.state_dict().items()}
        return Reply(model, *seen[0])

    def _backward(self, loss: Tensor, a: Tensor, g: Tensors) -> Tensors:
        """Leaves the method's direction in .grad; returns ∇f_i for methods that report it."""
        if not isinstance(self.method, FairGrad | FairLoss):
            loss.backward()
            return []
        if isinstance(self.method, FairGrad):
            slopes = list(torch.autograd.grad(loss, self.params, create_graph=True))
        else:
            loss.backward()
            slopes = self._slopes()
        found = direction(self.method, loss, slopes, self.params, a, g)
        for p, d in zip(self.params, found, strict=True):
            p.grad = d
        return [s.detach() for s in slopes] if self.method.reports_gradient else []

    def _slopes(self) -> Tensors:
        return [p.grad for p in self.params if p.grad is not None]

    def _server(self, found: list[Reply]) -> Weights:
        new = {k: _average([r.model[k] for r in found]) for k in self.model}
        if isinstance(self.method, QFFL):
            return new | self._q_step(found, self.method.q)
        if isinstance(self.method, AFL | AAggFF):
            weights, self.memory = self.method.weigh(self.memory, replies([r.loss for r in found]))
            new |= {k: _average([r.model[k] for r in found], weights) for k in self.names}
        return new

    def _q_step(self, found: list[Reply], q: float) -> Weights:
        """x ← x − Σ Δ_i / Σ h_i, Δ_i = f^q (x − x_i)/η, h_i = q f^(q−1) ‖(x − x_i)/η‖² + f^q/η"""
        deltas, bounds = [], []
        for reply in found:
            f = reply.loss + LOSS_FLOOR
            change = [(self.model[k] - reply.model[k]) / self.lr for k in self.names]
            norm = torch.stack([c.square().sum() for c in change]).sum()
            deltas.append([f**q * c for c in change])
            bounds.append(q * f ** (q - 1) * norm + f**q / self.lr)
        total = torch.stack(bounds).sum()
        summed = [torch.stack(one).sum(0) for one in zip(*deltas, strict=True)]
        return {k: self.model[k] - d / total for k, d in zip(self.names, summed, strict=True)}


def _mean(answers: Sequence[tuple[Tensor, Tensors]]) -> tuple[Tensor, Tensors]:
    losses, gradients = zip(*answers, strict=True)
    mean = [torch.stack(one).mean(0) for one in zip(*gradients, strict=True)]
    return torch.stack(losses).mean(), mean


def _average(values: list[Tensor], weights: Tensor | None = None) -> Tensor:
    stacked = torch.stack(values)
    if weights is not None:
        shape = (-1, *[1] * values[0].dim())
        return (weights.to(stacked.dtype).view(shape) * stacked).sum(0)
    wide = stacked if stacked.is_floating_point() else stacked.double()  # batch norm's counters
    return wide.mean(0).to(stacked.dtype)
