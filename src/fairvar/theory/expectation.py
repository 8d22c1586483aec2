"""T1: q-FFL (q = 1) against the loss variance, for random losses.

Expectations are exact sums over all outcomes of discrete losses, so nothing here is "up to Monte
Carlo error" except the one claim with gamma-distributed losses.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from fairvar import objectives, rng
from fairvar.theory.claim import Claim, compare

Law = list[tuple[float, float]]  # (value, probability) of one client's loss

N = 3
TWO_POINTS: Law = [(0.0, 0.64), (6.25 / 1.5, 0.36)]  # mean 1.5, variance 4


def claims() -> list[Claim]:
    return [*_statement(), *_as_printed(), *_hypotheses(), _gamma()]


def _outcomes(laws: list[Law]) -> tuple[Tensor, Tensor]:
    """All outcomes (rows) of independent losses with these laws, and their probabilities."""
    rows, chance = [], []
    for outcome in product(*laws):
        rows.append([value for value, _ in outcome])
        chance.append(torch.tensor([p for _, p in outcome], dtype=torch.float64).prod())
    return torch.tensor(rows, dtype=torch.float64), torch.stack(chance)


def _expected_h1(rows: Tensor, chance: Tensor) -> Tensor:
    return chance @ torch.stack([objectives.qffl(f, 1.0).value for f in rows])


def _expected_L(rows: Tensor, chance: Tensor, strength: float) -> Tensor:
    return chance @ torch.stack([objectives.loss_variance(f, strength).value for f in rows])


def _right_side(rows: Tensor, chance: Tensor) -> Tensor:
    """1/(2n) Σ E[f_i]² + n/(n − 1) E[1/(2n) Σ (f_i − F)²]"""
    n = rows.shape[1]
    means = chance @ rows
    return (means**2).mean() / 2 + n / (n - 1) * (chance @ rows.var(1, unbiased=False)) / 2


def _strength(C: float, n: int = N) -> float:
    return n / (C * (n - 1))


def _statement() -> list[Claim]:
    law: Law = [(0.2, 0.3), (1.0, 0.5), (3.1, 0.2)]
    mean = sum(v * p for v, p in law)
    rows, chance = _outcomes([law] * N)
    h1 = _expected_h1(rows, chance)
    found = [
        compare("T1, equality", "E[H_1] = (1/2n) Σ E[f_i]² + n/(n−1) E[(1/2n) Σ (f_i − F)²]",
                (h1, _right_side(rows, chance)), "=", "corrected",
                note="i.i.d. losses; the proof prints E[f_i]² outside the sum"),
        compare("T1, sharp", "E[H_1] = (C/2) E[L_2λ] with λ = n/(C(n−1)) when E[f_i] = C",
                (h1, mean / 2 * _expected_L(rows, chance, 2 * _strength(mean))), "=", "corrected",
                note="the proof wastes a factor 2; this bound is met"),
    ]  # fmt: skip
    for C in (mean, 2 * mean, 5 * mean):
        L = _expected_L(rows, chance, _strength(C))
        twice = _expected_L(rows, chance, 2 * _strength(C))
        found += [
            compare(f"T1, C = {C:.3g}", "E[H_1] ≤ C · E[L_λ] with λ = n/(C(n−1)), E[f_i] ≤ C",
                    (h1, C * L), "<=", "corrected", note="the statement omits the factor C"),
            compare(f"T1, sharper, C = {C:.3g}", "E[H_1] ≤ (C/2) E[L_2λ] ≤ C E[L_λ]",
                    (torch.stack([h1, C / 2 * twice]), torch.stack([C / 2 * twice, C * L])),
                    "<=", "corrected"),
        ]  # fmt: skip
    small, p = _outcomes([[(0.1, 0.5), (1.5, 0.5)]] * N)
    L = _expected_L(small, p, _strength(1.0))
    return [*found, compare("T1, C ≤ 1", "without the factor C the bound is true for C ≤ 1",
                            (_expected_h1(small, p), L), "<=", "theorem",
                            note="mean loss 0.8, C = 1")]  # fmt: skip


def _as_printed() -> list[Claim]:
    found = []
    for text, law, C in (("all losses 3", [(3.0, 1.0)], 3.0),
                         ("mean 1.5, variance 4", TWO_POINTS, 1.5)):  # fmt: skip
        rows, chance = _outcomes([law] * N)
        h1, L = _expected_h1(rows, chance), _expected_L(rows, chance, _strength(C))
        found += [
            compare(f"T1, as printed (without C), {text}", "the paper claims E[H_1] ≤ E[L_λ]",
                    (h1, L), "> (paper: <=)", "counterexample", 0.1, f"i.i.d. losses, C = {C}"),
            compare(f"T1, with C, {text}", "E[H_1] ≤ C · E[L_λ] in the same example",
                    (h1, C * L), "<=", "corrected"),
        ]  # fmt: skip
    return found


def _hypotheses() -> list[Claim]:
    laws: list[Law] = [[(0.5, 0.5), (1.5, 0.5)], [(3.0, 0.5), (4.0, 0.5)], [(1.0, 1.0)]]
    apart, chance = _outcomes(laws)
    r = 0.5**0.5
    together = torch.tensor([[1 - r, 1 - r], [1 + r, 1 + r]], dtype=torch.float64)
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    return [
        compare("T1 needs equal means", "the equality fails for independent losses of unequal mean",
                (_expected_h1(apart, chance), _right_side(apart, chance)), "!= (paper: =)",
                "counterexample", 0.1, "equal laws of the data need equal sample sizes too"),
        compare("T1 needs independence", "the equality fails for f_1 = f_2",
                (_expected_h1(together, half), _right_side(together, half)), "!= (paper: =)",
                "counterexample", 0.1, "mean 1, variance ½: 0.75 against 0.5"),
        compare("T1 needs independence: value", "E[H_1] = (E[f]² + Var f)/2 for f_1 = f_2",
                (_expected_h1(together, half), (1 + 0.5) / 2), "=", "identity"),
    ]  # fmt: skip


def _gamma() -> Claim:
    n, draws, shape = 5, 400_000, 2.0
    f = torch.from_numpy(rng.stream(0, "theory", "gamma").gamma(shape, 0.6, (draws, n)))
    h1 = (f**2).mean(1) / 2
    mean, variance = shape * 0.6, shape * 0.36
    error = float(h1.std()) / draws**0.5
    return compare("T1, gamma losses", "E[H_1] = (E[f]² + Var f)/2: both terms of T1's equality",
                   (h1.mean(), (mean**2 + variance) / 2), "=", "corrected", 4.5 * error,
                   "n = 5, 400 000 draws; tolerance 4.5 standard errors")  # fmt: skip
