"""A model with two inputs and a metric of one's own over Flower's messages, on data of a function
and on own data: the same model and scores as the reference loop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Context

import fairvar as fv
from fairvar.deploy.flower import client_app, place_of
from fairvar.deploy.flower.client import node_data
from fairvar.deploy.flower.server import run_on
from fairvar.deploy.flower.setup import read_setup
from fairvar.runs.stored import StoredRun
from grids import InProcessGrid

CODE = """
import torch
from torch import nn
import fairvar as fv

def clients(seed, sizes=(9, 4, 12)):
    draw = torch.Generator().manual_seed(seed)
    return [({"note": torch.randint(0, 7, (n, 6), generator=draw),
              "values": torch.randn(n, 2, generator=draw)},
             torch.randint(0, 3, (n,), generator=draw)) for n in sizes]

def load():
    return fv.Federation.from_arrays(clients(0), test=clients(1), classes=3)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.numbers, self.head = nn.Embedding(7, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, note, values):
        return self.head(torch.tanh(self.words(note).mean(1) + self.numbers(values)))

def confidence(outputs, targets):
    return outputs.softmax(1).gather(1, targets[:, None]).mean()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "two_inputs.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    import two_inputs  # type: ignore[import-not-found]

    yield two_inputs
    del sys.modules["two_inputs"]


@pytest.mark.parametrize("data", ["two_inputs:load", "own"])
@pytest.mark.parametrize("method", ["fedavg", "qffl"])
def test_two_inputs_and_an_own_metric(own, data: str, method: str, tmp_path: Path) -> None:
    config: dict = {
        **{"method": method, "data": data, "clients": 3, "rounds": 2, "lr": 0.3, "seed": 0},
        "options": "evaluate.metric=two_inputs:confidence train.dtype=float64 evaluate.every=1",
        "out": str(tmp_path / "runs"),
    }
    if data == "own":
        config |= {"classes": 3, "input-shape": "note=6:int values=2"}
    else:
        config["options"] += " partition.name=natural"

    def read(context: Context) -> fv.ClientData:
        i = int(place_of(context).name)
        return fv.ClientData(own.clients(0)[i], test=own.clients(1)[i])

    reads = {"data": read} if data == "own" else {}
    grid = InProcessGrid(config, {100: 0, 107: 1, 109: 2}, None, {i: f"/{i}" for i in range(3)})
    grid.app = client_app(own.Net, **reads)
    stored = StoredRun.open(run_on(grid, read_setup(config, own.Net, **reads)))
    with torch.random.fork_rng():
        torch.manual_seed(0)  # as the seed of the run does
        model = own.Net()
    expected = fv.train(model, own.load(), stored.config.method, 2, 0.3, dtype=torch.float64,
                        engine="reference", evaluate_every=1, metric=own.confidence)  # fmt: skip
    found = stored.history()
    assert found.metric == expected.metric
    for name, leaf in expected.state.params.items():
        assert torch.allclose(found.state.params[name], leaf, rtol=1e-10, atol=1e-12)
    for key in (("test", "global"), ("test", "local")):
        assert torch.allclose(found.score[key], expected.score[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("shape", "message"), [
    ("note=6:int values=3", r"the run expects note \(6,\) of int, values \(3,\)"),
    ("note=6:int note=2", "name each input once"),
    ("note=6:text", "name each input once"),
    ("note=x", "give the shape of one sample"),
])  # fmt: skip
def test_other_inputs_are_refused(own, shape: str, message: str) -> None:
    config = {"method": "fedavg", "data": "own", "clients": 3, "classes": 3, "input-shape": shape}
    x, y = own.clients(0)[0]
    with pytest.raises(fv.BadInput, match=message):
        node_data(read_setup(config, own.Net), fv.ClientData((x, y)))
