"""Proximal term, weight decay, momentum and learning-rate schedule: all paths = the reference loop,
which is `torch.optim.SGD` for a single client."""

from __future__ import annotations

import pytest
import torch
from test_engines import TOLERANCE_64, WORK, run
from torch import nn
from torch.optim import lr_scheduler

import fairvar as fv
from checks import MODELS, distance, images, same_bytes, smooth_network
from fairvar.engine.grid import Member, train_grid
from fairvar.engine.recorder import Checkpoint
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.train import run_rounds
from fairvar.testing import federation

COSINE = fv.LrSchedule("cosine", warm_up=1, least=0.1)
RULES: dict[str, dict] = {
    "pull": {},
    "decay": {"weight_decay": 0.3},
    "momentum": {"momentum": 0.8},
    "schedule": {"schedule": COSINE},
    "all": {"weight_decay": 0.3, "momentum": 0.8, "schedule": COSINE, "clip_norm": 0.4},
}
PROX = fv.FedProx(1.5)
METHODS = [PROX, fv.QFFL(1.0), fv.FairLoss(0.5, exact=True), fv.FairGrad(0.1)]
CASES = [("multinomial", m, w, r) for m in METHODS for w in WORK for r in ("all", "momentum")]
CASES += [("multinomial", PROX, w, r) for w in ("step", "epoch") for r in RULES]
CASES += [(net, m, "epoch", "all") for net in ("cnn", "batch_norm") for m in METHODS]
CASES += [("batch_norm", m, "mini_batch", "decay") for m in METHODS]


def paths(model: str, method: fv.Method, work: str, rule: dict) -> list[str]:
    decays, cuts = "weight_decay" in rule, "clip_norm" in rule
    found = ["vmapped", *(["linear"] if model == "multinomial" and not decays else [])]
    if work in ("step", "mini_batch"):
        if not (method.uses_norms and decays) and not (method.curvature and cuts):
            found.append("blocked")
        if not (method.uses_norms or method.curvature or cuts):
            found.append("pooled")
    return found


@pytest.mark.parametrize(("model", "method", "work", "rule"), CASES, ids=str)
def test_paths_agree(model: str, method: fv.Method, work: str, rule: str) -> None:
    expected = run(model, method, "reference", work, **RULES[rule])
    assert expected.diverged_at is None
    plain = run(model, method, "reference", work)
    one_step = work in ("step", "mini_batch")
    if rule != "pull" and not (one_step and rule == "momentum"):
        assert max(distance(plain, expected).values()) > 1e-3
    for path in paths(model, method, work, RULES[rule]):
        found = run(model, method, path, work, **RULES[rule])
        assert found.provenance["engine"] == path
        assert max(distance(found, expected).values()) <= TOLERANCE_64, path


@pytest.mark.parametrize("model", ["multinomial", "cnn"])
@pytest.mark.parametrize("work", ["mini_batch", "epoch"])
def test_some_clients(model: str, work: str) -> None:
    more: dict = {**RULES["all"], "participants": 4}
    expected, found = (run(model, PROX, path, work, **more) for path in ("reference", "vmapped"))
    assert max(distance(found, expected).values()) <= TOLERANCE_64
    assert run(model, PROX, "auto", work, **more).provenance["engine"] != "linear"


@pytest.mark.parametrize("engine", ["reference", "vmapped", "linear"])
def test_without_pull_or_with_one_step_it_is_fedavg(engine: str) -> None:
    more: dict = {"dtype": torch.float32}
    for method, work in ((fv.FedProx(0.0), "epoch"), (PROX, "mini_batch")):
        same_bytes(run("multinomial", method, engine, work, **more),
                   run("multinomial", fv.FedAvg(), engine, work, **more))  # fmt: skip
    other = run("multinomial", PROX, engine, "epoch", **more)
    with pytest.raises(AssertionError, match="differs"):
        same_bytes(other, run("multinomial", fv.FedAvg(), engine, "epoch", **more))


def optimised(
    module: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int, lr: float, pull: float = 0.0
) -> None:
    """Local steps of one round by torch's own optimiser."""
    start = [p.detach().clone() for p in module.parameters()]
    optimiser = torch.optim.SGD(module.parameters(), lr, momentum=0.9, weight_decay=0.2)
    for _ in range(steps):
        optimiser.zero_grad()
        near = sum(((p - s) ** 2).sum() for p, s in zip(module.parameters(), start, strict=True))
        (nn.functional.cross_entropy(module(x), y) + pull / 2 * near).backward()
        optimiser.step()


@pytest.mark.parametrize("engine", ["reference", "vmapped"])
def test_one_client_is_torch_sgd(engine: str) -> None:
    """With weight decay, momentum from zero in every round, and the proximal term as a penalty."""
    x, y = federation().train.of(3)
    expected, module = smooth_network(), smooth_network()
    for _ in range(2):
        optimised(expected, x, y, 4, 0.3, pull=0.7)
    found = fv.train(
        module, fv.Federation.from_arrays([(x, y)], classes=3), fv.FedProx(0.7), 2, 0.3,
        local_steps=4, momentum=0.9, weight_decay=0.2, dtype=torch.float64, engine=engine,
    ).model  # fmt: skip
    for name, leaf in expected.state_dict().items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("schedule", "peer"),
    [
        (fv.LrSchedule(), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
        (fv.LrSchedule("cosine"), lambda o: lr_scheduler.CosineAnnealingLR(o, 12)),
        (
            fv.LrSchedule("cosine", least=0.25),
            lambda o: lr_scheduler.CosineAnnealingLR(o, 12, eta_min=0.25),
        ),
        (fv.LrSchedule("step", decay=0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        (
            fv.LrSchedule("step", decay=0.1, every=5),
            lambda o: lr_scheduler.StepLR(o, 5, gamma=0.1),
        ),
        (
            fv.LrSchedule(warm_up=4),
            lambda o: lr_scheduler.LinearLR(o, start_factor=1 / 4, total_iters=3),
        ),
        (
            fv.LrSchedule("cosine", warm_up=4),
            lambda o: lr_scheduler.SequentialLR(
                o,
                [
                    lr_scheduler.LinearLR(o, start_factor=1 / 4, total_iters=3),
                    lr_scheduler.CosineAnnealingLR(o, 8),
                ],
                [4],
            ),
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, fv.LrSchedule) else "torch",
)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_schedules_are_those_of_torch(schedule: fv.LrSchedule, peer) -> None:
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    other = peer(optimiser)
    for t in range(12):
        assert schedule.factor(t, 12) == pytest.approx(other.get_last_lr()[0], abs=1e-12), t
        other.step()


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("work", ["mini_batch", "epoch"])
@pytest.mark.parametrize("model", ["multinomial", "cnn"])
def test_an_interrupted_run_continues_its_schedule(model: str, work: str, capture: bool) -> None:
    data, when = images(10), EvaluateSettings(every=2)
    settings = TrainSettings(rounds=5, schedule=COSINE, momentum=0.5, capture=capture, **WORK[work])
    kept: list[Checkpoint] = []

    def keep(done: int, make) -> None:
        if done == 2:
            kept.extend(make())

    given = (MODELS[model], data, PROX, "cross_entropy", settings, when)
    whole = run_rounds(*given, keep=keep)
    rest = run_rounds(*given, start=kept[0])
    for name, leaf in whole.state.params.items():
        assert torch.equal(rest.state.params[name], leaf), name
    assert torch.equal(rest.loss, whole.loss)


@pytest.mark.parametrize("rule", ["schedule", "all"])
@pytest.mark.parametrize("work", ["mini_batch", "epoch"])
@pytest.mark.parametrize("model", ["multinomial", "cnn"])
def test_captured_rounds_are_ordinary_rounds(model: str, work: str, rule: str) -> None:
    """One recording serves a second run with another learning rate, schedule and pull."""
    for pull, lr in ((1.5, 0.1), (0.5, 0.05)):
        more: dict = {"rounds": 5, "lr": lr, **RULES[rule]}
        expected, found = (
            run(model, fv.FedProx(pull), "auto", work, capture=capture, **more)
            for capture in (False, True)
        )
        assert found.provenance["captured"]
        assert max(distance(found, expected).values()) <= TOLERANCE_64


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("work", ["step", "epoch", "steps"])
def test_grids_are_single_runs(work: str, capture: bool) -> None:
    more: dict = {"dtype": "float64", "schedule": COSINE, "momentum": 0.6, "capture": capture}
    members = [
        Member(
            "multinomial", fv.FedProx(pull), TrainSettings(rounds=4, lr=lr, **WORK[work], **more)
        )
        for pull, lr in ((0.5, 0.1), (2.0, 0.1), (1.0, 0.3))
    ]
    when = EvaluateSettings(every=1)
    found = train_grid(members, images(10), "cross_entropy", when)
    for member, history in zip(members, found, strict=True):
        alone = run_rounds(
            "multinomial", images(10), member.method, "cross_entropy",
            TrainSettings(rounds=4, lr=member.settings.lr, engine="reference", dtype="float64",
                          schedule=COSINE, momentum=0.6, **WORK[work]), when,
        )  # fmt: skip
        assert max(distance(history, alone).values()) <= TOLERANCE_64
