"""FedEBA+: reference loop = pooled = vmapped, in both branches and in runs that change theirs."""

from __future__ import annotations

import pytest
import torch
from test_engines import TOLERANCE_64, run

import fairvar as fv
from checks import distance, images

METHODS = [
    fv.FedEBA(temperature=0.5, alpha=0.7, angle=0.0),
    fv.FedEBA(temperature=0.5, alpha=0.7, angle=90.0, weights="size", losses="batch"),
    fv.FedEBA(temperature=0.5, alpha=0.3, angle=8.0),
]
CASES = [("multinomial", work) for work in ("step", "mini_batch", "epoch", "steps")]
CASES += [(model, work) for model in ("cnn", "batch_norm") for work in ("mini_batch", "epoch")]


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize(("model", "work"), CASES)
@pytest.mark.parametrize("participants", [None, 4])
def test_engines_agree(method: fv.Method, model: str, work: str, participants: int | None) -> None:
    expected = run(model, method, "reference", work, participants=participants)
    for path in ("vmapped", "pooled") if work in ("step", "mini_batch") else ("vmapped",):
        gaps = distance(run(model, method, path, work, participants=participants), expected)
        assert max(gaps.values()) <= TOLERANCE_64, (path, gaps)


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("work", ["step", "epoch"])
def test_recorded_rounds(method: fv.Method, work: str) -> None:
    found, expected = (
        run("multinomial", method, "auto", work, capture=capture) for capture in (True, False)
    )
    assert found.provenance["captured"]
    assert max(distance(found, expected).values()) <= TOLERANCE_64


def test_some_rounds_are_unfair_and_others_fair() -> None:
    """Otherwise the third method above would test nothing."""
    totals = run("multinomial", METHODS[2], "vmapped", "epoch", data=images(10), rounds=8).weights
    found = totals.sum(1)
    assert bool((found - 1).abs().min() < 1e-12)
    assert bool((found - 0.7).abs().min() < 1e-12)


@pytest.mark.parametrize("engine", ["blocked", "linear"])
def test_paths_that_know_plain_means_only_refuse(engine: str) -> None:
    with pytest.raises(fv.BadInput, match=r"cannot do averages that are no plain means; use"):
        run("multinomial", fv.FedEBA(), engine)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_weight_decay_and_a_schedule(method: fv.Method) -> None:
    more: dict = {"weight_decay": 0.1, "schedule": fv.LrSchedule("step", decay=0.8)}
    expected = run("multinomial", method, "reference", **more)
    for path in ("vmapped", "pooled"):
        gaps = distance(run("multinomial", method, path, **more), expected)
        assert max(gaps.values()) <= TOLERANCE_64, (path, gaps)


def test_clipping_has_a_path() -> None:
    found = run("multinomial", METHODS[0], "auto", clip_norm=0.1)
    assert found.provenance["engine"] == "vmapped"
    expected = run("multinomial", METHODS[0], "reference", clip_norm=0.1)
    assert max(distance(found, expected).values()) <= TOLERANCE_64
    assert torch.isfinite(found.loss).all()
