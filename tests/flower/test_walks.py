"""What README and a tutorial tell a newcomer to type, in a new environment: fairvar's wheel, an
empty home, nothing of Flower's running."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("ray", reason="Flower's simulation runtime needs ray")

from deployment import commands_of, run_commands

from fairvar.deploy.flower import client_app
from fairvar.deploy.flower.server import run_on
from fairvar.deploy.flower.setup import read_setup
from fairvar.runs.stored import StoredRun
from grids import InProcessGrid

pytestmark = pytest.mark.deployment
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "hospital.md"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel. Other packages are those of this one."""
    place = tmp_path_factory.mktemp("clean")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for command in (
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(place), str(ROOT)],
        [sys.executable, "-m", "venv", "--without-pip", str(place / "venv")],
    ):
        subprocess.run(command, check=True)
    (wheel,) = place.glob("fairvar-*.whl")
    python = place / "venv" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place / "venv")}))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    for program in entry_points(group="console_scripts"):
        if program.module.startswith("flwr"):
            file = python.with_name(program.name)
            file.write_text(f"#!{python}\nimport sys\nfrom {program.module} import {program.attr}\n"
                            f"sys.exit({program.attr}())\n")  # fmt: skip
            file.chmod(0o755)
    return python.parent


@pytest.fixture
def kept(clean: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has just logged in."""
    (tmp_path / "home").mkdir()
    system = os.environ["PATH"]
    return {"PATH": f"{clean}:{system}", "HOME": str(tmp_path / "home"), "LANG": "C.UTF-8"}


def test_the_flower_lines_of_the_readme(kept: dict[str, str], tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    blocks = [b for b in re.findall(r"```console\n(.*?)```", text, re.DOTALL) if "flower" in b]
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("fairvar")]
    assert [line.split()[:3] for line in lines] == [
        ["fairvar", "flower", "new"], ["fairvar", "flower", "run"]]  # fmt: skip
    told = run_commands("\n".join(lines), tmp_path, kept, 900)
    assert "round 20 of 20: 5 of 5 clients, test loss" in told
    assert "the run is in runs/" in told
    (folder,) = (tmp_path / "runs").glob("*-flower")
    run = StoredRun.open(folder)
    assert run.manifest["birth"]["refused"] == {}
    assert run.history().rounds == 20
    # Bad input ends at once with one line and its exit code.
    wrong = "fairvar flower run my_app -c 'method=\"fairgrod\"' || echo code $?"
    told = run_commands(wrong, tmp_path, kept, 300)
    assert "did you mean 'fairgrad'" in told
    assert told.endswith("code 2\n")


def in_process(app: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> StoredRun:
    """What the nodes must have computed: the same app over messages within this process."""
    config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    monkeypatch.syspath_prepend(str(app))
    data = import_module(f"{app.name}.data").data
    model = import_module(f"{app.name}.model").model
    grid = InProcessGrid(config | changes, {number: number for number in range(3)})
    grid.app = client_app(model, data)
    return StoredRun.open(run_on(grid, read_setup(config | changes, model, data)))


def test_the_walk_of_a_hospital_engineer(
    kept: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = commands_of(PAGE)
    assert len(blocks) == 7
    told = run_commands("\n".join(blocks), tmp_path, kept, 1500)
    found = {}
    for name in ("runs", "deployed"):
        (folder,) = (tmp_path / name).glob("*-flower")
        found[name] = StoredRun.open(folder)
        assert found[name].manifest["birth"]["refused"] == {}
        assert (
            b'"sites":{"0":"berlin","1":"lyon","2":"turin"}'
            in (folder / "federation.json").read_bytes()
        )
    assert found["runs"].history().samples["train"].tolist() == [720, 480, 192]
    assert len(re.findall(r"^turin +192 +24 ", told, re.MULTILINE)) == 2
    for page in ("simulated", "report"):
        assert "own data of 3 nodes" in (tmp_path / page / "index.html").read_text()
    assert "berlin (client 0) is there" in told
    # As the page shows it, and the same on nodes under TLS.
    shown = [line.strip() for line in PAGE.read_text().splitlines() if line.startswith("    ")]
    for start in ("round 10 of 10", "test/global", "berlin ", "lyon ", "turin "):
        assert next(line for line in shown if line.startswith(start)) in told, start
    changes = {"rounds": 2, "folder": str(tmp_path / "sites"), "out": str(tmp_path / "expected")}
    expected = in_process(tmp_path / "ward", changes, monkeypatch).history()
    deployed = found["deployed"].history()
    assert deployed.rounds == 2
    for name, leaf in expected.state.params.items():
        assert torch.equal(deployed.state.params[name], leaf), name
