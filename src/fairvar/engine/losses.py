"""Losses per sample; a client's f_i is their mean over its samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fairvar.errors import BadInput, cause, unknown

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
    if not isinstance(loss, str) or loss not in LOSSES:
        raise unknown("loss", loss, [*LOSSES, "a function (outputs, targets) -> one per sample"])
    return LOSSES[loss]


def check_loss(loss: LossFunction, outputs: Tensor, targets: Tensor, classes: int | None) -> None:
    """Refuse a loss that does not fit the model's outputs and the data, before any training."""
    if loss is cross_entropy and classes is None:
        raise BadInput(_not_labels(targets))
    if loss is half_squared_error and (
        not targets.is_floating_point() or outputs.numel() != targets.numel()
    ):
        raise BadInput(
            f'loss = "mse" needs float targets shaped like the outputs {tuple(outputs.shape)}; '
            f"got {targets.dtype} of shape {tuple(targets.shape)}"
        )
    if classes is not None:
        _check_prediction(loss, outputs, classes)
    shapes = f"outputs of shape {tuple(outputs.shape)}, targets of shape {tuple(targets.shape)}"
    try:
        values = loss(outputs, targets)
    except Exception as error:
        raise BadInput(f"the loss fails on {shapes}: {cause(error)}") from error
    if not isinstance(values, Tensor) or values.shape != (len(targets),):
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise BadInput(
            f"the loss must give one value per sample ({len(targets)},), not {found}; torch's own "
            'losses do so with reduction="none"'
        )
    if not bool(torch.isfinite(values).all()):
        raise BadInput("the loss of the initial model is not finite; check the data and the model")


def _not_labels(targets: Tensor) -> str:
    if targets.is_floating_point():
        return 'loss = "cross_entropy" needs integer labels; for float targets use "mse"'
    shape = tuple(targets.shape[1:])
    return (
        f'loss = "cross_entropy" needs one label per sample, but targets have shape {shape}; give '
        "a loss function with one value per sample, such as the mean over the positions"
    )


def _check_prediction(loss: LossFunction, outputs: Tensor, classes: int) -> None:
    """Accuracy is the share of samples whose label has the largest output: one output per class.
    (For the cross-entropy further outputs are classes that the data lack.)"""
    width = outputs.shape[1] if outputs.dim() == 2 else 0
    fits = width >= classes if loss is cross_entropy else width == classes > 1
    if fits:
        return
    found = (
        f"{width} output{'s' * (width > 1)}"
        if width
        else f"outputs of shape {tuple(outputs.shape[1:])}"
    )
    way = f"make the last layer {max(classes, 2)} wide"
    if loss is not cross_entropy and width > classes:
        way += f", or say classes = {width} where the federation is made"
    elif loss is not cross_entropy:
        way += ", or give float targets (then losses are measured and no accuracy)"
    raise BadInput(
        f"the model has {found} but the data have {classes} classes, and the predicted class is "
        f"the one with the largest output; {way}"
    )
