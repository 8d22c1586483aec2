"""Speed of FedAvg compared with other frameworks, on equal work that is checked.

    python benchmarks/peers.py PEERS                             # about 20 minutes
    python benchmarks/peers.py PEERS --quick                     # one turn of few rounds
    python benchmarks/peers.py PEERS --case epoch --only fluke --only FLGo --json peers.json

PEERS is a folder with the other frameworks: an environment PEERS/venv with fluke and FLGo, and the
sources PEERS/PFLlib and PEERS/FL-bench; README.md has the commands. A framework that is missing or
fails is named with the reason, and the others are measured.

Each framework trains with its own clients, server and loop, without evaluation, on one thread. All
are given the same arrays, initial weights, batch size and learning rate. First each framework
trains two rounds on samples that are equal within a client, so that the order of its samples does
not matter, and the global models are compared: a framework whose weights, steps or samples differ
does other work and is not timed. Then the frameworks take turns on random samples. In every turn
each has a new process; the ratio to fairvar is formed within the turn. Times are processor times of
the process, medians of its rounds without the first; the table has median and range over the turns.

A difference is max |w − w_fairvar| ÷ max |w_fairvar − w_0| over the weights w of the global model;
it and the sum of the weights are those of the comparison, before the timed rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

from peer_worker import CLASSES, TRAIN, network

ROOT = Path(__file__).resolve().parent.parent
OURS, OWN = "fairvar", ("fairvar", "lean")  # OWN run in this environment
SOURCES = ("PFLlib", "FL-bench")  # peers that are not installed, but imported from a folder
WARM = 2  # first rounds of a process, which are not counted
CHECKED = 2  # rounds of the comparison of the models
TOLERANCE = 1e-3  # largest difference of a weight, in units of the largest change by training
TIMED_TOLERANCE = 1e-2  # after the timed rounds, because rounding grows from round to round
BUSY = 0.5  # load before the start above which the times should not be quoted


@dataclass(frozen=True)
class Case:
    """One local epoch of every client in batches of `batch` samples, `rounds` of them timed."""

    title: str
    model: str
    shape: tuple[int, ...]
    clients: int
    samples: int
    batch: int
    rounds: int
    lr: float

    @property
    def steps(self) -> int:
        """Of all clients in a round."""
        return self.clients * (self.samples // self.batch)

    @property
    def ordered(self) -> bool:
        """Whether the result depends on the order in which a client takes its samples."""
        return self.batch < self.samples

    def write(self, folder: Path, peers: Path, rounds: int, equal: bool) -> None:
        """The job of the workers. `equal`: all samples of a client are the same one."""
        draw = torch.Generator().manual_seed(0)
        held, rows = 1 if equal else self.samples, (self.clients, self.samples)
        x = torch.rand(self.clients, held, *self.shape, generator=draw)
        y = torch.randint(0, CLASSES, (self.clients, held), generator=draw)
        folder.mkdir()
        np.savez(folder / "arrays.npz", x=x.expand(*rows, *self.shape).numpy(),
                 y=y.expand(rows).numpy(), weights=self.start())  # fmt: skip
        told = {"model": self.model, "batch": self.batch, "lr": self.lr, "rounds": rounds}
        (folder / "job.json").write_text(json.dumps({**told, "peers": str(peers)}))

    def start(self) -> np.ndarray[Any, Any]:
        """The initial weights."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return parameters_to_vector(network(self.model).parameters()).detach().numpy()


CASES = {
    "epoch": Case("avgcnn, 50 clients × 64, an epoch in batches of 32",
                  "avgcnn", (3, 32, 32), 50, 64, 32, 3, lr=0.01),
    "step": Case("avgcnn, 50 clients × 32, one step on all samples",
                 "avgcnn", (3, 32, 32), 50, 32, 32, 5, lr=0.05),
    "linear": Case("multinomial regression, 50 clients × 20, one step on all samples",
                   "multinomial", (784,), 50, 20, 20, 100, lr=0.001),
    "tiny": Case("multinomial regression, 3 clients × 4, an epoch in batches of 2",
                 "multinomial", (784,), 3, 4, 2, 3, lr=0.001),
}  # fmt: skip
DEFAULT = ("epoch", "step", "linear")


class Failed(Exception):
    """A framework cannot be measured; the text is the reason."""


@dataclass(frozen=True)
class Answer:
    """What a worker found: seconds per round, counts, and the global model."""

    cpu: list[float]
    wall: list[float]
    steps: int
    samples: int
    versions: dict[str, str]
    weights: np.ndarray[Any, Any]

    def spent(self, clock: str, rounds: int) -> float:
        """Median of the timed rounds, in milliseconds."""
        found: list[float] = getattr(self, clock)
        return 1000 * median(found[-rounds:])


@dataclass
class Row:
    """One framework in one case; times are milliseconds per round, one for each turn."""

    name: str
    difference: float  # of the models in the comparison, in units of the largest change
    sum_of_weights: float
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    timed_difference: float = 0.0  # after the timed rounds, the largest of the turns


def ask(name: str, folder: Path, peers: Path) -> Answer:
    """Run the job in a new process of the framework."""
    python = Path(sys.executable) if name in OWN else peers / "venv" / "bin" / "python"
    if not python.exists():
        raise Failed(f"there is no environment {python.parent.parent.name} in the folder of peers")
    modules = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    own = {"PYTHONPATH": modules} if name in OWN else {}
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(python), str(ROOT / "benchmarks" / "peer_worker.py"), name, str(folder)]
        done = subprocess.run([*command, scratch], env={**os.environ, **one, **own},  # noqa: S603
                              capture_output=True, text=True, check=False)  # fmt: skip
        if done.returncode:
            raise Failed(_reason(done.stderr))
        found = json.loads(done.stdout.splitlines()[-1])
        return Answer(**found, weights=np.load(Path(scratch) / "model.npy"))


def _reason(errors: str) -> str:
    """The last line that says something, which in a traceback names the error."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return ([*lines, *named] or ["it ended without a message"])[-1][:200]


def difference(found: Answer, ours: Answer, start: np.ndarray[Any, Any]) -> float:
    """max |w − w_fairvar| ÷ max |w_fairvar − w_0|"""
    change = np.abs(ours.weights - start).max()
    return float(np.abs(found.weights - ours.weights).max() / change)


def check(case: Case, name: str, folder: Path, peers: Path, ours: Answer | None) -> Answer:
    """Two rounds on equal samples; refuses a framework that does other work than fairvar."""
    found = ask(name, folder, peers)
    if ours is None:
        return found
    expected = (CHECKED * case.steps, CHECKED * case.clients * case.samples)
    if (found.steps, found.samples) != expected:
        counts = f"{found.steps} steps on {found.samples} samples instead of {expected[0]} on"
        raise Failed(f"does other work: {counts} {expected[1]}")
    apart = difference(found, ours, case.start())
    if not apart <= TOLERANCE:
        raise Failed(f"does other work: weights differ by {apart:.1e} of the largest change")
    return found


class Measured:
    """The rows of one case, and the reasons why frameworks are missing."""

    def __init__(self, case: Case, names: Sequence[str], peers: Path, turns: int) -> None:
        self.case, self.peers = case, peers
        self.rows: dict[str, Row] = {}
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        with tempfile.TemporaryDirectory() as scratch:
            self.folder = Path(scratch)
            self._check(names)
            case.write(self.folder / "timed", peers, WARM + case.rounds, equal=False)
            for turn in range(turns):
                self._turn(turn)

    def _check(self, names: Sequence[str]) -> None:
        folder, ours = self.folder / "equal", None
        self.case.write(folder, self.peers, CHECKED, equal=True)
        for name in names:
            try:
                found = check(self.case, name, folder, self.peers, ours)
            except Failed as reason:
                self._leave_out(name, str(reason))
                continue
            ours = found if ours is None else ours
            apart = difference(found, ours, self.case.start())
            self.rows[name] = Row(name, apart, float(found.weights.sum(dtype=float)))
            self.versions |= found.versions

    def _turn(self, turn: int) -> None:
        """All frameworks once, in rotating order. Who fails has no row any more."""
        names = list(self.rows)
        shift = turn % len(names)
        found: dict[str, Answer] = {}
        for name in names[shift:] + names[:shift]:
            try:
                found[name] = ask(name, self.folder / "timed", self.peers)
            except Failed as reason:
                self._leave_out(name, str(reason))
        for name, answer in found.items():
            self._add(self.rows[name], answer, found[OURS])

    def _add(self, row: Row, answer: Answer, ours: Answer) -> None:
        row.cpu.append(answer.spent("cpu", self.case.rounds))
        row.wall.append(answer.spent("wall", self.case.rounds))
        apart = difference(answer, ours, self.case.start())
        row.timed_difference = max(row.timed_difference, apart)
        if not self.case.ordered and not apart <= TIMED_TOLERANCE:
            self._leave_out(row.name, f"weights differ by {apart:.1e} after the timed rounds")

    def _leave_out(self, name: str, reason: str) -> None:
        if name == OURS:
            raise SystemExit(f"fairvar: {reason}")
        self.rows.pop(name, None)
        self.missing[name] = reason

    def ratios(self, row: Row) -> list[float]:
        """Turn by turn, processor time over that of fairvar."""
        return [a / b for a, b in zip(row.cpu, self.rows[OURS].cpu, strict=True)]

    def lines(self) -> Iterator[str]:
        """The table as Markdown, then the frameworks that are missing."""
        yield f"### {self.case.title}\n"
        yield "| | CPU ms per round | × fairvar | wall ms | difference | sum of weights |"
        yield "|:--|--:|--:|--:|--:|--:|"
        for row in self.rows.values():
            yield f"| {row.name} | {' | '.join(self._cells(row))} |"
        worst = max(row.timed_difference for row in self.rows.values())
        why = ", because each takes its samples in an order of its own" if self.case.ordered else ""
        yield f"\nAfter the timed rounds the largest difference is {worst:.0e}{why}."
        for name, reason in self.missing.items():
            yield f"{name}: not measured: {reason}"
        yield ""

    def _cells(self, row: Row) -> list[str]:
        ours = row.name == OURS
        return [
            _spread(row.cpu),
            "1" if ours else _spread(self.ratios(row)),
            _spread(row.wall),
            "–" if ours else f"{row.difference:.0e}",
            f"{row.sum_of_weights:.5f}",
        ]

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "ratios": self.ratios(row)} for row in self.rows.values()]
        return {"case": asdict(self.case), "rows": rows, "missing": self.missing}


def _spread(values: list[float]) -> str:
    """Median and range over the turns."""
    if len(values) == 1:
        return _short(values[0])
    return f"{_short(median(values))} ({_short(min(values))}–{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _sources(peers: Path) -> dict[str, str]:
    """The commits of the peers that are not installed, where git knows them."""
    found = {}
    for name in SOURCES:
        command = ["git", "-C", str(peers / name), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode == 0 and (peers / name / ".git").exists():
            found[name] = done.stdout.strip()
    return found


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", type=Path, help="the folder with the other frameworks")
    add = parser.add_argument
    add(
        "--case",
        choices=CASES,
        action="append",
        help="this one; may be repeated (default: " + ", ".join(DEFAULT) + ")",
    )
    add(
        "--only",
        choices=[name for name in TRAIN if name != OURS],
        action="append",
        help="this framework beside fairvar; may be repeated",
    )
    add("--turns", type=int, default=5, help="processes of each framework and case")
    add("--quick", action="store_true", help="one turn of a single timed round")
    add("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = _read(arguments)
    peers: Path = given.peers.resolve()
    names = [name for name in TRAIN if name == OURS or not given.only or name in given.only]
    before, versions, found = os.getloadavg()[0], _sources(peers), []
    for key in given.case or DEFAULT:
        case = CASES[key]
        if given.quick:
            case = Case(**{**asdict(case), "rounds": 1})
        one = Measured(case, names, peers, 1 if given.quick else given.turns)
        print(*one.lines(), sep="\n", flush=True)
        found.append(one.as_dict())
        versions |= one.versions
    load = (before, os.getloadavg()[0])
    facts = {"python": platform.python_version(), "cores": os.cpu_count(), "versions": versions,
             "load_before": load[0], "load_after": load[1]}  # fmt: skip
    shown = ", ".join(f"{name} {number}" for name, number in versions.items())
    print(f"{shown}; load before {load[0]:.2f}, after {load[1]:.2f}")
    if before > BUSY:
        print("The machine was busy with other work: do not quote these numbers.")
    if given.json:
        given.json.write_text(json.dumps({**facts, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
