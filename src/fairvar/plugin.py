"""Own methods from a Python file, for the command line and its worker processes."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from fairvar.errors import BadInput
from fairvar.files import MOST_CODE, read_bytes


class PluginLoader(SourceFileLoader):
    """Compiles the file each time: Python's cached bytecode outlives an edit within a second. It
    keeps what was executed, of which `identity` takes the checksum."""

    source = b""

    def get_code(self, fullname: str) -> CodeType:
        self.source = read_bytes(Path(self.path), MOST_CODE)
        code: CodeType = self.source_to_code(self.source, self.path)
        return code


def load_plugin(path: Path | None) -> None:
    """Run a file that registers methods. It is code: load only what you would run yourself."""
    if path is None:
        return
    loader = PluginLoader(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    if spec is None or path.suffix != ".py":
        raise BadInput(f"plugin {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where annotations written as strings are looked up
    try:
        loader.exec_module(module)
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
