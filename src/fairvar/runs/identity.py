"""What a run computes: its settings, its data and the code of its method, as one checksum.

Runs are stored under it, checkpoints carry it, and reports group by parts of it: the keys that do
so stand here side by side. Where a run happens (device, paths, names) is in none of them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from fairvar._version import __version__
from fairvar.data import dataset_sha256
from fairvar.engine.losses import LOSSES
from fairvar.errors import BadInput, IntegrityError
from fairvar.methods.base import Method
from fairvar.methods.plugin import PluginLoader
from fairvar.models import MODELS
from fairvar.models.weights import read_tensors
from fairvar.runs.config import Config, DataConfig, deciding_values
from fairvar.runs.records import Sha256

RECORD = "identity"  # in a manifest
PLACES = ("FAIRVAR_DATA", "FAIRVAR_CACHE", "XDG_CACHE_HOME")  # where data sets are looked for
DEPLOYED_FILE = "federation.json"  # among the files of deployed runs only


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two runs with the same identity are the same run."""

    settings: str  # Config.fingerprint
    data: str | None  # SHA-256 of the data set; None where the settings make it or nodes keep it
    version: int = 1  # of the method
    code: Sha256 | None = None  # SHA-256 of the code that is not fairvar's
    deployed: Sha256 | None = None  # of what else decides the numbers of a run on real nodes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return self.sha256[:16] + ("-flower" if self.deployed else "")

    @property
    def variant(self) -> tuple[int, str | None, str | None]:
        """What tables do not tell: runs that differ in it are never mixed."""
        return self.version, self.code, self.deployed


def identity_of(config: Config) -> Identity:
    """Of the run that this configuration means here and now. The data must be readable, and weights
    to start from must be those that the settings name."""
    _check_weights(config.model.weights, config.model.weights_sha256)
    return Identity(
        config.fingerprint, data_sha256(config.data), version_of(config.method), code_of(config)
    )


def recorded_identity(manifest: Mapping[str, Any], config: Config) -> Identity:
    """Of a stored run. Manifests of earlier versions have the parts in other places; their methods
    had version 1, and the code of plugins was not recorded."""
    if RECORD not in manifest:
        data = manifest["passport"].get("dataset_sha256")
        deployed = manifest["sha256"].get(DEPLOYED_FILE)
        return Identity(config.fingerprint, data, deployed=deployed)
    try:
        return msgspec.convert(manifest[RECORD], Identity)
    except msgspec.ValidationError as error:
        raise IntegrityError(f"its record of what the run computes is not ours: {error}") from None


# -- keys made of parts of an identity -------------------------------------------------------------
def trial_key(config: Config, identity: Identity) -> str:
    """Equal for runs that differ in their seeds only."""
    values = deciding_values(config)
    values["train"].pop("seed")
    return _key(values, identity.data, *identity.variant)


def group_key(config: Config, identity: Identity) -> str:
    """Equal for runs on one federation: method, learning rate and seed may differ."""
    values = deciding_values(config)
    for varies in ("seed", "lr"):
        values["train"].pop(varies)
    values.pop("method")
    return _key(values, identity.data, identity.deployed is not None)


def checkpoint_key(identity: Identity) -> dict[str, str]:
    """What a checkpoint must say to be continued: the last bits depend on the versions."""
    return {"identity": identity.sha256, "fairvar": __version__, "torch": str(torch.__version__)}


def _key(*parts: Any) -> str:
    return json.dumps(parts, sort_keys=True)


# -- data ------------------------------------------------------------------------------------------
def data_sha256(section: DataConfig) -> str | None:
    """Asked once per command (`look_again`): a sweep asks for thousands of runs."""
    return _data_sha256(section, *map(os.environ.get, PLACES))


def look_again() -> None:
    """Forget which data and weights were found: a new command begins."""
    _data_sha256.cache_clear()
    _check_weights.cache_clear()


@lru_cache(maxsize=64)
def _data_sha256(section: DataConfig, *places: str | None) -> str | None:
    return dataset_sha256(section.name, section.root)


@lru_cache(maxsize=64)
def _check_weights(path: str | None, sha256: str | None) -> None:
    if path is not None:
        read_tensors(path, sha256)


# -- code ------------------------------------------------------------------------------------------
def version_of(method: Method) -> int:
    """1 where `version` is a field of one's own, and so one of the settings."""
    found = type(method).version
    return found if isinstance(found, int) else 1


def code_of(config: Config) -> str | None:
    """Of the method, model and loss, as far as they are not built in."""
    return code_sha256(type(config.method), MODELS[config.model.name], LOSSES[config.model.loss])


def code_sha256(*things: Any) -> str | None:
    """SHA-256 of the files that define these classes and functions, and of one's own files that
    those import; None for what fairvar brings. Files count as a whole, with their comments; other
    files that code reads are not seen."""
    try:
        return _code_sha256(things)
    except TypeError:  # a callable that cannot be hashed
        return _code_sha256.__wrapped__(things)


@lru_cache(maxsize=256)
def _code_sha256(things: tuple[Any, ...]) -> str | None:
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
    """By module name: the file of a class or function and, if it is one's own, what it imports."""
    home: str = part.__module__
    found: dict[str, bytes] = {}
    if home.partition(".")[0] in (*sys.builtin_module_names, "torch", "msgspec"):
        return found
    if _file(home) is None:
        return {f"{home}.{part.__qualname__}": _typed_in(part)}
    todo = [home] if _place(home) in ("own", "installed") else []
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = _content(name)
            imported = _imports(found[name], name) if _place(name) == "own" else ()
            todo += [other for other in imported if _place(other) == "own"]
    return found


def _typed_in(part: Any) -> bytes:
    """Code of a notebook or a terminal."""
    try:
        return inspect.getsource(part).encode()
    except (OSError, TypeError):
        raise BadInput(f"the code of {part.__qualname__} cannot be read, and so its stored runs "
                       "could not be told from others; put it in a file") from None  # fmt: skip


def _content(name: str) -> bytes:
    loader = getattr(sys.modules.get(name), "__loader__", None)
    if isinstance(loader, PluginLoader):
        return loader.source
    try:
        return Path(_file(name) or "").read_bytes()
    except OSError as error:
        raise BadInput(f"the code of {name} cannot be read: {error.strerror}") from None


def _imports(source: bytes, name: str) -> Iterator[str]:
    """Modules that a file imports, also within functions; some of the names are no modules."""
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


def _place(name: str) -> Literal["own", "fairvar", "installed", "python", "nowhere"]:
    """Whose file a module is."""
    file = _file(name)
    if file is None:
        return "nowhere"
    if file.is_relative_to(Path(__file__).resolve().parents[1]):
        return "fairvar"
    paths = {kind: Path(path).resolve() for kind, path in sysconfig.get_paths().items()}
    users = Path(site.getusersitepackages()).resolve()
    if any(file.is_relative_to(path) for path in (paths["purelib"], paths["platlib"], users)):
        return "installed"
    python = any(file.is_relative_to(paths[kind]) for kind in ("stdlib", "platstdlib"))
    return "python" if python else "own"


def _file(name: str) -> Path | None:
    """Of a module, whether it is imported yet or not."""
    if name in sys.modules:
        found = getattr(sys.modules[name], "__file__", None)
    else:
        spec = _spec(name)
        found = spec.origin if spec is not None and spec.has_location else None
    return None if found is None else Path(found).resolve()


def _spec(name: str) -> ModuleSpec | None:
    """Without importing anything."""
    parent = name.rpartition(".")[0]
    if not parent:
        return PathFinder.find_spec(name)
    if parent in sys.modules:
        where = getattr(sys.modules[parent], "__path__", None)
    else:
        above = _spec(parent)
        where = above.submodule_search_locations if above is not None else None
    return None if where is None else PathFinder.find_spec(name, list(where))
