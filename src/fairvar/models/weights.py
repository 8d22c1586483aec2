"""Weight files into a model, without running anything that is in them.

torch's own reader executes a restricted pickle, and has been broken twice (CVE-2025-32434,
CVE-2026-24747). Here `.safetensors` is read by its library, and a `.pth` or `.pt` file (a zip that
holds a small pickle beside raw storages) by `_Reader`: it walks through the *names* of the opcodes,
knows just those that a state dict of plain tensors consists of, calls nothing the file names, and
checks every size and offset against the bytes that are there.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import load as parse_safetensors
from torch import Tensor, nn

from fairvar.errors import BadInput, IntegrityError
from fairvar.system.files import MOST_TENSORS, read_bytes
from fairvar.tree import Tree

MOST_INDEX_BYTES = 2 << 20  # of the pickle or the header that lists the tensors
MOST_ENTRIES = 100_000  # of a zip
_STORAGES = {
    "torch FloatStorage": torch.float32,
    "torch DoubleStorage": torch.float64,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
# Everything that zipfile was seen to raise on damaged files.
_UNREADABLE = (
    *(zipfile.BadZipFile, struct.error, zlib.error),
    *(ArithmeticError, EOFError, OSError, RuntimeError, ValueError),
)
_DICT = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"


def load_weights(
    module: nn.Module,
    path: str | Path,
    sha256: str | None = None,
    strict: bool = True,
    skip: Sequence[str] = (),
) -> list[str]:
    """Copies the tensors of a weight file into `module` and returns the names of those loaded.

    Names that begin with one of `skip` are left as they are in the module: with other class counts
    say `skip=("classifier.1.",)`; nothing is left out silently. `strict=False` allows names missing
    on either side, never another shape. Either everything is copied or, with an error, nothing.
    """
    path = Path(path)
    tensors = read_tensors(path, sha256)
    own = module.state_dict()
    for prefix in skip:
        if not any(name.startswith(prefix) for name in (*own, *tensors)):
            raise BadInput(
                f"skip={prefix!r} is the beginning of no name in {path.name} or the model"
            )
    tensors = {name: t for name, t in tensors.items() if not name.startswith(tuple(skip))}
    own = {name: t for name, t in own.items() if not name.startswith(tuple(skip))}
    if strict and tensors.keys() != own.keys():
        raise BadInput(
            f"{path.name} does not fit the model: {_names('missing', own.keys() - tensors.keys())}"
            f" and {_names('unknown', tensors.keys() - own.keys())}; see skip= and strict="
        )
    common = [name for name in own if name in tensors]
    if not common:
        raise BadInput(f"{path.name} has no tensor of this model: it is for another one")
    for name in common:
        _check_fits(path, name, tensors[name], own[name])
    with torch.no_grad():
        for name in common:
            own[name].copy_(tensors[name])
    return common


def read_tensors(path: str | Path, sha256: str | None = None) -> Tree:
    """The tensors of a `.safetensors`, `.pth` or `.pt` file by name."""
    path = Path(path)
    data = _read_bytes(path)
    if sha256 is not None:
        found = hashlib.sha256(data).hexdigest()
        if found != sha256.lower():
            raise IntegrityError(f"{path.name} has SHA-256 {found}, not {sha256}: fetch it again")
    if path.suffix == ".safetensors":
        return _read_safetensors(path.name, data)
    if path.suffix in (".pth", ".pt"):
        return _read_zip(path.name, data)
    raise BadInput(f"{path.name}: weight files end in .safetensors, .pth or .pt")


def _read_bytes(path: Path) -> bytes:
    """Read once, so that what was checked is what is used."""
    try:
        return read_bytes(path, MOST_TENSORS)
    except OSError as error:
        raise BadInput(f"cannot read weights {path.name}: {error.strerror}") from None


def _names(what: str, names: set[str]) -> str:
    shown = ", ".join(repr(name[:80]) for name in sorted(names)[:3])
    more = ", …" if len(names) > 3 else ""
    return f"{len(names)} {what}" + (f" ({shown}{more})" if names else "")


def _check_fits(path: Path, name: str, new: Tensor, old: Tensor) -> None:
    if new.shape != old.shape:
        raise BadInput(
            f"{path.name}: {name} has shape {tuple(new.shape)}, the model's is {tuple(old.shape)}; "
            f"to keep the model's own pass skip=({name.rpartition('.')[0] + '.'!r},)"
        )
    if new.is_floating_point() != old.is_floating_point() or new.is_complex() or old.is_complex():
        raise BadInput(f"{path.name}: {name} is {new.dtype}, the model's is {old.dtype}")
    if new.is_floating_point() and not bool(torch.isfinite(new).all()):
        raise IntegrityError(f"{path.name}: {name} holds values that are not finite")


def _read_safetensors(file: str, data: bytes) -> Tree:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MOST_INDEX_BYTES, len(data) - 8):
        raise IntegrityError(f"{file} is cut off or no safetensors file")
    try:
        # The library keeps the last of two equal names; a file with two is forged.
        names = json.loads(data[8 : 8 + length], object_pairs_hook=lambda pairs: pairs)
        if isinstance(names, list) and len({name for name, _ in names}) < len(names):
            raise IntegrityError(f"{file} names a tensor twice")
        return parse_safetensors(data)
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise IntegrityError(f"{file} is no valid safetensors file: {_line(error)}") from None


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def _read_zip(file: str, data: bytes) -> Tree:
    if data.count(b"PK\1\2") > MOST_ENTRIES:
        raise IntegrityError(f"{file} is refused: the zip has more than {MOST_ENTRIES} entries")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _Reader(file, archive, len(data)).tensors()
    except _UNREADABLE as error:
        raise IntegrityError(
            f"{file} is no intact zip file of weights ({_line(error)}): files from before "
            "torch 1.6 must be saved again as safetensors"
        ) from None


class _Global(NamedTuple):
    """A name that the file mentions. It is only ever compared, never imported."""

    name: str


class _Storage(NamedTuple):
    values: Tensor


class _Reader:
    """One `.pth` file: the zip's table first, then the pickle's opcodes one by one."""

    def __init__(self, file: str, archive: zipfile.ZipFile, size: int) -> None:
        self.file = file
        self.archive = archive
        self.entries = self._checked_entries(size)
        self.storages: dict[str, _Storage] = {}
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def _bad(self, what: str) -> IntegrityError:
        return IntegrityError(f"{self.file} is refused: {what}")

    def _checked_entries(self, size: int) -> dict[str, zipfile.ZipInfo]:
        """The zip's entries without their common folder; torch writes them uncompressed."""
        infos = self.archive.infolist()
        names = [info.filename for info in infos]
        roots = {name.partition("/")[0] for name in names}
        if len(set(names)) < len(names) or len(roots) != 1:
            raise self._bad("the zip has two equal names or several folders")
        for info in infos:
            parts = info.filename.split("/")
            if ".." in parts or "" in parts or "\\" in info.filename:
                raise self._bad(f"the zip has an entry with the path {info.filename[:80]!r}")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise self._bad(
                    f"the zip's entry {info.filename[:80]!r} is compressed or encrypted"
                )
        if sum(info.file_size for info in infos) > size:
            raise self._bad("the zip's entries claim more bytes than the file has")
        return {info.filename.partition("/")[2]: info for info in infos}

    def _bytes(self, name: str) -> bytes:
        if name not in self.entries:
            raise self._bad(f"it has no part {name[:80]!r}")
        return self.archive.read(self.entries[name])

    def tensors(self) -> Tree:
        if "byteorder" in self.entries and self._bytes("byteorder") != b"little":
            raise self._bad("its numbers are not little-endian")
        if "data.pkl" in self.entries and self.entries["data.pkl"].file_size > MOST_INDEX_BYTES:
            raise self._bad("its list of tensors is too long")
        try:
            result = self._interpret(self._bytes("data.pkl"))
        except (IndexError, KeyError, TypeError, ValueError, UnicodeError) as error:
            raise self._bad(f"its list of tensors is malformed ({_line(error)})") from None
        if not isinstance(result, dict) or not all(isinstance(v, Tensor) for v in result.values()):
            raise self._bad("it is not a flat dict of tensors; save model.state_dict() alone")
        return result

    def _interpret(self, code: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(code):
            if opcode.name == "STOP":
                return self.stack.pop()
            self._step(opcode.name, argument)
        raise ValueError("no end")

    def _step(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        match opcode:
            case "PROTO" if argument == 2:
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._pop(None if opcode == "TUPLE" else int(opcode[-1]))))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode])
            case "BININT" | "BININT1" | "BININT2" | "BINUNICODE":
                stack.append(argument)
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL" if argument in (_DICT, _TENSOR, _PARAMETER, *_STORAGES):
                stack.append(_Global(argument))
            case "BINPERSID":
                stack.append(self._storage(*stack.pop()))
            case "REDUCE":
                function, arguments = self._pop(2)
                stack.append(self._build(function, arguments))
            case "SETITEM" | "SETITEMS":
                self._set_items(self._pop(None if opcode == "SETITEMS" else 2))
            case "BUILD":
                stack.pop()  # the state dict's version numbers; its attributes are never set
                if not isinstance(stack[-1], dict):
                    raise self._bad("opcode BUILD on something that is not a dict")
            case _:
                detail = f" {argument[:80]!r}" if isinstance(argument, str) else ""
                raise self._bad(f"opcode {opcode}{detail} has no place in a file of weights")

    def _pop(self, count: int | None) -> list[Any]:
        """The last `count` values, or those since the last mark."""
        start = self.marks.pop() if count is None else len(self.stack) - count
        if not (self.marks[-1] if self.marks else 0) <= start <= len(self.stack):
            raise ValueError("stack too short")
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("items without a dict")
        for name, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(name, str) or name in target:
                raise ValueError("a name is no text, or comes twice")
            target[name] = value

    def _build(self, function: Any, arguments: Any) -> Any:
        """What a state dict may call: an empty OrderedDict, a tensor, a parameter."""
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise ValueError("a call of something that has no name")
        if function.name == _DICT and not arguments:
            return {}
        if function.name == _TENSOR and len(arguments) in (6, 7):
            return self._tensor(*arguments[:4])
        if function.name == _PARAMETER and len(arguments) == 3 and isinstance(arguments[0], Tensor):
            return arguments[0]
        raise ValueError(f"{function.name} with {len(arguments)} arguments")

    def _storage(self, tag: str, kind: _Global, name: str, place: str, count: int) -> _Storage:
        """The raw numbers of one part of the zip; where they lived (`place`) does not matter."""
        dtype = _STORAGES.get(kind.name) if isinstance(kind, _Global) else None
        if tag != "storage" or dtype is None or not isinstance(name, str) or type(count) is not int:
            raise ValueError("not a storage")
        if name not in self.storages:
            raw = bytearray(self._bytes(f"data/{name}"))
            if len(raw) % dtype.itemsize:
                raise self._bad(f"storage {name[:80]!r} is cut off")
            empty = torch.empty(0, dtype=dtype)
            self.storages[name] = _Storage(torch.frombuffer(raw, dtype=dtype) if raw else empty)
        storage = self.storages[name]
        if storage.values.dtype != dtype or storage.values.numel() != count:
            raise self._bad(
                f"storage {name[:80]!r} should have {count} numbers of {dtype}, "
                f"it has {storage.values.numel()} of {storage.values.dtype}"
            )
        return storage

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
        """A view of a storage, if every element lies inside it and it repeats none."""
        if (
            not isinstance(storage, _Storage)
            or type(size) is not tuple
            or type(stride) is not tuple
        ):
            raise ValueError("not a tensor")
        if len(size) > 16:  # also keeps the product below short
            raise ValueError("more than 16 axes")
        if any(type(number) is not int or number < 0 for number in (offset, *size, *stride)):
            raise ValueError("a size or offset is not a natural number")
        held = storage.values.numel()
        elements = math.prod(size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if elements > held or (elements and last >= held) or offset > held:
            raise self._bad(
                f"a tensor of shape {size[:8]} reaches past its storage of {held} numbers"
            )
        return storage.values.as_strided(size, stride, offset)
