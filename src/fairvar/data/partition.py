"""Ways to deal a data set's samples to clients. A partition is a value; `assign` is pure.

Every way uses all samples and gives each to exactly one client. What cannot work is refused before
anything is drawn, and the number of draws is bounded: FL-bench's loop until every client holds the
minimum never ends for 1,000 MNIST images over 50 clients at alpha ≤ 0.1.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int64, Integer, Shaped

from fairvar.common.validation import Checked, Count, Positive
from fairvar.errors import BadInput

Labels = Integer[np.ndarray, " N"]
Groups = Shaped[np.ndarray, " N"] | None
Counts = Int64[np.ndarray, "labels n"]  # samples of each label per client
PerLabel = Int64[np.ndarray, " labels"]
Shares = Float[np.ndarray, "labels n"]

# Dirichlet variates in all attempts together; keeps the worst request below about a second.
VARIATE_BUDGET = 2_000_000


@dataclass(frozen=True)
class Assignment:
    """Who holds what: `indices[i]` are client i's samples, ascending."""

    indices: list[np.ndarray]
    attempts: int = 1  # draws that were looked at, the accepted one included
    moved: int = 0  # samples given to other clients to reach the minimum

    @property
    def sizes(self) -> Int64[np.ndarray, " n"]:
        return np.array([len(rows) for rows in self.indices], dtype=np.int64)


class Dirichlet(Checked, frozen=True, tag_field="name", tag="dirichlet"):
    """Each label's samples are cut by w ~ Dirichlet(alpha, …, alpha) over the clients (FL-bench).

    `balanced` is FL-bench before 31 October 2024: a client that holds N/n samples gets none of the
    later labels. Draws with a client below `min_samples` are drawn again, up to `attempts` times;
    then `repair` moves samples of the largest clients, `refuse` gives up.
    """

    alpha: Positive  # the smaller, the more the clients differ
    balanced: bool = False  # a client with its share of samples gets none of later labels
    min_samples: Count = 10  # of every client
    attempts: Count = 1000  # draws until every client has min_samples
    on_failure: Literal["repair", "refuse"] = "repair"  # where no draw has min_samples

    def assign(
        self, labels: Labels, clients: int, rng: np.random.Generator, groups: Groups = None
    ) -> Assignment:
        _check_enough(len(labels), clients, self.min_samples, "min_samples")
        _, code, per_label = np.unique(labels, return_inverse=True, return_counts=True)
        counts, attempts = self._draw(per_label, clients, rng)
        short = bool((counts.sum(0) < self.min_samples).any())
        if short and self.on_failure == "refuse":
            raise BadInput(self._why(counts, attempts))
        moved = _repair(counts, self.min_samples) if short else 0
        return Assignment(_materialise(code, counts, rng), attempts, moved)

    def _draw(
        self, per_label: PerLabel, clients: int, rng: np.random.Generator
    ) -> tuple[Counts, int]:
        """Counts of the first draw that meets the minimum, else of the one that misses least."""
        cut = _cut_balanced if self.balanced else _cut
        # The balanced cut goes label by label: a Python step costs about as much as 64 variates.
        cost = len(per_label) * (max(clients, 64) if self.balanced else clients)
        attempts = min(self.attempts, max(1, VARIATE_BUDGET // cost))
        best, shortage = np.empty((0, 0), dtype=np.int64), np.inf
        for attempt in range(1, attempts + 1):
            counts = cut(_dirichlet(self.alpha, len(per_label), clients, rng), per_label, rng)
            missing = np.maximum(self.min_samples - counts.sum(0), 0).sum()
            if missing == 0:
                return counts, attempt
            if missing < shortage:
                best, shortage = counts, missing
        return best, attempts

    def _why(self, counts: Counts, attempts: int) -> str:
        sizes = counts.sum(0)
        return (
            f"no draw in {attempts} attempts gave all {len(sizes)} clients {self.min_samples} "
            f"samples (mean {sizes.mean():.1f} per client; in the best draw "
            f"{int((sizes < self.min_samples).sum())} clients have fewer); lower min_samples or "
            f"clients, raise alpha (now {self.alpha:g}), or set on_failure to 'repair'"
        )


class IID(Checked, frozen=True, tag_field="name", tag="iid"):
    """Samples dealt at random, in sizes that differ by at most one."""

    min_samples: Count = 1  # of every client

    def assign(
        self, labels: Labels, clients: int, rng: np.random.Generator, groups: Groups = None
    ) -> Assignment:
        _check_enough(len(labels), clients, self.min_samples, "min_samples")
        owner = np.empty(len(labels), dtype=np.int64)
        owner[rng.permutation(len(labels))] = np.arange(len(labels)) % clients
        return Assignment(_by_client(owner, clients))


class Shards(Checked, frozen=True, tag_field="name", tag="shards"):
    """Samples sorted by label and cut into equal shards, `per_client` to each (McMahan 2017)."""

    per_client: Count = 2  # shards for each client

    def assign(
        self, labels: Labels, clients: int, rng: np.random.Generator, groups: Groups = None
    ) -> Assignment:
        _check_enough(len(labels), clients, self.per_client, "per_client (shards)")
        shuffled = rng.permutation(len(labels))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        holder = rng.permutation(clients * self.per_client) % clients
        owner = np.empty(len(labels), dtype=np.int64)
        for rows, client in zip(np.array_split(by_label, len(holder)), holder, strict=True):
            owner[rows] = client
        return Assignment(_by_client(owner, clients))


class Natural(Checked, frozen=True, tag_field="name", tag="natural"):
    """One client per group of the data set (writer, speaker, hospital …), in the groups' order."""

    def assign(
        self, labels: Labels, clients: int, rng: np.random.Generator, groups: Groups = None
    ) -> Assignment:
        if groups is None:
            raise BadInput("the natural partition needs group ids, and this data set has none; "
                           "use dirichlet, shards or iid")  # fmt: skip
        names, owner = np.unique(groups, return_inverse=True)
        if len(names) != clients:
            raise BadInput(f"the data set has {len(names)} groups but clients = {clients}; "
                           f"set clients to {len(names)} or use another partition")  # fmt: skip
        return Assignment(_by_client(owner.astype(np.int64), clients))


Partition = Dirichlet | IID | Shards | Natural


def _check_enough(samples: int, clients: int, each: int, field: str) -> None:
    if clients < 1:
        raise BadInput(f"clients = {clients}; a federation needs at least one client")
    if clients * each > samples:
        most = f"at most {samples // each} clients" if samples >= each else "more data"
        less = f" or {field} at most {samples // clients}" if samples >= clients else ""
        raise BadInput(f"{clients} clients with {field} = {each} need {clients * each} samples but "
                       f"there are {samples}; use {most}{less}")  # fmt: skip


def _dirichlet(alpha: float, labels: int, clients: int, rng: np.random.Generator) -> Shares:
    """Proportions per label; a draw that under- or overflows becomes its limit: one client."""
    share = rng.dirichlet(np.full(clients, alpha), size=labels)
    total = share.sum(1)
    for label in np.flatnonzero(~np.isfinite(total) | (total <= 0)):
        share[label] = _one_hot(np.arange(clients), clients, rng)
    return share


def _one_hot(
    candidates: Int64[np.ndarray, " m"], clients: int, rng: np.random.Generator
) -> Float[np.ndarray, " n"]:
    chosen = np.zeros(clients)
    chosen[rng.choice(candidates)] = 1.0
    return chosen


def _cut(share: Shares, per_label: PerLabel, rng: np.random.Generator) -> Counts:
    """Samples of each label per client: differences of floor(cumulated share · count)."""
    edges = np.cumsum(share, axis=1)
    # Divided by the last edge, so that a client without share gets nothing from rounding.
    edges = np.floor(edges / edges[:, -1:] * per_label[:, None]).astype(np.int64)
    return np.diff(edges, axis=1, prepend=0)


def _cut_balanced(share: Shares, per_label: PerLabel, rng: np.random.Generator) -> Counts:
    """As `_cut`, label by label, with clients that already hold N/n samples left out."""
    clients = share.shape[1]
    even = per_label.sum() / clients
    counts = np.zeros(share.shape, dtype=np.int64)
    size = np.zeros(clients, dtype=np.int64)
    for label in range(len(per_label)):
        is_open = size < even
        part = np.where(is_open, share[label], 0.0)
        if part.sum() <= 0:  # at tiny alpha the full clients can hold all of the share
            part = _one_hot(np.flatnonzero(is_open), clients, rng)
        counts[label] = _cut(part[None], per_label[label : label + 1], rng)[0]
        size += counts[label]
    return counts


def _repair(counts: Counts, minimum: int) -> int:
    """Fill clients below the minimum from the largest ones, in place; returns samples moved.

    The largest are lowered to a common level (never below the minimum). A client receives labels
    that it has already, then the giver's most frequent ones, so that the label skew survives.
    """
    sizes = counts.sum(0)
    need = np.maximum(minimum - sizes, 0)
    give = _lowered(sizes, int(need.sum()))
    givers = [int(i) for i in np.argsort(-sizes, kind="stable") if give[i]]
    for receiver in np.flatnonzero(need):
        while need[receiver]:
            giver = givers[0]
            wanted = np.lexsort((-counts[:, giver], -counts[:, receiver]))
            open_amount = min(need[receiver], give[giver])
            room = np.minimum(np.cumsum(counts[wanted, giver]), open_amount)
            taken = np.diff(room, prepend=0)
            counts[wanted, giver] -= taken
            counts[wanted, receiver] += taken
            need[receiver] -= open_amount
            give[giver] -= open_amount
            if not give[giver]:
                givers.pop(0)
    return int(np.maximum(minimum - sizes, 0).sum())


def _lowered(sizes: Int64[np.ndarray, " n"], amount: int) -> Int64[np.ndarray, " n"]:
    """Samples each client gives if the largest are lowered to one level, `amount` in all."""
    low, high = 0, int(sizes.max())  # the highest level that still frees `amount`
    while low < high:
        level = (low + high + 1) // 2
        if np.maximum(sizes - level, 0).sum() >= amount:
            low = level
        else:
            high = level - 1
    give = np.maximum(sizes - low, 0)
    smallest_first = np.argsort(np.where(give > 0, sizes, np.iinfo(np.int64).max), kind="stable")
    give[smallest_first[: int(give.sum()) - amount]] -= 1
    return give


def _materialise(
    code: Int64[np.ndarray, " N"], counts: Counts, rng: np.random.Generator
) -> list[np.ndarray]:
    """Counts → sample indices: within a label, chance decides who gets which sample."""
    clients = counts.shape[1]
    owner = np.empty(len(code), dtype=np.int64)
    members_by_label = np.split(np.argsort(code, kind="stable"), np.cumsum(counts.sum(1))[:-1])
    for members, count in zip(members_by_label, counts, strict=True):
        owner[rng.permutation(members)] = np.repeat(np.arange(clients), count)
    return _by_client(owner, clients)


def _by_client(owner: Int64[np.ndarray, " N"], clients: int) -> list[np.ndarray]:
    """The samples of each client, ascending."""
    sizes = np.bincount(owner, minlength=clients)
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])


def statistics_of(
    labels: Integer[np.ndarray, " N *positions"], assignment: Assignment
) -> dict[str, Any]:
    """Its checksum and how uneven it is, as JSON-able facts. Of sequences, positions are counted;
    a negative label is none.

    `mean_total_variation`: distance of a client's label law from the pooled one (0: alike).
    `effective_classes`: 1 / Σ share². `majority_share`: the accuracy of always answering the
    client's most frequent class. All three are means over clients.
    """
    names, real = np.unique(labels[labels >= 0]), labels.reshape(len(labels), -1) >= 0
    code = np.searchsorted(names, labels.reshape(len(labels), -1))
    rows, sizes = np.concatenate(assignment.indices), assignment.sizes
    held = (np.repeat(np.arange(len(sizes)), sizes)[:, None] * len(names) + code[rows])[real[rows]]
    count = np.bincount(held, minlength=len(sizes) * len(names)).reshape(len(sizes), len(names))
    share = count / count.sum(1, keepdims=True)
    pooled, digest = count.sum(0) / count.sum(), hashlib.sha256()
    for part in ([len(sizes)], sizes, rows):  # sizes, so that boundaries count too
        digest.update(np.asarray(part, dtype="<i8").tobytes())
    return {
        "sha256": digest.hexdigest(),
        "clients": len(sizes),
        "sizes": sizes.tolist(),
        "classes_by_client": (count > 0).sum(1).tolist(),
        "mean_total_variation": float(0.5 * np.abs(share - pooled).sum(1).mean()),
        "effective_classes": float((1 / (share**2).sum(1)).mean()),
        "majority_share": float(share.max(1).mean()),
        "attempts": assignment.attempts,
        "moved": assignment.moved,
    }
