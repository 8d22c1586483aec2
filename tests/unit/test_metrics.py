"""Metrics: definitions against slow versions, edge cases, unbiasedness and coverage (D8)."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairvar import metrics
from fairvar.errors import BadInput
from fairvar.metrics import fairness

accuracies = st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=40)


def simulated(stream, K, mean, sd, low=50, high=200):
    total = mean * (1 - mean) / sd**2 - 1
    true = stream.beta(mean * total, (1 - mean) * total, K)
    samples = stream.integers(low, high + 1, K)
    return stream.binomial(samples, true) / samples, samples


def test_by_hand():
    f = fairness([0.2, 0.4, 0.9], [10, 20, 30])
    assert f.clients == 3
    assert f.dropped_clients == 0
    assert f.mean == pytest.approx(0.5)
    assert f.mean_over_samples == pytest.approx((2 + 8 + 27) / 60)
    assert f.variance_over_clients == pytest.approx((0.09 + 0.01 + 0.16) / 2)
    assert f.noise_floor == pytest.approx((0.16 / 9 + 0.24 / 19 + 0.09 / 29) / 3)
    assert f.corrected_variance == pytest.approx(f.variance_over_clients - f.noise_floor)
    assert f.sd_over_clients == pytest.approx(math.sqrt(0.13))
    assert f.coefficient_of_variation == pytest.approx(math.sqrt(0.13) / 0.5)
    assert (f.smallest, f.largest) == (0.2, 0.9)
    assert f.range_over_clients == pytest.approx(0.7)
    assert f.gini == pytest.approx(2 * (0.2 + 0.7 + 0.5) / (2 * 9 * 0.5))
    assert f.jain == pytest.approx(1.5**2 / (3 * 1.01))
    assert f.cosine_to_ones == pytest.approx(1.5 / math.sqrt(3 * 1.01))
    shares = np.array([0.2, 0.4, 0.9]) / 1.5
    entropy = -(shares * np.log(shares)).sum()
    assert f.normalised_entropy == pytest.approx(entropy / math.log(3))
    assert f.kl_to_uniform == pytest.approx((shares * np.log(3 * shares)).sum())


def test_population_variance_scales_both_terms():
    p, n = [0.2, 0.4, 0.9, 0.5, 0.7, 0.1], [10, 20, 30, 5, 9, 12]
    one, zero = fairness(p, n), fairness(p, n, ddof=0)
    for name in ("variance_over_clients", "noise_floor", "corrected_variance"):
        assert zero[name] == pytest.approx(one[name] * 5 / 6)
    assert zero.variance_over_clients == pytest.approx(np.var(p))
    low, high = one.corrected_variance_interval
    assert zero.corrected_variance_interval == pytest.approx((low * 5 / 6, high * 5 / 6))


def test_it_is_also_a_mapping():
    f = fairness(torch.tensor([0.5, 0.75]), torch.tensor([4, 8]))
    assert f["mean"] == f.mean == 0.625
    assert dict(**f) == {name: f[name] for name in f.keys()}  # noqa: SIM118
    assert set(f.keys()) <= set(metrics.DEFINITIONS)
    with pytest.raises(KeyError):
        f["keys"]
    with pytest.raises(AttributeError):
        f.mean = 0.1


def test_clients_without_test_samples_are_dropped_not_zero():
    f = fairness([0.5, 0.0, 0.7, math.nan], [10, 0, 10, 10])
    assert (f.clients, f.dropped_clients, f.mean) == (2, 2, pytest.approx(0.6))
    assert fairness([0.5, math.nan]).mean == 0.5


def test_one_client():
    """One client has no variance over clients; its other numbers are defined."""
    f = fairness([0.8], [25])
    undefined = ("variance_over_clients", "corrected_variance", "sd_over_clients",
                 "coefficient_of_variation")  # fmt: skip
    assert [name for name in undefined if not math.isnan(f[name])] == []
    assert f.noise_floor == pytest.approx(0.8 * 0.2 / 24)
    population = fairness([0.8], [25], ddof=0)
    assert [population[name] for name in undefined] == [0, 0, 0, 0]
    assert f.gini == f.kl_to_uniform == f.range_over_clients == 0
    assert f.jain == f.normalised_entropy == f.cosine_to_ones == 1
    assert f.worst_10_percent == f.best_10_percent == 0.8
    assert all(map(math.isnan, f.variance_interval + f.corrected_variance_interval))


@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_equal_accuracies_are_exactly_even(level):
    f = fairness([level] * 7, [9] * 7)
    assert f.gini == f.kl_to_uniform == f.coefficient_of_variation == f.range_over_clients == 0
    assert f.jain == f.normalised_entropy == f.cosine_to_ones == 1
    assert f.variance_interval == pytest.approx((0, 0), abs=1e-30)
    low, high = f.corrected_variance_interval
    assert low == high == f.corrected_variance <= 0


def test_single_samples_borrow_the_mean_spread_of_the_others():
    f = fairness([1.0, 0.0, 0.5, 0.8], [1, 1, 4, 10])
    spread = (4 / 3 * 0.25 + 10 / 9 * 0.16) / 2
    expected = (2 * spread + 0.25 / 3 + 0.16 / 9) / 4
    assert f.noise_floor == pytest.approx(expected)
    only = fairness([1.0, 0.0, 1.0], [1, 1, 1])
    assert math.isnan(only.noise_floor)
    assert math.isnan(only.corrected_variance)
    assert only.variance_over_clients == pytest.approx(1 / 3)


def test_without_sample_counts():
    f = fairness([0.1, 0.5, 0.6, 0.7, 0.9])
    assert math.isnan(f.mean_over_samples)
    assert math.isnan(f.corrected_variance)
    assert f.variance_interval[0] < f.variance_over_clients < f.variance_interval[1]


@pytest.mark.parametrize(
    ("accuracy", "samples", "words"),
    [
        ([0.5, 87.0], None, "client 1 = 87.0"),
        ([-0.1], None, r"\[0, 1\]"),
        ([0.5, 0.6], [1], "1 entries, not 2"),
        ([0.5], [-1], "client 0"),
        ([0.5], [1.5], "client 0"),
        ([0.5], [0], "no client"),
        ([], None, "one number per client"),
        ([[0.5, 0.6]], None, "one number per client"),
        (["a"], None, "array of numbers"),
    ],
)
def test_bad_input(accuracy, samples, words):
    with pytest.raises(BadInput, match=words):
        fairness(accuracy, samples)


@pytest.mark.parametrize("option", [{"ddof": 2}, {"interval": 1.0}, {"resamples": -1}])
def test_bad_options(option):
    with pytest.raises(BadInput, match=next(iter(option))):
        fairness([0.5, 0.6], **option)


@pytest.mark.parametrize("K", range(1, 31))
def test_ten_percent(K):
    p = np.random.default_rng(K).permutation(np.arange(K) / 40)
    share = -(-K // 10)
    f = fairness(p)
    assert f.worst_10_percent == pytest.approx(sum(range(share)) / share / 40)
    assert f.best_10_percent == pytest.approx(sum(range(K - share, K)) / share / 40)


@settings(max_examples=100, deadline=None)
@given(accuracies)
def test_bounds_of_the_indices(p):
    f, K = fairness(p, resamples=0), len(p)
    assert 0 <= f.gini <= 1 - 1 / K + 1e-12
    assert 1 / K - 1e-12 <= f.jain <= 1
    assert f.jain == pytest.approx(f.cosine_to_ones**2)
    assert 0 <= f.normalised_entropy <= 1
    assert 0 <= f.kl_to_uniform <= math.log(K) + 1e-12
    top = f.mean * (1 - f.mean) * K / max(1, K - 1)  # Bhatia–Davis
    assert math.isnan(f.variance_over_clients) == (K == 1)
    assert K == 1 or f.variance_over_clients <= top + 1e-12
    assert f.smallest - 1e-12 <= f.worst_10_percent <= f.mean + 1e-12
    assert f.mean <= f.best_10_percent + 1e-12 <= f.largest + 2e-12


@settings(max_examples=50, deadline=None)
@given(accuracies, st.randoms(use_true_random=False))
def test_order_of_clients_does_not_matter(p, random):
    other = list(p)
    random.shuffle(other)
    a, b = fairness(p, resamples=0), fairness(other, resamples=0)
    for name in a.keys():  # noqa: SIM118
        assert a[name] == pytest.approx(b[name], nan_ok=True)


@pytest.mark.parametrize("K", [2, 5, 30])
def test_all_to_one_client_is_the_other_extreme(K):
    f = fairness([0.9] + [0.0] * (K - 1))
    assert f.gini == pytest.approx(1 - 1 / K)
    assert f.jain == pytest.approx(1 / K)
    assert f.normalised_entropy == pytest.approx(0, abs=1e-15)
    assert f.kl_to_uniform == pytest.approx(math.log(K))


def test_gini_is_the_mean_difference():
    p = np.random.default_rng(0).random(17)
    slow = np.abs(p[:, None] - p).sum() / (2 * 17**2 * p.mean())
    assert fairness(p).gini == pytest.approx(slow)


@pytest.mark.parametrize(("ddof", "low", "high"), [(1, 5, 40), (0, 5, 40), (1, 1, 6)])
def test_corrected_variance_is_unbiased(ddof, low, high):
    """2000 federations; with n = 1 among the clients too, where p does not depend on n."""
    stream, K, sd = np.random.default_rng(ddof + low), 20, 0.1
    found, raw = np.empty(2000), np.empty(2000)
    for i in range(2000):
        f = fairness(*simulated(stream, K, 0.7, sd, low, high), ddof=ddof, resamples=0)
        found[i], raw[i] = f.corrected_variance, f.variance_over_clients
    truth = sd**2 * (1 if ddof else 1 - 1 / K)
    error = found.std() / math.sqrt(2000)
    assert abs(found.mean() - truth) < 4 * error
    assert raw.mean() - truth > 20 * error  # the uncorrected one is far off


@pytest.mark.parametrize(("K", "mean", "sd"), [(50, 0.7, 0.1), (100, 0.8, 0.15), (100, 0.9, 0.05)])
def test_coverage_of_the_interval(K, mean, sd):
    stream, federations = np.random.default_rng(K), 600
    hits = 0
    for seed in range(federations):
        accuracy, samples = simulated(stream, K, mean, sd)
        low, high = fairness(accuracy, samples, resamples=400,
                             seed=seed).corrected_variance_interval  # fmt: skip
        hits += low <= sd**2 <= high
    allowance = 3 * math.sqrt(0.95 * 0.05 / federations)
    assert 0.93 - allowance < hits / federations < 0.97 + allowance


def test_intervals_are_repeatable_and_nested():
    accuracy, samples = simulated(np.random.default_rng(0), 100, 0.7, 0.1)
    f = fairness(accuracy, samples)
    assert f == fairness(accuracy, samples)
    assert f != fairness(accuracy, samples, seed=1)
    for name in ("variance_interval", "corrected_variance_interval"):
        wide, narrow = f[name], fairness(accuracy, samples, interval=0.5)[name]
        assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert f.variance_interval[0] > 0


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("n", [2, 3, 15])
@pytest.mark.parametrize(
    "p",
    [
        [1, 1, 1, 1, 1, 0.8, 1, 1],  # (0, 6.25) before intervals were cut
        [0, 0, 0, 0, 0.2, 0],
        [0, 1] * 4,
        [0, 1, 0, 1, 0],
        [0, 0, 0, 0, 1],
        [0.5] * 4 + [0.5 + 1e-9],
        [1e-9] + [0] * 9,
    ],
)
def test_intervals_end_where_the_number_must_end(p, n, ddof):
    f = fairness(p, [n] * len(p), ddof=ddof)
    most = np.var(([0.0, 1.0] * len(p))[: len(p)], ddof=ddof)
    floor = 0.25 / (n - 1) * (1 if ddof else 1 - 1 / len(p))
    low, high = f.variance_interval
    assert 0 <= low <= f.variance_over_clients <= high <= most + 1e-15
    low, high = f.corrected_variance_interval
    assert -floor - 1e-15 <= low <= f.corrected_variance <= high <= most + 1e-15


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 4)), min_size=1,
                max_size=12), st.integers(0, 1))  # fmt: skip
def test_intervals_of_extreme_clients_stay_in_range(clients, ddof):
    p, n = zip(*clients, strict=True)
    f, K = fairness(p, n, ddof=ddof, resamples=200), len(p)
    for name, least in (("variance_interval", 0.0), ("corrected_variance_interval", -0.5)):
        low, high = f[name]
        if math.isnan(low):
            assert K < 5 or max(n) == 1
        else:
            assert least <= low <= high <= K / (K - ddof) / 4 + 1e-15


def test_variance_units():
    assert metrics.variance_in_units(0.01, "fraction") == 0.01
    assert metrics.variance_in_units(0.01, "x100") == 1
    assert metrics.variance_in_units(0.01, "percent") == 100
    with pytest.raises(BadInput, match="percent"):
        metrics.variance_in_units(0.01, "percents")


def test_variances_of_losses_and_gradients():
    assert metrics.loss_variance([1.0, 3.0]) == 1
    g = torch.tensor([[1.0, 0.0], [0.0, 2.0], [2.0, 1.0]])
    slow = sum(float((row - g.mean(0)).square().sum()) for row in g) / 3
    assert metrics.gradient_variance(g) == pytest.approx(slow)
    tree = {"weight": g[:, :1].reshape(3, 1, 1), "bias": g[:, 1]}
    assert metrics.gradient_variance(tree) == pytest.approx(slow)
    with pytest.raises(BadInput):
        metrics.gradient_variance({"a": g, "b": g[:2]})


def test_epsilon_fair_order():
    p = [[0.9, 0.1], [0.5, 0.6], [0.5, 0.5], [0.4, 0.8]]
    found = metrics.epsilon_fair_order(p, [1.0, 1.05, 2.0, 1.1], 0.1 + 1e-12)
    assert found.feasible.tolist() == [True, True, False, True]
    assert found.order.tolist() == [1, 3, 0]
    assert found.variance_over_clients[0] == pytest.approx(0.32)
    assert metrics.epsilon_fair_order(p, [1.0, 1.05, 2.0, 1.1], 0).order.tolist() == [0]
    assert metrics.epsilon_fair_order([[0.5], [0.7]], [1, 1], 0).order.tolist() == [0, 1]
    for bad in ((p, [1.0], 0), (p, [1, 1, 1, math.nan], 0), (p, [1, 1, 1, 1], -1)):
        with pytest.raises(BadInput):
            metrics.epsilon_fair_order(*bad)


def test_worse_than():
    assert metrics.worse_than([0.1, 0.5, 0.7, math.nan], [0.2, 0.5, 0.6, 0.1]) == pytest.approx(
        1 / 3
    )
    with pytest.raises(BadInput):
        metrics.worse_than([math.nan], [0.5])


def test_pareto_front_and_hypervolume():
    a, v = [0.5, 0.7, 0.6, 0.7, 0.9, 0.5], [0.1, 0.2, 0.3, 0.2, 0.5, 0.15]
    assert metrics.pareto_front(a, v).tolist() in ([0, 1, 3, 4], [0, 3, 1, 4])
    assert metrics.pareto_front([0.5, math.nan], [0.1, 0.0]).tolist() == [0]
    expected = 0.5 * 0.9 + 0.2 * 0.8 + 0.2 * 0.5
    assert metrics.hypervolume(a, v, (0.0, 1.0)) == pytest.approx(expected)
    assert metrics.hypervolume(a, v, (0.95, 1.0)) == 0
    assert metrics.hypervolume(a, v, (0.6, 0.3)) == pytest.approx(0.1 * 0.1)
    with pytest.raises(BadInput):
        metrics.hypervolume(a, v, (0.1,))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_front_and_area_against_brute_force(points):
    a, v = np.array(points, dtype=float).T
    beaten = [any((a[j] >= a[i] and v[j] <= v[i]) and (a[j] > a[i] or v[j] < v[i])
                  for j in range(len(a))) for i in range(len(a))]  # fmt: skip
    assert sorted(metrics.pareto_front(a, v)) == [i for i, b in enumerate(beaten) if not b]
    cells = sum(any(a[i] >= x + 1 and v[i] <= y for i in range(len(a)))
                for x in range(6) for y in range(7))  # fmt: skip
    assert metrics.hypervolume(a, v, (0, 7)) == cells


def test_worst_class_of_client():
    correct = [1, 0, 1, 1, 1, 0, 0]
    labels = [0, 0, 1, 2, 2, 0, 1]
    client = [0, 0, 0, 2, 2, 3, 3]
    found = metrics.worst_class_of_client(correct, labels, client)
    np.testing.assert_array_equal(found, [0.5, math.nan, 1.0, 0.0])
    with pytest.raises(BadInput):
        metrics.worst_class_of_client([1], [0], [-1])


def test_intervals_of_many_clients_need_no_table_of_draws():
    """The draws of all resamples would take 16 GB for a million clients."""
    K, resamples = 200_000, 200
    p = np.random.default_rng(0).uniform(size=K)
    tracemalloc.start()
    found = fairness(p, np.full(K, 50), resamples=resamples)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.corrected_variance_interval[0] < found.corrected_variance
    assert peak < 8 * K * resamples
