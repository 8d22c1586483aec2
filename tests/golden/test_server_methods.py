"""FedMGDA+, FedFV, AdaFed and FedEBA+: numbers that were computed apart from this code."""

from __future__ import annotations

import pytest
import torch

import fairvar as fv
from checks import quadratic_run
from gram_checks import GOLDEN, follows, golden_data

METHODS: dict[str, fv.Method] = {
    "FedMGDA+ A": fv.FedMGDA(eps=0.3, step=0.1),
    "AdaFed A": fv.AdaFed(gamma=1.0),
    "AdaFed A 0": fv.AdaFed(gamma=0.0),
    "FedFV A": fv.FedFV(alpha=0.1, external="off"),
    "FedFV A official": fv.FedFV(alpha=0.1),
    "FedMGDA+ B 0": fv.FedMGDA(eps=0.0, step=0.1),
    "FedMGDA+ B .05": fv.FedMGDA(eps=0.05, step=0.1),
    "FedMGDA+ B .1": fv.FedMGDA(eps=0.1, step=0.1),
    "FedMGDA+ B 1": fv.FedMGDA(eps=1.0, step=0.1),
    "FedMGDA+ B 5:3:2": fv.FedMGDA(eps=0.1, step=0.1, weights="size"),
    "FedMGDA+ B mean": fv.FedMGDA(eps=0.1, scale="mean"),
    "AdaFed B": fv.AdaFed(gamma=1.0),
    "AdaFed B normalised": fv.AdaFed(gamma=1.0, normalise=True),
    "FedFV B": fv.FedFV(alpha=0.1, external="off"),
    "FedFV B official": fv.FedFV(alpha=0.1),
    "FedEBA+ A unfair": fv.FedEBA(temperature=0.5, alpha=0.3, angle=0.0),
    "FedEBA+ A fair": fv.FedEBA(temperature=0.5, alpha=0.5, angle=90.0),
    "FedEBA+ A unfair, two steps": fv.FedEBA(temperature=0.5, alpha=0.5, angle=0.0),
    "FedEBA+ A fair, two steps": fv.FedEBA(temperature=0.5, alpha=0.5, angle=90.0),
}
PATHS = [
    (name, engine) for name in METHODS for engine in ("reference", "vmapped", "deployed", "flower")
]
PATHS += [(f"FedEBA+ A {branch}", "pooled") for branch in ("unfair", "fair")]


@pytest.mark.parametrize(("name", "engine"), PATHS)
def test_trajectories(name: str, engine: str) -> None:
    follows(name, engine)(METHODS[name])


@pytest.mark.parametrize("engine", ["reference", "vmapped"])
def test_fedeba_changes_its_branch(engine: str) -> None:
    """With two local steps and a limit of 12° the rounds are unfair, fair, fair."""
    method = fv.FedEBA(temperature=0.5, alpha=0.5, angle=12.0)
    data = golden_data("FedEBA+ A fair")
    history = quadratic_run(data, method, (0.5, 0.5), 3, local_steps=2, engine=engine)
    f = history.loss
    found = torch.rad2deg(torch.arccos(f.sum(1) / (2**0.5 * f.norm(dim=1))))
    expected = torch.tensor([16.3268535, 4.1293655, 2.3620126], dtype=torch.float64)
    assert float((found - expected).abs().max()) <= 5.1e-8
    total = torch.tensor([1.0, 0.5, 0.5], dtype=torch.float64)
    torch.testing.assert_close(history.weights.sum(1), total)


@pytest.mark.parametrize("eps", [0.0, 0.05, 0.1, 0.5, 1.0])
def test_two_clients_make_the_bounds_of_fedmgda_irrelevant(eps: float) -> None:
    follows("FedMGDA+ A")(fv.FedMGDA(eps=eps, step=0.1))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AdaFed A", [0.58225709, 0.30657815]),
        ("FedFV A", [0.25993762, 0.38990643]),
        ("FedFV A official", [3 / 2, 5 / 6]),
        ("AdaFed B", [0.60631474, 0.42608424, -0.10557072]),
        ("FedFV B", [1.02928224, 0.54491413, 0.36327609]),
        ("FedFV B official", [1.81346131, 0.61589252, 0.41059501]),
    ],
)
def test_weights_of_the_first_round(name: str, expected: list[float]) -> None:
    start = (0.5,) * len(expected)
    found = quadratic_run(golden_data(name), METHODS[name], start, 1).weights[0]
    assert float((found - torch.tensor(expected, dtype=torch.float64)).abs().max()) <= 5.1e-9


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FedMGDA+ B .05", [[0.3833333333, 1 / 3, 0.2833333333]] * 3),
        ("FedMGDA+ B .1", [[0.4333333333, 1 / 3, 0.2333333333]] * 3),
        ("FedMGDA+ B 1", [[0.5, 0.5, 0.0]] * 3),
        ("FedMGDA+ B 5:3:2", [[0.5, 0.4, 0.1]]),
    ],
)
def test_lambda_of_fedmgda(name: str, expected: list[list[float]]) -> None:
    """λ_i = w_i ‖x − x_i‖ / step"""
    history = quadratic_run(
        golden_data(name), METHODS[name], (0.5,) * 3, len(expected), evaluate_every=1
    )
    found = history.weights * history.update_norm / 0.1
    assert float((found - torch.tensor(expected, dtype=torch.float64)).abs().max()) <= 1e-10


def test_all_golden_rows_are_used() -> None:
    assert METHODS.keys() == GOLDEN.keys()
