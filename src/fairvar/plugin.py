"""Own methods from a Python file, for the command line and its worker processes."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

from fairvar.errors import BadInput
from fairvar.files import MOST_CODE, read_bytes


def load_plugin(path: Path | None) -> None:
    """Run a file that registers methods. It is code: load only what you would run yourself."""
    if path is None:
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"plugin {path} is not a Python file")
    try:
        source = read_bytes(path, MOST_CODE)
    except OSError as error:
        raise BadInput(f"plugin {path} is not a Python file: {error.strerror}") from None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where annotations written as strings are looked up
    try:
        exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102  # as an import does
    except Exception as error:
        del sys.modules[path.stem]
        raise BadInput(f"plugin {_place(path, error)}: {_line(error)}") from None


def _place(path: Path, error: Exception) -> str:
    """The file and, if it came that far, the line of it that failed."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _line(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"
