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
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from fairvar.errors import BadInput
from fairvar.metrics import DEFINITIONS
from fairvar.report.style import style_of
from fairvar.report.style import svg as figure_svg
from fairvar.report.table import Cell, Column, Estimate, Table, parts
from fairvar.runs.store import write_text

__all__ = ["Page", "PageFigure", "Section", "figure_svg", "render_page", "write_page"]

GUIDE, NOTES, FACTS = "how-to-read", "notes", "provenance"
RESERVED = {GUIDE, NOTES, FACTS, "top", "tip", "heard"}  # ids that the template uses

EXPLAINED = (
    ("Accuracy", "mean",
     "How good the model is on average. A client's accuracy p_k is the share of its test samples "
     "that the model predicts correctly; the table shows the mean over the K clients, and a small "
     "client counts as much as a large one."),
    ("Variance over clients", "variance_over_clients",
     "How uneven the accuracies are: 0 if all clients have the same accuracy. It is printed as "
     "fraction² × 100, so 1.00 means that accuracies scatter by 10 percentage points around "
     "their mean, and 0.25 by 5."),
    ("Noise floor", "noise_floor",
     "What chance alone adds to the variance. A client is tested on n_k samples only, so measured "
     "accuracies would differ even if the true ones were all equal. The fewer test samples, the "
     "higher the floor."),
    ("Corrected variance", "corrected_variance",
     "The variance less its noise floor: an unbiased estimate of how much the true accuracies "
     "differ. Use it to compare methods. Near 0, or slightly below, the accuracies do not differ "
     "by more than chance."),
)  # fmt: skip
SIGNS = (
    "± is the standard error over random seeds; with a single seed there is none. "
    "“div.” means that training did not end in finite numbers, “undef.” that the formula has no "
    "value (the variance of one client), “–” that nothing was measured. "
    "Hover over a number, tap it, or move to it with Tab and the arrow keys, to see all its digits "
    "and its definition. Click a column's header to sort, twice for the reverse order, three times "
    "for the original order."
)


@dataclass(frozen=True)
class PageFigure:
    """`svg` as made by `figure_svg`; `files` are names of the same figure in the page's folder."""

    svg: str
    caption: str
    files: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """One table with its figures. `details` (name → text) are shown folded."""

    title: str
    anchor: str
    intro: str = ""
    table: Table | None = None
    figures: Sequence[PageFigure] = ()
    details: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", self.anchor):
            raise BadInput(
                f"anchor {self.anchor!r}: start with a letter, then letters, digits and . _ -"
            )


@dataclass(frozen=True)
class Page:
    """`facts` are the provenance of the whole page: versions, device, seeds, time."""

    title: str
    subtitle: str = ""
    sections: Sequence[Section] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        seen = set(RESERVED)
        for section in self.sections:
            if section.anchor in seen:
                raise BadInput(f"anchor {section.anchor!r} is taken; give every section its own")
            seen.add(section.anchor)


def render_page(page: Page) -> str:
    """The whole file."""
    contents = [(section.anchor, section.title) for section in page.sections]
    contents.append((GUIDE, "How to read this"))
    contents += [(NOTES, "Notes")] if page.notes else []
    contents += [(FACTS, "Provenance")] if page.facts else []
    return _template().render(
        page=page,
        contents=contents,
        sections=[_section(section) for section in page.sections],
        explained=[(name, DEFINITIONS[metric], meaning) for name, metric, meaning in EXPLAINED],
        signs=SIGNS,
        policy=_policy(),
        style=Markup(_asset("page.css")),  # noqa: S704  (our own files)
        script=Markup(_asset("page.js")),  # noqa: S704
    )


def write_page(path: Path | str, page: Page) -> Path:
    """The page as a file; links to figure files that are not in its folder are left out."""
    path = Path(path)

    def there(figure: PageFigure) -> PageFigure:
        return replace(figure, files=[f for f in figure.files if (path.parent / f).is_file()])

    sections = [replace(s, figures=[there(f) for f in s.figures]) for s in page.sections]
    write_text(path, render_page(replace(page, sections=sections)))
    return path


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
    environment.filters["subscripts"] = _subscripts
    return environment.from_string(_asset("page.html"))


def _printable(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return _NO_TEXT.sub("\ufffd", value)
    return value


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


def _section(section: Section) -> dict[str, Any]:
    return {
        "anchor": section.anchor,
        "title": section.title,
        "paragraphs": [p for p in re.split(r"\n\s*\n", section.intro) if p.strip()],
        "table": None if section.table is None else _table(section.table),
        "figures": [_figure(figure) for figure in section.figures],
        "details": section.details,
    }


# --- figures -------------------------------------------------------------------------------------
ENLARGED = 1.25 * 96 / 72  # pixels per point: letters of 8 points are for paper, too small here
WIDE = 600  # pixels; on a phone such a figure is shrunk less
_VIEW_BOX = re.compile(r'<svg[^>]* viewBox="0 0 ([0-9.]+) ([0-9.]+)"')


def _figure(figure: PageFigure) -> dict[str, Any]:
    box = _VIEW_BOX.search(figure.svg)
    if box is None:
        raise BadInput("a figure is not SVG with a viewBox; make it with figure_svg")
    width, height = (float(size) * ENLARGED for size in box.groups())
    return {
        "uri": "data:image/svg+xml," + quote(figure.svg, safe=" !$()*+,-./:;=?@[]^_`{|}~"),
        "caption": figure.caption,
        "width": f"{width:.0f}",
        "height": f"{height:.0f}",
        "wide": width > WIDE,
        "links": [_link(name) for name in figure.files],
    }


def _link(name: str) -> dict[str, str]:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or re.search(r"[:\\]", name) or not path.name:
        raise BadInput(f"figure file {name!r}: give a name relative to the page's folder")
    kind = path.suffix.lstrip(".").upper() or path.name
    return {"name": name, "href": quote(name), "kind": kind}


# --- tables --------------------------------------------------------------------------------------
def _table(table: Table) -> dict[str, Any]:
    """What the template shows of a table: every number with its definition and all its digits."""
    meanings = [(column.header, definition(column)) for column in table.columns]
    first = f"the {table.of}" + ", in the colour it has in the figures" * (table.of == "method")
    columns = [{"header": table.of, "kind": "text", "title": f"{table.of}\n{first}"}]
    for column in table.columns:
        title = f"{column.header}\n{definition(column)}"
        kind = "text" if table.is_text(column) else "number"
        columns.append({"header": column.header, "kind": kind, "title": title})
    by_column = [list(_cells(table, column)) for column in table.columns]
    rows = [
        {
            "label": row.label,
            "colour": style_of(row.label or "-").colour if table.of == "method" else "",
            "cells": [cells[i] for cells in by_column],
        }
        for i, row in enumerate(table.rows)
    ]
    return {"title": table.title, "columns": columns, "rows": rows, "notes": table.notes,
            "meanings": meanings}  # fmt: skip


def definition(column: Column) -> str:
    """What a number of this column is, in words and, if known, as a formula; never empty."""
    formula = DEFINITIONS.get(column.metric or column.key, "")
    if column.definition and formula and formula != column.definition:
        return f"{column.definition}\n{formula}"
    return column.definition or formula or column.header


def _cells(table: Table, column: Column) -> Iterator[dict[str, Any]]:
    """Only a finite number and a word have a `value`; cells without one are sorted last."""
    cells = table.cells(column)
    pairs = parts(cells, column.digits)
    longest = max((error.strip() for _, error in pairs), key=len, default="")
    for row, cell, (number, error) in zip(table.rows, cells, pairs, strict=True):
        shown: dict[str, Any] = {"number": number.strip(), "title": None, "value": None}
        if table.is_text(column):
            yield shown | {"value": cell if isinstance(cell, str) else None}
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
