"""Second derivatives, which FairGrad needs: kernels that have them, and the product in reverse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def twice_differentiable(module: nn.Module) -> Iterator[None]:
    """Fused attention and cuDNN's recurrent layers have first derivatives only: while this lasts,
    torch computes attention by plain operations, and recurrent layers without cuDNN."""
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
    bent = [(s, v) for s, v in zip(slopes, along, strict=True) if s.requires_grad]
    if not bent:
        return tuple(torch.zeros_like(p) for p in parameters)
    some, their = zip(*bent, strict=True)
    return torch.autograd.grad(some, list(parameters), their, materialize_grads=True)
