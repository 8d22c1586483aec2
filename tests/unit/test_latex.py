"""The LaTeX table goes through a real TeX engine, where there is one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from fairvar.report.table import (
    Column,
    Estimate,
    Row,
    Table,
    to_latex,
)

ENGINE = shutil.which("pdflatex") or shutil.which("lualatex") or shutil.which("xelatex")


@pytest.mark.slow
@pytest.mark.skipif(ENGINE is None, reason="no TeX engine on this machine (pdflatex and the like)")
def test_the_table_compiles(tmp_path):
    columns = [Column("a", "accuracy %", 2, "50 % & more_of #it"), Column("b", "variance ×100")]
    rows = [
        Row("FairGrad*", {"a": Estimate(88.1, 0.2, marked=True), "b": Estimate(0.05)}),
        Row("q-FFL_1 {x}", {"a": Estimate(float("nan")), "b": "div."}),
    ]
    table = Table("α = 0.1, 50 % of CIFAR-100 & λ² ≤ 1", columns, rows, ["± is over seeds"])
    document = (
        "\\documentclass{article}\\usepackage[utf8]{inputenc}"
        # A minimal TeX has no booktabs; its three rules are all that the table takes from it.
        "\\IfFileExists{booktabs.sty}{\\usepackage{booktabs}}"
        "{\\let\\toprule\\hline\\let\\midrule\\hline\\let\\bottomrule\\hline}"
        "\\begin{document}\n" + to_latex(table) + "\n\\end{document}\n"
    )
    (tmp_path / "t.tex").write_text(document, encoding="utf-8")
    assert ENGINE is not None
    done = subprocess.run(
        [ENGINE, "-interaction=nonstopmode", "-halt-on-error", "t.tex"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "t.pdf").stat().st_size > 1000
