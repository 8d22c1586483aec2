"""Own methods from a Python file, for the command line and its worker processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from fairvar.errors import BadInput


def load_plugin(path: Path | None) -> None:
    """Run a file that registers methods. It is code: load only what you would run yourself."""
    if path is None:
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BadInput(f"plugin {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where annotations written as strings are looked up
    spec.loader.exec_module(module)
