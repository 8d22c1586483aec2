"""FedAvg (McMahan et al. 2017)."""

from __future__ import annotations

from typing import ClassVar

from fairvar.methods.base import ClientWeights, Method


class FedAvg(Method, frozen=True, tag="fedavg"):
    """x ← Σ_i r_i x_i, x_i = x − η ∇f_i(x)

    The paper weights clients uniformly; FL-bench and others by their number of samples.
    """

    reference: ClassVar[str] = "McMahan et al. 2017"
    when: ClassVar[str] = "the baseline; run it in every comparison"

    weights: ClientWeights = "uniform"
