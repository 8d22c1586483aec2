"""Checkpoints of other runs are not continued; folders from elsewhere do not lead outside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from nursery import run_bytes
from safetensors.torch import load, save

from checks import METHODS
from fairvar.engine.keys import checkpoint_key
from fairvar.errors import IntegrityError
from fairvar.runs import runner
from fairvar.runs.config import Config
from fairvar.runs.formats import (
    MANIFEST,
    SLOTS,
    inside,
    pack_checkpoint,
    read_checkpoints,
    save_files,
    unpack_checkpoint,
    write_checkpoint,
)
from fairvar.runs.identity import identity_of
from fairvar.runs.plan import Plan
from fairvar.runs.runner import (
    Interrupted,
    Watch,
    arrange,
    missing,
    run_cell,
    run_folder,
    run_group,
)

BASE: dict[str, Any] = {
    "data": {"name": "logistic", "clients": 6},
    "partition": {"name": "natural"},
    "train": {"rounds": 6},
    "evaluate": {"every": 2},
}
GRID = {"methods": ["fairgrad*"], "seeds": 2, "lr": [0.05, 0.1, 0.2]}


def config(**sections: Any) -> Config:
    return Config.from_dict({**BASE, **sections})


def stop_after(rounds: int) -> Watch:
    asked = iter([False] * (rounds - 1) + [True])
    return Watch(stopping=lambda: next(asked))


def checkpoint_of(cell: Config, out: Path) -> bytes:
    """Of a run that was stopped after four rounds."""
    with pytest.raises(Interrupted):
        run_cell(cell, out, stop_after(4))
    folder = run_folder(cell, out)
    ((name, payload),) = read_checkpoints(folder)[0].items()
    assert name == folder.name
    return payload


def rounds_from(cell: Config, out: Path, payload: bytes) -> list[int]:
    """Which rounds are computed where this is the checkpoint."""
    folder = run_folder(cell, out)
    folder.mkdir(parents=True)
    write_checkpoint(folder, 0, {folder.name: payload})
    seen: list[int] = []
    run_cell(cell, out, Watch(progress=lambda done, total: seen.append(done)))
    return seen


OTHERS = {
    "learning rate": config(train={"rounds": 6, "lr": 0.3}),
    "seed": config(train={"rounds": 6, "seed": 1}),
    "method": config(method={"name": "afl"}),
    "data": config(data={"name": "logistic", "clients": 6, "seed": 1}),
    "clients": config(data={"name": "logistic", "clients": 5}),
    "model": config(model={"name": "2nn"}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_of_another_run_is_not_continued(kind, tmp_path, capsys):
    payload = checkpoint_of(OTHERS[kind], tmp_path / "other")
    assert rounds_from(config(), tmp_path / "out", payload) == list(range(1, 7))
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "belongs to another run" in told
    run_cell(config(), tmp_path / "calm", Watch())
    name = run_folder(config(), tmp_path).name
    assert run_bytes(tmp_path / "out" / name) == run_bytes(tmp_path / "calm" / name)


def relabelled(payload: bytes, cell: Config, **changes: str) -> bytes:
    """A checkpoint that says it is this run's."""
    return pack_checkpoint(unpack_checkpoint(payload), checkpoint_key(identity_of(cell)) | changes)


@pytest.mark.parametrize("kind", ["method", "clients", "model"])
def test_wrong_shapes_are_not_continued(kind, tmp_path, capsys):
    payload = relabelled(checkpoint_of(OTHERS[kind], tmp_path / "other"), config())
    assert rounds_from(config(), tmp_path / "out", payload) == list(range(1, 7))
    assert "is not continued: " in capsys.readouterr().err


@pytest.mark.parametrize("part", ["fairvar", "torch"])
def test_another_version_does_not_continue(part, tmp_path, capsys):
    payload = checkpoint_of(config(), tmp_path / "other")
    assert rounds_from(config(), tmp_path / "same", payload) == [5, 6]
    assert capsys.readouterr().err == ""
    old = relabelled(payload, config(), **{part: "0.0.1"})
    assert rounds_from(config(), tmp_path / "out", old) == list(range(1, 7))
    assert f"made with {part} '0.0.1'" in capsys.readouterr().err


def forged(payload: bytes) -> dict[str, bytes]:
    """The checkpoint of this very run, with one thing wrong."""
    flat, key = load(payload), checkpoint_key(identity_of(config()))

    def made(**changes: Any) -> bytes:
        named = {name.replace("__", "/"): value for name, value in changes.items()}
        kept = {k: v for k, v in (flat | named).items() if v is not None}
        return save({k: v.contiguous() for k, v in kept.items()}, key)

    rows = flat["tables/loss"]
    return {
        "too many rounds": made(round=torch.tensor(7)),
        "negative rounds": made(round=torch.tensor(-1)),
        "mean loss": made(mean_loss=torch.zeros(3)),
        "dtype": made(**{k: v.double() for k, v in flat.items() if k.startswith("params/")}),
        "a parameter more": made(params__x=torch.zeros(1)),
        "memory": made(memory__x=torch.zeros(1)),
        "iterate": made(iterate__x=torch.zeros(1)),
        "no losses": made(tables__loss=None),
        "losses of others": made(tables__loss=rows[:, :2]),
        "losses as a number": made(tables__loss=torch.zeros(())),
        "too many losses": made(tables__loss=rows.repeat(9, 1), tables__weights=rows.repeat(9, 1),
                                tables__ascended=torch.zeros(9 * len(rows)).double()),
        "evaluated": made(tables__evaluated=torch.tensor([2, 9])),
        "counters": made(tables__counters=torch.zeros(2)),
        "an unknown split": made(tables__accuracy__x__global=torch.zeros(2, 6)),
        "diverged": made(tables__diverged_at=torch.zeros(3)),
    }  # fmt: skip


def test_a_forged_checkpoint_is_not_continued(tmp_path, capsys):
    payload = checkpoint_of(config(), tmp_path / "other")
    for number, (kind, content) in enumerate(forged(payload).items()):
        assert rounds_from(config(), tmp_path / str(number), content) == list(range(1, 7)), kind
        assert capsys.readouterr().err.count("is not continued") == 1, kind


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_own_checkpoints_fit(method, tmp_path, capsys):
    cell = replace(config(), method=method)
    payload = checkpoint_of(cell, tmp_path / "other")
    assert rounds_from(cell, tmp_path / "out", payload) == [5, 6]
    assert capsys.readouterr().err == ""


# -- groups ---------------------------------------------------------------------------------------
def grid(**sections: Any) -> runner.Group:
    (group,) = arrange(Plan.from_dict({**BASE, "sweep": GRID, **sections}).cells)
    assert len(group) == 6
    return group


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calm")
    assert run_group(grid(), out, Watch())
    return out


def same(out: Path, calm: Path) -> None:
    for cell in grid():
        name = run_folder(cell, out).name
        assert run_bytes(out / name) == run_bytes(calm / name)


@pytest.mark.parametrize("lost", [[0], [1, 4]])
def test_a_deleted_run_comes_back_with_its_bytes(lost, calm, tmp_path):
    """Alone it would have other last bits; those that are there are not touched."""
    out = Path(shutil.copytree(calm, tmp_path / "out"))
    group = grid()
    for place in lost:
        shutil.rmtree(run_folder(group[place], out))
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/*") if p.parent.name != ".locks"}
    assert run_group(group, out, Watch())
    same(out, calm)
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_a_deleted_run_of_a_smaller_plan_says_so(calm, tmp_path, capsys):
    out = Path(shutil.copytree(calm, tmp_path / "out"))
    small = grid()[:3]
    shutil.rmtree(run_folder(small[1], out))
    assert run_group(small, out, Watch())
    assert missing(small, out) == []
    assert "may differ in its last bits" in capsys.readouterr().err


def test_runs_that_are_added_later_train_among_themselves(calm, tmp_path, capsys):
    out = Path(shutil.copytree(calm, tmp_path / "out"))
    more = {**GRID, "lr": [*GRID["lr"], 0.4]}
    (group,) = arrange(Plan.from_dict({**BASE, "sweep": more}).cells)
    assert run_group(group, out, Watch())
    added = [cell for cell in group if cell.train.lr == 0.4]
    names = [run_folder(cell, out).name for cell in added]
    assert [json.loads((out / n / MANIFEST).read_text())["group"] for n in names] == [names] * 2
    same(out, calm)
    shutil.rmtree(out / names[0])  # and come back with the same others
    assert run_group(group, out, Watch())
    assert json.loads((out / names[0] / MANIFEST).read_text())["group"] == names
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["another grid", "shapes", "one of them"])
def test_a_groups_checkpoint_of_other_runs_is_not_continued(kind, calm, tmp_path, capsys):
    other = grid(data={"name": "logistic", "clients": 5}) if kind != "one of them" else grid()
    with pytest.raises(Interrupted):
        run_group(other, tmp_path / "other", stop_after(4))
    (slot,) = (tmp_path / "other").glob(f".groups/*/{SLOTS[0]}")
    (files,) = read_checkpoints(slot.parent)
    packed = list(files.values())
    if kind == "one of them":  # has the checkpoint of its neighbour
        packed[0] = packed[1]
    cells, out = grid(), tmp_path / "out"
    names = [run_folder(cell, out).name for cell in cells]
    if kind == "shapes":
        packed = [relabelled(part, cell) for part, cell in zip(packed, cells, strict=True)]
    home = runner.home_of(cells, out)
    write_checkpoint(home, 0, dict(zip(names, packed, strict=True)))
    assert run_group(cells, out, Watch())
    same(out, calm)
    assert capsys.readouterr().err.count("is not continued") == 1


# -- names and links from elsewhere ----------------------------------------------------------------
BAD_NAMES = ["../x", "/tmp/x", "a/b", "..", ".", "", "a\0b", ".hidden", "a\nb", "a b", "x" * 200,
             "..\\x", "a/../../x", "ä"]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_lead_elsewhere_are_refused(name, tmp_path):
    with pytest.raises(IntegrityError, match="refused") as error:
        inside(tmp_path, name)
    assert "\n" not in str(error.value)
    with pytest.raises(IntegrityError, match="refused"):
        save_files(tmp_path / "run", {"config.toml": b"", name: b"x"})
    assert list(tmp_path.rglob("*")) == []


def test_tidying_up_stays_inside(tmp_path):
    """Names and links in `.groups` that lead out: left alone, and nothing behind them deleted."""
    out, precious = tmp_path / "out", tmp_path / "precious"
    precious.mkdir()
    (precious / MANIFEST).write_text("{}")
    write_checkpoint(precious, 0, {"../precious": b""})
    (out / ".groups").mkdir(parents=True)
    (out / ".groups" / "link").symlink_to(precious)
    write_checkpoint(out / ".groups" / "names", 0, {"../precious": b""})
    runner.tidy(out)
    assert {p.name for p in precious.iterdir()} == {MANIFEST, SLOTS[0]}


@pytest.mark.parametrize("where", ["run", "locks", "lock", "groups", "federations"])
def test_links_in_a_received_folder_are_not_followed(where, tmp_path):
    """A sweep writes into its folder, and deletes there; a link would lead it elsewhere."""
    out, precious = tmp_path / "out", tmp_path / "precious"
    precious.mkdir()
    (precious / ".dotfile").write_text("keep")
    out.mkdir()
    cells = grid() if where == "groups" else (config(),)
    name = run_folder(cells[0], out).name
    places = {"run": name, "locks": ".locks", "lock": f".locks/{name}", "groups": ".groups",
              "federations": "federations"}  # fmt: skip
    link = out / places[where]
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(precious / ".dotfile" if where == "lock" else precious)
    with pytest.raises(IntegrityError, match="is a link; refused"):
        run_group(cells, out, Watch())
    assert {p.name: p.read_text() for p in precious.iterdir()} == {".dotfile": "keep"}
