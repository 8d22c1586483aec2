"""The storage format of runs: their folders, checksums, checkpoints and locks, and histories and
states as safetensors.

A run is a folder with config.toml, history.safetensors, state.safetensors and manifest.json. The
manifest is written last and holds the SHA-256 of the other files; its own SHA-256 is its last line
(the seal). A folder without a manifest is not a result, but may hold checkpoints. These and other
temporary files begin with a sealed list of the same kind. Nothing is ever unpickled.

A seal shows that a record was not damaged. It is not a signature: anybody can change a record and
seal it again. So the fields of every `Record` have types and bounds, which are checked whenever one
is read, and two records of one fact must agree.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fairvar.common.files import (
    MOST_RECORD,
    MOST_TENSORS,
    Number,
    Record,
    check,
    checksums,
    open_seal,
    pack_files,
    read_bytes,
    seal,
    unpack_files,
    write_bytes,
)
from fairvar.engine.history import MODELS, History, Tables, are_ids, history_from_tables
from fairvar.engine.state import State
from fairvar.engine.train import Checkpoint
from fairvar.errors import BadInput, IntegrityError, cause
from fairvar.methods.base import Method
from fairvar.scores import ACCURACY, LOSS, recorded_metric

MANIFEST = "manifest.json"
SLOTS = ("checkpoint-a", "checkpoint-b")
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")  # a part of a path that fairvar writes
LOCKS = ".locks"


def agree(where: object, **pairs: tuple[object, object]) -> None:
    """Raise unless both values of each fact are equal."""
    for fact, (one, other) in pairs.items():
        if one != other:
            raise IntegrityError(
                f"{where} contradicts itself: {fact} is {str(one)[:80]} and {str(other)[:80]}"
            )


def inside(folder: Path, name: str, depth: int = 1) -> Path:
    """The path of a name that comes from a file: at most `depth` plain parts below the folder.

    All such names are checked here. A seal is a checksum, not a signature: a folder or an archive
    from outside may name any place, and may hold links to it.
    """
    parts = name.split("/")
    if len(parts) > depth or not all(PLAIN.fullmatch(part) for part in parts):
        raise IntegrityError(f"{name[:200]!r} is not a file of its own in {folder}; refused")
    path = folder
    for part in parts:
        path = no_link(path / part)
    return path


def no_link(path: Path) -> Path:
    """A path that may be written or deleted; refuses links, which may lead out of the folder."""
    if path.is_symlink():
        raise IntegrityError(f"{path} is a link; refused: delete it, or copy what it points to")
    return path


def lock_of(folder: Path, timeout: float = 0.0) -> FileLock:
    """The lock of a run's folder. The operating system releases it when its process ends, however
    it ends."""
    locks = no_link(folder.parent / LOCKS)
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(no_link(locks / no_link(folder).name), timeout=timeout)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def check_writable(folder: Path) -> None:
    """Refuse an output folder that cannot be written before any work is done."""
    try:
        if folder.exists() and not folder.is_dir():
            raise FileExistsError(errno.EEXIST, "it is a file")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot write into {folder}: {reason}; choose another --out") from None


def with_manifest(files: Mapping[str, bytes], facts: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a run and the manifest with their checksums."""
    return {**files, MANIFEST: seal({**facts, "sha256": checksums(files)})}


def save_files(folder: Path, files: Mapping[str, bytes], depth: int = 1) -> None:
    """Write files, manifests last: a run with a manifest is finished. `depth` 2: folder/name."""
    places = {name: inside(folder, name, depth) for name in files}
    for name in sorted(files, key=lambda n: n.endswith(MANIFEST)):
        write_bytes(places[name], files[name])


def is_complete(folder: Path) -> bool:
    """Whether the run is finished; nothing is read."""
    return (folder / MANIFEST).exists()


def read_record(path: Path, kind: type[Record], way_out: str) -> dict[str, Any] | None:
    """A sealed file; None if it does not exist."""
    try:
        return open_seal(read_bytes(path, MOST_RECORD), kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise IntegrityError(f"{path} is damaged: {error}; {way_out}") from None


def read_sealed(folder: Path, manifest: Mapping[str, Any], name: str) -> bytes:
    """A file of a finished run, exactly as it was written."""
    path = inside(folder, name)
    try:
        content = read_bytes(path, MOST_TENSORS, follow=False)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}; run again") from None
    if hashlib.sha256(content).hexdigest() != manifest["sha256"].get(name):
        raise IntegrityError(f"{path} was changed after it was written; delete {folder}, run again")
    return content


def write_checkpoint(folder: Path, number: int, files: Mapping[str, bytes]) -> None:
    """Checkpoints of one run or several, by name. Overwrites the older of two files, so that one
    good checkpoint always remains."""
    write_bytes(folder / SLOTS[number % 2], pack_files(files))


def read_checkpoints(folder: Path) -> list[dict[str, bytes]]:
    """The intact checkpoints; a damaged one is left out, because the other one will do."""
    found = []
    for slot in SLOTS:
        with suppress(OSError):
            found.append(unpack_files(read_bytes(folder / slot, MOST_TENSORS)))
    return [files for files in found if files]


def store_run(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a finished run; delete its checkpoints and what a crash left."""
    save_files(folder, files)
    for path in folder.iterdir():
        if path.name in SLOTS or (path.name.startswith(".") and path.is_file()):
            path.unlink(missing_ok=True)


# -- histories and states as bytes -----------------------------------------------------------------
NOT_MEASURED = -1  # in place of a number of correct answers
FIRST_LOSSES = 10  # evaluated rounds whose training losses condensed histories keep
_FLOATS, _COUNTS = (torch.float32, torch.float64), (torch.int64,)  # float32 in stored runs
# By kind of stored table: its types, and what its dimensions count (o: observed rounds,
# e: evaluated rounds, n: clients, m: participants of a round, which may be all clients).
TABLES: dict[str, tuple[tuple[torch.dtype, ...], str]] = {
    "observed": (_COUNTS, "o"),
    "participants": (_COUNTS, "om"),
    "loss": (_FLOATS, "om"),
    "weights": (_FLOATS, "om"),
    "ascended": (_FLOATS, "o"),
    "evaluated": (_COUNTS, "e"),
    "gradient_variance": ((torch.float64,), "e"),
    "update_norm": (_FLOATS, "en"),
    "accuracy": ((torch.float64,), "en"),  # of saved histories; stored runs have "right"
    "right": ((torch.int16, torch.int32), "en"),
    "evaluated_loss": (_FLOATS, "en"),
    "score": ((torch.float64,), "en"),
    "samples": (_COUNTS, "n"),
    "counters": (_COUNTS, "3"),
}


def pack_state(state: State) -> bytes:
    return save(state.flat())


def unpack_state(content: bytes) -> State:
    with _as_written():
        return State.from_flat(load_tensors(content), _metadata(content).get("made_by", ""))


def pack_checkpoint(checkpoint: Checkpoint, key: Mapping[str, str] | None = None) -> bytes:
    """`key` names the run and the versions that it was made with (`checkpoint_key`)."""
    tables = {f"tables/{name}": table for name, table in (checkpoint.tables or {}).items()}
    return save({**checkpoint.state.flat(), **tables}, dict(key or {}))


def unpack_checkpoint(content: bytes, key: Mapping[str, str] | None = None) -> Checkpoint:
    """IntegrityError unless it has this key."""
    with _as_written():
        flat = load_tensors(content)
        found = _metadata(content)
        for part, wanted in (key or {}).items():
            other = str(found.get(part))
            if other != wanted and part == "identity":
                raise IntegrityError(
                    f"it belongs to another run ({other[:16]!r}, not {wanted[:16]})"
                )
            if other != wanted:
                raise IntegrityError(f"it was made with {part} {other[:40]!r}, not {wanted}")
        tables = {k.removeprefix("tables/"): v for k, v in flat.items() if k.startswith("tables/")}
        int(tables.get("diverged_at", flat["round"]))  # a number
        return Checkpoint(State.from_flat(flat), tables)


def _metadata(content: bytes) -> dict[str, str]:
    """The texts in the header of a safetensors file that was loaded before."""
    length = int.from_bytes(content[:8], "little")
    return dict(json.loads(content[8 : 8 + length]).get("__metadata__") or {})


def pack_history(history: History) -> bytes:
    """Evaluated rounds only, because a sweep has thousands of runs. Accuracies are stored as exact
    numbers of correct answers, scores by another metric as they are, other tables per client as
    float32."""
    history, flat = history.at_evaluations(), dict[str, Tensor]()
    for name, table in history.tables().items():
        kind, _, key = name.partition("/")
        if kind == "accuracy":
            right = table * history.samples[key.split("/")[0]]
            flat[f"right/{key}"] = right.nan_to_num(NOT_MEASURED).round().int()
        else:
            flat[name] = table.float() if TABLES[kind][0] is _FLOATS else table
    for (split, model), table in history.score.items() if history.metric != ACCURACY else ():
        flat[f"score/{split}/{model}"] = table
    facts = {"rounds": history.rounds, "diverged_at": history.diverged_at}
    return save({k: v.contiguous() for k, v in flat.items()}, {"facts": json.dumps(facts)})


def condensed_history(content: bytes) -> bytes:
    """The part of a packed history that reports need, and the first training losses to three
    digits, so that others can compare their own run. Counts have as few bytes as possible."""
    flat = {k: v for k, v in load_tensors(content).items()
            if not k.startswith(("evaluated_loss/", "update_norm"))}  # fmt: skip
    for name, table in flat.items():
        if name.startswith("right/") and table.numel() and int(table.max()) < 2**15:
            flat[name] = table.short()
    flat["loss"][FIRST_LOSSES:] = torch.nan
    flat["loss"] = (flat["loss"].view(torch.int32) & ~0x1FFF).view(torch.float32)
    return save({k: v.contiguous() for k, v in flat.items()})


def unpack_history(
    content: bytes, state: State, method: Method, facts: Mapping[str, Any]
) -> History:
    with _as_written():
        return _history(load_tensors(content), state, method, facts)


class Saved(Record, frozen=True, kw_only=True):
    """What `History.save` writes in addition to tables and state."""

    method: dict[str, Any]
    kind: str = msgspec.field(name="class")
    made_by: str
    rounds: Number
    diverged_at: Number | None
    stopped: str | None
    classifies: bool
    metric: dict[str, Any] | None = None
    provenance: dict[str, Any] = msgspec.field(name="birth")


def unpack_saved(content: bytes, find: Callable[[Saved], Method]) -> History:
    """What `History.save` packed; `find` gives the method."""
    with _as_written():
        flat = load_tensors(content)
        facts = check(json.loads(_metadata(content)["facts"]), Saved)
    method = find(facts)
    with _as_written():
        state = State.from_flat(flat, facts.made_by)
        if not facts.rounds <= state.round:
            raise ValueError(f"{facts.rounds} rounds, but the state is of round {state.round}")
        tables = {k.removeprefix("tables/"): v for k, v in flat.items() if k.startswith("tables/")}
        return _history(tables, state, method, msgspec.to_builtins(facts))


def _history(flat: Tables, state: State, method: Method, facts: Mapping[str, Any]) -> History:
    clients = _check_tables(flat)
    samples = {k.split("/")[1]: v for k, v in flat.items() if k.startswith("samples/")}
    tables = {k: v.double() if v.is_floating_point() else v for k, v in flat.items()}
    if "update_norm" not in tables:  # of a condensed history
        size = len(flat["observed"]), clients
        tables["update_norm"] = torch.full(size, torch.nan, dtype=torch.float64)
    for name in [k for k in flat if k.startswith("right/")]:
        _, split, model = name.split("/")
        right = torch.where(flat[name] == NOT_MEASURED, torch.nan, flat[name].double())
        tables[f"accuracy/{split}/{model}"] = right / samples[split]
    kinds = {k.partition("/")[0] for k in flat}
    known = "right" in kinds or not kinds & {"evaluated_loss", "score"}
    classifies = facts.get("classifies", known)
    return history_from_tables(
        tables,
        method=method,
        state=state,
        rounds=int(facts["rounds"]),
        observed=flat["observed"],
        samples=samples,
        classifies=classifies,
        metric=recorded_metric(facts) or (ACCURACY if classifies else LOSS),
        diverged_at=facts["diverged_at"],
        provenance=facts["birth"],
        stopped=facts.get("stopped"),
    )


def _check_tables(flat: Tables) -> int:
    """The number of clients, if every table has the type and shape of its kind, and possible
    values."""
    (drawn,) = flat["loss"].shape[1:]
    clients = drawn
    if "participants" in flat:
        clients = next(len(table) for name, table in flat.items() if name.startswith("samples/"))
        if flat["participants"].dim() != 2 or not are_ids(flat["participants"], clients):
            raise ValueError("participants holds something other than ids of clients")
    rounds, seen = len(flat["observed"]), len(flat["evaluated"])
    sizes = {"o": rounds, "e": seen, "n": clients, "m": drawn, "3": 3}
    for name, table in flat.items():
        kind, _, rest = name.partition("/")
        if kind not in TABLES:
            continue
        types, dimensions = TABLES[kind]
        shape = tuple(sizes[d] for d in dimensions)
        if table.dtype not in types or table.shape != shape:
            found = f"{table.dtype} of shape {tuple(table.shape)}"
            raise ValueError(f"{name[:80]} holds {found}, not {types[0]} of shape {shape}")
        least, most = torch.tensor(0 if kind in ("samples", "counters") else -torch.inf), None
        if kind in ("right", "accuracy", "evaluated_loss", "score"):
            split, _, model = rest.partition("/")
            if model not in MODELS or f"samples/{split}" not in flat:
                raise ValueError(f"{name[:80]!r} is not the name of a table")
            if kind == "right":
                least, most = torch.tensor(NOT_MEASURED), flat[f"samples/{split}"]
            if kind == "accuracy":
                least, most = torch.tensor(0.0), torch.tensor(1.0)
        if bool((table < least).any()) or (most is not None and bool((table > most).any())):
            raise ValueError(f"{name[:80]} holds an impossible count")
    for name in ("observed", "evaluated"):
        if bool((flat[name].diff() < 1).any()) or bool((flat[name] < 0).any()):
            raise ValueError(f"{name} is not a column of increasing rounds")
    if bool(torch.isinf(flat["weights"]).any()):
        raise ValueError("weights holds infinity")
    return clients


@contextmanager
def _as_written() -> Iterator[None]:
    """Refuse tensors with other names or shapes than fairvar writes, whatever their checksum."""
    try:
        yield
    except (LookupError, ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        found = f"{type(error).__name__}: {cause(error)}"
        raise IntegrityError(f"it does not hold what fairvar writes: {found}") from None


def load_tensors(content: bytes) -> dict[str, Tensor]:
    """Tensors by name; IntegrityError if it is not a safetensors file."""
    try:
        return load(content)
    except SafetensorError as error:
        raise IntegrityError(f"not a valid safetensors file: {error}") from None
