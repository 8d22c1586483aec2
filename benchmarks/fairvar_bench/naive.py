"""The client loop with the overheads of a federated-learning framework.

It does what FL-bench (October 2025) does in a round with its evaluation switched off, in the same
order: the server deep-copies the parameters for every client; one worker loads them (and, in a
second call, the personal ones, of which there are none), resets its optimiser and points one Subset
and one DataLoader at the client's rows; before and after training it gets ready to evaluate;
samples are fetched and normalised one at a time; the updated model is cloned to the host, the
optimiser's state is copied; the server stacks all models along a last axis and sums. Written from
that description. Left out, though it costs time there: reading its configuration and logging.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from fairvar.data.federation import Federation
from fairvar.methods import AFL, QFFL, AAggFF, FairGrad, FairLoss, Method
from fairvar_bench.loops import (
    LOSS_FLOOR,
    Draw,
    Rows,
    Tensors,
    Weights,
    check_method,
    direction,
    replies,
)

MEAN, SCALE = 0.5, 0.25  # of the raw samples; any numbers do


class Normalise(nn.Module):
    """As torchvision does it to single samples: for each one the constants become tensors, are
    checked, and a copy is changed in place."""

    def forward(self, sample: Tensor) -> Tensor:
        channels = [1] * (sample.dim() - 1)
        mean, scale = (
            torch.as_tensor([value] * len(sample), dtype=sample.dtype, device=sample.device)
            for value in (MEAN, SCALE)
        )
        if (scale == 0).any():
            raise ValueError("scale is zero")
        return sample.clone().sub_(mean.view(-1, *channels)).div_(scale.view(-1, *channels))


class RawSamples(Dataset[tuple[Tensor, Tensor]]):
    """All clients' samples on the host, normalised when one is asked for."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.raw, self.y = x.cpu() * SCALE + MEAN, y.cpu()
        self.transforms = [Normalise()]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample, label = self.raw[index], self.y[index]
        for transform in self.transforms:
            sample = transform(sample)
        return sample, label

    def __len__(self) -> int:
        return len(self.y)


class Naive:
    """One model and one optimiser, used by client after client."""

    def __init__(
        self, module: nn.Module, data: Federation, method: Method, lr: float, draw: Draw
    ) -> None:
        check_method(method)
        self.module = copy.deepcopy(module).train()
        self.names = [name for name, _ in self.module.named_parameters()]
        self.params: Tensors = list(self.module.parameters())
        self.device = self.params[0].device
        self.optimizer = torch.optim.SGD(self.params, lr=lr)
        self.criterion = nn.CrossEntropyLoss()
        self.fresh = copy.deepcopy(self.optimizer.state_dict())
        self.own = Subset(RawSamples(data.train.x, data.train.y), [])
        self.batches: list[list[int]] = []
        self.loader = DataLoader(self.own, batch_sampler=self.batches)
        ends = data.train.offsets
        self.indices = [list(range(ends[i], ends[i + 1])) for i in range(data.clients)]
        self.method, self.lr, self.draw = method, lr, draw
        self.model: Weights = _host(self.module.state_dict())
        self.mean_loss = 0.0
        needed = self.names if method.uses_mean_gradient else []
        self.mean_gradient: Weights = {k: torch.zeros_like(self.model[k]) for k in needed}
        self.memory = method.initial_memory(data.clients)

    def round(self) -> None:
        """The new global model is left in `model`, on the host."""
        rows = [self.draw(i) for i in range(len(self.indices))]
        a, g = self.mean_loss, self.mean_gradient
        if self.method.probes:
            a, g = _mean_report([self._probe(i, some) for i, some in enumerate(rows)])
        packages = [self._client(i, some, a, g) for i, some in enumerate(rows)]
        if self.method.reports_gradient:
            self.mean_loss, self.mean_gradient = _mean_report(packages)
        self._aggregate(packages)

    def _receive(self, a: float, g: Weights) -> dict[str, Any]:
        package: dict[str, Any] = copy.deepcopy(
            {"model": self.model, "mean_loss": a, "mean_gradient": g}
        )
        self.module.load_state_dict(package["model"], strict=False)
        self.module.load_state_dict({}, strict=False)  # personal parameters
        self.optimizer.load_state_dict(self.fresh)
        return package

    def _loader(self, client: int, rows: Rows) -> DataLoader[tuple[Tensor, Tensor]]:
        """The one loader, pointed at this client's batches."""
        self.own.indices = self.indices[client]
        self.batches[:] = [list(range(len(self.own))) if r is None else r.tolist() for r in rows]
        return self.loader

    def _probe(self, client: int, rows: Rows) -> dict[str, Any]:
        """The first exchange of the exact methods."""
        self._receive(0.0, {})
        self.module.train()
        x, y = next(iter(self._loader(client, rows[:1])))
        loss = self.criterion(self.module(x.to(self.device)), y.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()
        gradient = {k: p.grad for k, p in zip(self.names, self.params, strict=True)}
        return {"loss": loss.item(), "gradient": _host(gradient)}

    def _client(self, client: int, rows: Rows, a: float, g: Weights) -> dict[str, Any]:
        package = self._receive(a, g)
        self._turn_to_evaluation()
        self.module.train()
        seen: list[tuple[float, Weights]] = []
        for host_x, host_y in self._loader(client, rows):
            x, y = host_x.to(self.device), host_y.to(self.device)
            loss = self.criterion(self.module(x), y)
            self.optimizer.zero_grad()
            gradient = self._backward(loss, package)
            self.optimizer.step()
            if not seen:
                seen.append((loss.item(), gradient))
        self._turn_to_evaluation()
        return {
            "model": _host(self.module.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "loss": seen[0][0],
            "gradient": seen[0][1],
        }

    def _turn_to_evaluation(self) -> None:
        """All that is left of an evaluation that is switched off."""
        self.module.eval()
        nn.CrossEntropyLoss(reduction="sum")

    def _backward(self, loss: Tensor, package: dict[str, Any]) -> Weights:
        """Leaves the method's direction in .grad; returns ∇f_i for methods that report it."""
        if not isinstance(self.method, FairLoss | FairGrad):
            loss.backward()
            return {}
        curved = isinstance(self.method, FairGrad)
        slopes = list(torch.autograd.grad(loss, self.params, create_graph=curved))
        report: Weights = {}
        if self.method.reports_gradient:
            report = _host(dict(zip(self.names, slopes, strict=True)))
        g = [package["mean_gradient"][k].to(self.device) for k in self.names]
        a = loss.new_tensor(package["mean_loss"])
        found = direction(self.method, loss, slopes, self.params, a, g)
        for p, d in zip(self.params, found, strict=True):
            p.grad = d
        return report

    def _aggregate(self, packages: list[dict[str, Any]]) -> None:
        losses = torch.tensor([p["loss"] for p in packages], dtype=torch.float64)
        weights = torch.full_like(losses, 1 / len(losses))
        old, shares = self.model, weights
        if isinstance(self.method, AFL | AAggFF):
            weights, self.memory = self.method.weigh(self.memory, replies(list(losses)))
        if isinstance(self.method, QFFL):
            weights = self._scaled(packages, losses, self.method.q)
        new = {}
        for name, value in old.items():
            stacked = torch.stack([p["model"][name] for p in packages], dim=-1)
            if name not in self.names or weights is shares:
                share = shares.to(value.dtype) if value.is_floating_point() else shares
                new[name] = (stacked * share).sum(-1).to(value.dtype)
            else:  # weights that need not sum to one apply to the changes
                change = (stacked - value[..., None]) * weights.to(value.dtype)
                new[name] = value + change.sum(-1)
        self.model = new

    def _scaled(self, packages: list[dict[str, Any]], losses: Tensor, q: float) -> Tensor:
        """q-FFL: x ← x − Σ f_i^q (x − x_i)/η / Σ h_i, as weights of x_i − x"""
        f = losses + LOSS_FLOOR
        norms = [
            sum(float((self.model[k] - p["model"][k]).square().sum()) for k in self.names)
            for p in packages
        ]
        h = q * f ** (q - 1) * f.new_tensor(norms) / self.lr**2 + f**q / self.lr
        return f**q / self.lr / h.sum()


def _host(weights: Mapping[str, Tensor | None]) -> Weights:
    return {k: v.detach().clone().cpu() for k, v in weights.items() if v is not None}


def _mean_report(packages: list[dict[str, Any]]) -> tuple[float, Weights]:
    n = len(packages)
    mean = {
        name: torch.stack([p["gradient"][name] for p in packages], dim=-1).sum(-1) / n
        for name in packages[0]["gradient"]
    }
    return sum(p["loss"] for p in packages) / n, mean
