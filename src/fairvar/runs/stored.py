"""Read stored runs, and check that their files agree with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from fairvar.engine.history import History
from fairvar.engine.state import State, no_state
from fairvar.errors import BadInput, IntegrityError
from fairvar.runs.config import Config, parse_toml
from fairvar.runs.identity import Identity, fingerprint, recorded_identity, version_of
from fairvar.runs.records import FederationRecord, Partition, RunManifest, agree, check
from fairvar.runs.serialize import unpack_history, unpack_state
from fairvar.runs.store import inside, read_manifest, read_record, read_sealed

SCORES = ("mean", "variance_over_clients", "noise_floor", "corrected_variance",
          "worst_10_percent", "smallest")  # fmt: skip
T = TypeVar("T")


class Deployed(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a deployed run, whose configuration may name data and a model that were not
    used."""

    nodes: Annotated[int, msgspec.Meta(ge=0)]  # that took part
    own_data: bool  # the nodes' files; otherwise parts of the data set of the configuration
    own_model: bool  # the app's model; otherwise that of the configuration
    model: str  # class or name of the model
    parameters: Annotated[int, msgspec.Meta(ge=0)]

    @property
    def where(self) -> str:
        return "1 node" if self.nodes == 1 else f"{self.nodes} nodes"

    @staticmethod
    def of(manifest: Mapping[str, Any], where: Path) -> Deployed | None:
        """Of the manifest of a run or summary; None for a simulated one."""
        passport, birth = manifest["passport"], manifest.get("birth") or manifest["births"][0]
        if "deployed" not in manifest and str(birth.get("engine")).startswith("flower"):
            return Deployed(  # stored before this was recorded
                nodes=passport.get("clients", 0), own_data="sha256" not in passport, own_model=True,
                model="a model that was not recorded", parameters=0,
            )  # fmt: skip
        try:
            return msgspec.convert(manifest.get("deployed"), Deployed | None)
        except msgspec.ValidationError as error:
            raise IntegrityError(f"the manifest of {where}: deployed: {error}") from None


@dataclass(frozen=True)
class StoredRun:
    """A finished run on disk; history and state are read on demand."""

    folder: Path
    config: Config
    manifest: Mapping[str, Any]

    @staticmethod
    def open(folder: Path) -> StoredRun:
        manifest = read_manifest(folder)
        if manifest is None:
            raise IntegrityError(f"{folder} holds no finished run (it has no manifest)")
        text = read_sealed(folder, manifest, "config.toml")
        config = stored_config(folder / "config.toml", text)
        run = StoredRun(folder, config, manifest)
        _check_records(run, check(manifest, RunManifest))
        return run

    @cached_property
    def identity(self) -> Identity:
        try:
            return recorded_identity(self.manifest, self.config)
        except IntegrityError as error:
            raise IntegrityError(f"the manifest of {self.folder}: {error}") from None

    def history(self, with_state: bool = True) -> History:
        """`with_state` False: with an empty state, so that the final model is not read."""
        state = self.state() if with_state else no_state(int(self.manifest["rounds"]))
        found = self._read(
            "history.safetensors",
            lambda content: unpack_history(content, state, self.config.method, self.manifest),
        )
        _check_same_history(self, found)
        return found

    def state(self) -> State:
        """The final state, which condensed runs do not have."""
        if self.manifest.get("condensed"):
            return no_state(int(self.manifest["rounds"]))
        state = self._read("state.safetensors", unpack_state)
        if not 0 <= state.round <= self.config.train.rounds:
            raise IntegrityError(f"{self.folder}: its state is of round {state.round}")
        return state

    def _read(self, name: str, unpack: Callable[[bytes], T]) -> T:
        content = read_sealed(self.folder, self.manifest, name)
        try:
            return unpack(content)
        except IntegrityError as error:
            raise IntegrityError(f"{self.folder / name}: {error}") from None


def stored_config(path: Path, content: bytes) -> Config:
    """A stored configuration, which must have all sections."""
    try:
        values = parse_toml(content.decode(), str(path))
        lacking = [field for field in Config.__struct_fields__ if field not in values]
        if lacking:
            raise BadInput(f"it lacks {', '.join(lacking)}")
        return Config.from_dict(values)
    except ValueError as error:  # BadInput, too: a method may need its plugin
        raise BadInput(f"{path} cannot be used: {error}") from None


def _check_records(run: StoredRun, manifest: RunManifest) -> None:
    """Raise unless manifest and identity belong to the configuration."""
    found, config, rounds = run.identity, run.config, run.config.train.rounds
    agree(
        f"the run in {run.folder}",
        fingerprint=(manifest.fingerprint, fingerprint(config)),
        settings=(found.settings, fingerprint(config)),
        data=(found.data, manifest.passport.dataset_sha256),
        version=(found.version, min(max(found.version, 1), version_of(config.method))),
        name=(manifest.name, config.name),
        method=(manifest.method, config.method.label),
        protocol=(manifest.protocol, config.protocol),
        starts_from=(manifest.starts_from, config.model.weights_sha256 or "scratch"),
        seed=(manifest.birth.seed, config.train.seed),
        rounds=(manifest.rounds, min(manifest.rounds, rounds)),
        diverged_at=(manifest.diverged_at or 0, min(manifest.diverged_at or 0, rounds)),
    )
    check_same_data(run.folder, manifest.passport, config)


def check_same_data(folder: Path, passport: Partition, config: Config) -> None:
    """Raise unless the partition is that of the configuration, as far as it was recorded."""
    asked = msgspec.to_builtins(config.partition)
    pairs = {
        "clients": (passport.clients, config.data.clients),
        "dataset": (passport.dataset, config.data.name),
        "seed of the partition": (passport.seed, config.data.seed),
        "partition": (asked | (passport.partition or {}), asked),
        "fraction": (passport.fraction, config.data.fraction),
        "samples": (passport.samples, config.data.samples),
    }
    agree(folder, **{fact: pair for fact, pair in pairs.items() if pair[0] is not None})


def _where_reported(reported: Sequence[int], known: Sequence[int] | None) -> list[int]:
    return [size and one for size, one in zip(reported, known or reported, strict=False)]


def _check_same_history(run: StoredRun, history: History) -> None:
    """Raise unless the history belongs to this run and is complete."""
    facts, rounds = run.manifest, run.config.train.rounds
    last = int(history.evaluated[-1]) if len(history.evaluated) else 0
    diverged = facts["diverged_at"]  # the last evaluation is missing if the run diverged
    whole = rounds if diverged is None else min(last, diverged, rounds - 1)
    samples = {split: counts.tolist() for split, counts in history.samples.items()}
    sizes = facts["passport"].get("split_sizes") or samples
    if Deployed.of(facts, run.folder) is not None:  # clients that never reported their sizes have 0
        sizes = {
            split: _where_reported(counts, sizes.get(split)) for split, counts in samples.items()
        }
    counters = (history.exchanges, history.bytes_down, history.bytes_up)
    named = [f"{what}_per_client" for what in ("exchanges", "bytes_down", "bytes_up")]
    agree(
        f"the history of the run in {run.folder}",
        clients=(history.loss.shape[1], run.config.data.clients),
        samples=(samples, sizes),
        last_round=(last, whole),
        traffic=(counters, tuple(facts[name] for name in named)),
    )


def recorded_federation(run: StoredRun) -> dict[str, Any] | None:
    """The partition of a stored run with its class counts, if it is stored in the same folder."""
    sha = str(run.manifest["passport"].get("sha256", "unknown"))
    try:
        path = inside(run.folder.parent / "federations", f"{sha[:16]}.json")
    except IntegrityError as error:
        raise IntegrityError(f"the manifest of {run.folder} names a partition: {error}") from None
    found = read_record(path, FederationRecord, "delete it")
    if found is not None:
        facts, same = run.manifest["passport"], ("sha256", "clients", "sizes", "classes_by_client")
        agree(path, **{fact: (found.get(fact), facts.get(fact)) for fact in same})
    return found


def final_scores(history: History) -> dict[str, dict[str, float]]:
    """The main fairness numbers of every evaluated split and model after the last round, without
    those that no client of a deployed run reported."""
    found: dict[str, dict[str, float]] = {}
    for (split, model), table in history.accuracy.items():
        if len(history.evaluated) and bool(table[-1].isfinite().any()):
            scores = history.fairness(split, model)
            found[f"{split}/{model}"] = {name: float(scores[name]) for name in SCORES}
    return found
