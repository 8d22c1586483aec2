"""`Method`: a frozen value with hyper-parameters and a few pure functions on tensors.

Every method of the paper fits one round:

    client  d_i = own_i ∇f_i + shared_i g + γ ∇²f_i (∇f_i − g) + pull (x_i − x),   x_i ← x_i − η d_i
    server  x ← x − Σ_i w_i (x − x_i) / normaliser − κ η g

A method overrides what differs from FedAvg: `coefficients` (own, shared) from the client's loss,
`curvature` γ, `pull` towards the global model, `weigh` for the server's weights w, and which
averages (a = mean loss, g = mean gradient) it needs. Reference loop, vectorised engine and
deployment all run these functions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import msgspec
import torch
from jaxtyping import Float, Float64, Int64
from msgspec.structs import replace
from torch import Tensor

from fairvar.common.tree import Tree
from fairvar.common.validation import Checked, NonNegative, Positive

ClientWeights = Literal["uniform", "size"]
LossData = Literal["batch", "full"]
Memory = dict[str, Tensor]


class Replies(NamedTuple):
    """The input of `weigh`, over the m clients that answered (of `clients`)."""

    loss: Float64[Tensor, " m"]  # f_i(x^t)
    share: Float64[Tensor, " m"]  # the plain weights r_i, summing to one
    ids: Int64[Tensor, " m"]
    clients: int  # of the federation
    gram: Float64[Tensor, "m m"] | None = None  # ⟨x − x_i, x − x_j⟩, for methods that use it


class Traffic(NamedTuple):
    """Floats between the server and one client in one round."""

    exchanges: int
    floats_down: int
    floats_up: int


class Personal(NamedTuple):
    """How a client trains its personal model v_i: by the local steps of `method` on the round's
    batches, with the proximal term to the received x^t, starting from v_i."""

    method: Method
    lr: float | Tensor | None = None  # None: that of the shared model
    steps: int | None = None  # in a round; None: as many as the shared model's


class Method(Checked, frozen=True, tag_field="name"):
    """Base of all methods; by itself it is FedAvg with uniform weights.

    Third-party methods subclass it, override what differs and call `fairvar.register`. Fields of
    these names mean the same in every method that has them: `exact`, `weights` and `losses`.
    """

    title: ClassVar[str] = ""  # as papers write it; the class name by default
    reference: ClassVar[str] = ""  # the paper, for `fairvar methods`
    when: ClassVar[str] = ""  # in one line, when to choose it
    sends: ClassVar[tuple[str, ...]] = ("model update",)  # what a client computes and sends
    each_separately: ClassVar[bool] = False  # sums over clients are not enough for the server
    fairness_knob: ClassVar[str | None] = None  # the field that trades accuracy for fairness
    version: ClassVar[int] = 1  # increased when the results of a built-in method change

    uses_mean_loss: ClassVar[bool] = False  # the server broadcasts a = Σ r_i f_i
    uses_mean_gradient: ClassVar[bool] = False  # … and g = Σ r_i ∇f_i
    uses_losses: ClassVar[bool] = False  # the server's weights depend on the clients' losses
    uses_norms: ClassVar[bool] = False  # `normaliser` depends on the norms of the updates
    uses_gram: ClassVar[bool] = False  # `weigh` depends on the products of the updates

    @property
    def reveals(self) -> tuple[str, ...]:
        """What the server receives from a client."""
        by_size = self.client_weights == "size"
        return (*self.sends, "number of samples") if by_size else self.sends

    @property
    def sums_suffice(self) -> bool:
        """Whether sums over clients are enough for the server, as in secure aggregation."""
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
    def averages_gradients(self) -> bool:
        """The server sends a moving average of mean gradients over rounds (`ema`)."""
        return getattr(self, "ema", None) is not None

    @property
    def keeps_gradient(self) -> bool:
        """Whether the server keeps g for the next round."""
        return self.reports_gradient or self.averages_gradients

    @property
    def penalises_some(self) -> bool:
        """Only some parameters are part of the curvature term (`only`)."""
        return getattr(self, "only", None) is not None

    @property
    def client_weights(self) -> ClientWeights:
        """r_i = 1/n, or proportional to the number of training samples."""
        return getattr(self, "weights", "uniform")

    @property
    def shared(self) -> Method:
        """The method that trains the shared model; another one where clients also train personal
        models."""
        return self

    @property
    def personal(self) -> Personal | None:
        """How clients train personal models, which they keep; None: there are none."""
        return None

    @property
    def reported_model(self) -> str:
        """The model whose scores are reported and used for selection."""
        return "global" if self.personal is None else "personal"

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
    def pull(self) -> float | Tensor:
        """Of the proximal term pull (x_i − x), which is zero in the first local step."""
        return 0.0

    @property
    def uses_pull(self) -> bool:
        return isinstance(self.pull, Tensor) or self.pull != 0

    @property
    def penalty_bound(self) -> float | Tensor | None:
        """b, where ‖d_i − ∇f_i‖ ≤ b ‖∇f_i‖ is kept by shortening d_i − ∇f_i; None: no bound."""
        return getattr(self, "bound", None)

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
        """Its weights and coefficients do not depend on the losses."""
        kind = type(self)
        return kind.weigh is Method.weigh and kind.coefficients is Method.coefficients

    @property
    def broadcasts_means(self) -> bool:
        """The server sends plain means, and takes no step along g itself."""
        kind = type(self)
        return kind.broadcast is Method.broadcast and kind.server_term is Method.server_term

    @property
    def needs_losses(self) -> bool:
        """Whether f_i(x^t) before training is used: by the server's weights or mean loss; with
        losses on all data also by `coefficients`, `normaliser` and the history."""
        weighs = self.uses_losses or (type(self).weigh is not Method.weigh and not self.uses_gram)
        return weighs or self.uses_mean_loss or self.loss_data == "full"

    @property
    def looks_at_values(self) -> bool:
        """The number of operations depends on values (as in a solver that iterates to convergence),
        so a round cannot be recorded as a CUDA graph."""
        return False

    # -- runs that differ in numbers only ------------------------------------------------------
    @property
    def numbers(self) -> dict[str, float]:
        """The fields that are floats, such as strengths and step lengths; of a captured round they
        are tensors.

        Runs of a grid differ in these, so the functions below must not branch on them."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        names = [name for name, value in fields.items() if isinstance(value, float | Tensor)]
        return {name: fields[name] for name in names}

    @property
    def form(self) -> tuple[object, ...]:
        """Everything that decides the operations of a round: the class and all other fields."""
        numbers = self.numbers
        rest = [getattr(self, f) for f in self.__struct_fields__ if f not in numbers]
        return type(self), *rest, self.uses_curvature, self.uses_pull

    def with_numbers(self, numbers: Mapping[str, float | Tensor]) -> Method:
        """The same method with tensors as numbers: of a captured round, or one per run under
        `vmap`. Internal; skips validation."""
        other = copy.copy(self)
        for name, value in numbers.items():
            msgspec.structs.force_setattr(other, name, value)
        return other

    # -- pure functions ------------------------------------------------------------------------
    def plain_weights(self, sizes: Int64[Tensor, " n"]) -> Float64[Tensor, " n"]:
        """The plain client weights r_i, summing to one."""
        by_size = self.client_weights == "size"
        counts = sizes.double() if by_size else torch.ones_like(sizes, dtype=torch.float64)
        return counts / counts.sum()

    def initial_memory(self, clients: int) -> Memory:
        """The server's memory between rounds, in addition to a and g."""
        return {}

    def check_memory(self, memory: Memory) -> None:
        """Raise `RunFailed` if the memory is invalid. Called after every evaluated round, because a
        recorded round cannot raise; leaves may have a leading axis of runs."""

    def at_round(self, t: int) -> Method:
        """The method as it acts in round t (a warm start may differ in round 0)."""
        return self

    def smoothed(self, before: Tree | None, fresh: Tree) -> Tree:
        """g, from the previous round's g and this round's mean gradient."""
        return fresh

    def penalised(self, away: Tree) -> Tree:
        """The part of ∇f_i − g that the curvature term contains (leaves may have a client axis)."""
        return away

    def check_parameters(self, params: Tree) -> None:
        """Raise `BadInput` where the method cannot train a model with these parameters."""

    def coefficients(
        self, loss: Float[Tensor, "*n"], mean_loss: Float[Tensor, ""]
    ) -> tuple[Tensor | float, Tensor | float]:
        """(own, shared) of a client's direction, elementwise in the loss."""
        return 1.0, 0.0

    def broadcast(self, replies: Replies) -> tuple[Float64[Tensor, ""], Float64[Tensor, " m"]]:
        """Of exact methods, before training: a for `coefficients`, and the weights of the clients'
        gradients in g. By default a = Σ r_i f_i, and r."""
        return replies.share @ replies.loss, replies.share

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Float64[Tensor, " m"], Memory]:
        """The server's weights w_i, and its memory for the next round."""
        return replies.share, memory

    def normaliser(
        self, replies: Replies, squared_norm: Float64[Tensor, " m"], lr: float | Tensor
    ) -> Float64[Tensor, ""] | float:
        """What Σ w_i (x − x_i) is divided by; `squared_norm` is ‖x − x_i‖²."""
        return 1.0

    def server_term(self, replies: Replies) -> Float64[Tensor, ""] | float:
        """κ of exact methods: the server adds the step κ η g."""
        return 0.0

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

    # -- in tables ----------------------------------------------------------------------------
    @property
    def label(self) -> str:
        """The name in tables; exact variants carry a star."""
        return (self.title or type(self).__name__) + ("*" if self.probes else "")

    def __str__(self) -> str:
        return self.label


class Regularised(Method, frozen=True):
    """A penalty on a variance over clients, which FairLoss and FairGrad share.

    The clients measure their distance to averages a and g that the server sends. The approximate
    method takes them from the round before; the exact one (`exact`, written with a star) asks for
    them in this round, at the price of a second exchange. `warm_start` is for round 0 of the
    approximate one: `zeros`, a = g = 0, as the paper writes (FairLoss's first step is then up to
    1 + λ·ln(classes) times longer); `skip`, no penalty; `exact`, one extra exchange.

    `bound` b is not part of the paper: a client shortens its penalty p_i = d_i − ∇f_i to the length
    b ‖∇f_i‖ where it is longer, so that no direction is longer than (1 + b) ‖∇f_i‖.
    """

    reference: ClassVar[str] = "FAIRVAR"
    fairness_knob: ClassVar[str | None] = "strength"
    uses_mean_gradient: ClassVar[bool] = True

    strength: NonNegative
    exact: bool = False
    weights: ClientWeights = "uniform"
    warm_start: Literal["zeros", "skip", "exact"] = "zeros"
    bound: Positive | None = None

    def at_round(self, t: int) -> Regularised:
        if t > 0 or self.exact or self.warm_start == "zeros":
            return self
        skips = self.warm_start == "skip"
        return replace(self, strength=0.0) if skips else replace(self, exact=True)
