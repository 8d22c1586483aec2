"""A report shows what was measured: without local models, validation or test data, many clients."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairvar import cli
from fairvar.errors import BadInput
from fairvar.report import files
from fairvar.report.compare import compare_sides, side
from fairvar.report.files import group_table, write_files
from fairvar.report.result_tables import WHEN_UNDEFINED
from fairvar.runs.plan import Plan
from fairvar.runs.results import gather
from fairvar.runs.runner import arrange
from fairvar.runs.sweep import run_sweep

SWEEP = {"methods": ["fedavg", "afl"], "seeds": 2, "lr": [0.5], "step": [0.1]}


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds; one test below draws them."""
    if "pictures" not in request.node.name:
        monkeypatch.setattr(files, "_figures", lambda group: ())


def swept(out: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "name": "tiny",
        "data": {"name": "digits", "clients": 6},
        "partition": {"name": "dirichlet", "alpha": 0.3},
        "train": {"rounds": 4},
        "evaluate": {"every": 2},
        "sweep": SWEEP,
    }
    for section, keys in changes.items():
        new = section == "partition" or not isinstance(keys, dict)
        values[section] = keys if new else {**values.get(section, {}), **keys}
    run_sweep(arrange(Plan.from_dict(values).cells), out, lambda done, total, what: None)
    return out


def reported(folder: Path, *options: str) -> str:
    cli.main(["report", str(folder), *options])
    return (folder / "report" / "index.html").read_text()


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """Exit code 2 and one line."""
    with pytest.raises(SystemExit) as end:
        cli.main([*command])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_without_own_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = swept(tmp_path, evaluate={"local": False, "every": 1}, train={"rounds": 8})
    page = reported(folder)
    assert "local acc. %" not in page
    assert "Local models were not evaluated" in page
    assert "bfloat16" not in page
    rows = list(csv.DictReader((folder / "report" / "clients.csv").read_text().splitlines()))
    assert {row["right_local"] for row in rows} == {""}
    assert all(row["right_global"] for row in rows)
    beside = (folder / "report" / "compared_with_fedavg.md").read_text()
    assert "global acc." in beside
    assert "local" not in beside
    capsys.readouterr()
    line = refused(capsys, "report", str(folder), "--model", "local", "--out", str(tmp_path / "r"))
    assert "the local model was not measured" in line
    assert not (tmp_path / "r").exists()
    told = refused(capsys, "compare", *(f"{folder}:{m}" for m in ("AFL", "FedAvg")),
                   "--model", "local")  # fmt: skip
    assert "the local model was not measured" in told
    cli.main(["compare", f"{folder}:AFL", f"{folder}:FedAvg", "--json"])
    assert json.loads(capsys.readouterr().out)["model"] == "global"
    line = refused(capsys, "compare", *(str(r.folder) for r in gather(folder)[0].trials[0].source),
                   "--model", "local")  # fmt: skip
    assert "no test accuracy of the local model" in line


def test_the_rule_of_the_configuration_chooses(tmp_path: Path, capsys) -> None:
    """[select] counts for `report` and `condense`, too, unless options are given."""
    folder = swept(tmp_path / "runs", select={"t": 1e6}, sweep={"lr": [0.5, 1e-6]})
    chosen = {r.label: r.trial.lr for group in gather(folder) for r in group.results}
    assert chosen["FedAvg"] == 1e-6  # equally bad for all clients

    def rate(*options: str, of: Path = folder) -> str:
        capsys.readouterr()
        cli.main(["report", str(of), "--json", *options])
        rows = json.loads(capsys.readouterr().out)[0]["rows"]
        return next(row["chosen"] for row in rows if row["method"] == "FedAvg").split(",")[0]

    assert (rate(), rate("--t", "0")) == ("lr 1e-06", "lr 0.5")
    cli.main(["condense", str(folder), "--out", str(tmp_path / "small")])
    assert rate(of=tmp_path / "small") == "lr 1e-06"


def test_personal_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A method that has them is about them, unless another model is asked for."""
    sweep = {"methods": ["fedavg", "ditto"], "seeds": 2, "lr": [0.5]}
    folder = swept(tmp_path / "runs", evaluate={"every": 1}, train={"rounds": 8}, sweep=sweep)
    page = reported(folder)
    assert "Ditto: chosen by the personal models (each client keeps its own), and reported" in page
    (group,) = gather(folder)
    fedavg, ditto = group_table(group).rows
    histories = group.results[1].trial.histories
    at = group.results[1].at

    def mean(model: str) -> float:
        return float(np.mean([100 * h.fairness("test", model, at).mean for h in histories]))

    assert [group.results[i].reported("global") for i in (0, 1)] == ["global", "personal"]
    assert ditto.cells["accuracy"].value == pytest.approx(mean("personal"))
    assert ditto.cells["global_accuracy"].value == pytest.approx(mean("global"))
    assert ditto.cells["other_accuracy"].value == pytest.approx(mean("local"))
    assert not {"global_accuracy", "personal_accuracy"} & fedavg.cells.keys()
    rows = list(csv.DictReader((folder / "report" / "clients.csv").read_text().splitlines()))
    assert {bool(row["right_personal"]) for row in rows if row["method"] == "Ditto"} == {True}
    assert {row["right_personal"] for row in rows if row["method"] == "FedAvg"} == {""}
    late = (folder / "report" / "compared_with_fedavg.md").read_text()
    assert "personal acc." in late
    sides = [f"{folder}:{label}" for label in ("Ditto", "FedAvg")]
    capsys.readouterr()
    found = {}
    for model in (None, "global"):
        cli.main(["compare", *sides, "--json", *(["--model", model] if model else [])])
        found[model] = json.loads(capsys.readouterr().out)
    assert [f["model"] for f in found.values()] == ["personal (A) and global (B)", "global"]
    differences = [f["accuracy"]["difference"] for f in found.values()]
    base = fedavg.cells["accuracy"].value
    assert differences == pytest.approx(
        [(mean(model) - base) / 100 for model in ("personal", "global")]
    )
    line = refused(capsys, "compare", *sides, "--model", "personal")
    assert "FedAvg: no test accuracy of the personal model" in line
    cli.main(["report", str(folder), "--model", "global", "--out", str(tmp_path / "global")])
    text = (tmp_path / "global" / "index.html").read_text()
    assert "chosen by the personal models (each client keeps its own), and reported by the " in text
    alone = swept(tmp_path / "alone", sweep={**sweep, "methods": ["ditto"]})
    cli.main(["report", str(alone), "--model", "personal", "--out", str(tmp_path / "own")])
    assert "the table is about the personal models" in (tmp_path / "own/index.html").read_text()


def test_the_model_of_the_protocol_was_not_measured(tmp_path: Path) -> None:
    """The tables protocol is about local models; what there is, is shown and named."""
    train = {"rounds": 4, "precision": "bfloat16"}
    (group,) = gather(swept(tmp_path, protocol="tables", evaluate={"local": False}, train=train))
    assert group.criterion.model == "global"
    table = group_table(group)
    assert any('train.precision = "bfloat16"' in note for note in table.notes)
    assert "the table is about the global model" in table.notes[0]
    assert {"accuracy", "corrected", "chosen"} <= table.rows[0].cells.keys()


def test_some_measured_own_models_and_some_did_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for local in (True, False):
        swept(tmp_path, evaluate={"local": local}, protocol="tables")
    page = reported(tmp_path)
    assert page.count("Local models were not evaluated") == 1
    assert {g.criterion.model for g in gather(tmp_path)} == {"global", "local"}
    assert "report: 2/2 (done)" in capsys.readouterr().err
    # Both are "digits, α 0.3": neither may hide the other.
    line = refused(capsys, "compare", f"{tmp_path}:AFL", f"{tmp_path}:FedAvg")
    assert "0.3-1 (digits, tables, α 0.3, evaluate.local " in line
    assert ", 0.3-2 (digits, tables, α 0.3, evaluate.local " in line
    assert "0.3-2" in refused(capsys, "compare", f"{tmp_path}:AFL@0.3", f"{tmp_path}:FedAvg@0.3")
    sides = [side(f"{tmp_path}:FedAvg@0.3-{n}", None) for n in (1, 2)]
    assert {s.model for s in sides} == {"global", "local"}
    with pytest.raises(BadInput, match="--model"):
        compare_sides(*sides)


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluate": {"splits": ["test"]}},
        {"data": {"split": [0.8, 0.0, 0.2]}},
        {"evaluate": {"splits": ["train", "test"]}},
    ],
)
def test_without_validation_data(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = swept(tmp_path / "one", **changes)
    page = reported(folder)
    assert "Without validation data: every method after its last round" in page
    assert "Chosen on validation" not in page
    table = group_table(gather(folder)[0])
    assert [row.cells["chosen"] for row in table.rows] == [
        "lr 0.5, round 4", "lr 0.5, step 0.1, round 4"
    ]  # fmt: skip
    many = swept(tmp_path / "many", **changes, sweep={"lr": [0.1, 0.5]})
    capsys.readouterr()
    for command in ("report", "condense"):
        line = refused(capsys, command, str(many), "--out", str(tmp_path / "out"))
        assert "no validation data to choose among the 2 configurations of FedAvg" in line
        assert not (tmp_path / "out").exists()


def test_without_validation_data_condensed(tmp_path: Path) -> None:
    folder = swept(tmp_path / "runs", evaluate={"splits": ["test"]})
    cli.main(["condense", str(folder), "--out", str(tmp_path / "small")])
    for source in ("runs", "small"):
        write_files(gather(tmp_path / source), tmp_path / f"report-{source}", "t")
    full, small = (sorted((tmp_path / f"report-{s}").iterdir()) for s in ("runs", "small"))
    assert [f.read_bytes() for f in full] == [f.read_bytes() for f in small]


@pytest.mark.parametrize(
    "changes", [{"evaluate": {"splits": ["valid"]}}, {"data": {"split": [0.8, 0.2, 0.0]}}]
)
def test_without_test_data(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = swept(tmp_path / "runs", **changes)
    line = refused(capsys, "report", str(folder))
    assert "no test accuracy was measured" in line
    assert not (folder / "report").exists()
    run = next(path for path in folder.iterdir() if (path / "manifest.json").exists())
    assert "no test accuracy" in refused(capsys, "compare", str(run), str(run))


def test_one_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its variance is undefined, and nothing diverged."""
    folder = swept(tmp_path, data={"clients": 1})
    page = reported(folder)
    (table,) = (group_table(g) for g in gather(folder))
    row = table.rows[0].cells
    assert (
        row["variance"] == row["corrected"] == row["interval"] == row["other_variance"] == "undef."
    )
    assert np.isfinite(row["accuracy"].value)
    assert np.isfinite(row["noise_floor"].value)
    assert row["chosen"].startswith("lr 0.5, round")
    assert WHEN_UNDEFINED in table.notes
    out = capsys.readouterr().out
    assert "div." not in out
    assert "undef." in out
    assert "undef." in page
    for suffix in ("md", "tex", "csv", "txt"):
        text = next((folder / "report").glob(f"table-*.{suffix}")).read_text()
        assert "div." not in text
        assert "nan" not in text
    line = refused(capsys, "compare", f"{folder}:AFL", f"{folder}:FedAvg")
    assert "fewer than two clients" in line


def test_one_client_of_a_single_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "one.toml"
    config.write_text('[data]\nname = "digits"\nclients = 1\n[train]\nrounds = 2\n')
    cli.main(["run", str(config), "--out", str(tmp_path / "runs")])
    assert "undef." in capsys.readouterr().out
    cli.main(["run", str(config), "--out", str(tmp_path / "runs"), "--json"])
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found["result"]["test/global"]["variance_over_clients"] is None
    assert found["result"]["test/global"]["mean"] > 0


def test_clients_with_one_test_sample_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise and spread cannot be separated: neither floor nor corrected variance."""
    few = {"samples": 30, "clients": 6, "split": [0.6, 0.2, 0.2]}
    folder = swept(tmp_path, data=few, partition={"name": "iid"})
    (group,) = gather(folder)
    samples = group.results[0].samples()
    assert samples.tolist() == [1] * 6
    reported(folder)
    row = group_table(group).rows[0].cells
    assert row["noise_floor"] == row["corrected"] == row["interval"] == "undef."
    assert np.isfinite(row["variance"].value)
    out = capsys.readouterr().out
    assert "div." not in out
    cli.main(["compare", f"{folder}:AFL", f"{folder}:FedAvg"])
    assert "undef." in capsys.readouterr().out
    cli.main(["compare", f"{folder}:AFL", f"{folder}:FedAvg", "--json"])
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found["corrected_variance"] == {
        "difference": None, "interval": [None, None], "clear": False
    }  # fmt: skip


def test_pictures_of_what_was_measured(tmp_path: Path) -> None:
    """No picture of a spread that is not defined, nor of models that were not measured."""
    kinds = {}
    for name, changes in {
        "alone": {"data": {"clients": 1}},
        "shared": {"evaluate": {"local": False, "every": 1}, "train": {"rounds": 8}},
    }.items():
        (group,) = gather(swept(tmp_path / name, **changes))
        kinds[name] = dict(files._figures(group))
    (group,) = gather(
        swept(tmp_path / "personal", sweep={"methods": ["fedavg", "ditto"], "lr": [0.5]})
    )
    drawn = dict(files._figures(group))
    label = drawn["front"].axes[0].get_xlabel()
    assert label == "mean test accuracy over clients (%), global model (Ditto: personal)"
    assert kinds["alone"].keys() == {"client_accuracies", "curves", "weights", "partition"}
    assert kinds["shared"].keys() == {*kinds["alone"], "front", "compared_with_fedavg"}
    titles = [axes.get_title("left") for axes in kinds["shared"]["compared_with_fedavg"].axes]
    assert titles == ["global model\naccuracy", "global model\nvariance"]
    weights = kinds["shared"]["weights"].axes[0].lines[0].get_xdata()
    assert weights.tolist() == list(range(1, 9))
