"""The long tests' own tool: that it runs, that it counts, and that it finds what is wrong."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import kills
import pytest
from nursery import End

SOAK = Path(__file__).parents[2] / "tools" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_short_campaign_of_kills(children, tmp_path):
    found = kills.campaign("batched", 5, 3, tmp_path, children)
    assert found.wrong == []
    assert found.tried == 3
    assert found.compared >= 1


@pytest.mark.slow
def test_other_bytes_are_found(children, tmp_path, monkeypatch):
    """A campaign that compares with something else must say so."""
    seen = iter(range(100))
    monkeypatch.setattr(kills, "sweep_bytes", lambda out: {"read": next(seen)})
    found = kills.campaign("batched", 5, 1, tmp_path, children)
    assert found.wrong[0].startswith("folder 0: other bytes")


WRONG = {
    "goes on": (End(0, "", "", 1.0), "SIGTERM"),
    "traceback": (End(130, "", "Traceback\nKeyboardInterrupt\n", 1.0), "SIGINT"),
    "silent": (End(130, "", "", 1.0), "SIGINT"),
    "another signal": (End(-15, "", "", 1.0), "SIGKILL"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_ends_are_found(case):
    end, name = WRONG[case]
    assert kills.wrong_end(end, (name, "all"))


def test_right_ends_pass():
    assert kills.wrong_end(End(-9, "", "", 1.0), ("SIGKILL", "all")) is None
    polite = End(130, "", "fault: 1/6 (runs)\nfairvar: interrupted\n", 1.0)
    assert kills.wrong_end(polite, ("SIGHUP", "all")) is None


def test_only_checkpoints_are_damaged(tmp_path):
    for name in ("run/checkpoint-a", "run/state.safetensors", ".groups/g/checkpoint-b"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"0123456789")
    draw = random.Random(0)
    assert sum(kills.damage(tmp_path, draw) for _ in range(20)) > 2
    assert (tmp_path / "run/state.safetensors").read_bytes() == b"0123456789"


@pytest.mark.parametrize("wrong", [[], ["case 7"]])
def test_the_exit_code_and_the_file_tell(wrong, soak, monkeypatch, capsys, tmp_path):
    def start(name: str, part: str, seed: int, count: int) -> list[object]:
        return [soak.Row(name, part, count, wrong, 1.5, 20.0)]

    monkeypatch.setattr(soak, "start_part", start)
    path = tmp_path / "soak.json"
    options = argparse.Namespace(seed=3, only=["kills", "flips"], count=4, jobs=2, json=path)
    assert soak.soak(options) == (1 if wrong else 0)
    out = capsys.readouterr().out
    assert f"| kills | 12 | {3 * len(wrong)} | 1.5 | 20.0 |" in out
    assert ("case 7" in out) == bool(wrong)
    assert json.loads(path.read_text())["seed"] == 3


def test_a_campaign_that_breaks_is_not_a_success(soak):
    (row,) = soak.start_part("no such campaign", "", 0, 1)
    assert row.wrong
    assert "failed" in row.wrong[0]
