"""The version stands in several files, for readers and for programs: everywhere the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fairvar as fv

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("file", "pattern"), [
    ("CITATION.cff", r"^version: (.*)$"),
    ("README.md", r"^  version = \{(.*)\},$"),
    ("CHANGELOG.md", r"^## \[(.*)\] – \d{4}-\d\d-\d\d$"),  # the first is the newest
])  # fmt: skip
def test_files_name_the_version(file: str, pattern: str) -> None:
    found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    assert found[1] == fv.__version__


def test_the_newest_changes_are_those_of_the_version() -> None:
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0].startswith(f"[{fv.__version__}]")
