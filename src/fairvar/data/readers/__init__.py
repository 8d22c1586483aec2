"""Readers of public file formats: idx, CIFAR, image files and .npz.

Files come from elsewhere, so every reader checks names, sizes and values before it believes them,
and refuses a damaged or forged file in one line that names it. Compressed files and archives are
read with limits: nothing is unpacked to disk, and what would unpack to more than its kind has is
refused.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from jaxtyping import Integer

from fairvar.common.files import MOST_ARCHIVE, open_regular, read_bytes, walk
from fairvar.data.dataset import update_digest
from fairvar.errors import BadInput, FairvarError, IntegrityError, cause

PIECE = 1 << 16  # the most bytes of one read: headers in archives may claim wrong lengths
MOST_ENTRIES = 150_000  # of an archive
MOST_HEADERS = 16 << 20  # bytes of a tar's long headers, which are slow to read
MOST_TABLE_BYTES = 24 << 20  # of the table of a zip
MOST_TREE_BYTES = 4 << 30  # of the files of a zip together
MOST_TAR_BYTES = 400 << 20  # of a tar, whose files are all read at once
MOST_FILE_BYTES = 32 << 20  # of one image or list
XZ_MEMORY = 128 << 20  # an .xz file may ask for 4 GB


@dataclass(frozen=True, eq=False)
class Samples:
    """A data set as its files hold it: the first `train` samples, then the official test part.

    x: uint8 pixels (N, channels, height, width), float32 where a user's array has floats, or int64
    tokens (N, length). y: one label per sample, or one per token.
    """

    x: np.ndarray
    y: np.ndarray  # int64 (N,) or (N, length)
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
class FileLayout:
    """One form that the files of a data set may have."""

    match: Callable[[Path], list[Path]]  # the files at a path that have this form, or none
    read: Callable[[Sequence[Path]], Samples]
    cached: bool = False  # slow to decode


def refused(where: str | Path, why: str) -> IntegrityError:
    """A file is not what it should be; the message leaves out the folder."""
    return IntegrityError(f"{where.name if isinstance(where, Path) else where} is refused: {why}")


def unreadable(path: Path, error: OSError) -> FairvarError:
    """A file is missing, larger than any of its kind, no regular file, or may not be read."""
    if isinstance(error, FileNotFoundError):
        return IntegrityError(f"{path.name} is missing in {path.parent}")
    if error.errno == errno.EFBIG:
        return refused(path, str(error.strerror))
    return BadInput(f"cannot read {path}: {error.strerror or cause(error)}")


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
        raise refused(path, f"it is no intact {kind} ({cause(error)})") from None


def read_capped(path: Path, most: int) -> bytes:
    """A whole file, if it is there and not larger than any file of its kind."""
    with refusing_damage(path, "file"):
        return read_bytes(path, most)


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


class _Xz:
    """Unpacks an .xz file of one stream; `lzma.LZMAFile` has no limit on memory."""

    def __init__(self, file: io.BufferedReader) -> None:
        self.file = file
        self.machine = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)

    def read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size and not self.machine.eof:
            data = self.file.read(PIECE) if self.machine.needs_input else b""
            if self.machine.needs_input and not data:
                raise EOFError("it is cut off")
            content += self.machine.decompress(data, size - len(content))
        if self.machine.eof and (self.machine.unused_data or self.file.peek(1)):
            raise ValueError("something follows its end")
        return bytes(content)


class _Capped:
    """An unpacking stream that is read forwards, at most `most` bytes in all."""

    def __init__(self, stream: gzip.GzipFile | _Xz, where: str, most: int) -> None:
        self.stream, self.where, self.most = stream, where, most
        self.position = 0

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= PIECE:
            raise refused(self.where, f"a part of it claims {size} bytes")
        content = self.stream.read(size)
        self.position += len(content)
        if self.position > self.most:
            raise refused(self.where, f"it unpacks to more than {self.most} bytes")
        return content

    def seek(self, position: int) -> None:
        """Forwards only, as tarfile needs it."""
        if position < self.position:
            raise refused(self.where, "it does not read from front to back")
        while self.position < position and self.read(min(PIECE, position - self.position)):
            pass


@contextmanager
def _unpacking(path: Path, most: int, kind: str) -> Iterator[_Capped]:
    """The content of a .gz or .xz file; its checksum is compared at its end."""
    with refusing_damage(path, kind), open_regular(path, MOST_ARCHIVE) as file:
        start = file.peek(6)
        if start.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=file) as stream:
                yield _Capped(stream, path.name, most)
        elif start.startswith(b"\xfd7zXZ\x00"):
            yield _Capped(_Xz(file), path.name, most)
        else:
            raise refused(path, "it is neither a gzip nor an xz file")


def _whole(read: Callable[[int], bytes]) -> bytes:
    """All that is left. (Joining a list of pieces would take the memory twice.)"""
    content = io.BytesIO()
    while piece := read(PIECE):
        content.write(piece)
    return content.getvalue()


def read_compressed(path: Path, most: int) -> bytes:
    """The content of a .gz or .xz file; of any other file the file itself."""
    if path.suffix not in (".gz", ".xz"):
        return read_capped(path, most)
    with _unpacking(path, most, f"{path.suffix} file") as stream:
        return _whole(stream.read)


def _check_name(where: str, name: str) -> None:
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or ":" in parts[0]:
        raise refused(where, f"it has an entry with the path {name[:80]!r}")


def tar_files(
    path: Path, most: int, most_file: int, wanted: Callable[[tarfile.TarInfo], bool]
) -> Iterator[tuple[str, bytes]]:
    """Name and content of the wanted files of a .tar.gz or .tar.xz, in the archive's order: at most
    `most` bytes in all and `most_file` in one of them. `wanted` may refuse entries."""
    with (
        _unpacking(path, most, "tar file") as stream,
        tarfile.open(fileobj=cast(Any, stream), mode="r:") as tar,
    ):
        for member in _members(path, tar, stream):
            take = wanted(member)
            if member.isdir():
                continue
            if not member.isreg() or member.issparse() or not 0 <= member.size <= most_file:
                raise refused(path, f"its entry {member.name[:80]!r} is a link, a device or "
                                    f"claims {member.size} bytes")  # fmt: skip
            if take:
                content = _whole(cast(BinaryIO, tar.extractfile(member)).read)
                if len(content) != member.size:
                    raise refused(path, f"its entry {member.name[:80]!r} is cut off")
                yield member.name, content
            stream.seek(member.offset_data + member.size)
        while rest := stream.read(PIECE):  # to the end, where the checksum is
            if rest.strip(b"\0"):
                raise refused(path, "something follows the end of its tar")


def _members(path: Path, tar: tarfile.TarFile, stream: _Capped) -> Iterator[tarfile.TarInfo]:
    room = MOST_HEADERS
    for _ in range(MOST_ENTRIES):
        start = stream.tell()
        if (member := tar.next()) is None:
            return
        tar.members.clear()  # type: ignore[attr-defined]  # or it keeps all of them
        room -= max(0, stream.tell() - start - 4 * tarfile.BLOCKSIZE)
        if room < 0:
            raise refused(path, f"its headers have more than {MOST_HEADERS} bytes")
        _check_name(path.name, member.name)
        yield member
    raise refused(path, f"it has more than {MOST_ENTRIES} entries")


@dataclass(frozen=True)
class FileTree:
    """Files of a folder or an archive: names with forward slashes, and how to read one."""

    where: str
    names: list[str]
    read: Callable[[str], bytes]


@contextmanager
def open_tree(path: Path, endings: Iterable[str]) -> Iterator[FileTree]:
    """The files of a folder, .zip, .tar.gz or .tar.xz whose names end so (any case)."""
    endings = tuple(endings)

    def wanted(name: str) -> bool:
        base = name.rpartition("/")[2]
        return base.lower().endswith(endings) and not base.startswith(".")

    if path.is_dir():
        names = [name for name in _folder_names(path) if wanted(name)]
        yield FileTree(path.name, names, lambda name: read_capped(path / name, MOST_FILE_BYTES))
    elif path.suffix == ".zip":
        with refusing_damage(path, "zip file"), open_zip(path, MOST_TABLE_BYTES) as archive:
            entries = _zip_entries(path, archive, wanted)
            yield FileTree(
                path.name, list(entries), lambda n: _zip_bytes(path, archive, entries[n])
            )
    else:
        files: dict[str, bytes] = {}
        for name, content in tar_files(
            path, MOST_TAR_BYTES, MOST_FILE_BYTES, lambda member: wanted(member.name)
        ):
            if name in files:
                raise refused(path, f"it holds {name[:80]!r} twice")
            files[name] = content
        yield FileTree(path.name, list(files), files.__getitem__)


def _folder_names(folder: Path) -> Iterator[str]:
    """All files below; links must not lead out of the folder."""
    inside = folder.resolve()
    try:
        for entry in walk(folder):
            path = Path(entry.path)
            if entry.is_symlink() and (entry.is_dir() or not path.resolve().is_relative_to(inside)):
                raise refused(path, f"it is a link to {os.readlink(path)[:80]!r}; only links to "
                                    "files inside the folder are followed")  # fmt: skip
            if not entry.is_dir(follow_symlinks=False):
                yield path.relative_to(folder).as_posix()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise BadInput(f"cannot read {folder}: {cause(error)}") from None


@contextmanager
def open_zip(path: Path, most_table: int, most: int = MOST_TREE_BYTES) -> Iterator[zipfile.ZipFile]:
    """A zip whose table of entries is not longer than it may be: zipfile makes an object of every
    entry, which takes long, before anything else can be asked. Damage raises nearly anything."""
    with open_regular(path, most, at_once=most_table) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most_table))
        if file.read().count(b"PK\1\2") > MOST_ENTRIES:
            raise refused(path, f"it has more than {MOST_ENTRIES} entries")
        with zipfile.ZipFile(file) as archive:
            yield archive


def _zip_entries(
    path: Path, archive: zipfile.ZipFile, wanted: Callable[[str], bool]
) -> dict[str, zipfile.ZipInfo]:
    """The wanted entries; sizes and names are checked before anything is unpacked."""
    entries: dict[str, zipfile.ZipInfo] = {}
    infos = archive.infolist()
    if sum(info.file_size for info in infos) > MOST_TREE_BYTES:
        raise refused(path, f"it claims more than {MOST_TREE_BYTES} bytes")
    for info in infos:
        _check_name(path.name, info.filename)
        is_link = (info.external_attr >> 16) & 0o170000 == 0o120000
        if info.file_size > MOST_FILE_BYTES or info.flag_bits & 1 or is_link:
            raise refused(path, f"its entry {info.filename[:80]!r} is a link, encrypted or claims "
                                f"{info.file_size} bytes")  # fmt: skip
        if info.filename in entries:
            raise refused(path, f"it holds {info.filename[:80]!r} twice")
        if wanted(info.filename) and not info.is_dir():
            entries[info.filename] = info
    return entries


def _zip_bytes(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    try:
        return archive.read(info)
    except Exception as error:  # zipfile raises nearly anything on damaged entries
        raise refused(path, f"its entry {info.filename[:80]!r} is damaged "
                            f"({cause(error)})") from None  # fmt: skip
