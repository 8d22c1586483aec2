"""Signals at any moment: the first asks, the second ends the command at once, workers too; and no
process that dies or stands still can hold up the others."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from nursery import PLAN, End, Nursery, catches, ends, sweep_bytes, wait_until, workers_of

AT_ONCE = ("fairvar: interrupted at once", "fairvar: interrupted")  # whichever thread is first
POLITELY = "fairvar: interrupted; the same command continues"
SOON = 20.0  # seconds, on a machine that does other things too

# What every plugin must do.
REGISTERS = """
import fairvar as fv

@fv.register
class Own(fv.Method, frozen=True, tag="own_for_signals"):
    pass
"""
# In a worker: take every lock that processes share, and die with them, once.
LOCKS_DIE = """
import contextlib, gc, multiprocessing, os, pathlib, signal
from multiprocessing.synchronize import SemLock

if multiprocessing.parent_process() is not None:
    with contextlib.suppress(FileExistsError):
        pathlib.Path({mark!r}).touch(exist_ok=False)
        for thing in gc.get_objects():
            if isinstance(thing, SemLock):
                thing._semlock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that would take an hour, each by itself."""
    path = tmp_path_factory.mktemp("endless") / "plan.toml"
    path.write_text(PLAN.format(rounds=10_000_000).replace('"afl", "fairgrad*"', '"afl"'))
    return path


def sweep(plan: Path, out: Path, *more: str) -> tuple[str | Path, ...]:
    return ("sweep", plan, "--out", out, "--save-every", "50", "--no-batch", *more)


def under_way(out: Path) -> bool:
    return len(list(out.glob("*/checkpoint-a"))) > 0


def end_soon(children: Nursery, pid: int) -> End:
    """The command and all its processes end soon; they are killed otherwise."""
    end = children.wait(pid, seconds=SOON)
    alone = ends(pid, seconds=2.0)
    children.kill(pid, whole=True)
    assert alone, end
    return end


@pytest.mark.slow
def test_locks_that_die_with_a_worker_block_nobody(children, short, tmp_path):
    """The sweep used to wait for ever for the lock of an event that a dead worker held."""
    plugin, out = tmp_path / "plugin.py", tmp_path / "out"
    plugin.write_text(REGISTERS + LOCKS_DIE.format(mark=str(tmp_path / "mark")))
    command = ("sweep", short / "plan.toml", "--out", out, "--save-every", "3", "--no-batch")
    pid = children.start(*command, "--workers", "2", "--plugin", plugin)
    end = children.wait(pid)
    children.kill(pid, whole=True)
    assert end.code == 0, end
    assert (tmp_path / "mark").exists()
    assert sweep_bytes(out) == sweep_bytes(short / "out")


@pytest.mark.slow
@pytest.mark.parametrize("names", [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT")])
def test_two_signals_end_a_sweep_with_workers(names, children, endless, tmp_path):
    """As a terminal sends them: to all processes of the command."""
    pid = children.start(*sweep(endless, tmp_path / "out", "--workers", "2"))
    wait_until(lambda: under_way(tmp_path / "out"))
    for worker in workers_of(pid):  # a worker that stands still does not stop politely
        children.kill(worker, signal.SIGSTOP)
    for name in names:
        children.kill(pid, getattr(signal, name), whole=True)
        time.sleep(0.1)
    end = end_soon(children, pid)
    assert (end.code, end.out, len(end.complaints)) == (130, "", 1)
    assert end.complaints[0] in AT_ONCE


def test_two_quick_signals_while_workers_start(children, endless, tmp_path):
    """They import torch then, and must neither go on nor print a traceback."""
    pid = children.start(*sweep(endless, tmp_path / "out", "--workers", "2"))
    wait_until(lambda: len(workers_of(pid)) == 2)
    children.kill(pid, signal.SIGINT, whole=True)
    time.sleep(0.05)  # two that are pending at once are one
    children.kill(pid, signal.SIGINT, whole=True)
    end = end_soon(children, pid)
    assert end.code == 130
    # The first may have ended it: workers that still start are not waited for.
    assert len(end.complaints) == 1
    assert end.complaints[0] in (*AT_ONCE, POLITELY)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_one_signal_to_all_processes_is_polite(name, children, endless, tmp_path):
    """Also while they start; workers save what they have, and none is started again."""
    out = tmp_path / "out"
    for late in (False, True):
        pid = children.start(*sweep(endless, out, "--workers", "2"))
        wait_until(lambda pid=pid, late=late: under_way(out) if late else workers_of(pid))
        children.kill(pid, getattr(signal, name), whole=True)
        end = end_soon(children, pid)
        assert end.code == 130
        assert end.complaints == [POLITELY]
    assert len(list(out.glob("*/checkpoint-*"))) >= 2


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_two_signals_end_one_process(command, children, endless, tmp_path):
    """Within one round, too: it must not take part."""
    arguments = sweep(endless, tmp_path / "out", "data.clients=300", "data.samples=100")
    if command == "run":
        config = tmp_path / "run.toml"
        config.write_text(endless.read_text().partition("[sweep]")[0])
        arguments = ("run", config, "--out", tmp_path / "out")
    pid = children.start(*arguments)
    wait_until(lambda: list(tmp_path.glob("out/.locks/*")))
    children.kill(pid, signal.SIGINT)
    children.kill(pid, signal.SIGTERM)
    end = end_soon(children, pid)
    assert end.code == 130, end
    assert len(end.complaints) == 1
    assert end.complaints[0].startswith(("fairvar: interrupted", "fairvar: stopped after"))


@pytest.mark.slow
def test_orphans_end_even_in_a_round_that_hangs(children, endless, tmp_path):
    """The parent was killed; its worker's main thread is stuck in a method."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        REGISTERS + "import multiprocessing, time\n"
        "if multiprocessing.parent_process() is not None:\n"
        f"    open({str(tmp_path / 'stuck')!r}, 'w').close()\n"
        "    time.sleep(1000)\n"
    )
    more = ("--workers", "2", "--plugin", str(plugin))
    pid = children.start(*sweep(endless, tmp_path / "out", *more))
    wait_until(lambda: (tmp_path / "stuck").exists())
    children.kill(pid)
    assert children.wait(pid).code == -9
    gone = ends(pid, seconds=12)
    children.kill(pid, whole=True)
    assert gone


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A command that is killed if the test fails before it has ended."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("name", "delay"), [("SIGINT", 0.0), ("SIGTERM", 0.3), ("SIGINT", 0.6),
                                             ("SIGHUP", 1.0)])  # fmt: skip
def test_a_signal_while_a_command_starts(name, delay, endless, tmp_path):
    """It imports torch for seconds; 130 and one line, and no traceback of a half-done import."""
    script = "import sys; from fairvar.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", script, *map(str, sweep(endless, tmp_path / "out"))]
    with started(command) as process:
        wait_until(lambda: catches(process.pid, signal.SIGHUP))
        time.sleep(delay)
        process.send_signal(getattr(signal, name))
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert [line.partition(";")[0] for line in err.splitlines()] == ["fairvar: interrupted"]


@contextmanager
def sweep_after(statement: str, config: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep under way, in a process that has executed a Python statement before."""
    script = f"{statement}\nimport sys\nfrom fairvar.cli import main; main(sys.argv[1:])"
    with started([sys.executable, "-c", script, *map(str, sweep(config, out))]) as process:
        wait_until(lambda: under_way(out))
        yield process


def test_an_ignored_signal_stays_ignored(endless, tmp_path):
    """`nohup fairvar sweep … &`: the terminal's end is not the sweep's."""
    before = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with sweep_after(before, endless, tmp_path / "out") as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, f"{POLITELY}\n")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_while_an_interrupted_command_ends(name, endless, tmp_path):
    """Its line is printed, and Python takes a while to end: still 130, and no second line."""
    before = "import atexit, time; atexit.register(time.sleep, 2)"
    with sweep_after(before, endless, tmp_path / "out") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        line = process.stderr.readline()
        time.sleep(0.3)
        process.send_signal(getattr(signal, name))
        rest = process.stderr.read()
        process.wait(timeout=120)
    assert (process.returncode, line, rest) == (130, f"{POLITELY}\n", "")


def test_the_fork_server_signals_only_its_own(children):
    """A number that belongs to somebody else by now must not be hit."""
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as stranger:
        children.kill(stranger.pid, signal.SIGKILL)
        children.kill(stranger.pid, signal.SIGKILL, whole=True)
        time.sleep(0.2)
        alive = stranger.poll() is None
        stranger.kill()
    assert alive
