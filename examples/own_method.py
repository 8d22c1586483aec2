"""A method of your own in one file: DRFL, weights by powers of the loss (Zhao and Joshi 2022).

Run it with `python examples/own_method.py`: it trains DRFL and FedAvg on the embedded digits, and
then runs the contract that fairvar's own methods keep. It takes a few seconds.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

import fairvar as fv
from fairvar.methods import Memory, Method, NonNegative, Replies, register
from fairvar.testing import check_method


@register
class DRFL(Method, frozen=True, tag="drfl"):
    """w_i ∝ r_i f_i(x)^q: the larger q, the more the worst clients count."""

    sends: ClassVar[tuple[str, ...]] = ("model update", "loss")
    each_separately: ClassVar[bool] = True
    uses_losses: ClassVar[bool] = True
    fairness_knob: ClassVar[str | None] = "q"

    q: NonNegative = 1.0

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        powers = replies.share * (replies.loss + 1e-10) ** self.q
        return powers / powers.sum(), memory


if __name__ == "__main__":
    federation = fv.load_federation("digits", clients=20, partition=fv.Dirichlet(alpha=0.3))
    for method in (fv.FedAvg(), DRFL(q=1.0), DRFL(q=4.0)):
        found = fv.train("multinomial", federation, method, rounds=200, lr=0.5).fairness("test")
        print(f"{method!r}: accuracy {found.mean:.3f}, worst {found.smallest:.3f}")
    print("keeps the contract:", ", ".join(check_method(DRFL(q=0.0), DRFL(q=4.0))))
