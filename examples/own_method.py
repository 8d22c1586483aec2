"""A method of your own in one file: TERM, tilted empirical risk minimisation (Li et al. 2021).

Run it with `python examples/own_method.py`: it trains TERM and FedAvg on the embedded digits, and
then runs the contract that fairvar's own methods keep. It takes a few seconds.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

import fairvar as fv
from fairvar.methods import Memory, Method, NonNegative, Replies, register
from fairvar.testing import check_method


@register
class TERM(Method, frozen=True, tag="term"):
    """w_i ∝ exp(τ f_i(x)): the larger the tilt τ, the more the worst clients count."""

    sends: ClassVar[tuple[str, ...]] = ("model update", "loss")
    uses_losses: ClassVar[bool] = True
    fairness_knob: ClassVar[str | None] = "tau"

    tau: NonNegative = 1.0

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return torch.softmax(self.tau * replies.loss + replies.share.log(), 0), memory


if __name__ == "__main__":
    federation = fv.load_federation("digits", clients=20, partition=fv.Dirichlet(alpha=0.3))
    for method in (fv.FedAvg(), TERM(tau=1.0), TERM(tau=4.0)):
        found = fv.train("multinomial", federation, method, rounds=200, lr=0.5).fairness("test")
        print(f"{method!r}: accuracy {found.mean:.3f}, worst {found.smallest:.3f}")
    print("keeps the contract:", ", ".join(check_method(TERM(tau=0.0), TERM(tau=4.0))))
