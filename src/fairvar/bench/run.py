"""Runs the cases: all contenders of one case in one process, in turns."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from fairvar._version import __version__
from fairvar.bench.cases import CLASSES, METHODS, BenchSettings, Case, cases
from fairvar.bench.loops import Central, Lean, everything, shuffled
from fairvar.bench.measure import Spread, Timing, Work, alternate, matmul_limit, ratio
from fairvar.bench.naive import Naive
from fairvar.engine.settings import TrainSettings
from fairvar.engine.state import advance
from fairvar.engine.train import Prepared, prepare
from fairvar.federation import Federation
from fairvar.models import build
from fairvar.progress import Report

LR = 1e-6  # time is measured, not learning: a model that blows up would compute with NaN
BUSY = 0.5  # load by others above which numbers should not be quoted
SECONDS_PER_CASE = {True: 3.0, False: 20.0}  # quick or not; three turns are always made
OURS = "fairvar"


@dataclass(frozen=True)
class BenchRow:
    """One case: the timings of "naive", "lean", "central" and "fairvar"."""

    case: Case
    path: str  # of the engine
    timings: dict[str, Timing]
    flops: float  # one forward and backward pass over all samples, whatever the method
    limit: float  # of the machine, per second

    def against(self, name: str) -> Spread | None:
        """How many times longer the other takes."""
        return ratio(self.timings[name], self.timings[OURS]) if name in self.timings else None

    @property
    def seconds(self) -> float:
        return self.timings[OURS].seconds.median

    @property
    def samples_per_second(self) -> float:
        return self.case.clients * self.case.samples / self.seconds

    @property
    def share_of_limit(self) -> float:
        return self.flops / self.seconds / self.limit

    def as_dict(self) -> dict[str, Any]:
        case, rivals = self.case, [name for name in self.timings if name != OURS]
        return {
            "model": case.model,
            "clients": case.clients,
            "samples": case.samples,
            "local": case.local,
            "batch": case.batch or case.samples,
            "method": METHODS[case.method].label,
            "path": self.path,
            "milliseconds": {k: _scaled(t.seconds, 1000) for k, t in self.timings.items()},
            "times_faster_than": {k: _scaled(self.against(k), 1) for k in rivals},
            "first_call_milliseconds": {k: 1000 * t.first for k, t in self.timings.items()},
            "peak_bytes": {k: t.peak_bytes for k, t in self.timings.items()},
            "samples_per_second": self.samples_per_second,
            "share_of_matmul_limit": self.share_of_limit,
            "turns": len(self.timings[OURS].times),
        }


@dataclass(frozen=True)
class BenchResult:
    facts: dict[str, Any]  # machine, versions, load
    rows: list[BenchRow] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return self.facts["load_before"] > BUSY

    def as_dict(self) -> dict[str, Any]:
        return {**self.facts, "rows": [row.as_dict() for row in self.rows]}


def run_bench(settings: BenchSettings, report: Report | None = None) -> BenchResult:
    """Measure all cases; `report(done, total, what)` is told before each."""
    todo = cases(settings)
    load = os.getloadavg()[0]
    with _threads(settings.threads):
        prepare_device(settings.device)
        device = torch.device(settings.device)
        limit = matmul_limit(device, _clock(settings)[0])
        rows = []
        for number, case in enumerate(todo):
            if report is not None:
                report(number, len(todo), f"{case.model}, {case.clients} clients, {case.method}")
            rows.append(_measure(case, settings, limit))
    if report is not None:
        report(len(todo), len(todo), "done")
    facts = _facts(settings, limit) | {"load_before": load, "load_after": os.getloadavg()[0]}
    return BenchResult(facts, rows)


def prepare_device(name: str) -> None:
    """The engine's own one-line error for a device that is not there, before any work."""
    tiny = Case("multinomial", 1, 2, "fedavg")
    prepare(tiny.model, tiny.federation(), METHODS["fedavg"], "cross_entropy",
            TrainSettings(device=name))  # fmt: skip


def _measure(case: Case, settings: BenchSettings, limit: float) -> BenchRow:
    gc.collect()
    device = torch.device(settings.device)
    data = case.federation().to(device, torch.float32)
    module = build(case.model, case.shape, CLASSES, 0).to(device)
    flops = _flops(module, data)
    prepared, contenders = _contenders(case, module, data)
    seconds = SECONDS_PER_CASE[settings.is_quick]
    clock, _ = _clock(settings)
    timings = alternate(contenders, device, settings.repeat, seconds, clock)
    return BenchRow(case, prepared.path, timings, flops, limit)


def _clock(settings: BenchSettings) -> tuple[Callable[[], float], str]:
    """One thread on the CPU: time of the process, which does not run while others have the core."""
    if settings.device == "cpu" and settings.threads == 1:
        return time.process_time, "CPU time of the process"
    return time.perf_counter, "wall time"


def _contenders(
    case: Case, module: nn.Module, data: Federation
) -> tuple[Prepared, dict[str, Work]]:
    method = METHODS[case.method]
    draw = everything if case.batch is None else shuffled(case.samples, case.batch)
    found: dict[str, Work] = {}
    if case.naive:
        found["naive"] = Naive(module, data, method, LR, draw).round
    found["lean"] = Lean(module, data, method, LR, draw).round
    found["central"] = Central(module, data, LR, case.batch).round
    epochs = None if case.batch is None else 1
    train = TrainSettings(
        lr=LR, batch_size=case.batch, local_epochs=epochs, device=str(data.train.x.device)
    )
    prepared = prepare(module, data, method, "cross_entropy", train)
    found[OURS] = _engine(prepared)
    return prepared, found


def _engine(prepared: Prepared) -> Work:
    """A round as `train` does it, from state to state."""
    state = prepared.start()

    def work() -> None:
        nonlocal state
        state = advance(state, prepared.round(state, state.round))

    return work


def _flops(module: nn.Module, data: Federation) -> float:
    """Of one forward and backward pass over everybody's samples, counted on the first client."""
    x, y = data.train.of(0)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(module(x), y).backward()
    module.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()) * data.clients


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _facts(settings: BenchSettings, limit: float) -> dict[str, Any]:
    on_gpu = settings.device != "cpu"
    return {
        "fairvar": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": settings.threads,
        "device": torch.cuda.get_device_name(settings.device) if on_gpu else "cpu",
        "matmul_flops_per_second": limit,
        "clock": _clock(settings)[1],
        "quick": settings.is_quick,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _scaled(spread: Spread | None, factor: float) -> dict[str, float] | None:
    if spread is None:
        return None
    return {k: factor * getattr(spread, k) for k in ("median", "low", "high")}
