"""Readers of public file formats: idx, CIFAR, image files and .npz.

Files come from elsewhere, so every reader checks names, sizes and values before it believes them,
and refuses a damaged or forged file in one line that names it.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from fairvar.data.dataset import update_digest
from fairvar.errors import BadInput, FairvarError, IntegrityError
from fairvar.system.files import read_bytes


@dataclass(frozen=True, eq=False)
class Samples:
    """A data set as its files hold it: the first `train` samples, then the official test part.

    x: uint8 pixels (N, channels, height, width), or float32 where a user's array has floats.
    """

    x: np.ndarray
    y: np.ndarray  # int64 (N,)
    train: int
    classes: int
    groups: np.ndarray | None = None
    note: str = ""  # which form of the data this is

    @cached_property
    def sha256(self) -> str:
        """Of the decoded arrays: the same for every form of the same data."""
        digest = hashlib.sha256(f"train={self.train}".encode())
        for array in (self.x, self.y.astype("<i8"), self.groups):
            if array is not None:
                update_digest(digest, array)
        return digest.hexdigest()


@dataclass(frozen=True)
class Layout:
    """One form in which a data set may lie in a folder."""

    match: Callable[[Path], list[Path]]  # the files at a path that have this form, or none
    read: Callable[[Sequence[Path]], Samples]
    cached: bool = False  # slow to decode


def refused(where: str | Path, why: str) -> IntegrityError:
    """A file is not what it should be; the message leaves out the folder."""
    return IntegrityError(f"{where.name if isinstance(where, Path) else where} is refused: {why}")


def reason(error: BaseException) -> str:
    """The first line of an error that another library raised."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def unreadable(path: Path, error: OSError) -> FairvarError:
    """A file is missing, larger than any of its kind, no regular file, or may not be read."""
    if isinstance(error, FileNotFoundError):
        return IntegrityError(f"{path.name} is missing in {path.parent}")
    if error.errno == errno.EFBIG:
        return refused(path, str(error.strerror))
    return BadInput(f"cannot read {path}: {error.strerror or reason(error)}")


@contextmanager
def refusing_damage(path: Path, kind: str) -> Iterator[None]:
    """Whatever a library raises on a damaged or forged file becomes one line with its name."""
    try:
        yield
    except FairvarError:
        raise
    except Exception as error:  # zipfile, tarfile, gzip and numpy raise nearly anything
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(path, error) from None
        raise refused(path, f"it is no intact {kind} ({reason(error)})") from None


def read_capped(path: Path, most: int) -> bytes:
    """A whole file, if it is there and not larger than any file of its kind."""
    try:
        return read_bytes(path, most)
    except OSError as error:
        raise unreadable(path, error) from None


def check_labels(where: str | Path, labels: Integer[np.ndarray, " N"], classes: int) -> None:
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(bad):
        raise refused(where, f"label {labels[bad[0]]} of image {bad[0]} is outside "
                             f"0 … {classes - 1}")  # fmt: skip


def joined(
    train: Sequence[tuple[np.ndarray, np.ndarray]],
    test: Sequence[tuple[np.ndarray, np.ndarray]],
    classes: int,
    note: str,
) -> Samples:
    """Parts of one data set, (images, labels) each, copied once."""
    parts = [*train, *test]
    x = np.concatenate([images for images, _ in parts])
    y = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    return Samples(x, y, sum(len(labels) for _, labels in train), classes, note=note)
