"""Milliseconds per round of CIFAR-10 as the paper splits it: what a slice of a grid will cost.

python benchmarks/cifar10_rounds.py tf32 step        # or full, bfloat16; or epoch
python benchmarks/cifar10_rounds.py tf32 epoch grouped   # without convolutions as products
Needs a GPU, the data (FAIRVAR_DATA) and, where fairvar is not installed, PYTHONPATH=src:.carry.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from statistics import median

import torch

from fairvar.engine import task
from fairvar.engine.train import run_rounds
from fairvar.runs.config import Config
from fairvar.runs.runner import federation_of, model_of

METHODS = (
    {"name": "fedavg"}, {"name": "afl"}, {"name": "qffl"}, {"name": "aaggff"},
    {"name": "fairloss", "strength": 0.1}, {"name": "fairloss", "strength": 0.1, "exact": True},
    {"name": "fairgrad", "strength": 0.001}, {"name": "fairgrad", "strength": 0.001, "exact": True},
)  # fmt: skip


def milliseconds(config: Config) -> float:
    """The median round after the first few, which choose kernels and record."""
    federation, marks = federation_of(config), list[float]()

    def mark(done: int, total: int) -> None:
        torch.cuda.synchronize()
        marks.append(time.perf_counter())

    model = model_of(config, federation)
    run_rounds(model, federation, config.method, config.model.loss, config.train, config.evaluate,
               progress=mark)  # fmt: skip
    return 1000 * median(b - a for a, b in pairwise(marks[3:-1]))


def main(precision: str, work: str, convolutions: str = "products") -> None:
    if convolutions == "grouped":
        task.products_pay = lambda _: False
    train = {"rounds": 30, "batch_size": 64, "lr": 0.05, "device": "cuda", "precision": precision}
    if work == "epoch":
        train |= {"rounds": 10, "local_epochs": 1}
    for method in METHODS:
        config = Config.from_dict(
            {"data": {"name": "cifar10"}, "model": {"name": "avgcnn"}, "method": method,
             "train": train, "evaluate": {"every": 1000}}
        )  # fmt: skip
        print(f"{config.method.label:10} {milliseconds(config):8.2f} ms", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
