"""The second edition of the reproduction (docs/protocol.md): tuning, final runs, verdicts.

    python benchmarks/second_edition.py run mnist-boxes STORE OUT       # all steps; continues
    python benchmarks/second_edition.py sentences OUT [OUT …]           # verdicts of archives

`run` tunes by successive halving on validation data of the tuning pairs, writes the table of
choices, computes the final runs with these and condenses everything; runs stay in STORE/STUDY. With
a budget it stops in time, and the same command continues. OUT/STUDY gets

    tuning/runs.tar.xz   the runs that tuned, with their histories
    final/runs.tar.xz    the final runs
    choices.json, .md    what validation chose on every rung

A study is a data set and a protocol: mnist-boxes, cifar10-tables, … `--tiny` shortens everything,
to try the steps on a CPU. On a GPU machine gpu_slice.py calls it (benchmarks/slices/second_*.toml).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fairvar.report.table import render
from fairvar.runs.archive import ARCHIVE, condense
from fairvar.runs.config import Config
from fairvar.runs.experiments import sweep
from fairvar.runs.formats import write_text
from fairvar.runs.plan import Plan
from fairvar.runs.results import gather, stored_runs
from fairvar.runs.runner import Interrupted, run_folder
from fairvar.runs.select import Criterion
from fairvar.runs.stored import StoredRun
from fairvar.runs.trials import Summary
from sentences import (
    Evidence,
    Where,
    cells_table,
    differences_table,
    evidence_of,
    judge,
    judge_apart,
    paper_table,
    scoreboard,
    sentences_table,
)

ROOT = Path(__file__).resolve().parent.parent
ALPHAS = (0.05, 0.1, 0.5)
SURVIVORS = (4, 2, 1)  # after each rung
PILOT_RATES, PILOT_ROUNDS = (0.003, 0.01, 0.03, 0.1, 0.3), 50
WEIGHTS = "mobilenet_v2/mobilenet_v2_imagenet.pth"
WEIGHTS_SHA256 = "844c418e13c79ba1627dfade00a9ce51303e99dc7b963adff6596aeb357ad14b"
APART = SCRATCH, RATES = "_scratch", "_rates"  # in the names of studies that are judged apart
MODELS = {"boxes": "global", "tables": "local"}
GRADIENT = "sweep.method.fairgrad{}.strength={}"
IMAGES = ("sweep.method.afl.losses=batch", "sweep.method.qffl.losses=batch",
          "sweep.method.aaggff.losses=batch", "train.precision=tf32")  # fmt: skip


@dataclass(frozen=True)
class Study:
    """What docs/protocol.md fixes for a data set and a protocol."""

    config: str
    protocol: str
    every: int
    rungs: tuple[int, int, int]
    rounds: int
    pairs: int
    rates: Sequence[float] = ()  # none: a pilot of FedAvg finds them
    fedavg: Sequence[float] = ()
    tuning: Sequence[int] = (100,)
    gammas: Sequence[float] = (0.001, 0.003, 0.01)
    overrides: Sequence[str] = IMAGES
    weights: bool = False
    alphas: Sequence[float] = ALPHAS
    device: str = "cpu"

    def criterion(self) -> Criterion:
        model: Any = MODELS[self.protocol]
        return Criterion(m=5, model=model)

    def plan(self, pair: int, rounds: int, *more: str) -> Plan:
        """The twelve configurations of every method on one pair."""
        given = [
            f"protocol={self.protocol}", f"train.rounds={rounds}", f"evaluate.every={self.every}",
            f"sweep.seeds=[{pair}]", f"sweep.grid.data.seed=[{pair}]",
            f"sweep.alpha={list(self.alphas)}", f"sweep.lr={list(self.rates)}",
            f"sweep.method.fedavg.lr={list(self.fedavg)}", "sweep.method.qffl.q=[0.1, 1.0, 5.0]",
            "sweep.strength=[0.01, 0.1, 1.0]", "sweep.step=[0.01, 0.1, 1.0]",
            'sweep.cdf=["logistic", "gumbel", "exponential"]',
            GRADIENT.format("", list(self.gammas)), GRADIENT.format("*", list(self.gammas)),
            "select.m=5", f"select.model={MODELS[self.protocol]}",
            f"train.device={self.device}",
        ]  # fmt: skip
        if self.weights:
            file = Path(os.environ.get("FAIRVAR_DATA", "data")) / WEIGHTS
            given += [f"model.weights={file}", f"model.weights_sha256={WEIGHTS_SHA256}"]
        return Plan.load(ROOT / self.config, [*given, *self.overrides, *more])


CIFAR10 = Study("configs/paper/cifar10.toml", "boxes", 30, (150, 300, 600), 1500, 5,
                (0.03, 0.1, 0.2, 0.3),
                (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.25, 0.3, 0.4, 0.5))  # fmt: skip
MNIST = Study("configs/paper/mnist.toml", "boxes", 40, (200, 680, 2000), 2000, 5,
              (0.1, 0.3, 0.6, 1.0),
              (0.03, 0.06, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3, 1.6, 2.0),
              (100, 101), (0.01, 0.1, 1.0), ())  # fmt: skip
MNIST_TABLES = replace(MNIST, protocol="tables", every=10, rungs=(50, 170, 500), rounds=500,
                       overrides=("train.batch_size=10",))  # fmt: skip
# The copies are half of the data already; batch norm needs batches that are not too small.
HEAVY = (*IMAGES, "data.fraction=1.0", "train.drop_last=true")
CIFAR100 = Study("configs/paper/cifar100.toml", "boxes", 6, (30, 60, 120), 300, 3,
                 overrides=HEAVY, weights=True)  # fmt: skip
TINY = replace(CIFAR100, config="configs/paper/tiny_imagenet.toml")
SMALL = (0.0001, 0.0003, 0.001)  # with larger strengths local epochs of MobileNetV2 diverge
STUDIES = {
    "mnist-boxes": MNIST,
    "mnist-tables": MNIST_TABLES,
    f"mnist{RATES}-boxes": replace(MNIST, rates=(0.03, 0.1, 0.2, 0.3), fedavg=(
        0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.17, 0.2, 0.25, 0.3)),
    f"mnist{RATES}-tables": replace(MNIST_TABLES, rates=(0.003, 0.01, 0.03, 0.1), fedavg=(
        0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.055, 0.075, 0.1)),
    "cifar10-boxes": CIFAR10,
    "cifar10-tables": replace(CIFAR10, protocol="tables", every=2, rungs=(10, 30, 100), rounds=100),
    "cifar100-boxes": CIFAR100,
    f"cifar100{SCRATCH}-boxes": replace(CIFAR100, weights=False),
    "cifar100-tables": replace(CIFAR100, protocol="tables", every=2, rungs=(10, 30, 100),
                               rounds=100, gammas=SMALL),
    "tiny_imagenet-boxes": TINY,
    "tiny_imagenet-tables": replace(TINY, protocol="tables", every=1, rungs=(3, 10, 30), rounds=30,
                                    pairs=1, gammas=SMALL),
}  # fmt: skip


def tiny(study: Study) -> Study:
    """The same steps in seconds."""
    rates, fedavg = study.rates[:2] or (0.03, 0.1), study.fedavg[::6] or (0.03, 0.1)
    small = ("data.name=mnist_1000", "data.holdout=auto", "data.samples=200", "data.clients=5")
    small += ("model.name=multinomial", "partition.min_samples=2", "train.batch_size=10")
    return replace(study, config="configs/paper/mnist.toml", every=2, rungs=(4, 8, 12), rounds=12,
                   pairs=2, rates=rates, fedavg=fedavg, weights=False, alphas=ALPHAS[1:],
                   overrides=[o for o in study.overrides if o.endswith("=batch")] + [*small]
                   )  # fmt: skip


# --- steps ---------------------------------------------------------------------------------------
class OutOfTime(Exception):
    """The budget is spent; what is finished is stored."""


@dataclass
class Machine:
    """Where runs go, and until when."""

    store: Path
    workers: int
    end: float

    def compute(self, cells: Sequence[Config], name: str, folder: str) -> None:
        left = self.end - time.monotonic()
        if left <= 5:
            raise OutOfTime(name)
        print(f"{name}: {len(cells)} runs", flush=True)
        plan = Plan(name, Plan.from_dict({}).settings, cells[0].select, list(cells))
        budget = f"{left:.0f}s" if math.isfinite(left) else None
        done = sweep(plan, out=self.store / folder, workers=self.workers, budget=budget).status
        if done.done < done.cells:
            raise OutOfTime(name)

    def summary(self, cells: Sequence[Config], folder: str) -> Summary:
        """What validation saw of one configuration on its pairs."""
        runs = [StoredRun.open(run_folder(cell, self.store / folder)) for cell in cells]
        return Summary.of([run.history(with_state=False) for run in runs])


def key(cell: Config) -> str:
    """The configuration, without pair and rounds."""
    return json.dumps([cell.to_dict()["partition"].get("alpha"), cell.method.label,
                       cell.to_dict()["method"], cell.train.lr], sort_keys=True)  # fmt: skip


def score(summary: Summary, criterion: Criterion) -> tuple[float, float]:
    """The criterion and the variance, averaged over the last quarter of the rounds; validation."""
    if summary.diverged:
        return -math.inf, math.inf
    rounds, curve = np.array(summary.rounds), summary.valid[criterion.model]
    late = rounds > 0.75 * rounds[-1]
    scores = criterion.score(curve, len(summary.provenances))
    return float(scores[late].mean()), float(np.nan_to_num(curve.variance)[late].mean())


def tune(study: Study, machine: Machine) -> list[dict[str, Any]]:
    """Successive halving; every configuration of every rung with its score and rank."""
    kept: set[str] | None = None
    table: list[dict[str, Any]] = []
    for rung, (rounds, survivors) in enumerate(zip(study.rungs, SURVIVORS, strict=True), 1):
        cells = [cell for pair in study.tuning for cell in study.plan(pair, rounds).cells
                 if kept is None or key(cell) in kept]  # fmt: skip
        if not cells:
            break
        machine.compute(cells, f"rung {rung}, {rounds} rounds", "tuning")
        kept = set()
        for row in _ranked(cells, study, machine):
            row = {"rung": rung, "rounds": rounds, **row, "goes on": row["rank"] <= survivors}
            row["goes on"] = row["goes on"] and row["score"] is not None
            kept |= {row["key"]} if row["goes on"] else set()
            table.append(row)
    return table


def _ranked(cells: Sequence[Config], study: Study, machine: Machine) -> Iterator[dict[str, Any]]:
    """Every configuration with its rank within its method and α."""
    by_key: dict[str, list[Config]] = {}
    for cell in cells:
        by_key.setdefault(key(cell), []).append(cell)
    by_method: dict[tuple[float, str], list[tuple[Any, ...]]] = {}
    for name, same in by_key.items():
        found, spread = score(machine.summary(same, "tuning"), study.criterion())
        first = same[0]
        knob = getattr(first.method, first.method.fairness_knob or "", None)
        weak = knob if isinstance(knob, float) else 0.0
        entry = (-found, spread, weak, first.train.lr, name, first, knob)
        where = float(getattr(first.partition, "alpha", 0.0)), first.method.label
        by_method.setdefault(where, []).append(entry)
    for (alpha, label), entries in by_method.items():
        for rank, (minus, spread, _, lr, name, _, knob) in enumerate(
            sorted(entries, key=lambda e: e[:5]), 1
        ):
            alive = math.isfinite(minus)
            yield {"alpha": alpha, "method": label, "lr": lr, "parameter": knob,
                   "score": -minus if alive else None, "variance": spread if alive else None,
                   "rank": rank, "key": name}  # fmt: skip


def pilot(study: Study, machine: Machine) -> Study:
    """Learning rates from a pilot of FedAvg on the first tuning pair at α = 0.1, with `boxes`."""
    first = replace(
        study, protocol="boxes", every=10, alphas=(0.1,), fedavg=PILOT_RATES, rates=(0.1,)
    )
    cells = first.plan(study.tuning[0], PILOT_ROUNDS, 'sweep.methods=["fedavg"]').cells
    machine.compute(cells, "pilot", "pilot")
    found = [
        (score(machine.summary([c], "pilot"), first.criterion())[0], c.train.lr) for c in cells
    ]
    best = max(found)[1]
    rates = [float(f"{best * f:.3g}") for f in (1 / 3, 1, 2, 3)]
    many = [float(f"{r:.3g}") for r in np.geomspace(best / 10, 5 * best, 12)]
    print(f"pilot: {best:g}; learning rates {rates}; FedAvg {many}", flush=True)
    return replace(study, rates=rates, fedavg=many)


def chosen(table: Sequence[Mapping[str, Any]]) -> set[str]:
    """The winners of the last rung."""
    last = max(row["rung"] for row in table)
    return {str(row["key"]) for row in table if row["rung"] == last and row["goes on"]}


def final_cells(study: Study, table: Sequence[Mapping[str, Any]]) -> list[Config]:
    keys = chosen(table)
    return [cell for pair in range(study.pairs) for cell in study.plan(pair, study.rounds).cells
            if key(cell) in keys]  # fmt: skip


def choices_text(table: Sequence[Mapping[str, Any]]) -> str:
    """The winner of every method and α: what validation chose is what was used."""
    lines = ["| α | method | learning rate | parameter | score | configurations by rung |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    last = max(row["rung"] for row in table)
    places = dict.fromkeys((row["alpha"], row["method"]) for row in table)
    for alpha, method in places:
        rows = [r for r in table if (r["alpha"], r["method"]) == (alpha, method)]
        counts = " → ".join(
            str(sum(r["rung"] == rung for r in rows)) for rung in range(1, last + 1)
        )
        won = [r for r in rows if r["rung"] == last and r["goes on"]]
        cells = ["all diverged", "", ""]
        if won:
            knob = won[0]["parameter"]
            cells = [
                f"{won[0]['lr']:g}",
                "" if knob is None else f"{knob}",
                f"{won[0]['score']:.4f}",
            ]
        lines.append(
            f"| {alpha:g} | {method} | {' | '.join(cells)} | {counts} |".replace("*", r"\*")
        )
    return "\n".join(lines) + "\n"


def run(name: str, study: Study, machine: Machine, out: Path) -> bool:
    """All steps; whether everything is done."""
    done = False
    try:
        study = study if study.rates else pilot(study, machine)
        table = tune(study, machine)
        write_text(out / "choices.json", json.dumps(table, indent=1) + "\n")
        write_text(out / "choices.md", choices_text(table))
        machine.compute(final_cells(study, table), "final", "final")
        done = True
    except OutOfTime as stopped:
        print(f"{name}: the budget is spent in {stopped}; the same command continues", flush=True)
    for part in ("pilot", "tuning", "final"):
        if any((machine.store / part).glob("*/manifest.json")):
            condense(gather(machine.store / part), out / part, everything=True)
    return done


def restore(machine: Machine, out: Path) -> None:
    """Runs that came along in earlier archives count as finished. The class counts of their
    partitions come along, too."""
    for part in ("pilot", "tuning", "final"):
        if (out / part / ARCHIVE).is_file():
            folders = [stored.folder for stored in stored_runs(out / part)]
            for folder in (*folders, folders[0].parent / "federations"):
                target = machine.store / part / folder.name
                if folder.is_dir() and not target.exists():
                    shutil.copytree(folder, target)


def verdicts(folders: Sequence[Path]) -> str:
    """The ten sentences, our readings and the cells of the runs in these archives together."""
    folders = counted(folders)
    groups = gather(*folders) if folders else []
    found = evidence_of(groups)
    for folder in folders:
        _add_tuning(found, folder.parent)
    notes = ["Windows (last quarter of the rounds), test data, paired over (partition, seed) and "
             "clients. p-values: the larger of bootstrap and t test."]  # fmt: skip
    holm = "Adjusted by Holm's rule over the ten sentences of this protocol."
    apart = "Not adjusted: readings of ours, not sentences of the paper."
    star = "*: the 95 % interval leaves zero out; not adjusted for the number of intervals."
    tables = [scoreboard(found), cells_table(found), paper_table(groups, found.get("tables", {}))]
    for protocol, evidence in sorted(found.items()):
        about = f"{protocol}, {MODELS[protocol]} model"
        tables += [
            differences_table(evidence, f"Each method minus FedAvg, {about}", [*notes, star]),
            sentences_table(judge(evidence), f"The paper's sentences, {about}", [*notes, holm]),
            sentences_table(judge_apart(evidence), f"Our readings, {about}", [*notes, apart]),
        ]
    return "\n".join(render(table, "markdown") for table in tables)


def counted(folders: Sequence[Path]) -> list[Path]:
    """The archives of finished studies; those that are judged apart only without others, because
    they have the pairs of the studies that the sentences are about."""
    done = [folder for folder in folders if finished(folder.parent)]
    main = [folder for folder in done if not any(part in folder.parent.name for part in APART)]
    return main or done


def finished(study: Path) -> bool:
    """Whether all final runs of a study are in its archive; so is a folder that is no study."""
    if study.name not in STUDIES:
        return True
    there, asked = 0, math.inf
    if (study / "choices.json").is_file() and (study / "final" / ARCHIVE).is_file():
        table = json.loads((study / "choices.json").read_text("utf-8"))
        there = len(stored_runs(study / "final"))
        asked = STUDIES[study.name].pairs * len(chosen(table))
    if there < asked:
        print(f"{study} is left out: {there} of {asked:g} final runs are there", file=sys.stderr)
    return there >= asked


def _add_tuning(found: dict[str, dict[Where, Evidence]], study: Path) -> None:
    """What the table of choices adds to the final runs: how many configurations were tried, and the
    methods of which every one diverged, so that they have no final runs."""
    if not (study / "choices.json").is_file():
        return
    data, _, protocol = study.name.rpartition("-")
    data = data.removesuffix(SCRATCH).removesuffix(RATES)
    table = json.loads((study / "choices.json").read_text("utf-8"))
    last = max(row["rung"] for row in table)
    for alpha in {row["alpha"] for row in table}:
        rows = [row for row in table if row["alpha"] == alpha]
        tried = Counter(row["method"] for row in rows if row["rung"] == 1)
        won = {row["method"] for row in rows if row["rung"] == last and row["goes on"]}
        place = found.setdefault(protocol, {})
        before = place.get((data, alpha), Evidence({}))
        diverged = before.diverged | (tried.keys() - won)
        place[data, alpha] = replace(before, diverged=diverged, tried=tried)


def main() -> None:
    described = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=described)
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("run", help="tune, compute the final runs, condense")
    one.add_argument("study", choices=STUDIES)
    one.add_argument("store", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--workers", type=int, default=1)
    one.add_argument("--budget", type=float, default=math.inf, help="seconds")
    one.add_argument("--device", default="cpu")
    one.add_argument("--earlier", type=Path, help="archives of earlier calls; OUT by default")
    one.add_argument("--tiny", action="store_true")
    two = commands.add_parser("sentences", help="verdicts of archives")
    two.add_argument("folders", type=Path, nargs="*")
    a = parser.parse_args()
    if a.command == "sentences":
        print(verdicts(a.folders))
        return
    study = replace(STUDIES[a.study], device=a.device)
    study = tiny(study) if a.tiny else study
    machine = Machine(a.store / a.study, a.workers, time.monotonic() + a.budget)
    restore(machine, (a.earlier or a.out) / a.study)
    try:
        done = run(a.study, study, machine, a.out / a.study)
    except Interrupted as stopped:
        sys.exit(str(stopped))
    sys.exit(0 if done else 3)


if __name__ == "__main__":
    main()
