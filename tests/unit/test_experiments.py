"""`fv.run`, `fv.sweep` and `fv.compare`: the same runs and numbers as the command line's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import config

import fairvar as fv
from checks import same_bytes
from commands import call
from fairvar.report import compare as pairs
from fairvar.runs.config import Config
from fairvar.runs.plan import Plan

BASE = {
    "name": "small",
    "data": {"name": "logistic", "clients": 6},
    "partition": {"name": "natural"},
    "train": {"rounds": 8},
    "evaluate": {"every": 2},
}
GRID = {**BASE, "sweep": {"methods": ["fedavg", "term"], "seeds": 2, "lr": [0.1, 0.5]}}
TOML = """name = "small"
[data]
name = "logistic"
clients = 6
[partition]
name = "natural"
[train]
rounds = 8
[evaluate]
every = 2
"""
DATA = fv.load_federation("logistic", clients=6, partition=fv.Natural())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if (path / "manifest.json").exists()}


def trained(method: fv.Method, seeds: int = 2, **given: object) -> list[fv.History]:
    options: dict = {"evaluate_every": 2, **given}
    return [fv.train("multinomial", DATA, method, 8, seed=s, **options) for s in range(seeds)]


# -- run -------------------------------------------------------------------------------------------
def test_run_takes_a_file_a_dict_or_a_config_and_is_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.toml"
    path.write_text(TOML)
    options = ("method.name=term", "method.tilt=2.0", "train.lr=0.5")
    code, text, _ = call(capsys, "run", path, *options, "--out", tmp_path / "a", "--json")
    assert code == 0
    stored = fv.load(json.loads(text)["folder"])
    assert isinstance(stored, fv.History)
    threads = torch.get_num_threads()
    for place, found in enumerate(
        (
            fv.run(path, *options, out=tmp_path / "0"),
            fv.run({**BASE, "method": fv.TERM(2.0)}, "train.lr=0.5", out=tmp_path / "1"),
            fv.run(Config.load(path, options), out=str(tmp_path / "2")),
        )
    ):
        same_bytes(found, stored)
        assert names(tmp_path / str(place)) == names(tmp_path / "a")
    assert torch.get_num_threads() == threads
    assert capsys.readouterr() == ("", "")


def test_a_stored_run_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fv.run(BASE, out=tmp_path)
    monkeypatch.setattr("fairvar.runs.runner.compute", None)
    same_bytes(fv.run(BASE, out=tmp_path), first)


def test_a_dict_may_hold_numpys_numbers_arrays_and_ranges() -> None:
    config.update("jaxtyping_disable", True)  # it would refuse some by itself
    train = {"rounds": np.int64(8), "lr": np.float64(0.5), "drop_last": np.True_}
    plain = {"rounds": 8, "lr": 0.5, "drop_last": True}
    assert Config.load({**BASE, "train": train}) == Config.load({**BASE, "train": plain})
    sweep = {"methods": ("fedavg",), "seeds": range(2), "lr": np.array([0.1, 0.5])}
    listed = {"methods": ["fedavg"], "seeds": [0, 1], "lr": [0.1, 0.5]}
    made = [Plan.load({**BASE, "sweep": each}) for each in (sweep, listed)]
    assert made[0].cells == made[1].cells
    with pytest.raises(fv.BadInput, match="must look like"):
        Config.load(BASE, [{"train.lr": 1}])  # type: ignore[list-item]


def test_bad_configurations_write_nothing(tmp_path: Path) -> None:
    for bad, why in ((3, "no configuration"), ({"trian": {}}, "unknown key trian"),
                     ({"train": {"lr": -1}}, "train.lr"), (GRID, "describes many runs"),
                     (tmp_path / "none.toml", "does not exist")):  # fmt: skip
        with pytest.raises(fv.BadInput, match=why):
            fv.run(bad, out=tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


# -- sweep -----------------------------------------------------------------------------------------
def test_a_sweep_from_a_dict_stores_what_the_command_stores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.toml"
    path.write_text(TOML + '[sweep]\nmethods = ["fedavg", "term"]\nseeds = 2\nlr = [0.1, 0.5]\n')
    code, _, _ = call(capsys, "sweep", path, "--out", tmp_path / "a")
    assert code == 0
    found = fv.sweep(GRID, out=tmp_path / "b")
    assert names(tmp_path / "a") == names(tmp_path / "b") == found.names
    for name in found.names:
        for file in ("history.safetensors", "state.safetensors"):
            parts = (tmp_path / place / name / file for place in "ab")
            one, other = (part.read_bytes() for part in parts)
            assert one == other
    assert (found.status.done, found.status.cells) == (8, 8)
    assert repr(found) == f"<Sweep: 8 of 8 runs are done in {tmp_path / 'b'}>"
    histories = found.histories()
    methods = ("FedAvg", "TERM")
    assert set(histories) == {f"{method} (lr {lr})" for method in methods for lr in (0.1, 0.5)}
    assert [h.provenance["seed"] for h in histories["FedAvg (lr 0.1)"]] == [0, 1]


def test_names_of_histories_have_what_distinguishes_them(tmp_path: Path) -> None:
    """Not an alpha that all runs share, as in docs/python.md."""
    digits = {**GRID, "data": {"name": "digits", "clients": 3}, "train": {"rounds": 1},
              "partition": {"name": "dirichlet", "alpha": 0.5}}  # fmt: skip
    given = ("sweep.seeds=1", 'sweep.methods=["fedavg"]')
    found = fv.sweep(digits, *given, out=tmp_path)
    assert set(found.histories()) == {"FedAvg (lr 0.1)", "FedAvg (lr 0.5)"}
    found = fv.sweep(digits, *given, "sweep.lr=[0.1]", "sweep.alpha=[0.5, 1.0]", out=tmp_path)
    assert set(found.histories()) == {"FedAvg (alpha 0.5)", "FedAvg (alpha 1.0)"}


def test_a_sweep_takes_overrides_plans_and_parts(tmp_path: Path) -> None:
    part = fv.sweep(GRID, "sweep.lr=[0.5]", out=tmp_path, shard="0/2")
    assert part.status.cells == 2
    plan = Plan.load(GRID, ["sweep.lr=[0.5]"])
    whole = fv.sweep(plan, out=tmp_path)
    assert (whole.status.done, whole.status.cells) == (4, 4)
    assert part.names < whole.names
    assert set(whole.histories()) == {"FedAvg", "TERM"}
    with pytest.raises(fv.BadInput, match="a Plan is finished"):
        fv.sweep(plan, "sweep.seeds=1", out=tmp_path)
    with pytest.raises(fv.BadInput, match="budget"):
        fv.sweep(GRID, out=tmp_path, budget="soon")


def test_own_methods_of_a_dict_are_registered_ones(tmp_path: Path) -> None:
    class Mine(fv.Method, frozen=True, tag="mine"):
        pass

    with pytest.raises(fv.BadInput, match=r"unknown method\.name 'mine'"):
        fv.run({**BASE, "method": Mine()}, out=tmp_path)


# -- compare ---------------------------------------------------------------------------------------
def test_compare_has_the_commands_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fv.compare(fv.sweep(GRID, out=tmp_path))
    sides = (f"{tmp_path}:TERM", f"{tmp_path}:FedAvg")
    _, text, _ = call(capsys, "compare", *sides, "--json")
    told = json.loads(text)
    paired = found.paired["TERM"]
    for key in pairs.numbers(paired):
        assert getattr(paired, key).value == told[key]["difference"]
        assert list(getattr(paired, key)[1:]) == told[key]["interval"]
    same = fv.compare(str(tmp_path))
    assert same.to_text() == found.to_text()
    late = fv.compare(tmp_path, late=True, model="local")
    assert (late.model, late.paired["TERM"].over_rounds) == ("local", True)


def test_compare_takes_histories() -> None:
    runs = {"FedAvg": trained(fv.FedAvg()), "τ 2": trained(fv.TERM(2.0)),
            "τ 5": tuple(reversed(trained(fv.TERM(5.0))))}  # fmt: skip
    found = fv.compare(runs)
    assert [row.label for row in found.table.rows] == list(runs)
    assert (found.baseline, list(found.paired)) == ("FedAvg", ["τ 2", "τ 5"])
    means = [h.fairness().mean for h in runs["τ 2"]]
    cell = found.table.rows[1].cells["accuracy"]
    assert getattr(cell, "value") == pytest.approx(100 * np.mean(means))  # noqa: B009
    frame = found.to_frame()
    assert frame["mean"][frame["method"] == "τ 2"].tolist() == means
    by_client = np.mean([(a.accuracy["test", "global"][-1] - b.accuracy["test", "global"][-1])
                         .numpy() for a, b in zip(trained(fv.TERM(5.0)), runs["FedAvg"],
                                                  strict=True)], axis=0)  # fmt: skip
    assert found.paired["τ 5"].by_client == pytest.approx(by_client)
    assert "τ 5" in str(found)
    assert fv.compare(runs, baseline="τ 2").differences.title == "Compared with τ 2"


def test_compare_takes_runs_of_different_length_and_common_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = [("front", None), ("curves", None)]
    monkeypatch.setattr("fairvar.report.in_python.result_figures", lambda *given: drawn)

    class Stop(fv.Callback):
        def on_evaluate(self, run: fv.Training) -> None:
            run.stop("early")

    early = trained(fv.FedAvg(), callbacks=[Stop()])
    found = fv.compare({"whole": trained(fv.FedAvg(), 3), "early": early})
    assert found.baseline == "whole"
    assert set(found.figures()) == {"front"}
    notes = " ".join(found.table.notes)
    assert "evaluated in different rounds" in notes
    assert "Other seeds are left out" in notes
    frame = found.to_frame()
    assert frame["round"].tolist() == [8, 8, 2, 2]
    assert frame["mean"][2] == early[0].fairness().mean


def test_where_nothing_is_left_to_compare_with_there_is_one_table(tmp_path: Path) -> None:
    lost = [replace(h, diverged_at=3) for h in trained(fv.FedAvg())]
    for runs in ({"a": trained(fv.TERM(2.0))}, {"FedAvg": lost, "a": trained(fv.TERM(2.0))}):
        found = fv.compare(runs)
        assert "Compared with" not in str(found) + found._repr_html_()
        assert found.save(tmp_path)


def test_wrong_options_of_a_sweep_end_in_one_line(tmp_path: Path) -> None:
    config.update("jaxtyping_disable", True)
    plan = {"sweep": {"methods": ["fedavg"], "seeds": 1, "lr": [0.1]}}
    for options, why in (({"workers": "2"}, "workers = '2'"), ({"budget": 10}, "budget 10"),
                         ({"workers": 0}, "at least 1"), ({"shard": 3}, "shard 3"),
                         ({"save_every": 1.5}, "save-every = 1.5")):  # fmt: skip
        with pytest.raises(fv.BadInput, match=why):
            fv.sweep(plan, out=tmp_path / "sweep", **options)
    with pytest.raises(fv.BadInput, match="path = None"):
        fv.run({}, out=None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    fv.run({"data": {"name": "digits", "clients": 3}, "train": {"rounds": 1}}, out="~/runs")
    (run,) = names(tmp_path / "runs")
    fv.compare({"a": trained(fv.FedAvg())}).save("~/tables")
    assert (tmp_path / "tables" / "table.md").exists()
    assert fv.load(f"~/runs/{run}").rounds == 1
    for part in ("manifest.json", "history.safetensors"):
        with pytest.raises(fv.BadInput, match="is a part of a run; give its folder"):
            fv.load(f"~/runs/{run}/{part}")


def test_what_cannot_be_compared_is_refused() -> None:
    two = trained(fv.FedAvg())
    other = fv.train("multinomial", fv.load_federation("digits", clients=6), fv.FedAvg(), 1)
    untested = trained(fv.TERM(2.0), evaluate_splits=("valid",))
    cases: list[tuple[dict, str]] = [
        ({}, "nothing to compare"),
        ({"a": []}, "'a': give a history"),
        ({"a": [two[0], two[0]]}, "two histories of one seed"),
        ({"a": two[0], "b": two[1]}, "no seed is common"),
        ({"a": two[0], "b": other}, "different clients"),
        ({"a": two, "b": untested}, "no accuracy of the global model on 'test'"),
    ]
    for runs, why in cases:
        with pytest.raises(fv.BadInput, match=why):
            fv.compare(runs)
    config.update("jaxtyping_disable", True)  # it would refuse a list by itself
    with pytest.raises(fv.BadInput, match=r"^compare takes \{label: histories\}, .*, not a list$"):
        fv.compare(two)
    with pytest.raises(fv.BadInput, match="unknown baseline"):
        fv.compare({"a": two}, baseline="b")
    with pytest.raises(fv.BadInput, match="unknown model"):
        fv.compare({"a": two}, model="x")
    lost = [replace(h, diverged_at=3) for h in two]
    found = fv.compare({"FedAvg": lost, "a": two, "b": two})
    assert (found.baseline, list(found.paired)) == ("a", ["b"])
    assert found.table.rows[0].cells["accuracy"] == "div."


def test_federations_of_one_name_are_told_apart_by_their_settings(tmp_path: Path) -> None:
    for seed in (3, 4):
        fv.run(BASE, f"data.seed={seed}", out=tmp_path)
    both = r"natural-1 \(.*, data\.seed 3\), natural-2 \(.*, data\.seed 4\)"
    with pytest.raises(fv.BadInput, match=both):
        fv.compare(tmp_path)
    assert fv.compare(tmp_path, federation="natural-2").results
