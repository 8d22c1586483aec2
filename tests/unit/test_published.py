"""The results in the repository: intact, and every published file comes out again byte by byte."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairvar.report.files import write_files
from fairvar.runs.archive import ARCHIVE, LIST, extract, write_list
from fairvar.runs.results import gather, stored_runs
from fairvar.runs.stored import StoredRun
from fairvar.runs.trials import Summary
from fairvar.runs.verify import check_files
from second_edition import RATES, choices_text, chosen, finished, key, score

ROOT = Path(__file__).parents[2]
RESULTS = sorted(path.parent for path in (ROOT / "results").rglob("runs.tar.xz"))
NAMES = [str(path.relative_to(ROOT / "results")) for path in RESULTS]
REPORTED = [path for path in RESULTS if (path / "report").is_dir()]  # others: of rungs, pairs
SECOND = ROOT / "results" / "second"
STUDIES = sorted(path.parent for path in SECOND.glob("*/choices.json"))
FIRST = [ROOT / "results" / name for name in ("mnist", "cifar10", "cifar10/larger_step")]


def published(folder: Path) -> list[Path]:
    """Files that git tracks: other reports may be in the same folder."""
    told = subprocess.run(["git", "ls-files", "--", str(folder)], cwd=ROOT, capture_output=True,
                          text=True, check=True).stdout  # fmt: skip
    return [ROOT / line for line in told.splitlines()]


@pytest.mark.parametrize("folder", RESULTS, ids=NAMES)
def test_every_file_is_as_it_was_written(folder: Path) -> None:
    assert check_files(folder) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("without_pdf")
@pytest.mark.parametrize("folder", REPORTED, ids=lambda f: str(f.relative_to(ROOT / "results")))
def test_the_published_report_comes_out_again(folder: Path, tmp_path: Path) -> None:
    groups = gather(folder)
    write_files(groups, tmp_path, f"fairvar: {groups[0].config.name}")
    files = published(folder / "report")
    assert {"table-" in f.name for f in files} == {True, False}
    differ = [f.name for f in files if f.read_bytes() != (tmp_path / f.name).read_bytes()]
    assert differ == []


def verdicts(*folders: Path) -> str:
    command = [sys.executable, "benchmarks/second_edition.py", "sentences", *map(str, folders)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def squeezed(text: str) -> list[str]:
    """Rows of tables without padding."""
    return [re.sub(r" {2,}", " ", line) for line in text.splitlines() if line.startswith("| ")]


def merged(first: str, second: str) -> str:
    """A row of the second edition; cells that it has not measured are those of the first."""
    pairs = zip(first.split("|"), second.split("|"), strict=True)
    return "|".join(one if two == " not measured " else two for one, two in pairs)


@pytest.mark.slow
def test_the_verdicts_come_out_again_and_stand_in_the_page() -> None:
    finals = [study / "final" for study in STUDIES if finished(study)]
    made = {
        ROOT / "results" / "sentences.md": verdicts(*FIRST),
        SECOND / "sentences.md": verdicts(*finals),
        SECOND / "sentences_rates.md": verdicts(*(f for f in finals if RATES in f.parent.name)),
    }
    assert made == {file: file.read_text("utf-8") for file in made}
    first, second, rates = (squeezed(text)[: 1 + 10 + 1 + 32 + 1 + 32] for text in made.values())
    expected = [*map(merged, first, second), *rates[1:4]]  # the supplement: sentences on MNIST
    page = set(squeezed((ROOT / "docs" / "reproduction.md").read_text("utf-8")))
    assert [row for row in expected[1:] if row not in page] == []


@pytest.mark.parametrize("study", STUDIES, ids=lambda f: f.name)
def test_what_was_used_is_what_the_tuning_runs_say(study: Path) -> None:
    """The rungs' scores come out of the archived runs again, and the winners are the final runs."""
    table = json.loads((study / "choices.json").read_text("utf-8"))
    by_rung: dict[tuple[int, str], list[StoredRun]] = {}
    for run in stored_runs(study / "tuning"):
        by_rung.setdefault((run.config.train.rounds, key(run.config)), []).append(run)
    assert by_rung.keys() == {(row["rounds"], row["key"]) for row in table}
    for row in table:
        runs = by_rung[row["rounds"], row["key"]]
        summary = Summary.of([run.history(with_state=False) for run in runs])
        assert summary.diverged == (row["score"] is None)
        if not summary.diverged:
            assert score(summary, runs[0].config.select) == (row["score"], row["variance"])
    used = {key(run.config) for run in stored_runs(study / "final")}
    assert used == chosen(table) if finished(study) else used <= chosen(table)
    assert choices_text(table) == (study / "choices.md").read_text("utf-8")


@pytest.mark.parametrize("folder", RESULTS, ids=NAMES)
def test_every_archive_has_the_list_that_condense_would_write(folder: Path, tmp_path: Path) -> None:
    write_list(tmp_path, extract(folder / ARCHIVE, tmp_path))
    assert (tmp_path / LIST).read_bytes() == (folder / LIST).read_bytes()


def test_all_results_together_stay_small() -> None:
    assert RESULTS
    assert sum(f.stat().st_size for f in published(ROOT / "results")) < 40_000_000
