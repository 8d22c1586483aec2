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
from checks import METHODS, MODELS, OPTIONS, distance, images
from fairvar.deploy.messages import Message

TOLERANCE = 1e-12
WORK: dict[str, dict] = {
    "step": {},
    "mini_batch": {"batch_size": 16},
    "epoch": {"batch_size": 16, "local_epochs": 1},
    "steps": {"batch_size": 7, "local_steps": 3},
}


def gaps(found: fv.History, expected: fv.History, method: fv.Method) -> dict[str, float]:
    """Of all numbers that the server of a federation sees. It never sees all gradients at once, and
    clients do not tell their losses where the method does without."""
    unseen = {"gradient_variance": expected.gradient_variance}
    assert bool(found.gradient_variance.isnan().all())
    if not (method.uses_losses or method.uses_mean_loss):
        unseen["loss"] = expected.loss
        assert bool(found.loss.isnan().all())
    return distance(replace(found, **unseen), expected)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("method", METHODS + OPTIONS, ids=repr)
def test_digits(method: fv.Method, work: str) -> None:
    found = run(method, digits(), **WORK[work])
    expected = reference(method, digits(), **WORK[work])
    assert not found.refused
    assert found.history.evaluated.tolist() == [2, 3]
    assert max(gaps(found.history, expected, method).values()) <= TOLERANCE
    assert (found.history.exchanges, found.history.bytes_up) == (
        expected.exchanges,
        expected.bytes_up,
    )


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_full_batches_are_equal_bit_by_bit(method: fv.Method) -> None:
    for dtype in ("float32", "float64"):
        found = run(method, digits(), dtype=dtype).history.state
        expected = reference(method, digits(), dtype=dtype).state
        for name, leaf in expected.params.items():
            assert torch.equal(found.params[name], leaf), (dtype, name)
        for name, leaf in expected.memory.items():
            assert torch.equal(found.memory[name], leaf), (dtype, name)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_batch_norm(method: fv.Method) -> None:
    data, work = images(4, sizes=(3, 13)), {"batch_size": 4, "local_epochs": 1}
    found = run(method, data, model=MODELS["batch_norm"], **work).history
    expected = reference(method, data, MODELS["batch_norm"], **work)
    assert max(gaps(found, expected, method).values()) <= TOLERANCE


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("model", ["multinomial", "batch_norm"])
def test_collapsed_fairloss_takes_one_exchange(model: str, clip_norm: float | None) -> None:
    """The server takes the step itself: equal bit by bit. In evaluated rounds clients also train,
    since nobody else can score their own models."""
    method = fv.FairLoss(0.5, exact=True, collapsed=True)
    data = digits() if model == "multinomial" else images(4, sizes=(3, 13))
    module = MODELS.get(model, model)
    seen: list[tuple[int, str]] = []

    def listens(request: Message, reply: Message) -> Sequence[Message]:
        if request.client == 1:
            seen.append((request.stamp.round, request.stamp.exchange))
        return [reply]

    found = run(method, data, listens, module, clip_norm=clip_norm)
    expected = reference(method, data, module, clip_norm=clip_norm)
    for group in ("params", "buffers"):
        for name, leaf in getattr(expected.state, group).items():
            assert torch.equal(getattr(found.history.state, group)[name], leaf), name
    assert max(gaps(found.history, expected, method).values()) <= TOLERANCE
    assert [e for t, e in seen if t == 0] == ["probe"]  # evaluated after rounds two and three
    assert [e for t, e in seen if t == 1] == ["probe", "train"]


@pytest.mark.parametrize("method", METHODS + OPTIONS[3:4], ids=repr)
def test_some_clients_in_each_round(method: fv.Method) -> None:
    data = digits(8)
    found = run(method, data, participants=3).history
    expected = reference(method, data, participants=3)
    assert torch.equal(found.weights != 0, expected.weights != 0)
    for name, leaf in expected.state.params.items():
        assert torch.equal(found.state.params[name], leaf), name
