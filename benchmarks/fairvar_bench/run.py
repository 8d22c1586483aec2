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
from fairvar.common.process import Report
from fairvar.data.federation import Federation
from fairvar.engine.cuda_graphs import RECORDINGS
from fairvar.engine.run import arithmetic
from fairvar.engine.settings import TrainSettings
from fairvar.engine.train import prepare
from fairvar.models import build
from fairvar_bench.cases import CLASSES, CLIENT_LOOPS, METHODS, BenchSettings, Case, cases
from fairvar_bench.contenders import OURS, make_engine, make_rivals
from fairvar_bench.flower import Simulation, require_simulation
from fairvar_bench.measure import Spread, Timing, Work, alternate, matmul_limit, once, ratio

BUSY = 0.5  # load by others above which numbers should not be quoted


@dataclass(frozen=True)
class BenchRow:
    """One case: the timings of "fairvar" and of the case's rivals."""

    case: Case
    path: str  # of the engine
    timings: dict[str, Timing]
    flops: float  # one forward and backward pass over all samples, whatever the method
    limit: float  # of the machine, per second
    padding: float | None = None  # of ragged clients: work on samples that are not there
    processor: dict[str, Timing] | None = None  # beside Flower: processor time of all processes

    def against(self, name: str) -> Spread | None:
        """How many times longer the other takes."""
        return ratio(self.timings[name], self.timings[OURS]) if name in self.timings else None

    @property
    def cost_of_flower(self) -> Spread | None:
        """How many times more processor time Flower's processes take."""
        found = self.processor
        return None if found is None else ratio(found["flower"], found[OURS])

    @property
    def seconds(self) -> float:
        return self.timings[OURS].seconds.median

    @property
    def samples_per_second(self) -> float:
        return self.case.used / self.seconds

    @property
    def share_of_limit(self) -> float:
        return self.flops / self.seconds / self.limit

    def as_dict(self) -> dict[str, Any]:
        case, rivals = self.case, [name for name in self.timings if name != OURS]
        return {
            "case": case.kind,
            "model": case.model,
            "clients": case.clients,
            "samples": case.samples,
            "runs": case.runs,
            "local": case.local,
            "batch": case.batch or case.samples,
            "method": METHODS[case.method].label,
            "path": self.path,
            "milliseconds": {k: _scaled(t.seconds, 1000) for k, t in self.timings.items()},
            "times_faster_than": {k: _scaled(self.against(k), 1) for k in rivals},
            "first_call_milliseconds": {k: 1000 * t.first for k, t in self.timings.items()},
            "peak_bytes": {k: t.peak_bytes for k, t in self.timings.items()},
            "peak_bytes_of_process": self.timings[OURS].process_bytes,
            "padding": self.padding,
            "processor_milliseconds": {
                k: _scaled(t.seconds, 1000) for k, t in (self.processor or {}).items()
            },
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


Keep = Callable[[BenchResult], object]


def run_bench(
    settings: BenchSettings, report: Report | None = None, keep: Keep | None = None
) -> BenchResult:
    """Measure all cases. `report(done, total, what)` is told before each, and `keep` is given all
    that is known after each: a run that is killed leaves what it has measured."""
    if settings.case == "flower":
        require_simulation()
    todo, load = cases(settings), os.getloadavg()[0]
    result = BenchResult({"load_before": load})
    prepare_device(settings.device)
    device = torch.device(settings.device)
    with _threads(settings.threads):
        with arithmetic(settings.numbers, device):
            limit = matmul_limit(device, _clock(settings)[0], precision=settings.numbers)
        facts = _facts(settings, limit) | {"load_before": load}
        for number, case in enumerate(todo):
            if report is not None:
                report(number, len(todo), f"{case.model}, {case.clients} clients, {case.method}")
            # The same precision and the same choice of kernels for everybody.
            with arithmetic(settings.numbers, device, tries=case.kind != "ragged"):
                rows = [*result.rows, _measure(case, settings, limit)]
            result = BenchResult(facts | {"load_after": os.getloadavg()[0]}, rows)
            if keep is not None:
                keep(result)
    if report is not None:
        report(len(todo), len(todo), "done")
    return result


def prepare_device(name: str) -> None:
    """The engine's own one-line error for a device that is not there, before any work."""
    tiny = Case("multinomial", 1, 2, "fedavg")
    prepare(tiny.model, tiny.federation(), METHODS["fedavg"], "cross_entropy",
            TrainSettings(device=name))  # fmt: skip


def _measure(case: Case, settings: BenchSettings, limit: float) -> BenchRow:
    device = torch.device(settings.device)
    _free(device)
    data = case.federation().to(device, torch.float32)
    module = build(case.model, case.shape, CLASSES, 0).to(device)
    flops = _flops_per_sample(module, data) * case.used
    engine = make_engine(case, settings, module, data)
    contenders = make_rivals(case, settings, module, data) | {OURS: engine}
    if case.kind == "flower":
        with Simulation(case) as simulation:
            rivals: dict[str, Work] = {"flower": simulation, **contenders}
            timings, processor = _timings(case, settings, rivals, module, data), None
            if simulation.tree:
                turns = settings.repeat, settings.limit
                processor = alternate(rivals, device, *turns, simulation.clock)
    else:
        timings, processor = _timings(case, settings, contenders, module, data), None
    if case.kind == "grid":  # the loop trains one of the runs: it would take minutes for all
        timings["bare"] = timings["bare"].times_by(case.runs)
    assert engine.ready is not None
    return BenchRow(case, engine.ready.path, timings, flops, limit, engine.ready.padding,
                    processor)  # fmt: skip


def _timings(
    case: Case,
    settings: BenchSettings,
    contenders: dict[str, Work],
    module: nn.Module,
    data: Federation,
) -> dict[str, Timing]:
    device, clock = data.train.x.device, _clock(settings)[0]
    if case.kind == "memory":
        return {OURS: once(contenders[OURS], device, clock)}
    plain = [k for k in contenders if k in CLIENT_LOOPS and case.kind == "rounds"]
    if device.type == "cuda" and plain:
        # Kernels are chosen when a shape is first seen. Two clients show all of them, and loops
        # that take a minute need not run twice.
        pairs = [data.train.of(i) for i in range(min(2, data.clients))]
        few = Federation.from_arrays(pairs, classes=CLASSES).to(device, torch.float32)
        for name, work in make_rivals(case, settings, module, few).items():
            if name in plain:
                work()
    return alternate(contenders, device, settings.repeat, settings.limit, clock, plain)


def _free(device: torch.device) -> None:
    """What the last case left behind; the engine looks at free memory when it cuts its work."""
    RECORDINGS.kept.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _clock(settings: BenchSettings) -> tuple[Callable[[], float], str]:
    """One thread on the CPU: time of the process, which does not run while others have the core."""
    if settings.on_cpu and settings.threads == 1 and settings.case != "flower":
        return time.process_time, "CPU time of the process"
    return time.perf_counter, "wall time"


def _flops_per_sample(module: nn.Module, data: Federation) -> float:
    """Of one forward and backward pass, counted on the first client."""
    x, y = data.train.of(0)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(module(x), y).backward()
    module.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()) / len(y)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _facts(settings: BenchSettings, limit: float) -> dict[str, Any]:
    on_gpu = not settings.on_cpu
    return {
        "fairvar": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": settings.threads,
        "device": torch.cuda.get_device_name(settings.device) if on_gpu else "cpu",
        "device_type": torch.device(settings.device).type,
        "precision": settings.numbers,
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
