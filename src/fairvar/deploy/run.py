"""A whole federation, round after round: from a model to its History, as `engine.train` does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace as with_fields
from torch import Tensor, nn

from fairvar.data.federation import Federation, Split
from fairvar.deploy.client import HELD_OUT
from fairvar.deploy.guard import Refusal
from fairvar.deploy.messages import ACCURACY, LOSS, MODEL, SAMPLES
from fairvar.deploy.notes import NAME, PARTS, Notes
from fairvar.deploy.server import Good, Server, Transport
from fairvar.deploy.settings import FederationSettings
from fairvar.deploy.summed import MeanTransport, SummingServer
from fairvar.engine.batches import Participation
from fairvar.engine.evaluate import Scores, Seen
from fairvar.engine.history import History
from fairvar.engine.kernels import Splits
from fairvar.engine.losses import LossFunction
from fairvar.engine.recorder import Checkpoint, check_tables, scored_keys
from fairvar.engine.run import Run
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.state import (
    DoesNotFit,
    Outcome,
    State,
    advance,
    check_fits,
    first_run,
    initial_state,
    one_run,
)
from fairvar.engine.train import KeepOne, Prepared, prepare, provenance
from fairvar.engine.trainer import Progress, Runs, train_rounds
from fairvar.methods.base import Method
from fairvar.tree import is_finite, squared_norm, subtract


@dataclass(frozen=True)
class Agreement:
    """What server and clients agree on before the first round."""

    model: nn.Module | str
    method: Method
    loss: str | LossFunction
    train: TrainSettings
    evaluate: EvaluateSettings
    clients: int
    input_shape: tuple[int, ...]
    classes: int | None  # None: regression


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
        self._note_samples(good)
        outcome = self.finish(made)
        # Clients need not send their losses, so the model says whether the run has diverged.
        finite = torch.tensor(is_finite(advance(state, outcome).params))
        outcome = replace(outcome, loss=made.loss, weights=made.weights, finite=finite).map(one_run)
        return outcome, None if splits is None else self._seen(state, good, splits)

    def scores(self, state: State, splits: Splits) -> dict[str, Scores]:
        good = self.server.evaluate(state.map(first_run))
        self._note_samples(good)
        return self._tables(good, splits)

    def _seen(self, before: State, good: Good, splits: Splits) -> Seen:
        norm = torch.full((1, self.run.clients), torch.nan, dtype=torch.float64)
        for i, reply in good.items():
            norm[0, i] = squared_norm(subtract(before.x, reply.group(MODEL))).double().sqrt()
        unknown = torch.full((1,), torch.nan, dtype=torch.float64)  # it never has all gradients
        return Seen(norm, unknown, self._tables(good, splits))

    def _tables(self, good: Good, splits: Splits) -> dict[str, Scores]:
        """Over all clients from the replies of those that answered; nan for the others."""
        nothing = torch.full((1, self.run.clients), torch.nan, dtype=torch.float64)
        scores = {split: Scores(nothing.clone(), nothing.clone()) for split in splits}
        for i, reply in good.items():
            for split, table in scores.items():
                table.loss[0, i] = reply.numbers.get(f"{split}/{LOSS}", torch.nan)
                table.accuracy[0, i] = reply.numbers.get(f"{split}/{ACCURACY}", torch.nan)
        return scores

    def _note_samples(self, good: Good) -> None:
        """How many samples the clients have: the server knows it from their replies only."""
        for i, reply in good.items():
            for part, counts in self.server.notes.samples.items():
                key = SAMPLES if part == "train" else f"{part}/{SAMPLES}"
                counts[i] = int(reply.numbers.get(key, counts[i]))


def federate(
    agreed: Agreement,
    rules: FederationSettings,
    transport: Transport,
    start: Checkpoint | None = None,
    progress: Progress | None = None,
    keep: KeepOne | None = None,
    finish: Callable[[Outcome], Outcome] = lambda outcome: outcome,
) -> Federated:
    """Train with the clients behind `transport`; continues from `start`. `finish` has the last word
    on what a round made (such as adding noise)."""
    started, settings = time.perf_counter(), agreed.train
    run = _server_run(agreed)
    start = start or Checkpoint(_fresh(run), None)
    notes = Notes.reopen(start.tables, agreed.clients)
    notes.typical_loss = max(notes.typical_loss, _loss_of_guessing(agreed))
    transport.keys |= {c: k for c, k in notes.keys.items() if c not in rules.rebind}
    server = _server(agreed, rules, transport, notes)
    kernel, when = Exchange(run, server, finish), agreed.evaluate
    runs = Runs(kernel, [start], _splits(agreed), when.local, all_answer=False)

    def with_notes(done: int, make: Callable[[], list[Checkpoint]]) -> None:
        if keep is not None:
            keep(done, lambda: _noted(make()[0], notes))

    train_rounds([runs], settings.rounds, when.every, progress, with_notes)
    seconds = time.perf_counter() - started
    birth = provenance(Prepared(run, transport.name), settings, seconds)
    birth["refused"] = dict(sorted(notes.reasons().items()))
    birth["weight_capped_rounds"] = sum(bool(note.limited) for note in notes.rounds)
    birth["norm_bounded_rounds"] = sum(bool(note.shortened) for note in notes.rounds)
    (made,) = runs.checkpoints()
    history = runs.recorder.history(made, 0, _samples(agreed, notes), birth)
    return Federated(history, notes)


def _server(
    agreed: Agreement, rules: FederationSettings, transport: Transport, notes: Notes
) -> Server:
    kind: type[Server] = SummingServer if isinstance(transport, MeanTransport) else Server
    settings = agreed.train
    return kind(
        method=agreed.method,
        clients=agreed.clients,
        lr=settings.lr,
        participation=Participation.build(
            agreed.clients, settings.seed, settings.participation, settings.participants
        ),
        settings=rules,
        transport=transport,
        notes=notes,
        clip_norm=settings.clip_norm,
    )


def first_state(agreed: Agreement) -> State:
    """Where a run starts that starts from nothing."""
    return _fresh(_server_run(agreed))


def check_start(agreed: Agreement, start: Checkpoint) -> None:
    """DoesNotFit unless `federate` can continue from this checkpoint of an earlier attempt."""
    check_fits(start.state, first_state(agreed), agreed.train.rounds)
    scored = scored_keys(_splits(agreed), agreed.evaluate)
    check_tables(start._replace(tables=start.tables or {}), agreed.clients, scored)
    try:
        notes = Notes.reopen(start.tables, agreed.clients)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DoesNotFit(f"its notes on the federation are not ours: {error}") from None
    if {part: len(sizes) for part, sizes in notes.samples.items()} != dict.fromkeys(
        PARTS, agreed.clients
    ):
        raise DoesNotFit("its notes on the federation are of other clients")


def _fresh(run: Run) -> State:
    return initial_state(run.method, run.task.params, run.task.buffers, run.clients)


def _server_run(agreed: Agreement) -> Run:
    """The engine's view of the run, on a few blank samples: the server has no data."""
    blank = torch.zeros(4, *agreed.input_shape)
    targets = torch.zeros(4, dtype=torch.float32 if agreed.classes is None else torch.int64)
    counts = torch.zeros(agreed.clients, dtype=torch.int64).index_fill(0, torch.tensor(0), 4)
    data = Federation(Split(blank, targets, counts), classes=agreed.classes)
    settings = with_fields(agreed.train, device="cpu", engine="reference")
    return prepare(agreed.model, data, agreed.method, agreed.loss, settings, alone=True).run


def _loss_of_guessing(agreed: Agreement) -> float:
    """The least that counts as a typical loss. (That of a model that starts well trained is tiny:
    no measure for those that it serves badly.)"""
    return log(agreed.classes or 1)


def _noted(made: Checkpoint, notes: Notes) -> Checkpoint:
    return made._replace(tables={**(made.tables or {}), NAME: notes.table()})


def _splits(agreed: Agreement) -> Splits:
    return tuple(split for split in agreed.evaluate.splits if split in HELD_OUT)


def _samples(agreed: Agreement, notes: Notes) -> dict[str, Tensor]:
    """Every client's number of samples, as far as it is known (0 otherwise), in the splits that the
    tables are about."""
    seen = {"train", *agreed.evaluate.splits}
    return {s: torch.tensor(n) for s, n in notes.samples.items() if s in seen or any(n)}
