"""`fairvar sweep`, `report` and `compare` on a tiny grid, as a user types them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from commands import call
from fairvar import cli
from fairvar.runs.results import stored_runs

PLAN = """
name = "tiny"
[data]
name = "digits"
clients = 8
[partition]
name = "dirichlet"
alpha = 0.5
[train]
rounds = 5
[evaluate]
every = 1
[sweep]
methods = ["fedavg", "fairloss*"]
seeds = 2
[scale.smaller]
sweep.seeds = 1
"""
KINDS = {".md", ".tex", ".csv", ".txt", ".html", ".png", ".pdf"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "plan.toml"
    path.write_text(PLAN)
    return path


@pytest.fixture(scope="module")
def runs(plan: Path) -> Path:
    """The finished sweep; tests only read it."""
    cli.main(["sweep", str(plan), "--out", str(plan.parent / "runs"), "--json"])
    return plan.parent / "runs"


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [p for p in folder.rglob("*") if p.is_file() and ".locks" not in p.parts]
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def test_dry_lists_the_runs_and_writes_nothing(plan, capsys, tmp_path):
    code, out, err = call(capsys, "sweep", plan, "--dry", "--out", tmp_path / "o")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[-1] == "4 runs"
    assert [line.split("  ")[1] for line in lines[:-1]] == [
        "FedAvg, lr 0.1, alpha 0.5, seed 0", "FairLoss*, strength 0.1, lr 0.1, alpha 0.5, seed 0",
        "FedAvg, lr 0.1, alpha 0.5, seed 1", "FairLoss*, strength 0.1, lr 0.1, alpha 0.5, seed 1",
    ]  # fmt: skip
    assert not (tmp_path / "o").exists()
    assert call(capsys, "sweep", plan, "--dry", "--scale", "smaller")[1].endswith("2 runs\n")
    assert call(capsys, "sweep", plan, "--dry", "--shard", "1/3")[1].endswith("\n1 run\n")


def test_a_finished_sweep_is_never_touched_again(plan, runs, capsys):
    before = snapshot(runs)
    code, out, _ = call(capsys, "sweep", plan, "--out", runs, "--json")
    assert code == 0
    assert json.loads(out) == {"folder": str(runs), "cells": 4, "done": 4, "elsewhere": 0,
                               "reason": ""}  # fmt: skip
    assert snapshot(runs) == before
    runs_of = [name for name in before if not name.startswith(("federations", "report"))]
    assert len(runs_of) == 4 * 4


def test_more_seeds_add_runs_and_keep_the_old_ones(plan, capsys, tmp_path):
    command = ("sweep", plan, "--out", tmp_path, "train.rounds=1", "sweep.seeds=1")
    assert "2 of 2 runs are done" in call(capsys, *command)[1]
    before = snapshot(tmp_path)
    assert "4 of 4 runs are done" in call(capsys, *command, "sweep.seeds=2")[1]
    after = snapshot(tmp_path)
    assert {k: after[k] for k in before} == before
    assert len(after) == len(before) + 2 * 4


def test_a_budget_that_is_spent_at_once(plan, capsys, tmp_path):
    command = ("sweep", plan, "--out", tmp_path, "--budget", "0.000001s")
    code, out, _ = call(capsys, *command)
    assert code == 0
    assert "0 of 4 runs are done" in out
    assert "stopped because the budget is spent; the same command continues" in out
    status = json.loads(call(capsys, *command, "--json")[1])
    assert (status["done"], status["reason"]) == (0, "the budget is spent")


BAD = {
    "budget": (["--budget", "soon"], "30min"),
    "shard": (["--shard", "4/4"], "0/4"),
    "workers": (["--workers", "0"], "--workers"),
    "save every": (["--save-every", "0"], "--save-every"),
    "scale": (["--scale", "smaler"], "did you mean 'smaller'"),
    "key": (["sweep.seed=3"], "did you mean 'seeds'"),
    "method": (['sweep.methods=["fedagv"]'], "did you mean 'fedavg'"),
    "impossible": (["data.clients=100000"], "100000 clients"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sweeps_are_one_line_exit_2_and_nothing_written(case, plan, capsys, tmp_path):
    arguments, mentioned = BAD[case]
    code, out, err = call(capsys, "sweep", plan, "--out", tmp_path / "o", *arguments)
    lines = [line for line in err.splitlines() if line]
    assert (code, out) == (2, ""), err
    assert len(lines) == 1, err
    assert mentioned in lines[0]
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.slow
def test_report_writes_everything_twice_the_same(runs, capsys, tmp_path):
    code, out, _ = call(capsys, "report", runs, "--out", tmp_path / "a", "--json")
    assert code == 0
    (table,) = json.loads(out)
    assert [row["method"] for row in table["rows"]] == ["FedAvg", "FairLoss*"]
    files = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    assert {Path(name).suffix for name in files} == KINDS
    assert all(len(content) > 100 for content in files.values())
    assert not [name for name in files if name.startswith(".")]
    code, text, _ = call(capsys, "report", runs)
    assert code == 0
    assert "FairLoss*" in text
    assert {p.name: p.read_bytes() for p in (runs / "report").iterdir()} == files
    assert len(stored_runs(runs)) == 4  # the report's folder is no run
    rows = list(csv.reader(files["table-digits-alpha-0.5.csv"].decode().splitlines()))
    assert len(rows) == 3
    clients = list(csv.DictReader(files["clients.csv"].decode().splitlines()))
    assert {row["seed"] for row in clients} == {"0", "1"}
    assert all(0 <= int(row["right_global"]) <= int(row["test_samples"]) for row in clients)
    assert "table-digits-alpha-0.5.md" in files


@pytest.mark.parametrize("case", ["empty", "missing", "file", "unfinished"])
def test_report_without_runs_is_one_line_exit_2(case, capsys, tmp_path):
    folder = tmp_path / "x"
    if case == "file":
        folder.write_text("")
    elif case != "missing":
        folder.mkdir()
    if case == "unfinished":
        (folder / "abc").mkdir()
        (folder / "abc" / "config.toml").write_text("")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = call(capsys, "report", folder)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "fairvar sweep" in err
    assert sorted(tmp_path.rglob("*")) == before


WRONG = [("--unit", "percent"), ("--model", "own"), ("--t", "-1"), ("--t", "nan"), ("--m", "0")]


@pytest.mark.parametrize(("flag", "value"), WRONG)
def test_report_with_wrong_options(flag, value, runs, capsys, tmp_path):
    code, out, err = call(capsys, "report", runs, flag, value, "--out", tmp_path / "o")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert flag.strip("-") in err
    assert not (tmp_path / "o").exists()


def test_compare_two_methods(runs, capsys):
    sides = (f"{runs}:FairLoss*", f"{runs}:FedAvg@0.5")
    code, out, err = call(capsys, "compare", *sides, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert len(found["by_client"]) == 8
    low, high = found["accuracy"]["interval"]
    assert low <= found["accuracy"]["difference"] <= high
    assert call(capsys, "compare", *sides, "--json")[1] == out
    back = json.loads(call(capsys, "compare", *reversed(sides), "--json")[1])
    assert back["accuracy"]["difference"] == -found["accuracy"]["difference"]
    assert back["gaining"] == found["paying"]
    code, text, _ = call(capsys, "compare", *sides)
    assert code == 0
    assert "clients gain" in text


def test_compare_late_rounds(runs, capsys):
    """The average of the last quarter, for sweeps and for single runs."""
    sides = (f"{runs}:FairLoss*", f"{runs}:FedAvg@0.5")
    found = json.loads(call(capsys, "compare", *sides, "--late", "--json")[1])
    assert found["late"]
    assert {"accuracy", "variance", "corrected_variance"} < found.keys()
    assert "by_client" not in found
    code, text, err = call(capsys, "compare", *sides, "--late")
    assert (code, err) == (0, "")
    assert "last quarter" in text
    run = next(p for p in sorted(runs.iterdir()) if (p / "manifest.json").exists())
    same = json.loads(call(capsys, "compare", run, run, "--late", "--json")[1])
    assert same["variance"] == {"difference": 0.0, "interval": [0.0, 0.0], "clear": False}


def test_compare_a_run_with_itself_is_zero(runs, capsys):
    run = next(p for p in sorted(runs.iterdir()) if (p / "manifest.json").exists())
    found = json.loads(call(capsys, "compare", run, run, "--json")[1])
    assert found["accuracy"] == {"difference": 0.0, "interval": [0.0, 0.0], "clear": False}
    assert found["gaining"] == found["paying"] == []


def test_compare_refuses_what_it_cannot_pair(plan, runs, capsys, tmp_path):
    other = ("sweep", plan, "--out", tmp_path, "train.rounds=1", "sweep.seeds=1", "data.seed=5")
    assert call(capsys, *other)[0] == 0
    wrong = {
        (f"{runs}:FedAvg", f"{tmp_path}:FedAvg"): "different partitions",
        (f"{runs}:FedAvg", f"{runs}:FedAvgg"): "did you mean 'FedAvg'",
        (f"{runs}:FedAvg", f"{runs}:FedAvg@0.7"): "0.5",
        (f"{runs}", f"{runs}:FedAvg"): "name a method",
        (f"{runs}:FedAvg", "nowhere:FedAvg"): "not a folder",
    }
    for sides, mentioned in wrong.items():
        code, out, err = call(capsys, "compare", *sides)
        assert (code, out) == (2, ""), sides
        assert len(err.splitlines()) == 1
        assert mentioned in err
    code, _, err = call(capsys, "compare", f"{runs}:FedAvg", f"{runs}:FedAvg", "--model", "own")
    assert code == 2
    assert len(err.splitlines()) == 1


def test_diverged_runs_are_results(plan, capsys, tmp_path):
    """An absurd learning rate ends in "div." and not in a crash."""
    command = ("sweep", plan, "--out", tmp_path / "runs", "sweep.lr=[1e9]", "sweep.seeds=1",
               "train.rounds=40")  # fmt: skip
    code, out, err = call(capsys, *command)
    assert code == 0, err
    assert "2 of 2 runs are done" in out
    code, out, err = call(capsys, "report", tmp_path / "runs", "--json")
    assert code == 0, err
    rows = {row["method"]: row for row in json.loads(out)[0]["rows"]}
    assert rows["FairLoss*"]["accuracy"] == "div."
    code, _, err = call(capsys, "compare", *[f"{tmp_path / 'runs'}:FairLoss*"] * 2)
    assert code == 2
    assert "diverged" in err
