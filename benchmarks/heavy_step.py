"""One local step of many clients with their own MobileNetV2, in several forms: time and error.

    python benchmarks/heavy_step.py --clients 100 --samples 32 --size 32 --classes 100
    python benchmarks/heavy_step.py --device cpu --clients 3 --samples 2 --small --dtype float64

A prototype for compiled heavy models, not part of the package. `step` is FedAvg's local step, the
others are FairGrad's: the gradient and a Hessian-vector product along gradient - g. The transforms
(vmap, grad, jvp) act while `make_fx` records plain tensor operations. The recorded graph is what is
compiled, so that the compiler never sees a transform.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy, pad

from fairvar.models.norm import swap_batch_norm
from fairvar.models.zoo import MobileNetV2

Tree = dict[str, Tensor]


class Pointwise(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("oi,bihw->bohw", self.weight[:, :, 0, 0], x)


def _windows(x: Tensor, k: int, s: int) -> Tensor:
    """(b, c, h, w) → (b, c, rows, columns, k, k): a view."""
    return x.unfold(2, k, s).unfold(3, k, s)


def _apply(x: Tensor, w: Tensor, k: int, s: int, p: int) -> Tensor:
    c = w.shape[0]
    seen = _windows(pad(x, (p, p, p, p)), k, s)
    return (seen * w.reshape(1, c, 1, 1, k, k)).sum((4, 5))


def _back(gradient: Tensor, w: Tensor, k: int, s: int, p: int, size: tuple[int, int]) -> Tensor:
    """The adjoint in x: a convolution of the spread gradient with the turned kernel."""
    b, c, rows, columns = gradient.shape
    if s > 1:
        spread = pad(gradient.reshape(b, c, rows, 1, columns, 1), (0, s - 1, 0, 0, 0, s - 1))
        gradient = spread.reshape(b, c, rows * s, columns * s)
    high, wide = gradient.shape[2:]
    before = k - 1 - p
    after = (size[0] - high + k - 1 - before, size[1] - wide + k - 1 - before)
    given = pad(gradient, (before, after[1], before, after[0]))
    return _apply(given, w.flip(2, 3), k, 1, 0)


def _correlate(x: Tensor, gradient: Tensor, k: int, s: int, p: int) -> Tensor:
    """The adjoint in w."""
    seen = _windows(pad(x, (p, p, p, p)), k, s)
    return (seen * gradient[..., None, None]).sum((0, 2, 3)).unsqueeze(1)


class _Depthwise(torch.autograd.Function):
    """y = x * w, channel by channel. The three bilinear maps are each other's derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, k: int, s: int, p: int) -> Tensor:
        return _apply(x, w, k, s, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, *how = inputs
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)
        ctx.how = how

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        size = (x.shape[2], x.shape[3])
        back = _Back.apply(gradient, w, *ctx.how, size)
        return back, _Correlate.apply(x, gradient, *ctx.how), None, None, None

    @staticmethod
    def jvp(ctx: Any, x1: Tensor | None, w1: Tensor | None, *_: None) -> Tensor:
        x, w = ctx.saved_tensors
        return _sum(
            None if x1 is None else _Depthwise.apply(x1, w, *ctx.how),
            None if w1 is None else _Depthwise.apply(x, w1, *ctx.how),
        )


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None or b is None:
        found = b if a is None else a
        assert found is not None
        return found
    return a + b


class _Back(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        gradient: Tensor, w: Tensor, k: int, s: int, p: int, size: tuple[int, int]
    ) -> Tensor:
        return _back(gradient, w, k, s, p, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gradient, w, *how = inputs
        ctx.save_for_backward(gradient, w)
        ctx.save_for_forward(gradient, w)
        ctx.how = how

    @staticmethod
    def backward(ctx: Any, of_x: Tensor) -> tuple[Any, ...]:
        gradient, w = ctx.saved_tensors
        k, s, p, _ = ctx.how
        to_gradient = _Depthwise.apply(of_x, w, k, s, p)
        return to_gradient, _Correlate.apply(of_x, gradient, k, s, p), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, gradient1: Tensor | None, w1: Tensor | None, *_: None) -> Tensor:
        gradient, w = ctx.saved_tensors
        return _sum(
            None if gradient1 is None else _Back.apply(gradient1, w, *ctx.how),
            None if w1 is None else _Back.apply(gradient, w1, *ctx.how),
        )


class _Correlate(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gradient: Tensor, k: int, s: int, p: int) -> Tensor:
        return _correlate(x, gradient, k, s, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, gradient, *how = inputs
        ctx.save_for_backward(x, gradient)
        ctx.save_for_forward(x, gradient)
        ctx.how = how

    @staticmethod
    def backward(ctx: Any, of_w: Tensor) -> tuple[Any, ...]:
        x, gradient = ctx.saved_tensors
        size = (x.shape[2], x.shape[3])
        to_x = _Back.apply(gradient, of_w, *ctx.how, size)
        return to_x, _Depthwise.apply(x, of_w, *ctx.how), None, None, None

    @staticmethod
    def jvp(ctx: Any, x1: Tensor | None, gradient1: Tensor | None, *_: None) -> Tensor:
        x, gradient = ctx.saved_tensors
        return _sum(
            None if x1 is None else _Correlate.apply(x1, gradient, *ctx.how),
            None if gradient1 is None else _Correlate.apply(x, gradient1, *ctx.how),
        )


class Shifted(nn.Conv2d):
    """A depthwise convolution as a sum of shifted products, which a compiler fuses."""

    def forward(self, x: Tensor) -> Tensor:
        k, s, p = self.kernel_size[0], self.stride[0], self.padding[0]
        return _Depthwise.apply(x, self.weight, k, s, p)


class Windows(nn.Conv2d):
    """A small dense convolution: the shifted inputs side by side, one product."""

    def forward(self, x: Tensor) -> Tensor:
        k, s, p = self.kernel_size[0], self.stride[0], self.padding[0]
        x = pad(x, (p, p, p, p))
        rows = (x.shape[2] - k) // s + 1
        columns = (x.shape[3] - k) // s + 1
        parts = [
            x[:, :, i : i + s * (rows - 1) + 1 : s, j : j + s * (columns - 1) + 1 : s]
            for i in range(k)
            for j in range(k)
        ]
        seen = torch.stack(parts, 2).flatten(1, 2)
        return torch.einsum("oi,bihw->bohw", self.weight.flatten(1), seen)


def rewritten(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    for layer in module.modules():
        if type(layer) is nn.Conv2d:
            if layer.kernel_size == (1, 1):
                layer.__class__ = Pointwise
            elif layer.groups == layer.in_channels == layer.out_channels:
                layer.__class__ = Shifted
            else:
                layer.__class__ = Windows
    return module


def small_network(classes: int) -> nn.Module:
    torch.manual_seed(0)
    net = MobileNetV2(classes)
    net.features = nn.Sequential(*net.features[:3])  # type: ignore[index]
    net.classifier[1] = nn.Linear(24, classes)
    return net


def losses_of(module: nn.Module, buffers: Tree) -> Callable[[Tree, Tensor, Tensor], Tensor]:
    def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(module, {**params, **buffers}, (x,), tie_weights=False)
        return cross_entropy(outputs, y)

    return loss


def steps(loss: Any, lr: float, strength: float) -> dict[str, Callable[..., Any]]:
    """Of one client; all take (params, x, y, g)."""

    def moved(params: Tree, direction: Tree) -> Tree:
        return {k: params[k] - lr * direction[k] for k in params}

    def step(params: Tree, x: Tensor, y: Tensor, g: Tree) -> Any:
        gradient, value = grad_and_value(loss)(params, x, y)
        return moved(params, gradient), value

    def forward_over_reverse(params: Tree, x: Tensor, y: Tensor, g: Tree) -> Any:
        gradient, value = grad_and_value(loss)(params, x, y)
        away = {k: gradient[k] - g[k] for k in g}
        product = jvp(lambda at: grad_and_value(loss)(at, x, y)[0], (params,), (away,))[1]
        return moved(params, {k: gradient[k] + strength * product[k] for k in g}), value

    def reverse_over_forward(params: Tree, x: Tensor, y: Tensor, g: Tree) -> Any:
        gradient, value = grad_and_value(loss)(params, x, y)
        away = {k: (gradient[k] - g[k]).detach() for k in g}

        def slope(at: Tree) -> Tensor:
            return jvp(lambda p: loss(p, x, y), (at,), (away,))[1]

        product = grad_and_value(slope)(params)[0]
        return moved(params, {k: gradient[k] + strength * product[k] for k in g}), value

    def reverse_over_reverse(params: Tree, x: Tensor, y: Tensor, g: Tree) -> Any:
        gradient, value = grad_and_value(loss)(params, x, y)
        away = {k: (gradient[k] - g[k]).detach() for k in g}

        def along(at: Tree) -> Tensor:
            inner = grad_and_value(loss)(at, x, y)[0]
            return sum(((inner[k] * away[k]).sum() for k in g), torch.zeros((), device=x.device))

        product = grad_and_value(along)(params)[0]
        return moved(params, {k: gradient[k] + strength * product[k] for k in g}), value

    return {
        "step": step,
        "forward_over_reverse": forward_over_reverse,
        "reverse_over_forward": reverse_over_forward,
        "reverse_over_reverse": reverse_over_reverse,
    }


def recorded(function: Callable[..., Any], arguments: tuple[Any, ...]) -> torch.fx.GraphModule:
    """The plain operations of the vmapped function, without what is computed and not used."""
    flat = make_fx(function, tracing_mode="real")(*arguments)
    flat.graph.eliminate_dead_code()
    flat.recompile()
    return flat


def median_ms(call: Callable[[], Any], device: torch.device, turns: int) -> float:
    times = []
    for _ in range(turns):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def replayed(call: Callable[[], Any]) -> Callable[[], Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    return lambda: (graph.replay(), kept)[1]


def distance(a: Tree, b: Tree) -> float:
    """‖a − b‖ / ‖b‖ over all leaves."""
    apart = sum(float((a[k].double() - b[k].double()).square().sum()) for k in b)
    size = sum(float(b[k].double().square().sum()) for k in b)
    return (apart / size) ** 0.5


EXACT = 8  # clients that are compared with float64


def less(after: Tree, before: Tree, clients: int) -> Tree:
    return {k: after[k][:clients].double() - before[k][:clients].double() for k in before}


def in_float64(layers: nn.Module, buffers: Tree, name: str, given: Any) -> Tree:
    """The update of the first clients, in float64."""
    stacked, x, y, g = given

    def double(tree: Tree) -> Tree:
        return {k: v.double() if v.is_floating_point() else v for k, v in tree.items()}

    module = copy.deepcopy(layers).double()
    one = steps(losses_of(module, double(buffers)), 0.1, 0.01)[name]
    some = {k: v[:EXACT].double() for k, v in stacked.items()}
    after, _ = vmap(one, in_dims=(0, 0, 0, None))(some, x[:EXACT].double(), y[:EXACT], double(g))
    return less(after, some, EXACT)


def times() -> dict[str, float]:
    """Seconds of the compiler's phases."""
    found = torch._dynamo.utils.compilation_time_metrics
    large = {k: round(sum(v), 1) for k, v in found.items() if sum(v) > 1}
    return dict(sorted(large.items(), key=lambda pair: -pair[1])[:12])


def measured(
    name: str, layers: nn.Module, buffers: Tree, given: tuple[Any, ...], arguments: Any
) -> dict[str, Any]:
    """Times, errors and memory of one form."""
    row: dict[str, Any] = {}
    stacked, device = given[0], given[1].device
    every = vmap(steps(losses_of(layers, buffers), 0.1, 0.01)[name], in_dims=(0, 0, 0, None))
    start = time.perf_counter()
    flat = recorded(every, given)
    row["record_s"] = time.perf_counter() - start
    row["nodes"] = len(flat.graph.nodes)
    with torch.no_grad():
        eager, plain = every(*given)[0], flat(*given)[0]
    row["recorded_error"] = distance(plain, eager)
    exact = in_float64(layers, buffers, name, given)
    row["eager_error_of_update"] = distance(less(eager, stacked, EXACT), exact)
    del plain, eager
    row["eager_ms"] = median_ms(lambda: every(*given), device, 3)
    if arguments.no_compile:
        return row
    with torch.no_grad():
        start = time.perf_counter()
        fast = torch.compile(flat, fullgraph=True, dynamic=False)
        out, _ = fast(*given)
        row["compile_s"] = time.perf_counter() - start
        row["compiled_error_of_update"] = distance(less(out, stacked, EXACT), exact)
        del out
        if arguments.cache:
            row["cache_mb"] = keep_cache(arguments.cache)
        row["compile_times"] = times()
        row["compiled_ms"] = median_ms(lambda: fast(*given), device, arguments.turns)
        if device.type == "cuda":
            again = replayed(lambda: fast(*given))
            row["replayed_ms"] = median_ms(again, device, arguments.turns)
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return row


def keep_cache(path: str) -> float:
    """Megabytes of the compiler's cache; written unless the file is there."""
    made = torch.compiler.save_cache_artifacts()
    assert made is not None
    if not os.path.exists(path):
        with open(path, "wb") as stored:
            stored.write(made[0])
    return len(made[0]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--forms", default="step,forward_over_reverse")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--layers", default="rewritten", choices=["rewritten", "torch"])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--out", default="")
    parser.add_argument("--unroll", type=int, default=16)
    parser.add_argument("--cache", default="", help="file of the compiler's cache: read, written")
    parser.add_argument("--no-tf32", action="store_true")
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    torch.backends.cuda.matmul.allow_tf32 = not arguments.no_tf32
    torch.backends.cudnn.allow_tf32 = not arguments.no_tf32
    if arguments.cache and os.path.exists(arguments.cache):
        with open(arguments.cache, "rb") as stored:
            torch.compiler.load_cache_artifacts(stored.read())
    torch._inductor.config.unroll_reductions_threshold = arguments.unroll
    torch.manual_seed(0)
    net = small_network(arguments.classes) if arguments.small else MobileNetV2(arguments.classes)
    net = swap_batch_norm(net.to(device, dtype).train())
    layers = rewritten(net) if arguments.layers == "rewritten" else net
    params = {k: v.detach().clone() for k, v in net.named_parameters()}
    buffers = {k: v.detach().clone() for k, v in net.named_buffers()}
    n, b, size = arguments.clients, arguments.samples, arguments.size
    x = torch.randn(n, b, 3, size, size, device=device, dtype=dtype)
    y = torch.randint(0, arguments.classes, (n, b), device=device)
    stacked = {k: v.expand(n, *v.shape).clone() for k, v in params.items()}
    g = {k: torch.randn_like(v) * 1e-3 for k, v in params.items()}
    found: dict[str, Any] = {"torch": torch.__version__, **vars(arguments)}
    print(f"{len(params)} tensors, {sum(v.numel() for v in params.values()):,} numbers", flush=True)
    for name in arguments.forms.split(","):
        try:
            found[name] = measured(name, layers, buffers, (stacked, x, y, g), arguments)
        except Exception as error:  # a form that fails is a result, too
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        print(name, json.dumps(found[name]), flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
