"""AAggFF: adaptive aggregation by online convex optimisation (Hahn et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fairvar.errors import RunFailed
from fairvar.methods.base import LossData, Memory, Method, Replies
from fairvar.methods.simplex import (
    distance_from_minimum,
    enough_iterations,
    minimise_quadratic,
)

# Up to this sum over rounds of the responses' variances the weights are exact to rounding: 2000
# rounds of the largest variance of the logistic function (0.06). Beyond it the solver converges
# more slowly, and `check_memory` raises if the weights are too far from their minimum.
VARIANCES = 120.0
FAR = 1e-6  # a distance from the minimum larger than rounding

# The first three are of distributions over positive numbers.
CDFS: dict[str, Callable[[Tensor], Tensor]] = {
    "weibull": lambda z: 1 - torch.exp(-(z.clamp(min=0) ** 2)),
    "exponential": lambda z: 1 - torch.exp(-z.clamp(min=0)),
    "frechet": lambda z: torch.exp(-1 / z.clamp(min=0)),
    "normal": lambda z: 0.5 * (1 + torch.erf((z - 1) / sqrt(2))),  # the authors' code has erfc
    "gumbel": lambda z: torch.exp(-torch.exp(-(z - 1))),
    "logistic": lambda z: torch.sigmoid(z - 1),
}


def response(loss: Tensor, cdf: str) -> Tensor:
    """The clients' losses mapped to [0, 1], increasing in the loss: CDF(f_i / mean f)."""
    mean = loss.mean()
    return CDFS[cdf](torch.where(mean > 0, loss / mean, 1.0))


class AAggFF(Method, frozen=True, tag="aaggff"):
    """p minimises the regret of −log(1 + ⟨p, r⟩), r the responses to the clients' losses

    cross_silo (all K clients answer): online Newton step, g = −r/(1 + ⟨p, r⟩), r = CDF/K, β = K/4
        p ← argmin_simplex ⟨c, p⟩ + ½ pᵀ (d·I + β Σ g gᵀ) p
        paper: c = Σ g − β Σ g ⟨g, p_τ⟩, d = 4, p_1 = 1/K;   official: c = Σ g, d = 4 + K, p_1 = 1
    cross_device (a share C answers): doubly robust r̆ and entropic weights
        p ← softmax(−Σ g · √(ln K) / (√(t+1) (2 + C))), restricted to those that answered
        paper: r̆_i = r̄ + (r_i − r̄)/C;   official code: without the first r̄

    In a cross_silo round where clients are missing, each of them counts with the mean response r̄
    (what the doubly robust estimate says of the absent); p is restricted to those that answered.
    """

    reference: ClassVar[str] = "Hahn, Kim, Lee 2024"
    when: ClassVar[str] = "weights that move slowly; little to tune"
    sends: ClassVar[tuple[str, ...]] = ("model update", "loss")
    each_separately: ClassVar[bool] = True
    fairness_knob: ClassVar[str | None] = "cdf"
    uses_losses: ClassVar[bool] = True

    cdf: Literal["weibull", "exponential", "frechet", "normal", "gumbel", "logistic"] = "logistic"
    variant: Literal["official", "paper"] = "official"
    setting: Literal["cross_silo", "cross_device"] = "cross_silo"
    losses: LossData = "full"

    def initial_memory(self, clients: int) -> Memory:
        zeros = torch.zeros(clients, dtype=torch.float64)
        memory = {"gradient_sum": zeros, "round": torch.zeros((), dtype=torch.float64)}
        if self.setting == "cross_silo":
            start = 1.0 if self.variant == "official" else 1 / clients
            return memory | {"p": zeros + start, "gram": torch.outer(zeros, zeros)}
        return memory | {"p": zeros + 1 / clients}

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        step = self._newton if self.setting == "cross_silo" else self._entropic
        return step(memory, replies)

    def _newton(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        K, p = replies.clients, memory["p"]
        beta, diagonal = self._strengths(K)
        answered = response(replies.loss, self.cdf) / K
        r = answered.mean().expand_as(p).index_copy(0, replies.ids, answered)
        g = -r / (1 + p @ r)
        linear = g if self.variant == "official" else g - beta * g * (g @ p)
        new = memory | {
            "gradient_sum": memory["gradient_sum"] + linear,
            "gram": memory["gram"] + torch.outer(g, g),
            "round": memory["round"] + 1,
        }
        # β Σ ‖g − mean g‖² ≤ (K/4) · K (variances / K²), and the last minimum is at most
        # ‖r − mean r‖ / diagonal ≤ 1 / (2 √K diagonal) away.
        nearby = 1e-12 * 2 * sqrt(K) * diagonal
        iterations = enough_iterations(diagonal, VARIANCES / 4, nearby)
        gram, c = beta * new["gram"], new["gradient_sum"]
        new["p"] = minimise_quadratic(diagonal, gram, c, p, iterations)
        used = new["p"][replies.ids]
        if len(used) == K:
            return used, new
        return torch.where(used.sum() > 0, used / used.sum(), replies.share), new

    def _strengths(self, clients: int) -> tuple[float, float]:
        """β and d"""
        alpha, beta = 4.0, clients / 4
        return beta, alpha * (1 + beta) if self.variant == "official" else alpha

    def check_memory(self, memory: Memory) -> None:
        if self.setting == "cross_device":
            return
        beta, diagonal = self._strengths(memory["p"].shape[-1])
        gram, c = beta * memory["gram"], memory["gradient_sum"]
        far = distance_from_minimum(diagonal, gram, c, memory["p"])
        if bool((far > FAR).any()):  # not NaN: a run that diverged is recognised by its losses
            raise RunFailed(f"AAggFF's weights are {float(far.nan_to_num().max()):.1e} from their "
                            "minimum: the clients' losses lie too far apart")  # fmt: skip

    def _entropic(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        K, ids, t = replies.clients, replies.ids, memory["round"] + 1
        C = len(ids) / K
        p = memory["p"]
        if self.variant == "official":
            p = torch.where(t == 1, C, p)
        r = C * response(replies.loss, self.cdf)
        mean = r.mean()
        answered = (r - mean) / C + (mean if self.variant == "paper" else 0.0)
        robust = mean.expand_as(p).index_copy(0, ids, answered)
        # The gradient's second term is the same for all clients and cancels in the softmax.
        total = memory["gradient_sum"] - robust / (1 + p.sum() * mean)
        new = torch.softmax(-total * sqrt(log(K)) / ((t + 1).sqrt() * (2 + C)), 0)
        memory = {"gradient_sum": total, "p": new, "round": memory["round"] + 1}
        return new[ids] / new[ids].sum(), memory
