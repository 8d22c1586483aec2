"""Checks that a right method passes and a wrong one fails: used by golden, theory and contract.

Each takes a method and raises AssertionError. `tests/contract` runs them on deliberately broken
methods too, so that every check is known to be able to fail.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import fairvar as fv
from fairvar.data import quadratics
from fairvar.methods import Replies
from fairvar.testing import federation

# -- the paper's eight, and their options ----------------------------------------------------------
METHODS: list[fv.Method] = [
    fv.FedAvg(),
    fv.AFL(),
    fv.QFFL(1.0),
    fv.AAggFF(),
    fv.FairLoss(0.5),
    fv.FairLoss(0.5, exact=True),
    fv.FairGrad(0.1),
    fv.FairGrad(0.1, exact=True),
]
OPTIONS: list[fv.Method] = [
    fv.FedAvg(weights="size"),
    fv.AFL(order="simultaneous", average=True, losses="batch"),
    fv.QFFL(0.5, losses="batch", weights="size"),
    fv.AAggFF(setting="cross_device", variant="paper"),
    fv.FairLoss(1.0, clip_beta=True, weights="size"),
    fv.FairLoss(0.5, losses="full", warm_start="exact"),
    fv.FairGrad(0.1, exact=True, weights="size"),
    fv.FairGrad(0.1, warm_start="skip"),
]

# -- golden trajectories ---------------------------------------------------------------------------
GOLDEN: dict[str, list[tuple[float, float]]] = {
    "FedAvg": [(0.45, 0.525), (0.41, 0.54625), (0.378, 0.5643125)],
    "FairLoss*": [(0.431875, 0.54765625), (0.3844779, 0.58057449), (0.35089083, 0.60324994)],
    "FairLoss": [(0.4009375, 0.563125), (0.36174111, 0.59097985), (0.33425338, 0.6100059)],
    "FairGrad*": [(0.43, 0.5125), (0.3754, 0.5230625), (0.332812, 0.53198781)],
    "FairGrad": [(0.41, 0.52), (0.367, 0.5285), (0.3297, 0.5362)],
    "QFFL": [(0.43565574, 0.55), (0.39015234, 0.58493662), (0.35776501, 0.60859054)],
}
PRINTED = 5.1e-9  # half a unit of the eighth decimal


def golden_federation() -> fv.Federation:
    """Two quadratics in two dimensions, of which the golden numbers were computed apart."""
    A = np.array([np.diag([1.0, 2.0]), np.diag([3.0, 1.0])])
    return quadratics(A, np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([0.5, 0.1]))


def linear_model(*start: float) -> nn.Module:
    """x ↦ ⟨w, x⟩ that starts at w."""
    layer = nn.Linear(len(start), 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([start], dtype=torch.float64))
    return layer


def quadratic_run(
    data: fv.Federation, method: fv.Method, start: tuple[float, ...], rounds: int, **options: object
) -> fv.History:
    given: dict = {"lr": 0.1, "loss": "mse", "dtype": torch.float64, **options}
    return fv.train(linear_model(*start), data, method, rounds, **given)


def follows_golden(name: str, engine: str = "auto") -> Callable[[fv.Method], None]:
    """x¹, x², x³ from (½, ½) with η = 0.1 are the printed ones, to every printed digit."""

    def check(method: fv.Method) -> None:
        for rounds, expected in enumerate(GOLDEN[name], start=1):
            found = quadratic_run(
                golden_federation(), method, (0.5, 0.5), rounds, engine=engine
            ).state.params["weight"][0]
            gap = float((found - torch.tensor(expected, dtype=torch.float64)).abs().max())
            assert gap <= PRINTED, f"x^{rounds} = {found.tolist()}, expected {expected}"

    return check


# -- server weights --------------------------------------------------------------------------------
Rows = list[list[float]]


def weights_by_round(method: fv.Method, losses: Rows, ids: list[list[int]] | None = None) -> Tensor:
    """The server's weights of all rounds, or its memory p where only some clients answer."""
    clients = 4
    memory, found = method.initial_memory(clients), []
    for number, row in enumerate(losses):
        who = torch.tensor(range(clients) if ids is None else ids[number])
        share = torch.full((len(who),), 1 / len(who), dtype=torch.float64)
        loss = torch.tensor(row, dtype=torch.float64)
        weights, memory = method.weigh(memory, Replies(loss, share, who, clients))
        found.append(weights if ids is None else memory["p"])
    return torch.stack(found)


SILO_LOSSES = [[0.5, 1.0, 1.5, 2.0], [0.4, 1.2, 1.0, 2.2], [0.3, 1.0, 0.9, 2.5]]
SILO: dict[tuple[str, str], Rows] = {
    ("official", "logistic"): [
        [0.24721883, 0.24904847, 0.25095153, 0.25278117],
        [0.24328366, 0.24908119, 0.24995765, 0.25767751],
        [0.23900232, 0.24827506, 0.24863104, 0.26409158],
    ],
    ("official", "exponential"): [
        [0.24529811, 0.24922456, 0.25185653, 0.2536208],
        [0.23824027, 0.25045817, 0.2515017, 0.25979987],
        [0.2303701, 0.2509242, 0.25105725, 0.26764845],
    ],
    ("paper", "logistic"): [
        [0.24191272, 0.24723306, 0.25276694, 0.25808728],
        [0.23307008, 0.24730785, 0.25053147, 0.2690906],
        [0.22346493, 0.24549911, 0.24755209, 0.28348387],
    ],
    ("paper", "exponential"): [
        [0.23562104, 0.2476286, 0.25567751, 0.26107285],
        [0.21949726, 0.25045227, 0.25485971, 0.27519075],
        [0.20165379, 0.25151112, 0.25384337, 0.29299172],
    ],
}


def follows_silo_golden(variant: str, cdf: str) -> Callable[[fv.Method], None]:
    """AAggFF-S gives the printed weights in three rounds."""

    def check(method: fv.Method) -> None:
        found = weights_by_round(method, SILO_LOSSES)
        expected = torch.tensor(SILO[variant, cdf], dtype=torch.float64)
        assert float((found - expected).abs().max()) <= PRINTED, found.tolist()

    return check


def worse_clients_weigh_more(method: fv.Method) -> None:
    """A fair method never gives a client less weight for a higher loss, and some client more."""
    weights = weights_by_round(method, [[0.2, 0.8, 1.1, 2.5]] * 3)
    assert bool((weights.diff(dim=1) >= -1e-15).all()), f"weights fall: {weights.tolist()}"
    assert float(weights[-1, -1] - weights[-1, 0]) > 1e-6, f"no response: {weights.tolist()}"


# -- directions against finite differences ---------------------------------------------------------
Value = Callable[[nn.Module, fv.Federation, Tensor], Tensor]


def client_values(module: nn.Module, data: fv.Federation) -> tuple[Tensor, Tensor]:
    """(f_i, ∇f_i) of all clients by plain autograd, one client after the other."""
    losses, gradients = [], []
    for i in range(data.clients):
        x, y = data.train.of(i)
        loss = nn.functional.cross_entropy(module(x), y)
        slopes = torch.autograd.grad(loss, list(module.parameters()))
        losses.append(loss.detach())
        gradients.append(torch.cat([s.flatten() for s in slopes]))
    return torch.stack(losses), torch.stack(gradients)


def loss_objective(strength: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """L_λ from (losses, gradients, client weights), written out once more."""
    return lambda f, g, w: w @ f + strength / 2 * (w @ (f - w @ f) ** 2)


def gradient_objective(strength: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """J_γ."""
    return lambda f, g, w: w @ f + strength / 2 * (w @ ((g - w @ g) ** 2).sum(1))


def slope(function: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-3) -> Tensor:
    """Fourth-order central differences: error about step⁴ + 1e-16/step."""
    found = torch.zeros_like(x)
    for k in range(len(x)):
        e = torch.zeros_like(x)
        e[k] = step
        near, far = function(x + e) - function(x - e), function(x + 2 * e) - function(x - 2 * e)
        found[k] = (8 * near - far) / (12 * step)
    return found


def smooth_network(hidden: int = 3) -> nn.Module:
    """A small network with tanh: smooth, not convex. hidden = 0: multinomial regression."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        if not hidden:
            return nn.Linear(4, 3).double()
        return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()


def descends(
    objective: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden: int = 0,
    engine: str = "auto",
    tolerance: float = 1e-7,
) -> Callable[[fv.Method], None]:
    """(x − x⁺)/η after one round is the objective's gradient by finite differences."""

    def check(method: fv.Method) -> None:
        data, lr = federation(), 0.1
        module = smooth_network(hidden)
        start = nn.utils.parameters_to_vector(module.parameters()).detach()
        options: dict = {"dtype": torch.float64, "engine": engine, "evaluate_local": False}
        after = fv.train(module, data, method, rounds=1, lr=lr, **options).state.params
        direction = (start - torch.cat([p.flatten() for p in after.values()])) / lr

        sizes = data.sizes.double()
        by_size = getattr(method, "weights", "uniform") == "size"
        w = sizes / sizes.sum() if by_size else torch.full_like(sizes, 1 / len(sizes))

        def value(x: Tensor) -> Tensor:
            nn.utils.vector_to_parameters(x, module.parameters())
            return objective(*client_values(module, data), w)

        expected = slope(value, start)
        gap = float((direction - expected).norm() / expected.norm())
        assert gap <= tolerance, f"relative distance {gap:.3g} to the objective's gradient"

    return check


# -- small networks and ragged image clients -------------------------------------------------------
def images(
    clients: int,
    shape: tuple[int, int, int] = (1, 8, 8),
    classes: int = 3,
    sizes: tuple[int, int] = (2, 13),
) -> fv.Federation:
    """Clients of sizes[0] to sizes[1] noise images, each with its own brightness."""

    def client(number: int) -> list[tuple[np.ndarray, np.ndarray]]:
        draw = np.random.default_rng((7, number))
        counts = (int(draw.integers(sizes[0], sizes[1] + 1)), 1 + number % 3, 2 + number % 4)
        return [
            (
                (1 + number % 3) / 3 * draw.standard_normal((size, *shape)) + 0.03 * number,
                draw.integers(0, classes, size),
            )
            for size in counts
        ]

    train, valid, test = zip(*(client(i) for i in range(clients)), strict=True)
    return fv.Federation.from_arrays(list(train), list(valid), list(test), classes=classes)


def small_cnn(batch_norm: bool) -> nn.Module:
    """Convolution (batch norm) ReLU max-pool, for 8 × 8 images and three classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        norm = [nn.BatchNorm2d(2)] if batch_norm else []
        layers = [nn.Conv2d(1, 2, 3), *norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(18, 3))


MODELS: dict[str, str | nn.Module] = {
    "multinomial": "multinomial",
    "cnn": small_cnn(batch_norm=False),
    "batch_norm": small_cnn(batch_norm=True),
}


def observed(history: fv.History) -> dict[str, Tensor]:
    """All numbers of a history, by name."""
    return {
        **{f"parameter {k}": v for k, v in history.state.params.items()},
        **{f"buffer {k}": v for k, v in history.state.buffers.items()},
        **{f"memory {k}": v for k, v in history.state.memory.items()},
        **{f"loss {k}": v for k, v in history.evaluated_loss.items()},
        **{f"accuracy {k}": v for k, v in history.accuracy.items()},
        "loss": history.loss,
        "weights": history.weights,
        "ascended": history.ascended,
        "gradient variance": history.gradient_variance,
        "update norm": history.update_norm,
    }


def distance(a: fv.History, b: fv.History) -> dict[str, float]:
    """‖a − b‖ / ‖b‖ of all numbers; the same clients must be NaN (no samples) in both."""
    left, right = observed(a), observed(b)
    assert left.keys() == right.keys()
    for values in (left, right):  # as one vector: some biases before batch norm have no gradient
        for kind in ("parameter", "buffer"):
            parts = [values.pop(k).double().flatten() for k in list(values) if k.startswith(kind)]
            values[kind] = torch.cat(parts) if parts else torch.zeros(0)
    found = {}
    for name, x in left.items():
        y = right[name]
        assert torch.equal(x.isnan(), y.isnan()), name
        x, y = x.double().nan_to_num(), y.double().nan_to_num()
        found[name] = float((x - y).norm() / y.norm()) if float(y.norm()) else float(x.norm())
    return found


def same_bytes(a: fv.History, b: fv.History, *, evaluated: bool = True) -> None:
    """Every number is the same, bit by bit; `evaluated=False` leaves the evaluations out."""
    left, right = observed(a), observed(b)
    seen = ("loss (", "accuracy", "gradient variance", "update norm")
    for name in left.keys() | right.keys():
        if evaluated or not name.startswith(seen):
            x, y = left[name], right[name]
            assert x.dtype == y.dtype, name
            assert x.numpy().tobytes() == y.numpy().tobytes(), f"{name} differs"
