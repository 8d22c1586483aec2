"""Samples of all clients as columns of a matrix: tiles of clients of about one size, padded.

Tables over clients become numbers per column (`spread`), and back (`sums`, `means`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Clients of about one size, padded to the largest: a (count, width) part of the columns."""

    ids: Int64[Tensor, " count"]  # the largest first
    start: int
    count: int
    width: int

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.count * self.width)


@dataclass(frozen=True)
class Layout:
    """Where each client's samples stand among the columns: tile after tile."""

    tiles: tuple[Tile, ...]
    client: Int64[Tensor, " P"]
    position: Int64[Tensor, " P"]  # of each sample among its client's; 0 for padding
    real: Float[Tensor, " P"] | None  # None: nothing is padded
    share: Float[Tensor, " P"]  # of each sample in its client's mean; 0 for padding
    length: Float64[Tensor, " n"]
    back: Int64[Tensor, " n"] | None  # from the tiles' order to the clients'; None: the same

    @staticmethod
    def build(
        groups: Sequence[Sequence[int]],
        lengths: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> Layout:
        """Client i has lengths[i] samples; a tile for every group of clients."""
        widths = [max(1, *(lengths[i] for i in group)) for group in groups]
        sizes = [len(group) * width for group, width in zip(groups, widths, strict=True)]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        length, order = torch.tensor(lengths), [torch.tensor(group) for group in groups]
        client = torch.cat([ids.repeat_interleave(w) for ids, w in zip(order, widths, strict=True)])
        position = torch.cat(
            [torch.arange(w).repeat(len(ids)) for ids, w in zip(order, widths, strict=True)]
        )
        real, ids = position < length[client], torch.cat(order)
        share = real.double() / length[client].clamp(min=1)
        tiles = zip(order, starts, widths, strict=True)
        return Layout(
            tiles=tuple(Tile(ids.to(device), start, len(ids), w) for ids, start, w in tiles),
            client=client.to(device),
            position=(position * real).to(device),
            real=None if bool(real.all()) else real.to(device, dtype),
            share=share.to(device, dtype),
            length=length.double().to(device),
            back=None if bool((ids.diff() == 1).all()) else torch.argsort(ids).to(device),
        )

    def sums(self, values: Float[Tensor, "*runs P"]) -> Float64[Tensor, "*runs n"]:
        """Σ over each client's columns."""
        parts = [
            values[..., tile.columns]
            .unflatten(-1, (tile.count, tile.width))
            .sum(-1, dtype=torch.float64)
            for tile in self.tiles
        ]
        return self.join(parts)

    def means(self, values: Float[Tensor, "*runs P"]) -> Float64[Tensor, "*runs n"]:
        """Over each client's samples; NaN for a client without."""
        return self.sums(values if self.real is None else values * self.real) / self.length

    def join(self, parts: list[Tensor]) -> Tensor:
        """Tables over the tiles' clients (last axis) as one table in the clients' order."""
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return joined if self.back is None else joined.index_select(-1, self.back)

    def spread(self, table: Float64[Tensor, "runs n"]) -> Float[Tensor, "runs 1 P"]:
        """A number per client as a number per column."""
        return table.to(self.share.dtype).index_select(1, self.client).unsqueeze(1)


def groups_by_size(sizes: list[int]) -> list[list[int]]:
    """Clients in order of size, cut where the padding would pass an eighth of the samples.

    Clients of one size stay as they are: one group, in their own order."""
    if len(set(sizes)) == 1:
        return [list(range(len(sizes)))]
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    spare = sum(sizes) // 64  # so there are not more than a few groups
    groups: list[list[int]] = []
    padding = used = 0
    for i in order:
        missing = sizes[groups[-1][0]] - sizes[i] if groups else 0
        if not groups or padding + missing > max(spare, (used + sizes[i]) // 8):
            groups.append([])
            padding = used = missing = 0
        groups[-1].append(i)
        padding, used = padding + missing, used + sizes[i]
    return groups
