"""MNIST and Fashion-MNIST: four idx files, plain or gzipped."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from fairvar.data.readers import Layout, Samples, check_labels, joined, refused
from fairvar.data.readers.archives import read_compressed

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte",
         "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")  # fmt: skip
MOST_BYTES = 64 << 20  # the largest real one has 47 million
SIDE = 28


def read_idx(path: Path, axes: int) -> UInt8[np.ndarray, " *axes"]:
    """Two zero bytes, type 8 (uint8), number of axes, their big-endian lengths, the values."""
    data = read_compressed(path, MOST_BYTES)
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


def read(paths: Sequence[Path]) -> Samples:
    parts = [_part(images, labels) for images, labels in (paths[:2], paths[2:])]
    return joined(parts[:1], parts[1:], 10, "original idx files")


def _part(
    image_file: Path, label_file: Path
) -> tuple[UInt8[np.ndarray, "N 1 28 28"], UInt8[np.ndarray, " N"]]:
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise refused(image_file, f"its images are {images.shape[1]} × {images.shape[2]}, not "
                                  f"{SIDE} × {SIDE}")  # fmt: skip
    if len(images) != len(labels) or not len(labels):
        raise refused(label_file, f"it has {len(labels)} labels for {len(images)} images")
    check_labels(label_file, labels, 10)
    return images[:, None], labels


def match(path: Path) -> list[Path]:
    """The four files, each under any of its usual names; a missing one as it should be called."""
    found = [_variants(path, name) for name in FILES]
    if not any(found):
        return []
    return [here[0] if here else path / name for here, name in zip(found, FILES, strict=True)]


def _variants(folder: Path, name: str) -> list[Path]:
    names = (name, f"{name}.gz", name.replace("-idx", ".idx"))
    return [folder / variant for variant in names if (folder / variant).is_file()]


LAYOUTS = (Layout(match, read),)
