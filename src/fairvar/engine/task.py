"""`Task`: a model and a loss as pure functions of parameters, buffers and a batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fairvar.common.tree import Inputs, Tree, input_parts, map_inputs
from fairvar.data.federation import Federation
from fairvar.engine.batches import Batch
from fairvar.engine.losses import (
    LOSSES,
    LossFunction,
    check_loss,
    choose_metric,
    has_answers,
    resolve_loss,
)
from fairvar.engine.settings import TrainSettings
from fairvar.errors import BadInput, cause
from fairvar.models import Problem, build
from fairvar.models.check import Findings, description, examine, examine_loss
from fairvar.models.norm import apply, call, dropout_layers, swap_batch_norm, swap_dropout
from fairvar.models.plain import plain_layers, swap_convolutions, twice_layers
from fairvar.models.weights import checksum
from fairvar.scores import ACCURACY, Metric


@dataclass(frozen=True)
class Task:
    """`original` is a copy of the user's module with keyed dropout; in `training` and `evaluating`
    batch norm is replaced as well (`models/norm.py`)."""

    original: nn.Module
    training: nn.Module
    evaluating: nn.Module
    loss: LossFunction
    params: Tree  # initial trainable parameters
    buffers: Tree  # initial buffers
    batch_norm: bool
    dropout: bool  # the model has dropout
    classifies: bool
    loop_only: tuple[str, ...]  # why the module cannot be vectorised; empty if it can
    half: bool = False  # training passes in bfloat16 (parameters and losses stay as they are)
    reverse_over_forward: bool = True  # whether it gives the right second derivatives
    modes_agree: bool = False  # training and evaluation mode give the same outputs
    moving_buffers: bool = False  # a training pass changes buffers that are not batch norm's
    activations: int = 1  # floats in the outputs of all layers for one sample
    metric: Metric = ACCURACY  # of the clients' scores
    mixes: bool = False  # a sample's loss or outputs depend on the other samples of its batch

    @cached_property
    def apart(self) -> Task:
        """The same task for clients with separate parameters or gradients."""
        if not products_pay(self):
            return self
        training, evaluating = (swap_convolutions(m) for m in (self.training, self.evaluating))
        return replace(self, training=training, evaluating=evaluating)

    @cached_property
    def plain(self) -> Task:
        """The same task with layers in plain operations, for torch.compile."""
        training, evaluating = (plain_layers(m) for m in (self.training, self.evaluating))
        return replace(self, training=training, evaluating=evaluating)

    @cached_property
    def twice(self) -> Task:
        """The same task for clients that train in turn and whose passes are differentiated twice:
        5 % faster for avgcnn. (Products in bfloat16 keep torch's layers.)"""
        return self if self.half else replace(self, training=twice_layers(self.training))

    @cached_property
    def in_turn(self) -> bool:
        """Whether local models are trained one after another: models with convolutions on a CPU,
        where grouped convolutions, as vmap makes them, take two to three times as long."""
        convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in self.original.modules())
        return convolves and next(iter(self.params.values())).device.type == "cpu"

    @cached_property
    def _copies(self) -> list[Task]:
        return [self]

    def copies(self, number: int) -> list[Task]:
        """This task and copies of it, one for each thread."""
        while len(self._copies) < number:
            self._copies.append(replace(self, training=copy.deepcopy(self.training)))
        return self._copies[:number]

    @cached_property
    def depthwise(self) -> bool:
        layers = [m for m in self.original.modules() if isinstance(m, nn.Conv2d)]
        return any(1 < layer.groups == layer.in_channels for layer in layers)

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Equal for tasks that compute the same functions of parameters and buffers: their models
        differ in the values of these only."""
        module = self.original
        shapes = tuple((k, v.shape, v.dtype) for k, v in self.params.items())
        tensors = (*module.named_parameters(), *module.named_buffers())
        fixed = {k: v.detach().cpu() for k, v in tensors if k not in {*self.params, *self.buffers}}
        known = description(module), checksum(fixed)
        return known, shapes, self.loss, self.metric, self.metric.function

    def sample_losses(self, params: Tree, buffers: Tree, batch: Batch) -> tuple[Tensor, Tree]:
        """Training mode: the loss of every sample and the buffers after this batch."""
        x, y, real, keys = batch
        assert self.dropout == (keys is not None)
        if not self.half:
            outputs, buffers = call(self.training, params, buffers, x, real, keys)
            return self.loss(outputs, y), buffers
        with torch.autocast(y.device.type, torch.bfloat16, cache_enabled=False):
            outputs, buffers = call(self.training, params, buffers, x, real, keys)
        return self.loss(outputs.to(next(iter(params.values())).dtype), y), buffers

    def client_loss(self, params: Tree, buffers: Tree, batch: Batch) -> tuple[Tensor, Tree]:
        """f_i on one batch, padded if `real` says so, and the buffers after it."""
        losses, buffers = self.sample_losses(params, buffers, batch)
        if batch.real is None:
            return losses.mean(), buffers
        weight = batch.real.to(losses.dtype)
        return (losses * weight).sum() / weight.sum(), buffers

    def predict(self, params: Tree, buffers: Tree, x: Inputs) -> Tensor:
        """Evaluation mode."""
        if not self.loop_only:
            return call(self.evaluating, params, buffers, x)[0]
        module = copy.deepcopy(self.evaluating)  # torch.func may not support it
        module.load_state_dict({**params, **buffers}, strict=False)
        outputs: Tensor = apply(module, x)
        return outputs


def split_model(task: Task, model: Tree) -> tuple[Tree, Tree]:
    """Split one tree into parameters and buffers; leaves may have the client as first axis."""
    return {k: model[k] for k in task.params}, {k: model[k] for k in task.buffers}


def channels_last(inputs: Inputs) -> Any:
    """The same images in the channels-last memory format: convolutions are up to 1.6 times faster
    on a CPU, 1.7 times for MobileNetV2 on a GPU."""

    def moved(x: Tensor) -> Tensor:
        return x.movedim(-3, -1).contiguous().movedim(-1, -3) if x.dim() >= 4 else x

    return map_inputs(moved, inputs)


def products_pay(task: Task) -> bool:
    """Whether convolutions as matrix products are faster: on a GPU, not on a CPU."""
    return next(iter(task.params.values())).is_cuda


_FOUND: dict[object, Findings] = {}


def _examined(module: nn.Module, sample: Inputs, curvature: bool) -> Findings:
    """`examine`, once for each kind of model, because a sweep prepares the same one repeatedly."""
    known = description(module)
    if known is module:
        return examine(module, sample, curvature=curvature)
    trained = tuple(p.requires_grad for p in module.parameters())
    outline = str(map_inputs(lambda part: (part.shape, part.dtype, part.device), sample))
    key = (known, trained, outline, curvature)
    if key in _FOUND:
        return _FOUND[key]
    found = examine(module, sample, curvature=curvature)
    if not any(problem.fatal for problem in found.problems):  # others may be of the data
        _FOUND[key] = found
    return found


def _examined_alone(module: nn.Module, sample: Inputs, curvature: bool) -> Findings:
    """`examine` without the tests under vmap; the model is then trained client by client."""
    found = examine(module, sample, together=False, curvature=curvature)
    untried = Problem("was not tried on several clients at once", fatal=False)
    return Findings([*found.problems, untried])


def make_task(
    model: nn.Module | str,
    federation: Federation,
    loss: str | LossFunction,
    settings: TrainSettings,
    curvature: bool = False,
    alone: bool = False,
    metric: object = None,
) -> Task:
    """Build or copy the model, move it to the data's device, and check that it fits; `curvature`:
    also that it can be differentiated twice; `alone`: for one client, never for several at once."""
    function = resolve_loss(loss)
    original = _placed(model, federation, settings)
    sample, targets = federation.train.take(slice(0, 4))
    found = (_examined_alone if alone else _examined)(original, sample, curvature)
    fatal = [p for p in found.problems if p.fatal]
    if fatal:
        raise BadInput("the model cannot be trained: " + "; ".join(fatal))
    training = swap_batch_norm(original).train()
    params = {k: p.detach().clone() for k, p in original.named_parameters() if p.requires_grad}
    kept = original.state_dict().keys()  # others are constants of the module
    buffers = {k: b.detach().clone() for k, b in original.named_buffers() if k in kept}
    task = Task(
        original=original,
        training=training,
        evaluating=copy.deepcopy(training).eval(),
        loss=function,
        params=params,
        buffers=buffers,
        batch_norm=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in original.modules()),
        dropout=bool(dropout_layers(original)),
        classifies=federation.classes is not None,
        loop_only=tuple(p for p in found.problems if not p.fatal),
        reverse_over_forward=found.reverse_over_forward,
        mixes=found.mixes,
        modes_agree=found.modes_agree,
        half=settings.precision == "bfloat16",
    )
    with torch.no_grad():
        if not alone:
            _check_integers(task, federation)
        outputs = task.predict(params, buffers, sample)
        check_loss(function, outputs, targets, federation.classes)
        classifies = has_answers(outputs, targets, federation.classes)
        scored_by = choose_metric(metric, loss, federation.classes if classifies else None)
        if scored_by.function is not None and not alone:
            scored_by(outputs, targets)
        task = replace(
            task,
            classifies=classifies,
            metric=scored_by,
            moving_buffers=_moves_buffers(task, sample),
            activations=_activation_floats(task, sample),
        )
    own = function not in LOSSES.values()
    return _with_own_loss(task, federation, curvature, alone) if own else task


def _check_integers(task: Task, federation: Federation) -> None:
    """Refuse tokens that an embedding lacks: the model is applied to samples with the largest and
    smallest integers of each position, in every split."""
    for name, split in federation.splits.items():
        parts = [part.reshape(len(part), -1) for part in input_parts(split.x).values()
                 if not (part.is_floating_point() or part.dtype == torch.bool)]  # fmt: skip
        if not parts:
            return
        places = [place for p in parts for place in (p.long().argmax(0), p.long().argmin(0))]
        x, _ = split.take(torch.cat(places).unique()[:256])
        try:
            task.predict(task.params, task.buffers, x)
        except Exception as error:
            found = " and ".join(f"{int(p.min())} … {int(p.max())}" for p in parts)
            raise BadInput(f"the model fails on {name} data, where the integers of x are {found}: "
                           f"{cause(error)}") from error  # fmt: skip


def _with_own_loss(task: Task, federation: Federation, curvature: bool, alone: bool) -> Task:
    """Test a loss of the user's. With one that vmap refuses, or that lets samples influence each
    other, clients train one after another, as with such a model."""
    total = len(federation.train.y)  # of many clients, for different targets
    rows = torch.linspace(0, total - 1, min(total, 16)).long().to(federation.train.device)
    x, targets = federation.train.take(rows)
    with torch.no_grad():
        outputs = task.predict(task.params, task.buffers, x)
    found = examine_loss(task.loss, outputs, targets, together=not alone, curvature=curvature)
    if fatal := [problem for problem in found.problems if problem.fatal]:
        raise BadInput("the loss " + "; ".join(fatal))
    return replace(
        task,
        loop_only=(*task.loop_only, *(f"has a loss that {problem}" for problem in found.problems)),
        reverse_over_forward=task.reverse_over_forward and found.reverse_over_forward,
        mixes=task.mixes or found.mixes,
    )


def _placed(model: nn.Module | str, federation: Federation, settings: TrainSettings) -> nn.Module:
    """A copy of the model on the data's device, in the run's dtype, with keyed dropout."""
    if isinstance(model, str) and not isinstance(federation.train.x, Tensor):
        raise BadInput(f"model {model!r} takes one input, but samples have several; give a module")
    if isinstance(model, str):
        model = build(model, federation.input_shape, federation.classes or 1, settings.seed)
    if not isinstance(model, nn.Module):
        raise BadInput(f"model must be an nn.Module or a name, not {type(model).__name__}")
    device, dtype = federation.train.device, getattr(torch, settings.dtype)
    try:
        return swap_dropout(model).to(device, dtype).train()
    except Exception as error:
        raise BadInput(f"the model cannot be copied to {device}: {cause(error)}") from error


def _moves_buffers(task: Task, sample: Inputs) -> bool:
    """Whether a training pass changes buffers of a model without batch norm."""
    if task.batch_norm or task.loop_only or not task.buffers:
        return False
    after = call(task.training, task.params, task.buffers, sample)[1]
    return any(after[name] is not value for name, value in task.buffers.items())


def _activation_floats(task: Task, x: Inputs) -> int:
    """Floats in the outputs of all layers for one sample, counted in a forward pass."""
    module, total = task.evaluating, 0

    def count(_module: nn.Module, _inputs: object, output: object) -> None:
        nonlocal total
        if isinstance(output, Tensor):
            total += output.numel()

    leaves = [m for m in module.modules() if not list(m.children())]
    handles = [leaf.register_forward_hook(count) for leaf in leaves]
    try:
        with torch.no_grad():
            task.predict(task.params, task.buffers, map_inputs(lambda part: part[:1], x))
    finally:
        for handle in handles:
            handle.remove()
    return max(total, sum(part[:1].numel() for part in input_parts(x).values()))
