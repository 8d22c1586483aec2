"""What a deployment must have computed: the same protocol in this process, and the engines."""

from __future__ import annotations

import csv
import importlib.util
import tomllib
from collections.abc import Sequence
from pathlib import Path

import torch
from deployment import Deployment

import fairvar as fv
from fairvar.deploy.client import Message
from fairvar.deploy.flower.setup import Setup, read_setup
from fairvar.deploy.run import LocalTransport, federate, local_clients
from fairvar.runs.runner import federation_of
from fairvar.runs.stored import StoredRun


def setup_of(deployed: Deployment, **changes: object) -> Setup:
    """The run configuration of the app, with what `flwr run -c` changes."""
    text = (deployed.app / "pyproject.toml").read_text()
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    return read_setup(config | changes, _model(deployed.app))


def _model(app: Path):
    spec = importlib.util.spec_from_file_location("trial_model", app / app.name / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.model


def as_text(changes: dict[str, object]) -> str:
    """For `flwr run -c`."""
    return " ".join(f"{k}={_quoted(v)}" for k, v in changes.items())


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def stored(out: Path) -> StoredRun:
    (folder,) = (p for p in out.iterdir() if p.name.endswith("-flower"))
    return StoredRun.open(folder)


def took_part(run: StoredRun) -> list[list[int]]:
    """The clients of every round."""
    with open(run.folder / "rounds.csv") as file:
        return [[int(i) for i in row["clients"].split()] for row in csv.DictReader(file)]


def refusals(run: StoredRun) -> list[dict[str, str]]:
    with open(run.folder / "refused.csv") as file:
        return list(csv.DictReader(file))


def same_as_in_process(setup: Setup, run: StoredRun) -> None:
    """Those that did not take part in a round of the deployment do not answer here either."""
    there = took_part(run)

    def absent(request: Message, reply: Message) -> Sequence[Message]:
        stamp = request.stamp
        asked = stamp.exchange == "evaluate" or request.client in there[stamp.round]
        return [reply] if asked else []

    clients = local_clients(setup.agreed, federation_of(setup.config))
    expected = federate(setup.agreed, setup.rules, LocalTransport(clients, absent)).history
    same_model(run.state().params, expected.state.params)


def same_as_engines(setup: Setup, run: StoredRun) -> None:
    """Everybody took part: the reference loop bit by bit, the vectorised engine within 1e-10."""
    train = setup.config.train
    more: dict = {"rounds": train.rounds, "lr": train.lr, "dtype": getattr(torch, train.dtype)}
    data = federation_of(setup.config)
    model, method = setup.agreed.model, setup.agreed.method
    found = run.state().params
    same_model(found, fv.train(model, data, method, engine="reference", **more).state.params)
    for name, leaf in fv.train(model, data, method, **more).state.params.items():
        assert float((found[name] - leaf).norm() / leaf.norm()) <= 1e-10, name


def same_model(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert torch.equal(found[name], leaf), name
