"""Checks whether a model can be trained, and vectorised over clients; each problem with its fix."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from fairvar.common.tree import Inputs, Tree, input_parts, map_inputs, one_input, scale, stack
from fairvar.common.validation import whole_number
from fairvar.errors import BadInput, cause, shown
from fairvar.models.norm import (
    DROPOUT,
    SWAPPED,
    PlainBatchNorm,
    aliases,
    apply,
    call,
    hessian_product,
    sample_weight_names,
    swap_batch_norm,
    swap_dropout,
    twice_differentiable,
)

FEW = 4  # samples for tests of second derivatives, which are costly
SECOND = 100.0  # factor of the tolerance for second derivatives
LOOP = "(it is trained client by client, slower)"


class Problem(str):
    """A problem in one line. `fatal`: the model cannot be trained; otherwise clients train one
    after another."""

    __slots__ = ("fatal",)
    fatal: bool

    def __new__(cls, text: str, fatal: bool = True) -> Problem:
        problem = super().__new__(cls, text)
        problem.fatal = fatal
        return problem


@dataclass
class Findings:
    problems: list[Problem]
    reverse_over_forward: bool = True  # whether it gave the right second derivatives
    mixes: bool = False  # in evaluation mode, too, a sample's outputs depend on its batch
    modes_agree: bool = False  # training and evaluation mode give the same outputs


def check_model(
    module: nn.Module,
    inputs: Inputs | None = None,
    targets: Tensor | None = None,
    classes: int | None = None,
    *,
    together: bool = True,
    curvature: bool = True,
) -> list[Problem]:
    """All problems of this module; an empty list if there are none.

    Layers and parameters are checked. With sample `inputs` (b, …), on the module's device, a copy
    of the module is also run; the random generators are restored afterwards. Several inputs are a
    tuple or dict. Batch norm, dropout, frozen parameters and tied weights are supported.
    `together=False` skips the tests under vmap: torch.func takes a second to load, which a node
    would spend on every message. `curvature`: also test second derivatives, which only FairGrad
    needs."""
    if not isinstance(module, nn.Module):
        raise BadInput(f"module must be an nn.Module, not {type(module).__name__}")
    several = inputs is not None and isinstance(inputs, tuple | dict) and len(inputs)
    parts: dict[str, Any] = {"inputs": inputs}
    if several and inputs is not None:
        parts = {name.replace("x", "inputs", 1): v for name, v in input_parts(inputs).items()}
    for name, value in {**parts, "targets": targets}.items():
        if value is not None and not isinstance(value, Tensor):
            raise BadInput(f"{name} must be a tensor, not {type(value).__name__}; use torch.tensor")
    if inputs is not None and any(v.dim() == 0 or len(v) == 0 for v in parts.values()):
        raise BadInput("inputs must be a batch of at least one sample: a tensor of shape (b, …)")
    classes = None if classes is None else whole_number("classes", classes, least=1)
    for name, flag in (("together", together), ("curvature", curvature)):
        if not isinstance(flag, bool):
            raise BadInput(f"{name} = {shown(flag)}: give True or False")
    return examine(module, inputs, targets, classes, together, curvature).problems


@torch.enable_grad()
def examine(
    module: nn.Module,
    inputs: Inputs | None,
    targets: Tensor | None = None,
    classes: int | None = None,
    together: bool = True,
    curvature: bool = True,
) -> Findings:
    """`check_model`, with findings for the kernels."""
    found = Findings([*_parameter_problems(module), *_layer_problems(module)])
    if inputs is None or any(is_lazy(p) for p in module.parameters()):
        return found
    together = together and not found.problems
    with _restoring(inputs):
        module = swap_dropout(module)
        found.problems += _pass_problems(module, inputs, targets, classes)
        if not any(problem.fatal for problem in found.problems):
            _try_engines(found, module, inputs, together, curvature)
    return found


class _Losses(nn.Module):
    """A loss as a module: of outputs times a parameter, by which it is differentiated."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor) -> None:
        super().__init__()
        self.loss, self.factor = loss, nn.Parameter(torch.ones_like(outputs[0]))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs * self.factor, targets)


def examine_loss(
    loss: Callable[[Tensor, Tensor], Tensor],
    outputs: Tensor,
    targets: Tensor,
    together: bool = True,
    curvature: bool = True,
) -> Findings:
    """The tests of `examine` on a loss per sample."""
    module, inputs = _Losses(loss, outputs), (outputs, targets)
    found = Findings([])
    with _restoring(inputs):
        found.problems += _pass_problems(module, inputs, None, None)
        if not found.problems:
            _try_engines(found, module, inputs, together, curvature)
    return found


@contextmanager
def _restoring(inputs: Inputs) -> Iterator[None]:
    """Restores the random generators, and is silent about operations that vmap has no rule for."""
    device = one_input(inputs).device
    devices = [device] if device.type == "cuda" else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices):
        warnings.simplefilter("ignore")
        yield


_OF_EVERY_MODULE = vars(nn.Module()).keys()


def description(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same function of parameters and buffers. (`repr` leaves
    out settings, such as the number of heads of attention.) Known for layers of torch and fairvar
    without hooks; any other module is equal to itself only."""
    found: list[Hashable] = [tuple(aliases(module))]
    for name, layer in module.named_modules(remove_duplicate=False):
        ours = type(layer).__module__.startswith(("torch.nn.", "fairvar.models."))
        hooks = (layer._forward_hooks, layer._forward_pre_hooks,
                 layer._backward_hooks, layer._backward_pre_hooks)  # fmt: skip
        if not ours or any(hooks) or isinstance(layer, nn.RNNBase):  # whose settings hold weights
            return module
        settings = {k: v for k, v in vars(layer).items() if k not in _OF_EVERY_MODULE}
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        if not all(isinstance(v, Hashable) for v in plain.values()):
            return module
        found.append((name, type(layer), frozenset(plain.items())))
    return tuple(found)


def _parameter_problems(module: nn.Module) -> Iterator[Problem]:
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        yield Problem("has lazy layers without parameters yet: run one batch through it first")
        return
    if not any(p.requires_grad and p.numel() for p in module.parameters()):
        yield Problem("has no trainable parameter: set requires_grad on some")
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            yield Problem(f"parameter {name} is {parameter.dtype}: use real floating point "
                          "numbers, or a buffer if it is not trained")  # fmt: skip


def _layer_problems(module: nn.Module) -> Iterator[Problem]:
    """Problems of layers that need no forward pass."""
    for name, layer in module.named_modules():
        for text in _reasons(layer):
            fatal = not text.endswith(LOOP)
            yield Problem(f"{name or 'the module'} ({type(layer).__name__}) {text}", fatal)


def _reasons(layer: nn.Module) -> Iterator[str]:
    """The problems of one layer, each with its fix."""
    hooks = {type(hook).__name__ for hook in layer._forward_pre_hooks.values()}
    one = "but two passes over a batch must see one function"
    if isinstance(layer, _DropoutNd) and type(layer) not in DROPOUT and layer.p > 0:
        yield f"drops at random, {one}: use nn.Dropout, or set it to 0"
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase) and layer.dropout > 0:
        yield f"drops at random inside, {one}: set it to 0 and use nn.Dropout layers"
    if isinstance(layer, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        yield f"is random, {one}: use LeakyReLU or MaxPool instead"
    if isinstance(layer, nn.RNNBase):
        yield f"cannot have parameters per client under vmap: write it with Linear layers {LOOP}"
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
        yield "has sparse gradients, which cannot be averaged: set sparse=False"
    if isinstance(layer, torch.jit.ScriptModule) or hasattr(layer, "_orig_mod"):
        yield "is compiled: give the module that it was made from"
    if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
        yield "spreads a batch over devices: give its .module"
    if isinstance(layer, nn.SyncBatchNorm):
        yield "mixes the batches of processes, so of clients: use BatchNorm2d"
    elif isinstance(layer, _BatchNorm) and layer.momentum is None:
        yield "averages over all batches ever seen: set momentum, for example to 0.1"
    elif isinstance(layer, _BatchNorm) and type(layer) not in (*SWAPPED, PlainBatchNorm):
        yield f"is a batch norm of its own kind: use BatchNorm1d, 2d or 3d {LOOP}"
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        yield f"keeps running statistics in place: set track_running_stats=False {LOOP}"
    if "SpectralNorm" in hooks or type(layer).__name__ == "_SpectralNorm":
        yield "changes its state in every forward pass: remove the spectral norm"
    if "WeightNorm" in hooks:
        yield f"has a weight norm by hook: use nn.utils.parametrizations.weight_norm {LOOP}"


def _pass_problems(
    module: nn.Module, inputs: Inputs, targets: Tensor | None, classes: int | None
) -> Iterator[Problem]:
    """Problems with plain torch: in training and evaluation mode, in two passes, on one sample."""
    b, shape, first = len(one_input(inputs)), _shapes(inputs), _some(inputs, slice(0, 1))
    keys = torch.arange(b, device=one_input(inputs).device)
    try:
        with torch.no_grad():
            trial = copy.deepcopy(module).train()
            before = copy.deepcopy(trial.state_dict())
            outputs = apply(trial, inputs, keys)
            trial.load_state_dict(before)
            again = apply(trial, inputs, keys)
            evaluating = copy.deepcopy(module).eval()
            evaluated = apply(evaluating, inputs)
            shape = _shapes(first)
            alone = apply(evaluating, first)
    except Exception as error:
        whole = not any(part.is_floating_point() for part in input_parts(inputs).values())
        embeds = any(isinstance(layer, nn.Embedding) for layer in module.modules())
        way = "; give x as floats: integers are for embeddings" if whole and not embeds else ""
        yield Problem(f"fails on inputs of shape {shape}: {cause(error)}{way}")
        return
    for given, samples, labels in (
        (outputs, b, targets), (evaluated, b, targets), (alone, 1, None)
    ):  # fmt: skip
        if found := list(_output_problems(given, samples, labels, classes)):
            yield from found
            return
    if not _close(again, outputs):
        yield Problem("gives other outputs in a second pass over the same batch: "
                      "remove what is random or remembers earlier passes (for dropout use "
                      "nn.Dropout layers)")  # fmt: skip
        return
    try:
        _slopes(copy.deepcopy(module).train(), inputs)
    except Exception as error:
        yield Problem(f"cannot be differentiated: {cause(error)}")


def _output_problems(
    outputs: Any, samples: int, targets: Tensor | None, classes: int | None
) -> Iterator[Problem]:
    if not isinstance(outputs, Tensor):
        yield Problem(f"returns a {type(outputs).__name__}: return one tensor of outputs")
        return
    if outputs.dim() == 0 or outputs.shape[0] != samples:
        yield Problem(f"turns {samples} inputs into outputs of shape "
                      f"{tuple(outputs.shape)}: the first axis must stay the batch")  # fmt: skip
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


def _slopes(module: nn.Module, inputs: Inputs, twice: bool = False) -> tuple[Tensor, ...]:
    """Derivatives of Σ outputs² by autograd; `twice`: the Hessian times them."""
    leaves = [p for p in module.parameters() if p.requires_grad]
    total = apply(module, inputs).square().sum()
    slopes = torch.autograd.grad(total, leaves, create_graph=twice, materialize_grads=True)
    return hessian_product(slopes, leaves, [s.detach() for s in slopes]) if twice else slopes


def _try_engines(
    found: Findings, module: nn.Module, inputs: Inputs, together: bool, curvature: bool
) -> None:
    """Problems under the transforms of the kernels: second derivatives, vmap, padding."""
    plain, inputs = _precise(copy.deepcopy(module).train(), inputs)
    hessian = None
    if curvature:
        try:
            with twice_differentiable(plain):
                products = _slopes(copy.deepcopy(plain), _few(inputs), twice=True)
            hessian = torch.cat([leaf.flatten() for leaf in products])
        except Exception as error:
            found.problems.append(Problem("cannot be differentiated twice, which FairGrad needs "
                                          f"and no other method: {cause(error)}"))  # fmt: skip
    try:
        trial = swap_batch_norm(plain)
        if changed := _changed_in_place(trial, inputs):
            text = f"changes {', '.join(changed)} in place: assign a new tensor instead {LOOP}"
            found.problems.append(Problem(text, fatal=False))
        elif together:
            found.problems += _vmap_problems(trial, inputs, hessian)
            found.reverse_over_forward = hessian is None or _reverse_over_forward_agrees(
                trial, inputs, hessian
            )
        found.problems += _mixing_problems(trial, inputs)
    except Exception as error:
        text = f"does not run under torch.func {LOOP}: {cause(error)}"
        found.problems.append(Problem(text, fatal=False))
    with torch.no_grad():
        keys = torch.arange(len(one_input(inputs)), device=one_input(inputs).device)
        found.modes_agree = _close(apply(plain, inputs, keys), apply(plain.eval(), inputs))
    found.mixes = _mixes(plain, inputs)
    if found.mixes and not found.problems:
        text = ("lets the samples of a batch influence each other in evaluation: batch norm needs "
                f"track_running_stats=True {LOOP}")  # fmt: skip
        found.problems.append(Problem(text, fatal=False))


def _mixes(module: nn.Module, inputs: Inputs) -> bool:
    """Whether the outputs of a sample depend on the other samples of its batch."""
    rows = range(len(one_input(inputs)))
    with torch.no_grad():
        alone = [apply(module, _some(inputs, slice(i, i + 1))) for i in rows]
        return not _close(torch.cat(alone), apply(module, inputs))


def _changed_in_place(module: nn.Module, inputs: Inputs) -> list[str]:
    """Parameters and buffers that a pass changes in place. (New values by assignment are fine.)"""
    for trial in (copy.deepcopy(module), copy.deepcopy(module).eval()):
        given = {name: leaf.detach().clone() for name, leaf in trial.state_dict().items()}
        before = copy.deepcopy(given)
        with torch.no_grad():
            call(trial, given, {}, inputs)
        if changed := [name for name, leaf in before.items() if not torch.equal(given[name], leaf)]:
            return changed
    return []


def _precise(module: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """Both in float64 if the module supports it, because rounding in deep nets is too large for a
    comparison in float32. (Tokens stay integers.)"""
    wide = map_inputs(lambda part: part.double() if part.is_floating_point() else part, inputs)
    try:
        double = copy.deepcopy(module).double()
        with torch.no_grad():
            apply(copy.deepcopy(double), wide)
    except Exception:
        return module, inputs
    return double, wide


def _vmap_problems(module: nn.Module, inputs: Inputs, hessian: Tensor | None) -> Iterator[Problem]:
    """Compare two clients under vmap with one by one; `hessian` is the expected Hessian product."""
    which, why = "", ""
    try:
        alike = _same_together(module, inputs)
        if alike and hessian is not None:
            which = "has a second derivative that "
            alike = _forward_over_reverse_agrees(module, inputs, hessian)
        what = "" if alike else "gives other numbers"
    except Exception as error:
        what, why = "does not run", f": {cause(error)}"
    if what:
        yield Problem(f"{which}{what} under torch.func.vmap {LOOP}{why}", fatal=False)


def _same_together(module: nn.Module, inputs: Inputs) -> bool:
    """Whether gradients and outputs of two clients agree: with one shared model, as in the first
    local step, and with separate parameters and buffers, as in later steps."""
    total, model, buffers = _functional(module)
    evaluating = copy.deepcopy(module).eval()

    def once(own: Tree, statistics: Tree, x: Inputs) -> tuple[Tensor, Tensor]:
        frozen = {k: p for k, p in evaluating.named_parameters() if k not in own}
        with torch.no_grad():
            outputs = call(evaluating, {**own, **frozen}, statistics, x)[0]
        return _flat(grad(total)(own, statistics, x)), outputs

    models = [model, scale(model, 0.5)]
    samples = [inputs, map_inputs(lambda part: part.flip(0), inputs)]
    x = map_inputs(lambda part: torch.stack([part, part.flip(0)]), inputs)
    shared = vmap(once, in_dims=(None, None, 0))(model, buffers, x)
    apart = vmap(once)(stack(models), stack([buffers] * 2), x)
    for i in range(2):
        for (gradients, outputs), own in ((shared, model), (apart, models[i])):
            gradient, alone = once(own, buffers, samples[i])
            if not _close(gradients[i], gradient) or not _close(outputs[i], alone):
                return False
    return True


def _forward_over_reverse_agrees(module: nn.Module, inputs: Inputs, hessian: Tensor) -> bool:
    """Whether forward over reverse gives this Hessian product for two clients with own models."""
    total, model, buffers = _functional(module)

    def product(own: Tree, statistics: Tree, x: Inputs) -> Tensor:
        along = grad(total)(own, statistics, x)
        return _flat(jvp(lambda at: grad(total)(at, statistics, x), (own,), (along,))[1])

    with twice_differentiable(module):
        found = vmap(product)(stack([model] * 2), stack([buffers] * 2), _twice(inputs))
    return _close(found[0], hessian, SECOND)


def _reverse_over_forward_agrees(module: nn.Module, inputs: Inputs, hessian: Tensor) -> bool:
    """Whether reverse over forward gives this Hessian product for two clients with a shared model;
    it is wrong for layer norm in torch 2.13."""
    total, model, buffers = _functional(module)
    try:
        with twice_differentiable(module):
            along = grad(total)(model, buffers, _few(inputs))

            def slope(at: Tree) -> Tensor:
                def each(x: Inputs) -> Tensor:
                    return jvp(lambda p: total(p, buffers, x), (at,), (along,))[1]

                return vmap(each)(_twice(inputs))[0]

            return _close(_flat(grad(slope)(model)), hessian, SECOND)
    except Exception:
        return False


def _functional(module: nn.Module) -> tuple[Callable[..., Tensor], Tree, Tree]:
    """Σ outputs² as a function of trained parameters, buffers and samples, and the former two."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    trained = {name: params[name] for name, p in module.named_parameters() if p.requires_grad}
    kept = module.state_dict()
    buffers = {name: b for name, b in module.named_buffers() if name in kept}

    def total(own: Tree, statistics: Tree, x: Inputs) -> Tensor:
        return call(module, {**params, **own}, statistics, x)[0].square().sum()

    return total, trained, buffers


def _mixing_problems(module: nn.Module, inputs: Inputs) -> Iterator[Problem]:
    """Problems if a last sample marked as padding changes other samples' outputs or the buffers."""
    b, others = len(one_input(inputs)), _some(inputs, slice(0, -1))
    if b < (3 if sample_weight_names(module) else 2):
        return
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    padded = map_inputs(lambda part: torch.cat([part[:-1], torch.zeros_like(part[-1:])]), inputs)
    real = torch.ones(b, device=one_input(inputs).device)
    real[-1] = 0
    try:
        with torch.no_grad():
            outputs, with_padding = call(module, params, buffers, padded, real)
            alone, without = call(module, params, buffers, others)
        mixed = not _close(outputs[:-1], alone)
        # As one vector: the mean of a single layer may be zero but for rounding.
        mixed |= bool(without) and not _close(_flat(with_padding).double(), _flat(without).double())
        reason = "lets the samples of a batch influence each other, so padding would leak"
    except Exception as error:
        mixed, reason = True, f"does not run on padded batches: {cause(error)}"
    if mixed:
        yield Problem(f"{reason}: use only layers that treat samples alone {LOOP}", fatal=False)


def _some(inputs: Inputs, rows: slice) -> Any:
    return map_inputs(lambda part: part[rows], inputs)


def _few(inputs: Inputs) -> Any:
    return _some(inputs, slice(0, FEW))


def _twice(inputs: Inputs) -> Any:
    """The same few samples for two clients."""
    return map_inputs(lambda part: torch.stack([part[:FEW], part[:FEW]]), inputs)


def _shapes(inputs: Inputs) -> Any:
    return map_inputs(lambda part: tuple(part.shape), inputs)


def _flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in tree.values()])


def _close(a: Tensor, b: Tensor, factor: float = 1.0) -> bool:
    """Equal up to another order of summation."""
    tolerance = factor * {torch.float64: 1e-7, torch.float32: 1e-3}.get(a.dtype, 1e-2)
    largest = float(b.abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest)
