"""`Table`: rows × columns of estimates with standard errors.

A table holds finished numbers and how many digits they have; `render` turns it into text for a
terminal, Markdown, LaTeX or CSV, and `html` into a part of a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fairvar.errors import BadInput

MISSING = "–"  # never measured
DIVERGED = "div."  # measured, and not a finite number
UNDEFINED = "undef."  # measured, but the formula ends in 0/0


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
