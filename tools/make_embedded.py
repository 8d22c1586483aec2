"""Rebuild the data files inside the package, byte for byte, from the originals.

    python tools/make_embedded.py [--mnist DIR] [--out DIR]

DIR holds the four original MNIST .gz files; the digits come from scikit-learn. Prints the
checksums that belong into `src/fairvar/data/builtin.py` and the README beside the files.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np

from fairvar.common import rng

ROOT = Path(__file__).resolve().parent.parent
MNIST = ROOT.parent / "shared" / "data" / "mnist"
EMBEDDED = ROOT / "src" / "fairvar" / "data" / "embedded"
SEED = 0
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip file can hold


def npz_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    """A compressed .npz whose bytes depend on the arrays only: no clock, no operating system."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            content = io.BytesIO()
            np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
            archive.writestr(entry, content.getvalue(), compresslevel=9)
    return out.getvalue()


def read_idx(path: Path) -> np.ndarray:
    """An idx file: two zero bytes, type 8 (uint8), number of axes, their big-endian lengths."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\x00\x00\x08":
        raise SystemExit(f"{path.name} is not an idx file of bytes")
    axes = raw[3]
    shape = np.frombuffer(raw, ">u4", axes, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(tuple(map(int, shape)))


def stratified(labels: np.ndarray, per_class: int, part: str) -> np.ndarray:
    """`per_class` indices of each label, drawn at random, in the original order."""
    chosen = [
        rng.stream(SEED, "mnist_1000", part, label)
        .permutation(np.flatnonzero(labels == label))[:per_class]
        for label in range(10)
    ]  # fmt: skip
    return np.sort(np.concatenate(chosen))


def mnist_1000(folder: Path) -> bytes:
    """100 training images per class, and a pool of 400 per class from the test images."""
    arrays: dict[str, np.ndarray] = {}
    for prefix, part, per_class in (("", "train", 100), ("pool_", "t10k", 400)):
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
        rows = stratified(labels, per_class, part)
        arrays[f"{prefix}x"] = images[rows]
        arrays[f"{prefix}y"] = labels[rows]
        arrays[f"{prefix}index"] = rows.astype("<u2")  # the place in the original file
    return npz_bytes(arrays)


def digits() -> bytes:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return npz_bytes({"x": bunch.images.astype(np.uint8), "y": bunch.target.astype(np.uint8)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mnist", type=Path, default=MNIST, help="folder of the original files")
    parser.add_argument("--out", type=Path, default=EMBEDDED, help="folder to write to")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, content in (("mnist_1000", mnist_1000(options.mnist)), ("digits", digits())):
        (options.out / f"{name}.npz").write_bytes(content)
        print(f"{hashlib.sha256(content).hexdigest()}  {name}.npz  ({len(content)} bytes)")


if __name__ == "__main__":
    main()
