"""The ServerApp: a run on Flower ends in the same folder of files as a simulated one.

After every round a checkpoint is written. The same run, started again, goes on from the last round
that was saved, whatever happened to the server, its SuperLink or the nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fairvar.archive import pack_checkpoint
from fairvar.engine.train import Checkpoint
from fairvar.errors import BadInput
from fairvar.experiment import StoredRun, checkpoints, run_folder, save_run
from fairvar.federated.guard import Refusal
from fairvar.federated.run import federate, first_state
from fairvar.flower import Model
from fairvar.flower.grid import GridTransport
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
    plain = run_folder(setup.config, setup.out)
    folder = plain.with_name(f"{plain.name}-flower")
    if is_complete(folder):
        LOG.info("this run is finished already: %s", folder)
        return folder
    folder.mkdir(parents=True, exist_ok=True)

    def keep(done: int, make: Callable[[], Checkpoint]) -> None:
        write_checkpoint(folder, done, pack_checkpoint(make()))
        LOG.info("round %s of %s", done, setup.config.train.rounds)

    transport = GridTransport(grid, setup.agreed.clients)
    history, refused = federate(
        setup.agreed, setup.rules, transport, _start(setup, folder), None, keep
    )
    passport = _passport(setup) if setup.own_data else None
    save_run(folder, setup.config, history, passport, {"refused.csv": _table(refused)})
    LOG.info("the run is in %s", folder)
    return folder


def _start(setup: Setup, folder: Path) -> Checkpoint | None:
    """The newest checkpoint of this run; else the run to start from; else nothing."""
    newest = max(checkpoints(folder), key=lambda c: c.state.round, default=None)
    if newest is not None or setup.start is None:
        return newest
    trained = StoredRun.open(setup.start)
    state = trained.state()
    if state.round >= setup.config.train.rounds:
        raise BadInput(f"the run to start from has {state.round} rounds already; rounds counts "
                       f"them all: give more than {state.round}")  # fmt: skip
    fresh = first_state(setup.agreed)
    for group in ("params", "buffers"):
        if _shapes(getattr(state, group)) != _shapes(getattr(fresh, group)):
            raise BadInput(f"the model of {setup.start} is not the app's: their {group} differ")
    if trained.config.method != setup.config.method:
        LOG.info("%s trained %s: only its model is used", setup.start, trained.config.method)
        state = replace(fresh, round=state.round, params=state.params, buffers=state.buffers)
    return Checkpoint(state, None)


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
