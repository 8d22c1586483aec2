"""AdaFed: adaptive common descent direction (Hamidi and Yang 2024)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fairvar.common.validation import NonNegative
from fairvar.methods.base import LossData, Memory, Method, Replies

RANK = 1e-10  # eigenvalues below this share of the largest are zero


class AdaFed(Method, frozen=True, tag="adafed"):
    """x ← x − η d with ⟨g_k, d⟩ = f_k^γ ‖d‖²,   g_k = (x − x_k)/η

        a = K⁺ c / (cᵀ K⁺ c),   d = Σ_k a_k g_k,   c_k = f_k^γ,   K_ij = ⟨g_i, g_j⟩

    d is the shortest of the Σ a_k g_k with ⟨c, a⟩ = 1: to first order f_k falls at the rate f_k^γ,
    so with γ = 1 all losses fall by the same ratio. `normalise` divides every g_k by its length.
    The paper's Gram-Schmidt gives the same d where K has full rank; K⁺ does not depend on an order.
    """

    reference: ClassVar[str] = "Hamidi, Yang 2024"
    when: ClassVar[str] = "losses should fall at prescribed rates; few clients, different gradients"
    sends: ClassVar[tuple[str, ...]] = ("model update", "loss")
    each_separately: ClassVar[bool] = True
    fairness_knob: ClassVar[str | None] = "gamma"
    uses_losses: ClassVar[bool] = True
    uses_gram: ClassVar[bool] = True

    gamma: NonNegative = 1.0
    normalise: bool = False
    losses: LossData = "full"

    @property
    def looks_at_values(self) -> bool:
        return True  # torch's eigh synchronises with the host

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        assert replies.gram is not None
        K, length = replies.gram, torch.ones_like(replies.loss)
        if self.normalise:
            squares = K.diagonal()
            length = torch.where(squares > 0, squares, 1.0).sqrt()
            K = K / torch.outer(length, length)
        # Losses below zero have no rate: the run diverges instead of standing still or climbing.
        c = torch.where(replies.loss >= 0, replies.loss, torch.nan) ** self.gamma
        # pinv raises if K is not finite, and 1/K overflows if all updates have all but vanished:
        # K = 0 then gives weights of zero.
        solvable = torch.isfinite(K).all() & (K.diagonal().max() > 1e-290)
        solved = torch.linalg.pinv(torch.where(solvable, K, 0.0), rtol=RANK, hermitian=True) @ c
        # cᵀ K⁺ c = 0: no combination of the updates lowers all losses, and the model stays.
        stuck = c @ solved * K.diagonal().sum() <= RANK * (c @ c)
        return torch.where(stuck, 0.0, solved / (c @ solved)) / length, memory

    def normaliser(
        self, replies: Replies, squared_norm: Tensor, lr: float | Tensor
    ) -> float | Tensor:
        return 1 / lr if self.normalise else 1.0
