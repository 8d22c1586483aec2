"""fairvar's methods on Flower, in its simulation runtime and in real deployments.

    from fairvar.deploy.flower import client_app, server_app

    app = server_app()  # in server_app.py of a Flower app; client_app() in client_app.py

Both take the app's functions: `model` for a model and a loss of your own, `data` for the data of a
node. The app's run configuration (`setup.py`) says what is trained, a node's configuration
(`client.py`) its client id and the place of its data. `new_app` writes an app from the template,
and `run_app` (`launch.py`) trains it with Flower's own `flwr run`.

Flower reads its telemetry switch when it is imported, before it imports an app, so an app cannot
change it. So the switch must be in the environment of every process of Flower: those that
`run_app` starts and, in deployments, the SuperLink and the SuperNodes (docs/deploy.md).
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from fairvar.deploy.flower.launch import require_flower as require_flower
from fairvar.deploy.flower.launch import run_app as run_app
from fairvar.errors import BadInput
from fairvar.runs.formats import write_text

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.clientapp.typing import Mod
    from flwr.serverapp import Grid, ServerApp

    from fairvar.data.client_data import ClientData
    from fairvar.deploy.flower.client import Data
    from fairvar.deploy.flower.setup import Model

AT_TOP = ("pyproject.toml", "README.md")
IN_PACKAGE = ("__init__.py", "data.py", "model.py", "server_app.py", "client_app.py")
TAKEN = ("fairvar", "flwr", "numpy", "torch")  # an app of this name would hide them


def server_app(model: Model | None = None, data: Data | None = None) -> ServerApp:
    """The ServerApp: runs the rounds, checks the replies, stores the run. It has no data; the code
    of `data`, the nodes' function, is part of the run's identity."""
    require_flower()
    from flwr.serverapp import ServerApp

    from fairvar.deploy.flower.server import run_on
    from fairvar.deploy.flower.setup import read_setup

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run_on(grid, read_setup(context.run_config, model, data))

    return app


def client_app(
    model: Model | None = None, data: Data | None = None, mods: Sequence[Mod] = ()
) -> ClientApp:
    """The ClientApp: trains on the node's data, by default its part of the embedded set. `mods` are
    Flower's, such as its LocalDpMod; they act on the train exchange."""
    require_flower()
    from fairvar.deploy.flower import client

    return client.client_app_of(data or client.embedded_part, model, mods)


def embedded_part(context: Context) -> ClientData:
    """For `data`: part i of the embedded data set that the run names, for client i."""
    from fairvar.deploy.flower import client

    return client.embedded_part(context)


def site_of(context: Context) -> str:
    """For `data`: the name of this node's site."""
    from fairvar.deploy.flower import client

    return client.site_of(context)


def place_of(context: Context) -> Path:
    """For `data`: where the data of this node are, a file or a folder."""
    from fairvar.deploy.flower import client

    return client.place_of(context)


def new_app(folder: Path) -> list[Path]:
    """Write a new app named as the folder; returns its files."""
    name = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name):
        raise BadInput(
            f"{name!r} cannot name an app; use lower-case letters, digits and _ (my_app)"
        )
    if keyword.iskeyword(name) or name in {*sys.stdlib_module_names, *TAKEN}:
        raise BadInput(f"{name!r} means something else in Python; choose another name (my_app)")
    if folder.exists():
        raise BadInput(f"{folder} exists already; choose another name")
    template = files("fairvar.deploy.flower").joinpath("template")
    paths = {file: folder / file for file in AT_TOP}
    paths |= {f"{file}.txt": folder / name / file for file in IN_PACKAGE}
    for stored, path in paths.items():
        source = template.joinpath(stored)
        text = source.read_text(encoding="utf-8") if source.is_file() else ""
        write_text(path, text.replace("APP_NAME", name).replace("APP-NAME", name.replace("_", "-")))
    return list(paths.values())
