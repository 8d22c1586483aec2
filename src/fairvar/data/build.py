"""From a data set to a `Federation`: samples are dealt to clients, and each client's are split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import torch
from jaxtyping import Float, Int64, Integer

from fairvar.common import rng
from fairvar.common.validation import as_python, whole_number
from fairvar.data import builtin, sources
from fairvar.data.dataset import Dataset
from fairvar.data.federation import SPLITS, Federation, Split
from fairvar.data.own_data import DEFAULT_SPLIT, Rows, Shares, checked_shares, split_rows
from fairvar.data.partition import (
    IID,
    Assignment,
    Dirichlet,
    Natural,
    Partition,
    statistics_of,
)
from fairvar.errors import BadInput, shown, unknown

Holdout = Literal["auto", "split", "pool"]

DATA_SEED = 0  # which images take part is a fact about the data, not about the run

# (clients, seed) → data. A `Dataset` is still to be dealt to clients, a `Federation` comes dealt.
DATASETS: dict[str, Callable[[int, int], Dataset | Federation]] = {
    "mnist_1000": lambda clients, seed: builtin.mnist_1000(),
    "mnist_rotated": lambda clients, seed: _rotated(clients, seed),
    "digits": lambda clients, seed: builtin.digits(),
    "quadratic": lambda clients, seed: builtin.random_quadratics(clients, 10, seed)[0],
    "logistic": lambda clients, seed: builtin.logistic(clients, seed=seed),
    "clinics": lambda clients, seed: builtin.clinics(clients, seed),
}


DATASET_NAMES = (*DATASETS, *sources.SOURCES)


def _is_file_set(name: str, root: sources.Root) -> bool:
    if name not in sources.SOURCES and root is not None:
        raise BadInput(f"{name} is part of the package; leave root out")
    return name in sources.SOURCES


def dataset_sha256(name: str, root: sources.Root = None) -> str | None:
    """The SHA-256 of the data that a name means here; None where they are made from the
    settings. The files must be there, and are read only if they are new or have changed."""
    if _is_file_set(name, root):
        return sources.sha256_of(name, root)
    return builtin.SHA256.get(f"{name}.npz")


def load_federation(
    name: str,
    clients: int = 50,
    partition: Partition | None = None,
    seed: int = 0,
    *,
    split: tuple[float, float, float] = DEFAULT_SPLIT,
    holdout: Holdout = "auto",
    pool_samples: int = 200,
    fraction: float = 1.0,
    samples: int | None = None,
    root: str | Path | None = None,
) -> Federation:
    """A federation by the name of its data; without a partition, Dirichlet(alpha=0.1).

    `split`: shares of train, valid and test of each client. `holdout`: with "pool" clients train on
    all their samples and are validated and tested on `pool_samples` each from the data set's pool;
    "auto" does so where there is a pool. `seed` decides who holds what, not how training runs.

    Sets that are read from files (`sources.SOURCES`) merge their official training and test parts,
    unless holdout is "pool": then the test part is the pool. `root` is the folder of the files;
    `fraction` or `samples` take a stratified part, always the same one.
    """
    if not isinstance(name, str) or name not in DATASET_NAMES:
        raise unknown("data set", name, DATASET_NAMES)
    if not isinstance(root, str | Path | None):
        raise BadInput(f"root = {shown(root)}: give the path of a folder or file")
    clients, seed, split, pool_samples, fraction, samples = _checked_request(
        clients, partition, seed, split, holdout, pool_samples, fraction, samples
    )
    data: Dataset | Federation
    if _is_file_set(name, root):
        data = sources.load(name, root, pool=holdout == "pool")
    else:
        data = DATASETS[name](clients, seed)
    return deal(name, data, clients, partition, seed, split=split, holdout=holdout,
                pool_samples=pool_samples, fraction=fraction, samples=samples)  # fmt: skip


def deal(
    name: str,
    data: Dataset | Federation,
    clients: int,
    partition: Partition | None,
    seed: int,
    **how: Any,
) -> Federation:
    """Deal a data set to clients; a federation is there already and takes no such settings. `how`:
    the further arguments of `build_federation`, all of them."""
    if isinstance(data, Dataset):
        return build_federation(data, clients, partition or Dirichlet(alpha=0.1), seed, **how)
    if not (partition is None or isinstance(partition, Natural)):
        raise BadInput(f'{name} is made client by client; set partition.name = "natural", or leave '
                       "the partition out in Python")  # fmt: skip
    if how["split"] != DEFAULT_SPLIT or how["holdout"] != "auto":
        raise BadInput(f"{name} comes with its own splits; leave split and holdout out")
    if how["fraction"] != 1 or how["samples"] is not None:
        raise BadInput(f"{name} is made client by client; leave fraction and samples out")
    return data


def _rotated(clients: int, seed: int) -> Federation:
    """`mnist_1000` dealt at random, with a fifth of the clients different by nature: all their
    images are turned by a quarter. `special` in the provenance lists them; they are the last."""
    even = build_federation(builtin.mnist_1000(), clients, IID(), seed)
    special = torch.arange(clients) >= clients - clients // 5
    splits: dict[str, Any] = {}
    for part in SPLITS:
        split = getattr(even, part)
        turned = special.repeat_interleave(split.counts)[:, None, None, None]
        x = torch.where(turned, split.x.rot90(1, (2, 3)), split.x)
        splits[part] = Split(x, split.y, split.counts)
    facts = {key: value for key, value in even.provenance.items() if key != "dataset_sha256"}
    facts |= {"dataset": "mnist_rotated", "special": special.nonzero()[:, 0].tolist()}
    facts["partition"] = msgspec.to_builtins(Natural())  # as the configuration has it
    return Federation(**splits, classes=even.classes, name="mnist_rotated", provenance=facts)


def build_federation(
    dataset: Dataset,
    clients: int,
    partition: Partition,
    seed: int = 0,
    split: tuple[float, float, float] = DEFAULT_SPLIT,
    holdout: Holdout = "auto",
    pool_samples: int = 200,
    *,
    fraction: float = 1.0,
    samples: int | None = None,
) -> Federation:
    """Deal a data set to clients and split each client's part (see `load_federation`)."""
    if not isinstance(dataset, Dataset):
        raise BadInput(f"dataset must be a fairvar Dataset, not {type(dataset).__name__}")
    if partition is None:
        raise BadInput(f"partition = None: {PARTITION}")
    clients, seed, split, pool_samples, fraction, samples = _checked_request(
        clients, partition, seed, split, holdout, pool_samples, fraction, samples
    )
    dataset = subsample(dataset, fraction, samples)
    if holdout == "auto":
        holdout = "split" if dataset.pool_x is None else "pool"
    draw = rng.stream(seed, "partition", dataset.name)
    assignment = partition.assign(dataset.strata, clients, draw, dataset.groups)
    if holdout == "pool":
        rows = _from_pool(dataset, assignment, seed, pool_samples)
    else:
        rows = split_rows(assignment.indices, seed, split)
    scale = dataset.scale
    drawn = {
        "dataset": dataset.name,
        "dataset_sha256": dataset.sha256,
        "provenance": dataset.provenance,
        "normalisation": scale and {"mean": list(scale.mean), "sd": list(scale.sd)},
        "fraction": fraction,
        "samples": samples,
        "partition": msgspec.to_builtins(partition),
        "seed": seed,
        "holdout": holdout,
        "split": list(split) if holdout == "split" else None,
        "pool_samples": pool_samples if holdout == "pool" else None,
        "split_sizes": {part: [len(r) for r in of] for part, of in rows.items()},
    }
    facts = {**statistics_of(dataset.y, assignment), **drawn}
    splits: dict[str, Any] = {}
    for part, of in rows.items():
        # Gathered straight into their place; `Dataset` has checked values and labels.
        x, y = dataset.gather(np.concatenate(of), holdout == "pool" and part != "train")
        counts = torch.tensor([len(r) for r in of], dtype=torch.int64)
        splits[part] = Split(torch.from_numpy(x), torch.from_numpy(y), counts)
    if dataset.y.ndim > 1:
        facts["split_answers"] = {part: s.answers.tolist() for part, s in splits.items()}
    return Federation(**splits, classes=dataset.classes, name=dataset.name, provenance=facts)


PARTITION = "give an object such as Dirichlet(alpha=0.1), Shards(), IID() or Natural()"


def _checked_request(
    clients: Any, partition: object, seed: Any, split: Any, holdout: object,
    pool_samples: Any, fraction: Any, samples: Any,
) -> tuple[int, int, Shares, int, float, int | None]:  # fmt: skip
    """Everything that can be checked before the data are read; numbers as Python's."""
    clients = whole_number("clients", clients, least=1)
    pool_samples = whole_number("pool_samples", pool_samples, least=1)
    samples = None if samples is None else whole_number("samples", samples, least=1)
    seed = whole_number("seed", seed)
    if not isinstance(partition, (*get_args(Partition), NoneType)):
        raise BadInput(f"partition = {shown(partition)}: {PARTITION}")
    if not isinstance(holdout, str) or holdout not in get_args(Holdout):
        raise unknown("holdout", holdout, get_args(Holdout))
    share = as_python(fraction)
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise BadInput(f"fraction = {shown(fraction)}: give a number above 0 and at most 1")
    if samples is not None and fraction != 1:
        raise BadInput("give fraction or samples, not both")
    return clients, seed, checked_shares(split), pool_samples, share, samples


def _from_pool(
    dataset: Dataset, assignment: Assignment, seed: int, pool_samples: int
) -> dict[str, Rows]:
    """All own samples train. Validation and test come from two halves of the pool, own label mix.

    Clients may share pool images, a client has none twice, and no image validates and tests.
    """
    if dataset.pool_x is None or dataset.pool_y is None:
        raise BadInput(f"data set {dataset.name} has no pool; use holdout 'split' or 'auto'")
    rows = {"train": assignment.indices}
    labels, code = np.unique(dataset.strata, return_inverse=True)
    halves = _pool_halves(dataset.pool_y, labels, seed)
    for part, members_by_label in halves.items():
        room = np.array([len(members) for members in members_by_label])
        rows[part] = []
        for client, owned in enumerate(assignment.indices):
            count = np.bincount(code[owned], minlength=len(labels))
            draw = rng.stream(seed, "pool", part, client)
            quota = _label_quota(count, room, pool_samples)
            chosen = [draw.permutation(m)[:q] for m, q in zip(members_by_label, quota, strict=True)]
            rows[part].append(np.concatenate(chosen))
    return rows


def _pool_halves(
    pool_y: Integer[np.ndarray, " P"], labels: Integer[np.ndarray, " labels"], seed: int
) -> dict[str, Rows]:
    """The pool's indices per label, cut at random into a half for validation and one for test."""
    halves: dict[str, Rows] = {"valid": [], "test": []}
    for label in labels:
        members = np.flatnonzero(pool_y == label)
        if len(members) < 2:
            raise BadInput(f"the pool holds {len(members)} samples of label {label}, but "
                           "validation and test need one each; use holdout 'split'")  # fmt: skip
        shuffled = rng.stream(seed, "pool", int(label)).permutation(members)
        halves["valid"].append(shuffled[: len(members) // 2])
        halves["test"].append(shuffled[len(members) // 2 :])
    return halves


def _label_quota(
    count: Int64[np.ndarray, " labels"], room: Int64[np.ndarray, " labels"], wanted: int
) -> Int64[np.ndarray, " labels"]:
    """How many pool samples of each label: the client's mix, by largest remainders.

    Where the half holds too few of a label the whole sample shrinks, so that the mix stays true.
    """
    held = count > 0
    share: Float[np.ndarray, " labels"] = count / count.sum()
    fits = int((room[held] / share[held]).min() + 1e-9)
    exact = share * min(wanted, max(fits, 1))
    return np.minimum(largest_remainders(exact, round(float(exact.sum()))), room)


def subsample(dataset: Dataset, fraction: float = 1.0, samples: int | None = None) -> Dataset:
    """A stratified `fraction` of the samples, or a number of them; a pool stays whole.

    A smaller part is contained in a larger one, and no part depends on the seed of the partition.
    The checksum remains that of the whole set.
    """
    total = len(dataset.y)
    wanted = round(fraction * total) if samples is None else samples
    if wanted > total:
        raise BadInput(f"samples = {samples}; {dataset.name} has {total}, use 1 … {total}")
    if wanted == total:
        return dataset
    rows = stratified(dataset.strata, wanted, dataset.name)
    groups = None if dataset.groups is None else dataset.groups[rows]
    return replace(dataset, x=dataset.x[rows], y=dataset.y[rows], groups=groups)


def largest_remainders(exact: Float[np.ndarray, " n"], total: int) -> Int64[np.ndarray, " n"]:
    """Whole numbers near the exact ones that sum to `total`: rounded down, then the largest
    remainders up."""
    found = np.floor(exact + 1e-9).astype(np.int64)
    found[np.argsort(found - exact, kind="stable")[: total - int(found.sum())]] += 1
    return found


def stratified(
    labels: Integer[np.ndarray, " N"], wanted: int, name: str
) -> Int64[np.ndarray, " n"]:
    """`wanted` rows with the classes' shares, ascending."""
    present, count = np.unique(labels, return_counts=True)
    quota = largest_remainders(count * (wanted / len(labels)), wanted)
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
