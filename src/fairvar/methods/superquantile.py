"""Superquantile aggregation, Δ-FL (Pillutla et al. 2023)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fairvar.common.validation import Share
from fairvar.methods.base import ClientWeights, LossData, Memory, Method, Replies

ROUNDING = 1e-12  # of a sum of shares


class Superquantile(Method, frozen=True, tag="superquantile"):
    """S_θ(x) = max { Σ_i π_i f_i(x) : 0 ≤ π_i ≤ r_i/θ, Σ π_i = 1 },   θ = share

        π_i = (r_i/θ) clamp((θ − above_i) / equal_i, 0, 1),   x ← Σ_i π_i x_i

    The mean loss of the worst share θ of the clients; above_i and equal_i are the shares of clients
    with a higher and with the same loss. θ = 1 is FedAvg, to the last bit, θ → 0 the worst client.
    `variant="filter"` is the authors' code: all clients from the (1 − θ)-quantile on, with their
    plain weights; that is one client too many where n θ is whole.
    """

    reference: ClassVar[str] = "Pillutla, Laguel, Malick, Harchaoui 2023"
    when: ClassVar[str] = "a given share of the clients matters, such as the worst tenth"
    sends: ClassVar[tuple[str, ...]] = ("model update", "loss")
    each_separately: ClassVar[bool] = True
    fairness_knob: ClassVar[str | None] = "share"
    uses_losses: ClassVar[bool] = True

    share: Share = 0.5  # θ
    variant: Literal["exact", "filter"] = "exact"
    weights: ClientWeights = "uniform"
    losses: LossData = "full"

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        above, equal = _above_and_equal(replies)
        if self.variant == "filter":
            kept = replies.share * (above <= self.share + ROUNDING)
            return kept / kept.sum(), memory
        # The sum of all shares is one only up to rounding: so θ = 1 gives r itself.
        share = self.share + ROUNDING * (self.share == 1)
        part = torch.clamp((share - above) / equal, 0, 1)
        return replies.share / self.share * part, memory


def _above_and_equal(replies: Replies) -> tuple[Tensor, Tensor]:
    """The shares of clients with a higher loss, and with the same, for every client."""
    # searchsorted warns of other layouts, which losses have under vmap.
    gain = -replies.loss.clone(memory_format=torch.contiguous_format)
    falling, order = torch.sort(gain)
    total = pad(replies.share[order].cumsum(0), (1, 0))  # of the k worst, from k = 0 on
    above, not_below = (
        total[torch.searchsorted(falling, gain, right=right)] for right in (False, True)
    )
    return above, not_below - above
