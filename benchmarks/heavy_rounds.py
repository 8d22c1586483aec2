"""Rounds of heavy models on a GPU, without and with compiled local steps, in one process.

    python benchmarks/heavy_rounds.py --case mobilenet32 --methods fedavg,qffl --work step,epoch
    python benchmarks/heavy_rounds.py --smoke            # tiny sizes on a CPU, to test the script

Images of noise in the paper's sizes, split by Dirichlet 0.1. Prints, for each row, the seconds of
the first rounds (compiling and recording) and the median of later rounds. The learning rate is next
to nothing, because small last batches make runs on noise diverge (small_batches.py). The compiler's
cache is read from and written to --cache.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
sys.path.append(str(ROOT / ".carry"))  # packages that the machine lacks (README.md)

import numpy as np  # noqa: E402
import torch  # noqa: E402

import fairvar as fv  # noqa: E402
from fairvar.engine.kernels import compiled as compiler  # noqa: E402

PROFILE, LOCK, DROP_LAST = False, "", False
METHODS = {
    "fedavg": fv.FedAvg(),
    "qffl": fv.QFFL(q=0.5, losses="batch"),
    "fairloss": fv.FairLoss(strength=0.01, exact=True),
    "fairgrad": fv.FairGrad(strength=1e-5),
    "fairgrad*": fv.FairGrad(strength=1e-5, exact=True),
}
# model, image size, classes, clients, batch size, images in all
CASES = {
    "mobilenet32": ("mobilenet_v2", 32, 100, 100, 32, 24_000),
    "mobilenet64": ("mobilenet_v2", 64, 200, 100, 32, 44_000),
    "avgcnn": ("avgcnn", 32, 10, 50, 64, 40_000),
    "smoke": ("avgcnn", 16, 4, 5, 4, 120),
}


def federation(size: int, classes: int, clients: int, images: int, least: int) -> fv.Federation:
    """Sizes as in a Dirichlet 0.1 split by labels."""
    draw = np.random.default_rng(0)
    shares = draw.dirichlet([0.1] * clients, classes).sum(0)
    sizes = np.maximum(least, (shares / shares.sum() * images).astype(int))
    torch.manual_seed(0)
    train = [
        (torch.randn(m, 3, size, size), torch.randint(0, classes, (m,))) for m in sizes.tolist()
    ]
    return fv.Federation.from_arrays(train=train, classes=classes)


def timed(case: str, fed: fv.Federation, method: str, work: str, compiled: bool, rounds: int,
          device: str) -> dict[str, object]:  # fmt: skip
    model, _, _, _, batch, _ = CASES[case]
    marks = [time.perf_counter()]
    profiler = torch.profiler.profile() if PROFILE else None
    lock = open(LOCK, "w") if LOCK else None  # noqa: SIM115

    def mark(done: int, total: int) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        if done == 3 and lock is not None:  # compiled: from here on nobody else may compute
            fcntl.flock(lock, fcntl.LOCK_EX)
        if profiler is not None and done == rounds - 2:
            profiler.start()
        if profiler is not None and done == rounds - 1:
            profiler.stop()
        marks.append(time.perf_counter())

    options = {"local_epochs": 1} if work == "epoch" else {"local_steps": 1}
    options["drop_last"] = DROP_LAST
    history = fv.train(
        model, fed, METHODS[method], rounds=rounds, lr=1e-9, batch_size=batch, device=device,
        precision="tf32" if device == "cuda" else "full", compile=compiled,
        evaluate_every=10_000, evaluate_local=False, evaluate_splits=("train",), progress=mark,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    gaps = [b - a for a, b in itertools.pairwise(marks)]
    if lock is not None:
        lock.close()
    if profiler is not None:
        by = "device_time_total" if device == "cuda" else "cpu_time_total"
        print(profiler.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=70))
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    return {
        "ms": round(1000 * statistics.median(gaps[4:-2]), 2),
        "first_s": round(sum(gaps[:3]), 1),
        "peak_gb": round(peak, 1),
        "loss": round(float(history.loss[-1].nanmean()), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="mobilenet32", choices=list(CASES))
    parser.add_argument("--methods", default="fedavg,qffl")
    parser.add_argument("--work", default="step,epoch")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--forms", default="compiled,plain")
    parser.add_argument("--group", type=int, default=0, help="most clients in a compiled call")
    parser.add_argument("--cache", default="")
    parser.add_argument("--drop-last", action="store_true", help="whole batches only: no padding")
    parser.add_argument("--unroll", type=int, default=0, help="longest sum that is written out")
    parser.add_argument("--profile", action="store_true", help="where a round's time goes")
    parser.add_argument("--lock", default="", help="a file: processes compile at once, time apart")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    global PROFILE, LOCK, DROP_LAST
    PROFILE, LOCK, DROP_LAST = given.profile, given.lock, given.drop_last
    if given.unroll:
        compiler.OPTIONS["unroll_reductions_threshold"] = given.unroll
    device = "cpu" if given.smoke else "cuda"
    compiler.MOST_TOGETHER = given.group or compiler.MOST_TOGETHER
    case = "smoke" if given.smoke else given.case
    _, size, classes, clients, _, images = CASES[case]
    fed = federation(size, classes, clients, images, 2)
    if given.cache and os.path.exists(given.cache):
        torch.compiler.load_cache_artifacts(Path(given.cache).read_bytes())
    for work, method, form in itertools.product(
        given.work.split(","), given.methods.split(","), given.forms.split(",")
    ):
        try:
            row = timed(case, fed, method, work, form == "compiled", given.rounds, device)
        except Exception as error:  # a form that fails is a result, too
            row = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        print(case, work, method, form, json.dumps(row), flush=True)
        if given.cache and form == "compiled":
            made = torch.compiler.save_cache_artifacts()
            if made is not None:
                Path(given.cache).write_bytes(made[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
