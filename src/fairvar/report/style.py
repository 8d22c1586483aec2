"""The style of all figures (colours and markers of the methods, fonts), and figures as files.

matplotlib is imported inside the functions, because the import takes time that most commands need
not spend. pyplot is not used, and matplotlib's settings are restored.
"""

from __future__ import annotations

import functools
import io
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:  # type checks at run time do not need matplotlib
    Axes = Figure = Any

P = ParamSpec("P")

BASELINE = "FedAvg"
GREY, DARK = "#7f7f7f", "#333333"
MANY = 8  # more methods than these need larger figures
Dashes = str | tuple[int, tuple[float, ...]]
EXACT: Dashes = (0, (4, 1.2))  # variants with a star
DOTTED: Dashes = (0, (1, 1.1))
DASH_DOT: Dashes = (0, (6, 1.5, 1, 1.5))
OWN: Dashes = (0, (5, 1, 1, 1, 1, 1))
# The style of a method is fixed by its name, so that it is the same in every figure. The first six
# have Okabe and Ito's colours, distinct with all common kinds of colour blindness, and solid lines.
# The others differ from these in line style too, and from each other in colour by as much as the
# nearest two of the first (26 in CIE 1976 L*a*b*).
FAMILIES: dict[str, tuple[str, str, Dashes]] = {
    BASELINE: (GREY, "o", "-"),
    "AFL": ("#009E73", "^", "-"),
    "q-FFL": ("#56B4E9", "s", "-"),
    "AAggFF": ("#CC79A7", "v", "-"),
    "FairLoss": ("#0072B2", "D", "-"),
    "FairGrad": ("#D55E00", "p", "-"),
    "TERM": ("#E69F00", "X", DASH_DOT),
    "PropFair": ("#6A3D9A", "h", DOTTED),
    "Superquantile": ("#A9744F", "d", DASH_DOT),
    "GIFAIR": ("#B8A800", "*", DOTTED),
    "Semi-VRed": ("#E7298A", "P", DASH_DOT),
    "FedMGDA+": ("#66A61E", "<", DOTTED),
    "FedFV": ("#00B8C4", ">", DASH_DOT),
    "AdaFed": ("#8C0D26", "H", DOTTED),
    "Ditto": ("#111111", "8", DASH_DOT),
    "FedEBA+": ("#F7908A", "o", DOTTED),
    "FedProx": ("#9A8CE0", "s", DASH_DOT),
}
# Methods of users have a line style of their own; colour and marker follow from the name.
OWN_COLOURS = ("#5F7A8A", "#A05195", "#2F6B3A", "#B5651D", "#C2185B", "#3F51B5")
OWN_MARKERS = ("X", "*", "h", "d", "P", "<", ">")
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": DARK,
    "lines.linewidth": 1.4,
    "figure.dpi": 150,
    "pdf.fonttype": 42,  # journals refuse type 3 fonts
    "svg.hashsalt": "fairvar",  # or the ids would be random
}
# The kinds of files, and what they would say of the day and the program.
KINDS = {"png": ("Software",), "pdf": ("Creator", "Producer", "CreationDate")}
VARIANCE = "variance over clients (fraction² × 100)"


@dataclass(frozen=True)
class LineStyle:
    """How a method is drawn in every figure."""

    colour: str
    marker: str
    dashes: Dashes


def style_of(label: str) -> LineStyle:
    """By the first word of the label. "FairLoss*" is FairLoss, darker and dashed."""
    word = re.split(r"[\s(]", label.strip())[0]
    family = word.rstrip("*")
    number = zlib.crc32(family.encode())
    own = OWN_COLOURS[number % len(OWN_COLOURS)], OWN_MARKERS[number % len(OWN_MARKERS)], OWN
    colour, marker, dashes = FAMILIES.get(family, own)
    exact = word.endswith("*")
    return LineStyle(_darker(colour, 0.55) if exact else colour, marker, EXACT if exact else dashes)


def _darker(colour: str, part: float) -> str:
    return "#" + "".join(f"{int(int(colour[i : i + 2], 16) * part):02x}" for i in (1, 3, 5))


def text_colour(label: str) -> str:
    """The colour of a method's name: the method's, dark enough for small letters on white."""
    colour = style_of(label).colour
    return colour if label.split("(")[0].strip().endswith("*") else _darker(colour, 0.8)


@contextmanager
def _style() -> Iterator[None]:
    """Uses our settings on top of matplotlib's defaults; restores the caller's settings."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _style():
            figure = draw(*args, **kwargs)
            # The layout is fixed here: saving twice, or as PDF, must not move anything.
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            return figure

    return wrapper


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, folder: Path | str, stem: str) -> list[Path]:
    """Writes `stem`.png and `stem`.pdf, without dates, so that equal figures are equal files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with _style():
        for kind, keys in KINDS.items():
            paths.append(folder / f"{stem}.{kind}")
            figure.savefig(paths[-1], dpi=150, metadata=dict.fromkeys(keys))
    _to_palette(paths[0], {line.get_color() for axes in figure.axes for line in axes.lines})
    return paths


def _to_palette(png: Path, drawn: set[Any]) -> None:
    """Uses a palette: figures have few colours, and the file is a third as large. It has the
    colours of the lines and then the most frequent ones; a median cut merges small markers."""
    from matplotlib.colors import to_rgb
    from PIL import Image  # matplotlib needs it as well

    with Image.open(png) as picture:
        red, green, blue = np.asarray(picture.convert("RGB"), np.int32).transpose(2, 0, 1)
    shape, codes = red.shape, (red << 16 | green << 8 | blue).ravel()
    found, place, count = np.unique(codes, return_inverse=True, return_counts=True)
    there = np.stack([found >> 16, found >> 8 & 255, found & 255], 1)
    lines = np.array(sorted(map(to_rgb, drawn))).reshape(-1, 3) * 255
    colours = np.vstack([lines.round().astype(np.int32), there[np.argsort(-count, kind="stable")]])
    nearest = ((there[:, None] - colours[None, :256]) ** 2).sum(-1).argmin(1)
    plain = Image.fromarray(nearest[place].reshape(shape).astype(np.uint8))
    plain.putpalette(colours[:256].astype(np.uint8).tobytes())
    plain.save(png, optimize=True)


_PLACES = re.compile(r' (?:d|x|y)="[^"]*"')
_MORE_DIGITS = re.compile(r"(\.\d\d)\d+")  # a hundredth of a point is enough, and half the size
_NOT_DRAWN = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL
)

_HASHED = re.compile(r"\b[pm][0-9a-f]{10}\b")  # ids of clip paths and markers


def svg(figure: Figure) -> str:
    """The figure as SVG text with letters as outlines, so that no font is needed to show it.

    Without dates and with ids by number, so that equal figures are equal texts: matplotlib names
    clip paths by a hash of their places, whose last bits depend on the processor.
    """
    out = io.StringIO()
    with _style():
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    drawn = re.sub(r"\s*\n\s*", " ", _NOT_DRAWN.sub("", out.getvalue())).strip()
    drawn = _PLACES.sub(lambda places: _MORE_DIGITS.sub(r"\1", places[0]), drawn)
    numbers = {name: f"id{n}" for n, name in enumerate(dict.fromkeys(_HASHED.findall(drawn)))}
    return _HASHED.sub(lambda name: numbers[name[0]], drawn)
