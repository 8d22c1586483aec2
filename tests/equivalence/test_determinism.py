"""Same seed, same bytes: whatever the chunks, the evaluations or the number of other clients."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fairvar as fv
from checks import MODELS, images, observed, same_bytes, small_cnn
from fairvar.engine.batches import Schedule
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.train import run_rounds
from fairvar.runs.formats import pack_checkpoint, unpack_checkpoint

CLIENTS = 19
STEP: dict = {"batch_size": 4}
EPOCH: dict = {"batch_size": 4, "local_epochs": 1}
DTYPES = [torch.float32, torch.float64]


def run(model: str, method: fv.Method | None = None, **options: object) -> fv.History:
    given: dict = {"rounds": 2, "lr": 0.1, "evaluate_every": 1, **STEP, **options}
    data = given.pop("data", None) or images(CLIENTS)
    return fv.train(MODELS[model], data, method or fv.FairGrad(0.1), **given)


@pytest.mark.parametrize("work", [STEP, EPOCH], ids=["step", "epoch"])
@pytest.mark.parametrize("model", MODELS)
def test_same_seed_same_bytes(model: str, work: dict) -> None:
    for method in (fv.FedAvg(), fv.FairGrad(0.1, exact=True)):
        same_bytes(run(model, method, **work), run(model, method, **work))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("work", [STEP, EPOCH], ids=["step", "epoch"])
@pytest.mark.parametrize("model", ["multinomial", "batch_norm"])
@pytest.mark.parametrize("method", [fv.FairGrad(0.1), fv.QFFL(1.0)], ids=lambda m: m.label)
def test_chunks_do_not_change_a_bit(
    method: fv.Method, model: str, work: dict, dtype: torch.dtype
) -> None:
    whole = run(model, method, engine="vmapped", chunk=CLIENTS, dtype=dtype, **work)
    for chunk in (1, 3, 8, 16):
        cut = run(model, method, engine="vmapped", chunk=chunk, dtype=dtype, **work)
        same_bytes(cut, whole, evaluated=False)
        for key in whole.accuracy:
            assert torch.equal(cut.accuracy[key], whole.accuracy[key]), key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_do_not_change_what_is_observed(dtype: torch.dtype) -> None:
    """The evaluated numbers too: losses of local models, gradient variance, norms of updates."""
    whole, cut = (run("batch_norm", engine="vmapped", chunk=c, dtype=dtype) for c in (CLIENTS, 8))
    same_bytes(cut, whole)


@pytest.mark.parametrize("method", [fv.FedAvg(), fv.FairLoss(0.5), fv.QFFL(1.0)], ids=repr)
@pytest.mark.parametrize("model", MODELS)
def test_watching_does_not_change_the_training(model: str, method: fv.Method) -> None:
    often = run(model, method, rounds=4, evaluate_every=1)
    for options in ({"evaluate_every": 3}, {"evaluate_local": False}, {"evaluate_splits": ()}):
        less = run(model, method, rounds=4, **options)
        for name, value in observed(less).items():
            if name.startswith(("parameter", "buffer", "memory")) or name in ("loss", "weights"):
                assert torch.equal(value, observed(often)[name]), (name, options)
    assert often.evaluated.tolist() == [1, 2, 3, 4]


def test_evaluations_do_not_depend_on_how_often() -> None:
    often, seldom = (run("batch_norm", rounds=4, evaluate_every=every) for every in (1, 2))
    assert seldom.evaluated.tolist() == [2, 4]
    for key, table in seldom.evaluated_loss.items():
        assert torch.equal(table, often.evaluated_loss[key][[1, 3]]), key


@pytest.mark.parametrize("local_epochs", [None, 2])
def test_a_new_client_changes_nobody_elses_batches(local_epochs: int | None) -> None:
    few, many = images(9).train, images(10).train
    drawn = [
        Schedule.build(split, 4, 1, local_epochs, seed=3, batch_norm=False) for split in (few, many)
    ]
    everyone = torch.arange(9)
    for t in range(3):
        for step in range(min(drawn[0].steps)):
            (a, real_a), (b, real_b) = (s.round(t).rows(step, everyone) for s in drawn)
            assert torch.equal(a[real_a], b[real_b])
            assert torch.equal(real_a.sum(1), real_b.sum(1))


def test_a_new_client_changes_nobody_elses_first_model() -> None:
    """End to end, through the losses of the clients' own models after one round."""
    a, b = (
        run("cnn", fv.FedAvg(), data=images(n), rounds=1, dtype=torch.float64, **EPOCH)
        for n in (9, 10)
    )
    for split in ("valid", "test"):
        left, right = a.evaluated_loss[split, "local"], b.evaluated_loss[split, "local"][:, :9]
        torch.testing.assert_close(left, right, rtol=1e-12, atol=0)


def test_batches_are_a_shuffle_of_the_clients_samples() -> None:
    """One epoch sees every sample of the client once, in an order that differs between rounds."""
    split = images(6).train
    schedule = Schedule.build(split, 4, 1, 1, seed=0, batch_norm=False)
    orders = []
    for t in range(2):
        drawn = schedule.round(t)
        for client in range(6):
            rows = [drawn.rows(s, torch.tensor([client])) for s in range(schedule.steps[client])]
            seen = torch.cat([r[real] for r, real in rows])
            assert sorted(seen.tolist()) == list(
                range(split.offsets[client], split.offsets[client + 1])
            )
            orders.append(seen.tolist())
    assert orders[:6] != orders[6:]


@pytest.mark.parametrize("work", [STEP, EPOCH], ids=["step", "epoch"])
@pytest.mark.parametrize("model", ["cnn", "batch_norm"])
@pytest.mark.parametrize("method", [fv.FedAvg(), fv.QFFL(1.0), fv.FairGrad(0.1)], ids=repr)
def test_a_stored_checkpoint_continues_bit_by_bit(
    method: fv.Method, model: str, work: dict
) -> None:
    """Stored tensors come back in another order, and norms are sums over them: q-FFL's step too."""
    kept: dict[int, bytes] = {}
    settings, when = TrainSettings(rounds=4, **work), EvaluateSettings(every=1)
    given = (MODELS[model], images(CLIENTS), method, "cross_entropy", settings, when)
    whole = run_rounds(*given, keep=lambda t, make: kept.update({t: pack_checkpoint(make()[0])}))
    same_bytes(run_rounds(*given, unpack_checkpoint(kept[2])), whole)


def test_other_seeds_other_numbers() -> None:
    """The seed draws the batches, and the first parameters of a model given by name."""
    one, two = (run("cnn", fv.FedAvg(), seed=s).state.params for s in (0, 1))
    assert not torch.equal(one["0.weight"], two["0.weight"])
    first, second = (
        fv.train("multinomial", images(3), fv.FedAvg(), rounds=1, seed=s).state.params["1.weight"]
        for s in (0, 1)
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize("engine", ["reference", "pooled", "vmapped", "blocked"])
def test_the_caller_is_left_alone(engine: str) -> None:
    """The module, the federation and every global random generator are as they were."""
    module = small_cnn(batch_norm=True).eval()
    module[0].bias.requires_grad_(False)
    data = images(5)
    kept, kept_data = copy.deepcopy(module.state_dict()), copy.deepcopy(data)
    # Python's own `random` cannot be watched here: beartype draws from it in the test run.
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    history = fv.train(module, data, fv.FedAvg(), rounds=2, batch_size=4, engine=engine)

    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])
    assert not module.training
    assert all(torch.equal(v, kept[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert [p.requires_grad for p in module.parameters()] == [True, False, *[True] * 4]
    for name, split in data.splits.items():
        assert torch.equal(split.x, kept_data.splits[name].x)
        assert torch.equal(split.y, kept_data.splits[name].y)
    moved = history.state.params["0.weight"]
    assert not torch.equal(moved, kept["0.weight"])


def test_the_history_does_not_share_memory_with_the_module() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    history = fv.train(module, images(4), fv.FedAvg(), rounds=1)
    before = history.state.params["1.weight"].clone()
    with torch.no_grad():
        module[1].weight.zero_()
    assert torch.equal(history.state.params["1.weight"], before)
