"""Averages over clients of whom some may lie: their numbers can move them only so far.

At most k of m clients lie, k = ⌈share · m⌉ and always fewer than half of them.
"""

from __future__ import annotations

from math import ceil

from jaxtyping import Float64
from torch import Tensor

from fairvar.deploy.settings import OFF, FederationSettings
from fairvar.engine.server import Combine
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.tree import Tree, tree_map, weighted_sum

ROUNDING = 1e-9  # 0.1 · 30 is a little more than 3


def liars_among(clients: int, share: float) -> int:
    """How many of so many clients may lie."""
    return max(0, min(ceil(share * clients - ROUNDING), (clients - 1) // 2))


def mean_loss(
    loss: Float64[Tensor, " m"], share: Float64[Tensor, " m"], settings: FederationSettings
) -> Float64[Tensor, ""]:
    """a = Σ r_i f_i, where no f_i counts as more than `mean_loss_bound` times the (k+1)-th largest.

    Losses are not negative, so a lie can move the mean far in one direction only: up. What is cut
    of an honest client's loss makes a smaller, which gives that client more weight, not less.
    """
    k, bound = liars_among(len(loss), settings.liars), settings.mean_loss_bound
    if k == 0 or bound >= OFF:
        return share @ loss
    return share @ loss.clamp(max=bound * float(loss.sort(descending=True).values[k]))


def combination(settings: FederationSettings) -> Combine:
    """How the updates of a round, its gradients and its buffers become one."""
    if settings.average == "mean":
        return weighted_sum
    part = 0.5 if settings.average == "median" else settings.liars
    return lambda weights, stacked: trimmed(weights, stacked, part)


def trimmed(weights: Float64[Tensor, " m"], stacked: Tree, part: float) -> Tree:
    """Coordinate by coordinate, the mean without the k largest and the k smallest, times Σ w_i; the
    median if that leaves one or two. For equal weights."""
    m, total = len(weights), float(weights.sum())
    k = liars_among(m, part)

    def middle(leaf: Tensor) -> Tensor:
        kept = leaf.double().sort(0).values[k : m - k]
        return (total * kept.mean(0)).to(leaf.dtype)

    return tree_map(middle, stacked)


def check_average(settings: FederationSettings, method: Method, sums_only: bool = False) -> None:
    """Whether `federation.average` means something: only the plain mean of single replies can be
    replaced by another average."""
    if settings.average == "mean":
        return
    kind, asked = type(method), f"federation.average = {settings.average!r}"
    if sums_only:
        raise BadInput(f"{asked} needs single replies, but secure aggregation tells sums only")
    if kind.weigh is not Method.weigh or kind.normaliser is not Method.normaliser:
        raise BadInput(
            f"{asked} is for methods that take the plain mean of updates, but {method.label} gives "
            "every client a weight of its own; leave it out, or use FedAvg, FairLoss or FairGrad"
        )
    if method.client_weights == "size":
        raise BadInput(
            f"{asked} treats all clients alike, but method.weights is 'size'; give 'uniform'"
        )
