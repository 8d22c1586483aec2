"""The driver of the second edition: equal budgets, rungs end with an evaluation, the window."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import second_edition
from fairvar.runs.archive import condense
from fairvar.runs.config import Config
from fairvar.runs.results import gather
from fairvar.runs.runner import missing
from fairvar.runs.select import Criterion, Curve
from fairvar.runs.trials import Summary
from second_edition import (
    PILOT_RATES,
    STUDIES,
    SURVIVORS,
    Machine,
    _add_tuning,
    choices_text,
    chosen,
    counted,
    final_cells,
    finished,
    key,
    pilot,
    restore,
    score,
    tiny,
)
from sentences import Evidence

WITH_RATES = [name for name, study in STUDIES.items() if study.rates]


@pytest.mark.parametrize("name", WITH_RATES)
def test_every_method_has_twelve_configurations(name: str) -> None:
    study = STUDIES[name]
    cells = study.plan(study.tuning[0], study.rungs[0]).cells
    counts = Counter((cell.method.label, key(cell)) for cell in cells)
    assert set(Counter(label for label, _ in counts).values()) == {12 * len(study.alphas)}
    assert {(c.data.seed, c.train.seed, c.select.m) for c in cells} == {(100, 100, 5)}


@pytest.mark.parametrize("name", STUDIES)
def test_rungs_end_with_an_evaluation_and_tuning_pairs_are_not_reported(name: str) -> None:
    study = STUDIES[name]
    assert [rounds % study.every for rounds in (*study.rungs, study.rounds)] == [0] * 4
    assert study.rounds // study.every == (30 if name == "tiny_imagenet-tables" else 50)
    assert not set(study.tuning) & set(range(study.pairs))


def test_a_rung_is_scored_on_its_last_quarter() -> None:
    mean = np.array([0.9, 0.5, 0.5, 0.6, 0.8])
    curve = Curve(mean, np.full(5, 0.05))
    births = [{"seed": 100}]
    rounds = [40, 80, 150, 160, 200]
    criterion = Criterion(m=5)
    found, variance = score(Summary(rounds, False, {"global": curve}, {}, births), criterion)
    assert found == pytest.approx(0.7 - 1.96 * 0.1)
    assert variance == pytest.approx(0.05)
    assert score(Summary((), True, {}, {}, births), criterion)[0] == -np.inf


def test_the_pilot_finds_the_rates_of_a_study_that_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Config] = []
    machine = Machine(tmp_path, 1, math.inf)
    monkeypatch.setattr(Machine, "compute", lambda self, cells, *_: asked.extend(cells))
    monkeypatch.setattr(Machine, "summary", lambda self, cells, _: cells[0].train.lr)
    monkeypatch.setattr(second_edition, "score", lambda lr, _: (-abs(lr - 0.03), 0.0))
    study = pilot(replace(tiny(STUDIES["cifar100-tables"]), rates=(), fedavg=()), machine)
    assert study.rates == pytest.approx([0.01, 0.03, 0.06, 0.09])
    assert [study.fedavg[0], study.fedavg[-1], len(study.fedavg)] == pytest.approx(
        [0.003, 0.15, 12]
    )
    assert np.diff(np.log(study.fedavg)) == pytest.approx(np.log(50) / 11, abs=0.01)
    assert [cell.train.lr for cell in asked] == list(PILOT_RATES)
    told = {
        (c.method.label, c.protocol, c.data.seed, c.train.rounds, c.select.model) for c in asked
    }
    assert told == {("FedAvg", "boxes", 100, 50, "global")}


def test_the_final_runs_use_what_was_chosen(tmp_path: Path) -> None:
    study = replace(STUDIES["mnist-boxes"], alphas=(0.1,), pairs=2)
    cells = study.plan(100, study.rungs[0]).cells
    first = {cell.method.label: cell for cell in cells}
    table = [{"alpha": 0.1, "method": label, "lr": cell.train.lr, "parameter": None, "score": 0.5,
              "rank": 1, "key": key(cell), "rung": len(SURVIVORS), "goes on": True}
             for label, cell in first.items() if label != "AFL"]  # fmt: skip
    table += [{**row, "method": label, "rung": 1} for row in table[:1] for label in 12 * [*first]]
    table.append({"alpha": 0.1, "method": "AFL", "lr": 0.1, "parameter": None, "score": None,
                  "rank": 1, "key": key(first["AFL"]), "rung": 3, "goes on": False})  # fmt: skip
    final = final_cells(study, table)
    assert {key(cell) for cell in final} == chosen(table)
    assert Counter(c.method.label for c in final) == dict.fromkeys(first.keys() - {"AFL"}, 2)
    assert {(c.data.seed, c.train.seed, c.train.rounds) for c in final} == {
        (0, 0, 2000),
        (1, 1, 2000),
    }
    assert "| AFL | all diverged |" in choices_text(table)
    (tmp_path / "mnist-boxes").mkdir()
    (tmp_path / "mnist-boxes" / "choices.json").write_text(json.dumps(table))
    found = {"boxes": {("mnist", 0.1): Evidence({})}}
    _add_tuning(found, tmp_path / "mnist-boxes")
    assert found["boxes"]["mnist", 0.1].diverged == {"AFL"}
    assert found["boxes"]["mnist", 0.1].tried == dict.fromkeys(first, 12)
    for before, name, data in (
        ("mnist-boxes", "cifar100_scratch-boxes", "cifar100"),
        ("cifar100_scratch-boxes", "mnist_rates-tables", "mnist"),
    ):
        (tmp_path / before).rename(tmp_path / name)
        _add_tuning(found, tmp_path / name)
        assert found[name.rpartition("-")[2]][data, 0.1].tried == dict.fromkeys(first, 12)


def test_a_study_counts_when_all_its_final_runs_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "mnist-boxes" / "final"
    final.mkdir(parents=True)
    (final / "runs.tar.xz").touch()
    table = [{"rung": 3, "key": name, "goes on": True} for name in ("one", "two")]
    (final.parent / "choices.json").write_text(json.dumps(table))
    for there in (9, 10):  # of two configurations on five pairs
        monkeypatch.setattr(second_edition, "stored_runs", lambda folder, n=there: range(n))
        assert finished(final.parent) == (there == 10)
    assert not finished(tmp_path / "cifar10-boxes")  # not begun
    assert finished(tmp_path)  # no study
    monkeypatch.setattr(second_edition, "finished", lambda study: study.name != "mnist-tables")
    names = ("mnist-tables", "cifar100-boxes", "cifar100_scratch-boxes", "mnist_rates-tables")
    finals = [tmp_path / name / "final" for name in names]
    assert [counted(finals), counted(finals[2:])] == [finals[1:2], finals[2:]]
    monkeypatch.undo()
    nothing = second_edition.verdicts([tmp_path / "cifar10-boxes" / "final"])
    assert nothing == second_edition.verdicts([])
    assert nothing.count("| not measured") > 10 * 2 + 32 * 8


def test_runs_of_earlier_archives_count_as_finished(tmp_path: Path) -> None:
    """With the class counts of their partitions, so that the next archive has the same bytes."""
    study = tiny(STUDIES["mnist-boxes"])
    plan = study.plan(100, 2, 'sweep.methods=["fedavg"]')
    first, again = (Machine(tmp_path / name, 1, math.inf) for name in ("first", "again"))
    first.compute(plan.cells[:1], "final", "final")
    before, after = tmp_path / "before", tmp_path / "after"
    condense(gather(first.store / "final"), before / "final", everything=True)
    restore(again, before)
    assert missing(plan.cells[:1], again.store / "final") == []
    condense(gather(again.store / "final"), after / "final", everything=True)
    archives = [folder / "final" / "runs.tar.xz" for folder in (before, after)]
    assert archives[0].read_bytes() == archives[1].read_bytes()
