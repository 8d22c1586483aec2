"""`fairvar flower run`: starts a SuperLink if needed, calls `flwr run`, and reports how it ended.

Plain `flwr run` can fail silently in a new environment. It reports that the run was started and
exits with 0, while Flower fails to install the app's requirements, finds no ray, simulates two
nodes for an app of five clients, or uses a SuperLink that another environment left running. So a
simulation gets its own SuperLink here, with this environment and one node per client, and the
status of the run is read from Flower afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fairvar.common.files import given_path
from fairvar.common.process import note
from fairvar.errors import BadInput, FairvarError, RunFailed, one_line

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
SIMULATION = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # the app runs in this environment
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # ray would listen on all network interfaces
    "RAY_USAGE_STATS_ENABLED": "0",
}
STARTED = re.compile(r"Successfully started run (\d+)")
BOXED = re.compile(r"│ (.*) │")  # a line of an error message of Flower's
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
HERE = "here"  # the name of the SuperLink of a simulation
SECONDS_TO_START, SECONDS_TO_END = 90.0, 90.0
PAIR = re.compile(r"""\S+?=('[^']*'|"[^"]*"|\S+)""")  # of -c; Flower skips all other text
BUILT_IN_LINKS = ("local", "supergrid")  # of the configuration that Flower writes at first
LOCAL = ":local:"  # address of a SuperLink that `flwr run` starts and leaves running


def run_app(app: Path, arguments: Sequence[str] = (), data: Path | None = None) -> None:
    """Simulate an app on this machine or, if `arguments` begins with the name of a SuperLink, run
    it there. The other arguments are passed to `flwr run`. `data`: a folder with the data of the
    simulated sites."""
    if not (app / "pyproject.toml").is_file():
        raise BadInput(f"{app} is not a Flower app (it has no pyproject.toml); "
                       "`fairvar flower new` writes one")  # fmt: skip
    environment = quiet_environment()
    named = bool(arguments) and not arguments[0].startswith("-")
    if named and not _is_local(arguments[0], environment):
        if data is not None:
            raise BadInput("--data is for simulations; a real node is started with --node-config "
                           "'data=\"/path\"'")  # fmt: skip
        _changes(arguments)
        _check_known(arguments[0], environment)
        return _run(app, arguments[0], arguments[1:], environment)
    rest = [*arguments[named:], *_sites_of(data)]
    if find_spec("ray") is None:
        raise BadInput('Flower simulates nodes with ray; run: pip install "fairvar[simulation]"')
    changed = _changes(rest)
    if not _given(rest).federation_config:
        nodes = _clients(app, changed)
        rest += ["--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1"]
    with simulating_superlink(environment) as inside:
        _run(app, HERE, rest, inside)


def require_flower() -> None:
    """Raise `BadInput` if Flower is not installed. Also switches off its telemetry in processes
    that this one starts, and in this one unless Flower was imported before."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise BadInput('Flower is not installed; run: pip install "fairvar[flower]"') from None


def quiet_environment() -> dict[str, str]:
    """Environment variables for processes of Flower, which find each other's programs by PATH."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**QUIET, **os.environ, "PATH": paths, "PYTHONUNBUFFERED": "1"}


def _home(environment: Mapping[str, str]) -> Path:
    return given_path(environment.get("FLWR_HOME", "~/.flwr"))


def _superlinks(environment: Mapping[str, str]) -> dict[str, Any]:
    """Those of Flower's configuration; `OSError` and others if it cannot be read."""
    text = (_home(environment) / "config.toml").read_text(encoding="utf-8")
    links = tomllib.loads(text)["superlink"]
    return {name: link for name, link in links.items() if isinstance(link, dict)}


def _is_local(name: str, environment: Mapping[str, str]) -> bool:
    """Whether Flower would start this SuperLink, or take any that listens on its port."""
    with suppress(OSError, ValueError, KeyError, AttributeError):
        link = _superlinks(environment).get(name, {})
        return str(link.get("address", "")).startswith(LOCAL)
    return name == "local"


def _check_known(name: str, environment: Mapping[str, str]) -> None:
    """Flower writes a configuration of its own where there is none; a mistyped name must not."""
    try:
        known = list(_superlinks(environment))
    except FileNotFoundError:
        known = list(BUILT_IN_LINKS)
    except (OSError, ValueError, KeyError, AttributeError):
        return  # `flwr run` says what is wrong with the file
    if name not in known:
        place = _home(environment) / "config.toml"
        raise BadInput(f"SuperLink {name!r} is not in {place}; known: {', '.join(sorted(known))}")


def _given(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of `flwr run` that are used here."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--run-config", action="append", default=[])
    parser.add_argument("--federation-config", action="append", default=[])
    parser.add_argument("--stream", action="store_true")
    return parser.parse_known_args(list(arguments))[0]


def _changes(arguments: Sequence[str]) -> dict[str, Any]:
    """Keys of the run configuration that are changed by `-c`: pairs KEY=VALUE, or a TOML file."""
    require_flower()
    from flwr.common.config import parse_config_args

    texts = _given(arguments).run_config
    try:
        found = parse_config_args(texts)
    except Exception as error:  # of Click or TOML, or that the file cannot be read
        raise BadInput(f"-c {' '.join(texts)}: {one_line(str(error))}") from None
    for text in texts:
        if not text.endswith(".toml") and (lost := PAIR.sub("", text).strip()):
            raise BadInput(f"-c {text}: {lost!r} is not KEY=VALUE; values with spaces need "
                           "quotation marks")  # fmt: skip
    return found


def _clients(app: Path, changed: Mapping[str, Any]) -> int:
    """The app's number of clients, with these changes of its configuration. Import and
    configuration errors are raised here, before anything is started."""
    from fairvar.deploy.flower.setup import read_setup

    try:
        text = (app / "pyproject.toml").read_text(encoding="utf-8")
        section = tomllib.loads(text)["tool"]["flwr"]["app"]
        config: dict[str, Any] = section.get("config", {})
        config = config | dict(changed)
        module = str(section["components"]["serverapp"]).partition(":")[0]
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise BadInput(f"{app}: its configuration cannot be read ({error!r})") from None
    sys.path.insert(0, str(app.resolve()))
    try:
        import_module(module)
        return read_setup(config).config.data.clients
    except FairvarError:
        raise
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise BadInput(f"{app}: {module} cannot be imported: {why}") from error
    finally:
        sys.path.remove(str(app.resolve()))


def _sites_of(folder: Path | None) -> list[str]:
    """The run configuration for a folder with a file or a folder for each site."""
    if folder is None:
        return []
    if not folder.is_dir():
        raise BadInput(f"--data {folder}: give a folder with a file or a folder for each site")
    names = sorted(path.stem for path in folder.iterdir() if not path.name.startswith("."))
    if not names or len(set(names)) < len(names):
        raise BadInput(f"--data {folder}: it needs one file or folder for each site, by its name")
    sites = " ".join(map(shlex.quote, names))
    for text in (sites, str(folder.resolve())):
        if '"' in text:
            raise BadInput(f"--data {folder}: names with quotation marks cannot be used")
    return ["-c", f'data="own" sites="{sites}" folder="{folder.resolve()}"']


# -- processes -------------------------------------------------------------------------------------
@contextmanager
def simulating_superlink(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start a SuperLink for this simulation; yields the environment in which its name is `HERE`."""
    with TemporaryDirectory(prefix="fairvar-flower-") as place:
        home, (port, address) = Path(place), _free_address()
        inside = {**SIMULATION, **environment, "FLWR_HOME": place}
        home.joinpath("config.toml").write_text(
            f'[superlink]\ndefault = "{HERE}"\n[superlink.{HERE}]\naddress = "{address}"\n'
            "insecure = true\n"
        )
        command = [_program("flower-superlink"), "--insecure", "--simulation",
                   "--host", "127.0.0.1", "--port", str(port),
                   "--database", str(home / "state.db")]  # fmt: skip
        with open(home / "superlink.log", "wb") as log:
            link = subprocess.Popen(command, env=inside, stdout=log, stderr=log,  # noqa: S603
                                    start_new_session=True)  # fmt: skip
        try:
            _wait_for(link, address, home / "superlink.log")
            yield inside
        finally:
            _end(link)


def _free_address() -> tuple[int, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    return port, f"127.0.0.1:{port}"


def _wait_for(link: subprocess.Popen[bytes], address: str, log: Path) -> None:
    import httpx

    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end and link.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://{address}/health", timeout=2.0, trust_env=False).is_success:
                return
        time.sleep(0.25)
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise RunFailed(f"the SuperLink of the simulation did not start: {' '.join(last)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started."""
    groups = _groups(process.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)


def _groups(leader: int) -> set[int]:
    """Process groups of this process and its descendants. (A SuperLink runs the simulation in a
    group of its own, and does not end it.)"""
    family, groups = {leader}, {leader}
    with suppress(OSError):  # without `ps` there is the first group only
        told = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,pgid="],  # noqa: S607
                              capture_output=True, text=True)  # fmt: skip
        rows = [[*map(int, line.split())] for line in told.stdout.splitlines()]
        while more := {pid for pid, parent, _ in rows if parent in family} - family:
            family |= more
        groups |= {group for pid, _, group in rows if pid in family}
    return groups


def _run(app: Path, link: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """`flwr run`, with its log on stdout; raises `RunFailed` unless the run was completed."""
    home = _home(environment)
    if not home.exists():  # a local SuperLink stores private files there
        home.mkdir(mode=0o700, parents=True)
    stream = [] if _given(arguments).stream else ["--stream"]
    command = [_program("flwr"), "run", str(app), link, *stream, *arguments]
    started, boxed = None, list[str]()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE,  # noqa: S603
                          stderr=subprocess.STDOUT) as flwr:  # fmt: skip
        assert flwr.stdout is not None
        try:
            for line in flwr.stdout:
                text = line.decode(errors="replace")
                print(text if sys.stdout.isatty() else COLOURS.sub("", text), end="", flush=True)
                started = started or STARTED.search(text)
                boxed += BOXED.findall(text)
        except KeyboardInterrupt:
            if started and link != HERE:
                note(f"the run goes on at {link}; to end it: flwr stop {started[1]} {link}")
            raise
    why = one_line(" ".join(boxed)) or "its own message is above"
    if flwr.returncode:
        raise RunFailed(f"flwr run ended with {flwr.returncode}: {why}")
    if started is None:
        raise RunFailed(f"flwr run has not started a run: {why}")
    status, details = _status(link, started[1], environment)
    if status != "finished:completed":
        raise RunFailed(f"the run ended as {status}: {one_line(details) or 'its log is above'}")


def _status(link: str, run: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Status of the run. Flower takes a while to notice that a server was killed."""
    command = [_program("flwr"), "list", link, "--run-id", run, "--format", "json"]
    end, status, details = time.monotonic() + SECONDS_TO_END, "unknown", ""
    while not status.startswith("finished") and time.monotonic() < end:
        found = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603
        with suppress(ValueError, LookupError):
            (run_facts,) = json.loads(found.stdout[found.stdout.index("{") :])["runs"]
            status, details = str(run_facts["status"]), str(run_facts.get("status-details", ""))
    return status, details


def _program(name: str) -> str:
    found = shutil.which(name, path=quiet_environment()["PATH"])
    if found is None:
        raise BadInput('Flower is not installed; run: pip install "fairvar[flower]"')
    return found
