"""The figure of the accuracy–variance front, with labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairvar.metrics import pareto_front
from fairvar.report.style import (
    DARK,
    VARIANCE,
    Axes,
    Figure,
    Floats,
    demand_some,
    new_figure,
    style_of,
    styled,
    text_colour,
)


@dataclass(frozen=True)
class Point:
    """A configuration: mean accuracy (fraction), variance over clients (fraction²), the errors."""

    label: str
    accuracy: float
    variance: float
    chosen: bool = False
    accuracy_error: float | None = None
    variance_error: float | None = None


@styled
def front(
    points: Sequence[Point], noise_floor: float | None = None, model: str | None = None
) -> Figure:
    """Lower right is better. Dots: all configurations; marks: the chosen ones; line: Pareto front.

    The axes show the neighbourhood of the chosen ones, since one diverged configuration would
    squeeze the rest into a corner; a note gives the number outside. `model`: for the label of the
    axis.
    """
    kept = [p for p in points if math.isfinite(p.accuracy) and math.isfinite(p.variance)]
    demand_some(kept, "points (with finite accuracy and variance)")
    figure = new_figure(4.6, 3.5)
    axes = figure.subplots()
    x, y = np.array([[p.accuracy * 100, p.variance * 100] for p in kept]).T
    for label in dict.fromkeys(p.label for p in kept):  # a call per point makes a large file
        mine = np.array([p.label == label for p in kept])
        axes.plot(x[mine], y[mine], "o", ms=2.8, mew=0, color=style_of(label).colour, alpha=0.45)
    for p in kept:
        kind = style_of(p.label)
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
        note = f"{outside} of {len(points)} configurations outside the axes or diverged"
        axes.set_title(note, loc="right", fontsize=6.5, color=DARK)
    test, of = ("test ", f", {model}") if model else ("", "")
    axes.set(xlabel=f"mean {test}accuracy over clients (%){of}", ylabel=VARIANCE)
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
        words: dict[str, Any] = {"fontsize": 7, "color": text_colour(p.label), "ha": "center"}
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
        leader = {
            "arrowstyle": "-",
            "lw": 0.5,
            "color": text_colour(p.label),
            "shrinkA": 0,
            "shrinkB": 3,
        }
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
