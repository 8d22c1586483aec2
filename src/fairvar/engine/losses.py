"""Losses per sample; a client's f_i is their mean over its samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fairvar.data.dataset import IGNORED
from fairvar.errors import BadInput, cause, unknown
from fairvar.scores import ACCURACY, LOSS, OF_LABELS, OF_NUMBERS, Metric, metric_of

LossFunction = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log softmax of the right class. For sequences, outputs (b, …, classes) and targets (b, …):
    the mean over the positions that have a target."""
    if targets.dim() == 1:
        return functional.cross_entropy(outputs, targets, reduction="none")
    real = targets != IGNORED
    at = torch.where(real, targets, 0).unsqueeze(-1)
    found = -functional.log_softmax(outputs, -1).gather(-1, at).squeeze(-1)
    total = torch.where(real, found, 0.0).flatten(1).sum(1)
    return total / real.flatten(1).sum(1).clamp(min=1)


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """½ ‖output − target‖² of each sample; with a linear model every f_i is a quadratic."""
    if outputs.shape != targets.shape:
        outputs = outputs.reshape(targets.shape)  # (b, 1) against (b,); never broadcast
    squares = (outputs - targets).square()
    return 0.5 * (squares.flatten(1).sum(1) if targets.dim() > 1 else squares)


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
        raise BadInput('loss = "cross_entropy" needs integer labels; for float targets use "mse"')
    if loss is half_squared_error and (
        not targets.is_floating_point() or outputs.numel() != targets.numel()
    ):
        raise BadInput(
            f'loss = "mse" needs float targets shaped like the outputs {tuple(outputs.shape)}; '
            f"got {targets.dtype} of shape {tuple(targets.shape)}"
        )
    if classes is not None and targets.dim() == 1:
        _check_prediction(loss, outputs, classes)
    elif loss is cross_entropy and not has_answers(outputs, targets, classes):
        raise BadInput(
            f"targets of shape {tuple(targets.shape[1:])} are labels of positions, so the model "
            f"must have outputs of shape {(*targets.shape[1:], classes)}, classes last, not "
            f"{tuple(outputs.shape[1:])}; if a sample has one label, "
            "give y as an array (samples,)"
        )
    values = _values(loss, outputs, targets)
    _values(loss, outputs[:1], targets[:1])
    if not bool(torch.isfinite(values).all()):
        raise BadInput("the loss of the initial model is not finite; check the data and the model")


def _values(loss: LossFunction, outputs: Tensor, targets: Tensor) -> Tensor:
    """The losses of samples, one each; of copies, since a loss may change its arguments."""
    shapes = f"outputs of shape {tuple(outputs.shape)}, targets of shape {tuple(targets.shape)}"
    given = outputs.clone(), targets.clone()
    try:
        values = loss(*given)
    except Exception as error:
        raise BadInput(f"the loss fails on {shapes}: {cause(error)}") from error
    for now, before in zip(given, (outputs, targets), strict=True):
        if not torch.allclose(now, before, rtol=0, atol=0, equal_nan=True):
            raise BadInput("the loss changes outputs or targets in place; let it change copies, "
                           "such as outputs.clone()")  # fmt: skip
    if not isinstance(values, Tensor) or values.shape != (len(targets),):
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise BadInput(
            f"the loss must give one value per sample ({len(targets)},), not {found}; torch's own "
            'losses do so with reduction="none" and a mean over further axes'
        )
    return values


def choose_metric(given: object, loss: str | LossFunction, classes: int | None) -> Metric:
    """The requested metric, if it fits the task; by default the accuracy of labels, or the loss if
    there are none."""
    if given is None:
        return LOSS if classes is None else ACCURACY
    metric = metric_of(given)
    if metric.name in OF_LABELS and classes is None:
        raise BadInput(f'metric = "{metric.name}" needs one label per sample; for other targets '
                       'use "loss", "rmse", "r2" or a Metric of your own')  # fmt: skip
    if metric.name in OF_NUMBERS and classes is not None:
        raise BadInput(f'metric = "{metric.name}" needs float targets; for labels use "accuracy", '
                       '"balanced_accuracy", "auc", "f1" or "loss"')  # fmt: skip
    if metric.name == "perplexity" and resolve_loss(loss) is half_squared_error:
        raise BadInput('metric = "perplexity" is exp(loss) of a loss such as "cross_entropy"; for '
                       '"mse" use "rmse" or "loss"')  # fmt: skip
    return metric


def has_answers(outputs: Tensor, targets: Tensor, classes: int | None) -> bool:
    """Whether there are outputs for the classes of every label, so that accuracies are defined.
    (A loss of one's own may use labels of positions with outputs of another shape.)"""
    if classes is None or targets.dim() == 1:
        return classes is not None
    return outputs.shape[:-1] == targets.shape and outputs.shape[-1] >= classes


def _check_prediction(loss: LossFunction, outputs: Tensor, classes: int) -> None:
    """Refuse outputs without one column per class, from which accuracies are computed. (With the
    cross-entropy, more outputs are classes that do not occur in the data.)"""
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
