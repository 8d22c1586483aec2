"""CIFAR-10 and CIFAR-100: the binary and the python version, as folders or as .tar.gz.

The python version consists of pickles. They are read by an unpickler that knows the parts of
numpy's arrays only, and replaces even these by two small classes that accept a table of bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from jaxtyping import Int64, UInt8

from fairvar.data.readers import Layout, Samples, check_labels, joined, read_capped, reason, refused
from fairvar.data.readers.archives import tar_files

PIXELS = 3 * 32 * 32
MOST_BYTES, MOST_FILE_BYTES = 192 << 20, 160 << 20  # real: 186 and 155 million
MOST_READS = 1_000_000  # of one pickle; CIFAR-100's have half a million


@dataclass(frozen=True)
class Cifar:
    """What differs between CIFAR-10 and CIFAR-100."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    classes: int
    label_key: str  # in the python version
    label_bytes: int  # in the binary version; the last one is the class
    archive: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.train, *self.test)


CIFAR10 = Cifar(tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",), 10, "labels", 1,
                "cifar-10")  # fmt: skip
CIFAR100 = Cifar(("train",), ("test",), 100, "fine_labels", 2, "cifar-100")


def binary_batch(
    file: str, data: bytes, kind: Cifar
) -> tuple[UInt8[np.ndarray, "N 3 32 32"], Int64[np.ndarray, " N"]]:
    record = kind.label_bytes + PIXELS
    if not data or len(data) % record:
        raise refused(file, f"its {len(data)} bytes are no multiple of {record}, one image's")
    table = np.frombuffer(data, np.uint8).reshape(-1, record)
    y = table[:, kind.label_bytes - 1].astype(np.int64)
    check_labels(file, y, kind.classes)
    return table[:, kind.label_bytes :].reshape(-1, 3, 32, 32), y


def python_batch(
    file: str, data: bytes, kind: Cifar
) -> tuple[UInt8[np.ndarray, "N 3 32 32"], Int64[np.ndarray, " N"]]:
    stream = _Counted(data)
    try:
        batch = _Unpickler(stream, encoding="latin-1").load()
    except KeyError as error:
        raise refused(file, f"opcode {error} has no place in a CIFAR batch") from None
    except Exception as error:  # pickle raises nearly anything on damaged files
        raise refused(file, f"it is no intact CIFAR batch ({reason(error)})") from None
    if stream.tell() != len(data) or not isinstance(batch, dict):
        raise refused(file, "it holds something other than one dict, or something follows its end")
    table, labels = batch.get("data"), batch.get(kind.label_key)
    if not isinstance(table, _Table) or table.values.shape[1] != PIXELS:
        raise refused(file, f"it has no table 'data' with {PIXELS} columns")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise refused(file, f"it has no list {kind.label_key!r} of numbers")
    if len(labels) != len(table.values):
        raise refused(file, f"it has {len(labels)} labels for {len(table.values)} images")
    y = np.array(labels, dtype=np.int64)
    check_labels(file, y, kind.classes)
    return table.values.reshape(-1, 3, 32, 32), y


class _Counted(io.BytesIO):
    """Ends a pickle of too many parts, which would take long and fill the memory."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > MOST_READS:
            raise pickle.UnpicklingError(f"it has more than {MOST_READS} parts")
        return super().read(size)


class _ByteType:
    """Stands for `numpy.dtype` and accepts the type of one unsigned byte."""

    def __init__(self, code: Any, *rest: Any) -> None:
        if code not in ("u1", "|u1"):
            raise ValueError(f"a table of {code!r:.20}, not a table of bytes")

    def __setstate__(self, state: Any) -> None:
        if state[:2] != (3, "|"):
            raise ValueError("a dtype with a state of its own")


class _Table:
    """Stands for `numpy.ndarray`: two axes of unsigned bytes, row by row."""

    values: np.ndarray = np.empty((0, 0), dtype=np.uint8)

    def __init__(self, *rest: Any) -> None:
        """numpy's arguments (a class, the shape 0 and a type) mean nothing before the state."""

    def __setstate__(self, state: Any) -> None:
        version, shape, dtype, fortran, values = state
        if version != 1 or not isinstance(dtype, _ByteType) or fortran is not False:
            raise ValueError("its table is not one of bytes, row by row")
        if type(shape) is not tuple or len(shape) != 2 or any(type(n) is not int for n in shape):
            raise ValueError("its table does not have two axes")
        content = values.encode("latin-1") if isinstance(values, str) else values
        if min(shape) < 1 or shape[0] * shape[1] != len(content):
            raise ValueError(f"its table of {shape[0]} × {shape[1]} has {len(content)} bytes")
        self.values = np.frombuffer(content, np.uint8).reshape(shape)


CLASSES = {
    ("numpy.core.multiarray", "_reconstruct"): _Table,
    ("numpy._core.multiarray", "_reconstruct"): _Table,
    ("numpy", "ndarray"): _Table,
    ("numpy", "dtype"): _ByteType,
}
OPCODES = (
    b"\x80\x95."  # protocol, frame, stop
    b"(}]uesa\x85\x86\x87tN\x88\x89"  # containers and constants
    b"JKMUTXBC\x8c\x8e"  # numbers, texts and bytes
    b"qrhj\x94cR\x93b"  # memo, names, calls and states
)


class _Unpickler(pickle._Unpickler):
    """Python's unpickler written in Python, with the opcodes of CIFAR's batches only. (The one in
    C can be made to allocate any amount of memory, by the number of a memo.)"""

    dispatch: ClassVar = {code: pickle._Unpickler.dispatch[code] for code in OPCODES}
    dispatch[0x95] = lambda self: cast(Any, self).read(8)  # a frame's length is only a hint

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in CLASSES:
            raise pickle.UnpicklingError(f"{module[:40]}.{name[:40]} has no place in a CIFAR batch")
        return CLASSES[module, name]


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _contents(paths: Sequence[Path], names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Base name and bytes of each batch file, from a folder or out of an archive."""
    if len(paths) > 1:
        for path in paths:
            yield path.name, read_capped(path, MOST_FILE_BYTES)
        return
    seen: set[str] = set()
    files = tar_files(paths[0], MOST_BYTES, MOST_FILE_BYTES, lambda n: _base(n) in names)
    for base, data in ((_base(name), data) for name, data in files):
        if base in seen:
            raise refused(paths[0], f"it holds {base} twice")
        seen.add(base)
        yield base, data
    for name in names:
        if name not in seen:
            raise refused(paths[0], f"it lacks {name}")


def _read(paths: Sequence[Path], kind: Cifar, binary: bool) -> Samples:
    suffix, batch = (".bin", binary_batch) if binary else ("", python_batch)
    names = [name + suffix for name in kind.names]
    parts = {name: batch(name, data, kind) for name, data in _contents(paths, names)}
    train, test = ([parts[n + suffix] for n in part] for part in (kind.train, kind.test))
    return joined(train, test, kind.classes, f"{'binary' if binary else 'python'} version")


def layouts(kind: Cifar) -> tuple[Layout, ...]:
    """Folder and archive, binary and python."""

    def layout(suffix: str, archive: str, binary: bool) -> Layout:
        def match(path: Path) -> list[Path]:
            files = [path / (name + suffix) for name in kind.names]
            if any(file.is_file() for file in files):
                return files
            file = path if path.name == archive else path / archive
            return [file] if file.is_file() else []

        return Layout(match, lambda paths: _read(paths, kind, binary))

    return (
        layout(".bin", f"{kind.archive}-binary.tar.gz", True),
        layout("", f"{kind.archive}-python.tar.gz", False),
    )
