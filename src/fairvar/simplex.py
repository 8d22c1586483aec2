"""The probability simplex: projection onto it, and quadratic programs over it (AFL, AAggFF)."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from fairvar.errors import RunFailed


def project(v: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """argmin_p ‖p − v‖ over p ≥ 0, Σ p = 1: shift by θ and cut at zero.

    With u = v sorted downwards, k is the last index with k·u_k > Σ_{j≤k} u_j − 1 and
    θ = (Σ_{j≤k} u_j − 1) / k. A constant added to v does not change the result.
    """
    u = torch.sort(v, descending=True).values
    excess = torch.cumsum(u, 0) - 1
    k = torch.arange(1, len(v) + 1, dtype=v.dtype, device=v.device)
    last = (k * u > excess).sum() - 1
    theta = excess[last] / k[last]
    return torch.clamp(v - theta, min=0)


def minimise_quadratic(
    diagonal: float,
    gram: Float64[Tensor, "n n"],
    linear: Float64[Tensor, " n"],
    start: Float64[Tensor, " n"],
    tolerance: float = 1e-13,
    most_iterations: int = 100_000,
) -> Float64[Tensor, " n"]:
    """argmin over the simplex of ⟨linear, p⟩ + ½ pᵀ (diagonal·I + gram) p, gram ⪰ 0.

    Projected gradient with the constant momentum of strongly convex problems. The trace of `gram`
    bounds its largest eigenvalue; it is nearly tight here because AAggFF's gradients are almost
    parallel.
    """
    largest = diagonal + float(torch.trace(gram))
    root = (largest / diagonal) ** 0.5
    momentum = (root - 1) / (root + 1)
    p = project(start)
    ahead = p
    for _ in range(most_iterations):
        following = project(ahead - (diagonal * ahead + gram @ ahead + linear) / largest)
        change = float((following - p).abs().max())
        ahead = following + momentum * (following - p)
        p = following
        if change < tolerance:
            return p
    raise RunFailed(f"the weights did not settle in {most_iterations} iterations (change {change})")
