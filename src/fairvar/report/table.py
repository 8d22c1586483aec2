"""`Table`: rows × columns of estimates with standard errors, and its forms as text: for a terminal
(rich), Markdown, LaTeX and CSV. `html` makes it a part of a page.

A table holds finished numbers and how many digits they have.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from rich import box
from rich.align import Align
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from fairvar.common.files import csv_text
from fairvar.errors import BadInput, unknown
from fairvar.scores import MISSING, UNDEFINED

DIVERGED = "div."  # measured, and not a finite number
UNLIMITED = 100_000  # characters in a line


@dataclass(frozen=True)
class Estimate:
    """A number and, where there are several seeds, its standard error; `marked` prints bold."""

    value: float
    standard_error: float | None = None
    marked: bool = False

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.value)

    @property
    def error(self) -> float | None:
        """The standard error if it and the value are finite."""
        known = self.standard_error is not None and math.isfinite(self.standard_error)
        return self.standard_error if known and not self.diverged else None


Cell = Estimate | str | None


@dataclass(frozen=True)
class Column:
    """`digits` after the decimal point; `definition` is printed under the table; `metric` names the
    formula behind the numbers in `fairvar.metrics.DEFINITIONS`."""

    key: str
    header: str
    digits: int = 2
    definition: str = ""
    metric: str = ""


@dataclass(frozen=True)
class Row:
    label: str
    cells: Mapping[str, Cell] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A row may leave columns out (printed "–"); cells need a column."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    of: str = "method"  # what a row is about

    def __post_init__(self) -> None:
        keys = [column.key for column in self.columns]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise BadInput(f"table column {twice[0]!r} occurs twice; give every column its own key")
        for row in self.rows:
            extra = sorted(set(row.cells) - set(keys))
            if extra:
                raise BadInput(
                    f"row {row.label!r} has a cell {extra[0]!r} but no column is so named"
                )

    def cells(self, column: Column) -> list[Cell]:
        return [row.cells.get(column.key) for row in self.rows]

    def is_text(self, column: Column) -> bool:
        """Whether a column holds words and no numbers; it is then aligned left."""
        kinds = {type(cell) for cell in self.cells(column)}
        return str in kinds and Estimate not in kinds

    def footnotes(self) -> list[str]:
        """What the columns mean, then the notes."""
        meant = [f"{c.header}: {c.definition}" for c in self.columns if c.definition]
        return [*meant, *self.notes]


def mean_and_standard_error(values: Iterable[float], marked: bool = False) -> Estimate:
    """Mean over m seeds and sd (ddof 1) / √m; a single seed has no standard error.

    One diverged seed makes the estimate diverged: dropping it would flatter the method.
    """
    x = [float(value) for value in values]
    if not x:
        raise BadInput("mean over no seeds; leave the cell out (None) if nothing was measured")
    if not all(map(math.isfinite, x)):
        return Estimate(math.nan, None, marked)
    m = len(x)
    mean = math.fsum(x) / m
    if m == 1:
        return Estimate(mean, None, marked)
    squares = math.fsum((value - mean) ** 2 for value in x)
    return Estimate(mean, math.sqrt(squares / (m - 1) / m), marked)


def over_seeds(values: Iterable[float], marked: bool = False) -> Cell:
    """The same for runs that did not diverge: there a value that is not finite is undefined."""
    estimate = mean_and_standard_error(values, marked)
    return UNDEFINED if estimate.diverged else estimate


def parts(cells: Sequence[Cell], digits: int) -> list[tuple[str, str]]:
    """(number, standard error) of one column as text, both of common width: decimals line up.

    The second text is empty only if no cell of the column has a standard error; words take the
    place of numbers.
    """
    pairs = [_write(cell, digits) for cell in cells]
    left = max((len(number) for number, _ in pairs), default=0)
    right = max((len(error) for _, error in pairs), default=0)
    return [(number.rjust(left), error.rjust(right)) for number, error in pairs]


def _write(cell: Cell, digits: int) -> tuple[str, str]:
    if cell is None:
        return MISSING, ""
    if isinstance(cell, str):
        return cell, ""
    if cell.diverged:
        return DIVERGED, ""
    # z: a tiny negative number is written 0.00, not -0.00
    return f"{cell.value:z.{digits}f}", "" if cell.error is None else f"{cell.error:z.{digits}f}"


def _marked(cell: Cell) -> bool:
    return isinstance(cell, Estimate) and cell.marked and not cell.diverged


def _line(number: str, error: str) -> str:
    """As in 97.12 ± 0.30; without an error its place stays blank, so that decimals line up."""
    if not error:
        return number
    return number + (f" ± {error}" if error.strip() else " " * (len(error) + 3))


def _two_lines(number: str, error: str) -> str:
    """The number above its error; digits of both count for the width."""
    wide = max(len(number), len(error) + 2)
    return number.rjust(wide) + (f"\n{'± ' + error:>{wide}}" if error.strip() else "")


def texts_of(table: Table, column: Column) -> list[str]:
    """The cells of a column as text."""
    return [_line(*pair) for pair in parts(table.cells(column), column.digits)]


# --- terminal ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Fitting:
    """Picks the widest of three layouts that fits the terminal: errors next to the numbers; errors
    below them; one line per cell. Title and notes use the whole width of the terminal."""

    table: Table

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Text | RichTable]:
        yield Text(self.table.title, style="bold")
        yield self._layout(console, options)
        for note in self.table.footnotes():
            yield Text(note, style="dim")

    def _layout(self, console: Console, options: ConsoleOptions) -> RichTable:
        for write, fold in product((_line, _two_lines), (False, True)):
            grid = _grid(self.table, write, fold)
            size = Measurement.get(console, options.update_width(UNLIMITED), grid)
            if (size.minimum if fold else size.maximum) <= options.max_width:
                return grid
        return _stacked(self.table, options.max_width)


def to_rich(table: Table) -> RenderableType:
    """For `Console.print`: fits 40 columns as well as 80, best values bold, notes below."""
    return _Fitting(table)


def _grid(table: Table, write: Callable[[str, str], str], fold: bool) -> RichTable:
    """`fold`: headers and the widest column of words are folded as far as needed; numbers never."""
    # SIMPLE_HEAD has a blank between columns, which together with one of padding is the gap.
    grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("", no_wrap=True, min_width=_widest([row.label for row in table.rows]))
    columns: list[list[RenderableType]] = [[Text(row.label) for row in table.rows]]
    words = {c.key: [line.strip() for line in texts_of(table, c)]
             for c in table.columns if table.is_text(c)}  # fmt: skip
    widest = max(words, key=lambda key: _widest(words[key]), default=None)
    for column in table.columns:
        cells = table.cells(column)
        lines, header = [write(*two) for two in parts(cells, column.digits)], column.header
        if column.key in words:
            texts, free = words[column.key], column.key == widest or not fold
            least = _widest([word for text in (header, *texts) for word in text.split()])
            width = None if free else _widest([header, *texts])
            grid.add_column(Text(header), min_width=least, width=width)
            columns.append([Text(text) for text in texts])
            continue
        least = _widest([*header.split(), *lines])
        width = least if fold else None
        grid.add_column(Text(header, justify="right"), min_width=least, width=width)
        # Not by the column: rich would strip the blanks that stand for a missing standard error.
        columns.append([
            Align.right(Text(line, style="bold" if _marked(cell) else "", no_wrap=True))
            for line, cell in zip(lines, cells, strict=True)
        ])  # fmt: skip
    for row in zip(*columns, strict=True):
        grid.add_row(*row)
    return grid


def _widest(texts: Sequence[str]) -> int:
    return max((cell_len(line) for text in texts for line in text.split("\n")), default=1)


def _stacked(table: Table, width: int) -> RichTable:
    """One line per cell: what is left in a very narrow terminal."""
    shown = {column.key: [_line(*parts([cell], column.digits)[0]) for cell in table.cells(column)]
             for column in table.columns}  # fmt: skip
    numbers = [line for c in table.columns if not table.is_text(c) for line in shown[c.key]]
    names = _widest([row.label for row in table.rows] + ["  " + c.header for c in table.columns])
    names = min(names, max(1, width - 1 - _widest(numbers)))
    grid = RichTable(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    grid.add_column(width=names, overflow="fold")
    grid.add_column(width=max(1, width - 1 - names), overflow="fold")
    for i, row in enumerate(table.rows):
        grid.add_row(Text(row.label, style="bold"), "")
        for column in table.columns:
            style = "bold" if _marked(row.cells.get(column.key)) else ""
            name = Padding(Text(column.header), (0, 0, 0, 2))
            grid.add_row(name, Text(shown[column.key][i], style=style))
    return grid


def to_terminal(table: Table, width: int = 80) -> str:
    """The terminal table as plain text, for logs and files."""
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False,
                      markup=False, emoji=False)  # fmt: skip
    with console.capture() as capture:
        console.print(to_rich(table))
    lines = (line.rstrip() for line in capture.get().splitlines())
    return "\n".join(lines) + "\n"


# --- Markdown ------------------------------------------------------------------------------------
def to_markdown(table: Table) -> str:
    """GitHub's Markdown, readable as plain text too."""
    columns = [["", *(_md(row.label) for row in table.rows)]]
    for column in table.columns:
        texts = [_md(line) for line in texts_of(table, column)]
        cells = zip(texts, table.cells(column), strict=True)
        bold = [f"**{text.strip()}**" if _marked(cell) else text for text, cell in cells]
        columns.append(
            [_md(column.header), *(x.strip() if table.is_text(column) else x for x in bold)]
        )
    wide = [max(3, *map(len, column)) for column in columns]
    left = [True, *(table.is_text(column) for column in table.columns)]
    lines = [
        "| " + " | ".join(map(_place, line, wide, left)) + " |"
        for line in zip(*columns, strict=True)
    ]
    rule = "|" + "|".join(
        ":" + "-" * (w + 1) if start else "-" * (w + 1) + ":"
        for w, start in zip(wide, left, strict=True)
    ) + "|"  # fmt: skip
    notes = [f"- {_md(note)}" for note in table.footnotes()]
    title = [f"**{_md(table.title)}**", ""] if table.title else []
    return "\n".join([*title, lines[0], rule, *lines[1:], *([""] if notes else []), *notes]) + "\n"


def _place(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)


def _md(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.splitlines()))


# --- CSV -----------------------------------------------------------------------------------------
def to_csv(table: Table) -> str:
    """Every number in full precision, its standard error in a column of its own.

    A cell that was not measured is empty; a diverged one is "div.", so that averaging the column
    fails instead of skipping it.
    """
    return csv_text(csv_rows(table))


def csv_rows(table: Table) -> Iterator[list[str]]:
    """The header, then one row for each row of the table."""
    keys = [(column.key, f"{column.key}_standard_error") for column in table.columns]
    yield ["label", *(key for pair in keys for key in pair)]
    for row in table.rows:
        cells = (_csv(row.cells.get(column.key)) for column in table.columns)
        yield [row.label, *(text for pair in cells for text in pair)]


def _csv(cell: Cell) -> tuple[str, str]:
    if cell is None or isinstance(cell, str):
        return cell or "", ""
    if cell.diverged:
        return DIVERGED, ""
    return repr(float(cell.value)), "" if cell.error is None else repr(float(cell.error))


# --- LaTeX ---------------------------------------------------------------------------------------
def to_latex(table: Table) -> str:
    """A `table` environment for the packages booktabs and (for Greek and ±) nothing else."""
    columns = []
    for column in table.columns:
        cells = table.cells(column)
        pairs = parts(cells, column.digits)
        columns.append([_tex_cell(*both) for both in zip(pairs, cells, strict=True)])
    sides = "".join("l" if table.is_text(column) else "r" for column in table.columns)
    header = " & ".join(["", *(_tex(column.header) for column in table.columns)])
    rows = [
        " & ".join([_tex_start(row.label), *(column[i] for column in columns)])
        for i, row in enumerate(table.rows)
    ]
    notes = [f"\\par\\footnotesize {_tex(note)}" for note in table.footnotes()]
    lines = [
        r"\begin{table}", r"\centering", rf"\caption{{{_tex(table.title)}}}",
        rf"\begin{{tabular}}{{l{sides}}}", r"\toprule",
        header + r" \\", r"\midrule", *(row + r" \\" for row in rows), r"\bottomrule",
        r"\end{tabular}", *notes, r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _tex_cell(pair: tuple[str, str], cell: Cell) -> str:
    number, error = pair
    if not isinstance(cell, Estimate) or cell.diverged:
        return _tex(number.strip())
    shown = number.strip()
    if error.strip():
        # an invisible digit per missing one keeps the decimals of a right-aligned column in line
        missing = len(error) - len(error.lstrip())
        pad = rf"\phantom{{{'0' * missing}}}" if missing else ""
        shown += rf" \pm {pad}{error.strip()}"
    return rf"$\mathbf{{{shown}}}$" if _marked(cell) else f"${shown}$"


_GREEK = (
    "alpha beta gamma delta varepsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau "
    "varphi chi psi omega Gamma Delta Theta Lambda Pi Phi Psi Omega"
)
_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%",
    "#": r"\#", "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$",
    ">": "$>$", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "²": "$^2$", "√": r"$\surd$",
    "−": "$-$", "–": "--", "—": "---", "≤": r"$\le$", "≥": r"$\ge$", "≈": r"$\approx$",
    "∈": r"$\in$", "∇": r"$\nabla$", "‖": r"$\|$", "…": r"\dots{}", "Σ": r"$\Sigma$",
    "→": r"$\to$", "\n": " ",
    **{letter: rf"$\{name}$" for letter, name in zip(
        "αβγδεζηθικλμνξπρστφχψωΓΔΘΛΠΦΨΩ",
        _GREEK.split(),
        strict=True,
    )},
}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


def _tex_start(text: str) -> str:
    """After the row end of the line above, a leading * or [ would be read as its option."""
    return ("{}" if text.startswith(("*", "[")) else "") + _tex(text)


RENDERERS: dict[str, Callable[[Table], str]] = {
    "terminal": to_terminal,
    "markdown": to_markdown,
    "csv": to_csv,
    "latex": to_latex,
}


def render(table: Table, format: str) -> str:
    """The table as text in one of the formats of `RENDERERS`."""
    if format not in RENDERERS:
        raise unknown("table format", format, RENDERERS)
    return RENDERERS[format](table)
