"""PropFair, proportional fairness (Zhang et al. 2023)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fairvar.common.validation import Positive
from fairvar.errors import BadInput
from fairvar.methods.base import ClientWeights, LossData, Method


class PropFair(Method, frozen=True, tag="propfair"):
    """P(x) = −Σ_i r_i log_ε(M − f_i(x)),   M = base, log_ε continued linearly below ε

        d_i = c(f_i) ∇f_i,   c(f) = 1 / max(M − f, ε)

    M − f_i is the client's utility, so the step follows relative gains. The factor c lengthens all
    steps: tune the learning rate together with M, which must exceed the first losses, about
    ln(classes). `variant="official"` is the default branch of the authors' code, where a client
    with M − f < ε gets the factor 1/M instead of 1/ε: the worst clients then count least.
    """

    reference: ClassVar[str] = "Zhang, Malekmohammadi, Chen, Yu 2023"
    when: ClassVar[str] = "first choice with secure aggregation; FedAvg's traffic, no loss is sent"
    fairness_knob: ClassVar[str | None] = "base"

    base: Positive = 3.0  # M
    eps: Positive = 0.2
    variant: Literal["extension", "official"] = "extension"
    weights: ClientWeights = "uniform"
    losses: LossData = "batch"

    def check(self) -> None:
        if self.eps >= self.base:
            raise BadInput(f"PropFair.eps = {self.eps:g} must be smaller than base = {self.base:g}")

    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, float]:
        utility = self.base - loss
        if self.variant == "official":
            return 1 / torch.where(utility < self.eps, self.base, utility), 0.0
        return 1 / torch.clamp(utility, min=self.eps), 0.0
