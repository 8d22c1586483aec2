"""Tests against several versions of torch, or of what an extra brings, each in an environment of
its own: `make versions`.

By default the floor in pyproject.toml, the version in constraints.txt and the newest that pip
finds. A build of torch for CUDA takes about 8 GB while it is tested; environments are made one
after the other, in --folder, and deleted unless --keep is given.

    python tools/versions.py 2.6.0 newest --folder /tmp/versions --keep

With --extra the packages of that extra are installed at their floors and at the newest versions
that pyproject.toml allows, and the extra's tests run. Everything else is that of the environment
that runs this script, which has fairvar's `dev`:

    .venv/bin/python tools/versions.py --extra tensorboard pandas
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TESTS = ("tests/contract", "tests/golden", "tests/equivalence/test_engines.py")
FOR_TESTS = ("beartype", "hypothesis", "matplotlib", "pillow", "pytest", "scipy")
GIGABYTES = 12
OWN_DATA, RAY = ["tests/unit/test_own_data.py"], ["tests/unit/test_cluster.py"]
TESTS_OF = {
    "plot": ["tests/unit/test_figures.py"],
    "vision": ["tests/unit/test_sources.py"],
    "pandas": OWN_DATA,
    "datasets": OWN_DATA,
    "flwr-datasets": OWN_DATA,
    "tensorboard": ["tests/unit/test_callbacks.py"],
    "flower": ["tests/flower/test_in_process.py"],
    "ray": RAY,
    "simulation": [*RAY, "tests/flower/test_simulation.py"],
    "privacy": ["tests/flower/test_privacy.py"],
    "docs": ["tests/unit/test_notebooks.py"],
    "release": ["tests/wheel"],
}


def dependencies() -> list[str]:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return list(found)


def defaults() -> list[str]:
    (floor,) = [d.removeprefix("torch>=") for d in dependencies() if d.startswith("torch>=")]
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    return [floor if floor.count(".") == 2 else f"{floor}.0", pinned[1], "newest"]


def install(version: str, place: Path) -> Path:
    """The environment's Python; an environment that was kept is used again."""
    python = place / "bin" / "python"
    if (place / "ready").exists():
        return python
    if shutil.disk_usage(place.parent).free < GIGABYTES * 10**9:
        sys.exit(f"{place.parent} has less than {GIGABYTES} GB free; give another --folder")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    limits = place / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    limits.write_text("\n".join(line for line in lines if not line.startswith("torch==")))
    torch = "torch" if version == "newest" else f"torch=={version}"
    others = [d for d in dependencies() if not d.startswith("torch")]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "-c", str(limits), *others, *FOR_TESTS], check=True)
    (place / "ready").touch()
    return python


def requirements(extra: str) -> list[Requirement]:
    """What an extra names, also by other extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = []
    for need in map(Requirement, project["optional-dependencies"][extra]):
        inner = sorted(need.extras) if need.name == "fairvar" else []
        found += [r for name in inner for r in requirements(name)] or [need]
    return found


def floor(need: Requirement) -> str:
    (least,) = [s.version for s in need.specifier if s.operator == ">="]
    return f"{need.name}{'[' + ','.join(need.extras) + ']' if need.extras else ''}=={least}"


def install_extra(extra: str, which: str, place: Path) -> tuple[Path, str]:
    """The environment's Python, and the versions that it has of the extra's packages. The packages
    of this environment are found behind its own."""
    python, needs = place / "bin" / "python", requirements(extra)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    (own,) = place.glob("lib/python*/site-packages")
    (own / "behind.pth").write_text(sysconfig.get_path("purelib"))
    wanted = [floor(n) if which == "floor" else str(n) for n in needs]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--upgrade"]
    subprocess.run([*pip, *wanted], check=True)
    ask = (
        f"import importlib.metadata as m; print(*[m.version(n) for n in {[n.name for n in needs]}])"
    )
    done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True)
    return python, done.stdout.strip()


def tested(python: Path, tests: list[str]) -> tuple[str, str]:
    """(torch's own version, the last line of pytest)."""
    ask = [str(python), "-c", "import torch; print(torch.__version__)"]
    version = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run(
        [*command, *tests], cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    return version, lines[-1] if lines else done.stderr.strip()[-200:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", help="such as 2.6.0 or newest")
    parser.add_argument("--folder", type=Path, help="for the environments; a temporary one else")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--extra", nargs="+", choices=TESTS_OF, default=[], help="instead of torch")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="fairvar-versions-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    extras = [f"{extra} {which}" for extra in asked.extra for which in ("floor", "newest")]
    for name in extras or asked.versions or defaults():
        place, started = folder / name.replace(" ", "-"), time.monotonic()
        try:
            if extras:
                extra, which = name.split()
                python, found = install_extra(extra, which, place)
                result = tested(python, TESTS_OF[extra])[1]
            else:
                found, result = tested(install(name, place), asked.tests)
        except subprocess.CalledProcessError as error:
            found, result = name, f"could not be installed or imported ({error})"
        finally:
            if not asked.keep:
                shutil.rmtree(place, ignore_errors=True)
        rows.append((name, found, result, f"{time.monotonic() - started:.0f} s"))
    if not asked.keep and asked.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    print(*(f"{a:<10} {b:<16} {c}  ({d})" for a, b, c, d in rows), sep="\n")
    if not all("passed" in row[2] and "failed" not in row[2] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
