"""Which replies count, and for how much; and the record of it (`Notes`).

A bad reply is left out, named and counted; the round goes on with the others. A reply is refused
for its form or for values that are not possible, never because it is unlike the others: the
worst-off honest client has the largest loss and often the largest update. What a client gains by
reporting a false loss or number of samples is limited instead (`limited_weights`, `mean_loss`), and
updates that are out of all proportion are shortened, not refused (`shortened`). `combination` gives
averages that some dishonest clients can move only so far.
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

from fairvar.deploy.client import ACCURACY, HELD_OUT, LOSS, METRIC, SAMPLES, Message, Stamp
from fairvar.engine.server import Combine
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.tree import Tree, is_finite, squared_norm, tree_map, weighted_sum
from fairvar.validation import Checked, Count, Positive

LONGEST = 200  # characters of a detail; what a client sends has no bound
Form = tuple[torch.dtype, tuple[int, ...]]  # of an array, as it is expected or as its header says
ROUNDING = 1e-9  # 0.1 · 30 is a little more than 3
OFF = 1e9  # a bound of this size is switched off
NAME = "federation"  # of the notes, among the tables of a checkpoint
PARTS = ("train", *HELD_OUT)
MOST_TOLD = 10  # clients that a message names
MOST_REFUSALS = 10_000  # that are kept one by one; further ones are counted
Factor = Annotated[float, msgspec.Meta(ge=1, le=OFF)]


class FederationSettings(Checked, frozen=True, kw_only=True):
    """`train.participation` or `train.participants` says how many clients are asked in a round."""

    __where__: ClassVar[str | None] = "federation"

    deadline: Positive = 600.0  # seconds for one exchange; what comes later is left out
    patience: Positive = 600.0  # seconds to wait for enough clients to be there
    min_replies: Count = 1  # a round with fewer good replies is repeated …
    repeats: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 3  # … so often, and then the run stops
    # A loss counts as at most this many times the largest median loss of any round, or the loss of
    # guessing among the classes. Honest clients are far from that.
    loss_cap: Factor = 100.0
    # No client gets a larger part of the sum of weights (in small rounds: twice its fair part).
    weight_cap: Annotated[float, msgspec.Meta(ge=0.5, le=1)] = 0.5
    largest: Positive = 1e9  # norms, losses and numbers of samples above this are not believed
    # Clients that may come back with another key than the one they are bound to, such as [2].
    rebind: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    # Against dishonest clients; docs/robustness.md measures what each of these prevents and costs.
    # An update, a gradient or a change of buffers that is more than this many times as long as the
    # largest median of the past rounds is shortened to that median.
    norm_bound: Factor = 10.0
    # In FairLoss's mean loss no client counts as more than this many times the largest loss of the
    # others, without the share `liars` of them.
    mean_loss_bound: Factor = 5.0
    # What the updates and gradients of the clients become: their mean, or, coordinate by
    # coordinate, the mean without the `liars` largest and smallest, or the median.
    average: Literal["mean", "trimmed", "median"] = "mean"
    liars: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.2  # share of dishonest clients


class Reason(StrEnum):
    NO_REPLY = "no reply"  # nothing came before the deadline
    ERROR = "error"  # the client or the transport reported one
    UNKNOWN = "unknown client"  # it was not asked, or it says it is another one
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
    """One reply that was left out, for the record."""

    round: int
    attempt: int
    exchange: str
    client: int
    reason: Reason
    detail: str


class BadMessage(ValueError):
    """Why there is no good reply."""

    def __init__(self, reason: Reason = Reason.NO_REPLY, detail: str = "") -> None:
        self.reason, self.detail = reason, brief(detail)
        super().__init__(f"not a message of fairvar's: {self.detail}")


def brief(text: str) -> str:
    """For logs and tables: one line of bounded length, whatever a client has put into it."""
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST]).strip()


def labelled(client: int, names: Mapping[int, str]) -> str:
    """How logs and messages call a client: by the name of its site, if it has one."""
    return f"{names[client]} (client {client})" if client in names else f"client {client}"


class Arrival(NamedTuple):
    """What came back through the channel to a client."""

    client: int
    reply: Message | BadMessage


@dataclass(frozen=True)
class Expected:
    """What a good reply to this exchange looks like."""

    stamp: Stamp
    asked: frozenset[int]
    arrays: Mapping[str, Tensor]  # of these names, shapes and dtypes
    loss: bool
    scores: Sequence[str]  # splits on which it may report scores
    largest: float
    score_within: tuple[float, float] | None = None  # None: no score beside loss and accuracy


class RoundNote(NamedTuple):
    """Who made a round: the clients in its model, those of them whose weight was cut or who sent an
    update, gradient or buffers that had to be shortened, and the keys that clients belong to since
    this round, as "client:key"."""

    round: int
    clients: list[int]
    limited: list[int]
    shortened: list[int]
    bound: tuple[str, ...] = ()


class Notes(msgspec.Struct):
    """What the server records in addition to the numbers of a run. It goes into every checkpoint,
    so that a run that was interrupted has one record, from its first round on."""

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
        """Continue those of a checkpoint, or begin."""
        if tables is None or NAME not in tables:
            return Notes({part: [0] * clients for part in PARTS})
        return msgspec.json.decode(tables[NAME].numpy().tobytes(), type=Notes)

    def bind(self, keys: Mapping[int, str]) -> tuple[str, ...]:
        """Remember which key each client belongs to; returns those that are new."""
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
        """How many samples the clients have: the server knows it from their replies only."""
        for i, reply in good.items():
            for part, counts in self.samples.items():
                key = SAMPLES if part == "train" else f"{part}/{SAMPLES}"
                counts[i] = int(reply.numbers.get(key, counts[i]))

    def reasons(self) -> Counter[str]:
        """How often each reason occurred."""
        return counted(self.refused) + Counter(self.more_refused)

    def table(self) -> Tensor:
        """As bytes in a tensor: a checkpoint holds nothing else."""
        return torch.frombuffer(bytearray(msgspec.json.encode(self)), dtype=torch.uint8)


def told(refused: Sequence[Refusal], names: Mapping[int, str]) -> str:
    """By client, the latest reason why its replies were left out."""
    times = Counter(refusal.client for refusal in refused)
    last = {refusal.client: refusal for refusal in refused}
    parts = []
    for client in sorted(last)[:MOST_TOLD]:
        why = last[client].detail or last[client].reason
        often = f" ({times[client]} times)" if times[client] > 1 else ""
        parts.append(f"{labelled(client, names)}: {why}{often}")
    more = len(last) - MOST_TOLD
    return "; ".join([*parts, *([f"and {more} more"] if more > 0 else [])])


def counted(refused: Iterable[Refusal]) -> Counter[str]:
    """How often each reason occurred."""
    return Counter(refusal.reason.value for refusal in refused)


def sift(
    arrivals: Iterable[Arrival], expected: Expected
) -> tuple[dict[int, Message], list[tuple[int, BadMessage]]]:
    """The good replies by client, ids rising, and why the others are none."""
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
        except Exception as error:  # a check that fails in any other way: the reply is bad
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
    """Of one type too: 1.0 and True equal 1, but name no client and no round."""
    return type(value) is type(known) and value == known


def check_forms(found: Mapping[str, Form], like: Mapping[str, Tensor]) -> None:
    """Refuse arrays of other names, types and shapes, before their values are looked at."""
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
    """No client has more than `cap` of the sum of weights, or twice its fair part if that is more.

    What a client has in excess goes to the others by their plain weights. With cap ≥ ½ at most one
    client is above it.
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
    """The distance from `origin`; counters, such as batch norm's, are no lengths."""
    moved = {
        name: leaf.double() - origin[name].double()
        for name, leaf in tree.items()
        if leaf.is_floating_point()
    }
    return float(squared_norm(moved).sqrt()) if moved else 0.0


def median_length(lengths: Iterable[float]) -> float | None:
    """Of those that are not zero: clients that send nothing must not make the others look long.
    With an even number the smaller of the two in the middle. None if all are zero."""
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

    Losses are not negative, so a false one can move the mean far in one direction only: up. What is
    cut of an honest client's loss makes a smaller, which gives that client more weight, not less.
    """
    k, bound = dishonest_among(len(loss), settings.liars), settings.mean_loss_bound
    if k == 0 or bound >= OFF:
        return share @ loss
    return share @ loss.clamp(max=bound * float(loss.sort(descending=True).values[k]))


def combination(settings: FederationSettings) -> Combine:
    """How the updates of a round, its gradients and its buffers become one."""
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
    """Whether `federation.average` means something: only the plain mean of single replies can be
    replaced by another average."""
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
