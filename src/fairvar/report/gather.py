"""From a folder of stored runs to the groups that a report shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairvar.config import Config
from fairvar.data import Dirichlet
from fairvar.errors import BadInput
from fairvar.experiment import StoredRun
from fairvar.methods import METHODS
from fairvar.report.results import Result, Trial, choose
from fairvar.select import Criterion
from fairvar.store import is_complete


@dataclass(frozen=True)
class Group:
    """All runs on one federation: a section of the report."""

    config: Config  # of one of the runs; method, lr and seed vary within the group
    trials: Sequence[Trial]
    results: Sequence[Result]
    runs: Sequence[StoredRun]

    @property
    def alpha(self) -> float | None:
        partition = self.config.partition
        return partition.alpha if isinstance(partition, Dirichlet) else None

    @property
    def dataset(self) -> str:
        return self.config.data.name


def stored_runs(folder: Path) -> list[StoredRun]:
    """Every finished run below a folder, in a fixed order."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the one that `fairvar sweep` wrote")
    found = [StoredRun.open(path) for path in sorted(folder.iterdir()) if is_complete(path)]
    if not found:
        raise BadInput(f"{folder} holds no finished run yet; run `fairvar sweep` first")
    return found


def gather(folder: Path, criterion: Criterion | None = None) -> list[Group]:
    """Group by federation, then by configuration (seeds together), and choose on validation."""
    groups: dict[str, list[StoredRun]] = {}
    for run in stored_runs(folder):
        # The same configuration on other data (half of CIFAR-100, say) is another federation.
        data = str(run.manifest["passport"].get("dataset_sha256"))
        groups.setdefault(_group_key(run.config) + data, []).append(run)
    found = [_group(runs, criterion) for runs in groups.values()]
    return sorted(found, key=lambda g: (g.dataset, g.config.protocol, g.alpha or 0.0))


def _group(runs: list[StoredRun], criterion: Criterion | None) -> Group:
    cells: dict[str, list[StoredRun]] = {}
    for run in runs:
        cells.setdefault(_trial_key(run.config), []).append(run)
    trials = [_trial(members) for members in cells.values()]
    trials.sort(key=_trial_order)
    config = runs[0].config
    return Group(config, trials, choose(trials, criterion or config.select), runs)


def _trial(members: list[StoredRun]) -> Trial:
    members = sorted(members, key=lambda run: run.config.train.seed)
    config = members[0].config
    return Trial(config.method, config.train.lr, [run.history() for run in members])


def _trial_order(trial: Trial) -> tuple[Any, ...]:
    names = list(METHODS)
    tag = str(type(trial.method).__struct_config__.tag)
    rank = names.index(tag) if tag in names else len(names)
    return (rank, trial.label, trial.lr, str(trial.knob))


def _trial_key(config: Config) -> str:
    values = config.to_dict()
    values["train"].pop("seed")
    for where in ("name", "select"):
        values.pop(where, None)
    return json.dumps(values, sort_keys=True)


def _group_key(config: Config) -> str:
    values = json.loads(_trial_key(config))
    values.pop("method")
    values["train"].pop("lr")
    return json.dumps(values, sort_keys=True)
