"""requirements.lock and constraints.txt name the same versions, and every file has a hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pinned(text: str) -> dict[str, str]:
    lines = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", text, re.M)
    return {canonicalize_name(name): version for name, version in lines}


def test_every_package_has_a_hash():
    text = (ROOT / "requirements.lock").read_text()
    entries = re.findall(r"^[\w.-]+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}\n", text, re.M)
    assert len(entries) == len(pinned(text)) > 100


def test_the_versions_are_those_of_the_constraints():
    lock = pinned((ROOT / "requirements.lock").read_text())
    constraints = pinned((ROOT / "constraints.txt").read_text())
    assert {n: v for n, v in lock.items() if n in constraints and constraints[n] != v} == {}
    # Beside them: what builds the project, which constraints do not reach.
    assert lock.keys() - constraints.keys() <= {"hatchling", "tomlkit", "trove-classifiers",
                                                "setuptools"}  # fmt: skip


def test_the_build_backend_is_in_both():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (backend,) = map(Requirement, project["build-system"]["requires"])
    lock = pinned((ROOT / "requirements.lock").read_text())
    assert backend.specifier.contains(lock["hatchling"])
    assert any(s.operator in ("<", "==") for s in backend.specifier)


def test_what_the_project_needs_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["plot"], *extras["vision"], *extras["dev"]]
    lock = pinned((ROOT / "requirements.lock").read_text())
    for need in map(Requirement, named):
        if need.name != "fairvar":
            assert need.specifier.contains(lock[canonicalize_name(need.name)]), need
