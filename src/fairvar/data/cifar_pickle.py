"""The CIFAR python batches are pickles. They are read here opcode by opcode, never unpickled.

What such a file may hold: one dict of texts, lists of numbers or texts, and one uint8 table, made
by the three calls with which numpy pickles an array. Those calls are recognised by name and not
made; any other name, and any other opcode, is refused.
"""

from __future__ import annotations

import pickletools
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from fairvar.data.raw import reason, refused

_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_NDARRAY, _DTYPE = "numpy ndarray", "numpy dtype"
_NAMES = (*_RECONSTRUCT, _NDARRAY, _DTYPE)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TEXTS = ("SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE")
_BYTES = {"BINSTRING": 5, "SHORT_BINBYTES": 2, "BINBYTES": 5, "BINBYTES8": 9}  # header lengths


MOST_OPCODES = 1_000_000  # CIFAR-100 has some hundred thousand


class _Global(NamedTuple):
    """A name that the file mentions. It is only ever compared, never imported."""

    name: str


class _Dtype(NamedTuple):
    code: str


class _Array:
    """An array between its making and its filling."""

    values: np.ndarray | None = None


def parse(file: str, data: bytes) -> dict[str, Any]:
    """The batch as a dict; the table's values are a view of `data`."""
    reader = _Reader(file, memoryview(data))
    try:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if number > MOST_OPCODES:
                raise ValueError(f"it has more than {MOST_OPCODES} parts")
            if opcode.name == "STOP":
                return reader.result(position, len(data))
            reader.step(opcode.name, argument, position or 0)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise refused(file, f"it is no intact CIFAR batch ({reason(error)})") from None
    raise refused(file, "it is cut off")


class _Reader:
    def __init__(self, file: str, data: memoryview) -> None:
        self.file, self.data = file, data
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def result(self, position: int | None, length: int) -> dict[str, Any]:
        if position != length - 1:
            raise ValueError("something follows its end")
        batch = self._pop(1)[0]
        if self.stack or not isinstance(batch, dict):
            raise ValueError("it holds something other than one dict")
        return {k: v.values if isinstance(v, _Array) else v for k, v in batch.items()}

    def step(self, opcode: str, argument: Any, position: int) -> None:
        stack = self.stack
        match opcode:
            case "PROTO" if 2 <= argument <= 4:
                pass
            case "FRAME":
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "EMPTY_DICT" | "EMPTY_LIST":
                stack.append({} if opcode == "EMPTY_DICT" else [])
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._pop(None if opcode == "TUPLE" else int(opcode[-1]))))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[opcode])
            case "BININT" | "BININT1" | "BININT2":
                stack.append(argument)
            case _ if opcode in _TEXTS:
                stack.append(argument)
            case _ if opcode in _BYTES:
                start = position + _BYTES[opcode]
                stack.append(self.data[start : start + len(argument)])
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case _:
                self._compose(opcode, argument)

    def _compose(self, opcode: str, argument: Any) -> None:
        """Opcodes that put several values together."""
        match opcode:
            case "GLOBAL":
                self.stack.append(self._known(argument))
            case "STACK_GLOBAL":
                self.stack.append(self._known(" ".join(self._pop(2))))
            case "REDUCE":
                self.stack.append(_call(*self._pop(2)))
            case "BUILD":
                state = self._pop(1)[0]
                _fill(self.stack[-1], state)
            case "APPEND" | "APPENDS":
                self._extend(self._pop(None if opcode == "APPENDS" else 1))
            case "SETITEM" | "SETITEMS":
                self._set_items(self._pop(None if opcode == "SETITEMS" else 2))
            case _:
                detail = f" {argument[:80]!r}" if isinstance(argument, str) else ""
                raise refused(self.file, f"opcode {opcode}{detail} has no place in a CIFAR batch")

    def _known(self, name: str) -> _Global:
        if name not in _NAMES:
            raise refused(self.file, f"opcode GLOBAL {name[:80]!r} has no place in a CIFAR batch")
        return _Global(name)

    def _pop(self, count: int | None) -> list[Any]:
        """The last `count` values, or those since the last mark."""
        start = self.marks.pop() if count is None else len(self.stack) - count
        if not (self.marks[-1] if self.marks else 0) <= start <= len(self.stack):
            raise ValueError("stack too short")
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list or not all(type(v) in (int, str, memoryview) for v in values):
            raise ValueError("a list of something other than numbers and texts")
        target.extend(values)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("items without a dict")
        for name, value in zip(items[::2], items[1::2], strict=True):
            key = name.tobytes().decode("ascii") if isinstance(name, memoryview) else name
            if type(key) is not str or key in target:
                raise ValueError("a key is no text, or comes twice")
            if type(value) not in (int, str, memoryview, list, _Array):
                raise ValueError(f"entry {key[:40]!r} is neither text, list nor table")
            target[key] = value


def _call(function: Any, arguments: Any) -> _Array | _Dtype:
    """The two calls of a pickled array: an empty array, and its type of one unsigned byte."""
    if not isinstance(function, _Global) or type(arguments) is not tuple:
        raise ValueError("a call of something that has no name")
    if function.name in _RECONSTRUCT and arguments[:2] == (_Global(_NDARRAY), (0,)):
        return _Array()
    if function.name == _DTYPE and arguments[0] in ("u1", "|u1"):
        return _Dtype("u1")
    raise ValueError(f"{function.name} with other arguments than a table of bytes has")


def _fill(target: Any, state: Any) -> None:
    if isinstance(target, _Dtype):
        if type(state) is not tuple or state[:2] != (3, "|"):
            raise ValueError("a dtype with a state of its own")
        return
    if type(target) is not _Array or target.values is not None:
        raise ValueError("opcode BUILD on something that is not an array")
    target.values = _table(*state)


def _table(
    version: Any, shape: Any, dtype: Any, fortran: Any, values: Any
) -> UInt8[np.ndarray, "rows columns"]:
    if version != 1 or dtype != _Dtype("u1") or fortran is not False:
        raise ValueError("its table is not one of bytes, row by row")
    if type(shape) is not tuple or len(shape) != 2 or any(type(n) is not int for n in shape):
        raise ValueError("its table does not have two axes")
    if isinstance(values, str):
        values = memoryview(values.encode("latin-1"))
    if min(shape) < 1 or shape[0] * shape[1] != len(values):
        raise ValueError(f"its table of {shape[0]} × {shape[1]} has {len(values)} bytes")
    return np.frombuffer(values, np.uint8).reshape(shape)
