"""The app whose rounds the benchmark times in Flower's simulation runtime: the server does a round
whenever the benchmark asks for one, the clients are fairvar's, with the case's samples.

A process of Flower's keeps the samples of a case, so that they are not made anew for every message.
"""

from __future__ import annotations

import socket
from functools import cache, lru_cache

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fairvar.data.federation import Federation
from fairvar.deploy.client import Agreement, Client
from fairvar.deploy.flower.client import app_of
from fairvar.deploy.flower.transport import GridTransport
from fairvar.deploy.guard import FederationSettings, Notes
from fairvar.deploy.server import Server
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.state import advance, initial_state
from fairvar.models import build
from fairvar_bench.cases import CLASSES, METHODS, Case
from fairvar_bench.contenders import LR
from fairvar_bench.flower import DONE, ROUND


def case_of(context: Context) -> Case:
    given = context.run_config
    return Case(str(given["model"]), int(given["clients"]), int(given["samples"]),
                str(given["method"]))  # fmt: skip


def server() -> ServerApp:
    app = ServerApp()
    app.main()(_serve)
    return app


def client() -> ClientApp:
    return app_of(
        lambda context: _client(case_of(context), int(context.node_config["partition-id"]))
    )


def _serve(grid: Grid, context: Context) -> None:
    """A round for every line that comes; the end of the line is the end of the run."""
    case = case_of(context)
    torch.set_num_threads(1)
    module, method = build(case.model, case.shape, CLASSES, 0), METHODS[case.method]
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    state = initial_state(method, params, dict(module.named_buffers()), case.clients)
    transport = GridTransport(grid, case.clients)
    notes = Notes.reopen(None, case.clients)
    host = Server(_agreement(case), FederationSettings(), transport, notes)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(context.run_config["line"]))
        while line.recv(len(ROUND)):
            outcome, _ = host.round(state)
            if host.notes.refused:
                raise RuntimeError(f"a round went wrong: {host.notes.refused[0]}")
            # Always the same round: what it made is thrown away.
            advance(state, outcome)
            line.sendall(DONE)


@cache
def _client(case: Case, number: int) -> Client:
    torch.set_num_threads(1)
    return Client(number, _data(case).only([number]), _agreement(case))


def _agreement(case: Case) -> Agreement:
    return Agreement(
        model=build(case.model, case.shape, CLASSES, 0),
        method=METHODS[case.method],
        loss="cross_entropy",
        train=TrainSettings(lr=LR),
        evaluate=EvaluateSettings(),
        clients=case.clients,
        input_shape=case.shape,
        classes=CLASSES,
    )


@lru_cache(maxsize=1)
def _data(case: Case) -> Federation:
    return case.federation()
