"""Local steps of many clients as one compiled graph, for heavy models on a GPU.

`make_fx` traces the vmapped step, with its derivatives, into plain tensor operations, and
`torch.compile` compiles the traced graph, which has no functorch transforms. The layers are in
plain operations as well (`models/plain.py`), which the compiler fuses.

Compiling takes minutes for each shape. So there are two: a group of clients with parameters of
their own, with a mask of real samples and without one. (Masks in batch norm make a step of
MobileNetV2 a fifth slower.) A round consists of as many calls as its active clients fill groups,
and the last group repeats a client.

`FAIRVAR_COMPILED=FILE` stores the compiler's cache in a file, for later processes and for other
machines with the same GPU and torch: compiling then takes a fraction of the time.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fairvar.errors import cause
from fairvar.files import write_bytes

BACKEND = "inductor"
# Write out sums of up to 5 × 5 products: depthwise convolutions are then fused (models/plain.py).
OPTIONS: dict[str, Any] = {"unroll_reductions_threshold": 32}
MOST_TOGETHER = 32  # clients in a group

# Seconds that compiling takes, and what it saves per float of a sample's activations: epochs of
# q-FFL with MobileNetV2 took 384 ms instead of 776 (24,000 images; benchmarks/README.md).
PRICE, SAVED = 180.0, 4e-11

_COMPILED: dict[object, Callable[..., Any] | None] = {}  # None: it does not compile
_FAILED: set[object] = set()  # keys that failed to compile; not tried again in other shapes


def repays(rounds: int, samples: int, activations: int) -> bool:
    """Whether compiling costs less than it saves in all rounds, of so many samples each."""
    return SAVED * rounds * samples * activations > PRICE


def group_width(clients: int) -> int:
    """Clients per call: the calls of a full round are of one size."""
    return math.ceil(clients / math.ceil(clients / MOST_TOGETHER))


def of_group(
    key: object, step: Callable[..., Any], width: int, stacked: Any, shared: Any
) -> Any | None:
    """`step(stacked, shared)` compiled, for at most `width` clients along the first axis of
    `stacked`; None if it does not compile. `key` says what it computes, apart from shapes."""
    clients = len(pytree.tree_leaves(stacked)[0])
    found = _call(key, step, pytree.tree_map(lambda leaf: _filled(leaf, width), stacked), shared)
    if found is None or clients == width:
        return found
    return pytree.tree_map(lambda leaf: leaf[:clients], found)


def _filled(leaf: Tensor | None, width: int) -> Tensor | None:
    """Repeat the last row up to `width` rows. Contiguous, because other strides would be compiled
    again."""
    if leaf is None or len(leaf) == width:
        return None if leaf is None else leaf.contiguous()
    rows = torch.arange(width, device=leaf.device).clamp(max=len(leaf) - 1)
    return leaf[rows]


def _call(key: object, step: Callable[..., Any], group: Any, shared: Any) -> Any | None:
    if key in _FAILED:
        return None
    leaves, form = pytree.tree_flatten((group, shared))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    shape = key, str(form), *((leaf.shape, leaf.dtype, leaf.device) for leaf in given)
    if shape not in _COMPILED:
        _COMPILED[shape] = _compile(step, leaves, form, given)
    compiled = _COMPILED[shape]
    if compiled is None:
        _FAILED.add(key)
        return None
    with torch.no_grad():
        return compiled(*given)


def _compile(
    step: Callable[..., Any], leaves: list[Any], form: Any, given: list[Tensor]
) -> Callable[..., Any] | None:
    def flat(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return step(*pytree.tree_unflatten(filled, form))

    kept = os.environ.get("FAIRVAR_COMPILED")
    try:
        if kept and not _COMPILED and Path(kept).exists():
            torch.compiler.load_cache_artifacts(Path(kept).read_bytes())
        with torch.no_grad():
            graph = make_fx(flat, tracing_mode="real")(*given)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            options = OPTIONS if BACKEND == "inductor" else None
            compiled = torch.compile(
                graph, fullgraph=True, dynamic=False, backend=BACKEND, options=options
            )
            compiled(*given)
        made = torch.compiler.save_cache_artifacts() if kept else None
        if kept and made is not None:
            write_bytes(Path(kept), made[0])
    except Exception as error:  # of make_fx, the compiler or its tools
        warnings.warn(f"local steps are computed without compiling them: {cause(error)}",
                      stacklevel=2)  # fmt: skip
        return None
    return compiled


def forget() -> None:
    """Free the compiled graphs of this process."""
    _COMPILED.clear()
    _FAILED.clear()
