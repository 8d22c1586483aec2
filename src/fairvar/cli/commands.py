"""All commands: importing their modules registers them."""

from fairvar.cli import data, describe, flower, results, train  # noqa: F401
from fairvar.cli.common import app

__all__ = ["app"]
