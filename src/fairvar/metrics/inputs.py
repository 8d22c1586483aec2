"""What metrics accept: lists, numpy arrays and torch tensors, as float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairvar.errors import BadInput, shown

Floats = NDArray[np.float64]
Numbers = ArrayLike | Any  # Any: a torch tensor; metrics do not import torch


def vector(values: Numbers, name: str, length: int | None = None) -> Floats:
    array = as_array(values, name)
    if array.ndim != 1 or len(array) == 0:
        raise BadInput(f"{name} has shape {array.shape}: give one number per client")
    if length is not None and len(array) != length:
        raise BadInput(f"{name} has {len(array)} entries, not {length}; give one per client")
    return array


def as_array(values: Numbers, name: str) -> Floats:
    values = values.detach().cpu().numpy() if hasattr(values, "detach") else values
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise BadInput(f"{name} cannot be read as an array of numbers") from None


def whole(value: object, name: str) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise BadInput(f"{name} = {shown(value)}: give a whole number")


def number(value: object, name: str) -> None:
    if not isinstance(value, int | float | np.number) or isinstance(value, bool):
        raise BadInput(f"{name} = {shown(value)}: give a number")
