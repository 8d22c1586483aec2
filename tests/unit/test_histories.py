"""A History numbers its rounds from the first of all, and says why something is not there."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fairvar as fv
from fairvar.deploy.client import Agreement
from fairvar.deploy.guard import FederationSettings
from fairvar.deploy.run import LocalTransport, federate, local_clients
from fairvar.engine.grid import Member, train_grid
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.state import Outcome, State, stays_finite
from fairvar.engine.train import Checkpoint
from fairvar.runs.formats import pack_history, unpack_history


def clients(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(len(sizes))
    return [
        (torch.randn(n, 4, generator=draw), torch.randint(0, 3, (n,), generator=draw))
        for n in sizes
    ]


DATA = fv.Federation.from_arrays(clients([5, 3, 4]), test=clients([2, 3, 1]), classes=3)
TRAINED = fv.Federation.from_arrays(clients([5, 3, 4]), classes=3)  # no data to evaluate on
NET = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


# -- runs that go on from a state ------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["reference", "pooled", "vmapped", "blocked", "linear"])
def test_a_continued_history_numbers_its_rounds_as_the_whole_one(engine: str) -> None:
    model = "multinomial" if engine == "linear" else NET
    given: dict = {"engine": engine, "evaluate_every": 2}
    whole = fv.train(model, DATA, fv.FairLoss(0.5), 7, **given)
    part = fv.train(model, DATA, fv.FairLoss(0.5), 3, **given)
    rest = fv.train(model, DATA, fv.FairLoss(0.5), 7, state=part.state, **given)
    assert rest.observed.tolist() == [3, 4, 5, 6]
    assert rest.evaluated.tolist() == [4, 6, 7]
    assert torch.equal(rest.loss, whole.loss[3:])
    assert (rest.rounds, rest.state.round) == (4, 7)  # of this history, of all
    for count in ("exchanges", "bytes_down", "bytes_up"):
        assert getattr(part, count) + getattr(rest, count) == getattr(whole, count)


def rows(history: fv.History, start: int) -> list[tuple[object, ...]]:
    """The rows of the frame from a round on; accuracies are those of the model after it."""
    frame = history.to_frame()
    first = frame["round"] >= np.where(
        np.isin(frame["quantity"], ["loss", "weight"]), start, start + 1
    )
    return sorted(zip(*(column[first].tolist() for column in frame.values()), strict=True))


def test_the_frame_of_a_continued_history_is_the_end_of_the_whole_one() -> None:
    given: dict = {"evaluate_every": 1, "dtype": torch.float64}
    whole = fv.train(NET, DATA, fv.FedAvg(), 6, **given)
    part = fv.train(NET, DATA, fv.FedAvg(), 4, **given)
    rest = fv.train(NET, DATA, fv.FedAvg(), 6, state=part.state, **given)
    found, expected = rows(rest, 4), rows(whole, 4)
    assert len(found) == 2 * (3 + 3 + 4 * 3)
    assert [row[:-1] for row in found] == [row[:-1] for row in expected]
    assert [row[-1] for row in found] == pytest.approx([row[-1] for row in expected])


def test_what_is_stored_of_a_continued_history() -> None:
    """Rounds that were evaluated are found by their number."""
    part = fv.train(NET, DATA, fv.FedAvg(), 3)
    rest = fv.train(NET, DATA, fv.FedAvg(), 7, state=part.state, evaluate_every=2)
    facts = {"rounds": rest.rounds, "diverged_at": None, "birth": {}}
    stored = unpack_history(pack_history(rest), rest.state, rest.method, facts)
    assert stored.observed.tolist() == [3, 5, 6]
    assert torch.equal(stored.loss, rest.loss[[0, 2, 3]].float().double())


def test_runs_together_and_nodes_number_their_rounds_alike() -> None:
    settings, when = TrainSettings(rounds=5, lr=0.1), EvaluateSettings(every=1)
    state = fv.train("multinomial", DATA, fv.FedAvg(), 2, 0.1).state
    members = [Member("multinomial", fv.FedAvg(), settings, Checkpoint(state, None))] * 2
    (found, _), agreed = train_grid(members, DATA, "cross_entropy", when), Agreement(
        "multinomial", fv.FedAvg(), "cross_entropy", settings, when, 3, DATA.input_shape, 3
    )  # fmt: skip
    transport = LocalTransport(local_clients(agreed, DATA))
    federated = federate(agreed, FederationSettings(), transport, Checkpoint(state, None)).history
    for history in (found, federated):
        assert (history.rounds, history.state.round) == (3, 5)
        assert history.observed.tolist() == [2, 3, 4]
        assert history.evaluated.tolist() == [3, 4, 5]


# -- why something is not there --------------------------------------------------------------------
def missing(history: fv.History, *words: str, key: tuple[str, str] = ("test", "global")) -> None:
    """All accessors say the same, in one line."""
    for get in (lambda: history.accuracy[key], lambda: history.fairness(*key)):
        with pytest.raises(fv.BadInput) as caught:
            get()
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize("engine", ["reference", "pooled", "vmapped", "blocked", "linear"])
def test_a_run_that_diverges_before_its_first_evaluation(engine: str) -> None:
    model = "multinomial" if engine == "linear" else NET
    with pytest.warns(RuntimeWarning, match="diverged in round"):
        history = fv.train(model, DATA, fv.FairLoss(1e6), 30, 1e5, engine=engine, evaluate_every=30)
    assert history.diverged_at is not None
    told = f"diverged in round {history.diverged_at}"
    missing(history, told, "smaller lr × strength", "1e+06")
    missing(history, told, key=("valid", "local"))
    with pytest.raises(fv.BadInput, match=told):
        history.evaluated_loss["test", "global"]
    assert told in str(history)
    assert len(history.to_frame()) == 2 * 3 * history.rounds
    assert history.state.round == history.diverged_at
    if engine != "linear":
        copy.deepcopy(NET).load_state_dict(history.model)
    assert history.accuracy.get(("test", "global")) is None
    assert ("test", "global") not in history.accuracy


def test_a_run_that_diverged_has_no_fairness() -> None:
    pairs = [(torch.eye(3), torch.ones(3))]
    data = fv.Federation.from_arrays(pairs, test=pairs)
    with pytest.warns(RuntimeWarning, match="diverged"):
        history = fv.train("linear", data, fv.FedAvg(), 100, lr=1e9, loss="mse")
    with pytest.raises(fv.BadInput, match="the run diverged in round"):
        history.fairness()


def test_a_run_that_diverges_later_keeps_what_was_seen() -> None:
    pairs = [(x, x.sum(1)) for x, _ in clients([5, 3])]
    data = fv.Federation.from_arrays(pairs, test=pairs)
    with pytest.warns(RuntimeWarning, match="try a smaller lr, or clip_norm"):
        history = fv.train("linear", data, fv.FedAvg(), 99, 9.0, loss="mse", evaluate_every=1)
    assert len(history.evaluated) > 3
    assert torch.isfinite(history.evaluated_loss["test", "global"]).all()
    assert history.diverged_at == history.state.round


@pytest.mark.parametrize("engine", ["reference", "pooled", "vmapped", "blocked", "linear"])
def test_the_last_round_may_be_the_one_that_diverges(engine: str) -> None:
    """Without data to evaluate on, only the last model's own numbers show it."""
    x = torch.full((3, 1), 1e18)
    data, given = fv.Federation.from_arrays([(x, x), (x, x)]), {"loss": "mse", "engine": engine}
    with pytest.warns(RuntimeWarning, match="diverged in round 1"):
        fv.train(nn.Linear(1, 1), data, fv.FedAvg(), 1, 1e9, evaluate_local=False, **given)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [True, False]),
        ({"losses_known": False}, [False, True]),
        ({"personal": {"v": torch.tensor([[[torch.inf]], [[0.0]]])}}, [False, False]),
    ],
    ids=["losses", "model", "personal models"],
)
def test_which_runs_diverge_in_a_round(change: dict, expected: list[bool]) -> None:
    loss, model = torch.tensor([[1.0, 2.0], [1.0, torch.nan]]), torch.tensor([[torch.inf], [0.0]])
    made = Outcome({}, {}, {}, loss, loss, loss[:, 0], None, loss[:, 0])
    after = State(1, {"x": model, "scale": torch.ones(2)}, {}, {}, loss[:, 0], None)
    assert stays_finite(replace(made, **change), after).tolist() == expected


def test_a_classifier_without_test_data() -> None:
    history = fv.train(NET, TRAINED, fv.FedAvg(), 2)
    missing(history, "the federation has no test data", "test=…")
    with pytest.raises(fv.BadInput, match="no test data"):
        history.evaluated_loss["test", "global"]


def test_what_was_not_evaluated() -> None:
    history = fv.train(NET, DATA, fv.FedAvg(), 2, evaluate_local=False)
    missing(history, "evaluate_local=True", key=("test", "local"))
    history = fv.train(NET, DATA, fv.FedAvg(), 2, evaluate_splits=("train",))
    missing(history, "was not evaluated", "train/global, train/local")
    missing(history, "splits are train, valid, test", key=("tests", "global"))
    missing(history, "models global, local", key=("test", "shared"))
    with pytest.raises(fv.BadInput, match="give \\(split, model\\)"):
        history.accuracy["test"]  # type: ignore[index]
    for at in (1, -2):
        with pytest.raises(fv.BadInput, match=f"at = {at}: there are 1 evaluations"):
            history.fairness("train", at=at)


def test_regression_says_so_after_storing_too() -> None:
    data = fv.Federation.from_arrays([(x, x.sum(1)) for x, _ in clients([4, 5])],
                                     test=[(x, x.sum(1)) for x, _ in clients([2, 2])])  # fmt: skip
    history = fv.train("linear", data, fv.FedAvg(), 2, loss="mse")
    facts = {"rounds": 2, "diverged_at": None, "birth": {}}
    again = unpack_history(pack_history(history), history.state, fv.FedAvg(), facts)
    for found in (history, again):
        with pytest.raises(fv.BadInput, match="regression has no accuracy"):
            found.accuracy["test", "global"]
        assert found.metric == fv.METRICS["loss"]
        assert found.fairness().mean == float(history.evaluated_loss["test", "global"][-1].mean())
    untested = fv.train(NET, TRAINED, fv.FedAvg(), 2)
    stored = unpack_history(pack_history(untested), untested.state, fv.FedAvg(), facts)
    missing(stored, "no test data")


def test_a_copy_with_other_tables_still_tells() -> None:
    history = fv.train(NET, DATA, fv.FedAvg(), 2)
    missing(replace(history, accuracy={}, diverged_at=1), "was not evaluated")
