"""A `Federation`: the data of all clients on one device, split into train, valid and test.

Samples of all clients are rows of one flat tensor, sorted by client; the number of samples of each
client is kept separately. Nothing is padded, and one gather builds any batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from fairvar.errors import BadInput, shown

SPLITS = ("train", "valid", "test")


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
        _check_facts(classes, name, provenance)
        given = {"train": train, "valid": valid, "test": test}
        pairs = {part: _pairs(part, v) for part, v in given.items() if v is not None}
        if not pairs.get("train"):
            raise BadInput("train holds no client; give one (x, y) pair per client")
        splits = {part: _join(part, v, len(pairs["train"])) for part, v in pairs.items()}
        _check_alike(splits)
        y = splits["train"].y
        whole = not y.is_floating_point()
        if whole:
            largest = max(int(s.y.max()) for s in splits.values() if s.y.numel())
            known = classes or max(largest, 0) + 1
            for part, split in splits.items():
                _check_labels(part, split, known)
        return cls(**splits, name=name, classes=known if whole and y.dim() == 1 else None,
                   provenance=dict(provenance or {}))  # fmt: skip


def _check_facts(classes: object, name: object, provenance: object) -> None:
    count = isinstance(classes, int) and not isinstance(classes, bool) and classes >= 1
    if classes is not None and not count:
        raise BadInput(f"classes = {shown(classes)}: give the number of classes, or leave it out")
    if not isinstance(name, str):
        raise BadInput(f"name = {shown(name)}: give a string")
    if not isinstance(provenance, Mapping | None):
        raise BadInput(f"provenance must be a dict, not {type(provenance).__name__}")


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
        if isinstance(pair, tuple | list) and len(pair) == 2:
            continue
        if len(found) == 2 and isinstance(given, tuple):
            raise BadInput(f"{way}; of one client give [(x, y)]")
        kind = f"a {type(pair).__name__}"
        if isinstance(pair, tuple | list):
            kind += f" of {len(pair)}"
        raise BadInput(f"{way}, but client {i} is {kind}")
    return [(x, y) for x, y in found]


def _tensor(values: Any, where: str) -> Tensor:
    try:
        own = isinstance(values, Tensor)
        t = values.detach().cpu() if own else torch.tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"{where} cannot be read as an array of numbers ({error})") from None
    if t.dim() == 0:
        raise BadInput(f"{where} is a single number; give an array with one row per sample")
    if t.is_complex():
        raise BadInput(f"{where} holds complex numbers; give real ones")
    if t.is_floating_point() and not (finite := torch.isfinite(t)).all():
        bad = int((~finite).nonzero()[0, 0])
        raise BadInput(f"{where} holds NaN or infinity first in sample {bad}; clean the data first")
    return t


def _join(part: str, pairs: Sequence[tuple[Any, Any]], clients: int) -> Split:
    """Check one split's pairs and lay them out flat."""
    if len(pairs) != clients:
        raise BadInput(f"{part} has {len(pairs)} clients but train has {clients}; give one pair "
                       "each")  # fmt: skip
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for i, (x, y) in enumerate(pairs):
        tx, ty = _tensor(x, f"{part}, client {i}: x"), _tensor(y, f"{part}, client {i}: y")
        if len(tx) != len(ty):
            raise BadInput(f"{part}, client {i}: {len(tx)} samples but {len(ty)} targets")
        if part == "train" and len(tx) == 0:
            raise BadInput(f"train, client {i} is empty; drop it or give it at least one sample")
        if tx.dtype == torch.uint8:
            raise BadInput(f"{part}, client {i}: x is uint8; scale pixels to floats (x / 255)")
        if len(tx):
            xs.append(tx)
            ys.append(ty if ty.is_floating_point() else ty.long())
    if not xs:
        raise BadInput(f"{part} holds no sample at all; leave it out instead")
    first = tuple(xs[0].shape[1:]), tuple(ys[0].shape[1:])
    for i, (tx, ty) in enumerate(zip(xs, ys, strict=True)):
        shape = tuple(tx.shape[1:]), tuple(ty.shape[1:])
        if shape != first:
            raise BadInput(f"{part}: samples differ in shape: x {shape[0]}, y {shape[1]} in filled "
                           f"client {i}, x {first[0]}, y {first[1]} in the first")  # fmt: skip
        if ty.dtype != ys[0].dtype:
            raise BadInput(f"{part}: targets mix {ys[0].dtype} and {ty.dtype}; use one of them")
    counts = torch.tensor([len(y) for _, y in pairs], dtype=torch.int64)
    return Split(torch.cat(xs), torch.cat(ys), counts)


def _check_alike(splits: Mapping[str, Split]) -> None:
    """Samples of all splits have the shape of the training samples."""
    first = splits["train"]
    for part, split in splits.items():
        for name, own, trained in (("x", split.x, first.x), ("y", split.y, first.y)):
            if own.shape[1:] != trained.shape[1:]:
                raise BadInput(f"{part}: samples of {name} have shape {tuple(own.shape[1:])}, "
                               f"but {tuple(trained.shape[1:])} in train")  # fmt: skip
            if own.is_floating_point() != trained.is_floating_point():
                raise BadInput(f"{part}: {name} is {own.dtype}, but {trained.dtype} in train")


def _check_labels(part: str, split: Split, classes: int) -> None:
    bad = ((split.y < 0) | (split.y >= classes)).nonzero()
    if len(bad):
        row = int(bad[0, 0])
        client = int(split.client[row])
        label, sample = int(split.y[tuple(bad[0])]), row - split.offsets[client]
        raise BadInput(f"{part}, client {client}, sample {sample}: label {label} is outside "
                       f"0 … {classes - 1}")  # fmt: skip
