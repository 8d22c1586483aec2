"""Secure aggregation by Flower's own SecAgg+: the server learns sums over clients, no single reply.

`secure-aggregation = true` in the run configuration. Flower has SecAgg+ in its older interface only
(`FitIns`, `FitRes`, `LegacyContext`) and its mod acts on messages of the type `train` and no other.
So probes travel as `train` messages here, our messages are put into that interface's, and a node
answers nothing that the mod does not mask. The four stages, the keys and the masks are Flower's.

Values are rounded to steps of 2 · clipping_range / `quantisation`, at random up or down: the mean
of a round is off by less than one step (`max_weight` times the number of clients over the sum of
their weights as many, where weights are numbers of samples).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from itertools import combinations, islice
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as Envelope
from flwr.client.mod import secaggplus_mod
from flwr.client.mod.secure_aggregation.secaggplus_mod import SecAggPlusState
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_separate
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as RoundKey
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from fairvar.checked import Checked, Positive
from fairvar.engine.state import State
from fairvar.errors import BadInput
from fairvar.federated.guard import Arrival, Reason, brief
from fairvar.federated.messages import SAMPLES, Message
from fairvar.federated.summed import Mean, contribution, is_additive
from fairvar.flower.grid import LOG, GridTransport, Reply, short
from fairvar.flower.wire import ARRAYS, FACTS, from_records, header_of, to_records
from fairvar.methods.base import Method
from fairvar.tree import Tree

SECURE = "secure-aggregation"
FEWEST = 3  # of two clients, each can subtract itself from the sum
MODULUS = 2**32
MOST_STEPS = 2**30  # Flower rounds to 32-bit integers
UNREADABLE = "unreadable"  # a node's complaint: of these nodes' shares
LONGEST_SHARE = 4096  # bytes; Flower's have about 1,000
NAMES, WANTED = "names", "wanted"  # in the older interface arrays have no names: "x/weight x/bias"


class SecureSettings(Checked, frozen=True, kw_only=True):
    __where__: ClassVar[str | None] = "secure"

    clipping_range: Positive = 8.0  # no number that a client adds may be larger
    # The part of the clients that must stay for the sum to be recovered; fewer than these together
    # with the server cannot unmask anybody.
    threshold: Annotated[float, msgspec.Meta(gt=0.5, le=1)] = 2 / 3
    max_weight: Positive = 1.0  # the largest number of samples, where weights are those


def check_carries(method: Method, asked: int, settings: SecureSettings) -> None:
    """Refuse what cannot be kept, with the reason; `asked` clients take part in a round."""
    if not is_additive(method):
        what = ", ".join(method.reveals)
        raise BadInput(
            f"{SECURE} = true cannot be kept for {method.label}: its server needs each client's "
            f"{what} by itself, and a secure sum hides just that; leave it out, or take FedAvg, "
            "q-FFL, FairLoss or FairGrad"
        )
    if asked < FEWEST:
        raise BadInput(f"{SECURE} = true hides nothing among {asked} clients; {FEWEST} or more")
    if method.client_weights == "size" and settings.max_weight == 1:
        raise BadInput(f"{SECURE} = true with weights by size needs secure.max_weight, the largest "
                       "number of samples of any client")  # fmt: skip


def check_model(state: State) -> None:
    if state.buffers:
        raise BadInput(f"{SECURE} = true: a model with batch norm has statistics of unknown size, "
                       "which the sum's fixed range cannot hold; take group norm")  # fmt: skip


def quantisation(clients: int) -> int:
    """Steps of the range: as many as the sum over all clients may have without wrapping around."""
    return min(MOST_STEPS, 1 << ((MODULUS - 1) // clients).bit_length() - 1)


# -- on a node -------------------------------------------------------------------------------------
def secured(message: Envelope, context: Context, call_next: ClientAppCallable) -> Envelope:
    """Flower's mod, where the run asks for it; and then nothing else is answered."""
    if not context.run_config.get(SECURE):
        return call_next(message, context)
    if RECORD_KEY_CONFIGS not in message.content.config_records:
        raise BadInput("this run has secure aggregation: unmasked answers are not given")

    def inner(asked: Envelope, ctx: Context) -> Envelope:
        return _contribute(asked, ctx, call_next)

    if unreadable := _unreadable(message, context):  # Flower's mod would fail and name nobody
        complaint = ConfigRecord({UNREADABLE: unreadable})
        return Envelope(RecordDict({RECORD_KEY_CONFIGS: complaint}), reply_to=message)
    return secaggplus_mod(message, context, inner)


def _unreadable(message: Envelope, context: Context) -> list[int]:
    """The nodes whose shares, which the server forwards now, this node cannot read."""
    configs: Any = message.content.config_records[RECORD_KEY_CONFIGS]
    kept: Any = context.state.config_records.get(RECORD_KEY_STATE, {})
    if configs.get(Key.STAGE) != Stage.COLLECT_MASKED_VECTORS:
        return []
    state, bad = SecAggPlusState(**kept), []
    for node, sealed in zip(configs[Key.SOURCE_LIST], configs[Key.CIPHERTEXT_LIST], strict=True):
        try:
            opened = share_keys_plaintext_separate(decrypt(state.ss2_dict[node], sealed))
            if opened[:2] != (node, state.nid):
                bad.append(node)
        except Exception:  # whatever it raises, it is unreadable
            bad.append(node)
    return bad


def _contribute(asked: Envelope, context: Context, call_next: ClientAppCallable) -> Envelope:
    """What is about to be masked: this client's part of the sums, and its weight."""
    from fairvar.flower.setup import read_terms

    config, _, _, settings, _ = read_terms(context.run_config)
    assert settings is not None
    request = _unpacked(compat.recorddict_to_fitins(asked.content, keep_input=True))
    answer = call_next(Envelope(request.records, reply_to=asked), context)
    if answer.has_error():
        raise BadInput(short(answer))
    reply, method = from_records(answer.content), config.method
    parts = contribution(from_records(request.records), reply, method, config.train.lr)
    weight = int(reply.numbers[SAMPLES]) if method.client_weights == "size" else 1
    arrays = [parts[name].numpy() for name in request.wanted]
    _check_range(arrays, weight, settings)
    return Envelope(_fitres(arrays, weight), reply_to=asked)


def _check_range(arrays: Sequence[np.ndarray], weight: int, settings: SecureSettings) -> None:
    """Flower would cut larger numbers without a word; then the sum were another one."""
    part = weight / settings.max_weight
    largest = max(float(np.abs(a).max(initial=0.0)) for a in arrays) * part
    if not largest <= settings.clipping_range:
        raise BadInput(f"a value of {largest:.3g} is beyond secure.clipping_range = "
                       f"{settings.clipping_range:g}")  # fmt: skip
    if part > 1:
        raise BadInput(f"{weight} samples are beyond secure.max_weight = {settings.max_weight:g}")


def _fitres(arrays: Sequence[np.ndarray], weight: int) -> RecordDict:
    """The mod masks the arrays; the weight stays readable, so it is a plain 1 where it can be."""
    done = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(list(arrays)), weight, {})
    return compat.fitres_to_recorddict(done, keep_input=False)


# -- messages in the older interface ---------------------------------------------------------------
class _Request(msgspec.Struct):
    records: Any  # RecordDict
    wanted: list[str]


def _packed(records: RecordDict, wanted: Iterable[str]) -> FitIns:
    arrays = records.array_records[ARRAYS]
    facts: dict[str, Any] = dict(records.config_records[FACTS])
    facts |= {NAMES: " ".join(arrays), WANTED: " ".join(wanted)}
    return FitIns(ndarrays_to_parameters([a.numpy() for a in arrays.values()]), facts)


def _unpacked(asked: FitIns) -> _Request:
    facts: dict[str, Any] = dict(asked.config)
    names, wanted = (str(facts.pop(key)).split() for key in (NAMES, WANTED))
    arrays = zip(names, parameters_to_ndarrays(asked.parameters), strict=True)
    record = ArrayRecord({name: Array(array) for name, array in arrays})
    return _Request(RecordDict({ARRAYS: record, FACTS: ConfigRecord(facts)}), wanted)


# -- on the server ---------------------------------------------------------------------------------
class SecureTransport(GridTransport):
    """Clients behind a Flower grid, of whose training only sums come back."""

    name = "flower-secure"

    def __init__(
        self, grid: Grid, clients: int, settings: SecureSettings, facts: dict[str, float]
    ) -> None:
        super().__init__(grid, clients, facts)
        self.settings = settings

    def mean(self, requests: Sequence[Message], like: Tree, seconds: float) -> Mean:
        """Flower cannot recover the sum if a node leaves before the masks are agreed on. Nobody has
        trained by then, so that it starts again without that node."""
        sent = {r.client: r for r in requests if r.client in self.nodes}
        lost: dict[int, Arrival] = {}
        while len(sent) >= FEWEST:
            plan = _Plan(self, sent, list(like))
            stages = _Stages(self, {plan.nodes[c]: c for c in sent}, like, seconds)
            again = self._run(plan, stages)
            lost |= {c: a for c, a in stages.lost.items() if c not in plan.share}
            for client, arrival in lost.items():
                self._lose(client, plan.nodes.get(client, 0), arrival.detail or "no reply in time")
            if not again:
                return _mean(plan, like, list(lost.values()))
            sent = {c: r for c, r in sent.items() if c not in lost}
        return Mean([], torch.zeros(0, dtype=torch.float64), {}, list(lost.values()))

    def _run(self, plan: _Plan, stages: _Stages) -> bool:
        """The four stages; True if they are to start again, with those that are left."""
        context = LegacyContext(Context(0, 0, {}, RecordDict(), {}, 0), strategy=plan)
        context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({RoundKey.CURRENT_ROUND: plan.round})
        context.state[MAIN_PARAMS_RECORD] = ArrayRecord()
        try:
            self._workflow()(stages, context)  # type: ignore[arg-type]
        except _LeftEarly:
            return True
        except Exception as error:
            LOG.warning("secure aggregation broke off: %s", brief(repr(error)))
            return stages.blame()
        return False

    def _workflow(self) -> SecAggPlusWorkflow:
        return SecAggPlusWorkflow(
            num_shares=1.0,
            reconstruction_threshold=float(self.settings.threshold),
            max_weight=float(self.settings.max_weight),
            clipping_range=float(self.settings.clipping_range),
            quantization_range=quantisation(self.clients),
            modulus_range=MODULUS,
        )


def _mean(plan: _Plan, like: Tree, lost: Sequence[Arrival]) -> Mean:
    """Without a sum, of nobody."""
    ids = sorted(plan.share)
    weights = torch.tensor([plan.share[i] for i in ids], dtype=torch.float64)
    arrays = {
        name: torch.from_numpy(np.ascontiguousarray(a)).double()
        for name, a in zip(like, plan.sums, strict=False)
    }
    return Mean(ids, weights / weights.sum(), arrays, lost)


class _LeftEarly(Exception):
    """A node was lost before the masks were agreed on."""


class _Plan(FedAvg):
    """Tells Flower's workflow whom to ask what, and keeps what it recovered."""

    def __init__(
        self, transport: SecureTransport, requests: dict[int, Message], wanted: list[str]
    ) -> None:
        super().__init__()
        self.transport, self.requests, self.wanted = transport, requests, wanted
        self.round = next(iter(requests.values())).stamp.round
        self.nodes = {client: transport.nodes[client] for client in requests}
        self.share: dict[int, int] = {}  # client → its weight, once the sum is there
        self.sums: list[np.ndarray] = []

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        t = self.transport
        return [
            (GridClientProxy(self.nodes[client], t.grid, 0),
             _packed(to_records(request, t.facts), self.wanted))
            for client, request in self.requests.items()
        ]  # fmt: skip

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Flower hands the mean over in every result."""
        named = {node: client for client, node in self.nodes.items()}
        self.share = {named[proxy.node_id]: res.num_examples for proxy, res in results}
        self.sums = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


class _Stages:
    """The part of a grid that the workflow uses, with our own loop and a look at what comes: Flower
    lets one reply of the wrong form stop the whole sum. Masked values say nothing, but the rest of
    a reply can be checked, and who sends nonsense is left out by name."""

    def __init__(
        self, transport: SecureTransport, clients: dict[int, int], like: Tree, seconds: float
    ) -> None:
        self.transport, self.clients, self.seconds = transport, clients, seconds
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
            raise _LeftEarly
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
        if type(weight) is not int or not 1 <= weight <= self.transport.settings.max_weight:
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
