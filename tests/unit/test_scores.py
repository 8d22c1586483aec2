"""Scores of one client by name, against scikit-learn and by hand; fairness of any score; what a
`Metric` refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics as sk
import torch

import fairvar as fv
from fairvar import scores
from fairvar.metrics import RATIOS, fairness, worse_than
from fairvar.runs.stored import score_rows
from fairvar.scores import METRICS, metric_of

DRAW = np.random.default_rng(0)
CASES = [(samples, classes) for samples in (2, 7, 60) for classes in (2, 3, 5)]
MANUAL = Path(__file__).parents[2] / "docs" / "metrics.md"


def labelled(samples: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Some outputs are equal, so that ties happen."""
    outputs = DRAW.integers(-3, 4, (samples, classes)).astype(float)
    return outputs, DRAW.integers(0, classes, samples)


def one_against_rest(z: np.ndarray, y: np.ndarray) -> float:
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    known = np.unique(y)
    if len(known) < 2:
        return math.nan
    return float(np.mean([sk.roc_auc_score(y == c, p[:, c].round(12)) for c in known]))


OF_LABELS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": lambda z, y: sk.accuracy_score(y, z.argmax(1)),
    "balanced_accuracy": lambda z, y: sk.recall_score(
        y, z.argmax(1), labels=np.unique(y), average="macro", zero_division=0
    ),
    "f1": lambda z, y: sk.f1_score(y, z.argmax(1), average="macro", zero_division=0),
    "auc": one_against_rest,
}


@pytest.mark.parametrize("name", OF_LABELS)
def test_labels_as_scikit_learn_has_them(name: str) -> None:
    for samples, classes in CASES:
        for _ in range(5):
            z, y = labelled(samples, classes)
            expected = OF_LABELS[name](z, y)
            found = METRICS[name](torch.from_numpy(z), torch.from_numpy(y))
            np.testing.assert_allclose(found, expected, rtol=1e-12, equal_nan=True)


def test_the_area_of_several_classes_is_scikit_learns_macro_average() -> None:
    z, y = DRAW.normal(size=(200, 4)), DRAW.permutation(np.arange(200) % 4)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    expected = sk.roc_auc_score(y, p, multi_class="ovr", average="macro")
    assert METRICS["auc"](z, y) == pytest.approx(expected, rel=1e-12)
    two = sk.roc_auc_score(y[y < 2], (z[:, 1] - z[:, 0])[y < 2])
    assert METRICS["auc"](z[y < 2][:, :2], y[y < 2]) == pytest.approx(two, rel=1e-12)


@pytest.mark.parametrize("outputs", [1, 3])
def test_numbers_as_scikit_learn_has_them(outputs: int) -> None:
    for samples in (2, 5, 50):
        z, y = DRAW.normal(size=(2, samples, outputs))
        wanted = {"rmse": sk.root_mean_squared_error(y, z), "r2": sk.r2_score(y, z)}
        shaped = y[:, 0] if outputs == 1 else y  # (b, 1) against (b,), as a linear model gives it
        for name, expected in wanted.items():
            assert METRICS[name](z, shaped) == pytest.approx(expected, rel=1e-12)


def test_scores_by_hand() -> None:
    z = np.array([[2.0, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 3]])  # predicts 0, 1, 1, 2
    y = np.array([0, 0, 1, 1])
    assert METRICS["accuracy"](z, y) == 0.5
    assert METRICS["balanced_accuracy"](z, y) == 0.5
    # class 0: TP 1, FN 1; class 1: TP 1, FP 1, FN 1; class 2, only predicted: 0
    assert METRICS["f1"](z, y) == pytest.approx((2 / 3 + 2 / 4 + 0) / 3)
    assert METRICS["balanced_accuracy"](z[[0, 1, 2]], y[[0, 1, 2]]) == 0.75
    assert METRICS["auc"]([[0, 1.0], [0, 2.0], [0, 3.0]], [0, 1, 0]) == 0.5
    assert METRICS["auc"]([[0, 1.0], [0, 1.0]], [0, 1]) == 0.5  # a tie counts half
    assert METRICS["rmse"]([1.0, 3.0], [1.0, 1.0]) == pytest.approx(math.sqrt(2))
    assert METRICS["r2"]([1.0, 2.0], [1.0, 3.0]) == pytest.approx(0.5)
    assert METRICS["r2"]([5.0, 5.0], [1.0, 3.0]) == pytest.approx(-9.0)


def test_what_is_not_defined_is_nan_and_never_zero() -> None:
    assert math.isnan(METRICS["auc"]([[0.0, 1.0], [1.0, 0.0]], [1, 1]))
    assert math.isnan(METRICS["r2"]([0.0, 1.0], [2.0, 2.0]))
    assert math.isnan(METRICS["r2"]([0.0], [2.0]))
    assert METRICS["balanced_accuracy"]([[0.0, 1.0]], [1]) == 1.0


def test_numbers_that_do_not_fit_each_other_have_no_score() -> None:
    assert math.isnan(METRICS["auc"]([[math.inf, 1.0], [0.0, 1.0]], [0, 1]))
    assert METRICS["auc"]([[-math.inf, 1.0], [0.0, -1.0]], [1, 0]) == 1.0
    with pytest.raises(fv.BadInput, match="give equally many"):
        METRICS["rmse"](np.ones((2, 3)), np.ones((3, 2)))


def test_labels_of_sequences_and_positions_without_one() -> None:
    z, y = DRAW.normal(size=(4, 6, 3)), DRAW.integers(0, 3, (4, 6))
    for name in OF_LABELS:
        flat = METRICS[name](z.reshape(-1, 3), y.ravel())
        assert METRICS[name](z, y) == flat
        masked = np.where(np.arange(6) < 4, y, -100)
        assert METRICS[name](z, masked) == METRICS[name](z[:, :4], y[:, :4])


@pytest.mark.parametrize("name", METRICS)
def test_directions_and_bounds(name: str) -> None:
    lower, fractions = {"rmse", "loss", "perplexity"}, {*OF_LABELS}
    assert METRICS[name].higher_is_better == (name not in lower)
    assert METRICS[name].bounds == ((0, 1) if name in fractions else None)
    assert METRICS[name].has_noise_floor == (name == "accuracy")


# -- wrong variants, which the tests above find ----------------------------------------------------
def broken_area(value: np.ndarray, positive: np.ndarray) -> float:
    """Ties count as right."""
    pairs = value[positive][:, None] >= value[~positive][None]
    return float(pairs.mean())


def test_broken_variants_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(scores, "_area", broken_area)
        with pytest.raises(AssertionError):
            test_labels_as_scikit_learn_has_them("auc")
    over_all = fv.Metric(lambda z, y: scores.accuracy(z, y), name="all", higher_is_better=True)
    with monkeypatch.context() as patch:
        patch.setitem(METRICS, "balanced_accuracy", over_all)
        with pytest.raises(AssertionError):
            test_labels_as_scikit_learn_has_them("balanced_accuracy")
    with monkeypatch.context() as patch:  # AUC of one class as 0
        zero = fv.Metric(lambda z, y: np.nan_to_num(scores.auc(z, y)), name="zero",
                         higher_is_better=True)  # fmt: skip
        patch.setitem(METRICS, "auc", zero)
        with pytest.raises(AssertionError):
            test_what_is_not_defined_is_nan_and_never_zero()


# -- fairness of any score -------------------------------------------------------------------------
ERRORS = [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 20, 30]


def test_the_worst_are_the_highest_where_lower_is_better() -> None:
    found = fairness(ERRORS, [5] * 11, metric="rmse")
    assert found.worst_10_percent == 25.0
    assert found.best_10_percent == 1.5
    assert (found.smallest, found.largest, found.range_over_clients) == (1.0, 30.0, 29.0)
    assert fairness([-e for e in ERRORS], metric="r2").worst_10_percent == -25.0
    assert found.mean == pytest.approx(np.mean(ERRORS))
    assert found.variance_over_clients == pytest.approx(np.var(ERRORS, ddof=1))


def test_numbers_that_a_score_does_not_have_are_nan() -> None:
    found = fairness(ERRORS, [5] * 11, metric="rmse")
    for name in ("noise_floor", "corrected_variance", *RATIOS):
        assert math.isnan(found[name]), name
    assert np.isnan(found.corrected_variance_interval).all()
    auc = fairness([0.5, 0.6, 0.7], [9] * 3, metric="auc")
    assert math.isnan(auc.noise_floor)
    assert auc.gini == fairness([0.5, 0.6, 0.7], [9] * 3).gini  # bounded and not negative


def test_intervals_end_only_where_the_score_ends() -> None:
    low, high = fairness(ERRORS, metric="rmse").variance_interval
    assert low >= 0
    assert high > np.var(ERRORS, ddof=1)
    few = [1.0, 1, 1, 1, 1, 0.8, 1, 1]
    assert fairness(few, metric="auc").variance_interval[1] == pytest.approx(16 / 56)
    assert fairness(few, metric="r2").variance_interval[1] > 16 / 56
    wide = fv.Metric(lambda z, y: 0, name="wide", higher_is_better=True, bounds=(-1, 1))
    assert fairness(few, metric=wide).variance_interval[1] == pytest.approx(4 * 16 / 56)


def test_clients_without_a_score_are_left_out_and_infinite_ones_are_not() -> None:
    found = fairness([1.0, math.nan, 3.0], [4, 4, 4], metric="loss")
    assert (found.mean, found.clients, found.dropped_clients) == (2.0, 2, 1)
    assert fairness([1.0, 2.0, math.inf], metric="perplexity").mean == math.inf
    with pytest.raises(fv.BadInput, match="no client has test samples and a finite AUC"):
        fairness([math.nan] * 3, metric="auc")
    with pytest.raises(fv.BadInput, match=r"AUC of client 1 = 1.5: give fractions in \[0, 1\]"):
        fairness([1.0, 1.5], metric="auc")


def test_accuracies_are_as_before() -> None:
    p, n = DRAW.uniform(size=30), DRAW.integers(1, 40, 30)
    assert dict(**fairness(p, n)) == dict(**fairness(p, n, metric="accuracy"))


def test_who_is_worse_off_follows_the_direction() -> None:
    assert worse_than([1, 2, 3], [2, 2, 1]) == pytest.approx(1 / 3)
    assert worse_than([1, 2, 3], [2, 2, 1], metric="rmse") == pytest.approx(1 / 3)
    assert worse_than([1, 1, 3], [2, 2, 1], metric="rmse") == pytest.approx(1 / 3)
    assert worse_than([1, 1, 3], [2, 2, 1]) == pytest.approx(2 / 3)


# -- what a Metric refuses -------------------------------------------------------------------------
def half(outputs: object, targets: object) -> float:
    return 0.5


def test_bad_metrics_are_refused_in_one_line() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: metric_of("acuracy"), "did you mean 'accuracy'"),
        (lambda: metric_of(lambda outputs, targets: 0.5), "give name="),
        (lambda: metric_of(3), "unknown metric 3"),
        (lambda: metric_of("no.such.module:auc"), "cannot be imported"),
        (lambda: metric_of("fairvar.scores:rmse"), "is taken"),  # as if higher were better
        (lambda: metric_of(fv.Metric(half, name="auc", higher_is_better=True)), "is taken"),
        (lambda: metric_of(fv.Metric(half, name="variance", higher_is_better=True)), "is taken"),
        (lambda: fv.Metric(3, name="x", higher_is_better=True), "give a function"),  # type: ignore[arg-type]
        (lambda: fv.Metric(half, name="a b", higher_is_better=True), "letters, digits"),
        (lambda: fv.Metric(half, higher_is_better=1), "True or False"),  # type: ignore[arg-type]
        (lambda: fv.Metric(half, higher_is_better=True, bounds=(1, 0)), "smallest, largest"),
        (lambda: fv.Metric(half, higher_is_better=True, bounds=(0, 0.4))([0], [0]), "bounds"),
        (lambda: fv.Metric(lambda z, y: z, name="x", higher_is_better=True)([1, 2], [1]),
         "must give one number"),
        (lambda: METRICS["loss"]([1], [1]), "follows from the loss"),
    ]  # fmt: skip
    for act, words in cases:
        with pytest.raises(fv.BadInput, match=re.escape(words)) as caught:
            act()
        assert "\n" not in str(caught.value)


def test_a_metric_that_changes_its_arguments_changes_neither_data_nor_accuracies() -> None:
    def careless(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        outputs.zero_()
        targets.zero_()
        return 0.0

    pair = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2
    data = fv.Federation.from_arrays([pair] * 2, test=[pair] * 2)
    runs = [
        fv.train("multinomial", data, fv.FedAvg(), 2, 0.1, metric=metric, engine=engine)
        for metric in ("accuracy", careless)
        for engine in ("reference", "linear", "vmapped")
    ]
    assert data.test is not None
    assert data.test.y.tolist() == [0, 1, 0, 1, 0, 1] * 2
    for key in (("test", "global"), ("test", "local")):
        for plain, own in zip(runs[:3], runs[3:], strict=True):
            assert torch.equal(plain.accuracy[key], own.accuracy[key])


def test_a_metric_is_named_after_its_function_and_found_by_its_place() -> None:
    assert fv.Metric(half, higher_is_better=True).name == "half"
    assert metric_of("fairvar.scores:ACCURACY") == METRICS["accuracy"]


def test_of_a_plain_function_higher_scores_are_better() -> None:
    assert metric_of(half) == fv.Metric(half, name="half", higher_is_better=True, bounds=None)


# -- the manual ------------------------------------------------------------------------------------
def test_the_manual_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = MANUAL.read_text(encoding="utf-8")
    part = text[text.index("\n## Other scores") :].split("\n## ")[1]
    blocks = re.findall(r"```(python|text)\n(.*?)```", part, re.S)
    scope: dict[str, object] = {}
    assert len(blocks) == 6
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, "docs/metrics.md", "exec"), scope)
        else:
            assert capsys.readouterr().out == block


def test_the_main_numbers_of_a_run_are_in_the_units_of_its_metric() -> None:
    scores = {"mean": 0.5, "variance_over_clients": 0.04, "noise_floor": 0.01,
              "corrected_variance": 0.03, "worst_10_percent": float("nan")}  # fmt: skip
    found = {"result": {"test/global": scores}}
    heads, ((_, *accuracies),) = score_rows(found)
    assert heads[:2] == ["accuracy %", "variance"]
    assert accuracies == ["50.00", "4.000", "1.000", "3.000", "undef."]
    heads, ((_, *errors),) = score_rows({"metric": {"name": "rmse"}, **found})
    assert heads[0] == "RMSE"
    assert errors == ["0.5", "0.04", "–", "–", "undef."]
