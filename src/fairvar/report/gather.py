"""From folders of stored runs to the groups that a report shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fairvar.archive import condensed_history
from fairvar.config import Config
from fairvar.data import Dirichlet
from fairvar.errors import BadInput, IntegrityError
from fairvar.experiment import StoredRun, recorded_federation
from fairvar.identity import group_key, trial_key
from fairvar.methods import METHODS
from fairvar.report.condensed import Condensed, unpacked
from fairvar.report.results import Result, choose
from fairvar.report.trial import Summary, Trial
from fairvar.select import Criterion
from fairvar.store import is_complete, read_sealed

Rule = Callable[[Config], Criterion]
Piece = StoredRun | Condensed
Variant = tuple[int, str | None, str | None]  # Identity.variant


@dataclass(frozen=True)
class Group:
    """All runs on one federation: a section of the report."""

    config: Config  # of one of the runs; method, lr and seed vary within the group
    criterion: Criterion  # how the results were chosen, and by which model
    passport: Mapping[str, Any]
    federation: Mapping[str, Any] | None  # who holds what, where that was recorded
    trials: Sequence[Trial]
    results: Sequence[Result]
    data: str = ""  # start of the data's SHA-256, where the same name stands for several data sets

    @property
    def alpha(self) -> float | None:
        partition = self.config.partition
        return partition.alpha if isinstance(partition, Dirichlet) else None

    @property
    def dataset(self) -> str:
        name = self.config.data.name
        return f"{name} [{self.data}]" if self.data else name

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
    pieces: list[Piece] = [
        *_each_once(run for folder in folders for run in stored_runs(folder)),
        *_distinct(s for folder in folders for s in Condensed.all_in(unpacked(folder))),
    ]
    versions = _versions(pieces)
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        # The same configuration on other data (half of CIFAR-100, say) is another federation.
        groups.setdefault(group_key(piece.config, piece.identity), []).append(piece)
    found = [_group(pieces, rule, versions) for pieces in groups.values()]
    order = sorted(found, key=lambda g: (g.dataset, g.config.protocol, g.alpha or 0.0))
    return _told_apart(order)


def _each_once(runs: Iterable[StoredRun]) -> list[StoredRun]:
    """A copy of a run is no other seed, whatever its folder is called."""
    found: dict[str, StoredRun] = {}
    for run in runs:
        known = found.setdefault(run.identity.sha256, run)
        if known is not run and _results(known) != _results(run):
            raise IntegrityError(f"{known.folder} and {run.folder} are the same run with different "
                                 "results; keep one of them")  # fmt: skip
    return list(found.values())


def _results(run: StoredRun) -> bytes:
    """What reports read of a run, whether it was condensed or not."""
    content = read_sealed(run.folder, run.manifest, "history.safetensors")
    return content if run.manifest.get("condensed") else condensed_history(content)


def _distinct(summaries: Iterable[Condensed]) -> list[Condensed]:
    return list({json.dumps(s.manifest, sort_keys=True): s for s in summaries}.values())


def _versions(pieces: Iterable[Piece]) -> dict[tuple[str, Variant], str]:
    """Short names for the versions of a method's code, where a label stands for several."""
    found: dict[str, set[Variant]] = {}
    for piece in pieces:
        found.setdefault(piece.config.method.label, set()).add(piece.identity.variant)
    return {
        (label, variant): _short(variant)
        for label, variants in found.items()
        for variant in variants
        if len(variants) > 1
    }


def _short(variant: Variant) -> str:
    version, code, deployed = variant
    parts = [f"v{version}", code and f"code {code[:8]}", deployed and f"deployed {deployed[:8]}"]
    return ", ".join(part for part in parts if part)


def _told_apart(groups: Sequence[Group]) -> list[Group]:
    """With the data's checksum in the name of those that have the same name on other data."""
    known: dict[tuple[Any, ...], set[Any]] = {}
    for group in groups:
        known.setdefault(_named(group), set()).add(group.passport.get("dataset_sha256"))
    return [
        replace(g, data=str(g.passport.get("dataset_sha256"))[:8])
        if len(known[_named(g)]) > 1
        else g
        for g in groups
    ]


def _named(group: Group) -> tuple[Any, ...]:
    """What titles tell of a federation."""
    config = group.config
    return group.dataset, config.protocol, group.alpha, config.data.clients, config.model.name


def _group(
    pieces: Sequence[Piece], rule: Rule, versions: Mapping[tuple[str, Variant], str]
) -> Group:
    cells: dict[str, list[Piece]] = {}
    for piece in pieces:
        cells.setdefault(trial_key(piece.config, piece.identity), []).append(piece)
    trials = sorted((_trial(members, versions) for members in cells.values()), key=_trial_order)
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


def _trial(members: Sequence[Piece], versions: Mapping[tuple[str, Variant], str]) -> Trial:
    runs = [m for m in members if isinstance(m, StoredRun)]
    summaries = [m for m in members if isinstance(m, Condensed)]
    if len(summaries) > 1 or (runs and summaries):
        raise BadInput(
            f"{summaries[0].config.method.label}, lr {summaries[0].config.train.lr:g} is there as "
            "a summary and again: its seeds cannot be told apart; condense the runs themselves"
        )
    config, identity = members[0].config, members[0].identity
    version = versions.get((config.method.label, identity.variant), "")
    if summaries:
        summary = summaries[0].summary()
        return Trial(config.method, config.train.lr, (), summary, identity, version)
    runs.sort(key=lambda run: run.config.train.seed)
    # A grid has thousands of histories: they are read here, and again for what is chosen.
    summary = Summary.of([run.history() for run in runs])
    return Trial(config.method, config.train.lr, runs, summary, identity, version)


def _trial_order(trial: Trial) -> tuple[Any, ...]:
    names = list(METHODS)
    tag = str(type(trial.method).__struct_config__.tag)
    rank = names.index(tag) if tag in names else len(names)
    return (rank, trial.label, trial.lr, str(trial.knob))
