"""FairGrad and FairGrad*: variance regularisation of client gradients (FAIRVAR)."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

import msgspec
import torch
from torch import Tensor

from fairvar.common.tree import Tree, tree_map
from fairvar.errors import BadInput, shown
from fairvar.methods.base import Regularised

HEAD = "head"


class FairGrad(Regularised, frozen=True, tag="fairgrad"):
    """J_γ(x) = F(x) + γ/2 Σ_i r_i ‖∇f_i(x) − ∇F(x)‖²,   γ = strength

        d_i = ∇f_i + γ ∇²f_i (∇f_i − g)

    One step of FairGrad* is a gradient step on J_γ, because Σ_i r_i (∇f_i − ∇F) = 0 cancels what
    each client leaves out. Clients with equal Hessians make it FedAvg.

    Two options make it FedIIR (Guo et al. 2023) with penalty γ/2: `ema`, g is a moving average over
    rounds, g ← ema · g + (1 − ema) Σ_i r_i ∇f_i, from zero; `only`, the penalty counts parameters
    whose names match this pattern, such as "fc.*". "head" is the layer of the model's last
    parameter, unless a parameter has this name.
    """

    when: ClassVar[str] = "clients pull apart; losses stay private; three times the work"
    sends: ClassVar[tuple[str, ...]] = ("model update", "gradient")

    ema: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    only: str | None = None

    @property
    def curvature(self) -> float | Tensor:
        return self.strength

    def smoothed(self, before: Tree | None, fresh: Tree) -> Tree:
        ema = self.ema
        if ema is None or before is None:
            return fresh
        return tree_map(lambda old, new: ema * old + (1 - ema) * new, before, fresh)

    def penalised(self, away: Tree) -> Tree:
        if self.only is None:
            return away
        kept = self._kept(list(away))
        return {k: v if k in kept else torch.zeros_like(v) for k, v in away.items()}

    def check_parameters(self, params: Tree) -> None:
        if self.only is not None and not self._kept(list(params)):
            raise BadInput(
                f"FairGrad.only = {shown(self.only)} is the name of no parameter; "
                f"known are {shown(', '.join(params))}"
            )

    def _kept(self, names: list[str]) -> set[str]:
        """Those of the parameters that `only` means."""
        found = {name for name in names if fnmatchcase(name, self.only or "")}
        if self.only != HEAD or found:
            return found
        layer = names[-1].rpartition(".")[0]
        return {name for name in names if name.rpartition(".")[0] == layer}
