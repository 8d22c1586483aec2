"""Compiled local steps = the plain loop, for models of standard layers; a failure only warns.

The graphs are recorded as on a GPU and run by the backend "eager", which compiles nothing: what the
compiler makes of them is tested there (`benchmarks/heavy_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fairvar as fv
from checks import distance
from fairvar.engine.kernels import compiled
from fairvar.models.zoo import Bottleneck

# torch's own first use of forward-mode differentiation
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.*deprecated")


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, group: bool) -> None:
        super().__init__()
        norm = (lambda c: nn.GroupNorm(2, c)) if group else nn.BatchNorm2d
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1), norm(outputs), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1), norm(outputs))
        self.down = nn.Conv2d(inputs, outputs, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(x)) + self.down(x))


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "MobileNetV2":
        blocks = [nn.Conv2d(3, 4, 3, 2, 1), Bottleneck(4, 4, 1, 2), Bottleneck(4, 6, 2, 2)]
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    group = kind.endswith("group norm")
    blocks = [Residual(3, 4, group), Residual(4, 6, group)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


def federation() -> fv.Federation:
    torch.manual_seed(1)
    pairs = [(torch.randn(m, 3, 8, 8), torch.randint(4, (m,))) for m in (9, 4, 6)]
    return fv.Federation.from_arrays(pairs, classes=4)


OPTIONS: dict = {
    "rounds": 2, "lr": 0.05, "batch_size": 4, "local_epochs": 1, "dtype": torch.float64,
    "evaluate_every": 2, "evaluate_splits": ("train",),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _recorded_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    compiled.forget()
    yield
    compiled.forget()


@pytest.mark.parametrize("kind", ["MobileNetV2", "ResNet, batch norm", "ResNet, group norm"])
@pytest.mark.parametrize("method", [fv.FedAvg(), fv.FairGrad(0.01)], ids=lambda m: m.label)
def test_ragged_epochs(kind: str, method: fv.Method) -> None:
    data, net = federation(), network(kind)
    expected = fv.train(net, data, method, engine="reference", **OPTIONS)
    found = fv.train(net, data, method, compile=True, **OPTIONS)
    assert len(compiled._COMPILED) == 2  # one shape for all steps, with padding and without
    assert None not in compiled._COMPILED.values()
    assert max(distance(found, expected).values()) <= 1e-10


def test_proximal_term_momentum_and_weight_decay() -> None:
    more = {**OPTIONS, "momentum": 0.7, "weight_decay": 0.1}
    data, net, method = federation(), network("MobileNetV2"), fv.FedProx(1.5)
    expected = fv.train(net, data, method, engine="reference", **more)
    found = fv.train(net, data, method, compile=True, **more)
    assert len(compiled._COMPILED) == 2
    assert None not in compiled._COMPILED.values()
    assert max(distance(found, expected).values()) <= 1e-10


def test_whole_batches_need_one_graph() -> None:
    more = {**OPTIONS, "drop_last": True}
    data, net = federation(), network("MobileNetV2")
    expected = fv.train(net, data, fv.FedAvg(), engine="reference", **more)
    found = fv.train(net, data, fv.FedAvg(), compile=True, **more)
    assert len(compiled._COMPILED) == 1
    assert max(distance(found, expected).values()) <= 1e-10


def test_groups_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last group is filled up, and only active clients fill groups."""
    monkeypatch.setattr(compiled, "MOST_TOGETHER", 2)
    data, net = federation(), network("MobileNetV2")
    expected = fv.train(net, data, fv.QFFL(1.0), engine="reference", **OPTIONS)
    found = fv.train(net, data, fv.QFFL(1.0), compile=True, **OPTIONS)
    assert len(compiled._COMPILED) == 2
    assert max(distance(found, expected).values()) <= 1e-10


def test_what_does_not_compile_is_computed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fails)
    data, net = federation(), network("ResNet, group norm")
    with pytest.warns(UserWarning, match="without compiling them: .*no compiler here") as warned:
        found = fv.train(net, data, fv.FedAvg(), compile=True, **OPTIONS)
    assert len(warned) == 1
    expected = fv.train(net, data, fv.FedAvg(), engine="reference", **OPTIONS)
    assert max(distance(found, expected).values()) <= 1e-10


@pytest.mark.parametrize("engine", ["reference", "blocked", "pooled"])
def test_engines_that_compile_nothing_are_refused(engine: str) -> None:
    with pytest.raises(fv.BadInput, match=f'engine="{engine}" compiles nothing; with compile=True'):
        fv.train(network("MobileNetV2"), federation(), fv.FedAvg(), 1, engine=engine, compile=True)


def test_linear_models_say_that_nothing_is_compiled() -> None:
    with pytest.warns(UserWarning, match="compile=True changes nothing: .* the linear path"):
        fv.train("multinomial", federation(), fv.FedAvg(), 1, compile=True)
