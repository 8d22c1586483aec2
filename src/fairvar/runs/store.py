"""The folder of a run: its files, their checksums, checkpoints and the lock.

A run is a folder with config.toml, history.safetensors, state.safetensors and manifest.json. The
manifest is written last and holds the SHA-256 of the other files; its own SHA-256 is its last line
(the seal). A folder without a manifest is not a result, but may hold checkpoints. These and other
temporary files begin with a sealed list of the same kind. Nothing is ever unpickled.

A seal shows that a record was not damaged. It is not a signature: anybody can change a record and
seal it again. So the fields of every `Record` have types and bounds, which are checked whenever one
is read, and two records of one fact must agree.
"""

from __future__ import annotations

import errno
import hashlib
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from fairvar.errors import BadInput, IntegrityError
from fairvar.files import (
    MOST_RECORD,
    MOST_TENSORS,
    Record,
    checksums,
    open_seal,
    pack_files,
    read_bytes,
    seal,
    unpack_files,
    write_bytes,
)

MANIFEST = "manifest.json"
SLOTS = ("checkpoint-a", "checkpoint-b")
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")  # a part of a path that fairvar writes
LOCKS = ".locks"


def agree(where: object, **pairs: tuple[object, object]) -> None:
    """Raise unless both values of each fact are equal."""
    for fact, (one, other) in pairs.items():
        if one != other:
            raise IntegrityError(
                f"{where} contradicts itself: {fact} is {str(one)[:80]} and {str(other)[:80]}"
            )


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


def with_manifest(files: Mapping[str, bytes], facts: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a run and the manifest with their checksums."""
    return {**files, MANIFEST: seal({**facts, "sha256": checksums(files)})}


def save_files(folder: Path, files: Mapping[str, bytes], depth: int = 1) -> None:
    """Write files, manifests last: a run with a manifest is finished. `depth` 2: folder/name."""
    places = {name: inside(folder, name, depth) for name in files}
    for name in sorted(files, key=lambda n: n.endswith(MANIFEST)):
        write_bytes(places[name], files[name])


def is_complete(folder: Path) -> bool:
    """Whether the run is finished; nothing is read."""
    return (folder / MANIFEST).exists()


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


def write_checkpoint(folder: Path, number: int, files: Mapping[str, bytes]) -> None:
    """Checkpoints of one run or several, by name. Overwrites the older of two files, so that one
    good checkpoint always remains."""
    write_bytes(folder / SLOTS[number % 2], pack_files(files))


def read_checkpoints(folder: Path) -> list[dict[str, bytes]]:
    """The intact checkpoints; a damaged one is left out, because the other one will do."""
    found = []
    for slot in SLOTS:
        with suppress(OSError):
            found.append(unpack_files(read_bytes(folder / slot, MOST_TENSORS)))
    return [files for files in found if files]


def store_run(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a finished run; delete its checkpoints and what a crash left."""
    save_files(folder, files)
    for path in folder.iterdir():
        if path.name in SLOTS or (path.name.startswith(".") and path.is_file()):
            path.unlink(missing_ok=True)
