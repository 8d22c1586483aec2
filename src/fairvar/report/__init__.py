"""What people read: tables and figures."""

from __future__ import annotations

from fairvar.report import figures
from fairvar.report.render import (
    RENDERERS,
    render,
    to_csv,
    to_latex,
    to_markdown,
    to_rich,
    to_terminal,
)
from fairvar.report.table import (
    Cell,
    Column,
    Estimate,
    Row,
    Table,
    mean_and_standard_error,
)

__all__ = [
    "RENDERERS",
    "Cell",
    "Column",
    "Estimate",
    "Row",
    "Table",
    "figures",
    "mean_and_standard_error",
    "render",
    "to_csv",
    "to_latex",
    "to_markdown",
    "to_rich",
    "to_terminal",
]
