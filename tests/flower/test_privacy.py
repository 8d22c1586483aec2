"""Differential privacy by Flower's means: what test_in_process does not show of cuts and noise."""

from __future__ import annotations

import json
from math import log, sqrt
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.clientapp.mod import LocalDpMod
from flwr.supercore.differential_privacy import compute_clip_model_update
from test_in_process import run, run_config

import fairvar as fv
from fairvar.deploy.flower import client_app, server
from fairvar.deploy.flower.server import run_on
from fairvar.deploy.flower.setup import read_setup
from fairvar.runs.stored import StoredRun
from grids import InProcessGrid

CUT = "privacy.clipping_norm=0.01"


def test_a_model_that_did_not_move_is_no_error(tmp_path: Path) -> None:
    """Flower's clipping divides by the norm of the update; the node would be left out."""
    with pytest.raises(ZeroDivisionError):
        compute_clip_model_update([np.ones(3)], [np.ones(3)], 1.0)
    quiet = f"{CUT} privacy.noise_multiplier=0.0"
    config = run_config(fv.FedAvg(), tmp_path, quiet, rounds=1, lr=1e-300)
    stored = run(config)
    assert stored.manifest["birth"]["refused"] == {}
    assert stored.history().weights[0].tolist() == pytest.approx([0.2] * 5)
    start = dict(read_setup(config).agreed.model.double().named_parameters())
    for name, leaf in stored.history().state.params.items():
        assert torch.equal(leaf, start[name])


def test_the_noise_is_new_in_every_run(tmp_path: Path) -> None:
    """It does not depend on the run's seed, with which anybody could subtract it again."""
    loud = f"{CUT} privacy.noise_multiplier=1.0"
    first, second = (
        run(run_config(fv.FedAvg(), tmp_path / name, loud, rounds=1)).history().state.params
        for name in ("a", "b")
    )
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_flowers_local_mod_on_the_train_exchange(tmp_path: Path) -> None:
    """`client_app(mods=[LocalDpMod(...)])`: the node itself adds the noise that Flower computes."""
    sent: dict[int, np.ndarray] = {}
    start = read_setup(run_config(fv.FedAvg(), tmp_path)).agreed.model.double()
    x = torch.cat([p.detach().flatten() for p in start.parameters()]).numpy()

    def listens(node: int, reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            arrays = reply.content.array_records["arrays"].to_numpy_ndarrays()
            sent[node] = np.concatenate([a.ravel() for a in arrays]) - x
        return reply

    config = run_config(fv.FedAvg(), tmp_path, rounds=1)
    grid = InProcessGrid(config, {100 + i: i for i in range(5)}, listens)
    grid.app = client_app(mods=[LocalDpMod(0.01, 0.01, 0.5, 1e-5)])
    stored = StoredRun.open(run_on(grid, read_setup(config)))
    assert stored.manifest["birth"]["refused"] == {}
    noise = 0.01 * sqrt(2 * log(1.25 / 1e-5)) / 0.5
    for update in sent.values():
        assert 0.85 * noise < update.std() < 1.15 * noise  # 650 numbers: 5 standard deviations
    assert not np.array_equal(sent[100], sent[101])


def test_an_account_needs_noise_and_the_accountant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = run_config(
        fv.FedAvg(), tmp_path, f"{CUT} privacy.noise_multiplier=0 privacy.delta=0.1"
    )
    with pytest.raises(fv.BadInput, match="without noise ε is infinite"):
        read_setup(silent)
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    with pytest.raises(fv.BadInput, match=r"fairvar\[privacy\]"):
        run(run_config(fv.FedAvg(), tmp_path, f"{CUT} privacy.delta=1e-5"))


def test_flowers_accountant_says_what_the_rounds_cost(tmp_path: Path) -> None:
    """Compared with Rényi orders by hand: T Gaussian releases cost T α / (2 z²) at order α."""
    pytest.importorskip("dp_accounting", reason="needs fairvar[privacy]")
    z, delta, rounds = 2.0, 1e-5, 3
    options = f"{CUT} privacy.noise_multiplier={z} privacy.delta={delta}"
    stored = run(run_config(fv.FedAvg(), tmp_path, options, rounds=rounds))
    account = json.loads((stored.folder / "federation.json").read_text())["privacy_spent"]
    assert account["releases"] == rounds
    assert account["delta"] == delta

    def epsilon(order: float) -> float:
        cost = rounds * order / (2 * z**2)
        return cost + log((order - 1) / order) - (log(delta) + log(order)) / (order - 1)

    by_hand = min(epsilon(1 + k / 100) for k in range(1, 10000))
    assert account["epsilon"] == pytest.approx(by_hand, rel=0.01)
