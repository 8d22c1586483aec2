"""Flower's simulation runtime trains what the reference loop trains. (Flower declares another
version of ray than fairvar's ray extra; this test is there to notice when ours stops working.)"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("ray", reason="Flower's simulation runtime needs ray")

from deployment import BIN, ENVIRONMENT, free_ports, until
from test_deployment import same_as_reference, stored

from fairvar.flower.new import new_app
from fairvar.flower.setup import read_setup

pytestmark = pytest.mark.deployment
RAY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # loopback only


def test_the_app_in_the_simulation_runtime(tmp_path: Path) -> None:
    new_app(tmp_path / "trial_app")
    (port,) = free_ports(1)
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        "insecure = true\n"
    )
    environment = {**os.environ, **ENVIRONMENT, **RAY, "FLWR_HOME": str(home)}
    with open(tmp_path / "link.log", "wb") as log:
        link = subprocess.Popen(
            [str(BIN / "flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1",
             "--port", str(port), "--database", str(tmp_path / "state.db")],
            env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        running = "Uvicorn running"
        until(lambda: running in (tmp_path / "link.log").read_text(), 60, "the SuperLink to start")
        options = "train.dtype=float64 evaluate.every=1"
        done = subprocess.run(
            [str(BIN / "flwr"), "run", str(tmp_path / "trial_app"), "here", "--stream",
             "--federation-config", "num-supernodes=5 client-resources-num-cpus=1",
             "-c", f'out="{tmp_path / "runs"}" options="{options}"'],
            env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    finally:
        os.killpg(link.pid, signal.SIGKILL)
        link.wait()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = stored(tmp_path / "runs")
    setup = read_setup(
        {"method": "fairgrad", "method-options": "strength=0.1 exact=true", "data": "digits",
         "clients": 5, "rounds": 3, "lr": 0.1, "seed": 0, "options": options},
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    )  # fmt: skip
    same_as_reference(setup, run.history())
