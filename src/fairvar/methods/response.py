"""AAggFF's response to the clients' losses: one of six distribution functions of f_i / mean f."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

CDFS: dict[str, Callable[[Tensor], Tensor]] = {
    "weibull": lambda z: 1 - torch.exp(-(z**2)),
    "exponential": lambda z: 1 - torch.exp(-z),
    "frechet": lambda z: torch.exp(-1 / z),
    "normal": lambda z: 0.5 * (1 + torch.erf((z - 1) / sqrt(2))),  # the authors' code has erfc
    "gumbel": lambda z: torch.exp(-torch.exp(-(z - 1))),
    "logistic": lambda z: torch.sigmoid(z - 1),
}


def response(loss: Tensor, cdf: str) -> Tensor:
    """The clients' losses as answers in [0, 1], increasing in the loss: CDF(f_i / mean f)."""
    mean = loss.mean()
    return CDFS[cdf](torch.where(mean > 0, loss / mean, 1.0))
