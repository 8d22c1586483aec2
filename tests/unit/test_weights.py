"""Weight files: what torch wrote is read exactly; what could do harm is refused."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from fairvar.errors import BadInput, FairvarError, IntegrityError
from fairvar.models import MobileNetV2, build, load_weights, read_tensors

torch.set_num_threads(1)

REAL = Path(__file__).parents[3] / "shared/data/mobilenet_v2/mobilenet_v2_imagenet.pth"
REAL_SHA256 = "844c418e13c79ba1627dfade00a9ce51303e99dc7b963adff6596aeb357ad14b"


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(
        torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "lenet.pth"
    torch.save(build("lenet5", (3, 32, 32), 10, seed=5).state_dict(), path)
    return path


def repack(path: Path, change: Callable[[str, bytes], bytes | None], **options: Any) -> Path:
    """The same zip with some parts changed (None leaves a part out)."""
    out = path.with_name("changed.pth")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", **options) as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return out


def with_pickle(path: Path, code: bytes) -> Path:
    return repack(path, lambda name, data: code if name.endswith("data.pkl") else data)


@pytest.mark.skipif(not REAL.exists(), reason="../shared/data/mobilenet_v2 is not on this machine")
def test_the_published_mobilenet_file_loads_strictly() -> None:
    expected = torch.load(REAL, weights_only=True)
    assert equal(read_tensors(REAL, REAL_SHA256), dict(expected))
    model = MobileNetV2()
    assert load_weights(model, REAL, REAL_SHA256) == list(expected)
    other = MobileNetV2()
    other.load_state_dict(expected)
    assert equal(model.state_dict(), other.state_dict())
    small = build("mobilenet_v2", (3, 32, 32), 100, seed=1)
    before = small.classifier[1].weight.clone()  # type: ignore[index, union-attr, operator]
    with pytest.raises(BadInput, match=r"skip=\('classifier.1.',\)"):
        load_weights(small, REAL)
    load_weights(small, REAL, skip=("classifier.1.",))
    assert torch.equal(small.classifier[1].weight, before)  # type: ignore[index, union-attr, arg-type]
    assert torch.equal(small.features[0][0].weight, expected["features.0.0.weight"])  # type: ignore


def test_both_formats_are_read_exactly(saved: Path) -> None:
    state = torch.load(saved, weights_only=True)
    twin = saved.with_suffix(".safetensors")
    safetensors.torch.save_file(state, twin)
    assert equal(read_tensors(saved), dict(state))
    for path in (saved, twin):
        model = build("lenet5", (3, 32, 32), 10, seed=6)
        assert set(load_weights(model, path)) == set(state)
        assert equal(model.state_dict(), dict(state))


def test_views_types_scalars_empty_and_shared_storages(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    state = {
        "transposed": base.reshape(3, 4).t(),
        "tail": base[5:],
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "double": torch.ones(3, dtype=torch.float64),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    torch.save(state, tmp_path / "x.pt")
    assert equal(read_tensors(tmp_path / "x.pt"), {n: t.detach() for n, t in state.items()})


def test_names_and_shapes_must_fit_and_nothing_is_half_loaded(saved: Path) -> None:
    model = build("lenet5", (3, 32, 32), 12, seed=1)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(BadInput, match=r"shape \(10, 84\), the model's is \(12, 84\)"):
        load_weights(model, saved, strict=False)
    with pytest.raises(BadInput, match=r"skip='clasifier'"):
        load_weights(model, saved, skip=("clasifier",))
    assert equal(model.state_dict(), before)
    loaded = load_weights(model, saved, skip=("13.",))
    assert len(loaded) == len(before) - 2
    other = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(BadInput, match="does not fit the model: 2 missing"):
        load_weights(other, saved)
    with pytest.raises(BadInput, match="no tensor of this model"):
        load_weights(nn.ParameterDict({"z": torch.ones(1)}), saved, strict=False)
    assert load_weights(nn.Sequential(nn.Conv2d(3, 6, 5)), saved, strict=False) == [
        "0.weight",
        "0.bias",
    ]


def test_values_must_be_finite_and_of_the_right_kind(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    for tensor, kind in (
        (torch.tensor([[1.0, float("nan")]]), IntegrityError),
        (torch.tensor([[1, 2]]), BadInput),
    ):
        torch.save({"weight": tensor, "bias": torch.ones(1)}, tmp_path / "x.pth")
        with pytest.raises(kind):
            load_weights(model, tmp_path / "x.pth")


def test_checksum_suffix_and_missing_file(saved: Path) -> None:
    right = hashlib.sha256(saved.read_bytes()).hexdigest()
    assert read_tensors(saved, right.upper())
    with pytest.raises(IntegrityError, match="SHA-256"):
        read_tensors(saved, "0" * 64)
    with pytest.raises(BadInput, match="end in"):
        read_tensors(saved.rename(saved.with_suffix(".bin")))
    with pytest.raises(BadInput, match="No such file"):
        read_tensors(saved)
    with pytest.raises(BadInput, match="directory"):
        read_tensors(saved.parent)


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_code_in_a_pickle_never_runs(saved: Path, protocol: int) -> None:
    canary = saved.with_name("canary")
    for evil in (Evil(os.system, f"touch {canary}"), Evil(eval, f"open({str(canary)!r}, 'w')")):
        code = pickle.dumps({"weight": evil}, protocol)
        with pytest.raises(IntegrityError, match=r"by torch: .*(GLOBAL|operand)"):
            read_tensors(with_pickle(saved, code))
        bare = saved.with_name("bare.pth")
        bare.write_bytes(code)
        with pytest.raises(IntegrityError):
            read_tensors(bare)
    assert not canary.exists()


def pickled(
    *, storage: Any = ("storage", "torch FloatStorage", "0", "cpu", 6), **tensor: Any
) -> bytes:
    """A one-tensor state dict as torch writes it, with forged entries."""
    tag, kind, key, place, count = storage

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(number(v) for v in values) + b"t"

    name = tensor.get("function", "torch._utils _rebuild_tensor_v2").replace(" ", "\n")
    return (
        b"\x80\x02}" + text("w") + b"c" + name.encode() + b"\n((" + text(tag) + b"c"
        + kind.replace(" ", "\n").encode() + b"\n" + text(key) + text(place) + number(count) + b"tQ"
        + number(tensor.get("offset", 0)) + numbers(tensor.get("size", (2, 3)))
        + numbers(tensor.get("stride", (3, 1))) + b"\x89}tRs."
    )  # fmt: skip


@pytest.fixture
def six(tmp_path: Path) -> Path:
    """A file with one tensor of six floats."""
    torch.save({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "six.pth")
    return tmp_path / "six.pth"


def test_the_forged_pickle_is_right_without_lies(six: Path) -> None:
    assert torch.equal(
        read_tensors(with_pickle(six, pickled()))["w"], torch.arange(6.0).reshape(2, 3)
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pickled(offset=1), "storage that is not resizable"),
        (pickled(offset=-1), "invalid storage offset"),
        (pickled(stride=(4, 1)), "storage that is not resizable"),
        (pickled(stride=(-3, 1)), "overflowed"),
        (pickled(size=(2, 4)), "storage that is not resizable"),
        (pickled(size=(2, 3, 1)), "size length .3. and stride length .2."),
        (pickled(size=(2**31 - 1, 2**31 - 1), stride=(0, 0)), "past its storage"),
        (pickled(size=(7,), stride=(0,)), "past its storage"),
        (pickled(size=(0,), stride=(1,), offset=7), "past its storage"),
        (pickled(size=(1,) * 17, stride=(1,) * 17), "no plain tensor"),
        (pickled(storage=("storage", "torch FloatStorage", "0", "cpu", 2**31 - 1)), "not match"),
        (pickled(storage=("storage", "torch DoubleStorage", "0", "cpu", 6)), "does not match"),
        (pickled(storage=("storage", "torch FloatStorage", "../../x", "cpu", 6)), "file not found"),
        (pickled(storage=("module", "torch FloatStorage", "0", "cpu", 6)), "load of storage"),
        (pickled(storage=("storage", "torch Blob", "0", "cpu", 6)), "GLOBAL torch.Blob"),
        (pickled(function="torch._utils _rebuild_tensor"), "4 positional arguments"),
        (pickled(function="posix system"), "GLOBAL posix.system"),
        (pickled(function="collections OrderedDict"), "got 6"),
        (pickled(function="torch FloatStorage"), "not callable"),
        (pickled()[:-1], "EOFError"),
        (pickled()[:40], "_rebuild_tensor_ was not an allowed"),
        (b"", "EOFError"),
        (b"\x80\x02.", "empty list"),
        (b"\x80\x02}.", ""),
        (b"\x80\x02}q\x00X\x01\x00\x00\x00wh\x00s.", "flat dict"),
        (b"\x80\x02}(K\x01K\x02u.", "flat dict"),
        (b"\x80\x02(((t.", "flat dict"),
        (b"\x80\x02)R.", "by torch: list index out of range"),
        (b"\x80\x02h\x05.", "by torch: 5"),
        (b"\x80\x02K\x01}b.", "Can only build Tensor"),
        (pickle.dumps([1.5], 2), "flat dict"),
    ],
)  # fmt: skip
def test_forged_lists_of_tensors(six: Path, code: bytes, words: str) -> None:
    path = with_pickle(six, code)
    if not words:  # an empty state dict is odd, but harmless
        assert read_tensors(path) == {}
        return
    with pytest.raises(IntegrityError, match=words) as error:
        read_tensors(path)
    assert "changed.pth" in str(error.value)
    assert "\n" not in str(error.value)


def test_forged_zips(six: Path, tmp_path: Path) -> None:
    def refused(path: Path, words: str) -> None:
        with pytest.raises(IntegrityError, match=words):
            read_tensors(path)

    same = lambda name, data: data  # noqa: E731
    refused(repack(six, same, compression=zipfile.ZIP_DEFLATED), "compressed")
    refused(repack(six, lambda n, d: None if n.endswith("pkl") else d), "data.pkl: file not found")
    refused(repack(six, lambda n, d: None if n.endswith("data/0") else d), "data/0: file not found")
    refused(repack(six, lambda n, d: d[:-4] if n.endswith("data/0") else d), "does not match")
    refused(repack(six, lambda n, d: d[:-1] if n.endswith("data/0") else d), "does not match")
    refused(repack(six, lambda n, d: b"odd" if n.endswith("byteorder") else d), "endianness")
    swapped = read_tensors(repack(six, lambda n, d: b"big" if n.endswith("byteorder") else d))["w"]
    assert torch.equal(
        swapped, torch.from_numpy(torch.arange(6.0).numpy().byteswap().reshape(2, 3))
    )
    for name, words in (("six/../../x", "path"), ("six//x", "path"), ("other/x", "folders")):
        path = repack(six, same)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(name, b"x")
        refused(path, words)
    (tmp_path / "text.pth").write_text("hello")
    refused(tmp_path / "text.pth", "no intact zip")
    (tmp_path / "old.pth").write_bytes(b"")
    refused(tmp_path / "old.pth", "no intact zip")
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "old.pth").write_bytes(buffer.getvalue())
    refused(tmp_path / "old.pth", "saved again as safetensors")
    torch.save(OrderedDict(model=OrderedDict(w=torch.ones(2))), tmp_path / "nested.pth")
    refused(tmp_path / "nested.pth", "flat dict")


def test_a_claim_of_more_bytes_than_there_are(six: Path) -> None:
    data = bytearray(six.read_bytes())
    place = data.rindex(b"six/data/0") - 46  # its record in the zip's table of contents
    struct.pack_into("<II", data, place + 20, 1 << 31, 1 << 31)
    path = six.with_name("claim.pth")
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="more bytes"):
        read_tensors(path)


def test_broken_bits_and_cuts_end_in_our_own_error_or_are_harmless(six: Path) -> None:
    intact, draw = six.read_bytes(), random.Random(0)
    twin = six.with_suffix(".safetensors")
    safetensors.torch.save_file(read_tensors(six), twin)
    for path, whole in ((six, intact), (twin, twin.read_bytes())):
        for i in range(400):
            data = bytearray(whole)
            if i % 4:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            else:
                data = data[: draw.randrange(len(data))]
            path.write_bytes(data)
            with contextlib.suppress(FairvarError):  # any other error fails the test
                read_tensors(path)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 4),
        (b'{"w":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,8]}}', 8),
        (b'{"w":{"dtype":"F64","shape":[2],"data_offsets":[0,8]}}', 8),
        (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
         b'"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
        (b'{"w":{"dtype":"O","shape":[2],"data_offsets":[0,8]}}', 8),
        (b"[" * 100_000, 8),
        (b"[1]", 0),
        (b"null", 0),
        (b"\xff\xff", 0),
    ],
)  # fmt: skip
def test_forged_safetensors(tmp_path: Path, header: bytes, body: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * body)
    with pytest.raises(IntegrityError, match=r"x\.safetensors"):
        read_tensors(path)
    path.write_bytes(struct.pack("<Q", 1 << 62) + header)
    with pytest.raises(IntegrityError, match="cut off"):
        read_tensors(path)
