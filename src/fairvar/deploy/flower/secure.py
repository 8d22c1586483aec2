"""Secure aggregation with Flower's SecAgg+: the server receives sums over clients, no single reply.

`secure-aggregation = true` in the run configuration. Flower offers SecAgg+ in its older interface
only (`FitIns`, `FitRes`, `LegacyContext`), and its mod acts on messages of type `train` only. So
probes are sent as `train` messages, our messages are packed into that interface's, and a node
(`client.secured`) answers nothing that the mod does not mask. The four stages, the keys and the
masks are Flower's.

In Flower one reply of the wrong form stops the whole sum. Masked values cannot be checked, but the
rest of a reply can: invalid replies are left out and recorded, and Flower's workflow receives the
others only.

Values are rounded at random up or down to steps of 2 · clipping_range / `quantisation`: the mean of
a round is off by less than one step (where weights are numbers of samples, times `max_weight` and
the number of clients over the sum of their weights).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import combinations, islice
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as Envelope
from flwr.common import parameters_to_ndarrays
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as RoundKey
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from fairvar.common.tree import Tree
from fairvar.deploy.client import Message
from fairvar.deploy.flower.setup import FEWEST, SecureSettings
from fairvar.deploy.flower.transport import (
    LOG,
    UNREADABLE,
    GridTransport,
    header_of,
    pack_request,
    to_records,
)
from fairvar.deploy.guard import BadMessage, Reason, brief
from fairvar.deploy.server import Mean

MODULUS = 2**32
MOST_STEPS = 2**30  # Flower rounds to 32-bit integers
LONGEST_SHARE = 4096  # bytes; Flower's have about 1,000


def quantisation(clients: int) -> int:
    """Steps of the range: as many as the sum over all clients can have without wrapping around."""
    return min(MOST_STEPS, 1 << ((MODULUS - 1) // clients).bit_length() - 1)


class SecureTransport(GridTransport):
    """Clients on a Flower grid; the server receives sums of their replies only."""

    name = "flower-secure"

    def __init__(
        self, grid: Grid, clients: int, facts: Mapping[str, float], settings: SecureSettings
    ) -> None:
        super().__init__(grid, clients, facts)
        self.settings = settings

    def mean(self, requests: Sequence[Message], like: Tree, seconds: float) -> Mean:
        """Flower cannot recover the sum if a node leaves before the masks are agreed on. No client
        has trained by then, so the stages start again without that node."""
        sent = {r.client: r for r in requests if r.client in self.nodes}
        lost: dict[int, BadMessage] = {}
        while len(sent) >= FEWEST:
            workflow = Workflow(self, sent, like, seconds)
            again = workflow.run()
            lost |= {c: a for c, a in workflow.lost.items() if c not in workflow.share}
            for client, why in lost.items():
                self._lose(client, workflow.nodes.get(client, 0), why)
            if not again:
                return workflow.mean(lost)
            sent = {c: r for c, r in sent.items() if c not in lost}
        return Mean([], torch.zeros(0, dtype=torch.float64), {}, lost)


class LeftEarly(Exception):
    """A node left before the masks were agreed on."""


class Workflow:
    """One secure sum. It acts as two of Flower's objects: the strategy, which has the requests and
    stores the mean, and the grid, which checks every reply."""

    def __init__(
        self, transport: SecureTransport, requests: dict[int, Message], like: Tree, seconds: float
    ) -> None:
        self.transport, self.requests, self.like, self.seconds = transport, requests, like, seconds
        self.nodes = {client: transport.nodes[client] for client in requests}
        self.clients = {node: client for client, node in self.nodes.items()}
        self.shapes = [(1,), *(tuple(leaf.shape) for leaf in like.values())]  # weights come first
        self.threshold = FEWEST
        self.shares: dict[int, dict[int, bytes]] = {}  # in the last stage: owner → sender → share
        self.lost: dict[int, BadMessage] = {}
        self.share: dict[int, int] = {}  # client → its weight, when the sum is known
        self.sums: list[np.ndarray] = []

    def run(self) -> bool:
        """The four stages; True if they must start again with the remaining clients."""
        context = LegacyContext(Context(0, 0, {}, RecordDict(), {}, 0), strategy=self)  # type: ignore[arg-type]
        t, settings = next(iter(self.requests.values())).stamp.round, self.transport.settings
        context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({RoundKey.CURRENT_ROUND: t})
        context.state[MAIN_PARAMS_RECORD] = ArrayRecord()
        stages = SecAggPlusWorkflow(
            num_shares=1.0,
            reconstruction_threshold=float(settings.threshold),
            max_weight=float(settings.max_weight),
            clipping_range=float(settings.clipping_range),
            quantization_range=quantisation(self.transport.clients),
            modulus_range=MODULUS,
        )
        try:
            stages(self, context)  # type: ignore[arg-type]
        except LeftEarly:
            return True
        except Exception as error:
            LOG.warning("secure aggregation broke off: %s", brief(repr(error)))
            return self._blame()
        return False

    def mean(self, lost: Mapping[int, BadMessage]) -> Mean:
        """Empty if secure aggregation failed."""
        ids = sorted(self.share)
        weights = torch.tensor([self.share[i] for i in ids], dtype=torch.float64)
        arrays = {
            name: torch.from_numpy(np.ascontiguousarray(a)).double()
            for name, a in zip(self.like, self.sums, strict=False)
        }
        return Mean(ids, weights / weights.sum(), arrays, lost)

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        t, found = self.transport, []
        for client, request in self.requests.items():
            packed = pack_request(to_records(request, t.facts), self.like)
            found.append((GridClientProxy(self.nodes[client], t.grid, 0), packed))
        return found

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Every result holds the mean."""
        self.share = {self.clients[proxy.node_id]: res.num_examples for proxy, res in results}
        self.sums = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}

    def send_and_receive(
        self, messages: Iterable[Envelope], *, timeout: float | None = None
    ) -> list[Envelope]:
        sent = {self.clients[m.metadata.dst_node_id]: m for m in messages}
        first = _configs(next(iter(sent.values())))
        stage, kept = first[Key.STAGE], dict[int, Envelope]()
        for envelope in sent.values():
            envelope.metadata.ttl = self.seconds
        read = partial(self._checked, sent, stage)
        for client, found in self.transport.collect(sent, self.seconds, read):
            if isinstance(found, BadMessage):
                self.lost.setdefault(client, found)
            else:
                kept[client] = found
        if stage == Stage.SETUP:
            self.threshold = int(first[Key.THRESHOLD])
            self._lose(_with_keys_of_others(kept), "its keys are another's too")
        complaints = self._complaints(kept) if stage == Stage.COLLECT_MASKED_VECTORS else {}
        self._lose(_blamed(complaints, len(kept)), "unreadable shares")
        good = [reply for client, reply in kept.items() if client not in self.lost]
        early = stage in (Stage.SETUP, Stage.SHARE_KEYS) or complaints
        if len(good) < len(sent) and early:
            raise LeftEarly
        return good

    def _complaints(self, kept: dict[int, Envelope]) -> dict[int, list[int]]:
        """Client → the clients whose shares it cannot decrypt."""
        named = {client: _configs(reply).get(UNREADABLE) for client, reply in kept.items()}
        return {c: [self.clients[n] for n in nodes] for c, nodes in named.items() if nodes}

    def _lose(self, clients: Iterable[int], detail: str) -> None:
        for client in clients:
            self.lost.setdefault(client, BadMessage(Reason.FORMAT, detail))

    def _checked(
        self, sent: Mapping[int, Envelope], stage: object, client: int, reply: Envelope
    ) -> Envelope:
        """The reply; raises if the workflow could not use it."""
        answer, node = _configs(reply), self.nodes[client]
        if reply.metadata.src_node_id != node:
            raise ValueError("it says it comes from another node")
        if stage == Stage.SETUP:
            for key in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2):
                if not isinstance(bytes_to_public_key(answer[key]).curve, SECP384R1):
                    raise ValueError(f"{key} is of another curve")
        elif stage == Stage.SHARE_KEYS:
            others = self.clients.keys() - {node}
            _check_lists(answer, (Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST), others)
        elif stage == Stage.UNMASK:
            whose = _configs(sent[client])
            nodes = {*whose[Key.ACTIVE_NODE_ID_LIST], *whose[Key.DEAD_NODE_ID_LIST]}
            _check_lists(answer, (Key.NODE_ID_LIST, Key.SHARE_LIST), nodes)
            for owner, share in zip(answer[Key.NODE_ID_LIST], answer[Key.SHARE_LIST], strict=True):
                self.shares.setdefault(owner, {})[node] = share
        elif answer.get(UNREADABLE):
            if not set(answer[UNREADABLE]) <= self.clients.keys() - {node}:
                raise ValueError("it complains of nodes that do not take part")
        else:
            self._check_masked(reply, answer[Key.MASKED_PARAMETERS])
        return reply

    def _check_masked(self, reply: Envelope, parts: Any) -> None:
        forms = [header_of(part).form for part in parts]
        if forms != [(torch.int64, shape) for shape in self.shapes]:
            raise BadMessage(Reason.SHAPE, "its masked vector has other shapes")
        weight = compat.recorddict_to_fitres(reply.content, keep_input=True).num_examples
        if type(weight) is not int or not 1 <= weight <= self.transport.settings.max_weight:
            raise ValueError(f"a weight of {weight!r}")

    def _blame(self) -> bool:
        """After the last stage failed: mark clients whose shares do not fit the others' as lost.
        False if there are none."""
        for owner, shares in self.shares.items():
            fitting = _fitting(shares, self.threshold)
            bad = shares.keys() - fitting if 2 * len(fitting) > len(shares) else {owner}
            self._lose([self.clients[n] for n in bad], "its shares fit no others")
        return bool(self.lost)


def _configs(message: Envelope) -> Any:
    return message.content.config_records[RECORD_KEY_CONFIGS]


def _check_lists(answer: Any, keys: tuple[str, str], nodes: Set[int]) -> None:
    """Raise unless there is one string of bytes for each of these nodes."""
    whose, given = (answer[key] for key in keys)
    if sorted(whose) != sorted(nodes) or len(given) != len(whose):
        raise ValueError(f"{keys[0]} names other nodes")
    if not all(type(part) is bytes and len(part) <= LONGEST_SHARE for part in given):
        raise ValueError(f"{keys[1]} holds no shares")


def _with_keys_of_others(kept: dict[int, Envelope]) -> set[int]:
    """Clients whose keys are not unique; Flower's nodes refuse equal keys."""
    keys = {c: [_configs(r)[k] for k in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2)]
            for c, r in kept.items()}  # fmt: skip
    often = Counter(key for pair in keys.values() for key in pair)
    return {c for c, pair in keys.items() if any(often[key] > 1 for key in pair)}


def _blamed(complaints: dict[int, list[int]], answers: int) -> set[int]:
    """Clients to leave out for unreadable shares: those of whom at least half complain. Of two
    clients of which only one complains about the other, both are left out."""
    votes = Counter(accused for names in complaints.values() for accused in set(names))
    most = {client for client, n in votes.items() if 2 * n >= answers}
    disputes = ([n for n in names if n not in most] for names in complaints.values())
    pairs = ({c, names[0]} for c, names in zip(complaints, disputes, strict=True) if names)
    return most.union(*pairs)


def _fitting(shares: dict[int, bytes], threshold: int) -> set[int]:
    """The largest set of nodes whose shares give the same secret, among 100 combinations."""
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
