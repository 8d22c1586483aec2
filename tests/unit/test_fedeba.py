"""What is known of FedEBA+: TERM's weights, its two branches with one local step, its limits."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

import fairvar as fv
from checks import descends
from fairvar.methods import Memory, Replies
from fairvar.testing import federation

T = 0.4


class Tilted(fv.Method, frozen=True, tag="tilted"):
    """TERM with tilt 1/T."""

    uses_losses: ClassVar[bool] = True
    losses: str = "full"

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        odds = replies.share * torch.exp((replies.loss - replies.loss.max()) / T)
        return odds / odds.sum(), memory


def run(method: fv.Method, **options: object) -> Tensor:
    given: dict = {"rounds": 3, "lr": 0.1, "dtype": torch.float64, **options}
    params = fv.train("multinomial", federation(), method, **given).state.params
    return torch.cat([leaf.flatten() for leaf in params.values()])


def tilted(f: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return T * torch.logsumexp(f / T + w.log(), 0)


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_one_unfair_step_descends_the_tilted_loss(alpha: float, weights: str) -> None:
    descends(tilted)(fv.FedEBA(T, alpha, angle=0.0, weights=weights))


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_one_fair_step_descends_a_mixture(alpha: float, weights: str) -> None:
    """(1 − α) of the tilted loss and α of the mean loss."""
    descends(lambda f, g, w: (1 - alpha) * tilted(f, g, w) + alpha * (w @ f))(
        fv.FedEBA(T, alpha, angle=90.0, weights=weights)
    )


@pytest.mark.parametrize("work", [{}, {"batch_size": 3, "local_epochs": 1}])
def test_without_alpha_it_is_term(work: dict) -> None:
    expected = run(Tilted(), **work)
    for angle in (0.0, 15.0, 90.0):
        found = run(fv.FedEBA(T, 0.0, angle=angle), **work)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_several_steps_of_the_branches_differ() -> None:
    work: dict = {"batch_size": 3, "local_epochs": 1}
    unfair, fair, term = (
        run(method, **work)
        for method in (fv.FedEBA(T, 0.5, angle=0.0), fv.FedEBA(T, 0.5, angle=90.0), Tilted())
    )
    assert (
        min(float((a - b).norm()) for a, b in ((unfair, fair), (unfair, term), (fair, term))) > 1e-3
    )


def test_a_high_temperature_is_fedavg_with_one_step() -> None:
    found = run(fv.FedEBA(1e9, 0.3, angle=90.0))
    torch.testing.assert_close(found, run(fv.FedAvg()), rtol=1e-8, atol=1e-10)


def test_the_weights_maximise_loss_and_entropy() -> None:
    """⟨p, f⟩ − T KL(p | r) falls in every direction along the simplex."""
    f = torch.tensor([0.2, 1.0, 1.7, 0.6], dtype=torch.float64)
    r = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    p, _ = fv.FedEBA(T, angle=0.0).weigh({}, Replies(f, r, torch.arange(4), 4))

    def value(p: Tensor) -> float:
        return float(p @ f - T * (p @ (p / r).log()))

    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        v = torch.randn(4, generator=draw, dtype=torch.float64)
        v = 1e-3 * (v - v.mean())
        assert value(p + v) < value(p)
    slope = f - T * (p / r).log()
    assert float(slope.max() - slope.min()) < 1e-12


@pytest.mark.parametrize(
    ("losses", "degrees"),
    [([1.0, 1.0], 0.0), ([1.0, 0.0], 45.0), ([3.0, 0.0, 0.0, 0.0], 60.0), ([0.0, 0.0], 0.0)],
)
def test_the_angle(losses: list[float], degrees: float) -> None:
    """Between the losses and (1, …, 1); from it on a round is unfair."""
    f = torch.tensor(losses, dtype=torch.float64)
    replies = Replies(f, torch.full_like(f, 1 / len(f)), torch.arange(len(f)), len(f))
    for angle, unfair in ((max(degrees - 1e-3, 0.0), 1.0), (degrees + 1e-3, 0.0)):
        a, weights = fv.FedEBA(T, angle=angle).broadcast(replies)
        assert float(a) == unfair
        expected = torch.softmax(f / T, 0) if unfair else replies.share
        torch.testing.assert_close(weights, expected)
    assert float(fv.FedEBA(T, 0.3, angle=90.0).server_term(replies)) == 0.3
