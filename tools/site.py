"""What `mkdocs build` does besides: links out of docs/, the configuration reference, notebooks.

Files outside docs/ that a page links (sources, examples, published tables) are copied into the site
below `repository/`. Notebooks are executed, so that a failing one stops the build, and shown with
what they printed and drew.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from posixpath import normpath, relpath
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from config_reference import reference
from jupyter_client import KernelManager
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = re.compile(r"(\]\([\w./]*notebooks/\w+)\.ipynb\)")  # shown as a page
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)([^)]*\))")
GENERATED = "reference/configuration.md"


def on_config(config: Any) -> Any:
    """Entries of the navigation whose page does not exist yet are left out."""

    def there(entry: Any) -> bool:
        page = next(iter(entry.values())) if isinstance(entry, dict) else entry
        made = page == GENERATED or str(page).startswith("notebooks/")
        return isinstance(page, list) or made or (Path(config.docs_dir) / page).is_file()

    for part in config.nav:
        for name, entries in part.items():
            if isinstance(entries, list):
                part[name] = [entry for entry in entries if there(entry)]
    return config


def on_files(files: Files, config: Any) -> Files:
    docs = Path(config.docs_dir)
    files.append(File.generated(config, GENERATED, content=reference()))
    for book in sorted(docs.glob("notebooks/*.ipynb")):
        files.append(File.generated(config, f"notebooks/{book.stem}.md", content=executed(book)))
        files.remove(files.get_file_from_path(f"notebooks/{book.name}"))
    for page in list(files.documentation_pages()):
        for target in outside(page.src_uri, page.content_string) - {"tools/config_reference.py"}:
            name = f"repository/{target}"
            if files.get_file_from_path(name) is None and (ROOT / target).is_file():
                content = (ROOT / target).read_text(encoding="utf-8")
                if name.endswith(".md"):  # shown as it is: its own links are not followed
                    content = f"<pre>{html.escape(content)}</pre>\n"
                copy = File.generated(config, name, content=content)
                copy.inclusion = copy.inclusion.NOT_IN_NAV
                files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri

    def inside(link: re.Match[str]) -> str:
        target = normpath(f"docs/{os.path.dirname(here)}/{link[2]}")
        if target.startswith("docs/"):
            return link[0]
        if target == "tools/config_reference.py":  # to the page that it makes
            return link[1] + relpath(GENERATED, os.path.dirname(here) or ".") + link[3]
        return link[1] + relpath(f"repository/{target}", os.path.dirname(here) or ".") + link[3]

    return LINK.sub(inside, NOTEBOOK.sub(r"\1.md)", markdown))


DRAWING = re.compile(r'<p>(<img [^>]*src="([^"]+\.svg)"[^>]*>)</p>')
PICTURE = re.compile(r'<p>(<img [^>]*src="[^"]+\.png"[^>]*>)</p>')
ARGUMENT = re.compile(r"(<p>|\n)((?:[a-z]\w*, )*[a-z]\w*): ")
NEW, BREAK = "\n", "<br>\n"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """On a phone drawings are links to themselves, to be enlarged, and pictures scroll. Arguments
    in docstrings begin a line and are shown as code; other lines of the source are joined."""
    html = DRAWING.sub(r'<p><a href="\2" title="the whole picture">\1</a></p>', html)
    html = PICTURE.sub(r'<div class="drawing" tabindex="0">\1</div>', html)
    if page.file.src_uri != "reference/api.md":
        return html
    return ARGUMENT.sub(lambda at: f"{at[1].replace(NEW, BREAK)}<code>{at[2]}</code>: ", html)


def outside(here: str, markdown: str) -> set[str]:
    """Paths of the files that a page links and that are not in docs/."""
    found = {normpath(f"docs/{os.path.dirname(here)}/{link[1]}") for link in LINK.findall(markdown)}
    return {path for path in found if not path.startswith(("docs/", ".."))}


def executed(path: Path) -> str:
    """A notebook as Markdown, with the outputs of this run."""
    book = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:  # what its cells write is not kept
        kernel = KernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
        where = {"metadata": {"path": folder}}
        NotebookClient(book, km=kernel, timeout=600, resources=where).execute()
    parts = []
    for cell in book.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = output.get("text") or data.get("text/plain", "")
            if "image/png" in data:
                picture = data["image/png"].replace("\n", "")
                image = f'<img alt="drawn by the cell above" src="data:image/png;base64,{picture}">'
                parts.append(f'<div class="drawing" tabindex="0">{image}</div>')
            elif text:
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
