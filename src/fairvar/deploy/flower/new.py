"""Write a Flower app that trains with fairvar, to be filled with one's own model."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.resources import files
from pathlib import Path

from fairvar.errors import BadInput
from fairvar.runs.store import write_text

AT_TOP = ("pyproject.toml", "README.md")
TAKEN = ("fairvar", "flwr", "numpy", "torch")  # the app would hide them
IN_PACKAGE = ("model.py", "server_app.py", "client_app.py")


def new_app(folder: Path) -> list[Path]:
    """The files of a new app; its name is the folder's."""
    name = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name):
        raise BadInput(
            f"{name!r} cannot name an app; use lower-case letters, digits and _ (my_app)"
        )
    if keyword.iskeyword(name) or name in {*sys.stdlib_module_names, *TAKEN}:
        raise BadInput(f"{name!r} means something else in Python; choose another name (my_app)")
    if folder.exists():
        raise BadInput(f"{folder} exists already; choose another name")
    written = []
    for file in (*AT_TOP, *IN_PACKAGE):
        stored = f"{file}.txt" if file in IN_PACKAGE else file  # no Python file before it is named
        text = (
            files("fairvar.deploy.flower").joinpath("template", stored).read_text(encoding="utf-8")
        )
        path = folder / file if file in AT_TOP else folder / name / file
        write_text(path, text.replace("APP_NAME", name).replace("APP-NAME", name.replace("_", "-")))
        written.append(path)
    write_text(folder / name / "__init__.py", "")
    return [*written, folder / name / "__init__.py"]
