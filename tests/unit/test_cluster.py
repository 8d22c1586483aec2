"""Runs computed elsewhere and sent back are the runs that would have been computed here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fairvar.errors import BadInput
from fairvar.runs.batch import arrange, run_group
from fairvar.runs.plan import Plan
from fairvar.runs.runner import Watch, missing
from fairvar.runs.sweep import compute_files, run_on_ray, save_new

PLAN = {
    "data": {"name": "digits", "clients": 6},
    "train": {"rounds": 3},
    "sweep": {"methods": ["fedavg", "fairgrad*"], "seeds": 2},
}
HAS_RAY = importlib.util.find_spec("ray") is not None


def files(out: Path) -> dict[str, bytes]:
    """All but the manifests, which tell the time, and the locks."""
    found = [p for p in out.glob("*/*") if p.parent.name != ".locks" and p.suffix != ".json"]
    return {str(p.relative_to(out)): p.read_bytes() for p in found}


def test_files_sent_back_equal_those_computed_here(tmp_path):
    cells = Plan.from_dict(PLAN).cells
    for group in arrange(cells):
        run_group(group, tmp_path / "here", Watch())
        save_new(tmp_path / "there", compute_files([cell.to_toml() for cell in group]))
    assert missing(cells, tmp_path / "there") == []
    assert files(tmp_path / "here") == files(tmp_path / "there")
    assert list((tmp_path / "there" / "federations").iterdir())


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_message_says_what_to_install(tmp_path):
    with pytest.raises(BadInput, match=r"fairvar\[ray\]"):
        run_on_ray(Plan.from_dict(PLAN).cells, tmp_path, "local", lambda *_: None)


@pytest.mark.deployment
@pytest.mark.skipif(not HAS_RAY, reason='Ray is not installed (pip install "fairvar[ray]")')
def test_on_a_local_ray(tmp_path):
    cells = Plan.from_dict(PLAN).cells
    run_on_ray(cells, tmp_path, "local", lambda *_: None)
    assert missing(cells, tmp_path) == []
