"""The probability simplex: projection onto it, and quadratic programs over it (AFL, AAggFF)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from fairvar.errors import RunFailed


def project(v: Float64[Tensor, "*runs n"]) -> Float64[Tensor, "*runs n"]:
    """argmin_p ‖p − v‖ over p ≥ 0, Σ p = 1: shift by θ and cut at zero.

    With u = v sorted downwards, k is the last index with k·u_k > Σ_{j≤k} u_j − 1 and
    θ = (Σ_{j≤k} u_j − 1) / k. A constant added to v does not change the result, so the largest is
    made zero first: next to 1e20 the 1 would be lost.
    """
    v = v - v.amax(-1, keepdim=True)
    u = torch.sort(v, descending=True).values
    excess = torch.cumsum(u, -1) - 1
    k = torch.arange(1, v.shape[-1] + 1, dtype=v.dtype, device=v.device)
    last = (k * u > excess).sum(-1, keepdim=True) - 1
    theta = torch.take_along_dim(excess, last, -1) / (last + 1)
    return torch.clamp(v - theta, min=0)


def minimise_quadratic(
    diagonal: float,
    gram: Float64[Tensor, "n n"],
    linear: Float64[Tensor, " n"],
    start: Float64[Tensor, " n"],
) -> Float64[Tensor, " n"]:
    """argmin over the simplex of ⟨linear, p⟩ + ½ pᵀ (diagonal·I + gram) p, gram ⪰ 0.

    May be vmapped, although the number of iterations depends on the data: runs that train
    together are solved together, and each keeps its p from the iteration where it settled.
    """
    return _solve(diagonal, gram, linear, start)


@torch.library.custom_op(
    "fairvar::minimise_quadratic",
    mutates_args=(),
    schema="(float diagonal, Tensor gram, Tensor linear, Tensor start) -> Tensor",
)
def _solve(diagonal: float, gram: Tensor, linear: Tensor, start: Tensor) -> Tensor:
    return settle(diagonal, gram, linear, start)


@_solve.register_vmap
def _solve_together(
    info: Any, in_dims: tuple[int | None, ...], diagonal: float, *problem: Tensor
) -> tuple[Tensor, int]:
    stacked = [
        value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)
        for value, axis in zip(problem, in_dims[1:], strict=True)
    ]
    gram, linear, start = stacked
    return _solve(diagonal, gram, linear, start), 0


def settle(
    diagonal: float,
    gram: Float64[Tensor, "*runs n n"],
    linear: Float64[Tensor, "*runs n"],
    start: Float64[Tensor, "*runs n"],
    tolerance: float = 1e-13,
    most_iterations: int = 100_000,
) -> Float64[Tensor, "*runs n"]:
    """Projected gradient with the constant momentum of strongly convex problems.

    The trace of `gram` bounds its largest eigenvalue; it is nearly tight here because AAggFF's
    gradients are almost parallel. A run whose numbers are not finite (it diverged) stays NaN and
    is not waited for.
    """
    largest = diagonal + gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    root = (largest / diagonal).sqrt()
    momentum = (root - 1) / (root + 1)
    p = project(start)
    ahead, moving = p, torch.ones_like(largest, dtype=torch.bool)
    for _ in range(most_iterations):
        slope = diagonal * ahead + (gram @ ahead.unsqueeze(-1)).squeeze(-1) + linear
        following = torch.where(moving, project(ahead - slope / largest), p)
        change = (following - p).abs().amax(-1, keepdim=True)
        ahead = following + momentum * (following - p)
        p = following
        moving = moving & (change >= tolerance)
        if not bool(moving.any()):
            return p
    worst = float(change.max())
    raise RunFailed(f"the weights did not settle in {most_iterations} iterations (change {worst})")
