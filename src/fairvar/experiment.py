"""From a `Config` to a stored run: compute what is missing, continue what was interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
from filelock import Timeout
from jaxtyping import Int64
from torch import nn

from fairvar.archive import (
    pack_checkpoint,
    pack_history,
    pack_state,
    unpack_checkpoint,
    unpack_history,
    unpack_state,
)
from fairvar.config import Config, parse_toml
from fairvar.data import load_federation
from fairvar.engine.state import DoesNotFit, State, no_state
from fairvar.engine.train import Checkpoint, run_rounds
from fairvar.errors import BadInput, FairvarError, IntegrityError, RunFailed
from fairvar.federation import Federation
from fairvar.history import History
from fairvar.identity import (
    RECORD,
    Identity,
    checkpoint_key,
    data_sha256,
    identity_of,
    recorded_identity,
    version_of,
)
from fairvar.models import build, load_weights
from fairvar.records import FederationRecord, Partition, RunManifest, agree, check
from fairvar.store import (
    LOCKS,
    MANIFEST,
    drop_checkpoints,
    inside,
    is_complete,
    lock_of,
    no_link,
    open_seal,
    read_checkpoints,
    read_manifest,
    read_record,
    read_sealed,
    save_files,
    seal,
    with_manifest,
    write_bytes,
    write_checkpoint,
)

SCORES = ("mean", "variance_over_clients", "noise_floor", "corrected_variance",
          "worst_10_percent", "smallest")  # fmt: skip
SECONDS_BETWEEN_CHECKPOINTS = 10.0
TIME_FOR_CHECKPOINTS = 0.05  # at most this share of a computation
RUN_FILES = ("config.toml", "history.safetensors", "state.safetensors")  # and the manifest
T = TypeVar("T")


class Interrupted(FairvarError):
    """Someone asked to stop; the same command continues."""

    exit_code = 130


@dataclass(frozen=True)
class Watch:
    """How a long computation talks to whoever started it."""

    progress: Callable[[int, int], None] = lambda done, total: None
    stopping: Callable[[], bool] = lambda: False
    save_every: int | None = None  # rounds; besides, every ten seconds


class Deployed(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run that was deployed: its configuration may tell of data and a model that
    were not used."""

    nodes: Annotated[int, msgspec.Meta(ge=0)]  # that took part
    own_data: bool  # the nodes' own files; else parts of the data set that the configuration names
    own_model: bool  # the app's; else the one that the configuration names
    model: str  # its class or name
    parameters: Annotated[int, msgspec.Meta(ge=0)]

    @property
    def where(self) -> str:
        return "1 node" if self.nodes == 1 else f"{self.nodes} nodes"

    @staticmethod
    def of(manifest: Mapping[str, Any], where: Path) -> Deployed | None:
        """From the manifest of a run or summary; None for a simulated one."""
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


def run_folder(config: Config, out: Path) -> Path:
    """Of the run that this configuration means with the data and the code that are here now."""
    return out / identity_of(config).name


def missing(cells: Sequence[Config], out: Path) -> list[Config]:
    return [cell for cell in cells if not is_complete(run_folder(cell, out))]


def federation_of(config: Config) -> Federation:
    return _federation(config.data, config.partition, data_sha256(config.data))


@lru_cache(maxsize=4)
def _federation(data: Any, partition: Any, sha256: str | None) -> Federation:
    found = load_federation(
        data.name,
        data.clients,
        partition,
        data.seed,
        split=data.split,
        holdout=data.holdout,
        pool_samples=data.pool_samples,
        fraction=data.fraction,
        samples=data.samples,
        root=data.root,
    )
    if found.passport.get("dataset_sha256") != sha256:
        raise RunFailed(f"the files of {data.name} were changed meanwhile; start the command again")
    return found


def model_of(config: Config, federation: Federation) -> nn.Module:
    return initial_model(config, federation.input_shape, federation.classes or 1)


def initial_model(config: Config, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The initial model; pretrained weights fill all but the last layer, which fits the data."""
    module = build(config.model.name, shape, classes, config.train.seed)
    if config.model.weights is not None:
        last = list(module.state_dict())[-1].rsplit(".", 1)[0]
        path = Path(config.model.weights)
        load_weights(module, path, config.model.weights_sha256, skip=(f"{last}.",))
    return module


def start_note(config: Config) -> str | None:
    """Where the model starts, for models that people expect to be pretrained."""
    if config.model.weights_sha256 is not None:
        return f"{config.model.name} starts from weights {config.model.weights_sha256[:12]}"
    if config.model.name == "mobilenet_v2":
        return "mobilenet_v2 starts from scratch: give model.weights for ImageNet weights"
    return None


def compute(config: Config, folder: Path, watch: Watch) -> History:
    """Train, continuing from the newest checkpoint in the folder that is this run's."""
    torch.set_num_threads(config.train.threads)
    key = checkpoint_key(identity_of(config))

    def write(number: int, checkpoint: Checkpoint) -> None:
        write_checkpoint(folder, number, pack_checkpoint(checkpoint, key))

    def train(start: Checkpoint | None) -> History:
        federation = federation_of(config)
        return run_rounds(
            model_of(config, federation),
            federation,
            config.method,
            config.model.loss,
            config.train,
            config.evaluate,
            start,
            watch.progress,
            keeper(watch, config.train.rounds, write),
        )

    for start in sorted(checkpoints(folder, key), key=lambda c: -c.state.round):
        try:
            return train(start)
        except DoesNotFit as error:
            pass_over(folder, error)
    return train(None)


def keeper(
    watch: Watch, rounds: int, write: Callable[[int, T], None]
) -> Callable[[int, Callable[[], T]], None]:
    """What the round loop asks after every round: shall it save, shall it stop?

    It saves now and then, later if writing is slow, and always before it stops."""
    count, due = 0, time.monotonic() + SECONDS_BETWEEN_CHECKPOINTS

    def keep(done: int, make: Callable[[], T]) -> None:
        nonlocal count, due
        stopping, now = watch.stopping(), time.monotonic()
        often = watch.save_every is not None and done % watch.save_every == 0
        if stopping or often or now > due:
            write(count, make())
            end = time.monotonic()
            pause = max(SECONDS_BETWEEN_CHECKPOINTS, (end - now) / TIME_FOR_CHECKPOINTS)
            count, due = count + 1, end + pause
        if stopping:
            raise Interrupted(f"stopped after round {done} of {rounds}; the same command "
                              "continues from here")  # fmt: skip

    return keep


def checkpoints(folder: Path, key: Mapping[str, str]) -> Iterator[Checkpoint]:
    """Those that say that they are of this run. Another one, or one of another version of fairvar
    or torch, would give bytes that no run has: the run starts from the beginning."""
    for payload in read_checkpoints(folder):
        try:
            yield unpack_checkpoint(payload, key)
        except IntegrityError as error:
            pass_over(folder, error)


def pass_over(folder: Path, error: FairvarError) -> None:
    print(f"fairvar: a checkpoint in {folder} is not continued: {error}", file=sys.stderr)


def run_cell(config: Config, out: Path, watch: Watch) -> dict[str, Any] | None:
    """Compute and store one run unless it is there already; None if another process has it."""
    folder = run_folder(config, out)
    if not is_complete(folder):
        try:
            with lock_of(folder):
                if not is_complete(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    history = compute(config, folder, watch)
                    save_run(folder, config, history)
        except Timeout:
            return None
        except BadInput:
            leave_nothing([folder], out)
            raise
        except OSError as error:
            raise RunFailed(f"cannot work in {folder}: {error.strerror or error}") from None
    manifest = read_manifest(folder)
    if manifest is not None and recorded_identity(manifest, config) != identity_of(config):
        raise IntegrityError(f"{folder} holds another run than its name says; delete it")
    return manifest


def leave_nothing(folders: Sequence[Path], out: Path) -> None:
    """Bad input writes nothing: take back the empty folders and the locks."""
    for folder in folders:
        (out / LOCKS / folder.name).unlink(missing_ok=True)
    for empty in (*folders, out / LOCKS, out):
        with suppress(OSError):
            empty.rmdir()


def save_run(folder: Path, config: Config, history: History) -> None:
    record_federation(folder.parent, federation_of(config))
    store_run(folder, run_files(config, history))


def store_run(folder: Path, files: Mapping[str, bytes]) -> None:
    save_files(folder, files)
    drop_checkpoints(folder)


def run_files(
    config: Config,
    history: History,
    passport: Mapping[str, Any] | None = None,
    more: Mapping[str, bytes] | None = None,
    identity: Identity | None = None,
    group: Sequence[str] = (),
    deployed: Deployed | None = None,
) -> dict[str, bytes]:
    """All that is kept of a run, as the files of its folder. `passport` and `identity`: of data
    that are not here (nodes keep them); `more` files to seal; `group`: who trained together;
    `deployed`: what is known of a run whose clients were not simulated."""
    files = {
        **(more or {}),
        "config.toml": config.to_toml().encode(),
        "history.safetensors": pack_history(history),
        "state.safetensors": pack_state(history.state),
    }
    if passport is None:
        passport = federation_of(config).passport
    facts = _facts(config, history, passport)
    facts[RECORD] = msgspec.to_builtins(identity or identity_of(config))
    if group:
        facts["group"] = list(group)
    if deployed is not None:
        facts["deployed"] = msgspec.to_builtins(deployed)
    return with_manifest(files, facts)


def holds_run(files: Mapping[str, bytes], identity: Identity) -> bool:
    """Whether these are the files of this run, as `run_files` makes them."""
    try:
        manifest = open_seal(files[MANIFEST], RunManifest)
        config = Config.from_toml(files["config.toml"].decode())
        found = recorded_identity(manifest, config)
    except (KeyError, ValueError, FairvarError):
        return False
    if found != identity or files.keys() != {*RUN_FILES, MANIFEST}:
        return False
    facts = {name: fact for name, fact in manifest.items() if name != "sha256"}
    return with_manifest({n: files[n] for n in RUN_FILES}, facts)[MANIFEST] == files[MANIFEST]


def record_federation(out: Path, federation: Federation) -> None:
    """Who holds what, once per partition, so that a report can draw it without the data."""
    folder = no_link(out / "federations")
    path = folder / f"{federation.passport.get('sha256', 'unknown')[:16]}.json"
    if federation.classes is not None and not path.exists():
        facts = {"class_counts": class_counts(federation).tolist(), **federation.passport}
        write_bytes(path, seal(facts))


def class_counts(federation: Federation) -> Int64[np.ndarray, "n classes"]:
    """Training samples of each class at each client."""
    split, classes = federation.train, federation.classes or 1
    cells = (split.client * classes + split.y).cpu().numpy()
    counts = np.bincount(cells, minlength=federation.clients * classes)
    return counts.reshape(federation.clients, classes)


def recorded_federation(run: StoredRun) -> dict[str, Any] | None:
    """The passport and class counts behind a stored run, if they were kept beside it."""
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


def _facts(config: Config, history: History, passport: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": config.name,
        "fingerprint": config.fingerprint,
        "method": config.method.label,
        "protocol": config.protocol,
        "starts_from": config.model.weights_sha256 or "scratch",
        "rounds": history.rounds,
        "diverged_at": history.diverged_at,
        "passport": dict(passport),
        "exchanges_per_client": history.exchanges,
        "bytes_down_per_client": history.bytes_down,
        "bytes_up_per_client": history.bytes_up,
        "result": final_scores(history),
        "birth": dict(history.birth),
    }


def final_scores(history: History) -> dict[str, dict[str, float]]:
    """The main fairness numbers of every evaluated split and model after the last round; without
    those of which no client of a deployed run has told anything."""
    found: dict[str, dict[str, float]] = {}
    for (split, model), table in history.accuracy.items():
        if len(history.evaluated) and bool(table[-1].isfinite().any()):
            scores = history.fairness(split, model)
            found[f"{split}/{model}"] = {name: float(scores[name]) for name in SCORES}
    return found


@dataclass(frozen=True)
class StoredRun:
    """A finished run on disk; the history is read when asked for."""

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
        _check_same_run(folder, check(manifest, RunManifest), config)
        run = StoredRun(folder, config, manifest)
        _check_identity(run)
        return run

    @cached_property
    def identity(self) -> Identity:
        try:
            return recorded_identity(self.manifest, self.config)
        except IntegrityError as error:
            raise IntegrityError(f"the manifest of {self.folder}: {error}") from None

    def history(self) -> History:
        state = self.state()
        found = self._read(
            "history.safetensors",
            lambda content: unpack_history(content, state, self.config.method, self.manifest),
        )
        _check_same_history(self, found)
        return found

    def state(self) -> State:
        """The final state; that of a condensed run was not kept."""
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
    """A configuration as it was stored: all its sections are there."""
    try:
        values = parse_toml(content.decode(), str(path))
        lacking = [field for field in Config.__struct_fields__ if field not in values]
        if lacking:
            raise BadInput(f"it lacks {', '.join(lacking)}")
        return Config.from_dict(values)
    except ValueError as error:  # BadInput, too: a method may need its plugin
        raise BadInput(f"{path} cannot be used: {error}") from None


def _check_same_run(folder: Path, manifest: RunManifest, config: Config) -> None:
    """The manifest is of this configuration."""
    rounds = config.train.rounds
    agree(
        f"the run in {folder}",
        fingerprint=(manifest.fingerprint, config.fingerprint),
        name=(manifest.name, config.name),
        method=(manifest.method, config.method.label),
        protocol=(manifest.protocol, config.protocol),
        starts_from=(manifest.starts_from, config.model.weights_sha256 or "scratch"),
        seed=(manifest.birth.seed, config.train.seed),
        rounds=(manifest.rounds, min(manifest.rounds, rounds)),
        diverged_at=(manifest.diverged_at or 0, min(manifest.diverged_at or 0, rounds)),
    )
    check_same_data(folder, manifest.passport, config)


def _check_identity(run: StoredRun) -> None:
    """What the run computes, as far as its other records tell: copies and versions go by it."""
    found, config = run.identity, run.config
    agree(
        f"the run in {run.folder}",
        settings=(found.settings, config.fingerprint),
        data=(found.data, run.manifest["passport"].get("dataset_sha256")),
        version=(found.version, min(max(found.version, 1), version_of(config.method))),
    )


def check_same_data(folder: Path, passport: Partition, config: Config) -> None:
    """The partition is the one that the configuration asks for, as far as it was noted."""
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


def _where_told(told: Sequence[int], known: Sequence[int] | None) -> list[int]:
    return [size and one for size, one in zip(told, known or told, strict=False)]


def _check_same_history(run: StoredRun, history: History) -> None:
    """The history is of this run: as many clients, samples and rounds, and it is whole."""
    facts, rounds = run.manifest, run.config.train.rounds
    last = int(history.evaluated[-1]) if len(history.evaluated) else 0
    diverged = facts["diverged_at"]  # the last evaluation is missing if the run diverged
    whole = rounds if diverged is None else min(last, diverged, rounds - 1)
    samples = {split: counts.tolist() for split, counts in history.samples.items()}
    sizes = facts["passport"].get("split_sizes") or samples
    if Deployed.of(facts, run.folder) is not None:  # clients that never told their sizes have 0
        sizes = {split: _where_told(counts, sizes.get(split)) for split, counts in samples.items()}
    counters = (history.exchanges, history.bytes_down, history.bytes_up)
    named = ("exchanges_per_client", "bytes_down_per_client", "bytes_up_per_client")
    agree(
        f"the history of the run in {run.folder}",
        clients=(history.loss.shape[1], run.config.data.clients),
        samples=(samples, sizes),
        last_round=(last, whole),
        traffic=(counters, tuple(facts[name] for name in named)),
    )
