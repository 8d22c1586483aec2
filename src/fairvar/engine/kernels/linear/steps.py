"""Several local steps of an affine model in the dual: each step touches its own samples only.

A client's model is x − η (X̃_iᵀ A_i + c_i g), and its logits on a batch b are
Z_b − η (K_i[b, :] A_i + c_i U_b): after one large product for Z and one for U, all steps are small
products with Gram matrices.

Directions of the clients of an affine model in the dual: d_i = X̃_iᵀ along_i + shared_i g.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from fairvar.common.tree import Tree
from fairvar.engine.batches import RoundBatches, Schedule
from fairvar.engine.kernels.linear.dual import (
    Columns,
    Layout,
    Target,
    Tile,
    answer,
    by_client,
    hessian_of_logits,
    through_grams,
)
from fairvar.engine.kernels.one_step import shortened, shortening
from fairvar.engine.server import Aggregator


class Averages(NamedTuple):
    """What the clients receive with x^t."""

    mean_loss: Float64[Tensor, " runs"]
    has_g: bool  # g is used, though it may be None here (`_receive`)
    g: Tree | None = None
    u: Float[Tensor, "runs outputs P"] | None = None  # X̃ g, if products with g are needed
    squared_g: Float64[Tensor, "runs 1"] | None = None  # ‖g‖², if directions are clipped or bounded


class Slopes(NamedTuple):
    """Gradients and second derivatives of the clients of a layout in one step."""

    layout: Layout
    slope: Float[Tensor, "runs outputs P"]  # ∇f_i = X̃_iᵀ slope_i
    p: Float[Tensor, "runs outputs P"] | None  # for the second derivative of the loss
    u: Float[Tensor, "runs outputs P"] | None
    grams: Callable[[], list[Tensor]]  # K_i, computed only if needed


class Direction(NamedTuple):
    along: Float[Tensor, "runs outputs P"]
    shared: Float64[Tensor, "runs m"] | None  # None: zero
    own: Float64[Tensor, "runs m"] | None  # None: one


def direction(
    server: Aggregator,
    slopes: Slopes,
    loss: Float64[Tensor, "runs m"],
    sent: Averages,
    clip_norm: float | None,
) -> Direction:
    """along_i = own_i D_i + γ J_i (K_i D_i − U_i), with bound and clipping."""
    layout, along, own, shared = slopes.layout, slopes.slope, None, None
    if not server.plain:
        own, shared = server.coefficients(loss, sent.mean_loss)
        along, shared = along * layout.spread(own), shared if sent.has_g else None
    if server.method.uses_curvature:
        moved = through_grams(layout, slopes.grams(), slopes.slope)
        curved = hessian_of_logits(slopes.p, moved if slopes.u is None else moved - slopes.u)
        strength = per_run(server.curvature, layout.share.dtype)
        along = torch.addcmul(along, curved, layout.share * strength)
    if server.penalty_bound is not None:
        made = Direction(along, shared, own)
        along, shared, own = _bounded(slopes, made, sent.squared_g, server.penalty_bound)
    if clip_norm is not None:
        norms = squared_lengths(layout, slopes.grams(), along, shared, slopes.u, sent.squared_g)
        cut = torch.clamp(clip_norm / norms.sqrt(), max=1.0)
        along, shared = along * layout.spread(cut), None if shared is None else shared * cut
    return Direction(along, shared, own)


def _bounded(
    slopes: Slopes,
    made: Direction,
    squared_g: Float64[Tensor, "runs 1"] | None,
    bound: Tensor | float,
) -> Direction:
    """With penalties d_i − ∇f_i no longer than bound · ‖∇f_i‖."""
    layout, grams, u = slopes.layout, slopes.grams(), slopes.u
    penalty = made.along - slopes.slope
    long = squared_lengths(layout, grams, penalty, made.shared, u, squared_g)
    s = shortening(long, squared_lengths(layout, grams, slopes.slope, None, None, None), bound)
    cut = layout.spread(s)
    return Direction(
        torch.where(cut < 1, torch.addcmul(slopes.slope, cut, penalty), made.along),
        None if made.shared is None else made.shared * s,
        None if made.own is None else shortened(made.own, s),
    )


def per_run(value: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """A number, or one per run, as a factor of (runs, outputs, columns)."""
    if not isinstance(value, Tensor):
        return value
    return value.to(dtype).unsqueeze(-1) if value.dim() else value.to(dtype)


def squared_lengths(
    layout: Layout,
    grams: list[Tensor],
    along: Float[Tensor, "runs outputs P"],
    shared: Float64[Tensor, "runs m"] | None,
    u: Float[Tensor, "runs outputs P"] | None,
    squared_g: Float64[Tensor, "runs 1"] | None,
) -> Float64[Tensor, "runs m"]:
    """‖X̃_iᵀ along_i + shared_i g‖² = ⟨B, K B⟩ + 2 s ⟨B, U⟩ + s² ‖g‖²"""
    found = layout.sums((along * through_grams(layout, grams, along)).sum(1))
    if shared is None or u is None or squared_g is None:
        return found.clamp(min=0)
    found = found + 2 * shared * layout.sums((along * u).sum(1)) + shared**2 * squared_g
    return found.clamp(min=0)  # rounding may make it negative


class Step(NamedTuple):
    """The layout of one local step, the same in every round. Tables are over `ids`."""

    ids: Int64[Tensor, " m"]  # active clients, tile by tile
    layout: Layout
    place: Int64[Tensor, " b"]  # of its samples in the shuffles of a round, one after the other


@dataclass(frozen=True)
class StepPlan:
    """All steps of a round. The largest clients come first, so that the active clients are a prefix
    of every tile, and their tiles a prefix of all tiles."""

    schedule: Schedule
    groups: list[list[int]]
    whole: Layout  # of all training samples

    @cached_property
    def steps(self) -> list[Step]:
        return [self._step(number) for number in range(max(self.schedule.steps))]

    @cached_property
    def column(self) -> Int64[Tensor, " N"]:
        """Where each row of the split stands in the layout of all samples."""
        fixed, whole = self.schedule.constants, self.whole
        rows = fixed.offsets[whole.client] + whole.position
        places = torch.arange(len(rows), device=rows.device)
        if whole.real is not None:  # padding repeats a row that stands elsewhere
            rows, places = rows[whole.real > 0], places[whole.real > 0]
        return torch.empty_like(self.schedule.everyone.slots.row).index_copy_(0, rows, places)

    def _step(self, number: int) -> Step:
        schedule, split = self.schedule, self.schedule.split
        active = [[i for i in g if schedule.steps[i] > number] for g in self.groups]
        active = [group for group in active if group]
        ids = [i for group in active for i in group]
        passes = [1 if schedule.full_batch else schedule.passes[i] for i in ids]
        starts = [(number % p) * schedule.width for p in passes]
        sizes = split.counts.tolist()
        lengths = [min(schedule.width, sizes[i] - a) for i, a in zip(ids, starts, strict=True)]
        cuts = [sum(map(len, active[:k])) for k in range(len(active) + 1)]
        tiles = [range(a, b) for a, b in pairwise(cuts)]
        share = self.whole.share
        layout = Layout.build(tiles, lengths, share.device, share.dtype)
        numbers = [0 if schedule.full_batch else number // p for p in passes]
        first = [
            k * len(split.client) + split.offsets[i] + a
            for k, i, a in zip(numbers, ids, starts, strict=True)
        ]
        place = torch.tensor(first, device=share.device)[layout.client] + layout.position
        return Step(torch.tensor(ids, device=share.device), layout, place)

    @cached_property
    def first(self) -> tuple[Layout, Int64[Tensor, " b"]]:
        """The first step with tables over all clients, and its places in the first shuffle."""
        share = self.whole.share
        layout = Layout.build(self.groups, self.schedule.lengths, share.device, share.dtype)
        return layout, self.schedule.constants.offsets[layout.client] + layout.position

    def columns(self, step: Step, batches: RoundBatches) -> Int64[Tensor, " b"]:
        """Where this round's samples of a step stand among all samples."""
        rows = batches.shuffled.flatten().index_select(0, step.place)
        return self.column.index_select(0, rows)

    def first_share(self, batches: RoundBatches) -> Float[Tensor, " P"]:
        """Of each sample in its client's first batch; zero for the others."""
        step = self.steps[0]
        columns = self.columns(step, batches)
        return torch.zeros_like(self.whole.share).index_add_(0, columns, step.layout.share)


@dataclass
class Walk:
    """The local steps of a round: A_i, c_i, and the logits at x^t, which stay fixed."""

    batch: Columns
    z: Float[Tensor, "runs outputs P"]
    u: Float[Tensor, "runs outputs P"] | None
    along: Float[Tensor, "runs outputs P"]
    shared: Float64[Tensor, "runs n"] | None
    momentum: float
    speed: Tensor | None = None  # of `along`, and of `shared`: by how much the last step moved them
    shared_speed: Tensor | None = None

    def take(
        self,
        step: Step,
        columns: Int64[Tensor, " b"],
        server: Aggregator,
        sent: Averages,
        fixed_loss: Float64[Tensor, "runs n"] | None,
        lr: Tensor | float,
        clip_norm: float | None,
    ) -> Direction:
        """One step of all active clients."""
        rows = self._gram_rows(step, columns)
        u = None if self.u is None else self.u.index_select(-1, columns)
        moved = self._moved(step, rows, u)
        z = self.z.index_select(-1, columns) - per_run(lr, moved.dtype) * moved
        value, label = self.batch.target
        target = Target(
            value.index_select(-1, columns),
            None if label is None else label.index_select(-1, columns),
        )
        found = answer(z, target)
        slope = found.slope * step.layout.share
        slopes = Slopes(step.layout, slope, found.p, u, lambda: self._square(step, rows, columns))
        loss = step.layout.means(found.loss) if fixed_loss is None else fixed_loss[:, step.ids]
        made = direction(server, slopes, loss, sent, clip_norm)
        if made.shared is not None and self.shared is None:
            self.shared = made.shared.new_zeros(len(made.shared), len(self.batch.layout.length))
        if self.momentum or server.method.uses_pull:
            self._move(step, columns, made, server.pull * lr)
        else:
            self.along.index_add_(-1, columns, made.along)
            if self.shared is not None and made.shared is not None:
                self.shared.index_add_(1, step.ids, made.shared)
        return made

    def _move(
        self, step: Step, columns: Int64[Tensor, " b"], made: Direction, shrink: Tensor | float
    ) -> None:
        """A ← A + V, V ← momentum · V + B − η pull A; c in the same way. Only clients that still
        train move."""
        layout = self.batch.layout
        active = torch.zeros_like(layout.length).index_fill_(0, step.ids, 1.0)[None]
        self.along, self.speed = _moved(
            self.along, self.speed, columns, made.along, layout.spread(active),
            self.momentum, per_run(shrink, self.along.dtype),
        )  # fmt: skip
        if self.shared is not None and made.shared is not None:
            self.shared, self.shared_speed = _moved(
                self.shared, self.shared_speed, step.ids, made.shared, active, self.momentum, shrink
            )

    def _gram_rows(self, step: Step, columns: Tensor) -> list[Float[Tensor, "m b width"]]:
        """K_i[b, :] of the clients that still train, tile by tile."""
        found = []
        for part, tile, matrix in self._tiles(step):
            places = columns[part.columns] - tile.start
            rows = matrix.flatten(0, 1).index_select(0, places)
            found.append(rows.unflatten(0, (part.count, part.width)))
        return found

    def _square(self, step: Step, rows: list[Tensor], columns: Tensor) -> list[Tensor]:
        """K_i[b, b]"""
        found = []
        for (part, tile, _), matrix in zip(self._tiles(step), rows, strict=True):
            position = (columns[part.columns] - tile.start) % tile.width
            position = position.unflatten(0, (part.count, 1, part.width))
            found.append(matrix.gather(2, position.expand(-1, part.width, -1)))
        return found

    def _moved(self, step: Step, rows: list[Tensor], u: Tensor | None) -> Tensor:
        """K_i[b, :] A_i + c_i U_b"""
        parts = []
        for (part, tile, _), matrix in zip(self._tiles(step), rows, strict=True):
            product = by_client(self.along, tile)[: part.count] @ matrix.mT
            parts.append(product.transpose(0, 1).reshape(*self.z.shape[:2], -1))
        moved = torch.cat(parts, -1)
        if u is None or self.shared is None:
            return moved
        return torch.addcmul(moved, u, step.layout.spread(self.shared[:, step.ids]))

    def _tiles(self, step: Step) -> list[tuple[Tile, Tile, Tensor]]:
        """The tiles of the step, those of all samples that they are part of, and the Grams."""
        whole = self.batch.layout.tiles
        return list(zip(step.layout.tiles, whole, self.batch.grams, strict=False))


def _moved(
    total: Tensor,
    speed: Tensor | None,
    places: Int64[Tensor, " b"],
    made: Tensor,
    active: Tensor,
    momentum: float,
    shrink: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """total + speed where `active`, with speed ← momentum · speed − shrink · total + made."""
    kept = torch.zeros_like(total) if speed is None else momentum * speed
    speed = (kept - shrink * total).index_add_(-1, places, made)
    return total + active * speed, speed
