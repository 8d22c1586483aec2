"""Flower's simulation runtime trains what the engine trains, with every method. (Flower declares
another version of ray than fairvar's ray extra; this test is there to notice when ours stops
working.)"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("ray", reason="Flower's simulation runtime needs ray")

from deployment import BIN, ENVIRONMENT, LINK_IS_UP, free_ports, kill_all_of, until
from expected import as_text, same_as_engines, stored

import fairvar as fv
from checks import METHODS
from fairvar.deploy.flower import new_app
from fairvar.deploy.flower.setup import read_setup

pytestmark = pytest.mark.deployment
RAY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # loopback only


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With an app and a SuperLink that simulates."""
    folder = tmp_path_factory.mktemp("simulation")
    new_app(folder / "trial_app")
    (port,) = free_ports(1)
    (folder / "home").mkdir()
    (folder / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        "insecure = true\n"
    )
    with open(folder / "link.log", "wb") as log:
        link = subprocess.Popen(
            [str(BIN / "flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1",
             "--port", str(port), "--database", str(folder / "state.db")],
            env=_environment(folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        until(lambda: LINK_IS_UP in (folder / "link.log").read_text(), 180, "the SuperLink")
        yield folder
    finally:
        os.killpg(link.pid, signal.SIGKILL)
        link.wait()
        kill_all_of(folder / "home")


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, **RAY, "FLWR_HOME": str(folder / "home")}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_the_app_in_the_simulation_runtime(method: fv.Method, folder: Path, tmp_path: Path) -> None:
    name, *fields = msgspec.to_builtins(method).items()
    given = " ".join(f"{k}={str(v).lower()}" for k, v in fields if v is not None)
    changes: dict = {
        "method": name[1],
        "method-options": given,
        "options": "train.dtype=float64 partition.alpha=0.3",
    }
    done = subprocess.run(
        [str(BIN / "flwr"), "run", str(folder / "trial_app"), "here", "--stream",
         "--federation-config", "num-supernodes=5 client-resources-num-cpus=1",
         "-c", f'out="{tmp_path}" {as_text(changes)}'],
        env=_environment(folder), cwd=folder, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = stored(tmp_path)
    assert run.config.method == method
    assert run.manifest["birth"]["refused"] == {}
    shared = {"data": "digits", "clients": 5, "rounds": 3, "lr": 0.1, "seed": 0}
    setup = read_setup(
        shared | changes,
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    )
    same_as_engines(setup, run)
