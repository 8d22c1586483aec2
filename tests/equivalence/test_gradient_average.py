"""Moving average of g and a penalty on some parameters: all paths = the reference loop."""

from __future__ import annotations

import pytest
from test_engines import TOLERANCE_64, WORK, run

import fairvar as fv
from checks import distance, same_bytes
from fairvar.engine.settings import TrainSettings
from fairvar.engine.train import prepare
from fairvar.testing import federation

METHODS = [
    fv.FairGrad(0.3, ema=0.8),
    fv.FairGrad(0.3, ema=0.8, exact=True, weights="size"),
    fv.FairGrad(0.3, ema=0.8, warm_start="exact"),
    fv.FairGrad(0.3, only="*.bias"),
    fv.FairGrad(0.3, ema=0.8, only="1.*", exact=True),
]
CNN = [*METHODS[:4], fv.FairGrad(0.3, ema=0.8, only="4.*", exact=True)]
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
    with pytest.raises(fv.BadInput, match=r"FairGrad\.ema = 1\.0"):
        fv.FairGrad(0.1, ema=1.0)
