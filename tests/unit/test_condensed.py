"""Results small enough to publish: the same report, the same choice, nothing taken on trust."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from fairvar.cli import main
from fairvar.config import Config
from fairvar.engine.train import run_rounds
from fairvar.errors import BadInput, IntegrityError
from fairvar.experiment import StoredRun, Watch, federation_of, model_of, run_cell
from fairvar.plan import Plan
from fairvar.report.condensed import ARCHIVE, condense, unpacked
from fairvar.report.gather import gather, stored_runs
from fairvar.report.write import write_report
from fairvar.select import Criterion
from fairvar.sweep import run_sweep
from fairvar.verify import (
    NARROW,
    WIDE,
    Agreement,
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
        run_sweep(plan.cells, out, lambda done, total, what: None)
    return out


@pytest.fixture(scope="module")
def small(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small")
    condense(gather(sweep), out)
    return out


def test_the_report_is_the_same_byte_by_byte(sweep: Path, small: Path, tmp_path: Path) -> None:
    for source in (sweep, small):
        write_report(gather(source), tmp_path / source.name, "t")
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
    names = [c.fingerprint[:16] for plan in plans for c in plan.cells]
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
    assert later.fingerprint in {r.config.fingerprint for r in stored_runs(tmp_path)}
    assert check_files(tmp_path) == check_files(small) + 1
    damaged = tmp_path / later.fingerprint[:16] / "config.toml"
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


@pytest.mark.parametrize("name", ["../escape/x", "/tmp/x", "a/b/c/d", "x", "a/.hidden"])
def test_hostile_archives_are_refused(name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / ARCHIVE, "w:xz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(IntegrityError, match="refused"):
        unpacked(tmp_path)
    assert not (tmp_path.parent / "escape").exists()


def test_links_and_damage_are_refused(small: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / ARCHIVE, "w:xz") as archive:
        entry = tarfile.TarInfo("a/link")
        entry.type, entry.linkname = tarfile.SYMTYPE, "../../secret"
        archive.addfile(entry)
    with pytest.raises(IntegrityError, match="refused"):
        unpacked(tmp_path)
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / ARCHIVE).write_bytes((small / ARCHIVE).read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="cannot be unpacked"):
        unpacked(cut)


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
    assert compared(run, history, dataclasses.replace(history, loss=away)).loss == 0


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
            found = Agreement(run, 5, part * allowed.accuracy, 0.0, part * allowed.loss)
            assert found.holds == (part < 1)


def test_an_unpacked_archive_stays_while_others_are_read(tmp_path: Path) -> None:
    folders = [tmp_path / str(n) for n in range(10)]
    for folder in folders:
        folder.mkdir()
        with tarfile.open(folder / ARCHIVE, "w:xz"):
            pass
    opened = [unpacked(folder) for folder in folders]
    assert len(set(opened)) == 10
    assert all(place.is_dir() for place in opened)
