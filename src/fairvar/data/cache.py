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

from fairvar.data.raw import Layout, Raw, reason

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
    with path.open("rb") as file:
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
    digest = hashlib.sha256(f"{VERSION} {name}".encode())
    for path in paths:
        if path.is_file():
            digest.update(file_digest(path).encode())
        for entry in sorted(_files(path), key=lambda entry: entry[0]) if path.is_dir() else ():
            digest.update("\0".join(map(str, entry)).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for base, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(base, name))]
        for name in (*names, *links):
            path = os.path.join(base, name)
            facts = os.stat(path) if os.path.exists(path) else os.lstat(path)
            yield os.path.relpath(path, folder), facts.st_size, facts.st_mtime_ns


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
        wanted = _sum_file(file).read_text(encoding="ascii").split()[0]
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != wanted:
                raise ValueError("its checksum is wrong")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as arrays:
                train, classes = arrays["numbers"].tolist()
                return Raw(arrays["x"], arrays["y"], train, classes, note=str(arrays["note"]))
    except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile) as error:
        _say(f"{file.name} in the cache is damaged ({reason(error)}); decoding the images again")
        return None
