"""Your own arrays in one .npz: x, y, and optionally groups, x_test, y_test, groups_test."""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fairvar.data.raw import Layout, Raw, reason, refused, unreadable
from fairvar.errors import BadInput, FairvarError
from fairvar.system.files import open_regular

NAMES = ("x", "y", "groups", "x_test", "y_test", "groups_test")
MOST_BYTES = 64 << 30
MOST_RATIO = 200  # no array is compressed more than that; a bomb is
MOST_RATIO_OF_ALL = 20  # above `ANY_RATIO` bytes
ANY_RATIO = 128 << 20
AT_ONCE = 2 << 20  # of the zip's table, too
_UNREADABLE = (zipfile.BadZipFile, struct.error, zlib.error, ArithmeticError, EOFError,
               RuntimeError, NotImplementedError, ValueError, TypeError, LookupError,
               SyntaxError, MemoryError)  # fmt: skip


def read(paths: Sequence[Path]) -> Raw:
    arrays = _arrays(paths[0])
    for name in ("x", "y"):
        if name not in arrays:
            raise BadInput(f"{paths[0].name} has no array {name!r}; save it with "
                           "np.savez(file, x=…, y=…)")  # fmt: skip
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise BadInput(f"{paths[0].name}: give both x_test and y_test, or neither")
    x, y = _inputs("x", arrays["x"]), _labels("y", arrays["y"])
    _check_length("x", x, y)
    train, groups = len(y), arrays.get("groups")
    if "x_test" in arrays:
        x_test = _inputs("x_test", arrays["x_test"])
        y_test = _labels("y_test", arrays["y_test"])
        _check_length("x_test", x_test, y_test)
        if x_test.shape[1:] != x.shape[1:] or x_test.dtype != x.dtype:
            raise BadInput(f"x_test is {x_test.dtype} {x_test.shape[1:]} but x is {x.dtype} "
                           f"{x.shape[1:]}; they must be alike")  # fmt: skip
        x, y = np.concatenate([x, x_test]), np.concatenate([y, y_test])
        if groups is not None and "groups_test" in arrays:
            groups = np.concatenate([groups, arrays["groups_test"]])
    if groups is not None and len(groups) not in (train, len(y)):
        raise BadInput(f"{len(groups)} group ids for {len(y)} samples; give one each")
    return Raw(x, y, train, int(y.max()) + 1, groups, note="own arrays")


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


def _labels(name: str, y: np.ndarray) -> np.ndarray:
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise BadInput(f"{name} is {y.dtype} of shape {y.shape}; give one integer per sample")
    if y.dtype == np.uint64 and len(y) and int(y.max()) > 2**62:
        raise BadInput(f"{name} holds {int(y.max())}; number the labels from 0")
    y = y.astype(np.int64)
    bad = np.flatnonzero((y < 0) | (y >= 1_000_000))
    if len(bad):
        raise BadInput(f"{name} holds label {y[bad[0]]} in sample {bad[0]}; number them from 0")
    return y


def _check_length(name: str, x: np.ndarray, y: np.ndarray) -> None:
    if len(x) != len(y):
        raise BadInput(f"{name} has {len(x)} samples but {len(y)} labels")


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with (
            open_regular(path, MOST_BYTES, at_once=AT_ONCE) as file,
            zipfile.ZipFile(file) as archive,
        ):
            infos = archive.infolist()
            names = [info.filename.removesuffix(".npy") for info in infos]
            for name in names:
                if name not in NAMES or names.count(name) > 1:
                    raise refused(path, f"{name[:80]!r} comes twice or is none of "
                                        f"{', '.join(NAMES)}")  # fmt: skip
            _check_sizes(path, infos)
            return {n: _array(path, archive, i) for n, i in zip(names, infos, strict=True)}
    except FairvarError:
        raise
    except _UNREADABLE as error:
        raise refused(path, f"it is no intact .npz file ({reason(error)})") from None
    except OSError as error:
        raise unreadable(path, error) from None


def _check_sizes(path: Path, infos: Sequence[zipfile.ZipInfo]) -> None:
    claimed, held = (sum(getattr(i, k) for i in infos) for k in ("file_size", "compress_size"))
    if claimed > min(MOST_BYTES, max(ANY_RATIO, MOST_RATIO_OF_ALL * held)):
        raise refused(path, f"it claims {claimed} bytes out of {held}; save it with np.savez")
    for info in infos:
        if info.file_size > 1 << 20 and info.file_size > MOST_RATIO * info.compress_size:
            raise refused(path, f"{info.filename} claims {info.file_size} bytes out of "
                                f"{info.compress_size}; save it with np.savez")  # fmt: skip


def _array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """The header is believed only where it agrees with the number of bytes that follow."""
    with archive.open(info) as file:
        shape, fortran, dtype = _header(file)
        if dtype.hasobject:
            raise refused(path, f"{info.filename} holds Python objects, not numbers")
        size = info.file_size - file.tell()
        if math.prod(shape) * dtype.itemsize != size or len(shape) > 8:
            raise refused(path, f"{info.filename} should have shape {shape} of {dtype} but has "
                                f"{size} bytes")  # fmt: skip
        values = np.empty(size, dtype=np.uint8)
        view = values.data
        done = 0
        while done < size:
            piece = file.read(min(1 << 20, size - done))
            if not piece:
                raise refused(path, f"{info.filename} is cut off")
            view[done : done + len(piece)] = piece
            done += len(piece)
        file.read(1)  # the end, where the checksum is
    flat = values.view(dtype) if size else np.empty(0, dtype)
    array = flat.reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"npy version {version}")


LAYOUTS = (Layout(lambda path: [path] if path.is_file() and path.suffix == ".npz" else [], read),)
