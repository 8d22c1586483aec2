"""What the server of a federation writes down beside the numbers of a run. It goes into every
checkpoint, so that a run that was interrupted has one record, from its first round on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from fairvar.federated.guard import Refusal

NAME = "federation"  # among the tables of a checkpoint
PARTS = ("train", "valid", "test")


class RoundNote(NamedTuple):
    """Who made a round: the clients in its model, and those of them whose weight was cut or who
    sent an update, gradient or buffers that had to be shortened."""

    round: int
    clients: list[int]
    limited: list[int]
    shortened: list[int]


class Notes(msgspec.Struct):
    samples: dict[str, list[int]]  # by split and client, as far as they told
    refused: list[Refusal] = msgspec.field(default_factory=list)
    rounds: list[RoundNote] = msgspec.field(default_factory=list)
    typical_loss: float = 0.0  # the largest median loss of any round
    # The median lengths of the last rounds' updates, gradients and changes of buffers, by group.
    lengths: dict[str, list[float]] = msgspec.field(default_factory=dict)

    @staticmethod
    def reopen(tables: Mapping[str, Tensor] | None, clients: int) -> Notes:
        """Continue those of a checkpoint, or begin."""
        if tables is None or NAME not in tables:
            return Notes({part: [0] * clients for part in PARTS})
        return msgspec.json.decode(tables[NAME].numpy().tobytes(), type=Notes)

    def table(self) -> Tensor:
        """As bytes in a tensor: a checkpoint holds nothing else."""
        return torch.frombuffer(bytearray(msgspec.json.encode(self)), dtype=torch.uint8)
