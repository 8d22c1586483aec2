"""Data sets that are arrays in files: MNIST's idx files, CIFAR's batches, your own .npz."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from jaxtyping import Int64, UInt8

from fairvar.data.readers import (
    FileLayout,
    Samples,
    check_labels,
    joined,
    open_zip,
    read_capped,
    read_compressed,
    refused,
    refusing_damage,
    tar_files,
)
from fairvar.errors import BadInput, cause

# --- MNIST and Fashion-MNIST: four idx files, plain or gzipped -----------------------------------

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte",
             "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")  # fmt: skip
MOST_IDX_BYTES = 64 << 20  # the largest real one has 47 million
SIDE = 28


def read_idx(path: Path, axes: int) -> UInt8[np.ndarray, " *axes"]:
    """Two zero bytes, type 8 (uint8), number of axes, their big-endian lengths, the values."""
    data = read_compressed(path, MOST_IDX_BYTES)
    if data[:4] != bytes((0, 0, 8, axes)):
        raise refused(path, f"it is no idx file of bytes with {axes} axes")
    start = 4 + 4 * axes
    if len(data) < start:
        raise refused(path, "it is cut off")
    shape = struct.unpack(f">{axes}I", data[4:start])
    if math.prod(shape) != len(data) - start:
        raise refused(path, f"its header says {' × '.join(map(str, shape))} bytes, it has "
                            f"{len(data) - start}")  # fmt: skip
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _read_mnist(paths: Sequence[Path]) -> Samples:
    parts = []
    for image_file, label_file in (paths[:2], paths[2:]):
        images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
        if images.shape[1:] != (SIDE, SIDE):
            raise refused(image_file, f"its images are {images.shape[1]} × {images.shape[2]}, not "
                                      f"{SIDE} × {SIDE}")  # fmt: skip
        if len(images) != len(labels) or not len(labels):
            raise refused(label_file, f"it has {len(labels)} labels for {len(images)} images")
        check_labels(label_file, labels, 10)
        parts.append((images[:, None], labels))
    return joined(parts[:1], parts[1:], 10, "original idx files")


def _match_mnist(folder: Path) -> list[Path]:
    """The four files, each under any of its usual names; a missing one as it should be called."""
    found = []
    for name in IDX_FILES:
        variants = [folder / v for v in (name, f"{name}.gz", name.replace("-idx", ".idx"))]
        found.append(next((file for file in variants if file.is_file()), folder / name))
    return found if any(file.is_file() for file in found) else []


IDX_LAYOUTS = (FileLayout(_match_mnist, _read_mnist),)

# --- CIFAR: the binary and the python version, as folders or as .tar.gz --------------------------

PIXELS = 3 * 32 * 32
MOST_CIFAR_BYTES, MOST_BATCH_BYTES = 192 << 20, 160 << 20  # real: 186 and 155 million
MOST_READS = 1_000_000  # of one pickle; CIFAR-100's have half a million
LabelledImages = tuple[UInt8[np.ndarray, "N 3 32 32"], Int64[np.ndarray, " N"]]


@dataclass(frozen=True)
class Cifar:
    """What differs between CIFAR-10 and CIFAR-100."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    classes: int
    label_key: str  # in the python version
    label_bytes: int  # in the binary version; the last one is the class
    archive: str


CIFAR10 = Cifar(tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",), 10, "labels", 1,
                "cifar-10")  # fmt: skip
CIFAR100 = Cifar(("train",), ("test",), 100, "fine_labels", 2, "cifar-100")


def binary_batch(file: str, data: bytes, kind: Cifar) -> LabelledImages:
    record = kind.label_bytes + PIXELS
    if not data or len(data) % record:
        raise refused(file, f"its {len(data)} bytes are no multiple of {record}, one image's")
    table = np.frombuffer(data, np.uint8).reshape(-1, record)
    y = table[:, kind.label_bytes - 1].astype(np.int64)
    check_labels(file, y, kind.classes)
    return table[:, kind.label_bytes :].reshape(-1, 3, 32, 32), y


def python_batch(file: str, data: bytes, kind: Cifar) -> LabelledImages:
    """A pickle, read by an unpickler that knows the parts of numpy's arrays only, and replaces even
    these by two small classes that accept a table of bytes."""
    stream = _Counted(data)
    try:
        batch = _Unpickler(stream, encoding="latin-1").load()
    except KeyError as error:
        raise refused(file, f"opcode {error} has no place in a CIFAR batch") from None
    except Exception as error:  # pickle raises nearly anything on damaged files
        raise refused(file, f"it is no intact CIFAR batch ({cause(error)})") from None
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


def _batches(paths: Sequence[Path], names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Base name and bytes of each batch file, from a folder or out of an archive."""
    if len(paths) > 1:
        yield from ((path.name, read_capped(path, MOST_BATCH_BYTES)) for path in paths)
        return
    missing = list(names)
    for name, data in tar_files(
        paths[0], MOST_CIFAR_BYTES, MOST_BATCH_BYTES, lambda m: Path(m.name).name in names
    ):
        base = Path(name).name
        if base not in missing:
            raise refused(paths[0], f"it holds {base} twice")
        missing.remove(base)
        yield base, data
    if missing:
        raise refused(paths[0], f"it lacks {missing[0]}")


def cifar_layouts(kind: Cifar) -> tuple[FileLayout, ...]:
    """Folder and archive, binary and python."""

    def layout(form: str, suffix: str, batch: Any) -> FileLayout:
        archive = f"{kind.archive}-{form}.tar.gz"
        train, test = ([name + suffix for name in part] for part in (kind.train, kind.test))

        def match(path: Path) -> list[Path]:
            files = [path / name for name in (*train, *test)]
            if any(file.is_file() for file in files):
                return files
            file = path if path.name == archive else path / archive
            return [file] if file.is_file() else []

        def read(paths: Sequence[Path]) -> Samples:
            found = {name: batch(name, data, kind) for name, data in _batches(paths, train + test)}
            trained, tested = ([found[name] for name in part] for part in (train, test))
            return joined(trained, tested, kind.classes, f"{form} version")

        return FileLayout(match, read)

    return layout("binary", ".bin", binary_batch), layout("python", "", python_batch)


# --- your own arrays: x, y, and optionally groups, x_test, y_test, groups_test -------------------

NAMES = ("x", "y", "groups", "x_test", "y_test", "groups_test")
MOST_NPZ_BYTES = 64 << 30
MOST_RATIO = 200  # no array is compressed more than that; a bomb is
MOST_RATIO_OF_ALL = 20  # above `ANY_RATIO` bytes
ANY_RATIO = 128 << 20
MOST_TABLE_BYTES = 2 << 20  # of the zip
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _read_npz(paths: Sequence[Path]) -> Samples:
    arrays = _arrays(paths[0])
    for name in ("x", "y"):
        if name not in arrays:
            raise BadInput(f"{paths[0].name} has no array {name!r}; save it with "
                           "np.savez(file, x=…, y=…)")  # fmt: skip
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise BadInput(f"{paths[0].name}: give both x_test and y_test, or neither")
    ends = ("", "_test") if "x_test" in arrays else ("",)
    xs = [_inputs("x" + end, arrays["x" + end]) for end in ends]
    ys = [_labels("y" + end, arrays["y" + end], x) for end, x in zip(ends, xs, strict=True)]
    if xs[-1].shape[1:] != xs[0].shape[1:] or xs[-1].dtype != xs[0].dtype:
        raise BadInput(f"x_test is {xs[1].dtype} {xs[1].shape[1:]} but x is {xs[0].dtype} "
                       f"{xs[0].shape[1:]}; they must be alike")  # fmt: skip
    x, y = (part[0] if len(part) == 1 else np.concatenate(part) for part in (xs, ys))
    groups = arrays.get("groups")
    if groups is not None and "groups_test" in arrays and len(ends) == 2:
        groups = np.concatenate([groups, arrays["groups_test"]])
    if groups is not None and len(groups) not in (len(ys[0]), len(y)):
        raise BadInput(f"{len(groups)} group ids for {len(y)} samples; give one each")
    return Samples(x, y, len(ys[0]), int(y.max()) + 1, groups, note="own arrays")


def _inputs(name: str, x: np.ndarray) -> np.ndarray:
    """uint8: pixels, channels first; floats are taken as they are."""
    if x.ndim < 2 or not x.size:
        raise BadInput(f"{name} has shape {x.shape}; give samples × features or images")
    if x.dtype != np.uint8:
        if not np.issubdtype(x.dtype, np.floating):
            raise BadInput(f"{name} is {x.dtype}; give uint8 pixels or floats")
        with np.errstate(over="ignore"):  # infinity is refused with its sample's number later
            return x.astype(np.float32, copy=False)
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        raise BadInput(f"{name} has shape {x.shape}, channels last; save "
                       f"{name}.transpose(0, 3, 1, 2)")  # fmt: skip
    return x


def _labels(name: str, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise BadInput(f"{name} is {y.dtype} of shape {y.shape}; give one integer per sample")
    bad = np.flatnonzero((y < 0) | (y >= 1_000_000))
    if len(bad):
        raise BadInput(f"{name} holds label {y[bad[0]]} in sample {bad[0]}; number them from 0")
    if len(x) != len(y):
        raise BadInput(f"{name}: {len(x)} samples but {len(y)} labels")
    return y.astype(np.int64)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of the file; their sizes and headers are checked before any is unpacked."""
    with (
        refusing_damage(path, ".npz file"),
        open_zip(path, MOST_TABLE_BYTES, MOST_NPZ_BYTES) as archive,
    ):
        infos = archive.infolist()
        names = [info.filename.removesuffix(".npy") for info in infos]
        claimed, held = (sum(getattr(i, k) for i in infos) for k in ("file_size", "compress_size"))
        for name, info in zip(names, infos, strict=True):
            if name not in NAMES or names.count(name) > 1:
                raise refused(path, f"{name[:80]!r} comes twice or is none of {', '.join(NAMES)}")
            if info.file_size > 1 << 20 and info.file_size > MOST_RATIO * info.compress_size:
                raise refused(path, f"{info.filename} claims {info.file_size} bytes out of "
                                    f"{info.compress_size}; save it with np.savez")  # fmt: skip
        if claimed > min(MOST_NPZ_BYTES, max(ANY_RATIO, MOST_RATIO_OF_ALL * held)):
            raise refused(path, f"it claims {claimed} bytes out of {held}; save it with np.savez")
        return {n: _array(path, archive, i) for n, i in zip(names, infos, strict=True)}


def _array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as file:  # numpy would allocate what the header claims
        version = np.lib.format.read_magic(file)
        if version not in HEADERS:
            raise refused(path, f"{info.filename} has the unknown version {version} of .npy files")
        shape, _, dtype = HEADERS[version](file)
        if dtype.hasobject:
            raise refused(path, f"{info.filename} holds Python objects, not numbers")
        size = info.file_size - file.tell()
        if math.prod(shape) * dtype.itemsize != size or len(shape) > 8:
            raise refused(path, f"{info.filename} should have shape {shape} of {dtype} but has "
                                f"{size} bytes")  # fmt: skip
    with archive.open(info) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read(1)  # the end, where zipfile compares the checksum
    return np.asarray(array, dtype=array.dtype.newbyteorder("="))


def _match_npz(path: Path) -> list[Path]:
    return [path] if path.is_file() and path.suffix == ".npz" else []


NPZ_LAYOUTS = (FileLayout(_match_npz, _read_npz),)
