"""From folders of stored runs to the groups that a report shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairvar.config import Config
from fairvar.data import Dirichlet
from fairvar.errors import BadInput
from fairvar.experiment import StoredRun, recorded_federation
from fairvar.methods import METHODS
from fairvar.report.condensed import Condensed, unpacked
from fairvar.report.results import Result, choose
from fairvar.report.trial import Summary, Trial
from fairvar.select import Criterion
from fairvar.store import is_complete

Rule = Callable[[Config], Criterion]


@dataclass(frozen=True)
class Group:
    """All runs on one federation: a section of the report."""

    config: Config  # of one of the runs; method, lr and seed vary within the group
    criterion: Criterion  # how the results were chosen, and by which model
    passport: Mapping[str, Any]
    federation: Mapping[str, Any] | None  # who holds what, where that was recorded
    trials: Sequence[Trial]
    results: Sequence[Result]

    @property
    def alpha(self) -> float | None:
        partition = self.config.partition
        return partition.alpha if isinstance(partition, Dirichlet) else None

    @property
    def dataset(self) -> str:
        return self.config.data.name

    @property
    def births(self) -> list[Mapping[str, Any]]:
        """Of every run, also of those of which a summary is all that was kept."""
        return [birth for trial in self.trials for birth in trial.summary.births]


def stored_runs(folder: Path) -> list[StoredRun]:
    """Every finished run below a folder, in a fixed order."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the one that `fairvar sweep` wrote")
    folder = unpacked(folder)
    found = [StoredRun.open(path) for path in sorted(folder.iterdir()) if is_complete(path)]
    if not found:
        raise BadInput(f"{folder} holds no finished run yet; run `fairvar sweep` first")
    return found


def gather(*folders: Path, rule: Rule = lambda config: config.select) -> list[Group]:
    """Group by federation, then by configuration (seeds together), and choose on validation.

    `rule`: how to choose in a group, from its configuration."""
    runs = {run.folder.name: run for folder in folders for run in stored_runs(folder)}
    summaries = {s.folder.name: s for folder in folders for s in Condensed.all_in(unpacked(folder))}
    groups: dict[str, list[StoredRun | Condensed]] = {}
    pieces: list[StoredRun | Condensed] = [*runs.values(), *summaries.values()]
    for piece in pieces:
        # The same configuration on other data (half of CIFAR-100, say) is another federation.
        data = str(piece.manifest["passport"].get("dataset_sha256"))
        groups.setdefault(_group_key(piece.config) + data, []).append(piece)
    found = [_group(pieces, rule) for pieces in groups.values()]
    return sorted(found, key=lambda g: (g.dataset, g.config.protocol, g.alpha or 0.0))


def _group(pieces: Sequence[StoredRun | Condensed], rule: Rule) -> Group:
    cells: dict[str, list[StoredRun | Condensed]] = {}
    for piece in pieces:
        cells.setdefault(_trial_key(piece.config), []).append(piece)
    trials = sorted(map(_trial, cells.values()), key=_trial_order)
    criterion = rule(pieces[0].config)
    results = choose(trials, criterion)
    first = _first_run(results)
    return Group(
        first.config,
        criterion,
        first.manifest["passport"],
        recorded_federation(first),
        trials,
        results,
    )


def _first_run(results: Sequence[Result]) -> StoredRun:
    """One of the chosen, so that condensed runs have the same report as those they came from."""
    for result in results:
        for run in result.trial.source:
            if isinstance(run, StoredRun):
                return run
    raise BadInput("of all that was chosen here only summaries were kept; report with the options "
                   "that the runs were condensed with")  # fmt: skip


def _trial(members: Iterable[StoredRun | Condensed]) -> Trial:
    runs = [m for m in members if isinstance(m, StoredRun)]
    summaries = [m for m in members if isinstance(m, Condensed)]
    if len(summaries) > 1 or (runs and summaries):
        raise BadInput(
            f"{summaries[0].config.method.label}, lr {summaries[0].config.train.lr:g} is there as "
            "a summary and again: its seeds cannot be told apart; condense the runs themselves"
        )
    if summaries:
        config = summaries[0].config
        return Trial(config.method, config.train.lr, (), summaries[0].summary())
    runs.sort(key=lambda run: run.config.train.seed)
    config = runs[0].config
    # A grid has thousands of histories: they are read here, and again for what is chosen.
    summary = Summary.of([run.history() for run in runs])
    return Trial(config.method, config.train.lr, runs, summary)


def _trial_order(trial: Trial) -> tuple[Any, ...]:
    names = list(METHODS)
    tag = str(type(trial.method).__struct_config__.tag)
    rank = names.index(tag) if tag in names else len(names)
    return (rank, trial.label, trial.lr, str(trial.knob))


def _trial_key(config: Config) -> str:
    values = config.to_dict()
    values["train"].pop("seed")
    # Where a run happened is no part of what it is.
    for place in ("device", "chunk", "capture"):
        values["train"].pop(place, None)
    values["data"].pop("root", None)
    for where in ("name", "select"):
        values.pop(where, None)
    return json.dumps(values, sort_keys=True)


def _group_key(config: Config) -> str:
    values = json.loads(_trial_key(config))
    values.pop("method")
    values["train"].pop("lr")
    return json.dumps(values, sort_keys=True)
