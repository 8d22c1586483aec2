"""What makes the methods fast, and what mini-batches do to them.

The mean of what the clients compute is set against the gradient of the objective; the bias of
mini-batches is found by going through all batches.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor
from torch.func import grad, jacrev

from fairvar import objectives, rng
from fairvar.theory.claim import Claim, compare
from fairvar.theory.problems import (
    Problem,
    both,
    hessian,
    normal,
    plain_gradient_variance,
    plain_loss_variance,
    slope,
    uniform,
)

LAM, GAM = 0.7, 0.4
SAMPLES, BATCH = 7, 3


def claims() -> list[Claim]:
    found: list[Claim] = []
    for problem in both():
        found += [*_fair_loss(problem), *_fair_grad(problem), _first_round(problem)]
    return [*found, *_mini_batches()]


def _averages(problem: Problem) -> tuple[Tensor, Tensor]:
    """a^t, g^t as a server would have them from an earlier point."""
    x = problem.start + 0.3 * normal(len(problem.start), name="earlier")
    return problem.losses(x).mean(), problem.gradients(x).mean(0)


def _loss_clients(problem: Problem, a: Tensor, sent: Tensor) -> Tensor:
    """The mean of d_i = g_i + λ(f_i − a)(g_i − g), each client on its own by autograd."""
    x, n = problem.start, len(problem.losses(problem.start))
    directions = []
    for i in range(n):
        g = grad(lambda y, i=i: problem.losses(y)[i])(x)
        directions.append(g + LAM * (problem.losses(x)[i] - a) * (g - sent))
    return torch.stack(directions).mean(0)


def _grad_clients(problem: Problem, sent: Tensor) -> Tensor:
    """The mean of the gradients of f_i + γ/2 ‖∇f_i − g‖², each client on its own by autograd."""
    directions = []
    for i in range(len(problem.losses(problem.start))):

        def own(y: Tensor, i: int = i) -> Tensor:
            away = grad(lambda z: problem.losses(z)[i])(y) - sent
            return problem.losses(y)[i] + GAM / 2 * (away**2).sum()

        directions.append(grad(own)(problem.start))
    return torch.stack(directions).mean(0)


def _fair_loss(problem: Problem) -> list[Claim]:
    x = problem.start
    f, g = problem.losses(x), problem.gradients(x)
    F, mean = f.mean(), g.mean(0)
    a, sent = _averages(problem)
    exact = _loss_clients(problem, F, mean)
    L = plain_loss_variance(problem, LAM, uniform(len(f)))
    collapsed = objectives.loss_variance(f, LAM, g).gradient
    if collapsed is None:
        raise ValueError("the objective returned no gradient")
    pooled = ((1 + LAM * (f - a))[:, None] * g).mean(0) - LAM * (F - a) * sent
    return [
        compare(f"FairLoss*, mean direction, {problem.name}", "(1/n) Σ d_i = ∇L_λ",
                (exact, slope(L, x)), "=", "identity", 1e-8),
        compare(f"FairLoss*, one exchange, {problem.name}",
                "(1/n) Σ d_i = (1/n) Σ (1 + λ(f_i − F)) ∇f_i: the server needs f_i and ∇f_i only",
                (exact, collapsed), "=", "identity"),
        compare(f"FairLoss, mean direction, {problem.name}",
                "(1/n) Σ d_i = (1/n) Σ (1 + λ(f_i − a)) ∇f_i − λ(F − a) g",
                (_loss_clients(problem, a, sent), pooled), "=", "identity"),
    ]  # fmt: skip


def _fair_grad(problem: Problem) -> list[Claim]:
    x = problem.start
    f, g, H = problem.losses(x), problem.gradients(x), problem.hessians(x)
    mean = g.mean(0)
    _, sent = _averages(problem)
    exact, stale = _grad_clients(problem, mean), _grad_clients(problem, sent)
    J = plain_gradient_variance(problem, GAM, uniform(len(f)))
    formula = objectives.gradient_variance(f, g, GAM, H).gradient
    if formula is None:
        raise ValueError("the objective returned no gradient")
    return [
        compare(f"FairGrad*, mean direction, {problem.name}",
                "the clients hold g fixed, and yet (1/n) Σ d_i = ∇J_γ", (exact, slope(J, x)), "=",
                "identity", 1e-8),
        compare(f"FairGrad*, formula, {problem.name}",
                "(1/n) Σ d_i = ∇F + (γ/n) Σ H_i(∇f_i − ∇F)", (exact, formula), "=", "identity"),
        compare(f"FairGrad, mean direction, {problem.name}",
                "(1/n) Σ d_i = ∇J_γ + γ H̄ (∇F − g)",
                (stale, formula + GAM * H.mean(0) @ (mean - sent)), "=", "identity"),
    ]  # fmt: skip


def _first_round(problem: Problem) -> Claim:
    x = problem.start
    start = _loss_clients(problem, torch.zeros((), dtype=torch.float64), torch.zeros_like(x))
    other = slope(lambda y: (problem.losses(y) + LAM / 2 * problem.losses(y) ** 2).mean(), x)
    return compare(f"FairLoss, round 0, {problem.name}",
                   "with a = 0, g = 0 the direction is ∇(F + (λ/2) mean f_i²), q-FFL-like",
                   (start, other), "=", "identity", 1e-8)  # fmt: skip


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
                (both_sides, full + (1 / BATCH - 1 / SAMPLES) * S), "=", "identity", note=note),
        compare("mini-batches bias FairLoss", "E[(f_B − a)(∇f_B − g)] ≠ (f − a)(∇f − g)",
                (both_sides, full), "!=", "counterexample", 1e-4, note),
        compare("mini-batches bias FairGrad", "E[H_B(∇f_B − g)] ≠ H(∇f − g)",
                (curved, straight), "!=", "counterexample", 1e-4, note),
        compare("two batches, FairLoss",
                "E[(f_B − a)(∇f_B' − g)] = (f − a)(∇f − g), independent B, B'",
                (two_loss, full), "=", "identity", note=note),
        compare("two batches, FairGrad", "E[H_B(∇f_B' − g)] = H(∇f − g), B, B' independent",
                (two_curved, straight), "=", "identity", note=note),
    ]  # fmt: skip
