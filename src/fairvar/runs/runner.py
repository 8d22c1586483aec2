"""From configurations to stored runs: train one run or a batch of runs, resume, and store.

Runs of a sweep that differ in numbers only train as one batch and are stored as separate runs. The
batches follow from the plan alone: neither the number of workers nor an interruption changes which
runs train together, so the bytes of a sweep do not depend on them. The last bits of a run depend on
the other runs of its batch. Its manifest lists them, so that a deleted run can be computed again in
the same batch.

A batch of several runs has a folder, `.groups/HASH`, while it is computed, with checkpoints of all
its runs at one round. The last checkpoint is that of the last round: a worker that is killed while
it stores the runs one by one has nothing to train again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from filelock import Timeout
from torch import nn

from fairvar.common.files import seal, write_bytes
from fairvar.common.process import note
from fairvar.data import deal, load_federation
from fairvar.data.federation import Federation
from fairvar.engine.grid import Member, members_that_fit, train_grid, trains_together
from fairvar.engine.history import History
from fairvar.engine.keys import Identity, batch_key, checkpoint_key, fingerprint
from fairvar.engine.state import DoesNotFit
from fairvar.engine.train import Checkpoint, prepare, run_rounds
from fairvar.errors import BadInput, FairvarError, IntegrityError, RunFailed
from fairvar.models import build, load_weights
from fairvar.runs import formats, own
from fairvar.runs.config import Config
from fairvar.runs.identity import RECORD, data_sha256, identity_of, recorded_identity
from fairvar.runs.stored import Deployed, final_scores, read_manifest
from fairvar.scores import metric_facts

SECONDS_BETWEEN_CHECKPOINTS = 10.0
TIME_FOR_CHECKPOINTS = 0.05  # at most this share of a computation
T = TypeVar("T")


class Interrupted(FairvarError):
    """A user or the system asked to stop; the same command continues."""

    exit_code = 130


@dataclass(frozen=True)
class Watch:
    """Callbacks of a long computation."""

    progress: Callable[[int, int], None] = lambda done, total: None
    stopping: Callable[[], bool] = lambda: False
    save_every: int | None = None  # rounds between checkpoints, in addition to every ten seconds


def run_folder(config: Config, out: Path) -> Path:
    """The folder of the run that this configuration gives with the present data and code."""
    return out / identity_of(config).name


def missing(cells: Sequence[Config], out: Path) -> list[Config]:
    return [cell for cell in cells if not formats.is_complete(run_folder(cell, out))]


def federation_of(config: Config) -> Federation:
    return _federation(config.data, config.partition, data_sha256(config.data))


@lru_cache(maxsize=4)
def _federation(data: Any, partition: Any, sha256: str | None) -> Federation:
    asked = msgspec.structs.asdict(data)
    del asked["args"]
    if data.is_own:
        name, _ = asked.pop("name"), asked.pop("root")
        found = deal(name, data.made()[0], partition=partition, **asked)
    else:
        found = load_federation(partition=partition, **asked)
    if found.provenance.get("dataset_sha256") != sha256:
        raise RunFailed(f"the files of {data.name} were changed meanwhile; start the command again")
    return found


def model_of(config: Config, federation: Federation) -> nn.Module:
    return initial_model(config, federation.input_shape, federation.classes or 1)


def initial_model(config: Config, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The initial model; pretrained weights fill all but the last layer, which fits the data."""
    name, args, make = config.model.name, config.model.args, None
    if config.model.is_own:
        make = lambda shape, classes: own.make_model(name, args, shape, classes)  # noqa: E731
    module = build(name, shape, classes, config.train.seed, make)
    if config.model.weights is not None:
        last = list(module.state_dict())[-1].rsplit(".", 1)[0]
        path = Path(config.model.weights)
        load_weights(module, path, config.model.weights_sha256, skip=(f"{last}.",))
    return module


def start_note(config: Config) -> str | None:
    """Says which weights the model starts from, if users expect pretrained ones."""
    if config.model.weights_sha256 is not None:
        return f"{config.model.name} starts from weights {config.model.weights_sha256[:12]}"
    if config.model.name == "mobilenet_v2":
        return "mobilenet_v2 starts from scratch: give model.weights for ImageNet weights"
    return None


def train_runs(
    cells: Sequence[Config],
    starts: Sequence[Checkpoint] | None = None,
    progress: Callable[[int, int], None] | None = None,
    keep: Callable[[int, Callable[[], list[Checkpoint]]], None] | None = None,
) -> list[History]:
    """Train runs from the beginning or from checkpoints; several of them train as one batch.

    `keep(rounds, make)` is called after every round; `make()` returns a checkpoint of each run.
    """
    first = cells[0]
    torch.set_num_threads(first.train.threads)
    data, loss, when = federation_of(first), first.model.loss, first.evaluate
    begin: Sequence[Checkpoint | None] = starts or [None] * len(cells)
    if len(cells) == 1:
        model = model_of(first, data)
        return [run_rounds(model, data, first.method, loss, first.train, when, begin[0], progress,
                           keep)]  # fmt: skip
    members = [
        Member(model_of(cell, data), cell.method, cell.train, start)
        for cell, start in zip(cells, begin, strict=True)
    ]
    return train_grid(members, data, loss, when, progress, keep)


def compute(cells: Sequence[Config], home: Path, watch: Watch) -> list[History]:
    """Train these runs, resuming from the newest checkpoint in the folder `home` that is theirs."""
    names = [identity_of(cell).name for cell in cells]
    keys = [checkpoint_key(identity_of(cell)) for cell in cells]
    own.remember(cells, identity_of(cells[0]).code)
    several = len(cells) > 1

    def write(number: int, made: list[Checkpoint]) -> None:
        packed = map(formats.pack_checkpoint, made, keys)
        formats.write_checkpoint(home, number, dict(zip(names, packed, strict=True)))

    keep = keeper(watch, cells[0].train.rounds, write, at_end=several)
    for starts in _checkpoints(home, names, keys):
        try:
            return train_runs(cells, starts, watch.progress, keep)
        except BadInput as error:
            if not several and not isinstance(error, DoesNotFit):
                raise
            _pass_over(home, error)
    try:
        return train_runs(cells, None, watch.progress, keep)
    except BadInput as error:
        raise (_blame(cells, error) if several else error) from None


def _checkpoints(
    home: Path, names: Sequence[str], keys: Sequence[Mapping[str, str]]
) -> list[list[Checkpoint]]:
    """Checkpoints of exactly these runs, newest first. Those of other runs, or of other versions of
    fairvar or torch, would lead to other bytes: the runs then start from the beginning."""
    found: list[list[Checkpoint]] = []
    for packed in formats.read_checkpoints(home):
        try:
            if packed.keys() != set(names):
                raise IntegrityError("it belongs to another run")
            parts = (packed[name] for name in names)
            found.append(list(map(formats.unpack_checkpoint, parts, keys)))
        except IntegrityError as error:
            _pass_over(home, error)
    return sorted(found, key=lambda made: -max(c.state.round for c in made))


def _pass_over(home: Path, error: FairvarError) -> None:
    note(f"fairvar: a checkpoint in {home} is not continued: {error}")


def _blame(cells: Sequence[Config], error: BadInput) -> BadInput:
    """The error with the name of the run that caused it."""
    data = federation_of(cells[0])
    for cell in cells:
        try:
            given = (model_of(cell, data), data, cell.method, cell.model.loss, cell.train)
            prepare(*given, metric=cell.evaluate.metric)
        except BadInput as own:
            numbers = "".join(f", {k} {v:g}" for k, v in cell.method.numbers.items())
            train = f"lr {cell.train.lr:g}, seed {cell.train.seed}"
            return BadInput(f"{cell.method.label}{numbers}, {train}: {own}")
    return error


def keeper(
    watch: Watch, rounds: int, write: Callable[[int, T], None], at_end: bool = False
) -> Callable[[int, Callable[[], T]], None]:
    """A function for the round loop to call after every round. It writes a checkpoint every ten
    seconds (less often where writing is slow), before it stops the loop with `Interrupted` and,
    with `at_end`, after the last round."""
    count, due = 0, time.monotonic() + SECONDS_BETWEEN_CHECKPOINTS

    def keep(done: int, make: Callable[[], T]) -> None:
        nonlocal count, due
        stopping, now = watch.stopping(), time.monotonic()
        often = watch.save_every is not None and done % watch.save_every == 0
        often |= at_end and done == rounds
        if stopping or often or now > due:
            write(count, make())
            end = time.monotonic()
            pause = max(SECONDS_BETWEEN_CHECKPOINTS, (end - now) / TIME_FOR_CHECKPOINTS)
            count, due = count + 1, end + pause
        if stopping:
            raise Interrupted(f"stopped after round {done} of {rounds}; the same command "
                              "continues from here")  # fmt: skip

    return keep


def run_files(
    config: Config,
    history: History,
    passport: Mapping[str, Any] | None = None,
    more: Mapping[str, bytes] | None = None,
    identity: Identity | None = None,
    group: Sequence[str] = (),
    deployed: Deployed | None = None,
) -> dict[str, bytes]:
    """The files of a run's folder.

    passport, identity: given if the data are at other machines.
    more: further files that the manifest lists.
    group: names of the runs that trained in one batch.
    deployed: facts about a run whose clients were not simulated.
    """
    files = {
        **(more or {}),
        "config.toml": config.to_toml().encode(),
        "history.safetensors": formats.pack_history(history),
        "state.safetensors": formats.pack_state(history.state),
    }
    facts: dict[str, Any] = {
        "name": config.name,
        "fingerprint": fingerprint(config),
        RECORD: msgspec.to_builtins(identity or identity_of(config)),
        "method": config.method.label,
        "protocol": config.protocol,
        "starts_from": config.model.weights_sha256 or "scratch",
        "rounds": history.rounds,
        "diverged_at": history.diverged_at,
        "passport": dict(federation_of(config).provenance if passport is None else passport),
        "exchanges_per_client": history.exchanges,
        "bytes_down_per_client": history.bytes_down,
        "bytes_up_per_client": history.bytes_up,
        "result": final_scores(history),
        "birth": dict(history.provenance),
    }
    facts |= metric_facts(history.metric)
    facts |= {"group": list(group)} if group else {}
    if (about := own.facts_of(config.method)) is not None:
        facts["own_method"] = msgspec.to_builtins(about)
    facts |= {} if deployed is None else {"deployed": msgspec.to_builtins(deployed)}
    return formats.with_manifest(files, facts)


def record_federation(out: Path, federation: Federation) -> None:
    """Store the class counts of a partition once, so that reports can draw it without the data."""
    folder = formats.no_link(out / "federations")
    path = folder / f"{federation.provenance.get('sha256', 'unknown')[:16]}.json"
    if federation.classes is not None and not path.exists():
        facts = {"class_counts": federation.class_counts.tolist(), **federation.provenance}
        write_bytes(path, seal(facts))


# -- batches of runs -------------------------------------------------------------------------------
RunGroup = tuple[Config, ...]
MOST_TOGETHER = 100  # a compromise: a group is the work of one process, and a plan may have few
GROUPS = ".groups"


def arrange(cells: Sequence[Config], batch: bool = True) -> list[RunGroup]:
    """Divide the runs of a plan into groups that train as one batch; a group of one where a batch
    is not faster.

    With full batches of samples, all seeds of a method's grid share their samples and train as one.
    Groups are cut in the order of the plan and computed in the order of their first runs, so that
    an unfinished sweep has the grids of the first seeds first.
    """
    places = {fingerprint(cell): place for place, cell in reversed(list(enumerate(cells)))}
    if not batch:
        return [(cells[place],) for place in sorted(places.values())]
    families: dict[Any, list[int]] = {}
    for place in sorted(places.values()):
        cell = cells[place]
        shares = cell.train.batch_size is None or cell.train.seed
        families.setdefault((batch_key(cell), shares), []).append(place)
    pieces, known = [], dict[Any, int]()
    for (sort, _), family in families.items():
        asked = (sort, len(family))  # seeds do not matter
        if asked not in known:
            known[asked] = _most([cells[place] for place in family])
        most = known[asked]
        pieces += [family[i : i + most] for i in range(0, len(family), most)]
    return [tuple(cells[place] for place in piece) for piece in sorted(pieces)]


def _most(family: Sequence[Config]) -> int:
    """How many of these runs make a group."""
    first = family[0]
    if len(family) == 1:
        return 1
    data = federation_of(first)
    # Only shapes matter here, so one initial model is enough.
    built_in = first.model.weights is None and not first.model.is_own
    model = first.model.name if built_in else model_of(first, data)
    members = [Member(model, cell.method, cell.train) for cell in family]
    most = min(MOST_TOGETHER, members_that_fit(members, data))
    return most if trains_together(members[:most], data, first.model.loss) else 1


def run_cell(config: Config, out: Path, watch: Watch) -> dict[str, Any] | None:
    """Compute and store one run unless it is stored already; None if another process computes it.
    Returns the manifest."""
    folder = run_folder(config, out)
    if not formats.is_complete(folder) and not run_group((config,), out, watch):
        return None
    manifest = read_manifest(folder)
    if manifest is not None and recorded_identity(manifest, config) != identity_of(config):
        raise IntegrityError(f"{folder} holds another run than its name says; delete it")
    return manifest


def run_group(group: RunGroup, out: Path, watch: Watch) -> bool:
    """Compute and store the missing runs of a group; False if another process computes some."""
    folders = sorted(run_folder(cell, out) for cell in missing(group, out))
    try:
        with ExitStack() as held:
            # Always in the same order: of two processes with common runs one gets all locks.
            for folder in folders:
                held.enter_context(formats.lock_of(folder))
            for part in parts_to_do(group, out):
                _finish(part, out, watch)
    except Timeout:
        return False
    except BadInput:
        _remove_empty(folders, out)
        raise
    except OSError as error:
        raise RunFailed(f"cannot work in {out}: {error.strerror or error}") from None
    return True


def _remove_empty(folders: Sequence[Path], out: Path) -> None:
    """Bad input must write nothing: remove the empty folders and the locks."""
    for folder in folders:
        (out / formats.LOCKS / folder.name).unlink(missing_ok=True)
    for empty in (*folders, out / formats.LOCKS, out):
        with suppress(OSError):
            empty.rmdir()


def parts_to_do(group: RunGroup, out: Path) -> list[RunGroup]:
    """The batches to train, so that the missing runs of a group get stored.

    The whole group if an earlier attempt left something; the runs of the former batch where a
    stored run lists a missing one; else a batch of the missing runs."""
    todo = {_name(cell): cell for cell in missing(group, out)}
    if not todo or len(group) == 1:
        return [group] if todo else []
    if any(files.keys() >= todo.keys() for files in formats.read_checkpoints(home_of(group, out))):
        return [group]
    known, found = {_name(cell): cell for cell in group}, list[RunGroup]()
    for name in [name for name in known if name not in todo]:
        before = dict.fromkeys((read_manifest(out / name) or {}).get("group", []))
        if not todo.keys() & before:
            continue
        if known.keys() >= before.keys():
            found.append(tuple(known[n] for n in before))
            todo = {n: cell for n, cell in todo.items() if n not in before}
        else:
            note(f"fairvar: the plan lacks some of the runs that trained with {out / name}; what "
                 "is missing of them may differ in its last bits")  # fmt: skip
            break
    return [*found, *([tuple(todo.values())] if todo else [])]


def _finish(part: RunGroup, out: Path, watch: Watch) -> None:
    """Train these runs, or continue where an earlier attempt was interrupted, and store the missing
    ones. (Stored ones train again with the others: the last bits may depend on the batch.)"""
    home, several = home_of(part, out), len(part) > 1
    histories = compute(part, home, watch)
    record_federation(out, federation_of(part[0]))
    group = list(map(_name, part)) if several else []
    for cell, history in zip(part, histories, strict=True):
        folder = run_folder(cell, out)
        if not formats.is_complete(folder):
            formats.store_run(folder, run_files(cell, history, group=group))
    if several:
        _drop(home)


def tidy(out: Path) -> None:
    """Delete what is left of groups whose runs are all stored, for example after a kill in the last
    moment, or because the plan has changed."""
    homes = [] if (out / GROUPS).is_symlink() else sorted((out / GROUPS).glob("*"))
    for home in homes:
        names = {name for files in formats.read_checkpoints(home) for name in files}
        if names and all(_is_stored(out, name) for name in names) and not home.is_symlink():
            _drop(home)


def _is_stored(out: Path, name: str) -> bool:
    try:
        return formats.is_complete(formats.inside(out, name))
    except IntegrityError:  # not a name that fairvar writes
        return False


def home_of(group: RunGroup, out: Path) -> Path:
    """Where the checkpoints of a group are: for a single run, its own folder."""
    if len(group) == 1:
        return formats.no_link(run_folder(group[0], out))
    names = " ".join(map(_name, group))
    digest = hashlib.sha256(names.encode()).hexdigest()
    return formats.no_link(formats.no_link(out / GROUPS) / digest[:16])


def _name(cell: Config) -> str:
    return identity_of(cell).name


def _drop(home: Path) -> None:
    """Delete the folder of a group, and `.groups` with the last one."""
    for path in home.glob("*"):
        with suppress(OSError):
            path.unlink()
    for empty in (home, home.parent):
        with suppress(OSError):
            empty.rmdir()
