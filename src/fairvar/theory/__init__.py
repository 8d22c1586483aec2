"""The theory as computation: every theorem, correction and counterexample as a checked `Claim`."""

from __future__ import annotations

from fairvar.theory import gradients, theorems
from fairvar.theory.claim import Claim

__all__ = ["Claim", "claims"]


def claims() -> list[Claim]:
    """All claims, computed now in float64; the same numbers every time."""
    return [*gradients.of_objectives(), *theorems.claims(), *gradients.of_trajectories(),
            *gradients.of_methods()]  # fmt: skip
