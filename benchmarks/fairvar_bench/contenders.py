"""Who competes in a case: the loops, the centralised step, the limit, and the engine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor, nn

from fairvar.data.federation import Federation
from fairvar.engine.batches import Schedule
from fairvar.engine.grid import Grid, Member
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.train import Prepared, prepare
from fairvar.methods import Method
from fairvar_bench.bare import Bare
from fairvar_bench.cases import CLASSES, CONFIGURATIONS, METHODS, SEEDS, BenchSettings, Case
from fairvar_bench.lean import Lean
from fairvar_bench.loops import Central, Draw, drawn, everything, shuffled
from fairvar_bench.measure import Work, in_precision
from fairvar_bench.naive import Naive

LR = 1e-6  # time is measured, not learning: a model that blows up would compute with NaN
OURS = "fairvar"
RATES = 5  # learning rates of a grid


class Ready(NamedTuple):
    """The engine once everything is prepared."""

    round: Work
    path: str
    padding: float | None = None  # work on samples that are not there, over the other work


class Engine:
    """Prepares itself in its first call, so that the time of that call tells what it costs."""

    def __init__(self, make: Callable[[], Ready]) -> None:
        self.make = make
        self.ready: Ready | None = None

    def __call__(self) -> None:
        if self.ready is None:
            self.ready = self.make()
        self.ready.round()


def make_engine(case: Case, settings: BenchSettings, module: nn.Module, data: Federation) -> Engine:
    if case.kind == "grid":
        return Engine(lambda: _grid(case, settings, data))
    return Engine(lambda: _single(case, settings, module, data))


def _single(case: Case, settings: BenchSettings, module: nn.Module, data: Federation) -> Ready:
    """A run, round by round as `train` does it."""
    prepared, work = _stepping(case, _train(case, settings), module, data)
    padding = padded_share(prepared.run.schedule) if case.kind == "ragged" else None
    return Ready(work, prepared.path, padding)


def _stepping(
    case: Case, train: TrainSettings, module: nn.Module, data: Federation
) -> tuple[Prepared, Work]:
    prepared = prepare(module, data, METHODS[case.method], "cross_entropy", train)
    runs = prepared.runs()

    def work() -> None:
        runs.step(due=False)
        runs.recorder.rounds.clear()

    return prepared, work


def _grid(case: Case, settings: BenchSettings, data: Federation) -> Ready:
    """All runs together, as `train_grid` does it between evaluations."""
    train = _train(case, settings)
    members = [
        Member(case.model, method, structs.replace(train, lr=lr, seed=seed))
        for lr, method in _configurations(METHODS[case.method])
        for seed in range(SEEDS)
    ]
    grid = Grid(members, data, "cross_entropy", EvaluateSettings())

    def work() -> None:
        for part in grid.parts:
            part.step(due=False)

    return Ready(work, grid.prepared.path)


def make_rivals(
    case: Case, settings: BenchSettings, module: nn.Module, data: Federation
) -> dict[str, Work]:
    device = data.train.x.device
    found = _rivals(case, module, data)
    if "reference" in case.rivals:  # the readable loop of the engine's own code
        plain = structs.replace(_train(case, settings), engine="reference")
        found["reference"] = _stepping(case, plain, module, data)[1]
    return {name: in_precision(work, device, settings.numbers) for name, work in found.items()}


def _rivals(case: Case, module: nn.Module, data: Federation) -> dict[str, Work]:
    method = METHODS[case.method]
    draw = _draw(case, data.sizes.tolist(), case.batch)
    loops: dict[str, type[Naive | Bare | Lean]] = {"naive": Naive, "bare": Bare, "lean": Lean}
    found: dict[str, Work] = {
        name: kind(module, data, method, LR, draw).round
        for name, kind in loops.items()
        if name in case.rivals
    }
    if "central" in case.rivals:
        pooled = None if case.batch is None else case.batch * case.clients
        found["central"] = Central(module, data, LR, _draw(case, [len(data.train.y)], pooled)).round
    if "gemm" in case.rivals:
        found["gemm"] = _products(data.train.x, case.runs * CLASSES)
    return found


def _draw(case: Case, sizes: list[int], batch: int | None) -> Draw:
    if batch is None:
        return everything
    return shuffled(sizes, batch) if case.local == "epoch" else drawn(sizes, batch)


def _train(case: Case, settings: BenchSettings) -> TrainSettings:
    return TrainSettings(
        lr=LR,
        batch_size=case.batch,
        local_epochs=1 if case.local == "epoch" else None,
        device=settings.device,
        precision=settings.numbers,
        threads=settings.threads,
    )


def _products(x: Tensor, columns: int) -> Work:
    """The matrix products that a grid of linear models cannot do without."""
    rows = x.flatten(1)
    weights = torch.randn(rows.shape[1], columns, device=x.device)
    slopes = torch.randn(len(rows), columns, device=x.device)

    def work() -> None:
        torch.matmul(rows, weights)
        torch.matmul(rows.T, slopes)

    return work


def _configurations(method: Method) -> list[tuple[float, Method]]:
    """Learning rates × strengths; a method without a strength gets more learning rates."""
    knob = method.fairness_knob
    if knob is None or knob not in method.numbers:
        return [(LR * (1 + i / CONFIGURATIONS), method) for i in range(CONFIGURATIONS)]
    strengths = [method.numbers[knob] * (1 + i / 10) for i in range(CONFIGURATIONS // RATES)]
    return [
        (LR * (1 + i / 10), structs.replace(method, **{knob: strength}))
        for i, strength in product(range(RATES), strengths)
    ]


def padded_share(schedule: Schedule) -> float:
    """All clients step together in batches of one width; small ones leave when they are done."""
    sizes = schedule.split.counts.tolist()
    real = sum(
        steps / passes * min(size, passes * schedule.width)
        for size, steps, passes in zip(sizes, schedule.steps, schedule.passes, strict=True)
    )
    return sum(schedule.steps) * schedule.width / real - 1
