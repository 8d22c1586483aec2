"""A SuperLink and five SuperNodes on loopback, under TLS with authentication: they train what the
reference loop trains with the same participants, also when a node is killed on the way.

Flower starts a process for every message, which imports torch: an exchange takes several seconds.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from deployment import Deployment, until

import fairvar as fv
from fairvar.experiment import StoredRun, federation_of
from fairvar.federated.local import LocalTransport, local_clients
from fairvar.federated.messages import Message
from fairvar.federated.run import federate
from fairvar.flower.keys import make_keys
from fairvar.flower.setup import Setup, read_setup

pytestmark = pytest.mark.deployment


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    found = Deployment(tmp_path_factory.mktemp("deployment"))
    try:
        found.start()
        yield found
    finally:
        found.stop()


def setup_of(deployed: Deployment, **changes: object) -> Setup:
    text = (deployed.app / "pyproject.toml").read_text()
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    return read_setup(config | changes, _model(deployed))


def _model(deployed: Deployment):
    place = deployed.app / deployed.app.name / "model.py"
    spec = importlib.util.spec_from_file_location("trial_model", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_model


def stored(out: Path) -> StoredRun:
    return StoredRun.open(next(p for p in out.iterdir() if p.name.endswith("-flower")))


def same_as_reference(setup: Setup, found: fv.History) -> None:
    """Those that did not take part in a round of the deployment do not answer here either."""
    present = (found.weights != 0) | ~found.loss.isnan()  # AFL may give a client no weight

    def absent(request: Message, reply: Message) -> Sequence[Message]:
        stamp = request.stamp
        there = stamp.exchange == "evaluate" or present[stamp.round, request.client]
        return [reply] if there else []

    clients = local_clients(setup.agreed, federation_of(setup.config))
    expected = federate(setup.agreed, setup.rules, LocalTransport(clients, absent)).history
    for name, leaf in expected.state.params.items():
        assert torch.equal(found.state.params[name], leaf), name


OPTIONS = "train.dtype=float64 evaluate.every=1"


def test_fairgrad_star(deployed: Deployment, tmp_path: Path) -> None:
    deployed.run(tmp_path, f'rounds=2 options="{OPTIONS}"')
    run = stored(tmp_path)
    assert run.manifest["birth"]["refused"] == {}
    history = run.history()
    assert bool((history.weights > 0).all())
    assert not bool(history.accuracy["test", "global"].isnan().any())
    same_as_reference(setup_of(deployed, rounds=2, options=OPTIONS), history)


def test_strangers_are_refused(deployed: Deployment, tmp_path: Path) -> None:
    """A key that nobody registered; a node that trusts another authority."""
    make_keys(tmp_path / "other", 1, ["127.0.0.1"])
    trusts = {"stranger": None, "fooled": tmp_path / "other" / "ca.crt"}
    for name, authority in trusts.items():
        deployed.start_node(5, name, authority)
        process = deployed.processes[name]
        until(lambda p=process: p.poll() is not None, 90, f"{name} to give up")
        assert process.returncode != 0
        deployed.processes.pop(name)
    assert "Failed to activate SuperNode" in deployed.log("stranger")
    assert "CERTIFICATE_VERIFY_FAILED" in deployed.log("fooled")
    listed = deployed.flwr("supernode", "list", "here", "--verbose").stdout
    assert listed.count("online") == 5, listed


def test_a_node_is_killed_and_comes_back(deployed: Deployment, tmp_path: Path) -> None:
    options = f"{OPTIONS} federation.deadline=90"
    config = f'method="afl" method-options="step=1.0" rounds=4 options="{options}"'
    deployed.start_run(tmp_path, config)
    log = "run"
    until(lambda: "round 1 of 4" in deployed.log(log), 200, "the first round")
    deployed.kill("node-2")
    until(lambda: "round 2 of 4" in deployed.log(log), 200, "a round without it")
    deployed.start_node(2)
    process = deployed.processes["run"]
    until(lambda: process.poll() is not None, 400, "the run to end")
    history = stored(tmp_path).history()
    there = ~history.loss.isnan()
    assert bool(there[:, [0, 1, 3, 4]].all())
    assert not bool(there[1, 2])
    setup = setup_of(
        deployed, method="afl", rounds=4, options=options, **{"method-options": "step=1.0"}
    )
    same_as_reference(setup, history)
