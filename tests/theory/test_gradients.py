"""The methods descend the objectives that they claim, and arrive where the theory says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fairvar as fv
from checks import (
    client_values,
    descends,
    gradient_objective,
    gradient_variance_minimiser,
    loss_objective,
    quadratic_run,
    slope,
    smooth_network,
)
from fairvar.data import quadratics, random_quadratics
from fairvar.testing import federation

ENGINES = ["reference", "auto"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("hidden", [0, 3], ids=["multinomial", "tanh"])
def test_fairloss_star_descends_the_loss_variance(hidden: int, weights: str, engine: str) -> None:
    check = descends(loss_objective(1.5), hidden, engine, tolerance=1e-8)
    check(fv.FairLoss(1.5, exact=True, weights=weights))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("hidden", [0, 3], ids=["multinomial", "tanh"])
def test_fairgrad_star_descends_the_gradient_variance(
    hidden: int, weights: str, engine: str
) -> None:
    check = descends(gradient_objective(0.7), hidden, engine, tolerance=1e-8)
    check(fv.FairGrad(0.7, exact=True, weights=weights))


def test_collapsed_fairloss_descends_the_loss_variance() -> None:
    descends(loss_objective(1.5), 3, tolerance=1e-8)(
        fv.FairLoss(1.5, exact=True, collapsed=True)
    )  # fmt: skip


@pytest.mark.parametrize("method", [fv.FairLoss(1.5), fv.FairGrad(0.7)], ids=repr)
def test_approximate_methods_do_not(method: fv.Method) -> None:
    """In round 0 they have no a and g: what the checks above are worth."""
    objective = loss_objective(1.5) if isinstance(method, fv.FairLoss) else gradient_objective(0.7)
    with pytest.raises(AssertionError, match="relative distance"):
        descends(objective)(method)


def one_round(
    method: fv.Method, state: fv.State | None = None, rounds: int = 1, lr: float = 0.1
) -> fv.History:
    options: dict = {"dtype": torch.float64, "evaluate_local": False, "state": state}
    return fv.train(smooth_network(), federation(), method, rounds=rounds, lr=lr, **options)


def flat(tree: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([leaf.flatten() for leaf in tree.values()])


@pytest.mark.parametrize("kind", [fv.FairLoss, fv.FairGrad])
def test_approximate_is_exact_when_given_this_rounds_averages(kind: type[fv.Method]) -> None:
    """FedAvg's step tells ∇F, its losses tell F: with them both variants are one."""
    module = smooth_network()
    params = {name: p.detach() for name, p in module.named_parameters()}
    plain = one_round(fv.FedAvg())
    gradient = {k: (v - plain.state.params[k]) / 0.1 for k, v in params.items()}
    state = fv.State(1, params, {}, {}, plain.loss[0].mean(), gradient)
    approximate = one_round(kind(0.5), state, rounds=2).state.params
    exact = one_round(kind(0.5, exact=True)).state.params
    torch.testing.assert_close(flat(approximate), flat(exact), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "method",
    [
        fv.FairLoss(0.0),
        fv.FairLoss(0.0, exact=True),
        fv.FairGrad(0.0),
        fv.FairGrad(0.0, exact=True),
        fv.QFFL(0.0),
    ],
    ids=repr,
)
def test_no_strength_is_fedavg(method: fv.Method) -> None:
    found, expected = (flat(one_round(m, rounds=4).state.params) for m in (method, fv.FedAvg()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("q", [0.5, 1.0, 2.0])
def test_qffl_steps_along_its_objective(q: float, weights: str) -> None:
    """x − x⁺ = ∇H_q / Σ r_i h_i with h_i = q f^(q−1) ‖∇f‖² + f^q/η; ∇H_q by finite differences."""
    lr, data, module = 0.1, federation(), smooth_network()
    sizes = data.sizes.double()
    r = sizes / sizes.sum() if weights == "size" else torch.full_like(sizes, 1 / len(sizes))
    start = nn.utils.parameters_to_vector(module.parameters()).detach()
    f, g = client_values(module, data)
    h = q * f ** (q - 1) * (g**2).sum(1) + f**q / lr

    def value(x: torch.Tensor) -> torch.Tensor:
        nn.utils.vector_to_parameters(x, module.parameters())
        return r @ client_values(module, data)[0] ** (q + 1) / (q + 1)

    step = start - flat(one_round(fv.QFFL(q, weights=weights), lr=lr).state.params)
    torch.testing.assert_close(step, (r * f**q) @ g / (r @ h), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(step * (r @ h), slope(value, start), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_fairgrad_star_finds_the_closed_form_minimiser(seed: int) -> None:
    data, A, m, _ = random_quadratics(4, 3, seed)
    method = fv.FairGrad(0.5, exact=True)
    history = quadratic_run(data, method, (0.0, 0.0, 0.0), 60, lr=0.6, evaluate_every=60)
    expected = torch.from_numpy(gradient_variance_minimiser(A, m, 0.5))
    plain = torch.from_numpy(gradient_variance_minimiser(A, m, 0.0))
    found = history.state.params["weight"][0]
    assert float((found - expected).norm()) < 1e-6
    assert float((plain - expected).norm()) > 1e-3, "the penalty must matter for this to be a test"


@pytest.mark.parametrize("seed", range(4))
def test_fairgrad_star_with_a_common_matrix_is_fedavg(seed: int) -> None:
    _, A, m, c = random_quadratics(4, 3, seed)
    data = quadratics(np.repeat(A[:1], 4, 0), m, c)
    found, expected = (
        quadratic_run(data, m, (1.0, -1.0, 0.5), 5).state.params["weight"]
        for m in (fv.FairGrad(2.0, exact=True), fv.FedAvg())
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("seed", range(4))
def test_fairloss_star_finds_a_stationary_point(seed: int) -> None:
    """∇L_λ = (1/n) Σ (1 + λ(f_i − F)) g_i vanishes there, and ∇F does not."""
    strength = 0.5
    data, A, m, c = random_quadratics(4, 3, seed)
    method = fv.FairLoss(strength, exact=True)
    history = quadratic_run(data, method, (0.0, 0.0, 0.0), 150, lr=0.3, evaluate_every=150)
    away = history.state.params["weight"][0].numpy() - m
    g = np.einsum("nij,nj->ni", A, away)
    f = 0.5 * np.einsum("ni,ni->n", away, g) + c
    beta = 1 + strength * (f - f.mean())
    assert np.linalg.norm((beta[:, None] * g).mean(0)) < 1e-8
    assert np.linalg.norm(g.mean(0)) > 1e-3, "the penalty must matter for this to be a test"


@pytest.mark.parametrize(
    "method",
    [fv.AFL(step=0.1), fv.AFL(step=0.1, order="simultaneous")],
    ids=["dual_first", "simultaneous"],
)
def test_afl_approaches_the_minimax_value(method: fv.Method) -> None:
    """f_1 = ½(x − 1)² + ½, f_2 = ½(x + 1)²: equal at x = ¼, where p = (5/8, 3/8) balances the
    slopes. The value 25/32 is reached to 1e-6 in 400 rounds (FedAvg: 1 at x = 0)."""
    data = quadratics(np.ones((2, 1, 1)), np.array([[1.0], [-1.0]]), np.array([0.5, 0.0]))
    history = quadratic_run(data, method, (0.0,), 400, lr=0.2, evaluate_every=400)
    x = float(history.state.params["weight"][0, 0])
    assert abs(max(0.5 * (x - 1) ** 2 + 0.5, 0.5 * (x + 1) ** 2) - 25 / 32) < 1e-6
    torch.testing.assert_close(
        history.weights[-1], torch.tensor([5 / 8, 3 / 8], dtype=torch.float64), rtol=0, atol=1e-5
    )
