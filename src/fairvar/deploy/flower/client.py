"""The ClientApp. A node's configuration says which client it is and where its data are:

    flower-supernode … --node-config 'client=3 data="/data/ward.npz"'

Without `data`, client i holds part i of the embedded data set of the run (Flower's `partition-id`
works as well). Flower starts a new process for each message, and nothing is kept between them but
a client's personal model: in the folder that the node's configuration names (`personal="/folder"`;
in fairvar's cache by default). What a node does for differential privacy (`clipped`) and for secure
aggregation (`secured`) are Flower's mods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.client.mod.secure_aggregation.secaggplus_mod import SecAggPlusState
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_separate
from flwr.compat.common import recorddict_compat as compat
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from fairvar.data import IID, build_federation
from fairvar.data.federation import Federation
from fairvar.data.fetch import cache_dir
from fairvar.data.sources import load
from fairvar.deploy.client import SAMPLES, Client, Stamp, contribution, only
from fairvar.deploy.client import Message as Plain
from fairvar.deploy.flower.setup import SECURE, Model, SecureSettings, Setup, read_setup
from fairvar.deploy.flower.transport import (
    FACTS,
    UNREADABLE,
    error_of,
    from_records,
    to_records,
    unpack_request,
)
from fairvar.errors import BadInput
from fairvar.runs.runner import federation_of


def app_of(client_of: Callable[[Context], Client], mods: Sequence[Mod] = ()) -> ClientApp:
    """An app that answers as the client of its node."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        reply = client_of(context).answer(from_records(message.content))
        return Message(to_records(reply), reply_to=message)

    def hello(message: Message, context: Context) -> Message:
        me = Plain(Stamp("probe", -1), client_id(context.node_config))
        return Message(to_records(me), reply_to=message)

    app.query("hello")(hello)
    app.query("probe", mods=[secured])(answer)
    app.train(mods=[secured, *mods, clipped])(answer)
    app.evaluate()(answer)
    return app


def node_client(context: Context, model: Model | None) -> Client:
    setup = read_setup(context.run_config, model)
    torch.set_num_threads(setup.config.train.threads)  # for the last bits of a simulated run
    number = client_id(context.node_config)
    folder = context.node_config.get("personal") or cache_dir() / "personal"
    data = node_data(setup, number, context.node_config)
    return Client(number, data, setup.agreed, Path(str(folder)))


def client_id(node_config: Mapping[str, Any]) -> int:
    given = node_config.get("client", node_config.get("partition-id"))
    if type(given) is not int or given < 0:
        raise BadInput(
            f"this node's client id is {given!r}; start it with --node-config 'client=0'"
        )
    return given


def node_data(setup: Setup, client: int, node_config: Mapping[str, Any]) -> Federation:
    """A federation of this client only, from its own files or the embedded data set."""
    config, place = setup.config.data, node_config.get("data")
    if not setup.own_data:
        return only(federation_of(setup.config), client)
    if not isinstance(place, str):
        raise BadInput(f"the run trains on nodes' own {config.name} data; start this node with "
                       "--node-config 'data=\"/path\"'")  # fmt: skip
    classes = setup.agreed.classes
    dataset = load(config.name, place, classes=classes)  # a node may lack some classes
    held = len(np.unique(dataset.y))
    if config.name == "folder" and held != classes:  # numbered by the folders that exist
        raise BadInput(f"{place} has {held} class sub-folders with images, the run {classes} "
                       "classes; a node that lacks some must use .npz")  # fmt: skip
    found = build_federation(dataset, 1, IID(), config.seed, config.split, "split")
    if found.input_shape != setup.agreed.input_shape:
        raise BadInput(f"samples in {place} have shape {found.input_shape}, the run expects "
                       f"{setup.agreed.input_shape}")  # fmt: skip
    return found


# -- mods ------------------------------------------------------------------------------------------
def clipped(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower's clipping mod, if the server asks for it."""
    if KEY_CLIPPING_NORM not in message.content.config_records.get(FACTS, {}):
        return call_next(message, context)
    replies = []

    def remember(asked: Message, ctx: Context) -> Message:
        replies.append(call_next(asked, ctx))
        return replies[-1]

    try:
        return fixedclipping_mod(message, context, remember)
    except ZeroDivisionError:  # Flower divides by the norm, which is 0 for an update of zeros
        return replies[-1]


def secured(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower's SecAgg+ mod, if the run asks for it; such a run gets no unmasked answer."""
    if not context.run_config.get(SECURE):
        return call_next(message, context)
    if RECORD_KEY_CONFIGS not in message.content.config_records:
        raise BadInput("this run has secure aggregation: unmasked answers are not given")
    if unreadable := _unreadable(message, context):  # Flower's mod would fail without naming them
        complaint = ConfigRecord({UNREADABLE: unreadable})
        return Message(RecordDict({RECORD_KEY_CONFIGS: complaint}), reply_to=message)
    return secaggplus_mod(message, context, lambda asked, ctx: _contribute(asked, ctx, call_next))


def _unreadable(message: Message, context: Context) -> list[int]:
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


def _contribute(asked: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The values to be masked: this client's part of the sums, and its weight."""
    setup = read_setup(context.run_config)
    assert setup.secure is not None
    fit = compat.recorddict_to_fitins(asked.content, keep_input=True)
    request, wanted = unpack_request(fit)
    answer = call_next(Message(request, reply_to=asked), context)
    if answer.has_error():
        raise BadInput(error_of(answer).detail)
    reply, method = from_records(answer.content), setup.config.method
    question, train = from_records(request), setup.config.train
    parts = contribution(question, reply, method, train.lr_of(question.stamp.round))
    # The weight is not masked, so it is a plain 1 where it can be.
    weight = int(reply.numbers[SAMPLES]) if method.client_weights == "size" else 1
    arrays = [parts[name].numpy() for name in wanted]
    _check_range(arrays, weight, setup.secure)
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), weight, {})
    return Message(compat.fitres_to_recorddict(result, keep_input=False), reply_to=asked)


def _check_range(arrays: Sequence[np.ndarray], weight: int, settings: SecureSettings) -> None:
    """Flower would clip larger values silently, and the sum would be wrong."""
    part = weight / settings.max_weight
    largest = max(float(np.abs(a).max(initial=0.0)) for a in arrays) * part
    if not largest <= settings.clipping_range:
        raise BadInput(f"a value of {largest:.3g} is beyond secure.clipping_range = "
                       f"{settings.clipping_range:g}")  # fmt: skip
    if part > 1:
        raise BadInput(f"{weight} samples are beyond secure.max_weight = {settings.max_weight:g}")
