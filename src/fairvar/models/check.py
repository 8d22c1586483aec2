"""Can this model be trained over many clients at once? All reasons why not, each with the fix."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from fairvar.errors import BadInput, shown
from fairvar.models.norm import SWAPPED, PlainBatchNorm, call, sample_weight_names, swap_batch_norm
from fairvar.models.twice import hessian_product, twice_differentiable
from fairvar.tree import Tree, scale, stack

FEW = 4  # samples on which second derivatives are tried: they are costly
SECOND = 100.0  # how much more they round
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


@dataclass
class Findings:
    problems: list[Problem]
    reverse_over_forward: bool = True  # right for second derivatives, as far as it was tried


def check_model(
    module: nn.Module,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    classes: int | None = None,
    *,
    together: bool = True,
    curvature: bool = True,
) -> list[Problem]:
    """All reasons against this module; an empty list means that it is fine.

    Layers and parameters are looked at; with sample `inputs` (b, …), on the module's device, the
    module is tried out as well: on a copy, with the random generators put back afterwards. Batch
    norm, frozen parameters and tied weights are fine. Without `together` it is not tried on several
    clients at once: torch.func takes a second to load, which a node spends on every message.
    `curvature`: also its second derivatives are tried, which FairGrad needs and no other method.
    """
    _check_arguments(module, inputs, targets, classes)
    for name, flag in (("together", together), ("curvature", curvature)):
        if not isinstance(flag, bool):
            raise BadInput(f"{name} = {shown(flag)}: give True or False")
    return examine(module, inputs, targets, classes, together, curvature).problems


def examine(
    module: nn.Module,
    inputs: Tensor | None,
    targets: Tensor | None = None,
    classes: int | None = None,
    together: bool = True,
    curvature: bool = True,
) -> Findings:
    """`check_model` with what only the engines want to know."""
    found = Findings([*_parameter_problems(module), *_layer_problems(module)])
    if inputs is None or any(is_lazy(p) for p in module.parameters()):
        return found
    devices = [inputs.device] if inputs.is_cuda else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices):
        warnings.simplefilter("ignore")  # vmap tells which operations it runs slowly
        wrong = list(_pass_problems(module, inputs, targets, classes))
        together = together and not found.problems
        found.problems += wrong
        if not any(problem.fatal for problem in found.problems):
            _try_engines(found, module, inputs, together, curvature)
    return found


def _check_arguments(module: object, inputs: object, targets: object, classes: object) -> None:
    if not isinstance(module, nn.Module):
        raise BadInput(f"module must be an nn.Module, not {type(module).__name__}")
    for name, value in (("inputs", inputs), ("targets", targets)):
        if value is not None and not isinstance(value, Tensor):
            raise BadInput(f"{name} must be a tensor, not {type(value).__name__}; use torch.tensor")
    if isinstance(inputs, Tensor) and (inputs.dim() == 0 or len(inputs) == 0):
        raise BadInput("inputs must be a batch of at least one sample: a tensor of shape (b, …)")
    if classes is not None and (not isinstance(classes, int) or classes < 1):
        raise BadInput(f"classes = {shown(classes)}: give the number of classes, 1 or more")


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
    if isinstance(layer, torch.jit.ScriptModule) or hasattr(layer, "_orig_mod"):
        yield "is compiled: give the module that it was made from", True
    if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
        yield "spreads a batch over devices: give its .module", True
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


# -- one pass, as torch alone would make it --------------------------------------------------------
def _pass_problems(
    module: nn.Module, inputs: Tensor, targets: Tensor | None, classes: int | None
) -> Iterator[Problem]:
    """In training and in evaluation mode, twice, and on a single sample."""
    shape = tuple(inputs.shape)
    try:
        with torch.no_grad():
            trial = copy.deepcopy(module).train()
            before = copy.deepcopy(trial.state_dict())
            outputs = trial(inputs)
            trial.load_state_dict(before)
            again = trial(inputs)
            evaluating = copy.deepcopy(module).eval()
            evaluated = evaluating(inputs)
            shape = tuple(inputs[:1].shape)
            alone = evaluating(inputs[:1])
    except Exception as error:
        yield Problem(f"fails on inputs of shape {shape}: {one_line(error)}")
        return
    found = list(_output_problems(outputs, inputs, targets, classes))
    found = found or list(_output_problems(evaluated, inputs, targets, classes))
    found = found or list(_output_problems(alone, inputs[:1], None, classes))
    yield from found
    if found:
        return
    if not _close(again, outputs):
        yield Problem(
            "gives other outputs in a second pass over the same batch: "
            "remove what is random or remembers earlier passes"
        )
        return
    try:
        _slopes(copy.deepcopy(module).train(), inputs)
    except Exception as error:
        yield Problem(f"cannot be differentiated: {one_line(error)}")


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


def _slopes(module: nn.Module, inputs: Tensor, twice: bool = False) -> tuple[Tensor, ...]:
    """Derivatives of Σ outputs² by autograd; `twice`: the Hessian times them."""
    leaves = [p for p in module.parameters() if p.requires_grad]
    total = module(inputs).square().sum()
    slopes = torch.autograd.grad(total, leaves, create_graph=twice, materialize_grads=True)
    return hessian_product(slopes, leaves, [s.detach() for s in slopes]) if twice else slopes


# -- as the engines make it ------------------------------------------------------------------------
def _try_engines(
    found: Findings, module: nn.Module, inputs: Tensor, together: bool, curvature: bool
) -> None:
    """What only shows when the module runs as the engines run it; nothing is said twice."""
    plain, inputs = _precise(copy.deepcopy(module).train(), inputs)
    bent = None
    if curvature:
        try:
            with twice_differentiable(plain):
                products = _slopes(copy.deepcopy(plain), inputs[:FEW], twice=True)
            bent = torch.cat([leaf.flatten() for leaf in products])
        except Exception as error:
            found.problems.append(Problem(
                "cannot be differentiated twice, which FairGrad needs and no other method: "
                + one_line(error)))  # fmt: skip
    try:
        trial = swap_batch_norm(plain)
        changed = list(_changed_in_place(trial, inputs))
        if changed:
            text = f"changes {', '.join(changed)} in place: assign a new tensor instead {_LOOP}"
            found.problems.append(Problem(text, fatal=False))
        elif together:
            found.problems += _vmap_problems(trial, inputs, bent)
            found.reverse_over_forward = bent is None or _bends_in_reverse(trial, inputs, bent)
        found.problems += _mixing_problems(trial, inputs)
    except Exception as error:
        text = f"does not run under torch.func {_LOOP}: {one_line(error)}"
        found.problems.append(Problem(text, fatal=False))


def _changed_in_place(module: nn.Module, inputs: Tensor) -> Iterator[str]:
    """Parameters and buffers that a pass writes into. (New values by assignment are fine.)"""
    for trial in (copy.deepcopy(module), copy.deepcopy(module).eval()):
        given = {name: leaf.detach().clone() for name, leaf in trial.state_dict().items()}
        before = copy.deepcopy(given)
        with torch.no_grad():
            call(trial, given, {}, inputs)
        changed = [name for name, leaf in before.items() if not torch.equal(given[name], leaf)]
        if changed:
            yield from changed
            return


def _precise(module: nn.Module, inputs: Tensor) -> tuple[nn.Module, Tensor]:
    """Both in float64 if that runs: deep nets round too much for a comparison in float32."""
    if not inputs.is_floating_point():
        return module, inputs
    try:
        double = copy.deepcopy(module).double()
        with torch.no_grad():
            copy.deepcopy(double)(inputs.double())
    except Exception:
        return module, inputs
    return double, inputs.double()


def _vmap_problems(module: nn.Module, inputs: Tensor, bent: Tensor | None) -> Iterator[Problem]:
    """Two clients, each with parameters, buffers and samples of its own, together and one by one.

    As in the engines: in the first step clients share the model, later they do not. `bent` is what
    the second derivative should be."""
    which = ""
    try:
        alike = _same_together(module, inputs)
        if alike and bent is not None:
            which = "has a second derivative that "
            alike = _bends_forward(module, inputs, bent)
    except Exception as error:
        text = f"{which}does not run under torch.func.vmap {_LOOP}: {one_line(error)}"
        yield Problem(text, fatal=False)
        return
    if not alike:
        yield Problem(f"{which}gives other numbers under torch.func.vmap {_LOOP}", fatal=False)


def _same_together(module: nn.Module, inputs: Tensor) -> bool:
    total, model, buffers = _functional(module)
    evaluating = copy.deepcopy(module).eval()

    def once(own: Tree, statistics: Tree, x: Tensor) -> tuple[Tree, Tensor]:
        frozen = {k: p for k, p in evaluating.named_parameters() if k not in own}
        with torch.no_grad():
            outputs = call(evaluating, {**own, **frozen}, statistics, x)[0]
        return grad(total)(own, statistics, x), outputs

    samples = torch.stack([inputs, inputs.flip(0)])
    models, twins = stack([model, scale(model, 0.5)]), _twins(buffers)
    for axes, given in (
        ((None, None, 0), (model, buffers, samples)),
        ((0, 0, 0), (models, twins, samples)),
    ):
        gradients, outputs = vmap(once, in_dims=axes)(*given)
        for i in range(2):
            own: list[Any] = [
                value if axis is None else _item(value, i)
                for value, axis in zip(given, axes, strict=True)
            ]
            gradient, alone = once(*own)
            same = _close(_flat(_item(gradients, i)), _flat(gradient))
            if not same or not _close(outputs[i], alone):
                return False
    return True


def _bends_forward(module: nn.Module, inputs: Tensor, bent: Tensor) -> bool:
    """The Hessian product of two clients, forward over reverse (as `engine/vmapped.py`)."""
    total, model, buffers = _functional(module)

    def product(own: Tree, statistics: Tree, x: Tensor) -> Tree:
        along = grad(total)(own, statistics, x)
        return jvp(lambda at: grad(total)(at, statistics, x), (own,), (along,))[1]

    few = inputs[:FEW]
    with twice_differentiable(module):
        found = vmap(product)(_twins(model), _twins(buffers), torch.stack([few, few]))
    return _close(_flat(_item(found, 0)), bent, SECOND)


def _bends_in_reverse(module: nn.Module, inputs: Tensor, bent: Tensor) -> bool:
    """The same in reverse over forward (as `engine/blocked.py`), which torch gets wrong for layer
    norm (seen in 2.13)."""
    total, model, buffers = _functional(module)
    few = inputs[:FEW]
    try:
        with twice_differentiable(module):
            along = grad(total)(model, buffers, few)

            def slope(at: Tree) -> Tensor:
                def each(x: Tensor) -> Tensor:
                    return jvp(lambda p: total(p, buffers, x), (at,), (along,))[1]

                return vmap(each)(torch.stack([few, few]))[0]

            return _close(_flat(grad(slope)(model)), bent, SECOND)
    except Exception:
        return False


def _functional(module: nn.Module) -> tuple[Callable[..., Tensor], Tree, Tree]:
    """Σ outputs² as a function of trained parameters, buffers and samples, and the former two."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    trained = {name: params[name] for name, p in module.named_parameters() if p.requires_grad}
    kept = module.state_dict()
    buffers = {name: b for name, b in module.named_buffers() if name in kept}

    def total(own: Tree, statistics: Tree, x: Tensor) -> Tensor:
        return call(module, {**params, **own}, statistics, x)[0].square().sum()

    return total, trained, buffers


def _mixing_problems(module: nn.Module, inputs: Tensor) -> Iterator[Problem]:
    """Is the last sample, called padding, left out of the others' outputs and of the buffers?"""
    if inputs.shape[0] < (3 if sample_weight_names(module) else 2):
        return
    padded = torch.cat([inputs[:-1], torch.zeros_like(inputs[-1:])])
    real = torch.ones(len(inputs), device=inputs.device)
    real[-1] = 0
    try:
        (outputs, buffers), (alone, own) = (
            _forward(module, padded, real),
            _forward(module, inputs[:-1]),
        )
        mixed = not _close(outputs[:-1], alone)
        mixed |= any(not _close(buffers[name].double(), own[name].double()) for name in own)
        reason = "lets the samples of a batch influence each other, so padding would leak"
    except Exception as error:
        mixed, reason = True, f"does not run on padded batches: {one_line(error)}"
    if mixed:
        yield Problem(f"{reason}: use only layers that treat samples alone {_LOOP}", fatal=False)


def _forward(module: nn.Module, inputs: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tree]:
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    with torch.no_grad():
        return call(module, params, buffers, inputs, real)


def _twins(tree: Tree) -> Tree:
    return {name: torch.stack([leaf, leaf]) for name, leaf in tree.items()}


def _item(value: Any, i: int) -> Any:
    return {k: leaf[i] for k, leaf in value.items()} if isinstance(value, dict) else value[i]


def _flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in tree.values()])


def _close(a: Tensor, b: Tensor, factor: float = 1.0) -> bool:
    """Equal up to another order of summation."""
    tolerance = factor * {torch.float64: 1e-7, torch.float32: 1e-3}.get(a.dtype, 1e-2)
    largest = float(b.abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest)


def one_line(error: Exception) -> str:
    """torch's own message, shortened to one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
