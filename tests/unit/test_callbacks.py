"""Callbacks see a run without changing it, and a run that they stop is the beginning of the run
that they do not."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn

import fairvar as fv
from checks import same_bytes


def clients(sizes: list[int], seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 4, generator=draw), torch.randint(0, 3, (n,), generator=draw))
            for n in sizes]  # fmt: skip


DATA = fv.Federation.from_arrays(
    clients([5, 3, 4, 8, 6]), valid=clients([4, 3, 4, 2, 4], 1), test=clients([2, 3, 1, 4, 2], 2),
    classes=3,
)  # fmt: skip
NET = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


class Everything(fv.Callback):
    """Looks at all there is."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.stop_after = stop_after

    def on_start(self, run: fv.Training) -> None:
        self.calls.append(("start", run.done))

    def on_round(self, run: fv.Training) -> None:
        self.calls.append(("round", run.done))
        run.loss.zero_()  # a copy
        run.state.map(torch.zero_)
        assert run.history().rounds == run.done
        if run.done == self.stop_after:
            run.stop("enough")
            run.stop("another reason")

    def on_evaluate(self, run: fv.Training) -> None:
        self.calls.append(("evaluate", run.done))
        run.fairness("valid")
        run.mean_loss("test", "local")

    def on_end(self, run: fv.Training) -> None:
        self.calls.append(("end", run.done))


CASES = [
    ("multinomial", fv.FedAvg(), {"engine": "linear"}),
    ("multinomial", fv.AFL(), {"engine": "linear", "capture": True}),
    (NET, fv.FairLoss(0.5), {"engine": "vmapped", "local_steps": 2, "capture": True}),
    (NET, fv.Ditto(), {}),
    (NET, fv.TERM(2.0), {"participants": 3}),
]


@pytest.mark.parametrize(("model", "method", "given"), CASES, ids=lambda v: str(v)[:20])
def test_a_watched_run_is_the_same_and_a_stopped_one_its_beginning(
    model: str | nn.Module, method: fv.Method, given: dict
) -> None:
    given = {"evaluate_every": 3, "lr": 0.2, **given}
    whole = fv.train(model, DATA, method, 8, **given)
    seen = Everything()
    same_bytes(fv.train(model, DATA, method, 8, callbacks=[seen], **given), whole)
    evaluated = [t for name, t in seen.calls if name == "evaluate"]
    assert seen.calls[0] == ("start", 0)
    assert seen.calls[-1] == ("end", 8)
    assert [t for name, t in seen.calls if name == "round"] == list(range(1, 9))
    assert evaluated == whole.evaluated.tolist() == [3, 6, 8]

    part = fv.train(model, DATA, method, 8, callbacks=[Everything(stop_after=5)], **given)
    assert part.stopped == "enough"
    assert "stopped: enough" in repr(part)
    assert (part.rounds, part.state.round) == (5, 5)
    assert part.evaluated.tolist() == [3]
    assert torch.equal(part.participant_loss, whole.participant_loss[:5])
    assert torch.equal(part.participant_weights, whole.participant_weights[:5])
    for key, table in part.accuracy.items():
        assert torch.equal(table.nan_to_num(-1), whole.accuracy[key][:1].nan_to_num(-1))
    rest = fv.train(model, DATA, method, 8, state=part, **given)
    assert all(map(torch.equal, rest.state.tensors(), whole.state.tensors()))
    same_bytes(part + rest, whole)


def test_a_run_that_reaches_its_end_was_not_stopped() -> None:
    found = fv.train("multinomial", DATA, fv.FedAvg(), 4, callbacks=[Everything(stop_after=4)])
    assert (found.stopped, found.rounds) == (None, 4)


def test_what_a_callback_shows_and_what_it_need_not_say() -> None:
    class Ends(fv.Callback):
        def on_start(self, run: fv.Training) -> None:
            with pytest.raises(fv.BadInput, match="no round is done yet"):
                _ = run.loss

        def on_round(self, run: fv.Training) -> None:
            assert repr(run) == "<Training: FedAvg, 1 of 4 rounds>"
            run.stop("")

    found = fv.train("multinomial", DATA, fv.FedAvg(), 4, callbacks=[Ends()])
    assert (found.rounds, found.stopped) == (1, "by a callback")


def test_callbacks_end_after_an_error_too() -> None:
    class Fails(fv.Callback):
        def on_round(self, run: fv.Training) -> None:
            raise KeyError("mine")

    seen = Everything()
    with pytest.raises(KeyError, match="mine"):
        fv.train("multinomial", DATA, fv.FedAvg(), 4, callbacks=[seen, Fails()])
    assert seen.calls[-1] == ("end", 1)


def test_bad_callbacks_are_refused() -> None:
    for bad in (3, "text", [Everything], [None]):
        with pytest.raises(fv.BadInput, match=r"give a list of fairvar\.Callback"):
            fv.train("multinomial", DATA, fv.FedAvg(), 1, callbacks=bad)  # type: ignore[arg-type]


# -- early stopping --------------------------------------------------------------------------------
def early(scores: list[float], **options: object) -> tuple[fv.History, fv.EarlyStopping]:
    """A run whose score after evaluation k is scores[k]."""
    given: dict = {"patience": 2, **options}
    values = iter(scores)
    found = fv.EarlyStopping(lambda run: next(values), **given)
    return fv.train("multinomial", DATA, fv.FedAvg(), 8, evaluate_every=1, callbacks=[found]), found


def test_early_stopping_waits_for_a_better_score() -> None:
    history, found = early([0.1, 0.3, 0.2, 0.3, 0.9])
    assert (history.rounds, found.best, found.best_round) == (4, 0.3, 2)
    assert "since round 2" in (history.stopped or "")
    short = fv.train("multinomial", DATA, fv.FedAvg(), 2)
    assert found.best_state is not None
    assert all(map(torch.equal, found.best_state.tensors(), short.state.tensors()))
    history, found = early([0.3, 0.2, 0.2, 0.1, 0.1, 0.1, 0.2, 0.2], higher_is_better=False)
    assert (history.rounds, found.best_round) == (6, 4)
    history, _ = early([0.1, 0.15, 0.19, 0.9], min_delta=0.1)
    assert history.rounds == 3


def scored_by(name: str) -> Any:
    return SimpleNamespace(metric=fv.METRICS[name])


def test_a_score_must_be_a_number() -> None:
    with pytest.raises(fv.BadInput, match="must return a number, not 'good'"):
        early(["good"])  # type: ignore[list-item]


def test_early_stopping_by_name_knows_which_way_is_better() -> None:
    for name, higher in (("mean", True), ("worst_10_percent", True), ("jain", True),
                         ("loss", False), ("variance_over_clients", False),
                         ("gini", False)):  # fmt: skip
        found = fv.EarlyStopping(name, patience=1)
        assert found._higher(scored_by("accuracy")) == higher, name
        by_error = name in ("jain",) and higher  # less error is better
        assert found._higher(scored_by("rmse")) == by_error, name
        history = fv.train("multinomial", DATA, fv.FedAvg(), 12, evaluate_every=1, lr=1.0,
                           callbacks=[found])  # fmt: skip
        scores = [
            float(history.evaluated_loss["valid", "global"][e].nanmean())
            if name == "loss" else history.fairness("valid", at=e)[name]
            for e in range(len(history.evaluated))
        ]  # fmt: skip
        steps = [b > a if higher else b < a for a, b in pairwise(scores)]
        ends = steps.index(False) + 2 if False in steps else 12
        assert history.rounds == ends, name


def test_a_score_that_is_not_defined_is_never_the_best() -> None:
    nan = float("nan")
    history, found = early([nan, 0.1, nan, nan])
    assert (history.rounds, found.best, found.best_round) == (4, 0.1, 2)
    history, found = early([nan, nan, nan])
    assert (history.rounds, found.best_round, found.best_state) == (2, 0, None)
    assert "(valid)" not in str(history.stopped)  # a function looks where it likes
    assert str(history.stopped).endswith("has not been a number")
    with pytest.raises(fv.BadInput, match="corrected_variance of the loss is not defined on valid"):
        fv.train("multinomial", DATA, fv.FedAvg(), 2, metric="loss",
                 callbacks=[fv.EarlyStopping("corrected_variance")])  # fmt: skip


def test_bad_early_stopping_is_refused() -> None:
    config.update("jaxtyping_disable", True)  # it would refuse some by itself
    for options, why in (({"score": "meen"}, "did you mean 'mean'"), ({"patience": 0}, "patience"),
                         ({"score": "variance_interval"}, "unknown score"),
                         ({"higher_is_better": "no"}, "give True or False"),
                         ({"model": "shared"}, "unknown model 'shared'"),
                         ({"min_delta": -1.0}, "min_delta")):  # fmt: skip
        with pytest.raises(fv.BadInput, match=why):
            fv.EarlyStopping(**options)  # type: ignore[arg-type]
    with pytest.raises(fv.BadInput, match="needs the split 'valid'"):
        fv.train("multinomial", DATA, fv.FedAvg(), 4, evaluate_splits=("test",),
                 callbacks=[fv.EarlyStopping()])  # fmt: skip


# -- TensorBoard -----------------------------------------------------------------------------------
@pytest.mark.extra
def test_tensorboard_gets_the_scores(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = fv.train("multinomial", DATA, fv.FedAvg(), 6, evaluate_every=3,
                       callbacks=[fv.TensorBoard(tmp_path)])  # fmt: skip
    written = EventAccumulator(str(tmp_path)).Reload()
    seen = written.Scalars("test/global/mean")
    assert [event.step for event in seen] == [3, 6]
    assert seen[-1].value == pytest.approx(history.fairness().mean)
    loss = written.Scalars("train/loss")[-1].value
    assert loss == pytest.approx(float(history.loss[5].mean()))
