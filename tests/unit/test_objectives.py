"""Objectives: gradients by fourth-order differences, identities, weights, errors."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, jacrev

from fairvar import objectives
from fairvar.errors import BadInput

torch.set_num_threads(1)
N, D = 4, 3
CASES = ["average", "loss_variance", "gradient_variance", "qffl 0", "qffl 0.5", "qffl 2"]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


A, M = draw(N, D, D), draw(N, D, seed=1)


def losses(x):
    """Four curved, positive losses."""
    return torch.log(torch.cosh(torch.einsum("nij,nj->ni", A, x - M))).sum(1) + 0.1


def hessian(function):
    return jacrev(jacrev(function))


def objective(case, x, weights):
    f, g = losses(x), jacrev(losses)(x)
    if case == "average":
        return objectives.average(f, g, weights)
    if case == "loss_variance":
        return objectives.loss_variance(f, 0.7, g, weights)
    if case == "gradient_variance":
        return objectives.gradient_variance(f, g, 0.4, hessian(losses)(x), weights)
    return objectives.qffl(f, float(case.split()[1]), g, weights)


def differences(function, x, step=1e-3):
    found = []
    for e in torch.eye(len(x), dtype=x.dtype) * step:
        near, far = function(x + e) - function(x - e), function(x + 2 * e) - function(x - 2 * e)
        found.append((8 * near - far) / (12 * step))
    return torch.stack(found)


@pytest.mark.parametrize("weights", [None, torch.tensor([0.1, 0.2, 0.3, 0.4]).double()])
@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_the_value(case, weights):
    x = draw(D, seed=2)
    formula = objective(case, x, weights).gradient
    numeric = differences(lambda y: objective(case, y, weights).value, x)
    torch.testing.assert_close(formula, numeric, rtol=0, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_uniform_weights_are_the_default(case):
    x, w = draw(D, seed=3), torch.full((N,), 1 / N, dtype=torch.float64)
    a, b = objective(case, x, None), objective(case, x, w)
    assert torch.equal(a.value, b.value)
    assert torch.equal(a.gradient, b.gradient)


@pytest.mark.parametrize("case", CASES)
def test_a_weight_of_two_is_the_client_twice(case):
    """Weights (1, 1, 1, 2)/5 on four clients = uniform weights on five, the last one twice."""
    x = draw(D, seed=4)
    w = torch.tensor([0.2, 0.2, 0.2, 0.4], dtype=torch.float64)
    weighted = objective(case, x, w)
    twice = torch.tensor([0, 1, 2, 3, 3])
    f, g, H = losses(x)[twice], jacrev(losses)(x)[twice], hessian(losses)(x)[twice]
    plain = {
        "average": lambda: objectives.average(f, g),
        "loss_variance": lambda: objectives.loss_variance(f, 0.7, g),
        "gradient_variance": lambda: objectives.gradient_variance(f, g, 0.4, H),
    }.get(case, lambda: objectives.qffl(f, float(case.split()[1]), g))()
    torch.testing.assert_close(weighted.value, plain.value, rtol=0, atol=1e-12)
    torch.testing.assert_close(weighted.gradient, plain.gradient, rtol=0, atol=1e-12)


def test_values_by_hand():
    f = torch.tensor([1.0, 3.0], dtype=torch.float64)
    g = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    assert objectives.average(f).value == 2
    assert objectives.loss_variance(f, 0.5).value == 2.25
    assert objectives.gradient_variance(f, g, 0.5).value == 2 + 0.25 * 1.25
    assert objectives.qffl(f, 1.0).value == 2.5
    assert objectives.loss_variance(f, 0.5, g).gradient.tolist() == [0.25, 1.5]


def test_h1_identity_and_fairness_off():
    x = draw(D, seed=5)
    f, g = losses(x), jacrev(losses)(x)
    h1 = f.mean() ** 2 / 2 + f.var(unbiased=False) / 2
    torch.testing.assert_close(objectives.qffl(f, 1.0).value, h1, rtol=0, atol=1e-12)
    average = objectives.average(f, g)
    for off in (objectives.loss_variance(f, 0.0, g), objectives.qffl(f, 0.0, g),
                objectives.gradient_variance(f, g, 0.0, hessian(losses)(x))):  # fmt: skip
        torch.testing.assert_close(off.value, average.value, rtol=0, atol=1e-12)
        torch.testing.assert_close(off.gradient, average.gradient, rtol=0, atol=1e-12)


def test_curvature_as_a_function_or_as_matrices():
    x = draw(D, seed=6)
    f, g = losses(x), jacrev(losses)(x)

    def bend(v):
        return torch.stack([grad(lambda y, i=i: jacrev(losses)(y)[i] @ v[i])(x) for i in range(N)])

    a = objectives.gradient_variance(f, g, 0.4, bend)
    b = objectives.gradient_variance(f, g, 0.4, hessian(losses)(x))
    torch.testing.assert_close(a.gradient, b.gradient, rtol=0, atol=1e-12)
    assert objectives.gradient_variance(f, g, 0.4).gradient is None
    with pytest.raises(BadInput, match="curvature"):
        objectives.gradient_variance(f, g, 0.4, lambda v: v[:1])


def test_the_value_can_be_differentiated():
    x = draw(D, seed=7).requires_grad_()
    objectives.loss_variance(losses(x), 0.7).value.backward()
    formula = objective("loss_variance", x.detach(), None).gradient
    torch.testing.assert_close(x.grad, formula, rtol=0, atol=1e-12)


def test_without_gradients_there_is_only_a_value():
    f = torch.ones(3)
    assert objectives.average(f).gradient is None
    assert objectives.loss_variance(f, 1.0).gradient is None
    assert objectives.qffl(f, 1.0).gradient is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: objectives.loss_variance(f, -1.0), "strength = -1"),
        (lambda f: objectives.qffl(f, float("nan")), "q = nan"),
        (lambda f: objectives.qffl(-f, 1.0), "losses ≥ 0"),
        (lambda f: objectives.average(f, weights=f), "sum to 3"),
        (lambda f: objectives.average(f, weights=torch.tensor([1.5, -0.5, 0.0])), "≥ 0"),
        (lambda f: objectives.average(f[:0]), "empty"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(BadInput, match=words):
        call(torch.ones(3))
