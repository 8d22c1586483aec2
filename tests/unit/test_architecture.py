"""Modules of fairvar import each other in one direction; imports inside functions count, too."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fairvar"
# A package may import packages of earlier layers only.
LAYERS: tuple[set[str], ...] = (
    {"_version", "errors"},
    {"common"},
    {"scores"},
    {"metrics", "objectives"},
    {"data", "methods", "models", "theory"},
    {"engine"},
    {"runs"},
    {"deploy", "report"},
    {"api", "cli", "testing"},
    {"__init__", "__main__"},
)
# Violations that remain. The sets must be exact, so that a mended entry has to be removed.
KNOWN_ARROWS: set[tuple[str, str]] = set()
KNOWN_CYCLES: set[str] = set()


def modules() -> dict[str, ast.Module]:
    names = {}
    for path in SOURCE.rglob("*.py"):
        if "template" not in path.parts:  # an app that `fairvar flower new` copies
            parts = ("fairvar", *path.relative_to(SOURCE).with_suffix("").parts)
            names[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return names


MODULES = modules()


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else node.module for name in names)


GRAPH = {name: set(imported(tree)) - {name} for name, tree in MODULES.items()}


def package(name: str) -> str:
    return [*name.split("."), "__init__"][1]


def test_imports_point_to_earlier_layers() -> None:
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    pairs = {(package(a), package(b)) for a, found in GRAPH.items() for b in found}
    assert {(a, b) for a, b in pairs if a != b and rank[a] <= rank[b]} == KNOWN_ARROWS


def test_no_module_imports_itself_over_others() -> None:
    def reached(start: str) -> set[str]:
        found, open_ = set[str](), [start]
        while open_:
            new = GRAPH[open_.pop()] - found
            found |= new
            open_ += new
        return found

    assert {name for name in GRAPH if name in reached(name)} == KNOWN_CYCLES


def test_no_import_is_hidden_from_this_test() -> None:
    relative = [name for name, tree in MODULES.items() for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.level]  # fmt: skip
    assert relative == []


def test_the_picture_of_the_modules_is_that_of_the_source() -> None:
    """Labels, not bytes: the layout depends on fonts and on matplotlib."""
    spec = importlib.util.spec_from_file_location("draw", ROOT / "tools" / "draw_modules.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    picture = (ROOT / "docs" / "modules.svg").read_text()
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    names = {name for text in drawn for name in text.rstrip(",").split(", ")}
    assert names == draw.labels(), "run: python tools/draw_modules.py"
    assert {package(name) for name in GRAPH} - {"__init__", "__main__", "_version"} <= names


def defined_in(place: str) -> set[str]:
    """Functions and classes of a file, or of all files of a folder, and methods as Class.method."""
    start = "fairvar." + place.removesuffix(".py").rstrip("/").replace("/", ".")
    names = set[str]()
    for tree in (tree for name, tree in MODULES.items() if f"{name}.".startswith(f"{start}.")):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
                names |= {f"{node.name}.{inner.name}" for inner in node.body
                          if isinstance(inner, ast.FunctionDef)}  # fmt: skip
    return names


def test_the_walks_of_the_design_page_name_functions_that_exist() -> None:
    """In the file that is named with them or in an earlier step; at most eight steps."""
    page = (ROOT / "docs" / "design.md").read_text()
    walks = re.findall(r"^## The walk of .*\n\n((?:\d\. .*\n(?:   .*\n)*)+)", page, re.MULTILINE)
    assert len(walks) == 3
    for walk in walks:
        steps = re.findall(r"^\d\. `([\w.]+)`[\w ]*(?:\(`([\w/.]+)`)?", walk, re.MULTILINE)
        place = ""
        assert 5 < len(steps) <= 8
        for name, named_place in steps:
            place = named_place or place
            assert name in defined_in(place), f"{name} is not in {place}"


def test_the_pages_on_the_design_name_files_that_exist() -> None:
    """Below the sources, the repository or, in a section on one package, that package."""
    places = [ROOT, SOURCE, *(path for path in SOURCE.iterdir() if path.is_dir())]
    places.append(SOURCE / "engine" / "kernels")
    for page in ("design.md", "decisions.md"):
        named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / page).read_text())
        assert len(named) > 10
        for name in named:
            assert any((place / name).is_file() for place in places), f"{page}: {name}"


def test_every_class_has_a_name_of_its_own() -> None:
    """Classes of fairvar, and private ones of a module, which need one there only."""
    seen: dict[str, str] = {}
    for name, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert node.name not in seen, f"{node.name}: in {name} and in {seen[node.name]}"
                seen[node.name] = name
