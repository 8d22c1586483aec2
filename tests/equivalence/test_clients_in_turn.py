"""Convolutional clients on a CPU train in turn: the plain loop's numbers, whatever the threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fairvar as fv
from checks import METHODS, distance
from fairvar.engine.settings import TrainSettings
from fairvar.engine.train import prepare

SIZES = (5, 9, 4, 12, 7, 6, 8, 5, 10)
# torch's own first use of forward-mode differentiation
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.*deprecated")


def federation() -> fv.Federation:
    torch.manual_seed(0)
    train = [
        (torch.randn(m, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (m,))) for m in SIZES
    ]
    return fv.Federation.from_arrays(train=train, classes=3)


def network(norm: bool = True) -> nn.Module:
    torch.manual_seed(1)
    between = [nn.BatchNorm2d(4)] if norm else []
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), *between, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()


def trained(method: fv.Method, engine: str, **options: object) -> fv.History:
    given = {"batch_size": 4, "local_epochs": 1, "evaluate_splits": ("train",)}
    given |= {"dtype": torch.float64, **options}
    return fv.train(network(), federation(), method, rounds=3, evaluate_every=1, engine=engine,
                    **given)  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
@pytest.mark.parametrize("options", [{}, {"participation": 0.5}, {"clip_norm": 0.1}])
def test_same_as_the_plain_loop(method: fv.Method, options: dict[str, object]) -> None:
    found, wanted = (trained(method, engine, **options) for engine in ("vmapped", "reference"))
    assert max(distance(found, wanted).values()) < 1e-10


def test_used_for_convolutions_only() -> None:
    settings, method = TrainSettings(engine="vmapped", dtype="float64"), fv.FedAvg()
    dense = nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()
    tasks = [
        prepare(net, federation(), method, "cross_entropy", settings).run.task
        for net in (network(), dense)
    ]
    assert [task.in_turn for task in tasks] == [True, False]


def test_bits_do_not_depend_on_threads_or_chunks() -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads, chunk in ((1, None), (3, None), (2, 8), (1, 64)):
            torch.set_num_threads(threads)
            options = {"dtype": torch.float32, "chunk": chunk, "evaluate_local": False}
            found.append(trained(fv.FairGrad(strength=0.05), "vmapped", **options))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(v, other.state.params[k]) for k, v in found[0].state.params.items())
        assert torch.equal(found[0].loss, other.loss)


@pytest.mark.parametrize(
    ("method", "path"),
    [(fv.FairGrad(0.05), "vmapped"), (fv.FairGrad(0.05, exact=True), "blocked")],
    ids=lambda given: getattr(given, "label", given),
)
def test_one_step_with_curvature(method: fv.Method, path: str) -> None:
    options: dict[str, object] = {"batch_size": None, "local_epochs": None}
    found, wanted = (trained(method, engine, **options) for engine in ("auto", "reference"))
    assert found.provenance["engine"] == path
    assert max(distance(found, wanted).values()) < 1e-10
