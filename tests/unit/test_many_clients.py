"""Many clients: what is kept and computed grows with the participants, not with all clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch.utils._python_dispatch import TorchDispatchMode

import fairvar as fv
from checks import images
from fairvar.common import rng
from fairvar.data import federation as federation_module
from fairvar.data import logistic, random_quadratics
from fairvar.engine.batches import Participation
from fairvar.engine.history import NO_REPLY, are_ids
from fairvar.engine.recorder import Recorder, check_tables
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.state import DoesNotFit, Outcome
from fairvar.engine.train import Checkpoint, prepare, run_rounds
from fairvar.errors import IntegrityError
from fairvar.runs.formats import condensed_history, pack_history, unpack_history
from fairvar.scores import ACCURACY

FACTS = {"rounds": 4, "diverged_at": None, "birth": {}}


def small(clients: int, samples: int = 3) -> fv.Federation:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(clients, samples, 4)).astype(np.float32)
    y = draw.integers(0, 3, (clients, samples))
    return fv.Federation.from_arrays(list(zip(x, y, strict=True)), classes=3)


def sampled(clients: int = 9, rounds: int = 4, **more: object) -> fv.History:
    given: dict = {"lr": 0.1, "participants": 3, "seed": 2, "evaluate_every": 2, **more}
    return fv.train("multinomial", images(clients), fv.AFL(step=0.5), rounds, **given)


# -- histories -------------------------------------------------------------------------------------
def test_a_sampled_history_keeps_participants_only() -> None:
    history = sampled()
    who = Participation.build(9, 2, number=3)
    assert history.participant_loss.shape == history.participant_weights.shape == (4, 3)
    assert history.participants is not None
    for t in range(4):
        assert torch.equal(history.participants[t], who.of_round(t))
    whole, weights = history.loss, history.weights
    assert whole.shape == weights.shape == (4, 9)
    away = torch.ones(4, 9, dtype=torch.bool).scatter(1, history.participants, False)
    assert bool(whole[away].isnan().all())
    assert bool((weights[away] == 0).all())
    assert torch.equal(whole.gather(1, history.participants), history.participant_loss)
    assert torch.equal(weights.gather(1, history.participants), history.participant_weights)
    assert repr(history).endswith("4 rounds, 9 clients>")


def test_all_clients_keep_the_present_form() -> None:
    history = sampled(participants=None)
    assert history.participants is None
    assert history.loss is history.participant_loss
    assert history.loss.shape == (4, 9)


def test_a_frame_lists_participants_only() -> None:
    history = sampled()
    frame = history.to_frame()
    for quantity, table in (("loss", history.loss), ("weight", history.weights)):
        rows = np.flatnonzero(frame["quantity"] == quantity)
        assert len(rows) == 4 * 3
        for r in rows:
            t, client = frame["round"][r], frame["client"][r]
            assert client in history.participants[t]
            assert frame["value"][r] == float(table[t, client])
    assert (frame["quantity"] == "accuracy").sum() == 2 * 9 * len(history.accuracy)


@pytest.mark.parametrize("condense", [False, True])
def test_a_stored_history_has_the_participants_of_evaluated_rounds(condense: bool) -> None:
    history = sampled()
    content = pack_history(history)
    if condense:
        content = condensed_history(content)
    assert load(content)["loss"].shape == (2, 3)
    stored = unpack_history(content, history.state, history.method, FACTS)
    assert stored.observed.tolist() == [1, 3]
    assert torch.equal(stored.participants, history.participants[[1, 3]])
    assert stored.clients == 9
    assert torch.equal(stored.weights, history.weights[[1, 3]].float().double())
    if not condense:
        torch.testing.assert_close(
            stored.loss, history.loss[[1, 3]].float().double(), equal_nan=True, rtol=0, atol=0
        )


def test_histories_from_before_are_still_read() -> None:
    """Runs with some clients were stored over all clients, NaN and 0 for those that were away."""
    history = sampled()
    tables = load(pack_history(history))
    del tables["participants"]
    kept = history.at_evaluations()
    tables |= {"loss": kept.loss.float().contiguous(), "weights": kept.weights.float().contiguous()}
    stored = unpack_history(save(tables), history.state, history.method, FACTS)
    assert stored.participants is None
    assert torch.equal(stored.weights, kept.weights.float().double())
    assert torch.equal(stored.loss.isnan(), kept.loss.isnan())


FORGED = {
    "no such client": lambda p: p + 9,
    "below nobody": lambda p: p - 20,
    "twice": lambda p: p[:, [0, 0, 1]],
    "falling": lambda p: p.flip(1),
    "nobody first": lambda p: torch.cat([torch.full((2, 1), NO_REPLY), p[:, :2]], 1),
    "one axis": lambda p: p[0],
    "one column less": lambda p: p[:, :2],
    "one round less": lambda p: p[:1],
    "other numbers": lambda p: p.int(),
}


@pytest.mark.parametrize("lie", FORGED)
def test_forged_participants_are_refused(lie: str) -> None:
    history = sampled()
    tables = load(pack_history(history))
    tables["participants"] = FORGED[lie](tables["participants"]).contiguous()
    with pytest.raises(IntegrityError, match="participants"):
        unpack_history(save(tables), history.state, history.method, FACTS)


def test_ids_are_rising_with_nobody_at_the_end() -> None:
    assert are_ids(torch.tensor([[0, 3, NO_REPLY], [1, NO_REPLY, NO_REPLY]]), 4)
    assert not are_ids(torch.tensor([[0, NO_REPLY, 3]]), 4)
    assert not are_ids(torch.tensor([[0, 4, NO_REPLY]]), 4)


# -- checkpoints -----------------------------------------------------------------------------------
def test_a_checkpoint_has_the_participants_and_is_checked() -> None:
    data, kept = images(9), []
    settings, when = TrainSettings(rounds=4, participants=3), EvaluateSettings(every=2)
    given = ("multinomial", data, fv.FedAvg(), "cross_entropy", settings)
    run_rounds(*given, when, keep=lambda t, make: kept.extend(make()))
    start: Checkpoint = kept[1]
    assert start.tables is not None
    assert start.tables["loss"].shape == start.tables["participants"].shape == (2, 3)
    scored = [tuple(k.split("/")[1:]) for k in start.tables if k.startswith("accuracy/")]
    who = prepare(*given).run.participation
    check_tables(start, who, scored, ACCURACY)
    for wrong in (start.tables["participants"] + 9, start.tables["participants"][:, :2]):
        forged = Checkpoint(start.state, {**start.tables, "participants": wrong})
        with pytest.raises(DoesNotFit, match="participants"):
            check_tables(forged, who, scored, ACCURACY)
    older = {k: v for k, v in start.tables.items() if k != "participants"}
    with pytest.raises(DoesNotFit, match="participants is absent"):
        check_tables(Checkpoint(start.state, older), who, scored, ACCURACY)


# -- who did not answer ----------------------------------------------------------------------------
def outcome(ids: list[int]) -> Outcome:
    loss = torch.tensor([[10.0 + i for i in ids]], dtype=torch.float64)
    nothing = torch.zeros(1, dtype=torch.float64)
    return Outcome({}, {}, {}, loss, loss / 100, nothing, None, nothing, torch.tensor(ids))


def recorded(number: int | None, *rounds: list[int]) -> dict[str, torch.Tensor]:
    settings = TrainSettings(rounds=4, participants=number)
    run = prepare("multinomial", images(5), fv.FedAvg(), "cross_entropy", settings).run
    recorder = Recorder(run, [fv.FedAvg()], [{}], 0, True)
    for t, ids in enumerate(rounds):
        recorder.write(t, outcome(ids))
    (tables,) = recorder.tables([-1], [len(rounds)])
    return tables


def test_rounds_in_which_fewer_answered_are_padded() -> None:
    tables = recorded(3, [0, 2, 4], [1], [0, 3])
    expected = [[0, 2, 4], [1, NO_REPLY, NO_REPLY], [0, 3, NO_REPLY]]
    assert tables["participants"].tolist() == expected
    assert are_ids(tables["participants"], 5)
    nan = torch.nan
    loss = torch.tensor([[10, 12, 14], [11, nan, nan], [10, 13, nan]], dtype=torch.float64)
    torch.testing.assert_close(tables["loss"], loss, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(tables["weights"], loss.nan_to_num(0.0) / 100)


def test_where_all_are_asked_the_absent_are_nan_in_their_place() -> None:
    tables = recorded(None, [0, 1, 2, 3, 4], [1, 3])
    assert "participants" not in tables
    assert tables["loss"][1].isnan().tolist() == [True, False, True, False, True]
    assert tables["weights"][1].tolist() == [0, 0.11, 0, 0.13, 0]


# -- what a round touches --------------------------------------------------------------------------
class Largest(TorchDispatchMode):
    """The most elements that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().nbytes():
                self.most = max(self.most, each.numel())
        return made


@pytest.mark.parametrize("method", [fv.FedAvg(), fv.QFFL(q=1.0), fv.FairLoss(0.5)], ids=repr)
def test_a_round_makes_nothing_as_large_as_the_federation(method: fv.Method) -> None:
    clients = 3000
    settings = TrainSettings(rounds=4, participants=4, lr=0.1)
    made: list[int] = []

    def watch(t: int, make: object) -> None:
        made.append(watched.most)
        watched.most = 0

    with Largest() as watched:
        when = EvaluateSettings(every=4, splits=("train",))
        run_rounds(
            "multinomial", small(clients), method, "cross_entropy", settings, when, keep=watch
        )
    assert max(made[1:3]) < clients  # before the first round all clients are prepared
    assert made[3] >= clients  # the last one is evaluated


# -- building --------------------------------------------------------------------------------------
def test_values_are_looked_at_once_for_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = federation_module.first_not_finite
    monkeypatch.setattr(
        federation_module,
        "first_not_finite",
        lambda values: calls.append(len(values)) or real(values),
    )
    small(500)
    assert calls == [1500, 1500]  # x and y


def test_streams_of_many_clients_are_their_own_streams() -> None:
    """Also after draws that leave half a word or part of a block in the generator."""
    for i, draw in zip(range(3, 40), rng.streams(5, "x", of=range(3, 40)), strict=True):
        alone = rng.stream(5, "x", i)
        assert draw.integers(7) == alone.integers(7)
        assert np.array_equal(draw.standard_normal(3), alone.standard_normal(3))
    keys = np.array([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1], dtype=np.uint64)
    wanted = [np.random.SeedSequence(int(k)).generate_state(2, np.uint64) for k in keys]
    assert np.array_equal(rng._seeded(keys), wanted)


def test_synthetic_clients_do_not_depend_on_each_other() -> None:
    few, many = logistic(3, seed=4), logistic(40, seed=4)
    for part, split in few.splits.items():
        for i in range(3):
            for a, b in zip(split.of(i), many.splits[part].of(i), strict=True):
                assert torch.equal(a, b)
    few_a, many_a = (random_quadratics(n, 4, 1)[1] for n in (3, 40))
    assert np.array_equal(few_a, many_a[:3])
