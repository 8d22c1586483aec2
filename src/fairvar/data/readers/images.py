"""Sets of image files: Tiny ImageNet, and any folder with one sub-folder per class."""

from __future__ import annotations

import io
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from fairvar.data.readers import FileLayout, FileTree, Samples, open_tree, refused
from fairvar.errors import BadInput, FairvarError, cause

ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm", ".pgm")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM")
MOST_PIXELS = 1 << 20  # of one image of a folder: larger ones are not for training as they are
MOST_RATIO = 200  # of pixels to the bytes of their files, above `ANY_RATIO` bytes
ANY_RATIO = 256 << 20
GREY, COLOUR = ("1", "L"), ("RGB", "RGBA", "P", "CMYK", "LA", "YCbCr")
Sample = tuple[str, int]  # name in the tree, class


@contextmanager
def pillow_image(where: str, content: bytes) -> Iterator[Any]:
    """An image opened by Pillow, whose size is checked before any pixel is decoded."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise BadInput("reading image files needs Pillow: pip install 'fairvar[vision]'") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a decompression bomb
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise refused(where, f"it claims {image.width} × {image.height} pixels")
                yield image
    except FairvarError:
        raise
    except UnidentifiedImageError:  # its text is an address in memory
        raise refused(where, f"it is no intact image of the kinds {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        raise refused(where, f"it is no intact image ({cause(error)})") from None


def decode(
    where: str, content: bytes, channels: int, size: tuple[int, int]
) -> UInt8[np.ndarray, "channels height width"]:
    """One image of the given width and height; grey ones become RGB where RGB is wanted."""
    with pillow_image(where, content) as image:
        if image.size != size:
            raise refused(where, f"it has {image.width} × {image.height} pixels where "
                                 f"{size[0]} × {size[1]} are due; use one size")  # fmt: skip
        if image.mode not in (*GREY, *COLOUR):
            raise refused(where, f"its pixels are of mode {image.mode}; save it with 8 bits each")
        pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _decode_all(
    tree: FileTree, train: list[Sample], test: list[Sample], classes: int, note: str,
    channels: int, size: tuple[int, int],
) -> Samples:  # fmt: skip
    samples = train + test
    x = np.empty((len(samples), channels, size[1], size[0]), dtype=np.uint8)
    read = 0
    for row, (name, _) in enumerate(samples):
        content = tree.read(name)
        read += len(content)
        if x[:row].nbytes > max(ANY_RATIO, MOST_RATIO * read):
            raise refused(tree.where, f"its images unpack to {MOST_RATIO} times their files' size")
        x[row] = decode(name, content, channels, size)
    y = np.array([label for _, label in samples], dtype=np.int64)
    return Samples(x, y, len(train), classes, note=note)


def _form(tree: FileTree, samples: Sequence[Sample]) -> tuple[int, tuple[int, int]]:
    """Channels and size: all images must be as large as the first, and are grey only if all are."""
    channels, size = 1, (0, 0)
    for name, _ in samples:
        with pillow_image(name, tree.read(name)) as image:
            size = image.size if size == (0, 0) else size
            if image.mode not in GREY:
                channels = 3
                break
    return channels, size


# --- Tiny ImageNet ---------------------------------------------------------------------------

_TRAIN = re.compile(r"(?:^|.*/)train/([^/]+)/images/[^/]+\.JPEG")
_VALID = re.compile(r"(?:^|.*/)val/images/([^/]+\.JPEG)")
TINY_SIDE = 64


def read_tiny(paths: Sequence[Path]) -> Samples:
    """Classes are the folders of train in alphabetical order; val is the official test part."""
    with open_tree(paths[0], (".jpeg", "val_annotations.txt")) as tree:
        names = sorted(tree.names)
        folders = [(name, found[1]) for name in names if (found := _TRAIN.fullmatch(name))]
        code = {wnid: label for label, wnid in enumerate(sorted({w for _, w in folders}))}
        if not folders:
            raise refused(tree.where, "it has no train/<class>/images/*.JPEG")
        train = [(name, code[wnid]) for name, wnid in folders]
        answers = _annotations(tree, code)
        images = {found[1]: name for name in names if (found := _VALID.fullmatch(name))}
        if images.keys() != answers.keys():
            odd = sorted(images.keys() ^ answers.keys())[0]
            raise refused(tree.where, f"{odd[:80]!r} is not both in val/images and in "
                                      "val_annotations.txt")  # fmt: skip
        test = [(images[base], answers[base]) for base in sorted(images)]
        size = (TINY_SIDE, TINY_SIDE)
        return _decode_all(tree, train, test, len(code), "original JPEG files", 3, size)


def _annotations(tree: FileTree, code: dict[str, int]) -> dict[str, int]:
    """Class of each validation image: lines of file name, class and a box."""
    lists = [name for name in tree.names if name.endswith("val/val_annotations.txt")]
    if len(lists) != 1:
        raise refused(tree.where, f"it has {len(lists)} files val/val_annotations.txt, not one")
    answers: dict[str, int] = {}
    lines = tree.read(lists[0]).decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        image, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in code or image in answers:
            raise refused("val_annotations.txt", f"line {number} names an unknown class or an "
                                                 "image for the second time")  # fmt: skip
        answers[image] = code[wnid]
    return answers


def match_tiny(path: Path) -> list[Path]:
    if (path / "val" / "val_annotations.txt").is_file():
        return [path]
    if path.is_file():
        return [path] if path.name.endswith((".zip", ".tar.xz", ".tar.gz")) else []
    found = sorted(path.glob("tiny-imagenet-200*")) if path.is_dir() else []
    return [file for file in found if file.name.endswith((".zip", ".tar.xz", ".tar.gz"))][:1]


# --- folders ---------------------------------------------------------------------------------


def read_folder(paths: Sequence[Path]) -> Samples:
    """Each sub-folder is a class; or train/ and test/ (or val/) hold one sub-folder per class."""
    with open_tree(paths[0], ENDINGS) as tree:
        parts = _parts(paths[0])
        by_part: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for name in sorted(tree.names):
            pieces = name.split("/")
            part = pieces.pop(0) if parts and pieces[0] in parts else ""
            if len(pieces) > 1 and bool(part) == bool(parts):
                by_part[part].append((name, pieces[0]))
        named = [by_part[part] for part in (parts or ("", "none"))]
        classes = sorted({kind for _, kind in named[0]})
        if len(classes) < 2:
            raise BadInput(f"{paths[0]} has {len(classes)} class sub-folders with images; it "
                           "takes two or more")  # fmt: skip
        code = {kind: label for label, kind in enumerate(classes)}
        for name, kind in named[1]:
            if kind not in code:
                raise BadInput(f"{name} is of class {kind!r}, which has no training image")
        train, test = ([(name, code[kind]) for name, kind in part] for part in named)
        form = _form(tree, train + test)
        return _decode_all(tree, train, test, len(classes), "own folder of images", *form)


def _parts(folder: Path) -> tuple[str, str] | None:
    """The names of the two parts, if the folder is divided into a training and a test one."""
    for test in ("test", "val"):
        if all(any((folder / part).glob("*/")) for part in ("train", test)):
            return "train", test
    return None


TINY_LAYOUTS = (FileLayout(match_tiny, read_tiny, cached=True),)
FOLDER_LAYOUTS = (
    FileLayout(lambda path: [path] if path.is_dir() else [], read_folder, cached=True),
)
