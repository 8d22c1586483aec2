"""Losses per sample; a client's f_i is their mean over its samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fairvar.errors import BadInput, unknown

LossFunction = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """½ ‖output − target‖² of each sample; with a linear model every f_i is a quadratic."""
    if outputs.shape != targets.shape:
        outputs = outputs.reshape(targets.shape)  # (b, 1) against (b,); never broadcast
    return (
        0.5 * (outputs - targets).square().flatten(1).sum(1)
        if targets.dim() > 1
        else (0.5 * (outputs - targets).square())
    )


LOSSES: dict[str, LossFunction] = {"cross_entropy": cross_entropy, "mse": half_squared_error}


def resolve_loss(loss: str | LossFunction) -> LossFunction:
    if callable(loss):
        return loss
    if loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    return LOSSES[loss]


def check_loss(loss: LossFunction, outputs: Tensor, targets: Tensor, classes: int | None) -> None:
    """Refuse a loss that does not fit the model's outputs and the data, before any training."""
    if loss is cross_entropy:
        if classes is None:
            raise BadInput(
                'loss = "cross_entropy" needs integer labels; for float targets use "mse"'
            )
        if outputs.dim() < 2 or outputs.shape[1] < classes:
            width = outputs.shape[1] if outputs.dim() > 1 else 0
            raise BadInput(
                f"the model has {width} outputs but the data have {classes} classes; "
                f"make the last layer {classes} wide"
            )
    if loss is half_squared_error and (
        not targets.is_floating_point() or outputs.numel() != targets.numel()
    ):
        raise BadInput(
            f'loss = "mse" needs float targets shaped like the outputs {tuple(outputs.shape)}; '
            f"got {targets.dtype} of shape {tuple(targets.shape)}"
        )
    values = loss(outputs, targets)
    if not isinstance(values, Tensor) or values.shape != (len(targets),):
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise BadInput(f"the loss must give one value per sample ({len(targets)},), not {found}")
    if not bool(torch.isfinite(values).all()):
        raise BadInput("the loss of the initial model is not finite; check the data and the model")
