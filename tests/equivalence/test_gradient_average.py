"""Moving average of g and a penalty on some parameters: all paths = the reference loop."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from test_engines import TOLERANCE_64, WORK, run
from torch import nn

import fairvar as fv
from checks import distance, golden_federation, run_by, same_bytes
from fairvar.engine.settings import TrainSettings
from fairvar.engine.train import prepare
from fairvar.models.zoo import build
from fairvar.testing import federation

METHODS = [
    fv.FairGrad(0.3, ema=0.8),
    fv.FairGrad(0.3, ema=0.8, exact=True, weights="size"),
    fv.FairGrad(0.3, ema=0.8, warm_start="exact"),
    fv.FairGrad(0.3, only="*.bias"),
    fv.FairGrad(0.3, ema=0.8, only="1.*", exact=True),
]
CNN = [*METHODS[:4], fv.FairGrad(0.3, ema=0.8, only="head", exact=True)]
CASES = [("multinomial", m, w) for m in METHODS for w in WORK]
CASES += [("cnn", m, w) for m in CNN for w in ("mini_batch", "epoch")]


@pytest.mark.parametrize(("model", "method", "work"), CASES, ids=str)
def test_paths_agree(model: str, method: fv.Method, work: str) -> None:
    expected = run(model, method, "reference", work)
    plain = fv.FairGrad(0.3, exact=method.exact, warm_start=method.warm_start)
    assert max(distance(run(model, plain, "reference", work), expected).values()) > 1e-4
    one_step = work in ("step", "mini_batch")
    for path in ("vmapped", "blocked") if one_step else ("vmapped",):
        found = run(model, method, path, work)
        assert max(distance(found, expected).values()) <= TOLERANCE_64, path
        a, b = found.state.mean_gradient, expected.state.mean_gradient
        assert (a is None) == (b is None) == (not method.keeps_gradient)
        assert all(float((a[k] - b[k]).abs().max()) <= TOLERANCE_64 for k in a or {})


@pytest.mark.parametrize("method", CNN, ids=repr)
def test_some_clients_captured_rounds_and_continued_runs(method: fv.Method) -> None:
    some: dict = {"participants": 4}
    expected, found = (run("cnn", method, path, "epoch", **some) for path in ("reference", "auto"))
    assert max(distance(found, expected).values()) <= TOLERANCE_64
    whole, captured = (run("cnn", method, "auto", "mini_batch", capture=c) for c in (False, True))
    assert max(distance(captured, whole).values()) <= TOLERANCE_64
    half = run("cnn", method, "auto", "mini_batch", rounds=2)
    rest = run("cnn", method, "auto", "mini_batch", state=half.state)
    for name, leaf in whole.state.params.items():
        assert bool((rest.state.params[name] == leaf).all()), name


class Net(nn.Sequential):
    """Its last layer is the first by name."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = {"z": nn.Linear(2, 3), "tanh": nn.Tanh(), "a": nn.Linear(3, 1)}
        super().__init__(OrderedDict(layers))


@pytest.mark.parametrize("engine", ["reference", "vmapped", "blocked", "deployed"])
def test_the_head_is_the_last_layer(engine: str) -> None:
    found, expected, body = (
        run_by(engine, golden_federation(), fv.FairGrad(0.3, only=only), Net(), 2).state.params
        for only in ("head", "a.*", "z.*")
    )
    assert all(torch.equal(found[name], leaf) for name, leaf in expected.items())
    assert not torch.equal(found["a.weight"], body["a.weight"])


@pytest.mark.parametrize(
    "name",
    ["multinomial", "linear", "2nn", "avgcnn", "lenet5", "mobilenet_v2", "lstm", "transformer"],
)
def test_heads_of_built_in_models(name: str) -> None:
    """The layer whose outputs are the model's."""
    shape = (20,) if name in ("lstm", "transformer") else (3, 32, 32)
    params = dict(build(name, shape, 7).named_parameters())
    kept = fv.FairGrad(0.1, only="head").penalised(
        {k: torch.ones_like(v) for k, v in params.items()}
    )
    heads = [k for k, v in kept.items() if bool(v.any())]
    assert {k.rpartition(".")[0] for k in heads} == {list(params)[-1].rpartition(".")[0]}
    assert len(params[heads[0]]) == (1 if name == "linear" else 7)


def test_all_parameters_are_all_parameters() -> None:
    same_bytes(
        run("cnn", fv.FairGrad(0.3, only="*"), "vmapped", "epoch"),
        run("cnn", fv.FairGrad(0.3), "vmapped", "epoch"),
    )


def test_what_is_refused() -> None:
    def chosen(method: fv.Method, **options: object) -> str:
        settings = TrainSettings(**options)  # type: ignore[arg-type]
        return prepare("multinomial", federation(), method, "cross_entropy", settings).path

    assert chosen(fv.FairGrad(0.1)) == "linear"
    assert chosen(METHODS[0]) == "blocked"
    assert chosen(fv.FairGrad(0.0, ema=0.5)) == "blocked"
    with pytest.raises(fv.BadInput, match=r"linear.* moving average .* some parameters"):
        chosen(METHODS[-1], engine="linear")
    with pytest.raises(fv.BadInput, match=r"FairGrad.only = 'head.\*'.*1.weight, 1.bias"):
        chosen(fv.FairGrad(0.1, only="head.*"))
    with pytest.raises(fv.BadInput, match=r"FairGrad.only = '' is the name of no parameter"):
        chosen(fv.FairGrad(0.1, only=""))
    with pytest.raises(fv.BadInput, match=r"FairGrad\.ema = 1\.0"):
        fv.FairGrad(0.1, ema=1.0)
