"""Results of the benchmark as tables, Markdown and a picture of cost against clients."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairvar.bench.cases import METHODS
from fairvar.bench.measure import Spread
from fairvar.bench.run import OURS, BenchResult, BenchRow
from fairvar.report.look import GREY, new_figure, save, styled
from fairvar.report.render import to_markdown
from fairvar.report.table import Cell, Column, Estimate, Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:  # for those who check types while running
    Axes = Figure = Any

TIMES = (
    Column("naive", "naive ms", 1, "per round, client loop with a framework's overheads"),
    Column("lean", "lean ms", 1, "per round, bare client loop"),
    Column("central", "central ms", 1, "SGD on the pooled batch, no clients"),
)
SHORT = (
    Column(OURS, "fairvar ms", 2, "per round, median over the turns"),
    Column("x_naive", "× naive", 1, "naive / fairvar, median and range over the turns"),
    Column("x_lean", "× lean", 1, "lean / fairvar, median and range"),
    Column("x_central", "of central", 1, "fairvar / central"),
    Column("peak", "peak MB", 0, "memory of a round on top of data and model"),
    Column("first", "first ms", 0, "the first round, with all that happens once"),
    Column("speed", "k/s", 0, "thousand training samples per second"),
    Column("limit", "% limit", 1,
           "one forward and backward pass per sample, of the machine's own matrix product"),
)  # fmt: skip
PATH = Column("path", "path", 0, "of the engine")
# Okabe and Ito's colours again; grey is what is compared with.
LOOKS = {
    "naive": ("#D55E00", "s"),
    "lean": ("#E69F00", "D"),
    "central": (GREY, "^"),
    OURS: ("#0072B2", "o"),
}


def bench_tables(result: BenchResult, full: bool = False) -> list[Table]:
    """One table per model, size and kind of local work; `full` has a column per contender."""
    columns = (*TIMES, *SHORT, PATH) if full else SHORT
    groups = [(k, list(rows)) for k, rows in groupby(result.rows, lambda row: row.case.group)]
    tables = []
    for number, (title, rows) in enumerate(groups):
        last = number == len(groups) - 1  # the columns are explained once
        shown = [c if last else Column(c.key, c.header, c.digits) for c in columns]
        lines = [Row(METHODS[r.case.method].label, _cells(r, columns)) for r in rows]
        tables.append(Table(title, shown, lines, _notes(result) if last else ()))
    return tables


def _cells(row: BenchRow, columns: tuple[Column, ...]) -> dict[str, Cell]:
    ours = row.timings[OURS]
    central = row.against("central")
    cells: dict[str, Cell] = {
        **{name: Estimate(1000 * t.seconds.median) for name, t in row.timings.items()},
        "x_naive": _spread(row.against("naive")),
        "x_lean": _spread(row.against("lean")),
        "x_central": Estimate(1 / central.median) if central else None,
        "peak": None if ours.peak_bytes is None else Estimate(ours.peak_bytes / 1e6),
        "first": Estimate(1000 * ours.first),
        "speed": Estimate(row.samples_per_second / 1000),
        "limit": Estimate(100 * row.share_of_limit),
        "path": row.path,
    }
    return {column.key: cells.get(column.key) for column in columns}


def _spread(spread: Spread | None) -> str | None:
    if spread is None:
        return None
    return f"{_short(spread.median)} ({_short(spread.low)}–{_short(spread.high)})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}"


def _notes(result: BenchResult) -> list[str]:
    facts = result.facts
    turns = [len(row.timings[OURS].times) for row in result.rows]
    notes = [
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} thread(s), device "
        f"{facts['device']}; fairvar {facts['fairvar']}, torch {facts['torch']}, Python "
        f"{facts['python']}; matrix product {facts['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s",
        f"{facts['clock']}; {min(turns)} to {max(turns)} turns; load of the machine before "
        f"{facts['load_before']:.2f}, after {facts['load_after']:.2f}",
    ]
    if result.busy:
        notes.append("The machine was busy with other work: do not quote these numbers.")
    return notes


def write_bench(result: BenchResult, out: Path) -> list[Path]:
    """table.md, bench.json and, where a method was measured at several sizes, clients.png/.pdf."""
    out.mkdir(parents=True, exist_ok=True)
    table, data = out / "table.md", out / "bench.json"
    table.write_text("\n".join(map(to_markdown, bench_tables(result, full=True))), encoding="utf-8")
    data.write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
    panels = _panels(result)
    return [table, data, *(save(clients_figure(panels), out, "clients") if panels else [])]


def _panels(result: BenchResult) -> dict[str, list[BenchRow]]:
    """Rows that differ in the number of clients alone, by model and method; two sizes at least."""
    found: dict[str, list[BenchRow]] = {}
    for row in result.rows:
        case = row.case
        if case.local == "step":
            name = f"{METHODS[case.method].label}, {case.model} × {case.samples}"
            found.setdefault(name, []).append(row)
    several = {k: v for k, v in found.items() if len({r.case.clients for r in v}) > 1}
    return {k: sorted(v, key=lambda row: row.case.clients) for k, v in several.items()}


@styled
def clients_figure(panels: dict[str, list[BenchRow]]) -> Figure:
    """Milliseconds per round against clients, both on logarithmic axes, a panel per method."""
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure = new_figure(max(3.2, 1.8 * across), 1.9 * down + 0.4)
    axes = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for one, (title, rows) in zip(axes, panels.items(), strict=False):
        _draw(one, title, rows)
    for one in axes[len(panels) :]:
        one.set_visible(False)
    named = max((one.get_legend_handles_labels() for one in axes), key=lambda found: len(found[1]))
    figure.legend(*named, loc="outside upper center", ncol=len(LOOKS), frameon=False)
    figure.supxlabel("clients", fontsize=8)
    figure.supylabel("ms per round (bars: range over turns)", fontsize=8)
    return figure


def _draw(axes: Axes, title: str, rows: list[BenchRow]) -> None:
    for name, (colour, marker) in LOOKS.items():
        points = [(r.case.clients, r.timings[name].seconds) for r in rows if name in r.timings]
        if not points:
            continue
        x = [clients for clients, _ in points]
        y = [1000 * s.median for _, s in points]
        bars = [[1000 * (s.median - s.low) for _, s in points],
                [1000 * (s.high - s.median) for _, s in points]]  # fmt: skip
        axes.errorbar(x, y, bars, color=colour, marker=marker, ms=3, lw=1.1, label=name)
    axes.set(xscale="log", yscale="log")
    axes.set_title(title, loc="left", fontsize=7)
