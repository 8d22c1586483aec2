"""The cache: downloads, decoded images and checksums.

A decoded data set has its SHA-256 in a second file. A damaged one is decoded again, and a cache
that cannot be written costs time only; both print one line on the standard error.

`sha256/` remembers the checksums of data sets by their files' paths, sizes, times and inodes, so
that a data set is read once to know which it is.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from fairvar.data.readers import Layout, Samples, reason, unreadable
from fairvar.system.files import digest, open_regular, read_bytes, walk, whole_file

MOST_BYTES = 64 << 30
MOST_NOTE = 1 << 10  # a remembered checksum
VERSION = "1"  # of the decoding: raised when the same files would give other arrays
# A file may be written again within one tick of its clock, with the same time (FAT's are 2 s long).
SETTLED = 2.0


def cache_dir() -> Path:
    """FAIRVAR_CACHE, or the user's cache folder."""
    own = os.environ.get("FAIRVAR_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairvar"


def datasets_dir() -> Path:
    """Where `fairvar data fetch` puts data sets, and the last place they are looked for."""
    return cache_dir() / "datasets"


def file_digest(path: Path, kind: str = "sha256") -> str:
    with open_regular(path, MOST_BYTES) as file:
        return hashlib.file_digest(file, kind).hexdigest()


def read_through_cache(name: str, layout: Layout, paths: Sequence[Path]) -> Samples:
    """`layout.read(paths)`, from the cache if these very files were decoded before."""
    identity = _identity(name, paths) if layout.cached else None
    if identity is None:
        return layout.read(paths)
    file = cache_dir() / f"{name}-{identity[:12]}.npz"
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


def _identity(name: str, paths: Sequence[Path]) -> str | None:
    """Of an archive its content, of a folder the state of its files; None while these are new."""
    found = hashlib.sha256(f"{VERSION} {name}".encode())
    for path in paths:
        try:
            if path.is_file():
                found.update(file_digest(path).encode())
            elif path.is_dir():
                state, settled = _state(path)
                if not settled:
                    return None
                found.update(state)
        except OSError as error:
            raise unreadable(path, error) from None
    return found.hexdigest()


def remembered_sha256(name: str, paths: Sequence[Path], compute: Callable[[], str]) -> str:
    """`compute()` of these files, or what it gave when their state was the same."""
    try:
        states = [_state(path) for path in paths]
    except OSError:
        return compute()  # which says what is missing
    summed = hashlib.sha256(f"{VERSION} {name}".encode())
    for path, (state, _) in zip(paths, states, strict=True):
        summed.update(os.fsencode(path.absolute()) + b"\n" + state)
    key = summed.hexdigest()
    file = cache_dir() / "sha256" / key[:32]
    settled = all(settled for _, settled in states)
    if settled and (known := _recall(file, key)):
        return known
    found = compute()
    if settled:
        with suppress(OSError), whole_file(file) as out:  # not kept: read again next time
            out.write(f"{found} {_check(key, found)}\n".encode())
    return found


def _recall(file: Path, key: str) -> str | None:
    try:
        found, check = read_bytes(file, MOST_NOTE).decode("ascii").split()
    except (OSError, ValueError):
        return None
    return found if check == _check(key, found) else None


def _check(key: str, found: str) -> str:
    return hashlib.sha256(f"{key} {found}".encode()).hexdigest()


def _state(path: Path) -> tuple[bytes, bool]:
    """Names, sizes, times and inodes of a file or of all files below a folder, and whether they are
    older than a tick of the clock. (Programs can set a file's time back, but not its entry's.)"""
    files = [path]
    if path.is_dir():
        files = sorted(Path(e.path) for e in walk(path) if not e.is_dir(follow_symlinks=False))
    lines, newest = [], 0
    for file in files:
        facts = file.stat() if file.exists() else file.lstat()
        newest = max(newest, facts.st_mtime_ns, facts.st_ctime_ns)
        numbers = (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)
        lines.append("\0".join((os.path.relpath(file, path.parent), *map(str, numbers))) + "\n")
    settled = newest < time.time_ns() - SETTLED * 1e9
    return "".join(lines).encode(errors="surrogateescape"), settled


def _save(file: Path, samples: Samples) -> None:
    numbers = np.array([samples.train, samples.classes])
    with whole_file(file) as out:
        np.savez(out, x=samples.x, y=samples.y, numbers=numbers, note=np.array(samples.note))
    with whole_file(_sum_file(file)) as out:
        out.write(f"{file_digest(file)}  {file.name}\n".encode())


def _sum_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.sha256")


def _load(file: Path) -> Samples | None:
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
                return Samples(arrays["x"], arrays["y"], train, classes, note=str(arrays["note"]))
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile) as error:
        _say(f"{file.name} in the cache is damaged ({reason(error)}); decoding the images again")
        return None
