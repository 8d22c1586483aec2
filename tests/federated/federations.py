"""Small federations in this process, with settings that the tests share."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

import fairvar as fv
from fairvar.deploy.client import Client
from fairvar.deploy.guard import FederationSettings
from fairvar.deploy.run import (
    Agreement,
    Fault,
    Federated,
    LocalTransport,
    federate,
    honest,
    local_clients,
)
from fairvar.engine.settings import EvaluateSettings, TrainSettings

TINY = 5  # clients
# Clients remember nothing, and making one takes longer than asking it. (The data are kept too, so
# that their id is not given to others.)
CLIENTS: dict[tuple, tuple[fv.Federation, list[Client]]] = {}


@lru_cache
def digits(clients: int = 5) -> fv.Federation:
    """Ragged: every client another number of digits, and another mix of them."""
    partition = fv.Dirichlet(alpha=0.3)
    return fv.load_federation("digits", clients=clients, partition=partition, seed=1)


@lru_cache
def tiny() -> fv.Federation:
    """Five clients of five to nine samples, in float64."""
    draw = torch.Generator().manual_seed(0)

    def client(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 3, generator=draw, dtype=torch.float64)
        return x, torch.randint(0, 3, (n,), generator=draw)

    return fv.Federation.from_arrays([client(5 + i) for i in range(TINY)], classes=3)


def agreement(
    method: fv.Method, data: fv.Federation, model: object = "multinomial", **train: object
) -> Agreement:
    given: dict = {"rounds": 3, "lr": 0.1, "dtype": "float64", **train}
    return Agreement(
        model=model,  # type: ignore[arg-type]
        method=method,
        loss="cross_entropy",
        train=TrainSettings(**given),
        evaluate=EvaluateSettings(every=2),
        clients=data.clients,
        input_shape=data.input_shape,
        classes=data.classes,
    )


def run(
    method: fv.Method,
    data: fv.Federation,
    fault: Fault = honest,
    model: object = "multinomial",
    rules: dict | None = None,
    **train: object,
) -> Federated:
    agreed = agreement(method, data, model, **train)
    key = (repr(method), id(data), id(model), *sorted(map(str, train.items())))
    if key not in CLIENTS:
        CLIENTS[key] = (data, local_clients(agreed, data))
    transport = LocalTransport(CLIENTS[key][1], fault)
    return federate(agreed, FederationSettings(**rules or {}), transport)


def reference(
    method: fv.Method, data: fv.Federation, model: object = "multinomial", **train: object
) -> fv.History:
    given: dict = {"rounds": 3, "lr": 0.1, "evaluate_every": 2, **train}
    given["dtype"] = getattr(torch, given.get("dtype", "float64"))
    return fv.train(model, data, method, engine="reference", **given)  # type: ignore[arg-type]
