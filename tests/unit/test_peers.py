"""Other frameworks beside fairvar: the same work, or they are not timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import peers
from peer_worker import TRAIN, Job
from peers import CASES, CHECKED, Answer, Case, Failed, check

TINY = CASES["tiny"]
WHOLE = Case(TINY.title, TINY.model, TINY.shape, clients=3, samples=4, batch=4, rounds=3, lr=0.001)


def job(case: Case, folder: Path, equal: bool) -> Job:
    folder.mkdir(exist_ok=True)
    case.write(folder / "job", folder, CHECKED, equal)
    return Job(folder / "job", folder)


def trained_by_hand(case: Case, given: Job) -> np.ndarray:
    """FedAvg with equal weights in float64; clients take their samples in order."""
    model = given.module.double()
    for _ in range(CHECKED):
        start = [p.detach().clone() for p in model.parameters()]
        total = [torch.zeros_like(p) for p in start]
        for x, y in given.pairs:
            for p, before in zip(model.parameters(), start, strict=True):
                p.data = before.clone()
            for rows in torch.arange(case.samples).split(case.batch):
                loss = cross_entropy(model(x[rows].double()), y[rows])
                for p, slope in zip(model.parameters(),
                                    torch.autograd.grad(loss, list(model.parameters())),
                                    strict=True):  # fmt: skip
                    p.data -= case.lr * slope
            for into, p in zip(total, model.parameters(), strict=True):
                into += p.detach() / case.clients
        for p, mean in zip(model.parameters(), total, strict=True):
            p.data = mean
    return parameters_to_vector(model.parameters()).detach().numpy()


@pytest.mark.parametrize("name", peers.OWN)
@pytest.mark.parametrize(("case", "equal"), [(TINY, True), (WHOLE, False)], ids=["epoch", "step"])
def test_own_workers_train_fedavg(name: str, case: Case, equal: bool, tmp_path: Path) -> None:
    given, ticks = job(case, tmp_path, equal), []
    weights = parameters_to_vector(TRAIN[name](given, lambda: ticks.append(1))).detach().numpy()
    assert len(ticks) == CHECKED
    expected = trained_by_hand(case, job(case, tmp_path / "again", equal))
    change = np.abs(expected - case.start()).max()
    assert np.abs(weights - expected).max() < 1e-4 * change
    if name == "lean":
        assert (given.steps, given.used) == (CHECKED * case.steps, CHECKED * 3 * case.samples)


def test_equal_samples_within_a_client_only(tmp_path: Path) -> None:
    x = job(TINY, tmp_path, equal=True).x
    assert (x == x[:, :1]).all()
    assert not (x[0] == x[1]).any()
    other = job(TINY, tmp_path / "random", equal=False).x
    assert not (other[:, 0] == other[:, 1]).any()


def answer(weights: np.ndarray, steps: int = CHECKED * TINY.steps, samples: int = 24) -> Answer:
    return Answer([0.1], [0.1], steps, samples, {}, weights)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (lambda w: answer(w, steps=6), "6 steps on 24 samples instead of 12 on 24"),
        (lambda w: answer(w, samples=12), "12 steps on 12 samples instead of 12 on 24"),
        (lambda w: answer(w * 1.01), "weights differ by"),
        (lambda w: answer(w * np.nan), "weights differ by nan"),
    ],
)
def test_other_work_is_refused(
    found: Callable[[np.ndarray], Answer], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = answer(TINY.start() + 0.1)
    monkeypatch.setattr(peers, "ask", lambda *_: answer(ours.weights + 1e-6))
    check(TINY, "fluke", Path(), Path(), ours)
    monkeypatch.setattr(peers, "ask", lambda *_: found(ours.weights))
    with pytest.raises(Failed, match=reason):
        check(TINY, "fluke", Path(), Path(), ours)


def test_ratios_are_formed_within_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn is slow for everybody; the first round of a process is never counted."""
    slow = {"timed": 0}

    def ask(name: str, folder: Path, _: Path) -> Answer:
        turn = slow["timed"] // 2
        slow["timed"] += folder.name == "timed"
        seconds = (2.0 if name == "lean" else 1.0) * (1 + 9 * turn)
        made = answer(TINY.start() + 0.1)
        return Answer([99.0, 99.0] + [seconds] * 3, [1.0] * 5, made.steps, 24, {}, made.weights)

    monkeypatch.setattr(peers, "ask", ask)
    found = peers.Measured(TINY, ["fairvar", "lean"], Path(), turns=2)
    assert found.rows["lean"].cpu == [2000, 20000]
    assert found.ratios(found.rows["lean"]) == [2, 2]


@pytest.mark.parametrize("case", [TINY, WHOLE], ids=["epoch", "step"])
def test_models_after_the_timed_rounds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may differ only where each framework takes the samples in an order of its own."""

    def ask(name: str, folder: Path, _: Path) -> Answer:
        other = name == "lean" and folder.name == "timed"
        weights = case.start() + (0.12 if other else 0.1)
        return Answer([1.0] * 5, [1.0] * 5, CHECKED * case.steps, 24, {}, weights)

    monkeypatch.setattr(peers, "ask", ask)
    found = peers.Measured(case, ["fairvar", "lean"], Path(), turns=1)
    if case.ordered:
        assert found.rows["lean"].timed_difference == pytest.approx(0.2, rel=1e-3)
    else:
        assert found.missing == {"lean": "weights differ by 2.0e-01 after the timed rounds"}
        assert "lean: not measured" in "\n".join(found.lines())


@pytest.mark.slow
def test_missing_frameworks_are_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["--only", "lean", "--only", "fluke"]
    out = tmp_path / "peers.json"
    peers.main([str(tmp_path), "--case", "tiny", "--quick", "--json", str(out), *names])
    lines = capsys.readouterr().out.splitlines()
    (missing,) = [line for line in lines if line.startswith("fluke")]
    assert missing == "fluke: not measured: there is no environment venv in the folder of peers"
    (case,) = json.loads(out.read_text())["cases"]
    assert [row["name"] for row in case["rows"]] == ["fairvar", "lean"]
    assert case["rows"][1]["difference"] < 1e-4
    assert len(case["rows"][1]["ratios"]) == 1


def test_a_failing_worker_is_named_by_its_error(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="FileNotFoundError"):
        peers.ask("lean", tmp_path / "nothing", tmp_path)
