"""The paper's sentences: verdicts follow from the intervals, and from nothing else."""

from __future__ import annotations

from fairvar.report.claims import ALIKE, LESS, MORE, SENTENCES, _verdict
from fairvar.report.paired import Difference

UP, DOWN = Difference(1.0, 0.5, 1.5), Difference(-1.0, -1.5, -0.5)
NOISE = Difference(0.2, -0.5, 0.9)


def test_alike_holds_unless_a_difference_is_clear() -> None:
    assert _verdict(ALIKE, {"a": NOISE, "b": NOISE})[0].startswith("reproduced")
    told, pair = _verdict(ALIKE, {"a": NOISE, "b": DOWN})
    assert told == "not reproduced: clear for b"
    assert pair == "b"


def test_a_direction_must_be_clear_against_everyone() -> None:
    assert _verdict(LESS, {"a": DOWN, "b": DOWN})[0] == "reproduced"
    assert _verdict(MORE, {"a": UP})[0] == "reproduced"
    assert _verdict(LESS, {"a": DOWN, "b": NOISE}) == ("within noise", "b")
    assert _verdict(LESS, {"a": DOWN, "b": UP}) == ("not reproduced: the opposite is clear", "b")
    assert _verdict(MORE, {"a": DOWN})[0] == "not reproduced: the opposite is clear"


def test_every_variance_is_judged_raw_and_corrected() -> None:
    raw = {(s.text, s.left) for s in SENTENCES if s.metric == "variance"}
    corrected = {(s.text, s.left) for s in SENTENCES if s.metric == "corrected_variance"}
    assert raw == corrected
    assert raw
