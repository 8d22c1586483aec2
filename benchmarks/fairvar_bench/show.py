"""Results of the benchmark as tables, Markdown and a picture of cost against clients."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairvar.report.style import GREY, new_figure, save, styled
from fairvar.report.table import Cell, Column, Estimate, Row, Table, to_markdown
from fairvar.runs.formats import write_text
from fairvar_bench.cases import METHODS
from fairvar_bench.contenders import OURS
from fairvar_bench.measure import Spread
from fairvar_bench.run import BenchResult, BenchRow
from fairvar_bench.targets import FEW, MANY, WORDS, Verdict, cost_of_many, verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:  # for those who check types while running
    Axes = Figure = Any

TIMES = (
    Column("naive", "naive ms", 1, "per round, client loop with a framework's overheads"),
    Column("bare", "bare ms", 1, "per round, the client loop that people write"),
    Column("lean", "lean ms", 1, "per round, the same loop tuned by hand"),
    Column("central", "central ms", 1, "SGD on the pooled batch, no clients"),
    Column("flower", "Flower ms", 0, "per round, Flower's simulation runtime with fairvar's app"),
    Column("reference", "reference ms", 1, "per round, the engine's own loop over clients"),
    Column("gemm", "gemm ms", 2, "the matrix products of the round alone"),
)
MULTIPLES = ("naive", "bare", "lean", "flower", "reference")
LEAN = Column("x_lean", "× lean", 1, "lean / fairvar, median and range")
SHORT = (
    Column(OURS, "fairvar ms", 2, "per round, median over the turns"),
    Column("x_naive", "× naive", 1, "naive / fairvar, median and range over the turns"),
    Column("x_bare", "× bare", 1, "bare / fairvar, median and range"),
    Column("x_central", "of central", 2, "fairvar / central"),
    Column("x_flower", "× Flower", 0, "Flower's simulation / fairvar, median and range"),
    Column("x_cpu", "× Flower CPU", 0, "the same of processor time, of all of Flower's processes"),
    Column("cpu_flower", "Flower CPU ms", 0, "processor time of all of Flower's processes"),
    Column("cpu_ours", "fairvar CPU ms", 2, "processor time, in the same turns"),
    Column("x_reference", "× reference", 1, "reference loop / fairvar, median and range"),
    Column("x_gemm", "of gemm", 2, "fairvar / gemm"),
    Column("padding", "padding %", 1, "work on samples that are not there, of the other work"),
    Column("peak", "peak MB", 0, "memory of a round on top of data and model"),
    Column("process", "process GB", 1, "peak memory with everything in it"),
    Column("first", "first ms", 0, "preparing and the first round: all that happens once"),
    Column("speed", "k/s", 0, "thousand training samples per second"),
    Column("limit", "% limit", 1,
           "one forward and backward pass per sample, of the machine's own matrix product"),
)  # fmt: skip
TURNS = Column("turns", "turns", 0, "in which all contenders ran; ratios are formed within them")
PATH = Column("path", "path", 0, "of the engine")
# Okabe and Ito's colours again; grey is what is compared with.
LOOKS = {
    "naive": ("#D55E00", "s"),
    "bare": ("#E69F00", "D"),
    "lean": ("#009E73", "v"),
    "central": (GREY, "^"),
    OURS: ("#0072B2", "o"),
}


def bench_tables(result: BenchResult, full: bool = False) -> list[Table]:
    """One table per model, size and kind of local work; `full` has a column per contender."""
    columns = (*TIMES, *SHORT[:3], LEAN, *SHORT[3:], TURNS, PATH) if full else SHORT
    groups = [(k, list(rows)) for k, rows in groupby(result.rows, lambda row: row.case.group)]
    tables, explained = [], set[str]()
    for number, (title, rows) in enumerate(groups):
        cells = [_cells(row) for row in rows]
        shown = [c for c in columns if any(one.get(c.key) is not None for one in cells)]
        kept = {c.key for c in shown}
        lines = [
            Row(METHODS[row.case.method].label, {k: v for k, v in one.items() if k in kept})
            for row, one in zip(rows, cells, strict=True)
        ]
        # A column is explained where it first occurs.
        told = [c if c.key not in explained else replace(c, definition="") for c in shown]
        explained |= kept
        notes = _notes(result) if number == len(groups) - 1 else ()
        tables.append(Table(title, told, lines, notes))
    return tables


def targets_table(result: BenchResult) -> Table | None:
    """The promises whose cases were measured; None: none was."""
    found = verdicts(result)
    columns = [Column(key, key) for key in ("target", "measured", "met")]
    rows = [Row(f"{v.place}: {METHODS[v.target.method].label}", _judged(v)) for v in found]
    met = sum(v.met for v in found)
    return Table(f"Targets: {met} of {len(found)} met", columns, rows) if rows else None


def _judged(verdict: Verdict) -> dict[str, Cell]:
    target = verdict.target
    sign = "≥" if target.at_least else "≤"
    return {
        "target": f"{sign} {target.bound:g} {WORDS[target.quantity]}",
        "measured": f"{verdict.value:.3g}",
        "met": "met" if verdict.met else "missed",
    }


def _cells(row: BenchRow) -> dict[str, Cell]:
    ours = row.timings[OURS]
    shares = {f"x_{k}": row.against(k) for k in ("central", "gemm")}
    return {
        **{name: Estimate(1000 * t.seconds.median) for name, t in row.timings.items()},
        **{f"x_{k}": _spread(row.against(k), len(ours.times)) for k in MULTIPLES},
        **{k: Estimate(1 / v.median) for k, v in shares.items() if v is not None},
        **_processor(row),
        "padding": None if row.padding is None else Estimate(100 * row.padding),
        "peak": None if ours.peak_bytes is None else Estimate(ours.peak_bytes / 1e6),
        "process": _process(row),
        "first": Estimate(1000 * ours.first),
        "speed": Estimate(row.samples_per_second / 1000),
        "limit": Estimate(100 * row.share_of_limit),
        "turns": Estimate(len(ours.times)),
        "path": row.path,
    }


def _processor(row: BenchRow) -> dict[str, Cell]:
    found = row.processor
    if found is None:
        return {}
    return {
        "cpu_flower": Estimate(1000 * found["flower"].seconds.median),
        "cpu_ours": Estimate(1000 * found[OURS].seconds.median),
        "x_cpu": _spread(row.cost_of_flower, len(found[OURS].times)),
    }


def _process(row: BenchRow) -> Cell:
    """Where the case is about memory; elsewhere it holds what earlier cases left."""
    peak = row.timings[OURS].process_bytes
    return Estimate(peak / 1e9) if row.case.kind == "memory" and peak is not None else None


def _spread(spread: Spread | None, turns: int) -> str | None:
    if spread is None:
        return None
    apart = "1 turn" if turns == 1 else f"{_short(spread.low)}–{_short(spread.high)}"
    return f"{_short(spread.median)} ({apart})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}"


def _notes(result: BenchResult) -> list[str]:
    facts = result.facts
    turns = [len(row.timings[OURS].times) for row in result.rows]
    notes = [
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} thread(s), device "
        f"{facts['device']}; fairvar {facts['fairvar']}, torch {facts['torch']}, Python "
        f"{facts['python']}; precision {facts['precision']}, in which a matrix product makes "
        f"{facts['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s",
        f"{facts['clock']}; {min(turns)} to {max(turns)} turns; load of the machine before "
        f"{facts['load_before']:.2f}, after {facts['load_after']:.2f}",
    ]
    grown = [(row.case.method, cost_of_many(row, result)) for row in result.rows]
    many = [f"{METHODS[k].label} {v:.1f}" for k, v in grown if v is not None]
    if many:
        notes.append(f"Cost of {MANY} clients over that of {FEW}: {', '.join(many)}")
    if any(row.case.kind == "grid" for row in result.rows):
        notes.append("The bare loop of a grid is timed on one run and multiplied by their number.")
    if result.busy:
        notes.append("The machine was busy with other work: do not quote these numbers.")
    return notes


def write_numbers(result: BenchResult, out: Path) -> list[Path]:
    """table.md and bench.json, whole at any moment: called after every case."""
    table, data = out / "table.md", out / "bench.json"
    promises = targets_table(result)
    tables = [*bench_tables(result, full=True), *([] if promises is None else [promises])]
    write_text(table, "\n".join(map(to_markdown, tables)))
    write_text(data, json.dumps(as_dict(result), indent=2) + "\n")
    return [table, data]


def as_dict(result: BenchResult) -> dict[str, Any]:
    return result.as_dict() | {"targets": [v.as_dict() for v in verdicts(result)]}


def write_bench(result: BenchResult, out: Path) -> list[Path]:
    """The numbers and, where a method was measured at several sizes, clients.png and .pdf.

    Without matplotlib there is no picture: machines with a GPU often have little else."""
    files, panels = write_numbers(result, out), _panels(result)
    if panels and find_spec("matplotlib") is not None:
        files += save(clients_figure(panels), out, "clients")
    return files


def _panels(result: BenchResult) -> dict[str, list[BenchRow]]:
    """Rows that differ in the number of clients alone, by model and method; two sizes at least."""
    found: dict[str, list[BenchRow]] = {}
    for row in result.rows:
        case = row.case
        if case.local == "step" and case.kind == "rounds":
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
