"""Part of a data set: stratified, and the same part whatever the partition seed.

Within a class the samples are drawn in one random order, so a smaller part lies in a larger one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Int64, Integer

from fairvar import rng
from fairvar.data.dataset import Dataset
from fairvar.errors import BadInput

DATA_SEED = 0  # fixed: which images take part is a fact about the data, not about the run


def subsample(dataset: Dataset, fraction: float = 1.0, samples: int | None = None) -> Dataset:
    """A stratified `fraction` of the samples, or a number of them; a pool stays whole.

    Class shares are kept up to rounding (largest remainders). The checksum remains that of the
    whole set: it names the source, and fraction and samples stand beside it in the passport.
    """
    check_part(fraction, samples)
    total = len(dataset.y)
    wanted = round(fraction * total) if samples is None else samples
    if wanted > total:
        raise BadInput(f"samples = {samples}; {dataset.name} has {total}, use 1 … {total}")
    if wanted == total:
        return dataset
    rows = stratified(dataset.y, wanted, dataset.name)
    groups = None if dataset.groups is None else dataset.groups[rows]
    return replace(dataset, x=dataset.x[rows], y=dataset.y[rows], groups=groups)


def check_part(fraction: float, samples: int | None) -> None:
    """What can be said without the data."""
    if not 0 < fraction <= 1:
        raise BadInput(f"fraction = {fraction:g}; use a number above 0 and at most 1")
    if samples is not None and fraction != 1:
        raise BadInput("give fraction or samples, not both")
    if samples is not None and samples < 1:
        raise BadInput(f"samples = {samples}; use at least 1")


def stratified(
    labels: Integer[np.ndarray, " N"], wanted: int, name: str
) -> Int64[np.ndarray, " n"]:
    """`wanted` rows with the classes' shares, ascending."""
    present, count = np.unique(labels, return_counts=True)
    exact = count * (wanted / len(labels))
    quota = np.floor(exact + 1e-9).astype(np.int64)
    missing = wanted - int(quota.sum())
    quota[np.argsort(quota - exact, kind="stable")[:missing]] += 1
    if (quota == 0).any():
        label = present[int(np.argmin(quota))]
        least = int(np.ceil(len(labels) / count.min()))
        raise BadInput(f"{wanted} of {len(labels)} samples leave class {label} of {name} empty; "
                       f"use at least {min(least, len(labels))} samples")  # fmt: skip
    chosen = [
        rng.stream(DATA_SEED, "subsample", name, int(label))
        .permutation(np.flatnonzero(labels == label))[:take]
        for label, take in zip(present, quota, strict=True)
    ]  # fmt: skip
    return np.sort(np.concatenate(chosen))
