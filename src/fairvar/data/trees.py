"""A tree of files by name, wherever it lies: in a folder, a .zip, a .tar.gz or a .tar.xz."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fairvar.data.inflate import check_name, tar_files
from fairvar.data.raw import read_capped, reason, refused, unreadable
from fairvar.errors import BadInput
from fairvar.system.files import Bounded, open_regular, walk

MOST_BYTES = 4 << 30  # of a whole archive
MOST_TAR_BYTES = 400 << 20  # of a tar, whose files are all read at once
MOST_TABLE_BYTES = 24 << 20  # of the table of a zip
MOST_FILES = 150_000  # of an archive
MOST_FILE_BYTES = 32 << 20  # of one image or list
# Everything that zipfile was seen to raise on damaged files.
_UNREADABLE = (zipfile.BadZipFile, struct.error, zlib.error, ArithmeticError, EOFError,
               RuntimeError, NotImplementedError)  # fmt: skip


@dataclass(frozen=True)
class Tree:
    """Names with forward slashes, and how to get one file's bytes."""

    where: str
    names: list[str]
    read: Callable[[str], bytes]


@contextmanager
def open_tree(path: Path, endings: Iterable[str]) -> Iterator[Tree]:
    """The files of a folder or an archive whose names end so (any case)."""
    endings = tuple(endings)

    def wanted(name: str) -> bool:
        base = name.rpartition("/")[2]
        return base.lower().endswith(endings) and not base.startswith(".")

    if path.is_dir():
        names = [name for name in _folder_names(path) if wanted(name)]
        yield Tree(path.name, names, lambda name: read_capped(path / name, MOST_FILE_BYTES))
    elif path.suffix == ".zip":
        with _open_zip(path) as archive:
            entries = _checked_entries(path, archive, wanted)
            yield Tree(path.name, list(entries), lambda n: _zip_bytes(path, archive, entries[n]))
    else:
        files: dict[str, bytes] = {}
        for name, content in tar_files(path, MOST_TAR_BYTES, MOST_FILE_BYTES, wanted):
            if name in files:
                raise refused(path, f"it holds {name[:80]!r} twice")
            files[name] = content
        yield Tree(path.name, list(files), files.__getitem__)


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
        raise BadInput(f"cannot read {folder}: {reason(error)}") from None


@contextmanager
def _open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with (
            open_regular(path, MOST_BYTES, at_once=MOST_TABLE_BYTES) as file,
            _checked_zip(path, file) as archive,
        ):
            yield archive
    except BadInput:  # which is a ValueError
        raise
    except (*_UNREADABLE, ValueError) as error:
        raise refused(path, f"it is no intact zip file ({reason(error)})") from None
    except OSError as error:
        raise unreadable(path, error) from None


def _checked_zip(path: Path, file: Bounded) -> zipfile.ZipFile:
    """The table of a zip lies at its end; zipfile makes objects of all its entries, which takes
    long, before anything else can be asked."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_TABLE_BYTES))
    if file.read().count(b"PK\1\2") > MOST_FILES:
        raise refused(path, f"it has more than {MOST_FILES} entries")
    return zipfile.ZipFile(file)


def _checked_entries(
    path: Path, archive: zipfile.ZipFile, wanted: Callable[[str], bool]
) -> dict[str, zipfile.ZipInfo]:
    """The wanted entries; sizes and names are checked before anything is unpacked."""
    entries: dict[str, zipfile.ZipInfo] = {}
    infos = archive.infolist()
    if sum(info.file_size for info in infos) > MOST_BYTES:
        raise refused(path, f"it claims more than {MOST_BYTES} bytes")
    for info in infos:
        check_name(path.name, info.filename)
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
    except (*_UNREADABLE, OSError) as error:
        raise refused(path, f"its entry {info.filename[:80]!r} is damaged "
                            f"({reason(error)})") from None  # fmt: skip
