"""Which samples a client uses in each local step: the same in every engine and on every device.

In each pass over its data a client's samples are shuffled by random keys that depend only on (seed,
round, pass, client id, position). Adding a client changes nobody else's batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from fairvar import rng
from fairvar.errors import BadInput
from fairvar.federation import Split


class Constants(NamedTuple):
    """What never changes between rounds, on the split's device: rounds then need no host."""

    counts: Int64[Tensor, " n"]
    offsets: Int64[Tensor, " n"]
    per_pass: Int64[Tensor, " n"]
    position: Int64[Tensor, " N"]  # of each sample among its client's
    order: Int64[Tensor, " n"]


class FlatStep(NamedTuple):
    """The first step of all clients without padding: where in a shuffle its samples stand."""

    place: Int64[Tensor, " b"]
    client: Int64[Tensor, " b"]
    length: Int64[Tensor, " n"]


class BlockLayout(NamedTuple):
    """The first step of all clients in blocks of one width, each of one client."""

    place: Int64[Tensor, "blocks width"]  # in a shuffle; padding repeats the client's first
    real: Bool[Tensor, "blocks width"]
    share: Float64[Tensor, "blocks width"]  # of each sample in its client's mean; 0 for padding
    client: Int64[Tensor, " blocks"]


@dataclass(frozen=True)
class Schedule:
    """Steps per client and batch sizes, fixed for a run; `round(t)` draws the samples."""

    split: Split
    batch_size: int | None
    seed: int
    steps: list[int]  # local steps of each client in a round
    passes: list[int]  # batches in one pass over the client's data
    live_keys: Int64[Tensor, " passes"] | None = None  # a captured round reads its draw from here

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

    def pads(self, step: int, clients: list[int]) -> bool:
        """Whether the batch of any of these clients is shorter than the width in this step."""
        if self.full_batch:
            return not self.even
        full = {i: int(self.split.counts[i]) // self.width for i in set(clients)}
        return any(step % self.passes[i] >= full[i] for i in clients)

    @property
    def order(self) -> list[int]:
        """Clients with the most steps first, so that those still active are always a prefix."""
        return sorted(range(len(self.steps)), key=lambda i: -self.steps[i])

    @cached_property
    def constants(self) -> Constants:
        split, device = self.split, self.split.client.device
        offsets = torch.tensor(split.offsets[:-1], device=device)
        return Constants(
            counts=split.counts.to(device),
            offsets=offsets,
            per_pass=torch.tensor(self.passes, device=device),
            position=torch.arange(len(split.client), device=device) - offsets[split.client],
            order=torch.tensor(self.order, device=device),
        )

    @cached_property
    def first(self) -> FlatStep:
        fixed = self.constants
        length = torch.clamp(fixed.counts, max=self.width)
        place = torch.nonzero(fixed.position < length[self.split.client])[:, 0]
        return FlatStep(place, self.split.client[place], length)

    def blocks(self, width: int) -> BlockLayout:
        device, fixed = self.split.client.device, self.constants
        pairs = [(i, at) for i, m in enumerate(self.lengths) for at in range(0, m, width)]
        client, start = torch.tensor(pairs, device=device).T
        position = start[:, None] + torch.arange(width, device=device)
        length = self.first.length[client][:, None]
        real = position < length
        place = fixed.offsets[client][:, None] + torch.where(real, position, 0)
        return BlockLayout(place, real, real / length.double(), client)

    def keys(self, t: int) -> list[int]:
        """The name of every shuffle of round t; none where every step sees everything."""
        if self.full_batch:
            return []
        passes = max(ceil(s / p) for s, p in zip(self.steps, self.passes, strict=True))
        return [rng.signed(rng.key(self.seed, "batch", t, number)) for number in range(passes)]

    def round(self, t: int) -> RoundBatches:
        device = self.split.client.device
        if self.full_batch:
            return RoundBatches(self, torch.arange(len(self.split.client), device=device)[None])
        keys = torch.tensor(self.keys(t), device=device) if self.live_keys is None else (
            self.live_keys)  # fmt: skip
        return RoundBatches(self, torch.stack([self._shuffle(key) for key in keys]))

    def _shuffle(self, key: Int64[Tensor, ""]) -> Int64[Tensor, " N"]:
        """All rows, still sorted by client, in this pass's random order within each client."""
        client = self.split.client
        keys = rng.sample_keys(key, client, self.constants.position)
        # One sort by (client, key): the client in the upper bits, the key's upper bits below.
        bits = len(self.steps).bit_length() + 1
        by_client = (client << (64 - bits)) + (keys >> bits) + (1 << (63 - bits))
        return torch.argsort(by_client, stable=True)


@dataclass(frozen=True)
class RoundBatches:
    """The samples of one round."""

    schedule: Schedule
    shuffled: Int64[Tensor, "passes N"]

    def rows(
        self, step: int, clients: Int64[Tensor, " k"]
    ) -> tuple[Int64[Tensor, "k width"], Bool[Tensor, "k width"]]:
        """Rows of the training split for this step, padded to one width; which of them are real."""
        schedule, device, fixed = self.schedule, self.shuffled.device, self.schedule.constants
        counts, offsets, per_pass = (v[clients] for v in fixed[:3])
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
