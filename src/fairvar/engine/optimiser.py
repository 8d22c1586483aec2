"""The server optimiser, which turns the method's update Δ into the step of x ← x − step.

It is applied in `state.advance`, for all kernels, grids and deployments.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from fairvar.common.tree import Tree
from fairvar.common.validation import Checked, Positive
from fairvar.errors import BadInput
from fairvar.methods.base import Method

Decay = Annotated[float, msgspec.Meta(ge=0, lt=1)]
FIRST, SECOND = "first/", "second/"  # names of the moments: "first/weight"
DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 1.0, "beta1": 0.0},
    "adam": {"beta1": 0.9, "beta2": 0.99, "tau": 1e-3},  # those of FedAdam's paper
}


class ServerOptimiser(Checked, frozen=True):
    """Δ is the method's update Σ_i w_i (x − x_i), the pseudo-gradient.

        sgd    m ← β1 m + Δ                  step = lr m                 FedAvgM, Hsu et al. 2019
        adam   m ← β1 m + (1 − β1) Δ         step = lr m / (√v + τ)      FedAdam, Reddi et al. 2021
               v ← β2 v + (1 − β2) Δ²

    m starts at 0 and v at τ²; there is no correction of the bias, as in the paper. "sgd" with
    lr = 1 and β1 = 0, its defaults, gives the same bits as no optimiser. "adam" needs lr; by
    default β1 = 0.9, β2 = 0.99, τ = 1e-3. Buffers are averaged without the optimiser.
    """

    __where__: ClassVar[str | None] = "train.server"

    name: Literal["sgd", "adam"] = "sgd"  # sgd with beta1 is FedAvgM, adam is FedAdam
    lr: Positive | None = None  # of the server; 1 for sgd, needed for adam
    beta1: Decay | None = None  # momentum: 0 for sgd, 0.9 for adam
    beta2: Decay | None = None  # of adam, of the squares: 0.99
    tau: Positive | None = None  # of adam, added to the root: 1e-3

    def check(self) -> None:
        if self.name == "adam" and self.lr is None:
            raise BadInput('train.server: "adam" needs lr, such as 0.01')
        if self.name == "sgd" and (self.beta2 is not None or self.tau is not None):
            raise BadInput('train.server: beta2 and tau belong to name = "adam"')
        for field, value in DEFAULTS[self.name].items():
            if getattr(self, field) is None:
                msgspec.structs.force_setattr(self, field, value)

    @property
    def is_plain(self) -> bool:
        """x ← x − Δ"""
        return (self.name, self.lr, self.beta1) == ("sgd", 1.0, 0.0)

    def start(self, params: Tree) -> Tree | None:
        """The moments before round 0."""
        if self.is_plain:
            return None
        moments = {FIRST + name: torch.zeros_like(leaf) for name, leaf in params.items()}
        if self.tau is not None:
            least = self.tau**2
            moments |= {SECOND + k: torch.full_like(leaf, least) for k, leaf in params.items()}
        return moments

    def step(self, update: Tree, moments: Tree | None) -> tuple[Tree, Tree | None]:
        """The step, x ← x − step, and the moments for the next round, of any number of runs."""
        if moments is None:
            return update, None
        step, after = dict[str, Tensor](), dict[str, Tensor]()
        for name, delta in update.items():
            lr, beta1, beta2, tau = self.lr, self.beta1, self.beta2, self.tau
            assert lr is not None
            assert beta1 is not None
            if beta2 is None or tau is None:
                m = beta1 * moments[FIRST + name] + delta
                step[name] = lr * m
            else:
                m = beta1 * moments[FIRST + name] + (1 - beta1) * delta
                v = beta2 * moments[SECOND + name] + (1 - beta2) * delta**2
                step[name] = lr * m / (v.sqrt() + tau)
                after[SECOND + name] = v
            after[FIRST + name] = m
        return step, after


PLAIN = ServerOptimiser()


def check_optimiser(optimiser: ServerOptimiser, method: Method) -> None:
    """Refuse an optimiser with methods whose definition fixes the server's step."""
    if optimiser.is_plain:
        return
    why = None
    if method.averages_iterates:
        why = "its result is the mean of the iterates of plain steps"
    elif method.uses_gram:
        why = "its direction serves the clients of this round, and past rounds would change it"
    elif type(method).normaliser is not Method.normaliser:
        why = "the length of its step is part of the method"
    if why is not None:
        raise BadInput(f"train.server is not defined for {method.label}: {why}; leave it out")
