"""Who takes part in a round, and what averages over some of the clients mean.

In round t the server asks `number` clients, drawn without replacement from a stream of its own, so
that every engine and a federation ask the same ones. Those that answer are the participants S.

- Plain weights: r_i over S, summing to one there. a = Σ_S r_i f_i and g = Σ_S r_i ∇f_i estimate the
  averages over all clients. With uniform weights they are unbiased, as every client is equally
  likely to be in S; weights by size make them ratios of two unbiased sums (bias of order 1/|S|),
  since weights that sum to one are what the methods' identities need. Clients that stay away for
  a reason that has to do with their data bias any average.
- Exact methods average over those that answered the probe; approximate ones carry the averages of
  the participants of the round before, also to clients that were not there.
- What a method remembers of a client (AFL's and AAggFF's weights) belongs to the client's id, and
  waits there while the client is away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from fairvar import rng
from fairvar.errors import BadInput


@dataclass(frozen=True)
class Participation:
    """Draws the clients of each round; everyone if `number` is the number of clients."""

    clients: int
    number: int
    seed: int
    live: Int64[Tensor, " m"] | None = None  # a captured round reads its participants from here

    @staticmethod
    def build(
        clients: int, seed: int, share: float | None = None, number: int | None = None
    ) -> Participation:
        """A share of the clients (rounded, at least one) or their number; neither: all of them."""
        if number is None:
            number = max(1, round((1.0 if share is None else share) * clients))
        if number > clients:
            raise BadInput(f"{number} participants per round, but there are {clients} clients")
        return Participation(clients, number, seed)

    @property
    def everyone(self) -> bool:
        return self.number == self.clients

    def largest(self, lengths: list[int]) -> list[int]:
        """Of these numbers of samples, those of the most costly draw."""
        return lengths if self.everyone else sorted(lengths)[-self.number :]

    def of_round(self, t: int, attempt: int = 0) -> Int64[Tensor, " m"]:
        """The ids to ask, rising; another draw for each further attempt at the same round."""
        if self.everyone:
            return torch.arange(self.clients)
        again = (attempt,) if attempt else ()
        draw = rng.stream(self.seed, "participants", t, *again)
        drawn = draw.choice(self.clients, self.number, replace=False)
        return torch.from_numpy(drawn).sort().values
