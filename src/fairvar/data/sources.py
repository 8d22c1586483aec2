"""The data sets that are read from files: what they are, where they are found, how they are scaled.

What is slow to decode is kept in the cache, with its SHA-256 in a second file. A damaged one is
decoded again, and a cache that cannot be written costs time only; both print one line on the
standard error. The cache's `sha256/` remembers the checksums of data sets by their files' paths,
sizes, times and inodes, so that a data set is read once to know which it is.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from fairvar.common.files import digest, given_path, open_regular, read_bytes, walk, whole_file
from fairvar.common.process import note
from fairvar.data.dataset import BLOCK, Dataset, Scale
from fairvar.data.fetch import (
    MOST_BYTES,
    REMOTE,
    cache_dir,
    checksum_error,
    datasets_dir,
    file_digest,
)
from fairvar.data.readers import FileLayout, Samples, arrays, images, text, unreadable
from fairvar.errors import BadInput, FairvarError, cause, unknown

MOST_NOTE = 1 << 10  # bytes of a remembered checksum
VERSION = "1"  # of the decoding: raised when the same files would give other arrays
# A file may be written again within one tick of its clock, with the same time (FAT's are 2 s long).
SETTLED = 2.0
Root = str | Path | None  # where the files are; None: in the usual places
RESEARCH = "published for research, no explicit licence; cite "


@dataclass(frozen=True)
class Source:
    """A data set of files. `folders`: where below a folder of data sets it may be."""

    title: str
    layouts: tuple[FileLayout, ...]
    folders: tuple[str, ...] = ("",)
    scale: Scale | None = None  # None: mean and sd of the training pixels themselves
    images: int = 0  # official number of samples, training and test part together; 0: any
    licence: str = "your own"
    address: str = ""
    sha256: str = ""  # `Raw.sha256` of the complete set in the official order, where known


# Constants of FL-bench, Tiny ImageNet's divided by 255. Fashion-MNIST is not
# in FL-bench's list; these are the mean and sd of its training pixels that everybody uses.
SOURCES: dict[str, Source] = {
    "mnist": Source(
        "MNIST", arrays.IDX_LAYOUTS, ("mnist", "MNIST/samples", "MNIST"),
        Scale((0.1307,), (0.3015,)), 70_000, RESEARCH + "LeCun et al. 1998",
        "http://yann.lecun.com/exdb/mnist/",
        "44bc8ab590f8ecabf1236a07ca331dd15accb2bd54758e323d5dc4157b76c03a",
    ),
    "fashion_mnist": Source(
        "Fashion-MNIST", arrays.IDX_LAYOUTS,
        ("fashion_mnist", "FashionMNIST/samples", "FashionMNIST", "fashion-mnist"),
        Scale((0.2860,), (0.3530,)), 70_000, "MIT",
        "https://github.com/zalandoresearch/fashion-mnist",
    ),
    "cifar10": Source(
        "CIFAR-10", arrays.cifar_layouts(arrays.CIFAR10),
        ("cifar10", "cifar-10-batches-py", "cifar-10-batches-bin", "cifar10/cifar-10-batches-py",
         "cifar10/cifar-10-batches-bin", ""),
        Scale((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)), 60_000,
        RESEARCH + "Krizhevsky 2009", "https://www.cs.toronto.edu/~kriz/cifar.html",
        "61be567bc44e895e4a337e8777d1ea100e00a033afc62281b859d61836d84711",
    ),
    "cifar100": Source(
        "CIFAR-100", arrays.cifar_layouts(arrays.CIFAR100),
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
    "shakespeare": Source(
        "Shakespeare by speaking role", text.TEXT_LAYOUTS,
        ("shakespeare", "tinyshakespeare", ""), None, 0, "public domain",
        "https://github.com/karpathy/char-rnn",
        "e6e4946803d234e5cdb948398f4a024595c65fc162bb297a9d7f9b0c5f596349",
    ),
    "folder": Source("class sub-folders of images (root: the folder)", images.FOLDER_LAYOUTS),
    "npz": Source("arrays x, y, groups, x_test, y_test (root: the file)", arrays.NPZ_LAYOUTS),
}  # fmt: skip
OWN = ("folder", "npz")
SHEETS = "index.txt.xz"  # the index of CIFAR as WebP sheets (tools/unpack_webp.py)


def load(name: str, root: Root = None, *, pool: bool = False) -> Dataset:
    """A data set by name: training and test part merged, or with the test part as the pool."""
    layout, paths = locate(name, root)
    samples, source = read_through_cache(name, layout, paths), SOURCES[name]
    if name == "npz" and len(np.unique(samples.y)) < 2:
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
        name, samples.x[:cut], samples.y[:cut], samples.classes,
        pool_x=samples.x[cut:] if pool else None, pool_y=samples.y[cut:] if pool else None,
        groups=None if groups is None else groups[:cut],
        sha256=samples.sha256, provenance=_provenance(source, samples), scale=scale,
    )  # fmt: skip


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


def _provenance(source: Source, samples: Samples) -> str:
    found, official = len(samples.y), source.images
    share = f"{100 * found / official:.3g} % of " if official else ""
    share = {1.0: "", 0.5: "half of "}.get(found / official if official else 1.0, share)
    title = source.title if official else samples.note
    parts = f"{samples.train} training and {found - samples.train} test images"
    if samples.y.ndim > 1:
        parts = f"{found} sequences"
    return f"{share}{title}: {parts}" + (f", {samples.note}" if official else "")


def _places(name: str, root: Root) -> Iterator[Path]:
    """Where a set may be: below the given root only, or below the usual two folders."""
    folders = SOURCES[name].folders
    bases = [given_path(b) for b in (os.environ.get("FAIRVAR_DATA"), datasets_dir()) if b]
    if root is not None:
        bases, folders = [given_path(root)], ("", *(f for f in folders if f))
    yield from (base / folder for base in bases for folder in folders)


def locate(name: str, root: Root = None) -> tuple[FileLayout, list[Path]]:
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


def _not_found(name: str, root: Root) -> BadInput:
    if name in OWN:
        there = given_path(root or "").exists()
        kind = "folder" if name == "folder" else ".npz file"
        return BadInput(f"root = {str(root)!r} {f'is no {kind}' if there else 'does not exist'}")
    way = f"point to it or run: fairvar data fetch {name}"
    sheets = [p for p in _places(name, root) if name.startswith("cifar") and (p / SHEETS).is_file()]
    if sheets:
        leave = "leave root out and " if root is not None else ""
        command = f"python tools/unpack_webp.py {shlex.quote(str(sheets[0]))}"
        way = f"{leave}unpack its WebP sheets first: {command}"
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
            with suppress(BadInput):
                found = str(locate(name)[1][0])
        size = sum(remote.size for remote in REMOTE.get(name, ()))
        rows.append({
            "name": name, "what": source.title, "images": source.images or None,
            "download_mb": round(size / 1e6, 1) if size else None, "found": found,
            "licence": source.licence, "address": source.address,
        })  # fmt: skip
    return rows


def verify(name: str, root: Root = None) -> list[tuple[str, bool, str]]:
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


# --- the cache --------------------------------------------------------------------------------


def read_through_cache(name: str, layout: FileLayout, paths: Sequence[Path]) -> Samples:
    """`layout.read(paths)`, from the cache if these very files were decoded before."""
    identity = _identity(name, paths) if layout.cached else None
    file = cache_dir() / f"{name}-{identity}.npz"
    found = _load(file) if identity else None
    if found is None:
        found = layout.read(paths)
        try:
            if identity:
                _save(file, found)
        except OSError as error:
            note(f"fairvar: cannot keep the decoded {name} in {file.parent} ({error.strerror}); "
                 "it will be decoded again next time")  # fmt: skip
    for other, source in SOURCES.items():  # MNIST and Fashion-MNIST have the same file names
        if other != name and source.sha256 == found.sha256:
            raise BadInput(f"the files found for {name} are those of {other}; check root")
    return found


def _identity(name: str, paths: Sequence[Path]) -> str | None:
    """Of an archive its content, of a folder the state of its files; None while these are new."""
    found = hashlib.sha256(f"{VERSION} {name}".encode())
    for path in paths:
        try:
            state, settled = _state(path) if path.is_dir() else (file_digest(path).encode(), True)
        except OSError as error:
            raise unreadable(path, error) from None
        if not settled:
            return None
        found.update(state)
    return found.hexdigest()[:12]


def sha256_of(name: str, root: Root = None) -> str:
    """`Dataset.sha256` of what `load` would give; the files are read if they are new here or their
    state has changed."""
    layout, paths = locate(name, root)
    try:
        states = [_state(path) for path in paths]
    except OSError:
        return read_through_cache(name, layout, paths).sha256  # which says what is missing
    summed = hashlib.sha256(f"{VERSION} {name}".encode())
    for path, (state, _) in zip(paths, states, strict=True):
        summed.update(os.fsencode(path.absolute()) + b"\n" + state)
    key = summed.hexdigest()
    file = cache_dir() / "sha256" / key[:32]

    def note(found: str) -> str:
        """The checksum and one of itself, by which a damaged note is found."""
        return f"{found} {hashlib.sha256(f'{key} {found}'.encode()).hexdigest()}\n"

    settled = all(settled for _, settled in states)
    if settled:
        with suppress(OSError, ValueError):
            known = read_bytes(file, MOST_NOTE).decode("ascii")
            if known == note(known.partition(" ")[0]):
                return known.partition(" ")[0]
    found = read_through_cache(name, layout, paths).sha256
    if settled:
        with suppress(OSError), whole_file(file) as out:  # not kept: read again next time
            out.write(note(found).encode())
    return found


def _state(path: Path) -> tuple[bytes, bool]:
    """Names, sizes, times and inodes of a file or of all files below a folder, and whether they are
    older than a tick of the clock. (Programs can set a file's time back, but not its entry's.)"""
    files = [path]
    if path.is_dir():
        files = sorted(Path(e.path) for e in walk(path) if not e.is_dir(follow_symlinks=False))
    lines, newest = [], 0
    for file in files:
        facts = file.stat() if file.exists() else file.lstat()
        newest = max(newest, facts.st_mtime_ns, facts.st_ctime_ns)
        numbers = (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)
        lines.append("\0".join((os.path.relpath(file, path.parent), *map(str, numbers))) + "\n")
    settled = newest < time.time_ns() - SETTLED * 1e9
    return "".join(lines).encode(errors="surrogateescape"), settled


def _save(file: Path, samples: Samples) -> None:
    numbers = np.array([samples.train, samples.classes])
    with whole_file(file) as out:
        np.savez(out, x=samples.x, y=samples.y, numbers=numbers, note=np.array(samples.note))
    with whole_file(file.with_name(f"{file.name}.sha256")) as out:
        out.write(f"{file_digest(file)}  {file.name}\n".encode())


def _load(file: Path) -> Samples | None:
    """None if it is not there or not what was written."""
    if not file.is_file():
        return None
    try:
        wanted = read_bytes(file.with_name(f"{file.name}.sha256"), 1000).decode("ascii").split()[0]
        with open_regular(file, MOST_BYTES) as stream:
            if digest(stream) != wanted:
                raise ValueError("its checksum is wrong")
            with np.load(stream, allow_pickle=False) as arrays:
                train, classes = arrays["numbers"].tolist()
                return Samples(arrays["x"], arrays["y"], train, classes, note=str(arrays["note"]))
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile) as error:
        note(f"fairvar: {file.name} in the cache is damaged ({cause(error)}); decoding the images "
             "again")  # fmt: skip
        return None
