"""Sweeps under signals, systematically: `campaign` kills, damages checkpoints, and compares bytes.

A folder is swept again and again. Each time a signal that a seed chooses arrives at a moment that
it chooses, at the command, at one of its workers or at all of its processes, and in between some of
the checkpoints are damaged. When the sweep has come to its end, its bytes must be those of a sweep
that nobody disturbed.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nursery import (
    End,
    Nursery,
    catches,
    ends,
    sweep_bytes,
    wait_until,
    workers_of,
    write_plan,
)

GRID = "lr = [0.05, 0.2]\n"
ROUNDS = 40
MODES: dict[str, tuple[str, ...]] = {
    "single": ("--no-batch",),
    "batched": (),
    "two workers": ("--workers", "2"),
}
POLITE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FATAL = (signal.SIGKILL, signal.SIGQUIT, signal.SIGABRT, signal.SIGSEGV, signal.SIGUSR1,
         signal.SIGUSR2, signal.SIGALRM, signal.SIGBUS, signal.SIGXCPU)  # fmt: skip
MOST_SECONDS = 60.0  # that a command and its workers may take to end after a signal
KILLS_PER_FOLDER = 12


@dataclass
class Kills:
    """What a campaign has done and found."""

    mode: str
    tried: int = 0  # signals that met a command under way
    signals: dict[str, int] = field(default_factory=dict)
    damaged: int = 0  # checkpoints
    compared: int = 0  # sweeps that came to their end
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds from a signal to the end of all processes


def campaign(mode: str, seed: int, count: int, folder: Path, children: Nursery) -> Kills:
    """At least `count` signals on sweeps of one kind, in a folder of its own."""
    found, draw = Kills(mode), random.Random(f"{mode} {seed}")
    plan = write_plan(folder, ROUNDS, GRID)
    plain = tuple(option for option in MODES[mode] if option == "--no-batch")
    assert children.run("sweep", plan, "--out", folder / "plain", *plain).code == 0
    right = sweep_bytes(folder / "plain")
    seconds, number = 0.0, 0  # the first sweep is left alone, to see how long it takes
    while found.tried < count and len(found.wrong) < 10:
        out = folder / f"out-{number}"
        arguments = ("sweep", plan, "--out", out, "--save-every", "5", *MODES[mode])
        if number > 0:
            disturb(children, arguments, out, seconds, draw, found, count)
        end = children.run(*arguments)
        if end.code != 0 or sweep_bytes(out) != right:
            found.wrong.append(f"folder {number}: other bytes, or {end.code}: {end.err[-300:]}")
        found.compared += 1
        seconds, number = seconds or end.seconds, number + 1
        shutil.rmtree(out)
    return found


def disturb(
    children: Nursery,
    arguments: tuple[str | Path, ...],
    out: Path,
    seconds: float,
    draw: random.Random,
    found: Kills,
    count: int,
) -> None:
    """Signals at one folder, until its sweep is complete or has had enough of them."""
    for _ in range(KILLS_PER_FOLDER):
        pid = children.start(*arguments)
        wait_until(lambda pid=pid: catches(pid, signal.SIGHUP))  # before, it is only Python
        time.sleep(seconds * draw.uniform(0.0, 0.7))
        sent = send(children, pid, draw)
        asked = time.monotonic()
        end = children.wait(pid, seconds=MOST_SECONDS)
        if not ends(pid, MOST_SECONDS):
            found.wrong.append(f"{sent}: processes were left behind")
            children.kill(pid, whole=True)
        found.slowest = max(found.slowest, time.monotonic() - asked)
        if end.code == 0:
            return  # it was over before
        found.tried += 1
        found.signals[sent[0]] = found.signals.get(sent[0], 0) + 1
        complaint = wrong_end(end, sent)
        if complaint:
            found.wrong.append(complaint)
        found.damaged += damage(out, draw)
        if found.tried >= count:
            return


def send(children: Nursery, pid: int, draw: random.Random) -> tuple[str, str]:
    """One signal, or a pause or the death of a worker and then a signal; (its name, at whom)."""
    workers = workers_of(pid)
    if draw.random() < 0.3:
        victim = draw.choice([pid, *workers])
        children.kill(victim, signal.SIGSTOP)
        time.sleep(draw.uniform(0.0, 0.2))
        children.kill(victim, signal.SIGCONT)
    if workers and draw.random() < 0.4:
        children.kill(draw.choice(workers), draw.choice((*POLITE, *FATAL)))
        time.sleep(draw.uniform(0.0, 1.0))
    number = draw.choice(POLITE if draw.random() < 0.5 else FATAL)
    whole = draw.random() < 0.5
    children.kill(pid, number, whole=whole)
    if number in POLITE and draw.random() < 0.5:
        time.sleep(draw.uniform(0.0, 0.3))
        children.kill(pid, draw.choice(POLITE), whole=whole)
    return number.name, "all" if whole else "the command"


def wrong_end(end: End, sent: tuple[str, str]) -> str | None:
    """What is not as promised in how a command ended, or None."""
    number = signal.Signals[sent[0]]
    expected = 130 if number in POLITE else -number
    if end.code != expected:
        return f"{sent}: exit code {end.code} instead of {expected}: {end.err[-300:]}"
    lines = end.complaints
    if number in POLITE and (len(lines) != 1 or not lines[0].startswith("fairvar: ")):
        return f"{sent}: not one line but {end.err[-300:]!r}"
    return None


def damage(out: Path, draw: random.Random) -> int:
    """Damage some of the checkpoints; how many."""
    names = ("checkpoint-a", "checkpoint-b")
    files = [p for n in names for p in (*out.glob(f"*/{n}"), *out.glob(f".groups/*/{n}"))]
    done = 0
    for path in sorted(files):
        if draw.random() < 0.4:
            content = bytearray(path.read_bytes())
            kind = draw.choice(("flip", "cut", "empty", "zeros", "gone"))
            if kind == "flip" and content:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            elif kind == "cut":
                content = content[: draw.randrange(len(content) + 1)]
            elif kind == "zeros":
                content = bytearray(len(content))
            with suppress(OSError):
                path.unlink()
            if kind != "gone":
                path.write_bytes(bytes(content) if kind != "empty" else b"")
            done += 1
    return done
