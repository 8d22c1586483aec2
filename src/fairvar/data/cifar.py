"""CIFAR-10 and CIFAR-100: the python and the binary version, as folders or as .tar.gz."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from fairvar.data.cifar_pickle import parse
from fairvar.data.inflate import tar_files
from fairvar.data.raw import Layout, Raw, check_labels, joined, read_capped, refused

PIXELS = 3 * 32 * 32
MOST_BYTES, MOST_FILE_BYTES = 192 << 20, 160 << 20  # real: 186 and 155 million
Part = tuple[np.ndarray, np.ndarray]  # images (N, 3, 32, 32), labels (N,)


@dataclass(frozen=True)
class Cifar:
    """What tells the two sets apart."""

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


def python_batch(
    file: str, data: bytes, kind: Cifar
) -> tuple[UInt8[np.ndarray, "N 3 32 32"], Int64[np.ndarray, " N"]]:
    batch = parse(file, data)
    images, labels = batch.get("data"), batch.get(kind.label_key)
    if not isinstance(images, np.ndarray) or images.shape[1] != PIXELS:
        raise refused(file, f"it has no table 'data' with {PIXELS} columns")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise refused(file, f"it has no list {kind.label_key!r} of numbers")
    if len(labels) != len(images):
        raise refused(file, f"it has {len(labels)} labels for {len(images)} images")
    y = np.array(labels, dtype=np.int64)
    check_labels(file, y, kind.classes)
    return images.reshape(-1, 3, 32, 32), y


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


def _read(paths: Sequence[Path], kind: Cifar, binary: bool) -> Raw:
    suffix, batch = (".bin", binary_batch) if binary else ("", python_batch)
    names = [name + suffix for name in kind.names]
    parts = {name: batch(name, data, kind) for name, data in _contents(paths, names)}
    train, test = ([parts[n + suffix] for n in part] for part in (kind.train, kind.test))
    return joined(train, test, kind.classes, f"original {'binary' if binary else 'python'} version")


def layouts(kind: Cifar) -> tuple[Layout, ...]:
    """Folder and archive, python and binary."""

    def matcher(suffix: str, archive: str, binary: bool) -> Layout:
        def match(path: Path) -> list[Path]:
            files = [path / (name + suffix) for name in kind.names]
            if any(file.is_file() for file in files):
                return files
            file = path if path.name == archive else path / archive
            return [file] if file.is_file() else []

        return Layout(match, lambda paths: _read(paths, kind, binary))

    return (
        matcher("", f"{kind.archive}-python.tar.gz", False),
        matcher(".bin", f"{kind.archive}-binary.tar.gz", True),
    )
