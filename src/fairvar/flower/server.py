"""The ServerApp: a run on Flower ends in the same folder of files as a simulated one.

After every round a checkpoint is written. The same run, started again, goes on from the last round
that was saved, whatever happened to the server, its SuperLink or the nodes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fairvar.archive import pack_checkpoint
from fairvar.engine.state import State
from fairvar.engine.train import Checkpoint
from fairvar.errors import BadInput
from fairvar.experiment import (
    StoredRun,
    checkpoints,
    federation_of,
    record_federation,
    run_files,
    run_folder,
    store_run,
)
from fairvar.federated.guard import Refusal
from fairvar.federated.run import federate, first_state
from fairvar.federated.settings import FederationSettings
from fairvar.flower import Model
from fairvar.flower.grid import GridTransport
from fairvar.flower.privacy import check_fits, noisy, request_facts, spent
from fairvar.flower.secure import SecureTransport, check_model
from fairvar.flower.setup import Setup, read_setup
from fairvar.store import check_writable, is_complete, write_checkpoint
from fairvar.tree import Tree

LOG = logging.getLogger("flwr.fairvar")


def make_server_app(model: Model | None) -> ServerApp:
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        run_on(grid, read_setup(context.run_config, model))

    app.main()(main)
    return app


def run_on(grid: Grid, setup: Setup) -> Path:
    """All rounds on this grid; the folder of the finished run."""
    check_writable(setup.out)
    torch.set_num_threads(setup.config.train.threads)
    folder = folder_of(setup)
    if is_complete(folder):
        LOG.info("this run is finished already: %s", folder)
        return folder
    folder.mkdir(parents=True, exist_ok=True)

    def keep(done: int, make: Callable[[], Checkpoint]) -> None:
        write_checkpoint(folder, done, pack_checkpoint(make()))
        LOG.info("round %s of %s", done, setup.config.train.rounds)

    privacy = setup.privacy
    if privacy is not None:
        check_fits(privacy, setup.config.method, first_state(setup.agreed))
    if setup.secure is not None:
        check_model(first_state(setup.agreed))
    history, refused = federate(
        setup.agreed,
        setup.rules,
        _transport(grid, setup),
        _start(setup, folder),
        keep=keep,
        finish=lambda outcome: outcome if privacy is None else noisy(outcome, privacy),
    )
    passport = _passport(setup) if setup.own_data else None
    if passport is None:
        record_federation(folder.parent, federation_of(setup.config))
    more = {"refused.csv": _table(refused), "federation.json": _terms(setup, history.rounds)}
    store_run(folder, run_files(setup.config, history, passport, more))
    LOG.info("the run is in %s", folder)
    return folder


def _transport(grid: Grid, setup: Setup) -> GridTransport:
    facts, clients = request_facts(setup.privacy), setup.agreed.clients
    if setup.secure is None:
        return GridTransport(grid, clients, facts)
    return SecureTransport(grid, clients, setup.secure, facts)


def folder_of(setup: Setup) -> Path:
    """Named by the configuration's fingerprint, as a simulated run's, and "flower". What else
    decides the numbers (caps, privacy, masks, the start) adds to the name where it is unusual."""
    plain, usual = run_folder(setup.config, setup.out), FederationSettings()
    rules = setup.rules
    same = (rules.loss_cap, rules.weight_cap) == (usual.loss_cap, usual.weight_cap)
    special = (setup.privacy, setup.secure, setup.start)
    if same and not any(special):
        return plain.with_name(f"{plain.name}-flower")
    caps = (rules.loss_cap, rules.weight_cap, rules.largest)
    names = [caps, setup.privacy, str(setup.start), *filter(None, [setup.secure])]
    digest = hashlib.sha256(msgspec.json.encode(names))
    return plain.with_name(f"{plain.name}-{digest.hexdigest()[:8]}-flower")


def _terms(setup: Setup, rounds: int) -> bytes:
    """Under which rules the run was made, and what privacy its rounds have cost."""
    start = None if setup.start is None else str(setup.start)
    terms = {"federation": setup.rules, "privacy": setup.privacy, "secure": setup.secure}
    account = spent(setup.privacy, setup.agreed.clients, rounds)
    return msgspec.json.encode({**terms, "start": start, "privacy_spent": account}, order="sorted")


def _start(setup: Setup, folder: Path) -> Checkpoint | None:
    """The newest checkpoint of this run; else the run to start from; else nothing."""
    newest = max(checkpoints(folder), key=lambda c: c.state.round, default=None)
    fresh = first_state(setup.agreed)
    if newest is not None:
        _check_model(newest.state, fresh, folder)
    if newest is not None or setup.start is None:
        return newest
    trained = StoredRun.open(setup.start)
    state = trained.state()
    _check_model(state, fresh, setup.start)
    if state.round >= setup.config.train.rounds:
        raise BadInput(f"the run to start from has {state.round} rounds already; rounds counts "
                       f"them all: give more than {state.round}")  # fmt: skip
    if trained.config.method != setup.config.method:
        LOG.info("%s trained %s: only its model is used", setup.start, trained.config.method)
        state = replace(fresh, round=state.round, params=state.params, buffers=state.buffers)
    return Checkpoint(state, None)


def _check_model(state: State, fresh: State, where: Path) -> None:
    for group in ("params", "buffers"):
        if _shapes(getattr(state, group)) != _shapes(getattr(fresh, group)):
            raise BadInput(f"the model of {where} is not the app's: their {group} differ")


def _shapes(tree: Tree) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (leaf.shape, leaf.dtype) for name, leaf in tree.items()}


def _passport(setup: Setup) -> dict[str, object]:
    return {"dataset": setup.config.data.name, "clients": setup.agreed.clients}


def _table(refused: list[Refusal]) -> bytes:
    """Every reply that was left out, and why."""
    lines = [",".join(Refusal._fields)]
    for r in refused:
        detail = r.detail.replace('"', "'").replace("\n", " ")
        lines.append(f'{r.round},{r.attempt},{r.exchange},{r.client},{r.reason.value},"{detail}"')
    return ("\n".join(lines) + "\n").encode()
