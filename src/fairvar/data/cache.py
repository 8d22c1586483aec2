"""Where downloads and decoded images are kept, and how files are written there: whole or not.

A decoded set has its SHA-256 in a file beside it. A damaged one is decoded again, and a cache
that cannot be written costs time only; both say so in one line on the standard error.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fairvar.data.raw import Layout, Raw, reason, unreadable
from fairvar.files import digest, open_regular, read_bytes, walk

MOST_BYTES = 64 << 30
VERSION = "1"  # of the decoding: raised when the same files would give other arrays


def cache_dir() -> Path:
    """FAIRVAR_CACHE, or the user's cache folder."""
    own = os.environ.get("FAIRVAR_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairvar"


def datasets_dir() -> Path:
    """Where `fairvar data fetch` puts data sets, and the last place they are looked for."""
    return cache_dir() / "datasets"


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name only when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def file_digest(path: Path, kind: str = "sha256") -> str:
    with open_regular(path, MOST_BYTES) as file:
        return hashlib.file_digest(file, kind).hexdigest()


def read_through_cache(name: str, layout: Layout, paths: Sequence[Path]) -> Raw:
    """`layout.read(paths)`, from the cache if these very files were decoded before."""
    if not layout.cached:
        return layout.read(paths)
    file = cache_dir() / f"{name}-{_identity(name, paths)[:12]}.npz"
    found = _load(file)
    if found is None:
        found = layout.read(paths)
        try:
            _save(file, found)
        except OSError as error:
            _say(f"cannot keep the decoded {name} in {file.parent} ({error.strerror}); "
                 "it will be decoded again next time")  # fmt: skip
    return found


def _say(line: str) -> None:
    print(f"fairvar: {line}", file=sys.stderr)


def _identity(name: str, paths: Sequence[Path]) -> str:
    """Of an archive its content, of a folder its names, sizes and times."""
    found = hashlib.sha256(f"{VERSION} {name}".encode())
    for path in paths:
        try:
            if path.is_file():
                found.update(file_digest(path).encode())
            for entry in sorted(_files(path), key=lambda entry: entry[0]) if path.is_dir() else ():
                found.update("\0".join(map(str, entry)).encode(errors="surrogateescape"))
        except OSError as error:
            raise unreadable(path, error) from None
    return found.hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for entry in walk(folder):
        if not entry.is_dir(follow_symlinks=False):
            facts = os.stat(entry.path) if os.path.exists(entry.path) else os.lstat(entry.path)
            yield os.path.relpath(entry.path, folder), facts.st_size, facts.st_mtime_ns


def _save(file: Path, raw: Raw) -> None:
    numbers = np.array([raw.train, raw.classes])
    with whole_file(file) as out:
        np.savez(out, x=raw.x, y=raw.y, numbers=numbers, note=np.array(raw.note))
    with whole_file(_sum_file(file)) as out:
        out.write(f"{file_digest(file)}  {file.name}\n".encode())


def _sum_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.sha256")


def _load(file: Path) -> Raw | None:
    """None if it is not there or not what was written."""
    if not file.is_file():
        return None
    try:
        wanted = read_bytes(_sum_file(file), 1000).decode("ascii").split()[0]
        with open_regular(file, MOST_BYTES) as stream:
            if digest(stream) != wanted:
                raise ValueError("its checksum is wrong")
            with np.load(stream, allow_pickle=False) as arrays:
                train, classes = arrays["numbers"].tolist()
                return Raw(arrays["x"], arrays["y"], train, classes, note=str(arrays["note"]))
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile) as error:
        _say(f"{file.name} in the cache is damaged ({reason(error)}); decoding the images again")
        return None
