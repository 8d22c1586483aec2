"""Every command as a user types it: exit codes, one-line errors, what lands on which stream."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from commands import call
from fairvar.cli import commands
from fairvar.cli.common import example_file
from fairvar.methods import BUILT_IN
from fairvar.runs.plan import Plan
from fairvar.runs.runner import Watch, run_cell

QUICK = str(Path(__file__).parents[2] / "configs" / "quick.toml")


BAD = {
    "unknown command": (["runn"], "run"),
    "missing argument": (["run"], "config"),
    "unknown flag": (["theory", "--jsn"], "json"),
    "missing file": (["run", "nope.toml"], "nope.toml"),
    "folder as file": (["run", "."], "cannot be read"),
    "negative strength": (["run", QUICK, "method.strength=-1"], "method.strength"),
    "unknown method": (["run", QUICK, "method.name=fairgrd"], "did you mean 'fairgrad'"),
    "unknown key": (["run", QUICK, "train.epochs=3"], "train.epochs"),
    "method without strength": (["run", QUICK, "method.name=fairloss"], "strength"),
    "option of another method": (["run", QUICK, "method.q=1"], "method.q"),
    "rounds zero": (["run", QUICK, "train.rounds=0"], "train.rounds"),
    "infinite lr": (["run", QUICK, "train.lr=inf"], "train.lr"),
    "lr that is text": (["run", QUICK, "train.lr=fast"], "train.lr"),
    "override without value": (["run", QUICK, "train.lr"], "train.lr=0.1"),
    "unknown data": (["run", QUICK, "data.name=mnst"], "data.name"),
    "unknown model": (["run", QUICK, "model.name=resnet"], "model.name"),
    "impossible partition": (["run", QUICK, "partition.min_samples=50"], "min_samples"),
    "too many clients": (["partition", QUICK, "data.clients=5000"], "5000 clients"),
    "model too large for images": (
        ["run", QUICK, "data.name=digits", "model.name=lenet5"], "lenet5"),
    "wrong loss": (["run", QUICK, "model.loss=mse"], "mse"),
    "no such device": (["run", QUICK, "train.device=cuda:99"], "cuda:99"),
    "plugin missing": (["run", QUICK, "--plugin", "nothing.py"], "nothing.py"),
    "seeds zero": (["demo", "--seeds", "0"], "seeds"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_exit_2_and_nothing_written(case, capsys, tmp_path, monkeypatch):
    arguments, mentioned = BAD[case]
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *arguments)
    lines = [line for line in err.splitlines() if line]
    assert code == 2, (out, err)
    assert len(lines) == 1, err
    assert lines[0].startswith("fairvar: ")
    assert mentioned.lower() in lines[0].lower()
    assert out == ""
    left = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert left == []


def test_a_run_is_stored_and_never_repeated(capsys, tmp_path):
    arguments = ["run", QUICK, "train.rounds=5", "--out", str(tmp_path), "--json"]
    code, out, _ = call(capsys, *arguments)
    first = json.loads(out)
    assert code == 0
    folder = Path(first["folder"])
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}
    assert set(before) == {"config.toml", "history.safetensors", "manifest.json",
                           "state.safetensors"}  # fmt: skip
    assert first["result"]["test/global"]["mean"] > 0.5
    code, out, _ = call(capsys, *arguments)
    assert code == 0
    assert json.loads(out) == first
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()} == before


def test_a_changed_result_is_refused(capsys, tmp_path):
    arguments = ["run", QUICK, "train.rounds=2", "--out", str(tmp_path), "--json"]
    _, out, _ = call(capsys, *arguments)
    state = Path(json.loads(out)["folder"]) / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(bytes(content))
    code, out, err = call(capsys, *arguments)
    assert code == 4
    assert "state.safetensors" in err


def test_dry_prints_a_config_that_loads_again(capsys, tmp_path):
    code, out, _ = call(capsys, "run", QUICK, "train.lr=0.3", "--dry")
    assert code == 0
    again = tmp_path / "again.toml"
    again.write_text(out)
    _, second, _ = call(capsys, "run", str(again), "--dry")
    assert second == out
    assert "fingerprint" in out


def test_fingerprint_ignores_where_and_sees_what(capsys):
    def mark(*overrides: str) -> str:
        return call(capsys, "run", QUICK, *overrides, "--dry")[1].split()[-1]

    assert mark() == mark("train.device=cuda", "train.chunk=8", "name=other")
    assert len({mark(), mark("train.lr=0.2"), mark("train.seed=1"), mark("data.seed=1"),
                mark("method.exact=false"), mark("partition.alpha=0.2")}) == 6  # fmt: skip


def test_theory_lists_every_theorem_and_holds(capsys):
    code, out, err = call(capsys, "theory", "--json")
    claims = json.loads(out)
    assert code == 0
    assert all(claim["holds"] for claim in claims)
    assert {f"T{i}" for i in range(1, 7)} <= {claim["name"][:2] for claim in claims}
    code, text, err = call(capsys, "theory")
    assert "refutes" in text
    assert "FAILS" not in text
    assert f"{len(claims)} of {len(claims)}" in err


def test_methods_lists_the_eight_with_their_traffic(capsys):
    found = {e["label"]: e for e in json.loads(call(capsys, "methods", "--json")[1])}
    table = {
        "FedAvg": (1, "d", "d"), "AFL": (1, "d", "d + 1s"), "q-FFL": (1, "d", "d + 1s"),
        "AAggFF": (1, "d", "d + 1s"), "FairLoss": (1, "2d + 1s", "2d + 1s"),
        "FairLoss*": (2, "2d + 1s", "2d + 1s"), "FairGrad": (1, "2d", "2d"),
        "FairGrad*": (2, "2d", "2d"),
    }  # fmt: skip
    assert {k: (found[k]["exchanges"], found[k]["down"], found[k]["up"]) for k in table} == table
    assert call(capsys, "methods")[0] == 0


def test_every_method_says_when_to_use_it(capsys):
    entries = json.loads(call(capsys, "methods", "--json")[1])
    built_in = {str(kind.__struct_config__.tag) for kind in BUILT_IN}
    for entry in entries:
        if entry["name"] in built_in:
            assert 20 < len(entry["when"]) <= 100, entry["name"]
    text = call(capsys, "methods")[1]
    assert "When to use which" in text
    assert "first choice with secure aggregation" in " ".join(text.split())


def test_the_table_of_the_documentation_is_that_of_the_code(capsys):
    page = (Path(__file__).parents[2] / "docs" / "methods" / "index.md").read_text()
    rows = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[0].startswith("["):
            for place, label in enumerate(re.sub(r"\[|\]\([^)]*\)", "", cells[0]).split(", ")):
                exchanges = cells[2].split(", ")
                counted = exchanges[min(place, len(exchanges) - 1)]
                rows[label] = (counted, cells[3], cells[5], cells[6])
    built_in = {str(kind.__struct_config__.tag) for kind in BUILT_IN}
    expected = {
        e["label"]: (str(e["exchanges"]), f"{e['down']} / {e['up']}".replace("1s", "1"),
                     "yes" if e["sums_suffice"] else "no", e["when"])
        for e in json.loads(call(capsys, "methods", "--json")[1]) if e["name"] in built_in
    }  # fmt: skip
    assert rows == expected


def test_partition_draws_and_tells(capsys, tmp_path):
    code, out, _ = call(capsys, "partition", QUICK, "--out", str(tmp_path), "--json")
    assert code == 0
    assert sum(json.loads(out)["sizes"]) == 1000
    assert (tmp_path / "partition.png").stat().st_size > 5000


def test_doctor(capsys):
    facts = json.loads(call(capsys, "doctor", "--json")[1])
    assert facts["two runs give identical bytes"] is True
    assert facts["engine agrees with the reference"].startswith("yes")


@pytest.mark.slow
def test_demo_shows_all_eight_methods(capsys, tmp_path):
    """And the runs that it was asked for, not another seed of an earlier demo in the folder."""
    with example_file("demo") as path:
        plan = Plan.load(path, ["sweep.seeds=2", "train.rounds=10"])
    run_cell(plan.cells[-1], tmp_path / "runs", Watch())
    code, out, _ = call(
        capsys, "demo", "--seeds", "1", "--rounds", "10", "--out", str(tmp_path), "--json"
    )
    table, rotated = json.loads(out)
    rows = table["rows"]
    assert code == 0
    assert [r["method"] for r in rotated["rows"]] == ["FedAvg", "AFL", "q-FFL", "FairLoss*", "TERM"]
    assert (tmp_path / "who_gains-mnist_rotated.png").stat().st_size > 5000
    assert "The 10 clients that are different by nature" in (tmp_path / "index.html").read_text()
    assert [r["method"] for r in rows] == ["FedAvg", "AFL", "q-FFL", "AAggFF", "FairLoss",
                                           "FairLoss*", "FairGrad", "FairGrad*"]  # fmt: skip
    for stem in ("partition", "client_accuracies", "front", "curves"):
        assert (tmp_path / f"{stem}-mnist_1000-alpha-0.1.png").stat().st_size > 5000
    assert r"FairGrad\*" in (tmp_path / "table-mnist_1000-alpha-0.1.md").read_text()
    assert "FairGrad*" in (tmp_path / "index.html").read_text()
    assert "Seeds 0; 30 runs" in table["notes"][1]


@pytest.mark.slow
def test_demo_of_further_methods(capsys, tmp_path):
    given = ["--methods", "fedavg,extended", "--seeds", "1", "--rounds", "4", "--out", tmp_path]
    code, out, err = call(capsys, "demo", *map(str, given), "--json")
    assert code == 0, err
    table, _ = json.loads(out)
    found = [row["method"] for row in table["rows"]]
    assert found == [
        "FedAvg", "TERM", "PropFair", "Superquantile", "GIFAIR", "Semi-VRed", "FedMGDA+", "FedFV",
        "AdaFed", "FedEBA+", "FedProx", "Ditto",
    ]  # fmt: skip
    for stem in ("client_accuracies", "front", "curves"):
        assert (tmp_path / f"{stem}-mnist_1000-alpha-0.1.png").stat().st_size > 5000


def test_plugin_brings_an_own_method(capsys, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import fairvar as fv\n"
        "@fv.register\n"
        "class Mine(fv.Method, frozen=True, tag='mine_test'):\n"
        "    pass\n"
    )
    config = tmp_path / "c.toml"
    config.write_text('[method]\nname = "mine_test"\n[train]\nrounds = 2\n')
    arguments = ["run", str(config), "--plugin", str(plugin), "--out", str(tmp_path), "--json"]
    try:
        code, out, _ = call(capsys, *arguments)
        assert code == 0
        assert json.loads(out)["method"] == "Mine"
    finally:
        from fairvar import METHODS

        METHODS.pop("mine_test", None)


def help_texts(app: App) -> Iterator[tuple[str, str]]:
    for name in app:
        if not name.startswith("-"):
            yield name, app[name].help
            yield from help_texts(app[name])


def test_every_help_has_an_example():
    found = dict(help_texts(commands.app))
    assert len(found) > 15
    assert [name for name, text in found.items() if "Example: fairvar" not in text] == []
    assert "Example: fairvar" in commands.app.help


def test_the_help_of_example_names_every_configuration(capsys):
    text = call(capsys, "example", "--help")[1]
    files = Path(QUICK).parent.rglob("*.toml")
    assert {file.stem for file in files} <= set(re.findall(r"\w+", text))


def test_no_help_offers_what_does_not_exist(capsys):
    for words in (["run"], ["sweep"], ["report"], ["compare"], ["flower", "keys"]):
        text = call(capsys, *words, "--help")[1]
        for name in ("--config", "--folder", "--a ", "--empty-host", "--no-late", "--batch"):
            assert name not in text


def test_help_and_version_as_a_process():
    for arguments in (["--help"], ["run", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-c", "from fairvar.cli import main; main()", *arguments],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout
        assert done.stderr == ""


def test_a_closed_pipe_is_no_error():
    script = f"{sys.executable} -c 'from fairvar.cli import main; main()' theory | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
