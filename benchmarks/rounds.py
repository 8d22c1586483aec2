"""Time of a round: a bare per-client PyTorch loop against fairvar's engine, in one process.

The contenders alternate, so that a noisy machine disturbs both; what counts is the ratio of
medians. The loop is what a careful person writes by hand: load the global model, forward, backward,
SGD step, add up the client models. It has no data loader, no packaging: frameworks are slower.

    python benchmarks/rounds.py            # about a minute
    python benchmarks/rounds.py --repeat 9 --json
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fairvar as fv
from fairvar.engine.settings import TrainSettings
from fairvar.engine.state import State, initial_state
from fairvar.engine.task import make_task
from fairvar.engine.train import _make_run, _round, choose_path
from fairvar.models import build

METHODS = (
    fv.FedAvg(), fv.FairLoss(0.1, exact=True), fv.FairLoss(0.1), fv.QFFL(1.0, losses="batch"),
    fv.FairGrad(0.01), fv.FairGrad(0.01, exact=True),
)  # fmt: skip
CASES = (("multinomial", (1, 28, 28), 50, 16), ("lenet5", (3, 32, 32), 10, 32))


def federation(shape: tuple[int, ...], clients: int, samples: int) -> fv.Federation:
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(samples, *shape, generator=generator),
         torch.randint(0, 10, (samples,), generator=generator))
        for _ in range(clients)
    ]  # fmt: skip
    return fv.Federation.from_arrays(pairs)


def loop_round(module: nn.Module, data: fv.Federation, method: fv.Method, lr: float) -> None:
    """One round client by client. Exact methods need a first pass over all clients."""
    params = [p for p in module.parameters() if p.requires_grad]
    start = copy.deepcopy(module.state_dict())
    mean = None
    if method.probes:
        total = [torch.zeros_like(p) for p in params]
        for i in range(data.clients):
            x, y = data.train.of(i)
            grads = torch.autograd.grad(cross_entropy(module(x), y), params)
            total = [t + g / data.clients for t, g in zip(total, grads, strict=True)]
        mean = total
    new = {k: torch.zeros_like(v, dtype=torch.float32) for k, v in start.items()}
    for i in range(data.clients):
        module.load_state_dict(start)
        x, y = data.train.of(i)
        loss = cross_entropy(module(x), y)
        grads = torch.autograd.grad(loss, params, create_graph=method.curvature > 0)
        step = [g.detach() for g in grads]
        if method.curvature > 0:
            away = [g - m for g, m in zip(step, mean, strict=True)] if mean else step
            products = torch.autograd.grad(grads, params, away)
            step = [s + method.curvature * p for s, p in zip(step, products, strict=True)]
        with torch.no_grad():
            for p, s in zip(params, step, strict=True):
                p -= lr * s
        for name, value in module.state_dict().items():
            new[name] += value / data.clients
    module.load_state_dict(new)


def engine_round(model: str, data: fv.Federation, method: fv.Method) -> Callable[[], None]:
    settings = TrainSettings(lr=0.01)
    run = _make_run(make_task(model, data, "cross_entropy", 0), data, method, settings)
    path = choose_path(run, "auto")
    state: State = initial_state(method, run.task.params, run.task.buffers, data.clients)
    return lambda: _round(run, path, state, 1, None) and None


def measure(contenders: dict[str, Callable[[], None]], repeat: int) -> dict[str, list[float]]:
    """Milliseconds of CPU-bound work, alternating; the first call of each is not counted."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeat + 1):
        for name, work in contenders.items():
            started = time.perf_counter()
            work()
            if turn:
                times[name].append(1000 * (time.perf_counter() - started))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for model, shape, clients, samples in CASES:
        data = federation(shape, clients, samples)
        for method in METHODS:
            module = build(model, shape, 10, 0)
            times = measure(
                {"loop": lambda m=module, d=data, f=method: loop_round(m, d, f, 0.01),
                 "engine": engine_round(model, data, method)}, options.repeat)  # fmt: skip
            loop, ours = (statistics.median(times[k]) for k in ("loop", "engine"))
            rows.append({"model": model, "clients": clients, "batch": samples,
                         "method": method.label, "loop_ms": round(loop, 2),
                         "engine_ms": round(ours, 2), "ratio": round(loop / ours, 1)})  # fmt: skip
            if not options.json:
                print("{model:12} {clients:3} x {batch:2}  {method:10} loop {loop_ms:8} ms  "
                      "engine {engine_ms:7} ms  ratio {ratio:5}".format(**rows[-1]))  # fmt: skip
    if options.json:
        print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(),
                          "repeat": options.repeat, "rows": rows}, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
