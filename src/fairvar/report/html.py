"""The results of a sweep as one HTML file: no network, no other files, the same bytes each time.

The page forbids itself to load anything (Content-Security-Policy) and runs only the style sheet
and the script beside this module, by hash. Without the script it still reads: what it adds is
sorting, tooltips in place of `title`, and the switch between light and dark.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from fairvar.errors import BadInput
from fairvar.metrics import DEFINITIONS
from fairvar.report.markup import NOTHING, Html, drawing, join, tag, text
from fairvar.report.page_table import legend, scrolling_table
from fairvar.report.style import svg as figure_svg
from fairvar.report.table import Table
from fairvar.runs.store import write_text

__all__ = ["Page", "PageFigure", "Section", "figure_svg", "render_page", "write_page"]

GUIDE, NOTES, FACTS = "how-to-read", "notes", "birth-certificate"
TOP, TIP, HEARD = "top", "tip", "heard"  # ids that the page itself uses

EXPLAINED = (
    ("Accuracy", "mean",
     "How well people are served on average. A client's accuracy p_k is the share of its own test "
     "samples that the model gets right; the table shows the mean over the K clients, and a small "
     "client counts as much as a large one."),
    ("Variance over clients", "variance_over_clients",
     "How unevenly they are served: 0 if all clients have the same accuracy. It is printed as "
     "fraction² × 100, so 1.00 means that accuracies scatter by 10 percentage points around "
     "their mean, and 0.25 by 5."),
    ("Noise floor", "noise_floor",
     "What chance alone adds to the variance. A client is tested on n_k samples only, so measured "
     "accuracies would differ even if the true ones were all equal. The fewer test samples, the "
     "higher the floor."),
    ("Corrected variance", "corrected_variance",
     "The variance less its noise floor: an unbiased estimate of how much the true accuracies "
     "differ. Compare methods by this one. Near 0, or slightly below, no unevenness can be told "
     "from chance."),
)  # fmt: skip
SIGNS = (
    "± is the standard error over random seeds; with a single seed there is none. "
    "“div.” means that training did not end in finite numbers, “undef.” that the formula has no "
    "value (the variance of one client), “–” that nothing was measured. "
    "Hover over a number, tap it, or move to it with Tab and the arrow keys, to see it in full "
    "with its definition. Click a column's header to sort, twice for the reverse, three times for "
    "the first order."
)


@dataclass(frozen=True)
class PageFigure:
    """`svg` as made by `figure_svg`; `files` are names of the same figure beside the page."""

    svg: str
    caption: str
    files: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """One table with its figures. `details` are folded away: name → text, of one line or many."""

    title: str
    anchor: str
    intro: str = ""
    table: Table | None = None
    figures: Sequence[PageFigure] = ()
    details: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", self.anchor):
            raise BadInput(
                f"anchor {self.anchor!r}: start with a letter, then letters, digits and . _ -"
            )


@dataclass(frozen=True)
class Page:
    """`facts` are the birth certificate of the whole page: versions, device, seeds, time."""

    title: str
    subtitle: str = ""
    sections: Sequence[Section] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        seen = {GUIDE, NOTES, FACTS, TOP, TIP, HEARD}
        for section in self.sections:
            if section.anchor in seen:
                raise BadInput(f"anchor {section.anchor!r} is taken; give every section its own")
            seen.add(section.anchor)


def render_page(page: Page) -> str:
    """The whole file."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy()),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content="fairvar"),
        tag("title", text(page.title)),
        tag("style", _asset("page.css")),
        tag("script", _asset("page.js")),
    )
    main = tag("main", _heading(page), *_parts(page))
    tip = tag("div", id=TIP, role="tooltip", hidden=True)
    heard = tag("div", id=HEARD, class_="heard", aria_live="polite")
    body = tag("body", _bar(page), main, tip, heard, id=TOP)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def write_page(path: Path | str, page: Page) -> Path:
    """The page as a file; links to figure files that are not beside it are left out."""
    path = Path(path)
    sections = []
    for section in page.sections:
        figures = [
            replace(figure, files=[name for name in figure.files if (path.parent / name).is_file()])
            for figure in section.figures
        ]
        sections.append(replace(section, figures=figures))
    write_text(path, render_page(replace(page, sections=sections)))
    return path


# --- frame ---------------------------------------------------------------------------------------
@cache
def _asset(name: str) -> Html:
    """Our own style sheet or script, as it goes into the page."""
    return Html(resources.files("fairvar.report").joinpath(name).read_text(encoding="utf-8"))


def _policy() -> str:
    def digest(name: str) -> str:
        found = hashlib.sha256(_asset(name).encode()).digest()
        return f"'sha256-{base64.b64encode(found).decode()}'"

    return (
        f"default-src 'none'; style-src {digest('page.css')}; script-src {digest('page.js')}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _bar(page: Page) -> Html:
    """The table of contents, always in sight, and the switch between light and dark."""
    goals = [(section.anchor, section.title) for section in page.sections]
    goals.append((GUIDE, "How to read this"))
    if page.notes:
        goals.append((NOTES, "Notes"))
    if page.facts:
        goals.append((FACTS, "Birth certificate"))
    links = [tag("li", tag("a", text(name), href=f"#{anchor}")) for anchor, name in goals]
    switch = tag("button", text("Light or dark"), type="button", class_="theme", hidden=True)
    nav = tag("nav", tag("ul", *links), aria_label="Contents")
    return tag("div", nav, switch, class_="bar")


def _heading(page: Page) -> Html:
    subtitle = tag("p", text(page.subtitle), class_="subtitle") if page.subtitle else NOTHING
    return tag("header", tag("h1", text(page.title)), subtitle)


def _parts(page: Page) -> Iterator[Html]:
    for section in page.sections:
        yield _section(section)
    yield _guide()
    if page.notes:
        items = [tag("li", text(note)) for note in page.notes]
        yield tag("section", tag("h2", text("Notes")), tag("ul", *items), id=NOTES)
    if page.facts:
        title = tag("h2", text("Birth certificate"))
        yield tag("section", title, _pairs(page.facts), id=FACTS)


def _guide() -> Html:
    cards = [
        tag("article", tag("h3", text(name)), tag("p", _indexed(meaning)),
            tag("p", _indexed(DEFINITIONS[metric]), class_="formula"))
        for name, metric, meaning in EXPLAINED
    ]  # fmt: skip
    title = tag("h2", text("How to read this"))
    signs = tag("p", text(SIGNS))
    return tag("section", title, tag("div", *cards, class_="cards"), signs, id=GUIDE)


def _indexed(meaning: str) -> Html:
    """p_k with a real subscript; longer names such as noise_floor stay as they are."""
    return Html(re.sub(r"\b([pn])_k\b", r"\1<sub>k</sub>", text(meaning)))


def _section(section: Section) -> Html:
    found = [tag("h2", text(section.title))]
    found += [tag("p", text(part)) for part in re.split(r"\n\s*\n", section.intro) if part.strip()]
    if section.table is not None:
        found += [scrolling_table(section.table), legend(section.table)]
    if section.figures:
        figures = (
            _figure(figure, f"{section.anchor}-{i}") for i, figure in enumerate(section.figures)
        )
        found.append(tag("div", *figures, class_="figures"))
    if section.details:
        summary = tag("summary", text("Configuration and chosen hyper-parameters"))
        found.append(tag("details", summary, _pairs(section.details)))
    return tag("section", *found, id=section.anchor)


def _pairs(pairs: Mapping[str, str]) -> Html:
    def written(value: str) -> Html:
        return tag("pre", text(value), tabindex="0") if "\n" in value else text(value)

    entries = (
        tag("div", tag("dt", text(name)), tag("dd", written(value)), class_="pair")
        for name, value in pairs.items()
    )
    return tag("dl", *entries, class_="pairs")


def _figure(figure: PageFigure, prefix: str) -> Html:
    picture = drawing(figure.svg, prefix, figure.caption)
    box = tag("div", picture, class_="picture", tabindex="0", role="group",
              aria_label=figure.caption)  # fmt: skip
    links = join((_download(name) for name in figure.files), " ")
    files = tag("span", links, class_="files") if figure.files else NOTHING
    caption = tag("figcaption", tag("span", text(figure.caption)), files)
    return tag("figure", box, caption)


def _download(name: str) -> Html:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or re.search(r"[:\\]", name) or not path.name:
        raise BadInput(f"figure file {name!r}: give a name relative to the page's folder")
    kind = path.suffix.lstrip(".").upper() or path.name
    return tag("a", text(kind), href=quote(name), download=True, aria_label=f"download {name}")
