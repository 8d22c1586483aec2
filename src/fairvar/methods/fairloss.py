"""FairLoss and FairLoss*: variance regularisation of client losses (FAIRVAR)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fairvar.errors import BadInput
from fairvar.methods.base import LossData, Regularised, Traffic


class FairLoss(Regularised, frozen=True, tag="fairloss"):
    """L_λ(x) = F(x) + λ/2 Σ_i r_i (f_i(x) − F(x))²,   λ = strength

        d_i = ∇f_i + λ (f_i − a)(∇f_i − g)

    One step of FairLoss* is a gradient step on L_λ. A client with λ(f_i − a) < −1 is ascended;
    `clip_beta` stops that. `collapsed` sends FairLoss* in one exchange: the server gets f_i, ∇f_i
    and forms Σ_i r_i (1 + λ(f_i − a)) ∇f_i itself.
    """

    when: ClassVar[str] = "to reduce the variance of losses; secure aggregation; twice the traffic"
    sends: ClassVar[tuple[str, ...]] = ("model update", "loss", "gradient")
    uses_mean_loss: ClassVar[bool] = True

    clip_beta: bool = False
    collapsed: bool = False
    losses: LossData = "batch"

    def check(self) -> None:
        if self.collapsed and not self.exact:
            raise BadInput("FairLoss.collapsed needs exact=True: it is a way to send FairLoss*")

    @property
    def only_one_step(self) -> bool:
        return self.collapsed

    @property
    def server_steps(self) -> bool:
        return self.collapsed

    @property
    def sums_suffice(self) -> bool:
        return not self.collapsed  # there the server weighs each gradient by its client's loss

    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, Tensor]:
        pull = self.strength * (loss - mean_loss)
        if self.clip_beta:
            pull = torch.clamp(pull, min=-1.0)
        return 1 + pull, -pull

    def traffic(self, parameters: int, buffers: int = 0) -> Traffic:
        if self.collapsed:
            return Traffic(1, parameters + buffers, parameters + buffers + 1)
        return super().traffic(parameters, buffers)
