"""Commands that train and report: demo, run, sweep, report, compare."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fairvar.cli.common import (
    Count,
    Json,
    Out,
    PositiveFloat,
    Workers,
    app,
    cores,
    duration,
    print_json,
    say,
    selection_rule,
    show,
    show_report,
    tell,
)
from fairvar.errors import RunFailed

MANY_RUNS = 40  # from here on, tell what it will cost before starting


@app.command
def demo(
    *,
    out: Out = Path("fairvar-demo"),
    alpha: PositiveFloat = 0.1,
    seeds: Count = 3,
    rounds: Count = 100,
    workers: Workers | None = None,
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
    from fairvar.cli.demo import NOTE, TITLE, demo_plan
    from fairvar.report.files import write_report
    from fairvar.report.style import require_matplotlib
    from fairvar.runs.results import gather
    from fairvar.runs.runner import run_folder
    from fairvar.runs.store import check_writable
    from fairvar.runs.sweep import run_sweep
    from fairvar.system.progress import progress

    plan = demo_plan(alpha, seeds, rounds)
    require_matplotlib()
    check_writable(out)
    with progress("fairvar demo") as report:
        run_sweep(plan.cells, out / "runs", report, workers or cores())
    # Runs of earlier demos with other options lie in the same folder.
    asked = {run_folder(cell, out).name for cell in plan.cells}
    tables, files = write_report(gather(out / "runs", only=asked), out, TITLE)
    show_report(tables, files, json)
    if not json:
        say(NOTE)


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

    Example: fairvar run quick.toml method.name=fairgrad method.strength=0.1

    Args:
        config: a TOML file; `fairvar example` prints one with every section.
        overrides: key=value pairs that change it, such as train.lr=0.5.
        dry: check everything, print the full configuration and its fingerprint, and stop.
        plugin: a Python file to load first, for methods of your own.
        json: print the result as JSON.
    """
    from fairvar.methods.plugin import load_plugin
    from fairvar.report.terminal import run_table
    from fairvar.runs.config import Config
    from fairvar.runs.identity import look_again
    from fairvar.runs.runner import Watch, run_cell, run_folder, start_note
    from fairvar.runs.store import check_writable, verify
    from fairvar.system.progress import progress
    from fairvar.system.signals import stop_signals

    load_plugin(plugin)
    settings = Config.load(config, overrides)
    if dry and json:
        return print_json({"config": settings.to_dict(), "fingerprint": settings.fingerprint})
    if dry:
        return print(settings.to_toml() + f"\n# fingerprint {settings.fingerprint}")
    look_again()
    folder = run_folder(settings, out)  # which the data decide, too: they must be readable
    check_writable(out)
    tell(start_note(settings))
    with progress(settings.name) as report, stop_signals() as asked:
        label = settings.method.label
        watch = Watch(lambda done, total: report(done, total, f"rounds of {label}"), asked)
        run_cell(settings, out, watch)
    manifest = verify(folder)
    if manifest is None:
        raise RunFailed(f"another process is computing {folder}; wait for it or use another --out")
    if json:
        return print_json({"folder": str(folder), **manifest})
    show(run_table(folder, manifest))


@app.command
def sweep(
    config: Path,
    *overrides: str,
    out: Path | None = None,
    scale: str | None = None,
    workers: Workers = 1,
    budget: str | None = None,
    shard: str | None = None,
    ray: str | None = None,
    save_every: Count | None = None,
    batch: bool = True,
    estimate: bool = True,
    dry: Annotated[bool, Parameter(negative="")] = False,
    plugin: Path | None = None,
    json: Json = False,
) -> None:
    """Compute all runs of a grid; the same command again continues where it stopped.

    Finished runs are never touched. Several of these processes may work on one folder at once.

    Example: fairvar sweep mnist.toml --scale small --workers 2

    Args:
        config: a TOML file with a [sweep] section; `fairvar example mnist` prints one.
        overrides: key=value pairs that change it, such as sweep.seeds=2.
        out: folder for the runs; runs/NAME by default.
        scale: use the file's [scale.NAME] overrides, such as small.
        workers: processes on this machine, of train.threads threads each (one by default). With
            train.device=cuda they take turns over the GPUs.
        budget: stop after this time, such as 30min; the same command continues later.
        shard: only part i of n, such as 0/4, for job arrays; runs of one batch stay together.
        ray: address of a Ray cluster that computes the missing runs ("local" starts one here).
        save_every: rounds between checkpoints, besides one every ten seconds.
        batch: runs that differ in numbers only (lr, strength, q, step, seed) train as one batch
            where that is faster; --no-batch trains every run by itself, the same within rounding.
        estimate: time a few rounds first, to tell what a large sweep will cost.
        dry: check everything, list the runs and their number, and stop.
        plugin: a Python file to load first, for methods of your own.
        json: print the outcome as JSON.
    """
    from fairvar.methods.plugin import load_plugin
    from fairvar.runs.identity import look_again
    from fairvar.runs.plan import Plan, differences
    from fairvar.runs.runner import missing, run_folder, start_note
    from fairvar.runs.store import check_writable
    from fairvar.runs.sweep import crowding, parse_budget, parse_shard, project, run_sweep
    from fairvar.runs.sweep import shard as shard_of
    from fairvar.system.progress import progress

    load_plugin(plugin)
    plan = Plan.load(config, overrides, scale)
    seconds = None if budget is None else parse_budget(budget)
    part, parts = (0, 1) if shard is None else parse_shard(shard)
    cells = shard_of(plan.cells, part, parts, batch)
    folder = out or Path("runs") / plan.name
    if dry:
        rows = differences(cells)
        if json:
            return print_json(rows)
        for row in rows:
            values = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("run", "method"))
            say(f"{row['run']}  {row['method']}, {values}")
        return say(f"{len(cells)} runs")
    look_again()
    for cell in cells:
        run_folder(cell, folder)  # bad data write nothing
    check_writable(folder)
    tell(start_note(cells[0]) if cells else None)
    if cells and ray is None:
        train = cells[0].train
        tell(crowding(workers, train.threads, train.device, os.cpu_count() or 1))
    if estimate and len(missing(cells, folder)) > MANY_RUNS and ray is None:
        cost = project(cells, folder, workers, batch)
        text = f"about {duration(cost)} with {workers} worker(s), from a few timed rounds"
        tell(f"{len(missing(cells, folder))} runs to do: {text}")
    with progress(plan.name) as report:
        if ray is not None:
            from fairvar.runs.ray import run_on_ray

            run_on_ray(cells, folder, ray, report, batch)
        status = run_sweep(cells, folder, report, workers, seconds, save_every, plugin, batch)
    if json:
        return print_json({"folder": str(folder), **asdict(status)})
    say(f"{status.done} of {status.cells} runs are done in {folder}")
    if status.reason:
        say(f"stopped because {status.reason}; the same command continues")
    elif status.elsewhere:
        say(f"{status.elsewhere} are left to other processes, which hold them or runs beside them")


@app.command
def report(
    folder: Path,
    *,
    out: Path | None = None,
    title: str | None = None,
    t: float = 1.96,
    model: str | None = None,
    unit: str = "fraction",
    m: Count | None = None,
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
    from fairvar.methods.plugin import load_plugin
    from fairvar.report.files import write_report
    from fairvar.report.style import require_matplotlib
    from fairvar.runs.results import gather
    from fairvar.runs.store import check_writable
    from fairvar.system.progress import progress

    load_plugin(plugin)
    require_matplotlib()
    target, rule = out or folder / "report", selection_rule(t, m, unit, model)
    with progress("report") as show:
        show(0, 1, "reading runs")
        groups = gather(folder, rule=rule, model=model)
        check_writable(target)  # bad input writes nothing
        tables, files = write_report(groups, target, title or f"fairvar: {groups[0].config.name}")
        show(1, 1, "done")
    show_report(tables, files, json)


@app.command
def compare(
    a: str,
    b: str,
    *,
    model: str | None = None,
    late: bool = False,
    plugin: Path | None = None,
    json: Json = False,
) -> None:
    """Paired differences between two methods: with intervals, and which clients gain or pay.

    Each side is a sweep's folder with a method label, FOLDER:LABEL or FOLDER:LABEL@ALPHA (the
    configuration chosen on validation), or the folder of a single run. Where a folder holds both
    protocols, ALPHA is boxes/0.1 or tables/0.1.

    Example: fairvar compare runs/mnist:FairGrad*@0.1 runs/mnist:FedAvg@0.1

    Args:
        a: the method in question.
        b: what it is compared with.
        model: the "global" or the clients' own ("local") model.
        late: average over the last quarter of the rounds, the same for both, instead of each at
            its chosen round: single rounds swing.
        plugin: a Python file to load first, for methods of your own.
        json: print the numbers as JSON.
    """
    from fairvar.methods.plugin import load_plugin
    from fairvar.report.compare import paired_dict, paired_table, side, versus

    load_plugin(plugin)
    left, right = side(a, model, late), side(b, model, late)
    paired = versus(left, right)
    if json:
        return print_json(paired_dict(left, right, paired))
    for part in paired_table(left, right, paired):
        show(part)
