"""Every command of docs/deploy.md, in order, in an empty folder on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployment import ENVIRONMENT, commands_of, run_commands
from spy import spied, spy

from fairvar.runs.stored import StoredRun

pytestmark = pytest.mark.deployment
PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def test_every_command_works(tmp_path: Path) -> None:
    blocks = commands_of(PAGE)
    assert len(blocks) == 5
    kept = {"PATH": ENVIRONMENT["PATH"], "HOME": str(tmp_path), **spy(tmp_path / "spy")}
    run_commands("\n".join(blocks), tmp_path, kept, 1500)
    folder = next(p for p in (tmp_path / "deployed").iterdir() if p.name.endswith("-flower"))
    run = StoredRun.open(folder)
    assert run.history().rounds == 2
    assert run.state().round == 52
    assert run.manifest["birth"]["refused"] == {}
    assert (tmp_path / "report" / "index.html").exists()
    assert spied(tmp_path / "spy") == ""  # no process of Flower looked for another machine
    for private in ("superlink.db", "keys/ca.key", "keys/server.key", "keys/node-0"):
        assert (tmp_path / private).stat().st_mode & 0o077 == 0, private
