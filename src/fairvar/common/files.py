"""Reading untrusted files with bounds, and writing files atomically.

Everything that fairvar reads is opened here: regular files only, of at most the size that their
kind has. The checks are made on the open file, so that it cannot be exchanged between check and
read, and a pipe is opened without waiting for its other end. Errors of reading are `OSError`s whose
`strerror` says what is wrong; callers name the file.

A sealed record is JSON whose last line is its SHA-256; several files become one after a sealed list
of theirs.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
from msgspec import Meta

from fairvar.errors import BadInput, RunFailed, shown

MOST_TEXT = 128 << 10  # a TOML configuration; its reader is slow
MOST_CODE = 4 << 20  # a plugin
MOST_RECORD = 64 << 20  # a manifest, a federation's record or an archive's list
MOST_TENSORS = 4 << 30  # a history, a state, a checkpoint or a file of weights
MOST_ARCHIVE = 1 << 30  # runs.tar.xz
SEAL = ',\n  "seal": "'
MOST_VALUES = 4_000_000  # in one record: they take about 60 bytes each
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Number = Annotated[int, Meta(ge=0, le=2**62)]
_SMALL = 64 << 20  # larger files that consist of holes take memory, but no space on disk


class _Regular(io.FileIO):
    """Ends where the file ended when it was opened, even if it grows."""

    length = 0

    def readinto(self, buffer: Any, /) -> int | None:
        return super().readinto(memoryview(buffer)[: max(0, self.length - self.tell())])


class Bounded(io.BufferedReader):
    """A file of which one call reads at most `at_once` bytes: the tables of a zip may be huge."""

    length, at_once = 0, 1 << 62

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.length - self.tell())
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > self.at_once:
            raise OSError(errno.EFBIG, f"a part of it has more than {self.at_once} bytes")
        return super().read(wanted)


def open_regular(path: Path, most: int, *, at_once: int = 1 << 62, follow: bool = True) -> Bounded:
    """A regular file of at most `most` bytes, open for reading; `follow`: also behind a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        handle = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a NUL byte") from None
    try:
        facts = os.fstat(handle)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        hides_its_length = stat.S_ISREG(facts.st_mode) and not facts.st_size and os.read(handle, 1)
        if not stat.S_ISREG(facts.st_mode) or hides_its_length:  # those in /proc do
            raise OSError(errno.EINVAL, "it is no regular file")
        if facts.st_size > most:
            size = f"it has {facts.st_size} bytes, more than the {most} allowed"
            raise OSError(errno.EFBIG, size)
        if facts.st_size > _SMALL and _mostly_holes(handle, facts.st_size):
            raise OSError(errno.EINVAL, f"nearly all of its {facts.st_size} bytes are a hole")
    except BaseException:
        os.close(handle)
        raise
    raw = _Regular(handle)
    file = Bounded(raw, 1 << 16)
    raw.length = file.length = facts.st_size
    file.at_once = at_once
    return file


def read_bytes(path: Path, most: int, *, follow: bool = True) -> bytes:
    """All of a regular file."""
    with open_regular(path, most, follow=follow) as file:
        return file.read()


def digest(file: Any) -> str:
    """SHA-256 of an open file in little memory; it is then at its start again."""
    found = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    return found


def _mostly_holes(handle: int, size: int) -> bool:
    """Whether less than a hundredth of a file was ever written; file systems that cannot tell
    report it as written."""
    data = place = 0
    try:
        while 100 * data < size:
            start = os.lseek(handle, place, os.SEEK_DATA)
            place = os.lseek(handle, start, os.SEEK_HOLE)
            data += place - start
    except OSError as error:
        return error.errno == errno.ENXIO  # nothing but holes up to the end
    finally:
        os.lseek(handle, 0, os.SEEK_SET)
    return False


def walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All files, folders and links below a folder; links are not followed. (`os.walk` of Python
    3.11 calls itself for every level.)"""
    waiting = [os.fspath(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name only when it is complete and on disk.

    It is written under a temporary name in the same folder, synced and renamed.
    """
    # Not tempfile: its files are private to the user, but results are meant to be shared.
    temporary = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """A rename is on disk only when the folder that records it is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def given_path(path: object, *, to_write: bool = False) -> Path:
    """The path that a user gave, where ~ is the home folder."""
    if not isinstance(path, str | os.PathLike):
        raise BadInput(f"path = {shown(path)}: give the path of a file")
    try:
        found = Path(path).expanduser()
    except RuntimeError:
        raise BadInput(f"{path}: your home folder is not known; set HOME, and FAIRVAR_CACHE to a "
                       "folder for data sets") from None  # fmt: skip
    if to_write and found.is_dir():
        raise BadInput(f"{found} is a folder; give the name of a file in it")
    return found


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: afterwards it holds all of `content` or what it held before."""
    try:
        with whole_file(path) as file:
            file.write(content)
    except OSError as error:
        needed = f"{len(content):,} bytes needed"
        raise RunFailed(f"cannot write {path}: {error.strerror or error} ({needed})") from None


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV, the same on every system."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


# -- sealed records and files ----------------------------------------------------------------------
class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object on disk. Other fields are ignored, so that later versions can add some."""


class FileList(Record, frozen=True, kw_only=True):
    """The head of several files that are stored as one."""

    sha256: dict[str, Sha256]
    sizes: dict[str, Number]


R = TypeVar("R", bound=Record)


def check(facts: Mapping[str, Any], kind: type[R]) -> R:
    """The record, if it has all fields in the right form; ValueError otherwise."""
    try:
        return msgspec.convert(facts, kind)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        where = place.strip(".`[]")
        raise ValueError(f"{where}: {text.replace('`', '')}" if where else text) from None


def seal(facts: Mapping[str, Any]) -> bytes:
    """JSON whose last line is the SHA-256 of everything before it."""
    return _seal(json.dumps(facts, indent=2, sort_keys=True).encode())


def _seal(body: bytes) -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    return body[: -len("\n}")] + f'{SEAL}{digest}"\n}}\n'.encode()


def open_seal(raw: bytes, kind: type[Record]) -> dict[str, Any]:
    """The content of a sealed record; ValueError if a bit was changed or if it is not of this
    kind."""
    head, mark, _ = raw.rpartition(SEAL.encode())
    body = head + b"\n}"
    if not mark or _seal(body) != raw:
        raise ValueError("its seal is broken")
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES} values")
    try:
        found = json.loads(body)
        check(found, kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return dict(found)


def checksums(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Several files as one: a sealed list with their checksums, then their contents."""
    sizes = {name: len(files[name]) for name in sorted(files)}
    return seal({"sha256": checksums(files), "sizes": sizes}) + b"".join(
        files[name] for name in sizes
    )


def unpack_files(content: bytes) -> dict[str, bytes]:
    """The files that `pack_files` packed; {} if it is something else, or damaged."""
    start = content.find(b"\n}\n") + 3
    try:
        facts = open_seal(content[:start], FileList)
    except ValueError:
        return {}
    names = sorted(facts["sizes"])
    ends = list(accumulate((facts["sizes"][name] for name in names), initial=start))
    files = {name: content[a:b] for name, (a, b) in zip(names, pairwise(ends), strict=True)}
    return files if (ends[-1], checksums(files)) == (len(content), facts["sha256"]) else {}
