"""Figures from plain arrays; every function returns a matplotlib `Figure`.

Accuracies are fractions and variances fraction², as everywhere in fairvar; the axes show percent
and fraction² × 100, as papers print them. See `style` for how matplotlib is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairvar.metrics import fairness, pareto_front
from fairvar.report.style import (
    BASELINE,
    DARK,
    GREY,
    MANY,
    VARIANCE,
    Axes,
    Figure,
    new_figure,
    style_of,
    styled,
    text_colour,
)
from fairvar.report.table import mean_and_standard_error
from fairvar.scores import ACCURACY, Floats, Metric

# Inches: the widths of figures that share a row of a page, and of those with many panels, so that
# the text of either is alike.
HALF, FULL = 5.6, 8.8


@styled
def client_accuracies(
    accuracy: Mapping[str, ArrayLike],
    ylabel: str = "accuracy on the client (%)",
    metric: Metric = ACCURACY,
) -> Figure:
    """Accuracies in increasing order, a panel per method with the baseline in grey behind it; or
    other scores, the worst first.

    Accuracies by client, or by (seed, client): then the clients of each seed are ranked, and every
    rank is averaged over seeds. Filled between the two curves: where the method serves that rank
    better (its colour) or worse (grey). The long line is the mean, the short one the mean of the
    worst tenth, both as `fairness` has them, averaged over seeds. Clients that were not measured
    (nan) are left out.
    """
    curves = {k: _Ranked.of(np.atleast_2d(v), metric) for k, v in accuracy.items()}
    first = BASELINE if BASELINE in curves else next(iter(curves))
    down = math.ceil(len(curves) / 4)
    across = math.ceil(len(curves) / down)
    figure = new_figure(FULL if across > 2 else HALF, 1.7 * down + 0.45)
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, label in zip(panels, curves, strict=False):
        _accuracy_panel(axes, label, curves[label], curves[first], metric)
    for place in range(len(curves), len(panels)):
        panels[place].set_visible(False)
        panels[place - across].tick_params(labelbottom=True)
    seen = np.concatenate([curve.accuracy for curve in curves.values()])
    if len(seen):
        low, high = seen.min(), seen.max()
        room = 0.06 * max(high - low, 1.0 if metric.factor == 100 else 1e-9)
        least, most = (-1, 101) if metric.factor == 100 else (-np.inf, np.inf)
        panels[0].set_ylim(max(low - room, least), min(high + room, most))
    panels[0].set(xlim=(0, 100), xticks=(0, 50, 100))
    figure.supylabel(ylabel, fontsize=8)
    legend = f"grey: {first}; dashed: mean; bar: mean of the worst 10 %"
    figure.supxlabel(f"clients from worst to best served (%)\n{legend}", fontsize=8)
    return figure


class _Ranked(NamedTuple):
    """Clients in the order of their accuracy, all in percent, or of another score."""

    rank: Floats
    accuracy: Floats
    mean: float
    worst: float  # mean of the worst tenth

    @staticmethod
    def of(table: Floats, metric: Metric) -> _Ranked:
        seeds, factor = [metric.worst_first(row[np.isfinite(row)]) for row in table], metric.factor
        seeds = [row for row in seeds if len(row)]
        if not seeds:
            return _Ranked(np.zeros(0), np.zeros(0), math.nan, math.nan)
        ranks = [(np.arange(len(row)) + 0.5) / len(row) * 100 for row in seeds]
        rank = max(ranks, key=len)  # seeds may have measured other numbers of clients
        scores = [fairness(row, metric=metric, resamples=0) for row in seeds]
        return _Ranked(
            rank,
            np.mean([np.interp(rank, x, factor * y) for x, y in zip(ranks, seeds, strict=True)], 0),
            mean_and_standard_error(factor * f.mean for f in scores).value,
            mean_and_standard_error(factor * f.worst_10_percent for f in scores).value,
        )


def _accuracy_panel(axes: Axes, label: str, own: _Ranked, base: _Ranked, metric: Metric) -> None:
    colour, both = style_of(label).colour, len(own.rank) and len(base.rank) and own is not base
    axes.set_title(label, loc="left", fontweight="bold", color=DARK, pad=13)
    _draw_ranked(axes, base, GREY, 1.0)
    if own is not base:
        _draw_ranked(axes, own, colour, 1.6)
    if both:
        x, y = own.rank, own.accuracy
        behind = np.interp(x, base.rank, base.accuracy)
        better = metric.sign * y >= metric.sign * behind
        for where, fill in ((better, colour), (~better, GREY)):
            axes.fill_between(
                x, y, behind, where=where, interpolate=True, color=fill, alpha=0.3, lw=0
            )
    # With the digits of the table, which shows the same numbers.
    form = ".2f" if metric.factor == 100 else ".3g"
    numbers = f"mean {own.mean:{form}}, worst 10 % {own.worst:{form}}" if len(own.rank) else "div."
    _below_title(axes, numbers)


def _below_title(axes: Axes, text: str) -> None:
    words: dict[str, Any] = {"fontsize": 6.5, "color": DARK, "va": "bottom"}
    note = axes.text(0, 1.03, text, transform=axes.transAxes, **words)
    note.set_in_layout(False)  # or a long text would make its panel narrow


def _draw_ranked(axes: Axes, curve: _Ranked, colour: str, width: float) -> None:
    """A sorted curve with its two means."""
    clients = len(curve.rank)
    if clients:
        axes.plot(curve.rank, curve.accuracy, color=colour, lw=width)
        axes.plot([0, 100], [curve.mean] * 2, color=colour, lw=0.7, ls=(0, (3, 2)))
        tenth = 100 * math.ceil(clients / 10) / clients
        axes.plot([0, tenth], [curve.worst] * 2, color=colour, lw=2.6, solid_capstyle="butt")


@styled
def differences(
    found: Mapping[str, Mapping[str, tuple[float, float, float]]], units: Mapping[str, str]
) -> Figure:
    """Differences with intervals: (value, low, high) by panel and method, with zero in grey.

    Marks are filled where the interval excludes zero. `units`: the label under each panel.
    """
    from matplotlib.ticker import MaxNLocator

    labels = list(dict.fromkeys(label for panel in found.values() for label in panel))
    # a panel with one method of many, such as Ditto's personal models, takes less room
    shares = [0.7 if 4 * len(values) < len(labels) else 1.0 for values in found.values()]
    width = HALF if len(found) < 3 else max(FULL, 2 * sum(shares) + 0.7)
    figure = new_figure(width, 0.19 * len(labels) + 0.87)
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False, width_ratios=shares)[0]
    for axes, (name, values) in zip(panels, found.items(), strict=True):
        axes.axvline(0, color=GREY, lw=0.8)
        for row, label in enumerate(labels):
            if label in values:
                value, low, high = values[label]
                style, clear = style_of(label), low > 0 or high < 0
                axes.plot([low, high], [row, row], color=style.colour, lw=1.2 if clear else 0.7)
                axes.plot(value, row, style.marker, color=style.colour, ms=4.5,
                          mfc=style.colour if clear else "white")  # fmt: skip
        axes.set_title(name.replace(", ", "\n"), loc="left", color=DARK)
        axes.set_xlabel(units[name])
        axes.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(labels)), labels)
    for tick, label in zip(panels[0].get_yticklabels(), labels, strict=True):
        tick.set_color(text_colour(label))
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    return figure


@styled
def who_gains(
    baseline: ArrayLike, accuracy: Mapping[str, ArrayLike], special: Sequence[int]
) -> Figure:
    """By client: accuracy under the baseline, and how much each method adds or takes.

    `special`: clients that are different by nature. They are drawn as triangles, and the mean of
    either kind stands above its panel.
    """
    x = 100 * np.asarray(baseline)
    kind = np.isin(np.arange(len(x)), np.asarray(special, dtype=int))
    kinds = [("others", ~kind, "#0072B2", "o"), ("different by nature", kind, "#D55E00", "^")]
    kinds = [k for k in kinds if k[1].any()]
    across = min(4, len(accuracy))
    down = math.ceil(len(accuracy) / across)
    figure = new_figure(FULL if across > 2 else HALF, 1.9 * down + 0.7)
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (label, values) in zip(panels, accuracy.items(), strict=False):
        change = 100 * np.asarray(values) - x
        axes.axhline(0, color=GREY, lw=0.8)
        for name, mine, colour, marker in kinds:
            axes.plot(x[mine], change[mine], marker, color=colour, ms=4, mew=0, alpha=0.75,
                      label=name)  # fmt: skip
        axes.set_title(label, loc="left", fontweight="bold", color=DARK, pad=13)
        means = ", ".join(f"{name.split(' ')[0]} {np.nanmean(change[mine]):+.1f}"
                          for name, mine, *_ in kinds).replace("-", "−")  # fmt: skip
        _below_title(axes, means)
    for axes in panels[len(accuracy) :]:
        axes.set_visible(False)
    figure.supxlabel(f"accuracy of the client under {BASELINE} (%)", fontsize=8)
    figure.supylabel("change (points): above zero gains", fontsize=8)
    marks, names = panels[0].get_legend_handles_labels()
    figure.legend(marks, names, loc="outside upper left", ncols=2, frameon=False)
    return figure


@styled
def partition(counts: ArrayLike, title: str, numbers: Mapping[str, str]) -> Figure:
    """Samples by (client, class): sizes above, each client's mix of classes below, largest first.

    A map, because stacked bars of 200 classes would need 200 colours.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, PowerNorm
    from matplotlib.ticker import MaxNLocator

    table = np.asarray(counts, dtype=float)
    size = table.sum(1)
    table = table[np.argsort(-size, kind="stable")]
    size = table.sum(1)
    share = np.divide(table, size[:, None], out=np.zeros_like(table), where=size[:, None] > 0)
    clients, classes = table.shape
    figure = new_figure(HALF, 3.4 if classes <= 50 else 4.4)
    shape: Any = [["bars", "numbers"], ["heat", "numbers"]]
    panels = figure.subplot_mosaic(shape, height_ratios=[1, 2.6], width_ratios=[1, 0.5])
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


@styled
def learning_curves(
    rounds: ArrayLike,
    mean: Mapping[str, ArrayLike],
    low: Mapping[str, ArrayLike],
    high: Mapping[str, ArrayLike],
    ylabel: str = "mean accuracy over clients",
) -> Figure:
    """A line per method with the range from `low` to `high`: all rounds on the left, the last half
    enlarged on the right, with names.

    Values are drawn as they are given. A line that ends in nan has a cross at its last number.
    """
    x = np.asarray(rounds, dtype=float)
    lines = {label: np.asarray(values, dtype=float) for label, values in mean.items()}
    figure = new_figure(HALF, max(3.9, 1.1 + 0.155 * len(lines)))
    whole, late = figure.subplots(1, 2)
    for axes, label in product((whole, late), lines):
        y, kind = lines[label], style_of(label)
        axes.plot(x, y, color=kind.colour, ls=kind.dashes, lw=1.2, zorder=3)
        alpha = max(0.06, 0.25 / len(lines))
        axes.fill_between(x, low[label], high[label], color=kind.colour, alpha=alpha, lw=0)
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
        leader = {"arrowstyle": "-", "lw": 0.5, "color": style_of(label).colour, "shrinkA": 1,
                  "shrinkB": 1, "relpos": (0, 0.5)}  # fmt: skip
        words: dict[str, Any] = {"va": "center", "fontsize": 7, "color": text_colour(label)}
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


@styled
def weights_over_rounds(weights: ArrayLike, title: str, rounds: ArrayLike) -> Figure:
    """Weights relative to equal ones, and the effective number of clients.

    `rounds`: which round each row belongs to, counted from 1.
    1 / Σ p_k² for normalised weights p: n if all count the same, 1 if one client decides alone.
    Colours are powers of two; a client without weight in a round (0 or nan) is grey.
    """
    from matplotlib.ticker import MaxNLocator

    x, table = np.asarray(rounds, dtype=float), np.asarray(weights, dtype=float)
    p = np.where(np.isfinite(table), table, 0)
    total = p.sum(1, keepdims=True)
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    clients = p.shape[1]
    squares = np.square(p).sum(1)
    effective = np.divide(1, squares, out=np.full(len(p), np.nan), where=squares > 0)
    ratio = np.full_like(p, np.nan)
    ratio[p > 0] = np.clip(np.log2(p[p > 0] * clients), -3, 3)
    figure = new_figure(HALF, 3.4)
    line, heat = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1, 2.4]})
    edges = _edges(x)
    line.plot(x, effective, color=DARK, lw=1.2, marker="o", ms=2 if len(x) < 60 else 0)
    line.axhline(clients, color=GREY, lw=0.7, ls=(0, (3, 2)))
    line.set(ylabel="effective\nclients", ylim=(0, 1.12 * clients), xlim=(edges[0], edges[-1]))
    line.set_title(title, loc="left", fontweight="bold")
    order = np.argsort(p.mean(0), kind="stable")
    image = heat.pcolormesh(edges, np.arange(clients + 1) - 0.5, ratio[:, order].T, cmap="PuOr_r",
                            vmin=-3, vmax=3, rasterized=True)  # fmt: skip
    heat.xaxis.set_major_locator(MaxNLocator(integer=True))
    heat.yaxis.set_major_locator(MaxNLocator(integer=True))
    heat.set(xlabel="round", ylabel="client, by mean weight", facecolor="#c4c4c4")
    bar = figure.colorbar(image, ax=heat, location="right", aspect=18, pad=0.02)
    bar.set_ticks(range(-3, 4), labels=["≤ 1/8", "1/4", "1/2", "1", "2", "4", "≥ 8"])
    bar.set_label("weight / equal weight (grey: none)")
    return figure


def _edges(x: Floats) -> Floats:
    """Borders half way between the rounds; the outer ones as far away as the inner ones."""
    if len(x) == 1:
        return np.array([x[0] - 0.5, x[0] + 0.5])
    middle = (x[1:] + x[:-1]) / 2
    return np.concatenate([[2 * x[0] - middle[0]], middle, [2 * x[-1] - middle[-1]]])


# --- the front of accuracy and variance ----------------------------------------------------------
@dataclass(frozen=True)
class Point:
    """A configuration: mean accuracy (fraction), variance over clients (fraction²), the errors."""

    label: str
    accuracy: float
    variance: float
    chosen: bool = False
    accuracy_error: float | None = None
    variance_error: float | None = None

    def in_units_of(self, metric: Metric) -> Point:
        """So that a hundred times its numbers are what a figure of this score shows."""
        if metric.factor == 100:
            return self
        names = ("accuracy", "variance", "accuracy_error", "variance_error")
        known = {name: getattr(self, name) for name in names}
        return replace(self, **{k: v and v / 100 for k, v in known.items()})


@styled
def front(
    points: Sequence[Point], noise_floor: float, model: str, metric: Metric = ACCURACY
) -> Figure:
    """Lower right is better (lower left, where a lower score is). Dots: all configurations; marks:
    the chosen ones; line: Pareto front.

    The axes show the neighbourhood of the chosen ones, since one diverged configuration would
    squeeze the rest into a corner; a note gives the number outside. `noise_floor`: nan if it is
    not known. `model`: for the label of the axis.
    """
    points = [p.in_units_of(metric) for p in points]
    kept = [p for p in points if math.isfinite(p.accuracy) and math.isfinite(p.variance)]
    chosen = [p for p in kept if p.chosen]
    across = 4 if len(chosen) <= MANY else 5
    figure = new_figure(HALF, 3.56 + 0.17 * math.ceil(len(chosen) / across))
    axes = figure.subplots()
    x, y = np.array([[p.accuracy * 100, p.variance * 100] for p in kept]).T
    for label in dict.fromkeys(p.label for p in kept):  # a call per point makes a large file
        mine = np.array([p.label == label for p in kept])
        axes.plot(x[mine], y[mine], "o", ms=2.8, mew=0, color=style_of(label).colour, alpha=0.45)
    marks = [_draw_chosen(axes, p) for p in chosen]
    _front_limits(axes, kept, noise_floor)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    i = pareto_front(metric.sign * x, y)
    start = min(left, x[i[0]]) if metric.higher_is_better else max(right, x[i[0]])
    reach = np.r_[start, x[i], x[i[-1]]], np.r_[y[i[0]], y[i], max(top, y[i[-1]])]
    axes.step(*reach, where="pre", color=DARK, lw=0.8, zorder=1.5)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    outside = len(points) - int(((x >= left) & (x <= right) & (y >= bottom) & (y <= top)).sum())
    if outside:
        note = f"{outside} of {len(points)} configurations outside the axes or diverged"
        axes.set_title(note, loc="right", fontsize=7, color=DARK)
    unit = " (%)" if metric.factor == 100 else ""
    ylabel = VARIANCE if unit else f"variance over clients ({metric.in_variances})"
    axes.set(xlabel=f"mean test {metric.title} over clients{unit}, {model}", ylabel=ylabel)
    if chosen:  # a legend outside: names next to the marks would cover others
        names = [p.label for p in chosen]
        figure.legend(marks, names, loc="outside lower center", ncols=across, frameon=False,
                      columnspacing=1.2, handletextpad=0.3)  # fmt: skip
    return figure


def _draw_chosen(axes: Axes, p: Point) -> Any:
    """A mark with standard errors; returns it for the legend."""
    kind = style_of(p.label)
    bars = axes.errorbar(
        p.accuracy * 100, p.variance * 100, _percent(p.variance_error),
        _percent(p.accuracy_error), fmt=kind.marker, ms=7, color=kind.colour, mec="white",
        mew=0.7, elinewidth=0.8, zorder=5 if p.label == BASELINE else 4,
    )  # fmt: skip
    return bars.lines[0]


def _percent(error: float | None) -> float:
    return 100 * error if error is not None and math.isfinite(error) else 0.0


def _front_limits(axes: Axes, points: Sequence[Point], noise_floor: float) -> None:
    chosen = np.array([p.chosen for p in points])
    main = chosen if chosen.any() else ~chosen
    x = np.array([(100 * p.accuracy, _percent(p.accuracy_error)) for p in points])
    y = np.array([(100 * p.variance, _percent(p.variance_error)) for p in points])
    axes.set_xlim(_reach(x[:, 0], x[:, 1], main))
    low, high = _reach(y[:, 0], y[:, 1], main)
    if math.isfinite(noise_floor):
        floor = 100 * noise_floor
        low, high = min(low, floor - (high - floor) / 8), max(high, floor + 1e-9)
        axes.axhspan(low - abs(low), floor, color="#e3e3e3", lw=0, zorder=0)
        words: dict[str, Any] = {"fontsize": 7, "color": DARK, "ha": "right", "va": "top"}
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
