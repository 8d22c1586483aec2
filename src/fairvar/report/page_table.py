"""A `Table` as HTML: sortable, and every number with its definition and all its digits."""

from __future__ import annotations

from collections.abc import Iterator

from fairvar.metrics import DEFINITIONS
from fairvar.report.markup import NOTHING, Html, join, tag, text
from fairvar.report.style import look
from fairvar.report.table import Cell, Column, Estimate, Row, Table, parts


def scrolling_table(table: Table) -> Html:
    """In a box of its own, so that a wide table never widens the page."""
    columns = {column.key: _column(table, column) for column in table.columns}
    rows = [
        tag("tr", _name(row, table.of), *(column[i] for column in columns.values()))
        for i, row in enumerate(table.rows)
    ]
    head = tag("thead", tag("tr", *_headers(table)))
    caption = tag("caption", tag("span", text(table.title))) if table.title else NOTHING
    whole = tag("table", caption, head, tag("tbody", *rows))
    return tag("div", whole, class_="scroll", tabindex="0", role="group", aria_label=table.title)


def _headers(table: Table) -> Iterator[Html]:
    coloured = "the method, in the colour it has in the figures"
    yield _header(table.of, "text", coloured if table.of == "method" else f"the {table.of}")
    for column in table.columns:
        yield _header(column.header, _kind(table, column), definition(column))


def _header(name: str, kind: str, meaning: str) -> Html:
    arrow = tag("span", class_="arrow", aria_hidden="true")
    title = f"{name}\n{meaning}"
    button = tag("button", text(name), arrow, type="button", title=title)
    return tag("th", button, scope="col", class_=kind, data_kind=kind, aria_sort="none")


def definition(column: Column) -> str:
    """What a number of this column is, in words and where known as a formula; never empty."""
    formula = DEFINITIONS.get(column.metric or column.key, "")
    if column.definition and formula and formula != column.definition:
        return f"{column.definition}\n{formula}"
    return column.definition or formula or column.header


def _kind(table: Table, column: Column) -> str:
    numbers = any(isinstance(cell, Estimate) for cell in table.cells(column))
    words = any(isinstance(cell, str) for cell in table.cells(column))
    return "number" if numbers or not words else "text"


def _name(row: Row, of: str) -> Html:
    if of != "method":
        return tag("th", text(row.label), scope="row", data_value=row.label)
    dot = tag("circle", cx="5", cy="5", r="4.5", fill=look(row.label or "-").colour)
    mark = tag("svg", dot, class_="dot", viewBox="0 0 10 10", aria_hidden="true")
    return tag("th", mark, text(row.label), scope="row", data_value=row.label)


def _column(table: Table, column: Column) -> list[Html]:
    cells = table.cells(column)
    kind, meaning = _kind(table, column), definition(column)
    pairs = parts(cells, column.digits)
    longest = max((error.strip() for _, error in pairs), key=len, default="")
    found = []
    for row, cell, (number, error) in zip(table.rows, cells, pairs, strict=True):
        if kind == "text":
            known = {"data_value": cell} if isinstance(cell, str) else {}
            found.append(tag("td", text(number.strip()), class_="text", **known))
        else:
            shown = _number(number.strip(), error, longest)
            title = "\n".join((f"{row.label}: {column.header}", full(cell), meaning))
            found.append(_number_cell(cell, shown, title))
    return found


def _number_cell(cell: Cell, shown: Html, title: str) -> Html:
    """Only a finite number has a `data-value`; cells without one are sorted last."""
    finite = isinstance(cell, Estimate) and not cell.diverged
    known = {"data_value": repr(float(cell.value))} if finite else {}  # type: ignore[union-attr]
    marked = " marked" if isinstance(cell, Estimate) and finite and cell.marked else ""
    return tag("td", shown, class_=f"number{marked}", tabindex="0", title=title, **known)


def _number(number: str, error: str, longest: str) -> Html:
    """The error in a place as wide as the longest of the column: decimals stay in line."""
    if not longest:
        return text(number)
    # figure spaces are as wide as digits; where there is no error, the longest keeps its place
    shown = f"±\u2007{error.replace(' ', chr(0x2007))}" if error.strip() else f"±\u2007{longest}"
    kind = "error" if error.strip() else "error none"
    place = tag("span", text(shown), class_=kind, aria_hidden=False if error.strip() else "true")
    return Html(f"{text(number)} {place}")


def full(cell: Cell) -> str:
    """A cell with all its digits, for those who want to compute with it."""
    if cell is None:
        return "not measured"
    if isinstance(cell, str):
        return cell
    if cell.diverged:
        return "diverged: not a finite number"
    if cell.error is None:
        return f"{float(cell.value)!r}, no standard error"
    return f"{float(cell.value)!r} ± {float(cell.error)!r} (standard error)"


def legend(table: Table) -> Html:
    """What the columns mean, for paper and for those who do not hover; then the table's notes."""
    entries = [
        tag("div", tag("dt", text(column.header)), tag("dd", text(definition(column))),
            class_="pair")
        for column in table.columns
    ]  # fmt: skip
    summary = tag("summary", text("What the columns mean"))
    notes = [tag("p", text(note), class_="note") for note in table.notes]
    return join([*notes, tag("details", summary, tag("dl", *entries, class_="pairs"))])
