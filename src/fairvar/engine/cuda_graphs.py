"""Captured rounds: a round recorded once as a CUDA graph and repeated without the host.

Small models spend most of an eager round on launching kernels. A captured round works on fixed
tensors: the state, the names of this round's shuffles and participants, and the runs' numbers
(learning rate, strengths). Since these are read from the device, one recording serves all runs that
differ in numbers and seeds only. A round whose shapes depend on the sampled clients
(`Run.shapes_stay`) is not captured.

Without CUDA the round is computed eagerly on the same fixed tensors: an eager fallback on the same
buffers, for tests.
"""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from fairvar.engine.evaluate import Seen
from fairvar.engine.kernels import Recordable, Splits
from fairvar.engine.run import Run
from fairvar.engine.settings import CONSTANT
from fairvar.engine.state import Outcome, State, settle
from fairvar.methods.base import Method

LATER = 1  # the round that is recorded: in the first a warm start may act differently
WARM_UP = 2  # rounds before recording: libraries choose and load their kernels
KEPT = 3  # recordings kept for later runs; each holds the memory of a round


class Made(NamedTuple):
    """Results of a round; valid until the next one."""

    state: State
    diverged_at: Int64[Tensor, " runs"]
    outcome: Outcome
    work: Any = None  # what `see` needs


class Captured:
    """Repeats the round of a kernel from state to state."""

    def __init__(self, kernel: Recordable, state: State, diverged_at: Tensor) -> None:
        device = kernel.run.device
        self.state, self.diverged_at = state.map(torch.clone), diverged_at.clone()
        self.names = torch.zeros(len(_names(kernel.run, LATER)), dtype=torch.int64, device=device)
        self.numbers = {
            name: torch.tensor(values, dtype=torch.float64, device=device)
            for name, values in kernel.numbers().items()
        }
        self.kernel = kernel.live(self.names, self.numbers)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.made: Made | None = None
        self.begin(kernel)

    def begin(self, kernel: Recordable) -> None:
        """Continue with this kernel, whose rounds have the same operations with other numbers."""
        for name, values in kernel.numbers().items():
            self.numbers[name].copy_(torch.tensor(values, dtype=torch.float64))
        self.given, self.rates = kernel, self.numbers["lr"].clone()

    def step(
        self, state: State, diverged_at: Tensor, splits: Splits | None
    ) -> tuple[Made, Seen | None]:
        """The next round. The new state is valid until the next call; the outcome's losses, weights
        and ids are copies."""
        t = state.round
        for mine, given in zip(self._fixed(), (diverged_at, *state.tensors()), strict=True):
            if mine is not given:
                mine.copy_(given)
        before = state.map(torch.clone) if splits is not None else state
        self.names.copy_(torch.tensor(_names(self.given.run, t)))
        run = self.given.run
        if run.lr_schedule != CONSTANT:
            self.numbers["lr"].copy_(self.rates * run.lr_schedule.factor(t, run.rounds))
        self._repeat()
        assert self.made is not None
        self.state = replace(self.state, round=t + 1)
        made = self.made.outcome
        kept = {k: getattr(made, k).clone() for k in ("loss", "weights", "ascended")}
        who = None if made.answered is None else made.answered.clone()
        outcome = replace(made, **kept, answered=who)
        seen = None
        if splits is not None:
            seen = self.given.see(before, t, self.made.work, splits)
        return Made(self.state, self.diverged_at, outcome), seen

    def compute(self) -> Made:
        """Does not change the state: it is called a few times before the recording."""
        outcome, work = self.kernel.compute(self.state, LATER)
        optimiser = self.kernel.run.optimiser
        after = settle(self.state, self.diverged_at, outcome, self.names[0], optimiser)
        return Made(*after, outcome, work)

    def _store(self, made: Made) -> None:
        for mine, new in zip(self._fixed(), (made.diverged_at, *made.state.tensors()), strict=True):
            mine.copy_(new)
        self.made = made

    def _fixed(self) -> list[Tensor]:
        return [self.diverged_at, *self.state.tensors()]

    def _repeat(self) -> None:
        if self.kernel.run.device.type != "cuda":
            self._store(self.compute())
            return
        if self.graph is None:
            self._record()
        assert self.graph is not None
        self.graph.replay()

    def _record(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.graph(graph):
            self._store(self.compute())
        self.graph = graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing an older CUDA graph during a recording would break the recording."""
    gc.collect()
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def acts_alike(method: Method, t: int) -> bool:
    """Whether round t may repeat the recorded one: not if the method acts differently in it."""
    return t > 0 and method.at_round(t) is method


def live_run(run: Run, names: Tensor, numbers: Mapping[str, Tensor]) -> Run:
    """The same run with shuffles, participants and numbers read from tensors on the device."""
    after = 1 + len(run.schedule.keys(LATER))
    who = run.participation
    own = {name: value for name, value in numbers.items() if name != "lr"}
    return replace(
        run,
        lr=numbers.get("lr", run.lr),
        lr_schedule=CONSTANT,  # `Captured.step` writes each round's
        method=run.method.with_numbers(own),
        schedule=replace(run.schedule, live_keys=names[1:after]),
        participation=who if who.everyone else replace(who, live=names[after:]),
    )


def _names(run: Run, t: int) -> list[int]:
    """The integers that a recorded round reads to compute round t: t + 1, the keys of its shuffles,
    and the ids of its participants unless all clients take part."""
    who = run.participation
    ids = [] if who.everyone else who.of_round(t).tolist()
    return [t + 1, *run.schedule.keys(t), *ids]


class Recordings:
    """The last few captured rounds of this process, by the operations that they compute."""

    def __init__(self) -> None:
        self.kept: OrderedDict[object, Captured] = OrderedDict()

    def find(self, kernel: Recordable, path: str, state: State, diverged_at: Tensor) -> Captured:
        """The recording for this kernel. Operations also depend on `path`, on what is compiled,
        which may depend on the number of rounds, and on the chunk, if one has fewer clients than a
        round. (The chunk follows the memory that is free, which changes from run to run.)"""
        run = kernel.run
        key = run.kind, path, run.compiles, min(run.chunk, run.participation.number)
        found = self.kept.pop(key, None)
        if found is None:
            found = Captured(kernel, state, diverged_at)
        found.begin(kernel)
        self.kept[key] = found
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        return found

    def forget(self, captured: Captured) -> None:
        self.kept = OrderedDict((k, v) for k, v in self.kept.items() if v is not captured)


RECORDINGS = Recordings()


def try_step(
    captured: Captured, state: State, diverged_at: Tensor, splits: Splits | None
) -> tuple[Made, Seen | None] | None:
    """None if the round cannot be recorded, for example because a layer synchronises with the host:
    rounds are then computed eagerly, more slowly, with the same result."""
    try:
        return captured.step(state, diverged_at, splits)
    except RuntimeError as error:
        RECORDINGS.forget(captured)
        if captured.kernel.run.device.type != "cuda" or captured.graph is not None:
            raise
        torch.cuda.synchronize()
        warnings.warn(
            f"rounds are computed without recording them first: {str(error).splitlines()[0]}",
            stacklevel=3,
        )
        return None
