"""`Checked`: a frozen struct whose fields are checked whenever one is made, from code or from TOML.

msgspec checks types and bounds only when it converts; a struct built in Python would skip them. So
`FairLoss(strength=-1)` and `strength = -1` in a configuration file end in the same one-line error.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import msgspec

from fairvar.errors import BadInput, shown, suggestion

# inf passes "greater than zero", so every number has an upper bound too.
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


class Checked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of methods, partitions and configuration sections."""

    __where__: ClassVar[str | None] = None  # how errors name the struct; its class name otherwise

    def __post_init__(self) -> None:
        for name, kind in _field_types(type(self)):
            value = getattr(self, name)
            try:
                value = msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                where = f"{self.__where__ or type(self).__name__}.{name}"
                choices = map(str, get_args(kind)) if get_origin(kind) is Literal else None
                reason = suggestion(value, choices) if choices else _plain(error)
                raise BadInput(f"{where} = {shown(value)}: {reason}") from None
            msgspec.structs.force_setattr(self, name, value)
        self.check()

    def check(self) -> None:
        """Conditions between fields; raise `BadInput`. Nothing by default."""


@cache
def _field_types(kind: type[Checked]) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(kind)]


def _plain(error: msgspec.ValidationError) -> str:
    """msgspec's sentence in words a reader of the manual would use."""
    text = str(error).split(" - at ")[0]
    for old, new in (("Expected `", "must be `"), ("`", "")):
        text = text.replace(old, new)
    return text[0].lower() + text[1:]
