"""The blocks of docs/python.md run, in their order, in one session."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.slow
def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert len(blocks) == 8
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), session)
    told = capsys.readouterr().out
    assert "<History: TERM, 20 rounds, 10 clients>" in told
    assert "<Sweep: 12 of 12 runs are done in runs/small>" in told
    assert "Compared with FedAvg" in told
    written = {path.name for path in (tmp_path / "comparison").iterdir()}
    assert {"table.md", "table.tex", "differences.csv", "front.png", "curves.pdf"} <= written
