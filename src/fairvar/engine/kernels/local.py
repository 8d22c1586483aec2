"""What clients do with their directions, in the same way in all vectorised kernels.

The penalty p = d − ∇f of a bounded method is shortened to b ‖∇f‖ where it is longer.

How a client moves along its direction d in the local steps of a round, from v = 0:

v ← momentum · v + d + pull (y − x) + weight_decay · y,     y ← y − η v
"""

from __future__ import annotations

import torch
from torch import Tensor

from fairvar.engine.run import Run
from fairvar.tree import Tree, add, squared_norm, subtract, tree_map


def shortening(penalty: Tensor, gradient: Tensor, bound: float | Tensor) -> Tensor:
    """s with s ‖p‖ ≤ b ‖∇f‖, from both squared norms; one where the penalty is short enough."""
    most = bound**2 * gradient
    return torch.where(penalty > most, (most / penalty).sqrt(), 1.0)


def shortened(own: Tensor, factor: Tensor) -> Tensor:
    """The factor of a client's own gradient, 1 + s (own − 1), after its penalty was shortened."""
    return torch.where(factor < 1, 1 + factor * (own - 1), own)


def bounded(
    gradient: Tree, direction: Tree, own: Tensor, bound: float | Tensor
) -> tuple[Tree, Tensor]:
    """∇f + s p and its factor of the own gradient; d itself, bit by bit, where s is one."""
    penalty = subtract(direction, gradient)
    s = shortening(squared_norm(penalty), squared_norm(gradient), bound).to(own.dtype)
    found = tree_map(lambda d, g, p: torch.where(s < 1, g + s * p, d), direction, gradient, penalty)
    return found, shortened(own, s)


def velocity(
    run: Run, pull: float | Tensor, x: Tree, y: Tree, direction: Tree, before: Tree | None
) -> Tree:
    """v of the next step; `before` is that of the last one, None in the first. `x` is the model
    that the clients received; y, directions and velocities may have the client as first axis."""
    found = direction
    if isinstance(pull, Tensor) or pull != 0:
        found = tree_map(lambda d, yi, xi: d + pull * (yi - xi), found, y, x)
    if run.weight_decay:
        found = add(found, y, run.weight_decay)
    if before is not None and run.momentum:
        found = add(found, before, run.momentum)
    return found
