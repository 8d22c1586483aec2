"""Heavy models: the engine's rounds beside layers in plain operations, eager and compiled.

    python benchmarks/heavy_gpu.py --seconds 500                # all, in order, until time is up
    python benchmarks/heavy_gpu.py --only mobilenet32 --forms block,pair
    python benchmarks/heavy_gpu.py --smoke                      # tiny sizes, on a CPU

One process measures everything in turns and prints a line as soon as it has it. $OUT (or --out) gets
`heavy.json` after every line, and `compile_cache.bin`, which --cache reads again.

The unit of work is a *tile*: one local step of T clients with their own parameters, buffers and a
mask of real samples. One shape serves one-step rounds and ragged epochs: clients are sorted by their
steps and cut into tiles, and a client that has finished has an empty mask, so its gradient is zero.

| form | what is compiled |
|---|---|
| eager | nothing: vmap(grad) of the plain layers |
| whole | the vmapped step, recorded by make_fx as plain operations, as one graph |
| block | every distinct block of the model, forward and backward apart (AOTAutograd); autograd links them |
| pair | the same for curvature: blocks that carry (value, tangent), recorded by make_fx from jvp; the gradient of the tangent of the loss is the Hessian-vector product: reverse over forward |
| whole_curved | gradient and forward-over-reverse product, recorded as one graph |
| twice | reverse over reverse: the backward of a block is itself a compiled block with a backward |
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
sys.path.append(str(ROOT / ".carry"))  # packages that the machine lacks (README.md)

import torch  # noqa: E402
import torch._inductor.config  # noqa: E402
from torch import Tensor, fx, nn  # noqa: E402
from torch.func import grad_and_value, jvp, vmap  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

try:
    import fairvar as fv
except ImportError as missing:  # the forms need torch alone; the engine's rows are left out
    print(f"without the engine: {missing}", flush=True)
    fv = None  # type: ignore[assignment]
    for name, path in (("fairvar", "fairvar"), ("fairvar.models", "fairvar/models")):
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT / "src" / path)]
        sys.modules[name] = package
    stub = types.ModuleType("jaxtyping")
    stub.__getattr__ = lambda name: type(name, (), {"__class_getitem__": lambda *_: Any})  # type: ignore[method-assign]
    sys.modules["jaxtyping"] = stub

from fairvar.models.norm import PlainBatchNorm, call, swap_batch_norm  # noqa: E402
from fairvar.models.plain import plain_layers  # noqa: E402
from fairvar.models.zoo import MobileNetV2  # noqa: E402

Tree = dict[str, Tensor]
LR, STRENGTH = 0.01, 1e-4
BACKEND = "inductor"
BLOCK_LAYERS = 8  # modules with more layers than this are cut further


# -- one client ------------------------------------------------------------------------------------
def masked_loss(outputs: Tensor, y: Tensor, real: Tensor) -> Tensor:
    losses = cross_entropy(outputs, y, reduction="none")
    return (losses * real).sum() / real.sum().clamp(min=1)


def client_gradient(module: nn.Module) -> Callable[..., Any]:
    """(params, buffers, x, y, real) → gradient, loss, new buffers"""

    def one(params: Tree, buffers: Tree, x: Tensor, y: Tensor, real: Tensor) -> Any:
        def loss(at: Tree) -> tuple[Tensor, Tree]:
            outputs, after = call(module, at, buffers, x, real)
            return masked_loss(outputs, y, real), after

        gradient, (value, after) = grad_and_value(loss, has_aux=True)(params)
        return gradient, value, after

    return one


def client_curvature(module: nn.Module) -> Callable[..., Any]:
    """The same with ∇²f (∇f − g): forward over reverse"""

    def one(params: Tree, buffers: Tree, x: Tensor, y: Tensor, real: Tensor, g: Tree) -> Any:
        def gradient_at(at: Tree) -> Tree:
            return client_gradient(module)(at, buffers, x, y, real)[0]

        gradient, value, after = client_gradient(module)(params, buffers, x, y, real)
        away = {k: gradient[k] - g[k] for k in g}
        product = jvp(gradient_at, (params,), (away,))[1]
        return gradient, value, after, product

    return one


# -- forms of a tile -------------------------------------------------------------------------------
# Each maker takes (module, example arguments) and returns a function
#   gradient(params, buffers, x, y, real)     → gradient, loss, new buffers
#   curved(params, buffers, x, y, real, g)    → gradient, loss, new buffers, product
def eager(module: nn.Module, given: tuple[Any, ...]) -> Callable[..., Any]:
    return vmap(client_gradient(module))


def eager_curved(module: nn.Module, given: tuple[Any, ...]) -> Callable[..., Any]:
    return vmap(client_curvature(module), in_dims=(0, 0, 0, 0, 0, None))


def recorded(function: Callable[..., Any], given: tuple[Any, ...]) -> fx.GraphModule:
    """The plain operations of a function with transforms, without what is not used."""
    with torch.no_grad():
        flat = make_fx(function, tracing_mode="real")(*given)
    flat.graph.eliminate_dead_code()
    flat.recompile()
    return flat


def compiled(flat: fx.GraphModule, backend: str = "") -> Callable[..., Any]:
    return torch.compile(flat, fullgraph=True, dynamic=False, backend=backend or BACKEND)


def whole(module: nn.Module, given: tuple[Any, ...]) -> Callable[..., Any]:
    return compiled(recorded(eager(module, given), given[:5]))


def whole_curved(module: nn.Module, given: tuple[Any, ...]) -> Callable[..., Any]:
    return compiled(recorded(eager_curved(module, given), given))


class Cut(fx.Tracer):
    """Leaves small modules whole: they are the blocks."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        layers = [child for child in m.modules() if not list(child.children())]
        inner = [child for child in m.children() if list(child.children())]
        return len(layers) <= BLOCK_LAYERS or not inner


class Blocks:
    """A model as a graph of blocks on tensors with a leading axis of clients.

    `kind`: "block" (plain), "pair" (value and tangent) or "twice" (with a backward that has a
    backward). Blocks with the same layers and shapes share what is compiled.
    """

    def __init__(self, module: nn.Module, kind: str = "block", compile: bool = True) -> None:
        self.module, self.kind, self.compile = module, kind, compile
        self.made: dict[object, Any] = {}
        root = nn.Sequential(module)  # so that a small model may be one block
        self.graph = Cut().trace(root)
        self.prefix = "0."
        self.blocks = {n.name: root.get_submodule(n.target) for n in self.graph.nodes
                       if n.op == "call_module"}  # fmt: skip

    def __call__(
        self, params: Tree, buffers: Tree, x: Tensor, real: Tensor, tangent: Tree | None = None
    ) -> tuple[Any, Tree]:
        """Outputs of all clients (pairs: and their tangents), and the new buffers."""
        after = dict(buffers)
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = (x, torch.zeros_like(x)) if tangent is not None else x
            elif node.op == "output":
                return values[node.args[0]], after
            elif node.op == "call_module":
                name = (node.target + ".").removeprefix(self.prefix)
                own = {k.removeprefix(name): v for k, v in params.items() if k.startswith(name)}
                kept = {k.removeprefix(name): v for k, v in buffers.items() if k.startswith(name)}
                moved = None
                if tangent is not None:
                    moved = {k: tangent[name + k] for k in own}
                at = values[node.args[0]]
                values[node], new = self._block(self.blocks[node.name], own, kept, at, real, moved)
                after.update({name + k: v for k, v in new.items()})
            else:
                values[node] = self._glue(node, values)
        raise AssertionError

    def _glue(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """What stands between blocks, operation by operation."""
        names = list(node.all_input_nodes)

        def one(*tensors: Tensor) -> Any:
            env = dict(zip(names, tensors, strict=True))
            args = fx.node.map_arg(node.args, lambda n: env[n])
            kwargs = fx.node.map_arg(node.kwargs, lambda n: env[n])
            if node.op == "call_method":
                return getattr(args[0], node.target)(*args[1:], **kwargs)
            return node.target(*args, **kwargs)

        given = [values[n] for n in names]
        if isinstance(given[0], tuple):
            primals, tangents = zip(*given, strict=True)
            return vmap(lambda p, t: jvp(one, p, t))(tuple(primals), tuple(tangents))
        return vmap(one)(*given)

    def _block(
        self, block: nn.Module, own: Tree, kept: Tree, at: Any, real: Tensor, moved: Tree | None
    ) -> tuple[Any, Tree]:
        masks = any(isinstance(layer, PlainBatchNorm) for layer in block.modules())

        def one(p: Tree, b: Tree, x: Tensor, mask: Tensor) -> tuple[Tensor, Tree]:
            return call(block, p, b, x, mask if masks else None)

        if moved is not None:

            def pair(p: Tree, b: Tree, x: Any, mask: Tensor, dp: Tree) -> Any:
                primals, tangents = (p, x[0]), (dp, x[1])
                y, dy, new = jvp(lambda q, z: one(q, b, z, mask), primals, tangents, has_aux=True)
                return (y, dy), new

            return self._call(block, pair, (own, kept, at, real, moved))
        if self.kind == "twice":
            return self._twice(block, one, own, kept, at, real)
        return self._call(block, one, (own, kept, at, real))

    def _call(self, block: nn.Module, function: Any, given: tuple[Any, ...], mark: str = "") -> Any:
        """The vmapped function on these tensors, compiled once for each kind of block."""
        leaves = torch.utils._pytree.tree_leaves(given)
        key = (mark, repr(block), *((t.shape, t.stride()) for t in leaves))
        if key not in self.made:
            plain = torch.utils._pytree.tree_map(lambda t: t.detach(), given)
            flat = recorded(vmap(function), plain)
            # (The backend "aot_eager" of --smoke mistakes strides in backward passes of blocks.)
            self.made[key] = compiled(flat, "inductor") if self.compile else flat
        return self.made[key](*given)

    def _twice(
        self, block: nn.Module, one: Any, own: Tree, kept: Tree, x: Tensor, real: Tensor
    ) -> tuple[Tensor, Tree]:
        names = list(own)
        made, new = [], {}

        def forward(x: Tensor, *leaves: Tensor) -> Tensor:
            p = dict(zip(names, leaves, strict=True))
            y, after = self._call(block, one, (p, kept, x, real))
            new.update(after)
            return y

        def backward(p: Tree, b: Tree, x: Tensor, mask: Tensor, dy: Tensor) -> Any:
            _, pull = torch.func.vjp(lambda q, z: one(q, b, z, mask)[0], p, x)
            return pull(dy)

        class Block(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, *leaves: Tensor) -> Tensor:
                ctx.save_for_backward(x, *leaves)
                return made[0](x, *leaves)

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Any:
                x, *leaves = ctx.saved_tensors
                p = dict(zip(names, leaves, strict=True))
                gp, gx = self._call(block, backward, (p, kept, x, real, dy), "backward")
                return gx, *(gp[k] for k in names)

        made.append(forward)
        return Block.apply(x, *own.values()), new


def _leaves(params: Tree) -> Tree:
    return {k: v.detach().requires_grad_() for k, v in params.items()}


def _grad(total: Tensor, params: Tree, more: bool = False) -> Tree:
    found = torch.autograd.grad(total, list(params.values()), create_graph=more)
    return dict(zip(params, found, strict=True))


def block(
    module: nn.Module, given: tuple[Any, ...], kind: str = "block", compile: bool = True
) -> Callable[..., Any]:
    model = Blocks(module, kind, compile)

    def gradient(params: Tree, buffers: Tree, x: Tensor, y: Tensor, real: Tensor) -> Any:
        at = _leaves(params)
        outputs, after = model(at, buffers, x, real)
        losses = vmap(masked_loss)(outputs, y, real)
        return _grad(losses.sum(), at), losses.detach(), after

    return gradient


def pair(module: nn.Module, given: tuple[Any, ...], compile: bool = True) -> Callable[..., Any]:
    """The gradient by plain blocks, the product by blocks of (value, tangent)."""
    first, model = block(module, given, compile=compile), Blocks(module, "pair", compile)

    def curved(params: Tree, buffers: Tree, x: Tensor, y: Tensor, real: Tensor, g: Tree) -> Any:
        gradient, loss, after = first(params, buffers, x, y, real)
        away = {k: gradient[k] - g[k] for k in g}
        at = _leaves(params)
        outputs, _ = model(at, buffers, x, real, away)

        def slope(o: Tensor, do: Tensor, y: Tensor, real: Tensor) -> Tensor:
            return jvp(lambda out: masked_loss(out, y, real), (o,), (do,))[1]

        slopes = vmap(slope)(*outputs, y, real)
        return gradient, loss, after, _grad(slopes.sum(), at)

    return curved


def twice(module: nn.Module, given: tuple[Any, ...], compile: bool = True) -> Callable[..., Any]:
    model = Blocks(module, "twice", compile)

    def curved(params: Tree, buffers: Tree, x: Tensor, y: Tensor, real: Tensor, g: Tree) -> Any:
        at = _leaves(params)
        outputs, after = model(at, buffers, x, real)
        losses = vmap(masked_loss)(outputs, y, real)
        slopes = _grad(losses.sum(), at, more=True)
        gradient = {k: v.detach() for k, v in slopes.items()}
        along = [(gradient[k] - g[k]) for k in g]
        found = torch.autograd.grad([slopes[k] for k in g], list(at.values()), along)
        return gradient, losses.detach(), after, dict(zip(at, found, strict=True))

    return curved


FORMS: dict[str, Callable[..., Any]] = {
    "eager": eager, "whole": whole, "block": block,
    "eager_curved": eager_curved, "pair": pair, "twice": twice, "whole_curved": whole_curved,
}  # fmt: skip
CURVED = ("eager_curved", "pair", "twice", "whole_curved")


# -- a tile that can be repeated -------------------------------------------------------------------
class Tile:
    """One local step of T clients on fixed tensors, recorded as a CUDA graph where there is one."""

    def __init__(self, form: str, module: nn.Module, data: Data, clients: int) -> None:
        self.data, self.clients, self.curved = data, clients, form in CURVED
        device, b = data.x.device, data.batch
        net = {k: v.detach() for k, v in module.named_parameters()}
        state = {k: v.detach() for k, v in module.named_buffers()}
        self.params = {k: v.expand(clients, *v.shape).clone() for k, v in net.items()}
        self.buffers = {k: v.expand(clients, *v.shape).clone() for k, v in state.items()}
        self.rows = torch.randint(len(data.x), (clients, b), device=device)
        self.real = torch.ones(clients, b, device=device, dtype=data.x.dtype)
        self.g = {k: torch.zeros_like(v) for k, v in net.items()}
        x, y = data.x[self.rows], data.y[self.rows]
        self.function = FORMS[form](module, (self.params, self.buffers, x, y, self.real, self.g))
        self.loss = torch.zeros(clients, device=device)
        self.graph: Any = None

    def compute(self) -> None:
        x, y = self.data.x[self.rows], self.data.y[self.rows]
        given = (self.params, self.buffers, x, y, self.real)
        gradient, loss, buffers, *product = self.function(*given, *([self.g] * self.curved))
        with torch.no_grad():
            names = list(self.params)
            moved = [gradient[k] for k in names]
            if product:
                moved = torch._foreach_add(moved, [product[0][k] for k in names], alpha=STRENGTH)
            self.direction = dict(zip(names, moved, strict=True))
            self.gradient = gradient
            torch._foreach_add_([self.params[k] for k in names], list(moved), alpha=-LR)
            for k, v in buffers.items():
                self.buffers[k].copy_(v)
            self.loss.copy_(loss)

    def warm_up(self) -> float:
        """Compiles and records; returns seconds."""
        start = time.perf_counter()
        self.compute()
        _wait(self.data.x)
        seconds = time.perf_counter() - start
        if self.data.x.is_cuda:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.compute()
            torch.cuda.current_stream().wait_stream(side)
            gc.collect()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.compute()
        return seconds

    def step(self) -> None:
        if self.graph is None:
            self.compute()
        else:
            self.graph.replay()

    def start(self, x: Tree, buffers: Tree) -> None:
        torch._foreach_copy_(
            list(self.params.values()), [x[k].expand_as(v) for k, v in self.params.items()]
        )
        for k, v in self.buffers.items():
            v.copy_(buffers[k].expand_as(v))


class Data:
    """Noise in the paper's sizes; clients with Dirichlet 0.1's ragged counts."""

    def __init__(self, case: Case, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(0)
        n, size = case.clients, case.size
        shape = (case.samples, 3, size, size)
        self.x = torch.randn(shape, device=device)
        self.y = torch.randint(case.classes, (case.samples,), generator=draw).to(device)
        # Sizes as the label-wise Dirichlet gives them: a sum of `classes` shares each.
        shares = torch.distributions.Dirichlet(torch.full((n,), 0.1))
        torch.manual_seed(0)
        counts = (shares.sample((case.classes,)).mean(0) * case.samples).long().clamp(min=4)
        self.counts = sorted(counts.tolist(), reverse=True)
        self.batch, self.classes = case.batch, case.classes

    def steps(self, client: int) -> int:
        return -(-self.counts[client] // self.batch)


class Case:
    def __init__(
        self, model: str, clients: int, batch: int, size: int, classes: int, samples: int
    ) -> None:
        self.model, self.clients, self.batch = model, clients, batch
        self.size, self.classes, self.samples = size, classes, samples

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        if self.model == "avgcnn":
            left = ((self.size - 4) // 2 - 4) // 2
            return nn.Sequential(
                nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(64 * left * left, 512), nn.ReLU(),
                nn.Linear(512, self.classes),
            )  # fmt: skip
        net = MobileNetV2(self.classes)
        if self.model == "short":  # for --smoke
            net.features = nn.Sequential(*net.features[:3])  # type: ignore[index]
            net.classifier[1] = nn.Linear(24, self.classes)
        return net

    def layers(self, device: torch.device, layers: str) -> nn.Module:
        net = swap_batch_norm(self.network().to(device).train())
        return net if layers == "torch" else plain_layers(net, largest=None)


CASES = {
    "mobilenet32": Case("mobilenet_v2", 100, 32, 32, 100, 24_000),
    "avgcnn": Case("avgcnn", 50, 64, 32, 10, 40_000),
    "mobilenet64": Case("mobilenet_v2", 100, 32, 64, 200, 44_000),
}
SMOKE = {
    "mobilenet32": Case("short", 5, 4, 16, 6, 100),
    "avgcnn": Case("avgcnn", 5, 4, 16, 10, 100),
    "mobilenet64": Case("short", 5, 4, 24, 6, 60),
}


# -- rounds ----------------------------------------------------------------------------------------
def epoch_round(tile: Tile, x: Tree, buffers: Tree, rows: Tensor, order: Tensor) -> Tree:
    """A local epoch of all clients, tile after tile; returns Σ p_i (x_i − x)."""
    data, T = tile.data, tile.clients
    n = len(data.counts)
    total = {k: torch.zeros_like(v) for k, v in x.items()}
    for first in range(0, n, T):
        tile.start(x, buffers)
        clients = torch.arange(first, min(first + T, n))
        for step in range(data.steps(first)):
            at = _schedule(data, clients, step)
            tile.rows[: len(clients)].copy_(rows[at[0]], non_blocking=True)
            tile.real.zero_()
            tile.real[: len(clients)].copy_(at[1], non_blocking=True)
            tile.step()
        weight = torch.tensor(data.counts[first : first + T], device=rows.device) / len(data.x)
        for k, v in tile.params.items():
            moved = v[: len(clients)] - x[k]
            total[k] += torch.tensordot(weight.to(v.dtype), moved, 1)
    return total


_SCHEDULES: dict[object, tuple[Tensor, Tensor]] = {}


def _schedule(data: Data, clients: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Rows and mask of one step, made once: the engine knows them before the round, too."""
    key = (id(data), int(clients[0]), len(clients), step)
    if key not in _SCHEDULES:
        counts = torch.tensor(data.counts)[clients]
        starts = torch.tensor([0, *data.counts]).cumsum(0)[clients]
        place = step * data.batch + torch.arange(data.batch)
        real = place[None] < counts[:, None]
        rows = torch.where(real, starts[:, None] + place[None], starts[:, None])
        rows = rows.clamp(max=len(data.x) - 1)
        _SCHEDULES[key] = rows.to(data.x.device), real.to(data.x.device, data.x.dtype)
    return _SCHEDULES[key]


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def median_ms(call: Callable[[], Any], x: Tensor, turns: int) -> float:
    times = []
    for _ in range(turns):
        _wait(x)
        start = time.perf_counter()
        call()
        _wait(x)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def distance(a: Tree, b: Tree) -> float:
    """‖a − b‖ / ‖b‖ over all leaves."""
    apart = sum(float((a[k].double() - b[k].double()).square().sum()) for k in b)
    return float((apart / sum(float(b[k].double().square().sum()) for k in b)) ** 0.5)


# -- what is measured ------------------------------------------------------------------------------
class Report:
    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.out = Path(arguments.out or os.environ.get("OUT", "."))
        self.begun, self.seconds = time.perf_counter(), arguments.seconds
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        self.found: dict[str, Any] = {"torch": torch.__version__, "device": name, "rows": []}
        self.cache = 0.0

    @property
    def left(self) -> float:
        return float(self.seconds - (time.perf_counter() - self.begun))

    def row(self, **row: Any) -> None:
        row["at_s"] = round(time.perf_counter() - self.begun)
        self.found["rows"].append(row)
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" if k in NAMES else f"{k} {v}"
                 for k, v in row.items())  # fmt: skip
        print(" | ".join(shown), flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "heavy.json").write_text(json.dumps(self.found, indent=1))

    def keep_cache(self) -> None:
        made = torch.compiler.save_cache_artifacts()
        if made is not None:
            (self.out / "compile_cache.bin").write_bytes(made[0])
            print(f"compile cache: {len(made[0]) / 1e6:.1f} MB", flush=True)


NAMES = ("case", "form", "layers", "what")


def engine_rows(report: Report, name: str, case: Case, device: torch.device, what: str) -> None:
    """The engine's rounds, through the public function."""
    if fv is None:
        return
    data = Data(case, device)
    cuts = [0, *torch.tensor(data.counts).cumsum(0).tolist()]
    cuts[-1] = max(cuts[-2] + 4, min(cuts[-1], len(data.x)))
    x, y = data.x.cpu(), data.y.cpu()
    if what == "step":
        n, b = case.clients, case.batch
        pairs = [(x[i * b : (i + 1) * b], y[i * b : (i + 1) * b]) for i in range(n)]
    else:
        pairs = [(x[a:b], y[a:b]) for a, b in pairwise(cuts)]
    fed = fv.Federation.from_arrays(pairs, classes=case.classes)
    more: dict[str, Any] = {"local_epochs": 1} if what == "epoch" else {}
    methods = {"FedAvg": fv.FedAvg(), "q-FFL": fv.QFFL(q=0.1), "FairGrad": fv.FairGrad(STRENGTH)}
    for label, method in methods.items():
        if report.left < 30 or (what == "epoch" and label == "q-FFL"):
            continue
        marks: list[float] = [time.perf_counter()]

        def mark(done: int, of: int, marks: list[float] = marks) -> None:
            _wait(data.x)
            marks.append(time.perf_counter())

        try:
            fv.train(
                case.network(), fed, method, 5 if what == "epoch" else 12, LR, device=str(device),
                batch_size=case.batch, evaluate_every=10**6, evaluate_splits=("train",),
                evaluate_local=False, precision="tf32", progress=mark, **more,
            )  # fmt: skip
        except Exception as error:
            report.row(case=name, form="engine", what=f"{label} {what}", failed=str(error)[:200])
            continue
        times = [1000 * (b - a) for a, b in pairwise(marks)]
        # The last is evaluated.
        report.row(case=name, form="engine", what=f"{label} {what}",
                   ms=statistics.median(times[3:-1]), first_s=times[0] / 1000)  # fmt: skip
        _clear()


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def exact_update(case: Case, tile: Tile, clients: int = 4) -> Any:
    """Gradient (and product) of the first clients in float64 by torch's own layers."""
    net = case.layers(tile.data.x.device, "torch").double()
    some = slice(0, clients)
    params = {k: v[some].double() for k, v in tile.params.items()}
    buffers = {
        k: v[some].double() if v.is_floating_point() else v[some] for k, v in tile.buffers.items()
    }
    x, y = tile.data.x[tile.rows[some]].double(), tile.data.y[tile.rows[some]]
    g = {k: v.double() for k, v in tile.g.items()}
    maker = eager_curved if tile.curved else eager
    given = (params, buffers, x, y, tile.real[some].double(), g)
    found = maker(net, given)(*given[: 6 if tile.curved else 5])
    return found[0], (found[3] if tile.curved else None)


def form_rows(
    report: Report, name: str, case: Case, form: str, layers: str, clients: int, data: Data,
    epoch: bool, exact: bool,
) -> None:  # fmt: skip
    """One form with tiles of so many clients: a step, a one-step round, an epoch round."""
    label = {"case": name, "form": form, "layers": layers, "clients": clients}
    try:
        module = case.layers(data.x.device, layers)
        begun = time.perf_counter()
        tile = Tile(form, module, data, clients)
        seconds = time.perf_counter() - begun  # recording
        if exact:
            gradient, product = exact_update(case, tile)
            begun = time.perf_counter()
            made = tile.function(
                tile.params, tile.buffers, data.x[tile.rows], data.y[tile.rows], tile.real,
                *([tile.g] * tile.curved),
            )  # fmt: skip
            _wait(data.x)
            seconds += time.perf_counter() - begun  # compiling
            some = {k: v[:4] for k, v in made[0].items()}
            label["gradient_error"] = distance(some, gradient)
            if product is not None:
                label["product_error"] = distance({k: v[:4] for k, v in made[3].items()}, product)
            del gradient, product, made, some
        if data.x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds += tile.warm_up()
        report.row(**label, what="local step", ms=median_ms(tile.step, data.x, 10),
                   first_s=seconds, **_memory())  # fmt: skip
        for key in ("gradient_error", "product_error"):
            label.pop(key, None)
        if report.left < 0:
            return
        x = {k: v.detach().clone() for k, v in module.named_parameters()}
        buffers = {k: v.detach().clone() for k, v in module.named_buffers()}
        weights = torch.full((clients,), 1 / case.clients, device=data.x.device)
        tiles = -(-case.clients // clients)

        def one_step_round() -> Any:
            total = {k: torch.zeros_like(v) for k, v in x.items()}
            norms = []
            for _ in range(tiles):
                tile.start(x, buffers)
                tile.step()
                norms.append(sum(v.square().flatten(1).sum(1) for v in tile.direction.values()))
                for k, v in tile.direction.items():
                    total[k] += torch.tensordot(weights, v, 1)
            return total, norms

        what = "FairGrad round of one step" if tile.curved else "FedAvg/q-FFL round of one step"
        report.row(**label, what=what, ms=median_ms(one_step_round, data.x, 5))
        if epoch and report.left > 0:
            rows = torch.arange(len(data.x), device=data.x.device)
            epoch_round(tile, x, buffers, rows, rows)
            ms = median_ms(lambda: epoch_round(tile, x, buffers, rows, rows), data.x, 3)
            what = "FairGrad epoch" if tile.curved else "FedAvg epoch"
            steps = [data.steps(i) for i in range(0, case.clients, clients)]
            report.row(**label, what=what, ms=ms, tile_steps=sum(steps),
                       waste=sum(steps) * clients * case.batch / len(data.x))  # fmt: skip
    except Exception as error:
        report.row(**label, what="failed", failed=f"{type(error).__name__}: {str(error)[:300]}")
    finally:
        _clear()


def _memory() -> dict[str, float]:
    if not torch.cuda.is_available():
        return {}
    return {"peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def aaggff_rows(report: Report, device: torch.device, smoke: bool) -> None:
    """Multinomial regression, 50 clients × 16 samples."""
    if fv is None:
        return
    n, b = (5, 4) if smoke else (50, 16)
    x, y = torch.randn(n, b, 784), torch.randint(10, (n, b))
    fed = fv.Federation.from_arrays([(x[i], y[i]) for i in range(n)], classes=10)
    for label, method in (("FedAvg", fv.FedAvg()), ("AAggFF", fv.AAggFF())):
        marks: list[float] = []

        def mark(done: int, of: int, marks: list[float] = marks) -> None:
            if done % 20 == 0:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                marks.append(time.perf_counter())

        found = fv.train(
            "multinomial", fed, method, 200, 0.1, device=str(device), evaluate_every=10**6,
            evaluate_splits=("train",), evaluate_local=False, progress=mark,
        )  # fmt: skip
        times = [50 * (b - a) for a, b in pairwise(marks[2:-1])]
        report.row(case="aaggff", form="engine", what=f"{label} multinomial {n} x {b}",
                   ms=statistics.median(times),
                   captured=str(found.provenance["captured"]))  # fmt: skip


def plan(names: list[str], forms: list[str], smoke: bool) -> list[tuple[Any, ...]]:
    """(case, form, layers, clients per tile, epoch?, compare with float64?), the most telling
    first; "engine" rows in between so that both meet the same machine."""
    whole_tile, quarter = (5, 2) if smoke else (100, 25)
    found: list[tuple[Any, ...]] = [
        ("mobilenet32", "engine", "step", 0, False, False),
        ("mobilenet32", "whole", "plain", quarter, True, True),
        ("mobilenet32", "whole", "plain", whole_tile, False, False),
        ("avgcnn", "engine", "epoch", 0, False, False),
        ("avgcnn", "whole", "torch", 5 if smoke else 50, True, False),
        ("avgcnn", "whole", "plain", 5 if smoke else 50, True, False),
        ("avgcnn", "whole_curved", "torch", 5 if smoke else 50, True, False),
        ("mobilenet64", "whole", "plain", quarter, True, False),
        ("mobilenet32", "whole_curved", "plain", quarter, True, True),
        ("mobilenet32", "engine", "epoch", 0, False, False),
        ("mobilenet64", "engine", "step", 0, False, False),
        ("mobilenet32", "block", "plain", quarter, True, False),
        ("mobilenet32", "pair", "plain", quarter, True, False),
        ("mobilenet32", "twice", "plain", quarter, False, False),
        ("mobilenet64", "pair", "plain", quarter, True, False),
        ("mobilenet32", "eager", "plain", quarter, False, False),
        ("mobilenet32", "eager", "torch", quarter, False, False),
        ("mobilenet64", "engine", "epoch", 0, False, False),
    ]  # fmt: skip
    return [row for row in found if row[0] in names and (not forms or row[1] in forms)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=500, help="stop starting rows after this")
    parser.add_argument("--only", default="", help="cases, with commas: " + ", ".join(CASES))
    parser.add_argument(
        "--forms", default="", help="forms, with commas: engine, " + ", ".join(FORMS)
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--out", default="")
    parser.add_argument("--cache", default="", help="file of the compiler's cache to read")
    parser.add_argument("--no-tf32", action="store_true")
    parser.add_argument("--backend", default="", help="of torch.compile; --smoke: aot_eager")
    arguments = parser.parse_args()
    global BACKEND
    BACKEND = arguments.backend or ("aot_eager" if arguments.smoke else "inductor")
    device = torch.device("cpu" if arguments.smoke else "cuda")
    torch.backends.cuda.matmul.allow_tf32 = not arguments.no_tf32
    torch.backends.cudnn.allow_tf32 = not arguments.no_tf32
    torch._dynamo.config.recompile_limit = 1000
    torch._inductor.config.unroll_reductions_threshold = 32
    if arguments.cache and os.path.exists(arguments.cache):
        torch.compiler.load_cache_artifacts(Path(arguments.cache).read_bytes())
    report = Report(arguments, device)
    cases = SMOKE if arguments.smoke else CASES
    names = [n for n in arguments.only.split(",") if n] or ["aaggff", *CASES]
    forms = [f for f in arguments.forms.split(",") if f]
    if "aaggff" in names and (not forms or "engine" in forms):
        aaggff_rows(report, device, arguments.smoke)
    held: dict[str, Data] = {}
    for name, form, layers, clients, epoch, exact in plan(names, forms, arguments.smoke):
        if report.left < 20:
            print("time is up", flush=True)
            break
        if name not in held:
            held.clear()
            _SCHEDULES.clear()
            _clear()
            if form != "engine":
                held[name] = Data(cases[name], device)
        if form == "engine":
            engine_rows(report, name, cases[name], device, layers)
            continue
        form_rows(report, name, cases[name], form, layers, clients, held[name], epoch, exact)
    with contextlib.suppress(Exception):
        report.keep_cache()


if __name__ == "__main__":
    sys.exit(main())
