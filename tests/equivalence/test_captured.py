"""Captured rounds = ordinary rounds. Here the fixed tensors of a captured round are used without
recording (there is no CUDA); the recording itself only repeats the same operations."""

from __future__ import annotations

import pytest
import torch
from test_engines import METHODS, OPTIONS, TOLERANCE_64, WORK, run

import fairvar as fv
from checks import MODELS, distance, images
from fairvar.engine.cuda_graphs import RECORDINGS
from fairvar.engine.grid import Member, train_grid
from fairvar.engine.settings import EvaluateSettings, TrainSettings

CASES = [("multinomial", m, w) for m in METHODS + OPTIONS for w in ("step", "mini_batch", "epoch")]
CASES += [("batch_norm", m, w) for m in METHODS for w in ("mini_batch", "epoch")]


@pytest.mark.parametrize(
    ("model", "method", "work"), CASES, ids=[f"{n}-{m}-{w}" for n, m, w in CASES]
)
def test_captured_rounds_are_ordinary_rounds(model: str, method: fv.Method, work: str) -> None:
    more: dict = {"rounds": 4, "evaluate_every": 3}
    expected = run(model, method, "auto", work, **more)
    found = run(model, method, "auto", work, capture=True, **more)
    assert found.provenance["captured"] is not method.looks_at_values
    gaps = distance(found, expected)
    assert max(gaps.values()) <= TOLERANCE_64, gaps
    assert found.state.round == 4


def test_evaluated_epochs_repeat_the_recording_too() -> None:
    """The recorded round yields the local models, so no second round is computed."""
    RECORDINGS.kept.clear()
    more: dict = {"rounds": 6, "evaluate_every": 1}
    expected = run("cnn", fv.FairGrad(0.1), "auto", "epoch", **more)
    found = run("cnn", fv.FairGrad(0.1), "auto", "epoch", capture=True, **more)
    assert max(distance(found, expected).values()) <= TOLERANCE_64
    (captured,) = RECORDINGS.kept.values()
    assert captured.kernel.shows
    assert captured.made is not None
    assert len(captured.made.work) == 1


def test_one_recording_serves_runs_with_other_numbers_and_seeds() -> None:
    data = images(10)
    RECORDINGS.kept.clear()
    more: dict = {"dtype": torch.float64, "evaluate_every": 2, **WORK["mini_batch"]}
    for lr, strength, seed in ((0.1, 0.5, 0), (0.05, 2.0, 0), (0.1, 0.5, 7)):
        model, method = MODELS["multinomial"], fv.FairLoss(strength)
        one = fv.train(model, data, method, 4, lr, seed=seed, capture=True, **more)
        other = fv.train(model, data, method, 4, lr, seed=seed, **more)
        assert max(distance(one, other).values()) <= TOLERANCE_64
    assert len(RECORDINGS.kept) == 1


def test_a_recording_serves_runs_that_found_more_memory_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = images(10)
    RECORDINGS.kept.clear()
    for memory in (1 << 30, 1 << 31):  # for all clients at once
        monkeypatch.setattr("fairvar.engine.run._memory_budget", lambda _, m=memory: m)
        fv.train(MODELS["multinomial"], data, fv.FairLoss(0.1), 2, capture=True)
    assert len(RECORDINGS.kept) == 1


def test_results_of_a_run_do_not_change_when_the_next_one_uses_its_recording() -> None:
    data = images(10)
    more: dict = {"batch_size": 4, "capture": True}
    first = fv.train(MODELS["multinomial"], data, fv.FedAvg(), 3, 0.1, **more)
    kept = {k: v.clone() for k, v in first.model.items()}
    fv.train(MODELS["multinomial"], data, fv.FedAvg(), 3, 0.5, **more)
    assert all(torch.equal(first.model[k], v) for k, v in kept.items())


@pytest.mark.filterwarnings("ignore:the run diverged:RuntimeWarning")
def test_divergence_ends_a_captured_run_like_an_ordinary_one() -> None:
    more: dict = {"lr": 1e9, "rounds": 20, "dtype": torch.float32}
    for work in ("step", "mini_batch"):
        expected = run("cnn", fv.FedAvg(), "auto", work, **more)
        found = run("cnn", fv.FedAvg(), "auto", work, capture=True, **more)
        assert expected.diverged_at is not None
        assert found.diverged_at == expected.diverged_at
        assert found.rounds == expected.rounds
        assert found.state.round == expected.state.round
        for name, leaf in expected.state.params.items():
            assert torch.equal(found.state.params[name], leaf), name


def test_half_precision_is_near_full_precision() -> None:
    for method in (fv.FedAvg(), fv.QFFL(1.0), fv.FairGrad(0.01)):
        full = run("cnn", method, "auto", "epoch", dtype=torch.float32)
        half = run("cnn", method, "auto", "epoch", dtype=torch.float32, precision="bfloat16")
        gap = distance(half, full)["parameter"]
        assert 0 < gap < 0.05
        assert half.provenance["precision"] == "bfloat16"


@pytest.mark.parametrize("work", ["step", "mini_batch", "epoch"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_captured_grids_are_ordinary_grids(method: fv.Method, work: str) -> None:
    """The third run diverges on the way where its method lets it."""
    data, found = images(10), []
    for capture in (False, True):
        settings = [
            TrainSettings(rounds=7, lr=lr, seed=seed, capture=capture, **WORK[work])
            for lr, seed in ((0.1, 0), (0.05, 1), (1e9, 0))
        ]
        members = [Member("multinomial", method, one) for one in settings]
        found.append(train_grid(members, data, "cross_entropy", EvaluateSettings(every=3)))
    for one, other in zip(*found, strict=True):
        assert one.diverged_at == other.diverged_at
        assert one.rounds == other.rounds
        assert one.bytes_up == other.bytes_up
        for name, leaf in one.state.params.items():
            assert torch.equal(leaf.nan_to_num(), other.state.params[name].nan_to_num()), name
        for key, table in one.accuracy.items():
            assert torch.equal(table.nan_to_num(), other.accuracy[key].nan_to_num()), key


class Fading(fv.FairLoss, frozen=True, tag="fading"):
    """A schedule: half the strength after round 3."""

    def at_round(self, t: int) -> fv.Method:
        return self if t < 3 else fv.FairLoss(self.strength / 2)


def test_a_method_with_a_schedule_is_not_repeated_as_it_was() -> None:
    method, data = Fading(5.0), images(10)
    expected = run("cnn", method, "auto", rounds=6)
    found = run("cnn", method, "auto", rounds=6, capture=True)
    assert max(distance(found, expected).values()) <= TOLERANCE_64
    assert max(distance(run("cnn", fv.FairLoss(5.0), "auto", rounds=6), expected).values()) > 1e-6
    grids = []
    for capture in (False, True):
        settings = [TrainSettings(rounds=6, lr=lr, capture=capture) for lr in (0.1, 0.05)]
        members = [Member("multinomial", method, one) for one in settings]
        grids.append(train_grid(members, data, "cross_entropy", EvaluateSettings(every=6)))
    for one, other in zip(*grids, strict=True):
        for name, leaf in one.state.params.items():
            assert torch.equal(leaf, other.state.params[name]), name
