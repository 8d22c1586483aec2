"""Configurations with all their seeds (`Trial`), those chosen for each method on validation data
(`Result`), and all runs on one federation (`Group`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isnan
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from msgspec import to_builtins

from fairvar.data import Dirichlet
from fairvar.engine.history import History
from fairvar.engine.keys import Identity, swept
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.metrics import Fairness, mean_and_variance
from fairvar.runs.config import Config, parse_toml
from fairvar.runs.formats import read_sealed
from fairvar.runs.select import Criterion, Curve, Validation, best
from fairvar.runs.stored import Deployed, StoredRun
from fairvar.scores import ACCURACY, Metric


@dataclass(frozen=True)
class Summary:
    """The part of a trial that choosing needs, without scores of single clients."""

    rounds: Sequence[int]  # evaluated rounds; none if a seed diverged
    diverged: bool
    valid: Mapping[str, Curve]  # by model
    last: Mapping[str, tuple[float, float]]  # by model: test mean and variance after the last round
    provenances: Sequence[Mapping[str, Any]]  # provenance of each seed's run
    metric: Metric = ACCURACY

    @staticmethod
    def of(histories: Sequence[History]) -> Summary:
        provenances = [history.provenance for history in histories]
        first = histories[0]
        if any(history.diverged_at is not None for history in histories):
            return Summary((), True, {}, {}, provenances, first.metric)
        curves = {
            (split, model): Curve.of(np.stack([h.score[split, model].numpy() for h in histories]))
            for split, model in first.score
            if split in ("valid", "test") and all((split, model) in h.score for h in histories)
        }
        return Summary(
            first.evaluated.tolist(),
            False,
            {model: curve for (split, model), curve in curves.items() if split == "valid"},
            {
                model: (float(curve.mean[-1]), float(curve.variance[-1]))
                for (split, model), curve in curves.items()
                if split == "test" and len(curve.mean)
            },
            provenances,
            first.metric,
        )

    @staticmethod
    def joined(parts: Sequence[Summary]) -> Summary:
        """One summary from those of different seeds, in which every seed has the same weight."""
        first, counts = parts[0], [len(part.provenances) for part in parts]
        if len(parts) == 1:
            return first  # the same bits
        provenances = [each for part in parts for each in part.provenances]
        if any(part.diverged for part in parts):
            return Summary((), True, {}, {}, provenances, first.metric)
        if any(list(part.rounds) != list(first.rounds) for part in parts):
            raise BadInput("seeds of one configuration were evaluated after different rounds")

        def mean(numbers: Iterable[Any]) -> Any:
            return np.average(list(numbers), axis=0, weights=counts)

        valid = {
            m: Curve(mean(p.valid[m].mean for p in parts), mean(p.valid[m].variance for p in parts))
            for m in first.valid
            if all(m in p.valid for p in parts)
        }
        tested = [m for m in first.last if all(m in p.last for p in parts)]
        last = {m: tuple(mean(p.last[m] for p in parts).tolist()) for m in tested}
        return Summary(first.rounds, False, valid, last, provenances, first.metric)


@dataclass(frozen=True, eq=False)
class Trial:
    """One configuration, trained with every seed. `source`: its runs in memory or on disk, which
    are read on first use; empty if only the summary was kept."""

    method: Method
    lr: float  # NaN: not known
    source: Sequence[History] | Sequence[StoredRun]
    kept: Summary | None = None
    identity: Identity | None = None  # of one of its stored runs
    version: str = ""  # set if runs of several versions of the code have the same label
    name: str = ""  # instead of the method's label
    config: Config | None = None  # of one of its stored runs
    varied: Mapping[str, Any] = field(default_factory=dict)  # other options of the method

    @cached_property
    def histories(self) -> Sequence[History]:
        if not self.source:
            raise BadInput(
                f"only a summary was kept of {self.label}, {self.describe()}; report with the "
                "options that the runs were condensed with, or condense the runs again"
            )
        return [
            run.history(with_state=False) if isinstance(run, StoredRun) else run
            for run in self.source
        ]

    @cached_property
    def summary(self) -> Summary:
        return self.kept or Summary.of(self.histories)

    @property
    def label(self) -> str:
        label = self.name or self.method.label
        return f"{label} [{self.version}]" if self.version else label

    @property
    def knob(self) -> tuple[str, Any] | None:
        """The method's fairness hyper-parameter and its value."""
        name = self.method.fairness_knob
        return None if name is None else (name, getattr(self.method, name))

    @property
    def diverged(self) -> bool:
        return self.summary.diverged

    @property
    def seeds(self) -> list[int]:
        return [int(each["seed"]) for each in self.summary.provenances]

    @property
    def metric(self) -> Metric:
        """The metric by which clients were scored."""
        return self.summary.metric

    @property
    def models(self) -> list[str]:
        """The models whose test scores were measured; none if a seed diverged."""
        return list(self.summary.last)

    def reported(self, model: str) -> str:
        """The model that this trial is chosen and compared by where others are by `model`: the
        personal ones, if the method has such, since its clients use these."""
        return model if self.method.personal is None else self.method.reported_model

    def validated(self, model: str) -> bool:
        """Whether any client has validation data for this model."""
        curve = self.summary.valid.get(model)
        return curve is not None and bool(np.isfinite(curve.mean).any())

    def validation(self, model: str) -> Validation:
        """What selection may use: validation data only."""
        strength = self.knob[1] if self.knob and isinstance(self.knob[1], float) else 0.0
        known = self.summary
        curve = None if known.diverged else known.valid[model]
        if curve is not None and not self.metric.higher_is_better:
            curve = replace(curve, mean=-curve.mean)
        return Validation(known.rounds, curve, len(known.provenances), strength)

    def scores(self, model: str) -> Float64[np.ndarray, "seeds rounds n"]:
        """Test score of every client at the evaluated rounds."""
        return np.stack([h.score["test", model].numpy() for h in self.histories])

    def test(self, model: str, at: int, resamples: int = 0) -> list[Fairness]:
        """Test fairness of every seed at one evaluated round; `resamples`: for intervals."""
        return [h.fairness("test", model, at, resamples) for h in self.histories]

    def describe(self, at: int | None = None) -> str:
        parts = [] if isnan(self.lr) else [f"lr {self.lr:g}"]
        if self.knob is not None:
            parts.append(named(*self.knob))
        parts += [named(key, value) for key, value in self.varied.items()]
        if self.config is not None:
            parts += [named(key, value) for key, value in swept(self.config).items()]
        if at is not None:
            parts.append(f"round {self.summary.rounds[at]}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Result:
    """The chosen trial of one method. `at` is None if all its configurations diverged."""

    trial: Trial
    at: int | None
    configurations: int
    model: str = ""  # reported by this one instead of the group's

    @property
    def label(self) -> str:
        return self.trial.label

    def reported(self, model: str) -> str:
        """The model that this result is about where others are about `model`."""
        return self.model or model

    def seed_scores(self, model: str) -> Float64[np.ndarray, "seeds n"]:
        """Test scores by (seed, client) at the chosen round."""
        return self.trial.scores(model)[:, self.at]

    def window(
        self, model: str
    ) -> tuple[Float64[np.ndarray, " seeds"], Float64[np.ndarray, " seeds"]]:
        """Test mean and variance over clients, averaged over the evaluated rounds that lie within
        an eighth of the run from the chosen one."""
        rounds = np.array(self.trial.summary.rounds)
        assert self.at is not None
        near = np.abs(rounds - rounds[self.at]) <= rounds[-1] / 8
        means, variances = mean_and_variance(self.trial.scores(model))
        return means[:, near].mean(1), variances[:, near].mean(1)

    def late(self, model: str) -> Float64[np.ndarray, "rounds seeds n"]:
        """Test scores in the last quarter of the rounds: the same rounds for every method."""
        evaluated = self.trial.histories[0].evaluated.numpy()
        late = self.trial.scores(model)[:, evaluated > 0.75 * evaluated[-1]]
        return np.ascontiguousarray(late.swapaxes(0, 1))

    def samples(self) -> Int64[np.ndarray, " n"]:
        return self.trial.histories[0].samples["test"].numpy()


def named(key: str, value: Any) -> str:
    """A setting in a table: `strength 0.1`, `batch_size 32`, `model avgcnn`; of a section,
    `schedule cosine, warm_up 10`."""
    section, _, last = key.rpartition(".")
    if isinstance(value, Mapping):
        parts = [each if name == "name" else named(name, each) for name, each in value.items()]
        return f"{last} {', '.join(parts) or 'default'}"
    text = (
        f"{value:g}" if isinstance(value, float) else str("not given" if value is None else value)
    )
    return f"{section if last == 'name' else last} {text}"


def with_varied(trials: Sequence[Trial]) -> list[Trial]:
    """Each trial with the options in which the configurations of its method differ, apart from the
    fairness hyper-parameter, which is always shown."""
    options = [to_builtins(trial.method, builtin_types=()) for trial in trials]
    seen: dict[tuple[str, str], list[Any]] = {}
    for trial, each in zip(trials, options, strict=True):
        for key, value in each.items():
            known = seen.setdefault((trial.label, key), [])
            known += [value] if value not in known else []
    return [
        replace(t, varied={
            key: value for key, value in each.items()
            if key != t.method.fairness_knob and len(seen[t.label, key]) > 1
        })
        for t, each in zip(trials, options, strict=True)
    ]  # fmt: skip


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
    apart: Sequence[str] = ()  # other settings that tell it from groups with the same name
    deployed: Deployed | None = None  # None: simulated

    @property
    def metric(self) -> Metric:
        return self.trials[0].metric

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
        """The name of the data set; of own data at nodes, their number."""
        if self.deployed is not None and self.deployed.own_data:
            return f"own data of {self.deployed.where}"
        return self.config.data.name

    @property
    def kind(self) -> list[str]:
        """What distinguishes federations of one data set and alpha, if it is not the default."""
        deployed = ["deployed"] if self.deployed is not None and not self.own_data else []
        protocol = [self.config.protocol] * (self.config.protocol != "boxes")
        return deployed + protocol + self.varied

    @property
    def varied(self) -> list[str]:
        """Settings that distinguish federations and are not part of their names anyway."""
        known = ("data.name", "data.clients", "partition.alpha", "protocol")
        varied = swept(self.config, apart=True).items()
        return [named(key, value) for key, value in varied if key not in known] + list(self.apart)

    @property
    def model(self) -> str:
        if self.deployed is None:
            several = {"model", "model.name"}.intersection(self.config.select.over or ())
            return "several models" if several else self.config.model.name
        size = self.deployed.parameters
        return self.deployed.model + (f" ({size:,} parameters)" if size else "")

    @property
    def validated(self) -> bool:
        """Whether there were validation data to choose by."""
        return validated(self.trials, self.criterion.model)

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration of one run as it was stored, without what a deployed run did not use.
        Options that fairvar got since then are not added."""
        run = one_stored_run(self.results)
        text = read_sealed(run.folder, run.manifest, "config.toml").decode()
        values = parse_toml(text, "config.toml")
        if self.own_data:
            del values["partition"]
            values["data"] = {k: values["data"][k] for k in ("name", "clients", "seed", "split")}
        if self.deployed is not None and self.deployed.own_model:
            del values["model"]["name"]
        return values

    @property
    def provenances(self) -> list[Mapping[str, Any]]:
        """The provenance of every run, also of those of which only a summary was kept."""
        return [each for trial in self.trials for each in trial.summary.provenances]


def one_stored_run(results: Sequence[Result]) -> StoredRun:
    """One of the chosen runs, so that a report from condensed runs is the same."""
    runs = (run for r in results for run in r.trial.source if isinstance(run, StoredRun))
    for run in runs:
        return run
    raise BadInput("only summaries were kept of what is chosen here; use the options that the runs "
                   "were condensed with")  # fmt: skip


def choose(trials: Iterable[Trial], criterion: Criterion) -> list[Result]:
    """The best configuration of each method on validation data, in the order of the trials.

    Without validation data each method may have only one configuration; its last round is used."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.label, []).append(trial)
    blind = not validated([t for group in groups.values() for t in group], criterion.model)
    results = []
    for label, group in groups.items():
        if blind:
            results.append(_only(label, group))
            continue
        choice = best([t.validation(t.reported(criterion.model)) for t in group], criterion)
        failed = choice.score == float("-inf")
        results.append(Result(group[choice.number], None if failed else choice.at, len(group)))
    return results


def validated(trials: Sequence[Trial], model: str) -> bool:
    """Whether there are validation data to choose by; also true if every trial diverged."""
    return all(t.validated(t.reported(model)) for t in trials if not t.diverged)


def _only(label: str, group: Sequence[Trial]) -> Result:
    """The single configuration of a method, after its last round."""
    if len(group) > 1:
        raise BadInput(
            f"no validation data to choose among the {len(group)} configurations of {label}: run "
            'with a validation part in data.split and evaluate.splits = ["valid", "test"], or one '
            "configuration of each method"
        )
    (trial,) = group
    return Result(trial, None if trial.diverged else len(trial.summary.rounds) - 1, 1)
