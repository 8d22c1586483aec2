"""fairvar's methods on Flower, in its simulation runtime and in real deployments.

    from fairvar.deploy.flower import client_app, server_app

    app = server_app()  # in server_app.py of a Flower app; client_app() in client_app.py

Both take a `model` function for a model of your own. The app's run configuration (`setup.py`) says
what is trained, a node's configuration (`client.py`) says where its data are. `new_app` writes an
app from the template, and `run_app` trains it with Flower's own `flwr run`.

Flower reads its telemetry switch when it is imported, which is before an app is imported: an app
cannot change it. So the switch must be in the environment of every process of Flower: those that
`run_app` starts and, in deployments, the SuperLink and the SuperNodes (docs/deploy.md).
"""

from __future__ import annotations

import keyword
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from fairvar.errors import BadInput, RunFailed
from fairvar.runs.store import write_text

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.clientapp.typing import Mod
    from flwr.serverapp import Grid, ServerApp

    from fairvar.deploy.flower.setup import Model

AT_TOP = ("pyproject.toml", "README.md")
IN_PACKAGE = ("__init__.py", "model.py", "server_app.py", "client_app.py")
TAKEN = ("fairvar", "flwr", "numpy", "torch")  # an app of this name would hide them
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def server_app(model: Model | None = None) -> ServerApp:
    """The ServerApp: runs the rounds, checks the replies, stores the run."""
    require_flower()
    from flwr.serverapp import ServerApp

    from fairvar.deploy.flower.server import run_on
    from fairvar.deploy.flower.setup import read_setup

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run_on(grid, read_setup(context.run_config, model))

    return app


def client_app(model: Model | None = None, mods: Sequence[Mod] = ()) -> ClientApp:
    """The ClientApp: trains on the node's data. `mods` are Flower's, such as its LocalDpMod; they
    act on the train exchange."""
    require_flower()
    from fairvar.deploy.flower.client import app_of, node_client

    return app_of(lambda context: node_client(context, model), mods)


def require_flower() -> None:
    """Raise `BadInput` if Flower is not installed. Also switches off its telemetry in processes
    that this one starts, and in this one unless Flower was imported before."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise BadInput('Flower is not installed; run: pip install "fairvar[flower]"') from None


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


def run_app(app: Path, arguments: Sequence[str] = ()) -> None:
    """`flwr run APP ARGUMENTS`, without telemetry unless the user's own environment asks for it."""
    if not (app / "pyproject.toml").is_file():
        raise BadInput(f"{app} is not a Flower app (it has no pyproject.toml); "
                       "`fairvar flower new` writes one")  # fmt: skip
    environment = quiet_environment()
    home = Path(environment.get("FLWR_HOME", Path.home() / ".flwr"))
    if not home.exists():  # a local SuperLink stores private things there
        home.mkdir(mode=0o700, parents=True)
    command = [_flwr(), "run", str(app), *arguments]
    done = subprocess.run(command, env=environment)  # noqa: S603  # arguments of the user
    if done.returncode:
        raise RunFailed(f"flwr run ended with {done.returncode}; its own message is above")


def quiet_environment() -> dict[str, str]:
    """This environment for a process of Flower; its programs find each other by PATH."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**QUIET, **os.environ, "PATH": paths}


def _flwr() -> str:
    found = shutil.which("flwr", path=quiet_environment()["PATH"])
    if found is None:
        raise BadInput('Flower is not installed; run: pip install "fairvar[flower]"')
    return found
