"""CIFAR as lossless WebP sheets → CIFAR's public binary format, which fairvar reads.

    python tools/unpack_webp.py FOLDER [FOLDER …] [--out DATASETS]

FOLDER holds `index.txt.xz` and the sheets of CIFAR-10, or of CIFAR-100 or a half of it; of two
halves give both, in their order. The `.bin` files are written to DATASETS/cifar10 or
DATASETS/cifar100, by default in fairvar's cache, where every command finds them.

A sheet has 500 images of 32 × 32 per column, columns from left to right. The index has one line per
image: `label name` for CIFAR-10, `split label name` for CIFAR-100. Order and pixels stay the same.
"""

from __future__ import annotations

import argparse
import lzma
import sys
from pathlib import Path

import numpy as np

from fairvar.common.files import write_bytes
from fairvar.data.fetch import datasets_dir
from fairvar.errors import FairvarError, IntegrityError

SIDE, ROWS = 32, 500
CIFAR10 = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR100 = ("train_0", "train_1", "test")
# The superclass of each class of CIFAR-100: the binary format begins every record with it.
SUPERCLASS = bytes([
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
    6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
    16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
    12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
])  # fmt: skip


def read_sheet(path: Path) -> np.ndarray:
    """Images (N, 3, 32, 32) of one sheet."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = 25 * ROWS * SIDE * SIDE
    try:
        with Image.open(path, formats=("WEBP",)) as image:
            if image.height != ROWS * SIDE or image.width % SIDE or image.mode != "RGB":
                raise IntegrityError(f"{path.name}: a sheet is RGB, {ROWS * SIDE} pixels high and "
                                     f"a multiple of {SIDE} wide")  # fmt: skip
            sheet = np.asarray(image)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise IntegrityError(f"{path} is no intact sheet ({error})") from None
    tiles = sheet.reshape(ROWS, SIDE, -1, SIDE, 3).transpose(2, 0, 4, 1, 3)
    return tiles.reshape(-1, 3, SIDE, SIDE)


def read_index(path: Path, classes: int) -> tuple[list[str], np.ndarray]:
    """Splits (of CIFAR-100; empty for CIFAR-10) and labels of all lines."""
    words = [line.split() for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    wide = 2 if classes == 10 else 3
    if any(len(row) != wide or not row[-2].isdecimal() for row in words):
        raise IntegrityError(f"{path}: a line is not like the others")
    labels = np.array([int(row[-2][:9]) for row in words], dtype=np.int64)
    if (labels >= classes).any():
        raise IntegrityError(f"{path}: label {labels.max()} is outside 0 … {classes - 1}")
    return [row[0] if wide == 3 else "" for row in words], labels


def records(images: np.ndarray, labels: np.ndarray, classes: int) -> bytes:
    """One record per image: the superclass (CIFAR-100 only), the class, the pixels."""
    heads = [labels.astype(np.uint8)[:, None]]
    if classes == 100:
        heads.insert(0, np.frombuffer(SUPERCLASS, np.uint8)[labels][:, None])
    return np.hstack([*heads, images.reshape(len(images), -1)]).tobytes()


def unpack(folder: Path) -> dict[str, bytes]:
    """The binary files of one folder of sheets, by name."""
    is_10 = (folder / f"{CIFAR10[0]}.webp").is_file()
    names, classes = (CIFAR10, 10) if is_10 else (CIFAR100, 100)
    splits, labels = read_index(folder / "index.txt.xz", classes)
    files: dict[str, bytes] = {}
    done = 0
    for name in names:
        images = read_sheet(folder / f"{name}.webp")
        own = slice(done, done + len(images))
        done += len(images)
        file = name.partition("_")[0] if classes == 100 else name
        if len(labels[own]) < len(images) or set(splits[own]) - {"", file}:
            raise IntegrityError(f"{folder}: the index does not fit {name}.webp")
        content = records(images, labels[own], classes)
        files[f"{file}.bin"] = files.get(f"{file}.bin", b"") + content
    if done != len(labels):
        raise IntegrityError(f"{folder}: the index has {len(labels)} lines for {done} images")
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders of sheets of one data set")
    parser.add_argument("--out", type=Path, help="folder of data sets; fairvar's cache by default")
    asked = parser.parse_args()
    try:
        files: dict[str, bytes] = {}
        for folder in asked.folders:
            for name, content in unpack(folder).items():
                files[name] = files.get(name, b"") + content
        kind = "cifar10" if f"{CIFAR10[0]}.bin" in files else "cifar100"
        for name, content in files.items():
            write_bytes((asked.out or datasets_dir()) / kind / name, content)
    except (FairvarError, OSError, lzma.LZMAError, ValueError) as error:
        sys.exit(f"unpack_webp: {error}")
    print((asked.out or datasets_dir()) / kind)


if __name__ == "__main__":
    main()
