"""Some of the clients in each round: who is drawn, and what the methods' averages then are."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

import fairvar as fv
from checks import images
from fairvar.engine.batches import Participation
from fairvar.runs.formats import pack_history, pack_state, unpack_history, unpack_state

METHODS: list[fv.Method] = [
    fv.FedAvg(),
    fv.FedAvg(weights="size"),
    fv.AFL(),
    fv.QFFL(1.0),
    fv.FairLoss(0.5),
    fv.FairLoss(0.5, exact=True),
    fv.FairGrad(0.1),
    fv.FairGrad(0.1, exact=True, weights="size"),
]
STATEFUL: list[fv.Method] = [
    fv.AAggFF(),
    fv.AAggFF(setting="cross_device"),
    fv.AAggFF(setting="cross_device", variant="paper"),
    fv.AFL(order="simultaneous", average=True),
]


def test_the_draw_belongs_to_seed_round_and_attempt() -> None:
    who = Participation.build(20, seed=3, share=0.3)
    drawn = who.of_round(5).tolist()
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 6
    assert Participation.build(20, seed=3, number=6).of_round(5).tolist() == drawn
    others = [who.of_round(6), who.of_round(5, attempt=1), Participation(20, 6, 4).of_round(5)]
    assert all(other.tolist() != drawn for other in others)


def test_every_client_is_drawn_equally_often() -> None:
    who, rounds = Participation.build(10, seed=0, number=3), 3000
    counts = torch.bincount(torch.cat([who.of_round(t) for t in range(rounds)]), minlength=10)
    assert float((counts - 0.3 * rounds).abs().max()) < 4.5 * (rounds * 0.3 * 0.7) ** 0.5


@pytest.mark.parametrize("share", [1e-9, 0.04, 1.0])
def test_at_least_one_and_at_most_all(share: float) -> None:
    assert 1 <= Participation.build(10, 0, share).number <= 10
    assert Participation.build(10, 0, 1.0).everyone
    with pytest.raises(fv.BadInput, match="11 participants per round, but there are 10"):
        Participation.build(10, 0, number=11)


def test_the_mean_over_a_uniform_draw_is_unbiased() -> None:
    """Enumerated: the average of a over all draws of three is the mean over all clients."""
    loss = torch.tensor([0.3, 1.0, 4.0, 0.7, 2.5], dtype=torch.float64)
    share = fv.FedAvg().plain_weights(torch.tensor([3, 9, 1]))
    found = [share @ loss[list(s)] for s in combinations(range(5), 3)]
    torch.testing.assert_close(torch.stack(found).mean(), loss.mean(), rtol=1e-14, atol=0)


def run(data: fv.Federation, method: fv.Method, rounds: int = 1, **more: object) -> fv.History:
    given: dict = {"lr": 0.1, "dtype": torch.float64, "evaluate_every": 1, **more}
    return fv.train("multinomial", data, method, rounds, **given)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_round_with_some_is_a_round_of_a_federation_of_those(method: fv.Method) -> None:
    data = images(9)
    found = run(data, method, participants=4, seed=2)
    ids = Participation.build(9, 2, number=4).of_round(0)
    those = [data.train.of(i) for i in ids.tolist()]
    expected = run(fv.Federation.from_arrays(those, classes=3), method, seed=2, engine="reference")
    for name, leaf in expected.state.params.items():
        torch.testing.assert_close(found.state.params[name], leaf, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.weights[0, ids], expected.weights[0], rtol=1e-12, atol=0)
    away = torch.ones(9, dtype=torch.bool).index_fill(0, ids, False)
    assert bool(found.loss[0, away].isnan().all())
    assert bool((found.weights[0, away] == 0).all())
    torch.testing.assert_close(found.state.mean_loss, expected.state.mean_loss)
    torch.testing.assert_close(found.gradient_variance, expected.gradient_variance)


@pytest.mark.parametrize("method", METHODS + STATEFUL, ids=repr)
def test_runs_with_some_clients_finish_and_can_be_continued(method: fv.Method) -> None:
    data = images(8)
    whole = run(data, method, 6, participation=0.4)
    half = run(data, method, 3, participation=0.4)
    rest = run(data, method, 6, participation=0.4, state=half.state)
    assert whole.diverged_at is None
    for name, leaf in whole.state.params.items():
        assert torch.equal(rest.state.params[name], leaf)
    if not isinstance(method, fv.QFFL):  # whose weights are divided by its normaliser
        ones = torch.ones(6, dtype=torch.float64)
        torch.testing.assert_close(whole.weights.sum(1), ones, rtol=1e-12, atol=0)


def test_what_afl_remembers_waits_for_the_client() -> None:
    data, who = images(8), Participation.build(8, 0, number=3)
    before = fv.AFL().initial_memory(8)["p"]
    for t in range(4):
        after = run(data, fv.AFL(step=1.0), t + 1, participants=3).state.memory["p"]
        away = [i for i in range(8) if i not in who.of_round(t).tolist()]
        assert torch.equal(after[away], before[away])
        before = after


def test_a_stored_history_knows_who_was_not_measured() -> None:
    history = run(images(8), fv.FedAvg(), 3, participants=3)
    state = unpack_state(pack_state(history.state))
    facts = {"rounds": 3, "diverged_at": None, "birth": {}}
    stored = unpack_history(pack_history(history), state, history.method, facts)
    for key, table in history.accuracy.items():
        torch.testing.assert_close(stored.accuracy[key], table, equal_nan=True)
    away = history.weights == 0
    assert bool(stored.accuracy["test", "local"][away].isnan().all())
    assert not bool(stored.accuracy["test", "global"].isnan().any())


def test_refusals() -> None:
    data = images(5)
    with pytest.raises(fv.BadInput, match="both given"):
        run(data, fv.FedAvg(), participation=0.5, participants=2)
    with pytest.raises(fv.BadInput, match=r"train\.participation = 0"):
        run(data, fv.FedAvg(), participation=0.0)
    with pytest.raises(
        fv.BadInput, match=r'"linear" trains all clients; to train some .* use "auto"'
    ):
        run(data, fv.FedAvg(), participation=0.5, engine="linear")
