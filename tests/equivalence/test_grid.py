"""Runs trained together = the single runs.

Measured over all methods and kinds of local work: 7e-16 relative in float64 (allowed: 1e-12) and
8e-8 in float32 (allowed: 1e-6), after five rounds of four runs that differ in all they may.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs
from test_engines import METHODS, OPTIONS, WORK
from test_linear import large, uneven
from torch import Tensor, nn

import fairvar as fv
from checks import FURTHER, distance, images, small_cnn
from fairvar.engine.grid import Member, members_that_fit, train_grid, trains_together
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.train import Checkpoint, run_rounds
from fairvar.runs.formats import pack_checkpoint, pack_history, unpack_checkpoint

TOLERANCE_64 = 1e-12
TOLERANCE_32 = 1e-6
WHEN = EvaluateSettings(every=2)
DATA = images(7)
CASES = [(m, w) for m in METHODS + OPTIONS + FURTHER for w in WORK]
FACTORS = ((1.0, 0.1, 0), (0.5, 0.2, 0), (2.0, 0.05, 1), (1.5, 0.1, 1))  # numbers, lr, seed


def members(method: fv.Method, work: str = "step", **options: object) -> list[Member]:
    given: dict = {"rounds": 5, "dtype": "float64", **WORK[work], **options}
    return [
        Member(
            "multinomial",
            structs.replace(method, **{k: v * factor for k, v in method.numbers.items()}),
            TrainSettings(lr=lr, seed=seed, **given),
        )
        for factor, lr, seed in FACTORS
    ]


def alone(member: Member, data: fv.Federation, when: EvaluateSettings = WHEN) -> fv.History:
    """The single run, at evaluated rounds."""
    history = run_rounds(
        member.model, data, member.method, "cross_entropy", member.settings, when, member.start
    )
    kept = torch.isin(history.observed + 1, history.evaluated)
    tables = ("observed", "participant_loss", "participant_weights", "ascended")
    return replace(history, **{k: getattr(history, k)[kept] for k in tables})


def same(found: fv.History, expected: fv.History, tolerance: float = TOLERANCE_64) -> None:
    gaps = {
        k: v
        for k, v in distance(found, expected).items()
        if tolerance < 1e-9 or "accuracy" not in k  # rounding may turn an answer
    }
    assert max(gaps.values()) <= tolerance, gaps
    for fact in ("rounds", "diverged_at", "exchanges", "bytes_down", "bytes_up", "method"):
        assert getattr(found, fact) == getattr(expected, fact), fact
    assert torch.equal(found.observed, expected.observed)
    assert torch.equal(found.evaluated, expected.evaluated)
    assert found.state.round == expected.state.round
    pack_history(found)  # may be stored


@pytest.mark.parametrize(("method", "work"), CASES, ids=[f"{m!r}-{w}" for m, w in CASES])
def test_grid_is_the_single_runs(method: fv.Method, work: str) -> None:
    runs = members(method, work)
    assert trains_together(runs, DATA, "cross_entropy")
    for member, found in zip(runs, train_grid(runs, DATA, "cross_entropy", WHEN), strict=True):
        same(found, alone(member, DATA))
        assert (found.provenance["engine"], found.provenance["together"]) == ("linear", 4)
        assert found.provenance["seed"] == member.settings.seed


@pytest.mark.parametrize("work", ["step", "mini_batch", "epoch"])
@pytest.mark.parametrize("method", [fv.QFFL(1.0), fv.FairGrad(0.1)], ids=repr)
def test_clients_of_all_sizes_in_single_precision(method: fv.Method, work: str) -> None:
    data, runs = uneven(), members(method, work, dtype="float32")
    for member, found in zip(runs, train_grid(runs, data, "cross_entropy", WHEN), strict=True):
        same(found, alone(member, data), TOLERANCE_32)


@pytest.mark.parametrize(
    "when", [{"local": False}, {"splits": ()}, {"splits": ("train",)}], ids=str
)
def test_other_evaluations(when: dict) -> None:
    often, runs = EvaluateSettings(every=1, **when), members(fv.FairLoss(0.5, exact=True))
    for member, found in zip(runs, train_grid(runs, DATA, "cross_entropy", often), strict=True):
        same(found, alone(member, DATA, often))


def test_modules_of_ones_own_and_clipped_directions() -> None:
    modules = [nn.Sequential(nn.Flatten(), nn.Linear(64, 3)) for _ in range(4)]
    runs = members(fv.FairGrad(0.1, exact=True), "epoch", clip_norm=0.3)
    runs = [replace(m, model=module) for m, module in zip(runs, modules, strict=True)]
    assert trains_together(runs, DATA, "cross_entropy")
    for member, found in zip(runs, train_grid(runs, DATA, "cross_entropy", WHEN), strict=True):
        same(found, alone(member, DATA))


# -- divergence ------------------------------------------------------------------------------------
def with_one_diverging(method: fv.Method, lr: float) -> list[Member]:
    runs = members(method, rounds=8, dtype="float32")
    runs[1] = replace(runs[1], settings=structs.replace(runs[1].settings, lr=lr))
    return runs


SMALL = [(0.1 * x, 0.1 * x.sum((1, 2, 3))) for x, _ in map(DATA.train.of, range(7))]
QUADRATICS = fv.Federation.from_arrays(SMALL, test=SMALL)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_a_run_that_diverges_disturbs_nobody(method: fv.Method, every: int) -> None:
    """Squared errors overflow after a few rounds, in the losses or, first, in an evaluation.
    (Not so q-FFL, whose steps shrink as gradients grow.)"""
    when, runs = EvaluateSettings(every=every), with_one_diverging(method, lr=1e7)
    runs = [replace(m, model="linear") for m in runs]
    found = train_grid(runs, QUADRATICS, "mse", when)
    for number, (member, history) in enumerate(zip(runs, found, strict=True)):
        single = run_rounds("linear", QUADRATICS, member.method, "mse", member.settings, when)
        diverges = number == 1 and not isinstance(method, fv.QFFL)
        assert (history.diverged_at is not None) == diverges
        assert history.diverged_at == single.diverged_at
        assert history.rounds == single.rounds == history.state.round
        assert history.bytes_up == single.bytes_up
        assert torch.equal(history.evaluated, single.evaluated)
        if number != 1:
            kept = torch.isin(single.observed + 1, single.evaluated)
            torch.testing.assert_close(history.loss, single.loss[kept], rtol=1e-4, atol=1e-6)
        for name, leaf in history.state.params.items():
            assert bool(torch.isfinite(leaf).all()) == bool(
                torch.isfinite(single.state.params[name]).all()
            )


def test_a_grid_ends_when_all_have_diverged() -> None:
    done: list[int] = []
    runs = [
        replace(m, model="linear", settings=structs.replace(m.settings, lr=1e6, rounds=1000))
        for m in members(fv.FedAvg(), dtype="float32")
    ]
    found = train_grid(
        runs, QUADRATICS, "mse", EvaluateSettings(every=10), lambda t, of: done.append(t)
    )
    assert all(h.diverged_at is not None and h.diverged_at < 20 for h in found)
    assert len(done) <= 20


# -- checkpoints -----------------------------------------------------------------------------------
def halves(runs: list[Member], data: fv.Federation, loss: str, at: int) -> list[list[fv.History]]:
    """All at once; and interrupted after `at` rounds, with checkpoints that went through bytes."""
    kept: list[list[Checkpoint]] = []

    class Stop(Exception):
        pass

    def keep(done: int, make) -> None:
        if done == at:
            kept.append([unpack_checkpoint(pack_checkpoint(c)) for c in make()])
            raise Stop

    whole = train_grid(runs, data, loss, WHEN)
    with pytest.raises(Stop):
        train_grid(runs, data, loss, WHEN, keep=keep)
    later = [replace(m, start=start) for m, start in zip(runs, kept[0], strict=True)]
    assert trains_together(later, data, loss)
    return [whole, train_grid(later, data, loss, WHEN)]


def equal(a: fv.History, b: fv.History) -> None:
    assert pack_history(a) == pack_history(b)
    assert a.state.round == b.state.round
    for x, y in zip(a.state.tensors(), b.state.tensors(), strict=True):
        assert torch.equal(x, y) or bool(torch.isnan(x).any())


@pytest.mark.parametrize("work", ["step", "mini_batch", "epoch"])
@pytest.mark.parametrize("method", [*METHODS[1:], OPTIONS[1], OPTIONS[5]], ids=repr)
def test_a_continued_grid_is_the_uninterrupted_one(method: fv.Method, work: str) -> None:
    for at in (1, 4):  # before and after the first evaluation
        for a, b in zip(*halves(members(method, work), DATA, "cross_entropy", at), strict=True):
            equal(a, b)


def test_a_run_that_has_diverged_is_carried_along() -> None:
    runs = [replace(m, model="linear") for m in with_one_diverging(fv.FedAvg(), lr=1e6)]
    whole, rest = halves(runs, QUADRATICS, "mse", 7)
    assert whole[1].diverged_at is not None
    assert whole[1].diverged_at < 7
    for a, b in zip(whole, rest, strict=True):
        equal(a, b)


def test_a_state_without_tables_starts_a_new_history() -> None:
    runs = members(fv.FairLoss(0.5))
    half = [alone(replace(m, settings=structs.replace(m.settings, rounds=2)), DATA) for m in runs]
    later = [replace(m, start=Checkpoint(h.state, None)) for m, h in zip(runs, half, strict=True)]
    for member, found in zip(later, train_grid(later, DATA, "cross_entropy", WHEN), strict=True):
        single = alone(member, DATA)
        assert found.rounds == single.rounds == 3
        assert found.bytes_up == single.bytes_up
        assert found.evaluated.tolist() == [4, 5]


# -- who may train together ------------------------------------------------------------------------
class Branching(fv.Method, frozen=True, tag="branching"):
    """Decides by its number what to do."""

    power: float = 1.0

    def weigh(self, memory: dict, replies: fv.methods.Replies) -> tuple[Tensor, dict]:
        return replies.share * (2 if self.power > 1 else 1), memory


def test_who_may_train_together() -> None:
    runs = members(fv.FairGrad(0.1))

    def changed(number: int = 1, **options: object) -> list[Member]:
        settings = structs.replace(runs[number].settings, **options)
        return [*runs[:number], replace(runs[number], settings=settings), *runs[number + 1 :]]

    def with_model(model: nn.Module | str) -> list[Member]:
        return [replace(m, model=model) for m in runs]

    def refused(others: list[Member], data: fv.Federation = DATA, loss: str = "cross_entropy"):
        assert not trains_together(others, data, loss)

    assert trains_together(runs, DATA, "cross_entropy")
    refused(runs[:1])
    refused(runs, loss="no loss")
    for options in ({"rounds": 6}, {"batch_size": 2}, {"clip_norm": 1.0}, {"dtype": "float32"}):
        refused(changed(**options))
    refused([replace(m, settings=structs.replace(m.settings, engine="vmapped")) for m in runs])
    refused([*runs, replace(runs[0], method=fv.FairGrad(0.0))])  # no curvature
    refused([*runs, replace(runs[0], method=fv.FairGrad(0.1, exact=True))])
    refused([*runs, replace(runs[0], method=fv.FedAvg())])
    refused(with_model(small_cnn(batch_norm=False)))
    refused([*runs, replace(runs[0], model=nn.Sequential(nn.Flatten(), nn.Linear(64, 4)))])
    refused([replace(m, model="multinomial") for m in members(fv.FairGrad(0.1))], large())
    refused(members(Branching()))
    history = alone(runs[0], DATA)
    refused([replace(runs[0], start=Checkpoint(history.state, None)), *runs[1:]])


def test_what_may_not_train_together_is_refused() -> None:
    runs = members(fv.FedAvg())
    mixed = [*runs, replace(runs[0], method=fv.QFFL(1.0))]
    with pytest.raises(fv.BadInput, match="one by one"):
        train_grid(mixed, DATA, "cross_entropy", WHEN)
    broken = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    fine = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with torch.no_grad():
        broken[1].bias.fill_(np.nan)
    two = [replace(runs[0], model=fine), replace(runs[1], model=broken)]
    with pytest.raises(fv.BadInput, match="not finite"):
        train_grid(two, DATA, "cross_entropy", WHEN)


def test_how_many_fit() -> None:
    """A gibibyte on the CPU: MNIST's 55 configurations in five seeds, and fewer where more is
    held per run."""
    images_of_mnist = images(50, (1, 28, 28), classes=10, sizes=(16, 16))
    runs = members(fv.FairGrad(0.1), dtype="float32")
    assert 275 <= members_that_fit(runs, images_of_mnist) <= 5000
    twice = members(fv.FairGrad(0.1), dtype="float64")
    few, many = (members_that_fit(r, images_of_mnist) for r in (twice, runs))
    assert many // 2 - 1 <= few <= many // 2 + 1
    on_gpu = [replace(m, settings=structs.replace(m.settings, device="cuda")) for m in runs]
    assert members_that_fit(on_gpu, images_of_mnist) >= 16 * many
    assert members_that_fit(members(fv.AAggFF()), DATA) < members_that_fit(twice, DATA)
