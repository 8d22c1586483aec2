"""Methods whose numbers are tensors: one per run under vmap, the same functions."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch.func import vmap

import fairvar as fv
from fairvar.methods.base import Replies

CLIENTS, RUNS = 7, 5
VALUES = torch.tensor([0.01, 0.1, 0.5, 1.0, 3.0], dtype=torch.float64)
METHODS: list[fv.Method] = [
    fv.FedAvg(),
    fv.AFL(),
    fv.AFL(order="simultaneous"),
    fv.QFFL(1.0),
    fv.FairLoss(0.5),
    fv.FairLoss(0.5, exact=True, clip_beta=True),
    fv.FairGrad(0.1),
    *(fv.AAggFF(setting=s, variant=v)
      for s in ("cross_silo", "cross_device") for v in ("official", "paper")),
    fv.TERM(1.0),
    fv.PropFair(3.0),
    fv.PropFair(3.0, variant="official"),
    fv.Superquantile(0.5),
    fv.Superquantile(0.5, variant="filter"),
    fv.GIFAIR(0.5),
    fv.SemiVRed(0.5),
]  # fmt: skip
# The largest value of some fields; PropFair's eps is smaller than its base.
LARGEST = {"share": 1.0, "eps": 0.3, ("gifair", "strength"): 0.9}


def losses(rounds: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(rounds, RUNS, CLIENTS, generator=generator, dtype=torch.float64) * 3


def server(method: fv.Method, memory: dict, loss: torch.Tensor) -> tuple:
    """All that a method's functions say in a round."""
    share = torch.full((CLIENTS,), 1 / CLIENTS, dtype=torch.float64)
    replies = Replies(loss, share, torch.arange(CLIENTS), CLIENTS)
    weights, memory = method.weigh(memory, replies)
    own, shared = (
        torch.as_tensor(c, dtype=torch.float64).expand_as(loss)
        for c in method.coefficients(loss, loss.mean())
    )
    normaliser = torch.as_tensor(method.normaliser(replies, loss**2, 0.1), dtype=torch.float64)
    return weights, own, shared, normaliser, memory


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_runs_under_vmap_are_the_single_runs(method: fv.Method) -> None:
    tag = type(method).__struct_config__.tag
    largest = {k: LARGEST.get((tag, k), LARGEST.get(k, 3.0)) for k in method.numbers}
    numbers = {k: VALUES / 3 * most for k, most in largest.items()}
    singles = [replace(method, **{k: float(v[r]) for k, v in numbers.items()}) for r in range(RUNS)]
    one = method.initial_memory(CLIENTS)
    together = {k: v.expand(RUNS, *v.shape) for k, v in one.items()}
    apart = [one] * RUNS

    def batched(values: dict, memory: dict, loss: torch.Tensor) -> tuple:
        return server(method.with_numbers(values), memory, loss)

    for loss in losses(4):
        *found, together = vmap(batched)(numbers, together, loss)
        told = [server(m, a, f) for m, a, f in zip(singles, apart, loss, strict=True)]
        apart = [t[-1] for t in told]
        for value, expected in zip(found, zip(*[t[:-1] for t in told], strict=True), strict=True):
            assert torch.allclose(value, torch.stack(expected), rtol=1e-12, atol=1e-14)


def test_a_diverged_run_does_not_hold_up_the_others() -> None:
    method = fv.AAggFF()
    memory = {k: v.expand(2, *v.shape) for k, v in method.initial_memory(CLIENTS).items()}
    loss = torch.stack([losses(1)[0, 0], torch.full((CLIENTS,), torch.nan, dtype=torch.float64)])
    weights = vmap(lambda m, f: server(method, m, f)[0])(memory, loss)
    alone = server(method, method.initial_memory(CLIENTS), loss[0])[0]
    assert torch.allclose(weights[0], alone, rtol=1e-12)


def test_form_is_all_but_the_numbers() -> None:
    assert fv.FairLoss(0.1).form == fv.FairLoss(2.0).form
    assert fv.FairLoss(0.1).form != fv.FairLoss(0.1, exact=True).form
    assert fv.FairGrad(0.1).form != fv.FairGrad(0.0).form  # no Hessian there
    assert fv.FairLoss(0.1).form != fv.FairGrad(0.1).form
