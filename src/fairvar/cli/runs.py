"""Commands that compute runs (demo, run, sweep) or read stored ones (report, compare, condense,
seal, verify)."""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.filesize import decimal

from fairvar.cli.common import (
    ConfigFile,
    Count,
    Dry,
    Flag,
    Json,
    Methods,
    NonNegative,
    Out,
    Overrides,
    Plugin,
    PositiveFloat,
    Scale,
    Selection,
    Workers,
    app,
    example_file,
    lib,
    method_override,
    print_json,
    say,
    show,
    show_report,
)
from fairvar.common.display import plural
from fairvar.errors import BadInput, RunFailed

TITLE = "Fair federated learning on MNIST: a demo"
NOTE = (
    "A small grid on 1000 images: it shows the tool and is too small to rank the methods. In the "
    "second federation a fifth of the clients see rotated digits; the page shows who gains and who "
    "pays."
)
Model = Annotated[
    str | None,
    Parameter(
        help='"global", "local" or "personal" models; by default personal ones of methods that '
        "have such, and of the others those that the runs' protocol is about"
    ),
]


@app.command
def demo(
    *,
    out: Out = Path("fairvar-demo"),
    alpha: PositiveFloat = 0.1,
    seeds: Count = 3,
    rounds: Count = 100,
    methods: Methods = None,
    workers: Workers | None = None,
    json: Json = False,
) -> None:
    """All methods of the paper on its MNIST experiment, and some on clients of which a fifth are
    different by nature, in about two minutes and without a download.

    Prints two tables of accuracy and variance over clients, and writes them to a folder with a page
    and figures. --methods names those of the first federation; all adds the further ones.

    Example: fairvar demo --seeds 2 --methods all --out my-demo

    Args:
        alpha: heterogeneity of the Dirichlet partition; smaller means more different clients.
        seeds: repetitions with other initial models.
        rounds: communication rounds of each run.
        workers: processes; as many as there are cores by default.
    """
    both = (f"sweep.seeds={seeds}", f"train.rounds={rounds}")
    first = (f"partition.alpha={alpha!r}", *method_override(methods))
    cells: list[Any] = []
    for name, overrides in (("demo", (*both, *first)), ("different", both)):
        with example_file(name) as path:
            cells += lib.plan.Plan.load(path, overrides).cells
    lib.formats.check_writable(out)
    with lib.progress("fairvar demo") as report:
        groups, processes = lib.runner.arrange(cells), workers or min(8, os.cpu_count() or 1)
        lib.sweep.run_sweep(groups, out / "runs", report, processes)
    with lib.progress("report") as report:
        # The folder may hold runs of earlier demos with other options.
        names = {lib.runner.run_folder(cell, out).name for cell in cells}
        found = lib.results.gather(out / "runs", only=names)
        tables, files = lib.files.write_files(found, out, TITLE, report)
    show_report(tables, files, json)
    if not json:
        say(NOTE)


@app.command
def run(
    config: ConfigFile,
    /,
    *overrides: Overrides,
    out: Out = Path("runs"),
    dry: Dry = False,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Train one configuration and store its configuration, history and final model.

    Example: fairvar run quick.toml method.name=fairgrad method.strength=0.1
    """
    lib.load_plugin(plugin)
    settings = lib.config.Config.load(config, overrides)
    mark = lib.keys.fingerprint(settings)
    if dry and json:
        return print_json({"config": settings.to_dict(), "fingerprint": mark})
    if dry:
        return print(settings.to_toml() + f"\n# fingerprint {mark}")
    lib.experiments.run(settings, out=out, progress=True)
    folder = lib.runner.run_folder(settings, out)
    manifest = lib.stored.verify(folder) or {}
    if json:
        return print_json({"folder": str(folder), **manifest})
    show(lib.run_table(folder, manifest))


@app.command
def sweep(
    config: ConfigFile,
    /,
    *overrides: Overrides,
    out: Path | None = None,
    scale: Scale = None,
    methods: Methods = None,
    workers: Workers = 1,
    budget: str | None = None,
    shard: str | None = None,
    ray: str | None = None,
    ray_cpus: PositiveFloat | None = None,
    ray_gpus: float | None = None,
    save_every: Count | None = None,
    no_batch: Flag = False,
    no_estimate: Flag = False,
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
        ray_cpus: CPUs that a task takes of its node; train.threads by default.
        ray_gpus: GPUs that it takes, such as 0.25; one by default if train.device is cuda.
        save_every: rounds between checkpoints, in addition to one every ten seconds.
        no_batch: train every run by itself. By default runs that differ in numbers only (lr,
            strength, q, step, seed) train as one batch where that is faster, the same within
            rounding.
        no_estimate: do not time a few rounds first to say how long a large sweep will take.
    """
    lib.load_plugin(plugin)
    plan = lib.plan.Plan.load(config, (*overrides, *method_override(methods)), scale)
    if dry:
        groups = lib.experiments.part_of(plan, shard, not no_batch)
        rows = lib.plan.differences([cell for group in groups for cell in group])
        if json:
            return print_json(rows)
        for row in rows:
            values = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("run", "method"))
            say(f"{row['run']}  {row['method']}, {values}")
        return say(plural(len(rows), "run"))
    found = lib.experiments.sweep(
        plan, out=out, workers=workers, budget=budget, shard=shard, ray=ray, ray_cpus=ray_cpus,
        ray_gpus=ray_gpus, save_every=save_every, batch=not no_batch,
        estimate=not no_estimate, progress=True,
    )  # fmt: skip
    folder, status = found.folder, found.status
    if json:
        return print_json({"folder": str(folder), **asdict(status)})
    say(f"{status.done} of {status.cells} runs are done in {folder}")
    if status.reason:
        say(f"stopped because {status.reason}; the same command continues")
    elif status.elsewhere:
        say(f"{status.elsewhere} are left to other processes, which compute them or their batches")


@app.command
def report(
    folder: Path,
    /,
    *,
    out: Path | None = None,
    title: str | None = None,
    model: Model = None,
    selection: Selection | None = None,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Choose on validation data, report on test data: tables, figures and a page from a sweep.

    Example: fairvar report runs/mnist --title "MNIST, 50 clients"

    Args:
        folder: what `fairvar sweep`, `run` or `condense` wrote.
        out: where the report goes; FOLDER/report by default.
        title: heading of the page.
    """
    lib.load_plugin(plugin)
    chosen = selection or Selection()
    found = lib.in_python.write_report(
        folder, out=out, title=title, model=model, t=chosen.t, unit=chosen.unit, m=chosen.m,
        progress=True,
    )  # fmt: skip
    show_report(found.tables, found.files, json)


@app.command
def compare(
    a: str,
    b: str,
    /,
    *,
    model: Model = None,
    late: Flag = False,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Paired differences between two methods: with intervals, and which clients gain or lose.

    Each side is a sweep's folder with a method label, FOLDER:LABEL or FOLDER:LABEL@ALPHA (the
    configuration chosen on validation data), or the folder of a single run. Where a folder holds
    both protocols, ALPHA is boxes/0.1 or tables/0.1.

    Example: fairvar compare runs/mnist:FairGrad*@0.1 runs/mnist:FedAvg@0.1

    Args:
        a: the method in question.
        b: what it is compared with.
        late: average over the last quarter of the rounds, the same for both, instead of each at
            its chosen round: single rounds vary much.
    """
    lib.load_plugin(plugin)
    left, right = lib.compare.side(a, model, late), lib.compare.side(b, model, late)
    paired = lib.compare.compare_sides(left, right)
    if json:
        return print_json(lib.compare.paired_dict(left, right, paired))
    for part in lib.compare.paired_table(left, right, paired):
        show(part)


@app.command
def condense(
    *folders: Path,
    out: Path,
    all: Flag = False,
    selection: Selection | None = None,
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Make results small enough to publish: one file, from which reports can be made again.

    Keeps the runs of the configurations that validation data choose, with the answers of every
    client, and the validation curve of every other configuration. Several folders become one, so
    that parts of a grid from several machines can be combined. `fairvar report` must then be given
    the same --t, --unit and --m.

    Example: fairvar condense runs/mnist --out results/mnist

    Args:
        folders: what `fairvar sweep` or this command wrote.
        out: folder for runs.tar.xz.
        all: keep all runs with their histories, chosen or not.
    """
    if not folders:
        raise BadInput("give at least one folder of runs")
    if out.is_dir() and any(map(lib.formats.is_complete, out.iterdir())):
        raise BadInput(f"{out} holds the runs themselves; give the archive a folder of its own")
    lib.load_plugin(plugin)
    rule = (selection or Selection()).rule()
    with lib.progress("condense") as progress:
        progress(0, 2, "reading runs")
        groups = lib.results.gather(*folders, rule=rule)
        lib.formats.check_writable(out)
        progress(1, 2, "writing")
        path = lib.archive.condense(groups, out, all)
        progress(2, 2, "done")
    runs, size = sum(len(g.provenances) for g in groups), path.stat().st_size
    if json:
        return print_json({"file": str(path), "runs": runs, "bytes": size})
    say(f"{plural(runs, 'run')} on {plural(len(groups), 'federation')} in {path}, {decimal(size)}")


@app.command
def seal(folder: Path, /, *, plugin: Plugin = None, json: Json = False) -> None:
    """Write the list of contents (runs.json) of an archive that was made without one.

    `condense` writes it by itself. Without it `report` and `verify` refuse an archive, because a
    damaged one could not be recognised. All runs in the archive are checked first.

    Example: fairvar seal results/mnist

    Args:
        folder: where runs.tar.xz is.
    """
    lib.load_plugin(plugin)
    path, checked = lib.verify.seal_archive(folder)
    if json:
        return print_json({"file": str(path), "runs": checked})
    print(f"{checked} runs and summaries are listed in {path}")


@app.command
def verify(
    folder: Path,
    /,
    *,
    rerun: NonNegative = 0,
    evaluations: Count = 1,
    seed: NonNegative | None = None,
    device: str = "cpu",
    plugin: Plugin = None,
    json: Json = False,
) -> None:
    """Check stored results: every file against its checksum, and some runs by computing them again.

    Exit code 4 if a file was changed, 3 if a run gives other numbers.

    Example: fairvar verify results/mnist --rerun 3

    Args:
        folder: what `fairvar sweep`, `run` or `condense` wrote.
        rerun: compute this many runs, drawn at random, again from the start on this machine.
        evaluations: up to their first, second, … evaluation.
        seed: of the random draw; another one each time by default.
        device: where to compute them.
    """
    lib.load_plugin(plugin)
    checked = lib.verify.check_files(folder)
    seed = secrets.randbelow(10**6) if seed is None else seed
    chosen = lib.verify.draw(lib.results.stored_runs(folder), rerun, seed) if rerun else []
    found = []
    with lib.progress("verify") as progress:
        for place, run in enumerate(chosen):
            progress(place, len(chosen), f"{run.config.method.label}, {run.folder.name}")
            found.append(lib.verify.rerun(run, evaluations, device))
    if json:
        again = [agreement.to_dict() for agreement in found]
        print_json({"files_intact": checked, "seed": seed, "rerun": again})
    else:
        say(f"{checked} runs and summaries are as they were written")
        if found:
            show(lib.agreement_table(found, seed))
    if not all(agreement.holds for agreement in found):
        raise RunFailed("a run did not come out again within the tolerance")
