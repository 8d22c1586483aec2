"""`Checked`: a frozen struct whose fields are checked when it is created, in Python or from TOML.

msgspec checks types and bounds only when it converts; a struct created in Python would skip them.
So `FairLoss(strength=-1)` and `strength = -1` in a configuration file give the same error.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import msgspec

from fairvar.errors import BadInput, plain, shown, suggestion

# Infinity is greater than zero, so every number has an upper bound too.
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


class Checked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of methods, partitions and configuration sections."""

    __where__: ClassVar[str | None] = None  # the name in errors; by default the class name

    def __post_init__(self) -> None:
        for name, kind in _field_types(type(self)):
            value = as_python(getattr(self, name))
            try:
                value = msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                where = f"{self.__where__ or type(self).__name__}.{name}"
                raise BadInput(f"{where} = {shown(value)}: {reason(error, kind)}") from None
            msgspec.structs.force_setattr(self, name, value)
        self.check()

    def check(self) -> None:
        """Conditions between fields; raise `BadInput`. Nothing by default."""


def as_python(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python's; other things as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def whole_number(name: str, value: object, least: int = 0) -> int:
    """Raise unless it is a whole number of Python, numpy or torch."""
    found = as_python(value)
    if not isinstance(found, int) or isinstance(found, bool) or found < least:
        raise BadInput(f"{name} = {shown(value)}: give a whole number, at least {least}")
    return found


@cache
def _field_types(kind: type[Checked]) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(kind)]


WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false",
         "array": "a list", "object": "a section", "null": "nothing"}  # fmt: skip


def reason(error: msgspec.ValidationError, kind: Any) -> str:
    """msgspec's message in the words of the documentation; `kind` is the type of the field."""
    text = str(error).split(" - at ")[0]
    if text.startswith("Invalid enum value"):
        return suggestion(text.split(maxsplit=3)[-1].strip("'"), map(str, literals(kind)))
    text = text.replace("Object missing required field", "needs").replace("Expected ", "must be ")
    text = re.sub(r"\.0\b", "", text.replace(", got ", ", not "))
    for old, new in WORDS.items():
        text = re.sub(rf"(`|\| ){old}\b", rf"\1{new}", text)
    text = text.replace(" | ", " or ").replace("`", "")
    if len(found := bounds(kind)) == 2:  # msgspec names the one that does not hold
        text = re.sub(r"[<>]=? \S+$", " and ".join(found), text)
    return text[0].lower() + text[1:]


def bounds(kind: Any) -> list[str]:
    """The bounds of a number, without the one that stands for "finite"."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    given = [
        (signs[k], getattr(m, k, None)) for m in getattr(kind, "__metadata__", ()) for k in signs
    ]
    inner = [bound for part in get_args(kind) for bound in bounds(part)]
    return [f"{sign} {v:g}" for sign, v in given if v is not None and abs(v) < 1e9] or inner


def literals(kind: Any) -> list[Any]:
    """All literal values within a type."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for inner in get_args(kind) for value in literals(inner)]


def check_component(where: str, name: str) -> None:
    """Refuse a name that is not one part of a path."""
    if not name or name in (".", "..") or len(name.encode(errors="replace")) > 100:
        raise BadInput(f"{where} = {shown(name)}: must be a name of 1 to 100 characters")
    if any(c in name for c in "/\\:") or plain(name) != name:
        raise BadInput(
            f"{where} = {shown(name)}: must be one name without / \\ : and control characters, "
            "since it becomes a folder"
        )
