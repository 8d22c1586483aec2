"""The server's optimiser: by hand, the same in all kernels, grids, recorded and continued runs."""

from __future__ import annotations

import msgspec
import pytest
import torch
from test_engines import TOLERANCE_64, run

import fairvar as fv
from checks import (
    ADAM,
    FURTHER,
    METHODS,
    MOMENTUM,
    OPTIONS,
    distance,
    golden_federation,
    images,
    printed_points,
    run_by,
    same_bytes,
)
from fairvar.engine.grid import Member, train_grid, trains_together
from fairvar.engine.keys import fingerprint
from fairvar.engine.recorder import Checkpoint
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.state import DoesNotFit
from fairvar.runs.config import Config
from fairvar.runs.formats import pack_checkpoint, pack_state, unpack_checkpoint, unpack_state

DEFINED = [
    *(m for m in METHODS if not isinstance(m, fv.QFFL)),
    fv.FairLoss(0.5, losses="full", warm_start="exact"),
    fv.FedEBA(0.5),
    *FURTHER,
    fv.FedProx(1.0),
    fv.Ditto(0.5),
]
CASES = [("multinomial", "step", MOMENTUM), ("batch_norm", "epoch", ADAM)]
PATHS = ("reference", "pooled", "vmapped", "blocked", "linear", "grid", "deployed", "flower")


def close(found: fv.History, expected: tuple[float, ...], tolerance: float) -> None:
    gap = found.state.params["weight"][0] - torch.tensor(expected, dtype=torch.float64)
    assert float(gap.abs().max()) <= tolerance, found.state.params["weight"].tolist()


def golden(engine: str, server: fv.ServerOptimiser, rounds: int) -> fv.History:
    return run_by(engine, golden_federation(), fv.FedAvg(), (0.5, 0.5), rounds, server=server)


@pytest.mark.parametrize("engine", PATHS)
def test_momentum_by_hand(engine: str) -> None:
    """FedAvg's update on the golden problem is Δ(x) = 0.1 (2 x_1 − 0.5, 1.5 x_2 − 1).

    m = (0.05, −0.025),                                        x¹ = (0.45, 0.525)
    Δ = (0.04, −0.02125),    m = 0.9 m + Δ = (0.085, −0.04375),     x² = (0.365, 0.56875)
    Δ = (0.023, −0.0146875), m = (0.0995, −0.0540625),              x³ = (0.2655, 0.6228125)
    """
    points = [(0.45, 0.525), (0.365, 0.56875), (0.2655, 0.6228125)]
    for rounds, expected in printed_points(points, engine):
        close(golden(engine, MOMENTUM, rounds), expected, 1e-14)


@pytest.mark.parametrize("engine", PATHS)
def test_adam_by_hand(engine: str) -> None:
    """β1 = ½, β2 = ¾, τ = 0.05, lr = 0.1; v starts at τ² = 0.0025.

    First coordinate: Δ = 0.05, m = 0.025, v = ¾ 0.0025 + ¼ 0.0025 = 0.0025, √v + τ = 0.1, so
    x = 0.5 − 0.1 · 0.025/0.1 = 0.475. Then Δ = 0.045, m = 0.035, v = 0.00238125 and
    x = 0.475 − 0.0035/(0.0487980532… + 0.05) = 0.4395742008. The rest with 40 digits apart.
    """
    points = [(0.475, 0.513148290818), (0.439574200754, 0.532734884796),
              (0.401722951193, 0.554578819469)]  # fmt: skip
    for rounds, expected in printed_points(points, engine):
        close(golden(engine, ADAM, rounds), expected, 6e-13)


def test_the_defaults_of_adam() -> None:
    """Those of the paper, written into the value and so into the identity of a run."""
    found = fv.ServerOptimiser("adam", lr=0.01)
    assert (found.beta1, found.beta2, found.tau) == (0.9, 0.99, 1e-3)
    assert found == fv.ServerOptimiser("adam", lr=0.01, beta1=0.9, beta2=0.99, tau=1e-3)
    start = {"w": torch.zeros(2)}
    moments = found.start(start)
    assert moments is not None
    assert set(moments) == {"first/w", "second/w"}
    torch.testing.assert_close(moments["second/w"], torch.full((2,), 1e-6))


# -- without an optimiser --------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS + OPTIONS, ids=repr)
def test_lr_one_without_momentum_is_no_optimiser(method: fv.Method) -> None:
    plain = fv.ServerOptimiser("sgd", lr=1.0, beta1=0.0)
    assert plain == fv.ServerOptimiser()
    more: dict = {"dtype": torch.float32}
    found = run("multinomial", method, "auto", "epoch", server=plain, **more)
    same_bytes(found, run("multinomial", method, "auto", "epoch", **more))
    assert found.state.moments is None
    assert pack_state(found.state) == pack_state(run("multinomial", method, "auto", "epoch",
                                                     **more).state)  # fmt: skip


def test_the_operations_themselves_change_no_bit() -> None:
    """With moments in the state, momentum 0 and lr 1."""
    optimiser = fv.ServerOptimiser("sgd", lr=2.0)
    msgspec.structs.force_setattr(optimiser, "lr", 1.0)
    update = {"a": torch.randn(3, 4), "b": torch.randn(5, dtype=torch.float64)}
    moments = {"first/" + k: torch.randn_like(v) for k, v in update.items()}
    step, _ = optimiser.step(update, moments)
    assert all(torch.equal(step[name], leaf) for name, leaf in update.items())


# -- all kernels -----------------------------------------------------------------------------------
@pytest.mark.parametrize("method", DEFINED, ids=repr)
@pytest.mark.parametrize(("model", "work", "server"), CASES, ids=["sgd", "adam"])
def test_engines_agree(
    method: fv.Method, model: str, work: str, server: fv.ServerOptimiser
) -> None:
    expected = run(model, method, "reference", work, server=server)
    plain = run(model, method, "reference", work)
    assert distance(expected, plain)["parameter"] > 1e-3
    for path in ("vmapped", "auto"):
        found = run(model, method, path, work, server=server)
        gaps = distance(found, expected)
        assert max(gaps.values()) <= TOLERANCE_64, (path, gaps)
        assert found.state.moments is not None
        assert expected.state.moments is not None
        for name, leaf in expected.state.moments.items():
            torch.testing.assert_close(found.state.moments[name], leaf, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("server", [MOMENTUM, ADAM], ids=lambda s: s.name)
def test_some_clients_in_each_round(server: fv.ServerOptimiser) -> None:
    found, expected = (
        run("multinomial", fv.FairLoss(0.5), engine, "epoch", server=server, participants=3)
        for engine in ("vmapped", "reference")
    )
    assert max(distance(found, expected).values()) <= TOLERANCE_64


@pytest.mark.parametrize("server", [MOMENTUM, ADAM], ids=lambda s: s.name)
def test_recorded_rounds(server: fv.ServerOptimiser) -> None:
    found, expected = (
        run("multinomial", fv.FairLoss(0.5), "auto", "epoch", server=server, capture=capture)
        for capture in (True, False)
    )
    assert found.provenance["captured"]
    same_bytes(found, expected)


@pytest.mark.parametrize("server", [MOMENTUM, ADAM], ids=lambda s: s.name)
def test_runs_that_train_together(server: fv.ServerOptimiser) -> None:
    data, when = images(10), EvaluateSettings(every=2)
    settings = TrainSettings(rounds=4, dtype="float64", server=server)
    members = [Member("multinomial", fv.FairLoss(s), settings) for s in (0.1, 0.5, 2.0)]
    assert trains_together(members, data, "cross_entropy")
    for member, found in zip(
        members, train_grid(members, data, "cross_entropy", when), strict=True
    ):
        alone = run("multinomial", member.method, "reference", data=data, rounds=4, server=server)
        for name, leaf in alone.state.params.items():
            torch.testing.assert_close(found.state.params[name], leaf, rtol=1e-10, atol=1e-12)
    other = [Member("multinomial", fv.FairLoss(0.1), msgspec.structs.replace(settings, server=o))
             for o in (server, fv.ServerOptimiser())]  # fmt: skip
    assert not trains_together(other, data, "cross_entropy")


# -- states ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("server", [MOMENTUM, ADAM], ids=lambda s: s.name)
def test_a_run_that_is_continued(server: fv.ServerOptimiser) -> None:
    more: dict = {"server": server, "dtype": torch.float32}
    whole = run("batch_norm", fv.FairLoss(0.5), "vmapped", "epoch", rounds=4, **more)
    part = run("batch_norm", fv.FairLoss(0.5), "vmapped", "epoch", rounds=2, **more)
    stored = unpack_checkpoint(pack_checkpoint(Checkpoint(part.state, {}))).state
    rest = run("batch_norm", fv.FairLoss(0.5), "vmapped", "epoch", rounds=4, state=stored, **more)
    for group in ("params", "buffers", "moments"):
        for name, leaf in getattr(whole.state, group).items():
            assert torch.equal(getattr(rest.state, group)[name], leaf), name
    again = unpack_state(pack_state(whole.state))
    assert again.moments is not None
    assert again.moments.keys() == (whole.state.moments or {}).keys()


def test_a_state_of_another_optimiser_is_refused() -> None:
    states = {
        name: run("multinomial", fv.FedAvg(), "auto", rounds=1, server=server).state
        for name, server in (("none", fv.ServerOptimiser()), ("sgd", MOMENTUM), ("adam", ADAM))
    }
    for made, server in (("none", MOMENTUM), ("sgd", ADAM), ("adam", fv.ServerOptimiser())):
        with pytest.raises(DoesNotFit, match="made with another server optimiser"):
            run("multinomial", fv.FedAvg(), "auto", rounds=2, server=server, state=states[made])


# -- what is refused -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "why"),
    [
        (fv.AFL(order="simultaneous", average=True), "the mean of the iterates"),
        (fv.QFFL(1.0), "the length of its step is part of the method"),
        (fv.FedMGDA(), "serves the clients of this round"),
        (fv.FedFV(), "serves the clients of this round"),
        (fv.AdaFed(), "serves the clients of this round"),
    ],
    ids=lambda value: value.label if isinstance(value, fv.Method) else "",
)
def test_methods_that_it_would_change(method: fv.Method, why: str) -> None:
    with pytest.raises(fv.BadInput, match=rf"train\.server is not defined for .*{why}"):
        run("multinomial", method, "auto", server=ADAM)
    run("multinomial", method, "auto", rounds=1, server=fv.ServerOptimiser())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"name": "adam"}, '"adam" needs lr'),
        ({"name": "sgd", "tau": 0.1}, "belong to name"),
        ({"name": "sgd", "beta1": 1.0}, "beta1 = 1"),
        ({"name": "sgd", "lr": 0.0}, "lr = 0"),
        ({"name": "adamw"}, "did you mean 'adam'"),
    ],
)
def test_bad_settings(options: dict, why: str) -> None:
    with pytest.raises(fv.BadInput, match=why):
        fv.ServerOptimiser(**options)


# -- configuration files and identities ------------------------------------------------------------
def test_configuration() -> None:
    text = '[train.server]\nname = "adam"\nlr = 0.01\n'
    config = Config.from_toml(text)
    assert config.train.server == fv.ServerOptimiser("adam", lr=0.01)
    assert Config.from_toml(config.to_toml()) == config
    with pytest.raises(fv.BadInput, match=r"unknown key train\.server\.betta2"):
        Config.from_toml(text + "betta2 = 0.9\n")
    with pytest.raises(fv.BadInput, match=r'train\.server: "adam" needs lr'):
        Config.from_toml('[train.server]\nname = "adam"\n')


def test_it_is_part_of_the_identity() -> None:
    plain = Config.from_dict({})
    same = Config.from_dict({"train": {"server": {"name": "sgd", "lr": 1.0}}})
    others = [Config.from_dict({"train": {"server": s}}) for s in (
        {"name": "sgd", "beta1": 0.9}, {"name": "sgd", "lr": 0.5}, {"name": "adam", "lr": 0.5},
        {"name": "adam", "lr": 0.5, "tau": 0.1})]  # fmt: skip
    assert fingerprint(plain) == fingerprint(same)
    assert len({fingerprint(config) for config in (plain, *others)}) == 5
