"""A `Table` as text: terminal (rich), Markdown, LaTeX, CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from fairvar.errors import unknown
from fairvar.report.table import DIVERGED, Cell, Column, Estimate, Table, parts


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


def _words(table: Table, column: Column) -> bool:
    """A column that holds words and no numbers is read from the left."""
    cells = table.cells(column)
    return any(isinstance(c, str) for c in cells) and not any(
        isinstance(c, Estimate) for c in cells
    )


def _lines(table: Table, column: Column) -> list[str]:
    return [_line(*pair) for pair in parts(table.cells(column), column.digits)]


# --- terminal ------------------------------------------------------------------------------------
class _Fitting(RichTable):
    """A rich table that, once it knows its width, picks the widest of three layouts that fits.

    Errors beside the numbers; errors below them; one line per cell. Title and notes use the whole
    width of the terminal, which may be more than the table's.
    """

    source: Table

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Text | RichTable]:
        table, width = self.source, options.max_width
        yield Text(table.title, style="bold")
        yield (
            _grid(table, _line, width) or _grid(table, _two_lines, width) or _stacked(table, width)
        )
        for note in table.footnotes():
            yield Text(note, style="dim")


def to_rich(table: Table) -> RichTable:
    """For `Console.print`: fits 40 columns as well as 80, best values bold, notes folded below."""
    fitting = _Fitting()
    fitting.source = table
    return fitting


def _grid(table: Table, write: Callable[[str, str], str], width: int) -> RichTable | None:
    """Headers and columns of words fold if they must, numbers never do; None if it cannot fit."""
    headers = ["", *(column.header for column in table.columns)]
    words = [False, *(_words(table, column) for column in table.columns)]
    columns = [[row.label for row in table.rows]]
    for column in table.columns:
        columns.append([write(*pair) for pair in parts(table.cells(column), column.digits)])
    widths = _widths(headers, columns, words, width)
    if widths is None:
        return None
    # SIMPLE_HEAD has a blank between columns, which together with one of padding is the gap
    grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for header, wide, word in zip(headers, widths, words, strict=True):
        grid.add_column(Text(header, justify="left" if word else "right"), width=wide)
    for i, row in enumerate(table.rows):
        cells = zip(columns[1:], widths[1:], words[1:], table.columns, strict=True)
        texts = [
            Text(lines[i].strip()) if word else _text(lines[i], wide, row.cells.get(c.key))
            for lines, wide, word, c in cells
        ]
        grid.add_row(Text(row.label, no_wrap=True), *texts)
    return grid


def _widths(
    headers: list[str], columns: list[list[str]], words: list[bool], width: int
) -> list[int] | None:
    """Of each column: as wide as it likes; else as narrow as it can, the rest to the words."""
    least, full = [], []
    for header, cells, word in zip(headers, columns, words, strict=True):
        whole = [cell.strip() if word else cell for cell in cells]
        least.append(_widest(header.split() + (" ".join(whole).split() if word else whole)))
        full.append(_widest([header, *whole]))
    spare = width - 2 * (len(headers) - 1)
    if sum(full) <= spare:
        return full
    spare -= sum(least)
    for i in (i for i, word in enumerate(words) if word):
        more = max(0, min(spare, full[i] - least[i]))
        least[i], spare = least[i] + more, spare - more
    return least if spare >= 0 else None


def _widest(texts: Sequence[str]) -> int:
    return max((cell_len(line) for text in texts for line in text.split("\n")), default=1)


def _text(lines: str, width: int, cell: Cell) -> Text:
    # aligned by hand: rich strips the blanks that stand for a missing standard error
    right = (" " * (width - cell_len(line)) + line for line in lines.split("\n"))
    return Text("\n".join(right), style="bold" if _marked(cell) else "", no_wrap=True)


def _stacked(table: Table, width: int) -> RichTable:
    """One line per cell: what is left in a very narrow terminal."""
    numbers = [
        _line(*parts([cell], column.digits)[0])
        for column in table.columns
        for cell in table.cells(column)
        if isinstance(cell, Estimate)
    ]
    names = _widest([row.label for row in table.rows] + ["  " + c.header for c in table.columns])
    names = min(names, max(1, width - 1 - _widest(numbers)))
    grid = RichTable(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    grid.add_column(width=names)
    grid.add_column(width=max(1, width - 1 - names))
    for row in table.rows:
        grid.add_row(Text(row.label, style="bold", overflow="fold"), "")
        for c in table.columns:
            cell = row.cells.get(c.key)
            value = _line(*parts([cell], c.digits)[0])
            shown = Text(value, style="bold" if _marked(cell) else "", overflow="fold")
            grid.add_row(Padding(Text(c.header, overflow="fold"), (0, 0, 0, 2)), shown)
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
        texts = [_md(line) for line in _lines(table, column)]
        cells = zip(texts, table.cells(column), strict=True)
        bold = [f"**{text.strip()}**" if _marked(cell) else text for text, cell in cells]
        columns.append(
            [_md(column.header), *(x.strip() if _words(table, column) else x for x in bold)]
        )
    wide = [max(3, *map(len, column)) for column in columns]
    left = [True, *(_words(table, column) for column in table.columns)]
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

    A cell never measured is empty; a diverged one says "div.", so that a reader who averages the
    column stumbles instead of skipping it.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = [(column.key, f"{column.key}_standard_error") for column in table.columns]
    writer.writerow(["label", *(key for pair in keys for key in pair)])
    for row in table.rows:
        cells = (_csv(row.cells.get(column.key)) for column in table.columns)
        writer.writerow([row.label, *(text for pair in cells for text in pair)])
    return out.getvalue()


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
    sides = "".join("l" if _words(table, column) else "r" for column in table.columns)
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
