"""Checking stored results: are the files as they were written, and do they come out again?

A run from a GPU does not come out bit by bit on a CPU: sums are taken in another order, and a
network's training then drifts apart. So a few first rounds are run again and compared within a
tolerance, in the measures that reports use. The tolerance is wide for runs whose products were
rounded (TF32, bfloat16) and that take many local steps between two evaluations: hundreds of steps
of a network turn such rounding into another trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from fairvar import rng
from fairvar.config import Config
from fairvar.engine.train import run_rounds
from fairvar.errors import BadInput
from fairvar.experiment import Deployed, StoredRun, federation_of, model_of
from fairvar.history import History
from fairvar.report.condensed import Condensed, unpacked
from fairvar.report.gather import places, stored_runs
from fairvar.store import is_complete, verify


class Tolerance(NamedTuple):
    accuracy: float  # of the mean over clients, as a fraction
    loss: float  # relative, of every client's training loss; stored losses have three digits

    def __str__(self) -> str:
        return f"{100 * self.accuracy:g} points, {self.loss:.0%}"


NARROW, WIDE = Tolerance(0.005, 0.02), Tolerance(0.03, 0.10)


def tolerance(config: Config) -> Tolerance:
    train = config.train
    one_step = train.local_epochs is None and train.local_steps == 1
    return NARROW if train.precision == "full" or one_step else WIDE


@dataclass(frozen=True)
class Agreement:
    """A stored run beside its first rounds run again."""

    run: StoredRun
    rounds: int
    accuracy: float  # largest difference of a mean accuracy over clients
    answers: float  # largest share of answers, of all clients together, that came out otherwise
    loss: float  # largest relative difference of a client's training loss

    @property
    def holds(self) -> bool:
        allowed = tolerance(self.run.config)
        return self.accuracy <= allowed.accuracy and self.loss <= allowed.loss

    def to_dict(self) -> dict[str, Any]:
        config = self.run.config
        return {
            "run": self.run.folder.name,
            "method": config.method.label,
            "dataset": config.data.name,
            "protocol": config.protocol,
            "alpha": getattr(config.partition, "alpha", None),
            "lr": config.train.lr,
            "seed": config.train.seed,
            "made_on": self.run.manifest["birth"].get("device"),
            "rounds": self.rounds,
            "accuracy_difference": self.accuracy,
            "answers_that_differ": self.answers,
            "loss_difference": self.loss,
            "tolerance": tolerance(config)._asdict(),
            "holds": self.holds,
        }


def check_files(folder: Path) -> int:
    """Check every file of every run against its seal; the number of runs and summaries."""
    checked = len(stored_runs(folder))
    for place in places(folder):  # a run may be in an archive and again beside it
        for path in filter(is_complete, place.iterdir()):
            verify(path)
            StoredRun.open(path).history()
    for summary in Condensed.all_in(unpacked(folder)):
        summary.summary()
        checked += 1
    return checked


def draw(runs: Sequence[StoredRun], number: int, seed: int) -> list[StoredRun]:
    """Some of the runs that have something to compare, at random."""
    here = [run for run in runs if not _elsewhere(run)]
    alive = [run for run in here if run.manifest["diverged_at"] is None]
    if not alive:
        raise BadInput("every run diverged: there is nothing to run again" if here else
                       "all runs were deployed with data or a model that are not here")  # fmt: skip
    chosen = rng.stream(seed, "verify").permutation(len(alive))[:number]
    return [alive[i] for i in sorted(chosen)]


def _elsewhere(run: StoredRun) -> bool:
    """Deployed with the nodes' own data or the app's own model: neither is here."""
    deployed = Deployed.of(run.manifest, run.folder)
    return deployed is not None and (deployed.own_data or deployed.own_model)


def rerun(
    run: StoredRun,
    evaluations: int,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Agreement:
    """Run the rounds up to the given number of evaluations again, and compare."""
    stored, config = run.history(), run.config
    evaluated = stored.evaluated[:evaluations]
    if not len(evaluated):
        raise BadInput(f"{run.folder.name} was never evaluated: there is nothing to compare")
    settings = replace(config.train, rounds=int(evaluated[-1]), device=device)
    federation = federation_of(config)
    again = run_rounds(
        model_of(config, federation),
        federation,
        config.method,
        config.model.loss,
        settings,
        config.evaluate,
        progress=progress,
    )
    return compared(run, stored, again)


def compared(run: StoredRun, stored: History, again: History) -> Agreement:
    """At the evaluated rounds that both have."""
    rows = len(again.evaluated)
    accuracy, answers = 0.0, 0.0
    for key, table in again.accuracy.items():
        gap = table - stored.accuracy[key][:rows]
        samples = again.samples[key[0]].double()
        accuracy = max(accuracy, float(gap.nanmean(1).abs().max()))
        answers = max(answers, float((gap.abs() * samples).nansum(1).max() / samples.sum()))
    seen = torch.isin(again.observed + 1, again.evaluated)
    loss = _relative(again.loss[seen], stored.loss[:rows])
    return Agreement(run, again.rounds, accuracy, answers, loss)


def _relative(a: Tensor, b: Tensor) -> float:
    gap = (a - b).abs() / b.abs().clamp_min(1e-3)
    measured = gap[torch.isfinite(gap)]
    return float(measured.max()) if len(measured) else 0.0
