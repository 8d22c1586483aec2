"""AFL, agnostic federated learning (Mohri et al. 2019)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fairvar.common.validation import Positive
from fairvar.methods.base import LossData, Memory, Method, Replies
from fairvar.methods.simplex import project


class AFL(Method, frozen=True, tag="afl"):
    """min_x max_{p in simplex} Σ_i p_i f_i(x)

        p ← Proj_simplex(p + s·f),   x ← Σ_i p_i x_i

    `order="dual_first"` uses the new p in the same round (AAggFF's code, which the paper adapted);
    `"simultaneous"` uses the old one, as in the AFL paper, which also returns the time average of
    the iterates (`average=True`). Only the clients that answered are updated and projected.
    """

    reference: ClassVar[str] = "Mohri, Sivek, Suresh 2019"
    when: ClassVar[str] = "only the worst client matters; few clients, all reliable"
    sends: ClassVar[tuple[str, ...]] = ("model update", "loss")
    each_separately: ClassVar[bool] = True
    fairness_knob: ClassVar[str | None] = "step"
    uses_losses: ClassVar[bool] = True

    step: Positive = 0.1  # s
    order: Literal["dual_first", "simultaneous"] = "dual_first"
    average: bool = False
    losses: LossData = "full"

    @property
    def averages_iterates(self) -> bool:
        return self.average

    def initial_memory(self, clients: int) -> Memory:
        return {"p": torch.full((clients,), 1 / clients, dtype=torch.float64)}

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        old = project(memory["p"][replies.ids])
        new = project(memory["p"][replies.ids] + self.step * replies.loss)
        used = new if self.order == "dual_first" else old
        return used, {"p": memory["p"].index_copy(0, replies.ids, new)}
