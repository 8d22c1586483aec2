"""Checks of replies, limits on a client's influence, and the record of both (`Notes`).

A bad reply is left out, recorded and counted; the round continues with the others. A reply is
refused for its form or for impossible values, never for being unlike the others: the worst-off
honest client has the largest loss and often the largest update. The influence of a false loss or
number of samples is limited instead (`limited_weights`, `mean_loss`), and updates that are far too
long are shortened, not refused (`shortened`). `combination` chooses a mean or a robust average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
import torch
from jaxtyping import Float64
from torch import Tensor

from fairvar.common.tree import Tree, is_finite, squared_norm, tree_map, weighted_sum
from fairvar.common.validation import Checked, Count, Positive
from fairvar.deploy.client import ACCURACY, HELD_OUT, LOSS, METRIC, SAMPLES, Message, Stamp
from fairvar.engine.server import Combine
from fairvar.errors import BadInput
from fairvar.methods.base import Method

LONGEST = 200  # characters of a detail: clients may send texts of any length
Form = tuple[torch.dtype, tuple[int, ...]]  # of an array: expected, or from its header
ROUNDING = 1e-9  # 0.1 · 30 is a little more than 3
OFF = 1e9  # a bound of this size is switched off
NAME = "federation"  # of the notes, among the tables of a checkpoint
PARTS = ("train", *HELD_OUT)
MAX_LISTED = 10  # clients that an error message names
MOST_REFUSALS = 10_000  # that are recorded one by one; further ones are counted
Factor = Annotated[float, msgspec.Meta(ge=1, le=OFF)]


class FederationSettings(Checked, frozen=True, kw_only=True):
    """Deadlines and limits of a deployment. How many clients a round samples is set by
    `train.participation` or `train.participants`."""

    __where__: ClassVar[str | None] = "federation"

    deadline: Positive = 600.0  # seconds for one exchange; later replies are left out
    patience: Positive = 600.0  # seconds to wait until enough clients are available
    min_replies: Count = 1  # a round with fewer accepted replies is repeated
    repeats: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 3  # of one round, before the run stops
    # A loss is clipped to this many times the largest median loss of any round, or the loss of
    # guessing among the classes if that is larger. Honest clients are far below.
    loss_cap: Factor = 100.0
    # The largest share of the sum of weights for one client (in small rounds: 2 / replies).
    weight_cap: Annotated[float, msgspec.Meta(ge=0.5, le=1)] = 0.5
    largest: Positive = 1e9  # norms, losses, numbers of samples: larger values are refused
    # Clients that may return with another key than the one recorded for them, such as [2].
    rebind: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    # Against dishonest clients; docs/robustness.md measures what each of these prevents and costs.
    # Updates, gradients and changes of buffers that are longer than this many times the largest
    # median length of the past rounds are shortened to that median.
    norm_bound: Factor = 10.0
    # In FairLoss's mean loss, losses are clipped to this many times the largest loss that remains
    # without the share `liars` of largest losses.
    mean_loss_bound: Factor = 5.0
    # How updates and gradients are averaged: their mean or, coordinate by coordinate, the mean
    # without the share `liars` of largest and of smallest values, or the median.
    average: Literal["mean", "trimmed", "median"] = "mean"
    liars: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.2  # share of dishonest clients


class Reason(StrEnum):
    NO_REPLY = "no reply"  # nothing came before the deadline
    ERROR = "error"  # the client or the transport reported one
    UNKNOWN = "unknown client"  # not asked, or it sent another client's id
    DUPLICATE = "duplicate"
    STALE = "stale"  # an answer to another round, attempt or exchange
    FORMAT = "format"
    KEYS = "keys"
    SHAPE = "shape"
    DTYPE = "dtype"
    NOT_FINITE = "not finite"
    TOO_LARGE = "too large"
    NEGATIVE = "negative variance"  # of batch norm: its square root would be no number
    LOSS = "loss"
    SAMPLES = "samples"
    SCORES = "scores"


class Refusal(NamedTuple):
    """The record of one reply that was left out."""

    round: int
    attempt: int
    exchange: str
    client: int
    reason: Reason
    detail: str


class BadMessage(ValueError):
    """The reason why there is no valid reply."""

    def __init__(self, reason: Reason = Reason.NO_REPLY, detail: str = "") -> None:
        self.reason, self.detail = reason, brief(detail)
        super().__init__(f"not a message of fairvar's: {self.detail}")


def brief(text: str) -> str:
    """One printable line of bounded length, for logs and tables: clients may send any text."""
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST]).strip()


def labelled(client: int, names: Mapping[int, str]) -> str:
    """The client in logs and messages, with the name of its site if it has one."""
    return f"{names[client]} (client {client})" if client in names else f"client {client}"


def listed(clients: Sequence[int], names: Mapping[int, str]) -> str:
    """The first of these clients, and how many more there are."""
    return _shortened([labelled(client, names) for client in clients], ", ")


class Arrival(NamedTuple):
    """What the transport returned for one client."""

    client: int
    reply: Message | BadMessage


@dataclass(frozen=True)
class Expected:
    """The form of a valid reply to this exchange."""

    stamp: Stamp
    asked: frozenset[int]
    arrays: Mapping[str, Tensor]  # of these names, shapes and dtypes
    loss: bool
    scores: Sequence[str]  # splits on which it may report scores
    largest: float
    score_within: tuple[float, float] | None = None  # None: no score other than loss and accuracy


class RoundNote(NamedTuple):
    """The record of a round: the clients that were aggregated, those of them whose weight was cut
    or whose update, gradient or buffers were shortened, and the keys that were first recorded in
    this round, as "client:key"."""

    round: int
    clients: list[int]
    limited: list[int]
    shortened: list[int]
    bound: tuple[str, ...] = ()


class Notes(msgspec.Struct):
    """What the server records in addition to the tables of a History. It is part of every
    checkpoint, so that the record of a resumed run starts at its first round."""

    samples: dict[str, list[int]]  # by split and client, as far as they are known
    refused: list[Refusal] = []
    rounds: list[RoundNote] = []
    typical_loss: float = 0.0  # the largest median loss of any round
    more_refused: dict[str, int] = {}  # beyond the list, by reason
    keys: dict[int, str] = {}  # of each client, where clients have keys
    # The median lengths of the last rounds' updates, gradients and changes of buffers, by group.
    lengths: dict[str, list[float]] = {}
    names: dict[int, str] = {}  # of the sites that have one
    training: int = 0  # the number of this run, under which clients keep personal models of it

    @staticmethod
    def reopen(tables: Mapping[str, Tensor] | None, clients: int) -> Notes:
        """The notes of a checkpoint; empty ones without a checkpoint."""
        if tables is None or NAME not in tables:
            return Notes({part: [0] * clients for part in PARTS})
        return msgspec.json.decode(tables[NAME].numpy().tobytes(), type=Notes)

    def bind(self, keys: Mapping[int, str]) -> tuple[str, ...]:
        """Record the key of each client; returns the new ones as "client:key"."""
        new = {c: k for c, k in sorted(keys.items()) if self.keys.get(c) != k}
        self.keys |= new
        return tuple(f"{c}:{k}" for c, k in new.items())

    def refuse(self, stamp: Stamp, bad: Iterable[tuple[int, BadMessage]]) -> None:
        refused = [
            Refusal(stamp.round, stamp.attempt, stamp.exchange, client, why.reason, why.detail)
            for client, why in bad
        ]
        room = max(0, MOST_REFUSALS - len(self.refused))
        self.refused += refused[:room]
        self.more_refused = dict(Counter(self.more_refused) + counted(refused[room:]))

    def count_samples(self, good: Mapping[int, Message]) -> None:
        """Record the clients' numbers of samples, which only their replies have."""
        for i, reply in good.items():
            for part, counts in self.samples.items():
                key = SAMPLES if part == "train" else f"{part}/{SAMPLES}"
                counts[i] = int(reply.numbers.get(key, counts[i]))

    def reasons(self) -> Counter[str]:
        """How often each reason occurred."""
        return counted(self.refused) + Counter(self.more_refused)

    def table(self) -> Tensor:
        """JSON as a tensor of bytes, because checkpoints hold tensors only."""
        return torch.frombuffer(bytearray(msgspec.json.encode(self)), dtype=torch.uint8)


def reasons_by_client(refused: Sequence[Refusal], names: Mapping[int, str]) -> str:
    """For each client, the latest reason why its reply was refused."""
    times = Counter(refusal.client for refusal in refused)
    last = {refusal.client: refusal for refusal in refused}
    parts = []
    for client in sorted(last):
        why = last[client].detail or last[client].reason
        often = f" ({times[client]} times)" if times[client] > 1 else ""
        parts.append(f"{labelled(client, names)}: {why}{often}")
    return _shortened(parts, "; ")


def _shortened(parts: Sequence[str], separator: str) -> str:
    more = len(parts) - MAX_LISTED
    return separator.join([*parts[:MAX_LISTED], *([f"and {more} more"] if more > 0 else [])])


def counted(refused: Iterable[Refusal]) -> Counter[str]:
    """How often each reason occurred."""
    return Counter(refusal.reason.value for refusal in refused)


def sift(
    arrivals: Iterable[Arrival], expected: Expected
) -> tuple[dict[int, Message], list[tuple[int, BadMessage]]]:
    """The valid replies by client, ids rising, and why the others are not valid."""
    good: dict[int, Message] = {}
    bad: list[tuple[int, BadMessage]] = []
    for client, arrived in arrivals:
        try:
            reply = _checked(client, arrived, expected)
            if client in good:
                raise BadMessage(Reason.DUPLICATE, "a second answer; the first one counts")
            good[client] = reply
        except BadMessage as why:
            bad.append((client, why))
        except Exception as error:  # any other failure of a check
            bad.append((client, BadMessage(Reason.FORMAT, repr(error))))
    missing = expected.asked - good.keys() - {client for client, _ in bad}
    bad += [(client, BadMessage()) for client in sorted(missing)]
    return dict(sorted(good.items())), bad


def _checked(client: int, reply: Message | BadMessage, expected: Expected) -> Message:
    if isinstance(reply, BadMessage):
        raise reply
    if client not in expected.asked:
        raise BadMessage(Reason.UNKNOWN, "it was not asked")
    if not _same(reply.client, client):
        raise BadMessage(Reason.UNKNOWN, f"it says it is client {reply.client!r}")
    if not _same(reply.stamp.format, expected.stamp.format):
        raise BadMessage(Reason.FORMAT, f"format {reply.stamp.format!r}")
    if not all(map(_same, reply.stamp, expected.stamp)):
        raise BadMessage(Reason.STALE, f"an answer to {tuple(reply.stamp)[:3]}")
    _check_arrays(reply.arrays, expected)
    _check_numbers(reply.numbers, expected)
    return reply


def _same(value: Any, known: Any) -> bool:
    """Equal and of the same type: 1.0 and True equal 1 but are not valid ids or rounds."""
    return type(value) is type(known) and value == known


def check_forms(found: Mapping[str, Form], like: Mapping[str, Tensor]) -> None:
    """Refuse arrays of other names, types or shapes, before their values are read."""
    if found.keys() != like.keys():
        missing = sorted(like.keys() - found.keys())
        extra = sorted(map(str, found.keys() - like.keys()))
        raise BadMessage(Reason.KEYS, f"missing {missing[:3]}, not asked for {extra[:3]}")
    for name, leaf in like.items():
        dtype, shape = found[name]
        if dtype != leaf.dtype:
            raise BadMessage(Reason.DTYPE, f"{name} is {dtype}, not {leaf.dtype}")
        if shape != tuple(leaf.shape):  # exactly: (1,) would broadcast into (10,)
            raise BadMessage(Reason.SHAPE, f"{name} is {shape}")


def _check_arrays(arrays: Tree, expected: Expected) -> None:
    check_forms({k: (v.dtype, tuple(v.shape)) for k, v in arrays.items()}, expected.arrays)
    if not is_finite(arrays):
        raise BadMessage(Reason.NOT_FINITE, "NaN or infinity in its arrays")
    for name, values in arrays.items():
        if name.endswith("running_var") and bool((values < 0).any()):
            raise BadMessage(Reason.NEGATIVE, f"{name} has values below zero")
        norm = float(torch.linalg.vector_norm(values.double()))
        if norm > expected.largest:
            raise BadMessage(Reason.TOO_LARGE, f"{name} has norm {norm:.3g}")


def _check_numbers(numbers: Mapping[str, Any], expected: Expected) -> None:
    wanted = {SAMPLES} | ({LOSS} if expected.loss else set())
    named = (SAMPLES, LOSS, ACCURACY, *[METRIC] * (expected.score_within is not None))
    allowed = wanted | {f"{s}/{n}" for s in expected.scores for n in named}
    if not wanted <= numbers.keys() <= allowed:
        raise BadMessage(Reason.KEYS, f"its numbers are {sorted(map(str, numbers))[:9]}")
    bounds: dict[str, tuple[type[Any], float, float, Reason]] = {
        SAMPLES: (int, 1, expected.largest, Reason.SAMPLES),
        LOSS: (float, 0, expected.largest, Reason.LOSS),
        ACCURACY: (float, 0, 1, Reason.SCORES),
        METRIC: (float, *(expected.score_within or (0, 0)), Reason.SCORES),
    }
    for name, value in numbers.items():
        split, _, what = name.rpartition("/")
        kind, least, most, reason = bounds[what]
        if type(value) is not kind or not least <= value <= most:  # NaN is in no range
            raise BadMessage(Reason.SCORES if split else reason, f"{name} = {value!r}")


def limited_weights(
    weights: Float64[Tensor, " m"], share: Float64[Tensor, " m"], cap: float
) -> Float64[Tensor, " m"]:
    """No client has more than the share max(cap, 2 / m) of the sum of weights.

    A client's excess is given to the others in proportion to their plain weights. With cap ≥ ½ at
    most one client exceeds it.
    """
    total, size = weights.sum(), weights.abs()
    cap = max(cap, 2 / len(weights))
    top = int(size.argmax())
    if cap >= 1 or float(size[top]) <= cap * float(size.sum()):
        return weights
    kept = cap * size.sum() / size[top]
    others = share.index_fill(0, torch.tensor(top, device=share.device), 0.0)
    return kept * weights + (1 - kept) * total * others / others.sum()


def length(tree: Tree, origin: Tree) -> float:
    """The distance from `origin`, without integer tensors such as batch norm's counters."""
    moved = {
        name: leaf.double() - origin[name].double()
        for name, leaf in tree.items()
        if leaf.is_floating_point()
    }
    return float(squared_norm(moved).sqrt()) if moved else 0.0


def median_length(lengths: Iterable[float]) -> float | None:
    """The median of the lengths that are not zero, so that empty updates do not lower it; of an
    even number the smaller middle one. None if all are zero."""
    found = sorted(value for value in lengths if value > 0)
    return found[(len(found) - 1) // 2] if found else None


def shortened(tree: Tree, factor: float, origin: Tree) -> Tree:
    """The same direction from `origin`, `factor` times as far."""

    def shorter(leaf: Tensor, start: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        return (start + factor * (leaf.double() - start.double())).to(leaf.dtype)

    return tree_map(shorter, tree, origin)


def dishonest_among(clients: int, share: float) -> int:
    """How many of so many clients may be dishonest: fewer than half, however large `share` is."""
    return max(0, min(ceil(share * clients - ROUNDING), (clients - 1) // 2))


def mean_loss(
    loss: Float64[Tensor, " m"], share: Float64[Tensor, " m"], settings: FederationSettings
) -> Float64[Tensor, ""]:
    """a = Σ r_i f_i, where no f_i counts as more than `mean_loss_bound` times the (k+1)-th largest.

    Losses are not negative, so a false one can only raise the mean. If the loss of an honest client
    is clipped, a becomes smaller, which gives that client more weight, not less.
    """
    k, bound = dishonest_among(len(loss), settings.liars), settings.mean_loss_bound
    if k == 0 or bound >= OFF:
        return share @ loss
    return share @ loss.clamp(max=bound * float(loss.sort(descending=True).values[k]))


def combination(settings: FederationSettings) -> Combine:
    """The average for updates, gradients and buffers of a round."""
    if settings.average == "mean":
        return weighted_sum
    part = 0.5 if settings.average == "median" else settings.liars
    return lambda weights, stacked: trimmed(weights, stacked, part)


def trimmed(weights: Float64[Tensor, " m"], stacked: Tree, part: float) -> Tree:
    """Coordinate by coordinate, the mean without the k largest and the k smallest, times Σ w_i; the
    median if that leaves one or two. For equal weights."""
    m, total = len(weights), float(weights.sum())
    k = dishonest_among(m, part)
    kept = tree_map(lambda leaf: leaf.double().sort(0).values[k : m - k], stacked)
    return {name: (total * leaf.mean(0)).to(stacked[name].dtype) for name, leaf in kept.items()}


def check_average(settings: FederationSettings, method: Method) -> None:
    """Refuse `federation.average` unless the method takes the plain mean of updates."""
    if settings.average == "mean":
        return
    kind, asked = type(method), f"federation.average = {settings.average!r}"
    if kind.weigh is not Method.weigh or kind.normaliser is not Method.normaliser:
        raise BadInput(
            f"{asked} is for methods that take the plain mean of updates, but {method.label} gives "
            "every client a weight of its own; leave it out, or use FedAvg, FairLoss or FairGrad"
        )
    if method.client_weights == "size":
        raise BadInput(f"{asked} needs equal weights, but method.weights is 'size'; give 'uniform'")
