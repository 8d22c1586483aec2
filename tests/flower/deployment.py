"""A real deployment on this machine's loopback: a SuperLink and SuperNodes as processes of their
own, under TLS with authentication, with the keys that `fairvar flower keys` makes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fairvar.flower.keys import make_keys
from fairvar.flower.new import new_app

BIN = Path(sys.executable).parent
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # it would fetch the app's requirements
    "PYTHONUNBUFFERED": "1",
    "PATH": f"{BIN}:{os.environ['PATH']}",
}


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def until(ready: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.25)


class Deployment:
    def __init__(self, folder: Path, nodes: int = 5) -> None:
        self.folder, self.nodes = folder, nodes
        self.keys, self.app = folder / "keys", folder / "trial_app"
        make_keys(self.keys, nodes + 1, ["127.0.0.1"])  # one more than will be registered
        new_app(self.app)
        self.port, *self.node_ports = free_ports(nodes + 2)
        self.environment = {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(folder / "home")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        home = folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.keys / "ca.crt"}"\n'
        )

    def start(self) -> None:
        self.start_link()
        for number in range(self.nodes):
            self.register(number)
            self.start_node(number)

    def start_link(self) -> None:
        self._start(
            "link", "flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
            "--database", str(self.folder / "state.db"),
            "--ssl-ca-certfile", str(self.keys / "ca.crt"),
            "--ssl-certfile", str(self.keys / "server.pem"),
            "--ssl-keyfile", str(self.keys / "server.key"), "--enable-supernode-auth",
        )  # fmt: skip
        until(lambda: "Uvicorn running" in self.log("link"), 60, "the SuperLink to start")

    def register(self, number: int) -> None:
        self.flwr("supernode", "register", str(self.keys / f"node-{number}.pub"), "here",
                  "--name", f"hospital-{number}")  # fmt: skip

    def start_node(self, number: int, name: str = "", authority: Path | None = None) -> None:
        self._start(
            name or f"node-{number}", "flower-supernode",
            "--root-certificates", str(authority or self.keys / "ca.crt"),
            "--auth-supernode-private-key", str(self.keys / f"node-{number}"),
            "--superlink", f"127.0.0.1:{self.port}",
            "--host", "127.0.0.1", "--port", str(self.node_ports[number]),
            "--max-retries", "3", "--node-config", f"client={number}",
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """SIGKILL the process and those that it started."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def run(self, out: Path, config: str, seconds: float = 400) -> subprocess.CompletedProcess[str]:
        return self.flwr("run", str(self.app), "here", "--stream", "-c",
                         f'out="{out}" {config}', seconds=seconds)  # fmt: skip

    def start_run(self, out: Path, config: str) -> None:
        self._start("run", "flwr", "run", str(self.app), "here", "--stream", "-c",
                    f'out="{out}" {config}')  # fmt: skip

    def flwr(self, *arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments], env=self.environment, cwd=self.folder,
            capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / program), *arguments], env=self.environment, cwd=self.folder,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
