"""T2, T3, T4: where the stationary points of F and of the fair objectives agree, and where not.

Each case is a set of quadratics with chosen losses and gradients at x = 0 and random curvature;
the gradient of the objective there comes from autograd of its definition or from
`fairvar.objectives`, the other side from the theorem.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad

from fairvar import objectives
from fairvar.theory.claim import Claim, compare
from fairvar.theory.problems import (
    Problem,
    Quadratics,
    normal,
    plain_gradient_variance,
    plain_loss_variance,
    plain_qffl,
    through,
    uneven,
    uniform,
)

LAM, GAM, Q = 0.7, 0.4, 1.5
N, D = 5, 6


def claims() -> list[Claim]:
    return [*_equal_losses(), *_equal_gradients(), *_converse(), *_t2_counterexamples(),
            *_independent(), *_one_differs(), *_perturbation()]  # fmt: skip


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _slope_of_L(problem: Problem) -> Tensor:
    f, g = problem.losses(problem.start), problem.gradients(problem.start)
    gradient = objectives.loss_variance(f, LAM, g).gradient
    if gradient is None:
        raise ValueError("the objective returned no gradient")
    return gradient


def _equal_losses() -> list[Claim]:
    g = normal(N, D, name="T2a")
    g = g - g.mean(0)  # ∇F = 0, every ∇f_i ≠ 0
    p = through(torch.full((N,), 1.3, dtype=torch.float64), g, "T2a")
    given = "∇F = 0 and equal losses"
    L = plain_loss_variance(p, LAM, uniform(N))
    Hq = plain_qffl(p, Q, uniform(N))
    return [
        compare("T2 (a), L", f"{given} ⇒ ∇L_λ = 0", (grad(L)(p.start), 0.0), "=", "theorem"),
        compare("T2 (a), L, by formula", f"{given} ⇒ Σ β_i ∇f_i = 0", (_slope_of_L(p), 0.0), "=",
                "theorem"),
        compare("T2 (a), H", f"{given}, r_i = 1/n ⇒ ∇H_q = 0", (grad(Hq)(p.start), 0.0), "=",
                "corrected", note="true for uniform r_i only"),
    ]  # fmt: skip


def _equal_gradients() -> list[Claim]:
    p = through(_numbers(0.2, 0.5, 1.0, 2.0, 4.0), torch.zeros(N, D, dtype=torch.float64), "T2b")
    w = uneven(N)
    plain = (plain_loss_variance(p, LAM, w), plain_gradient_variance(p, GAM, w),
             plain_qffl(p, Q, w))  # fmt: skip
    return [
        compare(f"T2 (b), {name}", f"∇F = 0 and equal gradients ⇒ ∇{name} = 0, for any weights",
                (grad(value)(p.start), 0.0), "=", "theorem")
        for name, value in zip(("L_λ", "J_γ", "H_q"), plain, strict=True)
    ]  # fmt: skip


def _converse() -> list[Claim]:
    """At these points the fair gradient is a positive multiple of ∇F: one is 0 iff the other is."""
    f, C = _numbers(0.2, 0.5, 1.0, 2.0, 4.0), 1.3
    g, one = normal(N, D, name="T2c"), normal(D, name="T2c one")
    equal_f = through(torch.full((N,), C, dtype=torch.float64), g, "T2c losses")
    equal_g = through(f, one.expand(N, D), "T2c gradients")
    w, r = uniform(N), uneven(N)
    rows = (
        ("L, equal losses", "∇L_λ = ∇F", plain_loss_variance(equal_f, LAM, w), g.mean(0)),
        ("L, equal gradients", "∇L_λ = ∇F", plain_loss_variance(equal_g, LAM, w), one),
        ("J, equal gradients", "∇J_γ = ∇F", plain_gradient_variance(equal_g, GAM, w), one),
        ("H, equal losses", "∇H_q = C^q ∇F", plain_qffl(equal_f, Q, w), C**Q * g.mean(0)),
        ("H, equal gradients", "∇H_q = (Σ r_i f_i^q) ∇F", plain_qffl(equal_g, Q, r),
         (r @ f**Q) * one),
    )  # fmt: skip
    return [
        compare(f"T2 (c), {name}", f"{text} there, so ∇F = 0 wherever the fair gradient is 0",
                (grad(value)(torch.zeros(D, dtype=torch.float64)), rhs), "=", "theorem")
        for name, text, value, rhs in rows
    ]  # fmt: skip


def _t2_counterexamples() -> list[Claim]:
    A, m = _numbers(1.0, 4.0).reshape(2, 1, 1), _numbers(1.0, -0.25)[:, None]
    p = Quadratics(A, m, _numbers(0.0, 0.375)).problem()  # (x−1)²/2 and 2(x+¼)² + 3/8
    zero = torch.zeros(1, dtype=torch.float64)
    slope_J = grad(plain_gradient_variance(p, GAM, uniform(2)))(zero)
    slope_H = grad(plain_qffl(p, 1.0, _numbers(0.7, 0.3)))(zero)
    back = Quadratics(A, -_numbers(0.875, -0.125 / 4)[:, None],
                      -_numbers(0.875**2, 0.125**2 / 4) / 2 + 1.0).problem()  # fmt: skip
    slope_back = grad(plain_gradient_variance(back, 0.5, uniform(2)))(zero)
    where = "f_1 = (x−1)²/2, f_2 = 2(x+¼)² + 3/8, x* = 0"
    return [
        compare("T2 example", "losses ½, ½ and gradients −1, +1 at x* = 0: ∇F = 0",
                (torch.cat([p.losses(zero), p.gradients(zero).flatten()]),
                 _numbers(0.5, 0.5, -1.0, 1.0)), "=", "identity"),
        compare("T2, as printed (J, equal losses)", "the paper claims ∇J_γ(x*) = 0",
                (slope_J, 0.0), "!= (paper: =)", "counterexample", 0.1, where),
        compare("T2, as printed (J, equal losses): value", "∇J_γ(x*) = 1.5 γ",
                (slope_J, 1.5 * GAM), "=", "corrected", note=where),
        compare("T2, as printed (H_q, r_i ∝ N_i)", "the paper claims ∇H_q(x*) = 0 for any r_i",
                (slope_H, 0.0), "!= (paper: =)", "counterexample", 0.1, f"{where}, r = (0.7, 0.3)"),
        compare("T2, as printed (H_q, r_i ∝ N_i): value", "∇H_1(x*) = (0.3 − 0.7)/2",
                (slope_H, -0.2), "=", "corrected", note=where),
        compare("T2 converse example", "losses equal and ∇J_γ(x_γ) = 0 with γ = ½",
                (torch.cat([slope_back, back.losses(zero).diff()]), 0.0), "=", "identity"),
        compare("T2 converse, as printed (J, equal losses)", "the paper claims ∇F(x_γ) = 0",
                (back.gradients(zero).mean(), 0.0), "!= (paper: =)", "counterexample", 0.1,
                "gradients 0.875 and −0.125, Hessians 1 and 4"),
    ]  # fmt: skip


def _with_rest(own: Tensor, rest_sum: Tensor, n: int, name: str) -> Tensor:
    """`own` rows followed by rows that are a convex split of `rest_sum`."""
    share = normal(n - len(own), name=f"{name} split").exp()
    return torch.cat([own, (share / share.sum())[:, None] * rest_sum])


def _independent() -> list[Claim]:
    n, m, C = N, 3, 0.9
    f = torch.cat([_numbers(0.3, 1.7, 2.4), torch.full((n - m,), C, dtype=torch.float64)])
    beta = 1 + LAM * (f - f.mean())
    own = normal(m, D, name="C1")
    star = through(f, _with_rest(own, -own.sum(0), n, "C1"), "C1")
    lam = through(f, _with_rest(own, -(beta[:m] @ own) / beta[-1], n, "C1"), "C1 λ")
    closed = LAM / n * ((f[:m] - C) @ own)
    back = (1 - beta[:m] / beta[-1]) @ own / n
    return _t3("C1", "Σ_ind (f_i − C) ∇f_i", "Σ_ind (1 − β_i/β) ∇f_i", (star, closed), (lam, back))


def _one_differs() -> list[Claim]:
    n, m, C = N, 3, 0.9
    f = _numbers(2.2, C, C, 0.1, 5.0)  # client k = 0; the last two have gradient 0
    beta = 1 + LAM * (f - f.mean())
    own, none = normal(1, D, name="C2"), torch.zeros(n - m, D, dtype=torch.float64)
    star = through(f, torch.cat([_with_rest(own, -own[0], m, "C2"), none]), "C2")
    rest = -beta[0] / beta[1] * own[0]
    lam = through(f, torch.cat([_with_rest(own, rest, m, "C2"), none]), "C2 λ")
    closed = LAM / n * (f[0] - C) * own[0]
    back = (1 - beta[0] / beta[1]) * own[0] / n
    return _t3("C2", "(f_k − C) ∇f_k", "(1 − β_k/β) ∇f_k", (star, closed), (lam, back))


def _t3(
    case: str, at_star: str, at_lam: str, star: tuple[Problem, Tensor], lam: tuple[Problem, Tensor]
) -> list[Claim]:
    """The closed forms of one case: at x* with ∇F = 0, and at x_λ with ∇L_λ = 0."""
    (p, closed), (back, mean) = star, lam
    slope_L, slope_F = _slope_of_L(p), back.gradients(back.start).mean(0)
    plain = grad(plain_loss_variance(back, LAM, uniform(N)))(back.start)
    return [
        compare(f"T3 {case}, example at x*", "∇F(x*) = 0",
                (p.gradients(p.start).mean(0), 0.0), "=", "identity"),
        compare(f"T3 {case}, at x*", f"∇L_λ(x*) = (λ/n) {at_star}", (slope_L, closed), "=",
                "theorem"),
        compare(f"T3 {case}, x* is not stationary for L", "∇L_λ(x*) ≠ 0",
                (slope_L.norm(), 0.0), "!=", "theorem", 1e-2),
        compare(f"T3 {case}, example at x_λ", "∇L_λ(x_λ) = 0", (plain, 0.0), "=", "identity"),
        compare(f"T3 {case}, at x_λ", f"∇F(x_λ) = (1/n) {at_lam}", (slope_F, mean), "=",
                "theorem", note="β ≠ 0 is needed and follows from Σ β_i = n"),
        compare(f"T3 {case}, x_λ is not stationary for F", "∇F(x_λ) ≠ 0",
                (slope_F.norm(), 0.0), "!=", "theorem", 1e-2),
    ]  # fmt: skip


def _perturbation() -> list[Claim]:
    found = []
    for label, m, shift in (("all gradients nonzero", N, _numbers(1.0, 1.0, 1.0, 1.0, -4.0)),
                            ("m = 3 nonzero", 3, _numbers(1.0, 1.0, -0.5, -2.0, 0.5))):  # fmt: skip
        g = normal(N, D, name=f"T4 {m}")
        g[m:] = 0
        g[:m] -= g[:m].mean(0)
        before = through(torch.full((N,), 2.0, dtype=torch.float64), g, "T4")
        after = through(2.0 + shift, g, "T4")
        x = normal(D, name="T4 x")
        closed = LAM / N * (shift[m - 1] - shift[0]) * g[m - 1]
        L = plain_loss_variance(after, LAM, uniform(N))
        found += [
            compare(f"T4, {label}", "∇L̃_λ(x*) = (λ/n) Σ o_i ∇f_i = (λ/n)(o_m − o) ∇f_m",
                    (grad(L)(after.start), closed), "=", "theorem"),
            compare(f"T4, {label}: by formula", "Σ β̃_i ∇f_i / n = (λ/n)(o_m − o) ∇f_m",
                    (_slope_of_L(after), closed), "=", "theorem"),
            compare(f"T4, {label}: x* lost", "∇L̃_λ(x*) ≠ 0 although ∇L_λ(x*) = 0",
                    (_slope_of_L(after).norm(), _slope_of_L(before).norm()), "!=", "theorem", 1e-2),
            compare(f"T4, {label}: F unchanged", "Σ o_i = 0: F̃(x) = F(x)",
                    (after.losses(x).mean(), before.losses(x).mean()), "=", "theorem"),
        ]  # fmt: skip
    return found
