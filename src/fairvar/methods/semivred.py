"""Semi-VRed: the variance of the losses above the mean (Malekmohammadi and Yu 2024)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fairvar.common.validation import NonNegative
from fairvar.methods.base import ClientWeights, LossData, Memory, Method, Replies


class SemiVRed(Method, frozen=True, tag="semivred"):
    """S_β(x) = F(x) + β Σ_i r_i e_i(x)²,   e_i = max(f_i − F, 0),   β = strength

        w_i = r_i (1 + 2β (e_i − Σ_j r_j e_j)),   x ← Σ_i w_i x_i

    Only clients worse than the mean are penalised. All that are better have the same factor, which
    is negative for 2β Σ_j r_j e_j > 1 only. Without the restriction it is V-REx (VRed), which is
    FairLoss* with λ = 2β.
    """

    title: ClassVar[str] = "Semi-VRed"
    reference: ClassVar[str] = "Malekmohammadi, Yu 2024"
    when: ClassVar[str] = "FairLoss holds good clients back too much"
    sends: ClassVar[tuple[str, ...]] = ("model update", "loss")
    each_separately: ClassVar[bool] = True
    fairness_knob: ClassVar[str | None] = "strength"
    uses_losses: ClassVar[bool] = True

    strength: NonNegative  # β
    weights: ClientWeights = "uniform"
    losses: LossData = "full"

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        f, r = replies.loss, replies.share
        e = torch.relu(f - r @ f)
        return r * (1 + 2 * self.strength * (e - r @ e)), memory
