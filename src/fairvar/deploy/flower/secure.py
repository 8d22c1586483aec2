"""Secure aggregation with Flower's SecAgg+: the server learns sums over clients, no single reply.

`secure-aggregation = true` in the run configuration. Flower offers SecAgg+ in its older interface
only (`FitIns`, `FitRes`, `LegacyContext`), and its mod acts on messages of type `train` only. So
probes are sent as `train` messages, our messages are packed into that interface's, and a node
answers nothing that the mod does not mask. The four stages, the keys and the masks are Flower's.
`secure_node` has what a node does, `secure_server` what the server does.

Values are rounded at random up or down to steps of 2 · clipping_range / `quantisation`: the mean of
a round is off by less than one step (where weights are numbers of samples, times `max_weight` and
the number of clients over the sum of their weights).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import msgspec
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays

from fairvar.deploy.flower.wire import ARRAYS, FACTS
from fairvar.deploy.summed import is_additive
from fairvar.engine.state import State
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.validation import Checked, Positive

SECURE = "secure-aggregation"
FEWEST = 3  # clients; of two clients, each could subtract its own value from the sum
UNREADABLE = "unreadable"  # in a node's reply: the nodes whose shares it cannot decrypt
MODULUS = 2**32
MOST_STEPS = 2**30  # Flower rounds to 32-bit integers
NAMES, WANTED = "names", "wanted"  # in the older interface arrays have no names: "x/weight x/bias"


class SecureSettings(Checked, frozen=True, kw_only=True):
    __where__: ClassVar[str | None] = "secure"

    clipping_range: Positive = 8.0  # no value that a client adds may be larger
    # Share of the clients that must stay until the sum is recovered. Fewer clients, together with
    # the server, cannot unmask anybody.
    threshold: Annotated[float, msgspec.Meta(gt=0.5, le=1)] = 2 / 3
    max_weight: Positive = 1.0  # the largest number of samples, where weights are those


def check_carries(method: Method, asked: int, settings: SecureSettings) -> None:
    """Refuse what a secure sum cannot compute or hide; `asked` clients take part in a round."""
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
