"""The paper's claims: verdicts follow from the intervals, and from nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fairvar.report.compare import (
    ALIKE,
    CLAIMS,
    LESS,
    MORE,
    _verdict,
    claims_overview,
    claims_table,
    compared_with_fedavg,
)
from fairvar.report.paired import Difference
from fairvar.runs.results import gather

UP, DOWN = Difference(1.0, 0.5, 1.5), Difference(-1.0, -1.5, -0.5)
NOISE = Difference(0.2, -0.5, 0.9)


def test_alike_is_within_the_margin_beyond_it_or_undecided() -> None:
    assert _verdict(ALIKE, {"a": NOISE, "b": NOISE}, 1.0)[0] == "reproduced: within the margin"
    told, pair = _verdict(ALIKE, {"a": NOISE, "b": DOWN}, 0.4)
    assert (told, pair) == ("not reproduced: beyond the margin for b", "b")
    told, pair = _verdict(ALIKE, {"a": NOISE, "b": DOWN}, 0.6)
    assert (told, pair) == ("undecided: not within the margin; clear for b", "b")


def test_a_direction_must_be_clear_against_everyone() -> None:
    assert _verdict(LESS, {"a": DOWN, "b": DOWN})[0] == "reproduced"
    assert _verdict(MORE, {"a": UP})[0] == "reproduced"
    assert _verdict(LESS, {"a": DOWN, "b": NOISE}) == ("undecided: within noise", "b")
    assert _verdict(LESS, {"a": DOWN, "b": UP}) == ("not reproduced: the opposite is clear", "b")
    assert _verdict(MORE, {"a": DOWN})[0] == "not reproduced: the opposite is clear"


def test_every_variance_is_judged_raw_and_corrected() -> None:
    raw = {(s.text, s.left) for s in CLAIMS if s.metric == "variance"}
    corrected = {(s.text, s.left) for s in CLAIMS if s.metric == "corrected_variance"}
    assert raw == corrected
    assert raw


def test_few_seeds_are_marked_and_never_judged_alone() -> None:
    """By the published CIFAR-10 runs: three seeds of one protocol, one of the other."""
    groups = gather(Path(__file__).parents[2] / "results" / "cifar10")
    one = [g for g in groups if g.config.protocol == "tables"]
    three = [g for g in groups if g.config.protocol == "boxes"]
    assert claims_table(one) is None
    alone, both = claims_table(three), claims_table(groups)
    assert alone is not None
    assert both is not None
    marked = [str(row.cells["verdict"]).endswith("(few seeds)") for row in both.rows]
    assert marked == [row.cells["seeds"] == "1" for row in both.rows]
    assert len(both.rows) - sum(marked) == len(alone.rows) > 0
    assert len(both.notes) == len(alone.notes) + 1
    late = [str(row.cells["late_verdict"]).endswith("(few seeds)") for row in both.rows]
    assert late == marked


def test_the_overview_says_whose_a_claim_is_and_when_it_is_undecided() -> None:
    """Claims of equality are undecided by their margins, not by zero."""
    claims = claims_table(gather(Path(__file__).parents[2] / "results" / "cifar10"))
    assert claims is not None
    overview = claims_overview(claims)
    whose = {claim.text: claim.whose for claim in CLAIMS}
    assert {row.cells["whose"] for row in overview.rows} == set(whose.values())
    assert all(row.cells["whose"] == whose[row.label] for row in overview.rows)
    assert any(claim.relation == ALIKE and claim.text in str(overview.rows) for claim in CLAIMS)
    assert "±1 point of accuracy" in overview.notes[0]


def test_every_method_is_compared_with_fedavg() -> None:
    (first, *_) = groups = gather(Path(__file__).parents[2] / "results" / "cifar10")
    beside = compared_with_fedavg(groups)
    assert beside is not None
    alive = [r for g in groups for r in g.results if r.at is not None and r.label != "FedAvg"]
    assert [row.label for row in beside.rows] == [r.label for r in alive]
    for row in beside.rows:
        for key, text in row.cells.items():
            if key != "where":
                low, high = map(float, str(text).partition("(")[2].partition(")")[0].split(" to "))
                assert str(text).endswith("*") == (low > 0 or high < 0) or 0 in (low, high)
    without = replace(first, results=[r for r in first.results if r.label != "FedAvg"])
    assert compared_with_fedavg([without]) is None
