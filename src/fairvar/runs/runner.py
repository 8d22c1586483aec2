"""From a `Config` to a stored run: compute what is missing, continue what was interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from filelock import Timeout
from jaxtyping import Int64
from torch import nn

from fairvar.data import load_federation
from fairvar.data.federation import Federation
from fairvar.engine.history import History
from fairvar.engine.state import DoesNotFit
from fairvar.engine.train import Checkpoint, run_rounds
from fairvar.errors import BadInput, FairvarError, IntegrityError, RunFailed
from fairvar.models import build, load_weights
from fairvar.runs.config import Config
from fairvar.runs.identity import (
    RECORD,
    Identity,
    checkpoint_key,
    data_sha256,
    fingerprint,
    identity_of,
    recorded_identity,
)
from fairvar.runs.records import RunManifest
from fairvar.runs.serialize import (
    pack_checkpoint,
    pack_history,
    pack_state,
    unpack_checkpoint,
)
from fairvar.runs.store import (
    LOCKS,
    MANIFEST,
    drop_checkpoints,
    is_complete,
    lock_of,
    no_link,
    open_seal,
    read_checkpoints,
    read_manifest,
    save_files,
    seal,
    with_manifest,
    write_bytes,
    write_checkpoint,
)
from fairvar.runs.stored import Deployed, final_scores

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


def _facts(config: Config, history: History, passport: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": config.name,
        "fingerprint": fingerprint(config),
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
