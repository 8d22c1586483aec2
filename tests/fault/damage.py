"""Damage and forgery, systematically: what the tests and the long `make soak` try on every reader.

Everything follows from a seed. `flips` and `mutations` change bytes; `forgeries` change one field
of a sealed record and seal it again. A `Reader` is an input that is read well and a way to read it;
its `mutate` changes it many times and counts how that ended.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import random
import shutil
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from fairvar.cli.library import run_table
from fairvar.common.files import seal
from fairvar.common.process import peak_bytes, reset_peak
from fairvar.data import sources
from fairvar.data.readers.arrays import read_idx
from fairvar.errors import BadInput, FairvarError, IntegrityError
from fairvar.models.weights import read_tensors
from fairvar.report.files import group_table
from fairvar.report.table import render
from fairvar.runs.archive import ARCHIVE, LIST, unpacked
from fairvar.runs.config import Config
from fairvar.runs.formats import MANIFEST, unpack_checkpoint
from fairvar.runs.results import gather
from fairvar.runs.stored import StoredRun, recorded_federation
from fairvar.runs.verify import check_files

# What a field of a record may be replaced with.
NONSENSE: tuple[Any, ...] = (
    None, True, "", "x", "\x1b[31m\n\0", "../../x", -1, 0, 1, 7, 10**30, 0.5, -1e300,
    float("nan"), float("inf"), [], [[]], {}, {"a": {"b": [None]}}, [1, "2", None], "9" * 5000,
)  # fmt: skip
LOST = object()


# --- bytes ---------------------------------------------------------------------------------------
def flips(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """One bit each, spread over the whole content and its two ends."""
    draw = random.Random(seed)
    for number in range(count):
        size = 8 * len(content)
        place = draw.randrange(size)
        if number % 4 == 0:  # headers, and the last parts with their checksums
            edge = min(size, max(8, size // 16))
            place = draw.choice((draw.randrange(edge), size - 1 - draw.randrange(edge)))
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        yield bytes(flipped)


def mutations(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Flips, cuts, tails, runs of bytes overwritten, repeated, left out, and odd numbers."""
    draw = random.Random(seed)
    odd = (b"\0", b"\xff" * 8, b"\x7f" * 4, b"[" * 5000, b"9" * 5000, b"\0" * 512, b"PK\1\2", b"\n")
    for _ in range(count):
        made = bytearray(content)
        for _ in range(draw.choice((1, 1, 1, 2, 8))):
            a = draw.randrange(len(made) + 1)
            b = min(len(made), a + draw.choice((1, 2, 4, 8, 64, 512)))
            kind = draw.randrange(7)
            if kind == 0 and a < len(made):
                made[a] ^= 1 << draw.randrange(8)
            elif kind == 1:
                made[a:b] = draw.randbytes(b - a)
            elif kind == 2:
                del made[a:b]
            elif kind == 3:
                made[a:a] = made[a:b]
            elif kind == 4:
                made[a:a] = draw.choice(odd)
            elif kind == 5:
                made[a:b] = draw.choice(odd)[: b - a]
            else:
                del made[a:]
        yield bytes(made)


# --- sealed records ------------------------------------------------------------------------------
def forgeries(facts: dict[str, Any], seed: int, count: int | None = None) -> Iterator[dict]:
    """Every field, at any depth, lost or replaced by every kind of nonsense and by its neighbours;
    `count` of them at random, or all."""
    cases = [(path, value) for path in _paths(facts) for value in _instead(facts, path)]
    if count is not None:
        draw = random.Random(seed)
        cases = [draw.choice(cases) for _ in range(count)]
    for path, value in cases:
        yield _with(facts, path, value)


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if prefix:
        yield prefix
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(
        value, list) else ()  # fmt: skip
    for key, part in list(inner)[:3] if isinstance(value, list) else inner:
        yield from _paths(part, (*prefix, key))


def _instead(facts: Any, path: tuple[Any, ...]) -> list[Any]:
    for key in path:
        facts = facts[key]
    near: list[Any] = []
    if isinstance(facts, int | float) and not isinstance(facts, bool):
        near = [facts + 1, facts - 1, -facts, 1000 * facts, float(facts), str(facts)]
    elif isinstance(facts, list):
        near = [facts[:-1], [*facts, 1], facts[::-1], [*facts, None]]
    elif isinstance(facts, dict):
        near = [
            {**facts, "new": 1},
            dict(list(facts.items())[1:]),
            {f"{k}x": facts[k] for k in facts},
        ]
    elif isinstance(facts, str):
        near = [facts + "x", facts[:-1], facts.upper()]
    return [LOST, *NONSENSE, *near]


def _with(facts: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = dict(facts) if isinstance(facts, dict) else list(facts)
    key, *rest = path
    if rest:
        changed[key] = _with(facts[key], tuple(rest), value)
    elif value is LOST:
        del changed[key]
    else:
        changed[key] = value
    return changed


def facts_of(path: Path) -> dict[str, Any]:
    facts = json.loads(path.read_bytes())
    del facts["seal"]
    return facts


def reseal_file(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a run and seal it as if it had been written so."""
    (folder / name).write_bytes(content)
    facts = facts_of(folder / MANIFEST)
    facts["sha256"][name] = hashlib.sha256(content).hexdigest()
    (folder / MANIFEST).write_bytes(seal(facts))


def relist(folder: Path) -> None:
    """A list that fits an archive, whatever that holds: a seal is no signature."""
    content, files = (folder / ARCHIVE).read_bytes(), {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:xz") as tar:
            for entry in tar:
                read = tar.extractfile(entry) if entry.size < 1 << 20 else None
                files[entry.name] = hashlib.sha256(read.read() if read else b"").hexdigest()
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError, ValueError):
        pass
    named = {k: v for k, v in files.items() if len(k) < 99} if len(files) < 1000 else {}
    facts = {"archive_sha256": hashlib.sha256(content).hexdigest(), "archive_bytes": len(content)}
    (folder / LIST).write_bytes(seal({**facts, "count": len(named), "files": named}))


def shown(folder: Path) -> list[str]:
    """What people see of a folder of runs: the tables of its report and of each run."""
    groups = gather(folder)
    tables = [render(group_table(group), "csv") for group in groups]
    for group in groups:
        for trial in group.trials:
            for run in trial.source:
                assert isinstance(run, StoredRun)
                run_table(run.folder, run.manifest)
    check_files(folder)
    return tables


# --- readers -------------------------------------------------------------------------------------
@dataclass
class Tally:
    """How attempts ended. `wrong`: what must not happen."""

    tried: int = 0
    refused: int = 0
    same: int = 0
    other: int = 0  # read, with another result: only where a format has no checksum
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds of this process, whatever else the machine does
    megabytes: float = 0.0  # by which this process has grown

    def __str__(self) -> str:
        return (f"{self.tried} tried: {self.refused} refused, {self.same} the same, {self.other} "
                f"read otherwise, {len(self.wrong)} wrong; slowest {self.slowest:.1f} s, "
                f"{self.megabytes:.0f} MB")  # fmt: skip


def attempt(read: Callable[[], Any], expected: Any, tally: Tally, sealed: bool, what: str) -> None:
    """Read once; the error must be one line, and a sealed input must not give another result."""
    reset_peak()
    before, start = peak_bytes() or 0, time.process_time()
    tally.tried += 1
    try:
        found = read()
    except (IntegrityError, BadInput) as error:
        tally.refused += 1
        if "\n" in str(error) or len(str(error)) > 2000 or not str(error).isprintable():
            tally.wrong.append(f"{what}: not one line: {str(error)[:200]!r}")
    except FairvarError as error:
        tally.wrong.append(f"{what}: {type(error).__name__}: {error}")
    except BaseException as error:  # MemoryError and RecursionError, too
        tally.wrong.append(f"{what}: traceback: {type(error).__name__}: {str(error)[:200]}")
    else:
        same = equal(found, expected)
        tally.same += same
        tally.other += not same
        if sealed and not same:
            tally.wrong.append(f"{what}: read, but not what was written")
    tally.slowest = max(tally.slowest, time.process_time() - start)
    grown = (peak_bytes() or 0) - before
    tally.megabytes = max(tally.megabytes, grown / 2**20)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return equal(a.numpy(), b.numpy())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@dataclass
class Reader:
    """One kind of file: its path and how it is read."""

    name: str
    path: Path
    read: Callable[[], Any]
    sealed: bool = False

    def mutate(self, seed: int, count: int, change: Any = mutations) -> Tally:
        """Change the file `count` times and read it each time; it is then as it was."""
        whole, tally = self.path.read_bytes(), Tally()
        expected = self.read()
        try:
            for number, changed in enumerate(change(whole, seed, count)):
                if changed != whole:
                    self.path.write_bytes(changed)
                    attempt(self.read, expected, tally, self.sealed, f"{self.name} {number}")
        finally:
            self.path.write_bytes(whole)
        return tally


def readers(folder: Path, run: Path | None = None) -> list[Reader]:
    """Good inputs of every kind, written into `folder`. `run`: a finished run in a sweep's folder,
    which is copied."""
    os.environ.setdefault("FAIRVAR_CACHE", str(folder / "cache"))
    found = [*_data_readers(folder), *_weight_readers(folder), *_text_readers(folder)]
    return found + (_run_readers(folder, run) if run is not None else [])


def _data_readers(folder: Path) -> Iterator[Reader]:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 28, 28), dtype=np.uint8)
    idx = struct.pack(">BBBBIII", 0, 0, 8, 3, *pixels.shape) + pixels.tobytes()
    for name, content in (("some", idx), ("some.gz", gzip.compress(idx))):
        yield _file(folder, f"idx/{name}", content, lambda path: read_idx(path, 3))

    def load(name: str) -> Callable[[Path], Any]:
        def read(path: Path) -> Any:
            data = sources.load(name, path)
            return data.x, data.y, data.classes

        return read

    buffer = io.BytesIO()
    np.savez(buffer, x=rng.normal(size=(9, 4)), y=np.arange(9) % 3)
    yield _file(folder, "npz/own.npz", buffer.getvalue(), load("npz"))
    batches = {f"data_batch_{i}.bin": bytes([i]) + rng.bytes(3072) for i in range(1, 6)}
    batches["test_batch.bin"] = bytes([0]) + rng.bytes(3072)
    name = "cifar-10-binary.tar.gz"
    yield _file(folder, f"cifar/{name}", _tar(batches, "gz"), load("cifar10"))
    from PIL import Image

    for n, label in enumerate("aabb"):
        out = io.BytesIO()
        Image.fromarray(pixels[n, :8, :8]).save(out, "PNG")
        _file(folder, f"images/{label}/{n}.png", out.getvalue(), len)
    whole = load("folder")
    yield Reader("a PNG in a folder", folder / "images/b/3.png", lambda: whole(folder / "images"))
    files = {f"tiny-imagenet-200/train/n0{k}/images/{i}.JPEG": _jpeg(9 * k + i)
             for k in range(2) for i in range(2)}  # fmt: skip
    files["tiny-imagenet-200/val/images/v.JPEG"] = _jpeg(3)
    files["tiny-imagenet-200/val/val_annotations.txt"] = b"v.JPEG\tn00\t0\t0\t1\t1\n"
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in files.items():
            archive.writestr(entry, content)
    tiny = {"zip": zipped.getvalue(), "tar.gz": _tar(files, "gz"), "tar.xz": _tar(files, "xz")}
    for form, content in tiny.items():
        path = f"{form}/tiny-imagenet-200.{form}"
        yield _file(folder, path, content, load("tiny_imagenet"))


def _jpeg(value: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (64, 64), (value, 2 * value, 0)).save(out, "JPEG")
    return out.getvalue()


def _tar(files: dict[str, bytes], form: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{form}") as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def _weight_readers(folder: Path) -> Iterator[Reader]:
    tensors = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.ones(3)}
    yield _file(folder, "weights/w.safetensors", save(tensors), read_tensors)
    out = io.BytesIO()
    torch.save(tensors, out)
    yield _file(folder, "weights/w.pth", out.getvalue(), read_tensors)


def _text_readers(folder: Path) -> Iterator[Reader]:
    text = Config().to_toml().encode()
    yield _file(folder, "config.toml", text, lambda path: Config.load(path).to_dict())


def _file(folder: Path, name: str, content: bytes, read: Callable[[Path], Any]) -> Reader:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return Reader(name, path, lambda: read(path))


def _run_readers(folder: Path, run: Path) -> list[Reader]:
    """Files of a run that fits its manifest, and, with a manifest that is made to fit, their
    parsers."""
    copy = Path(shutil.copytree(run, folder / "runs" / run.name))
    shutil.copytree(run.parent / "federations", folder / "runs" / "federations")

    def numbers() -> Any:
        stored = StoredRun.open(copy)
        history = stored.history()
        accuracy = {"/".join(key): table for key, table in history.accuracy.items()}
        return history.loss, history.weights, history.evaluated, accuracy, stored.state().params

    files = ("config.toml", "history.safetensors", "state.safetensors", MANIFEST)
    found = [Reader(name, copy / name, numbers, True) for name in files]
    (record,) = (copy.parent / "federations").iterdir()
    kept = record.name

    def counts() -> Any:
        facts = recorded_federation(StoredRun.open(copy))
        return facts and facts["class_counts"]

    return [*found, Reader(f"federations/{kept}", record, counts, True)]


class Resealed(Reader):
    """A file of a run whose manifest is made to fit: what is behind the checksum."""

    def mutate(self, seed: int, count: int, change: Any = mutations) -> Tally:
        folder, whole, tally = self.path.parent, self.path.read_bytes(), Tally()
        expected = self.read()
        try:
            for number, changed in enumerate(change(whole, seed, count)):
                reseal_file(folder, self.path.name, changed)
                attempt(self.read, expected, tally, False, f"resealed {self.name} {number}")
        finally:
            reseal_file(folder, self.path.name, whole)
        return tally


def archive_readers(folder: Path, archive: Path) -> list[Reader]:
    """An archive and its list, copied from a folder that has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (ARCHIVE, LIST):
        shutil.copyfile(archive / name, folder / name)

    def names() -> list[str]:
        place = unpacked(folder)
        return sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file())

    return [Reader(name, folder / name, names, True) for name in (ARCHIVE, LIST)]


def checkpoint_reader(folder: Path, payload: bytes) -> Reader:
    """A checkpoint with a right checksum: its parser alone."""
    return _file(
        folder, "payload", payload, lambda p: unpack_checkpoint(p.read_bytes()).state.params
    )


def forge_records(folder: Path, path: Path, seed: int, count: int | None) -> Tally:
    """Forge a sealed record below a folder of runs; whatever is accepted changes no table."""
    whole, tally = path.read_bytes(), Tally()
    expected = shown(folder)
    try:
        for number, forged in enumerate(forgeries(facts_of(path), seed, count)):
            path.write_bytes(seal(forged))
            attempt(lambda: shown(folder), expected, tally, True, f"{path.name} {number}")
    finally:
        path.write_bytes(whole)
    return tally
