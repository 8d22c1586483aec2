"""What each registered method is, costs and reveals, as plain data."""

from __future__ import annotations

from typing import Any

import msgspec

from fairvar.methods import METHODS, Method

_EXAMPLE_FLOATS = 1_000_000  # any number that is far from the few scalars


def catalogue() -> list[dict[str, Any]]:
    """One entry per method and, where it has one, for its exact variant."""
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
