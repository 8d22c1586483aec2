"""Damaged and hostile files: every flipped bit is found and named, and nothing is ever executed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from nursery import KEPT, run_bytes
from safetensors.torch import load, save

from fairvar.common.files import seal, unpack_files
from fairvar.errors import BadInput, IntegrityError
from fairvar.runs import runner
from fairvar.runs.formats import (
    MANIFEST,
    SLOTS,
    read_checkpoints,
    write_checkpoint,
)
from fairvar.runs.plan import Plan
from fairvar.runs.results import gather
from fairvar.runs.runner import Interrupted, Watch, run_cell, run_folder
from fairvar.runs.stored import StoredRun, recorded_federation, verify

FLIPS, CUTS = 200, 60
BOMB = zlib.compress(bytes(50_000_000), 9)  # a thousandth of that


@pytest.fixture
def run(short: Path, tmp_path: Path) -> Path:
    """A copy of one finished run."""
    whole = next(p for p in sorted((short / "out").iterdir()) if (p / MANIFEST).exists())
    shutil.copytree(short / "out" / "federations", tmp_path / "federations")
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def refused(folder: Path, name: str) -> None:
    """Reading the run and checking it both find the damage and name the file."""
    for read in (lambda: StoredRun.open(folder).history(), lambda: verify(folder)):
        with pytest.raises(IntegrityError) as found:
            read()
        message = str(found.value)
        assert name in message
        assert "\n" not in message


def damages(content: bytes, draw: random.Random) -> list[bytes]:
    """Bit flips, cuts and tails of a file."""
    found = []
    for place in draw.sample(range(8 * len(content)), FLIPS):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        found.append(bytes(flipped))
    lengths = [0, 1, len(content) - 1, *draw.sample(range(2, len(content) - 1), CUTS)]
    found += [content[:length] for length in lengths]
    found += [content + tail for tail in (b"\0", b"\n", b" ", b"}", content)]
    return found


@pytest.mark.parametrize("name", [*KEPT, MANIFEST])
def test_every_damage_is_found_and_named(name: str, run: Path) -> None:
    content = (run / name).read_bytes()
    StoredRun.open(run).history()
    for damaged in damages(content, random.Random(name)):
        (run / name).write_bytes(damaged)
        refused(run, name)
    (run / name).unlink()
    if name == MANIFEST:  # then it is simply not finished
        assert verify(run) is None
        with pytest.raises(IntegrityError, match="no finished run"):
            StoredRun.open(run)
    else:
        refused(run, name)


def test_every_damage_of_a_federations_record_is_found_and_named(run: Path) -> None:
    (record,) = (run.parent / "federations").iterdir()
    stored = StoredRun.open(run)
    assert recorded_federation(stored) is not None
    for damaged in damages(record.read_bytes(), random.Random(0)):
        record.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=record.name):
            recorded_federation(stored)
    record.unlink()
    assert recorded_federation(stored) is None


@pytest.mark.parametrize("passport", [{"sha256": "../../x"}, {"sha256": "/etc/x"}, 3, []])
def test_a_passport_cannot_point_outside(passport: Any, run: Path) -> None:
    facts = json.loads((run / MANIFEST).read_text())
    del facts["seal"]
    (run / MANIFEST).write_bytes(seal({**facts, "passport": passport}))
    with pytest.raises(IntegrityError, match=run.name):
        recorded_federation(StoredRun.open(run))


def test_a_damaged_run_stops_the_report_with_its_name(run: Path) -> None:
    content = bytearray((run / KEPT[1]).read_bytes())
    content[-1] ^= 1
    (run / KEPT[1]).write_bytes(content)
    with pytest.raises(IntegrityError, match=f"{run.name}/{KEPT[1]}"):
        gather(run.parent)


@pytest.fixture
def stopped(short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """A run that was interrupted after round 7, with checkpoints of rounds 6 and 7."""
    monkeypatch.setattr(runner, "SECONDS_BETWEEN_CHECKPOINTS", 1e9)  # however slow the machine
    cell = Plan.load(short / "plan.toml").cells[1]
    asked = iter([False] * 6 + [True] * 2)
    with pytest.raises(Interrupted):
        run_cell(cell, tmp_path / "out", Watch(stopping=lambda: next(asked), save_every=3))
    folder = run_folder(cell, tmp_path / "out")
    assert [int(load(payload_of(folder / slot))["round"]) for slot in SLOTS] == [7, 6]
    return cell, folder


def payload_of(path: Path) -> bytes:
    (payload,) = unpack_files(path.read_bytes()).values()
    return payload


@pytest.mark.parametrize("slot", SLOTS)
def test_every_damage_of_a_checkpoint_is_found(slot: str, stopped: tuple[Any, Path]) -> None:
    _, folder = stopped
    content = (folder / slot).read_bytes()
    (other,) = (payload_of(folder / s) for s in SLOTS if s != slot)
    for damaged in damages(content, random.Random(slot)):
        (folder / slot).write_bytes(damaged)
        assert read_checkpoints(folder) == [{folder.name: other}]


@pytest.mark.parametrize(
    ("damaged", "start"), [((), 7), (SLOTS[:1], 6), (SLOTS[1:], 7), (SLOTS, 0)]
)
def test_damaged_checkpoints_change_no_result(damaged, start, stopped, short):
    """The older one will do, or the beginning."""
    cell, folder = stopped
    for slot in damaged:
        content = bytearray((folder / slot).read_bytes())
        content[len(content) // 2] ^= 4
        (folder / slot).write_bytes(content)
    seen: list[int] = []
    run_cell(cell, folder.parent, Watch(progress=lambda done, total: seen.append(done)))
    assert seen == list(range(start + 1, 10))
    assert run_bytes(folder) == run_bytes(short / "out" / folder.name)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.canary),))


def tensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(name: str, shape: list[int], start: int, end: int, dtype: str = "F32") -> str:
    facts = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return f"{json.dumps(name)}: {json.dumps(facts)}"


def hostile_files(canary: Path) -> dict[str, bytes]:
    """Contents that are no safetensors of ours, with the right checksum in the manifest."""
    one = entry("round", [1], 0, 4)
    return {
        "pickle": pickle.dumps(Bomb(canary)),
        "old pickle": pickle.dumps(Bomb(canary), protocol=0),
        "zip bomb": b"PK\3\4" + BOMB,
        "npy with objects": b"\x93NUMPY\1\0v\0{'descr': '|O', 'fortran_order': False, 'shape': ()}",
        "empty": b"",
        "header of 100 MB": tensors(b"{}", length=100_000_000),
        "header of 2**63": tensors(b"{}", length=2**63),
        "header is no JSON": tensors(b"hello"),
        "header is a list": tensors(b"[]"),
        "deep header": tensors(b"[" * 100_000),
        "offsets past the end": tensors(f"{{{entry('round', [9], 0, 36)}}}".encode(), b"1234"),
        "offsets backwards": tensors(f"{{{entry('round', [1], 4, 0)}}}".encode(), b"1234"),
        "shape of 10**18": tensors(f"{{{entry('round', [10**18], 0, 4)}}}".encode(), b"1234"),
        "overflowing shape": tensors(
            f"{{{entry('round', [2**62, 2**62], 0, 4)}}}".encode(), b"1234"),
        "unknown type": tensors(f"{{{entry('round', [1], 0, 4, 'OBJ')}}}".encode(), b"1234"),
        "the same key twice": tensors(f"{{{one}, {one}}}".encode(), b"1234"),
        "no tensors": save({}),
        "other tensors": save({"x": torch.zeros(3)}),
        "a round that is a table": save({"round": torch.zeros(3), "mean_loss": torch.zeros(())}),
    }  # fmt: skip


def forge(folder: Path, name: str, content: bytes) -> None:
    """Replace a file and seal it as if it had been written so."""
    (folder / name).write_bytes(content)
    facts = json.loads((folder / MANIFEST).read_text())
    facts.pop("seal")
    facts["sha256"][name] = hashlib.sha256(content).hexdigest()
    (folder / MANIFEST).write_bytes(seal(facts))


@pytest.mark.parametrize("name", ["state.safetensors", "history.safetensors"])
@pytest.mark.parametrize("kind", hostile_files(Path()))
def test_hostile_tensors_are_refused(kind: str, name: str, run: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    forge(run, name, hostile_files(canary)[kind])
    verify(run)  # the checksum is right: only the content is not ours
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError) as found:
            StoredRun.open(run).history()
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert name in str(found.value)
    assert "\n" not in str(found.value)
    assert not canary.exists()


@pytest.mark.parametrize("kind", hostile_files(Path()))
def test_hostile_checkpoints_are_passed_by(kind, stopped, short, tmp_path):
    """With a right checksum, too: the run starts from the beginning and ends with its bytes."""
    cell, folder = stopped
    for number in (0, 1):
        hostile = hostile_files(tmp_path / "canary")[kind]
        write_checkpoint(folder, number, {folder.name: hostile})
    run_cell(cell, folder.parent, Watch())
    assert run_bytes(folder) == run_bytes(short / "out" / folder.name)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("outside", ["../secret", "../../x", "/etc/hostname", "a/../../secret",
                                     "..", ".", "", "nul\0"])  # fmt: skip
def test_a_manifest_cannot_point_outside(outside: str, run: Path) -> None:
    (run.parent / "secret").write_bytes(b"mine")
    facts = json.loads((run / MANIFEST).read_text())
    facts.pop("seal")
    facts["sha256"][outside] = hashlib.sha256(b"mine").hexdigest()
    (run / MANIFEST).write_bytes(seal(facts))
    with pytest.raises(IntegrityError) as found:
        verify(run)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", KEPT)
def test_a_link_out_of_the_folder_is_refused(name: str, run: Path, tmp_path: Path) -> None:
    """Even to the same bytes: files outside of the folder can change without the run."""
    outside = tmp_path / "outside"
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    refused(run, name)


MANIFESTS: dict[str, bytes] = {
    "a list": b"[\n]",
    "nested": b"[" * 200_000 + b"]" * 200_000,
    "no files": b'{\n  "a": 1\n}',
    "files as a list": b'{\n  "sha256": []\n}',
    "files as numbers": b'{\n  "sha256": {"config.toml": 1}\n}',
    "huge number": b'{\n  "a": ' + b"9" * 10_000 + b"\n}",
    "not text": b'{\n  "a": "\xff"\n}',
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_hostile_manifests_are_refused(kind: str, run: Path) -> None:
    """With a right seal: it is a checksum and no signature."""
    body = MANIFESTS[kind]
    digest = hashlib.sha256(body).hexdigest()
    (run / MANIFEST).write_bytes(body[:-2] + f',\n  "seal": "{digest}"\n}}\n'.encode())
    with pytest.raises(IntegrityError) as found:
        StoredRun.open(run)
    assert run.name in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("lost", ["rounds", "diverged_at", "birth", "passport"])
def test_a_manifest_without_a_fact_is_refused(lost: str, run: Path) -> None:
    facts = json.loads((run / MANIFEST).read_text())
    del facts["seal"], facts[lost]
    (run / MANIFEST).write_bytes(seal(facts))
    with pytest.raises(IntegrityError, match=lost):
        gather(run.parent)


@pytest.mark.parametrize("text", ["= =", "a = " + "[" * 5000, "lr = 1", "[method]\nname = 3"])
def test_hostile_configurations_are_refused(text: str, run: Path) -> None:
    forge(run, "config.toml", text.encode())
    with pytest.raises(BadInput) as found:
        StoredRun.open(run)
    assert "\n" not in str(found.value)
