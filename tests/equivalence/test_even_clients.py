"""Clients of equal size take shortcuts (no padding, mask or gather); the numbers stay the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fairvar as fv

METHODS = (
    fv.FedAvg(),
    fv.QFFL(q=1.0),
    fv.QFFL(q=0.5, losses="batch", weights="size"),
    fv.FairLoss(strength=0.5),
    fv.FairGrad(strength=0.1),
    fv.FairGrad(strength=0.1, exact=True),
)


def federation(classes: int = 3) -> fv.Federation:
    generator = torch.Generator().manual_seed(3)
    pairs = [
        (torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64),
         torch.randint(0, classes, (8,), generator=generator))
        for _ in range(9)
    ]  # fmt: skip
    return fv.Federation.from_arrays(pairs, test=pairs, classes=classes)


def network(batch_norm: bool) -> nn.Module:
    torch.manual_seed(1)
    norm = [nn.BatchNorm2d(2)] if batch_norm else []
    return nn.Sequential(nn.Conv2d(1, 2, 3), *norm, nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"clip_norm": 0.2}], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_even_clients_agree_with_the_reference(method, options, batch_norm):
    module, data = network(batch_norm), federation()
    reference, engine = (
        fv.train(module, data, method, 3, 0.2, dtype=torch.float64, engine=name, **options)
        for name in ("reference", "auto")
    )
    for name, leaf in reference.state.params.items():
        torch.testing.assert_close(engine.state.params[name], leaf, rtol=1e-10, atol=1e-12)
    for name, leaf in reference.state.buffers.items():
        torch.testing.assert_close(engine.state.buffers[name], leaf, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(engine.loss, reference.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(engine.weights, reference.weights, rtol=1e-10, atol=1e-12)
    assert engine.provenance["engine"] != "reference"


def test_clipping_really_clips():
    data, module = federation(), network(False)
    free, clipped = (
        fv.train(module, data, fv.FedAvg(), 1, 1.0, dtype=torch.float64, clip_norm=c)
        for c in (None, 0.05)
    )
    assert free.update_norm.max() > 0.05
    assert clipped.update_norm.max() <= 0.05 * (1 + 1e-12)
