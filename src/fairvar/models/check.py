"""Can this model be trained over many clients at once? All reasons why not, each with the fix."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from fairvar.models.norm import SWAPPED, PlainBatchNorm, call, sample_weight_names, swap_batch_norm
from fairvar.tree import Tree, scale, stack

_ONE_FUNCTION = "but two passes over a batch must see one function"
_LOOP = "(it is trained client by client, slower)"


class Problem(str):
    """One line. `fatal`: no training at all; otherwise just not vectorised over clients."""

    __slots__ = ("fatal",)
    fatal: bool

    def __new__(cls, text: str, fatal: bool = True) -> Problem:
        problem = super().__new__(cls, text)
        problem.fatal = fatal
        return problem


def check_model(
    module: nn.Module,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    classes: int | None = None,
    *,
    together: bool = True,
) -> list[Problem]:
    """All reasons against this module; an empty list means that it is fine.

    Layers and parameters are looked at; with sample `inputs` (b, …), on the module's device, the
    module is tried out as well: on a copy, with the random generators put back afterwards. Batch
    norm, frozen parameters and tied weights are fine. Without `together` it is not tried on several
    clients at once: torch.func takes a second to load, which a node spends on every message.
    """
    problems = [*_parameter_problems(module), *_layer_problems(module)]
    if inputs is None or any(is_lazy(p) for p in module.parameters()):
        return problems
    devices = [inputs.device] if inputs.is_cuda else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices):
        warnings.simplefilter("ignore")  # vmap tells which operations it runs slowly
        try:
            trial = copy.deepcopy(module).train()
            if not any(isinstance(m, _BatchNorm) and m.momentum is None for m in trial.modules()):
                trial = swap_batch_norm(trial)
            outputs = _forward(trial, inputs)
        except Exception as error:
            shape = tuple(inputs.shape)
            problems.append(Problem(f"fails on inputs of shape {shape}: {_line(error)}"))
            return problems
        wrong = list(_output_problems(outputs, inputs, targets, classes))
        if not wrong:
            wrong = list(_trial_problems(trial, inputs, outputs, problems, together))
    return [*problems, *wrong]


def tells_all(module: nn.Module) -> bool:
    """Torch's and our own layers say all about themselves when printed."""
    ours = ("torch.nn.", "fairvar.models.")
    return all(type(m).__module__.startswith(ours) for m in module.modules())


def _parameter_problems(module: nn.Module) -> Iterator[Problem]:
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        yield Problem("has lazy layers without parameters yet: run one batch through it first")
        return
    if not any(p.requires_grad and p.numel() for p in module.parameters()):
        yield Problem("has no trainable parameter: set requires_grad on some")
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            yield Problem(
                f"parameter {name} is {parameter.dtype}: use real floating point numbers, "
                "or a buffer if it is not trained"
            )


def _layer_problems(module: nn.Module) -> Iterator[Problem]:
    for name, layer in module.named_modules():
        for text, fatal in _against(layer):
            yield Problem(f"{name or 'the module'} ({type(layer).__name__}) {text}", fatal)


def _against(layer: nn.Module) -> Iterator[tuple[str, bool]]:
    """(reason, fatal) against one layer by what it is, without running it."""
    dropout = getattr(layer, "p" if isinstance(layer, _DropoutNd) else "dropout", 0)
    if isinstance(dropout, float | int) and dropout > 0:
        yield (
            "drops at random, but two passes over a batch must see one function: set it to 0",
            True,
        )
    if isinstance(layer, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        yield f"is random, {_ONE_FUNCTION}: use LeakyReLU or MaxPool instead", True
    if isinstance(layer, nn.RNNBase):
        yield (
            f"cannot have parameters per client under vmap: write it with Linear layers {_LOOP}",
            False,
        )
    if isinstance(layer, nn.SyncBatchNorm):
        yield "mixes the batches of processes, so of clients: use BatchNorm2d", True
    elif isinstance(layer, _BatchNorm) and layer.momentum is None:
        yield "averages over all batches ever seen: set momentum to a number such as 0.1", True
    elif isinstance(layer, _BatchNorm) and type(layer) not in (*SWAPPED, PlainBatchNorm):
        yield f"is a batch norm of its own kind: use BatchNorm1d, 2d or 3d {_LOOP}", False
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        yield f"keeps running statistics in place: set track_running_stats=False {_LOOP}", False
    hooks = {type(hook).__name__ for hook in layer._forward_pre_hooks.values()}
    if "SpectralNorm" in hooks or type(layer).__name__ == "_SpectralNorm":
        yield "changes its state in every forward pass: remove the spectral norm", True
    if "WeightNorm" in hooks:
        yield f"has a weight norm by hook: use nn.utils.parametrizations.weight_norm {_LOOP}", False


def _forward(module: nn.Module, inputs: Tensor, real: Tensor | None = None) -> Any:
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    with torch.no_grad():
        return call(module, params, buffers, inputs, real)[0]


def _precise(module: nn.Module, inputs: Tensor) -> tuple[nn.Module, Tensor]:
    """Both in float64 if that runs: deep nets round too much for a comparison in float32."""
    if not inputs.is_floating_point():
        return module, inputs
    try:
        double = copy.deepcopy(module).double()
        _forward(double, inputs.double())
    except Exception:
        return module, inputs
    return double, inputs.double()


def _output_problems(
    outputs: Any, inputs: Tensor, targets: Tensor | None, classes: int | None
) -> Iterator[Problem]:
    if not isinstance(outputs, Tensor):
        yield Problem(f"returns a {type(outputs).__name__}: return one tensor of outputs")
        return
    if outputs.dim() == 0 or outputs.shape[0] != inputs.shape[0]:
        yield Problem(
            f"turns {inputs.shape[0]} inputs into outputs of shape {tuple(outputs.shape)}: "
            "the first axis must stay the batch"
        )
        return
    if not bool(torch.isfinite(outputs).all()):
        yield Problem("gives outputs that are not finite: check the inputs and the initialisation")
    width = outputs.shape[-1] if outputs.dim() > 1 else 1
    if classes is not None and width != classes:
        yield Problem(f"has {width} outputs for {classes} classes: give its last layer {classes}")
    elif targets is not None and not targets.is_floating_point() and targets.numel():
        highest = int(targets.max())
        if highest >= width:
            yield Problem(f"has {width} outputs, but a target is {highest}: widen its last layer")


def _trial_problems(
    module: nn.Module, inputs: Tensor, outputs: Tensor, known: list[Problem], together: bool
) -> Iterator[Problem]:
    """What only shows when the module runs; nothing is said twice."""
    if any(problem.fatal for problem in known):
        return
    if not _close(_forward(module, inputs), outputs):
        yield Problem(
            "gives other outputs in a second pass over the same batch: "
            "remove what is random or remembers earlier passes"
        )
        return
    module, inputs = _precise(module, inputs)
    if together and not known:
        yield from _vmap_problems(module, inputs)
    yield from _mixing_problems(module, inputs)


def _vmap_problems(module: nn.Module, inputs: Tensor) -> Iterator[Problem]:
    """Two clients with their own parameters, together and one by one."""
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    trained: Tree = {name: p.detach() for name, p in params.items() if p.requires_grad}
    frozen: Tree = {name: p for name, p in params.items() if not p.requires_grad}
    clients = [trained, scale(trained, 0.5)]

    def total(own: Tree) -> tuple[Tensor, Tensor]:
        outputs, _ = call(module, {**own, **frozen}, buffers, inputs)
        return outputs.square().sum(), outputs

    try:
        gradients, together = vmap(grad(total, has_aux=True))(stack(clients))
    except Exception as error:
        yield Problem(f"does not run under torch.func.vmap {_LOOP}: {_line(error)}", fatal=False)
        return
    for i, client in enumerate(clients):
        gradient, outputs = grad(total, has_aux=True)(client)
        alone = torch.cat([gradient[name].flatten() for name in trained])
        vectorised = torch.cat([gradients[name][i].flatten() for name in trained])
        if not _close(vectorised, alone) or not _close(together[i], outputs):
            yield Problem(f"gives other numbers under torch.func.vmap {_LOOP}", fatal=False)
            return


def _mixing_problems(module: nn.Module, inputs: Tensor) -> Iterator[Problem]:
    """Is the last sample, called padding, really left out of the others' outputs?"""
    if inputs.shape[0] < (3 if sample_weight_names(module) else 2):
        return
    padded = torch.cat([inputs[:-1], torch.zeros_like(inputs[-1:])])
    real = torch.ones(len(inputs), device=inputs.device)
    real[-1] = 0
    try:
        mixed = not _close(_forward(module, padded, real)[:-1], _forward(module, inputs[:-1]))
        reason = "lets the samples of a batch influence each other, so padding would leak"
    except Exception as error:
        mixed, reason = True, f"does not run on padded batches: {_line(error)}"
    if mixed:
        yield Problem(f"{reason}: use only layers that treat samples alone {_LOOP}", fatal=False)


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to another order of summation."""
    tolerance = {torch.float64: 1e-7, torch.float32: 1e-3}.get(a.dtype, 1e-2)
    largest = float(b.abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest)


def _line(error: Exception) -> str:
    """torch's own message, shortened to one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
