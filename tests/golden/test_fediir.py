"""FedIIR as options of FairGrad: numbers of the notes (further_methods.md 7), penalty = γ/2."""

from __future__ import annotations

import pytest

import fairvar as fv
from checks import follows_fediir, follows_golden

FEDIIR = fv.FairGrad(0.2, exact=True, ema=0.95)
MESSAGES = ("deployed", "flower")


@pytest.mark.parametrize("engine", ["reference", "vmapped", "blocked", *MESSAGES])
def test_moving_average(engine: str) -> None:
    follows_fediir("all", engine)(FEDIIR)


@pytest.mark.parametrize("engine", ["reference", "vmapped", *MESSAGES])
def test_moving_average_with_two_local_steps(engine: str) -> None:
    follows_fediir("all, two steps", engine)(FEDIIR)


@pytest.mark.parametrize("engine", ["reference", "vmapped", "blocked", *MESSAGES])
def test_penalty_on_the_head(engine: str) -> None:
    follows_fediir("head", engine)(fv.FairGrad(0.2, exact=True, ema=0.95, only="head"))


@pytest.mark.parametrize("engine", ["reference", "vmapped", "blocked"])
def test_average_of_one_round_is_fairgrad(engine: str) -> None:
    follows_golden("FairGrad*", engine)(fv.FairGrad(0.2, exact=True, ema=0.0))
    follows_golden("FairGrad", engine)(fv.FairGrad(0.2, ema=0.0))
