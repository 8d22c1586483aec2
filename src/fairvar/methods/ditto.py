"""Ditto (Li et al. 2021)."""

from __future__ import annotations

from typing import ClassVar

from fairvar.common.validation import Count, NonNegative, Positive
from fairvar.methods.base import ClientWeights, Method, Personal
from fairvar.methods.fedavg import FedAvg
from fairvar.methods.fedprox import FedProx


class Ditto(Method, frozen=True, tag="ditto"):
    """min_v f_i(v) + λ/2 ‖v − x‖² for every client i, x that of FedAvg,   λ = pull

        v_i ← v_i − η_v (∇f_i(v_i) + λ (v_i − x^t)),     v_i^0 = x^0
        y_i ← y_i − η ∇f_i(y_i) from y_i = x^t,          x^{t+1} = Σ_i r_i y_i

    Both models of a client step on the same batches. The anchor is the x^t that the client has
    received; it stays fixed during the round. v_i never leaves the client, and does not change in
    rounds without it. Fairness is about the personal models v_i. λ = 0 is local training.
    """

    reference: ClassVar[str] = "Li, Hu, Beirami, Smith 2021"
    when: ClassVar[str] = "clients may keep models of their own; secure aggregation; twice the work"
    fairness_knob: ClassVar[str | None] = "pull"

    pull: NonNegative = 1.0
    personal_lr: Positive | None = None  # η_v; None: η
    personal_steps: Count | None = None  # in a round; None: as many as of the shared model
    weights: ClientWeights = "uniform"

    @property
    def shared(self) -> Method:
        return FedAvg(self.weights)

    @property
    def personal(self) -> Personal:
        # `with_numbers`: in a captured round λ is a tensor.
        return Personal(
            FedProx().with_numbers({"pull": self.pull}), self.personal_lr, self.personal_steps
        )
