"""Checks of stored results: are the files intact, and does running again give the same numbers?

A run from a GPU cannot be repeated bit by bit on a CPU: sums are taken in another order, and the
difference grows while a network trains. So the first few rounds are run again and compared within
a tolerance, in the measures that reports use. The tolerance is wide for runs with rounded products
(TF32, bfloat16) and many local steps between two evaluations, because hundreds of steps of a
network amplify such rounding.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from fairvar.common import rng
from fairvar.engine.history import History
from fairvar.engine.keys import batch_key
from fairvar.errors import BadInput, IntegrityError
from fairvar.metrics import mean_and_variance
from fairvar.runs import own
from fairvar.runs.archive import ARCHIVE, LIST, Condensed, extract, unpacked, write_list
from fairvar.runs.config import Config
from fairvar.runs.formats import is_complete
from fairvar.runs.identity import identity_of
from fairvar.runs.results import places, stored_runs
from fairvar.runs.runner import train_runs
from fairvar.runs.stored import StoredRun, final_scores, verify
from fairvar.scores import ACCURACY, Metric


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
class Rerun:
    """A stored run compared with its first rounds, run again."""

    run: StoredRun
    rounds: int
    accuracy: float  # largest difference of a mean accuracy, or another score, over clients
    answers: float | None  # largest share of answers, of all clients, that differ; None: no labels
    loss: float  # largest relative difference of a client's training loss
    metric: Metric = ACCURACY

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
            f"{self.metric.name}_difference": self.accuracy,
            "answers_that_differ": self.answers,
            "loss_difference": self.loss,
            "tolerance": tolerance(config)._asdict(),
            "holds": self.holds,
        }


def check_files(folder: Path) -> int:
    """Check every file of every run against its seal; the number of runs and summaries."""
    checked = len(stored_runs(folder))
    for place in places(folder):  # a run may be both in an archive and in a folder next to it
        for path in filter(is_complete, place.iterdir()):
            verify(path)
            run = StoredRun.open(path)
            _check_scores(run, run.history())
    for summary in Condensed.all_in(unpacked(folder)):
        summary.summary()
        checked += 1
    return checked


def _check_scores(run: StoredRun, history: History) -> None:
    """The numbers in the manifest are those of the history. Earlier versions wrote none for runs
    without labels."""
    if run.manifest.get("metric") is None and not history.classifies:
        return
    found, stored = final_scores(history), run.manifest["result"]
    flat = [(key, name) for key in found for name in found[key]]
    pairs = [(found[key][name], stored.get(key, {}).get(name)) for key, name in flat]
    if found.keys() != stored.keys() or not all(
        np.isclose(a, b, rtol=1e-6, atol=1e-12, equal_nan=True) for a, b in pairs
    ):
        raise IntegrityError(f"the manifest of {run.folder} has other results than its history")


def seal_archive(folder: Path) -> tuple[Path, int]:
    """Write the list of contents of an archive that was made before there were such lists, after
    checking all that it holds; returns the list, and the number of runs and summaries."""
    if os.path.lexists(folder / LIST):
        raise BadInput(f"{folder / LIST} is there already; it is never overwritten")
    if not (folder / ARCHIVE).exists():
        raise BadInput(f"{folder / ARCHIVE} does not exist; give the folder of an archive")
    with tempfile.TemporaryDirectory(prefix="fairvar-") as place:
        contents = extract(folder / ARCHIVE, Path(place))
        checked = check_files(Path(place))
    return write_list(folder, contents), checked


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
    """Whether the run was deployed with data or a model that are not available here."""
    there = run.deployed
    return there is not None and (there.own_data or there.own_model)


def rerun(run: StoredRun, evaluations: int, device: str = "cpu") -> Rerun:
    """Run the rounds up to the given number of evaluations again, and compare."""
    run = _with_code(run)
    stored = run.history()
    evaluated = stored.evaluated[:evaluations]
    if not len(evaluated):
        raise BadInput(f"{run.folder.name} was never evaluated: there is nothing to compare")
    _check_here(run)
    group, rounds = _group(run), int(evaluated[-1])
    cells = [replace(c, train=replace(c.train, rounds=rounds, device=device))
             for c in (each.config for each in group)]  # fmt: skip
    made = zip(group, train_runs(cells), strict=True)
    (again,) = (history for each, history in made if each.folder == run.folder)
    return compared(run, stored, again)


def _group(run: StoredRun) -> list[StoredRun]:
    """The runs that it trained with, itself among them, if all are stored next to it: a batch forms
    sums in another order than a single run, and steps that are too long to be stable turn a
    difference of the last bits into another trajectory. Otherwise itself alone."""
    names = run.manifest.get("group", ())
    folders = [run.folder.parent / Path(name).name for name in names]  # never a folder elsewhere
    if run.folder not in set(folders) or not all(map(is_complete, folders)):
        return [run]
    group = [StoredRun.open(folder) for folder in dict.fromkeys(folders)]
    alike = {(batch_key(r.config), r.identity.data, r.identity.code) for r in group}
    return group if len(alike) == 1 else [run]


def _with_code(run: StoredRun) -> StoredRun:
    """The run with the user's code that it was made with. A stored file must not make any code run,
    so only such is used that this user has loaded, or has computed runs with on this machine."""
    if not own.is_loaded(run.config):
        own.recall(run.identity.code)
        run = StoredRun.open(run.folder)
    if not own.is_loaded(run.config):
        raise BadInput(
            f"{run.folder.name} was made with code that is not part of fairvar and was not run on "
            "this machine; look at it, then give its file or the configuration that names it: "
            "--plugin FILE"
        )
    return run


def _check_here(run: StoredRun) -> None:
    """Refuses other data or code: they give other numbers, so that a comparison has no meaning."""
    here, there = identity_of(run.config), run.identity
    if here.data != there.data:
        raise BadInput(
            f"{run.folder.name} was made from other data than {run.config.data.name} is here: "
            f"sha256 {str(there.data)[:12]}, not {str(here.data)[:12]}"
        )
    if (here.version, here.code) != (there.version, there.code):
        raise BadInput(f"{run.folder.name} was made with another version of the code of "
                       f"{run.config.method.label} than the one here")  # fmt: skip


def compared(run: StoredRun, stored: History, again: History) -> Rerun:
    """At the evaluated rounds that both have. A mean score that is no fraction is compared with its
    own size, or with the spread over clients where that is larger."""
    rows, metric = len(again.evaluated), again.metric
    if metric.name != stored.metric.name:
        raise BadInput(f"{run.folder.name} was scored by {stored.metric.title}, here by "
                       f"{metric.title}")  # fmt: skip
    accuracy, answers = 0.0, 0.0
    for key, table in again.score.items():
        known = stored.score[key][:rows]
        gap = (table - known).nanmean(1).abs()
        if metric.factor != 100:
            mean, variance = map(torch.from_numpy, mean_and_variance(known.numpy()))
            gap = gap / torch.maximum(mean.abs(), variance.nan_to_num().sqrt()).clamp_min(1e-9)
        accuracy = max([accuracy, *gap[torch.isfinite(gap)].tolist()])
    for key, table in again.accuracy.items():
        gap = table - stored.accuracy[key][:rows]
        samples = again.samples[key[0]].double()
        answers = max(answers, float((gap.abs() * samples).nansum(1).max() / samples.sum()))
    known = stored.loss[:rows]
    gaps = (again.at_evaluations().loss - known).abs() / known.abs().clamp_min(1e-3)
    loss = max(gaps[torch.isfinite(gaps)].tolist(), default=0.0)
    counted = answers if again.accuracy else None
    return Rerun(run, again.rounds, accuracy, counted, loss, metric)
