"""`fairvar data list|fetch|verify`."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App

from fairvar.cli.common import Json, app, print_json, say, show

data = App(name="data", help="Data sets: what is available, where from, checksums.\n\n"
           "Example: fairvar data fetch cifar10")  # fmt: skip
app.command(data)


@data.command(name="list")
def data_list(*, json: Json = False) -> None:
    """Every data set: what it is, whether it was found, where it comes from.

    Example: fairvar data list
    """
    from fairvar.cli import library as lib

    print_json(lib.describe_data()) if json else show(lib.datasets_table(lib.describe_data()))


@data.command(name="fetch")
def data_fetch(name: str, *, root: Path | None = None) -> None:
    """Download a data set from its official address, checked against its SHA-256.

    The same command continues an interrupted download.

    Example: fairvar data fetch cifar10

    Args:
        name: as `fairvar data list` writes it.
        root: folder to put it into; fairvar's cache by default.
    """
    from fairvar.cli import library as lib

    with lib.progress(f"fetch {name}") as report:
        folder = lib.fetch(
            name, root, progress=lambda file, done, total: report(done, total or 0, file)
        )
    say(folder)


@data.command(name="verify")
def data_verify(name: str, *, root: Path | None = None, json: Json = False) -> None:
    """Check a data set's files; exit code 4 if one is not what was published.

    Example: fairvar data verify cifar10

    Args:
        name: as `fairvar data list` writes it.
        root: folder to look in; FAIRVAR_DATA and fairvar's cache otherwise.
    """
    from fairvar.cli import library as lib

    rows = lib.verify_data(name, root)
    if json:
        print_json([{"file": f, "ok": ok, "reason": why} for f, ok, why in rows])
    else:
        say(*(f"{'ok ' if ok else 'BAD'} {f}  {why}" for f, ok, why in rows))
    if not all(ok for _, ok, _ in rows):
        sys.exit(4)
