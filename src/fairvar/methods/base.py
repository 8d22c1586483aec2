"""What a method is: a frozen value with hyper-parameters and a few pure functions on tensors.

Every method of the paper fits one round:

    client  d_i = own_i ∇f_i + shared_i g + γ ∇²f_i (∇f_i − g),     x_i ← x_i − η d_i
    server  x ← x − Σ_i w_i (x − x_i) / normaliser

A method says what is special about it: `coefficients` (own, shared) from the client's loss,
`curvature` γ, `weigh` for the server's weights w, and which averages (a = mean loss, g = mean
gradient) it needs. Reference loop, vectorised engine and deployment all run these functions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import msgspec
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from fairvar.validation import Checked

ClientWeights = Literal["uniform", "size"]
LossData = Literal["batch", "full"]
Memory = dict[str, Tensor]


class Replies(NamedTuple):
    """What the server knows when it weighs the clients that answered (m of `clients`)."""

    loss: Float64[Tensor, " m"]  # f_i(x^t)
    share: Float64[Tensor, " m"]  # the plain weights r_i, summing to one
    ids: Int64[Tensor, " m"]
    clients: int  # all clients of the federation, present or not


class Traffic(NamedTuple):
    """What one client and the server send each other in one round."""

    exchanges: int
    floats_down: int
    floats_up: int


class Method(Checked, frozen=True, tag_field="name"):
    """Base of all methods; by itself it is FedAvg with uniform weights.

    Third-party methods subclass it, override what differs and call `fairvar.register`. Fields of
    these names mean the same in every method that has them: `exact`, `weights` and `losses`.
    """

    title: ClassVar[str] = ""  # as papers write it; the class name by default
    reference: ClassVar[str] = ""  # the paper, for `fairvar methods`
    sends: ClassVar[tuple[str, ...]] = ("model update",)  # what a client computes and sends
    each_separately: ClassVar[bool] = False  # the server needs every client's value by itself
    fairness_knob: ClassVar[str | None] = None  # the field that trades accuracy for fairness
    version: ClassVar[int] = 1  # raised when a built-in method computes other numbers than before

    uses_mean_loss: ClassVar[bool] = False  # the server broadcasts a = Σ r_i f_i
    uses_mean_gradient: ClassVar[bool] = False  # … and g = Σ r_i ∇f_i
    uses_losses: ClassVar[bool] = False  # the server's weights depend on the clients' losses
    uses_norms: ClassVar[bool] = False  # `normaliser` depends on the norms of the updates

    @property
    def reveals(self) -> tuple[str, ...]:
        """What the server gets to see of a client."""
        by_size = self.client_weights == "size"
        return (*self.sends, "number of samples") if by_size else self.sends

    @property
    def sums_suffice(self) -> bool:
        """Whether sums over clients are enough, so that secure aggregation could carry them."""
        return not self.each_separately

    @property
    def probes(self) -> bool:
        """Exact methods: clients first answer f_i, ∇f_i at x^t, so a and g are of this round."""
        return bool(getattr(self, "exact", False))

    @property
    def reports_gradient(self) -> bool:
        """Approximate methods: clients report ∇f_i(x^t), whose mean is the next round's g."""
        return self.uses_mean_gradient and not self.probes

    @property
    def client_weights(self) -> ClientWeights:
        """r_i = 1/n, or proportional to the number of training samples."""
        return getattr(self, "weights", "uniform")

    @property
    def loss_data(self) -> LossData:
        """f_i on this round's batch, or at x^t on all the client's training data (eval mode)."""
        return getattr(self, "losses", "batch")

    @property
    def curvature(self) -> float | Tensor:
        """γ; zero switches the Hessian-vector product off."""
        return 0.0

    @property
    def uses_curvature(self) -> bool:
        return isinstance(self.curvature, Tensor) or self.curvature != 0

    @property
    def averages_iterates(self) -> bool:
        """The resulting model is the mean of all iterates instead of the last one."""
        return False

    @property
    def only_one_step(self) -> bool:
        """The method is defined for a single local step per round only."""
        return False

    @property
    def server_steps(self) -> bool:
        """Exact methods of one step without curvature: the server can form x_i from f_i and ∇f_i
        itself, and one exchange is enough."""
        return False

    @property
    def is_blind(self) -> bool:
        """Its weights and coefficients are the plain ones, whatever the losses."""
        kind = type(self)
        return kind.weigh is Method.weigh and kind.coefficients is Method.coefficients

    @property
    def needs_losses(self) -> bool:
        """Somebody uses f_i(x^t) as it is before training: the server's weights or mean loss; with
        losses on all data also `coefficients`, `normaliser` and the history."""
        weighs = self.uses_losses or type(self).weigh is not Method.weigh
        return weighs or self.uses_mean_loss or self.loss_data == "full"

    @property
    def looks_at_values(self) -> bool:
        """Its functions decide by values how many operations to do (a solver that iterates until it
        settles): a GPU then cannot record a round and repeat it."""
        return False

    # -- runs that differ in numbers only ------------------------------------------------------
    @property
    def numbers(self) -> dict[str, float]:
        """The fields that are real numbers: strengths and step lengths, whatever they are called.

        Runs of a grid differ in these. The functions below therefore must not branch on them."""
        found = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in found.items() if isinstance(value, float)}

    @property
    def form(self) -> tuple[object, ...]:
        """All that decides which operations a round consists of: everything but the numbers."""
        rest = [getattr(self, f) for f in self.__struct_fields__ if f not in self.numbers]
        return type(self), *rest, self.uses_curvature

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> Method:
        """The same method with tensors for numbers: values that a GPU reads when it gets there, or
        one per run under `vmap`. Unchecked; not for people."""
        other = copy.copy(self)
        for name, value in numbers.items():
            msgspec.structs.force_setattr(other, name, value)
        return other

    # -- pure functions ------------------------------------------------------------------------
    def share(self, sizes: Int64[Tensor, " n"]) -> Float64[Tensor, " n"]:
        """The plain client weights r_i, summing to one."""
        by_size = self.client_weights == "size"
        counts = sizes.double() if by_size else torch.ones_like(sizes, dtype=torch.float64)
        return counts / counts.sum()

    def initial_memory(self, clients: int) -> Memory:
        """What the server carries from round to round beside a and g."""
        return {}

    def at_round(self, t: int) -> Method:
        """The method as it acts in round t (a warm start may differ in round 0)."""
        return self

    def coefficients(
        self, loss: Float[Tensor, "*n"], mean_loss: Float[Tensor, ""]
    ) -> tuple[Tensor | float, Tensor | float]:
        """(own, shared) of a client's direction, elementwise in the loss."""
        return 1.0, 0.0

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Float64[Tensor, " m"], Memory]:
        """The server's weights w_i, and its memory for the next round."""
        return replies.share, memory

    def normaliser(
        self, replies: Replies, squared_norm: Float64[Tensor, " m"], lr: float | Tensor
    ) -> Float64[Tensor, ""] | float:
        """What Σ w_i (x − x_i) is divided by; `squared_norm` is ‖x − x_i‖²."""
        return 1.0

    def traffic(self, parameters: int, buffers: int = 0) -> Traffic:
        """Floats per client and round; buffers (batch-norm statistics) travel with the model."""
        model = parameters + buffers
        gradient = parameters * self.uses_mean_gradient
        scalar_up = int(self.uses_losses or self.uses_mean_loss)
        return Traffic(
            exchanges=2 if self.probes else 1,
            floats_down=model + gradient + int(self.uses_mean_loss),
            floats_up=model + gradient + scalar_up,
        )

    # -- for people ----------------------------------------------------------------------------
    @property
    def label(self) -> str:
        """The name in tables; exact variants carry a star."""
        return (self.title or type(self).__name__) + ("*" if self.probes else "")

    def __str__(self) -> str:
        return self.label
