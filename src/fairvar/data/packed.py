"""CIFAR as lossless WebP sheets with an index: a quarter smaller than the original archives.

A sheet has 500 images of 32 × 32 per column, columns from left to right. `index.txt.xz` has one
line per image: `label name` for CIFAR-10, `split label name` for a half of CIFAR-100.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from fairvar.data.cifar import CIFAR10
from fairvar.data.images import pillow_image
from fairvar.data.inflate import read_compressed
from fairvar.data.raw import Layout, Raw, check_labels, joined, read_capped, refused

SIDE, ROWS = 32, 500
MOST_PIXELS = 25 * 500 * 32 * 32  # 12,500 images
MOST_SHEET_BYTES = 64 << 20
MOST_INDEX_BYTES = 16 << 20
SHEETS10 = tuple(f"{name}.webp" for name in CIFAR10.names)
SHEETS100 = ("train_0.webp", "train_1.webp", "test.webp")
INDEX = "index.txt.xz"
HALVES = ("cifar100_half", "cifar100_other_half")


def read_sheet(path: Path) -> UInt8[np.ndarray, "N 3 32 32"]:
    with pillow_image(path.name, read_capped(path, MOST_SHEET_BYTES), MOST_PIXELS) as image:
        if image.height != ROWS * SIDE or image.width % SIDE or image.mode != "RGB":
            raise refused(path, f"a sheet is {ROWS * SIDE} pixels high, RGB, and a multiple of "
                                f"{SIDE} wide")  # fmt: skip
        sheet = np.asarray(image)
    tiles = sheet.reshape(ROWS, SIDE, -1, SIDE, 3).transpose(2, 0, 4, 1, 3)
    return tiles.reshape(-1, 3, SIDE, SIDE)


def _index(path: Path, classes: int, label_at: int) -> tuple[list[str], Int64[np.ndarray, " N"]]:
    """First words and labels of all lines."""
    lines = read_compressed(path, MOST_INDEX_BYTES).decode("utf-8", "replace").splitlines()
    words = [line.split() for line in lines]
    for number, row in enumerate(words, start=1):
        if len(row) != label_at + 2 or not (row[label_at].isascii() and row[label_at].isdigit()):
            raise refused(path, f"line {number} is not like the others")
    labels = np.array([int(row[label_at][:9]) for row in words], dtype=np.int64)
    check_labels(path, labels, classes)
    return [row[0] for row in words], labels


def _check_count(path: Path, images: int, labels: int) -> None:
    if images != labels:
        raise refused(path, f"it has {labels} lines for {images} images")


def read_cifar10(paths: Sequence[Path]) -> Raw:
    index, *sheets = paths
    _, labels = _index(index, 10, 0)
    images = [read_sheet(sheet) for sheet in sheets]
    _check_count(index, sum(map(len, images)), len(labels))
    cuts = np.cumsum([len(sheet) for sheet in images])[:-1]
    parts = list(zip(images, np.split(labels, cuts), strict=True))
    return joined(parts[:-1], parts[-1:], 10, "packed sheets, original order")


def read_cifar100(paths: Sequence[Path]) -> Raw:
    """One half, or both one after the other; the order is the pack's own."""
    train, test = [], []
    for start in range(0, len(paths), 4):
        index, *sheets = paths[start : start + 4]
        split, labels = _index(index, 100, 1)
        images = [read_sheet(sheet) for sheet in sheets]
        _check_count(index, sum(map(len, images)), len(labels))
        first, second = (len(sheet) for sheet in images[:2])
        if split != ["train"] * (first + second) + ["test"] * len(images[2]):
            raise refused(index, "its splits are not those of the sheets")
        cut = np.split(labels, [first, first + second])
        train += [(images[0], cut[0]), (images[1], cut[1])]
        test.append((images[2], cut[2]))
    return joined(train, test, 100, "packed sheets, not in the original order")


def match_cifar10(path: Path) -> list[Path]:
    files = [path / name for name in (INDEX, *SHEETS10)]
    return files if files[0].is_file() and files[1].is_file() else []


def match_cifar100(path: Path) -> list[Path]:
    """A half, with the other half where it lies beside the first."""
    if not ((path / INDEX).is_file() and (path / SHEETS100[0]).is_file()):
        return []
    other = path.parent / HALVES[1]
    both = path.name == HALVES[0] and (other / INDEX).is_file()
    return [
        folder / name for folder in ((path, other) if both else (path,))
        for name in (INDEX, *SHEETS100)
    ]  # fmt: skip


CIFAR10_LAYOUTS = (Layout(match_cifar10, read_cifar10),)
CIFAR100_LAYOUTS = (Layout(match_cifar100, read_cifar100),)
