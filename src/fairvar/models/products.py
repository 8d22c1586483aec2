"""Convolutions as matrix products, for clients with parameters of their own on a GPU.

Under vmap a convolution whose weights differ from client to client becomes a grouped one, which
cuDNN computes group after group in kernels too small for the GPU. As a batched matrix product all
clients share one kernel: on an H200, 50 clients × 64 images through avgcnn, a step takes 5.8 ms
instead of 10.2, with curvature 19.8 instead of 34.5 (docs/performance.md).

The textbook way, one row of a matrix for every output pixel, copies each input k² times. Here a row
of the matrix makes `columns` neighbouring output pixels at once, from the k × (columns + k − 1)
inputs that they see: fewer copies, for products with some zeros in the (banded) weights.
"""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import pad

from fairvar.models.norm import swap_layers


class _Windows(Function):
    """(b, h, w, c) → (b, rows, parts, k, wide, c): the inputs of `columns` outputs, overlapping.
    `back`: the adjoint, in which every input gets the sum over the windows that contain it.

    Linear, so its derivatives are itself and its adjoint; both treat samples alone, so vmap just
    joins its axis with theirs. Written by hand since torch has no batching rule for the adjoint.
    """

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


class ProductConv2d(nn.Conv2d):
    """`nn.Conv2d` with steps of one, as a matrix product. The same parameters by the same names."""

    @classmethod
    def like(cls, layer: nn.Conv2d) -> ProductConv2d:
        """The same layer; its parameters are the very tensors of `layer`."""
        made = copy.copy(layer)
        made.__class__ = cls
        made._parameters = dict(layer._parameters)
        return made  # type: ignore[return-value]

    def forward(self, input: Tensor) -> Tensor:
        padding = self._reversed_padding_repeated_twice
        x = pad(input, padding) if any(padding) else input
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        outputs, (height, kernel) = self.out_channels, self.kernel_size
        b, rows, width = x.shape[0], x.shape[2] - height + 1, x.shape[3] - kernel + 1
        columns = _at_once(width, kernel)
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


def _at_once(width: int, kernel: int) -> int:
    """Output pixels per row of the matrix: they must divide the width. About as many as the kernel
    is wide, so that no more than half of the products are with zeros."""
    return max(d for d in range(1, min(width, kernel) + 1) if width % d == 0)


def _swaps(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    return (
        type(layer) is nn.Conv2d
        and (layer.stride, layer.dilation, layer.groups) == ((1, 1), (1, 1), 1)
        and layer.padding_mode == "zeros"
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )


def swap_convolutions(module: nn.Module) -> nn.Module:
    """A copy in which convolutions with steps of one are products.

    Other convolutions (strides, groups such as MobileNet's depthwise ones) stay as they are.
    """
    if not any(_swaps(layer) for layer in module.modules()):
        return module
    return swap_layers(module, lambda layer: ProductConv2d.like(layer) if _swaps(layer) else layer)
