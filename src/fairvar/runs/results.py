"""Stored runs, grouped by federation, with the configuration chosen for each method."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as with_fields

from fairvar.engine.history import MODELS
from fairvar.engine.keys import PLACES, group_key, swept, trial_key
from fairvar.errors import BadInput, IntegrityError
from fairvar.methods import METHODS
from fairvar.runs.archive import ARCHIVE, Condensed, unpacked
from fairvar.runs.config import Config, flat
from fairvar.runs.formats import condensed_history, is_complete, read_sealed
from fairvar.runs.select import Criterion
from fairvar.runs.stored import StoredRun, recorded_federation
from fairvar.runs.trials import Group, Summary, Trial, choose, one_stored_run, with_varied

Rule = Callable[[Config], Criterion]
Piece = StoredRun | Condensed
Variant = tuple[int, str | None, str | None]  # Identity.variant


def stored_runs(folder: Path) -> list[StoredRun]:
    """Every finished run below a folder, in a fixed order."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the one that `fairvar sweep` wrote")
    # If an archive and the folder next to it hold the same run, the folder has more of it.
    paths = [path for place in reversed(places(folder)) for path in sorted(place.iterdir())
             if is_complete(path)]  # fmt: skip
    if not paths:
        raise BadInput(_where_runs_are(folder))
    found = _each_once(StoredRun.open(path) for path in paths)
    return sorted(found, key=lambda run: run.folder.name)


def _where_runs_are(folder: Path) -> str:
    """The message for a folder without runs, often that of a single run or of several sweeps."""
    if is_complete(folder):
        above = os.path.normpath(folder / "..")
        return f"{folder} is a single run; give the folder that it is in: {above}"
    below = [place for place in sorted(folder.iterdir()) if place.is_dir() and (
        (place / ARCHIVE).exists() or any(map(is_complete, place.iterdir())))]  # fmt: skip
    if below:
        return f"{folder} holds no runs itself; give a folder in it, such as {below[0]}"
    return f"{folder} holds no finished run yet; run `fairvar sweep` first"


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
    summaries = (s for folder in folders for s in Condensed.all_in(unpacked(folder)))
    pieces = _with_all_varied([
        *_each_once(run for run in found_runs if only is None or run.folder.name in only),
        *{json.dumps(s.manifest, sort_keys=True): s for s in summaries}.values(),
    ])  # fmt: skip
    versions = _versions(pieces)
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        # The same configuration on other data (half of CIFAR-100, say) is another federation. So is
        # a deployment, whose clients and model need not be those of the configuration.
        there = piece.deployed
        known = "" if there is None else str((there.own_data, there.model, there.parameters))
        groups.setdefault(group_key(piece.config, piece.identity) + known, []).append(piece)
    found = [_group(pieces, rule, versions, model) for pieces in groups.values()]
    return sorted(_with_distinct_names(found), key=_group_order)


def _with_all_varied(pieces: Sequence[Piece]) -> list[Piece]:
    """What one sweep varied (`select.over`), validation chooses for every run of its folder, also
    for those that were computed before the key was added to the grid."""
    keys = dict.fromkeys(key for piece in pieces for key in swept(piece.config))
    found = list[Piece]()
    for piece in pieces:
        known = piece.config.select.over or ()
        over = (*known, *(key for key in keys if key not in known))
        select = with_fields(piece.config.select, over=over or None)
        found.append(replace(piece, config=with_fields(piece.config, select=select)))
    return found


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


def _versions(pieces: Iterable[Piece]) -> dict[tuple[str, Variant], str]:
    """Short names for the versions of a method's code, if several have the same label."""
    found: dict[tuple[str, ...], set[Variant]] = {}
    for piece in pieces:
        config = piece.config
        things = config.method.label, config.model.name, config.data.name
        found.setdefault(things, set()).add(piece.identity.variant)
    names = {}
    for (label, *_), variants in found.items():
        for version, code, deployed in variants if len(variants) > 1 else ():
            parts = [f"v{version}"] + ([f"code {code[:8]}"] if code else [])
            parts += [f"deployed {deployed[:8]}"] if deployed else []
            names[label, (version, code, deployed)] = ", ".join(parts)
    return names


def _with_distinct_names(groups: Sequence[Group]) -> list[Group]:
    """Adds the data's checksum to the names of groups that have the same name on other data, and to
    those that still have the same name the settings in which they differ."""
    data = [str(group.passport.get("dataset_sha256")) for group in groups]
    known: dict[tuple[Any, ...], set[str]] = {}
    for group, sha256 in zip(groups, data, strict=True):
        known.setdefault(_title(group), set()).add(sha256)
    groups = [
        replace(group, data=sha256[:8]) if len(known[_title(group)]) > 1 else group
        for group, sha256 in zip(groups, data, strict=True)
    ]
    same: dict[tuple[Any, ...], list[int]] = {}
    for place, group in enumerate(groups):
        same.setdefault((_title(group), group.data), []).append(place)
    found = list(groups)
    for where in same.values():
        named = zip(_differences([groups[p].config for p in where]), where, strict=True)
        for apart, place in named:
            found[place] = replace(groups[place], apart=apart)
    return found


def _group_order(group: Group) -> tuple[Any, ...]:
    """The order must not depend on which runs were kept as summaries: federations of one data set
    have numbers. In settings, 10 comes after 9."""
    parts = [re.split(r"(\d+(?:\.\d+)?)", text) for text in group.kind]
    kind = [[(float(part), "") if odd % 2 else (math.inf, part) for odd, part in enumerate(each)]
            for each in parts]  # fmt: skip
    return (group.source, group.config.protocol, group.alpha or 0.0, group.data, group.model,
            group.config.data.clients, kind)  # fmt: skip


def _differences(configs: Sequence[Config]) -> list[list[str]]:
    """The settings, with values, in which configurations of different groups differ."""
    known = ("method.", "train.lr", "train.seed", *PLACES)
    rows = [
        {k: v for k, v in flat(config.to_dict()) if not k.startswith((*known, *swept(config)))}
        for config in configs
    ]
    keys = dict.fromkeys(key for row in rows for key in row)
    differ = [key for key in keys if any(row.get(key) != rows[0].get(key) for row in rows)]
    return [[f"{key} {row.get(key, 'not given')}" for key in differ] for row in rows]


def _title(group: Group) -> tuple[Any, ...]:
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
    # The order decides between equal scores. It must not change: published archives have the
    # histories of the trials that were chosen in it.
    trials = sorted((_trial(members, versions) for members in cells.values()), key=_trial_order)
    trials = with_varied(trials)
    criterion = _measured(trials, rule(pieces[0].config), asked, pieces[0].config)
    results = choose(trials, criterion)
    if asked is None:  # clients with personal models use these
        results = [replace(r, model="personal") if "personal" in r.trial.models else r
                   for r in results]  # fmt: skip
    first = one_stored_run(results)
    passport, federation = first.manifest["passport"], recorded_federation(first)
    return Group(first.config, criterion, passport, federation, trials, results,
                 deployed=first.deployed)  # fmt: skip


def _measured(
    trials: Sequence[Trial], criterion: Criterion, asked: str | None, config: Config
) -> Criterion:
    """The criterion for a model that was evaluated: local models need not be (evaluate.local)."""
    alive = [trial for trial in trials if not trial.diverged]
    models = [m for m in MODELS if all(m in trial.models for trial in alive)]
    if criterion.model in models:
        return criterion
    where = f"{config.data.name}, {config.protocol}"
    if not models:
        raise BadInput(
            f"{where}: no test {trials[0].metric.title} was measured, which a report needs: run "
            'with evaluate.splits = ["valid", "test"] and a test part in data.split'
        )
    if asked is not None:
        raise BadInput(f"{where}: the {asked} model was not measured there, the {models[0]} one was"
                       " (evaluate.local = true measures local models)")  # fmt: skip
    return with_fields(criterion, model=models[0])


def _trial(members: Sequence[Piece], versions: Mapping[tuple[str, Variant], str]) -> Trial:
    runs = [m for m in members if isinstance(m, StoredRun)]
    seeds = {run.config.train.seed for run in runs}
    # A summary is not needed if all its runs are there.
    kept = [m.summary() for m in members if isinstance(m, Condensed)
            and not seeds.issuperset(b["seed"] for b in m.manifest["births"])]  # fmt: skip
    counted = [*seeds, *(each["seed"] for s in kept for each in s.provenances)]
    if len(set(counted)) < len(counted):
        raise BadInput(
            f"{members[0].config.method.label}, lr {members[0].config.train.lr:g} is there as "
            "a summary and again: its seeds cannot be separated; condense the runs themselves"
        )
    config, identity = members[0].config, members[0].identity
    version = versions.get((config.method.label, identity.variant), "")
    if kept:
        others = [Summary.of([run.history(with_state=False)]) for run in runs]
        summary = Summary.joined([*kept, *others])
        return Trial(config.method, config.train.lr, (), summary, identity, version, config=config)
    runs.sort(key=lambda run: run.config.train.seed)
    # Not kept, since a grid has thousands of histories; those of chosen runs are read again.
    summary = Summary.of([run.history(with_state=False) for run in runs])
    return Trial(config.method, config.train.lr, runs, summary, identity, version, config=config)


def _trial_order(trial: Trial) -> tuple[Any, ...]:
    names = list(METHODS)
    tag = str(type(trial.method).__struct_config__.tag)
    rank = names.index(tag) if tag in names else len(names)
    return (rank, trial.label, trial.lr, str(trial.knob), trial.describe())
