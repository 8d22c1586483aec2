"""Gradients and Hessians of L_λ, J_γ, H_q: the formulas against derivatives of the definitions."""

from __future__ import annotations

import torch
from torch import Tensor

from fairvar import objectives
from fairvar.theory.claim import Claim, compare
from fairvar.theory.problems import (
    Problem,
    Quadratics,
    both,
    hessian,
    normal,
    plain_gradient_variance,
    plain_loss_variance,
    plain_qffl,
    positive,
    quadratics,
    slope,
    uneven,
    uniform,
)

LAM, GAM, Q = 0.7, 0.4, 1.5
BY_DIFFERENCES = 1e-8


def claims() -> list[Claim]:
    found: list[Claim] = []
    for problem in both():
        n = len(problem.losses(problem.start))
        for label, w in (("w = 1/n", uniform(n)), ("uneven w", uneven(n))):
            found += _gradients(problem, label, w)
        found += [*_second_forms(problem), _hessian_of_L(problem), _mixed_weights(problem)]
        found += [_h1(problem), _fairness_off(problem)]
    return [*found, _common_matrix(), *_negative_beta()]


def _given(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise ValueError("the objective returned no gradient")
    return gradient


def _gradients(problem: Problem, label: str, w: Tensor) -> list[Claim]:
    x = problem.start
    f, g, H = problem.losses(x), problem.gradients(x), problem.hessians(x)
    L = objectives.loss_variance(f, LAM, g, w)
    J = objectives.gradient_variance(f, g, GAM, H, w)
    Hq = objectives.qffl(f, Q, g, w)
    table = (
        (
            "∇L_λ = Σ w_i β_i ∇f_i with β_i = 1 + λ(f_i − F)",
            L,
            plain_loss_variance(problem, LAM, w),
        ),
        ("∇J_γ = ∇F + γ Σ w_i H_i(∇f_i − ∇F)", J, plain_gradient_variance(problem, GAM, w)),
        ("∇H_q = Σ w_i f_i^q ∇f_i", Hq, plain_qffl(problem, Q, w)),
    )
    found = []
    for text, formula, plain in table:
        where = f"{text.split(' = ')[0]}, {problem.name}, {label}"
        found.append(compare(where, text, (_given(formula.gradient), slope(plain, x)), "=",
                             "identity", BY_DIFFERENCES,
                             "formula against finite differences of the value"))  # fmt: skip
        found.append(compare(f"{where[1:]}: value", "the value is that of the definition",
                             (formula.value, plain(x)), "=", "identity"))  # fmt: skip
    return found


def _second_forms(problem: Problem) -> list[Claim]:
    x = problem.start
    f, g, H = problem.losses(x), problem.gradients(x), problem.hessians(x)
    F, mean = f.mean(), g.mean(0)
    other_L = mean + LAM * ((f - F)[:, None] * (g - mean)).mean(0)
    other_J = mean + GAM * torch.einsum("nij,nj->i", H - H.mean(0), g - mean) / len(f)
    L = _given(objectives.loss_variance(f, LAM, g).gradient)
    J = _given(objectives.gradient_variance(f, g, GAM, H).gradient)
    return [
        compare(f"∇L_λ, centred form, {problem.name}",
                "Σ β_i ∇f_i / n = ∇F + (λ/n) Σ (f_i − F)(∇f_i − ∇F)",
                (L, other_L), "=", "identity"),
        compare(f"∇J_γ, centred form, {problem.name}",
                "∇F + (γ/n) Σ H_i(∇f_i − ∇F) = ∇F + (γ/n) Σ (H_i − H̄)(∇f_i − ∇F)",
                (J, other_J), "=", "identity"),
    ]  # fmt: skip


def _hessian_of_L(problem: Problem) -> Claim:
    x = problem.start
    f, g, H = problem.losses(x), problem.gradients(x), problem.hessians(x)
    beta, away = 1 + LAM * (f - f.mean()), g - g.mean(0)
    formula = (torch.einsum("n,nij->ij", beta, H) + LAM * away.T @ away) / len(f)
    exact = hessian(plain_loss_variance(problem, LAM, uniform(len(f))))(x)
    return compare(f"∇²L_λ, {problem.name}",
                   "∇²L_λ = (1/n) Σ β_i H_i + (λ/n) Σ (∇f_i − ∇F)(∇f_i − ∇F)ᵀ",
                   (formula, exact), "=", "identity", 1e-11)  # fmt: skip


def _mixed_weights(problem: Problem) -> Claim:
    x = problem.start
    f, g, H = problem.losses(x), problem.gradients(x), problem.hessians(x)
    w = uneven(len(f))
    # the variance around the *uniform* mean, added to the weighted F: its gradient lacks a term
    pull = torch.einsum("nij,nj->i", w[:, None, None] * H, g - g.mean(0))

    def mixed(y: Tensor) -> Tensor:
        grads = problem.gradients(y)
        return w @ problem.losses(y) + GAM / 2 * (w @ (grads - grads.mean(0)).square().sum(1))

    return compare(f"mixed weights, {problem.name}",
                   "with w_i outside and 1/n inside the variance, ∇F + γ Σ w_i H_i(∇f_i − ∇F) "
                   "is not the gradient",
                   (w @ g + GAM * pull, slope(mixed, x)), "!=", "counterexample", 1e-3)  # fmt: skip


def _h1(problem: Problem) -> Claim:
    f = problem.losses(problem.start)
    rhs = f.mean() ** 2 / 2 + f.var(unbiased=False) / 2
    return compare(f"H_1 identity, {problem.name}",
                   "H_1 = F²/2 + (1/2n) Σ (f_i − F)² for r_i = 1/n, without any expectation",
                   (objectives.qffl(f, 1.0).value, rhs), "=", "identity")  # fmt: skip


def _fairness_off(problem: Problem) -> Claim:
    x = problem.start
    f, g, H = problem.losses(x), problem.gradients(x), problem.hessians(x)
    off = [objectives.loss_variance(f, 0.0, g), objectives.gradient_variance(f, g, 0.0, H),
           objectives.qffl(f, 0.0, g)]  # fmt: skip
    plain = slope(lambda y: problem.losses(y).mean(), x)
    return compare(f"fairness off, {problem.name}", "∇L_0 = ∇J_0 = ∇H_0 = ∇F",
                   (torch.stack([_given(o.gradient) for o in off]), plain), "=", "identity",
                   BY_DIFFERENCES)  # fmt: skip


def _common_matrix() -> Claim:
    n, d = 5, 4
    A = positive(1, d, "common").expand(n, d, d)
    problem = Quadratics(A, normal(n, d, name="m"), torch.zeros(n, dtype=torch.float64)).problem()
    plain = plain_gradient_variance(problem, 10.0, uniform(n))
    return compare("equal Hessians", "if all H_i are equal, ∇J_γ = ∇F: FairGrad* is FedAvg",
                   (slope(plain, problem.start), problem.gradients(problem.start).mean(0)), "=",
                   "identity", 1e-7, "γ = 10, finite differences of J_γ")  # fmt: skip


def _negative_beta() -> list[Claim]:
    problem = quadratics().problem()
    x = problem.start
    f = problem.losses(x)
    limit = float(1 / (f.mean() - f.min()))

    def lowest(strength: float) -> Tensor:
        plain = plain_loss_variance(problem, strength, uniform(len(f)))
        return torch.linalg.eigvalsh(hessian(plain)(x))[0]

    # a client of loss 0 beside one of loss 2 at its minimum: L_λ is concave there for large λ
    A = torch.tensor([[[4.0]], [[1.0]]], dtype=torch.float64)
    zero = torch.zeros(2, 1, dtype=torch.float64)
    pair = Quadratics(A, zero, torch.tensor([0.0, 2.0], dtype=torch.float64)).problem()
    bent = torch.func.grad(torch.func.grad(lambda s: plain_loss_variance(
        pair, 5.0, uniform(2))(s[None])))(torch.zeros((), dtype=torch.float64))  # fmt: skip
    return [
        compare("convexity of L_λ", "0 ≤ λ_min(∇²L_λ) for convex f_i and λ ≤ 1/(F − min f_i)",
                (0.0, lowest(limit)), "<=", "identity", 1e-10, "at the largest such λ"),
        compare("L_λ is not convex for large λ",
                "convex f_i with β_1 < 0: L_λ'' = Σ β_i H_i / n < 0",
                (bent, (4 * (1 - 5.0) + 1 * (1 + 5.0)) / 2), "=", "identity", 1e-10,
                "f = (2x², x²/2 + 2), λ = 5, x = 0: the second derivative is −5"),
    ]  # fmt: skip
