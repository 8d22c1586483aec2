"""Every partition is an exact disjoint cover, ends, keeps its minimum and follows its law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairvar.common import rng
from fairvar.data import IID, Assignment, Dirichlet, Natural, Partition, Shards
from fairvar.data.partition import _repair, statistics_of
from fairvar.errors import BadInput

SEEDS = st.integers(0, 2**32)
ALPHAS = st.floats(0.01, 100)


@st.composite
def requests(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """(labels, clients, minimum) that can be met, with rare and missing labels."""
    clients = draw(st.integers(1, 12))
    minimum = draw(st.integers(1, 6))
    samples = clients * minimum + draw(st.integers(0, 60))
    classes = draw(st.integers(1, 6))
    labels = rng.stream(draw(SEEDS), "labels").geometric(0.4, samples) % classes
    return labels.astype(np.int64), clients, minimum


def assign(partition: Partition, labels: np.ndarray, clients: int, seed: int) -> Assignment:
    return partition.assign(labels, clients, rng.stream(seed, "partition"), None)


def assert_cover(assignment: Assignment, samples: int, clients: int, minimum: int) -> None:
    assert len(assignment.indices) == clients
    assert np.array_equal(np.sort(np.concatenate(assignment.indices)), np.arange(samples))
    assert assignment.sizes.min() >= minimum
    assert all((np.diff(rows) > 0).all() for rows in assignment.indices)


@settings(max_examples=300, deadline=None)
@given(requests(), ALPHAS, st.booleans(), st.integers(1, 30), SEEDS)
def test_dirichlet_covers_and_keeps_the_minimum(request_, alpha, balanced, attempts, seed):
    labels, clients, minimum = request_
    partition = Dirichlet(alpha, balanced=balanced, min_samples=minimum, attempts=attempts)
    found = assign(partition, labels, clients, seed)
    assert_cover(found, len(labels), clients, minimum)
    assert 1 <= found.attempts <= attempts
    assert 0 <= found.moved <= clients * minimum
    if found.moved:
        assert found.attempts == attempts


@settings(max_examples=100, deadline=None)
@given(requests(), SEEDS)
def test_iid_and_shards_cover(request_, seed):
    labels, clients, minimum = request_
    iid = assign(IID(min_samples=minimum), labels, clients, seed)
    assert_cover(iid, len(labels), clients, minimum)
    assert np.ptp(iid.sizes) <= 1
    shards = assign(Shards(per_client=minimum), labels, clients, seed)
    assert_cover(shards, len(labels), clients, minimum)
    assert np.ptp(shards.sizes) <= minimum


@settings(max_examples=40, deadline=None)
@given(requests(), st.sampled_from([Dirichlet(0.3, min_samples=1), IID(), Shards(1)]), SEEDS)
def test_the_seed_alone_decides(request_, partition, seed):
    labels, clients, _ = request_
    once, again = (assign(partition, labels, clients, seed) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(once.indices, again.indices, strict=True))
    assert statistics_of(labels, once) == statistics_of(labels, again)


@settings(max_examples=100, deadline=None)
@given(requests(), ALPHAS, SEEDS)
def test_refusing_either_meets_the_minimum_untouched_or_says_why(request_, alpha, seed):
    labels, clients, minimum = request_
    options = {"min_samples": minimum, "attempts": 3}
    repaired = assign(Dirichlet(alpha, **options), labels, clients, seed)
    refusing = Dirichlet(alpha, on_failure="refuse", **options)
    if repaired.moved:
        with pytest.raises(BadInput, match=r"in 3 attempts.*on_failure") as error:
            assign(refusing, labels, clients, seed)
        assert "\n" not in str(error.value)
    else:
        found = assign(refusing, labels, clients, seed)
        assert_cover(found, len(labels), clients, minimum)
        assert statistics_of(labels, found) == statistics_of(labels, repaired)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_label_shares_follow_the_dirichlet_law(alpha):
    """One label over 4 clients: mean 1/4, variance ¼·¾/(4 alpha + 1), both within 4 sigma.

    A single attempt, since choosing among draws changes the law; 4,000 samples, so that rounding
    and the repair of empty clients move a share by less than 1e-3.
    """
    clients, draws = 4, 1200
    partition = Dirichlet(alpha, min_samples=1, attempts=1)
    labels = np.zeros(4000, dtype=np.int64)
    sizes = np.stack([assign(partition, labels, clients, seed).sizes for seed in range(draws)])
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    for share in (sizes / len(labels)).T:
        deviation = (share - 1 / clients) ** 2
        assert abs(share.mean() - 1 / clients) < 4 * np.sqrt(expected / draws)
        assert abs(deviation.mean() - expected) < 4 * deviation.std() / np.sqrt(draws)


def test_labels_are_cut_independently():
    """Shares of two labels at one client do not correlate (within 4 sigma)."""
    labels = np.arange(2000) % 2
    found = [assign(Dirichlet(0.5, min_samples=1, attempts=1), labels, 5, s) for s in range(800)]
    odd = np.array([labels[f.indices[0]].sum() for f in found])
    even = np.array([len(f.indices[0]) for f in found]) - odd
    assert abs(np.corrcoef(odd, even)[0, 1]) < 4 / np.sqrt(len(found))


def test_chance_decides_which_samples_of_a_label_a_client_gets():
    labels = np.zeros(1000, dtype=np.int64)
    for partition in (Dirichlet(1.0), IID(), Shards()):
        first = assign(partition, labels, 4, 0).indices[0]
        spread = np.abs(first.mean() - 499.5) / (288.7 / np.sqrt(len(first)))
        assert spread < 4, partition  # a block of neighbours would lie far off the middle


def test_balanced_has_less_quantity_skew():
    labels = np.arange(2000) % 10
    spread = {
        balanced: np.mean([
            np.std(assign(Dirichlet(0.1, balanced, 1, 1), labels, 20, seed).sizes)
            for seed in range(20)
        ])
        for balanced in (False, True)
    }  # fmt: skip
    assert spread[True] < 0.8 * spread[False]


def test_a_full_client_gets_no_later_label_when_balanced():
    """Two clients, ten labels: once a client holds half of all, the rest goes to the other."""
    labels = np.repeat(np.arange(10), 20)
    for seed in range(30):
        found = assign(Dirichlet(0.1, True, 1, 1), labels, 2, seed)
        counts = np.stack([np.bincount(labels[rows], minlength=10) for rows in found.indices])
        before = np.cumsum(counts, axis=1) - counts
        assert (counts[before >= 100] == 0).all()


@pytest.mark.parametrize("alpha", [1e-300, 1e-8, 1e8])
@pytest.mark.parametrize("balanced", [False, True])
def test_extreme_alpha_gives_no_nan(alpha, balanced):
    labels = np.arange(300) % 3
    found = assign(Dirichlet(alpha, balanced, min_samples=5, attempts=5), labels, 10, 1)
    assert_cover(found, 300, 10, 5)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 100.0])
@pytest.mark.parametrize(
    ("classes", "balanced"), [(10, False), (10, True), (200, False), (200, True)]
)
def test_a_thousand_clients_with_the_largest_minimum(alpha, classes, balanced):
    """The minimum is the mean, so that every attempt fails and repair does all it can."""
    labels = np.arange(20_000) % classes
    found = assign(Dirichlet(alpha, balanced, min_samples=20), labels, 1000, 0)
    assert_cover(found, 20_000, 1000, 20)


def test_repair_takes_from_the_largest_and_keeps_the_label_skew():
    labels = np.arange(1000) % 10
    raw = assign(Dirichlet(0.05, min_samples=1, attempts=1), labels, 50, 3)
    fixed = assign(Dirichlet(0.05, min_samples=8, attempts=1), labels, 50, 3)
    need = np.maximum(8 - raw.sizes, 0).sum()
    assert abs(fixed.moved - need) <= raw.moved
    assert fixed.sizes.max() < raw.sizes.max()
    level = fixed.sizes.max()
    gave = fixed.sizes < raw.sizes
    assert (fixed.sizes[gave] >= level - 1).all()  # all givers end at one level
    one, two = statistics_of(labels, raw), statistics_of(labels, fixed)
    assert abs(one["majority_share"] - two["majority_share"]) < 0.1


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([[5, 1], [10, 0]], [[3, 3], [10, 0]]),  # the label it has already
        ([[5, 0], [10, 0]], [[5, 0], [7, 3]]),  # it has none: the giver's most frequent
        ([[1, 1], [10, 0]], [[0, 2], [9, 1]]),  # first its own, then the most frequent
    ],
)
def test_repair_by_hand(counts, expected):
    """Rows are labels, columns clients; client 1 is filled up to 3 by client 0."""
    found = np.array(counts)
    assert _repair(found, 3) == 3 - sum(row[1] for row in counts)
    assert found.tolist() == expected


def test_more_attempts_leave_less_to_repair():
    labels = np.arange(500) % 10
    moved = [
        [assign(Dirichlet(0.1, min_samples=8, attempts=n), labels, 50, seed).moved for n in (1, 20)]
        for seed in range(10)
    ]
    assert all(many <= one for one, many in moved)
    assert sum(many for _, many in moved) < 0.9 * sum(one for one, _ in moved)


class NoDraws(np.random.Generator):
    """A generator that must not be asked."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"drew {name} before refusing")


IMPOSSIBLE = [
    (Dirichlet(0.1), 100, 11, None, "at most 10 clients or min_samples at most 9"),
    (Dirichlet(0.1, min_samples=1), 3, 4, None, "at most 3 clients"),
    (Dirichlet(0.1), 5, 1, None, "min_samples at most 5"),
    (Dirichlet(0.1), 0, 1, None, "use more data"),
    (Dirichlet(0.1), 100, 0, None, "at least one client"),
    (IID(), 3, 4, None, "at most 3 clients"),
    (IID(min_samples=5), 19, 4, None, "at most 3 clients or min_samples at most 4"),
    (Shards(2), 19, 10, None, r"at most 9 clients or per_client \(shards\) at most 1"),
    (Natural(), 10, 2, None, "has none; use dirichlet"),
    (Natural(), 4, 3, np.array([0, 0, 1, 1]), "set clients to 2"),
]


@pytest.mark.parametrize(("partition", "samples", "clients", "groups", "way_out"), IMPOSSIBLE)
def test_the_impossible_is_refused_before_drawing(partition, samples, clients, groups, way_out):
    never = NoDraws(np.random.PCG64(0))
    with pytest.raises(BadInput, match=way_out) as error:
        partition.assign(np.zeros(samples, dtype=np.int64), clients, never, groups)
    assert "\n" not in str(error.value)


def test_natural_follows_the_groups():
    groups = np.array(["b", "a", "b", "c", "a"])
    found = Natural().assign(np.zeros(5, dtype=np.int64), 3, rng.stream(0, "x"), groups)
    assert [rows.tolist() for rows in found.indices] == [[1, 4], [0, 2], [3]]


def test_shards_give_few_classes():
    labels = np.arange(1000) % 10
    found = assign(Shards(2), labels, 50, 0)
    assert max(statistics_of(labels, found)["classes_by_client"]) <= 2


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0.0},
        {"alpha": float("nan")},
        {"alpha": float("inf")},
        {"alpha": 1.0, "min_samples": 0},
        {"alpha": 1.0, "attempts": 0},
        {"alpha": 1.0, "on_failure": "ignore"},
    ],
)
def test_bad_fields_are_refused_by_name(options):
    with pytest.raises(BadInput, match=rf"^Dirichlet\.{list(options)[-1]} = "):
        Dirichlet(**options)


def test_statistics_numbers_by_hand():
    """Client 0 has labels 0 0 1, client 1 has 1 1 1; pooled law (⅓, ⅔)."""
    labels = np.array([0, 0, 1, 1, 1, 1])
    facts = statistics_of(labels, Assignment([np.arange(3), np.arange(3, 6)], attempts=7, moved=2))
    assert facts["sizes"] == [3, 3]
    assert facts["classes_by_client"] == [2, 1]
    assert facts["mean_total_variation"] == pytest.approx(1 / 3)
    assert facts["effective_classes"] == pytest.approx((9 / 5 + 1) / 2)
    assert facts["majority_share"] == pytest.approx((2 / 3 + 1) / 2)
    assert (facts["attempts"], facts["moved"]) == (7, 2)


def test_statistics_checksum_sees_boundaries_and_order():
    labels = np.zeros(4, dtype=np.int64)
    cuts = [[[0, 1], [2, 3]], [[0], [1, 2, 3]], [[2, 3], [0, 1]], [[0, 1, 2, 3]]]
    sums = {
        statistics_of(labels, Assignment([np.array(rows) for rows in cut]))["sha256"]
        for cut in cuts
    }
    assert len(sums) == len(cuts)
