"""Steps of many clients as one compiled graph, for heavy models on a GPU.

`make_fx` traces the vectorised step, with its derivatives, into plain tensor operations, and
`torch.compile` compiles the traced graph, which has no functorch transforms. The layers are in
plain operations as well (`models/plain.py`), which the compiler fuses.

Compiling takes minutes for each shape. So there are two: a group of clients, with a mask of real
samples and without one. (Masks in batch norm make a step of MobileNetV2 a fifth slower.) A round
consists of as many calls as its active clients fill groups.

`FAIRVAR_COMPILED=FILE` keeps what the compiler made in a file, for later processes and for other
machines with the same GPU and torch: compiling then takes a fraction of the time. The file is a
list of torch's own caches, one for each graph. It holds code, so it is read only if nobody but the
user can write to it.
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fairvar.common.files import open_regular, write_bytes
from fairvar.common.process import COMPILING, Report
from fairvar.errors import BadInput, RunFailed, cause
from fairvar.models.norm import plain_attention

BACKEND = "inductor"
# Write out sums of up to 5 × 5 products: depthwise convolutions are then fused (models/plain.py).
OPTIONS: dict[str, Any] = {"unroll_reductions_threshold": 32}
MOST_TOGETHER = 32  # clients in a group

# Seconds that compiling takes, and what it saves per float of a sample's activations: epochs of
# q-FFL with MobileNetV2 took 384 ms instead of 776 (24,000 images; benchmarks/README.md).
PRICE, SAVED = 180.0, 4e-11

_COMPILED: dict[object, Callable[..., Any] | None] = {}  # None: it does not compile
_FAILED: set[object] = set()  # what does not compile in one shape is not tried in another
_SECONDS: dict[object, float] = {}  # that compiling took in another shape
_IN_FILE: set[tuple[str, str]] = set()  # names of what the file of the cache held
_LISTENERS: list[Callable[[str], object]] = []

KEPT_IN = "FAIRVAR_COMPILED"  # the environment variable with the file of the compiler's cache
DAMAGED = "it is damaged"
LARGEST = 8 << 30  # bytes of it; that of MobileNetV2 has 84 MB


def repays(rounds: int, samples: int, activations: int) -> bool:
    """Whether compiling costs less than it saves in all rounds, of so many samples each."""
    return SAVED * rounds * samples * activations > PRICE


def group_width(clients: int, most: int | None = None) -> int:
    """Clients per call: the calls of a full round are of one size."""
    most = MOST_TOGETHER if most is None else max(1, min(most, MOST_TOGETHER))
    return math.ceil(clients / math.ceil(clients / most))


@contextmanager
def announcing(listener: Callable[[str], object]) -> Iterator[None]:
    """Within, `listener` is called before compiling: with "compiling", or "compiling, about 40 s"
    where the same was compiled in another shape."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def announce(text: str) -> None:
    for listener in _LISTENERS:
        listener(text)


@contextmanager
def with_compiling(report: Report, done: int, total: int) -> Iterator[Report]:
    """A report of rounds that also says when they wait for the compiler."""
    last = done, total

    def rounds(done: int, total: int, what: str) -> None:
        nonlocal last
        last = done, total
        report(done, total, what)

    with announcing(lambda text: report(*last, text)):
        yield rounds


def of_group(
    key: object,
    step: Callable[..., Any],
    width: int,
    stacked: Any,
    weights: list[Tensor],
    shared: Any,
) -> tuple[Any, Any] | None:
    """`step(stacked, weights, shared)` compiled, for at most `width` clients along the first axis
    of `stacked` and `weights`; None if it does not compile. `key` says what it computes, apart from
    shapes. A step returns results of every client, and sums over them with these weights. (Copies
    of the first client, with weights of zero, fill a group: of zeros a model may make NaN.)"""
    clients = len(pytree.tree_leaves(stacked)[0])
    if clients < width:
        stacked = pytree.tree_map(lambda leaf: _filled(leaf, width, 1), stacked)
        weights = [_filled(leaf, width, 0) for leaf in weights]
    found = _call(key, step, (stacked, weights), shared)
    if found is None or clients == width:
        return found
    each, sums = found
    return pytree.tree_map(lambda leaf: leaf[:clients], each), sums


def in_groups(
    key: object,
    step: Callable[..., Any],
    width: int,
    stacked: Any,
    weights: list[Tensor],
    shared: Any,
) -> tuple[Any, Any] | None:
    """The same of any number of clients, group after group."""
    clients, made = len(pytree.tree_leaves(stacked)[0]), []
    for start in range(0, clients, width):
        some = slice(start, start + width)
        group, w = pytree.tree_map(
            lambda leaf, s=some: None if leaf is None else leaf[s], (stacked, weights)
        )
        found = of_group(key, step, width, group, w, shared)
        if found is None:
            return None
        made.append(found)
    each, sums = zip(*made, strict=True)
    return (
        pytree.tree_map(lambda *parts: torch.cat(parts), *each),
        pytree.tree_map(lambda *parts: sum(parts[1:], parts[0]), *sums),
    )


def _filled(leaf: Any, width: int, factor: int) -> Any:
    """Up to `width` rows: the first one times this factor."""
    if leaf is None:
        return leaf
    more = factor * leaf[:1].expand(width - len(leaf), *leaf.shape[1:])
    return torch.cat([leaf, more.to(leaf.dtype)])


def _laid_out(leaf: Tensor) -> Tensor:
    """With the strides of a new tensor, because others would be compiled again: those of a
    contiguous tensor are arbitrary along axes of length one."""
    if leaf.is_contiguous() and 1 not in leaf.shape:
        return leaf
    return leaf.contiguous().flatten().view(leaf.shape)


def _call(
    key: object, step: Callable[..., Any], group: tuple[Any, Any], shared: Any
) -> tuple[Any, Any] | None:
    if key in _FAILED:
        return None
    leaves, form = pytree.tree_flatten((*group, shared))
    with torch.no_grad():
        given = [_laid_out(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    shape = key, str(form), *((leaf.shape, leaf.dtype, leaf.device) for leaf in given)
    if shape not in _COMPILED:
        before = _SECONDS.get(key)
        announce(COMPILING if before is None else f"{COMPILING}, about {before:.0f} s")
        started = time.monotonic()
        with _kept_in_file():
            _COMPILED[shape] = _compile(step, leaves, form, given)
        _SECONDS[key] = time.monotonic() - started
    compiled = _COMPILED[shape]
    if compiled is None:
        _FAILED.add(key)
        return None
    with torch.no_grad():
        found: tuple[Any, Any] = compiled(*given)
        return found


def _compile(
    step: Callable[..., Any], leaves: list[Any], form: Any, given: list[Tensor]
) -> Callable[..., Any] | None:
    def flat(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return step(*pytree.tree_unflatten(filled, form))

    try:
        with torch.no_grad(), plain_attention(given[0].device):
            graph = make_fx(flat, tracing_mode="real")(*given)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            options = OPTIONS if BACKEND == "inductor" else None
            compiled = torch.compile(
                graph, fullgraph=True, dynamic=False, backend=BACKEND, options=options
            )
            compiled(*given)
    except Exception as error:  # of the recorder, the compiler or the tools that it starts
        warnings.warn(f"steps are computed without compiling them: {cause(error)}",
                      stacklevel=2)  # fmt: skip
        return None
    return compiled


# -- the compiler's cache --------------------------------------------------------------------------
@contextmanager
def _kept_in_file() -> Iterator[None]:
    """What is compiled within is kept in the file, beside what is there already."""
    name = os.environ.get(KEPT_IN)
    if not name:
        yield
        return
    _load(Path(name))
    try:  # a private class of torch, which another version may not have
        from torch.compiler._cache import CacheArtifactManager
    except ImportError as error:
        warnings.warn(f"{KEPT_IN} = {name} is not written: {cause(error)}", stacklevel=2)
        yield
        return
    # Each graph by itself: of what was saved in several calls torch loads only the last.
    with CacheArtifactManager.with_fresh_cache():
        yield
        made = torch.compiler.save_cache_artifacts()
    if made is not None:
        _save(Path(name), *made)


def _load(path: Path) -> None:
    """What earlier processes compiled, once per process. A damaged file only warns."""
    if _COMPILED or not path.exists():
        return
    content, log = _read(path), logging.getLogger("torch.compiler._cache")
    quiet, log.disabled = log.disabled, True  # it would show a traceback
    try:
        loaded, why = [torch.compiler.load_cache_artifacts(p) for p in _parts(content)], DAMAGED
    except Exception as error:
        loaded, why = [None], DAMAGED if isinstance(error, msgspec.MsgspecError) else cause(error)
    finally:
        log.disabled = quiet
    _IN_FILE.update(*(_names(found) for found in loaded if found is not None))
    if None in loaded:
        warnings.warn(f"{KEPT_IN} = {path} is not used: {why}", stacklevel=2)


def _save(path: Path, content: bytes, made: Any) -> None:
    if _names(made) <= _IN_FILE:
        return
    try:
        parts = _parts(_read(path)) if path.exists() else []
    except msgspec.MsgspecError:
        parts = []  # it is damaged
    try:
        write_bytes(path, msgspec.msgpack.encode([*parts, content]))
        path.chmod(0o600)
    except (RunFailed, OSError) as error:
        warnings.warn(f"{KEPT_IN} = {path} is not written: {cause(error)}", stacklevel=2)


def _names(found: Any) -> set[tuple[str, str]]:
    """Of the artifacts in what torch calls `CacheInfo`."""
    return {(kind, name) for kind, names in found.artifacts.items() for name in names}


def _parts(content: bytes) -> list[bytes]:
    return msgspec.msgpack.decode(content, type=list[bytes])


def _read(path: Path) -> bytes:
    """The file's bytes. They are run as code, so others must not be able to write them."""
    try:
        with open_regular(path, LARGEST) as file:
            facts = os.fstat(file.fileno())
            if hasattr(os, "getuid") and facts.st_uid != os.getuid():
                raise BadInput(f"{KEPT_IN} = {path} belongs to another user, and it holds code "
                               "that would be run; name a file of your own")  # fmt: skip
            if facts.st_mode & 0o022 and os.name == "posix":
                raise BadInput(f"{KEPT_IN} = {path} can be changed by other users, and it holds "
                               f"code that would be run: chmod go-w {path}")  # fmt: skip
            return file.read()
    except OSError as error:
        raise BadInput(f"{KEPT_IN} = {path} cannot be read: {error.strerror or error}") from None


def forget() -> None:
    """Free the compiled graphs of this process."""
    _COMPILED.clear()
    _FAILED.clear()
    _SECONDS.clear()
