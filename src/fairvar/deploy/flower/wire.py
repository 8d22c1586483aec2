"""Messages as Flower's records: one ArrayRecord and one ConfigRecord each way, nothing pickled.

There is one record of arrays because Flower's privacy mods require exactly one, and the train
exchange is a plain `train` message because these mods act on no other type.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from math import prod
from typing import Any, Literal, NamedTuple
from warnings import catch_warnings

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.constant import SType
from numpy.lib import format as npy
from torch import Tensor

from fairvar.deploy.guard import Form, Reason, misfit
from fairvar.deploy.messages import Message, Number, Stamp

ARRAYS, FACTS, NUMBER = "arrays", "message", "number/"
KINDS = {"probe": "query.probe", "train": "train", "evaluate": "evaluate"}  # message types
HELLO = "query.hello"
_NAMES = ("float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
DTYPES: dict[np.dtype[Any], torch.dtype] = {np.dtype(n): getattr(torch, n) for n in _NAMES}


def to_records(message: Message, more: Mapping[str, float] | None = None) -> RecordDict:
    """`more`: numbers for Flower's mods."""
    arrays = {name: Array(leaf.numpy(force=True)) for name, leaf in message.arrays.items()}
    facts: dict[str, Any] = {"client": message.client, **message.stamp._asdict()}
    facts |= {f"{NUMBER}{name}": value for name, value in message.numbers.items()}
    return RecordDict({ARRAYS: ArrayRecord(arrays), FACTS: ConfigRecord({**facts, **(more or {})})})


class Unreadable(ValueError):
    """Not a message of fairvar, or not of the form that was asked for."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"not a message of fairvar's: {detail}")
        self.reason, self.detail = reason, detail


def from_records(records: RecordDict, like: Mapping[str, Tensor] | None = None) -> Message:
    """Raises `Unreadable` for any defect of form; the guard checks the values. Arrays whose shapes
    and types differ from `like` are refused by their headers, before memory is allocated."""
    try:
        facts: dict[str, Any] = dict(records.config_records[FACTS])
        stamp = Stamp(facts["exchange"], facts["round"], facts["attempt"], facts["format"])
        found = {name: _opened(a) for name, a in records.array_records[ARRAYS].items()}
        if like is not None and (wrong := misfit({k: h.form for k, h in found.items()}, like)):
            raise Unreadable(*wrong)
        arrays = {name: header.tensor() for name, header in found.items()}
        numbers: dict[str, Number] = {
            name.removeprefix(NUMBER): value
            for name, value in facts.items()
            if name.startswith(NUMBER)
        }
        return Message(stamp, facts["client"], arrays, numbers)
    except Unreadable:
        raise
    except Exception as error:  # also MemoryError, OverflowError, RecursionError
        raise Unreadable(Reason.FORMAT, repr(error)) from None


class Header(NamedTuple):
    """The header of an array, and its bytes."""

    form: Form
    dtype: np.dtype[Any]
    columns_first: bool
    data: memoryview

    def tensor(self) -> Tensor:
        order: Literal["F", "C"] = "F" if self.columns_first else "C"
        seen = np.ndarray(self.form[1], self.dtype, self.data, order=order)
        return torch.from_numpy(seen.copy(order="C"))


def _opened(array: Array) -> Header:
    if array.stype != SType.NUMPY:
        raise ValueError(f"arrays as {array.stype!r}")
    return header_of(array.data)


def header_of(content: bytes) -> Header:
    """Read the .npy format; raises ValueError and others. (numpy's reader would first allocate the
    size that the header claims, and would open an .npz as well.)"""
    file = BytesIO(content)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    with catch_warnings(action="error"):  # for headers that only Python 2 wrote
        shape, columns_first, dtype = read[npy.read_magic(file)](file)
    data = memoryview(content)[file.tell() :]
    if dtype not in DTYPES or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"an array of {dtype} and shape {shape}")
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of {dtype} and shape {shape}")
    return Header((DTYPES[dtype], shape), dtype, columns_first, data)
