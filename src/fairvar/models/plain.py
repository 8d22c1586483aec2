"""Convolutions and group norm in plain tensor operations, for clients with separate weights.

Under vmap a convolution whose weights differ from client to client becomes a grouped one, which
cuDNN computes group after group in kernels too small for the GPU. The forms here vmap and
differentiate twice in any order of modes.

For a compiler (`plain_layers`): slices, sums and one matrix product, which `make_fx` records as one
graph, so that they are fused with batch norm, activation and padding. On an H200 a compiled step of
100 clients with their own MobileNetV2 takes 11.7 ms instead of 73 (benchmarks/README.md). Without a
compiler they are slower than torch's own: every slice is copied.
- product: the k² shifted inputs side by side, times the kernel as a matrix; 1×1 kernels need no
  copies. For dense and grouped convolutions.
- shifted: the sum of k² shifted inputs, each times one number per channel. For depthwise ones. Its
  derivatives are written as such sums, too: autograd would add up k² slices in tensors of zeros,
  which took the compiler twice as long and made steps of 15.0 ms instead of 11.7.

Without a compiler (`swap_convolutions`): one batched matrix product. 50 clients × 64 images through
avgcnn take 5.8 ms a step instead of 10.2, with curvature 19.8 instead of 34.5
(docs/performance.md). A row of the matrix makes `columns` neighbouring output pixels at once, from
the k × (columns + k − 1) inputs that they see: fewer copies than k² of each input, for products
with some zeros in the (banded) weights.

For clients that train in turn on a CPU (`twice_layers`): torch's kernels for every derivative.

Group norm is rewritten because torch's own refuses, under vmap in forward mode, inputs whose
channels come last, which is how products leave them. Batch norm: `norm.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import conv2d, pad

from fairvar.models.norm import swap_layers

Pair = tuple[int, int]
# Larger dense kernels are not replaced: avgcnn's 5 × 5, 50 clients × 64, H200, compiled: 5.0 ms a
# step as grouped convolutions, 6.4 as products.
LARGEST = 9  # places


class _Recast(nn.Module):
    @classmethod
    def like(cls, layer: nn.Module) -> Any:
        """The same layer, which shares its parameters with `layer`."""
        made = copy.copy(layer)
        made.__class__ = cls
        made._parameters = dict(layer._parameters)
        return made


# --- for a compiler ------------------------------------------------------------------------------


def _seen(x: Tensor, kernel: Pair, stride: Pair) -> Tensor:
    """(b, c, h, w) → (b, c, rows, columns, *kernel): a view."""
    return x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])


def _weighted(x: Tensor, w: Tensor, stride: Pair) -> Tensor:
    """Σ_ij w_ij · x shifted by (i, j). Inductor's `unroll_reductions_threshold` must be large
    enough to unroll this short sum, because reductions are not fused with later operations."""
    return (_seen(x, (w.shape[1], w.shape[2]), stride) * w[:, None, None]).sum((4, 5))


def _spread(y: Tensor, w: Tensor, stride: Pair, size: Pair) -> Tensor:
    """Values `stride` apart, ⋆ the turned kernel: the adjoint of `_weighted` in x of this size."""
    b, c, rows, columns = y.shape
    if stride != (1, 1):
        apart = pad(y[:, :, :, None, :, None], (0, stride[1] - 1, 0, 0, 0, stride[0] - 1))
        y = apart.reshape(b, c, rows * stride[0], columns * stride[1])
    # Beyond the input are only zeros between the strides: negative padding cuts them off.
    below, right = size[0] - y.shape[2], size[1] - y.shape[3]
    y = pad(y, (w.shape[2] - 1, right, w.shape[1] - 1, below))
    return _weighted(y, w.flip(1, 2), (1, 1))


@dataclass(frozen=True)
class _Depthwise:
    """x ⋆ w channel by channel, for x (b, c, *size) and w (c, *kernel), and its two adjoints."""

    stride: Pair
    size: Pair
    kernel: Pair

    def y(self, x: Tensor, w: Tensor) -> Tensor:
        return _weighted(x, w, self.stride)

    def x(self, y: Tensor, w: Tensor) -> Tensor:
        return _spread(y, w, self.stride, self.size)

    def w(self, x: Tensor, y: Tensor) -> Tensor:
        return (_seen(x, self.kernel, self.stride) * y[..., None, None]).sum((0, 2, 3))


@dataclass(frozen=True)
class _Convolution:
    """The same by torch's kernels; `how`: stride, padding, dilation and groups."""

    how: tuple[Any, ...]
    size: tuple[int, ...]  # of x
    kernel: tuple[int, ...]  # of w

    def y(self, x: Tensor, w: Tensor) -> Tensor:
        return conv2d(x, w, None, *self.how)

    def x(self, y: Tensor, w: Tensor) -> Tensor:
        shape_of_x = y.new_empty(1).expand(self.size)  # its values are not used
        made: Tensor = self._adjoints(y, shape_of_x, w, (True, False, False))[0]
        return made

    def w(self, x: Tensor, y: Tensor) -> Tensor:
        shape_of_w = y.new_empty(1).expand(self.kernel)
        made: Tensor = self._adjoints(y, x, shape_of_w, (False, True, False))[1]
        return made

    def _adjoints(self, y: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, ...]) -> Any:
        """Of x, w and a bias; None where not wanted."""
        stride, padding, dilation, groups = self.how
        return torch.ops.aten.convolution_backward(
            y, x, w, None, stride, padding, dilation, False, (0, 0), groups, wanted
        )


class _Product(Function):
    """y = x ⋆ w, and its two adjoints.

    The form Σ y · (x ⋆ w) is linear in each of x, w and y. `made` names the one of which the
    derivative is computed from the other two; so the derivatives of such a map are such maps.
    """

    generate_vmap_rule = True
    FROM = {"y": ("x", "w"), "x": ("y", "w"), "w": ("x", "y")}  # noqa: RUF012

    @staticmethod
    def forward(a: Tensor, b: Tensor, made: str, maps: _Depthwise | _Convolution) -> Tensor:
        found: Tensor = getattr(maps, made)(a, b)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, *ctx.how = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        made, maps = ctx.how
        names = _Product.FROM[made]
        known = {made: gradient, **dict(zip(names, ctx.saved_tensors, strict=True))}
        found: list[Tensor | None] = []
        for name, needed in zip(names, ctx.needs_input_grad, strict=False):
            pair = [known[other] for other in _Product.FROM[name]]
            found.append(_Product.apply(*pair, name, maps) if needed else None)
        return (*found, None, None)

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None, *_: None) -> Tensor:
        a, b = ctx.saved_tensors
        parts = [] if da is None else [_Product.apply(da, b, *ctx.how)]
        parts += [] if db is None else [_Product.apply(a, db, *ctx.how)]
        found: Tensor = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return found


class PlainConv2d(_Recast, nn.Conv2d):
    """`nn.Conv2d` in slices, sums and products. The same parameters by the same names."""

    def forward(self, input: Tensor) -> Tensor:
        half = torch.is_autocast_enabled(input.device.type)
        kind = torch.get_autocast_dtype(input.device.type) if half else input.dtype
        padding = self._reversed_padding_repeated_twice
        x = pad(input, padding) if any(padding) else input
        depthwise = 1 < self.groups == self.in_channels
        y = self._shifted(x) if depthwise else self._product(x.to(kind))
        if self.bias is not None:
            y = y + self.bias.reshape(-1, 1, 1)
        return y.to(kind)

    def _shifted(self, x: Tensor) -> Tensor:
        """y_c = Σ_ij w_cij · x shifted by (i, j)_c; every input channel makes `times` outputs."""
        times = self.out_channels // self.in_channels
        if times == 1 and self.dilation == (1, 1):
            size = x.shape[2], x.shape[3]
            maps = _Depthwise(self.stride, size, self.kernel_size)  # type: ignore[arg-type]
            y: Tensor = _Product.apply(x, self.weight[:, 0], "y", maps)
            return y
        w = self.weight.reshape(1, self.in_channels, times, 1, 1, -1)
        total = None
        for place, seen in enumerate(self._shifts(x)):
            part = seen.unsqueeze(2) * w[..., place]
            total = part if total is None else total + part
        assert total is not None
        return total.flatten(1, 2)

    def _product(self, x: Tensor) -> Tensor:
        """y_o = Σ_i,place w_(o, i, place) · x_i shifted to the place"""
        shifts = self._shifts(x)
        seen = shifts[0] if len(shifts) == 1 else torch.stack(shifts, 2).flatten(1, 2)
        w = self.weight.flatten(1).to(x.dtype)
        if self.groups == 1:
            return torch.einsum("oi,bihw->bohw", w, seen)
        seen = seen.unflatten(1, (self.groups, -1))
        w = w.unflatten(0, (self.groups, -1))
        return torch.einsum("goi,bgihw->bgohw", w, seen).flatten(1, 2)

    def _shifts(self, x: Tensor) -> list[Tensor]:
        """The input that each place of the kernel sees, in the order of the kernel's places."""
        ways = zip(x.shape[2:], self.kernel_size, self.stride, self.dilation, strict=True)
        rows, columns = (
            [slice(i * d, i * d + size - d * (k - 1), s) for i in range(k)]
            for size, k, s, d in ways
        )
        return [x[:, :, row, column] for row in rows for column in columns]


class PlainGroupNorm(_Recast, nn.GroupNorm):
    """`nn.GroupNorm` in plain operations. The same parameters by the same names."""

    def forward(self, input: Tensor) -> Tensor:
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        x = x.unflatten(1, (self.num_groups, -1))
        axes = list(range(2, x.dim()))
        centred = x - x.mean(axes, keepdim=True)
        variance = centred.square().mean(axes, keepdim=True)
        y = (centred * torch.rsqrt(variance + self.eps)).flatten(1, 2)
        if self.affine:
            shape = (1, -1, *[1] * (input.dim() - 2))
            y = y * self.weight.reshape(shape) + self.bias.reshape(shape)
        return y.to(input.dtype)


def plain_layers(module: nn.Module, largest: int | None = LARGEST) -> nn.Module:
    """A copy with convolutions and group norms in plain operations, for a compiler.

    `largest`: dense kernels with more places than this are not replaced; nor are convolutions that
    pad with anything but zeros, subclasses and layers with hooks.
    """

    def fits(layer: nn.Conv2d) -> bool:
        depthwise = 1 < layer.groups == layer.in_channels
        places = layer.kernel_size[0] * layer.kernel_size[1]
        return depthwise or largest is None or places <= largest

    return swap_layers(module, lambda layer: _swapped(layer, PlainConv2d, fits))


# --- without a compiler --------------------------------------------------------------------------


class _Windows(Function):
    """(b, h, w, c) → (b, rows, parts, k, wide, c): the inputs of `columns` outputs, overlapping.
    `back`: the adjoint, in which every input gets the sum over the windows that contain it.

    Linear, so its derivatives are itself and its adjoint. Both are independent over samples, so
    vmap merges its axis with that of the samples. Torch has no batching rule for the adjoint."""

    @staticmethod
    def forward(x: Tensor, back: bool, height: int, kernel: int, columns: int) -> Tensor:
        if not back:
            windows = x.unfold(1, height, 1).unfold(2, columns + kernel - 1, columns)
            return windows.permute(0, 1, 2, 4, 5, 3).contiguous()
        b, rows, parts, _, wide, c = x.shape
        found = x.new_zeros(b, rows + height - 1, parts * columns + kernel - 1, c)
        for i in range(height):
            for part in range(parts):
                start = part * columns
                found[:, i : i + rows, start : start + wide] += x[:, :, part, i]
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.back, *ctx.how = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Windows.apply(gradient, not ctx.back, *ctx.how), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _Windows.apply(tangent, ctx.back, *ctx.how)

    @staticmethod
    def vmap(info: Any, axes: Any, x: Tensor, *how: Any) -> tuple[Tensor, int]:
        joined = x.movedim(axes[0], 0).flatten(0, 1)
        return _Windows.apply(joined, *how).unflatten(0, (info.batch_size, -1)), 0


class ProductConv2d(_Recast, nn.Conv2d):
    """`nn.Conv2d` with steps of one, as a matrix product. The same parameters by the same names."""

    def forward(self, input: Tensor) -> Tensor:
        padding = self._reversed_padding_repeated_twice
        x = pad(input, padding) if any(padding) else input
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        outputs, (height, kernel) = self.out_channels, self.kernel_size
        b, rows, width = x.shape[0], x.shape[2] - height + 1, x.shape[3] - kernel + 1
        # Columns must divide the width. About as many as the kernel is wide, so that no more than
        # half of the products are with zeros.
        columns = max(d for d in range(1, min(width, kernel) + 1) if width % d == 0)
        windows = _Windows.apply(x.permute(0, 2, 3, 1), False, height, kernel, columns)
        made = windows.reshape(b * rows * (width // columns), -1) @ self._band(columns)
        y = made.reshape(b, rows, width, outputs)
        return (y if self.bias is None else y + self.bias).permute(0, 3, 1, 2)

    def _band(self, columns: int) -> Tensor:
        """(k · wide · c, columns · outputs): the kernel, one place further for every column.

        Rows one longer than `wide`, written one after the other and read in rows of `wide`, move
        by one place each.
        """
        height, kernel = self.kernel_size
        wide = columns + kernel - 1
        w = pad(self.weight.permute(2, 3, 1, 0), (0, 0, 0, 0, 0, columns))
        shape = w.shape[2:]
        again = w.unsqueeze(1).expand(height, columns, wide + 1, *shape)
        flat = again.reshape(height, columns * (wide + 1), *shape)[:, : columns * wide]
        moved = flat.reshape(height, columns, wide, *shape).permute(0, 2, 3, 1, 4)
        return moved.reshape(height * wide * shape[0], columns * shape[1])


def swap_convolutions(module: nn.Module) -> nn.Module:
    """A copy in which convolutions with steps of one are products, and group norms plain; the
    module itself if it has no such convolution."""

    def fits(layer: nn.Conv2d) -> bool:
        return (layer.stride, layer.dilation, layer.groups) == ((1, 1), (1, 1), 1)

    made = swap_layers(module, lambda layer: _swapped(layer, ProductConv2d, fits))
    return made if any(isinstance(layer, ProductConv2d) for layer in made.modules()) else module


# --- for clients that train in turn ---------------------------------------------------------------


class TwiceConv2d(_Recast, nn.Conv2d):
    """`nn.Conv2d` whose derivatives of any order are convolutions and their adjoints. For the
    second, torch makes convolutions with kernels as large as the image, which take longer."""

    def forward(self, input: Tensor) -> Tensor:
        x, padding = input, self.padding
        if isinstance(padding, str):
            x, padding = pad(input, self._reversed_padding_repeated_twice), (0, 0)
        how = self.stride, padding, self.dilation, self.groups
        maps = _Convolution(how, tuple(x.shape), tuple(self.weight.shape))
        y: Tensor = _Product.apply(x, self.weight, "y", maps)
        return y if self.bias is None else y + self.bias.reshape(-1, 1, 1)


def twice_layers(module: nn.Module) -> nn.Module:
    """A copy with convolutions that are quick to differentiate twice."""

    def new(layer: nn.Module) -> nn.Module:
        plain = type(layer) is nn.Conv2d
        return _swapped(layer, TwiceConv2d, lambda _: True) if plain else layer

    return swap_layers(module, new)


def _swapped(layer: nn.Module, kind: type[_Recast], fits: Callable[[nn.Conv2d], bool]) -> nn.Module:
    if type(layer) is nn.GroupNorm:
        return PlainGroupNorm.like(layer)
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    if hooked or type(layer) is not nn.Conv2d or layer.padding_mode != "zeros":
        return layer
    return kind.like(layer) if fits(layer) else layer
