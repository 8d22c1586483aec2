"""FedMGDA+: federated multi-objective optimisation (Hu et al. 2022)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from fairvar.common.validation import Fraction, Positive, Share
from fairvar.methods.base import ClientWeights, Memory, Method, Replies
from fairvar.methods.simplex import minimise_within

NO_UPDATE = 1e-12  # an update shorter than this share of the longest has no direction
SMALLEST = 1e-300  # least step after decay


class FedMGDA(Method, frozen=True, tag="fedmgda"):
    """x ← x − s_t Σ_i λ_i u_i,   u_i = (x − x_i) / ‖x − x_i‖

        λ = argmin ‖Σ_i λ_i u_i‖²  over the simplex with |λ_i − r_i| ≤ eps,   s_t = step · decay^t

    All u_i have length one, so the length of the step is `step`, whatever the learning rate;
    `scale="mean"` multiplies it by the mean length Σ r_i ‖x − x_i‖ (ours, not the paper's). eps = 0
    is the mean direction, eps = 1 is MGDA. A client without an update is left out.
    """

    title: ClassVar[str] = "FedMGDA+"
    reference: ClassVar[str] = "Hu, Shaloudegi, Zhang, Yu 2022"
    when: ClassVar[str] = "no client may get worse; updates of very different length"
    each_separately: ClassVar[bool] = True
    fairness_knob: ClassVar[str | None] = "eps"
    uses_gram: ClassVar[bool] = True

    eps: Fraction = 0.1
    step: Positive = 1.0
    decay: Share = 1.0
    scale: Literal["unit", "mean"] = "unit"
    weights: ClientWeights = "uniform"

    @property
    def looks_at_values(self) -> bool:
        return True  # the quadratic program is solved to convergence

    def at_round(self, t: int) -> FedMGDA:
        if self.decay == 1:
            return self
        return replace(self, step=max(self.step * self.decay**t, SMALLEST), decay=1.0)

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        assert replies.gram is not None
        length = replies.gram.diagonal().sqrt()
        moves = length > NO_UPDATE * length.max()
        length = torch.where(moves, length, 1.0)
        u = replies.gram / torch.outer(length, length)
        centre = torch.where(moves, replies.share, 0.0)
        centre = centre / centre.sum().clamp(min=NO_UPDATE)
        low = torch.where(moves, centre - self.eps, 0.0).clamp(min=0)
        high = torch.where(moves, centre + self.eps, 0.0).clamp(max=1)
        lambda_ = minimise_within(u, centre, low, high)
        mean = replies.share @ torch.where(moves, length, 0.0) if self.scale == "mean" else 1.0
        return self.step * mean * lambda_ / length, memory
