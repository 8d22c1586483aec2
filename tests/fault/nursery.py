"""A fork server for tests that kill: a process that has imported torch once and forks children.

Run as a script it warms up, then answers one JSON line per order. Each child is one `fairvar`
command in a session of its own, so that it can be killed at any moment, alone or with its workers.
Forking from pytest itself would inherit its threads and its shape checks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

PLAN = """
name = "fault"
[data]
name = "logistic"
clients = 6
[partition]
name = "natural"
[train]
rounds = {rounds}
[evaluate]
every = 5
[sweep]
methods = ["fedavg", "afl", "fairgrad*"]
seeds = 2
"""
KEPT = ("config.toml", "history.safetensors", "state.safetensors")
BESIDE = {".locks", "federations", "report"}  # what a sweep's folder holds besides runs
STEPS = ("made", "half", "written", "synced", "replaced", "folder")


class End(NamedTuple):
    """How a command ended: exit code (negative: the signal that killed it) and what it said."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def complaints(self) -> list[str]:
        """Lines on stderr but for progress, which a slow machine shows every ten seconds."""
        return [line for line in self.err.splitlines() if not line.startswith("fault: ")]


class Nursery:
    """The client's side: orders go down a pipe, answers come back."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, order: Mapping[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, *arguments: str | Path, **fault: Any) -> int:
        """Fork a `fairvar` command with a fault in it; its number."""
        return int(self.ask({"start": [str(a) for a in arguments], "fault": fault}))

    def kill(self, pid: int, number: int = signal.SIGKILL, whole: bool = False) -> None:
        """Signal a child, or it and all its workers."""
        self.ask({"kill": pid, "number": number, "whole": whole})

    def wait(self, pid: int, seconds: float = 300.0) -> End:
        return End(*self.ask({"wait": pid, "seconds": seconds}))

    def run(self, *arguments: str | Path, **fault: Any) -> End:
        return self.wait(self.start(*arguments, **fault))


@contextmanager
def nursery(folder: Path) -> Iterator[Nursery]:
    """A running fork server that keeps the children's words in `folder`."""
    command = [sys.executable, __file__, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Nursery(process)
        assert process.stdin is not None
        process.stdin.close()


def write_plan(folder: Path, rounds: int, sweep: str = "") -> Path:
    path = folder / "plan.toml"
    path.write_text(PLAN.format(rounds=rounds) + sweep)
    return path


def run_bytes(folder: Path) -> dict[str, bytes]:
    """What must be the same after any number of faults: all of a run but its wall-clock time."""
    found = {name: (folder / name).read_bytes() for name in KEPT}
    facts = json.loads((folder / "manifest.json").read_bytes())
    for measured in ("seconds", "peak_megabytes"):
        facts["birth"].pop(measured)
    facts.pop("seal")
    return found | {"manifest": json.dumps(facts, sort_keys=True).encode()}


def sweep_bytes(out: Path) -> dict[str, dict[str, bytes]]:
    found = {folder.name: run_bytes(folder) for folder in run_folders(out)}
    records = {p.name: p.read_bytes() for p in out.glob("federations/*.json")}
    return {**found, "federations": records}


def run_folders(out: Path) -> list[Path]:
    found = [p for p in sorted(out.iterdir()) if p.is_dir() and p.name not in BESIDE]
    return [p for p in found if p.name != ".groups"]


def visible(out: Path) -> list[Path]:
    """Files of runs and of groups under way, but for hidden leftovers of a write."""
    found = [p for p in sorted(out.rglob("*")) if p.is_file() and not set(p.parts) & BESIDE]
    return [p for p in found if not p.name.startswith(".")]


def wait_until(there: Callable[[], object], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers_of(session: int) -> list[int]:
    found = []
    for number in members(session):
        with suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{number}/cmdline").read_bytes():
                found.append(number)
    return found


def ends(session: int, seconds: float = 60.0) -> bool:
    """Whether all processes of a session end by themselves."""
    deadline = time.monotonic() + seconds
    while members(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not members(session)


def members(session: int) -> list[int]:
    """Processes that are left of a session, from the process table."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, from the process table."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def _die_in_save(doomed: str, step: str) -> None:
    """Die at once, as in a power cut, inside one step of writing one file."""
    from fairvar.common import files

    replace, fsync, sync_folder = os.replace, os.fsync, files._sync_folder
    writing = False

    def die(now: str) -> None:
        if writing and now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    class Doomed:
        """A file that can end half-way through its content."""

        def __init__(self, path: Path, mode: str) -> None:
            nonlocal writing
            writing = path.name.startswith(f".{doomed}")
            self.file = path.open(mode)
            die("made")

        def __enter__(self) -> Doomed:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, content: bytes) -> None:
            self.file.write(content[: len(content) // 2])
            self.file.flush()
            die("half")
            self.file.write(content[len(content) // 2 :])

    def sync(handle: int) -> None:
        die("written")
        fsync(handle)
        die("synced")

    def put(old: Path, new: Path) -> None:
        replace(old, new)
        die("replaced")

    def folder_sync(folder: Path) -> None:
        os.fsync = fsync
        sync_folder(folder)
        die("folder")
        os.fsync = sync

    files.open = Doomed  # type: ignore[attr-defined]
    os.replace, os.fsync = put, sync  # type: ignore[assignment]
    files._sync_folder = folder_sync


def _log_computed(path: str) -> None:
    """Note every cell that was computed to its end, in a file that appends whole lines."""
    from fairvar.runs import runner
    from fairvar.runs.identity import identity_of

    real = runner.compute

    def compute(configs: Sequence[Any], *rest: Any) -> Any:
        histories = real(configs, *rest)
        with Path(path).open("a") as file:
            file.writelines(f"{identity_of(c).name} {os.getpid()}\n" for c in configs)
        return histories

    runner.compute = compute


def _start(arguments: Sequence[str], fault: Mapping[str, Any], folder: Path) -> int:
    """Fork a child and wait until it has a session and output files of its own: on a busy machine
    it could be killed before, and leave no output to read."""
    sys.stdout.flush()
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        _child(arguments, fault, folder / f"words-{os.getpid()}", tell)
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)
    return pid


def _child(arguments: Sequence[str], fault: Mapping[str, Any], words: Path, tell: int) -> None:
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{words}.{name}", os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.close(tell)  # ends the parent's wait
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a job in the background ignores
        standard = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, standard)
    from fairvar import cli

    if "file" in fault:
        _die_in_save(fault["file"], fault["step"])
    if "log" in fault:
        _log_computed(fault["log"])
    code = 0
    try:
        cli.main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pid: int, words: Path, started: float, seconds: float) -> list[Any]:
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    spent = time.monotonic() - started
    code = os.waitstatus_to_exitcode(status)
    return [code, *(Path(f"{words}.{n}").read_text() for n in ("out", "err")), spent]


def _signal(pid: int, number: int, whole: bool, started: Mapping[int, float]) -> None:
    """Only to processes of commands that were started here: numbers of ended ones are used again,
    by anybody on the machine."""
    if whole and pid in started and members(pid):
        os.killpg(pid, number)
    elif not whole and os.getsid(pid) in started:
        os.kill(pid, number)


def _serve(folder: Path) -> None:
    from fairvar.runs.plan import Plan
    from fairvar.runs.runner import arrange
    from fairvar.runs.sweep import run_sweep

    # The first round of each kind imports and builds things: do that once, here.
    with tempfile.TemporaryDirectory() as name:
        plan = Plan.load(write_plan(Path(name), 5), ["sweep.seeds=1"])
        run_sweep(arrange(plan.cells), Path(name) / "out", lambda done, total, what: None)
    started: dict[int, float] = {}
    for line in sys.stdin:
        order, answer = json.loads(line), None
        if "start" in order:
            answer = pid = _start(order["start"], order["fault"], folder)
            started[pid] = time.monotonic()
        elif "kill" in order:
            with suppress(ProcessLookupError):
                _signal(order["kill"], order["number"], order["whole"], started)
        else:
            pid = order["wait"]
            answer = _wait(pid, folder / f"words-{pid}", started[pid], order["seconds"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
