"""Paired comparison: signs, intervals that hold what they promise, who gains and who pays."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import config
from rich.console import Console

from fairvar.errors import BadInput
from fairvar.metrics import fairness
from fairvar.report import paired
from fairvar.report.compare import Side, compare_sides, paired_dict, paired_table
from fairvar.report.paired import Difference, Paired, _draw, compare

NUMBERS = ("accuracy", "variance", "corrected_variance", "worst_10_percent")


def table(seed: int, seeds: int = 4, clients: int = 20) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.2, 0.9, (seeds, clients))


def many(clients: int = 20) -> np.ndarray:
    return np.full(clients, 100)


def test_identical_sides_differ_by_exactly_nothing() -> None:
    found = compare(table(0), table(0), many())
    for name in NUMBERS:
        assert getattr(found, name) == Difference(0.0, 0.0, 0.0)
        assert not getattr(found, name).clear
    assert not found.by_client.any()
    assert (found.gaining, found.paying) == ([], [])


def test_a_constant_shift_is_certain() -> None:
    """Every client gains the same: the mean moves by it, the variance does not."""
    b = table(1)
    found = compare(b + 0.0625, b, many())
    np.testing.assert_allclose(found.accuracy, [0.0625] * 3, atol=1e-12)
    np.testing.assert_allclose(found.worst_10_percent, [0.0625] * 3, atol=1e-12)
    np.testing.assert_allclose(found.variance, [0, 0, 0], atol=1e-12)
    assert found.accuracy.clear
    assert sorted(found.gaining) == list(range(20))
    assert found.paying == []
    np.testing.assert_allclose(found.standard_error_by_client, 0, atol=1e-12)


def test_less_spread_is_a_clear_negative_variance_difference() -> None:
    b = np.tile(np.linspace(0.2, 0.8, 20), (4, 1))
    a = 0.5 + (b - 0.5) / 2
    found = compare(a, b, many())
    assert found.variance.value == pytest.approx(-0.75 * b[0].var(ddof=1))
    assert found.variance.clear
    assert found.variance.high < 0
    assert not found.accuracy.clear
    assert found.worst_10_percent.value > 0


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(2, 30))
def test_swapping_the_sides_swaps_the_signs(seed: int, seeds: int, clients: int) -> None:
    a, b = table(seed, seeds, clients), table(seed + 5000, seeds, clients)
    forth, back = (compare(*s, many(clients), resamples=50) for s in ((a, b), (b, a)))
    for name in NUMBERS:
        one, two = getattr(forth, name), getattr(back, name)
        np.testing.assert_allclose(one, (-two.value, -two.high, -two.low), atol=1e-12)
        assert one.low <= one.high
    np.testing.assert_array_equal(forth.by_client, -back.by_client)
    assert forth.gaining == back.paying
    assert np.isnan(forth.standard_error_by_client).all() == (seeds == 1)


def test_numbers_by_hand() -> None:
    """Eleven clients: the worst tenth is two of them."""
    a, b = table(2, 3, 11), table(3, 3, 11)
    n = np.arange(11) * 10 + 5
    found = compare(a, b, n)

    def numbers(p: np.ndarray) -> list[float]:
        mean, spread = p.mean(), np.mean([row.var(ddof=1) for row in p])
        noise = np.mean([(row * (1 - row) / (n - 1)).mean() for row in p])
        worst = np.mean([np.sort(row)[:2].mean() for row in p])
        return [mean, spread, spread - noise, worst]

    expected = np.subtract(numbers(a), numbers(b))
    np.testing.assert_allclose([getattr(found, k).value for k in NUMBERS], expected, rtol=1e-10)
    np.testing.assert_allclose(found.by_client, (a - b).mean(0), rtol=1e-12)
    error = (a - b).std(0, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(found.standard_error_by_client, error, rtol=1e-12)


def test_the_noise_floor_is_that_of_fairness() -> None:
    """Also where clients have a single test sample; over several rounds, too."""
    draw, n = np.random.default_rng(0), np.array([1, 1, 2, 3, 10, 40, 1, 7])
    a, b = (draw.binomial(n, 0.7, (3, len(n))) / n for _ in range(2))

    def corrected(p: np.ndarray) -> float:
        return float(np.mean([fairness(row, n, resamples=0).corrected_variance for row in p]))

    expected = corrected(a) - corrected(b)
    assert compare(a, b, n).corrected_variance.value == pytest.approx(expected, abs=1e-14)
    late = compare(a[None], b[None], n).corrected_variance
    assert late.value == pytest.approx(expected, abs=1e-14)
    np.testing.assert_allclose(late, compare(a, b, n).corrected_variance, atol=1e-14)


def test_single_samples_everywhere_leave_the_corrected_difference_undefined() -> None:
    a, b = table(0), table(1)
    found = compare(a, b, many() // 100)
    assert np.isnan(found.corrected_variance).all()
    assert not found.corrected_variance.clear
    assert np.isfinite(found.variance).all()


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(2, 12))
def test_differences_stay_in_their_range(seed: int, seeds: int, clients: int) -> None:
    """A difference of two numbers in [0, top] lies in [−top, top]."""
    draw, n = np.random.default_rng(seed), np.full(clients, 2)
    a, b = (draw.choice([0.0, 0.5, 1.0], (seeds, clients)) for _ in range(2))
    found = compare(a, b, n, resamples=60)
    most = (clients // 2) * ((clients + 1) // 2) / clients / (clients - 1)
    tops = {"accuracy": 1.0, "variance": most, "corrected_variance": most + 0.25,
            "worst_10_percent": 1.0}  # fmt: skip
    for name, top in tops.items():
        value, low, high = getattr(found, name)
        assert -top - 1e-12 <= min(low, value) <= max(high, value) <= top + 1e-12


@pytest.mark.parametrize("truth", [0.0, 0.02])
def test_intervals_contain_the_truth(truth: float) -> None:
    """100 pairs from one law, with clients that differ, seeds that differ, and noise."""
    held = {"accuracy": 0, "variance": 0}
    spread = 0.05
    for number in range(100):
        draw = np.random.default_rng((number, int(1000 * truth)))
        base = draw.normal(0.7, 0.1, 40)  # clients differ far more than methods do
        effect = draw.normal(truth, spread, 40)
        noise, shock = draw.normal(0, 0.02, (2, 8, 40)), draw.normal(0, 0.003, (2, 8, 1))
        a, b = base + effect + noise[0] + shock[0], base + noise[1] + shock[1]
        found = compare(a, b, many(40), resamples=400)
        held["accuracy"] += found.accuracy.low <= truth <= found.accuracy.high
        # Var(base + effect) − Var(base) = Var(effect): the noise is the same on both sides.
        held["variance"] += found.variance.low <= spread**2 <= found.variance.high
    assert min(held.values()) >= 90, held


def test_counted_draws_are_gathered_draws() -> None:
    """Resampled means are products with counts: the same as gathering what was drawn."""
    a, b, samples = table(3, 3), table(4, 3), np.arange(20) + 5
    a[1, 7] = np.nan
    left = np.delete(np.arange(20), 7)
    ((rows, columns),) = _draw(3, 19, 2000, 0)

    def gathered(p: np.ndarray) -> np.ndarray:
        noise = p * (1 - p) / (samples[left] - 1)
        drawn, noise = p[rows, columns], noise[rows, columns]
        variance = drawn.var(2, ddof=1)
        return np.stack([drawn.mean(2), variance, variance - noise.mean(2)]).mean(2)

    expected = np.percentile(gathered(a[:, left]) - gathered(b[:, left]), [2.5, 97.5], axis=1)
    for found in (compare(a, b, samples), compare(a[None], b[None], samples)):
        for name, interval in zip(NUMBERS[:3], expected.T, strict=True):
            np.testing.assert_allclose(getattr(found, name)[1:], interval, rtol=0, atol=1e-12)


def test_intervals_of_many_clients_need_no_table_of_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws in pieces: 20,000 clients asked for 745 GB."""
    a, b = table(5, 3, 2000), table(6, 3, 2000)
    for p, q in ((a, b), (a[None], b[None])):
        whole = compare(p, q, many(2000), resamples=101)
        with monkeypatch.context() as patch:
            patch.setattr(paired, "DRAWN_AT_ONCE", 7 * 2000)
            tracemalloc.start()
            found = compare(p, q, many(2000), resamples=101)
            assert tracemalloc.get_traced_memory()[1] < 8e6
            tracemalloc.stop()
        for name in NUMBERS[: 3 + (p.ndim == 2)]:
            np.testing.assert_allclose(getattr(found, name), getattr(whole, name), atol=1e-14)


def test_rounds_are_averaged_within_each_draw() -> None:
    a, b = (np.stack([table(s + k, 2) for k in range(5)]) for s in (10, 20))
    found = compare(a, b, many())
    each = [compare(x, y, many()) for x, y in zip(a, b, strict=True)]
    for name in NUMBERS[:3]:
        mean = np.mean([getattr(d, name).value for d in each])
        assert getattr(found, name).value == pytest.approx(mean, abs=1e-12)


def test_swings_of_single_rounds_cancel() -> None:
    """A gain of one point under swings of five: hidden in one round, clear over forty."""
    draw, b = np.random.default_rng(5), table(5, 3)
    swings = draw.normal(0, 0.05, (2, 40, 3, 20))
    a, b = b + 0.01 + swings[0], b + swings[1]
    assert not compare(a[0], b[0], many()).accuracy.clear
    assert compare(a, b, many()).accuracy.clear


def test_pairing_is_what_makes_a_small_effect_clear() -> None:
    draw = np.random.default_rng(0)
    base = draw.uniform(0.1, 0.9, 50)
    b = base + draw.normal(0, 0.005, (5, 50))
    a = base + 0.01 + draw.normal(0, 0.005, (5, 50))
    assert compare(a, b, many(50)).accuracy.clear
    other = draw.permuted(a, axis=1)  # the same numbers, but not the same clients
    assert not compare(other, b, many(50)).accuracy.clear


def test_who_gains_and_who_pays_in_order() -> None:
    b = np.full((2, 5), 0.5)
    a = b + np.array([0.1, -0.2, 0.0, 0.3, -0.05])
    found = compare(a, b, many(5))
    assert found.gaining == [3, 0]
    assert found.paying == [1, 4]
    np.testing.assert_allclose(found.by_client, [0.1, -0.2, 0, 0.3, -0.05], atol=1e-12)


def test_clients_measured_on_one_side_only_are_left_out() -> None:
    a, b, n = table(4), table(5), many()
    a[:, 3], b[1, 7], n[9] = np.nan, np.nan, 0
    found = compare(a, b, n)
    left = np.delete(np.arange(20), [3, 7, 9])
    alone = compare(a[:, left], b[:, left], n[left])
    assert found.accuracy == alone.accuracy
    assert np.flatnonzero(np.isnan(found.by_client)).tolist() == [3, 7, 9]
    assert not {3, 7, 9} & {*found.gaining, *found.paying}


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(BadInput, match="fewer than two clients"):
        compare(table(0, 3, 1), table(1, 3, 1), many(1))
    with pytest.raises(BadInput, match="fewer than two clients"):
        compare(np.full((2, 5), np.nan), table(0, 2, 5), many(5))
    config.update("jaxtyping_disable", True)  # it would refuse these shapes by itself
    with pytest.raises(BadInput, match="cannot pair"):
        compare(table(0, 2), table(0, 3), many())


def side(accuracy: np.ndarray, seeds: list[int], passport: str = "p") -> Side:
    return Side("s", "global", passport, accuracy, many(accuracy.shape[1]), seeds)


def test_sides_are_paired_by_seed_not_by_place() -> None:
    a = table(6, 3)
    left, right = side(a, [0, 1, 2]), side(a[[2, 0]], [2, 0])
    assert compare_sides(left, right).accuracy == Difference(0.0, 0.0, 0.0)
    with pytest.raises(BadInput, match="no common seed"):
        compare_sides(left, side(a, [3, 4, 5]))


def test_other_partitions_are_refused() -> None:
    """Client 3 of another partition is another client."""
    with pytest.raises(BadInput, match="different partitions"):
        compare_sides(side(table(6), [0, 1, 2, 3]), side(table(6), [0, 1, 2, 3], "q"))


def test_what_is_printed_and_written() -> None:
    b = np.full((2, 4), 0.5)
    a = b + np.array([0.125, -0.25, 0.0, np.nan])
    left, right = side(a, [0, 1]), side(b, [0, 1])
    found = compare_sides(left, right)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in paired_table(left, right, found):
        console.print(part)
    text = console.export_text()
    console.file.close()
    assert "1 clients gain, 1 pay, 1 are the same" in text
    assert "gain most (client: points)  0: +12.5" in text
    assert "pay most (client: points)  1: -25.0" in text
    assert "-4.167" in text
    written = paired_dict(left, right, found)
    assert written["by_client"] == [0.125, -0.25, 0.0, None]
    assert (written["gaining"], written["paying"]) == ([0], [1])
    low, high = written["accuracy"]["interval"]
    assert low <= written["accuracy"]["difference"] <= high


def test_the_same_draw_every_time() -> None:
    a, b = table(7), table(8)
    one, two = compare(a, b, many()), compare(a, b, many())
    assert [getattr(one, n) for n in NUMBERS] == [getattr(two, n) for n in NUMBERS]
    assert isinstance(one, Paired)
    assert dataclasses.is_dataclass(one)
    assert compare(a, b, many(), seed=1).accuracy.low != one.accuracy.low
