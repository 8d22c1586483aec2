"""Weights from the products of client updates, and FedEBA+: a federation computes what the
reference loop does, and a client's influence is limited by the length of its part."""

from __future__ import annotations

import pytest
import torch
from federations import digits, reference, run
from test_equal import WORK, gaps

import fairvar as fv
from checks import MODELS, images
from fairvar.deploy.guard import limited_weights
from fairvar.engine.server import _by_length

METHODS: list[fv.Method] = [
    fv.FedMGDA(step=0.05),
    fv.FedMGDA(eps=1.0, scale="mean", decay=0.9, weights="size"),
    fv.FedFV(),
    fv.FedFV(alpha=0.5, external="off", losses="batch"),
    fv.AdaFed(),
    fv.AdaFed(normalise=True, losses="batch"),
    fv.FedEBA(temperature=0.5, alpha=0.7, angle=0.0),
    fv.FedEBA(temperature=0.5, alpha=0.7, angle=90.0, weights="size", losses="batch"),
    fv.FedEBA(temperature=0.5, alpha=0.3, angle=8.0),
]
RULES = {"weight_cap": 1.0, "norm_bound": 1e9}
SOLVED = 1e-10  # their weights amplify the rounding errors of the products


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_digits(method: fv.Method, work: str) -> None:
    found = run(method, digits(), rules=RULES, **WORK[work])
    expected = reference(method, digits(), **WORK[work])
    assert not found.refused
    assert max(gaps(found.history, expected, method).values()) <= SOLVED
    assert (found.history.exchanges, found.history.bytes_up) == (
        expected.exchanges,
        expected.bytes_up,
    )


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_some_clients_and_batch_norm(method: fv.Method) -> None:
    data, work = images(6, sizes=(3, 13)), {"batch_size": 4, "local_epochs": 1, "participants": 4}
    found = run(method, data, model=MODELS["batch_norm"], rules=RULES, **work).history
    expected = reference(method, data, MODELS["batch_norm"], **work)
    assert max(gaps(found, expected, method).values()) <= SOLVED


@pytest.mark.parametrize("method", METHODS[::2], ids=repr)
def test_full_batches_are_equal_bit_by_bit(method: fv.Method) -> None:
    found = run(method, digits(), rules=RULES).history.state.params
    for name, leaf in reference(method, digits()).state.params.items():
        assert torch.equal(found[name], leaf), name


def test_a_limit_on_weights_is_one_on_parts() -> None:
    """Updates of lengths 1, 1, 1, 1, 0.001 and weights that undo them: all parts are equal, so
    nothing is cut. A part of 0.8 is cut to one half, the rest goes to the others."""
    length = torch.tensor([1.0, 1.0, 1.0, 1.0, 1e-3], dtype=torch.float64)
    share = torch.full((5,), 0.2, dtype=torch.float64)
    limit = _by_length(lambda w: limited_weights(w, share, 0.5), torch.diag(length**2))
    torch.testing.assert_close(limit(share / length), share / length)
    parts = torch.tensor([0.05, 0.05, 0.05, 0.05, 0.8], dtype=torch.float64)
    cut = torch.tensor([0.125] * 4 + [0.5], dtype=torch.float64)
    torch.testing.assert_close(limit(parts / length) * length, cut)
    still = _by_length(lambda w: w / 2, torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(still(share[:2]), share[:2])


def test_sums_do_not_suffice() -> None:
    assert not any(method.sums_suffice for method in METHODS)
