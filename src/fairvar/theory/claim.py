"""`Claim`: one statement of the theory as two numbers and a relation between them; and the small
federations in float64 on which the claims are computed.

An `Example` has its client losses only; gradients and Hessians come from autograd. Its objectives
are written out from their definition, so that `fairvar.objectives`, whose gradients are formulas,
can be compared with derivatives of something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.func import jacrev

from fairvar.common import rng
from fairvar.objectives import Objective

Relation = Literal["=", "<=", "!=", "> (paper: <=)", "!= (paper: =)"]
Kind = Literal["theorem", "corrected", "counterexample", "identity"]
Vector = Float64[Tensor, " d"]
Clients = Float64[Tensor, " n"]
Scalar = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Claim:
    """lhs and rhs, computed in two different ways, and whether the relation holds between them.

    "=":  |lhs − rhs| ≤ tolerance        "<=": lhs ≤ rhs + tolerance      "!=": not "="
    "> (paper: <=)" and "!= (paper: =)": the paper's relation fails here, by more than tolerance;
    such a claim *holds* when the paper's form is violated.
    Where vectors or whole trajectories are compared, lhs and rhs are the pair of entries that
    speaks most against an equality or bound (for "!=": most for it) out of `comparisons`.
    """

    name: str
    statement: str
    lhs: float
    rhs: float
    tolerance: float
    relation: Relation
    kind: Kind
    note: str = ""
    comparisons: int = 1
    holds: bool = field(init=False)

    def __post_init__(self) -> None:
        gap = self.lhs - self.rhs
        size = gap if self.relation in ONE_SIDED else abs(gap)
        holds = size <= self.tolerance if self.relation in ("=", "<=") else size > self.tolerance
        object.__setattr__(self, "holds", holds)


ONE_SIDED = ("<=", "> (paper: <=)")


def compare(
    name: str,
    statement: str,
    sides: tuple[Tensor | float, Tensor | float],
    relation: Relation = "=",
    kind: Kind = "identity",
    tolerance: float = 1e-12,
    note: str = "",
) -> Claim:
    """A claim about all entries of two tensors (or a tensor and a number) of one shape."""
    lhs, rhs = torch.broadcast_tensors(*(torch.as_tensor(s, dtype=torch.float64) for s in sides))
    left, right = lhs.detach().flatten(), rhs.detach().flatten()
    gap = left - right
    worst = int((gap if relation in ONE_SIDED else gap.abs()).argmax())
    return Claim(name, statement, float(left[worst]), float(right[worst]), tolerance, relation,
                 kind, note, len(left))  # fmt: skip


def hessian(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Reverse mode twice; torch's own uses forward mode, whose first use warns of torch.jit."""
    return jacrev(jacrev(function))


@dataclass(frozen=True)
class Example:
    """n client losses as one function of the parameters."""

    name: str
    losses: Callable[[Vector], Clients]
    start: Vector
    smoothness: float  # F is this smooth: ‖∇F(x) − ∇F(y)‖ ≤ smoothness · ‖x − y‖

    @property
    def clients(self) -> int:
        return len(self.losses(self.start))

    def at_start(self) -> tuple[Clients, Float64[Tensor, "n d"], Float64[Tensor, "n d d"]]:
        """Losses, gradients and Hessians of all clients where the problem starts."""
        x = self.start
        return self.losses(x), self.gradients(x), self.hessians(x)

    def gradients(self, x: Vector) -> Float64[Tensor, "n d"]:
        return jacrev(self.losses)(x)

    def hessians(self, x: Vector) -> Float64[Tensor, "n d d"]:
        return hessian(self.losses)(x)

    def _mean(self, weights: Clients | None) -> Scalar:
        """The mean over clients, the first axis."""
        w = uniform(self.clients) if weights is None else weights
        return lambda rows: torch.tensordot(w, rows, 1)

    def loss_variance(self, strength: float, weights: Clients | None = None) -> Scalar:
        mean = self._mean(weights)

        def L(x: Vector) -> Tensor:
            f = self.losses(x)
            return mean(f) + strength / 2 * mean((f - mean(f)) ** 2)

        return L

    def gradient_variance(self, strength: float, weights: Clients | None = None) -> Scalar:
        mean = self._mean(weights)

        def J(x: Vector) -> Tensor:
            g = self.gradients(x)
            return mean(self.losses(x)) + strength / 2 * mean(((g - mean(g)) ** 2).sum(1))

        return J

    def qffl(self, q: float, weights: Clients | None = None) -> Scalar:
        mean = self._mean(weights)
        return lambda x: mean(self.losses(x) ** (q + 1)) / (q + 1)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, name: str) -> Tensor:
    """Standard normal numbers from the stream of this name."""
    return torch.from_numpy(rng.stream(0, "theory", name).standard_normal(shape))


def positive(n: int, d: int, name: str) -> Float64[Tensor, "n d d"]:
    """n random symmetric positive definite d × d matrices."""
    root = normal(n, d, d, name=name)
    return root @ root.mT / d + 0.3 * torch.eye(d, dtype=torch.float64)


def through(
    loss: Clients, gradient: Float64[Tensor, "n d"], name: str, A: Tensor | None = None
) -> Example:
    """Quadratics with exactly these losses and gradients at x = 0, where the problem starts, and
    Hessians A, random by default."""
    n, d = gradient.shape
    bend = positive(n, d, f"curvature {name}") if A is None else A

    def losses(x: Vector) -> Clients:
        return loss + gradient @ x + torch.einsum("i,nij,j->n", x, bend, x) / 2

    top = float(torch.linalg.eigvalsh(bend.mean(0))[-1])
    return Example(name, losses, torch.zeros_like(gradient[0]), top)


def quadratics(A: Tensor, m: Float64[Tensor, "n d"], c: Clients) -> Example:
    """f_i = ½ (x − m_i)ᵀ A_i (x − m_i) + c_i"""
    b = torch.einsum("nij,nj->ni", A, m)
    problem = through((m * b).sum(1) / 2 + c, -b, "quadratics", A)
    return replace(problem, start=normal(m.shape[1], name="start"))


def random_quadratics(n: int = 5, d: int = 4) -> Example:
    return quadratics(positive(n, d, "A"), normal(n, d, name="m"), normal(n, name="c").abs())


def regression(n: int = 4, samples: int = 6, features: int = 3, classes: int = 3) -> Example:
    """Multinomial regression (mean cross-entropy by client), each client with a tilt of its own."""
    x = normal(n, samples, features, name="x") + 0.7 * normal(n, 1, features, name="tilt")
    y = torch.from_numpy(rng.stream(0, "theory", "y").integers(0, classes, (n, samples)))

    def losses(w: Vector) -> Clients:
        score = x @ w.reshape(features, classes)
        return -score.log_softmax(-1).gather(-1, y[..., None]).mean((1, 2))

    # Hess = mean of (diag p − p pᵀ) ⊗ x xᵀ and ‖diag p − p pᵀ‖ ≤ ½
    top = float(torch.linalg.eigvalsh((x.mT @ x / samples).mean(0))[-1]) / 2
    return Example("regression", losses, normal(features * classes, name="w"), top)


def both() -> list[Example]:
    return [random_quadratics(), regression()]


def uneven(n: int) -> Clients:
    """Weights proportional to 1, 2, … n."""
    w = torch.arange(1, n + 1, dtype=torch.float64)
    return w / w.sum()


def uniform(n: int) -> Clients:
    return torch.full((n,), 1 / n, dtype=torch.float64)


def gradient_of(objective: Objective) -> Tensor:
    if objective.gradient is None:
        raise ValueError("the objective returned no gradient")
    return objective.gradient


def slope(function: Scalar, x: Vector, step: float = 1e-3) -> Vector:
    """∇function by central differences of fourth order; no autograd."""
    entries = []
    for unit in torch.eye(len(x), dtype=torch.float64) * step:
        near = function(x + unit) - function(x - unit)
        far = function(x + 2 * unit) - function(x - 2 * unit)
        entries.append((8 * near - far) / (12 * step))
    return torch.stack(entries).detach()
