"""A federation of separate clients computes what the reference loop computes.

With full batches the models are equal bit by bit. With mini-batches a client whose samples fit in
one batch has them in another order than in the engine, and sums may differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from federations import digits, reference, run

import fairvar as fv
from checks import FURTHER, FURTHER_OPTIONS, METHODS, MODELS, OPTIONS, distance, images
from fairvar.deploy.client import Message

TOLERANCE = 1e-12
WORK: dict[str, dict] = {
    "step": {},
    "mini_batch": {"batch_size": 16},
    "epoch": {"batch_size": 16, "local_epochs": 1},
    "steps": {"batch_size": 7, "local_steps": 3},
}


def gaps(found: fv.History, expected: fv.History, method: fv.Method) -> dict[str, float]:
    """Of all numbers that the server of a federation sees. It never sees all gradients at once, and
    clients do not tell their losses where the method does without, nor factors made of them."""
    unseen = {"gradient_variance": expected.gradient_variance}
    assert bool(found.gradient_variance.isnan().all())
    if not (method.uses_losses or method.uses_mean_loss):
        unseen["participant_loss"] = expected.participant_loss
        assert bool(found.loss.isnan().all())
        if type(method).coefficients is not fv.Method.coefficients:
            unseen["ascended"] = expected.ascended
            assert bool(found.ascended.isnan().all())
    return distance(replace(found, **unseen), expected)


def rules(method: fv.Method) -> dict:
    """Superquantile and TERM may give one client more weight than a federation allows."""
    return {"weight_cap": 1.0} if method in FURTHER + FURTHER_OPTIONS else {}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("method", METHODS + OPTIONS + FURTHER + FURTHER_OPTIONS, ids=repr)
def test_digits(method: fv.Method, work: str) -> None:
    found = run(method, digits(), rules=rules(method), **WORK[work])
    expected = reference(method, digits(), **WORK[work])
    assert not found.refused
    assert found.history.evaluated.tolist() == [2, 3]
    assert max(gaps(found.history, expected, method).values()) <= TOLERANCE
    assert (found.history.exchanges, found.history.bytes_up) == (
        expected.exchanges,
        expected.bytes_up,
    )


@pytest.mark.parametrize("method", METHODS + FURTHER, ids=lambda m: m.label)
def test_full_batches_are_equal_bit_by_bit(method: fv.Method) -> None:
    for dtype in ("float32", "float64"):
        found = run(method, digits(), rules=rules(method), dtype=dtype).history.state
        expected = reference(method, digits(), dtype=dtype).state
        for name, leaf in expected.params.items():
            assert torch.equal(found.params[name], leaf), (dtype, name)
        for name, leaf in expected.memory.items():
            assert torch.equal(found.memory[name], leaf), (dtype, name)


@pytest.mark.parametrize("method", METHODS + FURTHER, ids=lambda m: m.label)
def test_batch_norm(method: fv.Method) -> None:
    data, work = images(4, sizes=(3, 13)), {"batch_size": 4, "local_epochs": 1}
    found = run(method, data, model=MODELS["batch_norm"], rules=rules(method), **work).history
    expected = reference(method, data, MODELS["batch_norm"], **work)
    assert max(gaps(found, expected, method).values()) <= TOLERANCE


RULE: dict = {
    "weight_decay": 0.3,
    "momentum": 0.8,
    "schedule": fv.LrSchedule("cosine", warm_up=1, least=0.1),
}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("method", [fv.FedProx(1.5), fv.QFFL(1.0), fv.FairGrad(0.1)], ids=repr)
def test_proximal_term_weight_decay_momentum_and_schedule(method: fv.Method, work: str) -> None:
    found = run(method, digits(), **WORK[work], **RULE).history
    expected = reference(method, digits(), **WORK[work], **RULE)
    assert max(gaps(found, expected, method).values()) <= TOLERANCE


@pytest.mark.parametrize("work", ["step", "epoch"])
@pytest.mark.parametrize(
    "method",
    [
        fv.FairLoss(4.0, bound=0.1),
        fv.FairLoss(4.0, exact=True, bound=0.1),
        fv.FairGrad(1.0, bound=0.1),
    ],
    ids=repr,
)
def test_bounded_penalties(method: fv.Method, work: str) -> None:
    found = run(method, digits(), **WORK[work]).history
    expected = reference(method, digits(), **WORK[work])
    assert bool(found.ascended.isnan().all())  # clients do not say by how much they shortened
    found = replace(found, ascended=expected.ascended)
    assert max(gaps(found, expected, method).values()) <= TOLERANCE


@pytest.mark.parametrize("work", ["step", "epoch"])
@pytest.mark.parametrize(
    "method",
    [fv.FairGrad(0.3, ema=0.8), fv.FairGrad(0.3, ema=0.8, exact=True, only="*.bias")],
    ids=repr,
)
def test_moving_average_of_gradients(method: fv.Method, work: str) -> None:
    found = run(method, digits(), **WORK[work]).history
    expected = reference(method, digits(), **WORK[work])
    assert max(gaps(found, expected, method).values()) <= TOLERANCE


def test_the_server_shortens_penalties_too() -> None:
    """Collapsed FairLoss*: bit by bit what the clients would have sent."""
    method = fv.FairLoss(4.0, exact=True, collapsed=True, bound=0.1)
    found, expected = run(method, digits()).history, reference(method, digits())
    free = reference(fv.FairLoss(4.0, exact=True), digits())
    for name, leaf in expected.state.params.items():
        assert torch.equal(found.state.params[name], leaf), name
        assert not torch.equal(free.state.params[name], leaf), name


def test_some_clients_with_a_proximal_term() -> None:
    method, more = fv.FedProx(1.5), {"participants": 3, "local_steps": 3, **RULE}
    found = run(method, digits(8), **more).history
    expected = reference(method, digits(8), **more)
    assert torch.equal(found.weights != 0, expected.weights != 0)
    for name, leaf in expected.state.params.items():
        assert torch.equal(found.state.params[name], leaf), name


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.05}, RULE], ids=["", "clip", "rule"])
@pytest.mark.parametrize("model", ["multinomial", "batch_norm"])
def test_collapsed_fairloss_takes_one_exchange(model: str, options: dict) -> None:
    """The server takes the step itself: equal bit by bit. In evaluated rounds clients also train,
    since only they can score their local models."""
    method = fv.FairLoss(0.5, exact=True, collapsed=True)
    data = digits() if model == "multinomial" else images(4, sizes=(3, 13))
    module = MODELS.get(model, model)
    seen: list[tuple[int, str]] = []

    def listens(request: Message, reply: Message) -> Sequence[Message]:
        if request.client == 1:
            seen.append((request.stamp.round, request.stamp.exchange))
        return [reply]

    found = run(method, data, listens, module, **options)
    expected = reference(method, data, module, **options)
    for group in ("params", "buffers"):
        for name, leaf in getattr(expected.state, group).items():
            assert torch.equal(getattr(found.history.state, group)[name], leaf), name
    assert max(gaps(found.history, expected, method).values()) <= TOLERANCE
    assert [e for t, e in seen if t == 0] == ["probe"]  # evaluated after rounds two and three
    assert [e for t, e in seen if t == 1] == ["probe", "train"]


@pytest.mark.parametrize("method", METHODS + OPTIONS[3:4] + FURTHER, ids=repr)
def test_some_clients_in_each_round(method: fv.Method) -> None:
    data = digits(8)
    found = run(method, data, rules=rules(method), participants=3).history
    expected = reference(method, data, participants=3)
    assert torch.equal(found.weights != 0, expected.weights != 0)
    for name, leaf in expected.state.params.items():
        assert torch.equal(found.state.params[name], leaf), name
