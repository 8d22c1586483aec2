"""Tables, figures and the page of results."""

from __future__ import annotations

from fairvar.report import figures
from fairvar.report.html import Page, PageFigure, Section, figure_svg, render_page, write_page
from fairvar.report.render import (
    RENDERERS,
    render,
    to_csv,
    to_latex,
    to_markdown,
    to_rich,
    to_terminal,
)
from fairvar.report.table import Cell, Column, Estimate, Row, Table, mean_and_standard_error

__all__ = [
    "RENDERERS",
    "Cell",
    "Column",
    "Estimate",
    "Page",
    "PageFigure",
    "Row",
    "Section",
    "Table",
    "figure_svg",
    "figures",
    "mean_and_standard_error",
    "render",
    "render_page",
    "to_csv",
    "to_latex",
    "to_markdown",
    "to_rich",
    "to_terminal",
    "write_page",
]
