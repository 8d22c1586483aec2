"""Work that a sweep or a report does once, or not at all: counted, not timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fairvar as fv
from fairvar import metrics
from fairvar.common import files
from fairvar.engine import recorder, task
from fairvar.engine.settings import TrainSettings
from fairvar.engine.train import prepare
from fairvar.report import files as report_files
from fairvar.runs import runner

PLAN = {
    "name": "once",
    "data": {"name": "digits", "clients": 20},
    "partition": {"name": "iid"},
    "train": {"rounds": 2},
    "evaluate": {"every": 1},
    "sweep": {"methods": ["fedavg", "afl"], "lr": [0.1, 0.2], "seeds": 1},
}


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, of: Callable[..., Any]) -> Any:
    """How often `where.name` is called, by `of` of its arguments."""
    calls, function = Counter[Any](), getattr(where, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        calls[of(*args)] += 1
        return function(*args, **options)

    monkeypatch.setattr(where, name, wrapped)
    return calls


def test_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = counted(monkeypatch, runner, "_most", lambda family: family[0].method.label)
    tables = counted(monkeypatch, recorder.Recorder, "tables", lambda own, *_: own.methods[0].label)
    resamples = counted(monkeypatch, metrics, "_interval", lambda *args: args[4])
    fv.sweep(PLAN, out=tmp_path)
    assert prepared == {"FedAvg": 1, "AFL": 1}  # families that train as one batch
    assert tables == {"FedAvg": 1, "AFL": 1}  # for the last checkpoint and the histories
    assert set(resamples) == {0}  # a stored run has no intervals


def test_a_report_reads_no_final_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fv.sweep(PLAN, out=tmp_path)
    monkeypatch.setattr(report_files, "_figures", lambda group: ())  # they take seconds
    read = counted(monkeypatch, files, "open_regular", lambda path, *_: Path(path).name)
    fv.write_report(tmp_path)
    assert read["history.safetensors"] >= 4  # those of chosen runs again
    assert "state.safetensors" not in read


def test_a_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits on memory share one count of the activations."""
    passes = counted(monkeypatch, task, "_activation_floats", lambda *_: "all layers")
    data = fv.load_federation("digits", clients=4)
    settings = TrainSettings(batch_size=8, local_epochs=1)
    prepare("2nn", data, fv.FairGrad(0.1), "cross_entropy", settings)
    assert passes == {"all layers": 1}
