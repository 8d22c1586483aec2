"""Captured rounds: a round recorded once as a CUDA graph and repeated without the host.

Small models spend most of an eager round on launching kernels. A captured round works on fixed
tensors: the state, the names of this round's shuffles and participants, and the run's numbers
(learning rate, strengths). Since these are read from the device, one recording serves all runs of a
grid that differ in numbers and seeds only. A round whose shapes depend on who takes part
(`Run.shapes_stay`) is not captured.

Without CUDA the same fixed tensors are used and the round is simply computed: the slow twin, by
which the tests compare everything but the recording itself with ordinary rounds.
"""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State, advance
from fairvar.engine.vmapped import Observer, Trained
from fairvar.methods.base import Method
from fairvar.models.check import tells_all

RoundOf = Callable[[Run, State, int, Observer | None], Outcome]
T = TypeVar("T")
LATER = 1  # the round that is recorded: in the first a warm start may act differently
WARM_UP = 2  # rounds before recording: libraries choose and load their kernels
KEPT = 3  # recordings kept for later runs; each holds the memory of a round


class Recorded(Generic[T]):
    """A computation from and to fixed tensors: recorded at its first call on CUDA, then repeated.

    `compute` changes nothing, because it runs a few times before the recording; `store` does."""

    def __init__(
        self, compute: Callable[[], T], store: Callable[[T], None], device: torch.device
    ) -> None:
        self.compute, self.store, self.device = compute, store, device
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.device.type != "cuda":
            self.store(self.compute())
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
            self.store(self.compute())
        self.graph = graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """An older recording that Python happens to free while a new one is made spoils the new one."""
    gc.collect()
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class CapturedRound:
    """Repeats `round_of` from state to state for one run after the other."""

    def __init__(self, run: Run, round_of: RoundOf, state: State, watches: bool = False) -> None:
        device = run.device
        # The clients' own models stay at hand where all of them are made together anyway.
        self.watches, self.trained = watches and len(run.chunks()) == 1, list[Trained]()
        self.state = state.map(torch.clone)
        self.numbers = {
            name: torch.full((), value, dtype=torch.float64, device=device)
            for name, value in _numbers(run.method, run.lr).items()
        }
        self.names = torch.zeros(len(_names(run, LATER)), dtype=torch.int64, device=device)
        lr = self.numbers["lr"]
        method = run.method.with_numbers({k: v for k, v in self.numbers.items() if k != "lr"})
        after = 1 + len(run.schedule.keys(LATER))
        schedule = replace(run.schedule, live_keys=self.names[1:after])
        who = run.participation
        who = who if who.everyone else replace(who, live=self.names[after:])
        self.run = replace(run, lr=lr, method=method, schedule=schedule, participation=who)
        self.round_of = round_of
        self.outcome: Outcome | None = None
        self.recorded = Recorded(self._compute, self._store, device)

    def begin(self, run: Run) -> None:
        """The next rounds are those of this run: same operations, other numbers."""
        for name, value in _numbers(run.method, run.lr).items():
            self.numbers[name].fill_(value)
        self.given = run

    def step(self, state: State) -> tuple[State, Outcome]:
        """The state after the next round, valid until the next call, and its outcome, of which the
        numbers per client stay valid."""
        t = state.round
        self._load(state)
        self.names.copy_(torch.tensor(_names(self.given, t)))
        self.recorded()
        assert self.outcome is not None
        self.state = replace(self.state, round=t + 1)
        kept = {k: getattr(self.outcome, k).clone() for k in ("loss", "weights", "ascended")}
        return self.state, replace(self.outcome, **kept)

    def _load(self, state: State) -> None:
        for mine, given in zip(self.state.tensors(), state.tensors(), strict=True):
            if mine is not given:
                mine.copy_(given)

    def _compute(self) -> tuple[State, Outcome]:
        self.trained = []
        observe = self.trained.append if self.watches else None
        outcome = self.round_of(self.run, self.state, LATER, observe)
        return advance(self.state, outcome, self.names[0].double()), outcome

    def _store(self, found: tuple[State, Outcome]) -> None:
        after, self.outcome = found
        fine = self.outcome.fine  # a round that diverged changes nothing
        for mine, new in zip(self.state.tensors(), after.tensors(), strict=True):
            mine.copy_(torch.where(fine, new, mine))


def acts_alike(method: Method, t: int) -> bool:
    """Whether round t may repeat the recorded one. A method with a schedule changes on the way."""
    return t > 0 and method.at_round(t) is method


def _numbers(method: Method, lr: float | Tensor) -> dict[str, float]:
    return {"lr": float(lr), **method.numbers}


def _names(run: Run, t: int) -> list[int]:
    """What a recorded round reads from the device to be round t: the number of rounds done after
    it, the names of its shuffles, and its participants if not everyone takes part."""
    who = run.participation
    ids = [] if who.everyone else who.of_round(t).tolist()
    return [t + 1, *run.schedule.keys(t), *ids]


class Recordings:
    """The last few captured rounds of this process, found again by what they compute."""

    def __init__(self) -> None:
        self.kept: OrderedDict[object, CapturedRound] = OrderedDict()

    def find(self, run: Run, path: str, round_of: RoundOf, state: State) -> CapturedRound:
        key = _key(run, path)
        found = self.kept.pop(key, None)
        found = found or CapturedRound(run, round_of, state, watches=path == "vmapped")
        self.kept[key] = found
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        found.begin(run)
        return found

    def forget(self, captured: CapturedRound) -> None:
        self.kept = OrderedDict((k, v) for k, v in self.kept.items() if v is not captured)


RECORDINGS = Recordings()


def _key(run: Run, path: str) -> object:
    """Two runs with one key consist of the same operations on the same data."""
    module = run.task.original
    told = repr(module) if tells_all(module) else id(module)
    shapes = tuple((k, v.shape, v.dtype) for k, v in run.task.params.items())
    schedule = run.schedule
    asked = run.participation.number
    work = (schedule.batch_size, tuple(schedule.steps), run.clip_norm, run.chunk, run.precision)
    return path, id(run.federation), run.task.loss, told, shapes, run.method.form, work, asked


def try_step(captured: CapturedRound, state: State) -> tuple[State, Outcome] | None:
    """None if the round cannot be recorded, for example because a layer asks the host."""
    try:
        return captured.step(state)
    except RuntimeError as error:
        RECORDINGS.forget(captured)
        if captured.run.device.type != "cuda" or captured.outcome is not None:
            raise
        tell_unrecorded(error)
        return None


def tell_unrecorded(error: RuntimeError) -> None:
    """What could not be recorded is computed round by round: slower, and the same."""
    torch.cuda.synchronize()
    warnings.warn(
        f"rounds are computed without recording them first: {str(error).splitlines()[0]}",
        stacklevel=3,
    )
