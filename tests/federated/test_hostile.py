"""Replies that are made to break the server: a few of each kind; `make soak` sends all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

HERE = Path(__file__).parent


def test_hostile_replies_are_left_out_and_change_nothing() -> None:
    """In a process of its own: pytest's would check the types of arguments, a server does not."""
    here = [str(HERE.parent), *sys.path]
    done = subprocess.run(
        [sys.executable, str(HERE / "hostile.py"), "--seed", "3", "--count", "6", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(here)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["came_through"] == 0, [c for c in found["campaigns"] if c["came_through"]]
    assert found["kinds"] > 200
    assert found["replies"] == 6 * (8 * 3 + 2)  # two of the eight methods probe
    assert 100 < found["peak_megabytes"] < 1000  # torch and Flower alone take 400
