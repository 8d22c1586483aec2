"""The configuration reference names every key, and the navigation every page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

import fairvar
from fairvar.deploy.guard import FederationSettings
from fairvar.methods import BUILT_IN
from fairvar.runs.config import INNER, PARTITIONS, Config
from fairvar.runs.plan import SweepSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import config_reference

    yield config_reference.reference()
    sys.modules.pop("config_reference")


def test_every_key_is_there(reference: str) -> None:
    parts = {part.partition("\n")[0]: part for part in reference.split("\n## ")}
    kinds = {f"[partition, name = {tag}]": kind for tag, kind in PARTITIONS.items()}
    kinds |= {f"[method, name = {kind.__struct_config__.tag}]": kind for kind in BUILT_IN}
    kinds |= {f"[train.{name}]": kind for name, kind in INNER.items()}
    for field in msgspec.structs.fields(Config):
        if isinstance(field.default, msgspec.Struct) and field.name not in ("partition", "method"):
            kinds[f"[{field.name}]"] = type(field.default)
    kinds |= {"[sweep]": SweepSettings, "[federation]": FederationSettings}
    assert {"[data]", "[model]", "[train]", "[evaluate]", "[select]"} <= kinds.keys()
    for head, kind in kinds.items():
        for field in msgspec.structs.fields(kind):
            assert f"\n| `{field.name}` | " in parts[head], (head, field.name)
    assert "| `protocol` | one of" in parts["Top of the file"]


def test_types_and_meanings_are_in_words(reference: str) -> None:
    assert "| `lr` | number > 0 | `0.1` |" in reference
    assert (
        "| `batch_size` | whole number ≥ 1 or nothing | `–` | samples per local step;" in reference
    )
    assert "| `strength` | number ≥ 0 | needed | λ ≥ 0; 0 is FedAvg |" in reference


def test_every_key_has_a_meaning(reference: str) -> None:
    assert not [line for line in reference.splitlines() if line.endswith("|  |")]


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    methods = {kind.__name__ for kind in BUILT_IN}
    missing = [name for name in fairvar.__all__ if name not in methods | {"__version__"}
               and not re.search(rf"(^::: \S+\.|`fv\.){name}\b", page, re.MULTILINE)]  # fmt: skip
    assert not missing


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert not [page for page in pages if page not in navigation]
