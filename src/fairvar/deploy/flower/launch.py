"""`fairvar flower run`: Flower's own `flwr run`, in an environment that is set up before.

Flower reads its telemetry switch when it is imported, which is before any app is: an app that sets
it is too late. So it must be in the environment of every process of Flower: this command's, those
that it starts, and, for deployments, the SuperLink's and the SuperNodes' (docs/deploy.md).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fairvar.errors import BadInput, RunFailed

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def run_app(app: Path, arguments: Sequence[str] = ()) -> None:
    """`flwr run APP ARGUMENTS`, which sends nothing to Flower's makers unless the user's own
    environment says so."""
    if not (app / "pyproject.toml").is_file():
        raise BadInput(f"{app} is no Flower app (it has no pyproject.toml); "
                       "`fairvar flower new` writes one")  # fmt: skip
    environment = quiet_environment()
    home = Path(environment.get("FLWR_HOME", Path.home() / ".flwr"))
    if not home.exists():  # what a local SuperLink stores there is nobody else's business
        home.mkdir(mode=0o700, parents=True)
    command = [_flwr(), "run", str(app), *arguments]
    done = subprocess.run(command, env=environment)  # noqa: S603  # the user's own words
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
