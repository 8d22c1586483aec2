"""What a run is: other data or edited code are other runs, copies are the same one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save

from fairvar import cli
from fairvar.common.files import seal
from fairvar.data import dataset_sha256, sources
from fairvar.engine.keys import Identity, fingerprint, trial_key
from fairvar.errors import BadInput, FairvarError, IntegrityError
from fairvar.methods import METHODS, FedAvg, Method, register
from fairvar.report.files import group_names, group_table
from fairvar.report.result_tables import overviews
from fairvar.runs import identity
from fairvar.runs.archive import condense
from fairvar.runs.config import Config
from fairvar.runs.formats import MANIFEST
from fairvar.runs.identity import code_sha256, identity_of
from fairvar.runs.plan import Plan
from fairvar.runs.results import gather, stored_runs
from fairvar.runs.runner import Watch, arrange, federation_of, model_of, run_cell, run_folder
from fairvar.runs.stored import StoredRun
from fairvar.runs.sweep import run_sweep
from fairvar.runs.verify import rerun

SWEEP = """
[data]
name = "npz"
clients = 4
[partition]
name = "iid"
[train]
rounds = 2
[evaluate]
every = 1
[sweep]
methods = ["fedavg"]
seeds = 2
"""
DIGITS = {"data": {"name": "digits", "clients": 4}, "train": {"rounds": 2}}
PLUGIN = """
from fairvar import Method, register

@register
class Tilted(Method, frozen=True, tag="tilted"):
    uses_losses = True
    def weigh(self, memory, replies):
        weights = replies.share * replies.loss ** {power}
        return weights / weights.sum(), memory
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "cache"))
    identity.forget_files()


@pytest.fixture
def methods() -> Iterator[None]:
    """Methods that a test registers are forgotten after it."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def write_npz(path: Path, seed: int, samples: int = 80) -> Path:
    draw = np.random.default_rng(seed)
    np.savez(path, x=draw.normal(size=(samples, 3)), y=draw.integers(0, 2, samples))
    return path


def settle(path: Path) -> None:
    """As if the file had been there for a while; only its entry is new, which tests wait for."""
    os.utime(path, (1e9, 1e9))


def command(*arguments: str | Path) -> int:
    """The exit code of a `fairvar` command."""
    try:
        cli.main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def quiet(done: int, total: int, what: str) -> None:
    pass


# -- data -----------------------------------------------------------------------------------------
@pytest.fixture
def sweep(tmp_path: Path) -> tuple[str | Path, ...]:
    (tmp_path / "sw.toml").write_text(SWEEP)
    return ("sweep", tmp_path / "sw.toml", "--out", tmp_path / "runs", "--json")


def test_other_data_are_other_runs(sweep, tmp_path, capsys):
    a, b = write_npz(tmp_path / "a.npz", 0), write_npz(tmp_path / "b.npz", 1)
    assert command(*sweep, f"data.root={a}") == 0
    (alone,) = map(group_table, gather(tmp_path / "runs"))
    capsys.readouterr()
    assert command(*sweep, f"data.root={b}") == 0
    assert json.loads(capsys.readouterr().out)["done"] == 2
    assert len(stored_runs(tmp_path / "runs")) == 4
    both = [group_table(group) for group in gather(tmp_path / "runs")]
    assert alone.rows in [table.rows for table in both]
    assert both[0].rows != both[1].rows
    shas = {str(dataset_sha256("npz", path))[:8] for path in (a, b)}
    assert {table.title.partition(",")[0] for table in both} == {f"npz [{s}]" for s in shas}
    copy = Path(shutil.copy(a, tmp_path / "copy.npz"))  # the same data elsewhere
    assert command(*sweep, f"data.root={copy}") == 0
    assert len(stored_runs(tmp_path / "runs")) == 4


def test_a_file_that_was_edited_is_other_data(sweep, tmp_path, capsys):
    """Under the same name, of the same size, at once or with its time set back."""
    path = tmp_path / "a.npz"
    for seed in range(3):
        write_npz(path, seed)
        if seed == 2:
            settle(path)
        assert command(*sweep, f"data.root={path}") == 0
        assert len(stored_runs(tmp_path / "runs")) == 2 * (seed + 1)


@pytest.mark.parametrize("kind", ["missing", "folder", "text", "cut"])
def test_data_that_cannot_be_read_show_no_old_result(kind, sweep, tmp_path, capsys):
    good, bad = write_npz(tmp_path / "a.npz", 0), tmp_path / "bad.npz"
    assert command(*sweep, f"data.root={good}") == 0
    one = tmp_path / "one.toml"
    one.write_text(SWEEP.partition("[sweep]")[0])
    if kind == "folder":
        bad.mkdir()
    elif kind != "missing":
        bad.write_bytes(b"text" if kind == "text" else good.read_bytes()[:-30])
    capsys.readouterr()
    before = sorted(tmp_path.rglob("*"))
    for start in (sweep, ("run", one, "--out", tmp_path / "new", "--json")):
        assert command(*start, f"data.root={bad}") == (2 if kind in ("missing", "folder") else 4)
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert command(*sweep, f"data.root={bad}", "--dry") == 0  # which needs no data
    assert len(gather(tmp_path / "runs")) == 1  # nor does a report


def test_a_data_set_is_read_once(tmp_path, monkeypatch):
    path = write_npz(tmp_path / "a.npz", 0)
    monkeypatch.setattr(sources, "SETTLED", -60.0)  # files need not have been there for a while
    reads: list[str] = []
    real = sources.read_through_cache
    monkeypatch.setattr(sources, "read_through_cache",
                        lambda name, *rest: reads.append(name) or real(name, *rest))  # fmt: skip
    first = dataset_sha256("npz", path)
    assert first == dataset_sha256("npz", path) == sources.load("npz", path).sha256
    assert reads == ["npz", "npz"]  # once for the checksum, once to load it
    (kept,) = (tmp_path / "cache" / "sha256").iterdir()
    for damaged in (b"", b"x", kept.read_bytes().replace(b"a", b"b"), b"\xff " * 3):
        kept.write_bytes(damaged)
        assert dataset_sha256("npz", path) == first
    write_npz(path, 1)
    assert dataset_sha256("npz", path) != first
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("")  # cannot be written: costs time only
    before = len(reads)
    assert dataset_sha256("npz", path) == dataset_sha256("npz", path)
    assert len(reads) == before + 2


def test_new_files_are_not_trusted(tmp_path, monkeypatch):
    """Written again within one tick of the file system's clock, a file has the same stamp."""
    path = write_npz(tmp_path / "a.npz", 0)
    dataset_sha256("npz", path)
    assert not (tmp_path / "cache").exists()
    later = time.time_ns() + 3 * 10**9
    monkeypatch.setattr(sources.time, "time_ns", lambda: later)
    dataset_sha256("npz", path)
    assert len(list((tmp_path / "cache" / "sha256").iterdir())) == 1


def test_thousands_of_runs_ask_for_the_data_once(tmp_path, monkeypatch):
    path, asked = write_npz(tmp_path / "a.npz", 0), []
    monkeypatch.setattr(identity, "dataset_sha256", lambda *given: asked.append(given) or "0" * 64)
    base = Config.from_dict({"data": {"name": "npz", "root": str(path)}})
    for seed in range(1000):
        cell = Config.from_dict({**base.to_dict(), "train": {"seed": seed}})
        run_folder(cell, tmp_path)
    assert len(asked) == 1


def test_data_that_change_while_a_sweep_runs_stop_it(tmp_path):
    path = write_npz(tmp_path / "a.npz", 0)
    config = Config.from_dict({"data": {"name": "npz", "root": str(path), "clients": 4}})
    identity_of(config)
    write_npz(path, 1)
    with pytest.raises(FairvarError, match="were changed meanwhile"):
        federation_of(config)
    identity.forget_files()
    assert federation_of(config).clients == 4


def test_a_root_that_the_set_does_not_take_is_refused_when_all_is_done(tmp_path, capsys):
    config = tmp_path / "c.toml"
    config.write_text('[data]\nname="logistic"\nclients=4\n[partition]\nname="natural"\n'
                      "[train]\nrounds=1\n")  # fmt: skip
    run = ("run", config, "--out", tmp_path / "runs", "--json")
    assert command(*run) == 0
    capsys.readouterr()
    assert command(*run, f"data.root={tmp_path}") == 2
    assert capsys.readouterr().out == ""


def test_embedded_and_made_data_need_no_reading(monkeypatch):
    monkeypatch.setattr(sources, "load", None)
    for name, known in (("digits", True), ("mnist_1000", True), ("logistic", False)):
        assert (dataset_sha256(name) is not None) == known


# -- code -----------------------------------------------------------------------------------------
@pytest.mark.usefixtures("methods")
def test_an_edited_plugin_is_another_method(tmp_path, capsys):
    plugin, config = tmp_path / "tilted_for_tests.py", tmp_path / "c.toml"
    config.write_text('[data]\nname="digits"\nclients=4\n[train]\nrounds=2\n')
    run = ("run", config, "method.name=tilted", "--plugin", plugin, "--out", tmp_path / "runs",
           "--json")  # fmt: skip
    found = []
    for power in ("1", "2", "1"):  # files of the same size, written within a second
        plugin.write_text(PLUGIN.format(power=power))
        assert command(*run) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["result"] != found[1]["result"]
    assert found[0]["folder"] == found[2]["folder"] != found[1]["folder"]
    plugin.write_text(PLUGIN.format(power="broken"))
    assert command(*run) == 3  # it ran, and no old table was shown
    assert capsys.readouterr().out == ""
    plugin.write_text(PLUGIN.format(power="1"))
    (group,) = gather(tmp_path / "runs")
    codes = {r.identity.code for r in stored_runs(tmp_path / "runs")}
    assert {r.label for r in group.results} == {f"Tilted [v1, code {str(c)[:8]}]" for c in codes}
    notes = group_table(group).notes
    assert any("different versions of a method's code" in note for note in notes)


def own_module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)
    sys.modules.pop(name, None)


def test_what_the_code_imports_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    marks = set()
    for number, deeper in ((1, 1), (2, 1), (2, 2)):
        own_module(tmp_path, "deeper_for_tests", f"K = {deeper}")
        own_module(tmp_path, "helper_for_tests", f"import math\nN = {number}\ndef f():\n"
                   "    from deeper_for_tests import K\n    return K\n")  # fmt: skip
        own_module(tmp_path, "method_for_tests", "from fairvar import Method\n"
                   "from helper_for_tests import N\n"
                   "class Own(Method, frozen=True, tag='own_for_tests'):\n    pass\n")  # fmt: skip
        marks.add(code_sha256(__import__("method_for_tests").Own))
    assert len(marks) == 3
    assert None not in marks


def test_packages_of_another_environment_are_installed_ones(tmp_path, monkeypatch):
    """An environment may take them from another by a .pth file."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    for folder in (tmp_path, packages):
        monkeypatch.syspath_prepend(str(folder))
    own_module(packages, "package_for_tests", "N = 1")
    own_module(tmp_path, "uses_for_tests", "import package_for_tests\ndef f():\n    pass\n")
    before = code_sha256(__import__("uses_for_tests").f)
    own_module(packages, "package_for_tests", "N = 2")
    assert code_sha256(__import__("uses_for_tests").f) == before


def test_built_in_methods_have_a_version_instead(monkeypatch):
    config = Config.from_dict(DIGITS)
    before = identity_of(config)
    assert (before.version, before.code) == (1, None)
    assert all(
        code_sha256(kind) is None for kind in METHODS.values() if "fairvar" in kind.__module__
    )
    monkeypatch.setattr(FedAvg, "version", 2)
    assert identity_of(config).name != before.name


@pytest.mark.usefixtures("methods")
def test_a_version_of_ones_own_is_a_setting():
    @register
    class Versioned(Method, frozen=True, tag="versioned_for_tests"):
        version: str = "a"  # type: ignore[misc,assignment]

    found = [identity_of(replace(Config.from_dict(DIGITS), method=Versioned(v))) for v in "ab"]
    assert [i.version for i in found] == [1, 1]
    assert found[0].settings != found[1].settings


def test_models_and_partial_functions_count():
    def build(shape: tuple[int, ...], classes: int, width: int = 1) -> None:
        pass

    marks = {code_sha256(partial(build, width=w)) for w in (1, 2)} | {code_sha256(build)}
    assert len(marks) == 3
    assert None not in marks


def test_code_that_cannot_be_read_is_refused():
    scope: dict[str, Any] = {"__name__": "nowhere_for_tests", "Method": Method}
    exec("class Typed(Method, frozen=True, tag='typed_for_tests'):\n    pass", scope)
    with pytest.raises(BadInput, match="put it in a file"):
        code_sha256(scope["Typed"])


# -- stored runs ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("seeds")
    plan = Plan.from_dict({**DIGITS, "sweep": {"methods": ["fedavg"], "seeds": 2}})
    run_sweep(arrange(plan.cells), out, quiet)
    return out


def reseal(folder: Path, **changes: Any) -> None:
    facts = json.loads((folder / MANIFEST).read_text())
    del facts["seal"]
    facts = {k: v for k, v in (facts | changes).items() if k not in changes or v is not None}
    (folder / MANIFEST).write_bytes(seal(facts))


def test_copies_of_a_run_are_no_seeds(two_seeds, tmp_path):
    """Under any name, in one folder or in two, whole or condensed."""
    folder = Path(shutil.copytree(two_seeds, tmp_path / "runs"))
    first = stored_runs(folder)[0].folder
    shutil.copytree(first, folder / "a copy")
    shutil.copytree(first, folder / f"{first.name}-copy")
    condense(gather(two_seeds), tmp_path / "small")
    for folders in ([folder], [folder, two_seeds], [folder, tmp_path / "small"]):
        (group,) = gather(*folders)
        assert group.trials[0].seeds == [0, 1]
    condense(gather(folder), tmp_path / "again")
    assert len(stored_runs(tmp_path / "again")) == 2


def test_a_copy_with_other_results_is_refused(two_seeds, tmp_path):
    folder = Path(shutil.copytree(two_seeds, tmp_path / "runs"))
    first, second = (run.folder for run in stored_runs(folder))
    copy = Path(shutil.copytree(first, folder / "copy"))
    shutil.copy(second / "history.safetensors", copy)
    sums = {f.name: sha256(f.read_bytes()).hexdigest() for f in copy.iterdir()}
    reseal(copy, sha256={name: sums[name] for name in sums if name != MANIFEST})
    with pytest.raises(IntegrityError, match=r"different results") as error:
        gather(folder)
    assert first.name in str(error.value)
    assert "copy" in str(error.value)


def test_manifests_of_earlier_versions_mean_the_same(two_seeds, tmp_path):
    folder = Path(shutil.copytree(two_seeds, tmp_path / "runs"))
    run = stored_runs(folder)[0]
    shutil.copytree(run.folder, folder / "old")
    reseal(folder / "old", identity=None, group=None)
    assert StoredRun.open(folder / "old").identity == run.identity
    assert gather(folder)[0].trials[0].seeds == [0, 1]


@pytest.mark.parametrize("record", [3, {}, {"settings": 1, "data": None}, {"x": 1}])
def test_a_strange_record_is_named(record, two_seeds, tmp_path):
    folder = Path(shutil.copytree(two_seeds, tmp_path / "runs"))
    run = stored_runs(folder)[0].folder
    reseal(run, identity=record)
    with pytest.raises(IntegrityError, match=run.name):
        gather(folder)


def test_where_pretrained_weights_lie_separates_no_seeds():
    sections = [{"name": "2nn", "weights": path, "weights_sha256": "0" * 64} for path in "ab"]
    configs = [Config.from_dict({**DIGITS, "model": section}) for section in sections]
    assert fingerprint(configs[0]) == fingerprint(configs[1])
    same = Identity("s", None)
    assert trial_key(configs[0], same) == trial_key(configs[1], same)
    assert trial_key(configs[0], same) != trial_key(Config.from_dict(DIGITS), same)


def test_weights_that_changed_show_no_old_result(tmp_path):
    path = tmp_path / "w.safetensors"
    config = Config.from_dict({**DIGITS, "model": {"name": "2nn"}})
    shapes = model_of(config, federation_of(config)).state_dict()
    path.write_bytes(save(shapes))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for text in (digest, digest.upper()):
        section = {"name": "2nn", "weights": str(path), "weights_sha256": text}
        config = Config.from_dict({**DIGITS, "model": section})
        run_cell(config, tmp_path / "runs", Watch())
    assert len(stored_runs(tmp_path / "runs")) == 1
    path.write_bytes(save({**shapes, "extra": torch.zeros(1)}))
    identity.forget_files()
    with pytest.raises(IntegrityError, match="has SHA-256"):
        run_cell(config, tmp_path / "runs", Watch())
    path.unlink()
    identity.forget_files()
    with pytest.raises(FairvarError, match=r"w\.safetensors"):
        run_cell(config, tmp_path / "runs", Watch())


def test_a_run_under_another_name_is_not_shown(two_seeds, tmp_path):
    folder = Path(shutil.copytree(two_seeds, tmp_path / "runs"))
    first, second = stored_runs(folder)
    shutil.rmtree(second.folder)
    first.folder.rename(second.folder)
    with pytest.raises(IntegrityError, match="holds another run"):
        run_cell(second.config, folder, Watch())


def test_deployed_runs_are_no_seeds_of_simulated_ones(two_seeds, tmp_path):
    folder = Path(shutil.copytree(two_seeds, tmp_path / "runs"))
    run = stored_runs(folder)[0]
    shutil.copytree(run.folder, folder / "x-flower")
    record = json.loads((run.folder / MANIFEST).read_text())["identity"]
    reseal(folder / "x-flower", identity={**record, "deployed": "d" * 64})
    groups = gather(folder)
    assert sorted(len(g.provenances) for g in groups) == [1, 2]
    labels = {r.label for g in groups for r in g.results}
    assert labels == {"FedAvg [v1]", "FedAvg [v1, deployed dddddddd]"}


def test_reports_of_several_data_versions_keep_all_names_apart(sweep, tmp_path, capsys):
    for seed in range(2):
        path = write_npz(tmp_path / f"{seed}.npz", seed)
        assert command(*sweep, f"data.root={path}") == 0
    groups = gather(tmp_path / "runs")
    names = group_names(groups)
    assert len(set(names)) == len({group_table(g).title for g in groups}) == 2
    assert all(g.data in name for g, name in zip(groups, names, strict=True))
    assert [table.title for table in overviews([(g, group_table(g)) for g in groups])] == []
    path = condense(groups, tmp_path / "small", everything=True)
    again = gather(path.parent)
    assert [group_table(g) for g in again] == [group_table(g) for g in groups]
    capsys.readouterr()
    assert command("compare", f"{tmp_path / 'runs'}:FedAvg", f"{tmp_path / 'runs'}:FedAvg") == 2
    assert groups[0].data in capsys.readouterr().err


def test_running_again_needs_the_same_data(tmp_path):
    path = write_npz(tmp_path / "a.npz", 0)
    data = {"name": "npz", "root": str(path), "clients": 4}
    config = Config.from_dict({**DIGITS, "data": data, "partition": {"name": "iid"}})
    run_cell(config, tmp_path / "runs", Watch())
    (run,) = stored_runs(tmp_path / "runs")
    assert rerun(run, 1).holds
    write_npz(path, 1)
    identity.forget_files()
    with pytest.raises(BadInput, match="was made from other data"):
        rerun(run, 1)


def test_one_run_again_finds_itself(tmp_path):
    config = Config.from_dict(DIGITS)
    manifest = run_cell(config, tmp_path, Watch())
    assert manifest is not None
    assert manifest["fingerprint"] == fingerprint(config) == manifest["identity"]["settings"]
    assert manifest["identity"]["data"] == manifest["passport"]["dataset_sha256"]
    assert run_folder(config, tmp_path).name == identity_of(config).sha256[:16]
