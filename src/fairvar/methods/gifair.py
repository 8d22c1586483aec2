"""GIFAIR-FL: pairwise differences of client losses (Yue et al. 2023)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
import torch
from torch import Tensor

from fairvar.methods.base import ClientWeights, LossData, Memory, Method, Replies


class GIFAIR(Method, frozen=True, tag="gifair"):
    """G_λ(x) = F(x) + λ Σ_{i<j} |f_i(x) − f_j(x)|,   λ = strength · min r / (n − 1)

        w_i = r_i + λ Σ_j sign(f_i − f_j),   x ← Σ_i w_i x_i

    The weights depend on the order of the losses only, and equal losses count zero. All weights are
    positive for strength < 1. n is the number of clients that answered.
    """

    reference: ClassVar[str] = "Yue, Nouiehed, Al Kontar 2023"
    when: ClassVar[str] = "losses with outliers; only their order matters; weights stay positive"
    sends: ClassVar[tuple[str, ...]] = ("model update", "loss")
    each_separately: ClassVar[bool] = True
    fairness_knob: ClassVar[str | None] = "strength"
    uses_losses: ClassVar[bool] = True

    strength: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1
    weights: ClientWeights = "uniform"
    losses: LossData = "full"

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        # searchsorted warns of other layouts, which losses have under vmap.
        f, n = replies.loss.clone(memory_format=torch.contiguous_format), len(replies.loss)
        rising = torch.sort(f).values
        below, not_above = (torch.searchsorted(rising, f, right=right) for right in (False, True))
        signs = below - (n - not_above)  # Σ_j sign(f_i − f_j)
        strength = self.strength * replies.share.min() / max(n - 1, 1)
        return replies.share + strength * signs, memory
