"""The case "clients": rounds of 100 participants out of a thousand to a million clients.

Every number of clients is measured in a process of its own, so that its peak of memory is its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fairvar as fv
from fairvar.common.process import peak_bytes
from fairvar.data.builtin import MOST_CLIENTS, logistic
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.train import run_rounds
from fairvar_bench.cases import METHODS

NUMBERS = (1_000, 10_000, 100_000, 1_000_000)
PARTICIPANTS, SAMPLES, FEATURES, CLASSES = 100, 12, 20, 10
ROUNDS, FIRST = 60, 5  # the first rounds also warm the caches
SHOWN = ("fedavg", "afl", "fairgrad")


def measure(clients: int) -> dict[str, Any]:
    """CPU seconds of one thread, here and now: building, a round, an evaluation of all clients, and
    at last a synthetic federation of as many clients."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((clients, SAMPLES, FEATURES), dtype=np.float32)
    y = draw.integers(0, CLASSES, (clients, SAMPLES))
    pairs = [(x[i], y[i]) for i in range(clients)]
    start = time.process_time()
    data = fv.Federation.from_arrays(pairs, classes=CLASSES)
    found: dict[str, Any] = {"clients": clients, "build_s": time.process_time() - start}
    del x, y, pairs
    settings = TrainSettings(rounds=ROUNDS, lr=0.1, participants=PARTICIPANTS)
    when = EvaluateSettings(every=ROUNDS, splits=("train",), local=False)
    for name in SHOWN:
        clock: list[float] = []

        def tick(t: int, make: object, clock: list[float] = clock) -> None:
            clock.append(time.process_time())

        given = ("multinomial", data, METHODS[name], "cross_entropy", settings, when)
        run_rounds(*given, keep=tick)
        each = np.diff(clock)
        found[name] = 1e3 * float(np.median(each[FIRST:-1]))
        found["evaluation_s"] = float(each[-1])
    found["peak_mb"] = (peak_bytes() or 0) / 1e6
    if clients <= MOST_CLIENTS:
        start = time.process_time()
        logistic(clients, FEATURES, SAMPLES, classes=CLASSES)
        found["synthetic_s"] = time.process_time() - start
    return found


def measure_all(numbers: tuple[int, ...] = NUMBERS) -> list[dict[str, Any]]:
    script = Path(__file__).resolve().parent.parent / "bench.py"
    rows = []
    for clients in numbers:
        command = [str(script), "--case", "clients", "--clients", str(clients), "--json"]
        done = subprocess.run(  # noqa: S603
            [sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True
        )
        rows += json.loads(done.stdout)
    return rows


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """A table in Markdown."""
    methods = " / ".join(METHODS[name].label for name in SHOWN)
    return [
        f"| clients in all | CPU ms per round: {methods} | evaluation of all, s | from_arrays, s "
        "| peak MB | logistic, s |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['clients']:,} | {' / '.join(f'{row[name]:.1f}' for name in SHOWN)} "
            f"| {row['evaluation_s']:.2f} | {row['build_s']:.2f} | {row['peak_mb']:,.0f} "
            f"| {_seconds(row.get('synthetic_s'))} |"
            for row in rows
        ),
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
