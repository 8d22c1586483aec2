"""Runs that differ in numbers and seeds only, trained together.

Their models are affine and share the samples, so a round of all runs is a few products of large
matrices (`linear.py`). With full batches all seeds do the same; runs that draw samples share them
within a seed, and the seeds take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor, nn

from fairvar.data.federation import Federation
from fairvar.engine.batches import Schedule
from fairvar.engine.dual import affine_names
from fairvar.engine.history import History, Tables, history_from_tables
from fairvar.engine.linear import Group, grams_pay
from fairvar.engine.linear_steps import StepPlan
from fairvar.engine.losses import LOSSES, LossFunction
from fairvar.engine.record import check_tables, scored_keys
from fairvar.engine.run import Run, arithmetic
from fairvar.engine.server import Server
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.state import DoesNotFit, State, check_fits, initial_state
from fairvar.engine.together import GOING, Lockstep
from fairvar.engine.train import (
    Checkpoint,
    Progress,
    birth_certificate,
    prepare,
    wants_capture,
)
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.models import build
from fairvar.tree import Tree, is_finite


@dataclass(frozen=True)
class Member:
    """One run of a grid; `start` is a checkpoint that a grid has made, or a state alone."""

    model: nn.Module | str
    method: Method
    settings: TrainSettings
    start: Checkpoint | None = None

    @property
    def before(self) -> Tables:
        """What was observed before `start`."""
        return {} if self.start is None or self.start.tables is None else self.start.tables

    @property
    def diverged_at(self) -> int:
        """Of a run that is carried along to the end because others still train."""
        tables = None if self.start is None else self.start.tables
        return (
            GOING if tables is None or "diverged_at" not in tables else int(tables["diverged_at"])
        )


# Copies of (outputs, samples) and of the parameters that a round holds at once, by counting.
COLUMNS, COPIES = 10, 8

KeepAll = Callable[[int, Callable[[], list[Checkpoint]]], None]  # (rounds done, make checkpoints)


def train_grid(
    members: Sequence[Member],
    federation: Federation,
    loss: str | LossFunction,
    when: EvaluateSettings,
    progress: Progress | None = None,
    keep: KeepAll | None = None,
) -> list[History]:
    """The histories of the single runs, at evaluated rounds, within rounding."""
    started = time.perf_counter()
    grid = Grid(members, federation, loss)
    with arithmetic(members[0].settings.precision, grid.run.device):
        grid.check_tables(when)
        grid.train(when, progress, keep)
    return grid.close((time.perf_counter() - started) / len(members))


class Grid:
    """The members, and those of them that draw the same batches in lockstep."""

    def __init__(
        self, members: Sequence[Member], federation: Federation, loss: str | LossFunction
    ) -> None:
        self.members, first = list(members), members[0]
        plain = msgspec.structs.replace(first.settings, capture=False)
        self.prepared = prepare(first.model, federation, first.method, loss, plain)
        self.run = self.prepared.run
        if self.prepared.path != "linear" or not _alike(members):
            raise BadInput("these runs cannot be trained together; train them one by one")
        seeds = [0 if self.run.schedule.full_batch else m.settings.seed for m in members]
        self.places = [[i for i, s in enumerate(seeds) if s == seed] for seed in sorted(set(seeds))]
        self.parts = [self._lockstep([members[i] for i in places]) for places in self.places]

    def _lockstep(self, members: list[Member]) -> Lockstep:
        run, settings = self.run, members[0].settings
        schedule = Schedule.build(
            run.schedule.split,
            settings.batch_size,
            settings.local_steps,
            settings.local_epochs,
            settings.seed,
            batch_norm=False,
        )
        rates = [m.settings.lr for m in members]
        lr = torch.tensor(rates, dtype=torch.float64, device=run.device)[:, None]
        group = Group(
            replace(run, schedule=schedule),
            [m.method for m in members],
            lr if len(members) > 1 else rates[0],
            run.dual,
            StepPlan(schedule, run.dual.groups, run.dual.train.layout),
        )
        states = [self._start(member) for member in members]
        return Lockstep(group, states, [m.diverged_at for m in members], self.captures)

    @property
    def captures(self) -> bool:
        """Whether rounds are recorded: the members' models do not matter for that."""
        return wants_capture(self.members[0].settings, self.run)

    def _start(self, member: Member) -> State:
        params = _first_parameters(self.run, member)
        fresh = initial_state(member.method, params, {}, self.run.clients)
        if member.start is None:
            return fresh
        check_fits(member.start.state, fresh, member.settings.rounds)
        return member.start.state.to(self.run.device)

    def check_tables(self, when: EvaluateSettings) -> None:
        """Those of checkpoints: they come from files."""
        keys = scored_keys(self.run, when)
        for member in self.members:
            if member.start is not None and member.start.tables is not None:
                check_tables(member.before, self.run.clients, member.start.state.round, keys)
                if len(member.before["loss"]) != len(member.before["evaluated"]):
                    raise DoesNotFit("its tables have rows of rounds that were not evaluated")

    def train(
        self, when: EvaluateSettings, progress: Progress | None, keep: KeepAll | None
    ) -> None:
        rounds = self.members[0].settings.rounds
        for t in range(max(part.first_round for part in self.parts), rounds):
            due = (t + 1) % when.every == 0 or t + 1 == rounds
            for part in self.parts:
                part.step(when if due else None)
            if keep is not None:
                keep(t + 1, self.checkpoints)
            if progress is not None:
                progress(t + 1, rounds)
            if due and not any(bool(part.going.any()) for part in self.parts):
                return

    def checkpoints(self) -> list[Checkpoint]:
        """Of each member, in order."""
        found: dict[int, Checkpoint] = {}
        for places, part in zip(self.places, self.parts, strict=True):
            made = zip(places, part.states(), part.tables(), part.diverged_at.tolist(), strict=True)
            for i, state, tables, diverged_at in made:
                whole = _continued(self.members[i].before, tables, self.run.clients)
                whole["counters"] = _counters(self.members[i], part, state.round)
                whole["diverged_at"] = torch.tensor(diverged_at)
                found[i] = Checkpoint(state, whole)
        return [found[i] for i in range(len(self.members))]

    def close(self, seconds: float) -> list[History]:
        kept = zip(self.members, self.checkpoints(), strict=True)
        return [self._history(member, made, seconds) for member, made in kept]

    def _history(self, member: Member, made: Checkpoint, seconds: float) -> History:
        tables = made.tables or {}
        diverged_at, evaluated = int(tables["diverged_at"]), tables["evaluated"]
        if diverged_at == GOING and not is_finite(made.state.params):
            diverged_at = made.state.round
        unseen = 0 if member.start is None or member.before else member.start.state.round
        birth = birth_certificate(self.prepared, member.settings, seconds)
        return history_from_tables(
            tables,
            method=member.method,
            state=made.state,
            rounds=made.state.round - unseen,
            observed=evaluated - 1,
            samples={name: s.counts for name, s in self.run.federation.splits.items()},
            classifies=self.run.task.classifies,
            diverged_at=None if diverged_at == GOING else diverged_at,
            birth=birth | {"together": len(self.members), "captured": self.captures},
        )


def trains_together(members: Sequence[Member], federation: Federation, loss: str) -> bool:
    """Whether these runs may be given to `train_grid`, and gain by it."""
    first = members[0]
    known = len(members) > 1 and loss in LOSSES and _alike(members)
    if not known or first.settings.engine not in ("auto", "linear"):
        return False
    module = first.model if isinstance(first.model, nn.Module) else _build(first, federation)
    if affine_names(module, federation.train.x) is None:
        return False
    settings = msgspec.structs.replace(first.settings, capture=False)
    try:
        prepared = prepare(first.model, federation, first.method, loss, settings)
    except BadInput:
        return False  # whoever trains the first run says why
    fits = prepared.path == "linear" and grams_pay(prepared.run, len(members))
    return fits and all(
        _vmaps(prepared.run, [m.method.at_round(t) for m in members]) for t in (0, 1)
    )


def members_that_fit(members: Sequence[Member], federation: Federation) -> int:
    """How many such runs may train together in a fixed share of a machine's memory."""
    first = members[0]
    module = first.model if isinstance(first.model, nn.Module) else _build(first, federation)
    weight = next(module.parameters())
    train, *others = (len(split.y) for split in federation.splits.values())
    columns = COLUMNS * (max(train, *others) if others else train)
    memory = sum(v.numel() for v in first.method.initial_memory(federation.clients).values())
    floats = len(weight) * columns + COPIES * (weight.numel() + 2 * memory)
    width = 8 if first.settings.dtype == "float64" else 4
    budget = (16 if first.settings.device.startswith("cuda") else 1) << 30
    return max(1, budget // (floats * width))


def _build(member: Member, federation: Federation) -> nn.Module:
    assert isinstance(member.model, str)
    classes, seed = federation.classes or 1, member.settings.seed
    return build(member.model, federation.input_shape, classes, seed)


def _alike(members: Sequence[Member]) -> bool:
    """They differ in numbers, learning rates and seeds only, and have done as many rounds."""

    def kind(member: Member) -> tuple[object, ...]:
        settings = msgspec.structs.replace(member.settings, lr=1.0, seed=0)
        model = member.model if isinstance(member.model, str) else repr(member.model)
        return settings, member.method.form, model

    rounds = {
        0 if m.start is None else m.start.state.round for m in members if m.diverged_at == GOING
    }
    return all(kind(m) == kind(members[0]) for m in members) and len(rounds) <= 1


def _vmaps(run: Run, methods: list[Method]) -> bool:
    """A method from elsewhere may decide by its numbers what to do; then each run needs its own."""
    numbers = {
        name: torch.tensor(
            [m.numbers[name] for m in methods], dtype=torch.float64, device=run.device
        )
        for name in methods[0].numbers
    }
    server = Server(methods[0], numbers, run.share, run.ids)
    loss = torch.linspace(1, 2, run.clients, dtype=torch.float64, device=run.device)
    losses = loss.expand(len(methods), -1)
    memory = {k: v.to(run.device).expand(len(methods), *v.shape)
              for k, v in methods[0].initial_memory(run.clients).items()}  # fmt: skip
    try:
        server.coefficients(losses, losses[:, 0])
        server.weigh(memory, losses)
        server.normaliser(losses, losses, losses[:, :1])
        return all(m.form == methods[0].form for m in methods)
    except (RuntimeError, TypeError, ValueError):
        return False


def _first_parameters(run: Run, member: Member) -> Tree:
    """Only these differ between the members' models, so the others need not be checked again."""
    model = member.model
    if isinstance(model, str):
        shape, classes = run.federation.input_shape, run.federation.classes or 1
        model = build(model, shape, classes, member.settings.seed)
    params = {k: p.detach() for k, p in model.named_parameters()}
    shapes = {k: p.shape for k, p in run.task.params.items()}
    if {k: p.shape for k, p in params.items()} != shapes:
        raise BadInput("models that train together must have the same shapes")
    if not all(bool(torch.isfinite(p).all()) for p in params.values()):
        raise BadInput("the loss of the initial model is not finite; check the data and the model")
    return {k: p.to(run.device, run.dtype) for k, p in params.items()}


def _continued(before: Tables, new: Tables, clients: int) -> Tables:
    """The rows of both; none where nothing was evaluated so far."""
    per_client, per_run = torch.zeros(0, clients, dtype=torch.float64), torch.zeros(0).double()
    nothing: Tables = {
        "loss": per_client,
        "weights": per_client,
        "ascended": per_run,
        "evaluated": torch.zeros(0, dtype=torch.int64),
        "gradient_variance": per_run,
        "update_norm": per_client,
    }
    parts = [{k: v for k, v in before.items() if k not in ("counters", "diverged_at")}, new]
    filled = [part for part in parts if len(part.get("evaluated", ()))] or [nothing]
    return {name: torch.cat([part[name] for part in filled]) for name in filled[-1]}


def _counters(member: Member, part: Lockstep, rounds: int) -> Tensor:
    """Exchanges, bytes down and bytes up after so many rounds."""
    earlier = member.before.get("counters", torch.zeros(3, dtype=torch.int64))
    return earlier + part.traffic[max(0, rounds - part.first_round)]
