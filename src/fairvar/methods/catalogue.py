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
        plain = _example(kind)
        variants = [plain]
        if hasattr(plain, "exact"):
            variants.append(msgspec.structs.replace(plain, exact=True))
        entries += [_entry(name, method) for method in variants]
    return entries


def _example(kind: type[Method]) -> Method:
    """An instance with defaults; required numbers get 0.1."""
    needed = [f.name for f in msgspec.structs.fields(kind) if f.required]
    return kind(**dict.fromkeys(needed, 0.1))


def _entry(name: str, method: Method) -> dict[str, Any]:
    traffic = method.traffic(_EXAMPLE_FLOATS)
    return {
        "name": name,
        "label": method.label,
        "reference": method.reference,
        "exchanges": traffic.exchanges,
        "down": _floats(traffic.floats_down),
        "up": _floats(traffic.floats_up),
        "reveals": list(method.reveals),
        "sums_suffice": method.sums_suffice,
        "curvature": method.uses_curvature,
        "options": _options(type(method)),
        "equation": (type(method).__doc__ or "").strip().partition("\n")[0],
    }


def _floats(count: int) -> str:
    """1,000,001 → "d + 1s"."""
    models, scalars = divmod(count, _EXAMPLE_FLOATS)
    return f"{'' if models == 1 else models}d" + (f" + {scalars}s" if scalars else "")


def _options(kind: type[Method]) -> dict[str, Any]:
    fields = msgspec.structs.fields(kind)
    return {f.name: "needed" if f.required else f.default for f in fields}
