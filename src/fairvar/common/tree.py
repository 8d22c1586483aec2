"""Arithmetic on models: a `Tree` is a dict from parameter name to tensor. `Inputs` are what a model
takes of some samples: one tensor or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Tensor]
Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]  # module(x), module(*x) or module(**x)
COLUMNS = 1 << 16  # of a matrix of updates that are in float64 at once


def tree_map(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    return {name: function(leaf, *(o[name] for o in others)) for name, leaf in tree.items()}


def map_inputs(function: Callable[[Tensor], Any], inputs: Inputs) -> Any:
    """The function of one tensor, or of each of several in their tuple or dict."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, dict):
        return {name: function(part) for name, part in inputs.items()}
    return tuple(function(part) for part in inputs)


def input_parts(inputs: Inputs) -> dict[str, Tensor]:
    """Each tensor by what an error message calls it."""
    if isinstance(inputs, Tensor):
        return {"x": inputs}
    named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    return {f"x[{name!r}]": part for name, part in named}


def one_input(inputs: Inputs) -> Tensor:
    """The first of them: all have the same samples on the same device."""
    return next(iter(input_parts(inputs).values()))


def zeros_like(tree: Tree) -> Tree:
    return tree_map(torch.zeros_like, tree)


def add(a: Tree, b: Tree, factor: float | Tensor = 1.0) -> Tree:
    """a + factor · b"""
    return tree_map(lambda x, y: x + factor * y, a, b)


def subtract(a: Tree, b: Tree) -> Tree:
    return tree_map(torch.sub, a, b)


def scale(tree: Tree, factor: float | Tensor) -> Tree:
    return tree_map(lambda x: x * factor, tree)


def divide(tree: Tree, by: float | Tensor) -> Tree:
    """Without work where the divisor is the number one; in the tree's precision."""
    if isinstance(by, Tensor):
        return tree_map(lambda x: x * (1 / by).to(x.dtype), tree)
    return tree if by == 1 else scale(tree, 1 / by)


def concatenate(trees: list[Tree]) -> Tree:
    """Trees with a leading axis, one after the other."""
    return {name: torch.cat([t[name] for t in trees]) for name in trees[0]}


def stack(trees: Sequence[Tree]) -> Tree:
    """Trees of one shape → one tree whose leaves have a leading axis (client)."""
    return {name: torch.stack([t[name] for t in trees]) for name in trees[0]}


def expand(tree: Tree, n: int) -> Tree:
    """n copies along a new leading axis, without using memory until they are changed."""
    return tree_map(lambda x: x.unsqueeze(0).expand(n, *x.shape), tree)


def weighted_sum(weights: Tensor, stacked: Tree) -> Tree:
    """Σ_i w_i · leaf_i over the leading axis."""
    return tree_map(lambda x: torch.tensordot(weights.to(x.dtype), x, dims=1), stacked)


def typed_as(mean: Tree, model: Tree) -> Tree:
    """With the dtypes of another tree. Whole numbers (batch norm counts) are those below the mean,
    of which a sum of shares may miss 1e-16: 0.9999999999999999 batches are one."""
    found = {}
    for name, leaf in model.items():
        counts = mean[name].is_floating_point() and not leaf.is_floating_point()
        value = (mean[name] + 1e-6).floor() if counts else mean[name]
        found[name] = value.to(leaf.dtype)
    return found


def rows(leaf: Tensor) -> Tensor:
    """One row for each leading index; a parameter may be a single number, or none."""
    return leaf.unsqueeze(-1).flatten(1)


def squared_norm(tree: Tree, batched: bool = False) -> Tensor:
    """‖tree‖² over all leaves; one number per leading index if `batched`."""
    shaped = rows if batched else torch.flatten
    return torch.stack([shaped(x.square()).sum(-1) for x in tree.values()]).sum(0)


def gram(stacked: Tree) -> Tensor:
    """⟨u_i, u_j⟩ over all leaves, for the leading indices i and j, in float64."""
    some = next(iter(stacked.values()))
    total = torch.zeros(len(some), len(some), dtype=torch.float64, device=some.device)
    for leaf in stacked.values():
        for part in rows(leaf).split(COLUMNS, 1):
            wide = part.double()
            total += wide @ wide.T
    return (total + total.T) / 2


def size(tree: Tree) -> int:
    """Number of floats in the tree."""
    return sum(leaf.numel() for leaf in tree.values())


def is_finite(tree: Tree) -> bool:
    return all(bool(torch.isfinite(leaf).all()) for leaf in tree.values())
