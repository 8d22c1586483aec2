"""Every method on the GPU, against the plain loop on the CPU; and paths of one step, timed.

    python benchmarks/gpu_check.py                  # equality: worst relative difference in float64
    python benchmarks/gpu_check.py --compiled       # compiled steps: one, and ragged epochs
    python benchmarks/gpu_check.py --grid           # runs of a sweep in one matrix product
    python benchmarks/gpu_check.py --paths          # `blocked` against `vmapped`: ms per round
    python benchmarks/gpu_check.py --curvature      # FairGrad against a plain step, in every path

CI has no GPU. This runs on the device what the equivalence tests run on a CPU: methods x models x
local work, full and partial participation, rounds recorded as CUDA graphs.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
sys.path.append(str(ROOT / ".carry"))  # packages that the machine lacks (README.md)

import torch  # noqa: E402

import fairvar as fv  # noqa: E402

METHODS_HERE = {
    "FedAvg": fv.FedAvg(),
    "AFL": fv.AFL(step=0.1),
    "q-FFL": fv.QFFL(q=0.5),
    "AAggFF": fv.AAggFF(),
    "FairLoss": fv.FairLoss(strength=0.1),
    "FairLoss*": fv.FairLoss(strength=0.1, exact=True),
    "FairGrad": fv.FairGrad(strength=0.05),
    "FairGrad*": fv.FairGrad(strength=0.05, exact=True),
}
WORK = {
    "one step": {},
    "mini-batch": {"batch_size": 8},
    "epoch": {"batch_size": 8, "local_epochs": 1},
    "half of the clients": {"participation": 0.5},
    "half, epoch": {"participation": 0.5, "batch_size": 8, "local_epochs": 1},
    "clipped": {"clip_norm": 0.5},
    "no local models": {"evaluate_local": False},
}


def worst_difference(a: fv.History, b: fv.History) -> float:
    """Of parameters, losses and weights, relative to the largest entry of each. All parameters
    together: those of which the gradient is zero in theory (biases before a batch norm) hold
    nothing but rounding errors."""
    whole = [torch.cat([p.cpu().flatten() for p in h.state.params.values()]) for h in (a, b)]
    pairs = [(whole[0], whole[1])]
    pairs += [(a.loss, b.loss), (a.weights, b.weights)]
    pairs += [(a.evaluated_loss[k], b.evaluated_loss[k]) for k in b.evaluated_loss]
    gaps = [float((x - y).abs().nan_to_num().max() / y.abs().nan_to_num().max()) for x, y in pairs]
    return max(gaps)


def check(device: str) -> int:
    fed = fv.load_federation(
        "mnist_1000", clients=12, partition=fv.Dirichlet(alpha=0.3), seed=0, samples=300
    )
    worst, failed = 0.0, 0
    for (work, options), model in itertools.product(WORK.items(), ("multinomial", "lenet5")):
        row = []
        for name, method in METHODS_HERE.items():
            common = dict(rounds=3, lr=0.05, dtype=torch.float64, evaluate_every=2, **options)
            want = fv.train(model, fed, method, engine="reference", **common)
            got = fv.train(model, fed, method, device=device, **common)
            gap = worst_difference(got, want)
            worst, failed = max(worst, gap), failed + (not gap <= 1e-10)
            row.append(f"{name} {gap:.0e}")
        print(f"{model:12} {work:20} " + "  ".join(row), flush=True)
    print(f"worst {worst:.1e}; {failed} above 1e-10")
    return 1 if failed else 0


def check_compiled(device: str, backend: str) -> int:
    """`compile=True` against the plain loop on the CPU: a small MobileNetV2, and with curvature a
    CNN with batch norm. Clients of different sizes: one step (pooled or blocked) and epochs, with
    padded batches (masks in batch norm) and without."""
    from fairvar.engine.kernels import compiled
    from fairvar.models.zoo import Bottleneck

    nn = torch.nn
    compiled.BACKEND = backend or compiled.BACKEND
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [nn.Conv2d(3, 8, 3, 2, 1), Bottleneck(8, 8, 1, 2), Bottleneck(8, 12, 2, 2)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    models = {
        "depthwise": nn.Sequential(*blocks, *end, nn.Linear(12, 4)),
        "dense": nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), *end, nn.Linear(8, 4)
        ),
    }
    fed = federation([9, 4, 6], (3, 8, 8), 4)
    worst, failed = 0.0, 0
    work = {
        "one step": {"batch_size": 4},
        "one padded step": {"batch_size": 8},
        "ragged epoch": {"batch_size": 4, "local_epochs": 1},
        "drop_last": {"batch_size": 4, "local_epochs": 1, "drop_last": True},
    }
    started = time.monotonic()
    for (kind, model), (name, options) in itertools.product(models.items(), work.items()):
        row = []
        labels = ("FedAvg", "FairLoss*", "q-FFL", "FairGrad") if kind == "depthwise" else ()
        for label in labels or ("FairGrad",):
            common = dict(rounds=2, lr=0.05, dtype=torch.float64, evaluate_every=2,
                          evaluate_splits=("train",), **options)  # fmt: skip
            want = fv.train(model, fed, METHODS_HERE[label], engine="reference", **common)
            got = fv.train(model, fed, METHODS_HERE[label], device=device, compile=True, **common)
            gap = worst_difference(got, want)
            left = None in compiled._COMPILED.values()  # computed without compiling: no check
            if left:
                compiled.forget()
            worst, failed = max(worst, gap), failed + (left or not gap <= 1e-10)
            row.append(f"{label} {gap:.0e}" + (" NOT COMPILED" if left else ""))
        after = f"after {time.monotonic() - started:.0f} s"
        print(f"{kind:12} {name:20} " + "  ".join([*row, after]), flush=True)
    print(f"worst {worst:.1e}; {failed} above 1e-10 or not compiled")
    return 1 if failed else 0


def check_grid(device: str) -> int:
    """Runs that train together on the device, each against its single run on the CPU."""
    from fairvar.engine.grid import Member, train_grid
    from fairvar.engine.settings import EvaluateSettings, TrainSettings

    fed = fv.load_federation("digits", clients=8, partition=fv.Dirichlet(alpha=0.3), samples=240)
    worst = 0.0
    for name, work in itertools.product(METHODS_HERE, ("one step", "mini-batch", "epoch")):
        method, when = METHODS_HERE[name], EvaluateSettings(every=3)
        numbers = dict(rounds=6, dtype="float64", **WORK[work])
        runs = [TrainSettings(lr=lr, seed=seed, device=device, **numbers)
                for lr in (0.02, 0.05) for seed in (0, 1)]  # fmt: skip
        found = train_grid([Member("multinomial", method, run) for run in runs], fed,
                           "cross_entropy", when)  # fmt: skip
        gaps = []
        for run, got in zip(runs, found, strict=True):
            numbers["dtype"] = torch.float64
            want = fv.train("multinomial", fed, method, lr=run.lr, seed=run.seed,
                            engine="reference", evaluate_every=3, **numbers)  # fmt: skip
            pairs = [(got.state.params[k].cpu(), v) for k, v in want.state.params.items()]
            pairs += [(got.accuracy[k], want.accuracy[k]) for k in want.accuracy]
            gaps += [float((x - y).abs().nan_to_num().max()) for x, y in pairs]
        worst = max(worst, *gaps)
        print(f"{name:10} {work:12} {max(gaps):.0e}", flush=True)
    print(f"worst {worst:.1e}")
    return 1 if worst > 1e-10 else 0


def federation(samples: list[int], shape: tuple[int, ...], classes: int) -> fv.Federation:
    torch.manual_seed(0)
    train = [(torch.randn(m, *shape), torch.randint(0, classes, (m,))) for m in samples]
    return fv.Federation.from_arrays(train=train, classes=classes)


def paths(device: str) -> int:
    """Medians of rounds in alternating turns."""
    even, ragged = [32] * 50, [8 + (37 * i) % 120 for i in range(50)]
    cases = [
        ("lenet5", (1, 28, 28), 10, even),
        ("avgcnn", (3, 32, 32), 10, even),
        ("avgcnn", (3, 32, 32), 10, ragged),
        ("mobilenet_v2", (3, 32, 32), 100, [32] * 20),
    ]
    for model, shape, classes, samples in cases:
        fed = federation(samples, shape, classes)
        for name in ("q-FFL", "FairGrad", "FairGrad*"):
            found: dict[str, list[float]] = {"blocked": [], "vmapped": []}
            for _, engine in itertools.product(range(3), found):
                found[engine].append(round_ms(model, fed, METHODS_HERE[name], device, 12, engine))
            row = {k: round(min(v), 2) for k, v in found.items()}
            kind = "even" if len(set(samples)) == 1 else "ragged"
            print(f"{model:13} {kind:7} {name:10} {json.dumps(row)}", flush=True)
    return 0


def round_ms(
    model: str, fed: fv.Federation, method: fv.Method, device: str, rounds: int, engine: str,
    **options: object,
) -> float:  # fmt: skip
    """The median of later rounds. On a CPU the processor time of one thread."""
    marks: list[float] = []
    cuda = device == "cuda"

    def mark(done: int, total: int) -> None:
        if cuda:
            torch.cuda.synchronize()
        marks.append(time.perf_counter() if cuda else time.process_time())

    fv.train(model, fed, method, rounds=rounds, lr=1e-6, device=device, engine=engine,
             precision="tf32" if cuda else "full", evaluate_every=1000, evaluate_local=False,
             evaluate_splits=("train",), progress=mark, **options)  # fmt: skip
    gaps = [1000 * (b - a) for a, b in itertools.pairwise(marks)]
    return statistics.median(gaps[rounds // 3 : -1])


def curvature(device: str) -> int:
    """One step of MobileNetV2 in every path, in alternating turns: milliseconds per round, and how
    many times those of FedAvg in the same path and of FedAvg in its fastest one ("pooled")."""
    cuda = device == "cuda"
    clients, images, turns = (20, 32, 2) if cuda else (4, 8, 3)
    torch.set_num_threads(1)
    fed = federation([images] * clients, (3, 32, 32), 100)
    steps = [("pooled", "FedAvg")]
    steps += itertools.product(("blocked", "vmapped", "reference"), ("FedAvg", "FairGrad"))
    steps += [("blocked", "FairGrad*")]
    found: dict[tuple[str, str], list[float]] = {step: [] for step in steps}
    for _, (engine, name) in itertools.product(range(turns), steps):
        rounds = 4 if engine == "reference" else 8  # the loop takes seconds a round
        found[engine, name].append(
            round_ms("mobilenet_v2", fed, METHODS_HERE[name], device, rounds, engine)
        )
    print(f"MobileNetV2, {clients} clients × {images} images of 32×32; torch {torch.__version__}")
    for (engine, name), times in found.items():
        ratios = [
            statistics.median(a / b for a, b in zip(times, found[plain, "FedAvg"], strict=True))
            for plain in (engine, "pooled")
        ]
        print(f"{engine:10} {name:10} {statistics.median(times):8.1f} ms, {ratios[0]:.2f} times "
              f"FedAvg in this path, {ratios[1]:.2f} times pooled", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--paths", action="store_true")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--curvature", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--backend", default="", help="with --compiled; eager compiles nothing")
    parser.add_argument("--lock", default="", help="with --curvature: as of heavy_rounds.py")
    given = parser.parse_args()
    if given.lock and given.curvature:  # until the end of the process
        fcntl.flock(held := open(given.lock, "w"), fcntl.LOCK_EX)  # noqa: SIM115
    if given.compiled:
        sys.exit(check_compiled(given.device, given.backend))
    kinds = [(given.paths, paths), (given.grid, check_grid), (given.curvature, curvature)]
    sys.exit(next((work for wanted, work in kinds if wanted), check)(given.device))
