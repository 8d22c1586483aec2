"""Own methods from a Python file, for the command line and its worker processes."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from fairvar.errors import BadInput


class PluginLoader(SourceFileLoader):
    """Compiles the file each time: Python's cached bytecode outlives an edit within a second. It
    keeps what was executed, of which `identity` takes the checksum."""

    source = b""

    def get_code(self, fullname: str) -> CodeType:
        self.source = self.get_data(self.path)
        code: CodeType = self.source_to_code(self.source, self.path)
        return code


def load_plugin(path: Path | None) -> None:
    """Run a file that registers methods. It is code: load only what you would run yourself."""
    if path is None:
        return
    loader = PluginLoader(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    if spec is None or path.suffix != ".py" or not path.is_file():
        raise BadInput(f"plugin {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where annotations written as strings are looked up
    loader.exec_module(module)
