"""The ServerApp: a run on Flower is stored in the same files as a simulated one.

A checkpoint is written after every round. The same run, started again, continues from the last
checkpoint, whatever happened to the server, its SuperLink or the nodes. `flwr run --stream` ends
with 0 even if the ServerApp fails, so the file failed.txt in the run's folder says why it failed.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import torch
from filelock import Timeout
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fairvar.deploy.flower.apps import Model
from fairvar.deploy.flower.privacy import check_fits, noisy, request_facts, spent
from fairvar.deploy.flower.secure import check_model
from fairvar.deploy.flower.secure_server import SecureTransport
from fairvar.deploy.flower.setup import Setup, read_setup
from fairvar.deploy.flower.transport import LOG, GridTransport
from fairvar.deploy.guard import Refusal
from fairvar.deploy.notes import Notes, RoundNote
from fairvar.deploy.run import Federated, check_start, federate, first_state
from fairvar.deploy.settings import FederationSettings
from fairvar.engine.history import History
from fairvar.engine.state import DoesNotFit, State
from fairvar.engine.train import Checkpoint
from fairvar.errors import BadInput, IntegrityError, RunFailed
from fairvar.runs.identity import (
    Identity,
    checkpoint_key,
    code_of,
    data_sha256,
    fingerprint,
    version_of,
)
from fairvar.runs.runner import federation_of, record_federation, run_files
from fairvar.runs.serialize import pack_checkpoint, unpack_checkpoint
from fairvar.runs.source_code import code_sha256
from fairvar.runs.store import (
    check_writable,
    is_complete,
    lock_of,
    read_checkpoints,
    store_run,
    write_checkpoint,
    write_text,
)
from fairvar.runs.stored import Deployed, StoredRun
from fairvar.tree import Tree

FAILED = "failed.txt"
SECONDS_FOR_ANOTHER = 60.0  # for another server of this run to end


def make_server_app(model: Model | None) -> ServerApp:
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        run_on(grid, read_setup(context.run_config, model))

    app.main()(main)
    return app


def run_on(grid: Grid, setup: Setup) -> Path:
    """Train on this grid; returns the folder of the finished run."""
    check_writable(setup.out)
    torch.set_num_threads(setup.config.train.threads)
    folder = folder_of(setup)
    with _one_server(folder):
        if is_complete(folder):
            LOG.info("this run is finished already: %s", folder)
            return folder
        (folder / FAILED).unlink(missing_ok=True)
        try:
            history, notes = _rounds(grid, setup, folder)
            _store(setup, folder, history, notes)
        except Exception as error:
            write_text(folder / FAILED, f"{error or type(error).__name__}\n")
            raise
    LOG.info("the run is in %s", folder)
    return folder


@contextmanager
def _one_server(folder: Path) -> Iterator[None]:
    """Hold the lock of the run. A server that was stopped may need a while to end."""
    try:
        with lock_of(folder, SECONDS_FOR_ANOTHER):
            folder.mkdir(exist_ok=True)
            yield
    except Timeout:
        raise RunFailed(f"another server works on this run; stop it first: {folder}") from None


def _rounds(grid: Grid, setup: Setup, folder: Path) -> Federated:
    key = checkpoint_key(_identity(setup))

    def keep(done: int, make: Callable[[], Checkpoint]) -> None:
        write_checkpoint(folder, done, pack_checkpoint(make(), key))
        LOG.info("round %s of %s", done, setup.config.train.rounds)

    privacy = setup.privacy
    if privacy is not None:
        check_fits(privacy, setup.config.method, first_state(setup.agreed))
    if setup.secure is not None:
        check_model(first_state(setup.agreed))
    return federate(
        setup.agreed,
        setup.rules,
        _transport(grid, setup),
        _start(setup, folder),
        keep=keep,
        finish=lambda outcome: outcome if privacy is None else noisy(outcome, privacy),
    )


def _store(setup: Setup, folder: Path, history: History, notes: Notes) -> None:
    passport = None
    if setup.own_data:
        passport = {"dataset": setup.config.data.name, "clients": setup.agreed.clients}
    else:
        record_federation(folder.parent, federation_of(setup.config))
    more = {
        "refused.csv": _csv(notes.refused, Refusal._fields),  # every reply that was left out
        "rounds.csv": _csv(notes.rounds, RoundNote._fields),  # the clients of every round
        "federation.json": _terms(setup, history.rounds),
    }
    files = run_files(setup.config, history, passport, more, _identity(setup),
                      deployed=_deployed(setup, history))  # fmt: skip
    store_run(folder, files)
    limits = (("weight_cap", "limited", "a client's weight"),
              ("norm_bound", "shortened", "what a client sent"))  # fmt: skip
    for setting, column, what in limits:
        if cut := sum(bool(getattr(note, column)) for note in notes.rounds):
            LOG.warning("federation.%s = %s cut %s in %s of %s rounds: rounds.csv names it (%s)",
                        setting, getattr(setup.rules, setting), what, cut, len(notes.rounds),
                        column)  # fmt: skip


def _deployed(setup: Setup, history: History) -> Deployed:
    """Facts for reports: the server sees neither the data nor their partition."""
    model, sizes = setup.agreed.model, history.samples.get("train")
    return Deployed(
        nodes=0 if sizes is None else int((sizes > 0).sum()),
        own_data=setup.own_data,
        own_model=setup.own_model,
        model=type(model).__name__ if setup.own_model else setup.config.model.name,
        parameters=sum(leaf.numel() for leaf in history.state.params.values()),
    )


def _transport(grid: Grid, setup: Setup) -> GridTransport:
    facts, clients = request_facts(setup.privacy), setup.agreed.clients
    if setup.secure is None:
        return GridTransport(grid, clients, facts)
    return SecureTransport(grid, clients, setup.secure, facts)


def folder_of(setup: Setup) -> Path:
    """The name of a simulated run's folder, followed by "-flower"."""
    return setup.out / _identity(setup).name


def _identity(setup: Setup) -> Identity:
    """What the run computes. The checksums of nodes' own data are not known."""
    config, model = setup.config, setup.agreed.model
    code = code_of(config)
    if setup.own_model and isinstance(model, nn.Module):
        code = code_sha256(type(config.method), *dict.fromkeys(map(type, model.modules())))
    return Identity(
        fingerprint(config),
        None if setup.own_data else data_sha256(config.data),
        version_of(config.method),
        code,
        hashlib.sha256(msgspec.json.encode(_further_settings(setup), order="sorted")).hexdigest(),
    )


def _further_settings(setup: Setup) -> dict[str, object]:
    """What decides the numbers and is not in the configuration; None for defaults."""
    rules, usual, agreed = setup.rules, FederationSettings(), setup.agreed
    caps, usual_caps = ((r.loss_cap, r.weight_cap, r.largest) for r in (rules, usual))
    bounds, usual_bounds = (
        (r.norm_bound, r.mean_loss_bound, r.average, r.liars) for r in (rules, usual)
    )
    return {
        "caps": None if caps == usual_caps else caps,
        "privacy": setup.privacy,
        "secure": setup.secure,
        "start": None if setup.start is None else StoredRun.open(setup.start).manifest["sha256"],
        "data": (agreed.input_shape, agreed.classes) if setup.own_data else None,
        "model": _outline(agreed.model) if setup.own_model else None,
        **({} if bounds == usual_bounds else {"defences": bounds}),
    }


def _outline(model: nn.Module | str) -> object:
    """Layers and tensor shapes of the app's own model."""
    tensors = model.state_dict() if isinstance(model, nn.Module) else {}
    return repr(model), {name: tuple(leaf.shape) for name, leaf in tensors.items()}


def _terms(setup: Setup, rounds: int) -> bytes:
    """The rules of the run, and the privacy that its rounds have cost."""
    start = None if setup.start is None else str(setup.start)
    terms = {"federation": setup.rules, "privacy": setup.privacy, "secure": setup.secure}
    account = spent(setup.privacy, setup.agreed.clients, rounds)
    return msgspec.json.encode({**terms, "start": start, "privacy_spent": account}, order="sorted")


def _start(setup: Setup, folder: Path) -> Checkpoint | None:
    """The newest checkpoint of this run, or the run to start from."""
    newest = max(_checkpoints(setup, folder), key=lambda c: c.state.round, default=None)
    fresh = first_state(setup.agreed)
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


def _checkpoints(setup: Setup, folder: Path) -> list[Checkpoint]:
    """Checkpoints to resume from. Rounds on real nodes are never discarded silently: if there are
    only checkpoints of other runs, this run is refused. Other versions of fairvar or torch may
    resume."""
    identity, found, refused = _identity(setup), list[Checkpoint](), list[str]()
    for payload in read_checkpoints(folder):
        try:
            checkpoint = unpack_checkpoint(payload, {"identity": identity.sha256})
            check_start(setup.agreed, checkpoint)
            found.append(checkpoint)
            unpack_checkpoint(payload, checkpoint_key(identity))
        except (IntegrityError, DoesNotFit) as error:
            refused.append(str(error))
            LOG.warning("a checkpoint in %s: %s", folder, error)
    if refused and not found:
        raise RunFailed(f"the checkpoint in {folder} cannot be continued: {refused[-1]}; delete "
                        "the folder to start from the beginning")  # fmt: skip
    return found


def _check_model(state: State, fresh: State, where: Path) -> None:
    for group in ("params", "buffers"):
        if _shapes(getattr(state, group)) != _shapes(getattr(fresh, group)):
            raise BadInput(f"the model of {where} is not the app's: their {group} differ")


def _shapes(tree: Tree) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (leaf.shape, leaf.dtype) for name, leaf in tree.items()}


def _csv(rows: Sequence[tuple[Any, ...]], fields: Sequence[str]) -> bytes:
    """A table with one row per record; lists are separated by spaces."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    for row in rows:
        writer.writerow([" ".join(map(str, v)) if isinstance(v, list | tuple) else v for v in row])
    return text.getvalue().encode()
