"""The dual form of models that are affine in their parameters: numbers per sample, not per weight.

A client's gradient is ∇f_i = X̃_iᵀ D_i, with X̃_i = [X_i, 1] its samples and D_i one number per
sample and output. Hessian products and sums of steps have the same form, so a client's direction is
X̃_iᵀ B_i + s_i g with g the same for all. Its effect on logits and its length follow from X̃_i g and
the Gram matrix K_i = X̃_i X̃_iᵀ, which is fixed. No per-client weights are formed.

All R runs that train together share the samples. Their logits are the rows of one matrix,
(R·outputs, samples). On the CPU this order is by far the fastest: with ten classes, weights times
samplesᵀ takes a quarter of the time of samples times weightsᵀ (800 × 784 samples, one thread: 0.23
and 0.92 ms).

Samples of all clients as columns of a matrix: tiles of clients of about one size, padded.

Tables over clients become numbers per column (`spread`), and back (`sums`, `means`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from fairvar.common.tree import Inputs, Tree, one_input
from fairvar.data.federation import Federation, Split
from fairvar.engine.losses import cross_entropy, half_squared_error
from fairvar.engine.task import Task


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


class Target(NamedTuple):
    """The targets of the samples."""

    value: Float[Tensor, "outputs P"]  # one-hot, or the numbers themselves
    label: Int64[Tensor, "1 P"] | None


class Answer(NamedTuple):
    """The loss of every sample, its derivative in the logits, and p for the second derivative."""

    loss: Float[Tensor, "*runs P"]
    slope: Float[Tensor, "runs outputs P"]
    p: Float[Tensor, "runs outputs P"] | None


def sample_losses(
    logits: Float[Tensor, "runs outputs P"], target: Target
) -> Float[Tensor, "*runs P"]:
    """Cross-entropy where there are labels, half the squared error otherwise."""
    if target.label is None:
        return 0.5 * (logits - target.value).square().sum(-2)
    return _cross_entropy(torch.log_softmax(logits, -2), target.label)


def _cross_entropy(logarithm: Tensor, label: Tensor) -> Tensor:
    label = label.expand(*logarithm.shape[:-2], 1, logarithm.shape[-1])
    return -logarithm.gather(-2, label).squeeze(-2)


def answer(logits: Float[Tensor, "runs outputs P"], target: Target) -> Answer:
    """The same with derivatives."""
    if target.label is None:
        slope = logits - target.value
        return Answer(0.5 * slope.square().sum(-2), slope, None)
    logarithm = torch.log_softmax(logits, -2)
    p = logarithm.exp()
    return Answer(_cross_entropy(logarithm, target.label), p - target.value, p)


def hessian_of_logits(p: Tensor | None, v: Float[Tensor, "runs outputs P"]) -> Tensor:
    """The second derivative of each sample's loss in its logits, times v."""
    if p is None:
        return v
    product = p * v
    return product - p * product.sum(-2, keepdim=True)


@dataclass(frozen=True)
class Columns:
    """Samples of all clients in columns."""

    layout: Layout
    x: Float[Tensor, "P d"]
    target: Target
    bias: bool

    @cached_property
    def grams(self) -> list[Float[Tensor, "count width width"]]:
        """K_i of every client, tile by tile."""
        return [gram(self, self, number) for number in range(len(self.layout.tiles))]

    def logits(self, model: Names, params: Tree) -> Float[Tensor, "runs outputs P"]:
        """X̃ times the parameters (or a gradient) of every run."""
        weight = params[model.weight]
        rows = weight.flatten(0, 1)
        if model.bias is None:
            found = rows @ self.x.T
        else:
            found = torch.addmm(params[model.bias].reshape(-1, 1), rows, self.x.T)
        return found.unflatten(0, weight.shape[:2])

    def gradient(self, model: Names, slopes: Float[Tensor, "runs outputs P"]) -> Tree:
        """X̃ᵀ slopes, for every run."""
        weight = (slopes.flatten(0, 1) @ self.x).unflatten(0, slopes.shape[:2])
        found = {model.weight: weight}
        return found if model.bias is None else found | {model.bias: slopes.sum(-1)}


class Names(NamedTuple):
    """The parameters of an affine model."""

    weight: str
    bias: str | None


def by_client(slopes: Float[Tensor, "runs outputs P"], tile: Tile) -> Tensor:
    """One tile's columns as (client, runs · outputs, width)."""
    columns = slopes[..., tile.columns].flatten(0, 1)
    return columns.unflatten(-1, (tile.count, tile.width)).transpose(0, 1)


def through_grams(
    layout: Layout, grams: list[Tensor], slopes: Float[Tensor, "runs outputs P"]
) -> Float[Tensor, "runs outputs P"]:
    """K_i B_i of every client: the change of its logits along its direction X̃_iᵀ B_i."""
    parts = []
    for tile, matrix in zip(layout.tiles, grams, strict=True):
        product = by_client(slopes, tile) @ matrix
        parts.append(product.transpose(0, 1).reshape(*slopes.shape[:2], -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def gram(left: Columns, right: Columns, number: int) -> Float[Tensor, "count left right"]:
    """⟨x̃, x̃'⟩ of each client's samples in two batches whose tiles hold the same clients."""
    a, b = (
        part.x[tile.columns].unflatten(0, (tile.count, tile.width))
        for part, tile in ((p, p.layout.tiles[number]) for p in (left, right))
    )
    product = torch.bmm(a, b.mT)
    return product + 1 if left.bias else product  # the bias's feature is 1 in every sample


@dataclass(frozen=True)
class Dual:
    """Everything fixed: the samples of every split as columns, and their Gram matrices."""

    model: Names
    outputs: int
    classifies: bool
    federation: Federation
    dtype: torch.dtype
    splits: dict[str, Columns] = field(default_factory=dict)  # made so far
    crosses: dict[str, list[Tensor]] = field(default_factory=dict)

    @cached_property
    def groups(self) -> list[list[int]]:
        return groups_by_size(self.federation.sizes.tolist())

    @cached_property
    def train(self) -> Columns:
        return self.split("train")

    def split(self, name: str) -> Columns:
        """All samples of a split; cached for later evaluations."""
        if name not in self.splits:
            split = self.federation.splits[name]
            layout = self.layout(split.counts.tolist())
            offsets = torch.tensor(split.offsets[:-1], device=layout.client.device)
            rows = (offsets[layout.client] + layout.position).clamp(max=len(split.y) - 1)
            in_order = layout.back is None and layout.real is None
            self.splits[name] = self.batch(split, layout, None if in_order else rows)
        return self.splits[name]

    def layout(self, lengths: list[int]) -> Layout:
        """The training split's tiles, with other numbers of samples."""
        device = self.federation.train.device
        return Layout.build(self.groups, lengths, device, self.dtype)

    def batch(self, split: Split, layout: Layout, rows: Tensor | None) -> Columns:
        """The samples in these rows (None: all, in their order)."""
        x = one_input(split.x).flatten(1)
        x, y = (x, split.y) if rows is None else (x.index_select(0, rows), split.y[rows])
        return Columns(layout, x, self._target(y), self.model.bias is not None)

    def _target(self, y: Tensor) -> Target:
        if not self.classifies:
            return Target(y.reshape(len(y), self.outputs).T.contiguous(), None)
        classes = torch.arange(self.outputs, device=y.device)
        return Target((classes[:, None] == y).to(self.dtype), y[None])

    def cross(self, name: str) -> list[Float[Tensor, "count width samples"]]:
        """⟨x̃_train, x̃_evaluated⟩ of every client; cached as well."""
        if name not in self.crosses:
            right, tiles = self.split(name), range(len(self.train.layout.tiles))
            self.crosses[name] = [gram(self.train, right, number) for number in tiles]
        return self.crosses[name]


def dual_of(task: Task, federation: Federation) -> Dual:
    """One for all runs on the same data: Gram matrices take longer than many rounds."""
    names = affine_names(task.original, federation.train.x)
    if names is None:
        raise TypeError("the model is not affine")
    weight = task.params[names.weight]
    return _kept(names, len(weight), task.loss is cross_entropy, federation, weight.dtype)


_kept = lru_cache(maxsize=2)(Dual)


def affine_names(module: nn.Module, x: Inputs) -> Names | None:
    """The parameters, if the module is a linear layer on flattened samples and nothing else."""
    if not isinstance(x, Tensor):
        return None
    prefix, layer = "", module
    if type(module) is nn.Sequential and len(module) == 2 and type(module[0]) is nn.Flatten:
        flattens = (module[0].start_dim, module[0].end_dim) == (1, -1)
        prefix, layer = "1.", module[1]
    else:
        flattens = x.dim() == 2
    plain = type(layer) is nn.Linear and all(p.requires_grad for p in layer.parameters())
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    if not plain or not flattens or hooked:
        return None
    return Names(f"{prefix}weight", f"{prefix}bias" if layer.bias is not None else None)


def is_affine(task: Task, x: Inputs) -> bool:
    """Whether the dual form covers this model and loss."""
    known = task.loss in (cross_entropy, half_squared_error)
    return known and not task.half and affine_names(task.original, x) is not None
