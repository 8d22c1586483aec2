"""Read stored runs, check that their files agree with each other, and `fairvar.load`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from fairvar.common.files import (
    MOST_TENSORS,
    Number,
    Record,
    Sha256,
    check,
    given_path,
    read_bytes,
    unpack_files,
)
from fairvar.common.tree import Tree
from fairvar.engine.history import History, sizes_of
from fairvar.engine.keys import Identity, fingerprint
from fairvar.engine.state import State, no_state
from fairvar.errors import BadInput, IntegrityError, shown
from fairvar.methods import METHODS, Method
from fairvar.models.weights import WEIGHT_FILES, read_tensors
from fairvar.runs import formats
from fairvar.runs.config import Config, parse_toml
from fairvar.runs.identity import recorded_identity, version_of
from fairvar.runs.own import OwnMethod, find_method, recorded_method
from fairvar.scores import ACCURACY, MISSING, UNDEFINED, recorded_metric

Text = Annotated[str, Meta(max_length=1000, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]
Digits = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z]{1,64}\Z")]  # becomes part of a path
FileName = Annotated[str, Meta(max_length=255, pattern=r"\A[^/\\\x00-\x1f\x7f]+\Z")]
ScoreName = Annotated[str, Meta(pattern=r"\A(train|valid|test)/(global|local|personal)\Z")]
Positive = Annotated[int, Meta(ge=1, le=2**62)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
SplitName = Literal["train", "valid", "test"]
S = TypeVar("S", bound="Stored")
T = TypeVar("T")


# -- records ---------------------------------------------------------------------------------------
class Provenance(Record, frozen=True, kw_only=True):
    """Where a run was computed, with which versions, for how long (`birth` in a manifest)."""

    fairvar: Text
    torch: Text
    device: Text
    dtype: Text
    seed: Number
    engine: Text
    seconds: Amount
    precision: Text = "full"
    captured: bool = False
    peak_megabytes: Amount | None = None
    together: Positive = 1
    refused: dict[Text, Number] = msgspec.field(default_factory=dict)
    weight_capped_rounds: Number = 0


class Normalisation(Record, frozen=True, kw_only=True):
    mean: list[float]
    sd: list[float]


class PartitionRecord(Record, frozen=True, kw_only=True):
    """How the samples were divided among the clients (`passport` in a manifest). If the data are at
    nodes, only their name and the number of clients are known."""

    dataset: Text | None = None
    clients: Positive | None = None
    sha256: Digits | None = None
    dataset_sha256: Digits | None = None
    provenance: Text | None = None
    sizes: list[Count] | None = None
    classes_by_client: list[Count] | None = None
    mean_total_variation: Share | None = None
    effective_classes: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    majority_share: Share | None = None
    attempts: Number | None = None
    moved: Number | None = None
    seed: Number | None = None
    holdout: Text | None = None
    split: list[Share] | None = None
    split_sizes: dict[SplitName, list[Count]] | None = None
    split_answers: dict[SplitName, list[Count]] | None = None  # of sequences, positions
    normalisation: Normalisation | None = None
    partition: dict[Text, Any] | None = None
    fraction: Share | None = None
    samples: Positive | None = None
    pool_samples: Positive | None = None
    special: list[Count] | None = None  # clients that are different by nature

    def __post_init__(self) -> None:
        tables = {"sizes": self.sizes, "classes_by_client": self.classes_by_client}
        for name in ("split_sizes", "split_answers"):
            tables |= {f"{name}.{k}": v for k, v in (getattr(self, name) or {}).items()}
        known = {name: len(table) for name, table in tables.items() if table is not None}
        if self.special and (self.clients is None or max(self.special) >= self.clients):
            raise ValueError("special names a client that does not exist")
        if self.clients is not None and set(known.values()) - {self.clients}:
            raise ValueError(f"it has {self.clients} clients, but {known}")
        if self.sizes is not None and self.split_sizes is not None:
            own = [self.split_sizes.get("train", [])]  # other splits come from a pool
            if self.holdout == "split":
                own = list(self.split_sizes.values())
            if [sum(parts) for parts in zip(*own, strict=True)] != self.sizes:
                raise ValueError("split_sizes do not add up to sizes")


class FederationRecord(PartitionRecord, frozen=True, kw_only=True):
    """federations/*.json: a partition with the training samples of each class at each client."""

    sha256: Digits
    class_counts: list[list[Count]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({len(row) for row in self.class_counts}) != 1 or not self.class_counts[0]:
            raise ValueError("class_counts is not a table")
        if self.clients not in (None, len(self.class_counts)):
            raise ValueError(f"class_counts has {len(self.class_counts)} rows")
        train = (self.split_answers or self.split_sizes or {}).get("train")
        if train is not None and train != [sum(row) for row in self.class_counts]:
            raise ValueError("class_counts do not add up to the clients' training samples")


class Deployed(Record, frozen=True, kw_only=True):
    """Facts about a deployed run, whose configuration may name data and a model that were not
    used."""

    nodes: Number  # that took part
    own_data: bool  # the nodes' files; otherwise parts of the data set of the configuration
    own_model: bool  # the app's model; otherwise that of the configuration
    model: str  # class or name of the model
    parameters: Number

    @property
    def where(self) -> str:
        return "1 node" if self.nodes == 1 else f"{self.nodes} nodes"


class MetricRecord(Record, frozen=True, kw_only=True):
    """The metric by which clients were scored, so that reports need not import its function."""

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,39}\Z")]
    higher_is_better: bool
    bounds: tuple[float, float] | None = None


class Manifest(Record, frozen=True, kw_only=True):
    """The fields of all manifests."""

    sha256: dict[FileName, Sha256]
    method: Annotated[str, Meta(max_length=1000)]  # a label of any form, also of a plugin
    partition: PartitionRecord = msgspec.field(name="passport")
    identity: Identity | UnsetType = UNSET  # earlier versions did not record it
    deployed: Deployed | None = None
    metric: MetricRecord | None = None  # None: the accuracy, or the loss in earlier versions
    own_method: OwnMethod | None = None  # of a method that is not part of fairvar


class ScoresRecord(Record, frozen=True, kw_only=True):
    """The main numbers of one split and model after the last round; NaN where there are none."""

    mean: float
    variance_over_clients: float
    noise_floor: float
    corrected_variance: float
    worst_10_percent: float
    smallest: float


class RunManifest(Manifest, frozen=True, kw_only=True):
    name: Text
    fingerprint: Sha256
    protocol: Text
    starts_from: Text
    rounds: Number
    diverged_at: Number | None
    exchanges_per_client: Number
    bytes_down_per_client: Number
    bytes_up_per_client: Number
    result: dict[ScoreName, ScoresRecord]
    provenance: Provenance = msgspec.field(name="birth")
    condensed: bool = False
    group: tuple[Text, ...] = ()  # the names of the runs that it trained with, itself among them


# -- folders ---------------------------------------------------------------------------------------
def read_manifest(folder: Path, kind: type[Manifest] = RunManifest) -> dict[str, Any] | None:
    """The manifest of a finished run; None if it is unfinished."""
    return formats.read_record(folder / formats.MANIFEST, kind, f"delete {folder} and run again")


def verify(folder: Path) -> dict[str, Any] | None:
    """The manifest, after checking every file against it."""
    manifest = read_manifest(folder)
    if manifest is not None:
        for name in manifest["sha256"]:
            formats.read_sealed(folder, manifest, name)
    return manifest


@dataclass(frozen=True)
class Stored:
    """A folder with a configuration and a manifest that agree."""

    folder: Path
    config: Config
    manifest: Mapping[str, Any]
    kind: ClassVar[type[Manifest]]

    @classmethod
    def open(cls: type[S], folder: Path) -> S:
        manifest = read_manifest(folder, cls.kind)
        if manifest is None:
            raise IntegrityError(f"{folder} holds no finished run (it has no manifest)")
        path = folder / "config.toml"
        record = check(manifest, cls.kind)
        config = stored_config(path, formats.read_sealed(folder, manifest, path.name), record)
        found = cls(folder, config, manifest)
        found.check_manifest(record)
        _check_same_data(folder, record.partition, config)
        return found

    def check_manifest(self, manifest: Any) -> None:
        """Raise unless the manifest, of type `kind`, belongs to the configuration."""

    @cached_property
    def identity(self) -> Identity:
        return recorded_identity(self.manifest, self.config)

    @property
    def deployed(self) -> Deployed | None:
        """Facts about a run on real nodes; None for a simulated one."""
        partition, facts = self.manifest["passport"], self.manifest
        provenance = facts.get("birth") or facts["births"][0]
        if "deployed" not in facts and str(provenance.get("engine")).startswith("flower"):
            return Deployed(  # stored before this was recorded
                nodes=partition.get("clients", 0), own_data="sha256" not in partition,
                own_model=True, model="a model that was not recorded", parameters=0,
            )  # fmt: skip
        return msgspec.convert(facts.get("deployed"), Deployed | None)


class StoredRun(Stored):
    """A finished run on disk; history and state are read on demand."""

    kind = RunManifest

    def check_manifest(self, manifest: RunManifest) -> None:
        found, config, rounds = self.identity, self.config, self.config.train.rounds
        formats.agree(
            f"the run in {self.folder}",
            fingerprint=(manifest.fingerprint, fingerprint(config)),
            settings=(found.settings, fingerprint(config)),
            data=(found.data, manifest.partition.dataset_sha256),
            version=(found.version, min(max(found.version, 1), version_of(config.method))),
            name=(manifest.name, config.name),
            method=(manifest.method, config.method.label),
            protocol=(manifest.protocol, config.protocol),
            starts_from=(manifest.starts_from, config.model.weights_sha256 or "scratch"),
            seed=(manifest.provenance.seed, config.train.seed),
            rounds=(manifest.rounds, min(manifest.rounds, rounds)),
            diverged_at=(manifest.diverged_at or 0, min(manifest.diverged_at or 0, rounds)),
        )

    def history(self, with_state: bool = True) -> History:
        """`with_state` False: with an empty state, so that the final model is not read."""
        state = self.state() if with_state else no_state(int(self.manifest["rounds"]))
        method, facts = self.config.method, self.manifest
        found = self._read(
            "history.safetensors",
            lambda content: formats.unpack_history(content, state, method, facts),
        )
        _check_same_history(self, found)
        return found

    def state(self) -> State:
        """The final state, which condensed runs do not have."""
        if self.manifest.get("condensed"):
            return no_state(int(self.manifest["rounds"]))
        state = self._read("state.safetensors", formats.unpack_state)
        if not 0 <= state.round <= self.config.train.rounds:
            raise IntegrityError(f"{self.folder}: its state is of round {state.round}")
        return state

    def _read(self, name: str, unpack: Callable[[bytes], T]) -> T:
        content = formats.read_sealed(self.folder, self.manifest, name)
        try:
            return unpack(content)
        except IntegrityError as error:
            raise IntegrityError(f"{self.folder / name}: {error}") from None


def stored_config(path: Path, content: bytes, manifest: Manifest) -> Config:
    """A stored configuration, which must have all sections. A method of the user's that is not
    loaded is replaced by a `Recorded`."""
    try:
        values = parse_toml(content.decode(), str(path))
        lacking = [field for field in Config.__struct_fields__ if field not in values]
        if lacking:
            raise BadInput(f"it lacks {', '.join(lacking)}")
        section, facts = values["method"], manifest.own_method
        if facts is None or not isinstance(section, dict) or find_method(str(section.get("name"))):
            return Config.from_dict(values)
        known = manifest.identity if isinstance(manifest.identity, Identity) else None
        method = recorded_method(section, manifest.method, facts, known.version if known else 1)
        rest = Config.from_dict({key: v for key, v in values.items() if key != "method"})
        return replace(rest, method=method)
    except ValueError as error:  # BadInput, too
        raise BadInput(f"{path} cannot be used: {error}") from None


def _check_same_data(folder: Path, partition: PartitionRecord, config: Config) -> None:
    """Raise unless the recorded facts about the partition agree with the configuration."""
    expected = msgspec.to_builtins(config.partition)
    pairs = {
        "clients": (partition.clients, config.data.clients),
        "dataset": (partition.dataset, config.data.name),
        "seed of the partition": (partition.seed, config.data.seed),
        "partition": (expected | (partition.partition or {}), expected),
        "fraction": (partition.fraction, config.data.fraction),
        "samples": (partition.samples, config.data.samples),
    }
    formats.agree(folder, **{fact: pair for fact, pair in pairs.items() if pair[0] is not None})


def _check_same_history(run: StoredRun, history: History) -> None:
    """Raise unless the history belongs to this run and is complete."""
    facts, rounds = run.manifest, run.config.train.rounds
    last = int(history.evaluated[-1]) if len(history.evaluated) else 0
    diverged = facts["diverged_at"]  # the last evaluation is missing if the run diverged
    whole = rounds if diverged is None else min(last, diverged, rounds - 1)
    samples = sizes_of(history)
    recorded = facts["passport"]
    sizes = recorded.get("split_answers") or recorded.get("split_sizes") or samples
    if run.deployed is not None:  # clients that never reported their sizes have 0
        if recorded.get("split_answers"):  # of sequences, those in training are counted
            sizes = {**sizes, "train": recorded["split_sizes"]["train"]}
        sizes = {
            split: [n and one for n, one in zip(counts, sizes.get(split) or counts, strict=False)]
            for split, counts in samples.items()
        }
    counters = (history.exchanges, history.bytes_down, history.bytes_up)
    named = [f"{what}_per_client" for what in ("exchanges", "bytes_down", "bytes_up")]
    formats.agree(
        f"the history of the run in {run.folder}",
        clients=(history.clients, run.config.data.clients),
        samples=(samples, sizes),
        last_round=(last, whole),
        traffic=(counters, tuple(facts[name] for name in named)),
    )


def recorded_federation(run: StoredRun) -> dict[str, Any] | None:
    """The partition of a stored run with its class counts, if it is stored in the same folder."""
    sha = str(run.manifest["passport"].get("sha256", "unknown"))
    try:
        path = formats.inside(run.folder.parent / "federations", f"{sha[:16]}.json")
    except IntegrityError as error:
        raise IntegrityError(f"the manifest of {run.folder} names a partition: {error}") from None
    found = formats.read_record(path, FederationRecord, "delete it")
    if found is not None:
        facts, same = run.manifest["passport"], ("sha256", "clients", "sizes", "classes_by_client")
        formats.agree(path, **{fact: (found.get(fact), facts.get(fact)) for fact in same})
    return found


def final_scores(history: History) -> dict[str, dict[str, float]]:
    """The main fairness numbers of every evaluated split and model after the last round, without
    those that no client of a deployed run reported."""
    found: dict[str, dict[str, float]] = {}
    for (split, model), table in history.score.items():
        if len(history.evaluated) and bool(table[-1].isfinite().any()):
            scores = history.fairness(split, model, resamples=0)  # intervals are not stored
            found[f"{split}/{model}"] = {
                name: float(scores[name]) for name in ScoresRecord.__struct_fields__
            }
    return found


def score_rows(manifest: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The same numbers of a stored run as text: heads, and a row for each split and model."""
    metric = recorded_metric(manifest) or ACCURACY
    columns = {"mean": (metric.title + metric.unit, 2), "variance_over_clients": ("variance", 3),
               "noise_floor": ("noise floor", 3), "corrected_variance": ("corrected", 3),
               "worst_10_percent": ("worst 10 %", 2)}  # fmt: skip

    def text(name: str, value: float) -> str:
        if name in ("noise_floor", "corrected_variance") and not metric.has_noise_floor:
            return MISSING
        form = f"z.{columns[name][1]}f" if metric.factor == 100 else ".4g"
        return f"{metric.factor * value:{form}}" if math.isfinite(value) else UNDEFINED

    rows = [[name, *(text(key, scores[key]) for key in columns)]
            for name, scores in sorted(manifest["result"].items())]  # fmt: skip
    return [head for head, _ in columns.values()], rows


# -- `fairvar.load` --------------------------------------------------------------------------------
SEALED = b"{\n"  # how files of `History.save` and `State.save` begin


def load(path: str | Path) -> History | State | Tree:
    """Read what fairvar wrote; every file is checked against the SHA-256 in it or in the manifest.

    - the file of `history.save`: that History, bit by bit;
    - the file of `state.save`: that State;
    - the folder of a run that `fairvar.run` or `fairvar.sweep` stored: its History, at evaluated
      rounds;
    - .safetensors, .pth or .pt: a model as a state dict for `module.load_state_dict`.
    """
    path = given_path(path)
    if path.is_dir():
        return _load_run(path)
    try:
        content = read_bytes(path, MOST_TENSORS)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    if path.name in (formats.MANIFEST, "history.safetensors") and formats.is_complete(path.parent):
        raise BadInput(f"{path} is a part of a run; give its folder, {path.parent}")
    if not content.startswith(SEALED):
        if path.suffix not in WEIGHT_FILES:
            raise BadInput(f"{path.name} is no file of History.save or State.save; weight "
                           f"files end in {', '.join(WEIGHT_FILES)}")  # fmt: skip
        tensors = read_tensors(path)
        stored = tensors.keys() >= {"round", "mean_loss"}  # the state of a stored run
        return formats.unpack_state(content) if stored else tensors
    found = unpack_files(content)
    try:
        if "history.safetensors" in found:
            return formats.unpack_saved(found["history.safetensors"], _method_of)
        if "state.safetensors" in found:
            return formats.unpack_state(found["state.safetensors"])
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error}") from None
    raise IntegrityError(f"{path} is damaged, or no file of History.save or State.save")


def _load_run(folder: Path) -> History:
    if formats.is_complete(folder):
        return StoredRun.open(folder).history()
    runs = sum(formats.is_complete(inner) for inner in folder.iterdir() if inner.is_dir())
    if runs:
        raise BadInput(f"{folder} holds {runs} runs: give the folder of one of them, or compare "
                       "them all with fairvar.compare")  # fmt: skip
    raise BadInput(f"{folder} holds no finished run; give the folder of one, or a file")


def _method_of(saved: formats.Saved) -> Method:
    """The method of a saved history. Its class must be known here: files hold no code."""
    tag = saved.method.get("name")
    kinds = {kind.__struct_config__.tag: kind for kind in _subclasses(Method)} | METHODS
    if tag not in kinds:
        raise BadInput(
            f"the history was made by {shown(saved.kind)}, which is not known here: import the "
            "module that defines it, or run its cell, and load again"
        )
    try:
        return msgspec.convert(saved.method, kinds[tag])
    except (msgspec.ValidationError, BadInput) as error:
        made = f"the history was made by another version of {shown(saved.kind)}"
        raise BadInput(f"{made}: {error}") from None


def _subclasses(kind: type[Method]) -> Iterator[type[Method]]:
    """Methods need not be registered to train."""
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)
