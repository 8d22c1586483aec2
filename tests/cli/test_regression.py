"""Regression and other scores from end to end: run, sweep, report, compare, condense, verify."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import fairvar as fv
from commands import call
from fairvar.data import build
from fairvar.report import files
from fairvar.runs import config as configuration
from fairvar.runs.results import gather
from fairvar.runs.stored import StoredRun

PLAN = """
name = "sites"
[data]
name = "sites"
clients = 8
[partition]
name = "natural"
[model]
name = "linear"
loss = "mse"
[train]
rounds = 8
[evaluate]
every = 1
metric = "METRIC"
[sweep]
methods = ["fedavg", "fairloss"]
seeds = 2
lr = [0.01, 0.2]
strength = [1.0]
"""


def sites(clients: int, seed: int) -> fv.Federation:
    """Every site has a linear law of its own; the first has one test sample, the second none."""
    draw = np.random.default_rng(seed)
    parts: dict[str, list] = {"train": [], "valid": [], "test": []}
    for i in range(clients):
        slope = np.array([1.0, -1.0, 0.5]) + 0.4 * draw.normal(size=3)
        held_out = (1, 0)[i] if i < 2 else 9
        for part, n in (("train", 20), ("valid", 8), ("test", held_out)):
            x = draw.normal(size=(n, 3)).astype(np.float32)
            y = x @ slope + 0.1 * draw.normal(size=n)
            parts[part].append((torch.from_numpy(x), torch.from_numpy(y).float()))
    facts = {"dataset": "sites", "seed": seed}
    return fv.Federation.from_arrays(**parts, name="sites", provenance=facts)


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build.DATASETS, "sites", sites)
        names = (*build.DATASET_NAMES, "sites")
        patch.setattr(build, "DATASET_NAMES", names)
        patch.setattr(configuration, "DATASET_NAMES", names)
        yield


def swept(folder: Path, metric: str, capsys: pytest.CaptureFixture[str]) -> Path:
    file = folder / f"{metric.replace(':', '-')}.toml"
    file.write_text(PLAN.replace("METRIC", metric))
    out = folder / file.stem
    code, _text, error = call(capsys, "sweep", file, "--out", out, "--workers", 1)
    assert code == 0, error
    return out


def cells(path: Path) -> dict[str, dict[str, str]]:
    return {row["label"]: row for row in csv.DictReader(path.read_text().splitlines())}


def test_from_a_run_to_a_condensed_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = swept(tmp_path, "rmse", capsys)
    code, text, error = call(capsys, "report", out)
    assert code == 0, error
    assert "RMSE" in text
    assert "accuracy" not in text.replace("known for the accuracy only", "")
    report = out / "report"
    table = cells(report / "table-sites.csv")
    assert {"rmse", "other_rmse", "window_rmse", "variance"} <= table["FedAvg"].keys()
    assert table["FedAvg"]["noise_floor"] == table["FedAvg"]["corrected"] == ""
    page = (report / "index.html").read_text()
    for words in ("RMSE", "lower is better", "known for the accuracy only", "lower left is better"):
        assert words in page, words
    assert "accuracy %" not in page
    assert "–" in (report / "table-sites.md").read_text()
    assert "RMSE" in (report / "table-sites.tex").read_text()

    # The numbers are those of the histories; the lower learning rate is worse and is not chosen.
    (group,) = gather(out)
    result = next(r for r in group.results if r.label == "FedAvg")
    assert result.trial.lr == 0.2
    wanted = [h.fairness("test", "global", result.at) for h in result.trial.histories]
    mean = np.mean([f.mean for f in wanted])
    assert float(table["FedAvg"]["rmse"]) == pytest.approx(mean, rel=1e-12)
    assert wanted[0].dropped_clients == 1
    worst = np.mean([f.worst_10_percent for f in wanted])
    assert float(table["FedAvg"]["worst"]) == pytest.approx(worst, rel=1e-12)
    assert worst > mean
    clients = list(csv.DictReader((report / "clients.csv").read_text().splitlines()))
    assert "right_global" not in clients[0]
    scores = result.seed_scores("global")
    row = next(r for r in clients if (r["method"], r["client"], r["seed"]) == ("FedAvg", "3", "0"))
    assert float(row["rmse_global"]) == scores[0, 3]
    assert next(r for r in clients if r["client"] == "1")["rmse_global"] == ""

    code, text, error = call(capsys, "compare", f"{out}:FairLoss", f"{out}:FedAvg", "--json")
    assert code == 0, error
    found = json.loads(text)
    change = next(r for r in group.results if r.label == "FairLoss").seed_scores("global") - scores
    assert found["rmse"]["difference"] == pytest.approx(np.nanmean(change), rel=1e-9)
    assert found["corrected_variance"]["difference"] is None
    gains = {i for i, d in enumerate(change.mean(0)) if d < 0}
    assert set(found["gaining"]) == gains  # lower is better
    code, text, error = call(capsys, "compare", f"{out}:FairLoss", f"{out}:FedAvg")
    assert code == 0, error
    assert "mean RMSE" in text
    assert "known for the accuracy" in " ".join(text.split())

    code, text, error = call(capsys, "verify", out, "--rerun", 1)
    assert code == 0, text + error
    assert "RMSE" in text
    assert "agrees" in text
    small = tmp_path / "small"
    code, text, error = call(capsys, "condense", out, "--out", small)
    assert code == 0, error
    assert call(capsys, "verify", small)[0] == 0
    monkeypatch.setattr(files, "_figures", lambda group: ())  # once is enough
    assert call(capsys, "report", small)[0] == 0
    for path in sorted(report.glob("*")):
        if path.suffix not in (".png", ".pdf", ".html"):
            assert (small / "report" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_default_of_regression_is_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_figures", lambda group: ())
    file = tmp_path / "plain.toml"
    plan = PLAN.replace('metric = "METRIC"\n', "").partition("[sweep]")[0]
    file.write_text(plan)
    code, text, error = call(capsys, "run", file, "--out", tmp_path / "runs")
    assert code == 0, error
    assert "loss" in text
    assert "–" in text
    (folder,) = [p for p in (tmp_path / "runs").iterdir() if (p / "manifest.json").exists()]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["metric"] == {"name": "loss", "higher_is_better": False, "bounds": None}
    history = StoredRun.open(folder).history()
    assert history.metric == fv.METRICS["loss"]
    assert history.fairness().mean == pytest.approx(manifest["result"]["test/global"]["mean"])
    assert call(capsys, "report", tmp_path / "runs")[0] == 0
    assert call(capsys, "verify", tmp_path / "runs")[0] == 0


def test_a_metric_of_ones_own_by_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_figures", lambda group: ())
    code = (
        "import fairvar as fv\n"
        "def within(outputs, targets):\n"
        "    return ((outputs[:, 0] - targets).abs() < 0.5).double().mean()\n"
        "close = fv.Metric(within, name='close', higher_is_better=True, bounds=(0, 1))\n"
    )
    (tmp_path / "own_metric.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    out = swept(tmp_path, "own_metric:close", capsys)
    (run, *_) = [p for p in sorted(out.iterdir()) if (p / "manifest.json").exists()]
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["metric"]["bounds"] == [0.0, 1.0]
    assert manifest["identity"]["code"] is not None

    # Reports need no code; running again does.
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "own_metric")
    monkeypatch.setattr(files, "_figures", lambda group: ())
    status, text, error = call(capsys, "report", out)
    assert status == 0, error
    assert "close %" in text
    status, text, error = call(capsys, "verify", out, "--rerun", 1)
    assert status == 2
    assert "own_metric:close" in error
