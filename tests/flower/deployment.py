"""A real deployment on this machine's loopback: a SuperLink and SuperNodes as processes of their
own, under TLS with authentication, with the keys that `fairvar flower keys` makes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fairvar.deploy.flower import new_app
from fairvar.deploy.flower.keys import make_keys

BIN = Path(sys.executable).parent
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # it would fetch the app's requirements
    "PYTHONUNBUFFERED": "1",
    "PATH": f"{BIN}:{os.environ['PATH']}",
}
LINK_IS_UP = "Uvicorn running"
# A client app that waits while a file exists: while there is a file `2-1`, client 2 does not train
# in round 1. It wraps the app of the package, which has no such test code.
PATIENT = """
import time
from pathlib import Path
from flwr.clientapp import ClientApp
from fairvar.deploy.flower import client_app
from fairvar.deploy.flower.client import client_id
from APP.data import data
from APP.model import model

inner = client_app(model, data)


class Patient(ClientApp):
    def __call__(self, message, context):
        if message.metadata.message_type == "train":
            records = message.content.config_records  # stages of a secure sum have others
            t = records["message"]["round"] if "message" in records else None
            place = Path("FOLDER") / f"{client_id(context)}-{t}"
            end = time.monotonic() + 300
            while place.exists() and time.monotonic() < end:
                time.sleep(0.2)
        return inner(message, context)


app = Patient()
"""


GIVES_UP = ("--max-retries", "3")


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


def commands_of(page: Path) -> list[str]:
    """The blocks of a page that are to be executed."""
    return re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run_commands(script: str, folder: Path, environment: dict[str, str], seconds: float) -> str:
    """Execute a page's commands in this folder, on ports that are free; returns what they print.
    All that they have started is ended afterwards."""
    port, *nodes = free_ports(6)
    script = script.replace("8000", str(port)).replace("910$i", "${PORTS[$i]}")
    script = f"set -euo pipefail\nPORTS=({' '.join(map(str, nodes))})\n{script}"
    with open(folder / "page.log", "wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env={**environment, "PYTHONUNBUFFERED": "1"},
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kill_all_of(folder / "flwr")
    text = (folder / "page.log").read_text(errors="replace")
    assert code == 0, text[-3000:]
    return text


class Deployment:
    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        self.keys, self.app = folder / "keys", folder / "trial_app"
        make_keys(self.keys, nodes + 1, ["127.0.0.1"])  # one more than will be registered
        (self.port,) = free_ports(1)
        self.environment = {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(folder / "home")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._write_app()
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text('[superlink]\ndefault = "here"\n')
        self.knows("here", self.port)

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
        until(lambda: LINK_IS_UP in self.log("link"), 240, "the SuperLink to start")

    def start_open_link(self, port: int) -> None:
        """A second SuperLink, without TLS."""
        self._start("open", "flower-superlink", "--insecure", "--host", "127.0.0.1",
                    "--port", str(port))  # fmt: skip
        until(lambda: LINK_IS_UP in self.log("open"), 240, "the SuperLink to start")

    def register(self, number: int) -> None:
        self.flwr("supernode", "register", str(self.keys / f"node-{number}.pub"), "here",
                  "--name", f"hospital-{number}")  # fmt: skip

    def start_node(
        self, number: int, name: str = "", authority: Path | None = None, port: int | None = None
    ) -> None:
        """By default the node of this number as it should be; `port` of another SuperLink.

        One with a name of its own is to be refused, and soon gives up. The others must not: a
        SuperLink that was killed takes seconds to come back.
        """
        self._start_node(
            name or f"node-{number}", number, port or self.port,
            "--root-certificates", str(authority or self.keys / "ca.crt"),
            "--auth-supernode-private-key", str(self.keys / f"node-{number}"),
            *(GIVES_UP if name else ()),
        )  # fmt: skip

    def start_open_node(self, number: int, name: str) -> None:
        """Without TLS; Flower refuses a key without it before anything is sent."""
        self._start_node(name, number, self.port, "--insecure", *GIVES_UP)

    def kill(self, name: str) -> None:
        """SIGKILL the process and those that it started."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_server_app(self) -> None:
        """SIGKILL the ServerApp alone; its SuperLink and the nodes live on."""
        found = [p for p in processes_of(self.folder / "home") if "flwr-serverapp" in _command(p)]
        assert len(found) == 1, found
        os.kill(found[0], signal.SIGKILL)

    def ended(self, name: str, seconds: float) -> int:
        """The exit code of a process that ends by itself."""
        process = self.processes[name]
        until(lambda: process.poll() is not None, seconds, f"{name} to end")
        self.kill(name)  # what it may have left
        return process.returncode

    def run(self, out: Path, config: str, seconds: float = 900) -> subprocess.CompletedProcess[str]:
        return self.flwr(*self._run(out, config), seconds=seconds)

    def start_run(self, out: Path, config: str) -> None:
        self._start("run", "flwr", *self._run(out, config))

    def says(self, text: str, seconds: float = 600, times: int = 1) -> None:
        """Wait until the run that was started has said this, so many times."""
        until(lambda: self.log("run").count(text) >= times, seconds, f"{times} × {text!r}")

    def knows(self, name: str, port: int, trust: str = "") -> None:
        """A SuperLink by this name; by default it must show a certificate of our authority."""
        trust = trust or f'root-certificates = "{self.keys / "ca.crt"}"'
        with open(self.folder / "home" / "config.toml", "a") as file:
            file.write(f'[superlink.{name}]\naddress = "127.0.0.1:{port}"\n{trust}\n')

    def flwr(
        self, *arguments: str, seconds: float = 240, good: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Flower's command line, which must succeed, or fail if it is not `good`."""
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments], env=self.environment, cwd=self.folder,
            capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip
        assert (done.returncode == 0) == good, done.stdout[-2000:] + done.stderr[-2000:]
        return done

    def hold(self, client: int, t: int) -> None:
        """This client does not train in round t until it is let go."""
        (self.folder / "held" / f"{client}-{t}").touch()

    def let_go(self, client: int, t: int) -> None:
        (self.folder / "held" / f"{client}-{t}").unlink()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        kill_all_of(self.folder / "home")

    def _write_app(self) -> None:
        new_app(self.app)
        (self.folder / "held").mkdir()
        place = self.app / self.app.name / "client_app.py"
        text = PATIENT.replace("APP", self.app.name).replace("FOLDER", str(self.folder / "held"))
        place.write_text(text)

    def _run(self, out: Path, config: str) -> list[str]:
        return ["run", str(self.app), "here", "--stream", "-c", f'out="{out}" {config}']

    def _start_node(self, name: str, number: int, port: int, *trust: str) -> None:
        self._start(
            name, "flower-supernode", *trust, "--superlink", f"127.0.0.1:{port}",
            "--host", "127.0.0.1", "--port", str(free_ports(1)[0]),
            "--node-config", f"client={number}",
        )  # fmt: skip

    def _start(self, name: str, program: str, *arguments: str) -> None:
        place = self.folder / f"{name}.log"
        place.unlink(missing_ok=True)  # what an earlier one left may still write into its own
        with open(place, "wb") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / program), *arguments], env=self.environment, cwd=self.folder,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip


@contextmanager
def running(folder: Path, nodes: int) -> Iterator[Deployment]:
    """Started, and stopped whatever happens."""
    deployed = Deployment(folder, nodes)
    try:
        deployed.start()
        yield deployed
    finally:
        deployed.stop()


def kill_all_of(home: Path) -> None:
    """Also those that Flower has detached."""
    for process in processes_of(home):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def processes_of(home: Path) -> list[int]:
    """The ids of all processes of one deployment: its FLWR_HOME is in their environment."""
    mark = f"FLWR_HOME={home}".encode()
    found = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
    return [p for p in found if mark in _read(p, "environ").split(b"\0")]


def _command(process: int) -> str:
    return _read(process, "cmdline").decode(errors="replace")


def _read(process: int, what: str) -> bytes:
    """Nothing of a process that is gone, or another user's."""
    try:
        return Path(f"/proc/{process}/{what}").read_bytes()
    except OSError:
        return b""
