"""The linear path: affine models in the dual (`dual.py`), one run or many at once, no autograd.

    logits       Z = X̃ x,   D = ∂loss/∂Z · 1/m_i,   ∇f_i = X̃_iᵀ D_i,   g = X̃ᵀ (r_i D),   U = X̃ g
    direction    d_i = X̃_iᵀ B_i + s_i g,   B_i = own_i D_i + γ J_i (K_i D_i − U_i)
    its length   ‖d_i‖² = ⟨B_i, K_i B_i⟩ + 2 s_i ⟨B_i, U_i⟩ + s_i² ‖g‖²
    local steps  x_i = x − η (X̃_iᵀ A_i + c_i g): each step adds its B_i to A_i and its s_i to c_i, and
                 the client's logits are Z_i − η (K_i A_i + c_i U_i)
    server       x ← x − η X̃ᵀ (w_i A_i) − η (Σ w_i c_i) g

J is the second derivative of the loss in the logits. Two large products make a FedAvg round, four a
FairGrad* round, whatever the number of local steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.func import vmap

from fairvar.engine.dual import Answer, Batch, Dual, Layout, answer, bend, through_grams
from fairvar.engine.linear_steps import StepPlan
from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Memory, Method, Replies
from fairvar.tree import Tree, add, squared_norm


@dataclass(frozen=True)
class Server:
    """The method's functions for all runs: called as they are for one run, vmapped for several."""

    method: Method  # as it acts in this round
    numbers: dict[str, Float64[Tensor, " runs"]] | None  # of each run; None: a single run
    share: Float64[Tensor, " n"]
    ids: Tensor

    def each(self, function: Callable[..., Any], *given: Any) -> Any:
        """function(method, *given) of every run; all values have the run as first axis."""
        if self.numbers is None:
            return _lift(function(self.method, *(_drop(value) for value in given)))
        return vmap(lambda numbers, *values: function(self.method.with_numbers(numbers), *values))(
            self.numbers, *given
        )

    @property
    def plain(self) -> bool:
        """Every direction is the client's own gradient (and curvature): own = 1, shared = 0."""
        return type(self.method).coefficients is Method.coefficients

    @property
    def uses_g(self) -> bool:
        return self.method.uses_mean_gradient and (self.method.uses_curvature or not self.plain)

    @cached_property
    def curvature(self) -> Float[Tensor, "runs 1 1"] | float:
        if self.numbers is None:
            return self.method.curvature
        found = self.each(lambda method, share: share.new_tensor(1.0) * method.curvature, self._all)
        return found[:, None, None]

    @property
    def _all(self) -> Tensor:
        runs = len(next(iter(self.numbers.values()))) if self.numbers else 1
        return self.share.expand(runs, -1)

    def coefficients(self, loss: Float64[Tensor, "runs m"], a: Float64[Tensor, " runs"]) -> Any:
        def both(method: Method, loss: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
            own, shared = method.coefficients(loss, a)
            return _like(own, loss), _like(shared, loss)

        return self.each(both, loss, a)

    def weigh(self, memory: Memory, loss: Float64[Tensor, "runs n"]) -> tuple[Tensor, Memory]:
        if type(self.method).weigh is Method.weigh:
            return self.share.expand(len(loss), -1), memory

        def weigh(method: Method, memory: Memory, loss: Tensor) -> tuple[Tensor, Memory]:
            return method.weigh(memory, self._replies(loss))

        return self.each(weigh, memory, loss)

    def normaliser(
        self, loss: Tensor, squared_norms: Tensor, lr: Float64[Tensor, " runs"]
    ) -> Float64[Tensor, " runs"]:
        def normaliser(method: Method, loss: Tensor, norms: Tensor, lr: Tensor) -> Tensor:
            return _like(method.normaliser(self._replies(loss), norms, lr), loss.sum())

        return self.each(normaliser, loss, squared_norms, lr)

    def _replies(self, loss: Tensor) -> Replies:
        return Replies(loss, self.share, self.ids, len(self.ids))


class Look(NamedTuple):
    """What the clients of a layout see in one step."""

    layout: Layout
    answer: Answer
    share: Float[Tensor, " P"]
    u: Float[Tensor, "runs outputs P"] | None  # X̃ g
    grams: Callable[[], list[Tensor]]


class Direction(NamedTuple):
    """d_i = X̃_iᵀ along_i + shared_i g"""

    along: Float[Tensor, "runs outputs P"]
    shared: Float64[Tensor, "runs m"] | None
    own: Float64[Tensor, "runs m"] | None  # None: one


@dataclass(frozen=True)
class Work:
    """The clients after their local work: x − x_i = η (X̃_iᵀ along_i + shared_i g)."""

    batch: Batch
    first: Float[Tensor, "runs outputs P"]  # ∇f_i(x^t) = X̃_iᵀ first_i
    along: Float[Tensor, "runs outputs P"]
    shared: Float64[Tensor, "runs n"] | None
    g: Tree | None
    u: Float[Tensor, "runs outputs P"] | None

    def squared_norms(self) -> Float64[Tensor, "runs n"]:
        """‖x − x_i‖² / η²"""
        return lengths(self.batch.layout, self.batch.grams, self.along, self.shared, self.u, self.g)


@dataclass(frozen=True)
class Group:
    """Runs that draw the same batches and differ in numbers only. A single run is a group of one.

    States and outcomes of a group are those of a run, with the run as first axis of every tensor.
    """

    run: Run  # of the first; all have its federation, schedule and kind of method
    methods: Sequence[Method]
    lr: Float64[Tensor, " runs"]
    dual: Dual
    plan: StepPlan
