"""The user's own methods, models and data, which a configuration names.

    method.plugin = "drfl.py"              a file that registers methods (a list: several files)
    model.name = "clinic.nets:small"       a function that returns an nn.Module
    data.name = "clinic.tables:load"       a function that returns a Federation or a Dataset
    evaluate.metric = "clinic.scores:hit"  a function of outputs and targets, or a Metric

Files and modules lie in the folder of the configuration, or are installed. Packages may also offer
methods, models and data under short names, as entry points of the groups `fairvar.methods`,
`fairvar.models` and `fairvar.data`. Loading runs the code. So it is loaded for configurations that
a user gives (`Config.load`), and never because a stored run names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType
from typing import Any, Literal, NamedTuple

import msgspec
from torch import nn
from torch.utils._pytree import tree_leaves

from fairvar.common.files import MOST_CODE, MOST_TEXT, read_bytes, write_bytes
from fairvar.data import Dataset
from fairvar.data.dataset import update_digest
from fairvar.data.federation import Federation
from fairvar.data.fetch import cache_dir
from fairvar.errors import PLUGIN, BadInput, FairvarError, shown, unknown
from fairvar.methods import BUILT_IN, METHODS, FedAvg, Method, Personal

Kind = Literal["method", "model", "data", "metric"]
KEYS = {"model": "model.name", "data": "data.name", "metric": "evaluate.metric"}
GROUPS = {"method": "fairvar.methods", "model": "fairvar.models", "data": "fairvar.data"}
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
NOT_OWN = (*sys.stdlib_module_names, "fairvar", "torch", "numpy")


class Own(NamedTuple):
    """One thing that was loaded: a plugin's path or `package.module:function`, and its folder."""

    kind: Kind
    name: str
    folder: str


LOADED: dict[tuple[Kind, str], Own] = {}  # in this process; workers load the same
FUNCTIONS: dict[str, Callable[..., Any]] = {}


class Arguments(dict[str, Any]):
    """`args` of a section; hashable, as all of a configuration is."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=str))


class OwnLoader(SourceFileLoader):
    """Compiles the file each time: Python's cached bytecode outlives an edit within a second. It
    keeps what was executed, of which `identity` takes the checksum."""

    is_own = True  # for `errors`, which names the line of an error in such a file
    source = b""

    def get_code(self, fullname: str) -> CodeType:
        self.source = read_bytes(Path(self.path), MOST_CODE)
        code: CodeType = self.source_to_code(self.source, self.path)
        return code


class Finder:
    """Finds modules in one folder, with `OwnLoader`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in NOT_OWN:
            return None
        spec = PathFinder.find_spec(name, [str(self.folder)] if path is None else path)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if not Path(spec.loader.path).resolve().is_relative_to(self.folder):
            return None
        spec.loader = OwnLoader(name, spec.loader.path)
        return spec


@contextmanager
def importing(*folders: Path) -> Iterator[None]:
    """Modules in these folders can be imported. Python's and fairvar's own come first."""
    if not folders:
        yield
        return
    finders: list[Any] = [Finder(folder.resolve()) for folder in folders]
    path, before = list(sys.path), list(sys.meta_path)
    sys.path += [str(finder.folder) for finder in finders]
    sys.meta_path[:0] = finders
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        sys.meta_path[:] = before


def searching() -> Any:
    """`importing` from the folders of all that was loaded."""
    return importing(*{Path(own.folder): None for own in LOADED.values()})


# -- methods ---------------------------------------------------------------------------------------
def load_plugin(path: Path | None) -> None:
    """Run a file that registers methods. It is code: load only what you would run yourself."""
    if path is None:
        return
    # A name of its own: a plugin called json.py must not take the place of that module.
    name = PLUGIN + path.stem
    loader = OwnLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or path.suffix != ".py" or not os.path.isfile(path):
        there = os.path.exists(path)
        why = "is not a Python file" if there else "does not exist; give a Python file"
        raise BadInput(f"plugin {path} {why}")
    module = importlib.util.module_from_spec(spec)
    with importing(path.parent), _explained(f"plugin {path}"):
        forget_changed(path.parent)
        sys.modules[name] = module  # where annotations written as strings are looked up
        loader.exec_module(module)
    if not any(kind.__module__ == name for kind in METHODS.values()):
        raise BadInput(f"plugin {path} registers no method; put @fairvar.register above its class")
    LOADED["method", name] = Own("method", str(path.resolve()), str(path.parent.resolve()))


def load_plugins(values: Mapping[str, Any], *folders: Path) -> None:
    """Load the files of `method.plugin`, which is taken out of `values`, from the first folder that
    has them."""
    section = values.get("method")
    given = section.pop("plugin", []) if isinstance(section, dict) else []
    for name in given if isinstance(given, list) else [given]:
        if not isinstance(name, str):
            raise BadInput(f"method.plugin = {shown(given)}: give a Python file, such as drfl.py")
        places = [folder / name for folder in folders]
        load_plugin(next((place for place in places if place.is_file()), places[0]))


def find_method(name: str) -> bool:
    """Whether there is a method of this name, here or in an installed package."""
    if name not in METHODS:
        for entry in entry_points(group=GROUPS["method"], name=name):
            with _explained(f"method {name} of {entry.value}"):
                entry.load()
    return name in METHODS


# -- models and data -------------------------------------------------------------------------------
def is_own(kind: Kind, name: str, known: Iterable[str]) -> bool:
    """Whether a name is one of the user's, not one of the `known`. Raises if it can be neither."""
    if name in known:
        return False
    if ":" in name and (not NAME.fullmatch(name) or ".py:" in name):
        raise BadInput(f"{KEYS[kind]} = {shown(name)} must look like package.module:function, "
                       "without .py")  # fmt: skip
    if ":" not in name and not entry_points(group=GROUPS[kind], name=name):
        raise unknown(KEYS[kind], name, (*known, "package.module:function"))
    if (package := name.partition(":")[0].partition(".")[0]) in NOT_OWN:
        raise BadInput(f"{KEYS[kind]} = {shown(name)} is no code of yours: {package} belongs to "
                       "Python, torch, numpy or fairvar; give yours another name")  # fmt: skip
    return True


def load_functions(names: Iterable[tuple[Kind, str]], folder: Path) -> None:
    """Import these functions afresh: those of the folder's modules that were changed, at least."""
    folder = folder.resolve()
    for kind, name in dict.fromkeys(names):
        forget_changed(folder)
        FUNCTIONS.pop(name, None)
        LOADED[kind, name] = Own(kind, name, str(folder))
        try:
            function(kind, name)
        except BadInput:
            del LOADED[kind, name]
            raise


def function(kind: Kind, name: str) -> Callable[..., Any]:
    """The function that a name stands for; looked for in the current folder if no configuration
    file brought it."""
    if name not in FUNCTIONS:
        own = LOADED.get((kind, name)) or Own(kind, name, str(Path.cwd()))
        value = name if ":" in name else next(
            entry.value for entry in entry_points(group=GROUPS[kind], name=name)
        )  # fmt: skip
        module, _, attribute = value.partition(":")
        where = f"{KEYS[kind]} = {name!r}"
        with importing(Path(own.folder)), _explained(where, f"cannot be loaded from {own.folder}"):
            imported = importlib.import_module(module)
        found = getattr(imported, attribute, None)
        if not callable(found):
            place = getattr(imported, "__file__", None) or module
            raise BadInput(f"{where}: {place} has no function {attribute}")
        LOADED[kind, name] = own
        FUNCTIONS[name] = found
    return FUNCTIONS[name]


def call(kind: Kind, name: str, args: Mapping[str, Any] | None, **offered: Any) -> Any:
    """The function's result. It gets `args`, and what fairvar offers if it asks for it by name."""
    made, where = function(kind, name), f"{KEYS[kind]} = {name!r}"
    try:
        parameters = inspect.signature(made).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    given = {key: value for key, value in offered.items() if key in parameters} | dict(args or {})
    folder = LOADED[kind, name].folder
    with importing(Path(folder)), _explained(where, "fails"):
        return made(**given)


def make_model(
    name: str, args: Mapping[str, Any] | None, shape: tuple[int, ...], classes: int
) -> nn.Module:
    """The model of an own function, which may ask for `input_shape` and `classes`."""
    found = call("model", name, args, input_shape=shape, classes=classes)
    if not isinstance(found, nn.Module):
        raise BadInput(f"model.name = {name!r} returned {shown(found)}; return an nn.Module")
    return found


@lru_cache(maxsize=4)
def make_data(
    name: str, args: Arguments | None, clients: int, seed: int
) -> tuple[Dataset | Federation, str]:
    """The data of an own function, which may ask for `clients` and `seed`, and their SHA-256."""
    found = call("data", name, args, clients=clients, seed=seed)
    if isinstance(found, Dataset):
        found = replace(found, name=name, sha256="")  # computes the arrays' checksum
        return found, found.sha256
    if not isinstance(found, Federation):
        raise BadInput(f"data.name = {name!r} returned {shown(found)}; return a fairvar Federation "
                       "or Dataset")  # fmt: skip
    if found.clients != clients:
        raise BadInput(f"data.clients = {clients}, but {name} has {found.clients} clients; write "
                       f"data.clients = {found.clients}")  # fmt: skip
    digest = sha256(str(found.classes).encode())
    for part, split in found.splits.items():
        digest.update(part.encode())
        for leaf in tree_leaves((split.x, split.y, split.counts)):  # x may be several tensors
            update_digest(digest, leaf.cpu().numpy())
    mark = digest.hexdigest()
    facts: dict[str, Any] = {
        "dataset": name, "dataset_sha256": mark, "sha256": mark, "clients": clients,
        "partition": {"name": "natural"}, "sizes": found.sizes.tolist(),
    }  # fmt: skip
    if found.train.y.dim() == 1:  # of sequences, histories count positions
        facts["split_sizes"] = {part: s.counts.tolist() for part, s in found.splits.items()}
    return replace(found, name=name, provenance=facts), mark


# -- loading ---------------------------------------------------------------------------------------
def in_use(cells: Iterable[Any]) -> list[Own]:
    """What another process needs for these runs: their functions, and all plugins whose methods are
    still registered."""
    functions = {named for cell in cells for named in cell.functions}
    modules = {kind.__module__ for kind in METHODS.values()}
    return [own for key, own in LOADED.items()
            if key in functions or (own.kind == "method" and key[1] in modules)]  # fmt: skip


def load(found: Iterable[Own]) -> None:
    """Load what another process has loaded."""
    for own in found:
        if own.kind == "method":
            load_plugin(Path(own.name))
        else:
            load_functions([(own.kind, own.name)], Path(own.folder))


def forget_changed(folder: Path) -> None:
    """Import modules again that were edited, or are others in this folder than those known."""
    loaders = {name: getattr(module, "__loader__", None) for name, module in sys.modules.items()}
    mine = {name: loader for name, loader in loaders.items()
            if isinstance(loader, OwnLoader) and not name.startswith(PLUGIN)}  # fmt: skip
    here = {name: PathFinder.find_spec(name.partition(".")[0], [str(folder)]) for name in mine}
    for name, loader in mine.items():
        path = Path(loader.path)
        elsewhere = here[name] is not None and not path.resolve().is_relative_to(folder.resolve())
        if elsewhere or not path.is_file() or path.read_bytes() != loader.source:
            for other in mine:
                del sys.modules[other]
            FUNCTIONS.clear()
            return


@contextmanager
def _explained(where: str, failed: str = "cannot be loaded") -> Iterator[None]:
    """Errors of the user's code as one line, with the line of the file."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except FairvarError as error:
        raise BadInput(f"{where}: {error}") from error
    except BaseException as error:  # its code may raise anything, SystemExit too
        raise BadInput(f"{where} {failed}: {_what(error)}") from error


def _what(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if hasattr(frame.f_globals.get("__loader__"), "is_own")]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"


# -- stored runs -----------------------------------------------------------------------------------
class OwnMethod(msgspec.Struct, frozen=True, kw_only=True):
    """What reports must know of a method of the user's, so that they need not load it."""

    knob: str | None = None
    uses_losses: bool = False
    personal: bool = False


def facts_of(method: Method) -> OwnMethod | None:
    """Stored with a run of a method that is not part of fairvar."""
    if type(method) in BUILT_IN or isinstance(method, Recorded):
        return getattr(method, "facts", None)
    return OwnMethod(
        knob=method.fairness_knob,
        uses_losses=method.uses_losses,
        personal=method.personal is not None,
    )


class Recorded(Method, frozen=True, tag="recorded"):
    """Replaces a method whose code is not loaded: a label and options."""


def recorded_method(
    section: Mapping[str, Any], label: str, facts: OwnMethod, version: int
) -> Method:
    """The method of a stored run, from its configuration and manifest."""
    options = {key: value for key, value in section.items() if key != "name"}
    odd = [key for key in options if not key.isidentifier() or key.startswith("_")
           or key in ("label", "facts", "personal", "fairness_knob", "version")]  # fmt: skip
    if odd or (facts.knob is not None and facts.knob not in options):
        raise BadInput(f"method.{odd[0] if odd else facts.knob} cannot be an option of a method")
    kind = msgspec.defstruct(
        "Recorded",
        [(key, Any) for key in options],
        bases=(Recorded,),
        namespace={
            "label": label, "facts": facts, "version": version, "fairness_knob": facts.knob,
            "uses_losses": facts.uses_losses, "personal": Personal(FedAvg()) if facts.personal
            else None,
        },
        frozen=True,
        tag=str(section["name"]),
    )  # fmt: skip
    found: Any = kind(**options)
    return found


def is_loaded(config: Any) -> bool:
    """Whether all code of the user's that a configuration needs is loaded."""
    functions = [(kind, name) for kind, name in config.functions if ":" in name]
    return not isinstance(config.method, Recorded) and all(key in LOADED for key in functions)


def remember(cells: Iterable[Any], code: str | None) -> None:
    """Record where the code of these runs is, so that `verify` finds it again."""
    if code is not None and LOADED:
        with suppress(OSError, FairvarError):
            write_bytes(_memory(code), json.dumps(in_use(cells)).encode())


def recall(code: str | None) -> None:
    """Load the code with this checksum if this user has computed runs with it on this machine."""
    if code is None or not _memory(code).is_file():
        return
    load(Own(*entry) for entry in json.loads(read_bytes(_memory(code), MOST_TEXT)))


def _memory(code: str | None) -> Path:
    return cache_dir() / "own" / f"{code}.json"
