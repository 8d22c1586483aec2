"""Quadratic programs on the simplex: exact after the promised number of iterations, also for the
losses that are hardest for AAggFF."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fairvar as fv
from fairvar.errors import RunFailed
from fairvar.methods import simplex
from fairvar.methods.aaggff import CDFS, VARIANCES, response
from fairvar.methods.base import Replies
from fairvar.methods.simplex import (
    _iterate,
    converge,
    distance_from_minimum,
    enough_iterations,
    minimise_quadratic,
    minimise_within,
    project,
    project_within,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def assert_optimal(p: Tensor, diagonal: float, gram: Tensor, linear: Tensor) -> None:
    """At the minimum the slope is smallest exactly where p > 0."""
    slope = diagonal * p + gram @ p + linear
    size = 1 + float((slope - slope.mean()).abs().max())
    assert abs(float(p.sum()) - 1) < 1e-12
    assert float(p.min()) >= 0
    assert float((slope - slope.min())[p > 1e-9].max()) < 1e-11 * size * (1 + float(gram.norm()))


@pytest.mark.parametrize("n", [1, 2, 10, 50])
@pytest.mark.parametrize("rank", [1, 4, 50])
@pytest.mark.parametrize("size", [1e-6, 1.0, 50.0])
def test_promised_iterations_are_enough_from_any_start(n: int, rank: int, size: float) -> None:
    B = drawn(min(rank, n), n) * size**0.5
    gram, diagonal = B.T @ B, 2.0
    centred = torch.eye(n, dtype=torch.float64) - 1 / n
    largest = float(torch.linalg.matrix_norm(centred @ gram @ centred))  # Frobenius
    iterations = enough_iterations(diagonal, largest, 1e-15)
    room = 1e-12 * math.sqrt(1 + largest / diagonal)  # settling looks at changes, not distances
    for seed, spread in enumerate((0.0, 1e-3, 1.0, 1e2, 1e5)):
        linear = spread * drawn(n, seed=seed)
        start = torch.zeros(n, dtype=torch.float64)
        start[0] = 1
        p = minimise_quadratic(diagonal, gram, linear, start, iterations)
        assert_optimal(p, diagonal, gram, linear)
        assert float(distance_from_minimum(diagonal, gram, linear, p)) < 1e-12
        settled = minimise_quadratic(diagonal, gram, linear, start)
        torch.testing.assert_close(p, settled, rtol=0, atol=room)


@pytest.mark.parametrize(
    "linear", [[1e20, 1e20 + 1e6, 0.0], [1e-30, 0.0, 0.0], [7.0] * 4, [-1e200, 0.0], [3.0]]
)
def test_extreme_slopes(linear: list[float]) -> None:
    c = torch.tensor(linear, dtype=torch.float64)
    gram = torch.outer(c.sign() + 2, c.sign() + 2)
    p = minimise_quadratic(4.0, gram, c, torch.full_like(c, 1 / len(c)), 60)
    torch.testing.assert_close(p, converge(4.0, gram, c, c.softmax(0)), rtol=0, atol=1e-12)
    if len(set(linear)) == 1:
        torch.testing.assert_close(p, torch.full_like(c, 1 / len(c)))


def test_a_gram_whose_squares_overflow() -> None:
    gram = 1e200 * torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    p = minimise_quadratic(1e200, gram, torch.zeros(3, dtype=torch.float64), torch.ones(3).double())
    expected = 1 / torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(p, expected / expected.sum())


def test_number_of_iterations() -> None:
    """Of the rate 1 − 1/√κ; nothing to do but one projection where κ = 1."""
    assert enough_iterations(1.0, 0.0) == 2
    assert enough_iterations(1.0, 3.0, 1e-12) == 1 + math.ceil(math.log(1e-12) / math.log(0.5))


def test_runs_are_solved_together_as_alone() -> None:
    B, c = drawn(3, 4, 6), drawn(3, 6, seed=1)
    gram, start = B.mT @ B, torch.full((3, 6), 1 / 6, dtype=torch.float64)
    gram[1] = torch.nan
    for number in (None, 50):
        both = vmap(lambda G, b, s, k=number: minimise_quadratic(1.0, G, b, s, k))(gram, c, start)
        assert bool(both[1].isnan().all())
        for i in (0, 2):
            alone = minimise_quadratic(1.0, gram[i], c[i], start[i], number)
            torch.testing.assert_close(both[i], alone, rtol=0, atol=1e-14)


def hard_losses(kind: str, clients: int, t: int) -> Tensor:
    f = torch.full((clients,), 1e-6, dtype=torch.float64)
    if kind == "one large":
        f[0] = 1e6
    elif kind == "halves":
        f[: clients // 2 + 1] = 2.0
    elif kind == "in turns":
        f[t % clients] = 1e3
    elif kind == "ties":
        f[:] = 1e-300
    elif kind == "huge":
        f = 1e100 * (1 + torch.arange(clients) / clients).double()
    elif kind == "suddenly others":
        f = torch.linspace(0.1, 3, clients, dtype=torch.float64)
        f = f if t % 40 < 20 else f.flip(0)
    else:
        f = drawn(clients, seed=t).exp()
    return f


KINDS = ["one large", "halves", "in turns", "ties", "huge", "suddenly others", "noise"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["official", "paper"])
@pytest.mark.parametrize("clients", [1, 2, 7, 50])
def test_weights_are_exact_in_every_round(kind: str, variant: str, clients: int) -> None:
    for cdf in CDFS:
        method = fv.AAggFF(cdf=cdf, variant=variant)
        memory, ids = method.initial_memory(clients), torch.arange(clients)
        beta, diagonal = method._strengths(clients)
        share = torch.full((clients,), 1 / clients, dtype=torch.float64)
        for t in range(40 if clients < 50 else 20):
            replies = Replies(hard_losses(kind, clients, t), share, ids, clients)
            weights, memory = method.weigh(memory, replies)
            method.check_memory(memory)
            gram, c = beta * memory["gram"], memory["gradient_sum"]
            assert float(distance_from_minimum(diagonal, gram, c, weights)) < 1e-13
            if t % 20 == 19:
                torch.testing.assert_close(
                    weights, converge(diagonal, gram, c, share), rtol=0, atol=1e-12
                )


@pytest.mark.parametrize("cdf", CDFS)
def test_responses_to_negative_losses_are_probabilities(cdf: str) -> None:
    """Of a loss function of the user's: 1 − e^(−z) of z = −1e9 was infinite."""
    for losses in ([-1.0, 1.0 + 1e-9], [-3.0, 0.0, 5.0], [-1e300, 2e300, 0.0, 1.0]):
        r = response(torch.tensor(losses, dtype=torch.float64).sort().values, cdf)
        assert bool(((r >= 0) & (r <= 1)).all())
        assert bool((r.diff() >= 0).all())


def test_a_thousand_clients() -> None:
    method, clients = fv.AAggFF(), 1000
    memory, ids = method.initial_memory(clients), torch.arange(clients)
    share = torch.full((clients,), 1 / clients, dtype=torch.float64)
    for t in range(5):
        replies = Replies(hard_losses("noise", clients, t), share, ids, clients)
        weights, memory = method.weigh(memory, replies)
        beta, diagonal = method._strengths(clients)
        gram, c = beta * memory["gram"], memory["gradient_sum"]
        assert float(distance_from_minimum(diagonal, gram, c, weights)) < 1e-14


def test_the_hardest_case_that_the_number_of_iterations_is_made_for() -> None:
    """All variance in one direction, as much as promised: half of the clients always lose."""
    clients = 6
    for variant in ("official", "paper"):
        method = fv.AAggFF(variant=variant)
        beta, diagonal = method._strengths(clients)
        assert beta == clients / 4
        g = torch.tensor([1.0, -1.0] * 3, dtype=torch.float64) / math.sqrt(clients)
        gram = VARIANCES / 4 * torch.outer(g, g)
        linear = drawn(clients)
        iterations = enough_iterations(diagonal, VARIANCES / 4)
        start = torch.full((clients,), 1 / clients, dtype=torch.float64)
        p = minimise_quadratic(diagonal, gram, linear, start, iterations)
        assert float(distance_from_minimum(diagonal, gram, linear, p)) < 1e-12


def test_the_round_does_not_depend_on_values() -> None:
    """It traces into one graph of operations: nothing asks for a value."""
    method = fv.AAggFF()
    assert not method.looks_at_values
    memory, ids = method.initial_memory(5), torch.arange(5)
    share = torch.full((5,), 0.2, dtype=torch.float64)

    def weigh(loss: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return method.weigh(memory, Replies(loss, share, ids, 5))

    traced = make_fx(weigh, tracing_mode="real")(torch.rand(5, dtype=torch.float64), memory)
    loss = torch.tensor([5.0, 1.0, 1e-3, 0.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(traced(loss, memory)[0], weigh(loss, memory)[0])


def test_number_of_operations() -> None:
    """On a GPU each is a kernel at least: 9 in an iteration, 14 iterations for 50 clients."""
    gram, c = torch.eye(5, dtype=torch.float64), drawn(5)
    views = ("view", "unsqueeze", "squeeze", "diagonal", "expand")

    def operations(iterations: int) -> int:
        solve = make_fx(lambda G, b: _iterate(2.0, G, b, b, b, iterations))
        nodes = [node for node in solve(gram, c).graph.nodes if node.op == "call_function"]
        return sum(isinstance(node.target, OpOverload) and node.target._opname not in views
                   for node in nodes)  # fmt: skip

    assert operations(3) - operations(2) == 9
    asked = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, given=(), named=None):  # type: ignore[no-untyped-def]
            if function is torch.ops.fairvar.minimise_quadratic.default:
                asked.append(given[-1])
            return function(*given, **(named or {}))

    method, share = fv.AAggFF(), torch.full((50,), 0.02, dtype=torch.float64)
    with Asked():
        method.weigh(method.initial_memory(50), Replies(share, share, torch.arange(50), 50))
    assert asked == [14]


def test_weights_that_are_not_the_minimum_are_noticed() -> None:
    method, ids = fv.AAggFF(), torch.arange(4)
    share = torch.full((4,), 0.25, dtype=torch.float64)
    loss = torch.tensor([0.1, 1.0, 2.0, 3.0], dtype=torch.float64)
    memory = method.initial_memory(4)
    for _ in range(3):
        memory = method.weigh(memory, Replies(loss, share, ids, 4))[1]
    method.check_memory(memory)
    method.check_memory(memory | {"gram": memory["gram"] * torch.nan})  # it diverged: not here
    with pytest.raises(RunFailed, match="from their minimum"):
        method.check_memory(memory | {"p": share})


def test_projection_of_ties_and_extremes() -> None:
    for v in ([0.0] * 5, [1e20, 1e20, 0.0], [-1e300, 1e300], [2.0], [1e-320, 0.0]):
        p = project(torch.tensor(v, dtype=torch.float64))
        assert abs(float(p.sum()) - 1) < 1e-15
        assert float(p.min()) >= 0


# -- within bounds ---------------------------------------------------------------------------------
def bounds(share: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return (share - eps).clamp(min=0), (share + eps).clamp(max=1)


def by_enumeration(gram: Tensor, low: Tensor, high: Tensor) -> tuple[float, Tensor]:
    """The least value over all choices of who is at which bound, by linear systems."""
    n, best = len(gram), (math.inf, low)
    for choice in itertools.product((0, 1, 2), repeat=n):
        at = torch.tensor(choice)
        free = at == 2
        p, m = torch.where(at == 0, low, high) * ~free, int(free.sum())
        if m:
            system = torch.ones(m + 1, m + 1, dtype=torch.float64)
            system[:m, :m], system[m, m] = gram[free][:, free], 0
            right = torch.cat([-(gram[free] @ p), (1 - p.sum()).reshape(1)])
            p[free] = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[:m, 0]
        inside = bool(((p >= low - 1e-12) & (p <= high + 1e-12)).all())
        if inside and abs(float(p.sum()) - 1) < 1e-10 and float(p @ gram @ p) < best[0]:
            best = float(p @ gram @ p), p
    return best


@pytest.mark.parametrize("eps", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["general", "singular", "nearly equal", "in pairs"])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_minimum_within_bounds_is_that_of_enumeration(n: int, kind: str, eps: float) -> None:
    for seed in range(5):
        U = drawn(n, 2 if kind == "singular" else n + 2, seed=seed)
        if kind == "nearly equal":
            U = U[:1] + 1e-3 * U
        if kind == "in pairs":
            U = U[torch.arange(n) // 2]
        U = U / U.norm(dim=1, keepdim=True)
        share = drawn(n, seed=10 + seed).softmax(0)
        low, high = bounds(share, eps)
        value, expected = by_enumeration(U @ U.T, low, high)
        with pytest.MonkeyPatch.context() as patch:
            for _ in range(2):  # the second time by the interior-point method alone
                p = minimise_within(U @ U.T, share, low, high)
                assert abs(float(p.sum()) - 1) < 1e-13
                assert bool(((p >= low) & (p <= high)).all())
                assert float(p @ (U @ U.T) @ p) <= value + 1e-14
                assert float((p @ U - expected @ U).norm()) < 1e-10
                patch.setattr(simplex, "GRADIENT_STEPS", 0)


@pytest.mark.parametrize(
    ("eps", "expected"), [(1.0, [4 / 9, 5 / 18, 5 / 18]), (0.05, [23 / 60, 37 / 120, 37 / 120])]
)
def test_golden_quadratic_program(eps: float, expected: list[float]) -> None:
    gram = torch.tensor([[1, 0, 0], [0, 1, 0.6], [0, 0.6, 1]], dtype=torch.float64)
    share = torch.full((3,), 1 / 3, dtype=torch.float64)
    p = minimise_within(gram, share, *bounds(share, eps))
    torch.testing.assert_close(p, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_minimum_within_bounds_does_not_depend_on_the_order() -> None:
    """Nor does the choice among several minima: rank two, seven clients."""
    for seed in range(10):
        U, share = drawn(7, 2, seed=seed), drawn(7, seed=20 + seed).softmax(0)
        order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
        low, high = bounds(share, 0.2)
        p = minimise_within(U @ U.T, share, low, high)
        V = U[order]
        q = minimise_within(V @ V.T, share[order], low[order], high[order])
        torch.testing.assert_close(q, p[order], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("n", "noise", "eps"), [(40, 1e-4, 1.0), (60, 1e-5, 0.5)])
def test_updates_that_nearly_cancel(n: int, noise: float, eps: float) -> None:
    """Mixtures of ten directions whose mean is zero, and noise: many p are nearly minimal, and
    projected gradient alone does not settle in 100,000 steps."""
    mix = (4 * drawn(n, 10)).softmax(1)
    U = (mix - mix.mean(0)) @ drawn(10, 100, seed=1) + noise * drawn(n, 100, seed=2)
    U = U / U.norm(dim=1, keepdim=True)
    share = torch.full((n,), 1 / n, dtype=torch.float64)
    low, high = bounds(share, eps)
    p = minimise_within(U @ U.T, share, low, high)
    assert abs(float(p.sum()) - 1) < 1e-13
    slope = U @ (p @ U)
    assert float(slope[p > low + 1e-9].max() - slope[p < high - 1e-9].min()) < 1e-12
    assert float((p @ U).norm()) < 0.5 * noise
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    q = minimise_within(U[order] @ U[order].T, share, low, high)
    torch.testing.assert_close(q, p[order], rtol=0, atol=1e-6)
    torch.testing.assert_close(q @ U[order], p @ U, rtol=0, atol=1e-10)


def test_what_is_minimal_stays() -> None:
    share = drawn(5).softmax(0)
    low, high = bounds(share, 0.3)
    same = torch.ones(5, 5, dtype=torch.float64) + 1e-17 * drawn(5, 5)
    torch.testing.assert_close(minimise_within(same, share, low, high), share, rtol=0, atol=1e-15)
    tight = minimise_within(drawn(5, 5) @ drawn(5, 5).T, share, share, share)
    torch.testing.assert_close(tight, share, rtol=0, atol=1e-15)
    bad = same * torch.nan
    assert torch.equal(minimise_within(bad, share, low, high), share)


@pytest.mark.parametrize("mix", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("eps", [0.02, 1.0])
def test_many_clients_meet_the_optimality_conditions(mix: float, eps: float) -> None:
    """Where p is not at a bound the slope is the same; at the lower it may be larger."""
    U = mix**0.5 * drawn(1, 300) + (1 - mix) ** 0.5 * drawn(60, 300, seed=1)
    U = U / U.norm(dim=1, keepdim=True)
    share = torch.full((60,), 1 / 60, dtype=torch.float64)
    low, high = bounds(share, eps)
    p = minimise_within(U @ U.T, share, low, high)
    slope = U @ (p @ U)
    up, down = slope[p < high - 1e-9], slope[p > low + 1e-9]
    assert float(down.max() - up.min()) < 1e-10


def test_projection_within_bounds_is_the_nearest_point() -> None:
    """By bisection of θ in p = clip(v − θ, low, high)."""
    for seed in range(50):
        v, share = 2 * drawn(6, seed=seed), drawn(6, seed=60 + seed).softmax(0)
        low, high = bounds(share, (0.0, 0.05, 0.4, 1.0)[seed % 4])
        a, b = float(v.min()) - 2, float(v.max()) + 2
        for _ in range(200):
            middle = (a + b) / 2
            above = float(torch.clamp(v - middle, low, high).sum()) > 1
            a, b = (middle, b) if above else (a, middle)
        expected = torch.clamp(v - (a + b) / 2, low, high)
        found = project_within(v, low, high)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    every = project_within(v, torch.zeros(6).double(), torch.ones(6).double())
    torch.testing.assert_close(every, project(v), rtol=0, atol=1e-14)
