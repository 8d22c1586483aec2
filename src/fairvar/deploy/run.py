"""A whole federation, round after round: from a model to its History, as `engine.train` does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace as with_fields
from torch import nn

from fairvar.data.federation import Federation, Split
from fairvar.deploy.client import HELD_OUT
from fairvar.deploy.guard import Refusal
from fairvar.deploy.messages import ACCURACY, LOSS, MODEL, SAMPLES
from fairvar.deploy.notes import NAME, PARTS, Notes
from fairvar.deploy.server import Good, Server, Transport
from fairvar.deploy.settings import FederationSettings
from fairvar.deploy.summed import MeanTransport, SummingServer
from fairvar.engine.evaluate import Scores
from fairvar.engine.history import History, Key
from fairvar.engine.losses import LossFunction
from fairvar.engine.participation import Participation
from fairvar.engine.record import Book, Evaluation, check_tables
from fairvar.engine.run import Run
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.state import DoesNotFit, Outcome, State, advance, check_fits, initial_state
from fairvar.engine.train import (
    Checkpoint,
    Keep,
    Prepared,
    Progress,
    birth_certificate,
    prepare,
)
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


def federate(
    agreed: Agreement,
    rules: FederationSettings,
    transport: Transport,
    start: Checkpoint | None = None,
    progress: Progress | None = None,
    keep: Keep | None = None,
    finish: Callable[[Outcome], Outcome] = lambda outcome: outcome,
) -> Federated:
    """Train with the clients behind `transport`; continues from `start`. `finish` has the last word
    on what a round made (such as adding noise)."""
    started, settings = time.perf_counter(), agreed.train
    run = _server_run(agreed)
    state = _fresh(run) if start is None else start.state
    tables = None if start is None else start.tables
    book, notes = Book(run, tables, state.round), Notes.reopen(tables, agreed.clients)
    notes.typical_loss = max(notes.typical_loss, _loss_of_guessing(agreed))
    transport.keys |= {c: k for c, k in notes.keys.items() if c not in rules.rebind}
    kind: type[Server] = SummingServer if isinstance(transport, MeanTransport) else Server
    server = kind(
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
    for t in range(state.round, settings.rounds):
        due = (t + 1) % agreed.evaluate.every == 0 or t + 1 == settings.rounds
        outcome, good = server.round(state, score=due and agreed.evaluate.local)
        before, state = state, advance(state, finish(outcome))
        if not is_finite(state.params):
            book.diverged_at, state = t, before
            break
        book.write(outcome, t)
        if due:
            seen = {"local": good, "global": server.evaluate(state)}
            book.write_evaluation(t + 1, _evaluation(agreed, before, seen, notes.samples))
        if keep is not None:
            keep(t + 1, partial(_checkpoint, state, book, notes))
        if progress is not None:
            progress(t + 1, settings.rounds)
    splits: set[str] = {"train", *agreed.evaluate.splits}
    book.run = replace(run, federation=_of_sizes(run.federation, notes.samples, splits))
    prepared = Prepared(run, transport.name)
    birth = birth_certificate(prepared, settings, time.perf_counter() - started)
    birth["refused"] = dict(sorted(notes.reasons().items()))
    birth["weight_capped_rounds"] = sum(bool(note.limited) for note in notes.rounds)
    birth["norm_bounded_rounds"] = sum(bool(note.shortened) for note in notes.rounds)
    return Federated(book.close(state, birth), notes)


def first_state(agreed: Agreement) -> State:
    """Where a run starts that starts from nothing."""
    return _fresh(_server_run(agreed))


def check_start(agreed: Agreement, start: Checkpoint) -> None:
    """DoesNotFit unless `federate` can continue from this checkpoint of an earlier attempt."""
    run, tables = _server_run(agreed), start.tables or {}
    check_fits(start.state, _fresh(run), agreed.train.rounds)
    check_tables(tables, agreed.clients, start.state.round, _scored(agreed))
    try:
        notes = Notes.reopen(tables, agreed.clients)
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


def _checkpoint(state: State, book: Book, notes: Notes) -> Checkpoint:
    return Checkpoint(state, {**book.tables(), NAME: notes.table()})


def _scored(agreed: Agreement) -> list[Key]:
    models = ("global", "local") if agreed.evaluate.local else ("global",)
    return [(split, m) for split in agreed.evaluate.splits if split in HELD_OUT for m in models]


def _evaluation(
    agreed: Agreement, before: State, seen: Mapping[str, Good], samples: dict[str, list[int]]
) -> Evaluation:
    """Tables over all clients from the replies of those that answered; nan for the others."""
    nothing = torch.full((agreed.clients,), torch.nan, dtype=torch.float64)
    scores: dict[Key, Scores] = {
        key: Scores(nothing.clone(), nothing.clone()) for key in _scored(agreed)
    }
    norm = nothing.clone()
    for model, good in seen.items():
        for i, reply in good.items():
            samples["train"][i] = int(reply.numbers[SAMPLES])
            if model == "local":
                moved = subtract(before.x, reply.group(MODEL))
                norm[i] = squared_norm(moved).double().sqrt()
            for split in HELD_OUT:
                if f"{split}/{SAMPLES}" not in reply.numbers:
                    continue
                samples[split][i] = int(reply.numbers[f"{split}/{SAMPLES}"])
                if (split, model) in scores:
                    table, found = scores[split, model], reply.numbers
                    table.loss[i] = found.get(f"{split}/{LOSS}", torch.nan)
                    table.accuracy[i] = found.get(f"{split}/{ACCURACY}", torch.nan)
    return Evaluation(scores, nothing[0].clone(), norm)


def _of_sizes(blank: Federation, samples: Mapping[str, list[int]], seen: Set[str]) -> Federation:
    """Everybody's number of samples, as far as they told (0 otherwise), in the splits that the
    run's tables are about; no samples."""
    told = {s: n for s, n in samples.items() if s in seen or any(n)}
    kept = {s: replace(blank.train, counts=torch.tensor(n)) for s, n in told.items()}
    return replace(blank, **kept)  # type: ignore[arg-type]
