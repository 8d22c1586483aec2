"""Pictures of how evenly clients are served. Plain arrays in, a matplotlib `Figure` out.

Accuracies are fractions and variances fraction², as everywhere in fairvar; the axes show percent
and fraction² × 100, as papers print them. matplotlib is imported where it is used, so that a core
install does without it; no function touches pyplot or leaves a setting behind.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairvar.errors import BadInput
from fairvar.metrics import pareto_front

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:  # for those who check types while running
    Axes = Figure = Any

Floats = NDArray[np.float64]
P = ParamSpec("P")

BASELINE = "FedAvg"
GREY, DARK = "#7f7f7f", "#333333"
# Okabe and Ito's colours, told apart with all common kinds of colour blindness; with a marker each.
FAMILIES = {
    BASELINE: (GREY, "o"),
    "AFL": ("#009E73", "^"),
    "q-FFL": ("#56B4E9", "s"),
    "AAggFF": ("#CC79A7", "v"),
    "FairLoss": ("#0072B2", "D"),
    "FairGrad": ("#D55E00", "p"),
}
OTHERS = (("#E69F00", "X"), ("#B8A800", "*"), ("#6A3D9A", "h"), ("#7A5230", "d"))
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
}
VARIANCE = "variance over clients (fraction² × 100)"


@dataclass(frozen=True)
class Look:
    """How a method is drawn, in every figure the same."""

    colour: str
    marker: str
    dashes: str | tuple[int, tuple[float, ...]]


def look(label: str) -> Look:
    """By the first word of the label. "FairLoss*" is FairLoss, darker and dashed."""
    word = re.split(r"[\s(]", label.strip())[0]
    family = word.rstrip("*")
    colour, marker = FAMILIES.get(family) or OTHERS[zlib.crc32(family.encode()) % len(OTHERS)]
    if not word.endswith("*"):
        return Look(colour, marker, "-")
    return Look(_darker(colour, 0.55), marker, (0, (4, 1.2)))


def _darker(colour: str, part: float) -> str:
    return "#" + "".join(f"{int(int(colour[i : i + 2], 16) * part):02x}" for i in (1, 3, 5))


def _ink(label: str) -> str:
    """The colour of a method's name: its own, dark enough to read small on white."""
    colour = look(label).colour
    return colour if label.split("(")[0].strip().endswith("*") else _darker(colour, 0.8)


def require_matplotlib() -> None:
    """Raises `BadInput` if there is no matplotlib: to be asked before an hour of training."""
    try:
        import matplotlib.style  # noqa: F401
    except ImportError:
        raise BadInput('figures need matplotlib: pip install "fairvar[plot]"') from None


@contextmanager
def _style() -> Iterator[None]:
    """Our settings on matplotlib's defaults, whatever the caller's own are; then as before."""
    require_matplotlib()
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _style():
            figure = draw(*args, **kwargs)
            # the layout is settled here once: saving twice, or as PDF, must not move anything
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            return figure

    return wrapper


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, folder: Path | str, stem: str) -> list[Path]:
    """`stem`.png and `stem`.pdf; without dates, so that equal figures are equal files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    nothing = {"png": ("Software",), "pdf": ("Creator", "Producer", "CreationDate")}
    paths = []
    with _style():
        for kind, keys in nothing.items():
            paths.append(folder / f"{stem}.{kind}")
            figure.savefig(paths[-1], dpi=150, metadata=dict.fromkeys(keys))
    return paths


def _array(values: Any, name: str, ndim: int) -> Floats:
    values = values.detach().cpu().numpy() if hasattr(values, "detach") else values
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != ndim or array.size == 0:
        raise BadInput(f"{name} has shape {array.shape}: give {ndim} axes, none of them empty")
    return array


def _some(values: Mapping[str, Any] | Sequence[Any], name: str) -> None:
    if not values:
        raise BadInput(f"{name} is empty: there is nothing to draw")


# --- 1. accuracy of every client -----------------------------------------------------------------
@_styled
def client_accuracies(
    accuracy: Mapping[str, ArrayLike], noise: Mapping[str, ArrayLike] | None = None
) -> Figure:
    """Clients from worst to best served, a panel per method with the baseline in grey behind it.

    Filled between the two: where the method serves that rank better (its colour) or worse (grey).
    The long line is the mean, the short one the mean of the worst tenth. `noise` holds a standard
    error per client, drawn as a band. Clients that were not measured (nan) are left out.
    """
    _some(accuracy, "accuracy")
    curves = {label: _array(values, label, 1) * 100 for label, values in accuracy.items()}
    errors = {k: _array(values, k, 1) * 100 for k, values in (noise or {}).items()}
    first = BASELINE if BASELINE in curves else next(iter(curves))
    down = math.ceil(len(curves) / 4)
    across = math.ceil(len(curves) / down)
    figure = _figure(max(3.4, 1.75 * across), 1.7 * down + 0.45)
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, label in zip(panels, curves, strict=False):
        _accuracy_panel(
            axes, label, curves[label], curves[first], label == first, errors.get(label)
        )
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
        above = panels[np.flatnonzero(panels == axes)[0] - across]
        above.tick_params(labelbottom=True)
    seen = np.concatenate([*curves.values(), [np.nan]])
    if np.isfinite(seen).any():
        low, high = np.nanmin(seen), np.nanmax(seen)
        room = 0.06 * max(high - low, 1.0)
        panels[0].set_ylim(max(low - room, -1), min(high + room, 101))
    panels[0].set(xlim=(0, 100), xticks=(0, 50, 100))
    figure.supylabel("accuracy on the client (%)", fontsize=8)
    told = f"grey: {first}; dashed: mean; bar: mean of the worst 10 %"
    figure.supxlabel(f"clients from worst to best served (%)\n{told}", fontsize=8)
    return figure


def _accuracy_panel(
    axes: Axes, label: str, own: Floats, base: Floats, alone: bool, error: Floats | None
) -> None:
    colour = look(label).colour
    axes.set_title(label, loc="left", fontweight="bold", color=DARK, pad=13)
    rank, height = _ranked(axes, base, GREY, 1.0)
    x, y = (rank, height) if alone else _ranked(axes, own, colour, 1.6)
    told = "div."
    if len(y):
        tenth = y[: math.ceil(len(y) / 10)].mean()
        told = f"mean {y.mean():.1f}, worst 10 % {tenth:.1f}"
    if len(y) and len(height) and not alone:
        behind = np.interp(x, rank, height)
        for where, fill in ((y >= behind, colour), (y < behind, GREY)):
            axes.fill_between(
                x, y, behind, where=where, interpolate=True, color=fill, alpha=0.3, lw=0
            )
    if error is not None and len(error) == len(own) and len(y):
        e = error[np.isfinite(own)][np.argsort(own[np.isfinite(own)], kind="stable")]
        axes.fill_between(x, y - e, y + e, color=colour, alpha=0.15, lw=0)
    axes.text(0, 1.03, told, transform=axes.transAxes, fontsize=6.5, color=DARK, va="bottom")


def _ranked(axes: Axes, values: Floats, colour: str, width: float) -> tuple[Floats, Floats]:
    """Draws a sorted curve with its two means; returns it as (rank in percent, accuracy)."""
    y = np.sort(values[np.isfinite(values)])
    x = (np.arange(len(y)) + 0.5) / max(len(y), 1) * 100
    if len(y):
        axes.plot(x, y, color=colour, lw=width)
        tenth = math.ceil(len(y) / 10)
        axes.plot([0, 100], [y.mean()] * 2, color=colour, lw=0.7, ls=(0, (3, 2)))
        axes.plot([0, 100 * tenth / len(y)], [y[:tenth].mean()] * 2, color=colour, lw=2.6,
                  solid_capstyle="butt")  # fmt: skip
    return x, y


# --- 2. accuracy against variance ----------------------------------------------------------------
@dataclass(frozen=True)
class Point:
    """A configuration: mean accuracy (fraction), variance over clients (fraction²), the errors."""

    label: str
    accuracy: float
    variance: float
    chosen: bool = False
    accuracy_error: float | None = None
    variance_error: float | None = None


@_styled
def front(points: Sequence[Point], noise_floor: float | None = None) -> Figure:
    """Lower right is better. Dots: all configurations; marks: the chosen ones; line: Pareto front.

    The axes are cut to the neighbourhood of the chosen ones, or one diverged configuration would
    press the rest into a corner; how many lie outside is written above.
    """
    kept = [p for p in points if math.isfinite(p.accuracy) and math.isfinite(p.variance)]
    _some(kept, "points (with finite accuracy and variance)")
    figure = _figure(4.6, 3.5)
    axes = figure.subplots()
    x, y = np.array([[p.accuracy * 100, p.variance * 100] for p in kept]).T
    for p in kept:
        kind = look(p.label)
        axes.plot(
            p.accuracy * 100, p.variance * 100, "o", ms=2.8, mew=0, color=kind.colour, alpha=0.45
        )
        if p.chosen:
            axes.errorbar(
                p.accuracy * 100, p.variance * 100, _percent(p.variance_error),
                _percent(p.accuracy_error), fmt=kind.marker, ms=7, color=kind.colour, mec="white",
                mew=0.7, elinewidth=0.8, zorder=4,
            )  # fmt: skip
    _front_limits(axes, kept, noise_floor)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    i = pareto_front(x, y)
    reach = np.r_[min(left, x[i[0]]), x[i], x[i[-1]]], np.r_[y[i[0]], y[i], max(top, y[i[-1]])]
    axes.step(*reach, where="pre", color=DARK, lw=0.8, zorder=1.5)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    outside = len(points) - int(((x >= left) & (x <= right) & (y >= bottom) & (y <= top)).sum())
    if outside:
        told = f"{outside} of {len(points)} configurations outside the axes or diverged"
        axes.set_title(told, loc="right", fontsize=6.5, color=DARK)
    axes.set(xlabel="mean accuracy over clients (%)", ylabel=VARIANCE)
    figure.draw_without_rendering()
    _place_labels(axes, [p for p in kept if p.chosen])
    return figure


def _percent(error: float | None) -> float:
    return 100 * error if error is not None and math.isfinite(error) else 0.0


def _front_limits(axes: Axes, points: Sequence[Point], noise_floor: float | None) -> None:
    chosen = np.array([p.chosen for p in points])
    main = chosen if chosen.any() else ~chosen
    x = np.array([(100 * p.accuracy, _percent(p.accuracy_error)) for p in points])
    y = np.array([(100 * p.variance, _percent(p.variance_error)) for p in points])
    axes.set_xlim(_reach(x[:, 0], x[:, 1], main))
    low, high = _reach(y[:, 0], y[:, 1], main)
    if noise_floor is not None and math.isfinite(noise_floor):
        floor = 100 * noise_floor
        low, high = min(low, floor - (high - floor) / 8), max(high, floor + 1e-9)
        axes.axhspan(low - abs(low), floor, color="#e3e3e3", lw=0, zorder=0)
        words: dict[str, Any] = {"fontsize": 6.5, "color": DARK, "ha": "right", "va": "top"}
        axes.annotate(
            "noise floor: what finite test sets add", xy=(0.99, floor), xytext=(0, -2),
            xycoords=("axes fraction", "data"), textcoords="offset points", **words,
        )  # fmt: skip
    axes.set_ylim(low, high)


def _reach(value: Floats, error: Floats, main: NDArray[np.bool_]) -> tuple[float, float]:
    """Limits around the main points and their errors; the others widen them to double at most."""
    low, high = (value - error)[main].min(), (value + error)[main].max()
    span = max(high - low, 1e-3 * abs(high), 1e-6)
    low = min(low, max(value.min(), low - span / 2))
    high = max(high, min(value.max(), high + span / 2))
    return float(low - span / 8), float(high + span / 8)


_ANGLES = [(1, 1), (1, -1), (-1, 1), (-1, -1), (1, 0), (-1, 0), (0, 1), (0, -1)]
_PLACES = [(r, np.array(side)) for r, side in product((4, 9, 15, 23, 33, 45), _ANGLES)]


def _place_labels(axes: Axes, points: Sequence[Point]) -> None:
    """Each label at the first of 48 places around its mark that touches nothing placed before.

    Deterministic: near places first, points from left to right. If all are taken, the least bad.
    """
    from matplotlib.patheffects import withStroke

    taken = _marks(axes, points) + [np.array(t.get_window_extent().extents) for t in axes.texts]
    frame = np.array(axes.bbox.extents)
    pixel = axes.figure.dpi / 72  # per typographic point
    for p in sorted(points, key=lambda p: (p.accuracy, p.variance, p.label)):
        place = (100 * p.accuracy, 100 * p.variance)
        centre = axes.transData.transform(place)
        words: dict[str, Any] = {"fontsize": 7, "color": _ink(p.label), "ha": "center"}
        trial = axes.text(0, 0, p.label, va="center", **words)
        half = np.array(trial.get_window_extent().size) / 2
        trial.remove()
        best, found, least = (0, 0.0, 0.0), frame, math.inf
        for r, side in _PLACES:
            middle = centre + (r * pixel + half) * side
            box = np.r_[middle - half, middle + half]
            bad = sum(_overlap(box, other) for other in taken)
            bad += 4 * (4 * half.prod() - _overlap(box, frame))
            if bad + 1 < least:
                best, found, least = (r, *((middle - centre) / pixel)), box, bad
        taken.append(found)
        leader = {"arrowstyle": "-", "lw": 0.5, "color": _ink(p.label), "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            p.label, place, best[1:], textcoords="offset points", va="center", zorder=5, **words,
            arrowprops=leader if best[0] > 4 else None,
            path_effects=[withStroke(linewidth=1.5, foreground="white")],
        )  # fmt: skip


def _marks(axes: Axes, points: Sequence[Point]) -> list[Floats]:
    """Boxes (left, bottom, right, top) in pixels of the marks and both arms of their errors."""
    boxes = []
    for p in points:
        at = np.array([100 * p.accuracy, 100 * p.variance])
        arm = np.array([_percent(p.accuracy_error), _percent(p.variance_error)])
        low, centre, high = axes.transData.transform([at - arm, at, at + arm])
        boxes.append(np.r_[centre - 8, centre + 8])
        boxes.append(np.r_[low[0], centre[1] - 2, high[0], centre[1] + 2])
        boxes.append(np.r_[centre[0] - 2, low[1], centre[0] + 2, high[1]])
    return boxes


def _overlap(a: Floats, b: Floats) -> float:
    """Common area of two boxes (left, bottom, right, top)."""
    sides = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
    return float(np.maximum(sides, 0).prod())


# --- 3. the partition ----------------------------------------------------------------------------
@_styled
def partition(
    counts: ArrayLike, title: str = "", numbers: Mapping[str, str] | None = None
) -> Figure:
    """Samples by (client, class): sizes above, each client's mix of classes below, largest first.

    A map rather than stacked bars: it stays readable with 200 classes and needs no 200 colours.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, PowerNorm
    from matplotlib.ticker import MaxNLocator

    table = _array(counts, "counts", 2)
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise BadInput("counts must be numbers of samples, 0 or more, by client and class")
    size = table.sum(1)
    table = table[np.argsort(-size, kind="stable")]
    size = table.sum(1)
    share = np.divide(table, size[:, None], out=np.zeros_like(table), where=size[:, None] > 0)
    clients, classes = table.shape
    figure = _figure(6.4 if numbers else 4.6, 3.4 if classes <= 50 else 4.4)
    shape: Any = [["bars", "numbers"], ["heat", "numbers"]] if numbers else [["bars"], ["heat"]]
    panels = figure.subplot_mosaic(
        shape, height_ratios=[1, 2.6], width_ratios=[1, 0.42][: len(shape[0])]
    )
    bars, heat = panels["bars"], panels["heat"]
    bars.bar(np.arange(clients), size, width=0.8, color=GREY)
    bars.set(ylabel="samples", xlim=(-0.5, clients - 0.5))
    bars.tick_params(labelbottom=False)
    bars.set_title(title, loc="left", fontweight="bold")
    blues = ListedColormap(colormaps["Blues"](np.linspace(0.18, 1, 256)))
    image = heat.imshow(np.where(table > 0, share * 100, np.nan).T, aspect="auto", origin="lower",
                        cmap=blues, norm=PowerNorm(0.5, 0, max(100 * share.max(), 1e-9)),
                        interpolation="nearest")  # fmt: skip
    heat.set(xlabel="client, by size", ylabel="class")
    for axis in (bars.xaxis, heat.xaxis, heat.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=heat, location="bottom", aspect=40, pad=0.02, shrink=0.8,
                    label="share of the client's samples (%); white: none")  # fmt: skip
    if numbers:
        _numbers(panels["numbers"], numbers)
    return figure


def _numbers(axes: Axes, numbers: Mapping[str, str]) -> None:
    axes.set_axis_off()
    words: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    for i, (name, value) in enumerate(numbers.items()):
        for text, down, size in ((value, 0, 10), (name, 13, 7)):
            note = axes.annotate(
                text, (0, 1), (0, -30 * i - down), fontsize=size, va="top", **words
            )
            note.set_in_layout(False)  # or a long list would squeeze the map


# --- 4. learning curves --------------------------------------------------------------------------
@_styled
def learning_curves(
    rounds: ArrayLike,
    mean: Mapping[str, ArrayLike],
    low: Mapping[str, ArrayLike] | None = None,
    high: Mapping[str, ArrayLike] | None = None,
    ylabel: str = "mean accuracy over clients",
) -> Figure:
    """A line per method, whole on the left, its last half enlarged on the right and named there.

    Values are drawn as they are given. A line that ends in nan is crossed at its last number.
    """
    _some(mean, "mean")
    x = _array(rounds, "rounds", 1)
    lines = {label: _array(values, label, 1) for label, values in mean.items()}
    for label, y in lines.items():
        if len(y) != len(x):
            raise BadInput(f"{label} has {len(y)} values for {len(x)} rounds; give one per round")
    figure = _figure(6.4, 2.9)
    whole, late = figure.subplots(1, 2)
    for axes, label in product((whole, late), lines):
        y, kind = lines[label], look(label)
        axes.plot(x, y, color=kind.colour, ls=kind.dashes, lw=1.2, zorder=3)
        if low and high and label in low and label in high:
            between = _array(low[label], label, 1), _array(high[label], label, 1)
            axes.fill_between(
                x, *between, color=kind.colour, alpha=max(0.06, 0.25 / len(lines)), lw=0
            )
        alive = np.flatnonzero(np.isfinite(y))
        if len(alive) and alive[-1] < len(y) - 1:
            axes.plot(x[alive[-1]], y[alive[-1]], "x", color=kind.colour, ms=5, zorder=4)
    half = len(x) // 2
    whole.set(xlabel="round", ylabel=ylabel, xlim=(x[0], max(x[-1], x[0] + 1)))
    late.set(xlabel="round (last half)", xlim=(x[half], max(x[-1], x[half] + 1)))
    tail = np.concatenate([y[half:] for y in lines.values()])
    if np.isfinite(tail).any():
        room = 0.06 * max(np.nanmax(tail) - np.nanmin(tail), 1e-9)
        late.set_ylim(np.nanmin(tail) - room, np.nanmax(tail) + room)
    figure.draw_without_rendering()
    _name_ends(late, {label: float(y[-1]) for label, y in lines.items()}, float(x[-1]))
    return figure


def _name_ends(axes: Axes, ends: Mapping[str, float], x: float) -> None:
    """Names right of the axes at the height of the lines' ends, pushed apart just enough."""
    point = 72 / axes.figure.dpi
    _, bottom, _, top = np.array(axes.bbox.extents) * point
    # a line that diverged has no end; its name goes to the bottom
    goal = {k: axes.transData.transform((x, y))[1] * point if math.isfinite(y) else bottom
            for k, y in ends.items()}  # fmt: skip
    order = sorted(goal, key=lambda k: (goal[k], k))
    spots = _spread(np.array([goal[k] for k in order]), 9.0, bottom + 2, top - 2)
    for label, spot in zip(order, spots, strict=True):
        height = (spot - bottom) / (top - bottom)
        leader = {"arrowstyle": "-", "lw": 0.5, "color": look(label).colour, "shrinkA": 1,
                  "shrinkB": 1, "relpos": (0, 0.5)}  # fmt: skip
        words: dict[str, Any] = {"va": "center", "fontsize": 7, "color": _ink(label)}
        if math.isfinite(ends[label]):
            axes.annotate(label, (x, ends[label]), (1.09, height), textcoords="axes fraction",
                          annotation_clip=False, arrowprops=leader, **words)  # fmt: skip
        else:
            axes.text(1.09, height, f"{label} (div.)", transform=axes.transAxes, **words)


def _spread(goal: Floats, gap: float, low: float, high: float) -> Floats:
    """Rising heights at least `gap` apart, near the rising `goal`, inside [low, high]."""
    if len(goal) == 0:
        return goal
    gap = min(gap, (high - low) / max(len(goal) - 1, 1))
    steps = gap * np.arange(len(goal))
    # least squares under z rising, z = spot − steps: pool neighbours that would collide
    pools: list[list[float]] = []
    for value in goal - steps:
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [[(a * m + b * n) / (m + n), m + n]]
    flat = np.concatenate([np.full(int(n), value) for value, n in pools])
    return np.clip(flat, low, high - steps[-1]) + steps


# --- 5. aggregation weights ----------------------------------------------------------------------
@_styled
def weights_over_rounds(weights: ArrayLike, title: str = "") -> Figure:
    """Who counts how much: weights relative to equal ones, and the effective number of clients.

    1 / Σ p_k² for normalised weights p: n if all count the same, 1 if one client decides alone.
    Colours are powers of two; a client without weight in a round (0 or nan) is grey.
    """
    table = _array(weights, "weights", 2)
    p = np.where(np.isfinite(table), table, 0)
    total = p.sum(1, keepdims=True)
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    rounds, clients = p.shape
    squares = np.square(p).sum(1)
    effective = np.divide(1, squares, out=np.full(rounds, np.nan), where=squares > 0)
    ratio = np.full_like(p, np.nan)
    ratio[p > 0] = np.clip(np.log2(p[p > 0] * clients), -3, 3)
    figure = _figure(4.8, 3.3)
    line, heat = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1, 2.4]})
    line.plot(np.arange(rounds), effective, color=DARK, lw=1.2)
    line.axhline(clients, color=GREY, lw=0.7, ls=(0, (3, 2)))
    line.set(ylabel="effective\nclients", ylim=(0, 1.12 * clients), xlim=(-0.5, rounds - 0.5))
    line.set_title(title, loc="left", fontweight="bold")
    order = np.argsort(p.mean(0), kind="stable")
    image = heat.imshow(ratio[:, order].T, aspect="auto", origin="lower", cmap="PuOr_r", vmin=-3,
                        vmax=3, interpolation="nearest")  # fmt: skip
    heat.set(xlabel="round", ylabel="client, by mean weight", facecolor="#c4c4c4")
    bar = figure.colorbar(image, ax=heat, location="right", aspect=18, pad=0.02)
    bar.set_ticks(range(-3, 4), labels=["≤ 1/8", "1/4", "1/2", "1", "2", "4", "≥ 8"])
    bar.set_label("weight / equal weight (grey: none)")
    return figure
