"""All commands: importing their modules registers them."""

from fairvar.cli import data, experiments, facts, flower, results  # noqa: F401
from fairvar.cli.common import app

__all__ = ["app"]
