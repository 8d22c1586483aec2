"""Checks that a right method passes and a wrong one fails: used by golden, theory and contract.

Each takes a method and raises AssertionError. `tests/contract` runs them on deliberately broken
methods too, so that every check is known to be able to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fairvar as fv
from fairvar.data import quadratics
from fairvar.deploy.client import ROUNDS, Agreement
from fairvar.deploy.guard import FederationSettings
from fairvar.deploy.run import LocalTransport, federate, local_clients
from fairvar.engine.grid import Member, train_grid
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.methods import Replies
from fairvar.runs.formats import load_tensors
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

# -- further methods, and their options ------------------------------------------------------------
FURTHER: list[fv.Method] = [
    fv.TERM(1.0),
    fv.PropFair(3.0),
    fv.Superquantile(0.45),
    fv.GIFAIR(0.4),
    fv.SemiVRed(0.5),
]
FURTHER_OPTIONS: list[fv.Method] = [
    fv.TERM(3.0, weights="size", losses="batch"),
    fv.PropFair(1.2, variant="official", weights="size", losses="full"),
    fv.PropFair(1.2, losses="full"),
    fv.Superquantile(0.35, variant="filter", weights="size"),
    fv.GIFAIR(0.9, weights="size", losses="batch"),
    fv.SemiVRed(2.0, weights="size", losses="batch"),
]

# -- golden trajectories ---------------------------------------------------------------------------
GOLDEN: dict[str, list[tuple[float, float]]] = {
    "FedAvg": [(0.45, 0.525), (0.41, 0.54625), (0.378, 0.5643125)],
    "FairLoss*": [(0.431875, 0.54765625), (0.3844779, 0.58057449), (0.35089083, 0.60324994)],
    "FairLoss": [(0.4009375, 0.563125), (0.36174111, 0.59097985), (0.33425338, 0.6100059)],
    "FairGrad*": [(0.43, 0.5125), (0.3754, 0.5230625), (0.332812, 0.53198781)],
    "FairGrad": [(0.41, 0.52), (0.367, 0.5285), (0.3297, 0.5362)],
    # Two local steps, μ = 1. Of f = a/2 (x − m)² they make x − η a (x − m) (2 − η (a + μ)), so that
    # x₁ ← 0.67 x₁ + 0.09 and x₂ ← 0.74 x₂ + 0.18.
    "FedProx": [(0.425, 0.55), (0.37475, 0.587), (0.3410825, 0.61438)],
    "QFFL": [(0.43565574, 0.55), (0.39015234, 0.58493662), (0.35776501, 0.60859054)],
    # The server's optimisers `MOMENTUM` and `ADAM`, by hand in test_server_optimiser.py.
    "FedAvgM": [(0.45, 0.525), (0.365, 0.56875), (0.2655, 0.6228125)],
    "FedAdam": [(0.475, 0.51314829), (0.4395742, 0.53273488), (0.40172295, 0.55457882)],
}
PRINTED = 5.1e-9  # half a unit of the eighth decimal
Points = list[tuple[float, ...]]
FURTHER_GOLDEN: dict[str, Points] = {  # in two dimensions problem A, in three problem B
    "TERM": [
        (0.4152585801, 0.5684267749),
        (0.3646134301, 0.6078483764),
        (0.3331966088, 0.6294811319),
    ],
    "TERM 7:3": [
        (0.4561072828, 0.5173658965),
        (0.4268563584, 0.5240022108),
        (0.4063488948, 0.5251634225),
    ],
    "TERM 2": [  # FedEBA with T = 1/2
        (0.3880003132, 0.6024996085),
        (0.3384810610, 0.6442444094),
        (0.3160076472, 0.6551404696),
    ],
    "TERM B": [
        (0.2373083039, 0.5339129331, 0.3668715653),
        (0.0665660976, 0.5584787162, 0.2700462694),
        (-0.0319043643, 0.5696150063, 0.2078679745),
    ],
    "PropFair 5": [
        (0.4840017825, 0.5099376114),
        (0.4691698515, 0.5191883308),
        (0.4553987660, 0.5278092004),
    ],
    "PropFair 1.7": [
        (0.1553030303, 0.8143939394),
        (0.3394206999, 0.4760482485),
        (0.1917363607, 0.6994948667),
    ],
    "PropFair 1.7 official": [
        (0.4861853832, 0.4835115865),
        (0.4740830112, 0.4701540359),
        (0.4635321314, 0.4592227854),
    ],
    "Superquantile 0.75": [
        (0.4166666667, 0.5666666667),
        (0.3527777778, 0.6244444444),
        (0.3037962963, 0.6745185185),
    ],
    "Superquantile 0.5": [(0.35, 0.65), (0.245, 0.785), (0.3205, 0.628)],
    "GIFAIR": [(0.41, 0.575), (0.3416, 0.64025), (0.289616, 0.6970175)],
    "FedFair": [  # a of the round before
        (0.4009375000, 0.5631250000),
        (0.3630538692, 0.5903234667),
        (0.3354198790, 0.6094668069),
    ],
    "Semi-VRed": [
        (0.4409375, 0.536328125),
        (0.3966470417, 0.5641042691),
        (0.3632080695, 0.5853646032),
    ],
}
FURTHER_PRINTED = 6e-11  # these have ten decimals
FEDIIR: dict[str, Points] = {  # of problem A, penalty 0.1, ema 0.95
    "all": [
        (0.4110000000, 0.5196250000),
        (0.3492940000, 0.5350129062),
        (0.3064172760, 0.5470613650),
    ],
    "all, two steps": [
        (0.3756100000, 0.5481350000),
        (0.3113570924, 0.5788097726),
        (0.2780695917, 0.5983426313),
    ],
    "head": [
        (0.4500000000, 0.5196250000),
        (0.4100000000, 0.5350129062),
        (0.3780000000, 0.5470613650),
    ],
}
MOMENTUM = fv.ServerOptimiser("sgd", beta1=0.9)
ADAM = fv.ServerOptimiser("adam", lr=0.1, beta1=0.5, beta2=0.75, tau=0.05)


def golden_federation(copies: tuple[int, ...] = (1, 1)) -> fv.Federation:
    """Problem A, two quadratics in two dimensions, of which the golden numbers were computed apart.

    With `copies` of its samples a client has the same loss and another size."""
    A = np.array([np.diag([1.0, 2.0]), np.diag([3.0, 1.0])])
    data = quadratics(A, np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([0.5, 0.1]))
    pairs = [(data.train.of(i), number) for i, number in enumerate(copies)]
    return fv.Federation.from_arrays(
        [(x.repeat(number, 1), y.repeat(number, 1)) for (x, y), number in pairs]
    )


def golden_problem_b() -> fv.Federation:
    """Three quadratics in three dimensions: not degenerate for methods of least norm."""
    A = np.array([np.diag([1.0, 2.0, 1.0]), np.diag([3.0, 1.0, 2.0]), np.diag([2.0, 0.5, 1.0])])
    m = np.array([[1.0, 0.0, 1.0], [0.0, 2.0, 0.0], [-1.0, 1.0, -1.0]])
    return quadratics(A, m, np.array([0.5, 0.1, 0.3]))


def linear_model(*start: float) -> nn.Module:
    """x ↦ ⟨w, x⟩ that starts at w."""
    layer = nn.Linear(len(start), 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([start], dtype=torch.float64))
    return layer


Start = tuple[float, ...] | nn.Module


def module_of(start: Start) -> nn.Module:
    return start if isinstance(start, nn.Module) else linear_model(*start)


def gradient_variance_minimiser(A: np.ndarray, m: np.ndarray, strength: float) -> np.ndarray:
    """The minimiser of J = F + (γ/2n) Σ ‖g_i − ḡ‖² over quadratics; γ = 0: of the mean loss F.

    x* = (Ā + (γ/n) Σ D_i²)⁻¹ (b̄ + (γ/n) Σ D_i e_i)
    with b_i = A_i m_i, D_i = A_i − Ā and e_i = b_i − b̄.
    """
    b = np.einsum("nij,nj->ni", A, m)
    D, e = A - A.mean(0), b - b.mean(0)
    matrix = A.mean(0) + strength * (D @ D).mean(0)
    return np.linalg.solve(matrix, b.mean(0) + strength * np.einsum("nij,nj->ni", D, e).mean(0))


def quadratic_run(
    data: fv.Federation, method: fv.Method, start: Start, rounds: int, **options: object
) -> fv.History:
    given: dict = {"lr": 0.1, "loss": "mse", "dtype": torch.float64, **options}
    return fv.train(module_of(start), data, method, rounds, **given)


def deployed_run(
    data: fv.Federation, method: fv.Method, start: Start, rounds: int, **train: object
) -> fv.History:
    """The same through the messages of a deployment, in this process."""
    settings = TrainSettings(rounds=rounds, lr=0.1, dtype="float64", **train)  # type: ignore[arg-type]
    agreed = Agreement(module_of(start), method, "mse", settings, EvaluateSettings(),
                       data.clients, data.input_shape, data.classes)  # fmt: skip
    clients = local_clients(agreed, data)
    history = federate(agreed, FederationSettings(weight_cap=1.0), LocalTransport(clients)).history
    return with_personal(
        history, [v for c in clients if c.personal for v in c.personal.memory.values()]
    )


def grid_run(
    data: fv.Federation, method: fv.Method, start: Start, rounds: int, **train: object
) -> fv.History:
    """The first of three runs that train together, with other numbers and learning rates."""
    members = [
        Member(
            module_of(start),
            msgspec.structs.replace(method, **{k: v * part for k, v in method.numbers.items()}),
            TrainSettings(rounds=rounds, lr=0.1 * part, dtype="float64", **train),  # type: ignore[arg-type]
        )
        for part in (1.0, 0.9, 0.7)
    ]
    return train_grid(members, data, "mse", EvaluateSettings(every=1))[0]


def with_personal(history: fv.History, kept: list[bytes]) -> fv.History:
    """With the personal models that the clients have kept, which the server does not see."""
    if not kept:
        return history
    models = [load_tensors(content) for content in kept]
    stacked = {k: torch.stack([m[k] for m in models]) for k in models[0] if k != ROUNDS}
    return replace(history, state=replace(history.state, personal=stacked))


def run_by(
    engine: str, data: fv.Federation, method: fv.Method, start: Start, rounds: int, **train: object
) -> fv.History:
    """A kernel of this name; "grid": together with other runs; "deployed" and "flower": through
    messages, in this process."""
    if engine == "grid":
        return grid_run(data, method, start, rounds, **train)
    if engine == "deployed":
        return deployed_run(data, method, start, rounds, **train)
    if engine == "flower":
        pytest.importorskip("flwr")
        from grids import flower_run

        return flower_run(data, method, start, rounds, **train)
    return quadratic_run(data, method, start, rounds, engine=engine, **train)


def printed_points(points: Points, engine: str) -> list[tuple[int, tuple[float, ...]]]:
    """(rounds, x) to compare; through Flower's messages, which take longer, the last one only."""
    numbered = list(enumerate(points, start=1))
    return numbered[-1:] if engine == "flower" else numbered


def follows_golden(
    name: str, engine: str = "auto", **options: object
) -> Callable[[fv.Method], None]:
    """x¹, x², x³ from (½, …, ½) with η = 0.1 are the printed ones, to every printed digit."""
    points, tolerance = (
        (GOLDEN[name], PRINTED) if name in GOLDEN else (FURTHER_GOLDEN[name], FURTHER_PRINTED)
    )
    data = golden_federation((7, 3) if name.endswith("7:3") else (1, 1))
    if len(points[0]) == 3:
        data = golden_problem_b()

    def check(method: fv.Method) -> None:
        for rounds, expected in printed_points(points, engine):
            history = run_by(engine, data, method, (0.5,) * len(expected), rounds, **options)
            found = history.state.params["weight"][0]
            gap = float((found - torch.tensor(expected, dtype=torch.float64)).abs().max())
            assert gap <= tolerance, f"x^{rounds} = {found.tolist()}, expected {expected}"

    return check


class Parts(nn.Module):
    """x ↦ body x₁ + head x₂, from (½, ½)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64))
        self.head = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.body + x[:, 1:] * self.head


def follows_fediir(name: str, engine: str = "auto") -> Callable[[fv.Method], None]:
    """FedIIR's rows, of a model whose two coordinates are two parameters."""
    steps = {"local_steps": 2} if name.endswith("two steps") else {}

    def check(method: fv.Method) -> None:
        for rounds, expected in printed_points(FEDIIR[name], engine):
            model = run_by(engine, golden_federation(), method, Parts(), rounds, **steps).model
            found = torch.cat([model["body"], model["head"]])
            gap = float((found - torch.tensor(expected, dtype=torch.float64)).abs().max())
            assert gap <= FURTHER_PRINTED, f"x^{rounds} = {found.tolist()}, expected {expected}"

    return check


def bounded_by_hand(engine: str = "auto") -> Callable[[fv.Method], None]:
    """FairLoss*, λ = ½, b = 0.2: f − F = ∓.3625 and ∇f_i − ∇F = ∓(1, −1.25), so that both clients'
    penalties are .18125 (1, −1.25), of length .290. It is more than 0.2 ‖∇f_1‖ = .224 and less than
    0.2 ‖∇f_2‖ = .424: client 1 has 0.2 √(1.25/2.5625) in the place of .18125.
    """
    mean = (0.2 * (1.25 / 2.5625) ** 0.5 + 0.18125) / 2
    expected = torch.tensor([0.45 - 0.1 * mean, 0.525 + 0.125 * mean], dtype=torch.float64)

    def check(method: fv.Method) -> None:
        found = run_by(engine, golden_federation(), method, (0.5, 0.5), 1)
        gap = float((found.state.params["weight"][0] - expected).abs().max())
        assert gap <= 1e-14, gap

    return check


LOCAL_RULES: dict[str, tuple[dict, Points]] = {  # of FedAvg, by hand in test_trajectories.py
    "momentum": ({"momentum": 0.5, "local_steps": 2}, [(0.395, 0.565)]),
    "weight decay": ({"weight_decay": 0.2}, [(0.44, 0.515), (0.3932, 0.52745)]),
    "schedule": (
        {"schedule": fv.LrSchedule("step", decay=0.5)},
        [(0.45, 0.525), (0.43, 0.535625)],
    ),
}


def follows_rule(name: str, engine: str) -> None:
    """x¹, x², … of FedAvg with this rule of local steps."""
    options, points = LOCAL_RULES[name]
    for rounds, expected in enumerate(points, start=1):
        history = run_by(engine, golden_federation(), fv.FedAvg(), (0.5, 0.5), rounds, **options)
        found = history.state.params["weight"][0]
        gap = float((found - torch.tensor(expected, dtype=torch.float64)).abs().max())
        assert gap <= 1e-14, f"x^{rounds} = {found.tolist()}, expected {expected}"


# -- server weights --------------------------------------------------------------------------------
Rows = list[list[float]]


def weights_by_round(method: fv.Method, losses: Rows, ids: list[list[int]] | None = None) -> Tensor:
    """The server's weights of all rounds, or its memory p where only some clients answer."""
    clients = 4 if ids else len(losses[0])
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


def stays_nearer(method: fv.Method) -> None:
    """After several local steps every local model is nearer to the global one than FedAvg's."""
    near, far = (
        fv.train("multinomial", federation(), m, 1, 0.1, local_steps=4, dtype=torch.float64)
        for m in (method, fv.FedAvg())
    )
    assert bool((near.update_norm < far.update_norm).all()), near.update_norm - far.update_norm


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


def tilted_objective(tilt: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """R_τ."""
    return lambda f, g, w: torch.logsumexp(tilt * f + w.log(), 0) / tilt


def utility_objective(base: float, eps: float = 0.2) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """−Σ r_i log_ε(M − f_i)."""

    def value(f: Tensor, g: Tensor, w: Tensor) -> Tensor:
        u = base - f
        return -w @ torch.where(u >= eps, u.clamp(min=eps).log(), np.log(eps) + (u - eps) / eps)

    return value


def tail_objective(share: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """S_θ in the form of Rockafellar and Uryasev: the minimum over z is at one of the losses."""
    return lambda f, g, w: (f + torch.relu(f - f[:, None]) @ w / share).min()


def pair_objective(strength: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """F + λ Σ_{i<j} |f_i − f_j|, λ = strength · min r / (n − 1)."""

    def value(f: Tensor, g: Tensor, w: Tensor) -> Tensor:
        pairs = (f - f[:, None]).abs().sum() / 2
        return w @ f + strength * w.min() / (len(f) - 1) * pairs

    return value


def semivariance_objective(strength: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """F + β Σ r_i max(f_i − F, 0)²."""
    return lambda f, g, w: w @ f + strength * (w @ torch.relu(f - w @ f) ** 2)


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
    step: float = 1e-3,
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

        expected = slope(value, start, step)
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
        **{f"personal {k}": v for k, v in (history.state.personal or {}).items()},
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
        for kind in ("parameter", "buffer", "personal"):
            parts = [values.pop(k).double().flatten() for k in sorted(values) if k.startswith(kind)]
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
