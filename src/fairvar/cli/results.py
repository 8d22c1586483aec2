"""Commands for results that others shall trust: condense, seal, verify."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fairvar.cli.common import Count, Json, NonNegative, app, print_json, say, selection_rule, show
from fairvar.errors import BadInput, RunFailed


@app.command
def condense(
    *folders: Path,
    out: Path,
    all: Annotated[bool, Parameter(negative="")] = False,
    t: float = 1.96,
    unit: str = "fraction",
    m: Count | None = None,
    plugin: Path | None = None,
    json: Json = False,
) -> None:
    """Make results small enough to publish: one file, from which reports can be made again.

    Keeps the runs of the configurations that validation data choose, with the answers of every
    client, and the validation curve of every other configuration. Several folders become one, so
    that slices of a grid from several machines can be put together.

    Example: fairvar condense runs/mnist --out results/mnist

    Args:
        folders: what `fairvar sweep` or this command wrote.
        out: folder for runs.tar.xz.
        all: keep all runs with their histories, chosen or not.
        t: as in `fairvar report`, which must then be asked with the same t, unit and m.
        unit: as in `fairvar report`.
        m: as in `fairvar report`.
        plugin: a Python file to load first, for methods of your own.
        json: print the outcome as JSON.
    """
    from fairvar.methods.plugin import load_plugin
    from fairvar.runs.condense import condense as write
    from fairvar.runs.results import gather
    from fairvar.runs.store import check_writable, is_complete
    from fairvar.system.progress import progress

    if not folders:
        raise BadInput("give at least one folder of runs")
    if out.is_dir() and any(map(is_complete, out.iterdir())):
        raise BadInput(f"{out} holds the runs themselves; give the archive a folder of its own")
    load_plugin(plugin)
    rule = selection_rule(t, m, unit)
    with progress("condense") as report:
        report(0, 2, "reading runs")
        groups = gather(*folders, rule=rule)
        check_writable(out)
        report(1, 2, "writing")
        path = write(groups, out, all)
        report(2, 2, "done")
    runs, size = sum(len(g.births) for g in groups), path.stat().st_size
    if json:
        return print_json({"file": str(path), "runs": runs, "bytes": size})
    say(f"{runs} runs on {len(groups)} federations in {path}, {size / 1e6:.1f} MB")


@app.command
def seal(folder: Path, *, plugin: Path | None = None, json: Json = False) -> None:
    """Write the list of contents (runs.json) beside an archive that was written without one.

    `condense` writes it by itself. Without it `report` and `verify` refuse an archive: a damaged
    one could not be told from a whole one. All runs in the archive are checked first.

    Example: fairvar seal results/mnist

    Args:
        folder: where runs.tar.xz lies.
        plugin: a Python file to load first, for methods of your own.
        json: print the outcome as JSON.
    """
    from fairvar.methods.plugin import load_plugin
    from fairvar.runs.verify import seal_archive

    load_plugin(plugin)
    path, checked = seal_archive(folder)
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
    plugin: Path | None = None,
    json: Json = False,
) -> None:
    """Check stored results: every file against its seal, and some runs by running them again.

    Exit code 4 if a file was changed, 3 if a run does not come out again.

    Example: fairvar verify results/mnist --rerun 3

    Args:
        folder: what `fairvar sweep`, `run` or `condense` wrote.
        rerun: this many runs, drawn at random, are run again from the start on this machine.
        evaluations: up to their first, second, … evaluation.
        seed: of the draw; another one each time by default.
        device: where to run them again.
        plugin: a Python file to load first, for methods of your own.
        json: print what was found as JSON.
    """
    from fairvar.methods.plugin import load_plugin
    from fairvar.report.terminal import agreement_table
    from fairvar.runs.results import stored_runs
    from fairvar.runs.verify import check_files, draw
    from fairvar.runs.verify import rerun as again
    from fairvar.system.progress import progress

    load_plugin(plugin)
    checked = check_files(folder)
    seed = secrets.randbelow(10**6) if seed is None else seed
    chosen = draw(stored_runs(folder), rerun, seed) if rerun else []
    found = []
    with progress("verify") as report:
        for place, run in enumerate(chosen):
            report(place, len(chosen), f"{run.config.method.label}, {run.folder.name}")
            found.append(again(run, evaluations, device))
    if json:
        told = [agreement.to_dict() for agreement in found]
        print_json({"files_intact": checked, "seed": seed, "rerun": told})
    else:
        say(f"{checked} runs and summaries are as they were written")
        if found:
            show(agreement_table(found, seed))
    if not all(agreement.holds for agreement in found):
        raise RunFailed("a run did not come out again within the tolerance")
