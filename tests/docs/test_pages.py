"""README and docs: every block of code is executed or marked, and every link leads somewhere.

The blocks of a page run from top to bottom in one empty folder, which holds copies of `configs`,
`examples` and `tools`:

    ```python    in one namespace per page, with warnings as errors
    ```console   command by command; after "$ " lines, the lines below are what it must print ("…"
                 stands for anything)
    ```toml      must be a valid configuration, or a valid sweep where it has [sweep]
    ```text      right after Python code (or after the line "prints"): what that must print;
                 elsewhere it is shown only

A comment in the line before a block says otherwise:

    <!-- not executed: the reason -->
    <!-- executed by tests/flower/test_deploy_page.py -->
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

import fairvar.methods
from fairvar import cli
from fairvar.runs.config import Config, parse_toml
from fairvar.runs.plan import Plan

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
COPIED = ("configs", "examples", "tools")
SHOWN = {"", "text", "csv", "json"}
EXECUTED = {"python", "console", "toml"}
MARK = re.compile(r"<!-- (not executed: \S.*|executed by (?P<test>tests/\S+\.py)) -->")
COMMAND = re.compile(r"(\$ |(sudo |\S*/)?(pip|make|fairvar|flwr|python|pytest|git|docker)\d? )")


@dataclass(frozen=True)
class Block:
    line: int  # of the fence, counted from 1
    end: int  # of the closing fence
    language: str
    text: str
    mark: re.Match[str] | None  # of the comment in the line before


def blocks(source: str) -> Iterator[Block]:
    lines = source.splitlines()
    for token in MarkdownIt().parse(source):
        if token.type == "fence" and token.map:
            at = token.map[0]
            mark = MARK.fullmatch(lines[at - 1].strip()) if at else None
            yield Block(at + 1, token.map[1], token.info.split(" ")[0], token.content, mark)


class Page:
    """Executes the blocks of one page in the current folder."""

    def __init__(self, name: str) -> None:
        self.module = ModuleType("page_" + re.sub(r"\W", "_", name))
        sys.modules[self.module.__name__] = self.module  # annotations are looked up there
        self.printed = 0, ""  # by the last Python block: the line of its end, and what it printed

    def run(self, block: Block) -> None:
        if named := re.match(r"# file: (\S+)\n", block.text):
            Path(named[1]).write_text(block.text)
        elif block.language == "toml":
            values = parse_toml(block.text, "the block")
            if "sweep" in values or "scale" in values:
                Path("block.toml").write_text(block.text)
                Plan.load(Path("block.toml"), [])
            else:
                Config.from_dict(values)
        elif block.language == "python":
            # In a file with the line numbers of the page: `inspect` reads classes from there.
            file = Path(f"{self.module.__name__}.py").absolute()
            file.write_text("\n" * block.line + block.text)
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile(file.read_text(), str(file), "exec"), vars(self.module))
            self.printed = block.end, said.getvalue()
        elif block.language == "text":
            end, said = self.printed
            right_after = block.line - end <= 4  # two empty lines and "prints"
            assert not right_after or alike(said, block.text), f"printed:\n{said}"
        else:
            for command, expected in commands(block.text):
                said = self.command(command)
                assert alike(said, expected), f"{command} printed:\n{said}\nnot:\n{expected}"

    def command(self, line: str) -> str:
        """What a command prints. `fairvar` and `python -c` run in this process, which has torch
        loaded, unless the line needs a shell."""
        words = shlex.split(line, comments=True)
        if words[0] == "export":
            os.environ |= dict(word.split("=", 1) for word in words[1:])
            return ""
        said = io.StringIO()
        if words[0] == "fairvar" and not set("|><&;\n") & set(line):
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = ended(words[1:])
            assert not code, f"{line} ended with {code}:\n{said.getvalue()}"
        elif words[:2] == ["python", "-c"] and len(words) == 3:
            with contextlib.redirect_stdout(said):
                exec(words[2], {"__name__": "__main__"})
        else:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], capture_output=True,
                                  text=True, env=os.environ | {"PATH": path})  # fmt: skip
            assert done.returncode == 0, f"{line}:\n{done.stdout}{done.stderr}"
            said.write(done.stdout)
        return said.getvalue()


def ended(words: list[str]) -> int:
    """The exit code of a command of fairvar."""
    try:
        cli.main(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command with the output that the page shows ("" for none)."""
    text = text.replace("\\\n", " ")
    if not text.startswith("$ "):
        yield from ((line, "") for line in text.splitlines() if line.split("#")[0].strip())
        return
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def alike(said: str, expected: str) -> bool:
    """Whether all of `expected` stands in `said`, whatever the spaces; "…" stands for anything."""
    pieces = (re.escape(" ".join(piece.split())) for piece in expected.split("…"))
    return re.search(r".*?".join(pieces), " ".join(said.split())) is not None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder of a page. What its code changes for the whole process is put back."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    kept: Any = (os.environ, fairvar.methods.METHODS)
    before = [dict(mapping) for mapping in kept]
    for tag, method in before[1].items():
        if not method.__module__.startswith("fairvar."):  # of another test in this process
            del fairvar.methods.METHODS[tag]
    os.environ |= {"COLUMNS": "100", "PYTHONPATH": str(ROOT / "src")}
    yield
    for mapping, values in zip(kept, before, strict=True):
        mapping.clear()
        mapping.update(values)


def test_marks_and_languages_are_known() -> None:
    wrong = []
    for page, name in zip(PAGES, NAMES, strict=True):
        source = page.read_text(encoding="utf-8")
        for block in blocks(source):
            where = f"{name}:{block.line}"
            if block.mark is None and block.language not in SHOWN | EXECUTED:
                wrong.append(f"{where}: ```{block.language} is not executed; mark it")
            if block.mark is None and re.search(r"^(\$ )?pip |-m pip ", block.text, re.MULTILINE):
                wrong.append(f"{where}: installs packages; mark it")
            test = block.mark and block.mark["test"]
            if test and page.name not in (ROOT / test).read_text(encoding="utf-8"):
                wrong.append(f"{where}: {test} does not read this page")
        for token in MarkdownIt().parse(source):
            if token.type == "code_block" and token.map and COMMAND.match(token.content):
                wrong.append(f"{name}:{token.map[0] + 1}: an indented command; fence it")
        used = sum(block.mark is not None for block in blocks(source))
        if used != len(re.findall(r"^ *<!-- (?:not executed|executed by)", source, re.MULTILINE)):
            wrong.append(f"{name}: a mark that is misspelt or not right before a block")
    assert not wrong, "\n".join(wrong)


WITH_CODE = [
    name for page, name in zip(PAGES, NAMES, strict=True)
    if any(b.language in EXECUTED and b.mark is None for b in blocks(page.read_text("utf-8")))
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE)
@pytest.mark.usefixtures("folder")
def test_code_of_the_page_works(name: str) -> None:
    page = Page(name)
    for block in blocks((ROOT / name).read_text(encoding="utf-8")):
        if block.language in EXECUTED | {"text"} and block.mark is None:
            try:
                page.run(block)
            except Exception as error:
                error.add_note(f"{name}:{block.line}")
                raise


@pytest.mark.parametrize("name", NAMES)
def test_stars_of_exact_variants_are_no_emphasis(name: str) -> None:
    """FairLoss(*), FairGrad(*) would show no star, and the text between them in italics."""
    source = (ROOT / name).read_text(encoding="utf-8")
    wrong = [
        after.content
        for token in MarkdownIt("commonmark").enable("table").parse(source)
        for before, after in pairwise(token.children or ())
        if before.type == "em_open" and re.match(r"[^\w(“]", after.content)
    ]
    assert not wrong


# --- links ---------------------------------------------------------------------------------------
def links(source: str) -> Iterator[str]:
    for token in MarkdownIt("commonmark").enable("table").parse(source):
        for child in token.children or ():
            address: Any = child.attrGet("href") or child.attrGet("src")
            if address:
                yield unquote(address)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them; a heading that comes again has a number."""
    found: list[str] = []
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    for before, token in pairwise(tokens):
        if before.type == "heading_open":
            text = "".join(child.content for child in token.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            again = sum(known == slug or known.startswith(f"{slug}-") for known in found)
            found.append(f"{slug}-{again}" if slug in found else slug)
    return set(found)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page, wrong = ROOT / name, []
    for link in links(page.read_text(encoding="utf-8")):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        if not target.exists():
            wrong.append(f"{link}: no such file")
        elif parts.fragment and target.suffix == ".md" and parts.fragment not in anchors(target):
            wrong.append(f"{link}: no such heading")
    assert not wrong, f"{name}: " + "; ".join(wrong)


# --- the mechanism itself can fail ---------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        "```python\n1 / 0\n```",
        "```console\nfairvar no-such-command\n```",
        "```console\nfalse\n```",
        "```console\n$ python -c 'print(1)'\n2\n```",
        '```toml\n[method]\nname = "nothing"\n```',
    ],
)
@pytest.mark.usefixtures("folder")
def test_wrong_blocks_are_found(text: str) -> None:
    (block,) = blocks(text)
    with pytest.raises(Exception):  # noqa: B017, PT011
        Page("wrong").run(block)


def test_a_mark_stands_right_before_its_block() -> None:
    text = "<!-- not executed: it takes hours -->\n```console\nsleep 9999\n```\n"
    assert [bool(block.mark) for block in blocks(text + "\n" + text[38:])] == [True, False]


@pytest.mark.usefixtures("folder")
def test_what_python_prints_is_compared() -> None:
    page, text = Page("prints"), "```python\nprint(1)\n```\n\nprints\n\n```text\n2\n```\n"
    code, shown = blocks(text)
    page.run(code)
    with pytest.raises(AssertionError, match="printed"):
        page.run(shown)


@pytest.mark.usefixtures("folder")
def test_output_with_a_gap_is_compared() -> None:
    (block,) = blocks("```console\n$ python -c 'print(1,  2, 3)'\n1 … 3\n```")
    Page("right").run(block)
