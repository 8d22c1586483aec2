"""Secure aggregation with Flower's SecAgg+: the server learns sums over clients, no single reply.

`secure-aggregation = true` in the run configuration. Flower offers SecAgg+ in its older interface
only (`FitIns`, `FitRes`, `LegacyContext`), and its mod acts on messages of type `train` only. So
probes are sent as `train` messages, our messages are packed into that interface's, and a node
answers nothing that the mod does not mask. The four stages, the keys and the masks are Flower's.
This module has what a node does, `secure_server` what the server does.

Values are rounded at random up or down to steps of 2 · clipping_range / `quantisation`: the mean of
a round is off by less than one step (where weights are numbers of samples, times `max_weight` and
the number of clients over the sum of their weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
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

from fairvar.deploy.flower.setup import SECURE, SecureSettings, read_terms
from fairvar.deploy.flower.transport import error_of
from fairvar.deploy.flower.wire import ARRAYS, FACTS, from_records
from fairvar.deploy.messages import SAMPLES
from fairvar.deploy.summed import contribution
from fairvar.engine.state import State
from fairvar.errors import BadInput

UNREADABLE = "unreadable"  # in a node's reply: the nodes whose shares it cannot decrypt
MODULUS = 2**32
MOST_STEPS = 2**30  # Flower rounds to 32-bit integers
NAMES, WANTED = "names", "wanted"  # in the older interface arrays have no names: "x/weight x/bias"


def secured(message: Envelope, context: Context, call_next: ClientAppCallable) -> Envelope:
    """Flower's mod, if the run asks for it; such a run gets no unmasked answer."""
    if not context.run_config.get(SECURE):
        return call_next(message, context)
    if RECORD_KEY_CONFIGS not in message.content.config_records:
        raise BadInput("this run has secure aggregation: unmasked answers are not given")
    if unreadable := _unreadable(message, context):  # Flower's mod would fail without naming them
        complaint = ConfigRecord({UNREADABLE: unreadable})
        return Envelope(RecordDict({RECORD_KEY_CONFIGS: complaint}), reply_to=message)
    return secaggplus_mod(message, context, lambda asked, ctx: _contribute(asked, ctx, call_next))


def _unreadable(message: Envelope, context: Context) -> list[int]:
    """The nodes whose shares, which the server forwards now, this node cannot decrypt."""
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
        except Exception:  # of any kind: it cannot be read
            bad.append(node)
    return bad


def _contribute(asked: Envelope, context: Context, call_next: ClientAppCallable) -> Envelope:
    """The values to be masked: this client's part of the sums, and its weight."""
    terms = read_terms(context.run_config)
    assert terms.secure is not None
    fit = compat.recorddict_to_fitins(asked.content, keep_input=True)
    request, wanted = unpack_request(fit)
    answer = call_next(Envelope(request, reply_to=asked), context)
    if answer.has_error():
        raise BadInput(error_of(answer))
    reply, method = from_records(answer.content), terms.config.method
    parts = contribution(from_records(request), reply, method, terms.config.train.lr)
    # The weight is not masked, so it is a plain 1 where it can be.
    weight = int(reply.numbers[SAMPLES]) if method.client_weights == "size" else 1
    arrays = [parts[name].numpy() for name in wanted]
    _check_range(arrays, weight, terms.secure)
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), weight, {})
    return Envelope(compat.fitres_to_recorddict(result, keep_input=False), reply_to=asked)


def _check_range(arrays: Sequence[np.ndarray], weight: int, settings: SecureSettings) -> None:
    """Flower would clip larger values silently, and the sum would be wrong."""
    part = weight / settings.max_weight
    largest = max(float(np.abs(a).max(initial=0.0)) for a in arrays) * part
    if not largest <= settings.clipping_range:
        raise BadInput(f"a value of {largest:.3g} is beyond secure.clipping_range = "
                       f"{settings.clipping_range:g}")  # fmt: skip
    if part > 1:
        raise BadInput(f"{weight} samples are beyond secure.max_weight = {settings.max_weight:g}")


# -- on both sides ---------------------------------------------------------------------------------
def check_model(state: State) -> None:
    if state.buffers:
        raise BadInput(f"{SECURE} = true: a model with batch norm has statistics of unknown size, "
                       "which the sum's fixed range cannot hold; take group norm")  # fmt: skip


def quantisation(clients: int) -> int:
    """Steps of the range: as many as the sum over all clients can have without wrapping around."""
    return min(MOST_STEPS, 1 << ((MODULUS - 1) // clients).bit_length() - 1)


def pack_request(records: RecordDict, wanted: Iterable[str]) -> FitIns:
    """A request in the older interface; `wanted` are the names of the sums that it asks for."""
    arrays = records.array_records[ARRAYS]
    facts: dict[str, Any] = dict(records.config_records[FACTS])
    facts |= {NAMES: " ".join(arrays), WANTED: " ".join(wanted)}
    return FitIns(ndarrays_to_parameters([a.numpy() for a in arrays.values()]), facts)


def unpack_request(asked: FitIns) -> tuple[RecordDict, list[str]]:
    facts: dict[str, Any] = dict(asked.config)
    names, wanted = (str(facts.pop(key)).split() for key in (NAMES, WANTED))
    arrays = zip(names, parameters_to_ndarrays(asked.parameters), strict=True)
    record = ArrayRecord({name: Array(array) for name, array in arrays})
    return RecordDict({ARRAYS: record, FACTS: ConfigRecord(facts)}), wanted
