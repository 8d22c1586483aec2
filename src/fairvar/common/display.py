"""Numbers as text, and small tables and pictures for notebooks: HTML and SVG without a library.

Everything that comes from outside is escaped: `Markup.format` escapes what it is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

MOST_BARS, MOST_PARTS = 100, 4000  # of a picture: clients, and rectangles
WIDTH, HEIGHT = 560, 120
CELL = Markup('<td style="text-align:{};padding:1px 14px 1px 0;white-space:nowrap">{}</td>')
TEXT = Markup(
    '<text x="{:.0f}" y="{:.0f}" text-anchor="{}" font-size="11" fill="currentColor">{}</text>'
)


def join(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def number(value: object) -> str:
    """A number in few digits; other things as they are."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return "–" if math.isnan(value) else f"{value:.4g}"


def plural(number: int, noun: str) -> str:
    """ "1 client", "2 clients" """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], left: Sequence[int] = ()
) -> Markup:
    """The first column holds names; numbers are on the right but for the columns `left`."""

    def line(cells: Sequence[object]) -> Markup:
        found = (CELL.format("right" if i and i not in left else "left", number(cell))
                 for i, cell in enumerate(cells))  # fmt: skip
        return Markup("<tr>{}</tr>").format(join(found))

    body = join(map(line, rows))
    top = Markup("<thead>{}</thead>").format(line(head)) if head else Markup("")
    form = Markup('<table style="border-collapse:collapse">{}<tbody>{}</tbody></table>')
    return form.format(top, body)


def card(title: str, *parts: Markup) -> str:
    """What a notebook shows: a line of text, then tables and pictures."""
    return str(Markup("<div><b>{}</b>{}</div>").format(title, join(parts)))


def colour(place: int, of: int) -> str:
    return f"hsl({360 * place // max(of, 1)} 55% 55%)"


def _svg(label: str, *parts: Markup) -> Markup:
    form = Markup(
        '<svg role="img" aria-label="{}" width="{}" height="{}" viewBox="0 0 {} {}" '
        'style="display:block;margin:6px 0" xmlns="http://www.w3.org/2000/svg">{}</svg>'
    )
    width, height = WIDTH + 90, HEIGHT + 40
    return form.format(label, width, height, width, height, join(parts))


def bars(label: str, columns: Sequence[Sequence[int]], part: str) -> Markup:
    """A column for each client, its parts stacked: who holds how much of what. Only the first
    clients of a large federation are drawn, which a line below says."""
    kinds = max(map(len, columns))
    shown = columns[: max(1, min(MOST_BARS, MOST_PARTS // kinds))]
    most = max(max(map(sum, shown)), 1)
    step = min(24.0, WIDTH / len(shown))
    found = []
    for i, column in enumerate(shown):
        below = 0
        for k, count in enumerate(column):
            if count:
                below += count
                about = f"client {i}: {count:,} {part}" + (f" of class {k}" if kinds > 1 else "")
                found.append(
                    Markup(
                        '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.2f}" fill="{}">'
                        "<title>{}</title></rect>"
                    ).format(
                        50 + i * step, 10 + HEIGHT * (1 - below / most), max(0.6, 0.9 * step),
                        HEIGHT * count / most, colour(k, kinds), about,
                    )
                )  # fmt: skip
    some = f" (the first {len(shown)} of {len(columns):,})" if len(shown) < len(columns) else ""
    colours = "; a colour is a class" if kinds > 1 else ""
    found += [
        TEXT.format(46, 18, "end", f"{most:,}"),
        TEXT.format(46, 10 + HEIGHT, "end", "0"),
        TEXT.format(50, HEIGHT + 28, "start", f"{part} of each client{some}{colours}"),
    ]
    return _svg(label, *found)


def curves(label: str, x: Sequence[int], lines: Mapping[str, Sequence[float]]) -> Markup:
    """Lines over the rounds, each with its name at its end. Gaps where there is no number."""
    values = [v for line in lines.values() for v in line if math.isfinite(v)]
    if not values or not x:
        return Markup("")
    low, high, first, last = min(values), max(values), x[0], x[-1]

    def place(t: int, value: float) -> tuple[float, float]:
        right = (t - first) / (last - first) if last > first else 1.0
        up = (value - low) / (high - low) if high > low else 0.5
        return 50 + (WIDTH - 50) * right, 10 + HEIGHT * (1 - up)

    found, free = [], 0.0
    ends = {name: next((v for v in reversed(line) if math.isfinite(v)), low)
            for name, line in lines.items()}  # fmt: skip
    for k, name in enumerate(sorted(lines, key=lambda name: -ends[name])):
        points = [place(t, v) for t, v in zip(x, lines[name], strict=True) if math.isfinite(v)]
        text = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        form = Markup('<polyline points="{}" fill="none" stroke="{}" stroke-width="2"/>')
        found.append(form.format(text, colour(k, len(lines))))
        found += [Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.5" fill="{}"/>').format(
            *points[-1], colour(k, len(lines)))] if points else []  # fmt: skip
        free = max(place(last, ends[name])[1] + 4, free)
        found.append(TEXT.format(WIDTH + 6, free, "start", name))
        free += 12
    found += [
        TEXT.format(46, 18, "end", number(high)),
        TEXT.format(46, 10 + HEIGHT, "end", number(low)),
        TEXT.format(50, HEIGHT + 28, "start", f"round {first}"),
        TEXT.format(WIDTH, HEIGHT + 28, "end", f"round {last}"),
    ]
    return _svg(label, *found)
