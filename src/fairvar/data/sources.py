"""The data sets that are read from files: what they are, where they lie, how they are scaled."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from fairvar.data.cache import datasets_dir, read_through_cache, remembered_sha256
from fairvar.data.dataset import BLOCK, Dataset, Scale
from fairvar.data.fetch import REMOTE, checksum_error
from fairvar.data.readers import Layout, Samples, cifar, idx, images, npz
from fairvar.errors import BadInput, FairvarError, unknown

RESEARCH = "published for research, no explicit licence; cite "


@dataclass(frozen=True)
class Source:
    """A data set of files. `folders`: where under a folder of data sets it may lie."""

    title: str
    layouts: tuple[Layout, ...]
    folders: tuple[str, ...] = ("",)
    scale: Scale | None = None  # None: mean and sd of the training pixels themselves
    images: int = 0  # official number, training and test part together; 0: any
    licence: str = "your own"
    address: str = ""
    sha256: str = ""  # `Raw.sha256` of the complete set in the official order, where known


# Constants of FL-bench (algorithms.md 3.1), Tiny ImageNet's divided by 255. Fashion-MNIST is not
# in FL-bench's list; these are the mean and sd of its training pixels that everybody uses.
SOURCES: dict[str, Source] = {
    "mnist": Source(
        "MNIST", idx.LAYOUTS, ("mnist", "MNIST/samples", "MNIST"), Scale((0.1307,), (0.3015,)),
        70_000, RESEARCH + "LeCun et al. 1998", "http://yann.lecun.com/exdb/mnist/",
        "44bc8ab590f8ecabf1236a07ca331dd15accb2bd54758e323d5dc4157b76c03a",
    ),
    "fashion_mnist": Source(
        "Fashion-MNIST", idx.LAYOUTS,
        ("fashion_mnist", "FashionMNIST/samples", "FashionMNIST", "fashion-mnist"),
        Scale((0.2860,), (0.3530,)), 70_000, "MIT",
        "https://github.com/zalandoresearch/fashion-mnist",
    ),
    "cifar10": Source(
        "CIFAR-10", cifar.layouts(cifar.CIFAR10),
        ("cifar10", "cifar-10-batches-py", "cifar-10-batches-bin", "cifar10/cifar-10-batches-py",
         "cifar10/cifar-10-batches-bin", ""),
        Scale((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)), 60_000,
        RESEARCH + "Krizhevsky 2009", "https://www.cs.toronto.edu/~kriz/cifar.html",
        "61be567bc44e895e4a337e8777d1ea100e00a033afc62281b859d61836d84711",
    ),
    "cifar100": Source(
        "CIFAR-100", cifar.layouts(cifar.CIFAR100),
        ("cifar100", "cifar-100-python", "cifar-100-binary", "cifar100/cifar-100-python",
         "cifar100/cifar-100-binary", "cifar100_half", ""),
        Scale((0.5071, 0.4865, 0.4409), (0.2009, 0.1984, 0.2023)), 60_000,
        RESEARCH + "Krizhevsky 2009", "https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "tiny_imagenet": Source(
        "Tiny ImageNet", images.TINY_LAYOUTS,
        ("tiny-imagenet-200", "tiny_imagenet/tiny-imagenet-200", "tiny_imagenet", ""),
        Scale((122.51 / 255, 114.29 / 255, 101.39 / 255), (58.70 / 255, 57.76 / 255, 57.67 / 255)),
        110_000, "ImageNet pictures: non-commercial research only",
        "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
    ),
    "folder": Source("class sub-folders of images (root: the folder)", images.FOLDER_LAYOUTS),
    "npz": Source("arrays x, y, groups, x_test, y_test (root: the file)", npz.LAYOUTS),
}  # fmt: skip
OWN = ("folder", "npz")
SHEETS = "index.txt.xz"  # the index of CIFAR as WebP sheets (tools/unpack_webp.py)


def load(
    name: str,
    root: str | Path | None = None,
    *,
    pool: bool = False,
    classes: int | None = None,
) -> Dataset:
    """A data set by name: training and test part merged, or with the test part as the pool.

    `classes`: how many there are, for a part of a set that need not hold all of them.
    """
    layout, paths = locate(name, root)
    samples = read_through_cache(name, layout, paths)
    source = SOURCES[name]
    _check_not_another(name, samples)
    if name == "npz" and classes is None and len(np.unique(samples.y)) < 2:
        raise BadInput(f"all labels of {paths[0].name} are {samples.y[:1].tolist()}; it takes two "
                       "classes")  # fmt: skip
    if samples.train == len(samples.y) and pool:
        raise BadInput(f"{name} at {paths[0]} has no test part to serve as pool; use holdout "
                       "'split' or 'auto'")  # fmt: skip
    cut = samples.train if pool else len(samples.y)
    groups = samples.groups
    if groups is not None and len(groups) < cut:
        raise BadInput("groups cover the training samples only; add groups_test or use holdout "
                       "'pool'")  # fmt: skip
    scale = source.scale
    if scale is None and samples.x.dtype == np.uint8:
        scale = own_scale(samples.x[: samples.train])
    return Dataset(
        name, samples.x[:cut], samples.y[:cut], classes or samples.classes,
        pool_x=samples.x[cut:] if pool else None, pool_y=samples.y[cut:] if pool else None,
        groups=None if groups is None else groups[:cut],
        sha256=samples.sha256, provenance=_provenance(source, samples), scale=scale,
    )  # fmt: skip


def sha256_of(name: str, root: str | Path | None = None) -> str:
    """`Dataset.sha256` of what `load` would give; the files are read if they are new here."""
    layout, paths = locate(name, root)

    def read() -> str:
        samples = read_through_cache(name, layout, paths)
        _check_not_another(name, samples)
        return samples.sha256

    return remembered_sha256(name, paths, read)


def own_scale(x: UInt8[np.ndarray, " N *features"]) -> Scale:
    """Mean and sd per channel of images, or of all features together, on the scale 0 … 1."""
    channels = x.shape[1] if x.ndim == 4 else 1
    count = np.zeros((channels, 256))
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        for channel in range(channels):
            values = block[:, channel] if channels > 1 else block
            count[channel] += np.bincount(values.reshape(-1), minlength=256)
    share, levels = count / count.sum(1, keepdims=True), np.arange(256) / 255
    mean = share @ levels
    sd = np.sqrt(np.maximum(share @ levels**2 - mean**2, 0))
    sd[sd < 1e-6] = 1.0  # a constant channel
    return Scale(tuple(mean.tolist()), tuple(sd.tolist()))


def _check_not_another(name: str, samples: Samples) -> None:
    """MNIST and Fashion-MNIST have the same file names."""
    for other, source in SOURCES.items():
        if other != name and source.sha256 == samples.sha256:
            raise BadInput(f"the files found for {name} are those of {other}; check root")


def _provenance(source: Source, samples: Samples) -> str:
    found, official = len(samples.y), source.images
    share = f"{100 * found / official:.3g} % of " if official else ""
    share = {1.0: "", 0.5: "half of "}.get(found / official if official else 1.0, share)
    title = source.title if official else samples.note
    parts = f"{samples.train} training and {found - samples.train} test images"
    return f"{share}{title}: {parts}" + (f", {samples.note}" if official else "")


def _places(name: str, root: str | Path | None) -> Iterator[Path]:
    """Where a set may lie: below the given root only, or below the usual two folders."""
    folders = SOURCES[name].folders
    if root is not None:
        base = Path(root).expanduser()
        yield base
        yield from (base / folder for folder in folders if folder)
        return
    bases = [datasets_dir()]
    if os.environ.get("FAIRVAR_DATA"):
        bases.insert(0, Path(os.environ["FAIRVAR_DATA"]).expanduser())
    yield from (base / folder for base in bases for folder in folders)


def locate(name: str, root: str | Path | None = None) -> tuple[Layout, list[Path]]:
    """The files of a data set, or a `BadInput` that says where it was looked for."""
    if name not in SOURCES:
        raise unknown("data set of files", name, SOURCES)
    if name in OWN and root is None:
        raise BadInput(f"data set {name!r} is your own; say where it lies with root")
    try:
        for place in _places(name, root):
            for layout in SOURCES[name].layouts:
                if paths := layout.match(place):
                    return layout, paths
    except OSError as error:
        raise BadInput(f"cannot search {place} for {name}: {error.strerror}") from None
    raise _not_found(name, root)


def _not_found(name: str, root: str | Path | None) -> BadInput:
    if name in OWN:
        there = Path(root or "").expanduser().exists()
        kind = "folder" if name == "folder" else ".npz file"
        return BadInput(f"root = {str(root)!r} {f'is no {kind}' if there else 'does not exist'}")
    way = f"point to it or run: fairvar data fetch {name}"
    for place in _places(name, root):
        if name.startswith("cifar") and (place / SHEETS).is_file():
            leave = "leave root out and " if root is not None else ""
            command = f"python tools/unpack_webp.py {shlex.quote(str(place))}"
            way = f"{leave}unpack its WebP sheets first: {command}"
            break
    return BadInput(
        f"{name} was not found: root is {'not given' if root is None else repr(str(root))}, "
        f"FAIRVAR_DATA is {os.environ.get('FAIRVAR_DATA') or 'not set'}, the cache is "
        f"{datasets_dir()}; {way}"
    )


def describe() -> list[dict[str, Any]]:
    """One row per data set of files, for `fairvar data list`."""
    rows = []
    for name, source in SOURCES.items():
        found = "give root" if name in OWN else "not here"
        if name not in OWN:
            with contextlib.suppress(BadInput):
                found = str(locate(name)[1][0])
        size = sum(remote.size for remote in REMOTE.get(name, ()))
        rows.append({
            "name": name, "what": source.title, "images": source.images or None,
            "download_mb": round(size / 1e6, 1) if size else None, "found": found,
            "licence": source.licence, "address": source.address,
        })  # fmt: skip
    return rows


def verify(name: str, root: str | Path | None = None) -> list[tuple[str, bool, str]]:
    """(file, is it right, why) for each file, and a last row for the data as a whole."""
    layout, paths = locate(name, root)
    published = {remote.file: remote for remote in REMOTE.get(name, ())}
    rows = []
    for path in paths:
        wrong = None if path.exists() else "it is missing"
        why = "there is no published checksum for this form"
        if wrong is None and path.name in published:
            wrong, why = checksum_error(path, published[path.name]), "published checksum"
        rows.append((path.name, wrong is None, wrong or why))
    try:
        samples = layout.read(paths)
    except FairvarError as error:
        return [*rows, (name, False, str(error))]
    official = ", the complete official set" if samples.sha256 == SOURCES[name].sha256 else ""
    facts = f"{_provenance(SOURCES[name], samples)}{official}, sha256 {samples.sha256}"
    return [*rows, (name, True, facts)]
