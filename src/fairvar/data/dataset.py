"""A `Dataset`: samples and labels of one source, before they are dealt to clients."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Float32, Int64, Integer, Shaped, UInt8

from fairvar import rng
from fairvar.errors import BadInput, shown

DATA_SEED = 0  # which images take part is a fact about the data, not about the run
BLOCK = 2048  # samples converted at a time, so that no second copy of a whole set ever exists


@dataclass(frozen=True)
class Scale:
    """Pixels 0 … 255 → (pixel / 255 − mean) / sd, per channel; one number serves all features.

    Large image sets stay bytes until they are dealt to clients: a quarter of the memory.
    """

    mean: tuple[float, ...]
    sd: tuple[float, ...]

    def apply(
        self, raw: UInt8[np.ndarray, " N *features"], out: Float32[np.ndarray, " N *features"]
    ) -> None:
        """By a table of the 256 results: exact, and no temporary in double precision."""
        levels = np.arange(256) / 255.0
        tables = [
            ((levels - mean) / sd).astype(np.float32)
            for mean, sd in zip(self.mean, self.sd, strict=True)
        ]
        if len(tables) == 1:
            out[...] = tables[0][raw]
            return
        for channel, table in enumerate(tables):
            out[:, channel] = table[raw[:, channel]]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Normalised float32 inputs (images channel first) with integer labels.

    With a `scale`, x and pool_x are still bytes, to be normalised as samples are gathered. The
    pool, if there is one, holds further samples of the same law: clients validate and test on
    it, so that even a client with few training samples is measured precisely. `groups` name the
    natural client of each sample. Without `sha256` the arrays' own is computed.
    """

    name: str
    x: np.ndarray  # float32 (N, *features), or uint8 with a scale
    y: np.ndarray  # integer (N,)
    classes: int
    pool_x: np.ndarray | None = None  # as x: (P, *features)
    pool_y: np.ndarray | None = None  # integer (P,)
    groups: np.ndarray | None = None  # (N,)
    sha256: str = ""
    provenance: str = ""
    scale: Scale | None = None

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
            object.__setattr__(self, "sha256", _arrays_sha256(self))

    def _take_arrays(self) -> None:
        """Lists and tensors as arrays; other kinds of things are refused."""
        for field in ("name", "sha256", "provenance"):
            if not isinstance(getattr(self, field), str):
                raise BadInput(f"{field} = {shown(getattr(self, field))}: give a string")
        whole = isinstance(self.classes, int | np.integer) and not isinstance(self.classes, bool)
        if not whole or self.classes < 1:
            raise BadInput(
                f"data set {self.name}: classes = {shown(self.classes)}; give their number"
            )
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
        if x.dtype != (np.float32 if self.scale is None else np.uint8):
            way = "normalise it to float32 first" if self.scale is None else "a scale needs uint8"
            raise BadInput(f"{where}{part} is {x.dtype}; {way}")
        if self.scale is not None and len(self.scale.mean) not in (1, *x.shape[1:2]):
            raise BadInput(f"{where}{len(self.scale.mean)} means but {part} has shape {x.shape}; "
                           "give one mean and sd per channel, or one in all")  # fmt: skip
        if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
            raise BadInput(f"{where}the labels of {part} are {y.dtype} of shape {y.shape}; "
                           "give one integer per sample")  # fmt: skip
        bad = np.flatnonzero((y < 0) | (y >= self.classes))
        if len(bad):
            raise BadInput(
                f"{where}label {y[bad[0]]} of sample {bad[0]} in {part} is outside "
                f"0 … {self.classes - 1}; number the labels from 0 or raise classes"
            )
        if self.scale is None:
            _check_finite(where + part, x)

    def gather(
        self, rows: Integer[np.ndarray, " n"], from_pool: bool = False
    ) -> tuple[Float32[np.ndarray, " n *features"], Integer[np.ndarray, " n"]]:
        """Normalised samples and labels of some rows, block by block into one new array."""
        x, y = (self.pool_x, self.pool_y) if from_pool else (self.x, self.y)
        if x is None or y is None:
            raise BadInput(f"data set {self.name} has no pool; use holdout 'split' or 'auto'")
        out = np.empty((len(rows), *x.shape[1:]), dtype=np.float32)
        for start in range(0, len(rows), BLOCK):
            block = x[rows[start : start + BLOCK]]
            if self.scale is None:
                out[start : start + BLOCK] = block
            else:
                self.scale.apply(block, out[start : start + BLOCK])
        return out, y[rows].astype(np.int64)


def _check_finite(where: str, x: Shaped[np.ndarray, " N *features"]) -> None:
    for start in range(0, len(x), BLOCK):
        block = np.isfinite(x[start : start + BLOCK])
        if not block.all():
            sample = start + int(np.argwhere(~block)[0, 0])
            raise BadInput(f"{where} holds NaN or infinity first in sample {sample}; clean the "
                           "data first")  # fmt: skip


def update_digest(digest: hashlib._Hash, array: np.ndarray) -> None:
    """Feed an array's type, shape and values to a checksum, without a copy where possible."""
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    if array.size:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _arrays_sha256(dataset: Dataset) -> str:
    digest = hashlib.sha256()
    for array in (dataset.x, dataset.y, dataset.pool_x, dataset.pool_y, dataset.groups):
        if array is not None:
            update_digest(digest, array)
    return digest.hexdigest()


def subsample(dataset: Dataset, fraction: float = 1.0, samples: int | None = None) -> Dataset:
    """A stratified `fraction` of the samples, or a number of them; a pool stays whole.

    Within a class the samples are drawn in one random order, so a smaller part is contained in a
    larger one, and the part does not depend on the seed of the partition.

    Class shares are kept up to rounding (largest remainders). The checksum remains that of the
    whole set; the provenance of a federation has fraction and samples as well.
    """
    check_part(fraction, samples)
    total = len(dataset.y)
    wanted = round(fraction * total) if samples is None else samples
    if wanted > total:
        raise BadInput(f"samples = {samples}; {dataset.name} has {total}, use 1 … {total}")
    if wanted == total:
        return dataset
    rows = stratified(dataset.y, wanted, dataset.name)
    groups = None if dataset.groups is None else dataset.groups[rows]
    return replace(dataset, x=dataset.x[rows], y=dataset.y[rows], groups=groups)


def check_part(fraction: float, samples: int | None) -> None:
    """What can be said without the data."""
    if not 0 < fraction <= 1:
        raise BadInput(f"fraction = {fraction:g}; use a number above 0 and at most 1")
    if samples is not None and fraction != 1:
        raise BadInput("give fraction or samples, not both")
    if samples is not None and samples < 1:
        raise BadInput(f"samples = {samples}; use at least 1")


def largest_remainders(exact: Float[np.ndarray, " n"], total: int) -> Int64[np.ndarray, " n"]:
    """Whole numbers near the exact ones that sum to `total`: rounded down, then the largest
    remainders up."""
    found = np.floor(exact + 1e-9).astype(np.int64)
    found[np.argsort(found - exact, kind="stable")[: total - int(found.sum())]] += 1
    return found


def stratified(
    labels: Integer[np.ndarray, " N"], wanted: int, name: str
) -> Int64[np.ndarray, " n"]:
    """`wanted` rows with the classes' shares, ascending."""
    present, count = np.unique(labels, return_counts=True)
    quota = largest_remainders(count * (wanted / len(labels)), wanted)
    if (quota == 0).any():
        label = present[int(np.argmin(quota))]
        least = int(np.ceil(len(labels) / count.min()))
        raise BadInput(f"{wanted} of {len(labels)} samples leave class {label} of {name} empty; "
                       f"use at least {min(least, len(labels))} samples")  # fmt: skip
    chosen = [
        rng.stream(DATA_SEED, "subsample", name, int(label))
        .permutation(np.flatnonzero(labels == label))[:take]
        for label, take in zip(present, quota, strict=True)
    ]  # fmt: skip
    return np.sort(np.concatenate(chosen))
