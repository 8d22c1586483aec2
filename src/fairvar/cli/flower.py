"""`fairvar flower new|keys|run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from fairvar.cli.common import Days, Nodes, app, say

flower = App(name="flower", help="Real federations on Flower: an app of your own, keys for nodes."
             "\n\nExample: fairvar flower new my_app")  # fmt: skip
app.command(flower)


@flower.command(name="new")
def flower_new(folder: Path) -> None:
    """Write a Flower app that trains with fairvar; put your model into it.

    Example: fairvar flower new my_app

    Args:
        folder: where to; its last part names the app.
    """
    from fairvar.deploy.flower.apps import new_app

    say(*new_app(folder))


@flower.command(name="keys")
def flower_keys(folder: Path, *, nodes: Nodes, host: list[str], days: Days = 365) -> None:
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
def flower_run(app: Path, *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Train a Flower app: `flwr run`, with Flower's telemetry and update check switched off.

    Example: fairvar flower run my_app --stream

    Args:
        app: the app's folder.
        arguments: go to `flwr run`, such as a federation's name, --stream or -c "rounds=10".
    """
    from fairvar.deploy.flower.apps import run_app

    run_app(app, arguments)
