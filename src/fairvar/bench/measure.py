"""Timing that a noisy machine disturbs as little as possible, memory, and the machine's own limit.

The contenders take turns, so that whatever slows the machine down slows all of them; ratios are
formed inside a turn and only then summarised.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

Work = Callable[[], object]
FEWEST_TURNS = 3
SLICE = 0.02  # seconds: shorter work is repeated within a turn, or the clock would decide
MOST_CALLS = 20
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Spread:
    """Median and range over the turns."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the first call, then one number per turn; and memory on top of before."""

    first: float
    times: tuple[float, ...]
    peak_bytes: int | None = None  # None: cannot be told here

    @property
    def seconds(self) -> Spread:
        return Spread.of(list(self.times))


def ratio(slow: Timing, fast: Timing) -> Spread:
    """How many times longer `slow` takes, turn by turn."""
    return Spread.of([a / b for a, b in zip(slow.times, fast.times, strict=True)])


def alternate(
    contenders: Mapping[str, Work],
    device: torch.device,
    repeat: int,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """A first call and a warm-up of each, then up to `repeat` turns of all of them.

    Turns stop early where they would take longer than `seconds`, never below FEWEST_TURNS.
    """

    def timed(work: Work, calls: int = 1) -> float:
        _wait(device)
        started = clock()
        for _ in range(calls):
            work()
        _wait(device)
        return (clock() - started) / calls

    first, peak, steady = {}, {}, {}
    for name, work in contenders.items():
        first[name] = timed(work)
        with PeakMemory(device) as memory:
            steady[name] = timed(work)
        peak[name] = memory.bytes
    calls = {k: max(1, min(MOST_CALLS, round(SLICE / max(v, 1e-6)))) for k, v in steady.items()}
    turn = sum(steady[name] * calls[name] for name in contenders)
    turns = min(repeat, max(FEWEST_TURNS, int(min(seconds / max(turn, 1e-9), repeat))))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(turns):
        shift = number % len(names)  # nobody always runs in the same neighbour's cache
        for name in names[shift:] + names[:shift]:
            times[name].append(timed(contenders[name], calls[name]))
    return {name: Timing(first[name], tuple(times[name]), peak[name]) for name in names}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PeakMemory(contextlib.AbstractContextManager["PeakMemory"]):
    """Bytes in use at the worst moment inside, above those in use before.

    Exact on CUDA. On the CPU it is resident memory, which torch's caches and the allocator blur: an
    indication. It needs Linux, which can forget an earlier peak.
    """

    bytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before: int | None = torch.cuda.memory_allocated(self.device)
        else:
            _give_back()
            self.before = _resident("VmRSS") if _forget_peak() else None
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            return
        cuda = self.device.type == "cuda"
        after = torch.cuda.max_memory_allocated(self.device) if cuda else _resident("VmHWM")
        self.bytes = None if after is None else max(0, after - self.before)


def _give_back() -> None:
    """Freed memory goes back to the system first, or the work would seem to need none."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> bool:
    try:
        RESET.write_text("5")
    except OSError:
        return False
    return True


def _resident(what: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(what):
                return int(line.split()[1]) * 1024
    return None


def matmul_limit(
    device: torch.device, clock: Callable[[], float] = time.perf_counter, repeat: int = 5
) -> float:
    """Floating-point operations per second of this device's own float32 matrix product, at best.

    On CUDA with the tensor-core format that convolutions use by default (TF32).
    """
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        found = alternate({"matmul": lambda: a @ b}, device, repeat, clock=clock)["matmul"]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return 2 * size**3 / min(found.times)
