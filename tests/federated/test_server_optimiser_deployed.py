"""A server optimiser in a federation: the reference loop's numbers, also after an interruption."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federations import agreement, digits, reference, run

import fairvar as fv
from fairvar.deploy.guard import FederationSettings
from fairvar.deploy.run import LocalTransport, federate, local_clients
from fairvar.runs.formats import pack_checkpoint, unpack_checkpoint

SERVERS = [fv.ServerOptimiser("sgd", lr=0.7, beta1=0.9), fv.ServerOptimiser("adam", lr=0.02)]


@pytest.mark.parametrize("server", SERVERS, ids=lambda s: s.name)
@pytest.mark.parametrize("method", [fv.FedAvg(), fv.FairLoss(0.5), fv.AFL()], ids=lambda m: m.label)
def test_equal_bit_by_bit(method: fv.Method, server: fv.ServerOptimiser) -> None:
    found = run(method, digits(), server=server).history.state
    expected = reference(method, digits(), server=server).state
    assert found.moments is not None
    assert expected.moments is not None
    for name, leaf in {**expected.params, **expected.moments}.items():
        assert torch.equal({**found.params, **found.moments}[name], leaf), name


@pytest.mark.parametrize("server", SERVERS, ids=lambda s: s.name)
def test_continues_from_a_checkpoint(server: fv.ServerOptimiser) -> None:
    agreed = agreement(fv.FedAvg(), digits(), server=server)
    clients, kept = local_clients(agreed, digits()), dict[int, bytes]()

    def keep(done: int, make: Any) -> None:
        kept[done] = pack_checkpoint(make())

    rules = FederationSettings()
    whole = federate(agreed, rules, LocalTransport(clients), keep=keep).history.state.params
    rest = federate(agreed, rules, LocalTransport(clients), unpack_checkpoint(kept[1])).history
    for name, leaf in whole.items():
        assert torch.equal(rest.state.params[name], leaf), name
