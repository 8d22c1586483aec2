"""`bound` of FairLoss and FairGrad: the penalty of a client is never longer than bound · ‖∇f_i‖.

All paths = the reference loop; a bound that is not reached changes no bit of the paper's methods.
"""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from test_engines import TOLERANCE_64, WORK, run

import fairvar as fv
from checks import bounded_by_hand, distance, golden_federation, images, quadratic_run, same_bytes
from fairvar.engine.grid import Member, train_grid
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.train import prepare

METHODS = [
    fv.FairLoss(1.0, bound=0.1),
    fv.FairLoss(1.0, exact=True, bound=0.1, weights="size", losses="full"),
    fv.FairGrad(0.2, bound=0.1),
    fv.FairGrad(0.2, exact=True, bound=0.1),
]
NEVER = 1e9
CASES = [("multinomial", m, w) for m in METHODS for w in WORK]
CASES += [("cnn", m, w) for m in METHODS for w in ("mini_batch", "epoch")]
CASES += [("batch_norm", m, "mini_batch") for m in METHODS]


def paths(model: str, method: fv.Method, work: str) -> list[str]:
    found = ["vmapped", *(["linear"] if model == "multinomial" else [])]
    blocked = work in ("step", "mini_batch") and not method.curvature
    return [*found, "blocked"] if blocked else found


@pytest.mark.parametrize(("model", "method", "work"), CASES, ids=str)
def test_paths_agree(model: str, method: fv.Method, work: str) -> None:
    expected = run(model, method, "reference", work)
    free = run(model, replace(method, bound=None), "reference", work)
    assert max(distance(free, expected).values()) > 1e-3  # the bound is reached
    for path in paths(model, method, work):
        found = run(model, method, path, work)
        assert found.provenance["engine"] == path
        assert max(distance(found, expected).values()) <= TOLERANCE_64, path


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_bound_that_is_not_reached_changes_no_bit(method: fv.Method) -> None:
    bounded, free = replace(method, bound=NEVER), replace(method, bound=None)
    more: dict = {"dtype": torch.float32}
    for model, work in (("multinomial", "mini_batch"), ("cnn", "epoch"), ("batch_norm", "step")):
        for path in ("reference", *paths(model, method, work)):
            same_bytes(
                run(model, bounded, path, work, **more), run(model, free, path, work, **more)
            )


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_no_direction_is_much_longer_than_the_gradient(method: fv.Method) -> None:
    """One step: ‖x − x_i‖ ≤ η (1 + bound) ‖∇f_i‖, and far more without the bound."""
    strong = replace(method, strength=100.0)
    plain, found, free = (
        run("cnn", m, "reference", rounds=1).update_norm
        for m in (fv.FedAvg(), strong, replace(strong, bound=None))
    )
    assert bool((found <= 1.1 * plain + 1e-12).all())
    assert bool((found >= 0.9 * plain - 1e-12).all())
    assert float((free / plain).max()) > 5


@pytest.mark.parametrize(
    "engine", ["reference", "vmapped", "blocked", "linear", "grid", "deployed", "flower"]
)
def test_by_hand(engine: str) -> None:
    bounded_by_hand(engine)(fv.FairLoss(0.5, exact=True, bound=0.2))


@pytest.mark.parametrize("method", [fv.FairLoss(100.0), fv.FairGrad(100.0)], ids=repr)
def test_strengths_that_diverge_stay_finite(method: fv.Method) -> None:
    """A quadratic that FedAvg solves at this learning rate."""
    data = golden_federation()
    with pytest.warns(RuntimeWarning, match="diverged"):
        free = quadratic_run(data, method, (0.5, 0.5), 200, dtype=torch.float32)
    found = quadratic_run(data, replace(method, bound=0.5), (0.5, 0.5), 200, dtype=torch.float32)
    assert free.diverged_at is not None
    assert found.diverged_at is None
    assert float(found.loss[-1].mean()) < float(found.loss[0].mean())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_some_clients_and_captured_rounds(method: fv.Method) -> None:
    some: dict = {"participants": 4}
    expected, found = (
        run("cnn", method, path, "mini_batch", **some) for path in ("reference", "auto")
    )
    assert max(distance(found, expected).values()) <= TOLERANCE_64
    one, other = (
        run("multinomial", method, "auto", "epoch", capture=capture) for capture in (False, True)
    )
    assert max(distance(one, other).values()) <= TOLERANCE_64


def test_grids_are_single_runs() -> None:
    """The bound is one of the numbers in which the runs of a grid may differ."""
    for kind in (fv.FairLoss, fv.FairGrad):
        numbers = ((0.5, 0.3), (4.0, 0.3), (4.0, 1e9))
        members = [
            Member("multinomial", kind(s, bound=b), TrainSettings(rounds=3, dtype="float64"))
            for s, b in numbers
        ]
        found = train_grid(members, images(10), "cross_entropy", EvaluateSettings(every=1))
        for member, history in zip(members, found, strict=True):
            alone = run("multinomial", member.method, "reference", evaluate_every=1)
            assert max(distance(history, alone).values()) <= TOLERANCE_64


def test_which_path() -> None:
    def chosen(method: fv.Method, **options: object) -> str:
        settings = TrainSettings(**options)  # type: ignore[arg-type]
        return prepare("2nn", images(4), method, "cross_entropy", settings).path

    assert chosen(fv.FairLoss(0.1)) == "pooled"
    assert chosen(fv.FairLoss(0.1, bound=1.0)) == "blocked"
    assert chosen(fv.FairGrad(0.1, bound=1.0)) == "vmapped"
    with pytest.raises(fv.BadInput, match="a bound on the penalty"):
        chosen(fv.FairLoss(0.1, bound=1.0), engine="pooled")
    with pytest.raises(fv.BadInput, match="curvature and a bound on the penalty"):
        chosen(fv.FairGrad(0.1, bound=1.0), engine="blocked")
