"""The registry and catalogue of methods, and everything that the author of a method imports.

    from fairvar.methods import Memory, Method, Positive, Replies, register

Adding a method: a file here and a line below, or `register` from outside (docs/methods/index.md).
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from fairvar.common.tree import Tree, squared_norm, tree_map, weighted_sum
from fairvar.common.validation import Count, Fraction, NonNegative, Positive, Share
from fairvar.errors import LONGEST, BadInput, plain, shown
from fairvar.methods.aaggff import AAggFF
from fairvar.methods.adafed import AdaFed
from fairvar.methods.afl import AFL
from fairvar.methods.base import (
    ClientWeights,
    LossData,
    Memory,
    Method,
    Personal,
    Replies,
    Traffic,
)
from fairvar.methods.ditto import Ditto
from fairvar.methods.fairgrad import FairGrad
from fairvar.methods.fairloss import FairLoss
from fairvar.methods.fedavg import FedAvg
from fairvar.methods.fedeba import FedEBA
from fairvar.methods.fedfv import FedFV
from fairvar.methods.fedmgda import FedMGDA
from fairvar.methods.fedprox import FedProx
from fairvar.methods.gifair import GIFAIR
from fairvar.methods.propfair import PropFair
from fairvar.methods.qffl import QFFL
from fairvar.methods.semivred import SemiVRed
from fairvar.methods.simplex import minimise_quadratic as minimise_on_simplex
from fairvar.methods.simplex import project as project_to_simplex
from fairvar.methods.superquantile import Superquantile
from fairvar.methods.term import TERM

METHODS: dict[str, type[Method]] = {}

M = TypeVar("M", bound=type[Method])
_EXAMPLE_FLOATS = 1_000_000  # any number far above the few scalars


def register(kind: M) -> M:
    """Add a method under its tag, for configuration files, the command line and the tests."""
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise BadInput(f"{shown(kind)} is no method; write class NAME(fairvar.Method, frozen=True, "
                       'tag="…")')  # fmt: skip
    tag = kind.__struct_config__.tag
    if not isinstance(tag, str):
        raise BadInput(f'{kind.__name__} has no name; write class {kind.__name__}(..., tag="…")')
    if any(plain(text) != text or len(text) > LONGEST for text in (tag, kind.title)):
        raise BadInput(
            f"tag and title of {kind.__name__} must be short and without control characters"
        )
    if (taken := METHODS.get(tag)) is not None and _origin(taken) != _origin(kind):
        raise BadInput(
            f'the name "{tag}" belongs to {".".join(_origin(taken))}; '
            f"give {kind.__name__} another tag"
        )
    METHODS[tag] = kind
    return kind


def _origin(kind: type[Method]) -> tuple[str, str]:
    """The name of the class: a class defined again, in a notebook, replaces the old one."""
    return kind.__module__, kind.__qualname__


def catalogue() -> list[dict[str, Any]]:
    """What each registered method is, costs and reveals, as plain data: one entry per method and,
    if it has one, for its exact variant."""
    entries = []
    for name, kind in METHODS.items():
        needed = [f.name for f in msgspec.structs.fields(kind) if f.required]
        plain = kind(**dict.fromkeys(needed, 0.1))
        entries.append(_entry(name, plain))
        if hasattr(plain, "exact"):
            entries.append(_entry(name, msgspec.structs.replace(plain, exact=True)))
    return entries


def _entry(name: str, method: Method) -> dict[str, Any]:
    traffic, fields = method.traffic(_EXAMPLE_FLOATS), msgspec.structs.fields(method)
    return {
        "name": name,
        "label": method.label,
        "reference": method.reference,
        "when": method.when,
        "exchanges": traffic.exchanges,
        "down": _floats(traffic.floats_down),
        "up": _floats(traffic.floats_up),
        "reveals": [*method.reveals, *(["every update by itself"] if method.uses_gram else [])],
        "sums_suffice": method.sums_suffice,
        "curvature": method.uses_curvature,
        "options": {f.name: "needed" if f.required else f.default for f in fields},
        "equation": (type(method).__doc__ or "").strip().partition("\n")[0],
    }


def _floats(count: int) -> str:
    """1,000,001 → "d + 1s"."""
    models, scalars = divmod(count, _EXAMPLE_FLOATS)
    return f"{'' if models == 1 else models}d" + (f" + {scalars}s" if scalars else "")


BUILT_IN = (
    FedAvg, AFL, QFFL, AAggFF, FairLoss, FairGrad, TERM, PropFair, Superquantile, GIFAIR, SemiVRed,
    FedMGDA, FedFV, AdaFed, FedEBA, FedProx, Ditto,
)  # fmt: skip
for _kind in BUILT_IN:
    register(_kind)

__all__ = [
    "AFL", "GIFAIR", "METHODS", "QFFL", "TERM", "AAggFF", "AdaFed", "BadInput", "ClientWeights",
    "Count", "Ditto", "FairGrad", "FairLoss", "FedAvg", "FedEBA", "FedFV", "FedMGDA", "FedProx",
    "Fraction", "LossData", "Memory", "Method", "NonNegative", "Personal", "Positive", "PropFair",
    "Replies", "SemiVRed", "Share", "Superquantile", "Traffic", "Tree", "minimise_on_simplex",
    "project_to_simplex", "register", "squared_norm", "tree_map", "weighted_sum",
]  # fmt: skip
