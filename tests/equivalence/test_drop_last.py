"""`drop_last` leaves out the smaller last batch of a pass, in every kernel and on nodes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fairvar as fv
from checks import distance
from fairvar.engine.batches import Schedule


def data() -> fv.Federation:
    torch.manual_seed(0)
    pairs = [(torch.randn(m, 6), torch.randint(3, (m,))) for m in (3, 9, 8)]
    return fv.Federation.from_arrays(pairs, classes=3)


@pytest.mark.parametrize(("drop", "steps"), [(False, [1, 3, 2]), (True, [1, 2, 2])])
def test_number_of_steps(drop: bool, steps: list[int]) -> None:
    found = Schedule.build(data().train, 4, 1, 1, 0, batch_norm=False, drop_last=drop)
    assert found.steps == steps


@pytest.mark.parametrize("method", [fv.FedAvg(), fv.FairGrad(0.05)], ids=lambda m: m.label)
@pytest.mark.parametrize("engine", ["vmapped", "linear"])
def test_kernels(method: fv.Method, engine: str) -> None:
    more: dict = {"rounds": 3, "lr": 0.1, "batch_size": 4, "local_epochs": 2, "drop_last": True,
                  "dtype": torch.float64, "evaluate_every": 3}  # fmt: skip
    net = nn.Linear(6, 3) if engine == "linear" else "2nn"
    expected = fv.train(net, data(), method, engine="reference", **more)
    found = fv.train(net, data(), method, engine=engine, **more)
    kept = fv.train(net, data(), method, engine=engine, **{**more, "drop_last": False})
    assert max(distance(found, expected).values()) <= 1e-10
    assert max(distance(kept, expected).values()) > 1e-3


def test_small_last_batches_of_batch_norm() -> None:
    """Why epochs of MobileNetV2 on small images diverge: in the plain loop in float64 a last batch
    of two images moves a client thousands of times further than one of 32."""
    torch.manual_seed(0)
    pairs = [(torch.randn(m, 3, 32, 32), torch.randint(10, (m,))) for m in (34, 32)]
    more: dict = {
        "rounds": 1, "lr": 1e-6, "batch_size": 32, "local_epochs": 1, "dtype": torch.float64,
        "engine": "reference", "evaluate_splits": ("train",),
    }  # fmt: skip
    federation = fv.Federation.from_arrays(pairs, classes=10)
    all_batches = fv.train("mobilenet_v2", federation, fv.FedAvg(), **more).update_norm[-1]
    whole = fv.train("mobilenet_v2", federation, fv.FedAvg(), drop_last=True, **more).update_norm[
        -1
    ]
    assert all_batches[0] > 1000 * all_batches[1]
    assert whole[0] < 3 * whole[1]


def test_second_derivatives_of_batch_norm_on_two_samples() -> None:
    """Why FairGrad diverges there before FedAvg does. Two samples that differ by 2d are normalised
    to ±d / √(d² + ε), whose second derivative −3 ε d / (d² + ε)^2.5 is as large as 1 / ε; that of
    32 samples is about 1."""
    norm = nn.BatchNorm1d(1, affine=False, dtype=torch.float64)

    def bent(x: torch.Tensor) -> float:
        """The second derivative of the last sample's output along that sample."""
        x = x.requires_grad_()
        slope = torch.autograd.grad(norm(x[:, None])[-1].sum(), x, create_graph=True)[0][-1]
        return float(torch.autograd.grad(slope, x)[0][-1])

    d = norm.eps**0.5 / 2
    pair = bent(torch.tensor([-d, d], dtype=torch.float64))
    # The sample moves d by half as much, and the mean not at all in the output.
    assert pair == pytest.approx(-3 * norm.eps * d / (d**2 + norm.eps) ** 2.5 / 4, rel=1e-9)
    assert abs(pair) > 0.1 / norm.eps
    torch.manual_seed(0)
    assert abs(bent(torch.randn(32, dtype=torch.float64))) < 10
