"""Timing that a noisy machine disturbs as little as possible, memory, and the machine's own limit.

The contenders take turns, so that whatever slows the machine down slows all of them; ratios are
formed inside a turn and only then summarised.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch

from fairvar.common.process import peak_bytes, reset_peak

Work = Callable[[], object]
FEWEST_TURNS = 3
OVERTIME = 6.0  # the fewest turns may take so many times the limit; else as many as fit, or one
SLICE = 0.02  # seconds: shorter work is repeated within a turn, or the clock would decide
SLICE_OF_SLOWEST = 0.05  # … and so is work much shorter than the slowest, which gets few turns
MOST_CALLS = 20
SETTLING = 2  # first calls on CUDA: the engine computes one round and records the second
PATIENCE = 1.5  # seconds: a plain loop that takes as long is not called more often than needed


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
    """Seconds: of the first call (or calls), then per call, one number for each turn; and the
    memory that is needed on top of what was in use before."""

    first: float
    times: tuple[float, ...]
    peak_bytes: int | None = None  # None: cannot be told here
    process_bytes: int | None = None  # the same peak with all that was there before

    @property
    def seconds(self) -> Spread:
        return Spread.of(list(self.times))

    def times_by(self, factor: float) -> Timing:
        """As if the work were done so many times."""
        return replace(self, first=self.first * factor, times=tuple(factor * t for t in self.times))


def ratio(slow: Timing, fast: Timing) -> Spread:
    """How many times longer `slow` takes, turn by turn."""
    return Spread.of([a / b for a, b in zip(slow.times, fast.times, strict=True)])


def alternate(
    contenders: Mapping[str, Work],
    device: torch.device,
    repeat: int,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
    plain: Collection[str] = (),
) -> dict[str, Timing]:
    """A first call and a warm-up of each, then up to `repeat` turns of all of them.

    Turns stop early where they would take much longer than `seconds`. Those in `plain` were warmed
    up before: a long first call needs no second one, and is their turn where there is only one.
    """

    def timed(name: str, calls: int = 1) -> float:
        _wait(device)
        started = clock()
        for _ in range(calls):
            contenders[name]()
        _wait(device)
        return (clock() - started) / calls

    first, steady, memory = {}, {}, {}
    for name in contenders:
        with PeakMemory(device) as memory[name]:  # what is set up once, such as graphs, counts
            calls = SETTLING if device.type == "cuda" and name not in plain else 1
            steady[name] = first[name] = calls * timed(name, calls)
            if name not in plain or first[name] < PATIENCE:
                steady[name] = timed(name)
    piece = max(SLICE, SLICE_OF_SLOWEST * max(steady.values()))
    often = {k: max(1, min(MOST_CALLS, round(piece / max(v, 1e-6)))) for k, v in steady.items()}
    turn = sum(steady[name] * often[name] for name in contenders)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names, turns = list(contenders), min(repeat, _turns(turn, seconds, repeat))
    for number in range(turns):
        shift = number % len(names)  # nobody always runs in the same neighbour's cache
        for name in names[shift:] + names[:shift]:
            done = turns == 1 and name in plain and first[name] >= PATIENCE
            times[name].append(first[name] if done else timed(name, often[name]))
    return {
        k: Timing(first[k], tuple(times[k]), memory[k].bytes, memory[k].total) for k in names
    }  # fmt: skip


def once(
    work: Work, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> Timing:
    """A single call, for its memory."""
    with PeakMemory(device) as memory:
        started = clock()
        work()
        _wait(device)
        seconds = clock() - started
    return Timing(seconds, (seconds,), memory.bytes, memory.total)


def _turns(turn: float, seconds: float, repeat: int) -> int:
    fitting = int(min(seconds / max(turn, 1e-9), repeat))
    fewest = FEWEST_TURNS if FEWEST_TURNS * turn <= OVERTIME * seconds else 1
    return max(fewest, fitting)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PeakMemory(contextlib.AbstractContextManager["PeakMemory"]):
    """Bytes in use at the worst moment inside, above those in use before.

    Exact on CUDA. On the CPU it is resident memory, which torch's caches and the allocator blur: an
    indication. It needs Linux, which can forget an earlier peak.
    """

    bytes: int | None = None
    total: int | None = None  # with those in use before

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before: int | None = torch.cuda.memory_allocated(self.device)
        else:
            _give_back()
            self.before = peak_bytes() if reset_peak() else None
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is None:
            return
        cuda = self.device.type == "cuda"
        self.total = torch.cuda.max_memory_allocated(self.device) if cuda else peak_bytes()
        self.bytes = None if self.total is None else max(0, self.total - self.before)


def _give_back() -> None:
    """Freed memory goes back to the system first, or the work would seem to need none."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)


def in_precision(work: Work, device: torch.device, precision: str) -> Work:
    """A plain loop in bfloat16. Weights change inside, so torch must not remember their casts."""
    if precision != "bfloat16":
        return work

    def cast() -> None:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            work()

    return cast


def matmul_limit(
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    repeat: int = 5,
    precision: str = "full",
) -> float:
    """Floating-point operations per second of the device's own matrix product, at best.

    Whether CUDA takes TF32 for float32 is the caller's choice, as for the contenders.
    """
    size = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    found = alternate({"matmul": lambda: a @ b}, device, repeat, clock=clock)["matmul"]
    return 2 * size**3 / min(found.times)
