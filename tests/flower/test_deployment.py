"""A SuperLink and five SuperNodes on loopback, under TLS with authentication: they train what the
engine trains with the same participants, also when a node is killed on the way. Strangers stay out.

Flower starts a process for every message, which imports torch: an exchange takes several seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployment import Deployment, running
from expected import as_text, same_as_engines, same_as_in_process, setup_of, stored, took_part

from fairvar.deploy.flower.keys import make_keys

pytestmark = pytest.mark.deployment
EVERYBODY = [0, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running(tmp_path_factory.mktemp("deployment"), nodes=5) as found:
        yield found


def test_fairgrad_star(deployed: Deployment, tmp_path: Path) -> None:
    changes: dict = {"rounds": 2, "options": "train.dtype=float64"}  # the app's own method
    deployed.run(tmp_path, as_text(changes))
    run = stored(tmp_path)
    assert run.manifest["method"] == "FairGrad*"
    assert run.manifest["birth"]["refused"] == {}
    assert took_part(run) == [EVERYBODY] * 2
    assert not bool(run.history().accuracy["test", "global"].isnan().any())
    same_as_engines(setup_of(deployed, **changes), run)


def test_strangers_are_refused(deployed: Deployment, tmp_path: Path) -> None:
    """A key that is not registered; a node that trusts another authority; one without TLS."""
    make_keys(tmp_path / "other", 1, ["127.0.0.1"])
    deployed.start_node(5, "stranger")
    deployed.start_node(5, "fooled", authority=tmp_path / "other" / "ca.crt")
    deployed.start_open_node(5, "plaintext")
    for name in ("stranger", "fooled", "plaintext"):
        assert deployed.ended(name, 180) != 0
    assert "Failed to activate SuperNode" in deployed.log("stranger")
    assert "CERTIFICATE_VERIFY_FAILED" in deployed.log("fooled")
    listed = deployed.flwr("supernode", "list", "here", "--verbose").stdout
    assert listed.count("online") == 5, listed


def test_a_node_is_killed_and_comes_back(deployed: Deployment, tmp_path: Path) -> None:
    changes: dict = {
        "method": "afl",
        "method-options": "step=1.0",
        "rounds": 3,
        "options": "train.dtype=float64 federation.deadline=150",
    }
    deployed.hold(0, 1)  # the second round lasts until the node is up again
    deployed.start_run(tmp_path, as_text(changes))
    deployed.says("round 1 of 3")
    deployed.kill("node-2")
    deployed.says("client 2 is lost")
    deployed.start_node(2)
    deployed.says("client 2 is there", times=2)
    deployed.let_go(0, 1)
    assert deployed.ended("run", 300) == 0
    run = stored(tmp_path)
    assert took_part(run) == [EVERYBODY, [0, 1, 3, 4], EVERYBODY]
    assert run.manifest["birth"]["refused"] == {"error": 1}
    same_as_in_process(setup_of(deployed, **changes), run)
