"""All commands: those of `runs`, and here the ones that need no runs."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from fairvar.cli import runs  # noqa: F401  (importing it registers its commands)
from fairvar.cli.common import (
    ConfigFile,
    Days,
    Json,
    Nodes,
    Out,
    Overrides,
    Scale,
    app,
    example_file,
    lib,
    print_json,
    say,
    show,
)
from fairvar.common.files import whole_file
from fairvar.common.process import note
from fairvar.errors import BadInput, plain


@app.command
def example(name: str = "quick", /) -> None:
    """Print a configuration file to start from.

    Example: fairvar example > quick.toml

    Args:
        name: "quick", a single run with every section, or a sweep: demo and different, those of
            `fairvar demo`; mnist, cifar10, cifar100 and tiny_imagenet of the paper; mnist_all,
            shakespeare and tabular with further methods.
    """
    with example_file(name) as path:
        print(path.read_text(encoding="utf-8"), end="")


@app.command
def init(file: Path = Path("fairvar.toml"), /) -> None:
    """Write a configuration with comments, to start from; an existing file is never overwritten.

    Example: fairvar init my.toml

    Args:
        file: where to; `fairvar run FILE` then trains it.
    """
    with example_file("quick") as path:
        name = shlex.quote(plain(str(file)))
        text = path.read_text(encoding="utf-8").replace("configs/quick.toml", name)
    if os.path.lexists(file):
        raise BadInput(f"{file} is there already; give another name")
    try:
        with whole_file(file) as opened:
            opened.write(text.encode())
    except OSError as error:
        raise BadInput(f"cannot write {file}: {error.strerror or error}") from None
    say(f"wrote {file}; next: fairvar run {shlex.quote(str(file))}")


@app.command
def partition(
    config: ConfigFile,
    /,
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
    several, settings = lib.plan.federations(config, overrides, scale)
    drawn = {name: lib.runner.federation_of(each) for name, each in settings.items()}
    for federation in drawn.values():
        if federation.classes is None:
            raise BadInput(f"{federation.name} has no classes: there is no partition to draw")
    lib.formats.check_writable(out)
    files = []
    with lib.progress("fairvar partition") as report:
        for place, (name, federation) in enumerate(drawn.items()):
            report(place, len(drawn), name)
            counts = federation.class_counts.numpy()
            figure = lib.files.partition_figure(federation.name, counts, federation.provenance)
            files += lib.style.save(figure, out, name)
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
    found = lib.theory.claims()
    if json:
        print_json([asdict(c) for c in found])
    else:
        for part in lib.claims_text(found):
            show(part)
    failed = sum(not c.holds for c in found)
    note(f"{len(found) - failed} of {len(found)} claims hold")
    if failed:
        sys.exit(3)


@app.command
def methods(*, json: Json = False) -> None:
    """All methods: when to use which, exchanges and bytes per round, what the server sees, options.

    Example: fairvar methods
    """
    if json:
        return print_json(lib.catalogue())
    show(lib.when_table())
    show(lib.methods_table())
    show(lib.options_table())


@app.command
def doctor(*, json: Json = False) -> None:
    """Versions, device, threads, determinism and disk: what to paste into a bug report.

    Example: fairvar doctor
    """
    facts = lib.examine()
    print_json(facts) if json else show(lib.facts_table(facts))


# -- fairvar data ----------------------------------------------------------------------------------
data = App(name="data", help="Data sets: what is available, where from, checksums.\n\n"
           "Example: fairvar data fetch cifar10")  # fmt: skip
app.command(data)


@data.command(name="list")
def data_list(*, json: Json = False) -> None:
    """Every data set: what it is, whether it was found, where it comes from.

    Example: fairvar data list
    """
    print_json(lib.data.describe()) if json else show(lib.datasets_table(lib.data.describe()))


@data.command(name="fetch")
def data_fetch(name: str, /, *, root: Path | None = None) -> None:
    """Download a data set from its official address, checked against its SHA-256.

    The same command continues an interrupted download.

    Example: fairvar data fetch cifar10

    Args:
        name: as `fairvar data list` writes it.
        root: folder to put it into; fairvar's cache by default.
    """
    with lib.progress(f"fetch {name}") as report:
        folder = lib.fetch(
            name, root, progress=lambda file, done, total: report(done, total or 0, file)
        )
    say(folder)


@data.command(name="verify")
def data_verify(name: str, /, *, root: Path | None = None, json: Json = False) -> None:
    """Check a data set's files; exit code 4 if one is not what was published.

    Example: fairvar data verify cifar10

    Args:
        name: as `fairvar data list` writes it.
        root: folder to look in; FAIRVAR_DATA and fairvar's cache otherwise.
    """
    rows = lib.data.verify(name, root)
    if json:
        print_json([{"file": f, "ok": ok, "reason": why} for f, ok, why in rows])
    else:
        say(*(f"{'ok ' if ok else 'BAD'} {f}  {why}" for f, ok, why in rows))
    if not all(ok for _, ok, _ in rows):
        sys.exit(4)


# -- fairvar flower --------------------------------------------------------------------------------
flower = App(name="flower", help="Real federations on Flower: an app of your own, keys for nodes."
             "\n\nExample: fairvar flower new my_app")  # fmt: skip
app.command(flower)


@flower.command(name="new")
def flower_new(folder: Path, /) -> None:
    """Write a Flower app that trains with fairvar; put your model into it.

    Example: fairvar flower new my_app

    Args:
        folder: where to; its last part names the app.
    """
    from fairvar.deploy.flower import new_app

    say(*new_app(folder))


@flower.command(name="keys")
def flower_keys(
    folder: Path,
    /,
    *,
    nodes: Nodes,
    host: Annotated[list[str], Parameter(negative="")],
    days: Days = 365,
) -> None:
    """Make a certificate authority, the server's certificate and a key pair for every node.

    Example: fairvar flower keys keys --nodes 3 --host fl.example.org

    Args:
        folder: where to; keys are never overwritten.
        nodes: how many nodes will take part.
        host: a name or address of the server, as nodes write it; may be given several times.
        days: how long the certificates are good.
    """
    from fairvar.deploy.flower import require_flower

    require_flower()
    from fairvar.deploy.flower.keys import make_keys

    say(*make_keys(folder, nodes, host, days))


@flower.command(name="run")
def flower_run(
    app: Path,
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    data: Path | None = None,
) -> None:
    """Train a Flower app: simulated here, or on the nodes of a SuperLink that you name.

    Shows the log with a line for each round, ends with the fairness of the run and, unless it was
    completed, with exit code 3. Flower's telemetry and update check are switched off.

    Example: fairvar flower run my_app -c "rounds=10"

    Args:
        app: the app's folder.
        arguments: the name of a SuperLink in Flower's configuration, unless the run is to be
            simulated; then options of `flwr run`, such as -c "rounds=10".
        data: to simulate own data, a folder with one file or folder for each site.
    """
    from fairvar.deploy.flower import run_app

    run_app(app, arguments, data)
