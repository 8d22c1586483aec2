"""Commands that look: example, partition, theory, methods, doctor."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from fairvar.cli.common import (
    Json,
    Out,
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
    from fairvar.report.result_figures import partition_figure
    from fairvar.report.style import require_matplotlib, save
    from fairvar.report.terminal import passport_table
    from fairvar.runs.plan import federations
    from fairvar.runs.runner import class_counts, federation_of
    from fairvar.runs.store import check_writable

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
    from fairvar.report.terminal import claims_text
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
    from fairvar.methods.catalogue import catalogue
    from fairvar.report.terminal import methods_table, options_table

    if json:
        return print_json(catalogue())
    show(methods_table())
    show(options_table())


@app.command
def doctor(*, json: Json = False) -> None:
    """Versions, device, threads, determinism and disk: what to paste into a bug report."""
    from fairvar.cli.doctor import examine
    from fairvar.report.terminal import facts_table

    if json:
        print_json(examine())
    else:
        show(facts_table(examine()))
