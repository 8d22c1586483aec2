"""A `Dataset`: samples and labels of one source, before they are dealt to clients."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Integer, Shaped, UInt8
from torch import Tensor

from fairvar.common.validation import whole_number
from fairvar.errors import BadInput, shown

IGNORED = -100  # a position of a sequence without target, as torch's `ignore_index`
BLOCK = 2048  # samples converted at a time, so that no second copy of a whole set ever exists


@dataclass(frozen=True)
class Scale:
    """Pixels 0 … 255 → (pixel / 255 − mean) / sd, per channel; one number serves all features.

    Large image sets stay bytes until they are dealt to clients: a quarter of the memory.
    """

    mean: tuple[float, ...]
    sd: tuple[float, ...]

    def apply(self, raw: UInt8[np.ndarray, " N *features"]) -> Float32[np.ndarray, " N *features"]:
        """By a table of the 256 results: exact, and no temporary in double precision."""
        levels = np.arange(256) / 255.0
        tables = [
            ((levels - mean) / sd).astype(np.float32)
            for mean, sd in zip(self.mean, self.sd, strict=True)
        ]
        if len(tables) == 1:
            return tables[0][raw]
        return np.stack([table[raw[:, channel]] for channel, table in enumerate(tables)], axis=1)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Normalised float32 inputs (images channel first) or int64 tokens, with integer labels: one
    per sample, or one per position of a sequence (`IGNORED` where there is none).

    With a `scale`, x and pool_x are still bytes, to be normalised as samples are gathered. The
    pool, if there is one, holds further samples of the same law: clients validate and test on
    it, so that even a client with few training samples is measured precisely. `groups` name the
    natural client of each sample. Without `sha256` the arrays' own is computed.
    """

    name: str
    x: np.ndarray  # float32 (N, *features), int64 (N, length), or uint8 with a scale
    y: np.ndarray  # integer (N,) or (N, length)
    classes: int
    pool_x: np.ndarray | None = None  # as x: (P, *features)
    pool_y: np.ndarray | None = None  # integer (P,)
    groups: np.ndarray | None = None  # (N,)
    sha256: str = ""
    provenance: str = ""
    scale: Scale | None = None

    def __repr__(self) -> str:
        held = f"{len(self.y):,} samples of shape {tuple(self.x.shape[1:])}"
        return f"<Dataset {self.name}: {held}, {self.classes} classes>"

    def __post_init__(self) -> None:
        self._take_arrays()
        if (self.pool_x is None) != (self.pool_y is None):
            raise BadInput(f"data set {self.name}: give both pool_x and pool_y, or neither")
        if self.groups is not None and len(self.groups) != len(self.y):
            raise BadInput(f"data set {self.name}: {len(self.groups)} group ids but "
                           f"{len(self.y)} samples; give one each")  # fmt: skip
        self._check("x", self.x, self.y)
        if self.pool_x is not None and self.pool_y is not None:
            self._check("pool_x", self.pool_x, self.pool_y)
            if self.pool_x.shape[1:] != self.x.shape[1:]:
                raise BadInput(f"data set {self.name}: pool samples have shape "
                               f"{self.pool_x.shape[1:]} but x has {self.x.shape[1:]}")  # fmt: skip
        if not self.sha256:
            digest = hashlib.sha256()
            for array in (self.x, self.y, self.pool_x, self.pool_y, self.groups):
                if array is not None:
                    update_digest(digest, array)
            object.__setattr__(self, "sha256", digest.hexdigest())

    def _take_arrays(self) -> None:
        """Lists and tensors as arrays; other kinds of things are refused."""
        for name in ("name", "sha256", "provenance"):
            if not isinstance(getattr(self, name), str):
                raise BadInput(f"{name} = {shown(getattr(self, name))}: give a string")
        classes = whole_number(f"data set {self.name}: classes", self.classes, least=1)
        object.__setattr__(self, "classes", classes)
        if not isinstance(self.scale, Scale | None):
            raise BadInput(f"data set {self.name}: scale must be a Scale, not {shown(self.scale)}")
        for name in ("x", "y", "pool_x", "pool_y", "groups"):
            value = getattr(self, name)
            if value is None and name not in ("x", "y"):
                continue
            try:
                value = value.detach().cpu().numpy() if hasattr(value, "detach") else value
                array = np.asarray(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise BadInput(f"data set {self.name}: {name} is no array ({error})") from None
            if array.ndim == 0:
                raise BadInput(f"data set {self.name}: {name} is {shown(value)}; give an array")
            object.__setattr__(self, name, array)

    def _check(self, part: str, x: np.ndarray, y: np.ndarray) -> None:
        where = f"data set {self.name}: "
        if len(x) != len(y):
            raise BadInput(f"{where}{part} has {len(x)} samples but {len(y)} labels")
        kinds = (np.float32, np.int64) if self.scale is None else (np.uint8,)
        if x.dtype not in kinds:
            way = "normalise it to float32 first" if self.scale is None else "a scale needs uint8"
            raise BadInput(f"{where}{part} is {x.dtype}; {way}")
        if self.scale is not None and len(self.scale.mean) not in (1, *x.shape[1:2]):
            raise BadInput(f"{where}{len(self.scale.mean)} means but {part} has shape {x.shape}; "
                           "give one mean and sd per channel, or one in all")  # fmt: skip
        if y.ndim not in (1, 2) or not np.issubdtype(y.dtype, np.integer):
            raise BadInput(f"{where}the labels of {part} are {y.dtype} of shape {y.shape}; "
                           "give one integer per sample")  # fmt: skip
        bad = np.argwhere(((y < 0) | (y >= self.classes)) & ((y != IGNORED) | (y.ndim == 1)))
        if len(bad):
            raise BadInput(
                f"{where}label {y[tuple(bad[0])]} of sample {bad[0, 0]} in {part} is outside "
                f"0 … {self.classes - 1}; number the labels from 0 or raise classes"
            )
        if self.scale is None and (row := first_not_finite(x)) is not None:
            raise BadInput(f"{where}{part} holds NaN or infinity first in sample {row}; clean the "
                           "data first")  # fmt: skip

    @property
    def strata(self) -> Integer[np.ndarray, " N"]:
        """By what samples are drawn and dealt: their labels; sequences have none."""
        return self.y if self.y.ndim == 1 else np.zeros(len(self.y), np.int64)

    def gather(
        self, rows: Integer[np.ndarray, " n"], from_pool: bool = False
    ) -> tuple[Shaped[np.ndarray, " n *features"], Integer[np.ndarray, " n *positions"]]:
        """Normalised samples and labels of some rows, block by block into one new array."""
        x, y = (self.pool_x, self.pool_y) if from_pool else (self.x, self.y)
        if x is None or y is None:
            raise BadInput(f"data set {self.name} has no pool; use holdout 'split' or 'auto'")
        kind = x.dtype if self.scale is None else np.float32
        out = np.empty((len(rows), *x.shape[1:]), dtype=kind)
        for start in range(0, len(rows), BLOCK):
            block = x[rows[start : start + BLOCK]]
            out[start : start + BLOCK] = block if self.scale is None else self.scale.apply(block)
        return out, y[rows].astype(np.int64)


def update_digest(digest: hashlib._Hash, array: np.ndarray) -> None:
    """Feed an array's type, shape and values to a checksum, without a copy where possible."""
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    if array.size:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def first_not_finite(values: np.ndarray | Tensor) -> int | None:
    """The first row that holds NaN or infinity."""
    test: Any = torch.isfinite if isinstance(values, Tensor) else np.isfinite
    for start in range(0, len(values), BLOCK):
        finite = test(values[start : start + BLOCK])
        if not finite.all():
            return start + int(np.argwhere(~np.asarray(finite))[0, 0])
    return None
