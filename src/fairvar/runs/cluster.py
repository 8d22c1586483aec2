"""The missing runs of a sweep on a Ray cluster, whose nodes need no shared disk.

A task computes one batch of runs for a minute and returns a checkpoint, or the files of the
finished runs. This process stores them and sends the batch on. So a batch may continue on any node,
and what a killed node had not returned is computed again from the last checkpoint.

A task names the identities of its runs, which contain the checksums of data, weights and code. Code
of the user's is sent along. Data and weights are those of the node if they have the right
checksums, and are sent along otherwise. A node that still gets other identities, or has other
versions of fairvar or torch, refuses the task.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from math import floor, inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from filelock import Timeout
from msgspec.structs import replace

from fairvar.common.files import read_bytes, walk, write_bytes
from fairvar.common.process import Report, stop_signals
from fairvar.data.fetch import cache_dir
from fairvar.data.sources import SOURCES, locate
from fairvar.engine.keys import checkpoint_key
from fairvar.errors import PLUGIN, BadInput, FairvarError, RunFailed, cause, explained
from fairvar.runs.config import Config
from fairvar.runs.formats import MANIFEST, SLOTS, lock_of, save_files, store_run
from fairvar.runs.identity import forget_files, identity_of, user_modules
from fairvar.runs.own import Own, in_use, load, searching
from fairvar.runs.runner import (
    Interrupted,
    RunGroup,
    Watch,
    compute,
    federation_of,
    home_of,
    missing,
    parts_to_do,
    record_federation,
    run_files,
    run_folder,
)
from fairvar.runs.sweep import MOST_RESTARTS, failure_of

SECONDS = 60.0  # that a task computes before it returns a checkpoint
MOST_SENT = 1 << 30  # bytes of data and weights; more must be on the nodes
Files = dict[str, bytes]  # by path below a folder


class Needs(NamedTuple):
    """The resources of a node that a task takes. None: train.threads CPUs; one GPU for "cuda"."""

    cpus: float | None = None
    gpus: float | None = None

    def check(self) -> Needs:
        cpus, gpus = 1.0 if self.cpus is None else self.cpus, self.gpus or 0.0
        if not (0 < cpus < inf and 0 <= gpus < inf):
            raise BadInput("--ray-cpus must be above 0 and --ray-gpus 0 or more")
        if gpus > 1 and gpus != floor(gpus):
            raise BadInput(f"--ray-gpus {gpus:g}: give a share of one GPU or a whole number")
        return self

    def of(self, part: RunGroup) -> dict[str, float]:
        train = part[0].train
        cpus = float(train.threads) if self.cpus is None else self.cpus
        gpus = float(train.device.startswith("cuda")) if self.gpus is None else self.gpus
        return {"CPU": cpus, "GPU": gpus}


class TaskInput(NamedTuple):
    """What a task computes: runs that train together."""

    configs: list[str]  # as TOML
    names: list[str]  # of their folders
    versions: dict[str, str]
    own: list[Own]  # code of the user's, and
    code: Files  # its files, with those that they import
    saved: Files  # checkpoints
    seconds: float


class Parcel(NamedTuple):
    """A data set or a file of weights."""

    root: str  # what the configuration names, below the folder of the files
    files: Files


class Output(NamedTuple):
    """What a task returns: files of finished runs, or checkpoints, or why it failed."""

    files: Files
    saved: Files
    exit_code: int = 0
    error: str = ""


def run_on_ray(
    groups: Sequence[RunGroup],
    out: Path,
    address: str,
    report: Report,
    share: Needs = Needs(),  # noqa: B008  # a constant
    seconds: float = SECONDS,
) -> None:
    """Compute the missing runs of these groups on a Ray cluster, and store them here."""
    share, ray = share.check(), _import_ray(address)
    forget_files()
    cells = [cell for group in groups for cell in group]
    todo = [part for group in groups for part in parts_to_do(group, out)]
    if not todo:
        return
    _connect(ray, address)
    with ExitStack() as held:
        held.callback(ray.shutdown)
        asked = held.enter_context(stop_signals())  # ray.init replaces the handler of SIGTERM
        for needs in {tuple(share.of(part).items()): share.of(part) for part in todo}.values():
            _check_room(ray.nodes(), needs)
        sent = ray.put(parcels_of(cells))
        task, code = ray.remote(max_retries=0)(_task), own_files(cells)
        waiting, running = deque(todo), dict[Any, tuple[RunGroup, ExitStack, int]]()

        def start(part: RunGroup, locks: ExitStack, restarts: int = 0) -> None:
            needs = share.of(part)
            work = make_batch(part, out, code, seconds)
            given = task.options(num_cpus=needs["CPU"], num_gpus=needs["GPU"])
            running[given.remote(work, [sent])] = part, locks, restarts  # a list: got on demand

        while waiting or running:
            if asked():
                raise Interrupted("interrupted; the same command continues")
            while waiting and len(running) < _room(ray.nodes(), share.of(waiting[0])) + 1:
                part = waiting.popleft()
                if locks := _locked(part, out):
                    start(part, held.enter_context(locks))
            ready, _ = ray.wait(list(running), num_returns=1, timeout=1.0) if running else ([], 0)
            for reference in ready:
                part, locks, restarts = running.pop(reference)
                try:
                    result: Output = ray.get(reference)
                except ray.exceptions.RayError as error:  # the node or its worker was killed
                    if restarts == MOST_RESTARTS:
                        raise RunFailed(f"Ray gave up on a batch of runs: {cause(error)}") from None
                    start(part, locks, restarts + 1)
                    continue
                if accept(result, part, out):
                    locks.close()
                else:
                    start(part, locks)
            done = len(cells) - len(missing(cells, out))
            nodes = sum(node["Alive"] for node in ray.nodes())
            report(done, len(cells), f"runs, on {nodes} node(s) of Ray at {address}")


def accept(result: Output, part: RunGroup, out: Path) -> bool:
    """Store what a task returned; False if the batch must go on."""
    if result.exit_code:
        raise failure_of(result.exit_code, result.error)
    for slot, content in result.saved.items():
        write_bytes(home_of(part, out) / slot, content)
    if result.saved:
        return False
    done = {path.parent.name for path in out.glob(f"*/{MANIFEST}")}
    for folder in {name.partition("/")[0] for name in result.files} - done:
        mine = {n: c for n, c in result.files.items() if n.startswith(f"{folder}/")}
        if f"{folder}/{MANIFEST}" in mine:
            store_run(out / folder, {n.partition("/")[2]: c for n, c in mine.items()})
        else:
            save_files(out, mine, depth=2)
    return True


def make_batch(part: RunGroup, out: Path, code: Files, seconds: float = SECONDS) -> TaskInput:
    home, saved = home_of(part, out), {}
    for slot in SLOTS:
        with suppress(OSError):
            saved[slot] = (home / slot).read_bytes()
    return TaskInput(
        configs=[cell.to_toml() for cell in part],
        names=_names(part),
        versions=_versions(part),
        own=in_use(part),
        code=code,
        saved=saved,
        seconds=seconds,
    )


def _names(cells: Sequence[Config]) -> list[str]:
    return [identity_of(cell).name for cell in cells]


def _versions(cells: Sequence[Config]) -> dict[str, str]:
    """What must be equal, in addition to the identity, to continue a checkpoint elsewhere."""
    return {k: v for k, v in checkpoint_key(identity_of(cells[0])).items() if k != "identity"}


def _locked(part: RunGroup, out: Path) -> ExitStack | None:
    """The locks of these runs; None if another process computes one of them."""
    with ExitStack() as held, suppress(Timeout):
        for folder in sorted(run_folder(cell, out) for cell in missing(part, out)):
            held.enter_context(lock_of(folder))
        return held.pop_all()
    return None


# -- the cluster -----------------------------------------------------------------------------------
def _import_ray(address: str) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local":  # by default Ray listens on every network interface
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError:
        raise BadInput('--ray needs Ray: pip install "fairvar[ray]"') from None
    return ray


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise BadInput(f"cannot use Ray at {address}: {cause(error)}; is the cluster up, and does "
                       "it ask for a token (RAY_AUTH_MODE)?") from None  # fmt: skip


def _room(nodes: Sequence[Mapping[str, Any]], needs: Mapping[str, float]) -> int:
    """How many such tasks the nodes can compute at a time."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    fits = [min(floor(has.get(k, 0) / n) for k, n in needs.items() if n) for has in alive]
    return sum(fits)


def _check_room(nodes: Sequence[Mapping[str, Any]], needs: Mapping[str, float]) -> None:
    if not _room(nodes, needs):
        raise BadInput(
            f"no node of the Ray cluster has {needs['CPU']:g} CPU(s) and {needs['GPU']:g} GPU(s) "
            "for a task; give smaller --ray-cpus and --ray-gpus, or start such a node"
        )


# -- on a node -------------------------------------------------------------------------------------
def _task(batch: TaskInput, sent: Sequence[Any]) -> Output:
    import ray

    try:
        return compute_batch(batch, lambda: ray.get(sent[0]))
    except Exception as error:
        found: FairvarError = explained(error)
        return Output({}, {}, found.exit_code, f"on a node of Ray: {found}")


def compute_batch(batch: TaskInput, sent: Callable[[], dict[str, Parcel]]) -> Output:
    """Compute these runs for some time. `sent` gives the files that the driver has."""
    if batch.own:
        _load_code(tuple(batch.own), tuple(batch.code.items()))
    asked = [Config.from_toml(text) for text in batch.configs]
    cells = _with_files(asked, batch.names, sent)
    if _versions(cells) != batch.versions:
        raise RunFailed(f"this node has {_versions(cells)}, the sweep was started with "
                        f"{batch.versions}; install the same versions")  # fmt: skip
    end = time.monotonic() + batch.seconds
    with TemporaryDirectory() as name:
        home, files = Path(name), dict[str, bytes]()
        for slot, content in batch.saved.items():
            write_bytes(home / slot, content)
        try:
            histories = compute(cells, home, Watch(stopping=lambda: time.monotonic() > end))
        except Interrupted:
            return Output({}, {s: (home / s).read_bytes() for s in SLOTS if (home / s).exists()})
        data = federation_of(cells[0])
        record_federation(home, data)
        for path in home.glob("federations/*"):
            files[f"federations/{path.name}"] = path.read_bytes()
    group = batch.names if len(cells) > 1 else []
    for cell, used, history in zip(asked, cells, histories, strict=True):
        identity = identity_of(used)
        made = run_files(cell, history, data.provenance, identity=identity, group=group)
        files |= {f"{identity.name}/{file}": content for file, content in made.items()}
    return Output(files, {})


def _with_files(
    cells: Sequence[Config], names: Sequence[str], sent: Callable[[], dict[str, Parcel]]
) -> list[Config]:
    """These runs with data and weights of the right checksums: the node's own, or those sent."""
    with suppress(BadInput):
        if _names(cells) == names:
            return list(cells)
    parcels, found = sent(), []
    for cell in cells:
        data, weights = parcels.get(_data_key(cell)), parcels.get(str(cell.model.weights))
        if data is not None:
            cell = replace(cell, data=replace(cell.data, root=str(unpacked(data))))
        if weights is not None:
            cell = replace(cell, model=replace(cell.model, weights=str(unpacked(weights))))
        found.append(cell)
    if _names(found) != names:
        raise RunFailed("its data, weights or code differ from those of the sweep; put the same "
                        "files and packages there")  # fmt: skip
    return found


def unpacked(parcel: Parcel) -> Path:
    """Where this node stores files that were sent: in the cache, by their checksum."""
    sums = hashlib.sha256()
    for path, content in sorted(parcel.files.items()):
        sums.update(f"{path} {len(content)}\n".encode() + content)
    folder = cache_dir() / "ray" / sums.hexdigest()
    for path, content in parcel.files.items():
        if not (folder / path).exists():
            write_bytes(folder / path, content)
    return folder / parcel.root


@lru_cache(maxsize=1)  # once per process
def _load_code(found: tuple[Own, ...], code: tuple[tuple[str, bytes], ...]) -> None:
    folder = unpacked(Parcel(".", dict(code)))
    plugins = {own.name: str(folder / Path(own.name).name) for own in found}
    load(Own(own.kind, plugins[own.name] if own.kind == "method" else own.name, str(folder))
         for own in found)  # fmt: skip


# -- what is sent ----------------------------------------------------------------------------------
def own_files(cells: Sequence[Config]) -> Files:
    """The files of the user's code for these runs, with those that they import."""
    files: Files = {}
    with searching():
        for own in in_use(cells):
            plugin = Path(own.name)
            home = PLUGIN + plugin.stem if own.kind == "method" else own.name.partition(":")[0]
            modules = user_modules(home)
            if own.kind == "method":
                modules[plugin.name] = modules.pop(home)
            files |= modules
    return files


def parcels_of(cells: Sequence[Config]) -> dict[str, Parcel]:
    """Data sets and weights of these runs, as far as they are files and not too large."""
    paths: dict[str, list[Path]] = {}
    for cell in cells:
        if cell.data.name in SOURCES and _data_key(cell) not in paths:
            paths[_data_key(cell)] = locate(cell.data.name, cell.data.root)[1]
        if cell.model.weights is not None:
            paths[cell.model.weights] = [Path(cell.model.weights)]
    found = {key: dict(_files_below(some)) for key, some in paths.items()}
    if sum(p.stat().st_size for files in found.values() for p in files.values()) > MOST_SENT:
        return {}
    return {
        key: Parcel(
            paths[key][0].name if len(paths[key]) == 1 else ".",
            {place: read_bytes(path, MOST_SENT) for place, path in files.items()},
        )
        for key, files in found.items()
    }


def _data_key(cell: Config) -> str:
    return f"{cell.data.name} {cell.data.root}"


def _files_below(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Files, and all files below folders, by their place below the folder that has them all."""
    for path in paths:
        inner = [Path(entry.path) for entry in walk(path)] if path.is_dir() else [path]
        yield from ((str(p.relative_to(path.parent)), p) for p in inner if p.is_file())
