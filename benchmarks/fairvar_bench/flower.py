"""A contender of the benchmark: Flower's simulation runtime, with fairvar's app, on this machine.

Flower's processes are started once per case and wait; a call is one round. Ray listens on loopback
only, and nothing is reported or downloaded.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from pathlib import Path

from fairvar.errors import BadInput, RunFailed
from fairvar_bench.cases import Case

ROUND, DONE = b"round\n", b"done\n"  # what the benchmark and its app tell each other
STARTING = 2  # calls in which Ray still starts processes
PATIENCE = 180.0  # seconds for Flower and Ray to start
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or Ray listens on all interfaces
    "RAY_USAGE_STATS_ENABLED": "0",
}
APP = """[project]
name = "bench-app"
version = "1.0.0"
[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
serverapp = "bench_app.parts:server_app"
clientapp = "bench_app.parts:client_app"
[tool.flwr.app.config]
model = "{case.model}"
clients = {case.clients}
samples = {case.samples}
method = "{case.method}"
line = "{line}"
"""
PARTS = """from fairvar_bench.flower_app import client, server

server_app = server()  # Flower looks for such lines before it runs them
client_app = client()
"""
LINK = """[superlink]
default = "here"
[superlink.here]
address = "127.0.0.1:{port}"
insecure = true
"""


def require_simulation() -> None:
    """Refuse in one line where Flower's simulation runtime cannot run."""
    missing = [name for name in ("flwr", "ray") if find_spec(name) is None]
    if missing:
        raise BadInput(
            f"bench.case = flower needs {' and '.join(missing)}, not installed here; "
            'run: pip install "fairvar[simulation]"'
        )


class Simulation(AbstractContextManager["Simulation"]):
    """Calls are rounds; `spent` is the processor time that they cost all of Flower's processes."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.spent, self.calls = 0.0, 0
        self.tree: set[int] = set()  # Flower's processes; none known where this is not Linux

    def __enter__(self) -> Simulation:
        self.folder = Path(tempfile.mkdtemp(prefix="fairvar-bench-"))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.line = socket.socket(socket.AF_UNIX)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()
        for process in reversed(self.processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __call__(self) -> None:
        before = processor_time(self.tree)
        self.line.sendall(ROUND)
        if self.line.recv(len(DONE)) != DONE:
            raise RunFailed(f"Flower's simulation ended: {self._log()}")
        self.spent += processor_time(self.tree) - before
        self.calls += 1
        if self.calls <= STARTING:  # looking for processes takes time: not in every turn
            self.tree = tree_of(self.processes[0].pid)

    def clock(self) -> float:
        """Processor time of this process and, while they do a round, of Flower's."""
        return time.process_time() + self.spent

    def _start(self) -> None:
        port, place = _free_port(), self.folder / "line"
        app = self.folder / "bench_app"
        _write(app / "pyproject.toml", APP.format(case=self.case, line=place))
        _write(app / "bench_app" / "__init__.py", "")
        _write(app / "bench_app" / "parts.py", PARTS)
        _write(self.folder / "home" / "config.toml", LINK.format(port=port))
        self.line.bind(str(place))
        self.line.listen(1)
        self._run("flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1",
                  "--port", str(port), "--database", str(self.folder / "state.db"))  # fmt: skip
        self._wait_for("Uvicorn running")
        self._run("flwr", "run", str(app), "here", "--stream", "--federation-config",
                  f"num-supernodes={self.case.clients} client-resources-num-cpus=1")  # fmt: skip
        with self.line as listening:  # from here on, the line to the app
            self.line = self._answered(listening)

    def _answered(self, listening: socket.socket) -> socket.socket:
        listening.settimeout(1.0)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.processes[-1].poll() is None:
            with suppress(TimeoutError):
                return listening.accept()[0]
        raise RunFailed(f"Flower's simulation did not start: {self._log(1000)}")

    def _run(self, program: str, *arguments: str) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        modules = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        own = {"FLWR_HOME": str(self.folder / "home"), "PATH": path, "PYTHONPATH": modules}
        with open(self.folder / "log", "ab") as log:
            self.processes.append(
                subprocess.Popen(  # noqa: S603
                    [str(Path(sys.executable).parent / program), *arguments],
                    env={**os.environ, **ENVIRONMENT, **own}, cwd=self.folder,
                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip

    def _wait_for(self, words: str) -> None:
        end = time.monotonic() + PATIENCE
        while words not in self._log(10**6):
            if time.monotonic() > end or self.processes[-1].poll() is not None:
                raise RunFailed(f"Flower's SuperLink did not start: {self._log()}")
            time.sleep(0.1)

    def _log(self, characters: int = 300) -> str:
        return (self.folder / "log").read_text(errors="replace")[-characters:]


def tree_of(root: int) -> set[int]:
    """A process and all that come from it; nobody where this is not Linux."""
    parent_of = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent_of[int(entry.name)] = int(_stat(int(entry.name))[1])
    found = {root} & parent_of.keys()
    while more := {n for n, p in parent_of.items() if p in found} - found:
        found |= more
    return found


def processor_time(processes: set[int]) -> float:
    """Seconds that they have had together."""
    ticks = 0
    for number in processes:
        with suppress(OSError):
            ticks += sum(map(int, _stat(number)[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(number: int) -> list[str]:
    """What follows the name, which may hold anything: state, parent, …, user and system ticks."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
