"""The identity of a configuration with the data and the code on this machine, and of a stored run.

What an `Identity` is, and all keys that are derived from it, are in `engine/keys.py`.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec

from fairvar.data import dataset_sha256
from fairvar.engine.keys import Identity, cached, fingerprint
from fairvar.engine.losses import LOSSES
from fairvar.errors import PLUGIN, BadInput
from fairvar.methods import Method
from fairvar.models import MODELS
from fairvar.models.weights import read_tensors
from fairvar.runs import own
from fairvar.runs.config import Config, DataConfig
from fairvar.scores import Metric

RECORD = "identity"  # the key of an identity in a manifest
PLACES = ("FAIRVAR_DATA", "FAIRVAR_CACHE", "XDG_CACHE_HOME")  # decide where data sets are found
DEPLOYED_FILE = "federation.json"  # only deployed runs have this file


def identity_of(config: Config) -> Identity:
    """The identity that this configuration has with the data and the code of this machine. The data
    must be readable, and pretrained weights must have the SHA-256 that the settings name."""
    _check_weights(config.model.weights, config.model.weights_sha256)
    return Identity(
        fingerprint(config), data_sha256(config.data), version_of(config.method), code_of(config)
    )


def recorded_identity(manifest: Mapping[str, Any], config: Config) -> Identity:
    """The identity of a stored run. Manifests of earlier versions have the parts in other places;
    their methods had version 1, and the code of plugins was not recorded."""
    if RECORD in manifest:
        return msgspec.convert(manifest[RECORD], Identity)
    data = manifest["passport"].get("dataset_sha256")
    return Identity(fingerprint(config), data, deployed=manifest["sha256"].get(DEPLOYED_FILE))


# -- parts -----------------------------------------------------------------------------------------
def version_of(method: Method) -> int:
    """1 where `version` is a field of the method, and so one of the settings."""
    found = type(method).version
    return found if isinstance(found, int) else 1


def code_of(config: Config) -> str | None:
    """Of the method, model, loss, metric and data, as far as they are not part of fairvar."""
    things = [type(config.method), LOSSES[config.model.loss], *metric_code(config)]
    things += [own.function(kind, name) for kind, name in config.functions if kind != "metric"]
    if not config.model.is_own:
        things.append(MODELS[config.model.name])
    with own.searching():
        return code_sha256(*things)


def metric_code(config: Config) -> list[Any]:
    """The function of the user's metric, if it has one."""
    named = (own.function(kind, name) for kind, name in config.functions if kind == "metric")
    return [found.function if isinstance(found, Metric) else found for found in named]


def data_sha256(section: DataConfig) -> str | None:
    """Computed once per command (`forget_files`), because a sweep asks for thousands of runs."""
    return _data_sha256(section, *map(os.environ.get, PLACES))


def forget_files() -> None:
    """Check data and weights on disk again: a new command begins."""
    _data_sha256.cache_clear()
    _check_weights.cache_clear()
    own.make_data.cache_clear()


@lru_cache(maxsize=64)
def _data_sha256(section: DataConfig, *places: str | None) -> str | None:
    if section.is_own:
        return section.made()[1]
    return dataset_sha256(section.name, section.root)


@lru_cache(maxsize=64)
def _check_weights(path: str | None, sha256: str | None) -> None:
    if path is not None:
        read_tensors(path, sha256)


# -- code ------------------------------------------------------------------------------------------
# A plugin has no version number that could be trusted, so its runs are distinguished by the code
# itself: the file of the class or function and all files of the user's that it imports. Files are
# hashed whole, with their comments; other files that the code reads are not seen.
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
    if home.partition(".")[0] in (*sys.builtin_module_names, "torch", "msgspec"):
        return {}
    if _file(home) is None:
        return {f"{home}.{part.__qualname__}": _typed_in(part)}
    return _closure(home)


def user_modules(home: str) -> dict[str, bytes]:
    """The modules of the user's that make up a module, by their places below a folder of imports;
    a plugin by its name. Nothing of installed packages."""
    found: dict[str, bytes] = {}
    for name, content in _closure(home).items():
        file = _file(name)
        if name.startswith(PLUGIN):
            found[name] = content
        elif file is not None and _owner(name) == "user":
            parts = name.split(".")
            above = parts if file.stem == "__init__" else parts[:-1]
            found["/".join((*above, file.name))] = content
    return found


def _closure(home: str) -> dict[str, bytes]:
    """A module that is not part of fairvar or Python, and the user's modules that it imports."""
    found: dict[str, bytes] = {}
    todo = [home] if _owner(home) in ("user", "installed") else []
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = _content(name)
            imported = _imports(found[name], name) if _owner(name) == "user" else ()
            parents = accumulate(name.split("."), "{}.{}".format)  # importing it runs theirs, too
            todo += [other for other in (*imported, *parents) if _owner(other) == "user"]
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
    if isinstance(loader, own.OwnLoader):
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
    # By name, too: an environment may use packages of the one that it was made from.
    named = {"site-packages", "dist-packages"} & set(file.parts)
    if named or any(file.is_relative_to(p) for p in (paths["purelib"], paths["platlib"], users)):
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
