"""Secure aggregation among real SuperNodes: Flower starts a process for each of the four stages;
what a node must remember between them (its keys) is kept by Flower."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployment import Deployment
from test_deployment import setup_of, stored
from test_secure import distance

from fairvar.deploy.flower.secure import quantisation
from fairvar.deploy.run import LocalTransport, federate, local_clients
from fairvar.runs.runner import federation_of

pytestmark = pytest.mark.deployment
NODES = 3


def test_sums_of_three_nodes(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    found = Deployment(tmp_path / "site", NODES)
    options = "train.dtype=float64 evaluate.every=2"
    change = {"method": "fedavg", "method-options": "", "clients": NODES, "rounds": 2}
    try:
        found.start()
        found.run(
            tmp_path / "runs",
            f'method="fedavg" method-options="" clients={NODES} rounds=2 '
            f'secure-aggregation=true options="{options}"',
        )
    finally:
        found.stop()
    run = stored(tmp_path / "runs")
    assert run.history().provenance["engine"] == "flower-secure"
    assert run.manifest["birth"]["refused"] == {}
    setup = setup_of(found, options=options, **change)
    clients = local_clients(setup.agreed, federation_of(setup.config))
    plain = federate(setup.agreed, setup.rules, LocalTransport(clients)).history.state.params
    assert 0 < distance(run, plain) <= 4 * 2 * 8.0 / quantisation(NODES)
