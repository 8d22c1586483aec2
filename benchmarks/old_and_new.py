"""Speed of two checkouts of fairvar, measured in turns on one machine.

    git worktree add ../old COMMIT
    python benchmarks/old_and_new.py ../old . --turns 7

Each checkout gets one process per case. The processes train by turns, so that whatever slows the
machine down slows both; the ratio is formed within a turn, and the median of the ratios is printed.
Only `fairvar.train` and `fairvar sweep` are called, which both checkouts have. Times are processor
times of one thread; the first call of each process is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SWEEP = """name = "speed"
[data]
name = "digits"
clients = 20
[partition]
name = "dirichlet"
alpha = 0.5
[model]
name = "multinomial"
[train]
rounds = 30
[evaluate]
every = 10
[sweep]
lr = [0.05, 0.1, 0.2]
seeds = 3
methods = ["fedavg", "fairgrad"]
strength = [0.01, 0.1]
"""
STEP, EPOCH = {}, {"local_epochs": 1, "batch_size": 16}
CASES = {
    f"{model} {method} {work}": (model, method, STEP if work == "step" else EPOCH, clients, rounds)
    for model, methods, clients, rounds in [
        ("multinomial", ("FedAvg", "QFFL", "AFL", "FairLoss", "FairGrad"), 50, 300),
        ("lenet5", ("FedAvg", "QFFL", "FairGrad"), 20, 3),
    ]
    for method in methods
    for work in ("step", "epoch")
}  # fmt: skip


def worker(case: str) -> None:
    """Answer each line of the standard input with the seconds of one training."""
    import torch

    import fairvar as fv

    torch.set_num_threads(1)
    if case == "sweep":
        train = _sweep
    else:
        model, method, work, clients, rounds = CASES[case]
        torch.manual_seed(0)
        shape = (64,) if model == "multinomial" else (3, 32, 32)
        parts = [(torch.randn(32, *shape), torch.arange(32) % 10) for _ in range(clients)]
        federation = fv.Federation.from_arrays(parts)
        kind = getattr(fv, method)
        chosen = kind(strength=0.01) if method.startswith("Fair") else kind()

        def train() -> None:
            options = dict(work, evaluate_every=rounds)
            fv.train(model, federation, chosen, rounds, **options)

    train()
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.process_time()
        train()
        print(time.process_time() - started, flush=True)


def _sweep() -> None:
    from fairvar.cli import main

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "speed.toml")
        file.write_text(SWEEP)
        keep = os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            main(["sweep", str(file), "--out", f"{folder}/out"])
        finally:
            sys.stdout.flush()
            os.dup2(keep, 1)


def start(checkout: Path, case: str) -> subprocess.Popen[str]:
    source = os.pathsep.join([str(checkout.resolve() / "src")])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker", case]
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE,  # noqa: S603
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    answer = process.stdout.readline()
    if not answer:
        _, errors = process.communicate()
        raise SystemExit(f"the worker ended: {errors[-2000:]}")
    return answer


def compare(old: Path, new: Path, case: str, turns: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median of new / old."""
    both = [start(old, case), start(new, case)]
    try:
        for process in both:
            ask(process)
        taken: list[tuple[float, ...]] = []
        for turn in range(turns):
            order = both if turn % 2 == 0 else both[::-1]
            seconds = {}
            for process in order:
                process.stdin.write("go\n")
                process.stdin.flush()
                seconds[process.pid] = float(ask(process))
            taken.append(tuple(seconds[process.pid] for process in both))
    finally:
        for process in both:
            process.kill()
            process.communicate()
    ratios = statistics.median(b / a for a, b in taken)
    first, second = (statistics.median(column) for column in zip(*taken, strict=True))
    return first, second, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker)
    if options.old is None or options.new is None:
        parser.error("give the folders of two checkouts")
    found = {}
    print("| case | old s | new s | new / old |\n|:--|--:|--:|--:|", flush=True)
    for case in ["sweep", *CASES]:
        if options.only in case:
            first, second, ratio = compare(options.old, options.new, case, options.turns)
            found[case] = {"old": first, "new": second, "ratio": ratio}
            print(f"| {case} | {first:.3f} | {second:.3f} | {ratio:.3f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
