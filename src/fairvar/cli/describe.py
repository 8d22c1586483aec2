"""Commands that describe: example, partition, theory, methods, doctor."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from fairvar.cli.common import (
    ConfigFile,
    Json,
    Out,
    Overrides,
    Scale,
    app,
    example_file,
    print_json,
    say,
    show,
    warn,
)
from fairvar.errors import BadInput


@app.command
def example(name: str = "quick") -> None:
    """Print a configuration file to start from.

    Example: fairvar example > quick.toml

    Args:
        name: "quick", a single run with every section; "demo", the sweep of `fairvar demo`; or a
            sweep of the paper: mnist, cifar10, cifar100, tiny_imagenet.
    """
    with example_file(name) as path:
        print(path.read_text(encoding="utf-8"), end="")


@app.command
def partition(
    config: ConfigFile,
    *overrides: Overrides,
    scale: Scale = None,
    out: Out = Path("fairvar-partition"),
    json: Json = False,
) -> None:
    """Figure and heterogeneity numbers of a partition, before spending compute on it.

    The sections [data] and [partition] are used. Of a file with a [sweep] section, every federation
    of the sweep is drawn, and --json prints a list.

    Example: fairvar partition quick.toml partition.alpha=0.5
    """
    from fairvar.cli import library as lib

    several, settings = lib.federations(config, overrides, scale)
    lib.require_matplotlib()
    drawn = {name: lib.federation_of(each) for name, each in settings.items()}
    for federation in drawn.values():
        if federation.classes is None:
            raise BadInput(f"{federation.name} has no classes: there is no partition to draw")
    lib.check_writable(out)
    files = []
    for name, federation in drawn.items():
        counts = lib.class_counts(federation)
        figure = lib.partition_figure(federation.name, counts, federation.provenance)
        files += lib.save_figure(figure, out, name)
    if json:
        passports = [dict(federation.provenance) for federation in drawn.values()]
        return print_json(passports if several else passports[0])
    for name, federation in drawn.items():
        show(lib.passport_table(federation, name))
    say("Written:", *(f"  {file}" for file in files))


@app.command
def theory(*, json: Json = False) -> None:
    """The paper's theorems as numbers: each claim with both sides, tolerance and verdict.

    For statements of the paper that are wrong, the counterexample is shown. Exit code 3 if a claim
    fails.

    Example: fairvar theory --json
    """
    from fairvar.cli import library as lib

    found = lib.claims()
    if json:
        print_json([asdict(c) for c in found])
    else:
        for part in lib.claims_text(found):
            show(part)
    failed = sum(not c.holds for c in found)
    warn(f"{len(found) - failed} of {len(found)} claims hold")
    if failed:
        sys.exit(3)


@app.command
def methods(*, json: Json = False) -> None:
    """All methods: options, exchanges and bytes per round, what the server sees.

    Example: fairvar methods
    """
    from fairvar.cli import library as lib

    if json:
        return print_json(lib.catalogue())
    show(lib.methods_table())
    show(lib.options_table())


@app.command
def doctor(*, json: Json = False) -> None:
    """Versions, device, threads, determinism and disk: what to paste into a bug report.

    Example: fairvar doctor
    """
    from fairvar.cli import library as lib

    facts = lib.examine()
    print_json(facts) if json else show(lib.facts_table(facts))
