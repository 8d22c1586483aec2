"""The command of the benchmark: `python benchmarks/bench.py`."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from fairvar.cli.common import Count, Json, PositiveFloat, Workers, print_json, say, show
from fairvar.common.process import progress
from fairvar.report.table import (
    to_rich,
)
from fairvar.runs.formats import check_writable
from fairvar_bench.cases import BenchSettings
from fairvar_bench.many import lines, measure, measure_all
from fairvar_bench.run import run_bench
from fairvar_bench.show import as_dict, bench_tables, targets_table, write_bench, write_numbers

app = App(name="bench.py", suppress_keyboard_interrupt=False)


@app.default
def bench(
    *,
    quick: bool | None = None,
    case: str | None = None,
    model: str | None = None,
    method: str | None = None,
    clients: Count | None = None,
    batch: Count | None = None,
    local: str | None = None,
    device: str = "cpu",
    precision: str | None = None,
    repeat: Count = 7,
    seconds: PositiveFloat | None = None,
    threads: Workers = 1,
    out: Path | None = None,
    json: Json = False,
) -> None:
    """Speed of a round: the engine beside three client loops and a centralised step, as ratios.

    All contenders take turns in one process. What is measured is in docs/performance.md.

    Example: python benchmarks/bench.py --model multinomial --method fairgrad* --clients 50

    Args:
        quick: the short table, a few minutes; the default on the CPU.
        case: "rounds", "grid" (275 runs together), "ragged" (uneven clients), "memory", "epochs"
            (of a CNN on a CPU), "clients" (100 participants of up to a million) or "flower" (beside
            Flower's simulation runtime) only.
        model: this model only.
        method: this method only, such as qffl or fairloss* (a star: the exact variant).
        clients: so many clients in every case.
        batch: so many samples per client in every case.
        local: local work per round, "step" (all samples at once) or "epoch" (several steps).
        device: "cpu" or "cuda".
        precision: of all contenders: "full", "tf32" (the default on CUDA) or "bfloat16".
        repeat: turns of all contenders; fewer where a case takes long.
        seconds: for the turns of one case; slow contenders may run once.
        threads: of torch on the CPU.
        out: folder for table.md, bench.json (both after every case) and a picture of cost against
            clients.
        json: print all numbers as JSON.
    """
    if case == "clients":
        rows = measure_all() if clients is None else [measure(clients)]
        return print_json(rows) if json else say(*lines(rows))
    settings = BenchSettings(
        quick=quick, case=case, model=model, method=method,  # type: ignore[arg-type]
        clients=clients, batch=batch, local=local,  # type: ignore[arg-type]
        device=device, precision=precision,  # type: ignore[arg-type]
        repeat=repeat, seconds=seconds, threads=threads,
    )  # fmt: skip
    if out is not None:
        check_writable(out)
    keep = None if out is None else lambda result: write_numbers(result, out)
    with progress("benchmark") as report:
        result = run_bench(settings, report, keep)
    files = write_bench(result, out) if out is not None else []
    if json:
        return print_json(as_dict(result))
    promises = targets_table(result)
    for table in [*bench_tables(result), *([] if promises is None else [promises])]:
        show(to_rich(table))
        say("")
    if files:
        say("Written:", *(f"  {file}" for file in files))
