"""A `Dataset`: samples and labels of one source, before they are dealt to clients. A `Federation`:
the data of all clients on one device, split into train, valid and test.

In a federation the samples of all clients are rows of one flat tensor, sorted by client; the number
of samples of each client is kept separately. Nothing is padded, and one gather builds any batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64, Integer, Shaped, UInt8
from torch import Tensor

from fairvar.errors import BadInput, shown

SPLITS = ("train", "valid", "test")
BLOCK = 2048  # samples converted at a time, so that no second copy of a whole set ever exists


@dataclass(frozen=True)
class Split:
    """One part (train, valid or test) of all clients' data; client i owns `counts[i]` rows."""

    x: Shaped[Tensor, " N *features"]
    y: Shaped[Tensor, " N *targets"]
    counts: Int64[Tensor, " n"]  # always on the CPU: it steers Python loops

    @cached_property
    def offsets(self) -> list[int]:
        """Client i's rows are offsets[i] … offsets[i + 1] - 1."""
        return [0, *torch.cumsum(self.counts, 0).tolist()]

    @cached_property
    def client(self) -> Int64[Tensor, " N"]:
        """The client of each row, on the data's device."""
        n = torch.arange(len(self.counts))
        return torch.repeat_interleave(n, self.counts).to(self.x.device)

    @cached_property
    def counts_there(self) -> Int64[Tensor, " n"]:
        """The counts on the data's device: a round that is being recorded cannot copy them."""
        return self.counts.to(self.x.device)

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        rows = slice(self.offsets[client], self.offsets[client + 1])
        return self.x[rows], self.y[rows]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Split:
        """Moved, with floating-point values in `dtype` (labels and tokens keep theirs)."""

        def move(t: Tensor) -> Tensor:
            return t.to(device, dtype if t.is_floating_point() else t.dtype)

        return Split(move(self.x), move(self.y), self.counts)


@dataclass(frozen=True, eq=False, repr=False)  # compared by identity
class Federation:
    """All clients' data. `provenance`: data set, partition and seed, if it was drawn."""

    train: Split
    valid: Split | None = None
    test: Split | None = None
    name: str = "arrays"
    classes: int | None = None  # None: regression
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        held = ", ".join(f"{len(split.y)} {part}" for part, split in self.splits.items())
        return f"<Federation {self.name}: {self.clients} clients, {held}>"

    @property
    def clients(self) -> int:
        return len(self.train.counts)

    @property
    def sizes(self) -> Int64[Tensor, " n"]:
        """Training samples per client."""
        return self.train.counts

    @property
    def splits(self) -> dict[str, Split]:
        found = {name: getattr(self, name) for name in SPLITS}
        return {name: split for name, split in found.items() if split is not None}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Federation:
        moved: dict[str, Any] = {k: split.to(device, dtype) for k, split in self.splits.items()}
        return replace(self, **moved)

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[tuple[Any, Any]],
        valid: Sequence[tuple[Any, Any]] | None = None,
        test: Sequence[tuple[Any, Any]] | None = None,
        *,
        classes: int | None = None,
        name: str = "arrays",
        provenance: Mapping[str, Any] | None = None,
    ) -> Federation:
        """One (x, y) pair of arrays or tensors per client. One integer y per sample: classes; float
        y: regression. (Integers of another shape, such as next tokens, are for a loss of your own.)

        Everything is checked here, once: lengths, shapes, finite values, label range. A client
        may lack validation or test samples (it then counts in no average), never training samples.
        """
        count = isinstance(classes, int) and not isinstance(classes, bool) and classes >= 1
        if classes is not None and not count:
            raise BadInput(f"classes = {shown(classes)}: give their number, or leave it out")
        if not isinstance(name, str):
            raise BadInput(f"name = {shown(name)}: give a string")
        if not isinstance(provenance, Mapping | None):
            raise BadInput(f"provenance must be a dict, not {type(provenance).__name__}")
        given = {"train": train, "valid": valid, "test": test}
        pairs = {part: _pairs(part, v) for part, v in given.items() if v is not None}
        if not pairs.get("train"):
            raise BadInput("train holds no client; give one (x, y) pair per client")
        splits = {part: _join(part, v, len(pairs["train"])) for part, v in pairs.items()}
        return cls.from_splits(splits, classes, name, provenance)

    @classmethod
    def from_splits(
        cls, splits: Mapping[str, Split], classes: int | None, name: str, provenance: Any = None
    ) -> Federation:
        """Clients' data that are laid out already: values, shapes and labels are checked."""
        first = splits["train"]
        for part, split in splits.items():
            for values, own, trained in (("x", split.x, first.x), ("y", split.y, first.y)):
                row = _not_finite(own)
                if row is not None:
                    client, sample = _place(split, row)
                    raise BadInput(f"{part}, client {client}: {values} holds NaN or infinity first "
                                   f"in sample {sample}; clean the data first")  # fmt: skip
                if own.shape[1:] != trained.shape[1:]:
                    raise BadInput(f"{part}: samples of {values} have shape {tuple(own.shape[1:])},"
                                   f" but {tuple(trained.shape[1:])} in train")  # fmt: skip
                if own.is_floating_point() != trained.is_floating_point():
                    raise BadInput(f"{part}: {values} is {own.dtype}, but {trained.dtype} in train")
        if first.y.is_floating_point():
            classes = None
        else:
            largest = max(int(s.y.max()) for s in splits.values() if s.y.numel())
            known = classes or max(largest, 0) + 1
            for part, split in splits.items():
                _check_labels(part, split, known)
            classes = known if first.y.dim() == 1 else None
        found: dict[str, Any] = dict(splits)
        return cls(**found, name=name, classes=classes, provenance=dict(provenance or {}))


def _pairs(part: str, given: Any) -> list[tuple[Any, Any]]:
    """The clients' (x, y) pairs, whatever holds them."""
    way = f"{part} must be a list with one (x, y) pair of arrays per client"
    if isinstance(given, Tensor | np.ndarray | str | bytes | Mapping):
        raise BadInput(f"{way}, not a {type(given).__name__}")
    try:
        found = list(given)
    except TypeError:
        raise BadInput(f"{way}, not a {type(given).__name__}") from None
    for i, pair in enumerate(found):
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            if len(found) == 2 and isinstance(given, tuple):
                raise BadInput(f"{way}; of one client give [(x, y)]")
            length = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
            raise BadInput(f"{way}, but client {i} is a {type(pair).__name__}{length}")
    return found


def _join(part: str, pairs: Sequence[tuple[Any, Any]], clients: int) -> Split:
    """One split's pairs as flat rows. Per client only lengths and shapes are looked at: a hundred
    thousand clients take a second."""
    if len(pairs) != clients:
        raise BadInput(f"{part} has {len(pairs)} clients but train has {clients}; give one pair "
                       "each")  # fmt: skip
    xs, ys = ([_array(pair[k], part, i, "xy"[k]) for i, pair in enumerate(pairs)] for k in (0, 1))
    counts = [len(y) for y in ys]
    for i, (x, count) in enumerate(zip(xs, counts, strict=True)):
        if len(x) != count:
            raise BadInput(f"{part}, client {i}: {len(x)} samples but {count} targets")
        if not count and part == "train":
            raise BadInput(f"train, client {i} is empty; drop it or give it at least one sample")
    if not any(counts):
        raise BadInput(f"{part} holds no sample at all; leave it out instead")
    x, y = _flat(xs, part, "x"), _flat(ys, part, "y")
    return Split(x, y if y.is_floating_point() else y.long(), torch.tensor(counts))


def _array(values: Any, part: str, client: int, name: str) -> np.ndarray | Tensor:
    where = f"{part}, client {client}: {name}"
    try:
        own = isinstance(values, Tensor)
        array = values.detach().cpu() if own else np.asarray(values)
        if not own:
            _torch_type(array.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"{where} cannot be read as an array of numbers ({error})") from None
    if array.ndim == 0:
        raise BadInput(f"{where} is a single number; give an array with one row per sample")
    if array.dtype in COMPLEX:
        raise BadInput(f"{where} holds complex numbers; give real ones")
    if name == "x" and array.dtype in BYTES:
        raise BadInput(f"{part}, client {client}: x is uint8; scale pixels to floats (x / 255)")
    return array


COMPLEX = (np.complex64, np.complex128, torch.complex32, torch.complex64, torch.complex128)
BYTES = (np.uint8, torch.uint8)


@cache
def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _flat(arrays: Sequence[np.ndarray | Tensor], part: str, name: str) -> Tensor:
    """All samples of a split, of clients that have any, in one new tensor."""
    filled = [(i, array) for i, array in enumerate(arrays) if len(array)]
    first = filled[0][1]
    kinds = {}
    for i, array in filled:
        if array.shape[1:] != first.shape[1:]:
            raise BadInput(f"{part}: samples differ in shape: {name} {tuple(array.shape[1:])} in "
                           f"client {i}, {tuple(first.shape[1:])} in the first")  # fmt: skip
        kinds[array.dtype] = array
    if len(kinds) == 1 and isinstance(first, np.ndarray):
        return torch.from_numpy(np.concatenate([array for _, array in filled]))
    tensors = [array if isinstance(array, Tensor) else torch.tensor(array) for _, array in filled]
    found = {t.dtype if t.is_floating_point() else torch.int64 for t in tensors}
    if name == "y" and len(found) > 1:
        raise BadInput(f"{part}: targets mix {' and '.join(map(str, found))}; use one of them")
    return torch.cat(tensors)


def _place(split: Split, row: int) -> tuple[int, int]:
    """The client of a row and the number of the sample there."""
    client = int(split.client[row])
    return client, row - split.offsets[client]


def _not_finite(values: np.ndarray | Tensor) -> int | None:
    """The first row that holds NaN or infinity."""
    test: Any = torch.isfinite if isinstance(values, Tensor) else np.isfinite
    for start in range(0, len(values), BLOCK):
        finite = test(values[start : start + BLOCK])
        if not finite.all():
            return start + int(np.argwhere(~np.asarray(finite))[0, 0])
    return None


def _check_labels(part: str, split: Split, classes: int) -> None:
    bad = ((split.y < 0) | (split.y >= classes)).nonzero()
    if len(bad):
        client, sample = _place(split, int(bad[0, 0]))
        raise BadInput(f"{part}, client {client}, sample {sample}: label "
                       f"{int(split.y[tuple(bad[0])])} is outside 0 … {classes - 1}")  # fmt: skip


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
        if self.scale is None and (row := _not_finite(x)) is not None:
            raise BadInput(f"{where}{part} holds NaN or infinity first in sample {row}; clean the "
                           "data first")  # fmt: skip

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
            out[start : start + BLOCK] = block if self.scale is None else self.scale.apply(block)
        return out, y[rows].astype(np.int64)


def update_digest(digest: hashlib._Hash, array: np.ndarray) -> None:
    """Feed an array's type, shape and values to a checksum, without a copy where possible."""
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    if array.size:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
