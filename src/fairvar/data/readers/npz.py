"""Your own arrays in one .npz: x, y, and optionally groups, x_test, y_test, groups_test."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fairvar.data.readers import Layout, Samples, refused, refusing_damage
from fairvar.data.readers.archives import open_zip
from fairvar.errors import BadInput

NAMES = ("x", "y", "groups", "x_test", "y_test", "groups_test")
MOST_BYTES = 64 << 30
MOST_RATIO = 200  # no array is compressed more than that; a bomb is
MOST_RATIO_OF_ALL = 20  # above `ANY_RATIO` bytes
ANY_RATIO = 128 << 20
MOST_TABLE_BYTES = 2 << 20  # of the zip
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read(paths: Sequence[Path]) -> Samples:
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
    return Samples(x, y, train, int(y.max()) + 1, groups, note="own arrays")


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
    with (
        refusing_damage(path, ".npz file"),
        open_zip(path, MOST_TABLE_BYTES, MOST_BYTES) as archive,
    ):
        infos = archive.infolist()
        names = [info.filename.removesuffix(".npy") for info in infos]
        for name in names:
            if name not in NAMES or names.count(name) > 1:
                raise refused(path, f"{name[:80]!r} comes twice or is none of {', '.join(NAMES)}")
        _check_sizes(path, infos)
        return {n: _array(path, archive, i) for n, i in zip(names, infos, strict=True)}


def _check_sizes(path: Path, infos: Sequence[zipfile.ZipInfo]) -> None:
    claimed, held = (sum(getattr(i, k) for i in infos) for k in ("file_size", "compress_size"))
    if claimed > min(MOST_BYTES, max(ANY_RATIO, MOST_RATIO_OF_ALL * held)):
        raise refused(path, f"it claims {claimed} bytes out of {held}; save it with np.savez")
    for info in infos:
        if info.file_size > 1 << 20 and info.file_size > MOST_RATIO * info.compress_size:
            raise refused(path, f"{info.filename} claims {info.file_size} bytes out of "
                                f"{info.compress_size}; save it with np.savez")  # fmt: skip


def _array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as file:
        _check_header(path, info, file)
    with archive.open(info) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read(1)  # the end, where zipfile compares the checksum
    return np.asarray(array, dtype=array.dtype.newbyteorder("="))


def _check_header(path: Path, info: zipfile.ZipInfo, file: Any) -> None:
    """numpy would allocate what the header claims before it reads the numbers."""
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


LAYOUTS = (Layout(lambda path: [path] if path.is_file() and path.suffix == ".npz" else [], read),)
