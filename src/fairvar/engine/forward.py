"""Forward-mode differentiation, without torch's warning about itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad


def jvp(function: Callable[..., Any], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """`torch.func.jvp`."""
    _load()
    value, tangent = torch.func.jvp(function, primals, tangents)[:2]
    return value, tangent


@cache
def _load() -> None:
    """Torch's first forward derivative loads rules that torch itself compiles with its deprecated
    `torch.jit.script`: a DeprecationWarning in 2.13, a FutureWarning, shown to users, in 2.15."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
