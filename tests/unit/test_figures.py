"""Figures: equal bytes, honest about missing numbers, no trace left in matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fairvar.metrics import fairness
from fairvar.report import figures, style
from fairvar.report.figures import Point
from fairvar.report.table import mean_and_standard_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ["FedAvg", "AFL", "q-FFL", "AAggFF", "FairLoss", "FairLoss*", "FairGrad", "FairGrad*"]


def accuracies() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    found = {m: np.clip(draw.normal(0.9, 0.03, 50), 0, 1) for m in METHODS}
    found["AFL"][:] = np.nan
    found["q-FFL"][:3] = np.nan
    return found


def points() -> list[Point]:
    draw = np.random.default_rng(1)
    tried = [Point(m, *draw.normal((0.9, 9e-4), (0.01, 1e-4))) for m in METHODS for _ in range(5)]
    best = [Point(m, *draw.normal((0.9, 9e-4), (2e-3, 5e-5)), True, 1e-3, 2e-5) for m in METHODS]
    return [*tried, *best, Point("AFL", float("nan"), 0.0), Point("AFL", 0.1, 0.0)]


def curves() -> Figure:
    rounds = np.arange(0, 40, 2)
    mean = {m: 0.9 + 0.001 * i - np.exp(-rounds / 9) for i, m in enumerate(METHODS)}
    mean["AFL"][5:] = np.nan
    mean["q-FFL"][:] = np.nan
    low, high = ({m: y + d for m, y in mean.items()} for d in (-0.01, 0.01))
    return figures.learning_curves(rounds, mean, low, high)


def split() -> Figure:
    counts = np.random.default_rng(2).poisson(3, (20, 12)) * 1.0
    counts[3] = 0
    return figures.partition(counts, "Dirichlet α = 0.1", {"total variation": "0.71"})


def weights() -> Figure:
    table = np.random.default_rng(3).dirichlet(np.full(10, 0.3), 30)
    table[4:9, 2] = np.nan
    table[11] = 0
    return figures.weights_over_rounds(table, "AFL (step λ = 0.1)", np.arange(1, 31))


def gains() -> Figure:
    found = {"accuracy": {"AFL": (-0.5, -1.0, 0.2), "FairGrad": (1.0, 0.5, 1.5)},
             "variance": {"AFL": (-0.4, -0.6, -0.2)}}  # fmt: skip
    return figures.differences(found, {"accuracy": "points", "variance": "× 100"})


def who_gains() -> Figure:
    found = {"AFL": [0.62, 0.7, 0.78, 0.9], "q-FFL": [0.6, 0.71, 0.8, 0.88]}
    return figures.who_gains([0.5, 0.7, 0.8, 0.9], found, [0])


DRAWN: dict[str, Callable[[], Figure]] = {
    "differences": gains,
    "who_gains": who_gains,
    "accuracies": lambda: figures.client_accuracies(
        {m: np.stack([p, p[::-1] / 2]) for m, p in accuracies().items()}
    ),
    "front": lambda: figures.front(points(), 6e-4, "global model"),
    "partition": split,
    "curves": curves,
    "weights": weights,
}


@pytest.mark.parametrize("name", DRAWN)
def test_equal_bytes_and_no_trace(name: str, tmp_path: Path) -> None:
    import matplotlib

    matplotlib.rcParams["font.size"] = 23
    before = dict(matplotlib.rcParams)
    first = style.save(DRAWN[name](), tmp_path / "one", "a")
    assert dict(matplotlib.rcParams) == before
    matplotlib.rcdefaults()
    again = style.save(DRAWN[name](), tmp_path / "two", "a")
    assert [path.name for path in first] == ["a.png", "a.pdf"]
    for a, b in zip(first, again, strict=True):
        assert a.read_bytes() == b.read_bytes()
    assert b"CreationDate" not in first[1].read_bytes()
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_clients_that_differ_are_drawn_apart() -> None:
    panel, other = who_gains().axes
    special = [line for line in panel.lines if line.get_marker() == "^"]
    assert [line.get_ydata().tolist() for line in special] == [pytest.approx([12.0])]
    assert [text.get_text() for text in panel.texts] == ["others −0.7, different +12.0"]
    assert other.get_title(loc="left") == "q-FFL"


def test_differences_are_filled_where_they_are_clear() -> None:
    panels = gains().axes
    marks = [[line.get_markerfacecolor() for line in axes.lines if line.get_marker() != "None"]
             for axes in panels]  # fmt: skip
    assert marks == [["white", style.style_of("FairGrad").colour], [style.style_of("AFL").colour]]
    assert [t.get_text() for t in panels[0].get_yticklabels()] == ["AFL", "FairGrad"]


def test_pictures_have_a_table_of_colours(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = image.open(style.save(gains(), tmp_path, "a")[0])
    assert picture.mode == "P"
    assert len(picture.convert("RGB").getcolors()) <= 256


def test_saving_moves_nothing(tmp_path: Path) -> None:
    figure = weights()
    kept = [[path.read_bytes() for path in style.save(figure, tmp_path, "a")] for _ in range(2)]
    assert kept[0] == kept[1]


NINETEEN = [
    *METHODS, "TERM", "PropFair", "Superquantile", "GIFAIR", "Semi-VRed", "FedMGDA+", "FedFV",
    "AdaFed", "Ditto", "FedEBA+", "FedProx",
]  # fmt: skip


def test_nineteen_methods_look_different() -> None:
    styles = {label: style.style_of(label) for label in [*NINETEEN, "TERM*", "Semi-VRed*"]}
    assert len({(s.colour, s.dashes) for s in styles.values()}) == len(styles)
    assert len({(s.colour, s.marker) for s in styles.values()}) == len(styles)
    assert all(styles[label].dashes != style.OWN for label in NINETEEN)
    # published figures have these
    assert [styles[label].colour for label in METHODS] == [
        "#7f7f7f", "#009E73", "#56B4E9", "#CC79A7", "#0072B2", "#003e61", "#D55E00", "#753300"
    ]  # fmt: skip


def test_a_method_of_a_user_has_a_style_of_its_own() -> None:
    """By its name only: the same in every process and with any other methods."""
    mine = style.style_of("Mine (τ = 1)")
    # zlib.crc32(b"Mine") is 1 modulo 6 colours and 2 modulo 7 markers
    assert mine == style.style_of("Mine") == style.LineStyle("#A05195", "h", style.OWN)
    assert style.style_of("Mine*").dashes == style.EXACT
    assert len({style.style_of(f"method{i}") for i in range(40)}) > 20


@pytest.mark.parametrize("labels", [METHODS, NINETEEN], ids=["eight", "nineteen"])
def test_the_front_names_its_methods_in_a_legend_below(labels: list[str]) -> None:
    from matplotlib.text import Text

    draw = np.random.default_rng(5)
    found = [Point(m, *draw.normal((0.9, 9.5e-4), (1e-3, 4e-6)), True, 1e-3) for m in labels]
    figure = figures.front(found, 8.5e-4, "global model")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == labels
    for mark, label in zip(legend.legend_handles, labels, strict=True):
        kind = style.style_of(label)
        assert (mark.get_color(), mark.get_marker()) == (kind.colour, kind.marker)
    boxes = [Text.get_window_extent(t).extents for t in legend.texts]
    for i, a in enumerate(boxes):
        assert a[3] < figure.axes[0].bbox.y0
        assert (a[:2] >= figure.bbox.extents[:2]).all()
        assert (a[2:] <= figure.bbox.extents[2:]).all()
        for b in boxes[:i]:
            assert (np.minimum(a[2:], b[2:]) <= np.maximum(a[:2], b[:2])).any()
    noise = [text for text in figure.axes[0].texts if "noise floor" in text.get_text()]
    assert len(noise) == len(figure.axes[0].texts) == 1


def test_figures_of_many_methods_are_higher() -> None:
    from matplotlib.text import Text

    # Curves that end at nearly the same height: only room for the names keeps them apart.
    lines = {m: np.full(9, 0.9 + 1e-6 * i) for i, m in enumerate(NINETEEN)}
    eight = {m: lines[m] for m in METHODS}
    few = figures.learning_curves(np.arange(9), eight, eight, eight)
    many = figures.learning_curves(np.arange(9), lines, lines, lines)
    assert many.get_figheight() > few.get_figheight() == 3.9
    boxes = np.array([Text.get_window_extent(t).extents for t in many.axes[1].texts])
    middles = np.sort((boxes[:, 1] + boxes[:, 3]) / 2) * 72 / many.dpi
    assert np.diff(middles).min() > 7.5  # points; the letters have 7
    panels = [figures.client_accuracies({m: [0.5, 0.6] for m in labels})
              for labels in (METHODS, NINETEEN)]  # fmt: skip
    assert [figure.get_figheight() for figure in panels] == pytest.approx([3.85, 8.95])
    rows = dict.fromkeys(NINETEEN, (0.0, -1.0, 1.0))
    assert figures.differences({"a": rows}, {"a": "points"}).get_figheight() > 4


@pytest.mark.parametrize("kind", ["curves", "front"])
@pytest.mark.parametrize("labels", [METHODS, NINETEEN], ids=["eight", "nineteen"])
def test_pictures_keep_the_colours_of_methods(labels: list[str], kind: str, tmp_path: Path) -> None:
    """A palette without the colour of a small marker shows it in that of another method."""
    image = pytest.importorskip("PIL.Image")
    lines = {m: np.full(9, 0.9 + 1e-3 * i) for i, m in enumerate(labels)}
    draw = np.random.default_rng(5)
    points = [Point(m, *draw.normal((0.9, 9.5e-4), (1e-3, 4e-6)), chosen, 1e-3)
              for m in labels for chosen in (True, *(12 * [False]))]  # fmt: skip
    figure = (
        figures.learning_curves(np.arange(9), lines, lines, lines)
        if kind == "curves"
        else figures.front(points, 8.5e-4, "global model")
    )
    picture = image.open(style.save(figure, tmp_path, "a")[0]).convert("RGB")
    there = np.array([colour for _, colour in picture.getcolors(1 << 24)])
    assert picture.getpixel((0, 0)) == (255, 255, 255)
    for label in labels:
        colour = style.style_of(label).colour
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
        assert (there == wanted).all(1).any(), label


def test_names_of_curves_stay_apart() -> None:
    got = figures._spread(np.array([10.0, 10.0, 11.0, 50.0]), 9, 0, 100)
    assert np.diff(got).min() >= 9 - 1e-9
    assert got[3] == 50
    assert got[:3].mean() == pytest.approx(31 / 3)
    squeezed = figures._spread(np.zeros(5), 9, 0, 20)
    np.testing.assert_allclose(squeezed, [0, 5, 10, 15, 20])
    assert len(figures._spread(np.zeros(0), 9, 0, 20)) == 0


def test_style_is_by_method() -> None:
    plain, exact = style.style_of("FairGrad"), style.style_of("FairGrad* (γ = 0.1)")
    assert plain.marker == exact.marker
    assert plain.dashes == "-" != exact.dashes
    assert int(exact.colour[1:3], 16) < int(plain.colour[1:3], 16)
    assert style.style_of("FedAvg").colour == style.GREY
    assert style.style_of("my método λ") == style.style_of("my other")
    assert style.style_of("")


def test_panels_print_what_they_show() -> None:
    figure = figures.client_accuracies({"FedAvg": np.linspace(0, 1, 11), "x": [np.nan] * 11})
    told = [axes.texts[0].get_text() for axes in figure.axes]
    assert told == ["mean 50.00, worst 10 % 5.00", "div."]


def test_panels_rank_the_clients_of_every_seed() -> None:
    """Another client is worst in every seed: averaging clients first would hide it."""
    table = np.full((3, 10), 0.9)
    table[[0, 1, 2], [4, 7, 1]] = [0.1, 0.2, 0.3]
    table[2, 9] = np.nan
    figure = figures.client_accuracies({"FedAvg": table})
    told = [mean_and_standard_error(100 * fairness(row)[name] for row in table).value
            for name in ("mean", "worst_10_percent")]  # fmt: skip
    assert figure.axes[0].texts[0].get_text() == "mean {:.2f}, worst 10 % {:.2f}".format(*told)
    assert told[1] == pytest.approx(20)
    curve, dashed, bar = figure.axes[0].lines
    assert curve.get_ydata()[0] == pytest.approx(20, abs=0.5)  # seeds of 9 and 10 clients
    assert dashed.get_ydata() == pytest.approx([told[0]] * 2)
    assert bar.get_ydata() == pytest.approx([told[1]] * 2)


def test_weights_stand_at_their_rounds() -> None:
    """Kept at evaluations, every tenth and the last: the axis counts rounds."""
    table, rounds = np.random.default_rng(0).dirichlet(np.ones(4), 4), np.array([10, 20, 30, 35])
    line, heat = figures.weights_over_rounds(table, "AFL", rounds).axes[:2]
    np.testing.assert_array_equal(line.lines[0].get_xdata(), rounds)
    np.testing.assert_allclose(line.lines[0].get_ydata(), 1 / np.square(table).sum(1))
    assert heat.get_xlabel() == "round"
    assert line.get_xlim() == heat.get_xlim() == (5, 37.5)
    borders = heat.collections[0].get_coordinates()[0, :, 0]
    np.testing.assert_array_equal(borders, [5, 15, 25, 32.5, 37.5])


def test_small_and_odd_inputs() -> None:
    assert figures.client_accuracies({"a*": [0.5]})
    assert figures.client_accuracies({m: [0.5, 0.6] for m in METHODS[:5]})
    nan, half = float("nan"), {"FedAvg": [0.5]}
    assert figures.front([Point("α = 0.1", 0.5, 0.0)], nan, "")
    assert figures.front([Point("FedAvg", 0.5, 0.01, True, nan)], nan, "")
    assert figures.partition([[1]], "", {})
    assert figures.learning_curves([1], half, half, half)
    assert figures.weights_over_rounds([[0.0]], "", [1])
