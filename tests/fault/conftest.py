"""One fork server for all fault tests of a worker process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nursery import Nursery, nursery, write_plan


@pytest.fixture(scope="session")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("nursery")) as server:
        yield server


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory, children: Nursery) -> Path:
    """A folder with plan.toml (six runs of nine rounds, each by itself) and its undisturbed result
    in out/."""
    folder = tmp_path_factory.mktemp("short")
    plan, out = write_plan(folder, 9), folder / "out"
    end = children.run("sweep", plan, "--out", out, "--save-every", "3", "--no-batch")
    assert end.code == 0, end.err
    return folder
