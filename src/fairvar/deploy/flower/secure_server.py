"""Secure aggregation on the server: Flower's workflow, with every reply checked.

Flower lets one reply of the wrong form stop the whole sum. Masked values cannot be checked, but the
rest of a reply can: a node that sends nonsense is left out by name, and Flower's workflow gets the
other replies only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
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
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as RoundKey
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from fairvar.deploy.flower.secure import MODULUS, UNREADABLE, pack_request, quantisation
from fairvar.deploy.flower.setup import FEWEST, SecureSettings
from fairvar.deploy.flower.transport import LOG, GridTransport, Reply, error_of
from fairvar.deploy.flower.wire import header_of, to_records
from fairvar.deploy.guard import Arrival, Reason, brief
from fairvar.deploy.messages import Message
from fairvar.deploy.summed import Mean
from fairvar.tree import Tree

LONGEST_SHARE = 4096  # bytes; Flower's have about 1,000


class SecureTransport(GridTransport):
    """Clients behind a Flower grid, whose replies reach the server as sums only."""

    name = "flower-secure"

    def __init__(
        self, grid: Grid, clients: int, settings: SecureSettings, facts: dict[str, float]
    ) -> None:
        super().__init__(grid, clients, facts)
        self.settings = settings

    def mean(self, requests: Sequence[Message], like: Tree, seconds: float) -> Mean:
        """Flower cannot recover the sum if a node leaves before the masks are agreed on. No client
        has trained by then, so the stages start again without that node."""
        sent = {r.client: r for r in requests if r.client in self.nodes}
        lost: dict[int, Arrival] = {}
        while len(sent) >= FEWEST:
            plan = _Strategy(self, sent, list(like))
            nodes = {plan.nodes[c]: c for c in sent}
            stages = Stages(self, nodes, like, seconds, self.settings.max_weight)
            again = self._run(plan, stages)
            lost |= {c: a for c, a in stages.lost.items() if c not in plan.share}
            for client, arrival in lost.items():
                self._lose(client, plan.nodes.get(client, 0), arrival.detail or "no reply in time")
            if not again:
                return _mean(plan, like, list(lost.values()))
            sent = {c: r for c, r in sent.items() if c not in lost}
        return Mean([], torch.zeros(0, dtype=torch.float64), {}, list(lost.values()))

    def _run(self, plan: _Strategy, stages: Stages) -> bool:
        """The four stages; True if they must start again with the remaining clients."""
        context = LegacyContext(Context(0, 0, {}, RecordDict(), {}, 0), strategy=plan)
        context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({RoundKey.CURRENT_ROUND: plan.round})
        context.state[MAIN_PARAMS_RECORD] = ArrayRecord()
        workflow = SecAggPlusWorkflow(
            num_shares=1.0,
            reconstruction_threshold=float(self.settings.threshold),
            max_weight=float(self.settings.max_weight),
            clipping_range=float(self.settings.clipping_range),
            quantization_range=quantisation(self.clients),
            modulus_range=MODULUS,
        )
        try:
            workflow(stages, context)  # type: ignore[arg-type]
        except LeftEarly:
            return True
        except Exception as error:
            LOG.warning("secure aggregation broke off: %s", brief(repr(error)))
            return stages.blame()
        return False


def _mean(plan: _Strategy, like: Tree, lost: Sequence[Arrival]) -> Mean:
    """Empty if secure aggregation failed."""
    ids = sorted(plan.share)
    weights = torch.tensor([plan.share[i] for i in ids], dtype=torch.float64)
    arrays = {
        name: torch.from_numpy(np.ascontiguousarray(a)).double()
        for name, a in zip(like, plan.sums, strict=False)
    }
    return Mean(ids, weights / weights.sum(), arrays, lost)


class _Strategy(FedAvg):
    """Gives Flower's workflow the requests, and keeps the mean that it recovers."""

    def __init__(
        self, transport: SecureTransport, requests: dict[int, Message], wanted: list[str]
    ) -> None:
        super().__init__()
        self.transport, self.requests, self.wanted = transport, requests, wanted
        self.round = next(iter(requests.values())).stamp.round
        self.nodes = {client: transport.nodes[client] for client in requests}
        self.share: dict[int, int] = {}  # client → its weight, when the sum is known
        self.sums: list[np.ndarray] = []

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        t = self.transport
        return [
            (GridClientProxy(self.nodes[client], t.grid, 0),
             pack_request(to_records(request, t.facts), self.wanted))
            for client, request in self.requests.items()
        ]  # fmt: skip

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Every result holds the mean."""
        named = {node: client for client, node in self.nodes.items()}
        self.share = {named[proxy.node_id]: res.num_examples for proxy, res in results}
        self.sums = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


class LeftEarly(Exception):
    """A node left before the masks were agreed on."""


class Stages:
    """The part of a grid that the workflow uses, with our own loop and checks of every reply."""

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
        self.shares: dict[int, dict[int, bytes]] = {}  # in the last stage: owner → sender → share
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
        """Client → the clients whose shares it cannot decrypt."""
        told = {client: _configs(reply).get(UNREADABLE) for client, reply in kept.items()}
        return {c: [self.clients[n] for n in nodes] for c, nodes in told.items() if nodes}

    def _lose(self, clients: Iterable[int], reason: Reason, detail: str) -> None:
        for client in clients:
            self.lost.setdefault(client, Arrival(client, None, reason, detail))

    def _judged(self, client: int, reply: Reply, asked: Envelope, stage: object) -> Arrival | None:
        """What is wrong with a reply; any exception that it causes is its own fault."""
        try:
            if isinstance(reply, Exception):
                raise reply
            if reply.has_error():
                return Arrival(client, None, Reason.ERROR, error_of(reply))
            if reply.metadata.src_node_id != asked.metadata.dst_node_id:
                raise ValueError("it says it comes from another node")
            self._check(reply, asked, stage)
        except _OtherShapes:
            return Arrival(client, None, Reason.SHAPE, "its masked vector has other shapes")
        except Exception as error:
            return Arrival(client, None, Reason.FORMAT, brief(repr(error)))
        return None

    def _check(self, reply: Envelope, asked: Envelope, stage: object) -> None:
        """Raise if the workflow could not use the reply."""
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
                raise ValueError("it complains of nodes that do not take part")
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
        """After the last stage failed: leave out clients whose shares do not fit together. False if
        there are none."""
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
    """Raise unless there is one string of bytes for each of these nodes."""
    whose, given = (told[key] for key in keys)
    if sorted(whose) != sorted(nodes) or len(given) != len(whose):
        raise ValueError(f"{keys[0]} names other nodes")
    if not all(type(part) is bytes and len(part) <= LONGEST_SHARE for part in given):
        raise ValueError(f"{keys[1]} holds no shares")


def _with_keys_of_others(kept: dict[int, Envelope]) -> set[int]:
    """Clients whose keys are not unique: Flower's nodes refuse to continue with equal keys."""
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
