"""Every reader against damaged, forged and special files: one line, little memory, no waiting."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import damage
import pytest
import torch
from safetensors.torch import load, save

from fairvar.cli import main
from fairvar.common.files import seal
from fairvar.data import sources
from fairvar.errors import BadInput, FairvarError, IntegrityError
from fairvar.runs.archive import condense, extract
from fairvar.runs.config import Config, merge_overrides
from fairvar.runs.formats import MANIFEST
from fairvar.runs.own import load_plugin
from fairvar.runs.plan import Plan
from fairvar.runs.results import gather
from fairvar.runs.runner import arrange
from fairvar.runs.stored import StoredRun
from fairvar.runs.sweep import run_sweep
from fairvar.runs.verify import check_files

PLAN = {
    "name": "tiny",
    "data": {"name": "digits", "clients": 4},
    "train": {"rounds": 4},
    "evaluate": {"every": 2},
    "sweep": {"methods": ["fedavg"], "seeds": 1, "lr": [0.05, 0.5]},
}
MUTATIONS = 40  # of every reader; `make soak` makes thousands
HANGS = 60.0  # seconds of computing; reading takes milliseconds


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """full/: a sweep of two runs; small/: condensed."""
    base = tmp_path_factory.mktemp("made")
    run_sweep(arrange(Plan.from_dict(PLAN).cells), base / "full", lambda done, total, what: None)
    condense(gather(base / "full"), base / "small")
    return base


@pytest.fixture
def full(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "full", tmp_path / "full"))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A reader that waits for a pipe, or reads for ever, fails."""
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "cache"))

    def late(number: int, frame: Any) -> None:
        raise AssertionError("it takes too long")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def a_run(folder: Path) -> Path:
    return next(p for p in sorted(folder.iterdir()) if (p / MANIFEST).exists())


def all_readers(made: Path, folder: Path) -> list[damage.Reader]:
    archive = damage.archive_readers(folder / "archive", made / "small")
    return [*damage.readers(folder, a_run(made / "full")), *archive]


def test_every_mutation_of_every_input_is_refused_or_harmless(made: Path, tmp_path: Path) -> None:
    for reader in all_readers(made, tmp_path):
        tally = reader.mutate(seed=5, count=MUTATIONS)
        assert not tally.wrong, f"{reader.name}: {tally.wrong[:3]}"
        assert tally.tried == tally.refused + tally.same + tally.other > 0
        assert tally.megabytes < 500, reader.name
        assert tally.slowest < HANGS, reader.name


def test_every_mutation_behind_a_right_seal_is_refused_or_harmless(full: Path) -> None:
    for name in ("config.toml", "history.safetensors", "state.safetensors"):
        run = a_run(full)
        reader = damage.Resealed(name, run / name, lambda run=run: damage.shown(run.parent))
        tally = reader.mutate(seed=6, count=MUTATIONS)
        assert not tally.wrong, f"{name}: {tally.wrong[:3]}"
        assert tally.refused > 0


def test_every_forged_manifest_is_refused_or_harmless(full: Path) -> None:
    """With a right seal, which is a checksum and no signature."""
    tally = damage.forge_records(full, a_run(full) / MANIFEST, 1, 120)
    assert not tally.wrong, tally.wrong[:3]
    assert tally.refused > tally.same


def test_every_forged_federation_is_refused_or_harmless(full: Path) -> None:
    (record,) = (full / "federations").iterdir()
    tally = damage.forge_records(full, record, 2, 60)
    assert not tally.wrong, tally.wrong[:3]
    assert tally.refused > tally.same


def test_every_forged_summary_is_refused_or_harmless(made: Path, tmp_path: Path) -> None:
    extract(made / "small" / damage.ARCHIVE, tmp_path / "small")
    (summary,) = (tmp_path / "small" / "summaries").iterdir()
    tally = damage.forge_records(tmp_path / "small", summary / MANIFEST, 3, 60)
    assert not tally.wrong, tally.wrong[:3]
    assert tally.refused > tally.same


def test_every_forged_list_is_refused(made: Path, tmp_path: Path) -> None:
    """All of them: nothing in a list is without consequence."""
    archive, listed = damage.archive_readers(tmp_path, made / "small")
    expected, tally = archive.read(), damage.Tally()
    facts = damage.facts_of(listed.path)
    for number, forged in enumerate(damage.forgeries(facts, 4, 150)):
        if json.dumps(forged) != json.dumps(facts):
            listed.path.write_bytes(seal(forged))
            damage.attempt(listed.read, expected, tally, True, f"list {number}")
    assert not tally.wrong, tally.wrong[:3]
    harmless = ("new",)  # a field of a later version
    assert tally.refused >= tally.tried - 3 * len(harmless)


LIES: dict[str, Any] = {
    "a fingerprint of another run": {"fingerprint": "0" * 64},
    "another method": {"method": "AFL"},
    "another name": {"name": "other"},
    "more rounds than were asked for": {"rounds": 5},
    "divergence of a whole run": {"diverged_at": 4},
    "other traffic": {"exchanges_per_client": 5},
    "no provenance": {"birth": {}},
    "no passport": {"passport": []},
}


@pytest.mark.parametrize("lie", LIES)
def test_contradictions_are_found(lie: str, full: Path) -> None:
    path = a_run(full) / MANIFEST
    path.write_bytes(seal({**damage.facts_of(path), **LIES[lie]}))
    with pytest.raises(IntegrityError) as found:
        gather(full)
    assert path.parent.name in str(found.value)


def test_other_results_in_the_manifest_are_found_by_verify(full: Path) -> None:
    path = a_run(full) / MANIFEST
    facts = damage.facts_of(path)
    facts["result"]["test/global"]["mean"] += 0.01
    path.write_bytes(seal(facts))
    with pytest.raises(IntegrityError, match="has other results"):
        check_files(full)


def test_a_stored_configuration_has_all_its_sections(full: Path) -> None:
    run = a_run(full)
    damage.reseal_file(run, "config.toml", b"")
    with pytest.raises(BadInput, match="it lacks name, protocol, data"):
        StoredRun.open(run)


TABLES: dict[str, Any] = {
    "more right answers than samples": lambda t: {
        **t, "right/test/global": 1000 + 0 * t["right/test/global"]},
    "fewer than none": lambda t: {**t, "right/test/global": -2 + 0 * t["right/test/global"]},
    "one client less": lambda t: {k: v[:, :-1] if v.dim() == 2 else v[:-1] if "samples" in k else v
                                  for k, v in t.items()},
    "one evaluation less": lambda t: {k: v if "samples" in k or k == "counters" else v[:-1]
                                      for k, v in t.items()},
    "rounds backwards": lambda t: {**t, "evaluated": t["evaluated"].flip(0)},
    "rounds of the future": lambda t: {**t, "evaluated": 100 + t["evaluated"]},
    "negative samples": lambda t: {**t, "samples/test": -t["samples/test"]},
    "infinite weights": lambda t: {**t, "weights": t["weights"] / 0},
    "losses as counts": lambda t: {**t, "loss": t["loss"].int()},
    "an unknown split": lambda t: {**t, "right/nothing/global": t["right/test/global"] * 1},
    "no losses": lambda t: {k: v for k, v in t.items() if k != "loss"},
    "a loss without axes": lambda t: {**t, "loss": torch.zeros(())},
    "other samples": lambda t: {**t, "samples/test": t["samples/test"] + 1},
}  # fmt: skip


@pytest.mark.parametrize("lie", TABLES)
def test_impossible_histories_are_refused(lie: str, full: Path) -> None:
    run = a_run(full)
    tables = load((run / "history.safetensors").read_bytes())
    changed = {name: table.contiguous() for name, table in TABLES[lie](tables).items()}
    damage.reseal_file(run, "history.safetensors", save(changed))
    with pytest.raises(IntegrityError, match=run.name):
        gather(full)


# --- files that are none -------------------------------------------------------------------------
def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(900 << 20)


SPECIAL: dict[str, Any] = {
    "a pipe": make_fifo,
    "zeros for ever": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a file without a length": lambda path: path.symlink_to("/proc/self/pagemap"),
    "a folder": Path.mkdir,
    "a hole of 900 MB": make_hole,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_are_refused(kind: str, made: Path, tmp_path: Path) -> None:
    for reader in all_readers(made, tmp_path):
        if kind == "nothing" and reader.name.startswith(("federations", "a PNG")):
            continue  # these may be missing
        whole, tally = reader.path.read_bytes(), damage.Tally()
        reader.path.unlink()
        try:
            SPECIAL[kind](reader.path)
            damage.attempt(reader.read, None, tally, False, f"{kind} as {reader.name}")
        finally:
            if reader.path.is_dir() and not reader.path.is_symlink():
                reader.path.rmdir()
            else:
                reader.path.unlink(missing_ok=True)
            reader.path.write_bytes(whole)
        assert not tally.wrong, tally.wrong
        assert (tally.refused, tally.other) in ((1, 0), (0, 1)), reader.name
        assert tally.refused or reader.name.startswith("a PNG"), f"{kind} as {reader.name}"
        assert tally.megabytes < 300, reader.name
        assert tally.slowest < HANGS, reader.name


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_plugins_are_refused(kind: str, tmp_path: Path) -> None:
    SPECIAL[kind](tmp_path / "own.py")
    with pytest.raises(BadInput, match=r"own\.py"):
        load_plugin(tmp_path / "own.py")


def test_missing_plugins_are_told_from_other_files(tmp_path: Path) -> None:
    for name in ("own.py", "own.txt", "o" * 300 + ".py"):
        with pytest.raises(BadInput, match=f"{name} does not exist; give a Python file"):
            load_plugin(tmp_path / name)
    (tmp_path / "own.txt").touch()
    with pytest.raises(BadInput, match=r"own\.txt is not a Python file"):
        load_plugin(tmp_path / "own.txt")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"x = 1\n\nraise ValueError('no')", "line 3: ValueError: no"),
        (b"x = (", "SyntaxError"),
        (b"x = 1\0", "null bytes"),
        (b"x = '\xff'", "SyntaxError|UnicodeDecodeError"),
        (b"x = " + b"(" * 3000, "SyntaxError|too many|MemoryError"),
        (b"x = " + b"-" * 100_000 + b"1", "RecursionError|MemoryError|SyntaxError"),
    ],
)
def test_broken_plugins_are_told_in_one_line(text: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_bytes(text)
    with pytest.raises(BadInput, match=why) as found:
        load_plugin(tmp_path / "own.py")
    assert "\n" not in str(found.value)


TOML: dict[str, bytes] = {
    "5,000 digits": b"[train]\nlr = " + b"9" * 5000,
    "5,000 digits in a list": b"[sweep]\nlr = [" + b"9" * 5000 + b"]",
    "deep lists": b"x = " + b"[" * 5000 + b"]" * 5000,
    "deep tables": b"x = " + b"{a = " * 5000,
    "many dots": b"a." * 30_000 + b"a = 1",
    "many dots in a header": b"[" + b"a." * 30_000 + b"a]",
    "dots and quotes": b'"a".' * 20_000 + b"a = 1",
    "thirty levels": b"a." * 30 + b"a = 1",
    "NUL": b"name = 'a\0b'",
    "NUL in a key": b"a\0b = 1",
    "not UTF-8": b"name = '\xff\xfe'",
    "a megabyte": b"# " + b"x" * (1 << 20),
    "a date": b"name = 1979-05-27",
    "nan": b"[train]\nlr = nan",
    "infinite rounds": b"[train]\nrounds = inf",
}


@pytest.mark.parametrize("kind", TOML)
@pytest.mark.parametrize("read", [Config.load, Plan.load], ids=["run", "sweep"])
def test_hostile_toml_is_refused(kind: str, read: Any, tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_bytes(TOML[kind])
    with pytest.raises(BadInput) as found:
        read(tmp_path / "some.toml")
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 2000


@pytest.mark.parametrize("text", ["train.lr=" + "9" * 5000, "train.lr=" + "[" * 5000,
                                  "a." * 5000 + "a=1", "x={" + "a." * 5000 + "a=1}"])  # fmt: skip
def test_hostile_overrides_are_refused(text: str) -> None:
    with pytest.raises(BadInput) as found:
        merge_overrides({}, [text])
    assert len(str(found.value)) < 500


def test_deep_folders_of_images(tmp_path: Path) -> None:
    """As deep as a path can be; deeper ones are refused with a message."""
    handle = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("abc", dir_fd=handle)
        below = os.open("abc", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(handle)
    try:
        with pytest.raises(FairvarError) as found:
            sources.load("folder", tmp_path)
        assert "\n" not in str(found.value)
    finally:  # Python's own way to remove a tree calls itself for every level
        os.system(f"rm -rf {tmp_path}/abc")


def test_output_folders_that_are_too_deep(tmp_path: Path, capsys) -> None:
    for place in ("a/" * 1500, "a" * 300, "a\0b"):
        with pytest.raises(SystemExit) as end:
            main(["run", "configs/quick.toml", "--out", str(tmp_path / place)])
        assert end.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
