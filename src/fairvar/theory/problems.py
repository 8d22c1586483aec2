"""Small federations in float64 on which the claims are computed, and plain derivatives.

A `Problem` knows its client losses only; gradients and Hessians come from autograd. The objectives
in `plain_*` are written out from their definition, so that `fairvar.objectives`, whose gradients
are formulas, can be compared with derivatives of something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.func import jacrev

from fairvar import rng

Vector = Float64[Tensor, " d"]
Clients = Float64[Tensor, " n"]
Scalar = Callable[[Tensor], Tensor]


def hessian(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Reverse mode twice; torch's own uses forward mode, whose first use warns of torch.jit."""
    return jacrev(jacrev(function))


@dataclass(frozen=True)
class Problem:
    """n client losses as one function of the parameters."""

    name: str
    losses: Callable[[Vector], Clients]
    start: Vector
    smoothness: float  # F is this smooth: ‖∇F(x) − ∇F(y)‖ ≤ smoothness · ‖x − y‖

    def gradients(self, x: Vector) -> Float64[Tensor, "n d"]:
        return jacrev(self.losses)(x)

    def hessians(self, x: Vector) -> Float64[Tensor, "n d d"]:
        return hessian(self.losses)(x)


def normal(*shape: int, name: str) -> Tensor:
    """Standard normal numbers from the stream of this name."""
    return torch.from_numpy(rng.stream(0, "theory", name).standard_normal(shape))


def positive(n: int, d: int, name: str) -> Tensor:
    """n random symmetric positive definite d × d matrices."""
    root = normal(n, d, d, name=name)
    return root @ root.mT / d + 0.3 * torch.eye(d, dtype=torch.float64)


@dataclass(frozen=True)
class Quadratics:
    """f_i = ½ (x − m_i)ᵀ A_i (x − m_i) + c_i"""

    A: Float64[Tensor, "n d d"]
    m: Float64[Tensor, "n d"]
    c: Clients

    def losses(self, x: Vector) -> Clients:
        r = x - self.m
        return torch.einsum("ni,nij,nj->n", r, self.A, r) / 2 + self.c

    def problem(self) -> Problem:
        top = float(torch.linalg.eigvalsh(self.A.mean(0))[-1])
        return Problem("quadratics", self.losses, normal(self.m.shape[1], name="start"), top)


def quadratics(n: int = 5, d: int = 4) -> Quadratics:
    return Quadratics(positive(n, d, "A"), normal(n, d, name="m"), normal(n, name="c").abs())


def through(loss: Clients, gradient: Float64[Tensor, "n d"], name: str) -> Problem:
    """Quadratics with exactly these losses and gradients at x = 0, and random curvature."""
    A = positive(len(loss), gradient.shape[1], f"curvature {name}")

    def losses(x: Vector) -> Clients:
        return loss + gradient @ x + torch.einsum("i,nij,j->n", x, A, x) / 2

    return Problem(name, losses, torch.zeros_like(gradient[0]), float("nan"))


def regression(n: int = 4, samples: int = 6, features: int = 3, classes: int = 3) -> Problem:
    """Multinomial regression (mean cross-entropy by client), each client with a tilt of its own."""
    x = normal(n, samples, features, name="x") + 0.7 * normal(n, 1, features, name="tilt")
    y = torch.from_numpy(rng.stream(0, "theory", "y").integers(0, classes, (n, samples)))

    def losses(w: Vector) -> Clients:
        score = x @ w.reshape(features, classes)
        return -score.log_softmax(-1).gather(-1, y[..., None]).mean((1, 2))

    # Hess = mean of (diag p − p pᵀ) ⊗ x xᵀ and ‖diag p − p pᵀ‖ ≤ ½
    top = float(torch.linalg.eigvalsh((x.mT @ x / samples).mean(0))[-1]) / 2
    return Problem("regression", losses, normal(features * classes, name="w"), top)


def both() -> list[Problem]:
    return [quadratics().problem(), regression()]


def uneven(n: int) -> Clients:
    """Weights proportional to 1, 2, … n."""
    w = torch.arange(1, n + 1, dtype=torch.float64)
    return w / w.sum()


def uniform(n: int) -> Clients:
    return torch.full((n,), 1 / n, dtype=torch.float64)


def plain_loss_variance(problem: Problem, strength: float, w: Clients) -> Scalar:
    def L(x: Vector) -> Tensor:
        f = problem.losses(x)
        F = (w * f).sum()
        return F + strength / 2 * (w * (f - F) ** 2).sum()

    return L


def plain_gradient_variance(problem: Problem, strength: float, w: Clients) -> Scalar:
    def J(x: Vector) -> Tensor:
        g = problem.gradients(x)
        away = g - (w[:, None] * g).sum(0)
        return (w * problem.losses(x)).sum() + strength / 2 * (w[:, None] * away**2).sum()

    return J


def plain_qffl(problem: Problem, q: float, w: Clients) -> Scalar:
    return lambda x: (w * problem.losses(x) ** (q + 1)).sum() / (q + 1)


def slope(function: Scalar, x: Vector, step: float = 1e-3) -> Vector:
    """∇function by central differences of fourth order; no autograd."""
    entries = []
    for unit in torch.eye(len(x), dtype=torch.float64) * step:
        near = function(x + unit) - function(x - unit)
        far = function(x + 2 * unit) - function(x - 2 * unit)
        entries.append((8 * near - far) / (12 * step))
    return torch.stack(entries).detach()
