"""q-FFL by q-FedAvg (Li et al. 2020)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fairvar.common.validation import NonNegative
from fairvar.methods.base import ClientWeights, LossData, Memory, Method, Replies

LOSS_FLOOR = 1e-10  # as in fair_flearn: f^(q−1) must stay finite when f is 0 and q < 1


class QFFL(Method, frozen=True, tag="qffl"):
    """H_q(x) = Σ_i r_i f_i^{q+1} / (q + 1)

        Δ_i = f_i^q (x − x_i)/η,   h_i = q f_i^{q−1} ‖(x − x_i)/η‖² + f_i^q/η
        x ← x − Σ_i r_i Δ_i / Σ_i r_i h_i

    1/η estimates the Lipschitz constant, so the step length adapts; q = 0 is FedAvg. The loss is
    f_i(x^t) at the model received, not after training. Buffers are averaged and not in the norm.
    """

    title: ClassVar[str] = "q-FFL"
    reference: ClassVar[str] = "Li, Sanjabi, Beirami, Smith 2020"
    when: ClassVar[str] = "a classic baseline; one parameter; sets its own step length"
    sends: ClassVar[tuple[str, ...]] = ("scaled update", "step bound h")
    fairness_knob: ClassVar[str | None] = "q"
    uses_losses: ClassVar[bool] = True
    uses_norms: ClassVar[bool] = True

    q: NonNegative = 1.0
    weights: ClientWeights = "uniform"
    losses: LossData = "full"

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return replies.share * (replies.loss + LOSS_FLOOR) ** self.q, memory

    def normaliser(self, replies: Replies, squared_norm: Tensor, lr: float | Tensor) -> Tensor:
        f = replies.loss + LOSS_FLOOR
        h = self.q * f ** (self.q - 1) * squared_norm / lr**2 + f**self.q / lr
        return lr * (replies.share * h).sum()
