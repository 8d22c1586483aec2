"""SHA-256 of the source code that defines a method, a model or a loss.

A plugin has no version number that could be trusted, so its runs are told apart by the code itself:
the file of the class or function and all files of the user's that it imports. Files are hashed
whole, with their comments; other files that the code reads are not seen.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, wraps
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, Literal, TypeVar

from fairvar.errors import BadInput
from fairvar.methods.plugin import PluginLoader

T = TypeVar("T")


def cached(function: Callable[..., T]) -> Callable[..., T]:
    """Remember results; arguments that cannot be hashed (a method with a list) are not cached."""
    remembering = lru_cache(maxsize=100_000)(function)

    @wraps(function)
    def call(*args: Any) -> T:
        try:
            hash(args)
        except TypeError:
            return function(*args)
        return remembering(*args)

    return call


@cached
def code_sha256(*things: Any) -> str | None:
    """Of the files that define these classes and functions; None if all of them are part of
    fairvar, torch or Python."""
    sources: dict[str, bytes] = {}
    for thing in things:
        while isinstance(thing, partial):
            sources[repr(thing.keywords)] = repr((thing.args, thing.keywords)).encode()
            thing = thing.func
        kind = thing if hasattr(thing, "__qualname__") else type(thing)
        for part in inspect.getmro(kind) if inspect.isclass(kind) else [kind]:
            sources |= _sources(part)
    digests = sorted({hashlib.sha256(source).hexdigest() for source in sources.values()})
    return hashlib.sha256(" ".join(digests).encode()).hexdigest() if digests else None


def _sources(part: Any) -> dict[str, bytes]:
    """By module: the file of a class or function and, if it is the user's, what it imports."""
    home: str = part.__module__
    found: dict[str, bytes] = {}
    if home.partition(".")[0] in (*sys.builtin_module_names, "torch", "msgspec"):
        return found
    if _file(home) is None:
        return {f"{home}.{part.__qualname__}": _typed_in(part)}
    todo = [home] if _owner(home) in ("user", "installed") else []
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = _content(name)
            imported = _imports(found[name], name) if _owner(name) == "user" else ()
            todo += [other for other in imported if _owner(other) == "user"]
    return found


def _typed_in(part: Any) -> bytes:
    """Code of a notebook or a terminal."""
    try:
        return inspect.getsource(part).encode()
    except (OSError, TypeError):
        raise BadInput(f"the code of {part.__qualname__} cannot be read, so its stored runs "
                       "cannot be recognised; put it in a file") from None  # fmt: skip


def _content(name: str) -> bytes:
    loader = getattr(sys.modules.get(name), "__loader__", None)
    if isinstance(loader, PluginLoader):
        return loader.source
    try:
        return Path(_file(name) or "").read_bytes()
    except OSError as error:
        raise BadInput(f"the code of {name} cannot be read: {error.strerror}") from None


def _imports(source: bytes, name: str) -> Iterator[str]:
    """Modules that a file imports, also within functions; some of these names are no modules."""
    file = _file(name)
    package = name if file is not None and file.stem == "__init__" else name.rpartition(".")[0]
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a compiled module
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _owner(name: str) -> Literal["user", "installed", "other"]:
    """Whose module it is; "other": of fairvar, of Python, or no module."""
    file = _file(name)
    if file is None or file.is_relative_to(Path(__file__).resolve().parents[1]):
        return "other"
    paths = {kind: Path(path).resolve() for kind, path in sysconfig.get_paths().items()}
    users = Path(site.getusersitepackages()).resolve()
    if any(file.is_relative_to(path) for path in (paths["purelib"], paths["platlib"], users)):
        return "installed"
    python = any(file.is_relative_to(paths[kind]) for kind in ("stdlib", "platstdlib"))
    return "other" if python else "user"


def _file(name: str) -> Path | None:
    """The file of a module, found without importing anything."""
    if name in sys.modules:
        found = getattr(sys.modules[name], "__file__", None)
        return None if found is None else Path(found).resolve()
    spec = _spec(name)
    return Path(spec.origin).resolve() if spec and spec.has_location and spec.origin else None


def _spec(name: str) -> ModuleSpec | None:
    parent = name.rpartition(".")[0]
    if not parent:
        return PathFinder.find_spec(name)
    if parent in sys.modules:
        where = getattr(sys.modules[parent], "__path__", None)
    else:
        above = _spec(parent)
        where = above.submodule_search_locations if above is not None else None
    return None if where is None else PathFinder.find_spec(name, list(where))
