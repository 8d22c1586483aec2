"""Own methods from a Python file, for the command line and its worker processes."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from fairvar.errors import PLUGIN, BadInput, FairvarError
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
    from fairvar.methods import METHODS

    # A name of its own: a plugin called json.py must not take the place of that module.
    name = PLUGIN + path.stem
    loader = PluginLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or path.suffix != ".py" or not path.is_file():
        raise BadInput(f"plugin {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where annotations written as strings are looked up
    try:
        loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except FairvarError as error:
        raise BadInput(f"plugin {path}: {error}") from error
    except BaseException as error:  # its code may raise anything, SystemExit too
        raise BadInput(f"plugin {path} cannot be loaded: {_what(error)}") from error
    if not any(kind.__module__ == name for kind in METHODS.values()):
        raise BadInput(f"plugin {path} registers no method; put @fairvar.register above its class")


def _what(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for at, line in frames if str(at.f_globals.get("__name__")).startswith(PLUGIN)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"
