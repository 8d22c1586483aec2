"""What FairLoss and FairGrad share: a penalty on a variance over clients, exact or approximate."""

from __future__ import annotations

from typing import ClassVar, Literal

from msgspec.structs import replace

from fairvar.methods.base import ClientWeights, Method
from fairvar.validation import NonNegative


class Regularised(Method, frozen=True):
    """The clients measure their distance to averages a and g that the server sends.

    The approximate method takes them from the round before; the exact one (`exact`, written with a
    star) asks for them in this round, at the price of a second exchange. `warm_start` is for round
    0 of the approximate one: `zeros`, a = g = 0, as the paper writes (FairLoss's first step is then
    up to 1 + λ·ln(classes) times longer); `skip`, no penalty; `exact`, one extra exchange.
    """

    reference: ClassVar[str] = "FAIRVAR"
    fairness_knob: ClassVar[str | None] = "strength"
    uses_mean_gradient: ClassVar[bool] = True

    strength: NonNegative
    exact: bool = False
    weights: ClientWeights = "uniform"
    warm_start: Literal["zeros", "skip", "exact"] = "zeros"

    def at_round(self, t: int) -> Regularised:
        if t > 0 or self.exact or self.warm_start == "zeros":
            return self
        return (
            replace(self, strength=0.0) if self.warm_start == "skip" else replace(self, exact=True)
        )
