"""A method of one's own needs one import, `fairvar.methods`, and works from the command line."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import call
from fairvar import methods
from fairvar.methods import METHODS
from fairvar.testing import check_method

PLUGIN = """
from typing import ClassVar

from fairvar.methods import (
    BadInput, Fraction, Memory, Method, Positive, Replies, project_to_simplex, register,
)


@register
class Mixed(Method, frozen=True, tag="mixed_for_tests"):
    sends: ClassVar = ("model update", "loss")
    uses_losses: ClassVar = True

    step: Positive = 0.1
    mix: Fraction = 0.5

    def check(self) -> None:
        if self.step > 10:
            raise BadInput("step is too long")

    def weigh(self, memory: Memory, replies: Replies):
        ascended = project_to_simplex(replies.share + self.step * replies.loss)
        return self.mix * ascended + (1 - self.mix) * replies.share, memory
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    before = dict(METHODS)
    path = tmp_path / "mixed.py"
    path.write_text(PLUGIN)
    yield path
    METHODS.clear()
    METHODS.update(before)


def test_a_plugin_needs_one_import(plugin, capsys, tmp_path):
    imported = {n.module for n in ast.walk(ast.parse(PLUGIN)) if isinstance(n, ast.ImportFrom)}
    assert imported == {"typing", "fairvar.methods"}
    config = tmp_path / "c.toml"
    config.write_text('[data]\nname="digits"\nclients=4\n[train]\nrounds=2\n')
    command = ("run", config, "method.name=mixed_for_tests", "--plugin", plugin,
               "--out", tmp_path / "runs", "--json")  # fmt: skip
    code, out, err = call(capsys, *command)
    assert code == 0, err
    assert json.loads(out)["method"] == "Mixed"
    code, _, err = call(capsys, *command, "method.step=11")
    assert code == 2
    assert "step is too long" in err
    check_method(METHODS["mixed_for_tests"]())


def test_all_exports_exist():
    assert all(hasattr(methods, name) for name in methods.__all__)
