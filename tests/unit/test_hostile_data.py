"""Damaged and forged data files are refused with name and reason, quickly and in little memory."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from test_sources import (  # the writers of the formats
    Image,
    idx_bytes,
    jpeg,
    own_places,  # noqa: F401  # a fixture
    pixels,
    python2_pickle,
    python3_pickle,
    tiny_files,
    write_cifar,
    write_mnist,
    write_tar,
    write_tree,
)

from fairvar.data import load_federation, sources
from fairvar.data import readers as archives
from fairvar.data.readers import arrays, open_tree
from fairvar.data.readers.arrays import CIFAR10, CIFAR100, binary_batch, python_batch, read_idx
from fairvar.errors import BadInput, FairvarError, IntegrityError

MOST_MEMORY = 100 << 20


@contextmanager
def refused(pattern: str) -> Iterator[None]:
    """Refused in one line, in little memory."""
    tracemalloc.start()
    try:
        with pytest.raises((IntegrityError, BadInput), match=pattern) as error:
            yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
        assert "\n" not in str(error.value)
    finally:
        tracemalloc.stop()


# --- idx -------------------------------------------------------------------------------------

GOOD_IDX = idx_bytes(pixels(4, 1, 28)[:, 0])
IDX = {
    "empty": (b"", "no idx file"),
    "magic": (b"\x01" + GOOD_IDX[1:], "no idx file of bytes with 3 axes"),
    "type": (GOOD_IDX[:2] + b"\x0d" + GOOD_IDX[3:], "no idx file"),
    "axes": (GOOD_IDX[:3] + b"\x04" + GOOD_IDX[4:], "no idx file"),
    "header": (GOOD_IDX[:9], "cut off"),
    "short": (GOOD_IDX[:-1], "its header says 4 × 28 × 28 bytes, it has 3135"),
    "long": (GOOD_IDX + b"x", "it has 3137"),
    "huge": (GOOD_IDX[:4] + b"\xff" * 12 + GOOD_IDX[16:], "its header says 4294967295"),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", IDX)
def test_bad_idx_files(tmp_path, case, zipped):
    content, why = IDX[case]
    file = tmp_path / ("some.gz" if zipped else "some")
    file.write_bytes(gzip.compress(content) if zipped else content)
    with refused(rf"^{file.name} is refused: .*{why}"):
        read_idx(file, 3)


def test_bad_sets_of_idx_files(tmp_path):
    write_mnist(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx_bytes(np.full(40, 10))))
    with refused("train-labels-idx1-ubyte.gz is refused: label 10 of image 0 is outside 0 … 9"):
        sources.load("mnist", tmp_path)
    labels.write_bytes(gzip.compress(idx_bytes(np.zeros(39))))
    with refused("39 labels for 40 images"):
        sources.load("mnist", tmp_path)
    labels.unlink()
    with refused("train-labels-idx1-ubyte is missing"):
        sources.load("mnist", tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(
        gzip.compress(idx_bytes(pixels(40, 1, 8)[:, 0]))
    )
    with refused("missing|images are 8 × 8, not 28 × 28"):
        sources.load("mnist", tmp_path)


def test_every_flipped_bit_and_every_cut_of_a_gz_is_found(tmp_path):
    """Bytes 4 … 9 of the header (time, system) carry no content and may differ."""
    content = gzip.compress(GOOD_IDX)
    file = tmp_path / "some.gz"
    rng = np.random.default_rng(0)
    for _ in range(200):
        changed = bytearray(content)
        changed[rng.integers(10, len(changed))] ^= 1 << int(rng.integers(8))
        file.write_bytes(changed)
        with pytest.raises(FairvarError, match=r"^some\.gz is refused"):
            read_idx(file, 3)
    for length in rng.integers(0, len(content), 100):
        file.write_bytes(content[:length])
        with pytest.raises(FairvarError, match=r"^some\.gz is refused"):
            read_idx(file, 3)
    file.write_bytes(content + b"tail")
    with refused("some.gz is refused: it is no intact .gz file .Not a gzipped file"):
        read_idx(file, 3)


def bomb(kind: Callable[[], object], size: int) -> bytes:
    machine = kind()
    piece = bytes(1 << 20)
    return b"".join([machine.compress(piece) for _ in range(size >> 20)]) + machine.flush()


@pytest.mark.parametrize(
    "kind", [lambda: zlib.compressobj(9, wbits=31), lambda: lzma.LZMACompressor(preset=1)]
)
def test_compression_bombs(tmp_path, monkeypatch, kind):
    file = tmp_path / "bomb.gz"
    file.write_bytes(bomb(kind, 200 << 20))
    assert file.stat().st_size < 1 << 20
    monkeypatch.setattr(archives, "PIECE", 1 << 20)
    with refused("bomb.gz is refused: it unpacks to more than 10000000 bytes"):
        archives.read_compressed(file, 10_000_000)


def test_neither_gz_nor_xz(tmp_path):
    file = tmp_path / "index.txt.xz"
    file.write_bytes(b"BZh91AY")
    with refused("neither a gzip nor an xz file"):
        archives.read_compressed(file, 100)


def test_nothing_may_follow_the_end_of_an_archive(tmp_path):
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        entry = tarfile.TarInfo("a")
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"x"))
    content, file = plain.getvalue(), tmp_path / "some.tar"

    def files() -> list[tuple[str, bytes]]:
        return list(archives.tar_files(file, 1 << 20, 1 << 20, lambda member: True))

    for pack in (gzip.compress, lzma.compress):
        file.write_bytes(pack(content))
        assert files() == [("a", b"x")]
        file.write_bytes(pack(content + b"tail"))
        with refused("something follows the end of its tar"):
            files()
    file.write_bytes(lzma.compress(content) + b"tail")
    with refused("something follows its end"):
        files()


# --- CIFAR -----------------------------------------------------------------------------------

X, Y = pixels(4, 3, 32), [0, 1, 2, 3]
GOOD = python2_pickle(X, Y)


class Runs:
    def __init__(self, canary: str, how: str) -> None:
        self.canary, self.how = canary, how

    def __reduce__(self):
        code = f"open({self.canary!r}, 'w').close()"
        return (os.system, (f"touch {self.canary}",)) if self.how == "system" else (exec, (code,))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("how", ["system", "exec"])
@pytest.mark.parametrize("where", ["alone", "as data", "in a list", "as a key"])
def test_hostile_pickles_do_not_run(tmp_path, protocol, how, where):
    canary = tmp_path / "canary"
    evil = Runs(str(canary), how)
    batch = {"alone": evil, "as data": {"data": evil, "labels": Y}, "as a key": {evil: 1},
             "in a list": {"data": X.reshape(-1, 3072), "labels": [1, evil]}}[where]  # fmt: skip
    with refused(r"^data_batch_1 is refused: .*(opcode|no intact CIFAR batch)"):
        python_batch("data_batch_1", pickle.dumps(batch, protocol=protocol), CIFAR10)
    assert not canary.exists()


OPCODES = {
    "cos\nsystem\n(U\x04true\x85R.": "os.system has no place",
    "(ios\nsystem\n.": "opcode 105 has no place",
    "\x80\x02(cos\nsystem\nU\x04trueo.": "os.system has no place",
    "\x80\x04\x8c\x02os\x8c\x06system\x93.": "os.system has no place",
    "\x80\x02cnumpy\nload\n.": "numpy.load has no place",
    "\x80\x02\x82\x01.": "opcode 130 has no place",
    "\x80\x02P1\n.": "opcode 80 has no place",
    "\x80\x02U\x01aQ.": "opcode 81 has no place",
    "\x80\x02U\x01a)\x81.": "opcode 41 has no place",
    "\x80\x05\x97.": "opcode 151 has no place",
    "\x80\x02I5\n.": "opcode 73 has no place",
    "\x80\x02}q\x00(U\x01ah\x00u.": "no table 'data'",
    "\x80\x02]q\x00h\x00a.": "other than one dict",
    "\x80\x02}(U\x01aK\x01U\x01aK\x02u.": "no table 'data'",
    "\x80\x02].": "other than one dict",
    "\x80\x02}": "cut off|no intact",
    "\x80\x02u.": "no intact",
    "\x80\x02h\x05.": "no intact",
    "\x80\x02T\xff\xff\xff\x7fabc": "no intact",
    "\x80\x04B\xff\xff\xff\xffabc": "no intact",
    "\x80\x04\x8e" + "\xff" * 8 + "abc": "no intact",
    "": "no intact|cut off",
}


@pytest.mark.parametrize("code", OPCODES)
def test_only_the_opcodes_of_a_batch_are_known(code):
    with refused(rf"^f is refused: .*({OPCODES[code]})"):
        python_batch("f", code.encode("latin-1"), CIFAR10)


def other_pickle(**changes: object) -> bytes:
    batch: dict[str, object] = {"data": X.reshape(-1, 3072), "labels": Y}
    return pickle.dumps({**batch, **changes}, protocol=4)


BATCHES = {
    "float table": (other_pickle(data=np.zeros((4, 3072))), "table of bytes"),
    "signed table": (other_pickle(data=np.zeros((4, 3072), np.int8)), "table of bytes"),
    "object table": (other_pickle(data=np.array([[None]])), "no intact|opcode"),
    "fortran": (other_pickle(data=np.asfortranarray(X.reshape(-1, 3072))), "row by row"),
    "one axis": (other_pickle(data=X.ravel()), "two axes"),
    "wrong width": (other_pickle(data=X.reshape(-1, 1536)), "3072 columns"),
    "no table": (other_pickle(data="text"), "no table 'data'"),
    "no labels": (other_pickle(labels="text"), "no list 'labels'"),
    "text labels": (other_pickle(labels=["1"] * 4), "no list 'labels'"),
    "float labels": (other_pickle(labels=[1.0] * 4), "opcode 71 has no place"),
    "few labels": (other_pickle(labels=[1] * 3), "3 labels for 4 images"),
    "high label": (other_pickle(labels=[0, 1, 2, 10]), "label 10 of image 3 is outside 0 … 9"),
    "low label": (other_pickle(labels=[0, -1, 2, 9]), "label -1 of image 1"),
    "tail": (GOOD + b"x", "something follows its end"),
    "lying shape": (GOOD.replace(b"M\x04\x00M\x00\x0c", b"M\x05\x00M\x00\x0c"), "has 12288 bytes"),
    "huge shape": (GOOD.replace(b"M\x04\x00M\x00\x0c", b"J\xff\xff\xff\x7fM\x00\x0c"), "has 12288"),
    "no size": (GOOD.replace(b"M\x04\x00M\x00\x0c", b"M\x00\x00M\x00\x0c"), "has 12288 bytes"),
    "protocol 2 of Python 3": (python3_pickle(X, Y, protocol=2), "_codecs.encode has no place"),
    "protocol 5": (python3_pickle(X, Y, protocol=5), "_frombuffer has no place"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_bad_python_batches(case):
    content, why = BATCHES[case]
    with refused(rf"^f is refused: .*{why}"):
        python_batch("f", content, CIFAR10)


def test_cut_and_flipped_python_batches():
    """A cut is always found. A flip in pixels or names cannot be, but nothing else may happen."""
    rng = np.random.default_rng(0)
    for length in rng.integers(0, len(GOOD), 200):
        with pytest.raises(IntegrityError, match=r"^f is refused"):
            python_batch("f", GOOD[:length], CIFAR10)
    structure = [*range(90), *range(len(GOOD) - 70, len(GOOD))]
    start = GOOD.index(b"cnumpy")
    structure += range(start, start + 150)
    for at in structure:
        for bit in range(8):
            changed = bytearray(GOOD)
            changed[at] ^= 1 << bit
            try:
                images, labels = python_batch("f", bytes(changed), CIFAR10)
            except IntegrityError as error:
                assert str(error).startswith("f is refused")  # noqa: PT017
            else:
                assert images.shape == (4, 3, 32, 32)
                assert labels.shape == (4,)


def test_pickles_that_would_fill_the_memory(monkeypatch):
    """The unpickler in C allocates a memo of 2³¹ entries, and bytearrays of any length."""
    for code in (b"\x80\x02}r\xff\xff\xff\x7f.", b"\x80\x05\x96" + b"\xff" * 7 + b"\x00."):
        with refused("^f is refused"):
            python_batch("f", code, CIFAR10)
    monkeypatch.setattr(arrays, "MOST_READS", 10_000)
    with refused("it has more than 10000 parts"):
        python_batch("f", b"\x80\x02](" + b"K\x01" * 2_000_000 + b"e.", CIFAR10)


def test_bad_binary_batches():
    record = b"\x05" + X[0].tobytes()
    for content in (b"", record[:-1], record + b"x"):
        with refused("no multiple of 3073"):
            binary_batch("test.bin", content, CIFAR10)
    with refused("label 10 of image 1"):
        binary_batch("test.bin", record + b"\x0a" + X[0].tobytes(), CIFAR10)
    with refused("label 100 of image 0"):
        binary_batch("test.bin", b"\x00\x64" + X[0].tobytes(), CIFAR100)


def test_a_missing_batch_is_named(tmp_path):
    write_cifar(tmp_path / "a", "cifar10", "python2")
    (tmp_path / "a" / "data_batch_3").unlink()
    with refused("data_batch_3 is missing"):
        sources.load("cifar10", tmp_path / "a")
    write_tar(tmp_path / "cifar-10-python.tar.gz", {"x/data_batch_1": GOOD})
    with refused("cifar-10-python.tar.gz is refused: it lacks data_batch_2"):
        sources.load("cifar10", tmp_path)


# --- archives --------------------------------------------------------------------------------


def tar_with(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, f"w:{path.suffix[1:]}") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return path


def member(name: str, **facts: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for fact, value in facts.items():
        setattr(info, fact, value)
    return info


BAD_NAMES = ["../../etc/passwd", "/etc/passwd", "a/../../b", "C:/x", "a\\..\\b"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_paths_that_leave_the_archive(tmp_path, name):
    tar_with(tmp_path / "cifar-10-python.tar.gz", member(name))
    with refused(r"cifar-10-python.tar.gz is refused: it has an entry with the path"):
        sources.load("cifar10", tmp_path)
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
        archive.writestr("tiny", "")
        archive.writestr(name.replace("\\", "/../"), "x")
    with refused(r"tiny-imagenet-200.zip is refused: it has an entry with the path"):
        sources.load("tiny_imagenet", tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar(tmp_path, kind):
    tar_with(tmp_path / "cifar-10-python.tar.gz", member("data_batch_1", type=kind, linkname="/x"))
    with refused("'data_batch_1' is a link, a device"):
        sources.load("cifar10", tmp_path)


def test_tars_with_huge_entries(tmp_path):
    for size, kind in ((1 << 40, b"0"), (1 << 40, b"x"), (1 << 33, b"L"), (1 << 33, b"K")):
        header = member("data_batch_1", size=size, type=kind).tobuf(tarfile.GNU_FORMAT)
        (tmp_path / "cifar-10-python.tar.gz").write_bytes(gzip.compress(header + bytes(10240)))
        with refused("cifar-10-python.tar.gz is refused"):
            sources.load("cifar10", tmp_path)


def test_cut_flipped_and_doubled_tars(tmp_path):
    write_cifar(tmp_path / "files", "cifar100", "python2")
    files = {p.name: p.read_bytes() for p in (tmp_path / "files").iterdir()}
    path = tmp_path / "cifar-100-python.tar.gz"
    write_tar(path, files)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for length in rng.integers(0, len(content), 20):
        path.write_bytes(content[:length])
        with pytest.raises(FairvarError, match=r"^cifar-100-python.tar.gz is refused"):
            sources.load("cifar100", path)
    for _ in range(50):
        changed = bytearray(content)
        changed[rng.integers(60, len(changed))] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        with pytest.raises(FairvarError, match="is refused"):
            sources.load("cifar100", path)
    write_tar(path, {**files, "again/train": files["train"]})
    with refused("it holds train twice"):
        sources.load("cifar100", path)
    path.write_bytes(gzip.compress(b"no tar at all" * 100))
    with refused("no intact tar file"):
        sources.load("cifar100", path)


def test_zip_bombs(tmp_path):
    path = tmp_path / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny-imagenet-200/train/n01/images/a.JPEG", bytes(40 << 20))
    with refused("tiny-imagenet-200.zip is refused: its entry .* claims 41943040 bytes"):
        sources.load("tiny_imagenet", tmp_path)


@pytest.mark.parametrize("endings", [(".jpeg",)])
def test_bad_zips(tmp_path, endings):
    path = tmp_path / "some.zip"
    files = tiny_files()
    write_tree(tmp_path, "zip", files)
    content = (tmp_path / "tiny-imagenet-200.zip").read_bytes()
    name = next(iter(files))
    first = content.index(files[name])
    changed = bytearray(content)
    changed[first + 20] ^= 4
    path.write_bytes(changed)
    with refused("some.zip is refused: its entry .* is damaged"), open_tree(path, endings) as tree:
        tree.read(name)
    for length in (0, 10, len(content) // 2, len(content) - 10):
        path.write_bytes(content[:length])
        with refused("some.zip is refused: it is no intact zip"), open_tree(path, endings):
            pass
    link = zipfile.ZipInfo("a.jpeg")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with refused("is a link"), open_tree(path, endings):
        pass


# --- images ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    for kind in ("a", "b"):
        (tmp_path / "f" / kind).mkdir(parents=True)
        for i in range(2):
            (tmp_path / "f" / kind / f"{i}.png").write_bytes(jpeg(i, "L", 8, "PNG"))
    return tmp_path / "f"


def png(width: int, height: int) -> bytes:
    """A small file that claims to be a large picture."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99)))


def wide(mode: str) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (8, 8)).save(out, "PNG")
    return out.getvalue()


IMAGES = {
    "empty": (b"", "no intact image"),
    "text": (b"hello", "no intact image"),
    "cut": (jpeg(1, "L", 8, "PNG")[:-30], "no intact image"),
    "flip": (jpeg(1, "L", 8, "PNG").replace(b"IDAT", b"IDAU"), "no intact image"),
    "bomb": (png(30_000, 30_000), "no intact image .Image size .900000000 pixels. exceeds"),
    "large": (png(2000, 2000), "claims 2000 × 2000 pixels"),
    "other size": (jpeg(1, "L", 9, "PNG"), "9 × 9 pixels where 8 × 8"),
    "16 bit": (wide("I;16"), "mode I"),
    "gif": (b"GIF89a" + bytes(50), "no intact image"),
}


@pytest.mark.parametrize("case", IMAGES)
def test_bad_images(folder, case):
    content, why = IMAGES[case]
    (folder / "b" / "0.png").write_bytes(content)
    with refused(rf"^b/0.png is refused: .*{why}"):
        sources.load("folder", folder)


def test_links_out_of_the_folder(folder, tmp_path):
    (tmp_path / "secret.png").write_bytes(jpeg(7, "L", 8, "PNG"))
    (folder / "a" / "2.png").symlink_to(folder / "a" / "1.png")
    assert len(sources.load("folder", folder).y) == 5  # a link inside is fine
    (folder / "a" / "3.png").symlink_to(tmp_path / "secret.png")
    with refused("3.png is refused: it is a link to"):
        sources.load("folder", folder)
    (folder / "a" / "3.png").unlink()
    (folder / "c").symlink_to(tmp_path)
    with refused("c is refused: it is a link to"):
        sources.load("folder", folder)


def test_folders_that_are_no_data_set(tmp_path, folder):
    (tmp_path / "one" / "a").mkdir(parents=True)
    with refused("has 0 class sub-folders"):
        sources.load("folder", tmp_path / "one")
    (tmp_path / "one" / "a" / "0.png").write_bytes(jpeg(1, "L", 8, "PNG"))
    with refused("has 1 class sub-folders"):
        sources.load("folder", tmp_path / "one")
    with refused("is no folder"):
        sources.load("folder", folder / "a" / "0.png")
    with refused("has no test part"):
        sources.load("folder", folder, pool=True)


TINY = {
    "no train": (lambda f: {k: v for k, v in f.items() if "/train/" not in k}, "it has no train/"),
    "no list": (lambda f: {k: v for k, v in f.items() if "annot" not in k}, "has 0 files val/"),
    "no image": (lambda f: {k: v for k, v in f.items() if "val_2" not in k}, "'val_2.JPEG'"),
    "odd class": (lambda f: {k: v.replace(b"n02", b"n09") if "annot" in k else v
                             for k, v in f.items()}, "line 2 names an unknown class"),
    "double": (lambda f: {k: v.replace(b"val_1.J", b"val_0.J") if "annot" in k else v
                          for k, v in f.items()}, "line 2 names"),
    "size": (lambda f: {**f, "tiny-imagenet-200/val/images/val_1.JPEG": jpeg(1, side=32)},
             "val_1.JPEG is refused: it has 32 × 32 pixels"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["zip", "tar.gz"])
@pytest.mark.parametrize("case", TINY)
def test_bad_tiny_imagenets(tmp_path, case, form):
    change, why = TINY[case]
    write_tree(tmp_path, form, change(tiny_files()))
    with refused(why):
        sources.load("tiny_imagenet", tmp_path)


def test_without_pillow(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with refused(r"needs Pillow: pip install 'fairvar\[vision\]'"):
        sources.load("folder", folder)


# --- npz -------------------------------------------------------------------------------------

F, L = np.zeros((6, 3)), np.arange(6) % 2
NPZ = {
    "no y": ({"x": F}, "has no array 'y'"),
    "no x": ({"y": L}, "has no array 'x'"),
    "lengths": ({"x": F, "y": L[:5]}, "6 samples but 5 labels"),
    "float labels": ({"x": F, "y": L * 1.0}, "y is float64"),
    "negative label": ({"x": F, "y": L - 1}, "label -1 in sample 0"),
    "huge label": ({"x": F, "y": L + 2**40}, "number them from 0"),
    "unsigned label": ({"x": F, "y": L.astype(np.uint64) + np.uint64(2**63)}, "from 0"),
    "two axes": ({"x": F, "y": L[:, None]}, "one integer per sample"),
    "one class": ({"x": F, "y": L * 0}, "it takes two classes"),
    "empty": ({"x": F[:0], "y": L[:0]}, "x has shape"),
    "nan": ({"x": np.where(np.arange(6)[:, None] == 4, np.nan, F), "y": L}, "first in sample 4"),
    "overflow": ({"x": F + 1e300, "y": L}, "infinity first in sample 0"),
    "int pixels": ({"x": F.astype(np.int64), "y": L}, "give uint8 pixels or floats"),
    "complex": ({"x": F + 1j, "y": L}, "give uint8 pixels or floats"),
    "channels last": ({"x": np.zeros((6, 8, 8, 3), np.uint8), "y": L}, "transpose"),
    "only x_test": ({"x": F, "y": L, "x_test": F}, "both x_test and y_test"),
    "other test shape": ({"x": F, "y": L, "x_test": F[:, :2], "y_test": L}, "must be alike"),
    "groups": ({"x": F, "y": L, "groups": L[:4]}, "4 group ids for 6 samples"),
    "other name": ({"x": F, "y": L, "z": F}, "'z' comes twice or is none of"),
    "objects": ({"x": F, "y": np.array([None] * 6)}, "Python objects"),
}


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("case", NPZ)
def test_bad_npz(tmp_path, case):
    arrays, why = NPZ[case]
    np.savez(tmp_path / "own.npz", **arrays)
    with refused(why):
        load_federation("npz", 2, root=tmp_path / "own.npz")


def npz_of(path: Path, entries: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def npy(shape: str, dtype: str = "<f4", body: bytes = b"") -> bytes:
    head = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + body


FORGED = {
    "huge": npy("(1000000000, 1000)"),
    "overflow": npy("(4294967296, 4294967296)"),
    "negative": npy("(-1, -4)", body=bytes(16)),
    "short": npy("(4, 4)", body=bytes(63)),
    "long": npy("(4, 4)", body=bytes(65)),
    "object": npy("(2,)", "|O", pickle.dumps([1, 2])),
    "code": npy("__import__('os').system('true')"),
    "no magic": b"hello",
    "long header": b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{",
    "version": b"\x93NUMPY\x09\x00" + bytes(20),
    "record": npy("(1,)", "<f4,<f4", bytes(8)),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_npy(tmp_path, case):
    path = npz_of(tmp_path / "own.npz", {"x.npy": FORGED[case], "y.npy": FORGED[case]})
    with refused(r"own\.npz|x has shape|x is"):
        sources.load("npz", path)


def test_npz_bombs_and_damage(tmp_path):
    path = tmp_path / "own.npz"
    body = npy("(200000000,)", "|u1", bytes(200_000_000))
    npz_of(path, {"x.npy": body, "y.npy": npy("(1,)", "|u1", b"0")}, zipfile.ZIP_DEFLATED)
    del body
    with refused("claims 200000... bytes out of"):
        sources.load("npz", path)
    np.savez(path, x=np.random.default_rng(0).normal(size=(50, 4)), y=np.arange(50) % 2)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("x.npy").header_offset + 60
    for at in range(start, start + 1000, 50):
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(FairvarError, match=r"own\.npz is refused"):
            sources.load("npz", path)
    for length in (0, 100, len(content) - 5):
        path.write_bytes(content[:length])
        with refused("own.npz is refused"):
            sources.load("npz", path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").chmod(0)
    with refused("cannot read .*: Permission denied"):
        sources.load("mnist", tmp_path)
