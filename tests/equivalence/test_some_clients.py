"""Some clients in each round: reference loop = pooled = blocked = vmapped, also captured.

Measured on a CPU after three rounds of ragged clients, over all cases below: 1e-15 relative in
float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_engines import TOLERANCE_64, WORK, run
from torch.utils._python_dispatch import TorchDispatchMode

import fairvar as fv
from checks import FURTHER, FURTHER_OPTIONS, METHODS, OPTIONS, distance, images, same_bytes
from fairvar.common.tree import squared_norm, subtract
from fairvar.engine.batches import Cohort, Schedule
from fairvar.engine.cuda_graphs import RECORDINGS
from fairvar.engine.grid import Member, train_grid, trains_together
from fairvar.engine.run import Run
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.train import Checkpoint, prepare, run_rounds
from fairvar.runs.formats import pack_checkpoint, unpack_checkpoint

CLIENTS = 10
DATA = images(CLIENTS)
SOME = (1, 3, CLIENTS - 1)
EVERY_METHOD = [*METHODS, fv.AAggFF(setting="cross_device"), *OPTIONS]
KINDS = ("step", "mini_batch", "epoch")
CASES = [("multinomial", m, w, k) for m in EVERY_METHOD[:9] for w in KINDS for k in SOME]
CASES += [("multinomial", m, w, 3) for m in OPTIONS for w in ("mini_batch", "steps")]
CASES += [("batch_norm", m, w, 3) for m in METHODS[-4:] for w in ("mini_batch", "epoch")]
CASES += [("multinomial", m, w, 3) for m in FURTHER + FURTHER_OPTIONS for w in KINDS]
CASES += [("multinomial", m, "mini_batch", k) for m in FURTHER for k in (1, CLIENTS - 1)]


def some(model: str, method: fv.Method, engine: str, work: str, **more: object) -> fv.History:
    given: dict = {"data": DATA, "seed": 5, "participants": 3, "evaluate_every": 3}
    return run(model, method, engine, work, **given | {"evaluate_splits": ("test",)} | more)


def paths(method: fv.Method, work: str) -> list[str]:
    if work not in ("step", "mini_batch"):
        return ["vmapped"]
    pooled = not method.curvature and not method.uses_norms
    return ["vmapped", "blocked", "pooled"] if pooled else ["vmapped", "blocked"]


def gap(found: fv.History, expected: fv.History) -> float:
    """The largest distance of all numbers that were seen, and of what the server carries on."""
    gaps = distance(found, expected)
    if not bool((expected.weights != 0).sum(1).max() > 1):  # of one client it is nothing but noise
        gaps.pop("gradient variance")
        assert float(found.gradient_variance.abs().max()) < TOLERANCE_64
    a, b = found.state, expected.state
    gaps["mean loss"] = float((a.mean_loss - b.mean_loss).abs() / b.mean_loss.abs())
    for part in ("mean_gradient", "iterate"):
        mine, other = (getattr(state, part) for state in (a, b))
        assert (mine is None) == (other is None)
        if other is not None:
            gaps[part] = float((squared_norm(subtract(mine, other)) / squared_norm(other)).sqrt())
    return max(gaps.values())


@pytest.mark.parametrize(
    ("model", "method", "work", "number"), CASES, ids=[f"{n}-{m!r}-{w}-{k}" for n, m, w, k in CASES]
)
def test_engines_agree(model: str, method: fv.Method, work: str, number: int) -> None:
    expected = some(model, method, "reference", work, participants=number)
    assert expected.diverged_at is None
    assert torch.equal((~expected.loss.isnan()).sum(1), torch.full((3,), number))
    for path in paths(method, work):
        found = some(model, method, path, work, participants=number)
        assert found.provenance["engine"] == path
        assert gap(found, expected) <= TOLERANCE_64, path


@pytest.mark.parametrize("method", [fv.FairLoss(0.5), fv.FairLoss(0.5, exact=True)], ids=repr)
@pytest.mark.parametrize("work", ["step", "epoch"])
def test_engines_cut_the_same_directions(method: fv.Method, work: str) -> None:
    more: dict = {"clip_norm": 0.2, "participants": 4}
    expected = some("cnn", method, "reference", work, **more)
    for path in ("vmapped", "blocked") if work == "step" else ("vmapped",):
        assert gap(some("cnn", method, path, work, **more), expected) <= TOLERANCE_64
    assert gap(some("cnn", method, "vmapped", work, participants=4), expected) > 1e-3


# -- whose samples, whose memory -------------------------------------------------------------------
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("known", [True, False])
def test_a_client_draws_the_same_samples_whoever_else_takes_part(work: str, known: bool) -> None:
    given: dict = {"local_steps": 1, "local_epochs": None, **WORK[work]}
    split = DATA.train
    schedule = Schedule.build(split, seed=3, batch_norm=False, **given)
    for ids in ([0], [2, 3, 9], [7, 1, 4], list(range(1, CLIENTS))):
        cohort = Cohort(schedule, torch.tensor(ids), ids if known else None)
        for t in range(3):
            drawn, of_all = cohort.round(t), schedule.round(t)
            for place, client in enumerate(ids):
                for step in range(schedule.steps[client]):
                    rows, real = drawn.rows(step, torch.tensor([place]))
                    expected, expected_real = of_all.rows(step, torch.tensor([client]))
                    assert torch.equal(real, expected_real)
                    assert torch.equal(rows[real], expected[real])


@pytest.mark.parametrize("work", KINDS)
@pytest.mark.parametrize("wrong", ["ids", "samples"])
def test_a_mix_up_would_be_seen(wrong: str, work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail if what a method remembers, or the samples, are another client's."""
    right = Run.of_round

    def of_round(run: Run, t: int) -> Run:
        found = right(run, t)
        if wrong == "ids":
            return replace(found, ids=found.ids.flip(0))
        ids = found.ids.flip(0)
        return replace(found, drawn=Cohort(run.schedule, ids, ids.tolist()))

    methods = [fv.AFL(step=1.0), fv.AAggFF(setting="cross_device")]
    expected = [some("multinomial", m, "reference", work) for m in methods]
    monkeypatch.setattr(Run, "of_round", of_round)
    for method, history in zip(methods, expected, strict=True):
        for path in paths(method, work):
            assert gap(some("multinomial", method, path, work), history) > 1e-6, (path, method)


# -- all clients, chunks, continuing ---------------------------------------------------------------
@pytest.mark.parametrize("method", EVERY_METHOD[:9], ids=repr)
def test_all_clients_as_participants_change_no_bit(method: fv.Method) -> None:
    more: dict = {"dtype": torch.float32, "rounds": 2}
    for path in (*paths(method, "mini_batch"), "linear"):
        expected = some("multinomial", method, path, "mini_batch", participants=None, **more)
        found = some("multinomial", method, path, "mini_batch", participants=CLIENTS, **more)
        same_bytes(found, expected)


def test_chunks_of_participants_change_no_bit() -> None:
    more: dict = {"data": images(24), "participants": 19, "dtype": torch.float32, "rounds": 2}
    whole = some("cnn", fv.FairGrad(0.1), "vmapped", "epoch", **more)
    same_bytes(some("cnn", fv.FairGrad(0.1), "vmapped", "epoch", chunk=8, **more), whole)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("method", EVERY_METHOD[1:9], ids=repr)
def test_a_run_goes_on_from_a_stored_checkpoint(method: fv.Method, capture: bool) -> None:
    data, when = images(CLIENTS, sizes=(4, 13)), EvaluateSettings(every=2)
    settings = TrainSettings(rounds=5, participants=3, batch_size=4, capture=capture)
    kept: list[bytes] = []

    def keep(done: int, make: object) -> None:
        if done == 3:
            kept.append(pack_checkpoint(*make()))  # type: ignore[operator]

    def train(start: Checkpoint | None) -> fv.History:
        given = (data, method, "cross_entropy", settings, when, start, None, keep)
        return run_rounds("multinomial", *given)

    whole = train(None)
    assert whole.provenance["captured"] is (capture and not method.looks_at_values)
    rest = train(unpack_checkpoint(kept[0]))
    same_bytes(rest, whole)
    assert rest.state.round == whole.state.round == 5


# -- captured rounds -------------------------------------------------------------------------------
FIXED = {"step": (8, 8), "mini_batch": (4, 13), "steps": (5, 13)}  # sizes with which shapes stay


CAPTURED = [("multinomial", m, w) for m in EVERY_METHOD[:9] for w in FIXED]
CAPTURED += [("batch_norm", m, "steps") for m in METHODS[-2:]]
CAPTURED += [("multinomial", m, w) for m in FURTHER + FURTHER_OPTIONS for w in FIXED]


@pytest.mark.parametrize(
    ("model", "method", "work"), CAPTURED, ids=[f"{n}-{m!r}-{w}" for n, m, w in CAPTURED]
)
def test_captured_rounds_are_those_of_the_reference(
    model: str, method: fv.Method, work: str
) -> None:
    more: dict = {"data": images(CLIENTS, sizes=FIXED[work]), "rounds": 4, "evaluate_every": 3}
    expected = some(model, method, "reference", work, **more)
    found = some(model, method, "auto", work, capture=True, **more)
    assert found.provenance["captured"] is not method.looks_at_values
    assert found.provenance["engine"] not in ("linear", "reference")
    assert gap(found, expected) <= TOLERANCE_64


def test_one_recording_serves_runs_with_other_participants() -> None:
    data = images(CLIENTS, sizes=(4, 13))
    RECORDINGS.kept.clear()
    for seed in (0, 7):
        more: dict = {"data": data, "seed": seed}
        found = some("multinomial", fv.AFL(), "auto", "mini_batch", capture=True, **more)
        expected = some("multinomial", fv.AFL(), "reference", "mini_batch", **more)
        assert gap(found, expected) <= TOLERANCE_64
    assert len(RECORDINGS.kept) == 1
    some("multinomial", fv.AFL(), "auto", "mini_batch", capture=True, data=data, participants=4)
    assert len(RECORDINGS.kept) == 2


def test_rounds_of_changing_shapes_are_not_captured() -> None:
    for work in ("step", "epoch"):
        found = some("multinomial", fv.AFL(), "auto", work, capture=True)
        assert found.provenance["captured"] is False
        assert gap(found, some("multinomial", fv.AFL(), "reference", work)) <= TOLERANCE_64


@pytest.mark.filterwarnings("ignore:the run diverged:RuntimeWarning")
def test_divergence_ends_every_path_in_the_same_round() -> None:
    more: dict = {"lr": 1e9, "rounds": 20, "dtype": torch.float32, "evaluate_every": 20}
    more["data"] = images(CLIENTS, sizes=(8, 8))
    expected = some("cnn", fv.AFL(), "reference", "step", **more)
    assert expected.diverged_at is not None
    for path, capture in [(p, c) for p in paths(fv.AFL(), "step") for c in (False, True)]:
        found = some("cnn", fv.AFL(), path, "step", capture=capture, **more)
        assert (found.diverged_at, found.rounds) == (expected.diverged_at, expected.rounds)
        assert found.state.round == expected.state.round
        assert all(bool(leaf.isfinite().all()) for leaf in found.state.params.values())


class NoHost(TorchDispatchMode):
    """Refuses what a CUDA graph cannot record: asking the device, and fetching from the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket._qualified_op_name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh"), name
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("work", FIXED)
@pytest.mark.parametrize("number", [3, CLIENTS])
def test_a_captured_round_asks_the_host_for_nothing(work: str, number: int) -> None:
    data = images(CLIENTS, sizes=FIXED[work])
    more: dict = {"participants": number, "capture": True, **WORK[work]}
    methods = (fv.AFL(), fv.QFFL(1.0), fv.FairLoss(0.5, exact=True), fv.FairGrad(0.1), *FURTHER)
    for method, path in [(m, p) for m in methods for p in paths(m, work)]:
        settings = TrainSettings(engine=path, **more)  # type: ignore[arg-type]
        captured = prepare("multinomial", data, method, "cross_entropy", settings).runs().captured
        assert captured is not None
        captured.compute()  # what is made once is made while warming up
        with NoHost():
            captured.compute()


def test_the_check_above_sees_the_host() -> None:
    for ask in (lambda: torch.ones(1).item(), lambda: torch.tensor([1.0])):
        with pytest.raises(AssertionError, match="aten"), NoHost():
            ask()


# -- grids -----------------------------------------------------------------------------------------
def test_runs_with_some_clients_do_not_train_together() -> None:
    """Seeds differ in who takes part; each such run trains by itself."""
    data, when = DATA, EvaluateSettings(every=2)

    def grid(**options: object) -> list[Member]:
        settings = [TrainSettings(rounds=3, seed=s, **options) for s in (0, 1)]  # type: ignore[arg-type]
        return [Member("multinomial", fv.AFL(), one) for one in settings]

    for members in (grid(participants=3), grid(participation=0.3, engine="linear")):
        assert not trains_together(members, data, "cross_entropy")
        with pytest.raises(fv.BadInput):
            train_grid(members, data, "cross_entropy", when)
    assert trains_together(grid(participants=CLIENTS), data, "cross_entropy")
