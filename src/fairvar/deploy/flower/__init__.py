"""fairvar's methods on Flower, in its simulation runtime and in real deployments.

    from fairvar.deploy.flower import client_app, server_app

    app = server_app()  # in server_app.py of a Flower app; client_app() in client_app.py

Both take a `model` function for a model of your own. What is trained and how stands in the app's
run configuration (`setup.py`), where a node's data lie in its node configuration (`client.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from fairvar.errors import BadInput

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.clientapp.typing import Mod
    from flwr.serverapp import ServerApp

Model = Callable[[], nn.Module]  # makes the same architecture on the server and on every node


def server_app(model: Model | None = None) -> ServerApp:
    """The ServerApp: drives the rounds, checks the replies, writes the run."""
    require_flower()
    from fairvar.deploy.flower.server import make_server_app

    return make_server_app(model)


def client_app(model: Model | None = None, mods: Sequence[Mod] = ()) -> ClientApp:
    """The ClientApp: answers with the node's own data. `mods` are Flower's, such as its LocalDpMod,
    for the train exchange."""
    require_flower()
    from fairvar.deploy.flower.client import make_client_app

    return make_client_app(model, mods)


def require_flower() -> None:
    """Refuse in one line where Flower is not installed. Its telemetry is off in what this process
    starts, and in this process unless Flower was imported before: `launch` is for those."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise BadInput('Flower is not installed; run: pip install "fairvar[flower]"') from None
