"""`runs.tar.xz`: results that are small enough to publish, instead of a sweep's gigabytes.

The archive holds the chosen runs, whose histories keep what reports show (right answers of every
client, weights, the first training losses), and for every other configuration its validation
curve. So the choice can be repeated and each table and figure made again. Final models and the
losses on validation and test data are left out.

`runs.json` in the same folder is the sealed list of its contents: the archive's own SHA-256, and
the name and SHA-256 of every file in it. An archive is read to its end and compared with this list.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fairvar.errors import IntegrityError, RunFailed
from fairvar.runs.config import Config
from fairvar.runs.identity import RECORD, Identity, recorded_identity
from fairvar.runs.records import ArchiveList, EntryName, Model, SummaryManifest, agree, check
from fairvar.runs.select import Curve
from fairvar.runs.serialize import load_tensors
from fairvar.runs.store import (
    inside,
    is_complete,
    read_manifest,
    read_record,
    read_sealed,
    seal,
)
from fairvar.runs.stored import check_same_data, stored_config
from fairvar.runs.trials import Summary
from fairvar.system.files import MOST_ARCHIVE, digest, open_regular, write_bytes

ARCHIVE, LIST = "runs.tar.xz", "runs.json"
SUMMARIES = "summaries"
# An archive may come from elsewhere: it must fill neither the disk nor the memory.
NAME = re.compile(get_args(EntryName)[1].pattern)
MOST_BYTES = 2_000_000_000  # unpacked
MOST_FILES = 100_000
MOST_FILE_BYTES = 64 << 20
MOST_RATIO = 200  # of unpacked to packed bytes, above `ANY_RATIO` bytes
ANY_RATIO = 64 << 20
XZ_MEMORY = 128 << 20
PIECE = 1 << 20


@dataclass(frozen=True)
class Condensed:
    """A configuration of which only the summary was kept."""

    folder: Path
    config: Config  # with one of its seeds
    manifest: Mapping[str, Any]

    @staticmethod
    def all_in(folder: Path) -> Iterator[Condensed]:
        for path in sorted((folder / SUMMARIES).glob("*")):
            if is_complete(path):
                manifest = read_manifest(path, SummaryManifest) or {}
                text = read_sealed(path, manifest, "config.toml")
                config = stored_config(path / "config.toml", text)
                agree(
                    f"the summary in {path}",
                    name=(path.name, _summary_name(manifest, config, text)),
                    method=(manifest["method"], config.method.label),
                    seed=(manifest["births"][0]["seed"], config.train.seed),
                )
                check_same_data(path, check(manifest, SummaryManifest).passport, config)
                yield Condensed(path, config, manifest)

    @cached_property
    def identity(self) -> Identity:
        return recorded_identity(self.manifest, self.config)

    def summary(self) -> Summary:
        facts, where = self.manifest, self.folder / "curves.safetensors"
        try:
            content = read_sealed(self.folder, facts, where.name)
            curves = {name: leaf.numpy() for name, leaf in load_tensors(content).items()}
            rounds = _checked_curves(curves, self.config.train.rounds)
            models = sorted({name.split("/")[0] for name in curves} - {"rounds"})
            if facts["diverged"] != (not rounds) or facts["last"].keys() - models:
                raise ValueError("its manifest lists other curves")
            return Summary(
                rounds,
                facts["diverged"],
                {m: Curve(curves[f"{m}/mean"], curves[f"{m}/variance"]) for m in models},
                {model: tuple(two) for model, two in facts["last"].items()},
                facts["births"],
            )
        except (LookupError, ValueError, TypeError) as error:
            raise IntegrityError(f"{where} does not hold a summary: {error}") from None


def _checked_curves(curves: Mapping[str, np.ndarray], most: int) -> list[int]:
    """The evaluated rounds, after checking that every curve has one number for each of them."""
    rounds = curves["rounds"]
    if rounds.dtype != np.int64 or rounds.ndim != 1 or (np.diff(rounds) < 1).any():
        raise ValueError("rounds is no column of increasing rounds")
    if len(rounds) and not 1 <= rounds[0] <= rounds[-1] <= most:
        raise ValueError(f"rounds go from {rounds[0]} to {rounds[-1]} of {most}")
    known = [f"{model}/{part}" for model in get_args(Model) for part in ("mean", "variance")]
    for name, curve in curves.items():
        if name != "rounds" and (name not in known or curve.dtype != np.float64
                                 or curve.shape != rounds.shape):  # fmt: skip
            raise ValueError(f"{name[:80]!r} is no curve over these rounds")
    return [int(t) for t in rounds]


def write_list(folder: Path, sha256: str, size: int, files: Mapping[str, str]) -> Path:
    """The sealed list of an archive's contents."""
    path = folder / LIST
    facts = {"archive_sha256": sha256, "archive_bytes": size, "count": len(files)}
    write_bytes(path, seal({**facts, "files": dict(files)}))
    return path


def _summary_name(manifest: Mapping[str, Any], config: Config, text: bytes) -> str:
    """The name of its folder. Earlier versions used the checksum of the configuration."""
    if RECORD not in manifest:
        return hashlib.sha256(text).hexdigest()[:16]
    return recorded_identity(manifest, config).name


def pack(files: Mapping[str, bytes]) -> bytes:
    """The archive as bytes: without times and owners, so that the same content gives the same file.
    Files of the same name follow each other, because they are nearly equal and compress well."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=6) as archive:
        for name in sorted(files, key=lambda n: (n.rpartition("/")[2], n)):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name])
            archive.addfile(entry, io.BytesIO(files[name]))
    return buffer.getvalue()


def unpacked(folder: Path) -> Path:
    """The folder itself or, if it has an archive, a temporary folder with the archive's contents,
    which is deleted when this process ends."""
    both = (folder / ARCHIVE, folder / LIST)
    if not any(os.path.lexists(path) for path in both):
        return folder
    stamps = tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in both)
    return Path(_unpack(folder.resolve(), stamps).name)


@cache  # opened runs refer to the temporary folder
def _unpack(folder: Path, stamps: tuple[int, ...]) -> tempfile.TemporaryDirectory[str]:
    facts = read_record(folder / LIST, ArchiveList, f"get {ARCHIVE} and {LIST} again")
    if facts is None:
        raise IntegrityError(
            f"{folder / ARCHIVE} has no list of its contents ({LIST}); get both files again, or, "
            f"if it was written before there were lists and you trust it: fairvar seal {folder}"
        )
    place = tempfile.TemporaryDirectory(prefix="fairvar-")
    try:
        listed = (facts["archive_sha256"], facts["archive_bytes"], facts["files"])
        extract(folder / ARCHIVE, Path(place.name), listed)
    except BaseException:
        place.cleanup()
        raise
    return place


Contents = tuple[str, int, dict[str, str]]  # SHA-256 and bytes of an archive, SHA-256 by file


def extract(archive: Path, place: Path, listed: Contents | None = None) -> Contents:
    """Unpack an archive to its end and return its contents, which must be equal to `listed`."""
    sums: dict[str, str] = {}
    try:
        with open_regular(archive, MOST_ARCHIVE) as file:
            sha256, size = digest(file), os.fstat(file.fileno()).st_size
            if listed is not None and (sha256, size) != listed[:2]:
                raise ValueError(f"it is not the archive that {LIST} lists")
            for name, content in _entries(_Inflated(file, size)):
                if name in sums:
                    raise ValueError(f"it holds {name} twice")
                sums[name] = hashlib.sha256(content).hexdigest()
                _store(inside(place, name, depth=3), content)
        if listed is not None and sums != listed[2]:
            odd = sorted(sums.items() ^ listed[2].items())[0][0]
            raise ValueError(f"{odd} is not as {LIST} lists it")
    except (tarfile.TarError, lzma.LZMAError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise IntegrityError(f"{archive} cannot be unpacked: {reason}") from None
    return sha256, size, sums


def _store(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise RunFailed(f"cannot unpack into {path.parent}: {error.strerror or error}") from None


class _Inflated:
    """Decompresses an .xz file of one stream, with limits on size and memory."""

    def __init__(self, file: io.BufferedReader, size: int) -> None:
        self.file, self.buffer, self.total = file, bytearray(), 0
        self.most = min(MOST_BYTES, max(ANY_RATIO, MOST_RATIO * size))
        self.machine = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)

    def take(self, size: int) -> bytes:
        """The next bytes; fewer only at the end, after the checksum was verified."""
        while len(self.buffer) < size and not self.machine.eof:
            data = self.file.read(PIECE) if self.machine.needs_input else b""
            if self.machine.needs_input and not data:
                raise ValueError("it is cut off")
            piece = self.machine.decompress(data, PIECE)
            self.total += len(piece)
            if self.total > self.most:
                raise ValueError(f"it holds more than {self.most:,} bytes; refused")
            self.buffer += piece
        if self.machine.eof and (self.machine.unused_data or self.file.peek(1)):
            raise ValueError("something follows its end; refused")
        taken = bytes(self.buffer[:size])
        del self.buffer[:size]
        return taken


def _entries(stream: _Inflated) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file of a tar: plain files with plain names and short headers, as
    `pack` writes them, then zeros up to the end."""
    count, end = 0, bytes(tarfile.BLOCKSIZE)
    while (block := stream.take(tarfile.BLOCKSIZE)) != end:
        entry = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        count += 1
        if entry.type != tarfile.REGTYPE or not NAME.fullmatch(entry.name):
            raise ValueError(f"it holds {entry.name[:80]!r}, which is no plain file; refused")
        if not 0 <= entry.size <= MOST_FILE_BYTES or count > MOST_FILES:
            raise ValueError(f"{entry.name} is too large, or one of too many files; refused")
        content = stream.take(entry.size)
        padding = stream.take(-entry.size % tarfile.BLOCKSIZE)
        if len(content) < entry.size or padding.strip(b"\0"):
            raise ValueError(f"{entry.name} is cut off or followed by garbage")
        yield entry.name, content
    while rest := stream.take(PIECE):
        if rest.strip(b"\0"):
            raise ValueError("something follows the end of its tar; refused")
