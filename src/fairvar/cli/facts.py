"""Commands that look: example, partition, theory, methods, doctor, bench."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from fairvar.cli.common import (
    Count,
    Json,
    Out,
    PositiveFloat,
    Workers,
    app,
    print_json,
    say,
    show,
    tell,
)
from fairvar.errors import BadInput, unknown


@app.command
def example(name: str = "quick") -> None:
    """Print a configuration file to start from.

    Example: fairvar example > quick.toml

    Args:
        name: "quick", a single run with every section, or a sweep of the paper: mnist, cifar10,
            cifar100, tiny_imagenet.
    """
    from importlib.resources import files

    folder = files("fairvar").joinpath("configs")
    found = {
        file.name.removesuffix(".toml"): file
        for place in (folder, folder.joinpath("paper"))
        for file in place.iterdir()
        if file.name.endswith(".toml")
    }
    if name not in found:
        raise unknown("example", name, found)
    print(found[name].read_text(encoding="utf-8"), end="")


@app.command
def partition(
    config: Path,
    *overrides: str,
    scale: str | None = None,
    out: Out = Path("fairvar-partition"),
    json: Json = False,
) -> None:
    """Picture and heterogeneity numbers of a partition, before spending compute on it.

    Of a file with a [sweep] section, every federation of the sweep is drawn.

    Args:
        config: a TOML file; the sections [data] and [partition] are used, and sweep.alpha.
        overrides: key=value pairs that change it, such as partition.alpha=0.5.
        scale: use the file's [scale.NAME] overrides, such as small.
        json: print the partition's passport as JSON, of a sweep a list of them.
    """
    from fairvar.experiment import class_counts, federation_of
    from fairvar.plan import federations
    from fairvar.report.look import require_matplotlib, save
    from fairvar.report.pictures import partition_figure
    from fairvar.report.show import passport_table
    from fairvar.store import check_writable

    several, settings = federations(config, overrides, scale)
    require_matplotlib()
    drawn = {name: federation_of(each) for name, each in settings.items()}
    for federation in drawn.values():
        if federation.classes is None:
            raise BadInput(f"{federation.name} has no classes: there is no partition to draw")
    check_writable(out)
    files = []
    for name, federation in drawn.items():
        counts = class_counts(federation)
        files += save(partition_figure(federation.name, counts, federation.passport), out, name)
    if json:
        passports = [dict(federation.passport) for federation in drawn.values()]
        return print_json(passports if several else passports[0])
    for name, federation in drawn.items():
        show(passport_table(federation, name))
    say("Written:", *(f"  {file}" for file in files))


@app.command
def theory(*, json: Json = False) -> None:
    """The paper's theorems as numbers: each claim with both sides, tolerance and verdict.

    Claims about the paper's own statements that are wrong show the counterexample. Exit code 3 if
    any claim fails.
    """
    from fairvar.report.show import claims_text
    from fairvar.theory import claims

    found = claims()
    if json:
        print_json([asdict(c) for c in found])
    else:
        for part in claims_text(found):
            show(part)
    failed = sum(not c.holds for c in found)
    tell(f"{len(found) - failed} of {len(found)} claims hold")
    if failed:
        sys.exit(3)


@app.command
def methods(*, json: Json = False) -> None:
    """What there is to choose from: options, exchanges and bytes per round, what a server sees."""
    from fairvar.catalogue import catalogue
    from fairvar.report.show import methods_table, options_table

    if json:
        return print_json(catalogue())
    show(methods_table())
    show(options_table())


@app.command
def doctor(*, json: Json = False) -> None:
    """Versions, device, threads, determinism and disk: what to paste into a bug report."""
    from fairvar.doctor import examine
    from fairvar.report.show import facts_table

    if json:
        print_json(examine())
    else:
        show(facts_table(examine()))


@app.command
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

    Example: fairvar bench --model multinomial --method fairgrad* --clients 50 --batch 16

    Args:
        quick: the short table, a few minutes; the default on the CPU.
        case: "rounds", "grid" (275 runs together), "ragged" (uneven clients), "memory" or
            "flower" (beside Flower's simulation runtime) only.
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
    from fairvar.bench import BenchSettings, run_bench
    from fairvar.bench.show import as_dict, bench_tables, targets_table, write_bench, write_numbers
    from fairvar.progress import progress
    from fairvar.report import to_rich
    from fairvar.store import check_writable

    settings = BenchSettings(
        quick=quick, case=case, model=model, method=method,  # type: ignore[arg-type]
        clients=clients, batch=batch, local=local,  # type: ignore[arg-type]
        device=device, precision=precision,  # type: ignore[arg-type]
        repeat=repeat, seconds=seconds, threads=threads,
    )  # fmt: skip
    if out is not None:
        check_writable(out)
    keep = None if out is None else lambda result: write_numbers(result, out)
    with progress("fairvar bench") as report:
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
