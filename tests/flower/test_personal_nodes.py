"""Personal models on Flower: kept on the node's disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from safetensors.torch import load
from test_in_process import SOME, expected

import fairvar as fv
from fairvar.deploy.client import ROUNDS
from fairvar.deploy.flower.server import run_on
from fairvar.deploy.flower.setup import read_setup
from fairvar.runs.stored import StoredRun
from grids import DEFAULT, InProcessGrid, as_options

CLIENTS = 5
NODES = {100 + 7 * i: i for i in range(CLIENTS)}


def config(out: Path, **more: object) -> dict:
    options = "train.dtype=float64 partition.alpha=0.3 evaluate.every=2"
    given = {"method": "ditto", "method-options": "pull=0.5", "out": str(out), "options": options}
    return {**DEFAULT, **given, **more}


def on_disk(home: Path, nodes: int = CLIENTS) -> dict[int, dict]:
    return {i: {"client": i, "personal": str(home / f"node{i}")} for i in range(nodes)}


def same(stored: StoredRun, models: list[dict[str, torch.Tensor]], **train: object) -> None:
    """Bit by bit with full batches; otherwise sums over samples are in another order."""
    near = {"rtol": 1e-10 if train else 0, "atol": 1e-12 if train else 0}
    history, reference = stored.history(), expected(stored, evaluate_every=2, **train)
    assert history.state.personal is None
    assert history.method == fv.Ditto(0.5)
    torch.testing.assert_close(history.state.params, reference.state.params, **near)
    for i, found in enumerate(models):
        assert int(found.pop(ROUNDS)) in (range(4) if "participants" in train else (3,))
        torch.testing.assert_close(found, reference.personal_model(i), **near)
    for key in (("valid", "personal"), ("test", "personal"), ("test", "global")):
        torch.testing.assert_close(history.accuracy[key], reference.accuracy[key],
                                   equal_nan=True)  # fmt: skip
    assert stored.manifest["result"].keys() >= {"test/personal", "test/global"}
    with pytest.raises(fv.BadInput, match="stay on the nodes"):
        history.personal_model(0)


@pytest.mark.parametrize("train", [{}, SOME], ids=["full", "some"])
def test_on_disk(train: dict, tmp_path: Path) -> None:
    given, home = config(tmp_path / "runs"), tmp_path / "nodes"
    given["options"] += " " + as_options(train)
    grid = InProcessGrid(given, NODES, node_config=on_disk(home))
    stored = StoredRun.open(run_on(grid, read_setup(given)))
    files = [next((home / f"node{i}").iterdir()) for i in range(CLIENTS)]
    same(stored, [load(file.read_bytes()) for file in files], **train)
    assert not any(grid.states.values())  # nothing in Flower's hands


def test_in_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes have no configuration of their own: the folder is fairvar's cache."""
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "cache"))
    given = config(tmp_path)
    stored = StoredRun.open(run_on(InProcessGrid(given, NODES), read_setup(given)))
    files = sorted((tmp_path / "cache" / "personal").iterdir(), key=lambda file: file.name[-13:])
    assert len(files) == CLIENTS
    same(stored, [load(file.read_bytes()) for file in files])


def test_secure_aggregation(tmp_path: Path) -> None:
    """The server receives FedAvg's sum, and the nodes keep their models."""
    home = tmp_path / "nodes"
    more = {"secure-aggregation": True}
    given = config(tmp_path / "runs", **more)
    grid = InProcessGrid(given, NODES, node_config=on_disk(home))
    stored = StoredRun.open(run_on(grid, read_setup(given)))
    history, reference = stored.history(), expected(stored)
    for name, leaf in reference.state.params.items():  # within the quantisation
        assert float((history.state.params[name] - leaf).abs().max()) < 1e-4
    for i in range(CLIENTS):
        (file,) = (home / f"node{i}").iterdir()
        found = load(file.read_bytes())
        for name, leaf in reference.personal_model(i).items():
            assert float((found[name] - leaf).abs().max()) < 1e-4
    assert bool(torch.isfinite(history.accuracy["test", "personal"]).all())


def test_a_run_goes_on_with_its_shared_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes start from the model that they receive."""
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "cache"))
    first = config(tmp_path / "a")
    folder = run_on(InProcessGrid(first, NODES), read_setup(first))
    given = config(tmp_path / "b", start=str(folder), rounds=5)
    grid = InProcessGrid(given, NODES, node_config=on_disk(tmp_path / "nodes"))
    stored = StoredRun.open(run_on(grid, read_setup(given)))
    assert stored.history().state.round == 5
    for i in range(CLIENTS):
        (file,) = (tmp_path / "nodes" / f"node{i}").iterdir()
        assert int(load(file.read_bytes())[ROUNDS]) == 5
