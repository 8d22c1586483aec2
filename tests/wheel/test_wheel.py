"""The wheel in an environment that has fairvar and its core dependencies only: no clone, no extras.

torch takes a gigabyte on disk, so the environment is not filled by pip: it gets links to the
installed files of exactly those distributions that the wheel's metadata demand without extras, and
of what these demand. fairvar itself is installed from the wheel. So a dependency that is not
declared is missing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
Run = Callable[..., str]

pytestmark = pytest.mark.deployment


def execute(*command: object, cwd: Path, **variables: str) -> str:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FAIRVAR"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=keep | variables, text=True,
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    execute(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    return out


def needed(requirements: list[str]) -> Iterator[str]:
    """The names of all distributions that these requirements demand without extras."""
    seen, todo = set[str](), list(requirements)
    while todo:
        need = Requirement(todo.pop())
        name = canonicalize_name(need.name)
        if name in seen or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        todo += distribution(name).requires or []
        yield name


@pytest.fixture(scope="module")
def run(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of the new environment in a folder."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    (wheel,) = built.glob("*.whl")
    (name,) = [n for n in ZipFile(wheel).namelist() if n.endswith(".dist-info/METADATA")]
    metadata = ZipFile(wheel).read(name).decode()
    for found in needed(re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)):
        dist = distribution(found)
        for top in {file.parts[0] for file in dist.files or () if file.parts[0] != ".."}:
            source = Path(str(dist.locate_file(top)))
            if top != "__pycache__" and source.exists() and not (packages / top).exists():
                (packages / top).symlink_to(source)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin/python")
    execute(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    cache = str(tmp_path_factory.mktemp("cache"))

    def run(folder: Path, program: str, *arguments: object) -> str:
        return execute(home / "bin" / program, *arguments, cwd=folder, OMP_NUM_THREADS="1",
                       COLUMNS="120", FAIRVAR_CACHE=cache)  # fmt: skip

    return run


def test_twine_accepts_wheel_and_sdist(built: Path) -> None:
    files = sorted(built.glob("fairvar-*"))
    assert [file.suffix for file in files] == [".whl", ".gz"]
    said = execute(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=built)
    assert said.count("PASSED") == 2


def test_the_environment_is_that_of_the_wheel(run: Run, tmp_path: Path) -> None:
    text = "import fairvar, importlib.util as u; print(fairvar.__file__, u.find_spec('flwr'))"
    said = run(tmp_path, "python", "-c", text)
    assert "site-packages" in said
    assert str(ROOT) not in said.split()[0]
    assert said.split()[-1] == "None"


def test_demo_without_extras(run: Run, tmp_path: Path) -> None:
    said = run(tmp_path, "fairvar", "demo", "--seeds", 1, "--rounds", 4, "--workers", 1)
    assert "FairGrad*" in said
    assert (tmp_path / "fairvar-demo/index.html").is_file()
    assert list((tmp_path / "fairvar-demo").glob("*.png"))


def test_configurations_are_in_the_wheel(run: Run, tmp_path: Path) -> None:
    for name in ("demo", "mnist"):
        assert run(tmp_path, "fairvar", "example", name) == next(
            ROOT.glob(f"configs/**/{name}.toml")
        ).read_text(encoding="utf-8")
    run(tmp_path, "fairvar", "init", "mine.toml")
    assert "FairLoss*" in run(tmp_path, "fairvar", "run", "mine.toml", "train.rounds=2")


def test_the_researchers_walk(run: Run, tmp_path: Path) -> None:
    """examples/researcher.py: own data, own model, own metric, compare, save, load, continue."""
    source = (EXAMPLES / "researcher.py").read_bytes()
    for step in (b"from_arrays(", b"nn.Sequential(", b"fv.Metric(", b"fv.compare(", b".save(",
                 b"fv.load(", b"state=loaded", b"loaded + later"):  # fmt: skip
        assert step in source
    (tmp_path / "researcher.py").write_bytes(source)
    said = run(tmp_path, "python", "researcher.py")
    assert "Compared with FedAvg" in said
    assert "mean faults found (points)" in said
    assert "loaded <History: TERM, 60 rounds, 12 clients>" in said
    assert "continued to round 120" in said
    assert said.endswith("done\n")
    written = {path.name for path in (tmp_path / "study").iterdir()}
    assert {"table.md", "differences.csv", "client_accuracies.png", "term.fairvar"} <= written


def test_the_method_authors_walk(run: Run, tmp_path: Path) -> None:
    """The commands at the head of examples/own_method.toml: contract, sweep, report."""
    text = (EXAMPLES / "own_method.toml").read_text()
    for name in ("own_method.py", "own_method.toml"):
        (tmp_path / name).write_bytes((EXAMPLES / name).read_bytes())
    commands = re.findall(r"^#     (\S+) (.*?)(?:   .*)?$", text, re.M)
    assert [program for program, _ in commands] == ["python", "fairvar", "fairvar", "fairvar"]
    said = [run(tmp_path, program, *rest.split()) for program, rest in commands]
    assert "keeps the contract" in said[0]
    assert "runs are done" in said[1]
    assert "DRFL" in said[2]
    assert "DRFL" in said[3]
    assert (tmp_path / "runs/own-method/report/index.html").is_file()
