"""Identities and limits of TERM, PropFair, superquantile, GIFAIR and Semi-VRed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

import fairvar as fv
from checks import (
    MODELS,
    descends,
    golden_federation,
    golden_problem_b,
    images,
    pair_objective,
    quadratic_run,
    semivariance_objective,
    tail_objective,
    tilted_objective,
    utility_objective,
)
from fairvar.methods import Replies
from fairvar.testing import federation

ENGINES = ["reference", "auto"]


def draws(number: int, spread: float = 2.0) -> Iterator[tuple[Tensor, Tensor]]:
    """Losses and plain weights of 1 to 9 clients, some losses equal."""
    draw = np.random.default_rng(7)
    for _ in range(number):
        n = int(draw.integers(1, 10))
        losses = spread * draw.random(n)
        losses[draw.integers(0, n, n // 3)] = losses[0]
        share = draw.random(n) + 0.05
        yield torch.from_numpy(losses), torch.from_numpy(share / share.sum())


def weights(method: fv.Method, loss: Tensor, share: Tensor) -> Tensor:
    return method.weigh({}, Replies(loss, share, torch.arange(len(loss)), len(loss)))[0]


def factors(method: fv.Method, loss: Tensor) -> Tensor:
    return torch.as_tensor(method.coefficients(loss, loss.mean())[0])


# -- one full step is a gradient step on the objective, by finite differences ----------------------
OBJECTIVES: list[tuple[Callable[..., fv.Method], Callable]] = [
    (lambda **more: fv.TERM(1.5, **more), tilted_objective(1.5)),
    (lambda **more: fv.PropFair(3.0, **more), utility_objective(3.0)),
    (lambda **more: fv.PropFair(1.2, **more), utility_objective(1.2)),  # some beyond M − ε
    (lambda **more: fv.PropFair(1.2, losses="full", **more), utility_objective(1.2)),
    (lambda **more: fv.Superquantile(0.45, **more), tail_objective(0.45)),
    (lambda **more: fv.GIFAIR(0.7, **more), pair_objective(0.7)),
    (lambda **more: fv.SemiVRed(0.8, **more), semivariance_objective(0.8)),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("hidden", [0, 3], ids=["multinomial", "tanh"])
@pytest.mark.parametrize(("make", "objective"), OBJECTIVES)
def test_one_step_descends_the_objective(
    make: Callable, objective: Callable, hidden: int, weights: str, engine: str
) -> None:
    # Short differences: no two losses change places, where S_θ and Σ |f_i − f_j| have kinks.
    descends(objective, hidden, engine, tolerance=1e-8, step=1e-5)(make(weights=weights))


def test_some_clients_of_these_checks_are_in_the_linear_part_of_propfair() -> None:
    loss = fv.train("multinomial", federation(), fv.FedAvg(), rounds=1, dtype=torch.float64).loss[0]
    beyond = loss > 1.2 - 0.2
    assert bool(beyond.any())
    assert not bool(beyond.all())


# -- first-order strength --------------------------------------------------------------------------
LEVEL = 1.5  # F
STRENGTH: list[tuple[fv.Method, float]] = [
    (fv.TERM(0.7), 0.7),
    (fv.QFFL(0.7), 0.7 / LEVEL),
    (fv.PropFair(4.0), 1 / (4 - LEVEL)),
    (fv.FairLoss(0.7, exact=True), 0.7),
    (fv.FairLoss(2 * 0.3, exact=True), 2 * 0.3),  # V-REx with β = 0.3
    (fv.FedEBA(temperature=1 / 0.7, angle=0.0), 0.7),
]


@pytest.mark.parametrize(("method", "strength"), STRENGTH, ids=[repr(m) for m, _ in STRENGTH])
def test_first_order_strength(method: fv.Method, strength: float) -> None:
    """w_i / Σ w = r_i (1 + s (f_i − F)) + O(spread²): dividing the spread by 10, the gap by 100."""
    for direction, r in draws(20):
        away = direction - r @ direction
        gaps = []
        for spread in (1e-2, 1e-3):
            f = LEVEL + spread * away
            w = weights(method, f, r) * method.coefficients(f, r @ f)[0]
            gaps.append(float((w / w.sum() - r * (1 + strength * spread * away)).abs().max()))
        assert gaps[0] <= 10 * 1e-4
        assert gaps[1] <= max(gaps[0] / 50, 1e-14)


def test_vrex_is_fairloss_with_twice_the_strength() -> None:
    """∇(F + β Var f) = Σ r_i (1 + 2β (f_i − F)) g_i: FairLoss* with λ = 2β, to the last digit."""
    beta = 0.25
    expected = quadratic_run(golden_federation(), fv.FairLoss(2 * beta, exact=True), (0.5, 0.5), 1)
    f = torch.tensor([0.875, 1.6], dtype=torch.float64)
    g = torch.tensor([[-0.5, 1.0], [1.5, -1.5]], dtype=torch.float64)
    step = ((1 + 2 * beta * (f - f.mean())) / 2) @ g
    torch.testing.assert_close(
        expected.state.params["weight"][0], 0.5 - 0.1 * step, rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("engine", ["reference", "vmapped"])
@pytest.mark.parametrize(
    "method",
    [fv.TERM(5.0), fv.Superquantile(0.2), fv.GIFAIR(0.9), fv.SemiVRed(2.0), fv.FedMGDA(),
     fv.FedFV(), fv.AdaFed(), fv.FedEBA(0.2, angle=0.0), fv.PropFair(1.2)],
    ids=repr,
)  # fmt: skip
def test_batch_statistics_have_the_plain_weights(method: fv.Method, engine: str) -> None:
    """After one step from the same model they are FedAvg's, though the parameters are not."""
    options: dict = {"rounds": 1, "dtype": torch.float64, "engine": engine}
    data, model = images(5), MODELS["batch_norm"]
    found, expected = (fv.train(model, data, m, **options).state for m in (method, fv.FedAvg()))
    torch.testing.assert_close(found.buffers, expected.buffers, rtol=1e-12, atol=1e-14)
    assert any(float((found.params[k] - v).norm()) > 1e-6 for k, v in expected.params.items())


# -- TERM ------------------------------------------------------------------------------------------
def test_no_tilt_is_fedavg_exactly() -> None:
    for f, r in draws(100):
        assert torch.equal(weights(fv.TERM(0.0), f, r), r)
    for kind in ("uniform", "size"):
        found, expected = (
            fv.train("multinomial", federation(), m, rounds=4, batch_size=3, local_epochs=1)
            for m in (fv.TERM(0.0, weights=kind), fv.FedAvg(weights=kind))
        )
        for name, leaf in expected.state.params.items():
            assert torch.equal(found.state.params[name], leaf)


def test_term_value_is_the_mean_plus_half_the_variance() -> None:
    """R_τ = F + τ/2 Var_r(f) + O(τ²): with a tenth of τ, a hundredth of the gap."""
    for f, r in draws(50):
        gaps = []
        for tilt in (1e-2, 1e-3):
            F = r @ f
            value = tilted_objective(tilt)(f, f, r)
            gaps.append(float((value - F - tilt / 2 * (r @ (f - F) ** 2)).abs()))
        assert gaps[0] <= 1e-4
        assert gaps[1] <= max(gaps[0] / 50, 1e-12)


def test_small_tilts_are_small_strengths_of_fairloss() -> None:
    """TERM(τ) − FairLoss*(τ) = O(τ²), and both differ from FedAvg by O(τ)."""

    def end(method: fv.Method) -> Tensor:
        return quadratic_run(golden_problem_b(), method, (0.5,) * 3, 3).state.params["weight"][0]

    def gap(strength: float) -> float:
        pair = fv.TERM(strength), fv.FairLoss(strength, exact=True)
        return float((end(pair[0]) - end(pair[1])).norm())

    assert float((end(fv.TERM(1e-2)) - end(fv.FedAvg())).norm()) > 20 * gap(1e-2)
    assert gap(1e-3) < gap(1e-2) / 50


def test_term_limits_and_invariants() -> None:
    for f, r in draws(100):
        w = weights(fv.TERM(1.3), f, r)
        assert abs(float(w.sum()) - 1) < 1e-12
        torch.testing.assert_close(weights(fv.TERM(1.3), f + 5, r), w, rtol=1e-12, atol=1e-15)
        order = torch.argsort(f)
        assert bool(((w / r)[order].diff() >= -1e-12).all())  # worse clients weigh more
        worst = (f == f.max()) * r
        torch.testing.assert_close(weights(fv.TERM(1e6), f, r), worst / worst.sum())
        values = [float(tilted_objective(t)(f, f, r)) for t in (1e-3, 0.1, 1.0, 10.0, 1e3)]
        values = [float(r @ f), *values, float(f.max())]
        assert all(a <= b + 1e-12 for a, b in pairwise(values))


def test_a_loss_of_a_thousand_does_not_overflow() -> None:
    loss = torch.tensor([0.0, 1000.0, 999.0], dtype=torch.float64)
    share = torch.full((3,), 1 / 3, dtype=torch.float64)
    found = weights(fv.TERM(5.0), loss, share)
    expected = torch.tensor([0.0, 1.0, np.exp(-5)], dtype=torch.float64) / (1 + np.exp(-5))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-300)


# -- PropFair --------------------------------------------------------------------------------------
def test_propfair_with_a_large_base_is_fedavg() -> None:
    """M → ∞ with η M fixed: the gap falls like 1/M."""
    expected = quadratic_run(golden_federation(), fv.FedAvg(), (0.5, 0.5), 5)

    def gap(base: float) -> float:
        run = quadratic_run(golden_federation(), fv.PropFair(base), (0.5, 0.5), 5, lr=0.1 * base)
        return float((run.state.params["weight"] - expected.state.params["weight"]).norm())

    assert gap(1e8) < 1e-8
    assert 8 < gap(1e3) / gap(1e4) < 12


def test_propfair_factor_rises_and_is_bounded() -> None:
    f = torch.linspace(0, 50, 2001, dtype=torch.float64)
    for base, eps in ((3.0, 0.2), (1.0, 0.01)):
        found = factors(fv.PropFair(base, eps=eps), f)
        assert bool((found.diff() >= 0).all())
        assert float(found[0]) == pytest.approx(1 / base)
        assert float(found.max()) == pytest.approx(1 / eps)
        official = factors(fv.PropFair(base, eps=eps, variant="official"), f)
        near = base - f >= eps
        assert torch.equal(official[near], found[near])
        assert bool((official[~near] == 1 / base).all())  # the worst clients count least


@pytest.mark.parametrize("base", [2.5, 10.0], ids=["linear", "logarithmic"])
def test_equal_clients_take_fedavgs_step_times_the_factor(base: float) -> None:
    pair = federation().train.of(3)
    data = fv.Federation.from_arrays([pair] * 5, classes=3)
    options: dict = {"dtype": torch.float64, "evaluate_local": False}
    plain = fv.train("multinomial", data, fv.FedAvg(), rounds=1, lr=0.2, **options)
    found = fv.train("multinomial", data, fv.PropFair(base), rounds=1, lr=0.2, **options)
    start = fv.train("multinomial", data, fv.FedAvg(), rounds=1, lr=1e-300, **options).state.params
    factor = 1 / max(base - float(plain.loss[0, 0]), 0.2)
    assert (factor == 5) is (base == 2.5)
    for name, x in start.items():
        expected = x + factor * (plain.state.params[name] - x)
        torch.testing.assert_close(found.state.params[name], expected, rtol=1e-11, atol=1e-13)


def test_propfair_refuses_an_eps_that_covers_all_losses() -> None:
    with pytest.raises(fv.BadInput, match=r"eps = 2 must be smaller than base = 1\.5"):
        fv.PropFair(1.5, eps=2.0)


# -- superquantile ---------------------------------------------------------------------------------
SHARES = (0.07, 0.3, 0.5, 0.8, 1.0)


def test_superquantile_solves_its_linear_program() -> None:
    for f, r in draws(60):
        for share in SHARES:
            w = weights(fv.Superquantile(share), f, r)
            bounds = [(0, float(most)) for most in r / share]
            best = linprog(-f.numpy(), A_eq=np.ones((1, len(f))), b_eq=[1.0], bounds=bounds)
            assert best.status == 0
            assert float(w @ f) == pytest.approx(-best.fun, abs=1e-9)
            assert abs(float(w.sum()) - 1) < 1e-12
            assert bool((w >= 0).all())
            assert bool((w <= r / share + 1e-12).all())


def test_superquantile_is_the_form_of_rockafellar_and_uryasev() -> None:
    for f, r in draws(300):
        for share in SHARES:
            w = weights(fv.Superquantile(share), f, r)
            expected = float(tail_objective(share)(f, f, r))
            assert float(w @ f) == pytest.approx(expected, abs=1e-12)


def test_superquantile_limits() -> None:
    for f, r in draws(100):
        assert torch.equal(weights(fv.Superquantile(1.0), f, r), r)
        alone = fv.Superquantile(float(r[f.argmax()]) * 0.9)
        worst = (f == f.max()) * r
        torch.testing.assert_close(
            weights(alone, f, r), worst / worst.sum(), rtol=1e-12, atol=1e-14
        )
        values = [float(weights(fv.Superquantile(s), f, r) @ f) for s in (1e-6, *SHARES)]
        assert all(a >= b - 1e-12 for a, b in pairwise(values))
        assert values[0] == pytest.approx(float(f.max()))
        assert values[-1] == pytest.approx(float(r @ f))


@pytest.mark.parametrize("kind", ["uniform", "size"])
@pytest.mark.parametrize("engine", ["reference", "vmapped", "pooled", "blocked", "linear"])
def test_superquantile_of_all_clients_is_fedavg(engine: str, kind: str) -> None:
    found, expected = (
        fv.train("multinomial", federation(), m, rounds=4, engine=engine)
        for m in (fv.Superquantile(1.0, weights=kind), fv.FedAvg(weights=kind))
    )
    for name, leaf in expected.state.params.items():
        assert torch.equal(found.state.params[name], leaf)


# -- GIFAIR and Semi-VRed --------------------------------------------------------------------------
def test_gifair_sees_the_order_of_the_losses_only() -> None:
    for f, r in draws(100):
        method = fv.GIFAIR(0.99)
        w = weights(method, f, r)
        assert abs(float(w.sum()) - 1) < 1e-12
        assert float(w.min()) > 0
        assert torch.equal(weights(method, torch.exp(3 * f), r), w)
        for loss in f.unique():
            same = (w - r)[f == loss]  # equal losses: the same penalty
            torch.testing.assert_close(same, same[0].expand_as(same), rtol=0, atol=1e-15)


def test_gifair_must_stay_below_the_bound() -> None:
    with pytest.raises(fv.BadInput, match=r"GIFAIR\.strength = 1"):
        fv.GIFAIR(1.0)


def test_semivred_treats_better_clients_alike_and_turns_negative_late() -> None:
    for f, r in draws(100):
        e = torch.relu(f - r @ f)
        for strength in (0.2, 1.0, 5.0):
            w = weights(fv.SemiVRed(strength), f, r)
            assert abs(float(w.sum()) - 1) < 1e-12
            better = (w / r)[f <= r @ f]
            torch.testing.assert_close(better, better[:1].expand_as(better))
            assert bool((w < -1e-12).any()) == bool(2 * strength * (r @ e) > 1 + 1e-12)
