"""Verdicts on made-up runs whose answer is known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from scipy import stats

from fairvar.report.compare import PAPER
from over_pairs import OverPairs, Window, holm, simes, t_quantile, t_tail
from sentences import (
    ALPHAS,
    SENTENCES,
    Evidence,
    alike,
    cells_table,
    differences_table,
    evidence_of,
    improves,
    judge,
    judge_apart,
    kept,
    paper_table,
    scoreboard,
    sentences_table,
)

CLIENTS, PAIRS, NOISE = 40, 5, 0.002
Shift = tuple[float, float]  # added to the mean; factor of the deviations


def made(shifts: Mapping[str, Shift], pairs: int = PAIRS, noise: float = NOISE) -> Evidence:
    """Methods whose clients differ from FedAvg's by a shift and a factor of their spread."""
    windows: dict[str, dict[int, Window]] = {}
    for pair in range(pairs):
        random = np.random.default_rng(pair)
        spread = random.normal(0, 0.05, CLIENTS)
        samples = np.full(CLIENTS, 100 + pair)
        for method in PAPER:
            mean, factor = shifts.get(method, (0.0, 1.0))
            scores = 0.8 + mean + factor * spread + random.normal(0, noise, (2, CLIENTS))
            windows.setdefault(method, {})[pair] = Window(scores, samples, f"partition {pair}")
    return Evidence(windows, draws=4000)


def verdicts(data: str, evidence: Evidence) -> dict[str, str]:
    return {
        j.sentence.name: j.verdict for j in judge({(data, alpha): evidence for alpha in ALPHAS})
    }


ALIKE = made({})
STAR = made({"FairGrad*": (0.0, 0.8)})
WORSE = made({"FairGrad*": (-0.03, 1.2)})
APART = made(dict.fromkeys(PAPER[1:], (-0.03, 1.0)))
NOISY = made({}, noise=0.08)


@pytest.mark.parametrize(
    ("data", "evidence", "expected"),
    [
        ("mnist", ALIKE, {"1": "reproduced", "3": "undecided", "4": "not measured"}),
        ("mnist", STAR, {"1": "undecided", "2": "reproduced", "3": "reproduced"}),
        ("mnist", WORSE, {"3": "not reproduced", "10": "not reproduced"}),
        ("mnist", APART, {"1": "not reproduced", "2": "undecided"}),
        ("mnist", NOISY, {"1": "undecided", "2": "undecided", "10": "not measured"}),
        ("cifar10", made({"FairGrad": (0.03, 0.8)}), {"4": "reproduced", "5": "reproduced"}),
        ("cifar100", STAR, {"6": "undecided", "7": "reproduced"}),
        ("mnist", made({}, pairs=1), {"1": "undecided", "2": "undecided", "3": "undecided"}),
    ],
)  # fmt: skip
def test_verdicts(data: str, evidence: Evidence, expected: dict[str, str]) -> None:
    found = verdicts(data, evidence)
    assert {name: found[name] for name in expected} == expected


def test_a_sentence_without_all_its_runs_is_not_measured_unless_a_part_contradicts_it() -> None:
    one = judge({("mnist", 0.05): STAR})
    assert {j.verdict for j in one if j.sentence.name in ("2", "3")} == {"not measured"}
    without = Evidence({m: w for m, w in STAR.windows.items() if m != "AFL"})
    assert verdicts("mnist", without)["3"] == "not measured"
    assert verdicts("mnist", without)["2"] == "reproduced"  # which is not about AFL
    assert judge({("mnist", 0.05): WORSE})[2].verdict == "not reproduced"


def test_who_diverged_is_not_reproduced_as_a_claim_and_left_out_as_a_rival() -> None:
    rest = {m: w for m, w in STAR.windows.items() if m != "AFL"}
    assert verdicts("mnist", Evidence(rest, frozenset({"AFL"})))["3"] == "reproduced"
    rest = {m: w for m, w in STAR.windows.items() if m != "FairGrad*"}
    (*_, star) = judge({("mnist", a): Evidence(rest, frozenset({"FairGrad*"})) for a in ALPHAS})[:3]
    assert star.verdict == "not reproduced"
    assert "FairGrad* (MNIST, α 0.05)" in star.diverged


def test_equivalence_needs_both_margins_and_says_when_one_is_passed() -> None:
    over = made({"AFL": (0.004, 1.0), "q-FFL": (0.02, 1.0), "AAggFF": (0.0, 1.2)}).over_pairs()
    p = {c.text: (c.holds, c.fails) for c in alike(PAPER[1:4]).compare(over)}
    inside, outside = p["AFL − FedAvg, accuracy"], p["q-FFL − FedAvg, accuracy"]
    assert inside[0] < 0.05 < inside[1]  # clear, and yet within a point
    assert outside[1] < 0.05 < outside[0]
    assert p["AAggFF − FedAvg, variance"][1] < 0.05 < p["AAggFF − FedAvg, variance"][0]


def test_a_gain_in_one_is_no_improvement_if_the_other_is_clearly_worse() -> None:
    over = made({"FairGrad": (-0.03, 0.8), "FairLoss": (0.0, 0.8)}).over_pairs()
    (traded,), (gained,) = (improves((m,)).compare(over) for m in ("FairGrad", "FairLoss"))
    assert traded.holds == traded.fails == 1
    assert gained.holds < 0.05
    (lost,), (same,) = (kept((m,)).compare(over) for m in ("FairGrad", "FairLoss"))
    assert (lost.fails < 0.05, same.holds < 0.05) == (True, True)


def test_holm_and_simes() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.001]) == pytest.approx([0.5, 0.002])
    assert simes([0.04, 0.05]) == pytest.approx(0.05)
    assert simes([]) == 1


def test_student_t() -> None:
    for df in (1, 2, 3, 4, 9):
        assert t_tail(1.7, df) == pytest.approx(stats.t.sf(1.7, df))
        assert t_quantile(0.975, df) == pytest.approx(stats.t.ppf(0.975, df))


def test_few_pairs_are_not_narrower_than_students_t() -> None:
    over = OverPairs.of(NOISY.windows)
    weights = {"AFL": 1.0, "FedAvg": -1.0}
    tested = over.test("accuracy", weights)
    by_pair = over.seen["accuracy"]["AFL"] - over.seen["accuracy"]["FedAvg"]
    expected = stats.ttest_1samp(by_pair, 0)
    low, high = expected.confidence_interval()
    assert tested.low <= low + 1e-9 < high - 1e-9 <= tested.high
    assert min(tested.above, tested.below) >= expected.pvalue - 1e-9


def test_tables_have_every_sentence_and_every_cell() -> None:
    evidence = {("mnist", alpha): STAR for alpha in ALPHAS}
    table = sentences_table(judge(evidence), "ten", [])
    assert [row.label.partition(".")[0] for row in table.rows] == [s.name for s in SENTENCES]
    assert len(judge_apart(evidence)) == 6
    cells = cells_table({"boxes": evidence})
    told = [str(text) for row in cells.rows for text in row.cells.values()]
    assert (len(told), told.count("not measured")) == (2 * 4 * 32, 4 * (24 + 32))
    assert [row.cells["tables"] for row in scoreboard({}).rows] == ["not measured"] * 10
    assert evidence_of([]) == {}


def test_who_diverged_on_a_pair_or_in_all_of_tuning_says_so_in_every_table() -> None:
    nothing = Evidence({}, frozenset(PAPER), tried=dict.fromkeys(PAPER, 12))
    rest = {m: w for m, w in STAR.windows.items() if m != "AFL"}
    evidence = {("mnist", 0.05): nothing, ("mnist", 0.1): Evidence(rest, frozenset({"AFL"}))}
    cells = {row.label: row.cells for row in cells_table({"tables": evidence}).rows}
    ours = {row.label: row.cells for row in paper_table([], evidence).rows}
    for method, expected in (("AFL", ["div.", "div."]), ("q-FFL", ["div.", "not measured"])):
        row = f"MNIST, {method}"
        assert cells[row]["tables0.05"] == "div."
        assert [ours[row][f"ours{alpha:g}"] for alpha in (0.05, 0.1)] == expected


def test_differences_from_fedavg_are_marked_where_the_interval_leaves_zero_out() -> None:
    found = differences_table(
        {("mnist", 0.1): made({"FairGrad*": (0.03, 0.8)})}, "minus FedAvg", []
    )
    cells = {row.label: [str(text) for text in row.cells.values()] for row in found.rows}
    assert list(cells) == [method for method in PAPER if method != "FedAvg"]
    accuracy, variance = cells["FairGrad*"]
    assert (accuracy[:4], accuracy[-1], variance[:3], variance[-1]) == ("+3.0", "*", "-0.", "*")
    assert not any("*" in cell for cell in cells["FairLoss"])


def test_the_corrected_variance_leaves_out_what_the_test_sets_add() -> None:
    one = np.array([[0.5, 0.7, 0.9]])
    over = OverPairs.of({"FedAvg": {0: Window(one, np.full(3, 101), "p")}}, draws=10)
    noise = np.mean(one * (1 - one)) / 100
    assert over.mean("corrected", "FedAvg") == pytest.approx(0.04 - noise)
