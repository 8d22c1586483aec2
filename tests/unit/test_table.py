"""Tables: what is printed where, in every format."""

from __future__ import annotations

import csv
import io
import math
import re

import pytest
from rich.console import Console

from fairvar.errors import BadInput
from fairvar.report.table import (
    Column,
    Estimate,
    Row,
    Table,
    mean_and_standard_error,
    render,
    to_csv,
    to_latex,
    to_markdown,
    to_rich,
    to_terminal,
)


@pytest.fixture
def table() -> Table:
    columns = [
        Column("accuracy", "accuracy (%)", 2, "mean over clients"),
        Column("variance", "variance (×100)", 2),
        Column("worst", "worst 10 %", 1),
    ]
    rows = [
        Row("FedAvg", {"accuracy": Estimate(97.1234, 0.3), "variance": Estimate(0.09, 0.01)}),
        Row("AFL", {"accuracy": Estimate(9.5, 10.3), "variance": Estimate(math.nan, 0.1)}),
        Row("FairLoss*", {"accuracy": Estimate(98.1, 0.25, True), "worst": "n/a"}),
        Row("local", {"accuracy": Estimate(77.1), "worst": Estimate(-1e-9)}),
    ]
    return Table("Digits, α = 0.1", columns, rows, ["5 seeds; bold: best of its column"])


def test_terminal_80_columns(table: Table) -> None:
    assert to_terminal(table, 80) == (
        "Digits, α = 0.1\n"
        "            accuracy (%)  variance (×100)  worst 10 %\n"
        "─────────────────────────────────────────────────────\n"
        "FedAvg     97.12 ±  0.30      0.09 ± 0.01           –\n"
        "AFL         9.50 ± 10.30      div.                  –\n"
        "FairLoss*  98.10 ±  0.25         –                n/a\n"
        "local      77.10                 –                0.0\n"
        "accuracy (%): mean over clients\n"
        "5 seeds; bold: best of its column\n"
    )


def test_terminal_40_columns_puts_errors_below(table: Table) -> None:
    assert to_terminal(table, 40) == (
        "Digits, α = 0.1\n"
        "           accuracy  variance  worst\n"
        "                (%)    (×100)   10 %\n"
        "────────────────────────────────────\n"
        "FedAvg        97.12      0.09      –\n"
        "            ±  0.30    ± 0.01\n"
        "AFL            9.50      div.      –\n"
        "            ± 10.30\n"
        "FairLoss*     98.10         –    n/a\n"
        "            ±  0.25\n"
        "local         77.10         –    0.0\n"
        "accuracy (%): mean over clients\n"
        "5 seeds; bold: best of its column\n"
    )


@pytest.mark.parametrize("width", [24, 30, 40, 60, 80, 200])
def test_no_number_is_ever_cut(table: Table, width: int) -> None:
    text = to_terminal(table, width)
    assert max(map(len, text.splitlines())) <= width
    for number in ("97.12", "9.50", "10.30", "98.10", "0.25", "77.10", "div.", "n/a"):
        assert number in text
    assert "…" not in text


def test_columns_of_words_fold_and_stand_left() -> None:
    columns = [Column("a", "accuracy", 1), Column("chosen", "chosen", 0)]
    cells = {"a": Estimate(90.0, 0.5), "chosen": "lr 0.1, strength 10, round 100"}
    table = Table("t", columns, [Row("FairGrad*", cells), Row("AFL", {"a": "div."})])
    assert to_terminal(table, 34) == (
        "t\n"
        "             accuracy  chosen\n"
        "──────────────────────────────────\n"
        "FairGrad*  90.0 ± 0.5  lr 0.1,\n"
        "                       strength\n"
        "                       10, round\n"
        "                       100\n"
        "AFL        div.        –\n"
    )
    assert "|-----------:|:-------" in to_markdown(table)
    assert "{tabular}{lrl}" in to_latex(table)


def test_marked_values_are_bold_in_the_terminal(table: Table) -> None:
    console = Console(width=80, force_terminal=True, color_system="standard", file=io.StringIO())
    with console.capture() as capture:
        console.print(to_rich(table))
    assert "\x1b[1m98.10 ±  0.25\x1b[0m" in capture.get()
    assert "\x1b[1m97.12" not in capture.get()


def test_square_brackets_are_not_read_as_rich_markup() -> None:
    text = to_terminal(Table("[red]t[/red]", [Column("a", "[b]h")], [Row("[i]x", {"a": "[s]y"})]))
    assert all(word in text for word in ("[red]t[/red]", "[b]h", "[i]x", "[s]y"))


def test_markdown(table: Table) -> None:
    assert to_markdown(table) == (
        "**Digits, α = 0.1**\n"
        "\n"
        "|            |      accuracy (%) | variance (×100) | worst 10 % |\n"
        "|:-----------|------------------:|----------------:|-----------:|\n"
        "| FedAvg     |     97.12 ±  0.30 |     0.09 ± 0.01 |          – |\n"
        "| AFL        |      9.50 ± 10.30 |     div.        |          – |\n"
        "| FairLoss\\* | **98.10 ±  0.25** |        –        |        n/a |\n"
        "| local      |     77.10         |        –        |        0.0 |\n"
        "\n"
        "- accuracy (%): mean over clients\n"
        "- 5 seeds; bold: best of its column\n"
    )


def test_markdown_cannot_be_broken_by_labels() -> None:
    text = to_markdown(Table("", [Column("a", "x|y")], [Row("a|b\n<i>_", {"a": "c"})]))
    rows = text.splitlines()
    assert len(rows) == 3
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)
    assert r"a\|b \<i\>\_" in rows[2]


def test_csv_keeps_every_digit(table: Table) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    third = Table("", [Column("a", "a", 1)], [Row('x,"y', {"a": Estimate(1 / 3, 2 / 3)})])
    back = next(csv.DictReader(io.StringIO(to_csv(third))))
    assert (float(back["a"]), float(back["a_standard_error"])) == (1 / 3, 2 / 3)
    assert back["label"] == 'x,"y'
    assert rows[0]["accuracy"] == "97.1234"
    assert rows[0]["worst"] == rows[3]["accuracy_standard_error"] == ""
    assert (rows[1]["variance"], rows[1]["variance_standard_error"]) == ("div.", "")


def test_latex(table: Table) -> None:
    assert to_latex(table) == (
        "\\begin{table}\n"
        "\\centering\n"
        "\\caption{Digits, $\\alpha$ = 0.1}\n"
        "\\begin{tabular}{lrrr}\n"
        "\\toprule\n"
        " & accuracy (\\%) & variance ($\\times$100) & worst 10 \\% \\\\\n"
        "\\midrule\n"
        "FedAvg & $97.12 \\pm \\phantom{0}0.30$ & $0.09 \\pm 0.01$ & -- \\\\\n"
        "AFL & $9.50 \\pm 10.30$ & div. & -- \\\\\n"
        "FairLoss* & $\\mathbf{98.10 \\pm \\phantom{0}0.25}$ & -- & n/a \\\\\n"
        "local & $77.10$ & -- & $0.0$ \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
        "\\par\\footnotesize accuracy (\\%): mean over clients\n"
        "\\par\\footnotesize 5 seeds; bold: best of its column\n"
        "\\end{table}\n"
    )


def test_latex_escapes_and_balances() -> None:
    nasty = "a_b & 5% #1 {x} $y$ ~^ \\z λ ≤ ‖∇f‖² — €"
    text = to_latex(Table(nasty, [Column("a", nasty)], [Row("*" + nasty, {"a": nasty})], [nasty]))
    bare = re.sub(r"\\[\\{}$&%#_]", "", text)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    assert not re.search(r"[%#~λ≤‖∇²—]", bare)
    assert "\n{}*a" in text  # or the row end above would take the star as its own
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert all(len(re.findall(r"(?<!\\)&", row)) == 1 for row in rows)


def test_mean_and_standard_error() -> None:
    got = mean_and_standard_error([1.0, 2.0, 4.0])
    assert got.value == pytest.approx(7 / 3)
    assert got.standard_error == pytest.approx(math.sqrt(7 / 3) / math.sqrt(3))
    assert mean_and_standard_error([3.0]) == Estimate(3.0, None)
    assert mean_and_standard_error([1.0, math.inf]).diverged
    with pytest.raises(BadInput, match="no seeds"):
        mean_and_standard_error([])


@pytest.mark.parametrize("format", ["terminal", "markdown", "csv", "latex"])
def test_nan_is_never_printed(format: str) -> None:
    cells = [Estimate(math.nan), Estimate(math.inf, 1.0, True), Estimate(1.0, math.nan, True), None]
    rows = [Row(f"r{i}", {"a": cell}) for i, cell in enumerate(cells)]
    text = render(Table("t", [Column("a", "a")], rows), format)
    assert "nan" not in text
    assert "inf" not in text
    assert text.count("div.") == 2


def test_empty_tables_render() -> None:
    for format in ("terminal", "markdown", "csv", "latex"):
        assert render(Table("t", [Column("a", "a")], []), format)
        assert render(Table("t", [], []), format)


def test_what_is_refused() -> None:
    with pytest.raises(BadInput, match="did you mean 'markdown'"):
        render(Table("t", [], []), "markdwon")
    with pytest.raises(BadInput, match="twice"):
        Table("t", [Column("a", "x"), Column("a", "y")], [])
    with pytest.raises(BadInput, match="no column"):
        Table("t", [], [Row("r", {"a": None})])
