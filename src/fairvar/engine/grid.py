"""Runs that differ only in numbers and seeds, trained together.

Their models are affine and share the samples, so a round of all runs is a few products of large
matrices (`kernels/linear`). Runs with mini-batches are computed together if they have the same
seed; with full batches, batches do not depend on the seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import msgspec
import torch
from torch import nn

from fairvar.common.tree import Tree
from fairvar.data.federation import Federation
from fairvar.engine.cuda_graphs import Captured
from fairvar.engine.history import History, Key
from fairvar.engine.kernels.linear import Linear, grams_pay
from fairvar.engine.kernels.linear.dual import affine_names
from fairvar.engine.keys import operations_key
from fairvar.engine.losses import LOSSES, LossFunction
from fairvar.engine.recorder import Checkpoint, resumed, scored_keys
from fairvar.engine.run import Run, arithmetic
from fairvar.engine.server import Aggregator
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.state import GOING, initial_state
from fairvar.engine.train import prepare, provenance
from fairvar.engine.trainer import Keep, Progress, Runs, train_rounds
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.models import build


@dataclass(frozen=True)
class Member:
    """One run of a grid; `start` is a checkpoint that a grid has made, or a state alone."""

    model: nn.Module | str
    method: Method
    settings: TrainSettings
    start: Checkpoint | None = None

    @property
    def going(self) -> bool:
        """False for a run that has diverged while others of the grid still train."""
        return self.start is None or self.start.diverged_at == GOING


# Tensors of the shape (outputs, samples), and of the parameters, that a round holds at once.
COLUMNS, COPIES = 10, 8


def train_grid(
    members: Sequence[Member],
    federation: Federation,
    loss: str | LossFunction,
    when: EvaluateSettings,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> list[History]:
    """The histories of the single runs at evaluated rounds, equal up to rounding."""
    started, rounds = time.perf_counter(), members[0].settings.rounds
    grid = Grid(members, federation, loss, when)
    kept: dict[int, list[Checkpoint]] = {}  # of the last round, if `keep` asked for them
    with arithmetic(members[0].settings.precision, grid.run.device):

        def in_order(done: int, make: Callable[[], list[Checkpoint]]) -> None:
            def made() -> list[Checkpoint]:
                kept[done] = make()
                return grid.in_order(kept[done])

            kept.clear()
            if keep is not None:
                keep(done, made)

        train_rounds(grid.parts, rounds, when.every, progress, in_order)
    last = kept.get(rounds) or [made for part in grid.parts for made in part.checkpoints()]
    return grid.histories(last, (time.perf_counter() - started) / len(members))


class Grid:
    """The members, with one kernel for those that draw the same batches."""

    def __init__(
        self,
        members: Sequence[Member],
        federation: Federation,
        loss: str | LossFunction,
        when: EvaluateSettings,
    ) -> None:
        self.members, first = list(members), members[0]
        given = (first.model, federation, first.method, loss, first.settings)
        self.prepared = prepare(*given, metric=when.metric)
        self.run = self.prepared.run
        if self.prepared.path != "linear" or first.method.personal or not _alike(members):
            raise BadInput("these runs cannot be trained together; train them one by one")
        seeds = [0 if self.run.schedule.full_batch else m.settings.seed for m in members]
        self.places = [[i for i, s in enumerate(seeds) if s == seed] for seed in sorted(set(seeds))]
        self.parts = [self._runs([members[i] for i in places], when) for places in self.places]

    def _runs(self, members: list[Member], when: EvaluateSettings) -> Runs:
        schedule = replace(self.run.schedule, seed=members[0].settings.seed)
        kernel = Linear.build(
            replace(self.run, schedule=schedule),
            [member.method for member in members],
            [member.settings.lr for member in members],
        )
        splits = tuple(s for s in when.splits if s in self.run.federation.splits)
        scored = scored_keys(splits, when, self.run.method)
        starts = [self._start(member, scored) for member in members]
        runs = Runs(kernel, starts, splits, when.local, every_round=False)
        if self.prepared.captures:
            runs.captured = Captured(kernel, runs.state, runs.diverged_at)
        return runs

    def _start(self, member: Member, scored: Sequence[Key]) -> Checkpoint:
        params = _first_parameters(self.run, member)
        fresh = initial_state(member.method, params, {}, self.run.clients, self.run.optimiser)
        rounds = member.settings.rounds
        return resumed(self.run, member.start, fresh, rounds, scored, every_round=False)

    def in_order(self, made: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Checkpoints of the parts in the order of the members."""
        places = [i for part in self.places for i in part]
        return [one for _, one in sorted(zip(places, made, strict=True), key=itemgetter(0))]

    def histories(self, last: Sequence[Checkpoint], seconds: float) -> list[History]:
        """Of the members; `last`: their last checkpoints, in the order of the parts."""
        found, made = dict[int, History](), iter(last)
        for places, part in zip(self.places, self.parts, strict=True):
            for r, i in enumerate(places):
                origin = provenance(self.prepared, self.members[i].settings, seconds)
                origin["together"] = len(self.members)
                found[i] = part.recorder.history(next(made), r, self.run.samples, origin)
        return [found[i] for i in range(len(found))]


def trains_together(members: Sequence[Member], federation: Federation, loss: str) -> bool:
    """Whether `train_grid` can train these runs, and is faster than one by one."""
    first = members[0]
    known = len(members) > 1 and loss in LOSSES and _alike(members)
    known &= first.method.personal is None  # each run would hold a model per client
    if not known or first.settings.engine not in ("auto", "linear"):
        return False
    if affine_names(_module(first, federation), federation.train.x) is None:
        return False
    settings = msgspec.structs.replace(first.settings, capture=False)
    try:
        prepared = prepare(first.model, federation, first.method, loss, settings)
    except BadInput:
        return False  # training the first run alone raises the error
    fits = prepared.path == "linear" and grams_pay(prepared.run, len(members))
    return fits and all(
        _vmaps(prepared.run, [m.method.at_round(t) for m in members]) for t in (0, 1)
    )


def members_that_fit(members: Sequence[Member], federation: Federation) -> int:
    """How many such runs fit a fixed memory budget together."""
    first = members[0]
    weight = next(_module(first, federation).parameters())
    train, *others = (len(split.y) for split in federation.splits.values())
    columns = COLUMNS * (max(train, *others) if others else train)
    memory = sum(v.numel() for v in first.method.initial_memory(federation.clients).values())
    floats = len(weight) * columns + COPIES * (weight.numel() + 2 * memory)
    width = 8 if first.settings.dtype == "float64" else 4
    budget = (16 if first.settings.device.startswith("cuda") else 1) << 30
    return max(1, budget // (floats * width))


def _module(member: Member, federation: Federation) -> nn.Module:
    if isinstance(member.model, nn.Module):
        return member.model
    classes, seed = federation.classes or 1, member.settings.seed
    return build(member.model, federation.input_shape, classes, seed)


def _alike(members: Sequence[Member]) -> bool:
    """Whether they differ only in numbers, learning rates and seeds, at the same round."""

    def key(member: Member) -> tuple[object, ...]:
        model = member.model if isinstance(member.model, str) else repr(member.model)
        return operations_key(member.settings, member.method, member.settings.rounds, model)

    rounds = {0 if m.start is None else m.start.state.round for m in members if m.going}
    return len(set(map(key, members))) == 1 and len(rounds) <= 1


def _vmaps(run: Run, methods: list[Method]) -> bool:
    """Whether the method's functions work under vmap over the numbers. A third-party method may
    branch on them."""
    numbers = {
        name: torch.tensor(
            [m.numbers[name] for m in methods], dtype=torch.float64, device=run.device
        )
        for name in methods[0].numbers
    }
    server = Aggregator(methods[0], run.share, run.ids, run.clients, len(methods), numbers)
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
    """The member's initial parameters. All else of the model is that of the first member."""
    model = _module(member, run.federation)
    params = {k: p.detach() for k, p in model.named_parameters()}
    shapes = {k: p.shape for k, p in run.task.params.items()}
    if {k: p.shape for k, p in params.items()} != shapes:
        raise BadInput("models that train together must have the same shapes")
    if not all(bool(torch.isfinite(p).all()) for p in params.values()):
        raise BadInput("the loss of the initial model is not finite; check the data and the model")
    return {k: p.to(run.device, run.dtype) for k, p in params.items()}
