"""CIFAR as WebP sheets: the converter writes CIFAR's binary format, sample by sample the same."""

from __future__ import annotations

import importlib.util
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
from test_sources import (
    ROOT,
    Image,
    cifar_parts,
    own_places,  # noqa: F401  # a fixture
    real,
    write_cifar,
)

from fairvar.data import SOURCES, sources
from fairvar.errors import BadInput

spec = importlib.util.spec_from_file_location("unpack_webp", ROOT / "tools/unpack_webp.py")
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def unpack(monkeypatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["unpack_webp", *map(str, arguments)])
    tool.main()


def write_sheets(folder: Path, monkeypatch) -> str:
    """Sheets of five rows; returns the text of the index."""
    monkeypatch.setattr(tool, "ROWS", 5)
    folder.mkdir()
    lines = ""
    for name, (x, labels) in cifar_parts("cifar10").items():
        sheet = x.reshape(4, 5, 3, 32, 32).transpose(1, 3, 0, 4, 2).reshape(160, 128, 3)
        Image.fromarray(sheet).save(folder / f"{name}.webp", lossless=True)
        lines += "".join(f"{label} some_{i}.png\n" for i, label in enumerate(labels))
    (folder / "index.txt.xz").write_bytes(lzma.compress(lines.encode()))
    return lines


def test_sheets_become_binary_files_in_the_cache(tmp_path, monkeypatch):
    write_sheets(tmp_path / "cifar10", monkeypatch)
    monkeypatch.setenv("FAIRVAR_DATA", str(tmp_path))
    with pytest.raises(BadInput, match=f"tools/unpack_webp.py {tmp_path}/cifar10$"):
        sources.load("cifar10")
    with pytest.raises(BadInput, match=r"leave root out and unpack .* tools/unpack_webp\.py"):
        sources.load("cifar10", tmp_path / "cifar10")
    with pytest.raises(BadInput, match=r"fairvar data fetch cifar100$"):
        sources.load("cifar100")
    unpack(monkeypatch, tmp_path / "cifar10")
    write_cifar(tmp_path / "python", "cifar10", "python2")
    assert sources.load("cifar10").sha256 == sources.load("cifar10", tmp_path / "python").sha256


def test_bad_sheets(tmp_path, monkeypatch):
    folder = tmp_path / "cifar10"
    lines = write_sheets(folder, monkeypatch)
    index = folder / "index.txt.xz"
    for text, why in (
        (lines[: lines.rindex("\n", 0, -1) + 1], "the index does not fit test_batch.webp"),
        (lines + "0 a\n", "121 lines for 120 images"),
        (lines.replace("0 ", "10 ", 1), "label 10 is outside 0 … 9"),
        (lines.replace("0 ", "-1 ", 1), "a line is not like the others"),
        (lines + "0\n", "a line is not like the others"),
    ):
        index.write_bytes(lzma.compress(text.encode()))
        with pytest.raises(SystemExit, match=why):
            unpack(monkeypatch, folder)
    index.write_bytes(lzma.compress(lines.encode()))
    Image.new("RGB", (64, 161)).save(folder / "test_batch.webp", lossless=True)
    with pytest.raises(SystemExit, match="a sheet is RGB, 160 pixels high"):
        unpack(monkeypatch, folder)
    for content in (b"RIFF", None):
        (folder / "test_batch.webp").write_bytes(content or b"")
        with pytest.raises(SystemExit, match=r"test_batch.webp is no intact sheet"):
            unpack(monkeypatch, folder)
    assert not (tmp_path / "cache").exists()


def test_a_real_sheet_of_cifar10():
    sheet = tool.read_sheet(real("cifar10") / "test_batch.webp")
    assert sheet.shape == (10_000, 3, 32, 32)
    assert sheet.mean(axis=(0, 2, 3)) / 255 == pytest.approx([0.4942, 0.4851, 0.4504], abs=1e-3)


@pytest.mark.slow
def test_real_cifar(monkeypatch):
    """The same data as before, when fairvar read the sheets itself."""
    unpack(monkeypatch, real("cifar10"))
    data = sources.load("cifar10")
    assert data.sha256 == SOURCES["cifar10"].sha256
    assert np.bincount(data.y).tolist() == [6000] * 10
    unpack(monkeypatch, real("cifar100_half"))
    half = sources.load("cifar100")
    assert half.sha256 == "57584b51deabe0640654edfed06c099532f768c3e41ef3f85971cd71f9010137"
    assert half.provenance.startswith("half of CIFAR-100: 25000 training and 5000 test images")
    assert np.bincount(half.y).tolist() == [300] * 100
