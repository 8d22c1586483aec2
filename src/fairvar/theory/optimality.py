"""T5 and quadratics: what the minimisers of L_λ and J_γ look like."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad

from fairvar import objectives
from fairvar.theory.claim import Claim, compare
from fairvar.theory.problems import (
    Quadratics,
    hessian,
    normal,
    plain_gradient_variance,
    quadratics,
    uniform,
)

STRENGTHS = (0.0, 0.05, 0.3, 1.0, 4.0, 20.0, 100.0)
GAM = 0.8


def claims() -> list[Claim]:
    return [*_less_variance(), *_closed_form(), *_stability()]


def _curves(x: Tensor) -> Tensor:
    """Three losses of one parameter, none convex, (n,) at a number or (n, grid) on a grid."""
    return torch.stack([
        1.5 + torch.sin(1.7 * x) + 0.1 * x**2,
        2.0 + torch.cos(2.3 * x + 0.4) + 0.05 * (x - 1) ** 2,
        0.8 + 0.3 * (x + 0.5) ** 2 - 0.5 * torch.cos(3 * x),
    ])  # fmt: skip


def _minimisers(value: Callable[[Tensor, Tensor, float], Tensor], f: Tensor, g: Tensor) -> Tensor:
    """The grid point with the smallest objective, for each strength: a global minimiser."""
    points = range(f.shape[1])
    best = [
        int(torch.stack([value(f[:, k], g[:, k : k + 1], s) for k in points]).argmin())
        for s in STRENGTHS
    ]
    return torch.tensor(best)


def _less_variance() -> list[Claim]:
    """On any set of points, here a grid, the theorem's argument holds for global minimisers."""
    x = torch.linspace(-4, 4, 321, dtype=torch.float64)
    f, g = _curves(x), torch.func.vmap(torch.func.jacrev(_curves), out_dims=1)(x)
    table = (
        ("T5", "losses", f.var(0, unbiased=False),
         lambda a, _, s: objectives.loss_variance(a, s).value),
        ("T5 for J", "gradients", g.var(0, unbiased=False),
         lambda a, b, s: objectives.gradient_variance(a, b, s).value),
    )  # fmt: skip
    found = []
    for name, what, spread, value in table:
        best = _minimisers(value, f, g)
        v, F = spread[best], f.mean(0)[best]
        note = f"strengths {STRENGTHS} on a grid; the variance of {what}, not of accuracies"
        found += [
            compare(name, f"Var({what}) at the minimiser of the fair objective ≤ at that of F",
                    (v[1:], v[0]), "<=", "theorem", note=note),
            compare(f"{name}, monotone variance", f"Var({what}) falls as the strength grows",
                    (v[1:], v[:-1]), "<=", "corrected", note=f"stronger than printed; {note}"),
            compare(f"{name}, monotone loss", "F at the minimiser rises as the strength grows",
                    (F[:-1], F[1:]), "<=", "corrected", note=f"stronger than printed; {note}"),
            compare(f"{name}, not empty", "the variance really falls in this example",
                    (v[-1], v[0]), "!=", "theorem", 1e-2, "so the bounds above are not 0 ≤ 0"),
        ]  # fmt: skip
    return found


def _pieces(q: Quadratics) -> tuple[Tensor, Tensor]:
    """Matrix and right-hand side of the stationarity equation of J_γ."""
    n, b = len(q.c), torch.einsum("nij,nj->ni", q.A, q.m)
    D, e = q.A - q.A.mean(0), b - b.mean(0)
    matrix = q.A.mean(0) + GAM / n * (D @ D).sum(0)
    return matrix, b.mean(0) + GAM / n * torch.einsum("nij,nj->i", D, e)


def _closed_form() -> list[Claim]:
    q = quadratics()
    problem = q.problem()
    n, d = q.m.shape
    matrix, right = _pieces(q)
    minimiser = torch.linalg.solve(matrix, right)
    J = plain_gradient_variance(problem, GAM, uniform(n))
    start = problem.start
    curved = hessian(J)(start)
    newton = start - torch.linalg.solve(curved, grad(J)(start))  # exact: J is quadratic
    x = normal(d, name="elsewhere")
    f, g = problem.losses(x), problem.gradients(x)
    formula = objectives.gradient_variance(f, g, GAM, problem.hessians(x)).gradient
    if formula is None:
        raise ValueError("the objective returned no gradient")
    return [
        compare("minimiser of J, quadratics",
                "x_γ = (Ā + (γ/n) Σ D_i²)⁻¹ (b̄ + (γ/n) Σ D_i e_i)", (minimiser, newton), "=",
                "identity", 1e-11, "against one Newton step with autograd derivatives"),
        compare("∇J, quadratics", "∇J_γ(x) = (Ā + (γ/n) Σ D_i²)(x − x_γ)",
                (formula, matrix @ (x - minimiser)), "=", "identity", 1e-11),
        compare("∇²J, quadratics", "∇²J_γ = Ā + (γ/n) Σ D_i²", (curved, matrix), "=", "identity",
                1e-11),
    ]  # fmt: skip


def _stability() -> list[Claim]:
    """Gradient descent on J just below and just above the step size 2/λ_max(∇²J)."""
    q = quadratics()
    problem = q.problem()
    matrix, right = _pieces(q)
    best = torch.linalg.solve(matrix, right)
    limit = 2 / float(torch.linalg.eigvalsh(matrix)[-1])
    rounds = 150

    def distance(step: float) -> Tensor:
        x = problem.start
        H = problem.hessians(x)
        for _ in range(rounds):
            g = problem.gradients(x)
            x = x - step * (g.mean(0) + GAM * torch.einsum("nij,nj->i", H, g - g.mean(0)) / len(g))
        return (x - best).norm()

    first = (problem.start - best).norm()
    below, above = distance(0.98 * limit), distance(1.02 * limit)
    return [
        compare("stability of FairGrad*, below", "η = 0.98 · 2/λ_max(∇²J): the error shrinks",
                (below, first / 3), "<=", "identity", note=f"after {rounds} rounds, to a third"),
        compare("stability of FairGrad*, above", "η = 1.02 · 2/λ_max(∇²J): the error explodes",
                (3 * first, above), "<=", "identity", note=f"after {rounds} rounds, threefold"),
    ]  # fmt: skip
