"""The folder of a run: its files, their checksums, checkpoints and the lock.

A run is a folder with config.toml, history.safetensors, state.safetensors and manifest.json. The
manifest is written last and holds the SHA-256 of the other files; its own SHA-256 is its last line
(the seal). A folder without a manifest is not a result, but may hold checkpoints. These and other
temporary files have their SHA-256 in the first line. Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from filelock import FileLock

from fairvar.errors import BadInput, IntegrityError
from fairvar.runs.records import Manifest, Record, RunManifest, check, parse_json
from fairvar.system.files import MOST_RECORD, MOST_TENSORS, read_bytes, write_bytes

MANIFEST = "manifest.json"
SEAL = ',\n  "seal": "'
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")  # a part of a path that fairvar writes
LOCKS = ".locks"


def inside(folder: Path, name: str, depth: int = 1) -> Path:
    """The path of a name that comes from a file: at most `depth` plain parts below the folder.

    All such names are checked here. A seal is a checksum, not a signature: a folder or an archive
    from outside may name any place, and may hold links to it.
    """
    parts = name.split("/")
    if len(parts) > depth or not all(PLAIN.fullmatch(part) for part in parts):
        raise IntegrityError(f"{name[:200]!r} is not a file of its own in {folder}; refused")
    path = folder
    for part in parts:
        path = no_link(path / part)
    return path


def no_link(path: Path) -> Path:
    """A path that may be written or deleted; refuses links, which may lead out of the folder."""
    if path.is_symlink():
        raise IntegrityError(f"{path} is a link; refused: delete it, or copy what it points to")
    return path


def lock_of(folder: Path, timeout: float = 0.0) -> FileLock:
    """The lock of a run's folder. The operating system releases it when its process ends, however
    it ends."""
    locks = no_link(folder.parent / LOCKS)
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(no_link(locks / no_link(folder).name), timeout=timeout)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def check_writable(folder: Path) -> None:
    """Refuse an output folder that cannot be written before any work is done."""
    try:
        if folder.exists() and not folder.is_dir():
            raise FileExistsError(errno.EEXIST, "it is a file")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot write into {folder}: {reason}; choose another --out") from None


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
    found = parse_json(body)
    check(found, kind)
    return found


def with_manifest(files: Mapping[str, bytes], facts: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a run and the manifest with their checksums."""
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return {**files, MANIFEST: seal({**facts, "sha256": checksums})}


def save_files(folder: Path, files: Mapping[str, bytes], depth: int = 1) -> None:
    """Write files, manifests last: a run with a manifest is finished. `depth` 2: folder/name."""
    places = {name: inside(folder, name, depth) for name in files}
    for name in sorted(files, key=lambda n: n.endswith(MANIFEST)):
        write_bytes(places[name], files[name])


def is_complete(folder: Path) -> bool:
    """Whether the run is finished; nothing is read."""
    return (folder / MANIFEST).exists()


def read_manifest(folder: Path, kind: type[Manifest] = RunManifest) -> dict[str, Any] | None:
    """The manifest of a finished run; None if it is unfinished."""
    return read_record(folder / MANIFEST, kind, f"delete {folder} and run again")


def read_record(path: Path, kind: type[Record], way_out: str) -> dict[str, Any] | None:
    """A sealed file; None if it does not exist."""
    try:
        return open_seal(read_bytes(path, MOST_RECORD), kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise IntegrityError(f"{path} is damaged: {error}; {way_out}") from None


def read_sealed(folder: Path, manifest: Mapping[str, Any], name: str) -> bytes:
    """A file of a finished run, exactly as it was written."""
    path = inside(folder, name)
    try:
        content = read_bytes(path, MOST_TENSORS, follow=False)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}; run again") from None
    if hashlib.sha256(content).hexdigest() != manifest["sha256"].get(name):
        raise IntegrityError(f"{path} was changed after it was written; delete {folder}, run again")
    return content


def verify(folder: Path) -> dict[str, Any] | None:
    """The manifest, after checking every file against it."""
    manifest = read_manifest(folder)
    if manifest is not None:
        for name in manifest["sha256"]:
            read_sealed(folder, manifest, name)
    return manifest


SLOTS = ("checkpoint-a", "checkpoint-b")


def write_checkpoint(folder: Path, number: int, payload: bytes) -> None:
    """Overwrite the older of two files, so that one good checkpoint always remains."""
    write_hashed(folder / SLOTS[number % 2], payload)


def read_checkpoints(folder: Path) -> list[bytes]:
    """The intact checkpoints; a damaged one is left out, because the other one will do."""
    found = (read_hashed(folder / slot) for slot in SLOTS)
    return [payload for payload in found if payload is not None]


def write_hashed(path: Path, payload: bytes) -> None:
    """Write a file with its SHA-256 in the first line."""
    write_bytes(path, hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)


def read_hashed(path: Path) -> bytes | None:
    """The payload; None if the file is missing or damaged."""
    try:
        head, _, payload = read_bytes(path, MOST_TENSORS).partition(b"\n")
    except OSError:
        return None
    return payload if hashlib.sha256(payload).hexdigest().encode() == head else None


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Several files as one: a line with their names and lengths, then their contents."""
    lengths = {name: len(content) for name, content in files.items()}
    return b"".join([json.dumps(lengths).encode(), b"\n", *files.values()])


def unpack_files(content: bytes) -> dict[str, bytes]:
    """The files that `pack_files` packed; {} if it is something else."""
    head, _, body = content.partition(b"\n")
    try:
        lengths = parse_json(head)
    except ValueError:
        return {}
    if not all(type(n) is int for n in lengths.values()):
        return {}
    ends = list(accumulate(lengths.values(), initial=0))
    whole = ends == sorted(ends) and ends[-1] == len(body)
    cuts = zip(lengths, pairwise(ends), strict=True)
    return {name: body[a:b] for name, (a, b) in cuts} if whole else {}


def store_run(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a finished run; delete its checkpoints and what a crash left."""
    save_files(folder, files)
    for path in folder.iterdir():
        if path.name in SLOTS or (path.name.startswith(".") and path.is_file()):
            path.unlink(missing_ok=True)
