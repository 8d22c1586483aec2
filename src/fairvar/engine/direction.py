"""Directions of the clients of an affine model in the dual: d_i = X̃_iᵀ along_i + shared_i g."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fairvar.engine.columns import Layout
from fairvar.engine.dual import bend, through_grams
from fairvar.engine.server import Server
from fairvar.tree import Tree


class Sent(NamedTuple):
    """What the clients received beside x^t."""

    mean_loss: Float64[Tensor, " runs"]
    has_g: bool  # even where g itself is not needed: it may join the sum over clients
    g: Tree | None = None
    u: Float[Tensor, "runs outputs P"] | None = None  # X̃ g, where something is multiplied with g
    squared_g: Float64[Tensor, "runs 1"] | None = None  # ‖g‖², where directions are cut


class Look(NamedTuple):
    """What the clients of a layout see in one step."""

    layout: Layout
    slope: Float[Tensor, "runs outputs P"]  # ∇f_i = X̃_iᵀ slope_i
    p: Float[Tensor, "runs outputs P"] | None  # for the second derivative of the loss
    u: Float[Tensor, "runs outputs P"] | None
    grams: Callable[[], list[Tensor]]  # K_i, made only where they are needed


class Direction(NamedTuple):
    along: Float[Tensor, "runs outputs P"]
    shared: Float64[Tensor, "runs m"] | None  # None: zero
    own: Float64[Tensor, "runs m"] | None  # None: one


def direction(
    server: Server,
    look: Look,
    loss: Float64[Tensor, "runs m"],
    sent: Sent,
    clip_norm: float | None,
) -> Direction:
    """along_i = own_i D_i + γ J_i (K_i D_i − U_i), cut to the norm that is allowed."""
    layout, along, own, shared = look.layout, look.slope, None, None
    if not server.plain:
        own, shared = server.coefficients(loss, sent.mean_loss)
        along, shared = along * layout.spread(own), shared if sent.has_g else None
    if server.method.uses_curvature:
        moved = through_grams(layout, look.grams(), look.slope)
        bent = bend(look.p, moved if look.u is None else moved - look.u)
        strength = per_run(server.curvature, layout.share.dtype)
        along = torch.addcmul(along, bent, layout.share * strength)
    if clip_norm is not None:
        norms = squared_lengths(layout, look.grams(), along, shared, look.u, sent.squared_g)
        cut = torch.clamp(clip_norm / norms.sqrt(), max=1.0)
        along, shared = along * layout.spread(cut), None if shared is None else shared * cut
    return Direction(along, shared, own)


def per_run(value: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """A number, or one per run, as a factor of (runs, outputs, columns)."""
    if not isinstance(value, Tensor):
        return value
    return value.to(dtype).unsqueeze(-1) if value.dim() else value.to(dtype)


def squared_lengths(
    layout: Layout,
    grams: list[Tensor],
    along: Float[Tensor, "runs outputs P"],
    shared: Float64[Tensor, "runs m"] | None,
    u: Float[Tensor, "runs outputs P"] | None,
    squared_g: Float64[Tensor, "runs 1"] | None,
) -> Float64[Tensor, "runs m"]:
    """‖X̃_iᵀ along_i + shared_i g‖² = ⟨B, K B⟩ + 2 s ⟨B, U⟩ + s² ‖g‖²"""
    found = layout.sums((along * through_grams(layout, grams, along)).sum(1))
    if shared is None or u is None or squared_g is None:
        return found.clamp(min=0)
    found = found + 2 * shared * layout.sums((along * u).sum(1)) + shared**2 * squared_g
    return found.clamp(min=0)  # rounding may leave a length of nothing below zero
