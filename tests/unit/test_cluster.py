"""Runs computed on a Ray cluster are the runs that would have been computed here, whichever files
its nodes have, and if one of its nodes is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import call
from fairvar.errors import BadInput, RunFailed
from fairvar.methods import METHODS
from fairvar.runs import identity
from fairvar.runs.cluster import (
    Needs,
    Parcel,
    accept,
    compute_batch,
    make_batch,
    parcels_of,
    run_on_ray,
    unpacked,
)
from fairvar.runs.config import Config
from fairvar.runs.own import load_plugin
from fairvar.runs.plan import Plan
from fairvar.runs.runner import Watch, arrange, missing, run_folder, run_group

PLAN = {
    "data": {"name": "digits", "clients": 6},
    "train": {"rounds": 3},
    "sweep": {"methods": ["fedavg", "fairgrad*"], "seeds": 2},
}
HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs Ray (make deploy)")
RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on the loopback interface only
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
}
# A method that tells where it runs, in which round, and takes its time.
NOTING = """
import json, os, time
from pathlib import Path
import fairvar as fv
import helper_of_noting

@fv.register
class Noting(fv.Method, frozen=True, tag="noting"):
    strength: float = 1.0

    def at_round(self, t):
        note = {{"round": t, "strength": float(self.strength), "helper": helper_of_noting.__file__}}
        if "ray" in __import__("sys").modules:
            import ray
            if ray.is_initialized():
                where = ray.get_runtime_context()
                note |= {{"node": where.get_node_id(), **where.get_assigned_resources()}}
        with Path({log!r}).open("a") as file:
            file.write(json.dumps(note) + "\\n")
        time.sleep({pause})
        return self
"""


@pytest.fixture(autouse=True, scope="module")
def ray_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """On the loopback interface, with a token of its own, which Ray reads once per process."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**RAY, "RAY_AUTH_TOKEN_PATH": str(token)}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache, and methods that a test registers, are forgotten after it."""
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "cache"))
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)
    sys.modules.pop("helper_of_noting", None)


def files(out: Path) -> dict[str, bytes]:
    """All but the manifests, which tell the time, and the locks."""
    found = [p for p in out.glob("*/*") if p.parent.name != ".locks" and p.suffix != ".json"]
    return {str(p.relative_to(out)): p.read_bytes() for p in found}


def here(cells: Sequence[Config], out: Path, batch: bool = True) -> dict[str, bytes]:
    for group in arrange(cells, batch):
        run_group(group, out, Watch())
    return files(out)


def own_npz(folder: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    np.savez(folder / "own.npz", x=draw.random((60, 4), np.float32), y=np.arange(60) % 3)


def own_config(method: Mapping[str, Any], rounds: int = 3) -> Config:
    return Config.from_dict({
        "data": {"name": "npz", "root": "own.npz", "clients": 4},
        "partition": {"name": "iid"},
        "method": method,
        "train": {"rounds": rounds},
    })  # fmt: skip


def noted_cells(rounds: int = 3) -> list[Config]:
    return [own_config({"name": "noting", "strength": s}, rounds) for s in (1.0, 2.0)]


def noting(folder: Path, pause: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The plugin, loaded, and its log."""
    plugin, log = folder / "noting.py", folder / "log.txt"
    (folder / "helper_of_noting.py").write_text("")
    plugin.write_text(NOTING.format(log=str(log), pause=pause))
    monkeypatch.syspath_prepend(str(folder))
    load_plugin(plugin)
    return plugin, log


def notes(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


# -- without Ray: a task, computed in this process -------------------------------------------------
def test_files_sent_back_equal_those_computed_here(tmp_path: Path) -> None:
    cells = Plan.from_dict(PLAN).cells
    there = tmp_path / "there"
    for part in arrange(cells):
        assert accept(compute_batch(make_batch(part, there, {}), dict), part, there)
    assert missing(cells, there) == []
    assert here(cells, tmp_path / "here") == files(there)
    assert list((there / "federations").iterdir())


@pytest.mark.parametrize("batch", [True, False])
def test_a_batch_may_continue_elsewhere_after_every_round(tmp_path: Path, batch: bool) -> None:
    cells, there = Plan.from_dict(PLAN).cells, tmp_path / "there"
    for part in arrange(cells, batch):
        tasks = 1
        while not accept(compute_batch(make_batch(part, there, {}, seconds=0), dict), part, there):
            tasks += 1
        assert tasks == 4  # three rounds, and the files
    assert files(there) == here(cells, tmp_path / "here", batch)


def test_a_node_with_another_file_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the right one; without it, it refuses."""
    cell = own_config({"name": "fedavg"})
    for place, seed in (("here", 0), ("node", 1)):
        own_npz(tmp_path / place, seed)
    monkeypatch.chdir(tmp_path / "here")
    expected = here([cell], tmp_path / "expected")
    parcels, batch = parcels_of([cell]), make_batch((cell,), tmp_path / "out", {})
    monkeypatch.chdir(tmp_path / "node")
    identity.forget_files()
    with pytest.raises(RunFailed, match="differ from those of the sweep"):
        compute_batch(batch, dict)
    assert accept(compute_batch(batch, lambda: parcels), (cell,), tmp_path / "out")
    assert files(tmp_path / "out") == expected
    assert len(list((tmp_path / "cache" / "ray").glob("*/own.npz"))) == 1


def test_folders_and_several_files_keep_their_places(tmp_path: Path) -> None:
    parcel = Parcel("a", {"a/one/x.png": b"1", "a/two/y.png": b"2"})
    root = unpacked(parcel)
    assert {p.relative_to(root).as_posix() for p in root.rglob("*.png")} == {
        "one/x.png",
        "two/y.png",
    }
    assert unpacked(parcel) == root
    assert unpacked(Parcel("a", {**parcel.files, "a/one/x.png": b"3"})) != root


def test_a_node_with_other_versions_refuses(tmp_path: Path) -> None:
    part = arrange(Plan.from_dict(PLAN).cells)[0]
    batch = make_batch(part, tmp_path, {})
    other = batch._replace(versions={**batch.versions, "torch": "2.0.0"})
    with pytest.raises(RunFailed, match="install the same versions"):
        compute_batch(other, dict)


@pytest.mark.parametrize(
    ("share", "match"),
    [
        (Needs(gpus=1.5), "a share of one GPU or a whole number"),
        (Needs(gpus=-1), "0 or more"),
        (Needs(cpus=0), "above 0"),
        (Needs(gpus=float("nan")), "0 or more"),
    ],
)
def test_impossible_shares(share: Needs, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        share.check()


def test_shares_follow_the_configuration() -> None:
    part = arrange(Plan.from_dict({**PLAN, "train": {"rounds": 3, "threads": 2}}).cells)[0]
    assert Needs().of(part) == {"CPU": 2.0, "GPU": 0.0}
    gpu = [Config.from_dict({"train": {"device": "cuda"}})]
    assert Needs().of(tuple(gpu)) == {"CPU": 1.0, "GPU": 1.0}
    assert Needs(0.5, 0.25).of(tuple(gpu)) == {"CPU": 0.5, "GPU": 0.25}


def test_shares_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('[data]\nname = "digits"\n[sweep]\nmethods = ["fedavg"]\n')
    code, _, err = call(capsys, "sweep", file, "--ray-gpus", "0.25")
    assert code == 2
    assert "--ray ADDRESS" in err
    assert err.count("\n") == 1


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_message_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"fairvar\[ray\]"):
        run_on_ray(arrange(Plan.from_dict(PLAN).cells), tmp_path, "local", lambda *_: None)


# -- a cluster of two nodes on this machine --------------------------------------------------------
class Cluster:
    """Nodes of Ray on the loopback interface, each in a folder of its own."""

    def __init__(self, folder: Path, *nodes: Mapping[str, float]) -> None:
        from ray.cluster_utils import Cluster as Nodes

        self.folder = folder
        head = {"num_cpus": 0, "include_dashboard": False}
        self.nodes = Nodes(initialize_head=True, head_node_args=head)
        self.members = [self._add(number, node) for number, node in enumerate(nodes)]

    def _add(self, number: int, node: Mapping[str, float]) -> Any:
        """Its processes start in a folder that holds another own.npz."""
        place, before = self.folder / f"node-{number}", Path.cwd()
        own_npz(place, seed=number + 10)
        os.chdir(place)
        try:
            return self.nodes.add_node(wait=True, **node)
        finally:
            os.chdir(before)

    @property
    def address(self) -> str:
        return str(self.nodes.address)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    made = []
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "cache-of-nodes"))

    def start(*nodes: Mapping[str, float]) -> Cluster:
        made.append(Cluster(tmp_path, *nodes))
        monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "cache"))
        own_npz(tmp_path, seed=0)
        monkeypatch.chdir(tmp_path)
        return made[-1]

    yield start
    for each in made:
        each.nodes.shutdown()


@needs_ray
@pytest.mark.deployment
def test_on_a_local_ray(tmp_path: Path) -> None:
    cells = Plan.from_dict(PLAN).cells
    run_on_ray(arrange(cells), tmp_path / "there", "local", lambda *_: None)
    assert files(tmp_path / "there") == here(cells, tmp_path / "here")


@needs_ray
@pytest.mark.deployment
def test_plugin_and_data_go_along_and_tasks_take_their_share(
    cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the second node has a GPU in Ray's list, so it computes all."""
    nodes = cluster({"num_cpus": 1}, {"num_cpus": 1, "num_gpus": 1})
    _, log = noting(tmp_path, 0.0, monkeypatch)
    cells, quiet = noted_cells(), lambda *_: None
    alone = arrange(cells, batch=False)
    run_on_ray(alone, tmp_path / "there", nodes.address, quiet, Needs(0.5, 0.25))
    seen = notes(log)
    assert {n["node"] for n in seen} == {nodes.members[1].node_id}
    assert {(n["CPU"], n["GPU"]) for n in seen} == {(0.5, 0.25)}
    assert all(n["helper"].startswith(str(tmp_path / "cache-of-nodes" / "ray")) for n in seen)
    assert files(tmp_path / "there") == here(cells, tmp_path / "here", batch=False)
    with pytest.raises(BadInput, match=r"no node of the Ray cluster has 1 CPU\(s\) and 2 GPU"):
        run_on_ray(alone, tmp_path / "new", nodes.address, quiet, Needs(1, 2))
    assert not (tmp_path / "new").exists()


@needs_ray
@pytest.mark.deployment
def test_runs_of_a_killed_node_continue_elsewhere(
    cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster({"num_cpus": 1}, {"num_cpus": 1})
    _, log = noting(tmp_path, 0.1, monkeypatch)
    cells = noted_cells(rounds=60)
    killed = nodes.members[1]

    def kill() -> None:
        while not any(n["round"] >= 10 and n["node"] == killed.node_id for n in notes(log)):
            time.sleep(0.1)
        nodes.nodes.remove_node(killed, allow_graceful=False)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    alone = arrange(cells, batch=False)
    run_on_ray(alone, tmp_path / "there", nodes.address, lambda *_: None, seconds=0.5)
    thread.join()
    seen = notes(log)
    last = max(i for i, n in enumerate(seen) if n["node"] == killed.node_id)
    moved = seen[last]["strength"]
    # Every task, also the one that only writes files, asks for the method of round 1 first.
    after = [n["round"] for n in seen[last:] if n["strength"] == moved and n["round"] > 1]
    assert after[-1] == 59
    assert min(after) > 2  # from a checkpoint, not from the beginning
    assert files(tmp_path / "there") == here(cells, tmp_path / "here", batch=False)


@needs_ray
@pytest.mark.deployment
def test_after_ctrl_c_the_same_command_continues(
    cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster({"num_cpus": 1}, {"num_cpus": 1})
    plugin, _ = noting(tmp_path, 0.05, monkeypatch)
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[data]\nname = "npz"\nroot = "own.npz"\nclients = 4\n[partition]\nname = "iid"\n'
        '[train]\nrounds = 30\n[sweep]\nmethods = ["noting"]\nseeds = 6\n'
    )
    command = [sys.executable, "-m", "fairvar", "sweep", str(plan), "--plugin", str(plugin)]
    command += ["--no-batch", "--out", "there"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    there, cells = tmp_path / "there", Plan.load(plan).cells
    with subprocess.Popen([*command, "--ray", nodes.address], env=environment) as sweep:
        while len(missing(cells, there)) == len(cells):
            assert sweep.poll() is None
            time.sleep(0.1)
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(180) == 130
    kept = [run_folder(c, there) for c in cells if c not in missing(cells, there)]
    assert 0 < len(kept) < len(cells)
    times = {path: (path / "manifest.json").stat().st_mtime_ns for path in kept}
    subprocess.run([*command, "--ray", nodes.address], env=environment, check=True)
    assert missing(cells, there) == []
    assert {path: (path / "manifest.json").stat().st_mtime_ns for path in kept} == times
    assert files(there) == here(cells, tmp_path / "here", batch=False)
