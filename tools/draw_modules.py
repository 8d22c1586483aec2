"""Draw the packages of fairvar and the imports between them, as read from the source.

    python tools/draw_modules.py                  # writes docs/modules.svg
    python tools/draw_modules.py --out FILE.svg

A box is a package with its modules; an arrow says that the upper one imports the lower one. Arrows
that a chain of others implies are left out.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import textwrap
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "fairvar"
ROWS = [
    ["cli", "api"],
    ["report", "deploy"],
    ["runs", "testing"],
    ["engine"],
    ["data", "methods", "models", "theory"],
    ["metrics", "objectives"],
    ["scores"],
    ["common"],
    ["errors"],
]
WIDE, HIGH = 14.0, 16.0


def imports() -> set[tuple[str, str]]:
    """Pairs of packages (importing, imported)."""
    pairs = set()
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [n.name for n in node.names] if isinstance(node, ast.Import) else []
            if names == ["fairvar"] and isinstance(node, ast.ImportFrom):
                names = [f"fairvar.{alias.name}" for alias in node.names]
            pairs |= {(own, n.split(".")[1]) for n in names if n.startswith("fairvar.")}
    known = set(itertools.chain(*ROWS))
    return {(a, b) for a, b in pairs if a != b and {a, b} <= known}


def direct(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without those that a chain of other imports implies."""
    names = {name for pair in pairs for name in pair}

    def reaches(a: str, b: str) -> bool:
        return (a, b) in pairs or any((a, c) in pairs and reaches(c, b) for c in names - {a, b})

    return {
        (a, b) for a, b in pairs
        if not any((a, c) in pairs and reaches(c, b) for c in names - {a, b})
    }  # fmt: skip


def modules(name: str) -> str:
    folder = SOURCE / name
    if not folder.is_dir():
        return ""
    found = sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__")
    found += sorted(f"{p.name}/" for p in folder.iterdir() if (p / "__init__.py").exists())
    return ", ".join(found)


def labels() -> set[str]:
    """Every name in the picture."""
    names = set(itertools.chain(*ROWS))
    return names.union(*(modules(name).split(", ") for name in names)) - {""}


def places() -> dict[str, tuple[float, float, float, float]]:
    """Left, bottom, width and height of each box."""
    found = {}
    step = HIGH / len(ROWS)
    for number, row in enumerate(ROWS):
        bottom = HIGH - (number + 1) * step + 0.45
        weights = [max(2.2, len(modules(name)) ** 0.6) for name in row]
        room = min(WIDE - 0.4 * (len(row) + 1), sum(weights) * 1.1)
        left = (WIDE - room - 0.4 * (len(row) - 1)) / 2
        for name, weight in zip(row, weights, strict=True):
            width = room * weight / sum(weights)
            found[name] = (left, bottom, width, step - 0.75)
            left += width + 0.4
    return found


def draw() -> Figure:
    figure = Figure(figsize=(WIDE * 0.75, HIGH * 0.75))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDE), ylim=(0, HIGH))
    axes.axis("off")
    where = places()
    for name, (left, bottom, width, height) in where.items():
        axes.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0.06",
                                      facecolor="#eef3f8", edgecolor="#30506e"))  # fmt: skip
        inside = modules(name)
        axes.text(left + width / 2, bottom + height - (0.1 if inside else height / 2 - 0.1), name,
                  ha="center", va="top", fontsize=11, weight="bold", color="#1d3247")  # fmt: skip
        lines = textwrap.wrap(inside, max(14, int(width * 11)))
        axes.text(left + width / 2, bottom + height - 0.45, "\n".join(lines), ha="center", va="top",
                  fontsize=7.5, color="#333333", linespacing=1.25)  # fmt: skip
    for a, b in sorted(direct(imports())):
        start, end = where[a], where[b]
        axes.add_patch(FancyArrowPatch(
            (start[0] + start[2] / 2, start[1] - 0.06),
            (end[0] + end[2] / 2, end[1] + end[3] + 0.06),
            arrowstyle="-|>", mutation_scale=11, color="#7a8fa3", linewidth=1.1, zorder=0,
        ))  # fmt: skip
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "modules.svg")
    out = parser.parse_args().out
    with matplotlib.rc_context({"svg.hashsalt": "fairvar", "svg.fonttype": "none"}):
        draw().savefig(out, format="svg", metadata={"Date": None})
    print(out)


if __name__ == "__main__":
    main()
