"""The paper's printed tables: what ours stand beside."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from typing import NamedTuple

# Names of our data sets → the paper's rows.
DATASETS = {"mnist_1000": "mnist", "mnist": "mnist", "cifar10": "cifar10",
            "cifar100": "cifar100", "tiny_imagenet": "tiny_imagenet"}  # fmt: skip


class Printed(NamedTuple):
    """Accuracy in percent, variance over clients in fraction² × 100, with standard errors."""

    accuracy: float
    accuracy_error: float
    variance: float
    variance_error: float


@cache
def _tables() -> dict[tuple[str, float, str], Printed]:
    text = resources.files("fairvar.report").joinpath("paper_tables.csv").read_text("utf-8")
    found = {}
    for row in csv.DictReader(text.splitlines()):
        values = (float(row[k]) for k in ("acc", "acc_se", "var", "var_se"))
        found[row["dataset"], float(row["alpha"]), row["method"]] = Printed(*values)
    return found


def printed(dataset: str, alpha: float | None, label: str) -> Printed | None:
    """The paper's cell for a method label such as "FairGrad*", if it has one."""
    name = label.lower().replace("-", "").replace("*", "_star")
    return None if alpha is None else _tables().get((DATASETS.get(dataset, ""), alpha, name))
