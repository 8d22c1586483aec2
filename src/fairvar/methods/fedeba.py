"""FedEBA+: entropy-based aggregation with alignment (Wang et al. 2023)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
import torch
from torch import Tensor

from fairvar.common.validation import Fraction, Positive
from fairvar.methods.base import ClientWeights, LossData, Memory, Method, Replies

Degrees = Annotated[float, msgspec.Meta(ge=0, le=90)]


class FedEBA(Method, frozen=True, tag="fedeba"):
    """p_i ∝ r_i exp(f_i / T),   unfair if arccos(Σ f_i / (√n ‖f‖)) ≥ angle

        unfair:  g = Σ p_i ∇f_i(x),  d_i = (1 − α) ∇f_i + α g,  x ← x − Σ p_i (x − x_i)
        fair:    g = Σ r_i ∇f_i(x),  d_i = ∇f_i,  x ← x − (1 − α) Σ p_i (x − x_i) − α η g

    T = temperature. p maximises ⟨p, f⟩ − T KL(p | r): TERM's weights with tilt 1/T, to which it is
    equal with α = 0, and with one local step in the unfair case. f_i and ∇f_i are those at x, which
    takes a second exchange. The server sends 1 with g where the round is unfair, else 0.
    """

    title: ClassVar[str] = "FedEBA+"
    reference: ClassVar[str] = "Wang, Wang, Shi, Karimireddy, Tang 2023"
    when: ClassVar[str] = "TERM with several local steps, aligned; two exchanges, twice the traffic"
    sends: ClassVar[tuple[str, ...]] = ("model update", "loss", "gradient")
    each_separately: ClassVar[bool] = True
    fairness_knob: ClassVar[str | None] = "temperature"
    uses_losses: ClassVar[bool] = True
    uses_mean_loss: ClassVar[bool] = True
    uses_mean_gradient: ClassVar[bool] = True

    temperature: Positive = 1.0
    alpha: Fraction = 0.5
    angle: Degrees = 15.0  # 0: always unfair; 90: never
    weights: ClientWeights = "uniform"
    losses: LossData = "full"

    @property
    def probes(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return self.title  # there is no approximate one

    def broadcast(self, replies: Replies) -> tuple[Tensor, Tensor]:
        unfair = self._unfair(replies.loss)
        return unfair.double(), torch.where(unfair, self._tilted(replies), replies.share)

    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.alpha * mean_loss.expand_as(loss)
        return 1 - shared, shared

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return (1 - self.server_term(replies)) * self._tilted(replies), memory

    def server_term(self, replies: Replies) -> Tensor:
        return self.alpha * (~self._unfair(replies.loss)).double()

    def _tilted(self, replies: Replies) -> Tensor:
        return torch.softmax(replies.loss / self.temperature + replies.share.log(), 0)

    def _unfair(self, loss: Tensor) -> Tensor:
        length = len(loss) ** 0.5 * loss.norm()
        cosine = torch.where(length > 0, loss.sum() / length, 1.0)
        return torch.rad2deg(torch.arccos(cosine.clamp(max=1))) >= self.angle
