"""Personal models: reference = stacked = in turn, with any kernel for the shared model.

Measured on a CPU after three rounds of ragged clients, over all cases below: 4e-16 relative in
float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_engines import TOLERANCE_64, run

import fairvar as fv
from checks import (
    MODELS,
    distance,
    golden_federation,
    images,
    quadratic_run,
    same_bytes,
    small_cnn,
)
from fairvar.engine import task
from fairvar.engine.grid import Member, train_grid, trains_together
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.train import Checkpoint, run_rounds
from fairvar.runs.formats import pack_checkpoint, unpack_checkpoint

CLIENTS = 10
DATA = images(CLIENTS)
METHODS = [
    fv.Ditto(),
    fv.Ditto(0.3, personal_lr=0.05, personal_steps=4, weights="size"),
]
WORK = ("step", "mini_batch", "epoch", "steps")
CASES = [(net, m, w, k) for net in ("multinomial", "cnn", "batch_norm") for m in METHODS
         for w in WORK for k in (None, 3)]  # fmt: skip
SHARED = fv.FedAvg()


def some(model: str, method: fv.Method, engine: str, work: str, **more: object) -> fv.History:
    given: dict = {"data": DATA, "seed": 5, "evaluate_splits": ("test",), "clip_norm": None}
    return run(model, method, engine, work, **given | more)


def paths(model: str, work: str, participants: int | None) -> list[str]:
    """All that FedAvg takes."""
    found = ["vmapped"]
    if work in ("step", "mini_batch"):
        found += ["pooled", "blocked"]
    return [*found, "linear"] if model == "multinomial" and participants is None else found


@pytest.mark.parametrize(
    ("model", "method", "work", "number"), CASES, ids=[f"{n}-{m!r}-{w}-{k}" for n, m, w, k in CASES]
)
def test_engines_agree(model: str, method: fv.Ditto, work: str, number: int | None) -> None:
    expected = some(model, method, "reference", work, participants=number)
    assert expected.diverged_at is None
    assert ("test", "personal") in expected.accuracy
    for path in paths(model, work, number):
        found = some(model, method, path, work, participants=number)
        assert found.provenance["engine"] == path
        gaps = distance(found, expected)
        assert {"personal", "loss ('test', 'personal')"} <= gaps.keys()
        if number is not None and number < 2:
            gaps.pop("gradient variance")
        assert max(gaps.values()) <= TOLERANCE_64, (path, gaps)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("method", [fv.Ditto(0.3), METHODS[1]], ids=repr)
def test_personal_models_step_as_local_ones(method: fv.Ditto, capture: bool) -> None:
    """Cut directions, decay, momentum and schedules apply to both models of a client."""
    more: dict = {"clip_norm": 0.4, "weight_decay": 0.05, "momentum": 0.5, "participants": 4,
                  "schedule": fv.LrSchedule("cosine", warm_up=2)}  # fmt: skip
    for model in ("multinomial", "batch_norm"):
        expected = some(model, method, "reference", "epoch", **more)
        found = some(model, method, "auto", "epoch", **more, capture=capture)
        assert max(distance(found, expected).values()) <= TOLERANCE_64
        for name in more:
            if name != "participants":
                other = some(
                    model, method, "auto", "epoch", **{k: more[k] for k in more if k != name}
                )
                assert distance(other, expected)["personal"] > 1e-6, name


@pytest.mark.parametrize("products", [False, True])
def test_clients_in_turn_and_stacked_agree(products: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutional clients train in turn on a CPU, and as one call elsewhere."""
    expected = some("batch_norm", fv.Ditto(), "vmapped", "epoch")
    monkeypatch.setattr(task.Task, "in_turn", False)
    if products:
        monkeypatch.setattr(task, "products_pay", lambda _: True)
    found = some("batch_norm", fv.Ditto(), "vmapped", "epoch")
    assert max(distance(found, expected).values()) <= TOLERANCE_64


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("model", ["multinomial", "batch_norm"])
def test_the_shared_model_is_fedavgs_byte_by_byte(
    model: str, work: str, dtype: torch.dtype, capture: bool
) -> None:
    for engine in ("reference", "auto", *paths(model, work, None)):
        more: dict = {"dtype": dtype, "capture": capture}
        found, expected = (
            some(model, method, engine, work, **more) for method in (fv.Ditto(), SHARED)
        )
        assert found.provenance["engine"] == expected.provenance["engine"]
        assert found.provenance["captured"] == (capture and engine != "reference")
        same_bytes(without_personal(found), expected)


@pytest.mark.parametrize("number", [1, 3])
def test_the_shared_model_is_fedavgs_with_some_clients(number: int) -> None:
    for engine in ("reference", "pooled", "blocked", "vmapped"):
        more: dict = {"participants": number, "dtype": torch.float32}
        found, expected = (
            some("multinomial", m, engine, "mini_batch", **more) for m in (fv.Ditto(), SHARED)
        )
        same_bytes(without_personal(found), expected)


def without_personal(history: fv.History) -> fv.History:
    kept = {
        name: {key: table for key, table in getattr(history, name).items() if key[1] != "personal"}
        for name in ("accuracy", "evaluated_loss")
    }
    return replace(history, state=replace(history.state, personal=None), **kept)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("model", ["multinomial", "batch_norm"])
def test_captured_rounds_change_no_bit(model: str, work: str) -> None:
    """Recorded rounds read λ and the rates from the device, also of a second run."""
    data = images(6, sizes=(8, 8))
    for method in (fv.Ditto(0.7), fv.Ditto(0.2, personal_lr=0.03)):
        for number in (None, 3):
            more: dict = {"data": data, "participants": number, "rounds": 4}
            expected = some(model, method, "auto", work, **more, capture=False)
            found = some(model, method, "auto", work, **more, capture=True)
            assert found.provenance["captured"]
            same_bytes(found, expected)


def test_own_numbers_of_steps_are_not_captured() -> None:
    method = fv.Ditto(personal_steps=9)
    found = some("multinomial", method, "auto", "mini_batch", capture=True)
    assert not found.provenance["captured"]


def test_chunks_change_no_bit() -> None:
    more: dict = {"data": images(24), "participants": 19, "dtype": torch.float32, "rounds": 2}
    for model in ("multinomial", "cnn"):
        whole = some(model, fv.Ditto(), "vmapped", "epoch", **more)
        same_bytes(some(model, fv.Ditto(), "vmapped", "epoch", chunk=8, **more), whole)


# -- who keeps what --------------------------------------------------------------------------------
def test_clients_that_are_not_invited_keep_their_models() -> None:
    more: dict = {"participants": 3, "rounds": 4, "evaluate_every": 1}
    after = [
        some("batch_norm", fv.Ditto(), "auto", "epoch", **more | {"rounds": t}) for t in range(1, 5)
    ]
    start = small_cnn(batch_norm=True).double().state_dict()
    before = {k: v.expand(CLIENTS, *v.shape) for k, v in start.items()}
    for t, history in enumerate(after):
        invited = history.weights[t] != 0
        assert int(invited.sum()) == 3
        personal = history.state.personal
        assert personal is not None
        for name, leaf in personal.items():
            assert torch.equal(leaf[~invited], before[name][~invited]), name
        moved = personal["0.weight"][invited] != before["0.weight"][invited]
        assert bool(moved.flatten(1).any(1).all())
        counted = personal["1.num_batches_tracked"][invited]
        assert bool((counted > before["1.num_batches_tracked"][invited]).all())
        before = personal
    # Everybody's personal model is evaluated, also of those that were not there.
    last = after[-1]
    assert not bool(last.accuracy["test", "personal"].isnan().any())
    assert bool(last.accuracy["test", "local"].isnan().any())


def test_scores_are_those_of_each_clients_own_model() -> None:
    history = some("multinomial", fv.Ditto(), "auto", "epoch")
    module = fv.models.build("multinomial", DATA.input_shape, 3).double()
    for i in range(CLIENTS):
        module.load_state_dict(history.personal_model(i))
        x, y = DATA.test.of(i)
        with torch.no_grad():
            outputs = module(x.double())
        loss = torch.nn.functional.cross_entropy(outputs, y)
        right = (outputs.argmax(1) == y).double().mean()
        torch.testing.assert_close(history.evaluated_loss["test", "personal"][-1, i], loss)
        assert float(history.accuracy["test", "personal"][-1, i]) == pytest.approx(float(right))
    assert history.fairness("test") == history.fairness("test", "personal")
    assert history.fairness("test") != history.fairness("test", "global")
    assert "personal" in history.to_frame()["model"]


# -- limits ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("work", WORK)
def test_without_pull_it_is_local_training(work: str) -> None:
    """Every client by itself, from x^0, by the same rounds of FedAvg with one client."""
    history = some("multinomial", fv.Ditto(0.0), "auto", work, batch_size=None)
    for i in range(CLIENTS):
        alone = fv.Federation.from_arrays([DATA.train.of(i)], classes=3)
        found = some("multinomial", SHARED, "auto", work, data=alone, batch_size=None,
                     evaluate_splits=())  # fmt: skip
        for name, leaf in found.state.params.items():
            torch.testing.assert_close(history.personal_model(i)[name], leaf, rtol=1e-12,
                                       atol=1e-14)  # fmt: skip


def test_one_step_of_the_first_round_does_not_depend_on_the_pull() -> None:
    weak, strong = (
        some("multinomial", fv.Ditto(pull), "auto", "step", rounds=1).state.personal
        for pull in (0.0, 5.0)
    )
    assert weak is not None
    assert strong is not None
    for name, leaf in weak.items():
        assert torch.equal(leaf, strong[name])


def test_a_strong_pull_makes_them_the_shared_model() -> None:
    """η_v λ = 1: after a step v = x^t − η_v ∇f_i(v), which tends to x^t."""
    gaps = []
    for pull in (1e2, 1e4, 1e6):
        method = fv.Ditto(pull, personal_lr=1 / pull)
        before = some("multinomial", method, "auto", "step", rounds=2).state.params
        after = some("multinomial", method, "auto", "step", rounds=3).state.personal
        assert after is not None
        gaps.append(max(float((after[k] - before[k]).abs().max()) for k in before))
    assert gaps[0] > 50 * gaps[1] > 2500 * gaps[2] > 0


# -- continuing, storing, declining ----------------------------------------------------------------
@pytest.mark.parametrize("model", ["multinomial", "batch_norm"])
@pytest.mark.parametrize("number", [None, 3])
@pytest.mark.parametrize("capture", [False, True])
def test_a_run_continues_from_a_stored_checkpoint(
    capture: bool, number: int | None, model: str
) -> None:
    data = images(6, sizes=(8, 8))
    settings = TrainSettings(rounds=5, batch_size=4, local_epochs=1, participants=number,
                             capture=capture)  # fmt: skip
    when = EvaluateSettings(every=2)
    kept: dict[int, bytes] = {}

    def keep(done: int, make: object) -> None:
        kept[done] = pack_checkpoint(make()[0])  # type: ignore[operator]

    module = MODELS[model]
    whole = run_rounds(module, data, fv.Ditto(), "cross_entropy", settings, when, keep=keep)
    for done in (1, 3):
        start = unpack_checkpoint(kept[done])
        assert start.state.personal is not None
        again = run_rounds(module, data, fv.Ditto(), "cross_entropy", settings, when, start)
        same_bytes(again, whole)


def test_states_of_other_methods_or_clients_do_not_fit() -> None:
    ditto = some("multinomial", fv.Ditto(), "auto", "step")
    with pytest.raises(fv.BadInput, match="one of Ditto, which FedAvg cannot continue"):
        some("multinomial", SHARED, "auto", "step", rounds=4, state=ditto.state)
    fedavg = some("multinomial", SHARED, "auto", "step")
    with pytest.raises(fv.BadInput, match="which Ditto cannot continue"):
        some("multinomial", fv.Ditto(), "auto", "step", rounds=4, state=fedavg.state)
    with pytest.raises(fv.BadInput, match="other clients"):
        some("multinomial", fv.Ditto(), "auto", "step", rounds=4, state=ditto.state,
             data=images(8))  # fmt: skip


def test_a_checkpoint_without_its_table_is_refused() -> None:
    settings, when = TrainSettings(rounds=4), EvaluateSettings(every=1)
    kept: list[Checkpoint] = []

    def keep(done: int, make: object) -> None:
        kept.append(make()[0])  # type: ignore[operator]

    run_rounds("multinomial", DATA, fv.Ditto(), "cross_entropy", settings, when, keep=keep)
    tables = dict(kept[1].tables or {})
    del tables["accuracy/test/personal"]
    with pytest.raises(fv.BadInput, match="accuracy/test/personal is absent"):
        run_rounds("multinomial", DATA, fv.Ditto(), "cross_entropy", settings, when,
                   Checkpoint(kept[1].state, tables))  # fmt: skip


def test_grids_decline_personal_models() -> None:
    settings = TrainSettings(rounds=2)
    members = [Member("multinomial", fv.Ditto(pull), settings) for pull in (0.1, 1.0)]
    assert not trains_together(members, DATA, "cross_entropy")
    with pytest.raises(fv.BadInput, match="one by one"):
        train_grid(members, DATA, "cross_entropy", EvaluateSettings())
    plain = [Member("multinomial", SHARED, TrainSettings(rounds=2, lr=lr)) for lr in (0.1, 0.2)]
    assert trains_together(plain, DATA, "cross_entropy")  # so it is not the data


@pytest.mark.filterwarnings("ignore:the run diverged:RuntimeWarning")
@pytest.mark.parametrize("engine", ["reference", "vmapped", "linear"])
@pytest.mark.parametrize("every", [1, 7])
def test_personal_models_that_diverge_end_the_run(engine: str, every: int) -> None:
    """η_v > 2/(L + λ), while the shared model converges."""
    data = golden_federation()
    test = [data.train.of(i) for i in range(2)]
    data = fv.Federation.from_arrays(test, test=test)
    more: dict = {"engine": engine, "dtype": torch.float32, "evaluate_every": every}
    history = quadratic_run(data, fv.Ditto(1e5, personal_lr=1e3), (0.5, 0.5), 60, **more)
    assert history.diverged_at is not None
    assert history.diverged_at < 20
    assert "pull = 100000" in str(history.divergence)
    assert bool(torch.isfinite(history.loss).all())
    for table in history.evaluated_loss.values():
        assert bool(torch.isfinite(table).all())
    personal = history.state.personal
    assert personal is not None
    assert bool(torch.isfinite(personal["weight"]).all())
    fine = quadratic_run(data, SHARED, (0.5, 0.5), 60, **more)
    assert fine.diverged_at is None
