"""The ServerApp. It stores a run in the same files as a simulation.

A checkpoint is written after every round, and a restarted run continues from the last one. The log
has a line for each round and ends with the scores of the run. `flwr run --stream` exits with 0 even
if the ServerApp fails, so the reason of a failure is in failed.txt in the run's folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch
from filelock import Timeout
from flwr.serverapp import (
    GaussianPrivacyEvent,
    Grid,
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)
from flwr.supercore.differential_privacy import (
    KEY_CLIPPING_NORM,
    add_gaussian_noise_inplace,
    compute_stdv,
)
from httpx import TransportError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from fairvar.common.files import csv_text
from fairvar.common.tree import size
from fairvar.data.fetch import file_digest
from fairvar.deploy.client import sends_loss
from fairvar.deploy.flower.secure import SecureTransport
from fairvar.deploy.flower.setup import SECURE, PrivacySettings, Setup
from fairvar.deploy.flower.transport import LOG, GridTransport
from fairvar.deploy.guard import FederationSettings, Notes, Refusal, RoundNote
from fairvar.deploy.run import Federated, check_start, federate, first_state
from fairvar.engine.history import History
from fairvar.engine.keys import Identity, checkpoint_key, fingerprint
from fairvar.engine.state import DoesNotFit, Outcome, State
from fairvar.engine.train import Checkpoint
from fairvar.errors import BadInput, IntegrityError, RunFailed
from fairvar.methods.base import Method
from fairvar.runs import formats
from fairvar.runs.identity import (
    DEPLOYED_FILE,
    code_of,
    code_sha256,
    data_sha256,
    metric_code,
    version_of,
)
from fairvar.runs.runner import federation_of, record_federation, run_files
from fairvar.runs.stored import Deployed, StoredRun, score_rows

FAILED = "failed.txt"
SECONDS_FOR_ANOTHER = 60.0  # to wait for the lock of another server of this run
WIDTH = 160  # of the summary, whose output is usually no terminal
MAX_SITES = 30  # with more, the summary does not list every site


def run_on(grid: Grid, setup: Setup) -> Path:
    """Train on this grid; returns the folder of the finished run."""
    formats.check_writable(setup.out)
    torch.set_num_threads(setup.config.train.threads)
    folder = folder_of(setup)
    with _one_server(folder):
        if formats.is_complete(folder):
            LOG.info("this run is finished already")
            print_summary(folder)
            return folder
        (folder / FAILED).unlink(missing_ok=True)
        try:
            history, notes = _reached(lambda: _rounds(grid, setup, folder))
            _store(setup, folder, history, notes)
        except Exception as error:
            formats.write_text(folder / FAILED, f"{error or type(error).__name__}\n")
            raise
    print_summary(folder)
    return folder


def _reached(rounds: Callable[[], Federated]) -> Federated:
    try:
        return rounds()
    except TransportError as error:  # its own message is about TLS or sockets
        why = f"{type(error).__name__}: {error}"
        raise RunFailed(f"the SuperLink does not answer ({why}); start the run again, and it "
                        "continues from its last round") from error  # fmt: skip


@contextmanager
def _one_server(folder: Path) -> Iterator[None]:
    """Hold the lock of the run; waits a while for a server that is stopping."""
    try:
        with formats.lock_of(folder, SECONDS_FOR_ANOTHER):
            folder.mkdir(exist_ok=True)
            yield
    except Timeout:
        raise RunFailed(f"another server works on this run; stop it first: {folder}") from None


def _rounds(grid: Grid, setup: Setup, folder: Path) -> Federated:
    agreed, privacy = setup.agreed, setup.privacy
    key, first, facts = checkpoint_key(_identity(setup)), first_state(agreed), {}
    if privacy is not None:
        check_privacy(privacy, setup.config.method, first)
        facts[KEY_CLIPPING_NORM] = privacy.clipping_norm
    transport = GridTransport(grid, agreed.clients, facts)
    if setup.secure is not None:
        transport = SecureTransport(grid, agreed.clients, facts, setup.secure)
        if first.buffers:
            raise BadInput(f"{SECURE} = true: a model with batch norm has statistics of unknown "
                           "size, which the sum's range cannot hold; take group norm")  # fmt: skip

    def keep(done: int, make: Callable[[], Checkpoint]) -> None:
        made = make()
        formats.write_checkpoint(folder, done, {folder.name: formats.pack_checkpoint(made, key)})
        LOG.info(
            "round %s of %s%s", done, setup.config.train.rounds, round_line(made, agreed.clients)
        )

    def finish(outcome: Outcome) -> Outcome:
        return outcome if privacy is None else noisy(outcome, privacy)

    transport.names |= dict(enumerate(setup.sites))  # also of sites that never answer
    start = _start(setup, folder, first)
    return federate(agreed, setup.rules, transport, start, keep, finish)


def _store(setup: Setup, folder: Path, history: History, notes: Notes) -> None:
    passport, model = None, setup.agreed.model
    if setup.own_data:
        passport = {"dataset": setup.config.data.name, "clients": setup.agreed.clients}
    else:
        record_federation(folder.parent, federation_of(setup.config))
    terms = {
        "federation": setup.rules,
        "privacy": setup.privacy,
        "privacy_spent": spent(setup.privacy, setup.agreed.clients, history.rounds),
        "secure": setup.secure,
        "start": setup.start and str(setup.start),
        "sites": {str(client): name for client, name in sorted(notes.names.items())},
    }
    refused = [(*refusal, notes.names.get(refusal.client, "")) for refusal in notes.refused]
    more = {
        "refused.csv": _csv(refused, (*Refusal._fields, "site")),  # every reply that was left out
        "rounds.csv": _csv(notes.rounds, RoundNote._fields),  # the clients of every round
        "federation.json": msgspec.json.encode(terms, order="sorted"),
    }
    sizes = history.samples.get("train")
    deployed = Deployed(
        nodes=0 if sizes is None else int((sizes > 0).sum()),
        own_data=setup.own_data,
        own_model=setup.own_model,
        model=type(model).__name__ if setup.own_model else setup.config.model.name,
        parameters=size(history.state.params),
    )
    identity = _identity(setup)
    files = run_files(setup.config, history, passport, more, identity, deployed=deployed)
    formats.store_run(folder, files)
    limits = (("weight_cap", "limited", "a client's weight"),
              ("norm_bound", "shortened", "what a client sent"))  # fmt: skip
    for setting, column, what in limits:
        if cut := sum(bool(getattr(note, column)) for note in notes.rounds):
            LOG.warning("federation.%s = %s cut %s in %s of %s rounds: rounds.csv names it (%s)",
                        setting, getattr(setup.rules, setting), what, cut, len(notes.rounds),
                        column)  # fmt: skip


def _csv(rows: Sequence[tuple[Any, ...]], fields: Sequence[str]) -> bytes:
    """A table with one row per record; lists are separated by spaces."""
    lines = ([" ".join(map(str, v)) if isinstance(v, list | tuple) else v for v in row]
             for row in rows)  # fmt: skip
    return csv_text([fields, *lines]).encode()


# -- the log: a line for each round, and the scores at the end -------------------------------------
def round_line(made: Checkpoint, clients: int) -> str:
    """How many clients took part in the round, and the scores if it was evaluated."""
    tables = made.tables or {}
    noted = Notes.reopen(tables, clients).rounds
    text = f": {len(noted[-1].clients)} of {clients} clients" if noted else ""
    if len(tables["evaluated"]) and int(tables["evaluated"][-1]) == made.state.round:
        for split in ("test", "valid"):
            loss = tables.get(f"evaluated_loss/{split}/global")
            accuracy = tables.get(f"accuracy/{split}/global")
            if loss is not None and bool(loss[-1].isfinite().any()):
                text += f", {split} loss {float(loss[-1].nanmean()):.3f}"
                if accuracy is not None and bool(accuracy[-1].isfinite().any()):
                    known = accuracy[-1][accuracy[-1].isfinite()]
                    text += f", accuracy {100 * float(known.mean()):.1f} %"
                    text += f" (lowest {100 * float(known.min()):.1f} %)"
                return text
    return text


def print_summary(folder: Path) -> None:
    """Print the fairness of a finished run, the scores of its sites, and the refused replies."""
    run = StoredRun.open(folder)
    history, refused = run.history(), run.manifest["birth"]["refused"]
    terms = msgspec.json.decode(formats.read_sealed(folder, run.manifest, DEPLOYED_FILE))
    names = {int(client): name for client, name in terms.get("sites", {}).items()}
    (heads, rows), rounds = score_rows(run.manifest), history.state.round
    print(f"\n{run.manifest['method']} after {rounds} round{'s' * (rounds != 1)}")
    if rows:
        _print_columns([["clients' fairness", *heads], *rows])
        print(f"(variance over clients in {history.metric.in_variances})")
    split = next((s for s in ("test", "valid") if (s, "global") in history.evaluated_loss), None)
    if split is not None and history.clients <= MAX_SITES and len(history.evaluated):
        _print_columns(_by_site(history, split, names))
    if refused:
        print("left out: " + ", ".join(f"{n} × {why}" for why, n in refused.items())
              + "; refused.csv says which and why")  # fmt: skip
    print(f"the run is in {folder}; `fairvar report {folder.parent}` writes tables, figures and "
          "a page", flush=True)  # fmt: skip


def _by_site(history: History, split: str, names: Mapping[int, str]) -> list[list[str]]:
    loss = history.evaluated_loss[split, "global"][-1].tolist()
    accuracy = history.accuracy.get((split, "global"))
    right = [] if accuracy is None else [f"{100 * a:.2f}" for a in accuracy[-1].tolist()]
    sizes = [history.samples[part].tolist() for part in ("train", split)]
    rows = [["site", "train", split, f"{split} loss", *(["accuracy %"] if right else [])]]
    for i, value in enumerate(loss):
        counts = [size[i] for size in sizes]
        scores = [f"{value:.3f}", *right[i : i + 1]]
        shown = scores if counts[1] else ["–"] * len(scores)
        rows.append([names.get(i, f"client {i}"), *map(str, counts), *shown])
    return rows


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Text in columns, the first to the left."""
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(rows[0]):
        table.add_column(Text(head), justify="right" if number else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    Console(width=WIDTH, highlight=False).print(table)


# -- identity and start of the run -----------------------------------------------------------------
def folder_of(setup: Setup) -> Path:
    """The name of a simulated run's folder, followed by "-flower"."""
    return setup.out / _identity(setup).name


def _identity(setup: Setup) -> Identity:
    """The identity of the run. Checksums of the nodes' own data are not known."""
    config, model = setup.config, setup.agreed.model
    code = code_of(config)
    if setup.own_model and isinstance(model, nn.Module):
        parts: list[Any] = [*dict.fromkeys(map(type, model.modules())), *metric_code(config)]
        parts += [part for part in (setup.agreed.loss, setup.reads) if callable(part)]
        code = code_sha256(type(config.method), *parts)
    return Identity(
        fingerprint(config),
        None if setup.own_data else data_sha256(config.data),
        version_of(config.method),
        code,
        hashlib.sha256(msgspec.json.encode(_further_settings(setup), order="sorted")).hexdigest(),
    )


def _further_settings(setup: Setup) -> dict[str, object]:
    """Settings that affect the results and are not in the configuration; None for defaults."""
    agreed, model = setup.agreed, setup.agreed.model
    caps = _unusual(setup.rules, "loss_cap", "weight_cap", "largest")
    bounds = _unusual(setup.rules, "norm_bound", "mean_loss_bound", "average", "liars")
    tensors = model.state_dict() if isinstance(model, nn.Module) else {}
    outline = repr(model), {name: tuple(leaf.shape) for name, leaf in tensors.items()}
    return {
        "caps": caps,
        "privacy": setup.privacy,
        "secure": setup.secure,
        "start": None if setup.start is None else StoredRun.open(setup.start).manifest["sha256"],
        "data": (setup.inputs or agreed.input_shape, agreed.classes) if setup.own_data else None,
        "model": outline if setup.own_model else None,
        **({} if bounds is None else {"defences": bounds}),
        **({} if agreed.loss == setup.config.model.loss else {"loss": _name(agreed.loss)}),
        **({"sites": setup.sites} if setup.sites else {}),
        **({"folder": _content(setup.folder)} if setup.folder else {}),
    }


def _name(loss: object) -> str:
    return str(getattr(loss, "__qualname__", loss))


def _content(folder: Path) -> str:
    """SHA-256 of the files of simulated sites, part of the run's identity."""
    found = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(f"{file.relative_to(folder)}\0{file_digest(file)}\n".encode())
    return found.hexdigest()


def _unusual(rules: FederationSettings, *names: str) -> tuple[object, ...] | None:
    """These settings; None if all have their defaults."""
    given, usual = (tuple(getattr(r, n) for n in names) for r in (rules, FederationSettings()))
    return None if given == usual else given


def _start(setup: Setup, folder: Path, fresh: State) -> Checkpoint | None:
    """The newest checkpoint of this run, or the run to start from."""
    newest = max(_checkpoints(setup, folder), key=lambda c: c.state.round, default=None)
    if newest is not None or setup.start is None:
        return newest
    trained = StoredRun.open(setup.start)
    state = trained.state()
    for group in ("params", "buffers"):
        shapes = [{name: (leaf.shape, leaf.dtype) for name, leaf in getattr(one, group).items()}
                  for one in (state, fresh)]  # fmt: skip
        if shapes[0] != shapes[1]:
            raise BadInput(f"the model of {setup.start} is not the app's: their {group} differ")
    if state.round >= setup.config.train.rounds:
        raise BadInput(f"the run to start from has {state.round} rounds already; rounds counts "
                       f"them all: give more than {state.round}")  # fmt: skip
    if trained.config.method != setup.config.method:
        LOG.info("%s trained %s: only its model is used", setup.start, trained.config.method)
        state = replace(fresh, round=state.round, params=state.params, buffers=state.buffers)
    return Checkpoint(replace(state, personal=None), None)  # nodes have their own


def _checkpoints(setup: Setup, folder: Path) -> list[Checkpoint]:
    """Checkpoints to resume from. Raises if there are only checkpoints of other runs, because
    rounds on real nodes must not be discarded silently. Other versions of fairvar or torch may
    resume."""
    identity, found, refused = _identity(setup), list[Checkpoint](), list[str]()
    for payload in (part for files in formats.read_checkpoints(folder) for part in files.values()):
        try:
            checkpoint = formats.unpack_checkpoint(payload, {"identity": identity.sha256})
            check_start(setup.agreed, checkpoint)
            found.append(checkpoint)
            formats.unpack_checkpoint(payload, checkpoint_key(identity))
        except (IntegrityError, DoesNotFit) as error:
            refused.append(str(error))
            LOG.warning("a checkpoint in %s: %s", folder, error)
    if refused and not found:
        raise RunFailed(f"the checkpoint in {folder} cannot be continued: {refused[-1]}; delete "
                        "the folder to start from the beginning")  # fmt: skip
    return found


# -- differential privacy --------------------------------------------------------------------------
def check_privacy(settings: PrivacySettings, method: Method, state: State) -> None:
    """Refuse methods whose clients also send losses, gradients or statistics: they get no noise."""
    more = sends_loss(method) or method.uses_mean_gradient or method.client_weights == "size"
    if more or state.buffers:
        what = "batch-norm statistics" if state.buffers else ", ".join(method.reveals)
        raise BadInput(
            f"privacy.clipping_norm covers the model alone, but the clients of {method.label} send "
            f"{what}; use FedAvg with uniform weights and a model without batch norm"
        )
    if settings.delta is not None and find_spec("dp_accounting") is None:
        raise BadInput("privacy.delta needs Flower's accountant: pip install 'fairvar[privacy]'")


def noisy(outcome: Outcome, settings: PrivacySettings) -> Outcome:
    """The mean update with Flower's Gaussian noise."""
    replies = int((outcome.weights != 0).sum())
    spread = compute_stdv(settings.noise_multiplier, settings.clipping_norm, replies)
    arrays = {name: leaf.numpy(force=True).copy() for name, leaf in outcome.update.items()}
    add_gaussian_noise_inplace(list(arrays.values()), spread)
    return replace(outcome, update={name: torch.from_numpy(a) for name, a in arrays.items()})


def spent(settings: PrivacySettings | None, clients: int, releases: int) -> dict[str, Any] | None:
    """(ε, δ) of `releases` noisy means by Flower's accountant: add-or-remove-one client, for an
    adversary who sees the models but not the updates, without amplification by sampling."""
    if settings is None or settings.delta is None or not releases:
        return None
    from flwr.serverapp import RdpAccountant

    relation, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    accountant = RdpAccountant(PrivacyConfig(settings.delta, clients, relation, sampling))
    event = GaussianPrivacyEvent(float(settings.noise_multiplier), clients, clients)
    accountant.compose(event, releases)
    found = accountant.get_privacy_spent()
    return {"epsilon": found.epsilon, "delta": found.delta, "releases": releases,
            "neighbours": relation.value, "sampling": sampling.value}  # fmt: skip
