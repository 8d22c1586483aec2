"""One cell, one number: page, CSV, LaTeX, Markdown, terminal, JSON, figures and `compare` agree."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairvar import cli
from fairvar.metrics import DEFINITIONS, fairness
from fairvar.report import files
from fairvar.report.files import (
    accuracy_figure,
    curves_figure,
    fedavg_figure,
    front_figure,
    group_table,
    weights_figure,
)
from fairvar.report.html import minus
from fairvar.report.result_tables import result_columns
from fairvar.report.table import Estimate, Table
from fairvar.runs.plan import Plan
from fairvar.runs.results import gather
from fairvar.runs.runner import arrange
from fairvar.runs.sweep import run_sweep
from fairvar.runs.trials import Group

PLAN: dict[str, Any] = {
    "name": "numbers",
    # So few samples that some clients have a single test sample.
    "data": {"name": "digits", "clients": 12, "samples": 200},
    "train": {"rounds": 8, "participation": 0.75},
    "evaluate": {"every": 1},
    "sweep": {"methods": ["fedavg", "afl"], "seeds": 2, "lr": [0.5], "step": [0.1],
              "alpha": [0.1, 0.5]},
}  # fmt: skip
METRIC_OF_COMPARE = {"accuracy": "accuracy", "variance": "variance",
                     "corrected_variance": "corrected", "worst_10_percent": "worst"}  # fmt: skip


class Cells(HTMLParser):
    """Every table of a page as rows of (header, text, title, value)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[dict[str, str]]]] = []
        self.open: dict[str, str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.open = {"text": "", **{k: v or "" for k, v in attrs}}
            self.tables[-1][-1].append(self.open)
        elif tag == "button" and self.open is not None:
            self.open["title"] = dict(attrs).get("title") or ""

    def handle_endtag(self, tag: str) -> None:
        self.open = None if tag in ("td", "th") else self.open

    def handle_data(self, data: str) -> None:
        if self.open is not None:
            self.open["text"] += data


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """They take seconds; here the figures themselves are asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_figures", lambda group: ())
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("numbers")
    run_sweep(arrange(Plan.from_dict(PLAN).cells), out, lambda done, total, what: None)
    cli.main(["report", str(out)])
    return out


@pytest.fixture(scope="module")
def group(folder: Path) -> Group:
    return gather(folder)[0]


@pytest.fixture(scope="module")
def table(group: Group) -> Table:
    return group_table(group)


def shown(text: str) -> str:
    """ "42.20 ± 0.78" of a cell in any notation, bold or not."""
    text = re.sub(r"\\phantom\{0*\}|\\mathbf|[{}$*\\|]", "", text).replace("pm", "±")
    return re.sub(r"\s+", " ", text.replace("\u2007", " ")).strip()


def test_the_page_has_the_numbers_of_the_table(folder: Path, group: Group, table: Table) -> None:
    page = Cells((folder / "report" / "index.html").read_text()).tables
    (found,) = (t for t in page if [c["text"] for c in t[0][1:]] == [
        c.header for c in table.columns] and group.alpha == 0.1 and t is page[1])  # fmt: skip
    for row, cells in zip(table.rows, found[1:], strict=True):
        assert cells[0]["text"] == row.label
        for column, cell in zip(table.columns, cells[1:], strict=True):
            number = row.cells[column.key]
            if isinstance(number, Estimate):
                assert float(cell["data-value"]) == number.value
                assert repr(number.value) in cell["title"]
                error = f"{number.error:.{column.digits}f}"
                told = f"{number.value:z.{column.digits}f} ± {error}"
                assert shown(cell["text"]) == minus(told)
            else:
                assert cell["text"] == minus(number)


def test_files_have_the_numbers_of_the_table(folder: Path, table: Table) -> None:
    report = folder / "report"
    (exact, latex, markdown, text) = (
        (report / f"table-digits-alpha-0.1.{suffix}").read_text()
        for suffix in ("csv", "tex", "md", "txt")
    )
    rows = list(csv.DictReader(exact.splitlines()))
    every = [r for r in csv.DictReader((report / "table.csv").read_text().splitlines())
             if r["alpha"] == "0.1"]  # fmt: skip
    tex = [line.split("&") for line in latex.splitlines() if "&" in line][1:]
    md = [line.split("|")[1:-1] for line in markdown.splitlines() if line.startswith("|")][2:]
    for place, row in enumerate(table.rows):
        assert shown(tex[place][0]) == shown(md[place][0]) == row.label
        for at, column in enumerate(table.columns, 1):
            cell = row.cells[column.key]
            if not isinstance(cell, Estimate):
                continue
            told = f"{cell.value:z.{column.digits}f} ± {cell.error:z.{column.digits}f}"
            assert shown(tex[place][at].replace(r"\\", "")) == told
            assert shown(md[place][at]) == told
            for lines in (rows, every):
                assert float(lines[place][column.key]) == cell.value
                assert float(lines[place][f"{column.key}_standard_error"]) == cell.error
            assert f"{cell.value:z.{column.digits}f}" in text


def test_the_overview_has_the_numbers_of_the_tables(folder: Path) -> None:
    page = Cells((folder / "report" / "index.html").read_text()).tables[0]
    tables = [group_table(g) for g in gather(folder)]
    for place, row in enumerate(page[1:]):
        values = [float(cell["data-value"]) for cell in row[1:]]
        assert values == [t.rows[place].cells[key].value for t in tables  # type: ignore[union-attr]
                          for key in ("accuracy", "variance", "corrected")]  # fmt: skip


def test_json_has_the_numbers_of_the_table(
    folder: Path, table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["report", str(folder), "--json", "--out", str(folder / "again")])
    rows = json.loads(capsys.readouterr().out)[0]["rows"]
    for row, found in zip(table.rows, rows, strict=True):
        for key, cell in row.cells.items():
            told = found[key]["value"] if isinstance(cell, Estimate) else found[key]
            assert told == (cell.value if isinstance(cell, Estimate) else cell)


def test_compare_has_the_differences_of_the_table(
    folder: Path, table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    """All clients are tested by the global model; single test samples are among them."""
    cli.main(["compare", f"{folder}:AFL@0.1", f"{folder}:FedAvg@0.1", "--json"])
    found = json.loads(capsys.readouterr().out)
    rows = {row.label: row.cells for row in table.rows}
    for name, key in METRIC_OF_COMPARE.items():
        a, b = (rows[label][key].value for label in ("AFL", "FedAvg"))  # type: ignore[union-attr]
        assert 100 * found[name]["difference"] == pytest.approx(a - b, abs=1e-10), name


def test_clients_csv_gives_the_table_again(folder: Path, group: Group, table: Table) -> None:
    """From right answers and `fairness` alone."""
    rows = [r for r in csv.DictReader((folder / "report" / "clients.csv").read_text().splitlines())
            if r["alpha"] == "0.1"]  # fmt: skip
    assert 1 in {int(r["test_samples"]) for r in rows}
    for row in table.rows:
        seeds = []
        for seed in ("0", "1"):
            mine = [r for r in rows if (r["method"], r["seed"]) == (row.label, seed)]
            n = np.array([int(r["test_samples"]) for r in mine])
            right = np.array([int(r["right_global"] or 0) for r in mine])
            seeds.append(fairness(right / np.maximum(n, 1), n))
        for column in result_columns("global"):
            if column.key in ("accuracy", "variance", "noise_floor", "corrected", "worst"):
                mean = 100 * np.mean([f[column.metric] for f in seeds])
                assert row.cells[column.key].value == pytest.approx(mean, abs=1e-10)  # type: ignore[union-attr]


def test_figures_show_the_numbers_of_the_table(group: Group, table: Table) -> None:
    rows = {row.label: row.cells for row in table.rows}
    for axes in accuracy_figure(group.results).axes:
        cells = rows[axes.get_title("left")]
        mean, worst = (f"{cells[k].value:.2f}" for k in ("accuracy", "worst"))  # type: ignore[union-attr]
        assert axes.texts[0].get_text() == f"mean {mean}, worst 10 % {worst}"
    axes = front_figure(group.trials, group.results).axes[0]
    marks = {tuple(np.ravel(c.lines[0].get_xydata())) for c in axes.containers}
    expected = [(c["accuracy"].value, c["variance"].value) for c in rows.values()]  # type: ignore[union-attr]
    for accuracy, variance in expected:
        assert any(np.allclose(mark, (accuracy, variance), atol=1e-10) for mark in marks)
    whole = curves_figure(group.results).axes[0]
    for result, line in zip(group.results, whole.lines, strict=True):
        assert result.at is not None
        assert line.get_xdata()[result.at] == result.trial.summary.rounds[result.at]
        value = rows[result.label]["accuracy"].value  # type: ignore[union-attr]
        assert line.get_ydata()[result.at] == pytest.approx(value, abs=1e-10)


def test_the_figure_of_differences_has_the_numbers_of_its_table(folder: Path, group: Group) -> None:
    figure = fedavg_figure(group.results)
    assert figure is not None
    lines = (folder / "report" / "compared_with_fedavg.md").read_text().splitlines()
    head, _, first, *_ = (line.split("|")[1:-1] for line in lines if line.startswith("|"))
    told = {h.strip(): c.strip() for h, c in zip(head, first, strict=True)}
    for axes in figure.axes:
        model, metric = axes.get_title("left").split("\n")
        short = {"local models": "local", "global model": "global"}[model]
        cell = told[f"{short} {metric[:3]}."]
        value = float(axes.lines[2].get_xdata()[0])
        assert cell.startswith(f"{value:+.2f} (")


def test_every_number_has_its_formula(folder: Path) -> None:
    """Also columns of the overview, of the other model and of the window."""
    page = Cells((folder / "report" / "index.html").read_text()).tables
    formulas = set(DEFINITIONS.values())
    for found in page[:3]:
        for row in found[1:]:
            for cell in row[1:]:
                if "data-value" in cell and cell["class"].startswith("number"):
                    assert formulas & set(cell["title"].splitlines()), cell["title"]
    heads = [c for t in page[:3] for c in t[0] if c["text"].endswith(("%", "var.", "corr."))]
    assert len(heads) > 10
    for cell in heads:
        assert formulas & set(cell["title"].splitlines()), cell["title"]


def test_weights_of_the_page_are_at_evaluated_rounds(tmp_path: Path) -> None:
    plan = {**PLAN, "evaluate": {"every": 3}, "sweep": {**PLAN["sweep"], "alpha": [0.5]}}
    run_sweep(arrange(Plan.from_dict(plan).cells), tmp_path, lambda done, total, what: None)
    (group,) = gather(tmp_path)
    (afl,) = (r for r in group.results if r.label == "AFL")
    line, heat = weights_figure(afl).axes[:2]
    assert line.lines[0].get_xdata().tolist() == [3, 6, 8]
    assert heat.get_xlabel() == "round"
    borders = heat.collections[0].get_coordinates()[0, :, 0]
    assert all(low < t < high for t, (low, high) in zip((3, 6, 8), pairwise(borders), strict=True))
