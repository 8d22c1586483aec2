"""The theory: every claim holds, nothing is missing, and a wrong objective is noticed."""

from __future__ import annotations

import math

import pytest
import torch

from fairvar import objectives
from fairvar.theory import Claim, claims
from fairvar.theory.claim import compare

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def found():
    return claims()


def broken():
    return {claim.name for claim in claims() if not claim.holds}


def test_every_claim_holds(found):
    assert [claim for claim in found if not claim.holds] == []
    assert len({claim.name for claim in found}) == len(found) > 100
    assert all(math.isfinite(c.lhs) and math.isfinite(c.rhs) for c in found)


@pytest.mark.parametrize("theorem", ["T1", "T2", "T3", "T4", "T5", "T6"])
def test_every_theorem_is_there(found, theorem):
    own = [c for c in found if c.name.startswith(theorem)]
    assert len(own) >= 4
    assert {"theorem", "corrected"} & {c.kind for c in own}


@pytest.mark.parametrize(
    "start",
    [
        "T1, as printed (without C), all losses 3",
        "T1, as printed (without C), mean 1.5",
        "T1 needs equal means",
        "T1 needs independence",
        "T2, as printed (J, equal losses)",
        "T2, as printed (H_q",
        "T2 converse, as printed",
        "T6, ḡ_λ is not ∇ā_λ, quadratics",
        "T6, ḡ_λ is not ∇ā_λ, regression",
        "mixed weights",
        "mini-batches bias FairLoss",
        "mini-batches bias FairGrad",
    ],
)
def test_every_counterexample_is_there_and_not_zero(found, start):
    own = [c for c in found if c.name.startswith(start) and c.kind == "counterexample"]
    assert own
    for claim in own:
        assert claim.relation in ("> (paper: <=)", "!= (paper: =)", "!=")
        assert abs(claim.lhs - claim.rhs) > max(claim.tolerance, 1e-4)


def test_the_printed_numbers(found):
    by_name = {c.name: c for c in found}
    printed = by_name["T1, as printed (without C), all losses 3"]
    assert (printed.lhs, printed.rhs) == pytest.approx((4.5, 3.0))
    printed = by_name["T1, as printed (without C), mean 1.5, variance 4"]
    assert (printed.lhs, printed.rhs) == pytest.approx((3.125, 2.8333333))
    correlated = by_name["T1 needs independence"]
    assert (correlated.lhs, correlated.rhs) == pytest.approx((0.75, 0.5))
    assert by_name["T2, as printed (H_q, r_i ∝ N_i)"].lhs == pytest.approx(-0.2)


def test_it_is_deterministic(found):
    assert claims() == found


def test_holds_is_computed():
    assert not Claim("a", "", 1.0, 0.0, 0.5, "=", "identity").holds
    assert Claim("a", "", 1.0, 0.0, 0.5, "> (paper: <=)", "counterexample").holds
    assert not Claim("a", "", 0.4, 0.0, 0.5, "> (paper: <=)", "counterexample").holds
    assert not Claim("a", "", 0.4, 0.0, 0.5, "!= (paper: =)", "counterexample").holds
    assert Claim("a", "", 0.4, 0.0, 0.5, "<=", "theorem").holds
    for relation in ("=", "<=", "!=", "> (paper: <=)", "!= (paper: =)"):
        assert not Claim("a", "", math.nan, 0.0, 0.5, relation, "theorem").holds
    with pytest.raises(TypeError):
        Claim("a", "", 1.0, 0.0, 0.5, "=", "identity", holds=True)


def test_vectors_show_their_worst_entry():
    claim = compare("a", "", (torch.tensor([1.0, 5.0, 2.0]), torch.tensor([1.0, 1.0, 9.0])), "<=",
                    "theorem")  # fmt: skip
    assert (claim.lhs, claim.rhs, claim.comparisons, claim.holds) == (5.0, 1.0, 3, False)
    claim = compare("a", "", (torch.tensor([1.0, 5.0, 2.0]), torch.tensor([1.0, 1.0, 9.0])), "=",
                    "theorem")  # fmt: skip
    assert (claim.lhs, claim.rhs) == (2.0, 9.0)


def wrong_loss_variance(loss, strength, gradient=None, weights=None):
    """The sign of the regulariser turned round."""
    right = original_loss_variance(loss, strength, gradient, weights)
    off = objectives.average(loss, gradient, weights)
    slope = None if gradient is None else 2 * off.gradient - right.gradient
    return objectives.Objective(2 * off.value - right.value, slope)


def stale_gradient_variance(loss, gradient, strength, curvature=None, weights=None):
    """Twice the strength: the ½ forgotten."""
    return original_gradient_variance(loss, gradient, 2 * strength, curvature, weights)


def small_qffl(loss, q, gradient=None, weights=None):
    """1/(q + 1) forgotten and a power too many."""
    right = original_qffl(loss, q, gradient, weights)
    slope = None if gradient is None else original_qffl(loss, q + 1, gradient, weights).gradient
    return objectives.Objective(right.value * (q + 1), slope)


original_loss_variance = objectives.loss_variance
original_gradient_variance = objectives.gradient_variance
original_qffl = objectives.qffl


@pytest.mark.parametrize(
    ("name", "wrong", "noticed", "untouched"),
    [
        ("loss_variance", wrong_loss_variance,
         ["∇L_λ, quadratics, w = 1/n", "∇L_λ, centred form, regression", "T1, sharp",
          "T3 C1, at x*", "T3 C2, at x*", "T4, m = 3 nonzero: by formula", "T5",
          "T5, monotone variance", "T6, L, quadratics", "T6, ∇L, regression",
          "FairLoss*, one exchange, quadratics"],
         ["T6, J, quadratics", "T5 for J"]),
        ("gradient_variance", stale_gradient_variance,
         ["∇J_γ, regression, uneven w", "J_γ, quadratics, w = 1/n: value", "T6, J, quadratics",
          "T6, ∇J, regression", "∇J, quadratics", "FairGrad*, formula, quadratics"],
         ["T6, L, quadratics", "T1, sharp"]),
        ("qffl", small_qffl,
         ["∇H_q, quadratics, w = 1/n", "H_1 identity, regression", "T1, equality", "T1, sharp",
          "T1 needs independence: value"],
         ["T5", "T6, J, quadratics"]),
    ],
)  # fmt: skip
def test_a_wrong_objective_is_noticed(monkeypatch, name, wrong, noticed, untouched):
    monkeypatch.setattr(objectives, name, wrong)
    failing = broken()
    assert set(noticed) <= failing
    assert not set(untouched) & failing
