"""fairvar's methods on Flower, in its simulation runtime and in real deployments.

    from fairvar.deploy.flower import client_app, server_app

    app = server_app()  # in server_app.py of a Flower app; client_app() in client_app.py

Both take a `model` function for a model of your own. The app's run configuration (`setup.py`) says
what is trained, a node's configuration (`client.py`) says where its data are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairvar.deploy.flower.apps import Model
from fairvar.errors import BadInput

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.clientapp.typing import Mod
    from flwr.serverapp import ServerApp


def server_app(model: Model | None = None) -> ServerApp:
    """The ServerApp: runs the rounds, checks the replies, stores the run."""
    require_flower()
    from fairvar.deploy.flower.server import make_server_app

    return make_server_app(model)


def client_app(model: Model | None = None, mods: Sequence[Mod] = ()) -> ClientApp:
    """The ClientApp: trains on the node's data. `mods` are Flower's, such as its LocalDpMod; they
    act on the train exchange."""
    require_flower()
    from fairvar.deploy.flower.client import make_client_app

    return make_client_app(model, mods)


def require_flower() -> None:
    """Raise `BadInput` if Flower is not installed. Also switches off its telemetry in processes
    that this one starts, and in this one unless Flower was imported before (see `apps`)."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise BadInput('Flower is not installed; run: pip install "fairvar[flower]"') from None
