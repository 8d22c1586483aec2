"""The replies of secure aggregation, checked stage by stage: a node that sends nonsense is left out
by name, and Flower's workflow sees the others only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from itertools import combinations, islice
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1
from flwr.app import Message as Envelope
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from fairvar.deploy.flower.grid import GridTransport, Reply, short
from fairvar.deploy.flower.wire import header_of
from fairvar.deploy.guard import Arrival, Reason, brief
from fairvar.tree import Tree

FEWEST = 3  # of two clients, each can subtract itself from the sum
UNREADABLE = "unreadable"  # a node's complaint: of these nodes' shares
LONGEST_SHARE = 4096  # bytes; Flower's have about 1,000


class LeftEarly(Exception):
    """A node was lost before the masks were agreed on."""


class Stages:
    """The part of a grid that the workflow uses, with our own loop and a look at what comes: Flower
    lets one reply of the wrong form stop the whole sum. Masked values say nothing, but the rest of
    a reply can be checked, and who sends nonsense is left out by name."""

    def __init__(
        self,
        transport: GridTransport,
        clients: dict[int, int],
        like: Tree,
        seconds: float,
        max_weight: float,
    ) -> None:
        self.transport, self.clients, self.seconds = transport, clients, seconds
        self.max_weight = max_weight
        self.shapes = [(1,), *(tuple(leaf.shape) for leaf in like.values())]  # weights come first
        self.threshold = FEWEST
        self.shares: dict[int, dict[int, bytes]] = {}  # in the last stage: whose → from whom → it
        self.lost: dict[int, Arrival] = {}

    def send_and_receive(
        self, messages: Iterable[Envelope], *, timeout: float | None = None
    ) -> list[Envelope]:
        sent = list(messages)
        stage = _configs(sent[0])[Key.STAGE]
        if stage == Stage.SETUP:
            self.threshold = int(_configs(sent[0])[Key.THRESHOLD])
        kept = self._exchanged(sent, stage)
        if stage == Stage.SETUP:
            self._lose(_with_keys_of_others(kept), Reason.FORMAT, "its keys are another's too")
        complaints = self._complaints(kept) if stage == Stage.COLLECT_MASKED_VECTORS else {}
        self._lose(_blamed(complaints, len(kept)), Reason.FORMAT, "unreadable shares")
        good = [reply for client, reply in kept.items() if client not in self.lost]
        early = stage in (Stage.SETUP, Stage.SHARE_KEYS) or complaints
        if len(good) < len(sent) and early:
            raise LeftEarly
        return good

    def _exchanged(self, sent: Sequence[Envelope], stage: object) -> dict[int, Envelope]:
        """The replies of the right form, by client."""
        for envelope in sent:
            envelope.metadata.ttl = self.seconds
        asked = {self.clients[m.metadata.dst_node_id]: m for m in sent}
        waiting, kept = self.transport._push(asked.items()), {}
        missing = asked.keys() - waiting.values()
        for message, reply in self.transport._replies(set(waiting), self.seconds):
            client = waiting.pop(message)
            wrong = self._judged(client, reply, asked[client], stage)
            if wrong is None and isinstance(reply, Envelope):
                kept[client] = reply
            elif wrong is not None:
                self.lost.setdefault(client, wrong)
        silent = {*waiting.values(), *missing}
        self.lost |= {c: Arrival(c, None) for c in silent}  # until the deadline
        return kept

    def _complaints(self, kept: dict[int, Envelope]) -> dict[int, list[int]]:
        """Who cannot read whose shares."""
        told = {client: _configs(reply).get(UNREADABLE) for client, reply in kept.items()}
        return {c: [self.clients[n] for n in nodes] for c, nodes in told.items() if nodes}

    def _lose(self, clients: Iterable[int], reason: Reason, detail: str) -> None:
        for client in clients:
            self.lost.setdefault(client, Arrival(client, None, reason, detail))

    def _judged(self, client: int, reply: Reply, asked: Envelope, stage: object) -> Arrival | None:
        """What is wrong with a reply; whatever it raises is its own fault."""
        try:
            if isinstance(reply, Exception):
                raise reply
            if reply.has_error():
                return Arrival(client, None, Reason.ERROR, short(reply))
            if reply.metadata.src_node_id != asked.metadata.dst_node_id:
                raise ValueError("it says it comes from another node")
            self._check(reply, asked, stage)
        except _OtherShapes:
            return Arrival(client, None, Reason.SHAPE, "its masked vector has other shapes")
        except Exception as error:
            return Arrival(client, None, Reason.FORMAT, brief(repr(error)))
        return None

    def _check(self, reply: Envelope, asked: Envelope, stage: object) -> None:
        """Raises if the workflow could not use it."""
        told, node = _configs(reply), asked.metadata.dst_node_id
        if stage == Stage.SETUP:
            for key in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2):
                if not isinstance(bytes_to_public_key(told[key]).curve, SECP384R1):
                    raise ValueError(f"{key} is of another curve")
        elif stage == Stage.SHARE_KEYS:
            others = self.clients.keys() - {node}
            _check_lists(told, (Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST), others)
        elif stage == Stage.UNMASK:
            whose = _configs(asked)
            nodes = {*whose[Key.ACTIVE_NODE_ID_LIST], *whose[Key.DEAD_NODE_ID_LIST]}
            _check_lists(told, (Key.NODE_ID_LIST, Key.SHARE_LIST), nodes)
            for owner, share in zip(told[Key.NODE_ID_LIST], told[Key.SHARE_LIST], strict=True):
                self.shares.setdefault(owner, {})[node] = share
        elif told.get(UNREADABLE):
            if not set(told[UNREADABLE]) <= self.clients.keys() - {node}:
                raise ValueError("it complains of nodes that are not there")
        else:
            self._check_masked(reply, told[Key.MASKED_PARAMETERS])

    def _check_masked(self, reply: Envelope, parts: Any) -> None:
        forms = [header_of(part).form for part in parts]
        if forms != [(torch.int64, shape) for shape in self.shapes]:
            raise _OtherShapes
        weight = compat.recorddict_to_fitres(reply.content, keep_input=True).num_examples
        if type(weight) is not int or not 1 <= weight <= self.max_weight:
            raise ValueError(f"a weight of {weight!r}")

    def blame(self) -> bool:
        """After the last stage failed: whose shares do not fit together. False if nobody's."""
        for owner, shares in self.shares.items():
            fitting = _fitting(shares, self.threshold)
            bad = shares.keys() - fitting if 2 * len(fitting) > len(shares) else {owner}
            self._lose([self.clients[n] for n in bad], Reason.FORMAT, "its shares fit no others")
        return bool(self.lost)


class _OtherShapes(Exception):
    pass


def _configs(message: Envelope) -> Any:
    return message.content.config_records[RECORD_KEY_CONFIGS]


def _check_lists(told: Any, keys: tuple[str, str], nodes: Set[int]) -> None:
    """One string of bytes for each of these nodes."""
    whose, given = (told[key] for key in keys)
    if sorted(whose) != sorted(nodes) or len(given) != len(whose):
        raise ValueError(f"{keys[0]} names other nodes")
    if not all(type(part) is bytes and len(part) <= LONGEST_SHARE for part in given):
        raise ValueError(f"{keys[1]} holds no shares")


def _with_keys_of_others(kept: dict[int, Envelope]) -> set[int]:
    """Flower's nodes refuse to go on if two keys are equal; honest ones draw theirs."""
    keys = {c: [_configs(r)[k] for k in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2)]
            for c, r in kept.items()}  # fmt: skip
    often = Counter(key for pair in keys.values() for key in pair)
    return {c for c, pair in keys.items() if any(often[key] > 1 for key in pair)}


def _blamed(complaints: dict[int, list[int]], answers: int) -> set[int]:
    """Who has sent shares that cannot be read: those of whom most of the others complain. Where it
    is one's word against another's, both are left out."""
    votes = Counter(accused for names in complaints.values() for accused in set(names))
    most = {client for client, n in votes.items() if 2 * n >= answers}
    disputes = ([n for n in names if n not in most] for names in complaints.values())
    pairs = ({c, names[0]} for c, names in zip(complaints, disputes, strict=True) if names)
    return most.union(*pairs)


def _fitting(shares: dict[int, bytes], threshold: int) -> set[int]:
    """The largest set of nodes whose shares give one secret, as far as 100 tries can tell."""
    best: set[int] = set()
    for few in islice(combinations(sorted(shares), threshold), 100):
        secret = _combined([shares[n] for n in few])
        if secret is None:
            continue
        rest = [shares[n] for n in few[1:]]
        same = {n for n in shares if n in few or _combined([*rest, shares[n]]) == secret}
        best = max(best, same, key=len)
    return best


def _combined(shares: list[bytes]) -> bytes | None:
    try:
        return combine_shares(shares)
    except Exception:
        return None
