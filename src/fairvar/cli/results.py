"""Commands for stored results: report, compare, condense, seal, verify."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fairvar.cli.common import (
    Count,
    Json,
    NonNegative,
    Plugin,
    Selection,
    app,
    print_json,
    say,
    show,
    show_report,
)
from fairvar.errors import BadInput, RunFailed

Model = Annotated[
    str | None,
    Parameter(
        help='"global" or "local" models; by default those that the runs\' protocol is about'
    ),
]


@app.command
def report(
    folder: Path,
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
        folder: what `fairvar sweep` wrote.
        out: where the report goes; FOLDER/report by default.
        title: heading of the page.
    """
    from fairvar.cli import library as lib

    lib.load_plugin(plugin)
    lib.require_matplotlib()
    target, rule = out or folder / "report", (selection or Selection()).rule(model)
    with lib.progress("report") as progress:
        progress(0, 1, "reading runs")
        groups = lib.gather(folder, rule=rule, model=model)
        lib.check_writable(target)  # bad input must write nothing
        heading = title or f"fairvar: {groups[0].config.name}"
        tables, files = lib.write_report(groups, target, heading)
        progress(1, 1, "done")
    show_report(tables, files, json)


@app.command
def compare(
    a: str,
    b: str,
    *,
    model: Model = None,
    late: bool = False,
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
    from fairvar.cli import library as lib

    lib.load_plugin(plugin)
    left, right = lib.side(a, model, late), lib.side(b, model, late)
    paired = lib.versus(left, right)
    if json:
        return print_json(lib.paired_dict(left, right, paired))
    for part in lib.paired_table(left, right, paired):
        show(part)


@app.command
def condense(
    *folders: Path,
    out: Path,
    all: Annotated[bool, Parameter(negative="")] = False,
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
    from fairvar.cli import library as lib

    if not folders:
        raise BadInput("give at least one folder of runs")
    if out.is_dir() and any(map(lib.is_complete, out.iterdir())):
        raise BadInput(f"{out} holds the runs themselves; give the archive a folder of its own")
    lib.load_plugin(plugin)
    rule = (selection or Selection()).rule()
    with lib.progress("condense") as progress:
        progress(0, 2, "reading runs")
        groups = lib.gather(*folders, rule=rule)
        lib.check_writable(out)
        progress(1, 2, "writing")
        path = lib.condense(groups, out, all)
        progress(2, 2, "done")
    runs, size = sum(len(g.births) for g in groups), path.stat().st_size
    if json:
        return print_json({"file": str(path), "runs": runs, "bytes": size})
    say(f"{runs} runs on {len(groups)} federations in {path}, {size / 1e6:.1f} MB")


@app.command
def seal(folder: Path, *, plugin: Plugin = None, json: Json = False) -> None:
    """Write the list of contents (runs.json) of an archive that was made without one.

    `condense` writes it by itself. Without it `report` and `verify` refuse an archive, because a
    damaged one could not be recognised. All runs in the archive are checked first.

    Example: fairvar seal results/mnist

    Args:
        folder: where runs.tar.xz is.
    """
    from fairvar.cli import library as lib

    lib.load_plugin(plugin)
    path, checked = lib.seal_archive(folder)
    if json:
        return print_json({"file": str(path), "runs": checked})
    print(f"{checked} runs and summaries are listed in {path}")


@app.command
def verify(
    folder: Path,
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
    from fairvar.cli import library as lib

    lib.load_plugin(plugin)
    checked = lib.check_files(folder)
    seed = secrets.randbelow(10**6) if seed is None else seed
    chosen = lib.draw(lib.stored_runs(folder), rerun, seed) if rerun else []
    found = []
    with lib.progress("verify") as progress:
        for place, run in enumerate(chosen):
            progress(place, len(chosen), f"{run.config.method.label}, {run.folder.name}")
            found.append(lib.rerun(run, evaluations, device))
    if json:
        again = [agreement.to_dict() for agreement in found]
        print_json({"files_intact": checked, "seed": seed, "rerun": again})
    else:
        say(f"{checked} runs and summaries are as they were written")
        if found:
            show(lib.agreement_table(found, seed))
    if not all(agreement.holds for agreement in found):
        raise RunFailed("a run did not come out again within the tolerance")
