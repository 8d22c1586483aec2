"""All rounds of a deployment, from a model to its History, with the trainer of simulations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace as with_fields
from torch import Tensor

from fairvar.common.tree import Tree, squared_norm, subtract
from fairvar.data.federation import Federation, Split
from fairvar.deploy.client import (
    ACCURACY,
    HELD_OUT,
    LOSS,
    METRIC,
    MODEL,
    PERSONAL,
    Agreement,
    Client,
    Message,
    sends_score,
)
from fairvar.deploy.guard import (
    NAME,
    PARTS,
    Arrival,
    BadMessage,
    FederationSettings,
    Notes,
    Reason,
    Refusal,
)
from fairvar.deploy.server import Good, MeanTransport, Server, SummingServer, Transport
from fairvar.engine.batches import Participation
from fairvar.engine.evaluate import Scores, Seen
from fairvar.engine.history import History, Key
from fairvar.engine.kernels import Splits
from fairvar.engine.recorder import Checkpoint, check_tables, scored_keys
from fairvar.engine.run import Run
from fairvar.engine.state import (
    DoesNotFit,
    Outcome,
    State,
    check_fits,
    first_run,
    initial_state,
    one_run,
)
from fairvar.engine.train import Prepared, prepare, provenance
from fairvar.engine.trainer import Runs, train_rounds
from fairvar.errors import FairvarError
from fairvar.methods.base import Method


class Federated(NamedTuple):
    history: History
    notes: Notes

    @property
    def refused(self) -> list[Refusal]:
        return self.notes.refused


@dataclass(frozen=True)
class Exchange:
    """The kernel of a federation: a round is an exchange of messages with its clients."""

    run: Run
    server: Server
    finish: Callable[[Outcome], Outcome]

    @property
    def methods(self) -> Sequence[Method]:
        return [self.run.method]

    def round(self, state: State, t: int, splits: Splits | None) -> tuple[Outcome, Seen | None]:
        state = state.map(first_run)
        made, good = self.server.round(state, score=splits is not None)
        finished = replace(self.finish(made), loss=made.loss, weights=made.weights)
        outcome = replace(finished, losses_known=False).map(one_run)
        if splits is None:
            return outcome, None
        norm = torch.full((1, self.run.clients), torch.nan, dtype=torch.float64)
        for i, reply in good.items():
            norm[0, i] = squared_norm(subtract(state.x, reply.group(MODEL))).double().sqrt()
        # The server does not have all gradients.
        unknown = torch.full((1,), torch.nan, dtype=torch.float64)
        return outcome, Seen(norm, unknown, self._tables(good, splits))

    def scores(self, state: State, splits: Splits) -> dict[Key, Scores]:
        good = self.server.evaluate(state.map(first_run))
        models = {"global": ""}
        if self.run.method.personal is not None:
            models["personal"] = f"{PERSONAL}/"
        return {
            (split, model): found
            for model, mark in models.items()
            for split, found in self._tables(good, splits, mark).items()
        }

    def _tables(self, good: Good, splits: Splits, mark: str = "") -> dict[str, Scores]:
        """Scores over all clients; NaN for those that did not answer."""
        metric = self.run.task.metric

        def table(split: str, name: str) -> Tensor:
            found = torch.full((1, self.run.clients), torch.nan, dtype=torch.float64)
            for i, reply in good.items():
                found[0, i] = reply.numbers.get(f"{mark}{split}/{name}", torch.nan)
            return found

        return {
            split: Scores.build(
                metric,
                table(split, LOSS),
                table(split, ACCURACY),
                table(split, METRIC) if sends_score(metric) else None,
            )
            for split in splits
        }


def federate(
    agreed: Agreement,
    rules: FederationSettings,
    transport: Transport,
    start: Checkpoint | None = None,
    keep: Callable[[int, Callable[[], Checkpoint]], None] | None = None,
    finish: Callable[[Outcome], Outcome] = lambda outcome: outcome,
) -> Federated:
    """Train with the clients behind `transport`; continues from `start`. `finish` post-processes
    each Outcome, e.g. adds noise."""
    started, settings = time.perf_counter(), agreed.train
    run = _server_run(agreed)
    fresh = first_state(agreed, run)
    if start is None:
        start = Checkpoint(fresh, None)
    else:
        start = start._replace(state=check_fits(start.state, fresh, settings.rounds))
    notes = Notes.reopen(start.tables, agreed.clients)
    # At least the loss of guessing: the loss of a model that starts well trained is tiny, and would
    # make the limit on reported losses too strict for clients whose loss is large.
    notes.typical_loss = max(notes.typical_loss, log(agreed.classes or 1))
    transport.keys |= {c: k for c, k in notes.keys.items() if c not in rules.rebind}
    transport.names |= notes.names
    kind: type[Server] = SummingServer if isinstance(transport, MeanTransport) else Server
    server = kind(agreed, rules, transport, notes)
    if agreed.method.personal is not None and not notes.training:
        server.begin_personal(start.state)
    kernel, when = Exchange(run, server, finish), agreed.evaluate
    runs = Runs(kernel, [start], _splits(agreed), when.local, all_answer=False)

    def with_notes(done: int, make: Callable[[], list[Checkpoint]]) -> None:
        def noted() -> Checkpoint:
            (made,) = make()
            return made._replace(tables={**(made.tables or {}), NAME: notes.table()})

        if keep is not None:
            keep(done, noted)

    train_rounds([runs], settings.rounds, when.every, None, with_notes)
    seconds = time.perf_counter() - started
    origin = provenance(Prepared(run, transport.name), settings, seconds)
    origin["refused"] = dict(sorted(notes.reasons().items()))
    origin["weight_capped_rounds"] = sum(bool(note.limited) for note in notes.rounds)
    origin["norm_bounded_rounds"] = sum(bool(note.shortened) for note in notes.rounds)
    (made,) = runs.checkpoints()
    history = runs.recorder.history(made, 0, _samples(agreed, notes), origin)
    return Federated(history, notes)


def first_state(agreed: Agreement, run: Run | None = None) -> State:
    """The initial state of a new run, without personal models, which clients keep."""
    run = run or _server_run(agreed)
    task, optimiser = run.task, run.optimiser
    state = initial_state(run.method, task.params, task.buffers, run.clients, optimiser)
    return replace(state, personal=None)


def check_start(agreed: Agreement, start: Checkpoint) -> None:
    """DoesNotFit unless `federate` can continue from this checkpoint of an earlier attempt."""
    check_fits(start.state, first_state(agreed), agreed.train.rounds)
    scored = scored_keys(_splits(agreed), agreed.evaluate, agreed.method)
    train = agreed.train
    who = Participation.build(agreed.clients, train.seed, train.participation, train.participants)
    check_tables(start._replace(tables=start.tables or {}), who, scored, agreed.metric)
    try:
        notes = Notes.reopen(start.tables, agreed.clients)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DoesNotFit(f"its notes on the federation cannot be read: {error}") from None
    lengths = {part: len(sizes) for part, sizes in notes.samples.items()}
    if lengths != dict.fromkeys(PARTS, agreed.clients):
        raise DoesNotFit("its notes on the federation are of other clients")


def _server_run(agreed: Agreement) -> Run:
    """The `Run` of the server, on a few blank samples, because the server has no data."""
    blank = agreed.like
    if blank is None:
        targets = torch.zeros(4, dtype=torch.float32 if agreed.classes is None else torch.int64)
        blank = Split(torch.zeros(4, *agreed.input_shape), targets, torch.tensor([4]))
    counts = torch.tensor([len(blank.y)] + [0] * (agreed.clients - 1))
    data = Federation(replace(blank, counts=counts), classes=agreed.classes)
    settings = with_fields(agreed.train, device="cpu", engine="reference")
    given = (agreed.model, data, agreed.method, agreed.loss, settings)
    return prepare(*given, alone=True, metric=agreed.evaluate.metric).run


def _splits(agreed: Agreement) -> Splits:
    return tuple(split for split in agreed.evaluate.splits if split in HELD_OUT)


def _samples(agreed: Agreement, notes: Notes) -> dict[str, Tensor]:
    """Every client's number of samples in "train" and the evaluated splits; 0 where unknown."""
    seen = {"train", *agreed.evaluate.splits}
    return {s: torch.tensor(n) for s, n in notes.samples.items() if s in seen or any(n)}


Fault = Callable[[Message, Message], Sequence[Message]]  # (request, reply) → what arrives


def honest(request: Message, reply: Message) -> Sequence[Message]:
    return [reply]


class LocalTransport:
    """Calls clients in this process, one after another, without a deadline. `fault` maps each
    request and reply to what arrives, for tests and measurements of faults and attacks."""

    name = "local"

    def __init__(self, clients: Sequence[Client], fault: Fault = honest) -> None:
        self.clients = {c.number: c for c in clients}
        self.keys: dict[int, str] = {}
        self.names: dict[int, str] = {}
        self.fault = fault

    def present(self, at_least: int, seconds: float) -> Sequence[int]:
        return list(self.clients)

    def exchange(
        self, requests: Sequence[Message], like: Tree, seconds: float
    ) -> Iterator[Arrival]:
        for request in requests:
            try:
                reply = self.clients[request.client].answer(request)
            except FairvarError as error:
                yield Arrival(request.client, BadMessage(Reason.ERROR, str(error)))
                continue
            for message in self.fault(request, reply):
                yield Arrival(request.client, message)


def local_clients(agreed: Agreement, federation: Federation) -> list[Client]:
    """One `Client` for each client of a federation, with its own data only."""
    return [Client(i, federation.only([i]), agreed) for i in range(federation.clients)]
