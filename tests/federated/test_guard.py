"""Bad replies are left out, named and counted; the model is that of the run without them, bit by
bit. The honest client that is worst off is never left out, and a liar's weight has a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import log

import pytest
import torch
from federations import TINY as CLIENTS
from federations import run
from federations import tiny as data
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fairvar as fv
from checks import METHODS
from fairvar.deploy.client import LOSS, SAMPLES, Message, Stamp
from fairvar.deploy.guard import Arrival, Expected, Reason, limited_weights, sift
from fairvar.deploy.run import Fault

ROUNDS = 2
Change = Callable[[Message], Sequence[Message]]


def first(change: Callable[[Tensor], Tensor]) -> Change:
    """Change the first array of a reply."""

    def spoil(reply: Message) -> Sequence[Message]:
        name = next(iter(reply.arrays))
        return [replace(reply, arrays={**reply.arrays, name: change(reply.arrays[name])})]

    return spoil


def one_value(value: float) -> Change:
    def put(leaf: Tensor) -> Tensor:
        return leaf.flatten().index_fill(0, torch.tensor(1), value).reshape(leaf.shape)

    return first(put)


def number(name: str, value: float) -> Change:
    return lambda r: [replace(r, numbers={**r.numbers, name: value})]


def stamp(**fields: object) -> Change:
    return lambda r: [replace(r, stamp=r.stamp._replace(**fields))]


def keys(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Change:
    return lambda r: [replace(r, arrays=change(r.arrays))]


FAULTS: dict[str, tuple[Change, Reason]] = {
    "nan": (one_value(torch.nan), Reason.NOT_FINITE),
    "infinity": (one_value(torch.inf), Reason.NOT_FINITE),
    "minus_infinity": (one_value(-torch.inf), Reason.NOT_FINITE),
    "enormous": (one_value(1e38), Reason.TOO_LARGE),
    "wrong_shape": (first(lambda v: v.flatten()), Reason.SHAPE),
    "broadcastable": (first(lambda v: v.flatten()[:1]), Reason.SHAPE),
    "one_more_axis": (first(lambda v: v[None]), Reason.SHAPE),
    "half_precision": (first(lambda v: v.half()), Reason.DTYPE),
    "integers": (first(lambda v: v.long()), Reason.DTYPE),
    "complex": (first(lambda v: v.to(torch.complex128)), Reason.DTYPE),
    "missing_key": (keys(lambda a: dict(list(a.items())[1:])), Reason.KEYS),
    "extra_key": (keys(lambda a: {**a, "x/other": torch.zeros(1)}), Reason.KEYS),
    "empty": (keys(lambda a: {}), Reason.KEYS),
    "no_samples": (number(SAMPLES, 0), Reason.SAMPLES),
    "negative_samples": (number(SAMPLES, -3), Reason.SAMPLES),
    "samples_not_whole": (number(SAMPLES, 2.5), Reason.SAMPLES),
    "samples_not_a_number": (number(SAMPLES, torch.nan), Reason.SAMPLES),
    "too_many_samples": (number(SAMPLES, 10**12), Reason.SAMPLES),
    "negative_loss": (number(LOSS, -0.1), Reason.LOSS),
    "loss_not_a_number": (number(LOSS, torch.nan), Reason.LOSS),
    "infinite_loss": (number(LOSS, torch.inf), Reason.LOSS),
    "enormous_loss": (number(LOSS, 1e30), Reason.LOSS),
    "stale_round": (stamp(round=-1), Reason.STALE),
    "stale_attempt": (stamp(attempt=7), Reason.STALE),
    "other_exchange": (stamp(exchange="evaluate"), Reason.STALE),
    "other_format": (stamp(format=0), Reason.FORMAT),
    "unknown_client": (lambda r: [replace(r, client=99)], Reason.UNKNOWN),
    "another_client": (lambda r: [replace(r, client=(r.client + 1) % CLIENTS)], Reason.UNKNOWN),
    "silent": (lambda r: [], Reason.NO_REPLY),
}


def by(bad: Sequence[int], change: Change, exchanges: Sequence[str] = ("probe", "train")) -> Fault:
    """`bad` clients change what they send in these exchanges."""

    def fault(request: Message, reply: Message) -> Sequence[Message]:
        guilty = request.client in bad and request.stamp.exchange in exchanges
        return change(reply) if guilty else [reply]

    return fault


@lru_cache
def without(method: fv.Method, bad: tuple[int, ...], exchanges: tuple[str, ...]) -> fv.State:
    silent = FAULTS["silent"][0]
    return run(method, data(), by(bad, silent, exchanges), rounds=ROUNDS).history.state


def same(a: fv.State, b: fv.State) -> None:
    for group in ("params", "memory"):
        left, right = getattr(a, group), getattr(b, group)
        assert left.keys() == right.keys()
        for name in left:
            assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_bad_replies_are_left_out(method: fv.Method, fault: str) -> None:
    change, reason = FAULTS[fault]
    if reason is Reason.LOSS and not (method.uses_losses or method.uses_mean_loss):
        reason = Reason.KEYS  # a loss was not requested
    for bad in ((2,), (0, 1, 3, 4)):
        found = run(method, data(), by(bad, change), rounds=ROUNDS)
        same(found.history.state, without(method, bad, ("probe", "train")))
        accepted = found.history.weights != 0
        assert accepted.tolist() == [[i not in bad for i in range(CLIENTS)]] * ROUNDS
        assert {(r.client, r.reason) for r in found.refused} == {(i, reason) for i in bad}
        assert found.history.provenance["refused"] == {reason.value: ROUNDS * len(bad)}
    with pytest.raises(fv.RunFailed, match=rf"given up after 2 attempts.*\(10 × {reason.value}"):
        run(method, data(), by(range(CLIENTS), change), rules={"repeats": 1}, rounds=ROUNDS)


@pytest.mark.parametrize("method", [m for m in METHODS if m.probes], ids=lambda m: m.label)
def test_a_reply_that_goes_bad_after_a_good_probe(method: fv.Method) -> None:
    """Its probe counts in a and g, as if it had dropped out in between."""
    found = run(method, data(), by((1,), FAULTS["nan"][0], ("train",)), rounds=ROUNDS)
    same(found.history.state, without(method, (1,), ("train",)))
    assert {r.exchange for r in found.refused} == {"train"}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_the_first_of_two_answers_counts(method: fv.Method) -> None:
    twice = run(method, data(), by((3,), lambda r: [r, *one_value(0.0)(r)]), rounds=ROUNDS)
    same(twice.history.state, run(method, data(), rounds=ROUNDS).history.state)
    assert {(r.client, r.reason) for r in twice.refused} == {(3, Reason.DUPLICATE)}


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-310])
def test_small_numbers_are_fine(value: float) -> None:
    small = first(lambda v: torch.full_like(v, value))
    assert not run(fv.FedAvg(), data(), by((3,), small), rounds=1).refused


def test_an_answer_from_someone_who_was_not_asked() -> None:
    """A late or forged reply of a client that does not take part in this round."""
    now = Stamp("train", 4)
    expected = Expected(now, frozenset({1, 2}), {}, loss=False, scores=(), largest=1e9)
    arrivals = [Arrival(i, Message(now, i, {}, {SAMPLES: 3})) for i in (2, 5)]
    good, bad = sift(arrivals, expected)
    assert list(good) == [2]
    assert {(i, why.reason) for i, why in bad} == {(1, Reason.NO_REPLY), (5, Reason.UNKNOWN)}


def test_the_worst_off_honest_client_is_never_left_out() -> None:
    """50 times the median loss and 10 times the median update, in 60 random federations."""
    for case in range(60):
        draw = torch.Generator().manual_seed(case)
        scale = 10 ** float(torch.empty(1).uniform_(-3, 3, generator=draw))
        worst = case % CLIENTS

        def answer(request: Message, reply: Message) -> Sequence[Message]:
            if request.stamp.exchange != "train":
                return [reply]
            bad = request.client == worst  # noqa: B023  # called within this turn of the loop
            moved = {
                name: sent + scale * (10.0 if bad else 1.0) * torch.randn(  # noqa: B023
                    sent.shape, generator=draw, dtype=sent.dtype)  # noqa: B023
                for name, sent in request.arrays.items()
            }  # fmt: skip
            loss = {LOSS: scale * (50.0 if bad else 1.0)}  # noqa: B023
            return [replace(reply, arrays=moved, numbers={**reply.numbers, **loss})]

        found = run(fv.AFL(), data(), answer, rounds=1)
        assert not found.refused
        assert float(found.history.loss[0].max()) == 50 * scale  # nor is its loss limited


def test_a_well_trained_start_does_not_hide_the_worst_off() -> None:
    """Four clients with tiny losses, one that the model serves badly: its loss counts in full."""

    def served_badly(request: Message, reply: Message) -> Sequence[Message]:
        loss = {LOSS: 2.0 if request.client == 1 else 1e-7}
        return (
            [replace(reply, numbers={**reply.numbers, **loss})]
            if LOSS in reply.numbers
            else [reply]
        )

    assert float(run(fv.AFL(), data(), served_badly, rounds=1).history.loss[0, 1]) == 2.0


# -- liars -----------------------------------------------------------------------------------------
LIARS = [fv.AFL(), fv.AFL(step=10.0), fv.QFFL(1.0), fv.QFFL(5.0), fv.AAggFF(), fv.FairLoss(0.5)]


@pytest.mark.parametrize("factor", [100.0, 1e6])
@pytest.mark.parametrize("method", [*LIARS, fv.FedAvg(weights="size")], ids=repr)
def test_a_liar_has_at_most_half_of_the_weight(method: fv.Method, factor: float) -> None:
    def lies(reply: Message) -> Sequence[Message]:
        told = {k: type(v)(v * factor) for k, v in reply.numbers.items() if k in (LOSS, SAMPLES)}
        return [replace(reply, numbers={**reply.numbers, **told})]

    history = run(method, data(), by((1,), lies), rounds=4).history
    weights = history.weights / history.weights.sum(1, keepdim=True)
    assert float(weights[:, 1].max()) <= 0.5 + 1e-12
    if method.uses_losses or method.uses_mean_loss:
        honest = history.loss[:, [0, 2, 3, 4]]
        assert float(history.loss[:, 1].max()) <= 100 * max(float(honest.max()), log(3))


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda w: sum(w) > 1e-9),
    st.floats(0.5, 1),
)
def test_limited_weights(weights: list[float], cap: float) -> None:
    given_ = torch.tensor(weights, dtype=torch.float64)
    share = torch.full_like(given_, 1 / len(given_))
    found = limited_weights(given_, share, cap)
    torch.testing.assert_close(found.sum(), given_.sum())
    limit = max(cap, 2 / len(weights))
    assert float(found.max()) <= limit * float(given_.sum()) * (1 + 1e-12)
    if float(given_.max()) <= limit * float(given_.sum()):
        assert torch.equal(found, given_)
