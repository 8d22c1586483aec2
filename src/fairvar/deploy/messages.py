"""What travels between server and client: arrays by name and a few numbers, nothing else.

| exchange | down | up |
|---|---|---|
| probe | x, buffers | ∇f_i(x), f_i(x) where the method uses losses; buffers if the server steps |
| train | x, buffers, a and g where the method uses them | x_i, buffers, f_i and ∇f_i as asked for |
| evaluate | x, buffers | loss and accuracy of x on the client's held-out samples |

A request is stamped with its round, the attempt at that round and the exchange; a reply carries the
same stamp, so that an answer to an older question is never taken for one to this. The exchanges
share no memory on the client: each request holds all that its answer needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fairvar.methods.base import Method
from fairvar.tree import Tree

FORMAT = 1  # raise it when a message changes its meaning; both sides must have the same
Exchange = Literal["probe", "train", "evaluate"]
Number = int | float
MODEL, BUFFERS, GRADIENT = "x", "buffer", "g"  # groups of arrays: "x/weight"
MEAN_LOSS, LOSS, SAMPLES, ACCURACY = "a", "loss", "samples", "accuracy"  # numbers; "test/loss"
SCORE = "score"  # a number in train requests: 1 asks for scores of the client's own model


class Stamp(NamedTuple):
    """Which question a message asks or answers."""

    exchange: Exchange
    round: int
    attempt: int = 0
    format: int = FORMAT


@dataclass(frozen=True)
class Message:
    """To `client`, or from it. `numbers` are plain Python ones and travel exactly."""

    stamp: Stamp
    client: int
    arrays: Tree = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)

    def group(self, name: str) -> Tree:
        """The arrays of one group, by their own names."""
        mark = f"{name}/"
        return {k.removeprefix(mark): v for k, v in self.arrays.items() if k.startswith(mark)}


def grouped(**groups: Tree | None) -> Tree:
    """Trees side by side in one flat dict, each under its group's name."""
    return {f"{g}/{k}": v for g, tree in groups.items() for k, v in (tree or {}).items()}


def sends_loss(method: Method) -> bool:
    """Whether a client tells its loss: only where the method cannot do without."""
    return method.uses_losses or method.uses_mean_loss
