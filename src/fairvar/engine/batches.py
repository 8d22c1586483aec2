"""Which samples a client uses in each local step: the same in every engine and on every device.

In each pass over its data a client's samples are shuffled by random keys that depend only on (seed,
round, pass, client id, position). Adding a client changes nobody else's batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from fairvar import rng
from fairvar.errors import BadInput
from fairvar.federation import Split


@dataclass(frozen=True)
class Schedule:
    """Steps per client and batch sizes, fixed for a run; `round(t)` draws the samples."""

    split: Split
    batch_size: int | None
    seed: int
    steps: list[int]  # local steps of each client in a round
    passes: list[int]  # batches in one pass over the client's data

    @staticmethod
    def build(
        split: Split,
        batch_size: int | None,
        local_steps: int,
        local_epochs: int | None,
        seed: int,
        batch_norm: bool,
    ) -> Schedule:
        sizes = split.counts.tolist()
        if batch_norm:
            _check_batch_norm(sizes, batch_size)
        passes = [_batches_per_pass(size, batch_size, batch_norm) for size in sizes]
        if local_epochs is None:
            steps = [local_steps] * len(sizes)
        else:
            steps = [local_epochs * batches for batches in passes]
        return Schedule(split, batch_size, seed, steps, passes)

    @property
    def one_step(self) -> bool:
        return max(self.steps) == 1

    @property
    def full_batch(self) -> bool:
        """Every step sees all of the client's samples."""
        return self.batch_size is None or self.batch_size >= int(self.split.counts.max())

    @property
    def width(self) -> int:
        """Length of a padded batch. Fixed for the run: another padding, other rounding."""
        largest = int(self.split.counts.max())
        return largest if self.batch_size is None else min(self.batch_size, largest)

    @property
    def lengths(self) -> list[int]:
        """Samples in each client's first step."""
        return [min(size, self.width) for size in self.split.counts.tolist()]

    @property
    def even(self) -> bool:
        """All clients' first batches have one length: nothing is padded."""
        return min(self.lengths) == self.width

    @property
    def order(self) -> list[int]:
        """Clients with the most steps first, so that those still active are always a prefix."""
        return sorted(range(len(self.steps)), key=lambda i: -self.steps[i])

    def round(self, t: int) -> RoundBatches:
        if self.full_batch:
            shuffled = torch.arange(len(self.split.y), device=self.split.x.device)[None]
        else:
            passes = max(ceil(s / p) for s, p in zip(self.steps, self.passes, strict=True))
            shuffled = torch.stack([self._shuffle(t, number) for number in range(passes)])
        return RoundBatches(self, shuffled)

    def _shuffle(self, t: int, number: int) -> Int64[Tensor, " N"]:
        """All rows, still sorted by client, in this pass's random order within each client."""
        client = self.split.client
        offsets = torch.tensor(self.split.offsets, device=client.device)
        position = torch.arange(len(client), device=client.device) - offsets[client]
        keys = rng.sample_keys(rng.key(self.seed, "batch", t, number), client, position)
        by_key = torch.argsort(keys, stable=True)
        return by_key[torch.argsort(client[by_key], stable=True)]


@dataclass(frozen=True)
class RoundBatches:
    """The samples of one round."""

    schedule: Schedule
    shuffled: Int64[Tensor, "passes N"]

    def rows(
        self, step: int, clients: Int64[Tensor, " k"]
    ) -> tuple[Int64[Tensor, "k width"], Bool[Tensor, "k width"]]:
        """Rows of the training split for this step, padded to one width; which of them are real."""
        schedule, device = self.schedule, self.shuffled.device
        counts = schedule.split.counts.to(device)[clients]
        offsets = torch.tensor(schedule.split.offsets, device=device)[clients]
        per_pass = torch.tensor(schedule.passes, device=device)[clients]
        size = schedule.width
        start = (step % per_pass) * size if not schedule.full_batch else torch.zeros_like(counts)
        number = step // per_pass if not schedule.full_batch else torch.zeros_like(counts)
        length = torch.clamp(counts - start, max=size)
        column = torch.arange(size, device=device)
        real = column < length[:, None]
        place = (offsets + start)[:, None] + torch.where(real, column, 0)
        return self.shuffled[number[:, None], place], real


def _batches_per_pass(size: int, batch_size: int | None, batch_norm: bool) -> int:
    if batch_size is None or batch_size >= size:
        return 1
    full, rest = divmod(size, batch_size)
    # One sample has no variance: batch norm cannot train on it (FL-bench drops it as well).
    return full + (rest > (1 if batch_norm else 0))


def _check_batch_norm(sizes: list[int], batch_size: int | None) -> None:
    if batch_size == 1:
        raise BadInput("batch_size = 1 cannot train a model with batch norm; use 2 or more")
    if 1 in sizes:
        raise BadInput(
            f"client {sizes.index(1)} has one training sample, too few for batch norm; raise the "
            "partition's min_samples to 2 or use a model without batch norm"
        )
