"""Clients whose replies are well formed and wrong: the effect of each defence on each attack.

Replies that are no replies at all are in `test_guard`. How much accuracy the attacks cost, and the
defences, is measured by `benchmarks/robustness.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import TINY as CLIENTS
from federations import agreement, digits, run
from federations import tiny as data
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fairvar as fv
from checks import METHODS, MODELS, OPTIONS, images
from fairvar.common.tree import Tree, add, scale, subtract, tree_map
from fairvar.deploy.client import BUFFERS, GRADIENT, LOSS, MODEL, Message, grouped
from fairvar.deploy.guard import (
    OFF,
    FederationSettings,
    Reason,
    combination,
    dishonest_among,
    mean_loss,
    median_length,
)
from fairvar.deploy.run import Fault, Federated, LocalTransport, federate, local_clients
from fairvar.deploy.server import MEMORY
from fairvar.runs.formats import pack_checkpoint, unpack_checkpoint

BARE = {"norm_bound": OFF, "mean_loss_bound": OFF}
COLLAPSED = fv.FairLoss(0.5, exact=True, collapsed=True)
PLAIN = [m for m in METHODS if not m.uses_losses]  # the mean of updates, without weights
LIAR = 1


def moves(change: Callable[[Tree], Tree], liars: Sequence[int] = (LIAR,), since: int = 0) -> Fault:
    """Dishonest clients change their updates and, where they send any, their gradients."""

    def fault(request: Message, reply: Message) -> Sequence[Message]:
        late = request.stamp.round < since or request.stamp.exchange == "evaluate"
        if late or request.client not in liars:
            return [reply]
        x, groups = request.group(MODEL), {}
        if own := reply.group(MODEL):
            groups[MODEL] = add(x, change(subtract(own, x)))
        if gradient := reply.group(GRADIENT):
            groups[GRADIENT] = change(gradient)
        return [replace(reply, arrays={**reply.arrays, **grouped(**groups)})]

    return fault


def times(factor: float, liars: Sequence[int] = (LIAR,), since: int = 0) -> Fault:
    return moves(lambda u: scale(u, factor), liars, since)


def tells(loss: float) -> Fault:
    def fault(request: Message, reply: Message) -> Sequence[Message]:
        if request.client != LIAR or LOSS not in reply.numbers:
            return [reply]
        return [replace(reply, numbers={**reply.numbers, LOSS: loss})]

    return fault


def flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in tree.values()])


def distance(a: Federated, b: Federated) -> float:
    return float((flat(a.history.state.params) - flat(b.history.state.params)).norm())


def same_model(a: Federated, b: Federated) -> None:
    for group in ("params", "buffers", "memory"):
        left, right = (getattr(f.history.state, group) for f in (a, b))
        assert all(torch.equal(left[name], right[name]) for name in left)


def shortened(found: Federated) -> list[list[int]]:
    return [note.shortened for note in found.notes.rounds]


# -- honest clients --------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [*METHODS, *OPTIONS, COLLAPSED], ids=repr)
def test_honest_runs_are_the_same_bit_by_bit(method: fv.Method) -> None:
    """With the usual bounds and without any, also on clients of very different digits."""
    usual, bare = run(method, digits(), rounds=4), run(method, digits(), rules=BARE, rounds=4)
    same_model(usual, bare)
    assert torch.equal(usual.history.state.mean_loss, bare.history.state.mean_loss)
    assert shortened(usual) == [[]] * 4
    assert usual.history.provenance["norm_bounded_rounds"] == 0


def test_clients_at_rest_do_not_make_the_others_look_long() -> None:
    """Four clients have nothing left to learn; the fifth, which is worst off, counts in full."""
    at_rest = moves(lambda u: scale(u, 0.0), liars=(0, 1, 2, 3))
    found = run(fv.FedAvg(), data(), at_rest, rounds=3)
    assert shortened(found) == [[]] * 3
    same_model(found, run(fv.FedAvg(), data(), at_rest, rules=BARE, rounds=3))


def test_what_all_clients_send_may_grow() -> None:
    """Fifty times as long from round two on, all of them: cut once, and then no more."""
    everybody = range(CLIENTS)
    found = run(fv.FedAvg(), data(), times(50.0, everybody, since=2), rounds=6, lr=1e-4)
    assert shortened(found) == [[], [], [*everybody], *[[]] * 3]


# -- lengths ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("factor", [1e6, -1e3])
@pytest.mark.parametrize("method", [*METHODS, COLLAPSED], ids=repr)
def test_an_update_out_of_proportion_has_the_usual_length(method: fv.Method, factor: float) -> None:
    """It counts, in its direction: the model is the same for every factor, and near that of the
    honest run, compared with what the attack does to a server without bounds."""
    found = run(method, data(), times(factor), rounds=3)
    assert not found.refused
    assert shortened(found) == [[LIAR]] * 3
    assert found.history.provenance["norm_bounded_rounds"] == 3
    assert [note.clients for note in found.notes.rounds] == [[*range(CLIENTS)]] * 3
    assert distance(found, run(method, data(), times(100 * factor), rounds=3)) < 1e-9
    if isinstance(method, fv.QFFL):  # whose step is shorter the longer the updates are
        bare = run(method, data(), times(factor), rules=BARE, rounds=3)
        start = run(method, data(), times(0.0, range(CLIENTS)), rounds=1)
        assert distance(bare, start) < 0.1 * distance(found, start)
    else:  # one round: after two, the honest replies of some methods are refused as too large
        short, bare = (run(method, data(), times(factor), rules=r, rounds=1) for r in ({}, BARE))
        honest = run(method, data(), rounds=1)
        assert distance(short, honest) < 0.05 * distance(bare, honest)


def test_the_usual_length_by_hand() -> None:
    """Round 0 by its own median, round 1 by round 0's, of lengths 1, 2, 3, 4 and 500."""
    seen = []

    def lengths(request: Message, reply: Message) -> Sequence[Message]:
        if request.stamp.exchange == "evaluate":
            return [reply]
        x, length = request.group(MODEL), [1.0, 2.0, 3.0, 4.0, 500.0][request.client]
        seen.append(x)
        step = {name: torch.zeros_like(leaf) for name, leaf in x.items()}
        next(iter(step.values()))[0, 0] = length
        return [replace(reply, arrays=grouped(**{MODEL: subtract(x, step)}))]

    found = run(fv.FedAvg(), data(), lengths, rounds=2)
    (moved, *others) = flat(subtract(seen[0], found.history.state.params)).tolist()
    assert moved == pytest.approx(2 * (1 + 2 + 3 + 4 + 3) / 5, rel=1e-12)
    assert not any(others)
    assert found.notes.lengths == {MODEL: pytest.approx([3.0, 3.0])}


def test_past_rounds_decide_not_the_present_one() -> None:
    """Three of five are dishonest from round two on: they have the median then, not in the past."""
    found = run(fv.FedAvg(), data(), times(1e4, (0, 1, 2), since=2), rounds=4)
    assert shortened(found)[:3] == [[], [], [0, 1, 2]]
    assert max(found.notes.lengths[MODEL][:2]) * 10 >= found.notes.lengths[MODEL][2]


@pytest.mark.parametrize("method", [m for m in METHODS if m.probes], ids=lambda m: m.label)
def test_probes_are_bounded_too(method: fv.Method) -> None:
    def lies(request: Message, reply: Message) -> Sequence[Message]:
        return times(1e6)(request, reply) if request.stamp.exchange == "probe" else [reply]

    found = run(method, data(), lies, rounds=2)
    assert shortened(found) == [[LIAR]] * 2
    bare = run(method, data(), lies, rules=BARE, rounds=2)
    honest = run(method, data(), rounds=2)
    assert distance(found, honest) < 1e-3 * distance(bare, honest)


def spoils_buffers(change: Callable[[str, Tensor], Tensor]) -> Fault:
    def fault(request: Message, reply: Message) -> Sequence[Message]:
        if request.client != LIAR or request.stamp.exchange != "train":
            return [reply]
        spoilt = {name: change(name, leaf) for name, leaf in reply.group(BUFFERS).items()}
        return [replace(reply, arrays={**reply.arrays, **grouped(**{BUFFERS: spoilt})})]

    return fault


def test_batch_norm_is_bounded_too() -> None:
    model, images_ = MODELS["batch_norm"], images(4, sizes=(3, 13))
    far = spoils_buffers(lambda _, leaf: leaf + 1e6 if leaf.is_floating_point() else leaf)
    found = run(fv.FedAvg(), images_, far, model, rounds=2)
    assert shortened(found) == [[LIAR]] * 2
    assert all(float(b.abs().max()) < 10 for b in found.history.state.buffers.values())
    below = spoils_buffers(lambda name, leaf: -leaf if name.endswith("running_var") else leaf)
    found = run(fv.FedAvg(), images_, below, model, rounds=2)
    assert {(r.client, r.reason) for r in found.refused} == {(LIAR, Reason.NEGATIVE)}


@pytest.mark.parametrize("method", [*METHODS, COLLAPSED], ids=repr)
def test_the_memory_of_lengths_survives_a_restart(method: fv.Method) -> None:
    """After the restart a majority is dishonest: without stored lengths it has the median."""
    agreed, rules = agreement(method, data(), rounds=4), FederationSettings()
    clients, lies = local_clients(agreed, data()), times(1e4, (0, 1, 2), since=2)
    saved: dict[int, bytes] = {}

    def keep(done: int, make: Callable) -> None:
        saved[done] = pack_checkpoint(make())

    whole = federate(agreed, rules, LocalTransport(clients, lies), keep=keep)
    rest = federate(agreed, rules, LocalTransport(clients, lies), unpack_checkpoint(saved[2]))
    same_model(rest, whole)
    assert rest.notes.lengths == whole.notes.lengths
    assert shortened(rest) == shortened(whole)
    assert shortened(whole)[2] == [0, 1, 2]


def test_the_memory_of_lengths_is_short() -> None:
    found = run(fv.FedAvg(), data(), rounds=MEMORY + 3)
    assert len(found.notes.lengths[MODEL]) == MEMORY


@given(st.lists(st.floats(0, 1e9), max_size=9))
def test_median_length(lengths: list[float]) -> None:
    longer = sorted(v for v in lengths if v > 0)
    found = median_length(lengths)
    if not longer:
        assert found is None
    else:
        assert found == np.quantile(longer, 0.5, method="lower")


# -- the mean loss ---------------------------------------------------------------------------------
FAIRLOSS = [m for m in METHODS if m.uses_mean_loss] + [COLLAPSED, fv.FairLoss(3.0)]


@pytest.mark.parametrize("lie", [1e9, 1e3, 100.0])
@pytest.mark.parametrize("method", FAIRLOSS, ids=repr)
def test_a_lie_about_the_loss_does_not_lift_the_mean(method: fv.Method, lie: float) -> None:
    """It counts as the largest loss of the others, and no honest client ascends."""
    strict = {"mean_loss_bound": 1.0}
    honest, found = run(method, data(), rounds=4), run(method, data(), tells(lie), rules=strict,
                                                        rounds=4)  # fmt: skip
    others = torch.cat([found.history.loss[-2:, :LIAR], found.history.loss[-2:, LIAR + 1 :]], 1)
    assert float(found.history.state.mean_loss) <= float(others.max())
    assert not found.refused
    bare = run(method, data(), tells(lie), rules=BARE, rounds=4)
    assert float(bare.history.ascended.max()) >= 0.8
    assert float(found.history.ascended.max()) <= float(honest.history.ascended.max())
    if method.probes and not method.server_steps:  # all measure from the same a and g: a cancels
        assert max(distance(found, honest), distance(bare, honest)) < 1e-12
    else:
        assert distance(found, honest) < 0.1 * distance(bare, honest)


@pytest.mark.parametrize("lie", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("method", FAIRLOSS, ids=repr)
def test_other_lies_about_the_loss(method: fv.Method, lie: float) -> None:
    """A loss of zero is possible, and lowers the mean by no more than the client's part in it."""
    found = run(method, data(), tells(lie), rounds=2)
    expected = set() if lie == 0 else {(LIAR, Reason.LOSS)}
    assert {(r.client, r.reason) for r in found.refused} == expected
    assert bool(torch.isfinite(found.history.state.mean_loss))


losses = st.lists(st.floats(0, 1e9), min_size=1, max_size=12)


@given(losses, st.floats(1, 10), st.floats(0, 0.49))
def test_mean_loss(values: list[float], bound: float, liars: float) -> None:
    loss = torch.tensor(values, dtype=torch.float64)
    share = torch.full_like(loss, 1 / len(loss))
    rules = FederationSettings(mean_loss_bound=bound, liars=liars)
    found, k = float(mean_loss(loss, share, rules)), dishonest_among(len(values), liars)
    assert 2 * k < len(values)
    largest = sorted(values, reverse=True)[k]
    limit = bound * largest if k else max(values)
    assert found == pytest.approx(float(np.minimum(values, limit).mean()), rel=1e-9, abs=1e-300)
    if max(values) <= limit:
        assert found == float(share @ loss)


@pytest.mark.parametrize(
    ("clients", "share", "expected"),
    [(1, 0.2, 0), (2, 0.2, 0), (3, 0.2, 1), (5, 0.2, 1), (10, 0.2, 2), (30, 0.1, 3), (50, 0.1, 5),
     (5, 0.49, 2), (4, 0.49, 1), (7, 0.0, 0)],
)  # fmt: skip
def test_how_many_may_lie(clients: int, share: float, expected: int) -> None:
    assert dishonest_among(clients, share) == expected


# -- averages --------------------------------------------------------------------------------------
@pytest.mark.parametrize("m", [1, 2, 3, 5, 6])
def test_averages_by_hand(m: int) -> None:
    draw = torch.Generator().manual_seed(m)
    stacked = {"w": torch.randn(m, 3, 2, generator=draw, dtype=torch.float64)}
    weights = torch.full((m,), 1 / m, dtype=torch.float64)
    values = np.sort(stacked["w"].numpy(), axis=0)
    k = dishonest_among(m, 0.2)
    wanted = {"median": np.median(values, 0), "trimmed": values[k : m - k].mean(0),
              "mean": values.mean(0)}  # fmt: skip
    for average, expected in wanted.items():
        found = combination(FederationSettings(average=average))(weights, stacked)["w"]
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def ones(u: Tree) -> Tree:
    return tree_map(torch.ones_like, u)


def drawn(u: Tree) -> Tree:
    return tree_map(lambda x: torch.randn(x.shape, dtype=x.dtype), u)


LIES = {
    "huge": lambda u: scale(u, 1e6),
    "against": lambda u: scale(u, -10.0),
    "back": lambda u: scale(u, -1.0),
    "zero": lambda u: scale(u, 0.0),
    "ones": ones,
    "noise": drawn,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("average", ["trimmed", "median"])
@pytest.mark.parametrize("method", PLAIN, ids=lambda m: m.label)
def test_no_coordinate_leaves_the_range_of_the_honest(
    method: fv.Method, average: str, lie: str
) -> None:
    """Whatever one of five sends, without any other bound."""
    sent: list[Tree] = []

    def listens(request: Message, reply: Message) -> Sequence[Message]:
        if request.stamp.exchange == "train" and request.client != LIAR:
            sent.append(reply.group(MODEL))
        return moves(LIES[lie])(request, reply)

    torch.manual_seed(0)
    found = run(method, data(), listens, rules={**BARE, "average": average}, rounds=1)
    assert len(sent) == CLIENTS - 1
    for name, leaf in found.history.state.params.items():
        honest = torch.stack([tree[name] for tree in sent])
        assert bool((leaf >= honest.amin(0) - 1e-12).all())
        assert bool((leaf <= honest.amax(0) + 1e-12).all())


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (fv.AFL(), "AFL gives every client a weight of its own"),
        (fv.QFFL(1.0), "q-FFL gives every client a weight of its own"),
        (fv.AAggFF(), "AAggFF gives every client a weight of its own"),
        (fv.FedAvg(weights="size"), "give 'uniform'"),
        (fv.FairGrad(0.1, weights="size"), "give 'uniform'"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("average", ["trimmed", "median"])
def test_averages_are_refused_where_they_mean_nothing(
    method: fv.Method, average: str, complaint: str
) -> None:
    with pytest.raises(fv.BadInput, match=rf"federation\.average = '{average}'.*{complaint}"):
        run(method, data(), rules={"average": average})


@pytest.mark.parametrize(
    ("field", "value"),
    [("norm_bound", 0.5), ("norm_bound", float("nan")), ("mean_loss_bound", 0.0),
     ("average", "krum"), ("liars", 0.5), ("liars", -0.1)],
)  # fmt: skip
def test_settings_are_checked(field: str, value: object) -> None:
    with pytest.raises(fv.BadInput, match=rf"federation\.{field} = "):
        FederationSettings(**{field: value})
