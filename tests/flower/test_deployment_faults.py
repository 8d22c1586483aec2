"""What can go wrong around a deployment of three nodes: a straggler, a server that fails, dies or
loses its SuperLink, a SuperLink without TLS. The models are those of the same participants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployment import Deployment, free_ports, running
from expected import (
    as_text,
    refusals,
    same_as_engines,
    same_as_in_process,
    setup_of,
    stored,
    took_part,
)

pytestmark = pytest.mark.deployment


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running(tmp_path_factory.mktemp("faults"), nodes=3) as found:
        yield found


def test_a_straggler_misses_its_round_and_comes_back(deployed: Deployment, tmp_path: Path) -> None:
    changes: dict = {
        "method": "fairgrad",
        "method-options": "strength=0.1",
        "clients": 3,
        "rounds": 3,
        "options": "train.dtype=float64 federation.deadline=35",
    }
    deployed.hold(1, 0)  # beyond the deadline
    deployed.hold(0, 1)  # the second round lasts until the straggler has said hello again
    deployed.start_run(tmp_path, as_text(changes))
    deployed.says("round 1 of 3")
    deployed.let_go(1, 0)
    deployed.says("client 1 is there", times=2)
    deployed.let_go(0, 1)
    assert deployed.ended("run", 300) == 0
    run = stored(tmp_path)
    assert took_part(run) == [[0, 2], [0, 2], [0, 1, 2]]
    assert run.manifest["birth"]["refused"] == {"no reply": 1}
    (refused,) = refusals(run)
    assert (refused["round"], refused["exchange"], refused["client"]) == ("0", "train", "1")
    same_as_in_process(setup_of(deployed, **changes), run)


def test_too_few_replies_end_the_run_and_say_so(deployed: Deployment, tmp_path: Path) -> None:
    """`flwr run --stream` ends with 0 all the same (`Deployment.flwr` demands it): the user sees
    the failure in its output, in failed.txt and in Flower's list of runs."""
    rules = "federation.min_replies=4 federation.repeats=0 federation.patience=1"
    done = deployed.run(tmp_path, as_text({"clients": 3, "options": rules}))
    (folder,) = (p for p in tmp_path.iterdir() if p.name.endswith("-flower"))
    why = (folder / "failed.txt").read_text()
    assert "round 0 was given up after 1 attempts" in why
    assert "4 are needed" in why
    assert why.strip() in done.stdout
    assert not (folder / "manifest.json").exists()
    runs = json.loads(deployed.flwr("list", "here", "--format", "json").stdout)["runs"]
    assert any(r["status"] == "finished:failed" for r in runs), runs


def test_a_superlink_without_tls_is_refused(deployed: Deployment) -> None:
    """By a node and by the command line with the certificate of the authority."""
    (port,) = free_ports(1)
    deployed.start_open_link(port)
    deployed.start_node(3, "careful", port=port)
    assert deployed.ended("careful", 120) != 0
    assert "SSL" in deployed.log("careful")
    deployed.knows("careless", port, "insecure = true")
    deployed.flwr("list", "careless")
    deployed.knows("careful", port)
    deployed.flwr("list", "careful", good=False)
    deployed.kill("open")


def test_server_app_and_superlink_are_killed(deployed: Deployment, tmp_path: Path) -> None:
    """First the one, then the other, in the middle of a run: the same command goes on, and the
    model is that of a run that nothing happened to. (Last in this file: runs of a SuperLink end
    with it.)"""
    changes: dict = {
        "method": "aaggff",
        "method-options": "",
        "clients": 3,
        "rounds": 3,
        "options": "train.dtype=float64",
    }
    deployed.start_run(tmp_path, as_text(changes))
    deployed.says("round 1 of 3")
    deployed.kill_server_app()
    deployed.kill("run")
    deployed.start_run(tmp_path, as_text(changes))
    deployed.says("round 2 of 3")
    assert "round 1 of 3" not in deployed.log("run")
    deployed.kill("link")
    deployed.kill("run")
    deployed.start_link()
    deployed.run(tmp_path, as_text(changes))
    run = stored(tmp_path)
    assert run.manifest["birth"]["refused"] == {}
    assert took_part(run) == [[0, 1, 2]] * 3
    assert not (run.folder / "failed.txt").exists()
    same_as_engines(setup_of(deployed, **changes), run)
