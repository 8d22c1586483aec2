"""Compressed files, read forwards and with a limit: a bomb is refused, not expanded."""

from __future__ import annotations

import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from fairvar.data.raw import read_capped, reason, refused, unreadable
from fairvar.errors import FairvarError
from fairvar.system.files import MOST_ARCHIVE, open_regular

AT_ONCE = PIECE = (
    1 << 16
)  # the most bytes one read may ask for: tar headers lie about their lengths
MOST_ENTRIES = 150_000  # of a tar
MOST_HEADERS = 16 << 20  # bytes of a tar's long headers, which are slow to read
XZ_MEMORY = 256 << 20
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"


class Inflated:
    """The content of a .gz or .xz file, at most `most` bytes, checked by its own checksum."""

    def __init__(self, file: BinaryIO, where: str, most: int) -> None:
        self.file, self.where, self.most = file, where, most
        self.position = 0
        start = file.read(6)
        file.seek(0)
        self.machine: Any
        if start.startswith(_GZIP):
            self.machine = zlib.decompressobj(wbits=31)
        elif start == _XZ:
            self.machine = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)
        else:
            raise refused(where, "it is neither a gzip nor an xz file")

    def tell(self) -> int:
        return self.position

    def seek(self, position: int, whence: int = 0) -> int:
        """Forwards only, as tarfile needs it."""
        if whence != 0 or position < self.position:
            raise refused(self.where, "it does not read from front to back")
        while self.position < position and self.read(min(PIECE, position - self.position)):
            pass
        return self.position

    def read(self, size: int = AT_ONCE) -> bytes:
        if not 0 <= size <= AT_ONCE:
            raise refused(self.where, f"a part of it claims {size} bytes")
        pieces: list[bytes] = []
        missing = size
        while missing and (piece := self._some(missing)):
            pieces.append(piece)
            missing -= len(piece)
        self.position += size - missing
        if self.position > self.most:
            raise refused(self.where, f"it unpacks to more than {self.most} bytes")
        return b"".join(pieces)

    def read_all(self) -> bytes:
        return _whole(self.read)

    def _some(self, limit: int) -> bytes:
        """At least one byte, unless the end was reached and is intact."""
        try:
            while not self.machine.eof:
                data = getattr(self.machine, "unconsumed_tail", b"")
                hungry = not data and getattr(self.machine, "needs_input", True)
                if hungry:
                    data = self.file.read(PIECE)
                piece = self.machine.decompress(data, limit)
                if piece:
                    return cast(bytes, piece)
                if hungry and not data and not self.machine.eof:
                    raise refused(self.where, "it is cut off")
        except (zlib.error, lzma.LZMAError) as error:
            raise refused(self.where, f"it is damaged ({reason(error)})") from None
        if (self.machine.unused_data + self.file.read(PIECE)).strip(b"\0"):
            raise refused(self.where, "something follows its end")
        return b""


def read_compressed(path: Path, most: int) -> bytes:
    """The content of a .gz or .xz file; of any other file the file itself."""
    if path.suffix not in (".gz", ".xz"):
        return read_capped(path, most)
    try:
        with open_regular(path, MOST_ARCHIVE) as file:
            return Inflated(file, path.name, most).read_all()
    except OSError as error:
        raise unreadable(path, error) from None


def check_name(where: str, name: str) -> None:
    """Nothing is ever unpacked to disk; a name that wants to leave its folder is forged."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or ":" in parts[0]:
        raise refused(where, f"it has an entry with the path {name[:80]!r}")


def tar_files(
    path: Path, most: int, most_file: int, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, bytes]]:
    """Name and content of the wanted files of a .tar.gz or .tar.xz, in the archive's order: at most
    `most` bytes in all and `most_file` in one of them."""
    try:
        with open_regular(path, MOST_ARCHIVE) as file:
            stream = Inflated(file, path.name, most)
            with tarfile.open(fileobj=cast(Any, stream), mode="r:") as tar:
                room = MOST_HEADERS
                for _ in range(MOST_ENTRIES):
                    start = stream.tell()
                    if (member := tar.next()) is None:
                        break
                    tar.members.clear()  # type: ignore[attr-defined]  # or it keeps all of them
                    room -= max(0, stream.tell() - start - 4 * tarfile.BLOCKSIZE)
                    if room < 0:
                        raise refused(path, f"its headers have more than {MOST_HEADERS} bytes")
                    check_name(path.name, member.name)
                    if member.isdir():
                        continue
                    if not member.isreg() or member.issparse() or not 0 <= member.size <= most_file:
                        raise refused(path, f"its entry {member.name[:80]!r} is a link, a device "
                                            f"or claims {member.size} bytes")  # fmt: skip
                    if wanted(member.name):
                        yield member.name, _content(path, tar, member)
                    stream.seek(member.offset_data + member.size)
                else:
                    raise refused(path, f"it has more than {MOST_ENTRIES} entries")
            while stream.read(PIECE):  # to the end, where the checksum is
                pass
    except FairvarError:
        raise
    except (tarfile.TarError, EOFError, ValueError, ArithmeticError, RecursionError) as error:
        raise refused(path, f"it is no intact tar file ({reason(error)})") from None
    except OSError as error:
        raise unreadable(path, error) from None


def _content(path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    content = b"" if file is None else _whole(file.read)
    if len(content) != member.size:
        raise refused(path, f"its entry {member.name[:80]!r} is cut off")
    return content


def _whole(read: Callable[[int], bytes]) -> bytes:
    """All that is left. (Pieces in a list would take the memory twice when they are joined.)"""
    content = io.BytesIO()
    while piece := read(PIECE):
        content.write(piece)
    return content.getvalue()
