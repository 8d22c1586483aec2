"""`Task`: a model and a loss as pure functions of parameters, buffers and a batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fairvar.engine.losses import LossFunction, check_loss, resolve_loss
from fairvar.errors import BadInput
from fairvar.federation import Federation
from fairvar.models import Problem, build, check_model
from fairvar.models.check import tells_all
from fairvar.models.norm import call, swap_batch_norm
from fairvar.models.products import swap_convolutions
from fairvar.tree import Tree


@dataclass(frozen=True)
class Task:
    """`original` is the user's module (a copy); the others have batch norm in plain operations."""

    original: nn.Module
    training: nn.Module
    evaluating: nn.Module
    loss: LossFunction
    params: Tree  # initial trainable parameters
    buffers: Tree  # initial buffers
    batch_norm: bool
    classifies: bool
    loop_only: tuple[str, ...]  # why the module cannot be vectorised; empty if it can
    half: bool = False  # training passes in bfloat16 (parameters and losses stay as they are)

    @cached_property
    def apart(self) -> Task:
        """The same task for clients that have parameters, or gradients, of their own."""
        if not products_pay(self):
            return self
        training, evaluating = (swap_convolutions(m) for m in (self.training, self.evaluating))
        return replace(self, training=training, evaluating=evaluating)

    def sample_losses(
        self, params: Tree, buffers: Tree, x: Tensor, y: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """Training mode: the loss of every sample and the buffers after this batch."""
        if not self.half:
            outputs, buffers = call(self.training, params, buffers, x, real)
            return self.loss(outputs, y), buffers
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            outputs, buffers = call(self.training, params, buffers, x, real)
        return self.loss(outputs.to(x.dtype), y), buffers

    def client_loss(
        self, params: Tree, buffers: Tree, x: Tensor, y: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """f_i on one batch, padded if `real` says so, and the buffers after it."""
        losses, buffers = self.sample_losses(params, buffers, x, y, real)
        if real is None:
            return losses.mean(), buffers
        weight = real.to(losses.dtype)
        return (losses * weight).sum() / weight.sum(), buffers

    def predict(self, params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        """Evaluation mode."""
        return call(self.evaluating, params, buffers, x)[0]


def products_pay(task: Task) -> bool:
    """Convolutions as products: a GPU's gain. A CPU takes two to three times as long with them."""
    return next(iter(task.params.values())).is_cuda


_FOUND: dict[object, list[Problem]] = {}


def _problems(module: nn.Module, sample: Tensor) -> list[Problem]:
    """`check_model` once for each kind of model: a sweep prepares the same one again and again."""
    if not tells_all(module):
        return check_model(module, sample)
    trained = tuple(p.requires_grad for p in module.parameters())
    key = (repr(module), trained, sample.shape, sample.dtype, sample.device)
    if key not in _FOUND:
        _FOUND[key] = check_model(module, sample)
    return _FOUND[key]


def _alone_problems(module: nn.Module, sample: Tensor) -> list[Problem]:
    """Quicker, and then the model must never be given several clients at once."""
    untried = Problem("was not tried on several clients at once", fatal=False)
    return [*check_model(module, sample, together=False), untried]


def make_task(
    model: nn.Module | str,
    federation: Federation,
    loss: str | LossFunction,
    seed: int,
    half: bool = False,
    alone: bool = False,
) -> Task:
    """Build or copy the model, move it to the data's device and dtype, and check that it fits;
    `alone`: for one client, never for several at once."""
    x, y = federation.train.x, federation.train.y
    if isinstance(model, str):
        model = build(model, federation.input_shape, federation.classes or 1, seed)
    if not isinstance(model, nn.Module):
        raise BadInput(f"model must be an nn.Module or a name, not {type(model).__name__}")
    dtype = x.dtype if x.is_floating_point() else torch.float32
    original = copy.deepcopy(model).to(x.device, dtype).train()
    function = resolve_loss(loss)
    sample = x[: min(len(x), 4)]
    problems = _alone_problems(original, sample) if alone else _problems(original, sample)
    fatal = [p for p in problems if p.fatal]
    if fatal:
        raise BadInput("the model cannot be trained: " + "; ".join(fatal))
    training = swap_batch_norm(original).train()
    params = {k: p.detach().clone() for k, p in original.named_parameters() if p.requires_grad}
    buffers = {k: b.detach().clone() for k, b in original.named_buffers()}
    task = Task(
        original=original,
        training=training,
        evaluating=copy.deepcopy(training).eval(),
        loss=function,
        params=params,
        buffers=buffers,
        batch_norm=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in original.modules()),
        classifies=federation.classes is not None,
        loop_only=tuple(p for p in problems if not p.fatal),
        half=half,
    )
    with torch.no_grad():
        outputs = task.predict(params, buffers, sample)
        check_loss(function, outputs, y[: len(sample)], federation.classes)
    return task
