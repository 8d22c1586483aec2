"""Data sets, splits, pools and synthetic federations."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import gradient_variance_minimiser
from fairvar.common import rng
from fairvar.data import (
    DATASETS,
    IID,
    Dataset,
    Dirichlet,
    Natural,
    Shards,
    build_federation,
    builtin,
    load_federation,
    logistic,
    quadratics,
    random_quadratics,
)
from fairvar.data.federation import Federation
from fairvar.data.own_data import held_out_counts
from fairvar.errors import BadInput, IntegrityError

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "src" / "fairvar" / "data" / "embedded"


@pytest.fixture(scope="module")
def mnist() -> Dataset:
    return builtin.mnist_1000()


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return builtin.digits()


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """tools/make_embedded.py, which is no package."""
    spec = importlib.util.spec_from_file_location("make_embedded", ROOT / "tools/make_embedded.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbered(samples: int, classes: int = 3, pool: int = 0) -> Dataset:
    """x holds the sample's own number, so that every sample can be traced; pool: from 10,000 on."""
    x = np.arange(samples, dtype=np.float32)[:, None]
    pool_x = np.arange(10_000, 10_000 + pool, dtype=np.float32)[:, None]
    pool_y = np.arange(pool) % classes
    extra = {"pool_x": pool_x, "pool_y": pool_y} if pool else {}
    return Dataset("numbered", x, np.arange(samples) % classes, classes, **extra)


def rows_of(federation: Federation, part: str, client: int) -> list[int]:
    return federation.splits[part].of(client)[0][:, 0].int().tolist()


# --- embedded data ---------------------------------------------------------------------------


def test_mnist_1000_is_stratified_and_normalised(mnist):
    assert mnist.x.shape == (1000, 1, 28, 28)
    assert mnist.pool_x.shape == (4000, 1, 28, 28)
    assert np.bincount(mnist.y).tolist() == [100] * 10
    assert np.bincount(mnist.pool_y).tolist() == [400] * 10
    assert mnist.x.min() == pytest.approx(-0.1307 / 0.3015, rel=1e-6)
    assert mnist.x.max() == pytest.approx((1 - 0.1307) / 0.3015, rel=1e-6)
    assert abs(mnist.x.mean()) < 0.05  # a random subset of data with mean 0
    assert abs(mnist.x.std() - 1) < 0.05


def test_digits_are_scikit_learns(digits):
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    assert np.array_equal(digits.x[:, 0] * 16, load_digits().images)
    assert np.array_equal(digits.y, load_digits().target)


@pytest.mark.parametrize("name", ["mnist_1000", "digits"])
def test_a_nearest_mean_rule_reads_the_digits(name):
    """The labels belong to the images: class means of one half recognise the other."""
    data = getattr(builtin, name)()
    x = data.x.reshape(len(data.x), -1)
    means = np.stack([x[::2][data.y[::2] == k].mean(0) for k in range(10)])
    answer = ((x[1::2, None] - means) ** 2).sum(2).argmin(1)
    assert (answer == data.y[1::2]).mean() > 0.7


def test_a_damaged_file_is_named(tmp_path, monkeypatch):
    copy = tmp_path / "embedded"
    shutil.copytree(EMBEDDED, copy)
    monkeypatch.setattr(builtin.resources, "files", lambda package: tmp_path)
    assert len(builtin.digits().y) == 1797
    content = bytearray((copy / "digits.npz").read_bytes())
    content[100] ^= 1
    (copy / "digits.npz").write_bytes(bytes(content))
    with pytest.raises(IntegrityError, match=r"^digits\.npz is damaged"):
        builtin.digits()
    (copy / "digits.npz").unlink()
    with pytest.raises(IntegrityError, match=r"^digits\.npz is missing"):
        builtin.digits()


def test_the_readme_tells_the_checksums():
    text = (EMBEDDED / "README.md").read_text(encoding="utf-8")
    for file, digest in builtin.SHA256.items():
        assert f"`{file}` | `{digest}`" in text


def assert_same_file(content: bytes, file: str) -> None:
    if "ng" in zlib.ZLIB_RUNTIME_VERSION:
        pytest.skip("zlib-ng compresses the same arrays to other bytes")
    assert hashlib.sha256(content).hexdigest() == builtin.SHA256[file]


def test_mnist_1000_is_rebuilt_byte_for_byte(maker):
    if not maker.MNIST.is_dir():
        pytest.skip("the original MNIST files are not in ../shared/data")
    assert_same_file(maker.mnist_1000(maker.MNIST), "mnist_1000.npz")


def test_digits_are_rebuilt_byte_for_byte(maker):
    pytest.importorskip("sklearn.datasets")
    assert_same_file(maker.digits(), "digits.npz")


# --- splits ----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.floats(0, 0.99), st.floats(0, 1))
def test_held_out_counts(samples, held_out, balance):
    shares = (held_out * balance, held_out * (1 - balance))
    counts = held_out_counts(samples, *shares)
    assert samples - sum(counts) >= 1
    for count, share in zip(counts, shares, strict=True):
        assert 0 <= count <= max(samples * share + 1e-6, 1)
        if samples >= 3 and share > 0:
            assert count >= 1
        if share == 0:
            assert count == 0


@pytest.mark.parametrize(
    ("samples", "counts"),
    [(1, (0, 0)), (2, (0, 0)), (3, (1, 1)), (10, (1, 1)), (19, (1, 1)), (20, (2, 2)), (70, (7, 7))],
)
def test_eighty_ten_ten_by_hand(samples, counts):
    assert held_out_counts(samples, 0.1, 0.1) == counts


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(0, 2**32))
def test_a_split_federation_holds_every_sample_once(clients, seed):
    data = numbered(80)
    federation = build_federation(data, clients, Dirichlet(0.3, min_samples=3), seed)
    seen = torch.cat([split.x for split in federation.splits.values()])[:, 0]
    assert sorted(seen.int().tolist()) == list(range(80))
    for split in federation.splits.values():
        assert torch.equal(split.y, split.x[:, 0].long() % 3)
        assert (split.counts >= 1).all()


def test_chance_decides_what_is_held_out():
    """Test samples come from all of the client's data: within 4 sigma of the middle."""
    federation = build_federation(numbered(600), 1, IID())
    rows = np.array(rows_of(federation, "test", 0))
    assert abs(rows.mean() - 299.5) < 4 * 173.2 / np.sqrt(len(rows))


def test_shares_of_zero_leave_the_part_out():
    federation = build_federation(numbered(30), 3, IID(), split=(0.5, 0.0, 0.5))
    assert federation.valid is None
    assert federation.test.counts.tolist() == [5, 5, 5]
    assert set(federation.provenance["split_sizes"]) == {"train", "test"}


def test_data_seed_decides_the_partition():
    one, same, other = (
        load_federation("digits", 10, Dirichlet(0.5), seed=seed) for seed in (3, 3, 4)
    )
    assert torch.equal(one.train.x, same.train.x)
    assert one.provenance == same.provenance
    assert one.provenance["sha256"] != other.provenance["sha256"]


# --- pool ------------------------------------------------------------------------------------


def test_pool_clients_are_measured_on_their_own_label_mix(mnist):
    federation = build_federation(mnist, 20, Dirichlet(0.1), seed=1)
    assert federation.train.counts.sum() == 1000
    for client in range(20):
        mix = torch.bincount(federation.train.of(client)[1], minlength=10).double()
        mix /= mix.sum()
        for part in (federation.valid, federation.test):
            counts = torch.bincount(part.of(client)[1], minlength=10)
            assert counts.sum() == 200
            assert (counts - 200 * mix).abs().max() < 1  # largest remainders
            assert (counts[mix == 0] == 0).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(1, 80), st.integers(6, 90), st.integers(0, 2**32))
def test_pool_images_are_never_doubled_nor_shared(clients, pool_samples, pool, seed):
    data = numbered(60, pool=pool)
    partition = Dirichlet(0.2, min_samples=2)
    federation = build_federation(data, clients, partition, seed, pool_samples=pool_samples)
    assert sorted(federation.train.x[:, 0].int().tolist()) == list(range(60))
    used = {part: set(federation.splits[part].x[:, 0].int().tolist()) for part in ("valid", "test")}
    assert not used["valid"] & used["test"]
    for part, images in used.items():
        assert all(image >= 10_000 for image in images)
        for client in range(clients):
            rows = rows_of(federation, part, client)
            assert len(rows) == len(set(rows))
            assert 1 <= len(rows) <= pool_samples


def test_a_small_pool_shrinks_the_sample_and_keeps_the_mix():
    """Half a pool of 20 per label; a client with 3 : 1 can have 10 + 3, not 10 + 10."""
    x = np.zeros((8, 1), dtype=np.float32)
    pool_x, pool_y = np.zeros((40, 1), dtype=np.float32), np.arange(40) % 2
    data = Dataset("two", x, np.array([0, 0, 0, 1, 0, 0, 0, 1]), 2, pool_x, pool_y,
                   groups=np.repeat([0, 1], 4))  # fmt: skip
    federation = build_federation(data, 2, Natural())
    for client in range(2):
        for part in (federation.valid, federation.test):
            assert torch.bincount(part.of(client)[1]).tolist() == [10, 3]


def test_holdout_split_ignores_the_pool(mnist):
    federation = build_federation(mnist, 10, IID(), holdout="split")
    assert sum(int(split.counts.sum()) for split in federation.splits.values()) == 1000
    assert federation.provenance["holdout"] == "split"


# --- by name ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_data_set_loads_with_a_json_provenance(name):
    federation = load_federation(name, clients=8, seed=2)
    assert federation.clients == 8
    assert federation.provenance["dataset"] == name
    assert json.loads(json.dumps(dict(federation.provenance))) == federation.provenance


def test_the_provenance_tells_how_to_make_it_again(digits):
    federation = load_federation("digits", clients=50)
    facts = federation.provenance
    assert facts["partition"] == {
        "name": "dirichlet", "alpha": 0.1, "balanced": False, "min_samples": 10, "attempts": 1000,
        "on_failure": "repair",
    }  # fmt: skip
    assert facts["dataset_sha256"] == digits.sha256 == builtin.SHA256["digits.npz"]
    assert (facts["seed"], facts["holdout"], facts["split"]) == (0, "split", [0.8, 0.1, 0.1])
    assert facts["split_sizes"]["train"] == federation.sizes.tolist()
    assert sum(facts["sizes"]) == 1797


REFUSED = [
    ("mnist_100", {}, "did you mean 'mnist_1000'"),
    ("digits", {"clients": 0}, "clients = 0: give a whole number, at least 1"),
    ("digits", {"clients": 1798, "partition": IID()}, "at most 1797 clients"),
    ("digits", {"clients": 180}, "at most 179 clients"),
    ("digits", {"partition": Natural()}, "needs group ids"),
    ("digits", {"holdout": "pool"}, "has no pool"),
    ("digits", {"split": (0.8, 0.1, 0.2)}, "sum to 1"),
    ("digits", {"split": (0.0, 0.5, 0.5)}, "train above 0"),
    ("digits", {"split": (1.2, -0.1, -0.1)}, "at least 0"),
    ("digits", {"split": (float("nan"), 0.5, 0.5)}, "sum to 1"),
    ("digits", {"clients": 1000, "partition": IID()}, "the 3 samples"),
    ("mnist_1000", {"pool_samples": 0}, "at least 1"),
    ("logistic", {"partition": Shards()}, "leave the partition out"),
    ("quadratic", {"holdout": "split"}, "leave split and holdout out"),
]


@pytest.mark.parametrize(("name", "options", "way_out"), REFUSED)
def test_bad_requests_tell_the_way_out(name, options, way_out):
    with pytest.raises(BadInput, match=way_out) as error:
        load_federation(name, **options)
    assert "\n" not in str(error.value)


def test_data_sets_are_checked():
    x, y = np.zeros((4, 2), dtype=np.float32), np.array([0, 1, 2, 3])
    with pytest.raises(BadInput, match="label 3 of sample 3 in x is outside 0 … 2"):
        Dataset("d", x, y, 3)
    with pytest.raises(BadInput, match="4 samples but 3 labels"):
        Dataset("d", x, y[:3], 4)
    with pytest.raises(BadInput, match="both pool_x and pool_y"):
        Dataset("d", x, y, 4, pool_x=x)
    with pytest.raises(BadInput, match="pool_x has 4 samples but 2 labels"):
        Dataset("d", x, y, 4, pool_x=x, pool_y=y[:2])
    with pytest.raises(BadInput, match="1 group ids but 4 samples"):
        Dataset("d", x, y, 4, groups=np.array([1]))
    with pytest.raises(BadInput, match="x is uint8; normalise"):
        Dataset("d", x.astype(np.uint8), y, 4)
    with pytest.raises(BadInput, match="labels of x are float64"):
        Dataset("d", x, y * 1.0, 4)
    with pytest.raises(BadInput, match=r"pool samples have shape \(1,\)"):
        Dataset("d", x, y, 4, pool_x=x[:, :1], pool_y=y)
    one_sided = Dataset("d", x, y, 4, pool_x=x[:3], pool_y=y[:3])
    with pytest.raises(BadInput, match="1 samples of label 0"):
        build_federation(one_sided, 1, IID())


def test_a_data_set_without_checksum_gets_its_own():
    x, y = np.zeros((4, 2), dtype=np.float32), np.array([0, 1, 0, 1])
    sums = {Dataset("d", x, y, 2).sha256, Dataset("d", x + 1, y, 2).sha256,
            Dataset("d", x, y[::-1], 2).sha256}  # fmt: skip
    assert len(sums) == 3
    assert Dataset("e", x.copy(), y, 2).sha256 == Dataset("d", x, y, 2).sha256


# --- synthetic -------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32))
def test_quadratic_data_have_exactly_the_promised_loss(clients, dim, seed):
    federation, A, m, c = random_quadratics(clients, dim, seed)
    w = rng.stream(seed, "point").standard_normal(dim)
    for i in range(clients):
        x, y = (t.numpy() for t in federation.train.of(i))
        assert y.shape == (dim + 1, 1)
        loss = 0.5 * np.mean((x @ w[:, None] - y) ** 2)
        assert loss == pytest.approx(0.5 * (w - m[i]) @ A[i] @ (w - m[i]) + c[i], rel=1e-11)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.floats(0, 10), st.integers(0, 2**32))
def test_the_closed_form_is_where_the_gradient_of_J_vanishes(clients, dim, strength, seed):
    """∇J = ḡ + (γ/n) Σ H_i (g_i − ḡ) with g_i = A_i (x − m_i), written out independently."""
    _, A, m, _ = random_quadratics(clients, dim, seed)
    x = gradient_variance_minimiser(A, m, strength)
    g = np.stack([A[i] @ (x - m[i]) for i in range(clients)])
    mean_g = g.mean(0)
    grad_J = mean_g + strength * np.mean([A[i] @ (g[i] - mean_g) for i in range(clients)], axis=0)
    assert np.abs(grad_J).max() < 1e-9


def test_a_common_matrix_makes_strength_irrelevant():
    _, A, m, _ = random_quadratics(4, 3, seed=5)
    A = np.repeat(A[:1], 4, 0)
    x = [gradient_variance_minimiser(A, m, strength) for strength in (0.0, 10.0)]
    assert np.allclose(x[0], m.mean(0), atol=1e-12)
    assert np.allclose(x[0], x[1], atol=1e-12)


def test_bad_quadratics_are_refused():
    A, m, c = np.eye(2)[None], np.zeros((1, 2)), np.zeros(1)
    with pytest.raises(BadInput, match="not symmetric"):
        quadratics(np.array([[[1.0, 2.0], [0.0, 1.0]]]), m, c)
    with pytest.raises(BadInput, match=r"A\[0\] is not positive definite"):
        quadratics(-A, m, c)
    with pytest.raises(BadInput, match=r"c\[0\] = -1 is negative"):
        quadratics(A, m, c - 1)


def test_logistic_clients_do_not_depend_on_each_other():
    few, many = (logistic(clients, dim=3, samples=20, seed=1) for clients in (2, 5))
    assert torch.equal(few.train.of(1)[0], many.train.of(1)[0])
    assert len(set(many.sizes.tolist())) > 1  # ragged
    assert all(10 <= size <= 30 for size in many.sizes.tolist())
    assert many.test.counts.tolist() == [10] * 5


def test_logistic_heterogeneity_moves_inputs_and_concept():
    """Without it the clients' means agree within noise; with it they do not."""
    spread = {}
    for h in (0.0, 3.0):
        federation = logistic(10, dim=4, samples=400, heterogeneity=h, seed=0, classes=3)
        means = torch.stack([federation.train.of(i)[0].mean(0) for i in range(10)])
        spread[h] = float(means.var(0).mean())
        assert federation.classes == 3
    assert spread[0.0] < 0.01
    assert spread[3.0] > 0.5
    even, uneven = (logistic(10, samples=400, heterogeneity=h).provenance for h in (0.0, 3.0))
    assert even["mean_total_variation"] < 0.1 < uneven["mean_total_variation"]


@pytest.mark.parametrize(
    "options", [{"clients": 0}, {"samples": 1}, {"classes": 1}, {"heterogeneity": -1.0}]
)
def test_bad_logistic_is_refused(options):
    with pytest.raises(BadInput, match="logistic needs"):
        logistic(**{"clients": 2, **options})


@pytest.mark.parametrize(
    "name", ["digits", "mnist_1000", "mnist_rotated", "logistic", "quadratic", "clinics"]
)
def test_a_billion_clients_are_refused_at_once(name):
    with pytest.raises(BadInput, match="1000000000"):
        load_federation(name, 1_000_000_000)


def test_a_fifth_of_the_clients_see_rotated_images():
    even = load_federation("mnist_1000", 10, IID(), seed=3)
    rotated = load_federation("mnist_rotated", 10, seed=3)
    assert rotated.provenance["special"] == [8, 9]
    for part in ("train", "valid", "test"):
        for client in range(10):
            x, y = getattr(even, part).of(client)
            turned, labels = getattr(rotated, part).of(client)
            assert torch.equal(turned, x.rot90(1, (2, 3)) if client >= 8 else x)
            assert torch.equal(labels, y)
    with pytest.raises(BadInput, match="client by client"):
        load_federation("mnist_rotated", 10, IID())
