"""Modules as pure functions of their parameters, for many clients at once: calls without side
effects, batch norm in plain tensor operations, keyed dropout, and second derivatives.

Why not `nn.BatchNorm2d`: under vmap, torch's fused batch norm gives *silently wrong* second
derivatives in training mode (torch 2.11 on CUDA and 2.13 on CPU), it updates the running statistics
in place (so a second pass over the same batch updates them twice), and it cannot leave out padding.
`swap_batch_norm` replaces it by `PlainBatchNorm`, with the same names in the state dict.

Clients have ragged batches, padded to a common length b with any *finite* values; `real` (b,) holds
1 for a real sample and 0 for padding. For one client, inside vmap and grad:

    outputs, buffers = call(module, params, buffers, x, real)

The new running statistics come back as a value, so a pass whose statistics are not wanted (such as
the second pass of FairGrad) drops them.

Why not `nn.Dropout`: it draws from a generator, in the order of the calls, so masks would depend on
the chunks of clients and differ between two passes over a batch. `swap_dropout` replaces it by
`KeyedDropout`, whose mask is a function of a random key per sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from fairvar.common import rng
from fairvar.common.tree import Inputs, Tree
from fairvar.errors import BadInput

SWAPPED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LOW_PRECISION = (torch.float16, torch.bfloat16)


class PlainBatchNorm(_BatchNorm):
    """y = (x − μ) / √(σ² + ε) · weight + bias, with μ and σ² over the real samples of the batch.

    `sample_weight` (b,) marks real samples with 1 and padding with 0; None means all are real.
    Padding, which the loss leaves out, is normalised as well: a copy of a sample remains a copy, of
    which no later layer makes NaN. Running statistics follow torch:
    r ← (1 − momentum) r + momentum · statistic, the variance with n − 1 of the real values. A batch
    with fewer than two real values per channel has no variance and leaves them as they are.
    """

    sample_weight: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        if self.momentum is None:
            raise BadInput("batch norm with momentum=None cannot be federated: set momentum=0.1")
        self.register_buffer("sample_weight", None, persistent=False)

    @classmethod
    def like(cls, layer: _BatchNorm) -> PlainBatchNorm:
        """The same layer, which shares parameters and buffers with `layer`."""
        plain = cls(
            layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
        )
        plain._parameters.update(layer._parameters)
        plain._buffers.update(layer._buffers)
        return plain.train(layer.training)

    def forward(self, input: Float[Tensor, "b c ..."]) -> Float[Tensor, "b c ..."]:
        x = input.float() if input.dtype in _LOW_PRECISION else input
        if x.shape[1] != self.num_features:
            raise BadInput(f"batch norm is for {self.num_features} channels, got {x.shape[1]}")
        if self.training or self.running_mean is None or self.running_var is None:
            centred, variance = self._batch_statistics(x)
        else:
            centred, variance = x - _per_channel(self.running_mean, x), self.running_var
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        y = centred * _per_channel(scale, x)
        if self.bias is not None:
            y = y + _per_channel(self.bias, x)
        return y.to(input.dtype)

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x − μ and σ² of the real samples; updates the running statistics."""
        axes = [0, *range(2, x.dim())]
        values = x.numel() // x.shape[1]  # per channel
        if values < 2:
            raise BadInput(
                "batch norm needs more than one value per channel in training: "
                f"use a larger batch than {x.shape[0]} for inputs of shape {tuple(x.shape)}"
            )
        if self.sample_weight is None:
            count = x.new_full((), values)
            # Not torch.var_mean: on a CPU it takes longer than all of this.
            mean = x.sum(axes) / values
            centred = x - _per_channel(mean, x)
            variance = centred.square().sum(axes) / values
        else:
            if self.sample_weight.shape != x.shape[:1]:
                raise BadInput(
                    f"sample_weight of shape {tuple(self.sample_weight.shape)} does not fit a "
                    f"batch norm that sees {x.shape[0]} samples: do not fold axes into the batch"
                )
            real = (self.sample_weight > 0).reshape(-1, *[1] * (x.dim() - 1))
            count = real.sum().to(x.dtype) * (values // x.shape[0])
            divisor = count.clamp(min=1)
            mean = torch.where(real, x, 0).sum(axes) / divisor
            centred = x - _per_channel(mean, x)
            variance = torch.where(real, centred, 0).square().sum(axes) / divisor
        if self.training and self.running_mean is not None:
            self._remember(mean.detach(), variance.detach(), count)
        return centred, variance

    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """New running statistics by assignment, never in place: see the module's docstring."""
        enough = count >= 2
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for name, statistic in (("running_mean", mean), ("running_var", unbiased)):
            old = getattr(self, name)
            new = torch.lerp(old, statistic.to(old.dtype), self.momentum or 0.0)
            setattr(self, name, torch.where(enough, new, old))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked = self.num_batches_tracked + enough

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of spatial axes is fine; torch's base class asks for this method."""


DROPOUT: dict[type[nn.Module], bool] = {  # whether it drops whole channels
    nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True,
}  # fmt: skip
MOST_CALLS = 1 << 20  # of one layer in one pass


class KeyedDropout(nn.Module):
    """x / (1 − p) where a unit is kept, 0 where it is dropped, in training.

    `sample_keys` (b,) are the samples' random keys of this step. The mask is a hash of the key, the
    layer's number, the number of its call in this pass, and the unit. Without keys nothing is
    dropped, as in `check_model`.
    """

    sample_keys: Tensor | None

    def __init__(self, p: float, channels: bool, layer: int) -> None:
        super().__init__()
        self.p, self.channels, self.layer, self.calls = p, channels, layer, 0
        self.register_buffer("sample_keys", None, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        keys = self.sample_keys
        if not self.training or keys is None:
            return input
        if input.shape[0] != keys.shape[0]:
            raise BadInput(
                f"dropout sees {input.shape[0]} rows where the batch has {keys.shape[0]} samples: "
                "keep the samples on the first axis"
            )
        shape = input.shape[:2] if self.channels else input.shape
        keys = rng.numbered(keys, self.layer * MOST_CALLS + self.calls)
        self.calls += 1
        kept = rng.kept_units(keys, prod(shape[1:]), self.p)
        kept = kept.reshape(*shape, *[1] * (input.dim() - len(shape)))
        return torch.where(kept, input * (1 / (1 - self.p) if self.p < 1 else 0.0), 0.0)

    def extra_repr(self) -> str:
        return f"p={self.p}, channels={self.channels}, layer={self.layer}"


def _per_channel(value: Float[Tensor, " c"], x: Tensor) -> Tensor:
    return value.reshape(1, -1, *[1] * (x.dim() - 2))


def swap_layers(module: nn.Module, new: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A deep copy in which `new` may replace layers; shared layers stay shared."""
    module = copy.deepcopy(module)
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                made[child] = parent._modules[name] = made.get(child) or new(child)
    return new(module)


def swap_batch_norm(module: nn.Module) -> nn.Module:
    """A deep copy in which every batch norm is a `PlainBatchNorm`; state dicts fit both ways.

    Hooks on a batch norm itself are dropped; subclasses of torch's layers are not replaced
    (`check_model` reports them).
    """

    def plain(layer: nn.Module) -> nn.Module:
        return PlainBatchNorm.like(layer) if type(layer) in SWAPPED else layer  # type: ignore[arg-type]

    return swap_layers(module, plain)


def swap_dropout(module: nn.Module) -> nn.Module:
    """A deep copy in which every dropout of torch that drops anything is a `KeyedDropout`."""
    numbers = count()

    def keyed(layer: nn.Module) -> nn.Module:
        channels = DROPOUT.get(type(layer))
        if channels is None or not layer.p:
            return layer
        return KeyedDropout(float(layer.p), channels, next(numbers)).train(layer.training)  # type: ignore[arg-type]

    return swap_layers(module, keyed)


def dropout_layers(module: nn.Module) -> dict[str, KeyedDropout]:
    """The keyed dropout layers by name."""
    return {k: layer for k, layer in module.named_modules() if isinstance(layer, KeyedDropout)}


def apply(module: nn.Module, inputs: Inputs, keys: Tensor | None = None) -> Any:
    """The module's outputs, of one tensor or several; `keys`: of the samples, for dropout."""
    for layer in dropout_layers(module).values():
        layer.sample_keys, layer.calls = keys, 0
    if isinstance(inputs, Tensor):
        return module(inputs)
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def sample_weight_names(module: nn.Module) -> list[str]:
    """The names under which `functional_call` takes the (b,) weights, one per `PlainBatchNorm`."""
    return [
        f"{name}.sample_weight" if name else "sample_weight"
        for name, layer in module.named_modules()
        if isinstance(layer, PlainBatchNorm)
    ]


def call(
    module: nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Inputs,
    sample_weight: Shaped[Tensor, " b"] | None = None,
    sample_keys: Shaped[Tensor, " b"] | None = None,
) -> tuple[Any, Tree]:
    """Outputs and new buffers of `module` with these parameters; changes no argument. Several
    inputs come as a tuple or dict; `sample_keys` are for dropout.

    `functional_call` takes *one* dict, which torch updates with the reassigned buffers (a tuple of
    dicts would lose them).
    """
    state = {**params, **buffers}
    state.update({alias: state[name] for alias, name in aliases(module) if name in state})
    if sample_weight is not None:
        state.update(dict.fromkeys(sample_weight_names(module), sample_weight))
    if sample_keys is not None:
        for name, layer in dropout_layers(module).items():
            layer.calls, state[f"{name}.sample_keys" if name else "sample_keys"] = 0, sample_keys
    named = inputs if isinstance(inputs, dict) else {}
    several = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
    outputs = functional_call(module, state, several, named, tie_weights=False)
    return outputs, {name: state[name] for name in buffers}


def aliases(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(other name, first name) of every tied tensor.

    torch's `tie_weights=True` would set a layer that is used twice twice, and on the way out put
    the *given* tensors into the module for good (seen in 2.13); under vmap those are dead objects.
    """
    first: dict[int, str] = {}
    for prefix, layer in module.named_modules():  # a layer used twice comes once
        for leaf, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if tensor is not None and first.setdefault(id(tensor), name) != name:
                yield name, first[id(tensor)]


@contextmanager
def plain_attention(device: torch.device) -> Iterator[None]:
    """Attention in plain operations on a CPU, where torch's fused attention has no vmap rule and
    runs client by client, with a warning."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def twice_differentiable(module: nn.Module) -> Iterator[None]:
    """Attention in plain operations and recurrent layers without cuDNN, because the fused kernels
    have first derivatives only."""
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(layer, nn.RNNBase) for layer in module.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def hessian_product(
    slopes: Sequence[Tensor], parameters: Sequence[Tensor], along: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """∇²f · along from the slopes ∇f with their graph: reverse over reverse. Zero where the slopes
    do not depend on the parameters."""
    pairs = [(s, v) for s, v in zip(slopes, along, strict=True) if s.requires_grad]
    if not pairs:
        return tuple(torch.zeros_like(p) for p in parameters)
    some, their = zip(*pairs, strict=True)
    return torch.autograd.grad(some, list(parameters), their, materialize_grads=True)
