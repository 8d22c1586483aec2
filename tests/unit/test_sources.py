"""Data sets of files: every format is read back as it was written, from every usual place."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairvar.data import (
    DATASET_NAMES,
    IID,
    SOURCES,
    Dataset,
    Dirichlet,
    Natural,
    Scale,
    build_federation,
    builtin,
    describe,
    load_federation,
    sources,
    verify,
)
from fairvar.data.build import stratified, subsample
from fairvar.data.readers.arrays import CIFAR10, python_batch
from fairvar.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
Image = pytest.importorskip("PIL.Image")


def real(folder: str) -> Path:
    if not (SHARED / folder).is_dir():
        pytest.skip(f"../shared/data/{folder} is not there")
    return SHARED / folder


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """Neither the user's data nor the user's cache is looked at."""
    monkeypatch.delenv("FAIRVAR_DATA", raising=False)
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "cache"))


def pixels(count: int, channels: int, side: int, seed: int = 0) -> np.ndarray:
    shape = (count, channels, side, side)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# --- writers of the formats ------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, zipped: bool = True, train: int = 40, test: int = 20) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    x = pixels(train + test, 1, 28)[:, 0]
    y = np.arange(train + test) % 10
    for name, part in (("train", slice(train)), ("t10k", slice(train, None))):
        for kind, array in (("images-idx3", x[part]), ("labels-idx1", y[part])):
            content = idx_bytes(array)
            path = folder / f"{name}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(content, 1) if zipped else content)
    return x[:, None]


def python2_pickle(x: np.ndarray, labels: list[int], key: str = "labels") -> bytes:
    """As Python 2 wrote the originals: protocol 2, byte strings, numpy.core."""

    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    table = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
        b"(K\x01M" + struct.pack("<H", len(x)) + b"M" + struct.pack("<H", 3072)
        + b"\x86cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05(K\x03U\x01|NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<I", x.size)
        + x.tobytes() + b"tb"
    )  # fmt: skip
    names = b"]q\x06(" + b"".join(text(f"image_{i}.png") for i in range(len(x))) + b"e"
    items = [text("batch_label"), text("batch 1"), text(key), b"](" + numbers + b"e",
             text("data"), table, text("filenames"), names]  # fmt: skip
    return b"\x80\x02}q\x00(" + b"".join(items) + b"u."


def python3_pickle(x: np.ndarray, labels: list[int], key: str = "labels", protocol: int = 4):
    return pickle.dumps(
        {"filenames": ["a.png"] * len(x), key: labels, "data": x.reshape(-1, 3072)},
        protocol=protocol,
    )


def cifar_parts(kind: str) -> dict[str, tuple[np.ndarray, list[int]]]:
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    names = names if kind == "cifar10" else ["train", "test"]
    classes = 10 if kind == "cifar10" else 100
    return {n: (pixels(20, 3, 32, i), [(7 * i + j) % classes for j in range(20)])
            for i, n in enumerate(names)}  # fmt: skip


def write_cifar(folder: Path, kind: str, form: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    key = "labels" if kind == "cifar10" else "fine_labels"
    for name, (x, labels) in cifar_parts(kind).items():
        if form == "binary":
            coarse = b"" if kind == "cifar10" else b"\x05"
            content = b"".join(coarse + bytes([label]) + image.tobytes()
                               for image, label in zip(x, labels, strict=True))  # fmt: skip
            (folder / f"{name}.bin").write_bytes(content)
        else:
            content = {"python2": python2_pickle, "python3": python3_pickle}[form](x, labels, key)
            (folder / name).write_bytes(content)


def jpeg(value: int, mode: str = "RGB", side: int = 64, form: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (side, side), value if mode == "L" else (value, value, 0)).save(out, form)
    return out.getvalue()


def tiny_files() -> dict[str, bytes]:
    files = {}
    for k, wnid in enumerate(("n02", "n01")):
        for i in range(4):
            mode = "L" if i == 3 else "RGB"
            files[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = jpeg(50 * k + 10 * i, mode)
    for i in range(4):
        files[f"val/images/val_{i}.JPEG"] = jpeg(200 + i)
    lines = [f"val_{i}.JPEG\tn0{1 + i % 2}\t0\t0\t62\t62\n" for i in range(4)]
    files["val/val_annotations.txt"] = "".join(lines).encode()
    files["test/images/test_0.JPEG"] = jpeg(255)
    return {f"tiny-imagenet-200/{name}": content for name, content in files.items()}


def write_tree(folder: Path, form: str, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if form == "folder":
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    elif form == "zip":
        with zipfile.ZipFile(folder / "tiny-imagenet-200.zip", "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        write_tar(folder / f"tiny-imagenet-200.{form}", files)
    return folder


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, f"w:{path.suffix[1:]}") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


# --- formats ---------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_files(tmp_path, zipped, name):
    x = write_mnist(tmp_path / "MNIST" / "raw", zipped)
    data = sources.load(name, tmp_path / "MNIST" / "raw")
    assert np.array_equal(data.x, x)
    assert data.y.tolist() == [i % 10 for i in range(60)]
    assert (data.classes, data.pool_x) == (10, None)
    with_pool = sources.load(name, tmp_path / "MNIST" / "raw", pool=True)
    assert np.array_equal(with_pool.pool_x, x[40:])
    assert len(with_pool.y) == 40
    assert with_pool.sha256 == data.sha256


def test_plain_and_zipped_idx_files_are_the_same_data(tmp_path):
    write_mnist(tmp_path / "a")
    write_mnist(tmp_path / "b", zipped=False)
    one, two = (sources.load("mnist", tmp_path / folder) for folder in "ab")
    assert one.sha256 == two.sha256
    assert one.provenance.startswith("0.0857 % of MNIST: 40 training and 20 test images")


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_all_forms_of_cifar_are_the_same_data(tmp_path, kind):
    for form in ("python2", "python3", "binary"):
        write_cifar(tmp_path / form, kind, form)
    dashed = "cifar-10" if kind == "cifar10" else "cifar-100"
    for form, version in (("python2", "python"), ("binary", "binary")):
        files = {
            f"some/{p.name}": p.read_bytes() for p in reversed(list((tmp_path / form).iterdir()))
        }
        write_tar(tmp_path / f"{dashed}-{version}.tar.gz", files)
    roots = [tmp_path / form for form in ("python2", "python3", "binary")]
    roots += [tmp_path / f"{dashed}-python.tar.gz", tmp_path / f"{dashed}-binary.tar.gz", tmp_path]
    found = [sources.load(kind, root, pool=True) for root in roots]
    assert len({data.sha256 for data in found}) == 1
    parts = list(cifar_parts(kind).values())
    assert np.array_equal(found[0].x, np.concatenate([x for x, _ in parts[:-1]]))
    assert np.array_equal(found[0].pool_x, parts[-1][0])
    assert found[0].y.tolist() == [label for _, labels in parts[:-1] for label in labels]


@pytest.mark.parametrize("protocol", [3, 4])
def test_pickles_of_python_3(protocol):
    x = pixels(5, 3, 32)
    content = python3_pickle(x, [1, 2, 3, 4, 5], protocol=protocol)
    images, labels = python_batch("f", content, CIFAR10)
    assert np.array_equal(images, x)
    assert labels.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("form", ["folder", "zip", "tar.xz", "tar.gz"])
def test_tiny_imagenet_wherever_it_lies(tmp_path, form):
    data = sources.load("tiny_imagenet", write_tree(tmp_path / "d", form, tiny_files()), pool=True)
    assert data.x.shape == (8, 3, 64, 64)
    assert data.y.tolist() == [0] * 4 + [1] * 4  # n01 before n02
    assert data.pool_y.tolist() == [0, 1, 0, 1]
    assert abs(int(data.x[1, 0, 0, 0]) - 60) < 4  # n01_1: 50 + 10
    assert abs(int(data.pool_x[3, 0, 0, 0]) - 203) < 4
    assert np.array_equal(data.x[3, 0], data.x[3, 2])  # grey became RGB
    assert data.scale.mean[0] == pytest.approx(0.48043, abs=1e-5)


def test_a_folder_of_images(tmp_path):
    for kind, level in (("cat", 10), ("dog", 250)):
        (tmp_path / "f" / kind).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "f" / kind / f"{i}.png").write_bytes(jpeg(level + i, "L", 8, "PNG"))
    (tmp_path / "f" / "notes.txt").write_text("not an image")
    data = sources.load("folder", tmp_path / "f")
    assert data.x.shape == (6, 1, 8, 8)
    assert data.x[:, 0, 0, 0].tolist() == [10, 11, 12, 250, 251, 252]
    assert data.y.tolist() == [0, 0, 0, 1, 1, 1]
    x, _ = data.gather(np.arange(6))
    assert x.mean() == pytest.approx(0, abs=1e-5)
    assert x.std() == pytest.approx(1, rel=1e-5)
    (tmp_path / "f" / "cat" / "0.png").write_bytes(jpeg(10, "RGB", 8, "PNG"))
    assert sources.load("folder", tmp_path / "f").x.shape == (6, 3, 8, 8)  # one in colour


def test_a_folder_with_two_parts(tmp_path):
    for part, count in (("train", 3), ("test", 2)):
        for kind in ("a", "b"):
            (tmp_path / part / kind).mkdir(parents=True)
            for i in range(count):
                (tmp_path / part / kind / f"{i}.png").write_bytes(jpeg(i, "L", 8, "PNG"))
    assert len(sources.load("folder", tmp_path).y) == 10
    data = sources.load("folder", tmp_path, pool=True)
    assert (data.y.tolist(), data.pool_y.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1])


def test_npz_with_everything(tmp_path):
    file = tmp_path / "own.npz"
    x, y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 3
    np.savez(file, x=x, y=y, groups=np.repeat(["a", "b", "c"], 10), x_test=x[:9], y_test=y[:9])
    federation = load_federation("npz", 3, Natural(), root=file, holdout="pool")
    assert federation.sizes.tolist() == [10, 10, 10]
    assert torch.equal(federation.train.of(1)[0], torch.from_numpy(x[10:20].astype(np.float32)))
    with pytest.raises(BadInput, match="groups_test"):
        load_federation("npz", 3, Natural(), root=file)
    np.savez(file, x=x, y=y, groups=y, x_test=x[:9], y_test=y[:9], groups_test=y[:9])
    assert load_federation("npz", 3, Natural(), root=file).provenance["sizes"] == [13, 13, 13]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_of_pixels(tmp_path, save):
    x = pixels(12, 1, 5)[:, 0]
    save(tmp_path / "a.npz", x=np.asfortranarray(x), y=np.arange(12, dtype=">u2") % 2)
    data = sources.load("npz", tmp_path / "a.npz")
    assert np.array_equal(data.x[:, 0], x)
    assert data.y.dtype == np.int64


# --- scale, sub-samples and federations ------------------------------------------------------


def test_pixels_are_scaled_as_the_embedded_ones():
    raw = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    out = Scale((0.1307,), (0.3015,)).apply(raw)
    assert np.array_equal(out.ravel(), ((raw / 255.0 - 0.1307) / 0.3015).astype(np.float32).ravel())
    colour = np.repeat(raw, 3, axis=1)
    three = Scale((0.1, 0.2, 0.3), (1.0, 2.0, 4.0)).apply(colour)
    assert three[0, :, 0, 0] == pytest.approx([-0.1, -0.1, -0.075])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.floats(0.05, 1), st.integers(0, 99))
def test_sub_samples_keep_the_classes_shares(counts, fraction, order):
    labels = np.random.default_rng(order).permutation(np.repeat(np.arange(len(counts)), counts))
    wanted = round(fraction * len(labels))
    try:
        rows = stratified(labels, wanted, "some")
    except BadInput:
        assert min(counts) * wanted < len(labels)  # a class with a share below one sample
        return
    assert len(rows) == wanted
    assert (np.diff(rows) > 0).all()
    found = np.bincount(labels[rows], minlength=len(counts))
    assert (np.abs(found - np.array(counts) * wanted / len(labels)) < 1).all()


def test_smaller_parts_lie_in_larger_ones_and_ignore_the_partition_seed():
    data = builtin.digits()
    small, large = (subsample(data, f) for f in (0.25, 0.5))
    assert {row.tobytes() for row in small.x} <= {row.tobytes() for row in large.x}
    one, two = (load_federation("digits", 5, IID(), seed, samples=500) for seed in (1, 2))
    values = [torch.cat([s.x for s in f.splits.values()]).flatten(1) for f in (one, two)]
    assert torch.equal(*(v[np.lexsort(v.T.numpy())] for v in values))
    assert (one.provenance["fraction"], one.provenance["samples"]) == (1.0, 500)
    assert one.provenance["dataset_sha256"] == data.sha256


def test_a_scale_must_fit():
    x, y = pixels(4, 3, 2), np.array([0, 1, 0, 1])
    with pytest.raises(BadInput, match="2 means but x has shape"):
        Dataset("d", x, y, 2, scale=Scale((0.5, 0.5), (1.0, 1.0)))
    with pytest.raises(BadInput, match="x is float32; a scale needs uint8"):
        Dataset("d", x.astype(np.float32), y, 2, scale=Scale((0.5,), (1.0,)))


def test_bytes_and_floats_give_the_same_federation():
    x, y = pixels(60, 3, 4), np.arange(60) % 3
    scale = Scale((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    floats = scale.apply(x)
    late, early = Dataset("d", x, y, 3, scale=scale), Dataset("d", floats, y, 3)
    one, two = (build_federation(data, 4, Dirichlet(1.0, min_samples=3)) for data in (late, early))
    for part, split in one.splits.items():
        assert torch.equal(split.x, two.splits[part].x)
        assert split.x.dtype == torch.float32
        assert torch.equal(split.y, two.splits[part].y)


def test_merged_by_default_and_pool_on_request(tmp_path):
    write_mnist(tmp_path, train=200, test=100)
    merged = load_federation("mnist", 4, IID(), root=tmp_path)
    assert merged.provenance["holdout"] == "split"
    assert sum(merged.provenance["sizes"]) == 300
    pool = load_federation(
        "mnist", 4, IID(), root=tmp_path, samples=100, holdout="pool", pool_samples=20
    )
    assert sum(pool.provenance["sizes"]) == 100
    assert torch.bincount(pool.train.y).tolist() == [10] * 10
    assert json.loads(json.dumps(dict(pool.provenance))) == pool.provenance
    assert pool.provenance["normalisation"] == {"mean": [0.1307], "sd": [0.3015]}
    half = load_federation("mnist", 4, IID(), root=tmp_path, fraction=0.5)
    assert sum(half.provenance["sizes"]) == 150


REFUSED = [
    ("digits", {"root": "x"}, "leave root out"),
    ("quadratic", {"fraction": 0.5}, "leave fraction and samples out"),
    ("logistic", {"samples": 5}, "leave fraction and samples out"),
    ("logistic", {"root": "x"}, "leave root out"),
    ("digits", {"fraction": 0.0}, "above 0"),
    ("digits", {"fraction": 1.5}, "at most 1"),
    ("digits", {"fraction": float("nan")}, "above 0"),
    ("digits", {"fraction": 0.5, "samples": 5}, "not both"),
    ("digits", {"samples": 0}, "at least 1"),
    ("cifar10", {"fraction": 2}, "at most 1"),  # before the files are looked for
    ("cifar10", {"split": (2, 0, 0)}, "sum to 1"),
    ("digits", {"samples": 1798}, r"use 1 … 1797"),
    ("digits", {"samples": 9}, "leave class . of digits empty"),
    ("cifar11", {}, "did you mean 'cifar1"),
    ("npz", {}, "say where it lies with root"),
    ("npz", {"root": "nowhere.npz"}, "root = 'nowhere.npz' does not exist"),
    ("folder", {"root": "nowhere"}, "root = 'nowhere' does not exist"),
    ("npz", {"root": "."}, "is no .npz file"),
]


@pytest.mark.parametrize(("name", "options", "way_out"), REFUSED)
def test_bad_requests_tell_the_way_out(name, options, way_out):
    with pytest.raises(BadInput, match=way_out) as error:
        load_federation(name, **options)
    assert "\n" not in str(error.value)


# --- places and cache ------------------------------------------------------------------------


def test_the_three_places_in_their_order(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="root is not given, FAIRVAR_DATA is not set, the cache is "):
        sources.load("mnist")
    write_mnist(tmp_path / "cache" / "datasets" / "mnist", train=10)
    assert len(sources.load("mnist").y) == 30
    write_mnist(tmp_path / "data sets ü" / "mnist", train=20)
    monkeypatch.setenv("FAIRVAR_DATA", str(tmp_path / "data sets ü"))
    assert len(sources.load("mnist").y) == 40
    write_mnist(tmp_path / "mine", train=30)
    assert len(sources.load("mnist", tmp_path / "mine").y) == 50
    with pytest.raises(BadInput, match="run: fairvar data fetch mnist"):
        sources.load("mnist", tmp_path / "nowhere")  # what was asked for, or nothing


def test_a_list_of_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRVAR_DATA", str(tmp_path))
    write_mnist(tmp_path / "mnist")
    rows = {row["name"]: row for row in describe()}
    assert set(rows) == set(SOURCES) < set(DATASET_NAMES)
    assert rows["mnist"]["found"].startswith(str(tmp_path / "mnist"))
    assert rows["cifar10"]["found"] == "not here"
    assert rows["tiny_imagenet"]["download_mb"] == 248.1


def test_verify_names_what_is_wrong(tmp_path):
    write_mnist(tmp_path)
    rows = verify("mnist", tmp_path)
    assert [ok for _, ok, _ in rows] == [False] * 4 + [True]
    size = (tmp_path / rows[0][0]).stat().st_size
    assert rows[0][2] == f"it has {size} bytes, not 9912422"
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    rows = verify("mnist", tmp_path)
    assert rows[3][1:] == (False, "it is missing")
    assert "t10k-labels-idx1-ubyte is missing" in rows[-1][2]


def test_decoded_images_are_kept_and_checked(tmp_path, capsys, monkeypatch):
    root = write_tree(tmp_path / "d", "zip", tiny_files())
    first = sources.load("tiny_imagenet", root)
    (file,) = (tmp_path / "cache").glob("tiny_imagenet-*.npz")
    monkeypatch.setattr(sources.images, "decode", None)  # the second time nothing is decoded
    assert np.array_equal(sources.load("tiny_imagenet", root).x, first.x)
    monkeypatch.undo()
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "cache"))
    content = bytearray(file.read_bytes())
    rng = np.random.default_rng(0)
    for _ in range(20):
        changed = bytearray(content)
        changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
        file.write_bytes(changed)
        assert sources.load("tiny_imagenet", root).sha256 == first.sha256
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert "is damaged (its checksum is wrong)" in line
    file.with_name(file.name + ".sha256").unlink()
    sources.load("tiny_imagenet", root)
    assert "is damaged" in capsys.readouterr().err
    assert file.read_bytes() == bytes(content)


def test_a_changed_folder_is_decoded_again(tmp_path):
    for kind in ("a", "b"):
        (tmp_path / "f" / kind).mkdir(parents=True)
        (tmp_path / "f" / kind / "0.png").write_bytes(jpeg(5, "L", 8, "PNG"))
    before = sources.load("folder", tmp_path / "f")
    (tmp_path / "f" / "a" / "1.png").write_bytes(jpeg(9, "L", 8, "PNG"))
    assert len(sources.load("folder", tmp_path / "f").y) == len(before.y) + 1


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FAIRVAR_CACHE", str(tmp_path / "file"))
    root = write_tree(tmp_path / "d", "zip", tiny_files())
    assert len(sources.load("tiny_imagenet", root).y) == 12
    assert "it will be decoded again" in capsys.readouterr().err


def test_the_cache_folder_follows_the_platform(monkeypatch, tmp_path):
    from fairvar.data.fetch import cache_dir

    monkeypatch.delenv("FAIRVAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fairvar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "fairvar"


# --- the real ones ---------------------------------------------------------------------------


def test_real_mnist():
    data = sources.load("mnist", real("mnist"))
    assert data.sha256 == SOURCES["mnist"].sha256
    assert data.provenance == "MNIST: 60000 training and 10000 test images, original idx files"
    counts = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    assert np.bincount(data.y).tolist() == counts
    assert [ok for _, ok, _ in verify("mnist", real("mnist"))] == [True] * 5
    with pytest.raises(BadInput, match="found for fashion_mnist are those of mnist"):
        sources.load("fashion_mnist", real("mnist"))


def test_the_papers_mnist_from_the_originals():
    federation = load_federation("mnist", 50, root=real("mnist"), samples=1000, holdout="pool")
    assert sum(federation.provenance["sizes"]) == 1000
    counts = torch.bincount(federation.train.y)
    whole = np.array([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
    assert np.abs(counts.numpy() - whole / 60).max() < 1
    assert (federation.test.counts <= 200).all()


@pytest.mark.slow
def test_real_tiny_imagenet():
    data = sources.load("tiny_imagenet", real("tiny_imagenet"))
    assert data.provenance.startswith("half of Tiny ImageNet: 50000 training and 5000 test images")
    assert np.bincount(data.y).tolist() == [275] * 200
