"""The theory as computation: every theorem, correction and counterexample as a checked `Claim`."""

from __future__ import annotations

from fairvar.theory import (
    decompositions,
    expectation,
    identities,
    optimality,
    stationary,
    trajectories,
)
from fairvar.theory.claim import Claim

__all__ = ["Claim", "claims"]


def claims() -> list[Claim]:
    """All claims, computed now in float64; the same numbers every time."""
    groups = (identities, expectation, stationary, optimality, trajectories, decompositions)
    return [claim for group in groups for claim in group.claims()]
