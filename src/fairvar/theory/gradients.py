"""Gradients and Hessians of L_λ, J_γ, H_q, what the clients of the methods compute of them, and T6:
how far FairLoss and FairGrad, which use the last round's averages, are from the exact gradients.

Formulas are compared with derivatives of the definitions, and the mean of the clients' directions
with the gradient of the objective. The bias of mini-batches is found by going through all batches.
T6 is computed along trajectories x^t = x^{t−1} − η ḡ(x^{t−1}) of the approximate methods, t ≥ 1 (at
t = 0 the server's averages are zeros, not averages at a previous point).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise

import torch
from torch import Tensor
from torch.func import grad, jacrev

from fairvar import objectives
from fairvar.common import rng
from fairvar.theory.claim import (
    Claim,
    Example,
    both,
    compare,
    gradient_of,
    hessian,
    normal,
    numbers,
    positive,
    quadratics,
    random_quadratics,
    slope,
    uneven,
    uniform,
)  # fmt: skip

LAM, GAM, Q, ETA, ROUNDS = 0.7, 0.4, 1.5, 0.03, 15
BY_DIFFERENCES = 1e-8
SAMPLES, BATCH = 7, 3


def of_objectives() -> list[Claim]:
    """The formulas against derivatives of the definitions."""
    found: list[Claim] = []
    for problem in both():
        n = problem.clients
        for label, w in (("w = 1/n", uniform(n)), ("uneven w", uneven(n))):
            found += _gradients(problem, label, w)
        found += [*_other_forms(problem), _mixed_weights(problem), *_special_cases(problem)]
    return [*found, _common_matrix(), *_negative_beta()]


def of_methods() -> list[Claim]:
    """The mean of what the clients compute against the gradient of the objective."""
    found: list[Claim] = []
    for problem in both():
        found += [*_fair_loss(problem), *_fair_grad(problem), _first_round(problem)]
    return [*found, *_mini_batches()]


def _gradients(problem: Example, label: str, w: Tensor) -> list[Claim]:
    x, (f, g, H) = problem.start, problem.at_start()
    L = objectives.loss_variance(f, LAM, g, w)
    J = objectives.gradient_variance(f, g, GAM, H, w)
    Hq = objectives.qffl(f, Q, g, w)
    table = (
        ("∇L_λ = Σ w_i β_i ∇f_i with β_i = 1 + λ(f_i − F)", L, problem.loss_variance(LAM, w)),
        ("∇J_γ = ∇F + γ Σ w_i H_i(∇f_i − ∇F)", J, problem.gradient_variance(GAM, w)),
        ("∇H_q = Σ w_i f_i^q ∇f_i", Hq, problem.qffl(Q, w)),
    )
    found = []
    for text, formula, plain in table:
        where = f"{text.split(' = ')[0]}, {problem.name}, {label}"
        found += [
            compare(where, text, (gradient_of(formula), slope(plain, x)), tolerance=BY_DIFFERENCES,
                    note="formula against finite differences of the value"),
            compare(f"{where[1:]}: value", "the value is that of the definition",
                    (formula.value, plain(x))),
        ]  # fmt: skip
    return found


def _other_forms(problem: Example) -> list[Claim]:
    f, g, H = problem.at_start()
    F, away = f.mean(), g - g.mean(0)
    L = gradient_of(objectives.loss_variance(f, LAM, g))
    J = gradient_of(objectives.gradient_variance(f, g, GAM, H))
    other_L = g.mean(0) + LAM * ((f - F)[:, None] * away).mean(0)
    other_J = g.mean(0) + GAM * torch.einsum("nij,nj->i", H - H.mean(0), away) / len(f)
    beta = 1 + LAM * (f - F)
    curved = (torch.einsum("n,nij->ij", beta, H) + LAM * away.T @ away) / len(f)
    exact = hessian(problem.loss_variance(LAM))(problem.start)
    return [
        compare(f"∇L_λ, centred form, {problem.name}",
                "Σ β_i ∇f_i / n = ∇F + (λ/n) Σ (f_i − F)(∇f_i − ∇F)", (L, other_L)),
        compare(f"∇J_γ, centred form, {problem.name}",
                "∇F + (γ/n) Σ H_i(∇f_i − ∇F) = ∇F + (γ/n) Σ (H_i − H̄)(∇f_i − ∇F)", (J, other_J)),
        compare(f"∇²L_λ, {problem.name}",
                "∇²L_λ = (1/n) Σ β_i H_i + (λ/n) Σ (∇f_i − ∇F)(∇f_i − ∇F)ᵀ", (curved, exact),
                tolerance=1e-11),
    ]  # fmt: skip


def _mixed_weights(problem: Example) -> Claim:
    x, (f, g, H) = problem.start, problem.at_start()
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


def _special_cases(problem: Example) -> list[Claim]:
    f, g, H = problem.at_start()
    off = [objectives.loss_variance(f, 0.0, g), objectives.gradient_variance(f, g, 0.0, H),
           objectives.qffl(f, 0.0, g)]  # fmt: skip
    plain = slope(lambda y: problem.losses(y).mean(), problem.start)
    return [
        compare(f"H_1 identity, {problem.name}",
                "H_1 = F²/2 + (1/2n) Σ (f_i − F)² for r_i = 1/n, without any expectation",
                (objectives.qffl(f, 1.0).value, f.mean() ** 2 / 2 + f.var(unbiased=False) / 2)),
        compare(f"fairness off, {problem.name}", "∇L_0 = ∇J_0 = ∇H_0 = ∇F",
                (torch.stack([gradient_of(o) for o in off]), plain), tolerance=BY_DIFFERENCES),
    ]  # fmt: skip


def _common_matrix() -> Claim:
    n, d = 5, 4
    A = positive(1, d, "common").expand(n, d, d)
    problem = quadratics(A, normal(n, d, name="m"), numbers(*[0.0] * n))
    plain = problem.gradient_variance(10.0)
    return compare("equal Hessians", "if all H_i are equal, ∇J_γ = ∇F: FairGrad* is FedAvg",
                   (slope(plain, problem.start), problem.gradients(problem.start).mean(0)),
                   tolerance=1e-7, note="γ = 10, finite differences of J_γ")  # fmt: skip


def _negative_beta() -> list[Claim]:
    problem = random_quadratics()
    x = problem.start
    f = problem.losses(x)
    limit = float(1 / (f.mean() - f.min()))
    lowest = torch.linalg.eigvalsh(hessian(problem.loss_variance(limit))(x))[0]
    # two clients, of loss 0 and 2 at their common minimum: L_λ is concave there for large λ
    A, zero = numbers(4.0, 1.0).reshape(2, 1, 1), numbers(0.0, 0.0)[:, None]
    bent = hessian(quadratics(A, zero, numbers(0.0, 2.0)).loss_variance(5.0))(numbers(0.0))
    return [
        compare("convexity of L_λ", "0 ≤ λ_min(∇²L_λ) for convex f_i and λ ≤ 1/(F − min f_i)",
                (0.0, lowest), "<=", tolerance=1e-10, note="at the largest such λ"),
        compare("L_λ is not convex for large λ",
                "convex f_i with β_1 < 0: L_λ'' = Σ β_i H_i / n < 0",
                (bent, (4 * (1 - 5.0) + 1 * (1 + 5.0)) / 2), tolerance=1e-10,
                note="f = (2x², x²/2 + 2), λ = 5, x = 0: the second derivative is −5"),
    ]  # fmt: skip


def _averages(problem: Example) -> tuple[Tensor, Tensor]:
    """a^t, g^t as a server would have them from an earlier point."""
    x = problem.start + 0.3 * normal(len(problem.start), name="earlier")
    return problem.losses(x).mean(), problem.gradients(x).mean(0)


def _loss_clients(problem: Example, a: Tensor, sent: Tensor) -> Tensor:
    """The mean of d_i = g_i + λ(f_i − a)(g_i − g), each client on its own by autograd."""
    x, directions = problem.start, []
    for i, f in enumerate(problem.losses(x)):
        g = grad(lambda y, i=i: problem.losses(y)[i])(x)
        directions.append(g + LAM * (f - a) * (g - sent))
    return torch.stack(directions).mean(0)


def _grad_clients(problem: Example, sent: Tensor) -> Tensor:
    """The mean of the gradients of f_i + γ/2 ‖∇f_i − g‖², each client on its own by autograd."""

    def own(y: Tensor, i: int) -> Tensor:
        away = grad(lambda z: problem.losses(z)[i])(y) - sent
        return problem.losses(y)[i] + GAM / 2 * (away**2).sum()

    slopes = [grad(own)(problem.start, i) for i in range(problem.clients)]
    return torch.stack(slopes).mean(0)


def _fair_loss(problem: Example) -> list[Claim]:
    x, (f, g, _) = problem.start, problem.at_start()
    F, mean = f.mean(), g.mean(0)
    a, sent = _averages(problem)
    exact = _loss_clients(problem, F, mean)
    L = problem.loss_variance(LAM)
    collapsed = gradient_of(objectives.loss_variance(f, LAM, g))
    pooled = ((1 + LAM * (f - a))[:, None] * g).mean(0) - LAM * (F - a) * sent
    return [
        compare(f"FairLoss*, mean direction, {problem.name}", "(1/n) Σ d_i = ∇L_λ",
                (exact, slope(L, x)), tolerance=1e-8),
        compare(f"FairLoss*, one exchange, {problem.name}",
                "(1/n) Σ d_i = (1/n) Σ (1 + λ(f_i − F)) ∇f_i: the server needs f_i and ∇f_i only",
                (exact, collapsed)),
        compare(f"FairLoss, mean direction, {problem.name}",
                "(1/n) Σ d_i = (1/n) Σ (1 + λ(f_i − a)) ∇f_i − λ(F − a) g",
                (_loss_clients(problem, a, sent), pooled)),
    ]  # fmt: skip


def _fair_grad(problem: Example) -> list[Claim]:
    x, (f, g, H) = problem.start, problem.at_start()
    mean = g.mean(0)
    _, sent = _averages(problem)
    exact, stale = _grad_clients(problem, mean), _grad_clients(problem, sent)
    J = problem.gradient_variance(GAM)
    formula = gradient_of(objectives.gradient_variance(f, g, GAM, H))
    return [
        compare(f"FairGrad*, mean direction, {problem.name}",
                "the clients hold g fixed, and yet (1/n) Σ d_i = ∇J_γ", (exact, slope(J, x)),
                tolerance=1e-8),
        compare(f"FairGrad*, formula, {problem.name}", "(1/n) Σ d_i = ∇F + (γ/n) Σ H_i(∇f_i − ∇F)",
                (exact, formula)),
        compare(f"FairGrad, mean direction, {problem.name}", "(1/n) Σ d_i = ∇J_γ + γ H̄ (∇F − g)",
                (stale, formula + GAM * H.mean(0) @ (mean - sent))),
    ]  # fmt: skip


def _first_round(problem: Example) -> Claim:
    x = problem.start
    start = _loss_clients(problem, torch.zeros_like(x[0]), torch.zeros_like(x))
    other = slope(lambda y: (problem.losses(y) + LAM / 2 * problem.losses(y) ** 2).mean(), x)
    return compare(f"FairLoss, round 0, {problem.name}",
                   "with a = 0, g = 0 the direction is ∇(F + (λ/2) mean f_i²), q-FFL-like",
                   (start, other), tolerance=1e-8)  # fmt: skip


def _mini_batches() -> list[Claim]:
    x = normal(SAMPLES, 2, name="batch x")
    y = torch.from_numpy(rng.stream(0, "theory", "batch y").integers(0, 2, SAMPLES)).double()
    w, a, sent = normal(2, name="batch w"), 0.4, normal(2, name="batch g")

    def by_sample(v: Tensor) -> Tensor:  # logistic loss
        return torch.nn.functional.softplus((1 - 2 * y) * (x @ v))

    f, g, H = by_sample(w), jacrev(by_sample)(w), hessian(by_sample)(w)
    batches = [list(b) for b in combinations(range(SAMPLES), BATCH)]
    fB = torch.stack([f[b].mean() for b in batches])
    gB = torch.stack([g[b].mean(0) for b in batches])
    HB = torch.stack([H[b].mean(0) for b in batches])
    both_sides = ((fB - a)[:, None] * (gB - sent)).mean(0)
    full = (f.mean() - a) * (g.mean(0) - sent)
    S = (f - f.mean()) @ (g - g.mean(0)) / (SAMPLES - 1)
    curved = torch.einsum("bij,bj->bi", HB, gB - sent).mean(0)
    two_loss = torch.einsum("b,cd->bcd", fB - a, gB - sent).mean((0, 1))
    two_curved = torch.einsum("bij,cj->bci", HB, gB - sent).mean((0, 1))
    straight = H.mean(0) @ (g.mean(0) - sent)
    note = f"all {len(batches)} batches of {BATCH} out of {SAMPLES} samples"
    return [
        compare("mini-batch bias of FairLoss",
                "E[(f_B − a)(∇f_B − g)] = (f − a)(∇f − g) + (1/b − 1/N) S",
                (both_sides, full + (1 / BATCH - 1 / SAMPLES) * S), note=note),
        compare("mini-batches bias FairLoss", "E[(f_B − a)(∇f_B − g)] ≠ (f − a)(∇f − g)",
                (both_sides, full), "!=", "counterexample", 1e-4, note),
        compare("mini-batches bias FairGrad", "E[H_B(∇f_B − g)] ≠ H(∇f − g)", (curved, straight),
                "!=", "counterexample", 1e-4, note),
        compare("two batches, FairLoss",
                "E[(f_B − a)(∇f_B' − g)] = (f − a)(∇f − g), independent B, B'", (two_loss, full),
                note=note),
        compare("two batches, FairGrad", "E[H_B(∇f_B' − g)] = H(∇f − g), B, B' independent",
                (two_curved, straight), note=note),
    ]  # fmt: skip


# --- T6 ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Round:
    """What is known at x^t: the clients' values, and the server's a^t, g^t of one round ago."""

    x: Tensor
    f: Tensor
    g: Tensor
    a: Tensor
    sent: Tensor  # g^t
    direction: Tensor  # ḡ(x^t)


Rounds = list[tuple[Round, Round]]  # the round before and the round itself


def of_trajectories() -> list[Claim]:
    found: list[Claim] = []
    for problem in both():
        of_loss, of_gradient = _trajectory(problem, "loss"), _trajectory(problem, "gradient")
        found += [*_of_loss(problem, of_loss), *_of_gradient(problem, of_gradient)]
        found += _not_a_gradient(problem, of_loss[3][1])
    return found


def _bend(problem: Example, x: Tensor, v: Tensor) -> Tensor:
    """H_i v_i for all clients, as the gradients of ⟨∇f_i, v_i⟩."""
    rows = [grad(lambda y, i=i: problem.gradients(y)[i] @ v[i])(x) for i in range(len(v))]
    return torch.stack(rows)


def _trajectory(problem: Example, kind: str) -> Rounds:
    """ḡ_λ = ∇F + (λ/n) Σ (f_i − a)(g_i − g)   or   ḡ_γ = ∇F + (γ/n) Σ H_i(g_i − g)"""
    x, a, sent = problem.start, torch.zeros_like(problem.start[0]), torch.zeros_like(problem.start)
    rounds: list[Round] = []
    for _ in range(ROUNDS + 1):
        f, g = problem.losses(x), problem.gradients(x)
        if kind == "loss":
            direction = g.mean(0) + LAM * ((f - a)[:, None] * (g - sent)).mean(0)
        else:
            direction = g.mean(0) + GAM * _bend(problem, x, g - sent).mean(0)
        rounds.append(Round(x, f, g, a, sent, direction))
        x, a, sent = x - ETA * direction, f.mean(), g.mean(0)
    return list(pairwise(rounds))


def _of_loss(problem: Example, rounds: Rounds) -> list[Claim]:
    """In the bound the left side is autograd of the definition of L, the right side our own."""
    L = problem.loss_variance(LAM)
    value, slope, bound = [], [], []
    for before, r in rounds:
        F, mean, exact = r.f.mean(), r.g.mean(0), objectives.loss_variance(r.f, LAM, r.g)
        approximate = F + LAM / 2 * (r.f - r.a).square().mean()
        value.append((exact.value - approximate, -LAM / 2 * (F - r.a) ** 2))
        slope.append((gradient_of(exact) - r.direction, -LAM * (mean - r.sent) * (F - r.a)))
        change = (F - before.f.mean()).abs()
        slack = LAM * problem.smoothness * ETA * before.direction.norm() * change
        bound.append((grad(L)(r.x).norm(), r.direction.norm() + slack))
    return [
        compare(f"T6, L, {problem.name}", "L_λ − ā_λ = −(λ/2)(F − a^t)²", _stack(value),
                kind="theorem"),
        compare(f"T6, ∇L, {problem.name}", "∇L_λ − ḡ_λ = −λ (∇F − g^t)(F − a^t)", _stack(slope),
                kind="theorem"),
        compare(f"T6, bound on ∇L, {problem.name}",
                "‖∇L_λ(x^t)‖ ≤ ‖ḡ_λ(x^t)‖ + λ L η ‖ḡ_λ(x^{t−1})‖ |F(x^t) − F(x^{t−1})|",
                _stack(bound), "<=", "theorem", note="F is L-smooth"),
    ]  # fmt: skip


def _of_gradient(problem: Example, rounds: Rounds) -> list[Claim]:
    J = problem.gradient_variance(GAM)
    value, slope, bound = [], [], []
    for before, r in rounds:
        away, H = r.g.mean(0) - r.sent, problem.hessians(r.x).mean(0)
        exact = objectives.gradient_variance(r.f, r.g, GAM, partial(_bend, problem, r.x))
        approximate = r.f.mean() + GAM / 2 * (r.g - r.sent).square().sum(1).mean()
        value.append((exact.value - approximate, -GAM / 2 * away.square().sum()))
        slope.append((gradient_of(exact) - r.direction, -GAM * H @ away))
        slack = GAM * problem.smoothness**2 * ETA * before.direction.norm()
        bound.append((grad(J)(r.x).norm(), r.direction.norm() + slack))
    return [
        compare(f"T6, J, {problem.name}", "J_γ − ā_γ = −(γ/2) ‖∇F − g^t‖²", _stack(value),
                kind="corrected", note="the paper prints ≤; it is an equality"),
        compare(f"T6, ∇J, {problem.name}", "∇J_γ − ḡ_γ = −γ H̄ (∇F − g^t)", _stack(slope),
                kind="corrected", note="not in the paper, whose last bound needs it"),
        compare(f"T6, bound on ∇J, {problem.name}",
                "‖∇J_γ(x^t)‖ ≤ ‖ḡ_γ(x^t)‖ + γ L² η ‖ḡ_γ(x^{t−1})‖", _stack(bound), "<=", "theorem",
                note="follows from the equality of gradients, not of values; "
                "F is L-smooth and twice differentiable"),
    ]  # fmt: skip


def _not_a_gradient(problem: Example, r: Round) -> list[Claim]:
    """Autograd of "f_i + λ/2 (f_i − a)²" with a constant a is another algorithm."""

    def frozen(x: Tensor) -> Tensor:
        f = problem.losses(x)
        return f.mean() + LAM / 2 * (f - r.a).square().mean()

    slope, missing = grad(frozen)(r.x), LAM * (r.f.mean() - r.a) * r.sent
    return [
        compare(f"T6, ∇ā_λ, {problem.name}", "∇_x ā_λ = ḡ_λ + λ (F − a^t) g^t, a^t frozen",
                (slope, r.direction + missing), kind="corrected"),
        compare(f"T6, ḡ_λ is not ∇ā_λ, {problem.name}",
                "autograd of F + λ/2 mean (f_i − a^t)² is not the direction of FairLoss",
                (slope, r.direction), "!=", "counterexample", 1e-4),
    ]  # fmt: skip


def _stack(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    left, right = zip(*pairs, strict=True)
    return torch.stack(left), torch.stack(right)
