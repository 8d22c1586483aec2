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

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch
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

from fairvar.deploy.flower.grid import LOG, GridTransport, short
from fairvar.deploy.flower.secure_stages import FEWEST, UNREADABLE, LeftEarly, Stages
from fairvar.deploy.flower.wire import ARRAYS, FACTS, from_records, to_records
from fairvar.deploy.guard import Arrival, brief
from fairvar.deploy.messages import SAMPLES, Message
from fairvar.deploy.summed import Mean, contribution, is_additive
from fairvar.engine.state import State
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.tree import Tree
from fairvar.validation import Checked, Positive

SECURE = "secure-aggregation"
MODULUS = 2**32
MOST_STEPS = 2**30  # Flower rounds to 32-bit integers
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
    from fairvar.deploy.flower.setup import read_terms

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
            stages = Stages(
                self, {plan.nodes[c]: c for c in sent}, like, seconds, self.settings.max_weight
            )
            again = self._run(plan, stages)
            lost |= {c: a for c, a in stages.lost.items() if c not in plan.share}
            for client, arrival in lost.items():
                self._lose(client, plan.nodes.get(client, 0), arrival.detail or "no reply in time")
            if not again:
                return _mean(plan, like, list(lost.values()))
            sent = {c: r for c, r in sent.items() if c not in lost}
        return Mean([], torch.zeros(0, dtype=torch.float64), {}, list(lost.values()))

    def _run(self, plan: _Plan, stages: Stages) -> bool:
        """The four stages; True if they are to start again, with those that are left."""
        context = LegacyContext(Context(0, 0, {}, RecordDict(), {}, 0), strategy=plan)
        context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({RoundKey.CURRENT_ROUND: plan.round})
        context.state[MAIN_PARAMS_RECORD] = ArrayRecord()
        try:
            self._workflow()(stages, context)  # type: ignore[arg-type]
        except LeftEarly:
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
    """Empty if secure aggregation failed."""
    ids = sorted(plan.share)
    weights = torch.tensor([plan.share[i] for i in ids], dtype=torch.float64)
    arrays = {
        name: torch.from_numpy(np.ascontiguousarray(a)).double()
        for name, a in zip(like, plan.sums, strict=False)
    }
    return Mean(ids, weights / weights.sum(), arrays, lost)


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
