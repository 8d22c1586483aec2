"""Results small enough to publish: the same report, the same choice, nothing taken on trust."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import lzma
import random
import shutil
import tarfile
import tempfile
import tracemalloc
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from fairvar.cli import main
from fairvar.engine.history import History
from fairvar.engine.keys import fingerprint
from fairvar.engine.train import run_rounds
from fairvar.errors import BadInput, IntegrityError
from fairvar.report.files import write_files
from fairvar.runs.archive import ARCHIVE, LIST, ArchiveList, condense, extract, unpacked, write_list
from fairvar.runs.config import Config
from fairvar.runs.identity import identity_of
from fairvar.runs.plan import Plan
from fairvar.runs.results import gather, stored_runs
from fairvar.runs.runner import (
    Watch,
    arrange,
    federation_of,
    model_of,
    run_cell,
    run_folder,
    train_runs,
)
from fairvar.runs.select import Criterion
from fairvar.runs.stored import StoredRun
from fairvar.runs.sweep import run_sweep
from fairvar.runs.verify import (
    NARROW,
    WIDE,
    Rerun,
    Tolerance,
    check_files,
    compared,
    draw,
    rerun,
    tolerance,
)

PLAN = {
    "name": "tiny",
    "data": {"name": "digits", "clients": 6},
    "train": {"rounds": 6},
    "evaluate": {"every": 2},
    "sweep": {
        "methods": ["fedavg", "afl", "fairgrad"], "seeds": 2, "lr": [0.05, 0.5],
        "strength": [0.01, 0.1], "step": [0.1], "alpha": [0.1, 0.5],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both protocols of a small grid in one folder."""
    out = tmp_path_factory.mktemp("sweep")
    for protocol in ("boxes", "tables"):
        plan = Plan.from_dict({**PLAN, "protocol": protocol})
        run_sweep(arrange(plan.cells), out, lambda done, total, what: None)
    return out


@pytest.fixture(scope="module")
def small(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small")
    condense(gather(sweep), out)
    return out


@pytest.mark.usefixtures("without_pdf")
def test_the_report_is_the_same_byte_by_byte(sweep: Path, small: Path, tmp_path: Path) -> None:
    for source in (sweep, small):
        write_files(gather(source), tmp_path / source.name, "t")
    full, condensed = ({p.name: p.read_bytes() for p in (tmp_path / s.name).iterdir()}
                       for s in (sweep, small))  # fmt: skip
    assert full.keys() == condensed.keys()
    assert {"table.md", "table.csv", "table.tex", "index.html"} <= full.keys()
    assert [name for name in full if full[name] != condensed[name]] == []


def test_it_is_much_smaller_and_always_the_same(sweep: Path, small: Path, tmp_path: Path) -> None:
    whole = sum(p.stat().st_size for p in sweep.rglob("*") if p.is_file())
    assert (small / ARCHIVE).stat().st_size < whole / 10
    again = condense(gather(small), tmp_path / "again")
    assert again.read_bytes() == (small / ARCHIVE).read_bytes()
    everything = condense(gather(sweep), tmp_path / "all", everything=True)
    assert len(stored_runs(everything.parent)) == len(stored_runs(sweep))
    from_all = condense(gather(everything.parent), tmp_path / "from_all")
    assert from_all.read_bytes() == again.read_bytes()


def test_slices_from_two_machines_become_one(sweep: Path, tmp_path: Path) -> None:
    """Cells by protocol, seeds of one configuration apart: as if one machine had computed all."""
    plans = [Plan.from_dict({**PLAN, "protocol": p}) for p in ("boxes", "tables")]
    names = [identity_of(c).name for plan in plans for c in plan.cells]
    for place, part in enumerate((names[::2], names[1::2])):
        folder = tmp_path / str(place)
        folder.mkdir()
        for name in part:
            (folder / name).symlink_to(sweep / name)
        (folder / "federations").symlink_to(sweep / "federations")
        condense(gather(folder), folder / "out", everything=True)
    together = gather(tmp_path / "0" / "out", tmp_path / "1" / "out")
    path = condense(together, tmp_path / "both")
    assert path.read_bytes() == condense(gather(sweep), tmp_path / "whole").read_bytes()


def report(folder: Path, criterion: Criterion) -> list[list[int]]:
    groups = gather(folder, rule=lambda config: criterion)
    return [[len(r.trial.histories) for r in group.results] for group in groups]


def test_a_choice_that_was_not_kept_is_refused(sweep: Path, small: Path) -> None:
    """Another criterion may choose a configuration of which only the curve is there."""
    chosen = [[r.trial.describe() for r in g.results] for g in gather(sweep)]
    other = gather(sweep, rule=lambda c: Criterion(t=0.0, model="global"))
    assert [[r.trial.describe() for r in g.results] for g in other] != chosen
    with pytest.raises(BadInput, match="summar"):
        report(small, Criterion(t=0.0, model="global"))


def test_a_summary_gives_way_to_the_runs_behind_it(sweep: Path, small: Path) -> None:
    both, alone = gather(sweep, small), gather(sweep)
    assert [[(t.label, t.lr, t.seeds) for t in g.trials] for g in both] == [
        [(t.label, t.lr, t.seeds) for t in g.trials] for g in alone
    ]


def test_summaries_and_runs_of_one_configuration_are_not_mixed(
    sweep: Path, small: Path, tmp_path: Path
) -> None:
    for run in stored_runs(sweep):
        if run.config.train.seed == 0:
            shutil.copytree(run.folder, tmp_path / run.folder.name)
    sweep = tmp_path
    with pytest.raises(BadInput, match="as a summary and again"):
        gather(sweep, small)


def test_a_summary_is_completed_by_runs_of_other_seeds(sweep: Path, tmp_path: Path) -> None:
    for run in stored_runs(sweep):
        (tmp_path / str(run.config.train.seed)).mkdir(exist_ok=True)
        shutil.copytree(run.folder, tmp_path / str(run.config.train.seed) / run.folder.name)
    condense(gather(tmp_path / "0"), tmp_path / "archive")
    joined = [t for g in gather(tmp_path / "archive", tmp_path / "1") for t in g.trials]
    whole = [t for g in gather(sweep) for t in g.trials]
    assert any(not t.source for t in joined)
    for one, other in zip(joined, whole, strict=True):
        assert (one.label, one.describe(), one.diverged) == (
            other.label, other.describe(), other.diverged)  # fmt: skip
        assert sorted(one.seeds) == other.seeds == [0, 1]
        for model, curve in other.summary.valid.items():
            mine = one.summary.valid[model]
            np.testing.assert_allclose(mine.mean, curve.mean, rtol=1e-12)
            np.testing.assert_allclose(mine.variance, curve.variance, rtol=1e-12)
            np.testing.assert_allclose(one.summary.last[model], other.summary.last[model])
    condense(gather(tmp_path / "archive", tmp_path / "1"), tmp_path / "both")


def test_an_archive_does_not_hide_the_runs_beside_it(
    sweep: Path, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Later runs in the folder of an archive: report, verify and compare have all of them."""
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    before = len(stored_runs(tmp_path))
    later = replace(stored_runs(sweep)[0].config, train=replace(
        stored_runs(sweep)[0].config.train, seed=7))  # fmt: skip
    run_cell(later, tmp_path, Watch())
    assert len(stored_runs(tmp_path)) == before + 1
    assert fingerprint(later) in {fingerprint(r.config) for r in stored_runs(tmp_path)}
    assert check_files(tmp_path) == check_files(small) + 1
    damaged = run_folder(later, tmp_path) / "config.toml"
    damaged.write_bytes(damaged.read_bytes() + b"#")
    with pytest.raises(SystemExit) as end:
        main(["verify", str(tmp_path)])
    assert end.value.code == 4
    assert "was changed after it was written" in capsys.readouterr().err


def test_archives_go_into_a_folder_of_their_own(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["condense", str(sweep), "--out", str(sweep)])
    assert end.value.code == 2
    assert "a folder of its own" in capsys.readouterr().err
    assert not (sweep / ARCHIVE).exists()


def test_an_archive_among_its_own_runs_changes_nothing(sweep: Path, tmp_path: Path) -> None:
    """As earlier versions could leave it behind."""
    shutil.copytree(sweep, tmp_path, dirs_exist_ok=True)
    condense(gather(sweep), tmp_path)
    one, two = ([[(t.label, t.lr, t.seeds) for t in g.trials] for g in gather(f)]
                for f in (sweep, tmp_path))  # fmt: skip
    assert one == two
    assert len(stored_runs(tmp_path)) == len(stored_runs(sweep))


def test_the_model_was_not_kept_and_says_so(small: Path) -> None:
    with pytest.raises(BadInput, match="was condensed"):
        assert stored_runs(small)[0].history().model


def listed(folder: Path, content: bytes) -> None:
    """An archive with a list that fits it, but for the files in it: a seal is no signature."""
    folder.mkdir(exist_ok=True)
    (folder / ARCHIVE).write_bytes(content)
    write_list(folder, ArchiveList.of(hashlib.sha256(content).hexdigest(), len(content), {}))


@pytest.mark.parametrize("name", ["../escape/x", "/tmp/x", "a/b/c/d", "x", "a/.hidden", "ä/x",
                                  "a/" + 97 * "b", "a/" + 300 * "b"])  # fmt: skip
def test_hostile_archives_are_refused(name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / ARCHIVE, "w:xz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    listed(tmp_path, (tmp_path / ARCHIVE).read_bytes())
    with pytest.raises(IntegrityError, match=r"refused|not as runs.json"):
        unpacked(tmp_path)
    assert not (tmp_path.parent / "escape").exists()


def test_links_and_damage_are_refused(small: Path, tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"7", b"\0"):
        with tarfile.open(tmp_path / ARCHIVE, "w:xz") as archive:
            entry = tarfile.TarInfo("a/link")
            entry.type, entry.linkname = kind, "../../secret"
            archive.addfile(entry)
        listed(tmp_path, (tmp_path / ARCHIVE).read_bytes())
        with pytest.raises(IntegrityError, match="refused"):
            unpacked(tmp_path)
    listed(tmp_path / "cut", (small / ARCHIVE).read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="cut off"):
        unpacked(tmp_path / "cut")


def header(name: str, size: int = 0, kind: bytes = b"0") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type = size, kind
    return entry.tobuf(tarfile.GNU_FORMAT)


def sparse() -> bytes:
    """144 bytes that claim three gigabytes of zeros."""
    with tempfile.TemporaryFile() as file:
        entry = tarfile.TarInfo("a/x")
        entry.size, entry.pax_headers = 512, {
            "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a/x",
            "GNU.sparse.realsize": str(3 << 30),
        }  # fmt: skip
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            archive.addfile(entry, io.BytesIO(f"1\n{3 << 30}\n0\n".encode().ljust(512, b"\0")))
        file.seek(0)
        return file.read()


def large_dictionary(content: bytes) -> bytes:
    """The header of the first block requests the most memory that the format has."""
    head = bytearray(content[12 : 12 + 4 * (content[12] + 1)])
    assert head[2:4] == b"\x21\x01"  # LZMA2 and the length of its one property
    head[4] = 40
    head[-4:] = zlib.crc32(head[:-4]).to_bytes(4, "little")
    return content[:12] + head + content[12 + len(head) :]


END = bytes(1024)
ENTRY = header("a/x", 1) + b"x".ljust(512, b"\0")
BOMBS = {
    "sparse": lambda: lzma.compress(sparse(), preset=0),
    "zeros in one file": lambda: lzma.compress(header("a/x", 3 << 30) + bytes(1 << 20), preset=0),
    "zeros in many": lambda: lzma.compress(
        b"".join(header(f"a/{i}", 8 << 20) + bytes(8 << 20) for i in range(10)) + END, preset=0),
    "long names": lambda: lzma.compress(
        (header("x", 512, b"L") + b"a" * 512) * 3000 + ENTRY + END, preset=0),
    "pax": lambda: lzma.compress(
        header("x", 9 << 20, b"x") + b"9 path=a\n" * (1 << 20) + END, preset=0),
    "the same entry twice": lambda: lzma.compress(ENTRY + ENTRY + END),
    "an entry after the end": lambda: lzma.compress(ENTRY + END + ENTRY + END),
    "garbage in the padding": lambda: lzma.compress(ENTRY[:-1] + b"g" + END),
    "no end": lambda: lzma.compress(ENTRY),
    "garbage behind": lambda: lzma.compress(ENTRY + END) + b"garbage",
    "zeros behind": lambda: lzma.compress(ENTRY + END) + bytes(4),
    "two streams": lambda: lzma.compress(ENTRY + END) + lzma.compress(END),
    "no checksum, cut": lambda: lzma.compress(ENTRY + END, check=lzma.CHECK_NONE)[:-30],
    "another format": lambda: lzma.compress(ENTRY + END, format=lzma.FORMAT_ALONE),
    "a dictionary of 4 GB": lambda: large_dictionary(lzma.compress(ENTRY + END)),
    "nothing": lambda: b"",
    "a negative size": lambda: lzma.compress(
        ENTRY[:124] + b"\xff" * 12 + b" " * 8 + ENTRY[156:] + END),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_and_tails_are_refused(kind: str, tmp_path: Path) -> None:
    """In little memory, with a list that fits."""
    listed(tmp_path, BOMBS[kind]())
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError) as found:
            unpacked(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(found.value)


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairvar.runs.archive.MOST_FILES", 1000)
    listed(tmp_path, lzma.compress(b"".join(header(f"a/{i}") for i in range(1001)) + END, preset=0))
    with pytest.raises(IntegrityError, match="one of too many files"):
        unpacked(tmp_path)


def test_a_damaged_archive_or_list_is_found(small: Path, tmp_path: Path) -> None:
    """Any bit of either file, a list of another archive, and a list that is gone."""
    content = {name: (small / name).read_bytes() for name in (ARCHIVE, LIST)}
    for name, whole in content.items():
        for other in content:
            (tmp_path / other).write_bytes(content[other])
        unpacked(tmp_path)
        places = random.Random(name).sample(range(8 * len(whole)), 100)
        for place in [*places, *range(8 * len(whole) - 200, 8 * len(whole))]:
            flipped = bytearray(whole)
            flipped[place // 8] ^= 1 << place % 8
            (tmp_path / name).write_bytes(flipped)
            with pytest.raises(IntegrityError):
                unpacked(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(IntegrityError, match=r"fairvar seal|cannot be unpacked"):
            unpacked(tmp_path)
    other = condense(gather(small), tmp_path / "other", everything=True).parent
    (tmp_path / ARCHIVE).write_bytes(content[ARCHIVE] + b"")
    facts = json.loads((other / LIST).read_bytes())
    write_list(tmp_path, ArchiveList.of("0" * 64, facts["archive_bytes"], facts["files"]))
    with pytest.raises(IntegrityError, match=r"not the archive that runs.json lists"):
        unpacked(tmp_path)


@pytest.mark.parametrize("change", ["lost", "new", "other"])
def test_a_list_must_fit_the_contents(change: str, small: Path, tmp_path: Path) -> None:
    shutil.copyfile(small / ARCHIVE, tmp_path / ARCHIVE)
    contents = extract(small / ARCHIVE, tmp_path / "place")
    files = contents.files
    name = sorted(files)[3]
    if change == "other":
        files[name] = "0" * 64
    else:
        files = {k: v for k, v in files.items() if k != name} if change == "lost" else {
            **files, "new/file": "0" * 64}  # fmt: skip
    write_list(tmp_path, ArchiveList.of(contents.archive_sha256, contents.archive_bytes, files))
    with pytest.raises(IntegrityError, match=r"is not as runs.json lists it"):
        unpacked(tmp_path)


def test_an_older_archive_gets_its_list(small: Path, tmp_path: Path, capsys) -> None:
    shutil.copyfile(small / ARCHIVE, tmp_path / ARCHIVE)
    for command in (["verify", str(tmp_path)], ["report", str(tmp_path)]):
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code == 4
        assert f"fairvar seal {tmp_path}" in capsys.readouterr().err
    main(["seal", str(tmp_path)])
    assert (tmp_path / LIST).read_bytes() == (small / LIST).read_bytes()
    main(["verify", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main(["seal", str(tmp_path)])
    assert end.value.code == 2
    (tmp_path / LIST).unlink()
    (tmp_path / ARCHIVE).write_bytes((small / ARCHIVE).read_bytes()[:-8])
    with pytest.raises(SystemExit) as end:
        main(["seal", str(tmp_path)])
    assert end.value.code == 4
    assert not (tmp_path / LIST).exists()


# --- verify --------------------------------------------------------------------------------------
def test_runs_come_out_again(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify", str(small), "--rerun", "3", "--evaluations", "2", "--seed", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["files_intact"] == len(stored_runs(small)) + len(
        list((unpacked(small) / "summaries").iterdir())
    )
    assert len(found["rerun"]) == 3
    assert all(r["holds"] and r["rounds"] == 4 for r in found["rerun"])
    assert max(r["accuracy_difference"] for r in found["rerun"]) == 0


def test_a_wrong_result_is_found(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of another learning rate in the place of the stored one."""
    run = next(r for r in stored_runs(small) if r.config.method.label == "FedAvg")
    federation, config = federation_of(run.config), run.config
    settings = replace(config.train, lr=10 * config.train.lr, rounds=2)
    other = run_rounds(model_of(config, federation), federation, config.method, config.model.loss,
                       settings, config.evaluate)  # fmt: skip
    assert rerun(run, 1).holds
    assert tolerance(run.config) == NARROW
    assert not compared(run, run.history(), other).holds


def test_a_run_of_a_batch_is_run_again_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are too long turn the last bits, which a batch rounds otherwise, into another
    trajectory. Without all runs of the batch it is run alone."""
    sweep = {"methods": ["fairgrad"], "lr": [0.5], "strength": [0.01, 3.0], "alpha": [0.1]}
    data = {"name": "mnist_1000", "samples": 200, "clients": 5}
    plan = Plan.from_dict({**PLAN, "data": data, "train": {"rounds": 20}, "sweep": sweep})
    run_sweep(arrange(plan.cells), tmp_path / "runs", lambda done, total, what: None)
    condense(gather(tmp_path / "runs"), tmp_path / "all", everything=True)
    seen: list[int] = []

    def counted(cells: Sequence[Config]) -> list[History]:
        seen.append(len(cells))
        return train_runs(cells)

    monkeypatch.setattr("fairvar.runs.verify.train_runs", counted)
    stored = [run for run in stored_runs(tmp_path / "all") if run.manifest["diverged_at"] is None]
    for run in stored[:2]:
        size = len(run.manifest["group"])
        assert size > 1
        found = rerun(run, 10)
        assert (found.accuracy, found.answers, seen.pop()) == (0, 0, size)
    first = stored[0]
    gone = next(name for name in first.manifest["group"] if name != first.folder.name)
    shutil.rmtree(tmp_path / "runs" / gone)
    rerun(StoredRun.open(tmp_path / "runs" / first.folder.name), 1)
    assert seen == [1]


def test_a_changed_file_is_found(small: Path, tmp_path: Path, capsys) -> None:
    """Exit code 4, and the file is named."""
    with (
        tarfile.open(small / ARCHIVE, "r:xz") as old,
        tarfile.open(tmp_path / ARCHIVE, "w:xz") as new,
    ):
        changed = False
        for entry in old:
            content = old.extractfile(entry).read()  # type: ignore[union-attr]
            if entry.name.endswith("history.safetensors") and not changed:
                content, changed = content[:-1] + bytes([content[-1] ^ 1]), True
            new.addfile(entry, io.BytesIO(content))
    write_list(tmp_path, extract(tmp_path / ARCHIVE, tmp_path / "place"))
    with pytest.raises(SystemExit) as end:
        main(["verify", str(tmp_path)])
    assert end.value.code == 4
    assert "was changed after it was written" in capsys.readouterr().err


def test_diverged_runs_are_not_drawn(sweep: Path) -> None:
    runs = stored_runs(sweep)
    gone = StoredRun(runs[0].folder, runs[0].config, {**runs[0].manifest, "diverged_at": 3})
    with pytest.raises(BadInput, match="every run diverged"):
        draw([gone], 3, 0)
    assert draw([gone, runs[1]], 3, 0) == [runs[1]]


def test_losses_of_clients_that_were_away_do_not_count(small: Path) -> None:
    run = stored_runs(small)[0]
    history = run.history()
    away = history.loss.clone()
    away[:, 0] = torch.nan
    assert compared(run, history, dataclasses.replace(history, participant_loss=away)).loss == 0


def test_only_rounded_epochs_may_drift(tmp_path: Path) -> None:
    """TF32 with one step per round is held to the narrow tolerance, as full precision is."""
    given = {"data": {"name": "digits"}, "model": {"name": "avgcnn"}, "method": {"name": "fedavg"}}
    kinds: list[tuple[str, dict, Tolerance]] = [
        ("full", {"local_epochs": 1}, NARROW),
        ("tf32", {}, NARROW),
        ("tf32", {"local_epochs": 1}, WIDE),
        ("bfloat16", {"local_steps": 3}, WIDE),
    ]
    for precision, work, allowed in kinds:
        train = {"precision": precision, "batch_size": 8, **work}
        config = Config.from_dict({**given, "train": train})
        assert tolerance(config) == allowed
        run = StoredRun(tmp_path, config, {"birth": {}})
        for part in (0.9, 1.1):
            found = Rerun(run, 5, part * allowed.accuracy, 0.0, part * allowed.loss)
            assert found.holds == (part < 1)


def test_an_unpacked_archive_stays_while_others_are_read(tmp_path: Path) -> None:
    folders = [tmp_path / str(n) for n in range(10)]
    for folder in folders:
        listed(folder, lzma.compress(END))
    opened = [unpacked(folder) for folder in folders]
    assert len(set(opened)) == 10
    assert all(place.is_dir() for place in opened)
