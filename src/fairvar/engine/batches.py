"""Batches and sampled clients: the same for every kernel, every device and in deployments.

`Schedule` is fixed for a run; `Cohort` has the clients of one round.

Batches. In each pass over its data a client's samples are shuffled by random keys that depend only
on (seed, round, pass, client id, position). Adding a client does not change the batches of the
others. Dropout masks depend on (seed, round, step, client id, position) in the same way.

Participation. In round t the server asks `number` clients, sampled without replacement from a
random stream of its own. Those that answer are the participants S.

- Plain weights: r_i over S, summing to one there. a = Σ_S r_i f_i and g = Σ_S r_i ∇f_i estimate the
  averages over all clients. With uniform weights they are unbiased, as every client is equally
  likely to be in S; weights by size make them ratios of two unbiased sums (bias of order 1/|S|),
  since the methods' identities need weights that sum to one. If absence depends on a client's
  data, every average is biased.
- Exact methods average over the clients that answered the probe; approximate ones send the averages
  over the participants of the round before, also to clients that did not take part in it.
- Per-client memory of a method (the weights of AFL and AAggFF) is stored by client id and does not
  change while the client is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from fairvar.common import rng
from fairvar.common.tree import Inputs, map_inputs
from fairvar.data.federation import Split
from fairvar.errors import BadInput


class Batch(NamedTuple):  # a tuple, because vmap maps over tuples
    """Samples for a model. Stacked batches have the client or the block as first axis."""

    x: Inputs
    y: Tensor
    real: Tensor | None = None  # False for padding; None: nothing is padded
    keys: Tensor | None = None  # of the samples' dropout; None: the model has none

    @property
    def axes(self) -> Any:
        """`in_dims` for vmap: the first axis of every tensor."""
        axes: list[Any] = [None if part is None else 0 for part in self]
        return Batch(*axes)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        x, *rest = self
        found: list[Any] = [None if part is None else function(part) for part in rest]
        return Batch(map_inputs(function, x), *found)


@dataclass(frozen=True)
class Participation:
    """Samples the clients of each round; all clients if `number` is their number."""

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
        """The largest `number` of these numbers of samples: the most costly round."""
        return lengths if self.everyone else sorted(lengths)[-self.number :]

    def of_round(self, t: int, attempt: int = 0) -> Int64[Tensor, " m"]:
        """The sampled ids, rising; each further attempt at a round samples anew."""
        if self.everyone:
            return torch.arange(self.clients)
        again = (attempt,) if attempt else ()
        draw = rng.stream(self.seed, "participants", t, *again)
        drawn = draw.choice(self.clients, self.number, replace=False)
        return torch.from_numpy(drawn).sort().values


class Constants(NamedTuple):
    """Constants of all rounds on the split's device, so that rounds copy nothing from the host."""

    counts: Int64[Tensor, " n"]
    offsets: Int64[Tensor, " n"]
    per_pass: Int64[Tensor, " n"]
    position: Int64[Tensor, " N"]  # of each sample among its client's


@dataclass(frozen=True)
class Schedule:
    """Steps per client and batch sizes, fixed for a run; `round(t)` draws the samples."""

    split: Split
    batch_size: int | None
    seed: int
    steps: list[int]  # local steps of each client in a round
    passes: list[int]  # batches in one pass over the client's data
    dropout: bool = False  # the model has dropout
    live_keys: Int64[Tensor, " passes"] | None = None  # a captured round reads its keys from here

    @staticmethod
    def build(
        split: Split,
        batch_size: int | None,
        local_steps: int,
        local_epochs: int | None,
        seed: int,
        batch_norm: bool,
        drop_last: bool = False,
        dropout: bool = False,
    ) -> Schedule:
        sizes = split.counts.tolist()
        if batch_norm:
            _check_batch_norm(sizes, batch_size)
        # One sample has no variance: batch norm cannot train on it (FL-bench drops it as well).
        least = 2 if batch_norm else 1
        least = batch_size if drop_last and batch_size is not None else least
        passes = [_batches_per_pass(size, batch_size, least) for size in sizes]
        if local_epochs is None:
            steps = [local_steps] * len(sizes)
        else:
            steps = [local_epochs * batches for batches in passes]
        return Schedule(split, batch_size, seed, steps, passes, dropout)

    @property
    def one_step(self) -> bool:
        return max(self.steps) == 1

    @cached_property
    def sizes(self) -> list[int]:
        """Training samples of each client, for Python."""
        return self.split.counts.tolist()

    @cached_property
    def largest(self) -> int:
        return max(self.sizes)

    @cached_property
    def full_batch(self) -> bool:
        """Whether every step takes all of the client's samples."""
        return self.batch_size is None or self.batch_size >= self.largest

    @cached_property
    def width(self) -> int:
        """Length of a padded batch. Fixed for the run: another padding, other rounding."""
        return self.largest if self.batch_size is None else min(self.batch_size, self.largest)

    @cached_property
    def lengths(self) -> list[int]:
        """Samples in each client's first step."""
        return [min(size, self.width) for size in self.sizes]

    @cached_property
    def even(self) -> bool:
        """All clients' first batches have one length: nothing is padded."""
        return min(self.lengths) == self.width

    def pads(self, step: int, clients: list[int]) -> bool:
        """Whether the batch of any of these clients is shorter than the width in this step."""
        if self.full_batch:
            return not self.even
        return any(step % self.passes[i] >= self.sizes[i] // self.width for i in clients)

    @cached_property
    def constants(self) -> Constants:
        split, device = self.split, self.split.device
        offsets = torch.tensor(split.offsets[:-1], device=device)
        return Constants(
            counts=split.counts.to(device),
            offsets=offsets,
            per_pass=torch.tensor(self.passes, device=device),
            position=torch.arange(len(split.y), device=device) - offsets[split.client],
        )

    @cached_property
    def everyone(self) -> Cohort:
        known = list(range(len(self.steps)))
        return Cohort(self, torch.arange(len(known), device=self.split.device), known)

    def keys(self, t: int) -> list[int]:
        """The random key of every shuffle of round t (none with full batches), then that of dropout
        if the model has dropout."""
        passes = max(ceil(s / p) for s, p in zip(self.steps, self.passes, strict=True))
        keys = [rng.key(self.seed, "batch", t, n) for n in range(0 if self.full_batch else passes)]
        keys += [rng.key(self.seed, "dropout", t)] if self.dropout else []
        return [rng.signed(key) for key in keys]

    def round(self, t: int) -> RoundBatches:
        """The samples of all clients."""
        return self.everyone.round(t)


class Slots(NamedTuple):
    """All samples of a cohort, place after place, in the order before shuffling."""

    place: Int64[Tensor, " s"]
    client: Int64[Tensor, " s"]  # its id
    position: Int64[Tensor, " s"]  # of each sample among its client's
    row: Int64[Tensor, " s"]  # in the training split; padding repeats the client's first
    real: Bool[Tensor, " s"] | None  # None: nothing is padded
    start: Int64[Tensor, " m"]  # the first slot of each place


class Padded(NamedTuple):
    """Ranges of consecutive samples as rows of one width: the padded layout."""

    slot: Int64[Tensor, "rows width"]  # of each sample; padding repeats the first of its row
    real: Bool[Tensor, "rows width"]

    @staticmethod
    def build(start: Int64[Tensor, " rows"], length: Int64[Tensor, " rows"], width: int) -> Padded:
        column = torch.arange(width, device=start.device)
        real = column < length[:, None]
        return Padded(start[:, None] + torch.where(real, column, 0), real)


class Blocks(NamedTuple):
    """The first step of a cohort in blocks of one width, each of one client. With width one, a
    block is a sample and nothing is padded; with the width of a batch, a block is a client."""

    rows: Padded  # of a shuffle
    share: Float64[Tensor, "blocks width"]  # of each sample in its client's mean; 0 for padding
    place: Int64[Tensor, " blocks"]


@dataclass(frozen=True)
class Cohort:
    """The clients of a round in places 0 … m − 1: all clients, or the sampled ones.

    In a captured round their ids are on the device only (`known` is None), and shapes must not
    depend on them: all clients then take the same number of steps on equally many samples
    (`Run.shapes_stay`), and each place has as many slots as the largest client has samples.
    """

    schedule: Schedule
    ids: Int64[Tensor, " m"]
    known: list[int] | None  # the ids on the host

    @property
    def everyone(self) -> bool:
        return len(self.ids) == len(self.schedule.steps)

    @cached_property
    def steps(self) -> list[int]:
        """Local steps of each place in a round."""
        return self._by_place(self.schedule.steps, self.schedule.steps[0])

    @cached_property
    def order(self) -> list[int]:
        """Places with the most steps first, so that the active places are always a prefix."""
        return sorted(range(len(self.ids)), key=lambda place: -self.steps[place])

    @cached_property
    def order_on_device(self) -> Int64[Tensor, " m"]:
        if len(set(self.steps)) == 1:
            return self.places
        return torch.tensor(self.order, device=self.ids.device)

    @cached_property
    def places(self) -> Int64[Tensor, " m"]:
        return torch.arange(len(self.ids), device=self.ids.device)

    @cached_property
    def counts(self) -> Int64[Tensor, " m"]:
        return self._on_device(self.schedule.constants.counts)

    @cached_property
    def per_pass(self) -> Int64[Tensor, " m"]:
        return self._on_device(self.schedule.constants.per_pass)

    @cached_property
    def slots(self) -> Slots:
        schedule = self.schedule
        sizes = self._by_place(schedule.sizes, schedule.largest)
        place, position = _spans(sizes, self.ids.device)
        first_row = self._on_device(schedule.constants.offsets)
        client = place if self.everyone else self.ids[place]
        if self.known is not None:
            start = torch.cumsum(self.counts, 0) - self.counts
            return Slots(place, client, position, first_row[place] + position, None, start)
        row, real = (v.flatten() for v in Padded.build(first_row, self.counts, sizes[0]))
        return Slots(place, client, position, row, real, self.places * sizes[0])

    @cached_property
    def _made(self) -> dict[int, Blocks]:
        return {}

    def blocks(self, width: int) -> Blocks:
        """The first step cut into blocks of this width."""
        if width not in self._made:
            self._made[width] = self._cut(width)
        return self._made[width]

    def _cut(self, width: int) -> Blocks:
        lengths = self._by_place(self.schedule.lengths, self.schedule.width)
        cut = [-(-length // width) for length in lengths]
        place, number = _spans(cut, self.ids.device)
        length, done = self.counts.clamp(max=self.schedule.width)[place], number * width
        rows = Padded.build(self.slots.start[place] + done, length - done, width)
        return Blocks(rows, rows.real / length.double()[:, None], place)

    def pads(self, step: int, places: list[int]) -> bool:
        """Whether the batch of any of these places is shorter than the width in this step."""
        if self.known is None:
            return self.schedule.pads(step, list(range(len(self.schedule.steps))))
        return self.schedule.pads(step, [self.known[place] for place in places])

    def round(self, t: int) -> RoundBatches:
        """The samples of round t."""
        schedule, device = self.schedule, self.ids.device
        if schedule.full_batch and not schedule.dropout:
            return RoundBatches(self, self.slots.row[None])
        live, of_samples = schedule.live_keys, None
        keys = torch.tensor(schedule.keys(t), device=device) if live is None else live
        if schedule.dropout:
            client, position = schedule.split.client, schedule.constants.position
            of_samples = rng.sample_keys(keys[-1], client, position)
            keys = keys[:-1]
        if schedule.full_batch:
            return RoundBatches(self, self.slots.row[None], of_samples)
        return RoundBatches(self, torch.stack([self._shuffle(key) for key in keys]), of_samples)

    def _shuffle(self, key: Int64[Tensor, ""]) -> Int64[Tensor, " s"]:
        """All rows, still sorted by place, in this pass's random order within each client."""
        slots = self.slots
        keys = rng.sample_keys(key, slots.client, slots.position)
        if slots.real is not None:  # padding goes to the end of its client's slots
            keys = torch.where(slots.real, keys, torch.iinfo(torch.int64).max)
        # One sort by (place, key): the place in the upper bits, the key's upper bits below.
        bits = len(self.schedule.steps).bit_length() + 1
        by_place = (slots.place << (64 - bits)) + (keys >> bits) + (1 << (63 - bits))
        order = torch.argsort(by_place, stable=True)
        return order if self.everyone else slots.row[order]

    def _by_place(self, by_client: list[int], unknown: int) -> list[int]:
        known = self.known
        return [unknown] * len(self.ids) if known is None else [by_client[i] for i in known]

    def _on_device(self, by_client: Int64[Tensor, " n"]) -> Int64[Tensor, " m"]:
        return by_client if self.everyone else by_client[self.ids]


@dataclass(frozen=True)
class RoundBatches:
    """The samples of one round."""

    cohort: Cohort
    shuffled: Int64[Tensor, "passes s"]  # rows of the training split, slot by slot
    keys: Int64[Tensor, " N"] | None = None  # of each sample of that split, for dropout

    def rows(self, step: int, places: Int64[Tensor, " k"]) -> Padded:
        """Rows of the training split for this step, padded to one width."""
        cohort, schedule = self.cohort, self.cohort.schedule
        counts, first = cohort.counts[places], cohort.slots.start[places]
        number = done = torch.zeros_like(counts)
        if not schedule.full_batch:
            per_pass = cohort.per_pass[places]
            number, done = step // per_pass, (step % per_pass) * schedule.width
        slot, real = Padded.build(first + done, counts - done, schedule.width)
        return Padded(self.shuffled[number[:, None], slot], real)

    def take(self, rows: Int64[Tensor, " *shape"], step: int, real: Tensor | None = None) -> Batch:
        """The batch of these samples, with the dropout keys of this step."""
        return Batch(*self.cohort.schedule.split.take(rows), real, self.dropout(rows, step))

    def dropout(self, rows: Int64[Tensor, " *shape"], step: int) -> Int64[Tensor, " *shape"] | None:
        """The samples' keys in this step."""
        return None if self.keys is None else rng.numbered(self.keys[rows], step)


def _spans(
    lengths: list[int], device: torch.device
) -> tuple[Int64[Tensor, " s"], Int64[Tensor, " s"]]:
    """Owner and index of each element: lengths 3 and 2 give 0 0 0 1 1 and 0 1 2 0 1."""
    if len(set(lengths)) == 1:  # nothing to fetch from the host
        number = torch.arange(len(lengths) * lengths[0], device=device)
        return number // lengths[0], number % lengths[0]
    length = torch.tensor(lengths)
    owner = torch.repeat_interleave(length)
    start = torch.cumsum(length, 0) - length
    return owner.to(device), (torch.arange(len(owner)) - start[owner]).to(device)


def _batches_per_pass(size: int, batch_size: int | None, least: int) -> int:
    """Number of batches of at least `least` samples; a smaller client has one batch of all."""
    if batch_size is None or batch_size >= size:
        return 1
    full, rest = divmod(size, batch_size)
    return full + (rest >= least)


def _check_batch_norm(sizes: list[int], batch_size: int | None) -> None:
    if batch_size == 1:
        raise BadInput("batch_size = 1 cannot train a model with batch norm; use 2 or more")
    if 1 in sizes:
        raise BadInput(
            f"client {sizes.index(1)} has one training sample, too few for batch norm; raise the "
            "partition's min_samples to 2 or use a model without batch norm"
        )
