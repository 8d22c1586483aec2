"""The results of a sweep as one HTML file: no network, no other files, the same bytes each time.

The jinja2 template `page.html` holds the markup and escapes every text. The page forbids itself to
load anything (Content-Security-Policy) and runs only `page.css` and `page.js`, by hash. Figures are
images with data URIs, in which browsers run no script. Without the script the page can still be
read: it adds sorting, tooltips instead of `title`, and the switch between light and dark.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from fairvar.errors import BadInput
from fairvar.metrics import DEFINITIONS
from fairvar.report.style import style_of
from fairvar.report.table import Cell, Column, Estimate, Table, parts
from fairvar.scores import ACCURACY, Metric

# ids that the template uses; an empty one is not allowed
RESERVED = {"in-short", "how-to-read", "provenance", "top", "tip", "heard", ""}


@dataclass(frozen=True)
class PageFigure:
    """`svg` as made by `style.svg`; `file` is the name of the same figure in the page's folder."""

    svg: str
    caption: str
    file: str = ""


@dataclass(frozen=True)
class Section:
    """One table with its figures. `name` becomes the id; `rest`, a table with all rows behind
    `table`, and `details` (name → text) are folded."""

    title: str
    name: str
    table: Table | None = None
    figures: Sequence[PageFigure] = ()
    details: Mapping[str, str] = field(default_factory=dict)
    rest: Table | None = None


def render_page(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    facts: Mapping[str, str] | None = None,
    summary: Mapping[str, Sequence[str]] | None = None,
    scores: Sequence[Metric] = (ACCURACY,),
) -> str:
    """The whole file. `facts` are the provenance of the page: versions, device, seeds, time;
    `summary` the sentences on top, by what they are about; `scores`: by what clients are scored in
    the tables."""
    return _template().render(
        title=title,
        subtitle=subtitle,
        summary=summary or {},
        sections=list(zip(_ids(sections), sections, strict=True)),
        facts=facts or {},
        definitions=DEFINITIONS,
        scores=scores,
        policy=_policy(),
        style=Markup(_asset("page.css")),  # noqa: S704  (our own files)
        script=Markup(_asset("page.js")),  # noqa: S704
    )


def _ids(sections: Sequence[Section]) -> list[str]:
    """A different id for each section, made from its name."""
    found: list[str] = []
    for section in sections:
        id = re.sub(r"[^A-Za-z0-9_-]", "_", section.name)
        while id in RESERVED or id in found:
            id += "_"
        found.append(id)
    return found


# --- template ------------------------------------------------------------------------------------
# NUL, other control characters and lone surrogates are not allowed in HTML; they are replaced by a
# sign that shows that they were there.
_NO_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"subscripts": _subscripts, "in_rows": _in_rows, "cells": _table,
                            "minus": minus}  # fmt: skip
    return environment.from_string(_asset("page.html"))


def _printable(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return _NO_TEXT.sub("\ufffd", value)
    return value


def minus(text: str) -> str:
    """With the sign that is as wide as a plus, where a hyphen stands before a number."""
    return re.sub(r"(?<![\w.])-(?=[\d.])", "−", text)


def _subscripts(text: str) -> Markup:
    """p_k with a real subscript; longer names such as noise_floor stay as they are."""
    escaped = str(escape(text))
    return Markup(re.sub(r"\b([pn])_k\b", r"\1<sub>k</sub>", escaped))  # noqa: S704


@cache
def _asset(name: str) -> str:
    return resources.files("fairvar.report").joinpath(name).read_text(encoding="utf-8")


def _policy() -> str:
    def digest(name: str) -> str:
        found = hashlib.sha256(_asset(name).encode()).digest()
        return f"'sha256-{base64.b64encode(found).decode()}'"

    return (
        f"default-src 'none'; style-src {digest('page.css')}; script-src {digest('page.js')}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


# --- figures -------------------------------------------------------------------------------------
ENLARGED = 1.25 * 96 / 72  # pixels per point: letters of 8 points are for paper, too small here
WIDE, TALL = 700, 530  # pixels
_VIEW_BOX = re.compile(r'<svg[^>]* viewBox="0 0 ([0-9.]+) ([0-9.]+)"')


def _in_rows(figures: Sequence[PageFigure]) -> list[list[dict[str, Any]]]:
    """Large figures have many panels and need the whole width; the others share rows."""
    shown = [_figure(figure) for figure in figures]
    rows = [[f] for f in shown if f["large"]] + [[f for f in shown if not f["large"]]]
    return [row for row in rows if row]


def _figure(figure: PageFigure) -> dict[str, Any]:
    box = _VIEW_BOX.search(figure.svg)
    if box is None:
        raise BadInput("a figure is not SVG with a viewBox; make it with style.svg")
    width, height = (float(size) * ENLARGED for size in box.groups())
    return {
        "uri": "data:image/svg+xml," + quote(figure.svg, safe=" !$()*+,-./:;=?@[]^_`{|}~"),
        "caption": figure.caption,
        "width": f"{width:.0f}",
        "height": f"{height:.0f}",
        "large": width > WIDE or height > TALL,
        "file": figure.file,
        "href": quote(figure.file, errors="replace"),
    }


# --- tables --------------------------------------------------------------------------------------
def _table(table: Table) -> dict[str, Any]:
    """What the template shows of a table: every number with its definition and all its digits."""
    first = f"the {table.of}" + ", in the colour it has in the figures" * (table.of == "method")
    meanings = [(column.header, definition(column)) for column in table.columns]
    kinds = ["text" if table.is_text(column) else "number" for column in table.columns]
    heads = [("text", table.of, first),
             *((kind, *pair) for kind, pair in zip(kinds, meanings, strict=True))]  # fmt: skip
    by_row = zip(*(_cells(table, column) for column in table.columns), strict=True)
    rows = [
        (row.label, style_of(row.label or "-").colour if table.of == "method" else "", cells)
        for row, cells in zip(table.rows, by_row, strict=True)
    ]
    return {"title": table.title, "heads": heads, "rows": rows, "notes": table.notes,
            "meanings": meanings}  # fmt: skip


def definition(column: Column) -> str:
    """What a number of this column is, in words and, if known, as a formula; never empty."""
    formula = DEFINITIONS.get(column.metric or column.key, "")
    if column.definition and formula and formula != column.definition:
        return f"{column.definition}\n{formula}"
    return column.definition or formula or column.header


LONG = 45  # characters; longer text takes several lines


def _cells(table: Table, column: Column) -> Iterator[dict[str, Any]]:
    """Only a finite number and a word have a `value`; cells without one are sorted last."""
    cells = table.cells(column)
    pairs = parts(cells, column.digits)
    longest = max((error.strip() for _, error in pairs), key=len, default="")
    for row, cell, (number, error) in zip(table.rows, cells, pairs, strict=True):
        shown: dict[str, Any] = {"number": number.strip(), "title": None, "value": None}
        if table.is_text(column):
            long = len(number) > LONG
            yield shown | {"value": cell if isinstance(cell, str) else None, "long": long}
            continue
        finite = isinstance(cell, Estimate) and not cell.diverged
        yield shown | {
            "title": f"{row.label}: {column.header}\n{full(cell)}\n{definition(column)}",
            "value": repr(float(cell.value)) if finite else None,  # type: ignore[union-attr]
            "marked": finite and cell.marked,  # type: ignore[union-attr]
            # Figure spaces are as wide as digits. Where there is no error, an invisible one as wide
            # as the longest of the column keeps the decimals in line.
            "error": f"±\u2007{error.replace(' ', chr(0x2007))}" if error.strip() else "",
            "blank": f"±\u2007{longest}" if longest else "",
        }


def full(cell: Cell) -> str:
    """A cell with all its digits."""
    if cell is None:
        return "not measured"
    if isinstance(cell, str):
        return cell
    if cell.diverged:
        return "diverged: not a finite number"
    if cell.error is None:
        return f"{float(cell.value)!r}, no standard error"
    return f"{float(cell.value)!r} ± {float(cell.error)!r} (standard error)"
