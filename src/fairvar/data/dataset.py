"""A `Dataset`: samples and labels of one source, before they are dealt to clients."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from fairvar.errors import BadInput


@dataclass(frozen=True, eq=False)
class Dataset:
    """Normalised float32 inputs (images channel first) with integer labels.

    The pool, if there is one, holds further samples of the same law: clients validate and test on
    it, so that even a client with few training samples is measured precisely. `groups` name the
    natural client of each sample. Without `sha256` the arrays' own is computed.
    """

    name: str
    x: np.ndarray  # float32 (N, *features)
    y: np.ndarray  # integer (N,)
    classes: int
    pool_x: np.ndarray | None = None  # float32 (P, *features)
    pool_y: np.ndarray | None = None  # integer (P,)
    groups: np.ndarray | None = None  # (N,)
    sha256: str = ""
    provenance: str = ""

    def __post_init__(self) -> None:
        if (self.pool_x is None) != (self.pool_y is None):
            raise BadInput(f"data set {self.name}: give both pool_x and pool_y, or neither")
        if self.groups is not None and len(self.groups) != len(self.y):
            raise BadInput(f"data set {self.name}: {len(self.groups)} group ids but "
                           f"{len(self.y)} samples; give one each")  # fmt: skip
        _check(self.name, "x", self.x, self.y, self.classes)
        if self.pool_x is not None and self.pool_y is not None:
            _check(self.name, "pool_x", self.pool_x, self.pool_y, self.classes)
            if self.pool_x.shape[1:] != self.x.shape[1:]:
                raise BadInput(f"data set {self.name}: pool samples have shape "
                               f"{self.pool_x.shape[1:]} but x has {self.x.shape[1:]}")  # fmt: skip
        if not self.sha256:
            object.__setattr__(self, "sha256", _arrays_sha256(self))


def _check(name: str, part: str, x: np.ndarray, y: np.ndarray, classes: int) -> None:
    if len(x) != len(y):
        raise BadInput(f"data set {name}: {part} has {len(x)} samples but {len(y)} labels")
    if x.dtype != np.float32:
        raise BadInput(f"data set {name}: {part} is {x.dtype}; normalise it to float32 first")
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise BadInput(f"data set {name}: the labels of {part} are {y.dtype} of shape {y.shape}; "
                       "give one integer per sample")  # fmt: skip
    bad = np.flatnonzero((y < 0) | (y >= classes))
    if len(bad):
        raise BadInput(
            f"data set {name}: label {y[bad[0]]} of sample {bad[0]} in {part} is outside "
            f"0 … {classes - 1}; number the labels from 0 or raise classes"
        )


def _arrays_sha256(dataset: Dataset) -> str:
    digest = hashlib.sha256()
    for array in (dataset.x, dataset.y, dataset.pool_x, dataset.pool_y, dataset.groups):
        if array is not None:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
