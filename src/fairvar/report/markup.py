"""HTML from text and SVG. `Html` is a type of its own: mypy refuses text that was not escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import NewType
from xml.etree import ElementTree

from fairvar.errors import BadInput

Html = NewType("Html", str)
NOTHING = Html("")

# NUL, other control characters and lone surrogates are no HTML; a reader should see that they
# were there.
_NO_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"meta", "link", "br", "hr"})


def text(value: str) -> Html:
    """Any text, safe between tags and inside quoted attributes."""
    return Html(html.escape(_NO_TEXT.sub("\ufffd", value), quote=True))


def join(parts: Iterable[Html], between: str = "\n") -> Html:
    return Html(text(between).join(parts))


def tag(element: str, *inside: Html, **attributes: str | bool) -> Html:
    """`tag("td", text("1.5"), class_="number")`; an attribute that is False is left out."""
    written = []
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            written.append(f" {name}")
        elif value is not False:
            written.append(f' {name}="{text(value)}"')
    start = f"<{element}{''.join(written)}>"
    return Html(start if element in _VOID else f"{start}{''.join(inside)}</{element}>")


# --- SVG -----------------------------------------------------------------------------------------
_DRAWN = frozenset({
    "svg", "g", "defs", "path", "use", "rect", "circle", "ellipse", "line", "polyline", "polygon",
    "clipPath", "image", "text", "tspan", "linearGradient", "radialGradient", "stop", "pattern",
    "mask", "marker",
})  # fmt: skip
_LEFT_OUT = frozenset({"metadata", "style", "title", "desc"})
ENLARGED = 1.25 * 96 / 72  # pixels per point: letters of 8 points are for paper, too small here
WIDE = 600  # pixels; on a phone such a figure is shrunk less
_PNG = "data:image/png;base64,"


def drawing(svg: str, prefix: str, name: str) -> Html:
    """An SVG file as part of a page: ids made its own, styles turned into attributes.

    Two figures of one page may use the same ids, and a page that forbids inline styles would show
    matplotlib's figures black. What could run or load something is refused.
    """
    try:
        if "<!ENTITY" in svg:
            raise ElementTree.ParseError("it declares entities")
        root = ElementTree.fromstring(svg)  # noqa: S314  (no entities: see above)
    except ElementTree.ParseError as error:
        raise BadInput(f"a figure is not SVG ({error}); make it with figure_svg") from None
    if _bare(root.tag) != "svg":
        raise BadInput(f"a figure starts with <{_bare(root.tag)}>; make it with figure_svg")
    _clean(root, prefix)
    wide, high = _size(root)
    # matplotlib gives these as a style sheet for all elements; here they are inherited
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt"}
    root.attrib |= {"width": f"{wide:.0f}", "height": f"{high:.0f}"}
    root.attrib |= {"class": "wide"} if wide > WIDE else {}
    root.attrib |= {"role": "img", "aria-label": _NO_TEXT.sub("\ufffd", name)}
    return Html(ElementTree.tostring(root, encoding="unicode"))


def _bare(name: str) -> str:
    return name.rpartition("}")[2]


def _size(root: ElementTree.Element) -> tuple[float, float]:
    """Width and height in CSS pixels, from the box that the figure is drawn in (points)."""
    try:
        *_, wide, high = map(float, root.attrib["viewBox"].split())
    except (KeyError, ValueError):
        raise BadInput("a figure has no viewBox; make it with figure_svg") from None
    return wide * ENLARGED, high * ENLARGED


def _clean(element: ElementTree.Element, prefix: str) -> None:
    element.tag = _bare(element.tag)
    if element.tag not in _DRAWN:
        raise BadInput(f"a figure has a <{element.tag}> element; make it with figure_svg")
    found: dict[str, str] = {}
    for key, value in element.attrib.items():
        if key == "style":
            found |= _properties(value)
        else:
            found[_bare(key)] = value
    element.attrib.clear()
    for key, value in sorted(found.items()):
        element.set(key, _reference(key, value, prefix))
    for child in list(element):
        if _bare(child.tag) in _LEFT_OUT:
            element.remove(child)
        else:
            _clean(child, prefix)


def _properties(style: str) -> dict[str, str]:
    pairs = (item.partition(":") for item in style.split(";") if item.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _reference(key: str, value: str, prefix: str) -> str:
    """The value with ids renamed; refuses what points outside the figure or would be run."""
    if key.lower().startswith("on") or not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", key):
        raise BadInput(f"a figure has an attribute {key!r}; make it with figure_svg")
    if key == "id":
        return f"{prefix}-{value}"
    if key in ("href", "src"):
        if value.startswith("#"):
            return f"#{prefix}-{value[1:]}"
        if value.startswith(_PNG):
            return value
        raise BadInput(f"a figure refers to {value[:40]!r}; make it with figure_svg")
    if "url(" in value:
        inner = re.fullmatch(r"url\(#([\w.-]+)\)", value)
        if inner is None:
            raise BadInput(f"a figure refers to {value[:40]!r}; make it with figure_svg")
        return f"url(#{prefix}-{inner[1]})"
    return value
