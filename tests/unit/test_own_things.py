"""Own models, data and methods in configurations, and sweeps over any key. docs/own_things.md is
executed block by block."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import call
from fairvar.errors import BadInput
from fairvar.methods import METHODS
from fairvar.report import files
from fairvar.runs import cluster, own
from fairvar.runs.archive import condense
from fairvar.runs.config import Config, merge_overrides
from fairvar.runs.identity import identity_of
from fairvar.runs.plan import Plan
from fairvar.runs.results import gather, stored_runs
from fairvar.runs.runner import Watch, arrange, run_cell
from fairvar.runs.sweep import run_sweep

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/own_things.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.M | re.S)
HEAD = re.compile(r"\A# file: (\S+)\n(.*)", re.S)
FILES = {found[1]: found[2] for _, block in BLOCKS if (found := HEAD.match(block))}


def forget() -> None:
    """As in a new process."""
    METHODS.pop("powers", None)
    own.LOADED.clear()
    own.FUNCTIONS.clear()
    for name in [
        n for n, m in sys.modules.items() if hasattr(getattr(m, "__loader__", 0), "is_own")
    ]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the page. The current folder is another one."""
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "cache"))
    place, other = tmp_path / "things", tmp_path / "elsewhere"
    place.mkdir()
    other.mkdir()
    for name, text in FILES.items():
        (place / name).write_text(text)
    monkeypatch.chdir(other)
    before = dict(METHODS)
    yield place
    forget()
    METHODS.clear()
    METHODS.update(before)


# -- the page --------------------------------------------------------------------------------------
def test_the_page_is_executed(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(files, "_figures", lambda group: iter(()))  # other tests draw
    commands = [line for kind, block in BLOCKS if kind == "console" for line in block.splitlines()]
    assert len(commands) == 8
    said = {}
    for line in commands:
        forget()  # every command is a process
        code, said[line], err = call(capsys, *line.split()[1:])
        assert code == 0, (line, err)
        needs_code = line.split()[1] in ("run", "sweep", "verify")
        assert bool(own.LOADED) == needs_code
    assert len(list(Path("runs").glob("*/manifest.json"))) == 3
    report = said["fairvar report runs/clinics-sweep"]
    assert "Powers" in report
    assert re.search(r"clinics:data.*clinics:model, shift 0\.4", report)
    assert report.count("12 runs") == 2
    assert "agrees" in said["fairvar verify runs/clinics-sweep --rerun 1"]


# -- identity --------------------------------------------------------------------------------------
def test_code_arguments_and_arrays_make_the_run(folder: Path) -> None:
    def identity(*overrides: str):
        return identity_of(Config.load(folder / "clinics.toml", overrides))

    first = identity()
    assert identity() == first
    assert first.code is not None
    assert first.data is not None
    assert identity("model.args.width=5").settings != first.settings
    assert identity("data.args.shift=0.5").data != first.data
    module = folder / "clinics.py"
    module.write_text(module.read_text().replace("nn.Tanh()", "nn.ReLU()"))  # same size or not
    edited = identity()
    assert edited.data == first.data
    assert edited.code != first.code
    module.write_text("import deeper\n" + module.read_text())
    deeper = folder / "deeper.py"
    codes = set()
    for number in (1, 2):
        deeper.write_text(f"N = {number}")
        codes.add(identity().code)
    assert len(codes) == 2
    assert str(folder) not in sys.path


def test_two_folders_may_have_modules_of_the_same_name(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "second"
    other.mkdir()
    (other / "clinics.toml").write_text(FILES["clinics.toml"])
    (other / "clinics.py").write_text(FILES["clinics.py"].replace("width=8", "width=9"))
    found = {identity_of(Config.load(at / "clinics.toml")).code for at in (folder, other, folder)}
    assert len(found) == 2


METRIC = "def hit(outputs, targets):\n    return (outputs.argmax(1) == targets).double().mean()\n"


@pytest.mark.slow
def test_a_metric_lies_next_to_the_configuration(folder: Path, tmp_path: Path, capsys) -> None:
    """Workers and `verify` find it; a stored run that names it makes no code run."""
    (folder / "scores.py").write_text(METRIC)
    out = tmp_path / "out"
    plan = Plan.load(folder / "sweep.toml", ["sweep.grid={}", "evaluate.metric=scores:hit"])
    run_sweep(arrange(plan.cells), out, lambda *_: None, workers=2)
    forget()
    code, said, err = call(capsys, "verify", out, "--rerun", "1", "--seed", "0")
    assert code == 0, err
    assert "agrees" in said
    forget()
    (folder / "scores.py").unlink()
    assert gather(out)[0].metric.name == "hit"
    own.LOADED.clear()
    code, _, err = call(capsys, "verify", out, "--rerun", "1", "--seed", "0")
    assert code == 2
    assert "scores:hit" in err


def test_a_stored_metric_is_not_imported(folder: Path, tmp_path, monkeypatch, capsys):
    """Not even from the current folder: its code is not the one that made the run."""
    (folder / "scores.py").write_text(METRIC)
    out = tmp_path / "out"
    (run,) = Plan.load(folder / "sweep.toml", ['sweep.methods=["fedavg"]', "sweep.seeds=1",
                       "sweep.grid={}", "evaluate.metric=scores:hit"]).cells  # fmt: skip
    run_cell(run, out, Watch())
    forget()
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "another machine"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "scores.py").write_text("open('it_ran', 'w')\n")
    code, _, err = call(capsys, "verify", out, "--rerun", "1")
    assert code == 2
    assert "--plugin FILE" in err
    assert not (folder / "it_ran").exists()


# -- stored runs -----------------------------------------------------------------------------------
def sweep(folder: Path, out: Path, workers: int = 1, **grid: str) -> Plan:
    given = [f"sweep.grid={{{', '.join(f'{k!r} = {v}' for k, v in grid.items())}}}"]
    plan = Plan.load(folder / "sweep.toml", given)
    run_sweep(arrange(plan.cells), out, lambda *_: None, workers)
    return plan


@pytest.mark.slow
def test_workers_load_the_same_code(folder: Path, tmp_path: Path) -> None:
    sweep(folder, tmp_path / "one")
    sweep(folder, tmp_path / "two", workers=2)
    names = [sorted(p.name for p in (tmp_path / n).glob("[!.f]*")) for n in ("one", "two")]
    assert names[0] == names[1]
    assert len(names[0]) == 4


def test_stored_runs_make_no_code_run(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    sweep(folder, out, **{"method.q": "[1.0, 4.0]"})
    forget()
    for name in FILES:  # nothing is left to import
        (folder / name).unlink()
    (group,) = gather(out)
    powers = next(r for r in group.results if r.label == "Powers")
    assert powers.trial.knob is not None
    assert powers.trial.knob[0] == "q"
    assert {t.knob for t in group.trials if t.label == "Powers"} == {("q", 1.0), ("q", 4.0)}
    assert call(capsys, "condense", out, "--out", tmp_path / "small")[0] == 0
    (small,) = gather(tmp_path / "small")
    assert [r.trial.describe(r.at) for r in small.results] == [
        r.trial.describe(r.at) for r in group.results
    ]
    assert call(capsys, "compare", f"{out}:Powers", f"{out}:FedAvg")[0] == 0
    assert not own.LOADED
    assert "powers" not in METHODS
    code, _, err = call(capsys, "verify", out, "--rerun", "1", "--seed", "0")
    assert code == 2
    assert "does not exist" in err or "No module" in err  # where it was is remembered


def test_verify_runs_only_code_that_this_user_ran(folder: Path, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    sweep(folder, out)
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "another machine"))
    forget()
    again = ("verify", out, "--rerun", "1", "--seed", "0")
    code, _, err = call(capsys, *again)
    assert code == 2
    assert "--plugin FILE" in err
    assert len(err.strip().splitlines()) == 1
    assert not own.LOADED
    code, said, err = call(capsys, *again, "--plugin", folder / "sweep.toml")
    assert code == 0, err
    assert "agrees" in said


def test_ray_gets_the_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task in this process, without the folder: code comes along by its checksum."""
    plan = Plan.load(folder / "sweep.toml", ['sweep.methods=["powers"]', "sweep.seeds=1",
                                             "sweep.grid={}"])  # fmt: skip
    code = cluster.own_files(plan.cells)
    assert set(code) == {"powers.py", "clinics.py"}
    group = arrange(plan.cells)[0]
    batch = cluster.make_batch(group, tmp_path, code)
    forget()
    for name in FILES:
        (folder / name).unlink()
    cluster._load_code.cache_clear()
    result = cluster.compute_batch(batch, dict)
    assert result.exit_code == 0
    assert cluster.accept(result, group, tmp_path / "out")
    (run,) = stored_runs(tmp_path / "out")
    assert run.folder.name == batch.names[0]


SMALL = {"data": {"name": "digits", "clients": 4}, "train": {"rounds": 2}, "evaluate": {"every": 1}}
ONE = {"methods": ["fedavg"], "seeds": 1}


# -- sweeps ----------------------------------------------------------------------------------------
def test_the_grid_is_expanded_grouped_and_chosen(folder: Path, tmp_path: Path) -> None:
    grid = {"train.batch_size": "[4, 8]", "data.args.shift": "[0.0, 0.4]"}
    plan = sweep(folder, tmp_path / "out", **grid)
    assert plan.settings.runs == len(plan.cells) == 2 * 2 * 2 * 2  # with methods and seeds
    assert len({identity_of(cell).name for cell in plan.cells}) == 16
    groups = gather(tmp_path / "out")
    assert len(groups) == 2
    for group in groups:
        assert len(group.trials) == 4
        assert [r.configurations for r in group.results] == [2, 2]
        assert {t.describe() for t in group.trials if t.label == "FedAvg"} == {
            "lr 0.3, batch_size 4", "lr 0.3, batch_size 8"
        }  # fmt: skip
        assert all(len(t.seeds) == 2 for t in group.trials)
    assert sorted(group.varied for group in groups) == [["shift 0"], ["shift 0.4"]]


def test_plans_over_methods_models_and_partitions() -> None:
    base = {"data": {"name": "digits", "clients": 4}, "sweep": {
        "methods": ["fedavg", "fairloss"], "seeds": 1, "grid": {
            "model.name": ["multinomial", "2nn"], "method.exact": [False, True],
            "partition.alpha": [0.1, 0.5]}}}  # fmt: skip
    plan = Plan.from_dict(base)
    found = {(c.method.label, c.model.name, c.partition.alpha) for c in plan.cells}  # type: ignore[union-attr]
    labels = ("FedAvg", "FairLoss", "FairLoss*")
    assert found == {(m, n, a) for m in labels for n in ("multinomial", "2nn") for a in (0.1, 0.5)}
    assert len(plan.cells) == plan.settings.runs == 12
    assert {c.select.over for c in plan.cells} == {("model.name", "partition.alpha")}


@pytest.mark.parametrize(
    ("grid", "word"),
    [
        ({"train.batchsize": [1]}, "unknown key train.batchsize"),
        ({"data.alpha": [0.1]}, "partition.alpha"),
        ({"nothing": [1]}, "unknown key nothing"),
        ({"method.nothing": [1]}, "unknown key method.nothing"),
        ({"train.lr": [0.1]}, "sweep.lr"),
        ({"train.seed": [1]}, "sweep.seeds"),
        ({"method.name": ["afl"]}, "sweep.methods"),
        ({"train.device": ["cpu"]}, "train.device"),
        ({"select.model": ["local"]}, "select.model"),
        ({"train.batch_size": []}, "empty"),
        ({"train.batch_size": [4, 4]}, "twice"),
        ({"train.batch_size": [0]}, "train.batch_size"),
        ({"train.batch_size": 4}, "train.batch_size"),
        ({"train": [{"lr": 0.1}]}, "single keys"),
        ({"method": [{"name": "afl"}]}, "single keys"),
    ],
)
def test_what_a_grid_refuses(grid: dict[str, object], word: str) -> None:
    with pytest.raises(BadInput, match=re.escape(word)) as caught:
        Plan.from_dict({"sweep": {"methods": ["fedavg"], "grid": grid}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"alpha": [0.1], "grid": {"partition.alpha": [0.5]}}, "give one of them"),
        ({"method": {"fedavg": {"lr": [0.1, 0.1]}}}, "fedavg.lr = [0.1, 0.1] has a value twice"),
        ({"methods": ["fedavg*"]}, "fedavg has no exact variant"),
    ],
)
def test_what_a_sweep_refuses(section: dict[str, object], word: str) -> None:
    with pytest.raises(BadInput, match=re.escape(word)):
        Plan.from_dict({"sweep": {"methods": ["fedavg"], **section}})


def test_quotes_and_the_order_of_keys_do_not_matter() -> None:
    values: dict[str, object] = {"sweep": {}}
    merge_overrides(values, ['sweep.grid."train.batch_size"=[4]', "sweep.method.'fairloss*'.lr=2"])
    assert values["sweep"] == {
        "grid": {"train": {"batch_size": [4]}}, "method": {"fairloss*": {"lr": 2}}
    }  # fmt: skip
    grid = {"partition.alpha": [0.5], "partition.name": ["dirichlet"]}
    (cell,) = Plan.from_dict({"sweep": {"methods": ["fedavg"], "seeds": 1, "grid": grid}}).cells
    assert cell.partition.alpha == 0.5  # type: ignore[union-attr]


def test_whole_partitions_make_tables_of_their_own(tmp_path: Path) -> None:
    kinds = [{"name": "iid"}, {"name": "iid", "min_samples": 10}, {"name": "iid", "min_samples": 9},
             {"name": "dirichlet", "alpha": 1.0}]  # fmt: skip
    models = [{"name": "multinomial"}, {"name": "2nn"}]
    grid = {"partition": kinds, "model": models}
    plan = Plan.from_dict({**SMALL, "sweep": {**ONE, "grid": grid}})
    run_sweep(arrange(plan.cells), tmp_path / "runs", lambda *_: None)
    groups = gather(tmp_path / "runs")
    assert len({group.passport["sha256"] for group in groups}) == 2
    # Of a section, tables have the name and what is not the default.
    assert [group.kind for group in groups] == [
        ["partition iid"], ["partition iid, min_samples 9"], ["partition iid, min_samples 10"],
        ["partition dirichlet, alpha 1"],
    ]  # fmt: skip
    assert {group.model for group in groups} == {"several models"}
    assert {t.describe() for t in groups[0].trials} == {"lr 0.1, model multinomial",
                                                        "lr 0.1, model 2nn"}  # fmt: skip
    # They have the same order, and so the same numbers, in an archive.
    condense(groups, tmp_path / "small")
    assert [group.kind for group in gather(tmp_path / "small")] == [g.kind for g in groups]


def test_a_key_that_is_added_to_a_grid_keeps_the_earlier_runs(tmp_path: Path, capsys) -> None:
    """Runs before and after are one table; without a value the default is one of the values."""
    for grid in ({}, {"train.batch_size": [4]}, {"train.batch_size": [4], "train.momentum": [0.5]}):
        plan = Plan.from_dict({**SMALL, "sweep": {**ONE, "grid": grid}})
        run_sweep(arrange(plan.cells), tmp_path / "runs", lambda *_: None)
    assert call(capsys, "condense", tmp_path / "runs", "--out", tmp_path / "small")[0] == 0
    for place in ("runs", "small"):
        (group,) = gather(tmp_path / place)
        assert {trial.describe() for trial in group.trials} == {
            "lr 0.1, batch_size not given, momentum 0",
            "lr 0.1, batch_size 4, momentum 0",
            "lr 0.1, batch_size 4, momentum 0.5",
        }


# -- what is refused -------------------------------------------------------------------------------
BROKEN = {
    "model.name=clinics:nothing": "has no function nothing",
    "model.name=nowhere:model": "nowhere",
    "model.name=os:system": "no code of yours",
    "model.name=torch.hub:load": "no code of yours",
    "model.name=clinics.model": "unknown model.name",
    "model.name=../clinics:model": "package.module:function",
    "model.args.depth=3": "depth",
    "model.args=3": "model.args",
    "data.name=clinics:model": "clinics:model",
    "data.clients=5": "",  # the function takes it
    "partition.name=iid": "clinics:data is made client by client",
    "data.root=x": "data.args",
    "model={name=\"multinomial\", args={width=3}}": "model.args is for functions of your own",
    "evaluate.metric=nowhere:hit": "nowhere",
    "evaluate.metric=clinics:hit": "clinics.py has no function hit",
    "evaluate.metric=os:system": "no code of yours",
    "evaluate.metric='a b:c'": "package.module:function",
    "model.name=rich:model": "rich/__init__.py has no function model",
    "model.name=things.clinics:model": "things",
    "method.plugin=3": "method.plugin",
    "method.plugin='nothing.py'": "nothing.py",
}  # fmt: skip


@pytest.mark.parametrize(("override", "word"), BROKEN.items())
def test_bad_names_are_told_in_one_line(override: str, word: str, folder: Path, capsys) -> None:
    if override.startswith("method"):
        override = f"method={{name='fedavg', plugin={override.partition('=')[2]}}}"
    code, _, err = call(capsys, "run", folder / "clinics.toml", override, "--out", "runs")
    assert code == (2 if word else 0), err
    if word:
        assert word in err
        assert len(err.strip().splitlines()) == 1
        assert not Path("runs").exists()


def test_errors_name_the_line_of_your_file(folder: Path, capsys) -> None:
    module = folder / "clinics.py"
    text = module.read_text()
    module.write_text(text.replace("    return nn.Sequential(", "    raise KeyError('x')\n    ("))
    code, _, err = call(capsys, "run", folder / "clinics.toml")
    assert code == 2
    line = [text.startswith("    return nn") for text in text.splitlines()].index(True)
    assert f"line {line + 1}: KeyError" in err
    module.write_text("x = = 3\n")
    code, _, err = call(capsys, "run", folder / "clinics.toml")
    assert code == 2
    assert "line 1: SyntaxError" in err


# -- entry points ----------------------------------------------------------------------------------
def test_installed_packages_offer_things_by_name(folder: Path, monkeypatch) -> None:
    names = {"fairvar.methods": ("powers", "powers"), "fairvar.models": ("net", "clinics:model"),
             "fairvar.data": ("wards", "clinics:data")}  # fmt: skip
    points = [importlib.metadata.EntryPoint(name, value, group)
              for group, (name, value) in names.items()]  # fmt: skip
    select = importlib.metadata.EntryPoints(points).select
    monkeypatch.setattr(own, "entry_points", select)
    monkeypatch.syspath_prepend(str(folder))
    given = ("data.name=wards", "model.name=net", "method.name=powers")
    found = Config.load(folder / "clinics.toml", given)
    assert found.method.label == "Powers"
    assert identity_of(found).code is not None
    for module in ("powers", "clinics"):
        sys.modules.pop(module, None)


# -- Flower ----------------------------------------------------------------------------------------
def test_a_flower_app_names_own_things(folder: Path, monkeypatch) -> None:
    pytest.importorskip("flwr")
    from fairvar.deploy.flower.setup import read_setup

    monkeypatch.syspath_prepend(str(folder))  # as Flower does with the app's folder
    given = {"method": "powers", "data": "clinics:data", "clients": 6, "model": "clinics:model",
             "options": "partition.name=natural method.plugin=powers.py"}  # fmt: skip
    agreed = read_setup(given).agreed
    assert agreed.method.label == "Powers"
    assert agreed.input_shape == (5,)
    assert sum(p.numel() for p in agreed.model.parameters()) == 5 * 8 + 8 + 8 * 2 + 2
    sys.modules.pop("clinics", None)


# -- init ------------------------------------------------------------------------------------------
def test_init_writes_a_file_that_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code, said, _ = call(capsys, "init", "mine.toml")
    assert code == 0
    assert "fairvar run mine.toml" in said
    code, said, err = call(capsys, "run", "mine.toml", "train.rounds=2", "--json")
    assert code == 0, err
    assert json.loads(said)["rounds"] == 2
    before = Path("mine.toml").read_bytes()
    code, _, err = call(capsys, "init", "mine.toml")
    assert code == 2
    assert "there already" in err
    assert Path("mine.toml").read_bytes() == before
    odd = "of\ntwo lines.toml"
    assert call(capsys, "init", odd)[0] == 0
    assert call(capsys, "run", odd, "--dry")[0] == 0


def test_init_leaves_nothing_where_the_disk_is_full(tmp_path, monkeypatch, capsys) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fairvar.common.files.os.fsync", full)
    code, _, err = call(capsys, "init", "mine.toml")
    assert code == 2
    assert "No space left" in err
    assert list(tmp_path.iterdir()) == []
