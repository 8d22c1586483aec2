"""Commands that train: demo, run, sweep."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from fairvar.cli.common import (
    ConfigFile,
    Count,
    Dry,
    Json,
    Out,
    Overrides,
    Plugin,
    PositiveFloat,
    Scale,
    Workers,
    app,
    example_file,
    print_json,
    say,
    show,
    show_report,
    warn,
)
from fairvar.errors import RunFailed

MANY_RUNS = 40  # from this number on, a sweep says how long it will take before it starts
TITLE = "Fair federated learning on MNIST: a demo"
NOTE = "A small grid on 1000 images: it shows the tool, not the last word on the methods."


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


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

    Prints a table of accuracy and variance over clients, and writes it to a folder with figures.

    Example: fairvar demo --seeds 2 --out my-demo

    Args:
        alpha: heterogeneity of the Dirichlet partition; smaller means more different clients.
        seeds: repetitions with other initial models.
        rounds: communication rounds of each run.
        workers: processes; as many as there are cores by default.
    """
    from fairvar.cli import library as lib

    overrides = (f"partition.alpha={alpha!r}", f"sweep.seeds={seeds}", f"train.rounds={rounds}")
    with example_file("demo") as path:
        plan = lib.Plan.load(path, overrides)
    lib.require_matplotlib()
    lib.check_writable(out)
    with lib.progress("fairvar demo") as report:
        lib.run_sweep(plan.cells, out / "runs", report, workers or min(8, os.cpu_count() or 1))
    # The folder may hold runs of earlier demos with other options.
    names = {lib.run_folder(cell, out).name for cell in plan.cells}
    tables, files = lib.write_report(lib.gather(out / "runs", only=names), out, TITLE)
    show_report(tables, files, json)
    if not json:
        say(NOTE)


@app.command
def run(
    config: ConfigFile,
    *overrides: Overrides,
    out: Out = Path("runs"),
    dry: Dry = False,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Train one configuration and store its configuration, history and final model.

    Example: fairvar run quick.toml method.name=fairgrad method.strength=0.1
    """
    from fairvar.cli import library as lib

    lib.load_plugin(plugin)
    settings = lib.Config.load(config, overrides)
    mark = lib.fingerprint(settings)
    if dry and json:
        return print_json({"config": settings.to_dict(), "fingerprint": mark})
    if dry:
        return print(settings.to_toml() + f"\n# fingerprint {mark}")
    lib.forget_files()
    folder = lib.run_folder(settings, out)  # needs readable data
    lib.check_writable(out)
    warn(lib.start_note(settings))
    with lib.progress(settings.name) as report, lib.stop_signals() as asked:
        label = settings.method.label
        watch = lib.Watch(lambda done, total: report(done, total, f"rounds of {label}"), asked)
        lib.run_cell(settings, out, watch)
    manifest = lib.verify(folder)
    if manifest is None:
        raise RunFailed(f"another process is computing {folder}; wait for it or use another --out")
    if json:
        return print_json({"folder": str(folder), **manifest})
    show(lib.run_table(folder, manifest))


@app.command
def sweep(
    config: ConfigFile,
    *overrides: Overrides,
    out: Path | None = None,
    scale: Scale = None,
    workers: Workers = 1,
    budget: str | None = None,
    shard: str | None = None,
    ray: str | None = None,
    save_every: Count | None = None,
    batch: bool = True,
    estimate: bool = True,
    dry: Dry = False,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Compute all runs of a grid; the same command again continues where it stopped.

    Finished runs are never changed. Several of these processes may work on one folder at once.

    Example: fairvar sweep mnist.toml --scale small --workers 2

    Args:
        out: folder for the runs; runs/NAME by default.
        workers: processes on this machine, of train.threads threads each (one by default). With
            train.device=cuda they are distributed over the GPUs.
        budget: stop after this time, such as 30min; the same command continues later.
        shard: only part i of n, such as 0/4, for job arrays; runs of one batch stay together.
        ray: address of a Ray cluster that computes the missing runs ("local" starts one here).
        save_every: rounds between checkpoints, in addition to one every ten seconds.
        batch: runs that differ in numbers only (lr, strength, q, step, seed) train as one batch
            where that is faster; --no-batch trains every run by itself, the same within rounding.
        estimate: time a few rounds first, to say how long a large sweep will take.
    """
    from fairvar.cli import library as lib

    lib.load_plugin(plugin)
    plan = lib.Plan.load(config, overrides, scale)
    seconds = None if budget is None else lib.parse_budget(budget)
    part, parts = (0, 1) if shard is None else lib.parse_shard(shard)
    cells = lib.shard(plan.cells, part, parts, batch)
    folder = out or Path("runs") / plan.name
    if dry:
        rows = lib.differences(cells)
        if json:
            return print_json(rows)
        for row in rows:
            values = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("run", "method"))
            say(f"{row['run']}  {row['method']}, {values}")
        return say(f"{len(cells)} runs")
    lib.forget_files()
    for cell in cells:
        lib.run_folder(cell, folder)  # unreadable data must write nothing
    lib.check_writable(folder)
    warn(lib.start_note(cells[0]) if cells else None)
    if cells and ray is None:
        train = cells[0].train
        warn(lib.crowding(workers, train.threads, train.device, os.cpu_count() or 1))
        todo = len(lib.missing(cells, folder))
        if estimate and todo > MANY_RUNS:
            cost = duration(lib.project(cells, folder, workers, batch))
            warn(
                f"{todo} runs to do: about {cost} with {workers} worker(s), from a few timed rounds"
            )
    with lib.progress(plan.name) as report:
        if ray is not None:
            lib.run_on_ray(cells, folder, ray, report, batch)
        status = lib.run_sweep(cells, folder, report, workers, seconds, save_every, plugin, batch)
    if json:
        return print_json({"folder": str(folder), **asdict(status)})
    say(f"{status.done} of {status.cells} runs are done in {folder}")
    if status.reason:
        say(f"stopped because {status.reason}; the same command continues")
    elif status.elsewhere:
        say(f"{status.elsewhere} are left to other processes, which compute them or their batches")
