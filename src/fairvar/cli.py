"""The command line. Each command parses, makes one library call and prints one result.

Results go to stdout (`--json` for machines), progress to stderr. Exit codes: 0 fine, 2 bad input
(one line on stderr, nothing written), 3 run failed, 4 integrity failed, 130 interrupted.
"""

from __future__ import annotations

import importlib.util
import json as jsonlib
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from fairvar._version import __version__
from fairvar.errors import BadInput, FairvarError

app = App(
    name="fairvar",
    version=__version__,
    help="Fair federated learning: train models whose quality is even across clients.",
)
Json = Annotated[bool, Parameter(negative="")]
Out = Annotated[Path, Parameter(help="folder for the files that are written")]


@app.command
def demo(
    *,
    out: Out = Path("fairvar-demo"),
    alpha: float = 0.1,
    seeds: int = 3,
    rounds: int = 100,
    json: Json = False,
) -> None:
    """All methods of the paper on its MNIST experiment, in about a minute and without a download.

    Prints a table of accuracy and variance over clients and leaves it in a folder with pictures.

    Args:
        alpha: heterogeneity of the Dirichlet partition; smaller means more different clients.
        seeds: repetitions with other initial models.
        rounds: communication rounds of each run.
        json: print the table as JSON.
    """
    from fairvar.demo import DemoSettings, demo_federation, run_demo, write_demo
    from fairvar.progress import progress
    from fairvar.report.look import require_matplotlib
    from fairvar.store import check_writable

    settings = DemoSettings(alpha=alpha, seeds=seeds, rounds=rounds)
    require_matplotlib()
    check_writable(out)
    federation = demo_federation(settings)
    with progress("fairvar demo") as report:
        trials = run_demo(settings, federation, report)
    table, files = write_demo(out, settings, federation, trials)
    if json:
        return _print_json(_table_dict(table))
    from fairvar.report import to_rich

    _print(to_rich(table))
    print("\nWritten:", *files, sep="\n  ")


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
    from fairvar.experiment import run_config
    from fairvar.progress import progress
    from fairvar.report.show import run_table
    from fairvar.store import check_writable

    _load_plugin(plugin)
    settings = Config.load(config, overrides)
    if dry:
        return print(settings.to_toml() + f"\n# fingerprint {settings.fingerprint}")
    check_writable(out)
    with progress(settings.name) as report:
        folder, manifest = run_config(settings, out, report)
    if json:
        return _print_json({"folder": str(folder), **manifest})
    _print(run_table(folder, manifest))


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
    from fairvar.experiment import federation_of
    from fairvar.report.look import require_matplotlib, save
    from fairvar.report.pictures import partition_figure
    from fairvar.report.show import passport_table
    from fairvar.store import check_writable

    settings = Config.load(config, overrides)
    require_matplotlib()
    check_writable(out)
    federation = federation_of(settings)
    files = save(partition_figure(federation), out, "partition")
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


def _load_plugin(path: Path | None) -> None:
    """Run a file that registers methods."""
    if path is None:
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BadInput(f"plugin {path} is not a Python file")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


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
