"""Numbers that were computed apart from this code: trajectories, server weights, responses."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import fairvar as fv
from checks import (
    FURTHER_GOLDEN,
    PRINTED,
    SILO,
    follows_golden,
    follows_rule,
    follows_silo_golden,
    quadratic_run,
    weights_by_round,
)
from fairvar.data import quadratics
from fairvar.methods.aaggff import CDFS
from fairvar.methods.simplex import minimise_quadratic, project

METHODS = {
    "FedAvg": fv.FedAvg(),
    "FairLoss*": fv.FairLoss(0.5, exact=True),
    "FairLoss": fv.FairLoss(0.5),
    "FairGrad*": fv.FairGrad(0.2, exact=True),
    "FairGrad": fv.FairGrad(0.2),
    "QFFL": fv.QFFL(1.0),
}
ENGINES = ("reference", "pooled", "vmapped", "blocked", "linear", "grid")
NOT_POOLED = {"FairGrad*", "FairGrad", "QFFL"}
PATHS = [
    (name, engine)
    for name in METHODS
    for engine in ENGINES
    if engine != "pooled" or name not in NOT_POOLED
]


class FedFair(fv.Method, frozen=True, tag="fedfair"):
    """Ling et al. 2024: d_i = (1 + λ (f_i − a)) ∇f_i, with a of the round before."""

    uses_mean_loss: ClassVar[bool] = True

    strength: float
    exact: bool = False

    def coefficients(self, loss: torch.Tensor, mean_loss: torch.Tensor) -> tuple:
        return 1 + self.strength * (loss - mean_loss), 0.0


FURTHER = {
    "TERM": fv.TERM(1.0),
    "TERM 7:3": fv.TERM(1.0, weights="size"),
    "TERM 2": fv.TERM(2.0),
    "TERM B": fv.TERM(1.0),
    "PropFair 5": fv.PropFair(5.0),
    "PropFair 1.7": fv.PropFair(1.7),
    "PropFair 1.7 official": fv.PropFair(1.7, variant="official"),
    "Superquantile 0.75": fv.Superquantile(0.75),
    "Superquantile 0.5": fv.Superquantile(0.5),
    "GIFAIR": fv.GIFAIR(0.4),  # λ = 0.2 = 0.4 · ½ / (2 − 1)
    "FedFair": FedFair(0.5),
    "Semi-VRed": fv.SemiVRed(0.25),
}


def close(found: torch.Tensor, expected: object, tolerance: float = PRINTED) -> None:
    gap = (found - torch.tensor(expected, dtype=torch.float64)).abs().max()
    assert float(gap) <= tolerance, f"{found.tolist()} is not {expected}"


@pytest.mark.parametrize(("name", "engine"), PATHS)
def test_quadratics(name: str, engine: str) -> None:
    follows_golden(name, engine)(METHODS[name])


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        (name, engine)
        for name in FURTHER_GOLDEN
        for engine in (*ENGINES, "deployed", "flower")
        if (name, engine) != ("FedFair", "flower")  # no configuration can name a local class
    ],
)
def test_quadratics_with_further_methods(name: str, engine: str) -> None:
    follows_golden(name, engine)(FURTHER[name])


@pytest.mark.parametrize("engine", [*ENGINES, "deployed"])
def test_fedfair_with_the_mean_of_this_round_is_fairloss_star(engine: str) -> None:
    """Σ r_i (f_i − F) = 0 cancels the −g that FedFair leaves out."""
    follows_golden("FairLoss*", engine)(FedFair(0.5, exact=True))


@pytest.mark.parametrize("engine", [*ENGINES, "deployed"])
@pytest.mark.parametrize("name", [name for name in FURTHER_GOLDEN if name.startswith("PropFair")])
def test_propfair_with_losses_of_the_round(name: str, engine: str) -> None:
    """One full step: the batch is all data."""
    follows_golden(name, engine)(replace(FURTHER[name], losses="full"))


@pytest.mark.parametrize("engine", ["reference", "vmapped", "linear", "grid", "deployed", "flower"])
def test_fedprox_by_hand(engine: str) -> None:
    follows_golden("FedProx", engine, local_steps=2)(fv.FedProx(1.0))


@pytest.mark.parametrize("engine", ["reference", "vmapped", "linear", "grid", "deployed", "flower"])
def test_momentum_by_hand(engine: str) -> None:
    """Two steps of each client with momentum ½, v ← ½ v + ∇f_i, from x = (½, ½):
    client 1: v = (−.5, 1), y = (.55, .4), v = ½ v + (−.45, .8) = (−.7, 1.3), y = (.62, .27);
    client 2: v = (1.5, −1.5), y = (.35, .65), v = ½ v + (1.05, −1.35) = (1.8, −2.1) and
    y = (.17, .86). The next round starts from v = 0: its first step is FedAvg's.
    """
    follows_rule("momentum", engine)
    follows_golden("FedAvg", engine, momentum=0.5)(fv.FedAvg())


@pytest.mark.parametrize(
    "engine", ["reference", "pooled", "vmapped", "blocked", "deployed", "flower"]
)
def test_weight_decay_by_hand(engine: str) -> None:
    """x − η (∇F + 0.2 x) with ∇F = (2 x₁ − ½, 1.5 x₂ − 1):
    (.5, .5) − .1 ((.5, −.25) + (.1, .1)) = (.44, .515), and
    (.44, .515) − .1 ((.38, −.2275) + (.088, .103)) = (.3932, .52745)."""
    follows_rule("weight decay", engine)


@pytest.mark.parametrize("engine", [*ENGINES, "deployed", "flower"])
def test_halved_learning_rate_by_hand(engine: str) -> None:
    """η = 0.1, then 0.05: (.45, .525) − .05 (.4, −.2125) = (.43, .535625)."""
    follows_rule("schedule", engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_collapsed_fairloss_is_fairloss_star(engine: str) -> None:
    follows_golden("FairLoss*", engine)(fv.FairLoss(0.5, exact=True, collapsed=True))


@pytest.mark.parametrize("engine", ["reference", "pooled", "vmapped", "blocked", "linear"])
def test_afl_by_hand(engine: str) -> None:
    """f_1 = ½(x − 1)² + ½, f_2 = ½(x + 1)², x⁰ = 0, η = ½, s = ¼.

    Round 1: f = (1, ½); p = Proj(½ + ¼, ½ + ⅛): θ = (1.375 − 1)/2 = 3/16, p = (9/16, 7/16).
    g = (−1, 1): x¹ = 0 − ½(−9/16 + 7/16) = 1/16.
    Round 2: f = (½(15/16)² + ½, ½(17/16)²) = (481/512, 289/512);
    p + s f = (9/16 + 481/2048, 7/16 + 289/2048), θ = 770/2048/2 = 385/2048,
    p = (9/16 + 96/2048, 7/16 − 96/2048) = (39/64, 25/64).
    g = (−15/16, 17/16): x² = 1/16 − ½(−39·15 + 25·17)/1024 = 1/16 + 160/2048 = 9/64.
    """
    data = quadratics(np.ones((2, 1, 1)), np.array([[1.0], [-1.0]]), np.array([0.5, 0.0]))
    history = quadratic_run(data, fv.AFL(step=0.25), (0.0,), 2, lr=0.5, engine=engine)
    close(history.loss, [[1, 0.5], [481 / 512, 289 / 512]], 1e-14)
    close(history.weights, [[9 / 16, 7 / 16], [39 / 64, 25 / 64]], 1e-14)
    close(history.state.params["weight"][0], [9 / 64], 1e-14)


def test_afl_in_the_papers_order_by_hand() -> None:
    """The same, with p of the round before and the mean of the iterates.

    x¹ = 0 − ½(−½ + ½) = 0 with p = (½, ½); x² = 0 − ½(−9/16 + 7/16) = 1/16; mean 1/32.
    """
    data = quadratics(np.ones((2, 1, 1)), np.array([[1.0], [-1.0]]), np.array([0.5, 0.0]))
    method = fv.AFL(step=0.25, order="simultaneous", average=True)
    history = quadratic_run(data, method, (0.0,), 2, lr=0.5)
    close(history.weights, [[0.5, 0.5], [9 / 16, 7 / 16]], 1e-14)
    close(history.state.x["weight"][0], [1 / 16], 1e-14)
    close(history.state.params["weight"][0], [1 / 32], 1e-14)


@pytest.mark.parametrize(
    ("step", "expected"), [(0.1, [0.175, 0.225, 0.275, 0.325]), (1.0, [0, 0, 0.25, 0.75])]
)
def test_afl_weights(step: float, expected: list[float]) -> None:
    close(weights_by_round(fv.AFL(step=step), [[0.5, 1, 1.5, 2]])[0], expected, 1e-14)


@pytest.mark.parametrize(
    ("method", "losses", "expected"),
    [
        (fv.TERM(1.0), [0.875, 1.6], [0.3262929, 0.6737071]),
        (fv.TERM(1.0), [1, 1.85, 3.7375], [0.05322557, 0.12452903, 0.8222454]),
        (fv.Superquantile(0.5), [1, 2, 2, 2], [0, 1 / 3, 1 / 3, 1 / 3]),
        (fv.Superquantile(0.25), [1, 2, 3, 4], [0, 0, 0, 1]),
        (fv.Superquantile(0.625), [1, 2, 3, 4], [0, 0.2, 0.4, 0.4]),
        (fv.GIFAIR(0.6), [1, 2, 2, 4], [0.1, 0.25, 0.25, 0.4]),  # λ = 0.05 = 0.6 · ¼ / 3
        # F = 2, e = (0, 0, 0, 2), Σ r e = ½: ¼ (1 + ½ (e − ½))
        (fv.SemiVRed(0.25), [1, 1, 2, 4], [3 / 16, 3 / 16, 3 / 16, 7 / 16]),
    ],
    ids=repr,
)
def test_weights_of_further_methods(
    method: fv.Method, losses: list[float], expected: list[float]
) -> None:
    found = weights_by_round(method, [losses])[0]
    close(found, expected, 1e-12 if len(losses) == 4 else PRINTED)


@pytest.mark.parametrize(
    ("share", "clients", "kept"), [(0.8, 100, 81), (0.1, 100, 11), (0.5, 2, 2), (0.25, 10, 3)]
)
def test_superquantile_filter_keeps_what_the_authors_code_keeps(
    share: float, clients: int, kept: int
) -> None:
    """Losses from the ⌈n (1 − θ)⌉-th smallest on: one client more than n θ where that is whole."""
    losses = torch.randperm(clients, generator=torch.Generator().manual_seed(1)).tolist()
    weights = weights_by_round(fv.Superquantile(share, variant="filter"), [losses])[0]
    close(weights, [1 / kept if f >= clients - kept else 0 for f in losses], 1e-12)


@pytest.mark.parametrize(
    ("variant", "factor"), [("extension", (4.7619, 5)), ("official", (4.7619, 0.5882))]
)
def test_propfair_factor(variant: str, factor: tuple[float, float]) -> None:
    own, shared = fv.PropFair(1.7, variant=variant).coefficients(
        torch.tensor([1.49, 1.51], dtype=torch.float64), torch.tensor(0.0)
    )
    assert shared == 0
    close(own, factor, 5e-5)


@pytest.mark.parametrize(("variant", "cdf"), SILO)
def test_aaggff_cross_silo(variant: str, cdf: str) -> None:
    follows_silo_golden(variant, cdf)(fv.AAggFF(variant=variant, cdf=cdf))


@pytest.mark.parametrize(
    ("variant", "expected"),
    [("official", [0, 0, 0.27417942, 0.72582058]), ("paper", [0, 0, 0, 1])],
)
def test_aaggff_after_200_equal_rounds(variant: str, expected: list[float]) -> None:
    weights = weights_by_round(fv.AAggFF(variant=variant), [[0.5, 1, 1.5, 2]] * 200)
    close(weights[-1], expected)


def test_aaggff_with_two_clients_by_hand() -> None:
    """Variant "paper", K = 2: on p = (½ − u, ½ + u) the program is one parabola in u.

    g = −r/(1 + ⟨p, r⟩), r = CDF/2, β = ½, p_1 = (½, ½). With d = g_2 − g_1:
    minimise (½ + u) g_2 + (½ − u) g_1 + β/2 (d u)² + 2 (½ + 2u²), so d + β d² u + 8 u = 0 and
    u = −d / (β d² + 8).
    """
    method = fv.AAggFF(variant="paper", cdf="exponential")
    loss = torch.tensor([1.0, 3.0], dtype=torch.float64)
    half = torch.full((2,), 0.5, dtype=torch.float64)
    replies = fv.methods.Replies(loss, half, torch.arange(2), 2)
    weights, _ = method.weigh(method.initial_memory(2), replies)
    r = (1 - np.exp([-0.5, -1.5])) / 2
    g = -r / (1 + r.sum() / 2)
    d = g[1] - g[0]
    u = -d / (0.5 * d**2 + 8)
    close(weights, [0.5 - u, 0.5 + u], 1e-12)


@pytest.mark.parametrize(
    ("variant", "first", "second"),
    [
        (
            "official",
            [0.2352696, 0.25687088, 0.25098865, 0.25687088],
            [0.2444856, 0.2449523, 0.2478973, 0.26266479],
        ),
        (
            "paper",
            [0.24039396, 0.24990591, 0.25979422, 0.24990591],
            [0.24209757, 0.24606417, 0.26194713, 0.24989112],
        ),
    ],
)
def test_aaggff_cross_device(variant: str, first: list[float], second: list[float]) -> None:
    method = fv.AAggFF(variant=variant, setting="cross_device")
    found = weights_by_round(method, [[0.5, 2], [1, 1.8]], ids=[[0, 2], [1, 2]])
    close(found, [first, second])


@pytest.mark.parametrize(
    ("cdf", "expected"),
    [
        ("weibull", [0.14785621, 0.47270758, 0.76307224, 0.92269526]),
        ("exponential", [0.32967995, 0.55067104, 0.69880579, 0.79810348]),
        ("frechet", [0.082085, 0.2865048, 0.43459821, 0.53526143]),
        ("normal", [0.27425312, 0.42074029, 0.57925971, 0.72574688]),
        ("gumbel", [0.16168281, 0.29481632, 0.44099103, 0.57763584]),
        ("logistic", [0.35434369, 0.450166, 0.549834, 0.64565631]),
    ],
)
def test_responses(cdf: str, expected: list[float]) -> None:
    z = torch.tensor([0.4, 0.8, 1.2, 1.6], dtype=torch.float64)
    close(CDFS[cdf](z), expected)


@pytest.mark.parametrize(
    ("v", "expected"),
    [
        ([0.3, 0.7], [0.3, 0.7]),
        ([5.0], [1.0]),
        ([1.0, 1.0, 1.0], [1 / 3] * 3),
        ([2.0, 0.0], [1.0, 0.0]),
        ([0.6, 0.8, -1.0], [0.4, 0.6, 0.0]),
        ([-7.0, -7.5, -9.0], [0.75, 0.25, 0.0]),
    ],
)
def test_projection(v: list[float], expected: list[float]) -> None:
    close(project(torch.tensor(v, dtype=torch.float64)), expected, 1e-15)


def test_projection_is_the_nearest_point() -> None:
    """⟨v − p, s − p⟩ ≤ 0 for every corner s: what characterises the nearest point."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        v = 3 * torch.randn(6, generator=draw, dtype=torch.float64)
        p = project(v)
        assert abs(float(p.sum()) - 1) < 1e-12
        assert float(p.min()) >= 0
        assert float(((v - p) @ (torch.eye(6, dtype=torch.float64) - p).T).max()) < 1e-12


def test_quadratic_program_meets_its_optimality_conditions() -> None:
    """At the minimum the slope is smallest exactly where p > 0."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(10):
        B, c = (torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((3, 5), (5,)))
        gram = B.T @ B
        p = minimise_quadratic(1.5, gram, c, torch.full_like(c, 0.2))
        slope = 1.5 * p + gram @ p + c
        assert abs(float(p.sum()) - 1) < 1e-12
        assert float((slope - slope.min())[p > 1e-9].max()) < 1e-9
