"""What the server of a federation records in addition to the numbers of a run. It goes into every
checkpoint, so that a run that was interrupted has one record, from its first round on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from fairvar.deploy.guard import Refusal, counted

NAME = "federation"  # among the tables of a checkpoint
PARTS = ("train", "valid", "test")
MOST_REFUSALS = 10_000  # that are kept one by one; further ones are counted


class RoundNote(NamedTuple):
    """Who made a round: the clients in its model, those of them whose weight was cut or who sent an
    update, gradient or buffers that had to be shortened, and the keys that clients belong to since
    this round, as "client:key"."""

    round: int
    clients: list[int]
    limited: list[int]
    shortened: list[int]
    bound: tuple[str, ...] = ()


class Notes(msgspec.Struct):
    samples: dict[str, list[int]]  # by split and client, as far as they are known
    refused: list[Refusal] = msgspec.field(default_factory=list)
    rounds: list[RoundNote] = msgspec.field(default_factory=list)
    typical_loss: float = 0.0  # the largest median loss of any round
    more_refused: dict[str, int] = msgspec.field(default_factory=dict)  # beyond the list, by reason
    keys: dict[int, str] = msgspec.field(default_factory=dict)  # what each client is known by
    # The median lengths of the last rounds' updates, gradients and changes of buffers, by group.
    lengths: dict[str, list[float]] = msgspec.field(default_factory=dict)

    @staticmethod
    def reopen(tables: Mapping[str, Tensor] | None, clients: int) -> Notes:
        """Continue those of a checkpoint, or begin."""
        if tables is None or NAME not in tables:
            return Notes({part: [0] * clients for part in PARTS})
        return msgspec.json.decode(tables[NAME].numpy().tobytes(), type=Notes)

    def bind(self, keys: Mapping[int, str]) -> tuple[str, ...]:
        """Remember which key each client belongs to; returns those that are new."""
        new = {c: k for c, k in sorted(keys.items()) if self.keys.get(c) != k}
        self.keys |= new
        return tuple(f"{c}:{k}" for c, k in new.items())

    def refuse(self, refused: Sequence[Refusal]) -> None:
        room = max(0, MOST_REFUSALS - len(self.refused))
        self.refused += refused[:room]
        self.more_refused = dict(Counter(self.more_refused) + Counter(counted(refused[room:])))

    def reasons(self) -> Counter[str]:
        """How often each reason occurred."""
        return Counter(counted(self.refused)) + Counter(self.more_refused)

    def table(self) -> Tensor:
        """As bytes in a tensor: a checkpoint holds nothing else."""
        return torch.frombuffer(bytearray(msgspec.json.encode(self)), dtype=torch.uint8)
