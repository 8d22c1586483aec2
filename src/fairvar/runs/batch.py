"""Runs of a sweep that differ in numbers only: computed as one batch, stored as separate runs.

Groups follow from the plan alone. Neither the number of workers nor an interruption changes who
trains with whom, and so the bytes of a sweep do not depend on them. The last bits of a run depend
on who trains beside it; its manifest lists them, so that a run that was deleted can be trained with
the same others again.

A group under way has a folder of its own, `.groups/HASH`: checkpoints of all its runs at one round
and, when they are trained, `finished`, from which the runs are stored one by one. Whoever dies in
between finds there what the others were stored from.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout

from fairvar.data.federation import Federation
from fairvar.engine.grid import Member, members_that_fit, train_grid, trains_together
from fairvar.engine.history import History
from fairvar.engine.train import Checkpoint, prepare
from fairvar.errors import BadInput, IntegrityError, RunFailed
from fairvar.runs.config import Config
from fairvar.runs.identity import batch_key, checkpoint_key, fingerprint, identity_of
from fairvar.runs.runner import (
    Watch,
    compute,
    federation_of,
    holds_run,
    keeper,
    leave_nothing,
    missing,
    model_of,
    pass_over,
    record_federation,
    run_cell,
    run_files,
    run_folder,
    save_run,
    store_run,
)
from fairvar.runs.serialize import pack_checkpoint, unpack_checkpoint
from fairvar.runs.store import (
    inside,
    is_complete,
    lock_of,
    no_link,
    pack_files,
    read_checkpoints,
    read_hashed,
    read_manifest,
    unpack_files,
    write_checkpoint,
    write_hashed,
)

Group = tuple[Config, ...]
MOST_TOGETHER = 100  # a compromise: every group is one worker's, and a plan may have few kinds
GROUPS, FINISHED = ".groups", "finished"


def arrange(cells: Sequence[Config], batch: bool = True) -> list[Group]:
    """The runs of a plan in groups that train together, each by itself where that does not pay.

    With full batches all seeds of a method's grid share their samples and train as one. Groups are
    cut in the order of the plan and computed in the order of their first runs, so that an
    unfinished sweep has the grids of the first seeds first.
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
    # The question is one of shapes: one initial model stands for all.
    model = first.model.name if first.model.weights is None else model_of(first, data)
    members = [Member(model, cell.method, cell.train) for cell in family]
    most = min(MOST_TOGETHER, members_that_fit(members, data))
    return most if trains_together(members[:most], data, first.model.loss) else 1


def run_group(group: Group, out: Path, watch: Watch) -> bool:
    """Compute and store what is missing of a group; False if another process has some of it."""
    if len(group) == 1:
        return run_cell(group[0], out, watch) is not None
    folders = sorted(run_folder(cell, out) for cell in missing(group, out))
    try:
        with ExitStack() as held:
            # All in the same order: of two processes with runs in common one gets them all.
            for folder in folders:
                held.enter_context(lock_of(folder))
            for part in parts_to_do(group, out):
                _finish(part, out, watch)
    except Timeout:
        return False
    except BadInput:
        leave_nothing(folders, out)
        raise
    except OSError as error:
        raise RunFailed(f"cannot work in {out}: {error.strerror or error}") from None
    return True


def parts_to_do(group: Group, out: Path) -> list[Group]:
    """Who trains together, so that what is missing of a group gets stored.

    The whole group if an earlier attempt left something; those that trained together before, where
    a stored run lists a missing one; else the missing ones among themselves."""
    todo = {_name(cell): cell for cell in missing(group, out)}
    if not todo:
        return []
    if _has_something(_home(group, out), todo):
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


def _has_something(home: Path, names: Iterable[str]) -> bool:
    """Whether a group's folder holds the runs of these names, trained or half trained."""
    found = [*read_checkpoints(home), read_hashed(home / FINISHED) or b""]
    return any(unpack_files(payload).keys() >= set(names) for payload in found)


def _finish(part: Group, out: Path, watch: Watch) -> None:
    """Train these runs together, or find what is left of an earlier attempt, and store those that
    are missing. (The others must train along: last bits may depend on how many do.)"""
    todo = missing(part, out)
    if len(part) == 1:
        folder = run_folder(part[0], out)
        return save_run(folder, part[0], compute(part[0], folder, watch))
    home = _home(part, out)
    files = _finished(home)
    if not all(holds_run(files.get(_name(cell), {}), identity_of(cell)) for cell in todo):
        histories = compute_group(part, _starts(home, part), home, watch)
        names = [_name(cell) for cell in part]
        files = {
            name: run_files(cell, history, group=names)
            for name, cell, history in zip(names, part, histories, strict=True)
        }
        packed = {name: pack_files(of_run) for name, of_run in files.items()}
        write_hashed(home / FINISHED, pack_files(packed))
    record_federation(out, federation_of(todo[0]))
    for cell in todo:
        store_run(run_folder(cell, out), files[_name(cell)])
    _drop(home)


def compute_group(
    cells: Sequence[Config], starts: Mapping[str, Checkpoint], home: Path, watch: Watch
) -> list[History]:
    """Train all of them, from their checkpoints or from the beginning."""
    first = cells[0]
    torch.set_num_threads(first.train.threads)
    keys = [checkpoint_key(identity_of(cell)) for cell in cells]

    def write(number: int, made: list[Checkpoint]) -> None:
        packed = {
            _name(cell): pack_checkpoint(checkpoint, key)
            for cell, checkpoint, key in zip(cells, made, keys, strict=True)
        }
        write_checkpoint(home, number, pack_files(packed))

    data, loss = federation_of(first), first.model.loss
    members = [
        Member(model_of(cell, data), cell.method, cell.train, starts.get(_name(cell)))
        for cell in cells
    ]
    keep = keeper(watch, first.train.rounds, write)
    try:
        return train_grid(members, data, loss, first.evaluate, watch.progress, keep)
    except BadInput as error:
        if starts:  # which are files, and may hold anything
            pass_over(home, error)
            return compute_group(cells, {}, home, watch)
        raise _blame(cells, members, data, error) from None


def _blame(
    cells: Sequence[Config], members: Sequence[Member], data: Federation, error: BadInput
) -> BadInput:
    """The error with the name of the run that caused it."""
    for cell, member in zip(cells, members, strict=True):
        try:
            prepare(member.model, data, member.method, cell.model.loss, member.settings)
        except BadInput as own:
            numbers = "".join(f", {k} {v:g}" for k, v in cell.method.numbers.items())
            train = f"lr {cell.train.lr:g}, seed {cell.train.seed}"
            return BadInput(f"{cell.method.label}{numbers}, {train}: {own}")
    return error


def tidy(out: Path) -> None:
    """Drop what was left of groups whose runs are all stored: by a kill in the last moment, by
    another way of computing them, or by a plan that has changed since."""
    homes = [] if (out / GROUPS).is_symlink() else sorted((out / GROUPS).glob("*"))
    for home in homes:
        found = [*read_checkpoints(home), read_hashed(home / FINISHED) or b""]
        names = {name for payload in found for name in unpack_files(payload)}
        if names and all(_is_stored(out, name) for name in names) and not home.is_symlink():
            _drop(home)


def _is_stored(out: Path, name: str) -> bool:
    try:
        return is_complete(inside(out, name))
    except IntegrityError:  # no name of ours
        return False


def _home(group: Group, out: Path) -> Path:
    names = " ".join(map(_name, group))
    return no_link(no_link(out / GROUPS) / hashlib.sha256(names.encode()).hexdigest()[:16])


def _name(cell: Config) -> str:
    return identity_of(cell).name


def _finished(home: Path) -> dict[str, dict[str, bytes]]:
    packed = unpack_files(read_hashed(home / FINISHED) or b"")
    return {name: unpack_files(content) for name, content in packed.items()}


def _starts(home: Path, part: Group) -> dict[str, Checkpoint]:
    """The newest checkpoint of all these runs; {} if there is none."""
    found: list[dict[str, Checkpoint]] = []
    for payload in read_checkpoints(home):
        packed = unpack_files(payload)
        try:
            found.append({
                _name(cell): unpack_checkpoint(
                    packed.get(_name(cell), b""), checkpoint_key(identity_of(cell))
                )
                for cell in part
            })  # fmt: skip
        except IntegrityError as error:
            pass_over(home, error)
    return max(found, key=lambda s: max(c.state.round for c in s.values()), default={})


def _drop(home: Path) -> None:
    """The group's own folder, and that of all groups with the last one."""
    for path in sorted(home.glob("*")):  # what tells whose it was goes last
        with suppress(OSError):
            path.unlink()
    for empty in (home, home.parent):
        with suppress(OSError):
            empty.rmdir()
