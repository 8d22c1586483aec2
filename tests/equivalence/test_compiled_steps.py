"""Compiled steps = the plain loop, for models of standard layers; a failure only warns.

The graphs are recorded as on a GPU and run as they are, or by torch's backend "eager", which
compiles nothing and takes seconds to do so: what the compiler makes of them is tested on a GPU
(`benchmarks/gpu_check.py --compiled`).
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.compiler._cache import CacheArtifactManager

import fairvar as fv
from checks import distance
from fairvar.engine.cuda_graphs import RECORDINGS
from fairvar.engine.kernels import compiled
from fairvar.errors import BadInput
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
    block = Residual(3, 6, group=kind.endswith("group norm"))
    return nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


def small_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.ReLU(), nn.Linear(4, 4))


def federation() -> fv.Federation:
    torch.manual_seed(1)
    pairs = [(torch.randn(m, 3, 8, 8), torch.randint(4, (m,))) for m in (9, 4, 6)]
    return fv.Federation.from_arrays(pairs, classes=4)


OPTIONS: dict = {
    "rounds": 2, "lr": 0.05, "batch_size": 4, "local_epochs": 1, "dtype": torch.float64,
    "evaluate_every": 2, "evaluate_splits": ("train",),
}  # fmt: skip


COMPILE = torch.compile


@pytest.fixture(autouse=True)
def _recorded_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
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


# -- one step from shared parameters ---------------------------------------------------------------
def depthwise_network(group: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.GroupNorm(2, 4) if group else nn.BatchNorm2d(4)
    layers = [nn.Conv2d(3, 4, 1), norm, nn.ReLU6(), nn.Conv2d(4, 4, 3, 2, 1, groups=4)]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 4))


ONE_STEP = {**OPTIONS, "batch_size": 8, "local_epochs": None, "rounds": 3}
SHARED: list[tuple[str, fv.Method]] = [
    ("pooled", fv.FedAvg()),
    ("pooled", fv.FairLoss(0.1, exact=True)),  # sums of gradients after the losses
    ("blocked", fv.QFFL(1.0)),
    ("blocked", fv.FairGrad(0.01)),
]


@pytest.mark.parametrize("group", [False, True], ids=["batch norm", "group norm"])
@pytest.mark.parametrize(("form", "method"), SHARED, ids=lambda v: getattr(v, "label", v))
def test_one_step(
    form: str, method: fv.Method, group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded batches, in groups of two clients, the last of which is filled up."""
    monkeypatch.setattr(compiled, "MOST_TOGETHER", 2)
    data, net = federation(), depthwise_network(group)
    expected = fv.train(net, data, method, engine="reference", **ONE_STEP)
    found = fv.train(net, data, method, compile=True, **ONE_STEP)
    assert found.provenance["engine"] == form
    assert compiled._COMPILED
    assert None not in compiled._COMPILED.values()
    assert max(distance(found, expected).values()) <= 1e-10


class Unit(nn.Module):
    """Samples of length one: NaN of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().sum((1, 2, 3), keepdim=True).sqrt()


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize(("form", "method"), SHARED, ids=lambda v: getattr(v, "label", v))
def test_padding_is_no_zero_that_a_model_divides_by(
    form: str,
    method: fv.Method,
    batch_size: int | None,
    compiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither that of batches, after batch norm, nor that of groups."""
    monkeypatch.setattr(compiled, "MOST_TOGETHER", 2)
    torch.manual_seed(0)
    layers = [Unit(), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), Unit(), nn.Flatten()]
    data, net = federation(), nn.Sequential(*layers, nn.Linear(256, 4))
    more = {**ONE_STEP, "batch_size": batch_size}
    expected = fv.train(net, data, method, engine="reference", **more)
    found = fv.train(net, data, method, engine=form, compile=compiles, **more)
    assert max(distance(found, expected).values()) <= 1e-10


@pytest.mark.parametrize(("form", "method"), SHARED[1:], ids=lambda v: getattr(v, "label", v))
def test_one_step_that_does_not_compile(
    form: str, method: fv.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_compile", lambda *_: None)
    data, net = federation(), depthwise_network(False)
    expected = fv.train(net, data, method, engine="reference", **ONE_STEP)
    found = fv.train(net, data, method, compile=True, **ONE_STEP)
    assert compiled._FAILED
    assert max(distance(found, expected).values()) <= 1e-10


# -- rules and failures ----------------------------------------------------------------------------
def test_proximal_term_momentum_and_weight_decay() -> None:
    more = {**OPTIONS, "momentum": 0.7, "weight_decay": 0.1}
    data, net, method = federation(), network("MobileNetV2"), fv.FedProx(1.5)
    expected = fv.train(net, data, method, engine="reference", **more)
    found = fv.train(net, data, method, compile=True, **more)
    assert len(compiled._COMPILED) == 2
    assert None not in compiled._COMPILED.values()
    assert max(distance(found, expected).values()) <= 1e-10


def test_whole_batches_need_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch.compile takes as one graph."""
    monkeypatch.setattr(torch, "compile", COMPILE)
    more = {**OPTIONS, "drop_last": True}
    data, net = federation(), network("MobileNetV2")
    expected = fv.train(net, data, fv.FedAvg(), engine="reference", **more)
    found = fv.train(net, data, fv.FedAvg(), compile=True, **more)
    assert len(compiled._COMPILED) == 1
    assert max(distance(found, expected).values()) <= 1e-10


def test_other_strides_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[object] = []

    def counts(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", COMPILE)
    monkeypatch.setattr(compiled, "BACKEND", counts)
    x, factor = torch.randn(2, 3, 1, 4), torch.randn(3, 4)
    layouts = [
        (x, factor),
        (x.movedim(1, -1).contiguous().movedim(-1, 1), factor.T.contiguous().T),
        (x.as_strided(x.shape, (12, 4, 1, 1)), factor),  # as contiguous, strictly, as x
    ]

    def product(x: Tensor, _: list[Tensor], factor: Tensor) -> tuple[Tensor, tuple[()]]:
        return x * factor[:, None], ()

    for given, shared in layouts:
        found = compiled.of_group("product", product, 2, given, [], shared)
        assert found is not None
        assert torch.equal(found[0], x * factor[:, None])
    assert len(graphs) == 1


def test_recordings_of_compiled_rounds_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the number of rounds decides, which recordings do not depend on."""
    monkeypatch.setattr(RECORDINGS, "kept", OrderedDict())
    data = federation()
    for compiles in (False, True):
        monkeypatch.setattr("fairvar.engine.train.wants_compiling", lambda *_, c=compiles: c)
        fv.train(small_network(), data, fv.FedAvg(), 2, capture=True)
    assert len(RECORDINGS.kept) == 2


def test_recorded_rounds_give_their_numbers_to_the_compiled_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a recorded round they are tensors: a compiled step that contained them could serve no
    other recording, and to print them, as part of a key, waits for the GPU."""
    monkeypatch.setattr(Tensor, "__repr__", lambda _: pytest.fail("a tensor was printed"))
    data, net = federation(), depthwise_network(False)
    for method in (fv.FairLoss(0.01), fv.FairLoss(0.02)):
        monkeypatch.setattr(RECORDINGS, "kept", OrderedDict())  # each has a recording of its own
        expected = fv.train(net, data, method, engine="reference", **OPTIONS)
        found = fv.train(net, data, method, compile=True, capture=True, **OPTIONS)
        assert max(distance(found, expected).values()) <= 1e-10
    assert len(compiled._COMPILED) == 2


def attention(heads: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, heads, 16, 0.0, batch_first=True)
    return nn.Sequential(nn.Flatten(2), nn.Linear(64, 8), layer, nn.Flatten(), nn.Linear(24, 4))


def frozen(seed: int) -> nn.Module:
    net = small_network()
    with torch.no_grad():
        net[1].weight.fill_(seed / 100)
    net[1].requires_grad_(False)
    return net


def hooked(factor: int) -> nn.Module:
    net = small_network()
    net[1].register_forward_hook(lambda _module, _inputs, outputs: factor * outputs)
    return net


def tied(layer: int) -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), *(nn.Linear(4, 4) for _ in range(3)))
    net[4].weight = net[layer].weight
    return net


ALIKE = [(attention, 2, 4), (frozen, 1, 2), (hooked, 1, 2), (tied, 2, 3)]  # as `repr` shows them


@pytest.mark.parametrize("how", ["capture", "compile"])
@pytest.mark.parametrize(("make", "first", "second"), ALIKE)
def test_models_that_look_alike_do_not_share_recordings(
    how: str, make: Callable[[int], nn.Module], first: int, second: int
) -> None:
    data = federation()
    for number in (first, second, first):
        torch.manual_seed(0)
        net = make(number)
        expected = fv.train(net, data, fv.FedAvg(), engine="reference", **OPTIONS)
        found = fv.train(net, data, fv.FedAvg(), **{how: True}, **OPTIONS)
        assert found.provenance["captured"] is (how == "capture")
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


def test_engines_that_compile_nothing_are_refused() -> None:
    with pytest.raises(BadInput, match='engine="reference" compiles nothing; use "auto" with'):
        fv.train(network("MobileNetV2"), federation(), fv.FedAvg(), 1, engine="reference",
                 compile=True)  # fmt: skip


def test_linear_models_say_that_nothing_is_compiled() -> None:
    with pytest.warns(UserWarning, match="compile=True changes nothing: .* the linear path"):
        fv.train("multinomial", federation(), fv.FedAvg(), 1, compile=True)


def test_rounds_that_wait_for_the_compiler_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    fv.train(small_network(), federation(), fv.FedAvg(), compile=True, progress=True, **OPTIONS)
    shown = re.findall(r"FedAvg: (\d)/2 \((compiling[^)]*)\)", capsys.readouterr().err)
    assert [done for done, _ in shown] == ["0", "0"]
    assert shown[0][1] == "compiling"  # the second shape takes about as long as the first
    assert re.fullmatch(r"compiling, about \d+ s", shown[1][1])


def test_a_stored_run_shows_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"data": {"name": "digits", "clients": 3, "samples": 60}, "model": {"name": "2nn"},
              "train": {"rounds": 1, "compile": True}}  # fmt: skip
    fv.run(config, out=tmp_path, progress=True)
    assert ": 0/1 (compiling) after" in capsys.readouterr().err


# -- the file with the compiler's cache ------------------------------------------------------------
@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that torch would load without complaint."""
    file = tmp_path / "cache"
    file.write_bytes(msgspec.msgpack.encode([b"code"]))
    file.chmod(0o600)
    monkeypatch.setenv(compiled.KEPT_IN, str(file))
    monkeypatch.setattr(compiled, "_IN_FILE", set())
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda _: Artifacts({"x": ["old"]}))
    monkeypatch.setattr(
        torch.compiler, "save_cache_artifacts", lambda: (b"new", Artifacts({"x": ["old", "new"]}))
    )
    return file


class Artifacts(NamedTuple):
    artifacts: dict[str, list[str]]


def parts(file: Path) -> list[bytes]:
    return msgspec.msgpack.decode(file.read_bytes(), type=list[bytes])


def one_round() -> fv.History:
    return fv.train(small_network(), federation(), fv.FedAvg(), 1, compile=True)


def test_the_cache_is_read_and_written_for_the_user_alone(kept: Path) -> None:
    one_round()
    assert parts(kept) == [b"code", b"new"]
    assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_cache_that_others_can_write_is_refused(mode: int, kept: Path) -> None:
    kept.chmod(mode)
    with pytest.raises(BadInput, match="can be changed by other users, and it holds code"):
        one_round()
    assert parts(kept) == [b"code"]


def test_the_cache_of_another_user_is_refused(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: kept.stat().st_uid + 1)
    with pytest.raises(BadInput, match="belongs to another user, and it holds code"):
        one_round()


def test_what_was_loaded_is_not_written_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = b"the same", Artifacts({"x": ["old"]})
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: found)
    one_round()
    assert parts(kept) == [b"code"]


def test_the_cache_keeps_every_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was saved in several calls, torch loads that of the last call only."""
    file = tmp_path / "cache"
    monkeypatch.setenv(compiled.KEPT_IN, str(file))
    monkeypatch.setattr(compiled, "_load", lambda _: None)  # not what torch can read
    CacheArtifactManager._ensure_cache_artifacts_registered()
    for name in ("first", "second"):
        with compiled._kept_in_file():
            CacheArtifactManager.record_artifact("inductor", name, b"code")
    loaded = [CacheArtifactManager.deserialize(part) for part in parts(file)]
    assert [one.key for found in loaded for one in found["inductor"]] == ["first", "second"]


@pytest.mark.parametrize("content", [b"code", msgspec.msgpack.encode([b"code"])])
def test_a_damaged_cache_is_one_warning(
    content: bytes, kept: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    kept.write_bytes(content)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setenv(compiled.KEPT_IN, str(kept))
    with pytest.warns(UserWarning, match="is not used: it is damaged") as warned:
        one_round()
    assert len(warned) == 1
    assert "Traceback" not in capfd.readouterr().err
