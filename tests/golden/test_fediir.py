"""FedIIR as options of FairGrad: numbers of the notes (further_methods.md 7), penalty = γ/2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fairvar as fv
from checks import Points, follows_golden, golden_federation, printed_points, run_by

PRINTED = 6e-11
ALL = [
    (0.4110000000, 0.5196250000),
    (0.3492940000, 0.5350129062),
    (0.3064172760, 0.5470613650),
]
TWO_STEPS = [
    (0.3756100000, 0.5481350000),
    (0.3113570924, 0.5788097726),
    (0.2780695917, 0.5983426313),
]
HEAD = [
    (0.4500000000, 0.5196250000),
    (0.4100000000, 0.5350129062),
    (0.3780000000, 0.5470613650),
]
FEDIIR = fv.FairGrad(0.2, exact=True, ema=0.95)


class Parts(nn.Module):
    """x ↦ body x₁ + head x₂, from (½, ½)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64))
        self.head = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.body + x[:, 1:] * self.head


def follows(method: fv.Method, expected: Points, engine: str, **options: object) -> None:
    for rounds, point in printed_points(expected, engine):
        found = run_by(engine, golden_federation(), method, Parts(), rounds, **options).model
        gap = (
            (torch.cat([found["body"], found["head"]]) - torch.tensor(point, dtype=torch.float64))
            .abs()
            .max()
        )
        assert float(gap) <= PRINTED, (rounds, found)


@pytest.mark.parametrize("engine", ["reference", "vmapped", "blocked", "deployed", "flower"])
def test_moving_average(engine: str) -> None:
    follows(FEDIIR, ALL, engine)


@pytest.mark.parametrize("engine", ["reference", "vmapped", "deployed", "flower"])
def test_moving_average_with_two_local_steps(engine: str) -> None:
    follows(FEDIIR, TWO_STEPS, engine, local_steps=2)


@pytest.mark.parametrize("engine", ["reference", "vmapped", "blocked", "deployed", "flower"])
def test_penalty_on_the_head(engine: str) -> None:
    follows(fv.FairGrad(0.2, exact=True, ema=0.95, only="h*"), HEAD, engine)


@pytest.mark.parametrize("engine", ["reference", "vmapped", "blocked"])
def test_average_of_one_round_is_fairgrad(engine: str) -> None:
    follows_golden("FairGrad*", engine)(fv.FairGrad(0.2, exact=True, ema=0.0))
    follows_golden("FairGrad", engine)(fv.FairGrad(0.2, ema=0.0))
