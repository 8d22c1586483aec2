"""`ClientData`: the samples of one client, as a node of a real federation brings them.

fv.ClientData.from_csv("ward.csv", target="ill")         a table with a header
fv.ClientData.from_arrays(x, y, name="berlin")           arrays, split here
fv.ClientData(train=(x, y), test=(x_test, y_test))       arrays that are split already

x may be a tuple or dict of arrays, for models with several inputs.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from fairvar.common import rng
from fairvar.data.federation import SPLITS, Federation
from fairvar.data.own_data import DEFAULT_SPLIT, checked_shares, held_out_counts
from fairvar.errors import BadInput, shown

Pair = tuple[Any, Any]  # x with one row per sample, and y


@dataclass(frozen=True, eq=False, repr=False)
class ClientData:
    """Whole numbers from 0 in y are classes, floats are targets of a regression. `name` is the
    client's in messages and tables: the name of the site."""

    train: Pair
    valid: Pair | None = None
    test: Pair | None = None
    name: str = ""

    def __repr__(self) -> str:
        held = ", ".join(f"{len(y)} {part}" for part, (_, y) in self._parts().items())
        return f"<ClientData{self.name and ' ' + self.name}: {held}>"

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        *,
        name: str = "",
        split: tuple[float, float, float] = DEFAULT_SPLIT,
        seed: int = 0,
    ) -> ClientData:
        """Split at random into the shares of train, valid and test; the same seed gives the same
        parts again, which a node needs because it reads its data more than once."""
        x, y = _each(np.asarray, x), np.asarray(y)
        for given in x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else [x]:
            if given.ndim == 0 or y.ndim == 0 or len(given) != len(y) or not len(y):
                raise BadInput(f"x has shape {given.shape} and y {y.shape}; give a row of x and an "
                               "element of y for every sample")  # fmt: skip
        _, *held_out = checked_shares(split)
        valid, test = held_out_counts(len(y), *held_out)
        rows = rng.stream(seed, "split", 0).permutation(len(y))
        parts = np.split(rows, [len(y) - valid - test, len(y) - test])
        found = {
            part: (_each(itemgetter(at), x), y[at])
            for part, at in zip(SPLITS, parts, strict=True)
            if len(at)
        }
        return cls(**found, name=name)

    @classmethod
    def from_csv(
        cls,
        path: Path | str,
        target: str,
        *,
        columns: Sequence[str] | None = None,
        labels: Sequence[str] | None = None,
        name: str = "",
        split: tuple[float, float, float] = DEFAULT_SPLIT,
        seed: int = 0,
    ) -> ClientData:
        """A table with a header: one file, which is split here, or a folder with train.csv and,
        if there are such parts, valid.csv and test.csv.

        `columns` are the inputs, in this order (all but the target by default, in the order of the
        file: name them if files of several sites may differ). `labels` are the texts of the target
        column, numbered in this order; without them it holds numbers.
        """
        path = Path(path)
        name = name or path.stem
        if not path.is_dir():
            x, y = read_table(path, target, columns, labels)
            return cls.from_arrays(x, y, name=name, split=split, seed=seed)
        files = {part: path / f"{part}.csv" for part in SPLITS}
        found = {
            part: read_table(file, target, columns, labels)
            for part, file in files.items()
            if part == "train" or file.exists()
        }
        return cls(**found, name=name)

    def scaled(self, mean: Any = None, sd: Any = None) -> ClientData:
        """(x − mean) / sd. Give numbers that all clients agree on, one or one per column. Without
        them they are those of this client's training samples, which hides differences between
        clients that a common model may need."""
        if isinstance(self.train[0], tuple | dict):
            raise BadInput("scaled: x has several inputs; scale them before you give them")
        x = np.asarray(self.train[0], dtype=np.float64)
        mean = x.mean(0) if mean is None else _fitting("mean", mean, x.shape[1:])
        if sd is None:
            sd = x.std(0)
            sd = np.where(sd > 0, sd, 1.0)  # a constant column
        elif not (_fitting("sd", sd, x.shape[1:]) > 0).all():
            raise BadInput(f"scaled: sd = {shown(sd)} must be positive")
        scaled: dict[str, Any] = {
            part: (((np.asarray(x) - mean) / sd).astype(np.float32), y)
            for part, (x, y) in self._parts().items()
        }
        return replace(self, **scaled)

    def federation(self, classes: int | None = None) -> Federation:
        """Of this client alone, checked. Without classes its targets are floats."""
        given: dict[str, Any] = {part: [pair] for part, pair in self._parts().items()}
        if classes is None:
            given = {part: [(x, _floats(y))] for part, [(x, y)] in given.items()}
        try:
            made = Federation.from_arrays(**given, classes=classes, name=self.name or "arrays")
        except BadInput as error:  # it is not client 0 of the run
            raise BadInput(str(error).replace(", client 0", "", 1)) from None
        if classes is not None and made.classes is None:
            raise BadInput(f"the targets are floats, but the run has {classes} classes; give "
                           f"labels from 0 to {classes - 1}, or set classes = 0")  # fmt: skip
        return made

    def _parts(self) -> dict[str, Pair]:
        """Those that it has."""
        found = {part: getattr(self, part) for part in SPLITS}
        return {part: pair for part, pair in found.items() if pair is not None}


def read_table(
    path: Path,
    target: str,
    columns: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """x (float32) and y of a CSV file whose first line names its columns."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows, heads = [(reader.line_num, row) for row in reader], list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"{path} cannot be read as a CSV file: {why}") from None
    inputs = [head for head in heads if head != target] if columns is None else list(columns)
    if target in inputs:
        raise BadInput(f"columns: {shown(target)} is the target, and cannot be an input as well")
    for head in (target, *inputs):
        if heads.count(head) > 1:
            raise BadInput(f"{path} has several columns {shown(head)}; each needs its own name")
        if head not in heads:
            known = ", ".join(h if h == h.strip() else shown(h) for h in heads) or "none"
            raise BadInput(f"{path} has no column {shown(head)}; it has {known}; columns are "
                           "separated by commas")  # fmt: skip
    if not rows or not inputs:
        raise BadInput(f"{path} has no samples; it must have a header and a line for each sample")
    for line, row in rows:  # values too few are None, and values too many are a list under None
        values = sum(row[head] is not None for head in heads) + len(row.get(None, ()))
        if values != len(heads):
            raise BadInput(f"{path}, line {line} has {values} values for {len(heads)} columns; "
                           "commas separate values, and decimals need a point")  # fmt: skip
    x = [[_number(row[head], path, line, head) for head in inputs] for line, row in rows]
    if labels is None:
        y = np.array([_number(row[target], path, line, target) for line, row in rows])
        whole = all(value.is_integer() for value in y.tolist())
        return np.array(x, dtype=np.float32), y.astype(np.int64 if whole else np.float32)
    number = {label: k for k, label in enumerate(labels)}
    for line, row in rows:
        if row[target] not in number:
            raise BadInput(f"{path}, line {line}: {target} is {shown(row[target])}; the labels are "
                           f"{', '.join(labels)}")  # fmt: skip
    return np.array(x, dtype=np.float32), np.array([number[row[target]] for _, row in rows])


def _fitting(name: str, given: Any, shape: tuple[int, ...]) -> np.ndarray:
    """One number, or one per column. (numpy would make two columns of one by two numbers.)"""
    try:
        found = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.array(np.nan)
    if not np.isfinite(found).all():
        raise BadInput(f"scaled: {name} = {shown(given)} must be finite numbers")
    try:
        return np.broadcast_to(found, shape)
    except ValueError:
        raise BadInput(f"scaled: {name} has shape {found.shape}, a sample has {shape}; give one "
                       "number, or one per column") from None  # fmt: skip


def _each(function: Callable[[Any], Any], x: Any) -> Any:
    """Of the one array, or of each of several."""
    if isinstance(x, dict):
        return {name: function(part) for name, part in x.items()}
    return tuple(map(function, x)) if isinstance(x, tuple) else function(x)


def _floats(y: Any) -> Any:
    """A table of whole numbers only may be of a regression, too."""
    y = np.asarray(y)
    return y.astype(np.float32) if y.dtype.kind in "biu" else y


def _number(text: str | None, path: Path, line: int, head: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = nan
    if not isfinite(value):
        raise BadInput(f"{path}, line {line}: {head} is {shown(text or '')}, not a number; fill "
                       "the gap or leave the line out")  # fmt: skip
    return value
