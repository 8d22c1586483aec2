"""FedFV: federated fair averaging (Wang et al. 2021)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fairvar.common.validation import Fraction
from fairvar.methods.base import LossData, Memory, Method, Replies

ROUNDING = 1e-9  # 10 · (1 − 0.7) is a little more than 3
VANISHED = 1e-15  # squared lengths below this share of the updates' mean are rounding


class FedFV(Method, frozen=True, tag="fedfv"):
    """x ← x − d ‖mean D‖ / ‖d‖,   d = mean P,   D_i = x − x_i

        P_i = D_i;  then for j by rising loss, if ⟨P_i, D_j⟩ < 0:  P_i ← P_i − ⟨P_i, D_j⟩/‖D_j‖² D_j
        the share alpha of clients with the largest losses keep P_i = D_i
        external="official":  c = Σ of the D_i with ⟨d, D_i⟩ < 0,   d ← d − min(⟨d, c⟩, 0)/‖c‖² c

    With P = C D all of it follows from the products K of the updates. Updates that do not conflict
    (K ≥ 0) give FedAvg. The external step is that of the authors' code with its default τ = 1,
    where it looks at the present round only. Clients with equal losses are ordered by ‖D_i‖.
    """

    reference: ClassVar[str] = "Wang, Fan, Qi, Wen, Wang, Yu 2021"
    when: ClassVar[str] = "updates conflict, and steps should keep FedAvg's length"
    sends: ClassVar[tuple[str, ...]] = ("model update", "loss")
    each_separately: ClassVar[bool] = True
    fairness_knob: ClassVar[str | None] = "alpha"
    uses_losses: ClassVar[bool] = True
    uses_gram: ClassVar[bool] = True

    alpha: Fraction = 0.1
    external: Literal["official", "off"] = "official"
    losses: LossData = "full"

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        assert replies.gram is not None
        order = replies.gram.diagonal().argsort(stable=True)
        order = order[replies.loss[order].argsort(stable=True)]
        K = replies.gram[order][:, order]
        w = self._projected(K).mean(0)
        if self.external == "official":
            c = (K @ w < 0).double()
            along = w @ K @ c
            w = w - torch.where(along < 0, along / (c @ K @ c), 0.0) * c
        squared = w @ K @ w
        mean = K.mean()  # ‖mean D‖²
        length = (mean.clamp(min=0) / squared).sqrt()
        w = torch.where(squared > VANISHED * K.diagonal().mean(), w * length, 0.0)
        return torch.empty_like(w).index_copy(0, order, w), memory

    def _projected(self, K: Tensor) -> Tensor:
        """C, for clients by rising loss."""
        n = len(K)
        C = torch.eye(n, dtype=K.dtype, device=K.device)
        place = torch.arange(n, device=K.device)
        kept = (place >= (n - 1) * (1 - self.alpha) - ROUNDING) & (self.alpha > 0)
        for j in range(n):
            along = (C @ K[:, j]).clamp(max=0)
            conflict = ~kept & (place != j) & (along < 0)
            C[:, j] -= torch.where(conflict, along / K[j, j], 0.0)
        return C
