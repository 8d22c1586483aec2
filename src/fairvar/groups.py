"""Runs of a sweep that differ in numbers only: computed as one batch, stored as separate runs.

Groups follow from the plan alone. Neither the number of workers nor an interruption changes who
trains with whom, and so the bytes of a sweep do not depend on them.

A group under way has a folder of its own, `.groups/HASH`: checkpoints of all its runs at one round
and, when they are trained, `finished`, from which the runs are stored one by one. Whoever dies in
between finds there what the others were stored from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from msgspec.structs import replace

from fairvar.archive import pack_checkpoint, unpack_checkpoint
from fairvar.config import Config
from fairvar.engine.grid import Member, members_that_fit, train_grid, trains_together
from fairvar.engine.train import Checkpoint, prepare
from fairvar.errors import BadInput, IntegrityError, RunFailed
from fairvar.experiment import (
    Watch,
    compute,
    federation_of,
    keeper,
    leave_nothing,
    missing,
    model_of,
    record_federation,
    run_cell,
    run_files,
    run_folder,
    save_run,
    store_run,
)
from fairvar.federation import Federation
from fairvar.history import History
from fairvar.methods import FedAvg
from fairvar.store import (
    is_complete,
    pack_files,
    read_checkpoints,
    read_hashed,
    unpack_files,
    write_checkpoint,
    write_hashed,
)

Group = tuple[Config, ...]
MOST_TOGETHER = 100  # a compromise: every group is one worker's, and a plan may have few kinds
FINISHED = "finished"


def arrange(cells: Sequence[Config], batch: bool = True) -> list[Group]:
    """The runs of a plan in groups that train together, each by itself where that does not pay.

    With full batches all seeds of a method's grid share their samples and train as one. Groups are
    cut in the order of the plan and computed in the order of their first runs, so that an
    unfinished sweep has the grids of the first seeds first.
    """
    families: dict[Any, list[int]] = {}
    places = {cell.fingerprint: place for place, cell in reversed(list(enumerate(cells)))}
    for place in sorted(places.values()):
        cell = cells[place]
        shares = cell.train.batch_size is None or cell.train.seed
        families.setdefault((kind(cell), shares), []).append(place)
    pieces, known = [], dict[Any, int]()
    for (sort, _), family in families.items():
        asked = (sort, len(family))  # seeds do not matter
        if batch and asked not in known:
            known[asked] = _most([cells[place] for place in family])
        most = known[asked] if batch else 1
        pieces += [family[i : i + most] for i in range(0, len(family), most)]
    return [tuple(cells[place] for place in piece) for piece in sorted(pieces)]


def kind(cell: Config) -> tuple[Any, ...]:
    """Equal for runs that differ in the method's numbers, the learning rate and the seed only."""
    bare = replace(cell, method=FedAvg(), train=replace(cell.train, lr=1.0, seed=0))
    return bare, repr(cell.method.form)


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
        (out / ".locks").mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            # All in the same order: of two processes with runs in common one gets them all.
            for folder in folders:
                held.enter_context(FileLock(out / ".locks" / folder.name, timeout=0))
            todo = missing(group, out)
            if todo:
                _finish(group, todo, out, watch)
    except Timeout:
        return False
    except BadInput:
        leave_nothing(folders, out)
        raise
    except OSError as error:
        raise RunFailed(f"cannot work in {out}: {error.strerror or error}") from None
    return True


def _finish(group: Group, todo: Sequence[Config], out: Path, watch: Watch) -> None:
    """Store the runs `todo` of a group, from what is left of an earlier attempt if there is any."""
    home = _home(group, out)
    files = _finished(home)
    if not files.keys() >= {_name(cell) for cell in todo}:
        starts = _starts(home, group, todo)
        if not starts and len(todo) == 1:
            folder = run_folder(todo[0], out)
            return save_run(folder, todo[0], compute(todo[0], folder, watch))
        # With a checkpoint all its runs go on, also those that are stored by now: the last bits of
        # a run may depend on how many train beside it.
        cells = [cell for cell in group if _name(cell) in starts] or todo
        histories = compute_group(cells, starts, home, watch)
        done = zip(cells, histories, strict=True)
        files = {_name(cell): pack_files(run_files(cell, history)) for cell, history in done}
        write_hashed(home / FINISHED, pack_files(files))
    record_federation(out, federation_of(todo[0]))
    for cell in todo:
        store_run(run_folder(cell, out), unpack_files(files[_name(cell)]))
    _drop(home)


def compute_group(
    cells: Sequence[Config], starts: Mapping[str, Checkpoint], home: Path, watch: Watch
) -> list[History]:
    """Train all of them, from their checkpoints or from the beginning."""
    first = cells[0]
    torch.set_num_threads(first.train.threads)

    def write(number: int, made: list[Checkpoint]) -> None:
        packed = {_name(c): pack_checkpoint(m) for c, m in zip(cells, made, strict=True)}
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
    for home in sorted((out / ".groups").glob("*")):
        found = [*read_checkpoints(home), read_hashed(home / FINISHED) or b""]
        names = {name for payload in found for name in unpack_files(payload)}
        if names and all(is_complete(out / name) for name in names):
            _drop(home)


def _home(group: Group, out: Path) -> Path:
    names = " ".join(map(_name, group))
    return out / ".groups" / hashlib.sha256(names.encode()).hexdigest()[:16]


def _name(cell: Config) -> str:
    return run_folder(cell, Path()).name


def _finished(home: Path) -> dict[str, bytes]:
    return unpack_files(read_hashed(home / FINISHED) or b"")


def _starts(home: Path, group: Group, todo: Sequence[Config]) -> dict[str, Checkpoint]:
    """The newest intact checkpoint that holds all runs to do; {} if there is none."""
    known, needed = set(map(_name, group)), set(map(_name, todo))
    found: list[dict[str, Checkpoint]] = []
    for payload in read_checkpoints(home):
        with suppress(IntegrityError):
            starts = {n: unpack_checkpoint(part) for n, part in unpack_files(payload).items()}
            if needed <= starts.keys() <= known:
                found.append(starts)
    return max(found, key=lambda s: max(c.state.round for c in s.values()), default={})


def _drop(home: Path) -> None:
    """The group's own folder, and that of all groups with the last one."""
    for path in sorted(home.glob("*")):  # what tells whose it was goes last
        path.unlink(missing_ok=True)
    for empty in (home, home.parent):
        with suppress(OSError):
            empty.rmdir()
