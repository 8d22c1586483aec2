"""Stored runs, grouped by federation, with the configuration chosen for each method."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as with_fields

from fairvar.data import Dirichlet
from fairvar.errors import BadInput, IntegrityError
from fairvar.methods import METHODS
from fairvar.runs.archive import Condensed, unpacked
from fairvar.runs.config import Config
from fairvar.runs.identity import group_key, trial_key
from fairvar.runs.select import Criterion
from fairvar.runs.serialize import condensed_history
from fairvar.runs.store import is_complete, read_sealed
from fairvar.runs.stored import Deployed, StoredRun, recorded_federation
from fairvar.runs.trials import Result, Summary, Trial, choose, validated

Rule = Callable[[Config], Criterion]
Piece = StoredRun | Condensed
Variant = tuple[int, str | None, str | None]  # Identity.variant


@dataclass(frozen=True)
class Group:
    """All runs on one federation."""

    config: Config  # of one of the runs; method, lr and seed vary within the group
    criterion: Criterion  # how the results were chosen, and by which model
    passport: Mapping[str, Any]
    federation: Mapping[str, Any] | None  # classes by client, if they were recorded
    trials: Sequence[Trial]
    results: Sequence[Result]
    data: str = ""  # start of the data's SHA-256, if several data sets have the same name
    deployed: Deployed | None = None  # None: simulated

    @property
    def own_data(self) -> bool:
        """Whether nodes used their own files, which the configuration does not describe."""
        return self.deployed is not None and self.deployed.own_data

    @property
    def alpha(self) -> float | None:
        partition = self.config.partition
        return None if self.own_data or not isinstance(partition, Dirichlet) else partition.alpha

    @property
    def dataset(self) -> str:
        return f"{self.source} [{self.data}]" if self.data else self.source

    @property
    def source(self) -> str:
        """The name of the data set, or whose data they were."""
        if self.deployed is not None and self.deployed.own_data:
            return f"own data of {self.deployed.where}"
        return self.config.data.name

    @property
    def kind(self) -> list[str]:
        """What distinguishes federations of one data set and alpha, if it is not the default."""
        deployed = ["deployed"] if self.deployed is not None and not self.own_data else []
        return deployed + [self.config.protocol] * (self.config.protocol != "boxes")

    @property
    def model(self) -> str:
        if self.deployed is None:
            return self.config.model.name
        size = self.deployed.parameters
        return self.deployed.model + (f" ({size:,} parameters)" if size else "")

    @property
    def validated(self) -> bool:
        """Whether there were validation data to choose by."""
        return validated(self.trials, self.criterion.model)

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration of one run, without what a deployed run did not use."""
        values = self.config.to_dict()
        if self.own_data:
            del values["partition"]
            values["data"] = {k: values["data"][k] for k in ("name", "clients", "seed", "split")}
        if self.deployed is not None and self.deployed.own_model:
            del values["model"]["name"]
        return values

    @property
    def births(self) -> list[Mapping[str, Any]]:
        """The provenance of every run, also of those of which only a summary was kept."""
        return [birth for trial in self.trials for birth in trial.summary.births]


def stored_runs(folder: Path) -> list[StoredRun]:
    """Every finished run below a folder, in a fixed order."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the one that `fairvar sweep` wrote")
    # If an archive and the folder next to it hold the same run, the folder has more of it.
    paths = [path for place in reversed(places(folder)) for path in sorted(place.iterdir())
             if is_complete(path)]  # fmt: skip
    if not paths:
        raise BadInput(f"{folder} holds no finished run yet; run `fairvar sweep` first")
    found = _each_once(StoredRun.open(path) for path in paths)
    return sorted(found, key=lambda run: run.folder.name)


def places(folder: Path) -> list[Path]:
    """The folders with runs: the unpacked archive, if there is one, and the folder itself."""
    return list(dict.fromkeys([unpacked(folder), folder]))


def gather(
    *folders: Path,
    rule: Rule = lambda config: config.select,
    model: str | None = None,
    only: Container[str] | None = None,
) -> list[Group]:
    """Group by federation, then by configuration (seeds together), and choose on validation.

    `rule`: the criterion of a group, from its configuration. `model`: raise unless this model was
    evaluated; by default use one that was. `only`: the names of the runs to gather."""
    found_runs = (run for folder in folders for run in stored_runs(folder))
    pieces: list[Piece] = [
        *_each_once(run for run in found_runs if only is None or run.folder.name in only),
        *_distinct(s for folder in folders for s in Condensed.all_in(unpacked(folder))),
    ]
    versions = _versions(pieces)
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        # The same configuration on other data (half of CIFAR-100, say) is another federation. So is
        # a deployment, whose clients and model need not be those of the configuration.
        there = Deployed.of(piece.manifest, piece.folder)
        known = "" if there is None else str((there.own_data, there.model, there.parameters))
        groups.setdefault(group_key(piece.config, piece.identity) + known, []).append(piece)
    found = [_group(pieces, rule, versions, model) for pieces in groups.values()]
    order = sorted(found, key=lambda g: (g.dataset, g.config.protocol, g.alpha or 0.0))
    return _with_distinct_names(order)


def _each_once(runs: Iterable[StoredRun]) -> list[StoredRun]:
    """Without copies: a copy of a run is not another seed, even under another name."""
    found: dict[str, StoredRun] = {}
    for run in runs:
        known = found.setdefault(run.identity.sha256, run)
        if known is not run and _results(known) != _results(run):
            raise IntegrityError(f"{known.folder} and {run.folder} are the same run with different "
                                 "results; keep one of them")  # fmt: skip
    return list(found.values())


def _results(run: StoredRun) -> bytes:
    """What a report reads of a run, in the same form for condensed runs and others."""
    content = read_sealed(run.folder, run.manifest, "history.safetensors")
    return content if run.manifest.get("condensed") else condensed_history(content)


def _distinct(summaries: Iterable[Condensed]) -> list[Condensed]:
    return list({json.dumps(s.manifest, sort_keys=True): s for s in summaries}.values())


def _versions(pieces: Iterable[Piece]) -> dict[tuple[str, Variant], str]:
    """Short names for the versions of a method's code, if several have the same label."""
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


def _with_distinct_names(groups: Sequence[Group]) -> list[Group]:
    """Adds the data's checksum to the names of groups that have the same name on other data."""
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
    """The parts of a federation's title."""
    return group.source, *group.kind, group.alpha, group.config.data.clients, group.model


def _group(
    pieces: Sequence[Piece],
    rule: Rule,
    versions: Mapping[tuple[str, Variant], str],
    asked: str | None,
) -> Group:
    cells: dict[str, list[Piece]] = {}
    for piece in pieces:
        cells.setdefault(trial_key(piece.config, piece.identity), []).append(piece)
    trials = sorted((_trial(members, versions) for members in cells.values()), key=_trial_order)
    criterion = _measured(trials, rule(pieces[0].config), asked, pieces[0].config)
    results = choose(trials, criterion)
    first = _first_run(results)
    return Group(
        first.config,
        criterion,
        first.manifest["passport"],
        recorded_federation(first),
        trials,
        results,
        deployed=Deployed.of(first.manifest, first.folder),
    )


def _measured(
    trials: Sequence[Trial], criterion: Criterion, asked: str | None, config: Config
) -> Criterion:
    """The criterion for a model that was evaluated: local models need not be (evaluate.local)."""
    alive = [trial for trial in trials if not trial.diverged]
    models = [m for m in ("global", "local") if all(m in trial.models for trial in alive)]
    if criterion.model in models:
        return criterion
    where = f"{config.data.name}, {config.protocol}"
    if not models:
        raise BadInput(
            f"{where}: no test accuracy was measured, which a report needs: run a "
            'classifier with evaluate.splits = ["valid", "test"] and a test part in data.split'
        )
    if asked is not None:
        raise BadInput(f"{where}: the {asked} model was not measured there, the {models[0]} one was"
                       " (evaluate.local = true measures local models)")  # fmt: skip
    return with_fields(criterion, model=models[0])


def _first_run(results: Sequence[Result]) -> StoredRun:
    """One of the chosen runs, so that a report from condensed runs is the same."""
    for result in results:
        for run in result.trial.source:
            if isinstance(run, StoredRun):
                return run
    raise BadInput("only summaries were kept of what is chosen here; use the options that the runs "
                   "were condensed with")  # fmt: skip


def _trial(members: Sequence[Piece], versions: Mapping[tuple[str, Variant], str]) -> Trial:
    runs = [m for m in members if isinstance(m, StoredRun)]
    seeds = {run.config.train.seed for run in runs}
    # A summary is not needed if all its runs are there.
    summaries = [m for m in members if isinstance(m, Condensed)
                 and not seeds.issuperset(b["seed"] for b in m.manifest["births"])]  # fmt: skip
    if len(summaries) > 1 or (runs and summaries):
        raise BadInput(
            f"{summaries[0].config.method.label}, lr {summaries[0].config.train.lr:g} is there as "
            "a summary and again: its seeds cannot be separated; condense the runs themselves"
        )
    config, identity = members[0].config, members[0].identity
    version = versions.get((config.method.label, identity.variant), "")
    if summaries:
        summary = summaries[0].summary()
        return Trial(config.method, config.train.lr, (), summary, identity, version)
    runs.sort(key=lambda run: run.config.train.seed)
    # Not kept, since a grid has thousands of histories; those of chosen runs are read again.
    summary = Summary.of([run.history(with_state=False) for run in runs])
    return Trial(config.method, config.train.lr, runs, summary, identity, version)


def _trial_order(trial: Trial) -> tuple[Any, ...]:
    names = list(METHODS)
    tag = str(type(trial.method).__struct_config__.tag)
    rank = names.index(tag) if tag in names else len(names)
    return (rank, trial.label, trial.lr, str(trial.knob))
