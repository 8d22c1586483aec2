"""Clients that do not answer, come late, leave and come back; a server that is killed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from federations import TINY as CLIENTS
from federations import agreement, run
from federations import tiny as data

import fairvar as fv
from checks import METHODS, OPTIONS
from fairvar.common import rng
from fairvar.deploy.client import Message
from fairvar.deploy.guard import FederationSettings
from fairvar.deploy.run import LocalTransport, federate, local_clients
from fairvar.engine.train import Checkpoint
from fairvar.runs.formats import pack_checkpoint, unpack_checkpoint

CROSS_DEVICE = fv.AAggFF(setting="cross_device", variant="paper")


@pytest.mark.parametrize("percent", [0, 10, 30, 50, 80, 100])
@pytest.mark.parametrize("method", [*METHODS, CROSS_DEVICE], ids=repr)
def test_drop_out(method: fv.Method, percent: int) -> None:
    """Every reply is lost with this probability: the run finishes, or stops where all are lost."""
    draw = rng.stream(0, "drop-out", percent)

    def lossy(request: Message, reply: Message) -> Sequence[Message]:
        return [reply] if draw.random() >= percent / 100 else []

    if percent == 100:
        with pytest.raises(fv.RunFailed, match="given up after 3 attempts") as caught:
            run(method, data(), lossy, rounds=3, rules={"repeats": 2})
        assert caught.value.exit_code == 3
        return
    found = run(method, data(), lossy, rounds=3, rules={"repeats": 50})
    assert found.history.rounds == 3
    assert all(bool(torch.isfinite(p).all()) for p in found.history.state.params.values())
    assert (percent == 0) == (not found.refused)
    if not isinstance(method, fv.QFFL):
        total = found.history.weights.sum(1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-12, atol=0)


class Late:
    """A reply that comes one exchange too late: after the next request to the same client."""

    def __init__(self, client: int) -> None:
        self.client = client
        self.waiting: list[Message] = []

    def __call__(self, request: Message, reply: Message) -> Sequence[Message]:
        if request.client != self.client:
            return [reply]
        came, self.waiting = self.waiting, [reply]
        return came


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_what_comes_too_late_is_not_used(method: fv.Method) -> None:
    found = run(method, data(), Late(2), rounds=3)
    silent = run(method, data(), lambda q, r: [r] if q.client != 2 else [], rounds=3)
    for name, leaf in silent.history.state.params.items():
        assert torch.equal(found.history.state.params[name], leaf)
    assert {r.reason.value for r in found.refused} == {"no reply", "stale"}


class ComesAndGoes(LocalTransport):
    """Who is there changes from round to round."""

    def __init__(self, clients: list, there: list[list[int]]) -> None:
        super().__init__(clients)
        self.there = iter(there)

    def present(self, at_least: int, seconds: float) -> Sequence[int]:
        return next(self.there, list(self.clients))


def test_weights_follow_the_client_not_its_place() -> None:
    """AFL's weights of clients that are away wait for them, in 30 random schedules."""
    agreed = agreement(fv.AFL(step=1.0), data(), rounds=4)
    clients = local_clients(agreed, data())
    for case in range(30):
        draw = rng.stream(case, "schedule")
        there = [sorted(draw.choice(CLIENTS, draw.integers(1, 6), replace=False).tolist())
                 for _ in range(5)]  # fmt: skip
        # After rounds two and four the server also asks who can evaluate.
        order = [there[0], there[1], [0, 1], there[2], there[3], [0, 1]]
        found = federate(agreed, FederationSettings(), ComesAndGoes(clients, order)).history
        before = fv.AFL().initial_memory(CLIENTS)["p"]
        assert [(row != 0).nonzero().flatten().tolist() for row in found.loss.nan_to_num()] == [
            there[t] for t in range(4)
        ]
        away = [i for i in range(CLIENTS) if not any(i in row for row in there[:4])]
        assert torch.equal(found.state.memory["p"][away], before[away])


@pytest.mark.parametrize("method", METHODS + OPTIONS, ids=repr)
def test_a_killed_server_goes_on_from_its_last_round(method: fv.Method) -> None:
    """Through the bytes of a checkpoint, with fewer clients than all: the same bits."""
    agreed = agreement(method, data(), rounds=4, participants=3)
    rules, clients = FederationSettings(), local_clients(agreed, data())
    saved: dict[int, bytes] = {}

    def keep(done: int, make: object) -> None:
        saved[done] = pack_checkpoint(make())  # type: ignore[operator]

    whole = federate(agreed, rules, LocalTransport(clients), keep=keep).history
    start: Checkpoint = unpack_checkpoint(saved[2])
    rest = federate(agreed, rules, LocalTransport(clients), start).history
    assert rest.rounds == 4
    for name, leaf in whole.state.params.items():
        assert torch.equal(rest.state.params[name], leaf)
    assert torch.equal(rest.weights, whole.weights)


def test_a_resumed_run_has_one_record() -> None:
    """What was refused, who took part and who has how many samples, also from before the kill."""
    agreed = agreement(fv.AFL(step=1.0), data(), rounds=4)  # evaluated after rounds two and four
    rules, clients = FederationSettings(), local_clients(agreed, data())
    saved: dict[int, bytes] = {}

    def keep(done: int, make: object) -> None:
        saved[done] = pack_checkpoint(make())  # type: ignore[operator]

    def fault(request: Message, reply: Message) -> Sequence[Message]:
        """Client 1 is lost in round 0, client 4 from round 2 on."""
        t, client = request.stamp.round, request.client
        gone = (client == 1 and t == 0) or (client == 4 and t >= 2)
        return [] if gone and request.stamp.exchange == "train" else [reply]

    whole = federate(agreed, rules, LocalTransport(clients, fault), keep=keep)
    assert len(whole.refused) == 3
    for done in (2, 4):  # 4: killed before the finished run was stored
        start = unpack_checkpoint(saved[done])
        there = [c for c in clients if c.number != 4]
        rest = federate(agreed, rules, LocalTransport(there, fault), start)
        lost = [r for r in whole.refused if r.round < done]
        assert rest.refused == lost
        assert rest.history.provenance["refused"] == {"no reply": len(lost)}
        assert [n.clients for n in rest.notes.rounds] == [n.clients for n in whole.notes.rounds]
        assert torch.equal(rest.history.samples["train"], whole.history.samples["train"])


def test_a_weight_that_is_cut_is_recorded() -> None:
    """AFL with a long step gives nearly all weight to the worst-off client."""
    cut = run(fv.AFL(step=100.0), data(), rounds=2)
    first = cut.notes.rounds[0]
    assert first.limited == [int(cut.history.weights[0].argmax())]
    assert float(cut.history.weights[0].max()) == pytest.approx(0.5)
    assert cut.history.provenance["weight_capped_rounds"] == 2
    free = run(fv.AFL(step=100.0), data(), rounds=2, rules={"weight_cap": 1.0})
    assert [note.limited for note in free.notes.rounds] == [[], []]
    assert float(free.history.weights[0].max()) > 0.9


def test_too_few_clients_end_the_run() -> None:
    with pytest.raises(fv.RunFailed, match="5 clients are available, 6 are needed"):
        run(fv.FedAvg(), data(), rules={"min_replies": 6, "repeats": 0})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("deadline", 0.0),
        ("min_replies", 0),
        ("repeats", -1),
        ("weight_cap", 0.2),
        ("loss_cap", 0.5),
    ],
)
def test_settings_are_checked(field: str, value: float) -> None:
    with pytest.raises(fv.BadInput, match=rf"federation\.{field} = "):
        FederationSettings(**{field: value})
