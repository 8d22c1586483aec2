"""What the loops over clients share, and one centralised step.

`bare` is the loop that a person writes, `lean` the same one tuned, `naive` has a framework's
overheads. Nothing here comes from the engine, so that the benchmark compares different programs; a
test shows that all of them compute the same global model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairvar.data.federation import Federation
from fairvar.errors import BadInput
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


def shuffled(sizes: Sequence[int], batch: int) -> Draw:
    """One local epoch over a client's samples, in an order of its own."""
    generator = torch.Generator().manual_seed(0)
    return lambda client: list(torch.randperm(sizes[client], generator=generator).split(batch))


def drawn(sizes: Sequence[int], batch: int) -> Draw:
    """One local step on some of a client's samples, other ones in every round."""
    generator = torch.Generator().manual_seed(0)
    return lambda client: [torch.randperm(sizes[client], generator=generator)[:batch]]


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


def replies(losses: Tensors) -> Replies:
    n, device = len(losses), losses[0].device
    share = torch.full((n,), 1 / n, dtype=torch.float64, device=device)
    return Replies(torch.stack(losses).double(), share, torch.arange(n, device=device), n)


class Loop:
    """A module that client after client uses, their data, and what the server remembers."""

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

    def batch(self, client: int, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        x, y = self.clients[client]
        return (x, y) if rows is None else (x[rows.to(x.device)], y[rows.to(y.device)])


class Central:
    """SGD on the pooled batch, as if nobody had private data: what the arithmetic itself costs.

    With batch norm its statistics are those of the pool, so it is a yardstick, not a method.
    """

    def __init__(self, module: nn.Module, data: Federation, lr: float, draw: Draw) -> None:
        self.module = copy.deepcopy(module).train()
        self.params: Tensors = list(self.module.parameters())
        self.x, self.y, self.lr, self.draw = data.train.x, data.train.y, lr, draw

    def round(self) -> None:
        for rows in self.draw(0):
            at = slice(None) if rows is None else rows.to(self.x.device)
            loss = cross_entropy(self.module(self.x[at]), self.y[at])
            slopes = torch.autograd.grad(loss, self.params)
            with torch.no_grad():
                for p, d in zip(self.params, slopes, strict=True):
                    p.sub_(d, alpha=self.lr)
