"""FedProx (Li et al. 2020)."""

from __future__ import annotations

from typing import ClassVar

from fairvar.common.validation import NonNegative
from fairvar.methods.base import ClientWeights, Method


class FedProx(Method, frozen=True, tag="fedprox"):
    """Local steps on f_i(y) + μ/2 ‖y − x‖²,   μ = pull

        d_i = ∇f_i(y) + μ (y − x),     x ← Σ_i r_i x_i

    Local models stay near the global model x that the clients received. μ = 0 is FedAvg, and so is
    one local step, where y = x.
    """

    reference: ClassVar[str] = "Li et al. 2020"
    when: ClassVar[str] = "many local steps, after which clients drift apart; not a fairness method"

    pull: NonNegative = 0.1
    weights: ClientWeights = "uniform"
