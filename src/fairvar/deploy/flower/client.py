"""The ClientApp. A node's configuration says which client it is and where its data are:

    flower-supernode … --node-config 'client=3 data="/data/ward.npz"'

Without `data`, client i holds part i of the embedded data set of the run (Flower's `partition-id`
works as well). Nothing is kept between messages: Flower starts a new process for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from fairvar.data import IID, build_federation
from fairvar.data.federation import Federation
from fairvar.data.sources import load
from fairvar.deploy.client import Client
from fairvar.deploy.flower.apps import Model
from fairvar.deploy.flower.privacy import clipped
from fairvar.deploy.flower.secure import secured
from fairvar.deploy.flower.setup import Setup, read_setup
from fairvar.deploy.flower.wire import from_records, to_records
from fairvar.deploy.local import only
from fairvar.deploy.messages import Message as Plain
from fairvar.deploy.messages import Stamp
from fairvar.errors import BadInput
from fairvar.runs.runner import federation_of


def make_client_app(model: Model | None, mods: Sequence[Mod] = ()) -> ClientApp:
    return app_of(lambda context: node_client(context, model), mods)


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
    torch.set_num_threads(
        setup.config.train.threads
    )  # as in a simulated run, for the same last bits
    number, agreed = client_id(context.node_config), setup.agreed
    data = node_data(setup, number, context.node_config)
    return Client(number, data, agreed.model, agreed.method, agreed.loss, agreed.train)


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
    if (
        config.name == "folder" and held != classes
    ):  # classes are numbered by the folders that exist
        raise BadInput(f"{place} has {held} class sub-folders with images, the run {classes} "
                       "classes; a node that lacks some must use .npz")  # fmt: skip
    found = build_federation(dataset, 1, IID(), config.seed, config.split, "split")
    if found.input_shape != setup.agreed.input_shape:
        raise BadInput(f"samples in {place} have shape {found.input_shape}, the run expects "
                       f"{setup.agreed.input_shape}")  # fmt: skip
    return found
