"""The probability simplex: projection onto it, and quadratic programs over it (AFL, AAggFF) or its
part within bounds (FedMGDA+)."""

from __future__ import annotations

from math import ceil, log, sqrt
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from fairvar.errors import RunFailed

TOGETHER = 8  # iterations between two looks at the residual
MOST_ITERATIONS = 100_000
SETTLED = 1e-13
GRADIENT_STEPS = 1000  # of `minimise_within`, before it uses the interior-point method
NEWTON_STEPS = 60  # at most, of that method
NEARLY_SETTLED = 1e-9  # the largest distance that is accepted after them
RANK = 1e-11  # eigenvalues below this share of the largest are zero
ROUNDING = 1e-14  # of products, as a share of the largest


def project(v: Float64[Tensor, "*runs n"]) -> Float64[Tensor, "*runs n"]:
    """argmin_p ‖p − v‖ over p ≥ 0, Σ p = 1: shift by θ and cut at zero.

    A constant added to v does not change the result, so the largest is made zero first: next to
    1e20 the 1 would be lost.
    """
    return _cut(v - v.amax(-1, keepdim=True), _counts(v))


def _counts(v: Tensor) -> Tensor:
    return torch.arange(1, v.shape[-1] + 1, dtype=v.dtype, device=v.device)


def _cut(v: Tensor, counts: Tensor) -> Tensor:
    """With u = v sorted downwards, θ = max_k (Σ_{j≤k} u_j − 1) / k."""
    u = torch.sort(v, descending=True).values
    theta = ((torch.cumsum(u, -1) - 1) / counts).amax(-1, keepdim=True)
    return torch.clamp(v - theta, min=0)


def minimise_quadratic(
    diagonal: float,
    gram: Float64[Tensor, "n n"],
    linear: Float64[Tensor, " n"],
    start: Float64[Tensor, " n"],
    iterations: int | None = None,
) -> Float64[Tensor, " n"]:
    """argmin over the simplex of ⟨linear, p⟩ + ½ pᵀ (diagonal·I + gram) p, gram ⪰ 0.

    By default it iterates to convergence, which needs the host, so it cannot be part of a recorded
    round. With `iterations` it makes exactly that many (see `enough_iterations`). Both support
    vmap: the problems of all runs of a grid are solved together.
    """
    return _solve(diagonal, gram, linear, start, iterations or 0)


def enough_iterations(diagonal: float, largest: float, factor: float = 1e-12) -> int:
    """How many iterations divide the distance to the minimum by 1 / factor, if no eigenvalue of
    `gram` on {Σ v = 0} exceeds `largest`: with κ = 1 + largest / diagonal, one iteration leaves
    1 − 1/√κ of the distance (and at least one is needed)."""
    left = 1 - 1 / sqrt(1 + largest / diagonal)
    return 1 + ceil(log(factor) / log(left)) if left > factor else 2


def distance_from_minimum(
    diagonal: float,
    gram: Float64[Tensor, "*runs n n"],
    linear: Float64[Tensor, "*runs n"],
    p: Float64[Tensor, "*runs n"],
) -> Float64[Tensor, " *runs"]:
    """How far one gradient step with projection moves p: zero at the minimum alone."""
    largest, _ = _pace(diagonal, gram)
    slope = diagonal * p + (gram @ p.unsqueeze(-1)).squeeze(-1) + linear
    return (project(p - slope / largest) - p).abs().amax(-1)


@torch.library.custom_op(
    "fairvar::minimise_quadratic",
    mutates_args=(),
    schema="(float diagonal, Tensor gram, Tensor linear, Tensor start, int iterations) -> Tensor",
)
def _solve(diagonal: float, gram: Tensor, linear: Tensor, start: Tensor, iterations: int) -> Tensor:
    p = start + (1 - start.sum(-1, keepdim=True)) / start.shape[-1]
    if iterations:
        return _iterate(diagonal, gram, linear, p, p, iterations)[0]
    return converge(diagonal, gram, linear, p)


@_solve.register_vmap
def _solve_together(
    info: Any, in_dims: tuple[int | None, ...], diagonal: float, *given: Any
) -> tuple[Tensor, int]:
    *problem, iterations = given
    stacked = [
        value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)
        for value, axis in zip(problem, in_dims[1:], strict=False)
    ]
    gram, linear, start = stacked
    return _solve(diagonal, gram, linear, start, iterations), 0


def converge(
    diagonal: float,
    gram: Float64[Tensor, "*runs n n"],
    linear: Float64[Tensor, "*runs n"],
    start: Float64[Tensor, "*runs n"],
) -> Float64[Tensor, "*runs n"]:
    """Iterates from a point with Σ p = 1 until all runs have converged; each keeps its p from then.
    A run that diverged stays NaN and does not prolong the iteration."""
    p = ahead = start
    moving = torch.ones_like(p[..., :1], dtype=torch.bool)
    for _ in range(0, MOST_ITERATIONS, TOGETHER):
        new, ahead, before = _iterate(diagonal, gram, linear, p, ahead, TOGETHER)
        change = (new - before).abs().amax(-1)
        p = torch.where(moving, new, p)
        moving = moving & (change >= SETTLED).unsqueeze(-1)
        if not bool(moving.any()):
            return p
    raise RunFailed(f"the weights did not settle in {MOST_ITERATIONS} iterations "
                    f"(change {float(change.max())})")  # fmt: skip


def _iterate(
    diagonal: float, gram: Tensor, linear: Tensor, p: Tensor, ahead: Tensor, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Projected gradient with the constant momentum of strongly convex problems; also returns the
    point ahead, and the last p but one. Few operations, because each is a kernel on a GPU."""
    largest, momentum = _pace(diagonal, gram)
    scale = -1 / largest
    shift = linear * scale
    shift = shift - shift.amax(-1, keepdim=True)  # as in `project`, once for all iterations
    # The gradient step is one product, because Σ ahead = 1: shift = shift Σ ahead.
    matrix = torch.addcmul(shift.unsqueeze(-1), gram, scale.unsqueeze(-1))
    matrix.diagonal(dim1=-2, dim2=-1).add_(1 + diagonal * scale)
    counts, before = _counts(linear), p
    for _ in range(iterations):
        before = p
        p = _cut((matrix @ ahead.unsqueeze(-1)).squeeze(-1), counts)
        ahead = torch.lerp(before, p, momentum)
    return p, ahead, before


def _pace(diagonal: float, gram: Tensor) -> tuple[Tensor, Tensor]:
    """A bound of the largest eigenvalue of diagonal·I + gram on {Σ v = 0}, and 1 + momentum.

    p moves inside Σ p = 1, so what `gram` does along (1, …, 1) does not matter, and for AAggFF,
    whose gradients are almost parallel to it, that is most of `gram`. The others are bounded by
    their sum (the trace) and, mostly far better, by the root of the sum of their squares
    (Frobenius' norm); with P = I − 11ᵀ/n both are those of P gram P.
    """
    n, rows = gram.shape[-1], gram.mean(-1)
    mean, length = rows.mean(-1), torch.linalg.vector_norm(rows, dim=-1)
    trace = torch.sub(gram.diagonal(dim1=-2, dim2=-1).sum(-1), mean, alpha=n)
    squares = torch.linalg.vector_norm(gram, dim=(-2, -1)).square()
    squares = torch.addcmul(squares, length, length, value=-2 * n)
    squares = torch.addcmul(squares, mean, mean, value=n**2)
    bound = torch.fmin(trace, squares.clamp(min=0).sqrt())  # squares may overflow
    largest = diagonal + bound.clamp(min=0).unsqueeze(-1)
    root = (largest / diagonal).sqrt()
    return largest, 2 - 2 / (root + 1)


# -- within bounds ---------------------------------------------------------------------------------
def project_within(
    v: Float64[Tensor, " n"], low: Float64[Tensor, " n"], high: Float64[Tensor, " n"]
) -> Float64[Tensor, " n"]:
    """argmin_p ‖p − v‖ over low ≤ p ≤ high, Σ p = 1: p = clip(v − θ, low, high).

    Σ p falls with θ: not at all below v_i − high_i and above v_i − low_i, with slope one between.
    """
    ends, order = torch.cat([v - high, v - low]).sort()
    turns = torch.cat([-torch.ones_like(v), torch.ones_like(v)])[order]
    slope = turns.cumsum(0)[:-1]
    total = high.sum() + torch.cat([torch.zeros_like(v[:1]), (slope * ends.diff()).cumsum(0)])
    last = (total >= 1).sum().clamp(min=1, max=len(slope)) - 1  # the piece in which Σ p = 1
    steep = slope.take(last).clamp(max=-1)  # of a flat piece every θ is right
    return torch.clamp(v - ends.take(last) - (1 - total.take(last)) / steep, low, high)


def minimise_within(
    gram: Float64[Tensor, "n n"],
    start: Float64[Tensor, " n"],
    low: Float64[Tensor, " n"],
    high: Float64[Tensor, " n"],
) -> Float64[Tensor, " n"]:
    """argmin over low ≤ p ≤ high, Σ p = 1 of pᵀ gram p, where gram ⪰ 0 may be singular.

    Projected gradient with momentum, which starts anew when it overshoots, finds the bounds that
    hold. One linear system then gives the minimum between them. Where updates nearly cancel, so
    that many p are nearly minimal, this converges slowly; then an interior-point method solves the
    problem. All steps are symmetric in the clients: where several p are minimal, the one found does
    not depend on their order, and it is `start` if that is minimal, or if `gram` is not finite. It
    asks the host when to stop.
    """
    problem = Within(*_centred(gram), low, high)
    p = ahead = start
    speed = 1.0
    for number in range(GRADIENT_STEPS):
        if number % TOGETHER == 0:
            for find in (lambda p: p, problem.between):
                found = find(p)
                if not bool(problem.distance(found) > SETTLED):  # also NaN
                    return found
        new = problem.step(ahead)
        if bool((ahead - new) @ (new - p) > 0):  # uphill
            p, ahead, speed = new, new, 1.0
            continue
        faster = (1 + sqrt(1 + 4 * speed**2)) / 2
        p, ahead, speed = new, new + (speed - 1) / faster * (new - p), faster
    found = problem.from_inside()
    far = float(problem.distance(found))
    if far > NEARLY_SETTLED:
        raise RunFailed(f"the weights did not settle (distance {far})")
    return found


def _centred(gram: Tensor) -> tuple[Tensor, Tensor]:
    """A and b, for which ½ pᵀ A p + bᵀ p is pᵀ gram p up to a constant and a factor where Σ p = 1.
    No eigenvalue of A exceeds one. Both are zero if all that the clients differ in is rounding."""
    rows = gram.mean(0)
    A, b = gram - rows - rows[:, None] + rows.mean(), rows - rows.mean()
    size = torch.linalg.matrix_norm(A)
    scale = torch.where(size <= ROUNDING * torch.linalg.matrix_norm(gram), torch.inf, size)
    return A / scale, b / scale


class Within(NamedTuple):
    """½ pᵀ A p + bᵀ p on low ≤ p ≤ high, Σ p = 1."""

    A: Tensor
    b: Tensor
    low: Tensor
    high: Tensor

    def step(self, p: Tensor) -> Tensor:
        """A gradient step, projected."""
        return project_within(p - self.A @ p - self.b, self.low, self.high)

    def distance(self, p: Tensor) -> Tensor:
        """How far a step moves p: zero at a minimum alone."""
        return (self.step(p) - p).abs().amax()

    def from_inside(self) -> Tensor:
        """A minimum, by an interior-point method.

        With p = low + down = high − up and multipliers z of the bounds, all positive, each Newton
        step aims at A p + b − z_low + z_high = (y, …, y), Σ p = 1, down · z_low = up · z_high = t,
        where t falls to zero. At the end p_i is at a bound where its distance is less than z_i.
        """
        wide = self.high > self.low
        A, b = self.A[wide][:, wide], (self.A @ self.low + self.b)[wide]
        width = (self.high - self.low)[wide]
        down = (1 - self.low.sum()) / width.sum() * width
        up = width - down
        z_low = z_high = ones = torch.ones_like(width)
        for _ in range(NEWTON_STEPS):
            t = (down @ z_low + up @ z_high) / (20 * len(ones))  # a tenth of the mean product
            if bool(t < SETTLED**2):
                break
            bent = A + (z_low / down + z_high / up + ROUNDING).diag()  # never singular
            slope = A @ down + b - t / down + t / up
            across = torch.linalg.solve(bent, torch.stack([slope, ones], 1))
            y = across[:, 0].sum() / across[:, 1].sum()
            move = y * across[:, 1] - across[:, 0]
            rise_low = (t - z_low * move) / down - z_low
            rise_high = (t + z_high * move) / up - z_high
            falls = [-move / down, move / up, -rise_low / z_low, -rise_high / z_high]
            step = 0.99 / torch.cat(falls).amax().clamp(min=0.99)  # all stay positive
            down, up = down + step * move, up - step * move
            z_low, z_high = z_low + step * rise_low, z_high + step * rise_high
        down = torch.where(down < z_low, 0.0, torch.where(up < z_high, width, down))
        found = self.low + torch.zeros_like(self.low).masked_scatter(wide, down)
        return project_within(found, self.low, self.high)

    def between(self, p: Tensor) -> Tensor:
        """The minimum nearest to p if those at a bound stay there and no other bound mattered: with
        Q the projection on {v: Σ v = 0, v = 0 at bounds}, p − (Q A Q)⁺ (A p + b)."""
        free = ((p > self.low) & (p < self.high)).double()
        Q = free.diag() - torch.outer(free, free) / free.sum().clamp(min=1)
        bent = torch.linalg.pinv(Q @ self.A @ Q, rtol=RANK, hermitian=True)
        return project_within(p - bent @ (self.A @ p + self.b), self.low, self.high)
