"""Ditto's personal models on problem A: printed numbers, fixed point, and variants that are wrong.

Problem A: A_1 = diag(1, 2), m_1 = (1, 0), A_2 = diag(3, 1), m_2 = (0, 2), η = 0.1, x⁰ = (½, ½).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fairvar as fv
from checks import golden_federation, linear_model, run_by
from fairvar.common.tree import Tree
from fairvar.engine.kernels import personal
from fairvar.engine.kernels.personal import WithPersonal
from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State, advance

ENGINES = ("reference", "pooled", "blocked", "vmapped", "linear")
MESSAGES = ("deployed", "flower")
PRINTED = 6e-11
# λ: v_1 and v_2 after rounds 1, 2, 3.
V: dict[float, list[list[list[float]]]] = {
    0.0: [
        [[0.55, 0.4], [0.35, 0.65]],
        [[0.595, 0.32], [0.245, 0.785]],
        [[0.6355, 0.256], [0.1715, 0.9065]],
    ],
    0.1: [
        [[0.55, 0.4], [0.35, 0.65]],
        [[0.594, 0.32125], [0.246, 0.78375]],
        [[0.63276, 0.25925], [0.17384, 0.903]],
    ],
    1.0: [
        [[0.55, 0.4], [0.35, 0.65]],
        [[0.585, 0.3325], [0.255, 0.7725]],
        [[0.609, 0.287375], [0.194, 0.872625]],
    ],
}
X = [[0.45, 0.525], [0.41, 0.54625], [0.378, 0.5643125]]  # FedAvg's
X_TWO_STEPS = [[0.42, 0.5525], [0.368, 0.5905625], [0.3342, 0.6181578125]]


def doubles(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def models(method: fv.Method, rounds: int, engine: str, **more: object) -> tuple[Tensor, Tensor]:
    """x and all v_i."""
    history = run_by(engine, golden_federation(), method, (0.5, 0.5), rounds, **more)
    found = history.state.personal
    assert found is not None
    return history.state.params["weight"][0], found["weight"][:, 0]


def follows_the_table(pull: float, engine: str) -> None:
    for rounds, expected in enumerate(V[pull], start=1):
        if engine == "flower" and rounds < len(X):  # takes longer, and the last round tells
            continue
        x, v = models(fv.Ditto(pull), rounds, engine)
        assert float((v - doubles(expected)).abs().max()) <= PRINTED, v.tolist()
        assert float((x - doubles(X[rounds - 1])).abs().max()) <= PRINTED


@pytest.mark.parametrize("engine", [*ENGINES, *MESSAGES])
@pytest.mark.parametrize("pull", V)
def test_the_printed_models(pull: float, engine: str) -> None:
    follows_the_table(pull, engine)


@pytest.mark.parametrize("engine", ["reference", "vmapped", "linear", "deployed"])
def test_two_local_steps(engine: str) -> None:
    """The shared model as printed; v_i by hand: v ← v − η (A (v − m) + λ (v − x^t)), twice."""
    A, m = doubles([[1.0, 2], [3, 1]]), doubles([[1.0, 0], [0, 2]])
    v = x = torch.full((2, 2), 0.5, dtype=torch.float64)
    for rounds, printed in enumerate(X_TWO_STEPS, start=1):
        for _ in range(2):
            v = v - 0.1 * (A * (v - m) + 0.7 * (v - x))
        found, personal_models = models(fv.Ditto(0.7), rounds, engine, local_steps=2)
        x = doubles(printed)
        assert float((found - x).abs().max()) <= PRINTED
        assert float((personal_models - v).abs().max()) <= PRINTED


@pytest.mark.parametrize("engine", ENGINES)
def test_own_rate_and_steps_by_hand(engine: str) -> None:
    """Three personal steps of 0.05 and one shared step of 0.1."""
    A, m = doubles([[1.0, 2], [3, 1]]), doubles([[1.0, 0], [0, 2]])
    v = x = torch.full((2, 2), 0.5, dtype=torch.float64)
    method = fv.Ditto(2.0, personal_lr=0.05, personal_steps=3)
    for rounds, printed in enumerate(X, start=1):
        for _ in range(3):
            v = v - 0.05 * (A * (v - m) + 2.0 * (v - x))
        found, personal_models = models(method, rounds, engine)
        x = doubles(printed)
        assert float((found - x).abs().max()) <= PRINTED
        assert float((personal_models - v).abs().max()) <= PRINTED


@pytest.mark.parametrize("engine", ["reference", "vmapped", "linear"])
def test_the_fixed_point(engine: str) -> None:
    """x* = (¼, ⅔), v_i* = (A_i + λ)⁻¹ (A_i m_i + λ x*) for λ = 1."""
    x, v = models(fv.Ditto(1.0), 200, engine, evaluate_every=200)
    expected = torch.tensor([[0.625, 2 / 9], [0.0625, 4 / 3]], dtype=torch.float64)
    assert float((x - torch.tensor([0.25, 2 / 3], dtype=torch.float64)).abs().max()) <= 1e-12
    assert float((v - expected).abs().max()) <= 1e-12


# -- wrong in one way that someone got wrong, or could ---------------------------------------------
Round = Callable[[WithPersonal, Outcome, State, int], Outcome]
right = WithPersonal._train


def anchored_at_the_new_model(
    kernel: WithPersonal, outcome: Outcome, state: State, t: int
) -> Outcome:
    return right(kernel, outcome, replace(state, params=advance(state, outcome).params), t)


def averaged(kernel: WithPersonal, outcome: Outcome, state: State, t: int) -> Outcome:
    """The personal models are sent, and their mean comes back."""
    made = right(kernel, outcome, state, t)
    assert made.personal is not None
    mean: Tree = {k: v.mean(1, keepdim=True).expand_as(v) for k, v in made.personal.items()}
    return replace(made, personal=mean)


def restarted(kernel: WithPersonal, outcome: Outcome, state: State, t: int) -> Outcome:
    """v_i starts from the received model in every round."""
    start = {k: v[:, None].expand_as((state.personal or {})[k]) for k, v in state.params.items()}
    return right(kernel, outcome, replace(state, personal=start), t)


@pytest.mark.parametrize("wrong", [anchored_at_the_new_model, averaged, restarted])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_personal_step_is_found(
    wrong: Round, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows_the_table(1.0, engine)
    monkeypatch.setattr(WithPersonal, "_train", wrong)
    with pytest.raises(AssertionError):
        follows_the_table(1.0, engine)


def test_an_anchor_at_the_local_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With y_i as anchor, which in the first step is x^t: two local steps tell."""
    local = personal.train_personal

    def anchored(run: Run, v: Tree, sent: nn.Module, t: int, client: int) -> Tree:
        A, m = ((1.0, 2.0), (1.0, 0.0)) if client == 0 else ((3.0, 1.0), (0.0, 2.0))
        x = sent.get_parameter("weight")
        y = linear_model(*(x - 0.1 * doubles(A) * (x - doubles(m)))[0].tolist())
        return local(run, v, y, t, client)

    monkeypatch.setattr(personal, "train_personal", anchored)
    with pytest.raises(AssertionError):
        follows_the_table(1.0, "reference")


class PulledTwice(fv.Ditto, frozen=True, tag="26"):
    """The shared model is pulled as well: FedProx."""

    @property
    def shared(self) -> fv.Method:
        return self.personal.method


class Unpulled(fv.Ditto, frozen=True, tag="27"):
    """The default of a library: λ = 0, whatever is asked for."""

    @property
    def personal(self) -> fv.methods.Personal:
        return fv.methods.Personal(fv.Ditto(0.0).personal.method)


def test_wrong_methods_are_found() -> None:
    def two_steps(method: fv.Method) -> None:
        x, _ = models(method, 3, "reference", local_steps=2)
        assert float((x - doubles(X_TWO_STEPS[-1])).abs().max()) <= PRINTED

    def table(method: fv.Method) -> None:
        _, v = models(method, 3, "vmapped")
        assert float((v - doubles(V[1.0][-1])).abs().max()) <= PRINTED

    for check, wrong in ((two_steps, PulledTwice(1.0)), (table, Unpulled(1.0))):
        check(fv.Ditto(1.0))
        with pytest.raises(AssertionError):
            check(wrong)
