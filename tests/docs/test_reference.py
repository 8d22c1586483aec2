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
from fairvar.testing import CLAUSES

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


METHODS = ROOT / "docs" / "methods"
HEADINGS = ["Use", "The mathematics", "Fidelity", "What the server sees and what it costs", "Tests"]


@pytest.mark.parametrize("kind", BUILT_IN, ids=lambda kind: kind.__name__)
def test_every_method_has_a_page(kind: type[fairvar.Method]) -> None:
    """With the five headings, all options, its traffic, and a row in the index."""
    tag = kind.__struct_config__.tag
    page = (METHODS / f"{tag}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == HEADINGS
    for field in kind.__struct_fields__:
        assert re.search(rf"^\| `{field}` \|", page, re.MULTILINE), field
    for said in (f'name = "{tag}"', "| secure aggregation |", "Traffic(exchanges="):
        assert said in page
    assert f"]({tag}.md)" in (METHODS / "index.md").read_text(encoding="utf-8")
    assert getattr(fairvar, kind.__name__) is kind


def test_every_clause_of_the_contract_is_named() -> None:
    page = (METHODS / "index.md").read_text(encoding="utf-8")
    contract = page.partition("## The contract\n")[2].partition("\n## ")[0]
    assert not [clause for clause in CLAUSES if f"`{clause}`" not in contract]


def test_test_files_that_pages_name_exist() -> None:
    pages = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs").rglob("*.md"))
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", pages))
    assert len(named) > 40
    assert not [path for path in named if not (ROOT / path).is_file()]


def test_identities_have_the_tests_that_the_page_names() -> None:
    page = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"`(\w+)` is\s`(tests/[\w/]+\.py)`", page))
    named = re.findall(r"`(\w+)::(test_\w+)`", page)
    assert {file for file, _ in named} == files.keys()
    sources = {file: (ROOT / path).read_text(encoding="utf-8") for file, path in files.items()}
    assert not [(file, test) for file, test in named if f"def {test}(" not in sources[file]]
