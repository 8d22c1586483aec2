"""Compute and store missing runs, many of them as one batch.

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
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from filelock import Timeout

from fairvar.engine.grid import Member, members_that_fit, trains_together
from fairvar.errors import BadInput, IntegrityError, RunFailed
from fairvar.runs import store
from fairvar.runs.config import Config
from fairvar.runs.identity import batch_key, fingerprint, identity_of, recorded_identity
from fairvar.runs.runner import (
    Watch,
    compute,
    federation_of,
    missing,
    model_of,
    record_federation,
    run_files,
    run_folder,
)
from fairvar.runs.stored import read_manifest

Group = tuple[Config, ...]
MOST_TOGETHER = 100  # a compromise: a group is the work of one process, and a plan may have few
GROUPS = ".groups"


def arrange(cells: Sequence[Config], batch: bool = True) -> list[Group]:
    """Divide the runs of a plan into groups that train as one batch; a group of one where a batch
    is not faster.

    With full batches of samples, all seeds of a method's grid share their samples and train as one.
    Groups are cut in the order of the plan and computed in the order of their first runs, so that
    an unfinished sweep has the grids of the first seeds first.
    """
    families: dict[Any, list[int]] = {}
    places = {fingerprint(cell): place for place, cell in reversed(list(enumerate(cells)))}
    for place in sorted(places.values()):
        cell = cells[place]
        shares = cell.train.batch_size is None or cell.train.seed
        families.setdefault((batch_key(cell), shares), []).append(place)
    pieces, known = [], dict[Any, int]()
    for (sort, _), family in families.items():
        asked = (sort, len(family))  # seeds do not matter
        if batch and asked not in known:
            known[asked] = _most([cells[place] for place in family])
        most = known[asked] if batch else 1
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
    if not store.is_complete(folder) and not run_group((config,), out, watch):
        return None
    manifest = read_manifest(folder)
    if manifest is not None and recorded_identity(manifest, config) != identity_of(config):
        raise IntegrityError(f"{folder} holds another run than its name says; delete it")
    return manifest


def run_group(group: Group, out: Path, watch: Watch) -> bool:
    """Compute and store the missing runs of a group; False if another process computes some."""
    folders = sorted(run_folder(cell, out) for cell in missing(group, out))
    try:
        with ExitStack() as held:
            # Always in the same order: of two processes with common runs one gets all locks.
            for folder in folders:
                held.enter_context(store.lock_of(folder))
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
        (out / store.LOCKS / folder.name).unlink(missing_ok=True)
    for empty in (*folders, out / store.LOCKS, out):
        with suppress(OSError):
            empty.rmdir()


def parts_to_do(group: Group, out: Path) -> list[Group]:
    """The batches to train, so that the missing runs of a group get stored.

    The whole group if an earlier attempt left something; the runs of the former batch where a
    stored run lists a missing one; else a batch of the missing runs."""
    todo = {_name(cell): cell for cell in missing(group, out)}
    if not todo or len(group) == 1:
        return [group] if todo else []
    if any(files.keys() >= todo.keys() for files in store.read_checkpoints(home_of(group, out))):
        return [group]
    known, found = {_name(cell): cell for cell in group}, list[Group]()
    for name in [name for name in known if name not in todo]:
        before = _trained_with(out / name)
        if not todo.keys() & before:
            continue
        if known.keys() >= set(before):
            found.append(tuple(known[n] for n in before))
            todo = {n: cell for n, cell in todo.items() if n not in before}
        else:
            print(f"fairvar: the plan lacks some of the runs that trained with {out / name}; what "
                  "is missing of them may differ in its last bits", file=sys.stderr)  # fmt: skip
            break
    return [*found, *([tuple(todo.values())] if todo else [])]


def _trained_with(folder: Path) -> list[str]:
    """The names of the runs that a stored run trained with, itself among them."""
    listed = (read_manifest(folder) or {}).get("group", [])
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return list(dict.fromkeys(names))


def _finish(part: Group, out: Path, watch: Watch) -> None:
    """Train these runs, or continue where an earlier attempt was interrupted, and store the missing
    ones. (Stored ones train again with the others: the last bits may depend on the batch.)"""
    home, several = home_of(part, out), len(part) > 1
    histories = compute(part, home, watch)
    record_federation(out, federation_of(part[0]))
    group = list(map(_name, part)) if several else []
    for cell, history in zip(part, histories, strict=True):
        folder = run_folder(cell, out)
        if not store.is_complete(folder):
            store.store_run(folder, run_files(cell, history, group=group))
    if several:
        _drop(home)


def tidy(out: Path) -> None:
    """Delete what is left of groups whose runs are all stored, for example after a kill in the last
    moment, or because the plan has changed."""
    homes = [] if (out / GROUPS).is_symlink() else sorted((out / GROUPS).glob("*"))
    for home in homes:
        names = {name for files in store.read_checkpoints(home) for name in files}
        if names and all(_is_stored(out, name) for name in names) and not home.is_symlink():
            _drop(home)


def _is_stored(out: Path, name: str) -> bool:
    try:
        return store.is_complete(store.inside(out, name))
    except IntegrityError:  # not a name that fairvar writes
        return False


def home_of(group: Group, out: Path) -> Path:
    """Where the checkpoints of a group are: for a single run, its own folder."""
    if len(group) == 1:
        return store.no_link(run_folder(group[0], out))
    names = " ".join(map(_name, group))
    digest = hashlib.sha256(names.encode()).hexdigest()
    return store.no_link(store.no_link(out / GROUPS) / digest[:16])


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
