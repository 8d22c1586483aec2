"""FairGrad and FairGrad*: variance regularisation of client gradients (FAIRVAR)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fairvar.methods.regularised import Regularised


class FairGrad(Regularised, frozen=True, tag="fairgrad"):
    """J_γ(x) = F(x) + γ/2 Σ_i r_i ‖∇f_i(x) − ∇F(x)‖²,   γ = strength

        d_i = ∇f_i + γ ∇²f_i (∇f_i − g)

    One step of FairGrad* is a gradient step on J_γ, because Σ_i r_i (∇f_i − ∇F) = 0 cancels what
    each client leaves out. Clients with equal Hessians make it FedAvg.
    """

    sends: ClassVar[tuple[str, ...]] = ("model update", "gradient")

    @property
    def curvature(self) -> float | Tensor:
        return self.strength
