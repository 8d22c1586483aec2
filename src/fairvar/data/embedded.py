"""Two small real data sets inside the package: no download, no further dependency.

`embedded/README.md` tells where they come from; `tools/make_embedded.py` rebuilds them.
"""

from __future__ import annotations

import hashlib
import io
from importlib import resources

import numpy as np
from jaxtyping import Float32, UInt8

from fairvar.data.dataset import Dataset
from fairvar.errors import IntegrityError

SHA256 = {
    "mnist_1000.npz": "b4e692f921685e2ee207398b88076216efe68ac802ac7c6a7d77c21a1017e030",
    "digits.npz": "35ca2870ddda628aecd42364588fe5012bdb3df9ce91b9b943752b82b02f04c9",
}
MNIST_MEAN, MNIST_SD_OVER_PIXELS = 0.1307, 0.3015  # FL-bench's constants, on [0, 1] pixels


def mnist_1000() -> Dataset:
    """1,000 MNIST training images, 100 per class; pool: 4,000 test images, 400 per class."""
    arrays = _read("mnist_1000.npz")
    return Dataset(
        name="mnist_1000",
        x=_mnist_pixels(arrays["x"]),
        y=arrays["y"].astype(np.int64),
        classes=10,
        pool_x=_mnist_pixels(arrays["pool_x"]),
        pool_y=arrays["pool_y"].astype(np.int64),
        sha256=SHA256["mnist_1000.npz"],
        provenance="stratified sample of the original MNIST train and t10k files",
    )


def digits() -> Dataset:
    """1,797 handwritten digits of 8 × 8 pixels (the UCI optdigits test set, as in scikit-learn)."""
    arrays = _read("digits.npz")
    return Dataset(
        name="digits",
        x=(arrays["x"] / np.float32(16)).astype(np.float32)[:, None],
        y=arrays["y"].astype(np.int64),
        classes=10,
        sha256=SHA256["digits.npz"],
        provenance="UCI optdigits test set as packaged by scikit-learn",
    )


def _mnist_pixels(raw: UInt8[np.ndarray, "N 28 28"]) -> Float32[np.ndarray, "N 1 28 28"]:
    pixels = (raw / 255.0 - MNIST_MEAN) / MNIST_SD_OVER_PIXELS
    return pixels.astype(np.float32)[:, None]


def _read(file: str) -> dict[str, np.ndarray]:
    """The arrays of one file, after its checksum was found right."""
    path = resources.files("fairvar.data") / "embedded" / file
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise IntegrityError(f"{file} is missing from the package; install fairvar again") from None
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[file]:
        raise IntegrityError(f"{file} is damaged (sha256 {found[:12]}…, expected "
                             f"{SHA256[file][:12]}…); install fairvar again")  # fmt: skip
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
