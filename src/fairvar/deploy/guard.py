"""Which replies count. A bad one is left out, named and counted; the round goes on with the others.

The guard judges form and possibility, never rank: a reply is refused for what it is, not for being
unlike the others. The worst-off honest client has the largest loss and often the largest update, so
nothing here compares a client's norm or loss with the others' to refuse it. What a client gains by
lying about its loss or its number of samples is limited instead (`limited_losses`,
`limited_weights`), and updates that are out of all proportion are shortened, not refused
(`shortened`). `robust` has the averages that hold against clients that lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from fairvar.deploy.messages import ACCURACY, LOSS, SAMPLES, Message, Stamp
from fairvar.tree import Tree, is_finite, squared_norm

LONGEST = 200  # characters of a detail; what a client sends has no bound
Form = tuple[torch.dtype, tuple[int, ...]]  # of an array, as it is expected or as its header says


class Reason(StrEnum):
    NO_REPLY = "no reply"  # nothing came before the deadline
    ERROR = "error"  # the client or the transport reported one
    UNKNOWN = "unknown client"  # nobody asked it, or it says it is another one
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


class Arrival(NamedTuple):
    """What came back through the channel to a client: its reply, or why there is none."""

    client: int
    reply: Message | None
    reason: Reason = Reason.NO_REPLY
    detail: str = ""


@dataclass(frozen=True)
class Expected:
    """What a good reply to this exchange looks like."""

    stamp: Stamp
    asked: frozenset[int]
    arrays: Mapping[str, Tensor]  # of these names, shapes and dtypes
    loss: bool
    scores: Sequence[str]  # splits on which it may report scores
    largest: float


class _Bad(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason, self.detail = reason, detail


def refusal(stamp: Stamp, client: int, reason: Reason, detail: str = "") -> Refusal:
    return Refusal(stamp.round, stamp.attempt, stamp.exchange, client, reason, brief(detail))


def brief(text: str) -> str:
    """For logs and tables: one line of bounded length, whatever a client has put into it."""
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST]).strip()


def sift(
    arrivals: Iterable[Arrival], expected: Expected
) -> tuple[dict[int, Message], list[Refusal]]:
    """The good replies by client, ids rising, and why the others are none."""
    good: dict[int, Message] = {}
    refused, stamp = [], expected.stamp
    for arrival in arrivals:
        try:
            reply = _checked(arrival, expected)
            if arrival.client in good:
                raise _Bad(Reason.DUPLICATE, "a second answer; the first one counts")
            good[arrival.client] = reply
        except _Bad as bad:
            refused.append(refusal(stamp, arrival.client, bad.reason, bad.detail))
        except Exception as error:  # whatever else a reply makes of the checks is its own fault
            refused.append(refusal(stamp, arrival.client, Reason.FORMAT, repr(error)))
    missing = expected.asked - good.keys() - {r.client for r in refused}
    refused += [refusal(stamp, i, Reason.NO_REPLY) for i in sorted(missing)]
    return dict(sorted(good.items())), refused


def _checked(arrival: Arrival, expected: Expected) -> Message:
    reply = arrival.reply
    if reply is None:
        raise _Bad(arrival.reason, arrival.detail)
    if arrival.client not in expected.asked:
        raise _Bad(Reason.UNKNOWN, "it was not asked")
    if not _same(reply.client, arrival.client):
        raise _Bad(Reason.UNKNOWN, f"it says it is client {reply.client!r}")
    if not _same(reply.stamp.format, expected.stamp.format):
        raise _Bad(Reason.FORMAT, f"format {reply.stamp.format!r}, not {expected.stamp.format}")
    if not all(map(_same, reply.stamp, expected.stamp)):
        raise _Bad(Reason.STALE, f"an answer to {tuple(reply.stamp)[:3]}")
    _check_arrays(reply.arrays, expected)
    _check_numbers(reply.numbers, expected)
    return reply


def _same(told: Any, known: Any) -> bool:
    """Of one type too: 1.0 and True equal 1, but name no client and no round."""
    return type(told) is type(known) and told == known


def misfit(found: Mapping[str, Form], like: Mapping[str, Tensor]) -> tuple[Reason, str] | None:
    """What is wrong with arrays of these forms, before anybody has to look at their values."""
    if found.keys() != like.keys():
        missing = sorted(like.keys() - found.keys())
        extra = sorted(map(str, found.keys() - like.keys()))
        return Reason.KEYS, f"missing {missing[:3]}, not asked for {extra[:3]}"
    for name, leaf in like.items():
        dtype, shape = found[name]
        if dtype != leaf.dtype:
            return Reason.DTYPE, f"{name} is {dtype}, not {leaf.dtype}"
        if shape != tuple(leaf.shape):  # exactly: (1,) would broadcast into (10,)
            return Reason.SHAPE, f"{name} is {shape}"
    return None


def _check_arrays(arrays: Tree, expected: Expected) -> None:
    forms: dict[str, Form] = {k: (v.dtype, tuple(v.shape)) for k, v in arrays.items()}
    if wrong := misfit(forms, expected.arrays):
        raise _Bad(*wrong)
    if not is_finite(arrays):
        raise _Bad(Reason.NOT_FINITE, "NaN or infinity in its arrays")
    for name, values in arrays.items():
        if name.endswith("running_var") and bool((values < 0).any()):
            raise _Bad(Reason.NEGATIVE, f"{name} has values below zero")
        norm = float(torch.linalg.vector_norm(values.double()))
        if norm > expected.largest:
            raise _Bad(Reason.TOO_LARGE, f"{name} has norm {norm:.3g}")


def _check_numbers(numbers: Mapping[str, Any], expected: Expected) -> None:
    wanted = {SAMPLES} | ({LOSS} if expected.loss else set())
    allowed = wanted | {f"{s}/{n}" for s in expected.scores for n in (SAMPLES, LOSS, ACCURACY)}
    if not wanted <= numbers.keys() <= allowed:
        raise _Bad(Reason.KEYS, f"its numbers are {sorted(map(str, numbers))[:9]}")
    if not _is_count(numbers[SAMPLES], expected.largest):
        raise _Bad(Reason.SAMPLES, f"{numbers[SAMPLES]!r} samples")
    if expected.loss and not _is_loss(numbers[LOSS], expected.largest):
        raise _Bad(Reason.LOSS, f"a loss of {numbers[LOSS]!r}")
    for name, value in numbers.items():
        split, _, what = name.partition("/")
        good = {SAMPLES: _is_count, LOSS: _is_loss, ACCURACY: _is_share}
        if what and not good[what](value, expected.largest):
            raise _Bad(Reason.SCORES, f"{what} {value!r} on {split}")


def _is_count(value: Any, largest: float) -> bool:
    return type(value) is int and 1 <= value <= largest


def _is_loss(value: Any, largest: float) -> bool:
    return type(value) is float and isfinite(value) and 0 <= value <= largest


def _is_share(value: Any, _largest: float) -> bool:
    return type(value) is float and 0 <= value <= 1


def limited_losses(loss: Float64[Tensor, " m"], limit: float) -> Float64[Tensor, " m"]:
    """No loss counts as more than `limit`; it is not refused, since the client may be honest."""
    return loss.clamp(max=limit)


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


def length(tree: Tree, origin: Tree | None = None) -> float:
    """The distance from `origin`, or from zero; counters, such as batch norm's, are no lengths."""
    moved = {
        name: leaf.double() if origin is None else leaf.double() - origin[name].double()
        for name, leaf in tree.items()
        if leaf.is_floating_point()
    }
    return float(squared_norm(moved).sqrt()) if moved else 0.0


def median_length(lengths: Iterable[float]) -> float | None:
    """Of those that are not zero: clients that send nothing must not make the others look long.
    With an even number the smaller of the two in the middle. None if all are zero."""
    found = sorted(value for value in lengths if value > 0)
    return found[(len(found) - 1) // 2] if found else None


def shortened(tree: Tree, factor: float, origin: Tree | None = None) -> Tree:
    """The same direction from `origin`, or from zero, `factor` times as far."""
    kept = {}
    for name, leaf in tree.items():
        if not leaf.is_floating_point():
            kept[name] = leaf
        elif origin is None:
            kept[name] = leaf * factor
        else:
            start = origin[name].double()
            kept[name] = (start + factor * (leaf.double() - start)).to(leaf.dtype)
    return kept


def counted(refused: Iterable[Refusal]) -> dict[str, int]:
    """How often each reason occurred."""
    found: dict[str, int] = {}
    for refusal in refused:
        found[refusal.reason.value] = found.get(refusal.reason.value, 0) + 1
    return dict(sorted(found.items()))
