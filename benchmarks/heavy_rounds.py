"""Rounds of heavy models on a GPU: the first version and this one in turns, with the goals.

    mkdir first; git archive efd871c src | tar -x -C first         # the first version, for example
    python benchmarks/heavy_rounds.py --table --first first               # every row of the table
    python benchmarks/heavy_rounds.py --case mobilenet32 --methods fedavg,qffl --work step,epoch
    python benchmarks/heavy_rounds.py --table --first first --smoke --backend eager       # on a CPU

Images of noise in the paper's sizes, split by Dirichlet 0.1. Prints, for each row and form, the
seconds of the first rounds (compiling and recording) and the median of later rounds; with --table
also the median over the turns of the ratio to the first version. Forms: "first" (the checkout of
--first), "plain" (compile=False), "compiled" (compile=True) and for one step "own" (compile=True,
engine="vmapped": every client has a copy of the parameters, which "compiled" shares). Each form of
a row has a process of its own, and only one of them computes at a time. The learning rate is next
to nothing, because small last batches make runs on noise diverge (small_batches.py). What was
compiled is kept in the file of --cache (FAIRVAR_COMPILED).
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FORMS = ("compiled", "own", "first", "plain")  # in this order, because compiling takes minutes
# model, image size, classes, clients, batch size, images in all
CASES = {
    "mobilenet32": ("mobilenet_v2", 32, 100, 100, 32, 24_000),
    "mobilenet64": ("mobilenet_v2", 64, 200, 100, 32, 44_000),
    "avgcnn": ("avgcnn", 32, 10, 50, 64, 40_000),
    "multinomial": ("multinomial", 28, 10, 50, 16, 800),
}
SMALL = {  # the same models where they are quick, on a few tiny images
    "mobilenet32": ("mobilenet_v2", 8, 4, 2, 4, 16),
    "mobilenet64": ("mobilenet_v2", 8, 4, 2, 4, 16),
    "avgcnn": ("avgcnn", 16, 4, 3, 4, 36),
    "multinomial": ("multinomial", 8, 4, 3, 4, 36),
}


class Row(NamedTuple):
    """A row of the goals: milliseconds per round on an H200."""

    case: str
    work: str  # "step" or "epoch"
    method: str
    goal: float


TABLE = (
    Row("mobilenet32", "step", "fedavg", 12),
    Row("mobilenet32", "step", "qffl", 25),
    Row("mobilenet32", "step", "fairgrad", 55),
    Row("mobilenet32", "epoch", "fedavg", 200),
    Row("mobilenet32", "epoch", "fairgrad", 800),
    Row("mobilenet64", "step", "fedavg", 35),
    Row("mobilenet64", "step", "qffl", 80),
    Row("mobilenet64", "step", "fairgrad", 250),
    Row("mobilenet64", "epoch", "fedavg", 800),
    Row("avgcnn", "epoch", "fedavg", 45),
    Row("avgcnn", "epoch", "fairgrad", 150),
    Row("multinomial", "step", "aaggff", 0.4),
)


# -- the process of one form -----------------------------------------------------------------------
class Timed:
    """One row in this process, in the checkout whose fairvar was imported."""

    def __init__(self, given: argparse.Namespace) -> None:
        import numpy as np
        import torch

        import fairvar as fv

        self.fv, self.torch, self.given = fv, torch, given
        self.device = "cpu" if given.smoke else "cuda"
        torch.set_num_threads(1)
        self.model, size, classes, clients, self.batch, images = (SMALL if given.smoke else CASES)[
            given.case
        ]
        draw = np.random.default_rng(0)
        shares = draw.dirichlet([0.1] * clients, classes).sum(0)
        sizes = np.maximum(2, (shares / shares.sum() * images).astype(int))
        if given.case == "multinomial":
            sizes[:] = images // clients
        shape = (1 if given.case == "multinomial" else 3, size, size)
        torch.manual_seed(0)
        train = [(torch.randn(m, *shape), torch.randint(0, classes, (m,))) for m in sizes.tolist()]
        self.federation = fv.Federation.from_arrays(train=train, classes=classes)
        self.method = {
            "fedavg": lambda: fv.FedAvg(),
            "qffl": lambda: fv.QFFL(q=0.5, losses="batch"),
            "fairloss": lambda: fv.FairLoss(strength=0.01, exact=True),
            "fairgrad": lambda: fv.FairGrad(strength=1e-5),
            "fairgrad*": lambda: fv.FairGrad(strength=1e-5, exact=True),
            "aaggff": lambda: fv.AAggFF(losses="batch"),
        }[given.method]()
        self.options: dict[str, Any] = {"drop_last": True} if given.drop_last else {}
        if given.work == "epoch":
            self.options["local_epochs"] = 1
        if given.form != "first":
            from fairvar.engine.kernels import compiled

            self.options["compile"] = given.form in ("compiled", "own")
            self.options["engine"] = "vmapped" if given.form == "own" else "auto"
            compiled.MOST_TOGETHER = given.group or compiled.MOST_TOGETHER
            if given.backend:
                compiled.BACKEND = given.backend
            if given.unroll:
                compiled.OPTIONS["unroll_reductions_threshold"] = given.unroll

    def __call__(self) -> dict[str, object]:
        given, torch = self.given, self.torch
        marks = [time.perf_counter()]
        profiler = torch.profiler.profile() if given.profile else None
        lock = open(given.lock, "w") if given.lock else None  # noqa: SIM115

        def mark(done: int, total: int) -> None:
            if self.device == "cuda":
                torch.cuda.synchronize()
            if profiler is not None and done == given.rounds - 2:
                profiler.start()
            if profiler is not None and done == given.rounds - 1:
                profiler.stop()
            marks.append(time.perf_counter())
            if done == 3 and lock is not None:  # compiled: from here on one process is timed
                fcntl.flock(lock, fcntl.LOCK_EX)

        try:
            history = self.fv.train(
                self.model, self.federation, self.method, rounds=given.rounds, lr=1e-9,
                batch_size=self.batch, device=self.device,
                precision="tf32" if self.device == "cuda" else "full", evaluate_every=10_000,
                evaluate_local=False, evaluate_splits=("train",), progress=mark, **self.options,
            )  # fmt: skip
        finally:  # also after a failure: other processes wait for the lock
            if lock is not None:
                lock.close()
        gaps = [b - a for a, b in itertools.pairwise(marks)]
        if profiler is not None:
            by = "device_time_total" if self.device == "cuda" else "cpu_time_total"
            table = profiler.key_averages().table(sort_by=by, row_limit=25)
            print(table, file=sys.stderr)
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.device == "cuda" else 0.0
        return {
            "ms": round(1000 * statistics.median(gaps[4:-2]), 2),
            "first_s": round(sum(gaps[:3]), 1),
            "peak_gb": round(peak, 1),
            "loss": round(float(history.loss[-1].nanmean()), 4),
        }

    def release(self) -> None:
        """Free the recorded rounds: those of all forms and rows may need more memory than the GPU
        has."""
        from fairvar.engine.cuda_graphs import RECORDINGS

        RECORDINGS.kept.clear()
        gc.collect()
        if self.device == "cuda":
            self.torch.cuda.empty_cache()


def worker(given: argparse.Namespace) -> None:
    """Answer each line of the standard input with the times of one training."""
    source = Path(given.first) if given.form == "first" else ROOT
    sys.path.insert(0, str(source / "src"))
    sys.path.append(str(ROOT / ".carry"))  # packages that the machine lacks (README.md)
    timed = None
    for _ in sys.stdin:
        try:
            timed = timed or Timed(given)
            answer = timed()
        except Exception as error:  # a form that fails is a result, too
            answer = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        if timed is not None:
            timed.release()
        print(json.dumps(answer), flush=True)


# -- rows ------------------------------------------------------------------------------------------
class Process:
    def __init__(self, given: argparse.Namespace, row: Row, form: str) -> None:
        flags = ["--worker", "--case", row.case, "--work", row.work, "--method", row.method]
        flags += ["--form", form, "--rounds", str(given.rounds), "--first", given.first]
        flags += ["--group", str(given.group), "--unroll", str(given.unroll)]
        flags += ["--lock", given.lock, "--backend", given.backend]
        for name in ("smoke", "profile", "drop_last"):
            flags += [f"--{name.replace('_', '-')}"] if getattr(given, name) else []
        environment = {**os.environ, **({"FAIRVAR_COMPILED": given.cache} if given.cache else {})}
        self.process = subprocess.Popen(  # noqa: S603
            [sys.executable, __file__, *flags], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def time(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else {"failed": "the process ended"}

    def end(self) -> None:
        self.process.communicate()


def measure(given: argparse.Namespace, row: Row, forms: list[str], turns: int) -> bool:
    """All forms of a row in turns; False if one failed."""
    processes = {form: Process(given, row, form) for form in forms}
    found: dict[str, list[dict[str, Any]]] = {form: [] for form in forms}
    try:
        for _ in range(turns):
            for form, process in processes.items():
                if not any("failed" in one for one in found[form]):
                    found[form].append(process.time())
                    name = (row.case, row.work, row.method, form)
                    print(*name, json.dumps(found[form][-1]), flush=True)
    finally:
        for process in processes.values():
            process.end()
    fine = {form: all("ms" in one for one in made) for form, made in found.items()}
    best = {form: statistics.median(one["ms"] for one in found[form]) for form in forms
            if fine[form]}  # fmt: skip
    said = [f"{form} {ms:g} ms" for form, ms in best.items()]
    if "first" in best:
        for form in [form for form in best if form != "first"]:
            pairs = zip(found["first"], found[form], strict=True)
            ratio = statistics.median(old["ms"] / new["ms"] for old, new in pairs)
            said.append(f"{form} × first {ratio:.2f}")
    ours = min((ms for form, ms in best.items() if form != "first"), default=None)
    if row.goal and ours is not None:
        said.append(f"goal {row.goal:g}: {'met' if ours <= row.goal else 'missed'}")
    print("=", row.case, row.work, row.method, "; ".join(said), flush=True)
    return all(fine.values())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true", help="all rows with goals, in turns")
    parser.add_argument("--first", default="", help="folder of a checkout of the first version")
    parser.add_argument("--turns", type=int, default=0, help="3 with --table, otherwise 1")
    parser.add_argument("--case", default="", help=f"one of {', '.join(CASES)}")
    parser.add_argument("--methods", default="")
    parser.add_argument("--work", default="")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--forms", default="")
    parser.add_argument("--group", type=int, default=0, help="most clients in a compiled call")
    parser.add_argument("--cache", default="", help="a file that keeps what was compiled")
    parser.add_argument("--drop-last", action="store_true", help="whole batches only: no padding")
    parser.add_argument("--unroll", type=int, default=0, help="longest sum that is written out")
    parser.add_argument("--backend", default="", help="of torch.compile; eager compiles nothing")
    parser.add_argument("--profile", action="store_true", help="where a round's time goes")
    parser.add_argument("--lock", default="", help="a file: processes compile at once, time apart")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--form", default="", help=argparse.SUPPRESS)
    parser.add_argument("--method", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.first and not (Path(given.first) / "src/fairvar").is_dir():
        parser.error(f"--first: {given.first} is no checkout, it has no src/fairvar")
    if given.worker:
        worker(given)
        return 0
    works = given.work.split(",") if given.work else ["step", "epoch"]
    methods = given.methods.split(",") if given.methods else ["fedavg", "qffl"]
    case = given.case or "mobilenet32"
    rows = [Row(case, work, method, 0) for work in works for method in methods]
    if given.table:
        rows = [row for row in TABLE if given.case in ("", row.case)
                and (not given.work or row.work in works)
                and (not given.methods or row.method in methods)]  # fmt: skip
    forms = given.forms.split(",") if given.forms else list(FORMS)
    forms = [form for form in forms if form != "first" or given.first]
    turns = given.turns or (3 if given.table else 1)
    fine = [measure(given, row, _forms(row, forms), turns) for row in rows]
    return 0 if all(fine) else 1


def _forms(row: Row, forms: list[str]) -> list[str]:
    """Linear models are not compiled, and epochs always start from copies."""
    left_out = {"compiled", "own"} if row.case == "multinomial" else set()
    left_out |= {"own"} if row.work == "epoch" else set()
    return [form for form in forms if form not in left_out]


if __name__ == "__main__":
    sys.exit(main())
