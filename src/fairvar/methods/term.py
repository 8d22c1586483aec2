"""TERM, tilted empirical risk minimisation, with one tilt over clients (Li et al. 2021)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fairvar.common.validation import NonNegative
from fairvar.methods.base import ClientWeights, LossData, Memory, Method, Replies


class TERM(Method, frozen=True, tag="term"):
    """R_τ(x) = (1/τ) log Σ_i r_i exp(τ f_i(x)),   τ = tilt

        w_i = r_i exp(τ f_i) / Σ_j r_j exp(τ f_j),   x ← Σ_i w_i x_i

    One full step is a gradient step on R_τ ≈ F + τ/2 Var(f). τ = 0 is FedAvg, to the last bit;
    τ → ∞ trains for the worst client. FedEBA's weights are these with τ = 1/T.
    """

    reference: ClassVar[str] = "Li, Beirami, Sanjabi, Smith 2021"
    when: ClassVar[str] = "first choice if the server may see losses; one number sets the strength"
    sends: ClassVar[tuple[str, ...]] = ("model update", "loss")
    each_separately: ClassVar[bool] = True  # the shift and the sum below need all losses
    fairness_knob: ClassVar[str | None] = "tilt"
    uses_losses: ClassVar[bool] = True

    tilt: NonNegative = 1.0  # τ
    weights: ClientWeights = "uniform"
    losses: LossData = "full"

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        shifted = replies.loss - replies.loss.max()  # exp(1000) would overflow
        tilted = replies.share * torch.exp(self.tilt * shifted)
        # Σ r_i is one only up to rounding: with it in both sums τ = 0 gives r itself.
        return tilted * (replies.share.sum() / tilted.sum()), memory
