"""From a `Config` to a stored run: compute what is missing, continue what was interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import torch
from filelock import FileLock, Timeout
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
from fairvar.config import Config
from fairvar.data import load_federation
from fairvar.engine.state import State, no_state
from fairvar.engine.train import Checkpoint, run_rounds
from fairvar.errors import BadInput, FairvarError, IntegrityError, RunFailed
from fairvar.federation import Federation
from fairvar.history import History
from fairvar.models import build, load_weights
from fairvar.store import (
    drop_checkpoints,
    is_complete,
    open_seal,
    read_checkpoints,
    read_manifest,
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
NEEDED = ("rounds", "diverged_at", "passport", "birth")  # facts that readers of a run use
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
    return out / config.fingerprint[:16]


def missing(cells: Sequence[Config], out: Path) -> list[Config]:
    return [cell for cell in cells if not is_complete(run_folder(cell, out))]


def federation_of(config: Config) -> Federation:
    data = config.data
    return _federation(data, config.partition)


@lru_cache(maxsize=4)
def _federation(data: Any, partition: Any) -> Federation:
    return load_federation(
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
    """Train, continuing from the newest intact checkpoint of the folder if there is one."""
    torch.set_num_threads(config.train.threads)
    start = max(checkpoints(folder), key=lambda c: c.state.round, default=None)

    def write(number: int, checkpoint: Checkpoint) -> None:
        write_checkpoint(folder, number, pack_checkpoint(checkpoint))

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


def checkpoints(folder: Path) -> Iterator[Checkpoint]:
    for payload in read_checkpoints(folder):
        with suppress(IntegrityError):
            yield unpack_checkpoint(payload)


def run_cell(config: Config, out: Path, watch: Watch) -> dict[str, Any] | None:
    """Compute and store one run unless it is there already; None if another process has it.

    The lock is the operating system's: it ends with its process, however that dies.
    """
    folder = run_folder(config, out)
    if not is_complete(folder):
        try:
            (out / ".locks").mkdir(parents=True, exist_ok=True)
            with FileLock(out / ".locks" / folder.name, timeout=0):
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
    return read_manifest(folder)


def leave_nothing(folders: Sequence[Path], out: Path) -> None:
    """Bad input writes nothing: take back the empty folders and the locks."""
    for folder in folders:
        (out / ".locks" / folder.name).unlink(missing_ok=True)
    for empty in (*folders, out / ".locks", out):
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
    deployed: Deployed | None = None,
) -> dict[str, bytes]:
    """All that is kept of a run, as the files of its folder. `passport`: of data that are not here
    (their nodes keep them); `more` files to seal; `deployed`: what is known of a run whose clients
    were not simulated."""
    files = {
        **(more or {}),
        "config.toml": config.to_toml().encode(),
        "history.safetensors": pack_history(history),
        "state.safetensors": pack_state(history.state),
    }
    if passport is None:
        passport = federation_of(config).passport
    known = {} if deployed is None else {"deployed": msgspec.to_builtins(deployed)}
    return with_manifest(files, {**_facts(config, history, passport), **known})


def record_federation(out: Path, federation: Federation) -> None:
    """Who holds what, once per partition, so that a report can draw it without the data."""
    path = out / "federations" / f"{federation.passport.get('sha256', 'unknown')[:16]}.json"
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
    if not sha.isalnum():  # part of a path, and not from us
        raise IntegrityError(f"the manifest of {run.folder} names the partition {sha!r}; refused")
    path = run.folder.parent / "federations" / f"{sha[:16]}.json"
    try:
        return open_seal(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise IntegrityError(f"{path} is damaged: {error}; delete it") from None


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
    """The main fairness numbers of every evaluated split and model after the last round."""
    found: dict[str, dict[str, float]] = {}
    for split, model in history.accuracy:
        if len(history.evaluated):
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
        lacking = [fact for fact in NEEDED if fact not in manifest]
        if lacking or not isinstance(manifest["passport"], dict):
            raise IntegrityError(
                f"the manifest of {folder} lacks {', '.join(lacking) or 'a passport'}"
            )
        text = read_sealed(folder, manifest, "config.toml").decode()
        return StoredRun(folder, Config.from_toml(text), manifest)

    def history(self) -> History:
        state = self.state()
        return self._read(
            "history.safetensors",
            lambda content: unpack_history(content, state, self.config.method, self.manifest),
        )

    def state(self) -> State:
        """The final state; that of a condensed run was not kept."""
        if self.manifest.get("condensed"):
            return no_state(int(self.manifest["rounds"]))
        return self._read("state.safetensors", unpack_state)

    def _read(self, name: str, unpack: Callable[[bytes], T]) -> T:
        content = read_sealed(self.folder, self.manifest, name)
        try:
            return unpack(content)
        except IntegrityError as error:
            raise IntegrityError(f"{self.folder / name}: {error}") from None
