"""The report page without a browser: well-formed, escaped, the same bytes, nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from fairvar.errors import BadInput
from fairvar.metrics import DEFINITIONS
from fairvar.report import figures
from fairvar.report.html import RESERVED, PageFigure, Section, render_page
from fairvar.report.result_tables import SHORT, result_columns
from fairvar.report.style import svg as figure_svg
from fairvar.report.table import (
    Column,
    Estimate,
    Row,
    Table,
)

HOSTILE = '</td><script>alert("1")</script>\'"&<img src=x onerror=alert(1)>\x00\ud800'
COLUMNS = [column for column in result_columns("global") if column.key in SHORT]
VOID = {"meta", "link", "br", "hr", "img"}
URI = "data:image/svg+xml,"


class Reader(HTMLParser):
    """Every element with its attributes and own text; insists that what is opened is closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[dict[str, Any]] = []
        self.elements: list[dict[str, Any]] = []
        self.feed(source)
        self.close()
        assert not self.open, [e["tag"] for e in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice"
        found = {"tag": tag, "text": "", **dict(attrs)}
        self.elements.append(found)
        if tag not in VOID:
            self.open.append(found)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append({"tag": tag, "text": "", **dict(attrs)})

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()["tag"] == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element["text"] += data

    def all(self, tag: str, **attributes: str) -> list[dict[str, Any]]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [e for e in self.elements if e["tag"] == tag and wanted.items() <= e.items()]


@pytest.fixture(scope="module")
def svg() -> str:
    return figure_svg(figures.partition([[3, 1, 0], [0, 2, 5]], "who holds what", {}))


@pytest.fixture
def page(svg: str) -> str:
    rows = [
        Row("FedAvg", {"accuracy": Estimate(97.123456789, 0.25), "variance": Estimate(0.5, 0.125)}),
        Row("AFL", {"accuracy": Estimate(math.nan), "variance": "div.", "chosen": "lr 0.1"}),
        Row("FairLoss*", {"accuracy": Estimate(9.5, 10.5, True), "worst": Estimate(3.0)}),
    ]
    table = Table("Digits", COLUMNS, rows, ["two seeds"])
    figure = PageFigure(svg, "Partition", "partition of α.png")
    sections = [
        Section(f"α = {alpha}", f"alpha-{alpha}", table, [figure, figure],
                {"seeds": "0, 1", "configuration": "a = 1\nb = 2"})
        for alpha in ("0.05", "0.1")
    ]  # fmt: skip
    return render_page("Results", "of a test", sections, {"torch": "2.6"})


def one(section: Section) -> str:
    return render_page("t", "", [section])


def test_well_formed_and_complete(page: str) -> None:
    found = Reader(page)
    ids = [e["id"] for e in found.elements if "id" in e]
    assert len(ids) == len(set(ids))
    links = [a["href"] for a in found.all("a")]
    assert {link[1:] for link in links if link[0] == "#"} <= set(ids)
    assert {"#alpha-0_05", "#alpha-0_1", "#how-to-read", "#provenance"} <= set(links)
    assert "partition%20of%20%CE%B1.png" in links
    guide = found.all("section", id="how-to-read")[0]["text"]
    for metric in ("mean", "variance_over_clients", "noise_floor", "corrected_variance"):
        assert DEFINITIONS[metric].replace("_k", "k") in guide
    assert [e["text"] for e in found.all("pre")] == ["a = 1\nb = 2"] * 2
    assert [h["text"] for h in found.all("h1")] == ["Results"]


def test_every_number_has_definition_value_and_error(page: str) -> None:
    found = Reader(page)
    numbers = [e for e in found.all("td") if e["class"].startswith("number")]
    # two sections of three rows; "chosen" is the one column of words
    assert len(numbers) == 2 * 3 * (len(COLUMNS) - 1)
    for number in numbers:
        assert number["tabindex"] == "0"
        assert any(c.header in number["title"] and c.definition in number["title"] for c in COLUMNS)
    first = numbers[0]
    assert "97.123456789 ± 0.25 (standard error)" in first["title"]
    assert DEFINITIONS["mean"] in first["title"]
    assert first["data-value"] == "97.123456789"
    assert first["text"].replace("\u2007", " ") == "97.12 ±  0.25"
    assert [b["title"].splitlines()[0] for b in found.all("button") if "title" in b][:2] == [
        "method", "accuracy %",
    ]  # fmt: skip


def test_what_is_no_number_has_no_value(page: str) -> None:
    cells = [e for e in Reader(page).all("td") if e["class"].startswith("number")]
    diverged = [e for e in cells if e["text"].startswith("div.")]
    missing = [e for e in cells if e["text"].startswith("–")]
    assert len(diverged) == 4
    assert len(missing) == 2 * 12
    assert not [e for e in diverged + missing if "data-value" in e]
    assert "not measured" in missing[0]["title"]
    assert [e["text"] for e in cells if "marked" in e["class"]] == ["9.50 ±\u200710.50"] * 2


def test_a_column_without_definition_takes_the_metric_s_or_its_header() -> None:
    columns = [Column("gini", "Gini"), Column("x", "my x")]
    row = Row("A", {"gini": Estimate(0.1), "x": Estimate(1)})
    source = one(Section("s", "s", table=Table("", columns, [row])))
    titles = [e["title"] for e in Reader(source).all("td")]
    assert titles == [
        f"A: Gini\n0.1, no standard error\n{DEFINITIONS['gini']}",
        "A: my x\n1.0, no standard error\nmy x",
    ]


def test_hostile_text_stays_text(svg: str) -> None:
    column = Column("k", HOSTILE, 2, HOSTILE)
    words = Column("w", "words")
    rows = [Row(HOSTILE, {"k": Estimate(1.0), "w": HOSTILE}), Row("b", {"k": HOSTILE})]
    section = Section(HOSTILE, HOSTILE, Table(HOSTILE, [column, words], rows, [HOSTILE]),
                      [PageFigure(svg, HOSTILE, HOSTILE)], {HOSTILE: HOSTILE})  # fmt: skip
    source = render_page(HOSTILE, HOSTILE, [section], {HOSTILE: HOSTILE + "\n"})
    found = Reader(source)
    assert len(found.all("script")) == 1
    (image,) = found.all("img")  # the figure
    assert unquote(image["src"]) == URI + svg
    assert "\x00" not in source
    source.encode()
    assert not [name for e in found.elements for name in e if name.startswith("on")]
    shown = HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert found.all("h1")[0]["text"] == shown
    assert found.all("th", scope="row")[0]["data-value"] == shown


def test_same_bytes_in_every_process() -> None:
    code = (
        "from fairvar.report import figures; import hashlib;"
        "from fairvar.report.style import svg;"
        "f = figures.client_accuracies({'FedAvg': [.1, .5, .9], 'AFL': [.2, .5, .8]});"
        "print(hashlib.sha256(svg(f).encode()).hexdigest())"
    )
    found = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
        for _ in range(2)
    }
    assert len(found) == 1


def test_nothing_from_outside(page: str) -> None:
    source = page
    drawn = [unquote(image["src"]) for image in Reader(source).all("img")]
    frame = re.sub(r'src="[^"]*"', "", source)
    assert len(drawn) == 4
    for text in (frame, *drawn):
        assert not re.findall(r"https?://(?!www\.w3\.org/)", text)
        assert not re.search(r"@import|url\((?!#)", text)
    assert not re.search(r"\sstyle=", frame), "the policy forbids style attributes"
    for element in Reader(source).elements:
        for name in ("src", "href"):
            if name in element:
                assert element[name].startswith(("#", URI, "partition"))
    for image in drawn:
        inner = ElementTree.fromstring(image.removeprefix(URI))
        links = [v for e in inner.iter() for k, v in e.items() if k.endswith("href")]
        assert links
        assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)


def test_policy_allows_our_script_and_style_only(page: str) -> None:
    source = page
    found = Reader(source)
    (policy,) = [
        e["content"] for e in found.all("meta", **{"http-equiv": "Content-Security-Policy"})
    ]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", source, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_every_section_has_an_id_of_its_own() -> None:
    """Names come from data sets: any text, also one that the page uses itself."""
    names = ["α b", "β b", "a.1", "a_1", *RESERVED]
    found = Reader(render_page("t", "", [Section("s", name) for name in names]))
    ids = [e["id"] for e in found.elements if "id" in e]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", id) for id in ids)
    targets = [a["href"][1:] for a in found.all("a")]
    assert [e["id"] for e in found.all("section")][: len(names)] == targets[: len(names)]


BOX = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 72 36">'


@pytest.mark.parametrize(
    "inside",
    [
        "<script>alert(1)</script>",
        "<foreignObject/>",
        '<g onclick="alert(1)"/>',
        '<image href="file:///etc/passwd"/>',
        '<g style="fill: url(other.svg#a)"/>',
        "</svg>\"><script>alert('1')</script>&#34;<img src=x onerror=alert(1)>%22%3E",
    ],
)
def test_a_figure_is_an_image_and_never_markup_of_the_page(inside: str) -> None:
    """In an image browsers run no script and load nothing; here nothing gets out of it."""
    svg = BOX + inside + "</svg>"
    found = Reader(one(Section("s", "s", figures=[PageFigure(svg, "c")])))
    (image,) = found.all("img")
    assert unquote(image["src"]) == URI + svg
    assert len(found.all("script")) == 1
    assert not found.all("svg")
    assert not [name for e in found.elements for name in e if name.startswith("on")]


@pytest.mark.parametrize(
    "svg", ["no svg", "<p>hello</p>", '<svg xmlns="http://www.w3.org/2000/svg"/>']
)
def test_what_is_no_figure_is_refused(svg: str) -> None:
    with pytest.raises(BadInput, match=r"style\.svg"):
        one(Section("s", "s", figures=[PageFigure(svg, "c")]))


def test_figures_have_a_size_and_a_text() -> None:
    page = one(Section("s", "s", figures=[PageFigure(BOX + "</svg>", "c")]))
    assert Reader(page).all("img", width="120", height="60", alt="c")


def test_the_summary_comes_first_and_minus_signs_are_true() -> None:
    table = Table(
        "", [Column("x", "x"), Column("w", "w")], [Row("A", {"x": Estimate(-0.5), "w": "-1 to 2"})]
    )
    told = {"digits": [HOSTILE, "AFL (-0.25) is clearly behind."]}
    found = Reader(render_page("t", "", [Section("s", "s", table=table)], summary=told))
    assert [e["id"] for e in found.all("section")] == ["in-short", "how-to-read", "s"]
    assert "AFL (−0.25) is" in found.all("section", id="in-short")[0]["text"]
    assert [e["text"] for e in found.all("td")] == ["−0.50", "−1 to 2"]
    assert len(found.all("script")) == 1


def test_an_empty_page() -> None:
    found = Reader(render_page("nothing yet", "", []))
    assert not found.all("table")
    Reader(one(Section("s", "s", table=Table("", [], []))))
