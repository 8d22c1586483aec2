"""The ClientApp. The node configuration gives the name of the site and the place of its data:

    flower-supernode … --node-config 'site="berlin" data="/data/ward.csv"'

The app's function `data` reads the data (`site_of` and `place_of` return both values, also in a
simulation). Without names of sites, give `client=3`. Flower starts a new process for each message;
only a client's personal model is kept between messages, in the folder `personal="/folder"` of the
node configuration (by default in fairvar's cache). Clipping for differential privacy (`clipped`)
and masking for secure aggregation (`secured`) are done by Flower's mods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.client.mod.secure_aggregation.secaggplus_mod import SecAggPlusState
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.constant import ErrorCode
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

from fairvar.data.client_data import ClientData
from fairvar.data.federation import Federation
from fairvar.data.fetch import cache_dir
from fairvar.deploy.client import SAMPLES, Client, Stamp, contribution
from fairvar.deploy.client import Message as Plain
from fairvar.deploy.flower.setup import (
    OWN_DATA,
    SECURE,
    Inputs,
    Model,
    SecureSettings,
    Setup,
    read_setup,
    sites_of,
)
from fairvar.deploy.flower.transport import (
    FACTS,
    LOG,
    SITE,
    UNREADABLE,
    error_of,
    from_records,
    to_records,
    unpack_request,
)
from fairvar.errors import BadInput
from fairvar.runs.runner import federation_of

Data = Callable[[Context], ClientData]  # reads the data of the node that this context is of


class Part(ClientData):
    """A part of an embedded data set, which the server has as well."""


def client_app_of(data: Data, model: Model | None, mods: Sequence[Mod]) -> ClientApp:
    """A ClientApp with the data that `data` reads at every node."""

    def name_of(context: Context) -> str:
        if site := site_of(context):
            return site
        with suppress(Exception):  # the first reply will report why the data cannot be read
            return data(context).name
        return ""

    return app_of(lambda context: node_client(context, data, model), mods, name_of)


def app_of(
    client_of: Callable[[Context], Client],
    mods: Sequence[Mod] = (),
    name_of: Callable[[Context], str] = lambda context: "",
) -> ClientApp:
    """A ClientApp that answers messages with the `Client` of its node."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        reply = client_of(context).answer(from_records(message.content))
        return Message(to_records(reply), reply_to=message)

    def hello(message: Message, context: Context) -> Message:
        me = Plain(Stamp("probe", -1), client_id(context))
        return Message(to_records(me, {SITE: name_of(context)}), reply_to=message)

    app.query("hello", mods=[reported])(hello)
    app.query("probe", mods=[reported, secured])(answer)
    app.train(mods=[reported, secured, *mods, clipped])(answer)
    app.evaluate(mods=[reported])(answer)
    return app


def node_client(context: Context, data: Data, model: Model | None) -> Client:
    setup = read_setup(context.run_config, model)
    torch.set_num_threads(setup.config.train.threads)  # the same bits as a simulated run
    folder = context.node_config.get("personal") or cache_dir() / "personal"
    found = node_data(setup, data(context))
    return Client(client_id(context), found, setup.agreed, Path(str(folder)))


def client_id(context: Context) -> int:
    """The position of the node's site in the run's `sites`, or the `client` number of the node."""
    sites, config = sites_of(context.run_config), context.node_config
    if "site" in config and sites:
        if config["site"] not in sites:
            raise BadInput(f"this node is started as site {config['site']!r}, the run has "
                           f"{', '.join(sites)}")  # fmt: skip
        return sites.index(str(config["site"]))
    given = config.get("client", config.get("partition-id"))
    if type(given) is not int or given < 0:
        way = f'site="{sites[0]}"' if sites else "client=0"
        raise BadInput(f"this node's client id is {given!r}; start it with --node-config '{way}'")
    return given


def site_of(context: Context) -> str:
    """The name of this node: `site` of its configuration, otherwise the entry of the run's `sites`
    with its number. Empty if sites have no names."""
    sites, config = sites_of(context.run_config), context.node_config
    number = config.get("client", config.get("partition-id"))
    listed = sites[number] if type(number) is int and 0 <= number < len(sites) else ""
    return str(config.get("site", listed))


def place_of(context: Context) -> Path:
    """The path of this node's data: `data` of its configuration or, in a simulation of own data,
    the file or folder with the site's name in the run's `folder`."""
    given, folder = context.node_config.get("data"), str(context.run_config.get("folder", ""))
    if given is None and "partition-id" in context.node_config and folder:
        found = {path.stem: path for path in sorted(Path(folder).iterdir())}
        given = str(found.get(site_of(context), "")) or None
    if given is None:
        raise BadInput("this node does not know where its data are; start it with --node-config "
                       "'data=\"/path\"', or simulate with --data FOLDER")  # fmt: skip
    return Path(str(given))


def embedded_part(context: Context) -> ClientData:
    """Part i of the embedded data set of the run, for client i."""
    setup, number = read_setup(context.run_config), client_id(context)
    if setup.own_data:
        raise BadInput(f'data = "{OWN_DATA}": the function `data` of the app must read the data of '
                       "this node, but it gives part of an embedded set")  # fmt: skip
    mine = federation_of(setup.config).only([number])
    parts = {name: (s.x, s.y) for name, s in mine.splits.items() if len(s.y) or name == "train"}
    return Part(**parts, name=site_of(context))


def node_data(setup: Setup, found: ClientData) -> Federation:
    """A federation of this client only."""
    if not isinstance(found, ClientData):
        raise BadInput(f"the function `data` of the app gives a {type(found).__name__}; it must "
                       "give a fairvar.ClientData")  # fmt: skip
    if not setup.own_data and not isinstance(found, Part):
        raise BadInput(f"the function `data` of the app reads own data, but the run says data = "
                       f'"{setup.config.data.name}"; set data = "{OWN_DATA}"')  # fmt: skip
    federation = found.federation(setup.agreed.classes)
    if setup.inputs:
        _check_inputs(setup.inputs, federation.train.x)
    elif federation.input_shape != setup.agreed.input_shape:
        raise BadInput(f"samples have shape {federation.input_shape}, the run expects "
                       f"{setup.agreed.input_shape} (input-shape)")  # fmt: skip
    return federation


def _check_inputs(expected: Inputs, x: Any) -> None:
    several = x if isinstance(x, dict) else {}
    found = {name: (tuple(part.shape[1:]), not part.is_floating_point())
             for name, part in several.items()}  # fmt: skip
    if found != expected:
        raise BadInput(f"samples have inputs {_described(found) or '(one, or without names)'}, the "
                       f"run expects {_described(expected)} (input-shape)")  # fmt: skip


def _described(inputs: Inputs) -> str:
    return ", ".join(f"{name} {shape}{' of int' * whole}"
                     for name, (shape, whole) in sorted(inputs.items()))  # fmt: skip


# -- mods ------------------------------------------------------------------------------------------
def reported(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer with an error message where the app raises an exception. Flower would do the same, and
    print the exception as a hundred lines, in every round of a simulation. The traceback is logged
    only if the message alone does not say what to change."""
    try:
        return call_next(message, context)
    except Exception as error:
        LOG.error("%s: %s", type(error).__name__, error, exc_info=not isinstance(error, BadInput))
        reason = f"{type(error)}:<'{error}'>"  # in Flower's form
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


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
    """The nodes whose forwarded shares this node cannot decrypt."""
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
