"""The four objectives, from what clients know: losses f_i, gradients g_i and curvature H_i.

    F   = Σ w_i f_i                                  average
    L_λ = F + λ/2 Σ w_i (f_i − F)²                   loss_variance
    J_γ = F + γ/2 Σ w_i ‖g_i − ḡ‖²,  ḡ = Σ w_i g_i   gradient_variance
    H_q = Σ w_i f_i^(q+1) / (q + 1)                  qffl

Weights are 1/n unless given; the same weights stand in F, in ḡ and in the variance, for mixing
uniform and size weights breaks every gradient formula below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fairvar.errors import BadInput

Losses = Float[Tensor, " n"]
Gradients = Float[Tensor, "n d"]
Hessians = Float[Tensor, "n d d"]
Number = float | int  # beartype, unlike mypy, does not take an int for a float
Curvature = Callable[[Tensor], Tensor]  # v (n, d) → H_i v_i (n, d)


class Objective(NamedTuple):
    """A value and its gradient with respect to the parameters (None: not enough was given)."""

    value: Float[Tensor, ""]
    gradient: Float[Tensor, " d"] | None = None


def average(
    loss: Losses, gradient: Gradients | None = None, weights: Losses | None = None
) -> Objective:
    """F = Σ w_i f_i,   ∇F = Σ w_i g_i"""
    w = _weights(loss, weights)
    return Objective(w @ loss, None if gradient is None else w @ gradient)


def loss_variance(
    loss: Losses,
    strength: Number,
    gradient: Gradients | None = None,
    weights: Losses | None = None,
) -> Objective:
    """L_λ = F + λ/2 Σ w_i (f_i − F)²,   ∇L_λ = Σ w_i β_i g_i,   β_i = 1 + λ (f_i − F)

    β_i < 0 for a client with f_i < F − 1/λ: its own loss is pushed up.
    """
    _non_negative("strength", strength)
    w = _weights(loss, weights)
    excess = loss - w @ loss
    value = w @ loss + strength / 2 * (w @ excess.square())
    if gradient is None:
        return Objective(value)
    beta = 1 + strength * excess
    return Objective(value, (w * beta) @ gradient)


def gradient_variance(
    loss: Losses,
    gradient: Gradients,
    strength: Number,
    curvature: Curvature | Hessians | None = None,
    weights: Losses | None = None,
) -> Objective:
    """J_γ = F + γ/2 Σ w_i ‖g_i − ḡ‖²,   ∇J_γ = ḡ + γ Σ w_i H_i (g_i − ḡ)

    `curvature` is a function v ↦ H_i v_i for all clients at once, or the Hessians themselves;
    without it there is no gradient. That ḡ depends on the parameters too adds nothing, because
    Σ w_i (g_i − ḡ) = 0.
    """
    _non_negative("strength", strength)
    w = _weights(loss, weights)
    mean_gradient = w @ gradient
    excess = gradient - mean_gradient
    value = w @ loss + strength / 2 * (w @ excess.square().sum(1))
    if curvature is None:
        return Objective(value)
    if isinstance(curvature, Tensor):
        bent = torch.einsum("nij,nj->ni", curvature, excess)
    else:
        bent = curvature(excess)
        if bent.shape != excess.shape:
            raise BadInput(
                f"curvature returned shape {tuple(bent.shape)}; H_i v_i for all clients has "
                f"shape {tuple(excess.shape)}"
            )
    return Objective(value, mean_gradient + strength * (w @ bent))


def qffl(
    loss: Losses,
    q: Number,
    gradient: Gradients | None = None,
    weights: Losses | None = None,
) -> Objective:
    """H_q = Σ w_i f_i^(q+1) / (q + 1),   ∇H_q = Σ w_i f_i^q g_i   (losses ≥ 0; q = 0 is F)"""
    _non_negative("q", q)
    if bool((loss < 0).any()):
        raise BadInput(f"q-FFL needs losses ≥ 0 but one is {float(loss.detach().min()):.3g}")
    w = _weights(loss, weights)
    value = w @ loss.pow(q + 1) / (q + 1)
    return Objective(value, None if gradient is None else (w * loss.pow(q)) @ gradient)


def _weights(loss: Losses, weights: Losses | None) -> Losses:
    n = len(loss)
    if n == 0:
        raise BadInput("no client given; losses are empty")
    if weights is None:
        return loss.new_full((n,), 1 / n)
    if len(weights) != n:
        raise BadInput(f"weights has {len(weights)} entries for {n} clients; give one each")
    total = float(weights.detach().sum())
    if not abs(total - 1) <= 1e-5 or bool((weights < 0).any()):
        raise BadInput(f"weights sum to {total:.6g}; give numbers ≥ 0 with sum 1 (w / w.sum())")
    exact = weights.to(loss)
    return exact / exact.sum()  # float32 weights sum to 1 only roughly in float64


def _non_negative(name: str, value: Number) -> None:
    if not 0 <= value < float("inf"):
        raise BadInput(f"{name} = {value} must be a finite number ≥ 0 (0 is the average loss)")
