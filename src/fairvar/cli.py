"""The command line. Each command parses, makes one library call and prints one result.

Results go to stdout (`--json` for machines), progress to stderr. Exit codes: 0 fine, 2 bad input
(one line on stderr, nothing written), 3 run failed, 4 integrity failed, 130 interrupted.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from fairvar._version import __version__
from fairvar.errors import BadInput, FairvarError, RunFailed

app = App(
    name="fairvar",
    version=__version__,
    help="Fair federated learning: train models whose quality is even across clients.",
)
MANY_RUNS = 40  # from here on, tell what it will cost before starting
Json = Annotated[bool, Parameter(negative="")]
Out = Annotated[Path, Parameter(help="folder for the files that are written")]


@app.command
def demo(
    *,
    out: Out = Path("fairvar-demo"),
    alpha: float = 0.1,
    seeds: int = 3,
    rounds: int = 100,
    workers: int | None = None,
    json: Json = False,
) -> None:
    """All methods of the paper on its MNIST experiment, in about a minute and without a download.

    Prints a table of accuracy and variance over clients and leaves it in a folder with pictures.

    Args:
        alpha: heterogeneity of the Dirichlet partition; smaller means more different clients.
        seeds: repetitions with other initial models.
        rounds: communication rounds of each run.
        workers: processes; as many as there are cores by default.
        json: print the table as JSON.
    """
    from fairvar.demo import NOTE, TITLE, demo_plan
    from fairvar.progress import progress
    from fairvar.report.gather import gather
    from fairvar.report.look import require_matplotlib
    from fairvar.report.write import write_report
    from fairvar.store import check_writable
    from fairvar.sweep import run_sweep

    plan = demo_plan(alpha, seeds, rounds)
    require_matplotlib()
    check_writable(out)
    with progress("fairvar demo") as report:
        run_sweep(plan.cells, out / "runs", report, workers or _cores())
    tables, files = write_report(gather(out / "runs"), out, TITLE)
    _show_report(tables, files, json)
    if not json:
        print(NOTE)


@app.command
def run(
    config: Path,
    *overrides: str,
    out: Out = Path("runs"),
    dry: Annotated[bool, Parameter(negative="")] = False,
    plugin: Path | None = None,
    json: Json = False,
) -> None:
    """Train one configuration and store config, history and final model.

    Example: fairvar run configs/quick.toml method.name=fairgrad method.strength=0.1

    Args:
        config: a TOML file; configs/quick.toml shows every section.
        overrides: key=value pairs that change it, such as train.lr=0.5.
        dry: check everything, print the full configuration and its fingerprint, and stop.
        plugin: a Python file to load first, for methods of your own.
        json: print the result as JSON.
    """
    from fairvar.config import Config
    from fairvar.experiment import Watch, run_cell, run_folder
    from fairvar.plugin import load_plugin
    from fairvar.progress import progress
    from fairvar.report.show import run_table
    from fairvar.store import check_writable, verify
    from fairvar.sweep import stop_signals

    load_plugin(plugin)
    settings = Config.load(config, overrides)
    if dry:
        return print(settings.to_toml() + f"\n# fingerprint {settings.fingerprint}")
    check_writable(out)
    folder = run_folder(settings, out)
    with progress(settings.name) as report, stop_signals() as asked:
        label = settings.method.label
        watch = Watch(lambda done, total: report(done, total, f"rounds of {label}"), asked)
        run_cell(settings, out, watch)
    manifest = verify(folder)
    if manifest is None:
        raise RunFailed(f"another process is computing {folder}; wait for it or use another --out")
    if json:
        return _print_json({"folder": str(folder), **manifest})
    _print(run_table(folder, manifest))


@app.command
def sweep(
    config: Path,
    *overrides: str,
    out: Path | None = None,
    scale: str | None = None,
    workers: int = 1,
    budget: str | None = None,
    shard: str | None = None,
    ray: str | None = None,
    save_every: int | None = None,
    dry: Annotated[bool, Parameter(negative="")] = False,
    plugin: Path | None = None,
    json: Json = False,
) -> None:
    """Compute all runs of a grid; the same command again continues where it stopped.

    Finished runs are never touched. Several of these processes may work on one folder at once.

    Example: fairvar sweep configs/paper/mnist.toml --scale small --workers 2

    Args:
        config: a TOML file with a [sweep] section; see configs/paper/.
        overrides: key=value pairs that change it, such as sweep.seeds=2.
        out: folder for the runs; runs/NAME by default.
        scale: use the file's [scale.NAME] overrides, such as small.
        workers: processes on this machine, one thread each.
        budget: stop after this time, such as 30min; the same command continues later.
        shard: only part i of n, such as 0/4, for job arrays.
        ray: address of a Ray cluster that computes the missing runs ("local" starts one here).
        save_every: rounds between checkpoints, besides one every ten seconds.
        dry: check everything, list the runs and their number, and stop.
        plugin: a Python file to load first, for methods of your own.
        json: print the outcome as JSON.
    """
    from fairvar.plan import Plan
    from fairvar.plugin import load_plugin
    from fairvar.progress import progress
    from fairvar.store import check_writable
    from fairvar.sweep import missing, parse_budget, parse_shard, project, run_sweep

    load_plugin(plugin)
    plan = Plan.load(config, overrides, scale)
    seconds = None if budget is None else parse_budget(budget)
    part, parts = (0, 1) if shard is None else parse_shard(shard)
    if workers < 1 or (save_every is not None and save_every < 1):
        raise BadInput("--workers and --save-every must be at least 1")
    cells = plan.cells[part::parts]
    folder = out or Path("runs") / plan.name
    if dry:
        rows = [f"{c.fingerprint[:16]}  {c.method.label}, lr {c.train.lr:g}" for c in cells]
        return print(*rows, f"{len(cells)} runs", sep="\n")
    check_writable(folder)
    if len(missing(cells, folder)) > MANY_RUNS and ray is None:
        cost = project(cells, folder, workers)
        text = f"about {_duration(cost)} with {workers} worker(s), from a few timed rounds"
        print(f"{len(missing(cells, folder))} runs to do: {text}", file=sys.stderr)
    with progress(plan.name) as report:
        if ray is not None:
            from fairvar.cluster import run_on_ray

            run_on_ray(cells, folder, ray, report)
        status = run_sweep(cells, folder, report, workers, seconds, save_every, plugin)
    if json:
        return _print_json({"folder": str(folder), **asdict(status)})
    print(f"{status.done} of {status.cells} runs are done in {folder}")
    if status.reason:
        print(f"stopped because {status.reason}; the same command continues")
    elif status.elsewhere:
        print(f"{status.elsewhere} are being computed by other processes")


@app.command
def report(
    folder: Path,
    *,
    out: Path | None = None,
    title: str | None = None,
    t: float = 1.96,
    model: str | None = None,
    unit: str = "fraction",
    m: int | None = None,
    plugin: Path | None = None,
    json: Json = False,
) -> None:
    """Choose on validation, report on test: tables, figures and a page from a sweep's folder.

    Args:
        folder: what `fairvar sweep` wrote.
        out: where the report goes; FOLDER/report by default.
        title: heading of the page.
        t: selection takes accuracy - t * sqrt(variance / m) on validation data; 1.96 in the paper.
        model: select and report the "global" or the clients' own ("local") model; by default what
            the runs' protocol says.
        unit: "fraction", or "mixed": percent accuracy with the variance x 100.
        m: divisor of the variance; the number of seeds by default, as in the paper.
        plugin: a Python file to load first, for methods of your own.
        json: print the tables as JSON.
    """
    from fairvar.plugin import load_plugin
    from fairvar.progress import progress
    from fairvar.report.gather import gather, stored_runs
    from fairvar.report.look import require_matplotlib
    from fairvar.report.write import write_report
    from fairvar.select import Criterion
    from fairvar.store import check_writable

    load_plugin(plugin)
    require_matplotlib()
    first = stored_runs(folder)[0].config
    criterion = Criterion(t=t, m=m, unit=unit, model=model or first.select.model)  # type: ignore[arg-type]
    target = out or folder / "report"
    check_writable(target)
    with progress("report") as show:
        show(0, 1, "reading runs")
        groups = gather(folder, criterion)
        tables, files = write_report(groups, target, title or f"fairvar: {first.name}")
        show(1, 1, "done")
    _show_report(tables, files, json)


@app.command
def compare(
    a: str,
    b: str,
    *,
    model: str | None = None,
    plugin: Path | None = None,
    json: Json = False,
) -> None:
    """Paired differences between two methods: with intervals, and which clients gain or pay.

    Each side is a sweep's folder with a method label, FOLDER:LABEL or FOLDER:LABEL@ALPHA (the
    configuration chosen on validation), or the folder of a single run.

    Example: fairvar compare runs/mnist:FairGrad*@0.1 runs/mnist:FedAvg@0.1

    Args:
        a: the method in question.
        b: what it is compared with.
        model: the "global" or the clients' own ("local") model.
        plugin: a Python file to load first, for methods of your own.
        json: print the numbers as JSON.
    """
    from fairvar.plugin import load_plugin
    from fairvar.report.versus import paired_dict, paired_table, side, versus

    load_plugin(plugin)
    left, right = side(a, model), side(b, model)
    paired = versus(left, right)
    if json:
        return _print_json(paired_dict(left, right, paired))
    for part in paired_table(left, right, paired):
        _print(part)


@app.command
def partition(
    config: Path,
    *overrides: str,
    out: Out = Path("fairvar-partition"),
    json: Json = False,
) -> None:
    """Picture and heterogeneity numbers of a partition, before spending compute on it.

    Args:
        config: a TOML file; the sections [data] and [partition] are used.
        overrides: key=value pairs that change it, such as partition.alpha=0.5.
        json: print the partition's passport as JSON.
    """
    from fairvar.config import Config
    from fairvar.experiment import class_counts, federation_of
    from fairvar.report.look import require_matplotlib, save
    from fairvar.report.pictures import partition_figure
    from fairvar.report.show import passport_table
    from fairvar.store import check_writable

    settings = Config.load(config, overrides)
    require_matplotlib()
    federation = federation_of(settings)
    if federation.classes is None:
        raise BadInput(f"{federation.name} has no classes: there is no partition to draw")
    check_writable(out)
    figure = partition_figure(federation.name, class_counts(federation), federation.passport)
    files = save(figure, out, "partition")
    if json:
        return _print_json(dict(federation.passport))
    _print(passport_table(federation))
    print("Written:", *files, sep="\n  ")


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
        _print_json([asdict(c) for c in found])
    else:
        for part in claims_text(found):
            _print(part)
    failed = sum(not c.holds for c in found)
    print(f"{len(found) - failed} of {len(found)} claims hold", file=sys.stderr)
    if failed:
        sys.exit(3)


@app.command
def methods(*, json: Json = False) -> None:
    """What there is to choose from: options, exchanges and bytes per round, what a server sees."""
    from fairvar.catalogue import catalogue
    from fairvar.report.show import methods_table, options_table

    if json:
        return _print_json(catalogue())
    _print(methods_table())
    _print(options_table())


@app.command
def doctor(*, json: Json = False) -> None:
    """Versions, device, threads, determinism and disk: what to paste into a bug report."""
    from fairvar.doctor import examine
    from fairvar.report.show import facts_table

    if json:
        _print_json(examine())
    else:
        _print(facts_table(examine()))


@app.command
def bench(
    *,
    quick: bool | None = None,
    model: str | None = None,
    method: str | None = None,
    clients: int | None = None,
    batch: int | None = None,
    local: str | None = None,
    device: str = "cpu",
    repeat: int = 7,
    threads: int = 1,
    out: Path | None = None,
    json: Json = False,
) -> None:
    """Speed of a round: the engine beside two client loops and a centralised step, as ratios.

    All contenders take turns in one process. What is measured is in docs/performance.md.

    Example: fairvar bench --model multinomial --method fairgrad* --clients 50 --batch 16

    Args:
        quick: the short table, a few minutes; the default on the CPU.
        model: this model only.
        method: this method only, such as qffl or fairloss* (a star: the exact variant).
        clients: so many clients in every case.
        batch: so many samples per client in every case.
        local: local work per round, "step" (all samples at once) or "epoch" (four steps).
        device: "cpu" or "cuda".
        repeat: turns of all contenders; fewer where a case takes long.
        threads: of torch on the CPU.
        out: folder for table.md, bench.json and a picture of cost against clients.
        json: print all numbers as JSON.
    """
    from fairvar.bench import BenchSettings, run_bench
    from fairvar.bench.show import bench_tables, write_bench
    from fairvar.progress import progress
    from fairvar.report import to_rich
    from fairvar.report.look import require_matplotlib
    from fairvar.store import check_writable

    settings = BenchSettings(
        quick=quick, model=model, method=method, clients=clients, batch=batch,
        local=local, device=device, repeat=repeat, threads=threads,  # type: ignore[arg-type]
    )  # fmt: skip
    if out is not None:
        require_matplotlib()
        check_writable(out)
    with progress("fairvar bench") as report:
        result = run_bench(settings, report)
    files = write_bench(result, out) if out is not None else []
    if json:
        return _print_json(result.as_dict())
    for table in bench_tables(result):
        _print(to_rich(table))
        print()
    if files:
        print("Written:", *files, sep="\n  ")


data = App(name="data", help="Data sets: what is available, where from, checksums.")
app.command(data)


@data.command(name="list")
def data_list(*, json: Json = False) -> None:
    """Every data set: what it is, whether it was found, where it comes from."""
    from fairvar.data import describe
    from fairvar.report.show import datasets_table

    if json:
        _print_json(describe())
    else:
        _print(datasets_table(describe()))


@data.command(name="fetch")
def data_fetch(name: str, *, root: Path | None = None) -> None:
    """Download a data set from its official address, checked against its SHA-256.

    An interrupted download is continued by the same command.

    Args:
        name: as `fairvar data list` writes it.
        root: folder to put it into; fairvar's cache by default.
    """
    from fairvar.data.fetch import fetch
    from fairvar.progress import progress

    with progress(f"fetch {name}") as report:
        folder = fetch(
            name, root, progress=lambda file, done, total: report(done, total or 0, file)
        )
    print(folder)


@data.command(name="verify")
def data_verify(name: str, *, root: Path | None = None, json: Json = False) -> None:
    """Check a data set's files; exit code 4 if one is not what was published.

    Args:
        name: as `fairvar data list` writes it.
        root: folder to look in; FAIRVAR_DATA and fairvar's cache otherwise.
        json: print the result as JSON.
    """
    from fairvar.data import verify

    rows = verify(name, root)
    if json:
        _print_json([{"file": f, "ok": ok, "reason": why} for f, ok, why in rows])
    else:
        print(*(f"{'ok ' if ok else 'BAD'} {f}  {why}" for f, ok, why in rows), sep="\n")
    if not all(ok for _, ok, _ in rows):
        sys.exit(4)


def _show_report(tables: Any, files: Any, json: bool) -> None:
    from fairvar.report import to_rich
    from fairvar.report.results import shorten

    if json:
        return _print_json([_table_dict(table) for table in tables])
    for table in tables:
        # The columns are explained once, under the last table.
        _print(to_rich(shorten(table, explain=table is tables[-1])))
        print()
    page = next(f for f in files if f.name == "index.html")
    print(f"{len(files)} files in {page.parent}; open {page} in a browser")


def _cores() -> int:
    return max(1, min(8, os.cpu_count() or 1))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _print(thing: Any) -> None:
    Console(highlight=False).print(thing)


def _print_json(value: Any) -> None:
    print(jsonlib.dumps(value, indent=2, ensure_ascii=False))


def _table_dict(table: Any) -> dict[str, Any]:
    from fairvar.report import Estimate

    rows = []
    for row in table.rows:
        cells = {
            k: {"value": c.value, "standard_error": c.standard_error}
            if isinstance(c, Estimate)
            else c
            for k, c in row.cells.items()
        }
        rows.append({"method": row.label, **cells})
    return {"title": table.title, "rows": rows, "notes": list(table.notes)}


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors become one line and an exit code."""
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        _fail(" ".join(str(error).split()), 2)
    except FairvarError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader went away (`fairvar theory | head`); keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> None:
    print(f"fairvar: {message}", file=sys.stderr)
    sys.exit(code)
