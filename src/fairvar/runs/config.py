"""`Config`: everything a run depends on, as one checked value.

A TOML file and `key=value` overrides are merged first and converted once, so that both get the same
checks. Unknown keys are refused, and the error suggests the nearest known key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
import tomli_w

from fairvar.common.files import MOST_TEXT, read_bytes
from fairvar.common.validation import (
    Checked,
    Count,
    Fraction,
    Share,
    as_python,
    check_component,
    reason,
)
from fairvar.data import DATASET_NAMES, Dirichlet, Partition
from fairvar.engine.losses import LOSSES
from fairvar.engine.optimiser import ServerOptimiser
from fairvar.engine.settings import EvaluateSettings, LrSchedule, TrainSettings
from fairvar.errors import BadInput, plain, shown, suggestion, unknown
from fairvar.methods import METHODS, FedAvg
from fairvar.models import MODELS
from fairvar.runs import own
from fairvar.runs.select import Criterion
from fairvar.scores import METRICS

Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
PARTITIONS: dict[str, Any] = {str(k.__struct_config__.tag): k for k in get_args(Partition)}
INNER: dict[str, Any] = {"schedule": LrSchedule, "server": ServerOptimiser}  # within [train]
MOST_DOTS, MOST_LEVELS = 1000, 20  # in a line of TOML; of sections within sections
EXAMPLE = "`fairvar example > quick.toml` writes one to start from"


class DataConfig(Checked, frozen=True, kw_only=True):
    """The data set and how each client's part is split. This seed draws the partition only."""

    __where__: ClassVar[str | None] = "data"

    name: str = "mnist_1000"  # of `fairvar data list`, or package.module:function of your own
    args: dict[str, Any] | None = None  # of that function
    clients: Count = 50  # among whom the samples are dealt
    seed: Seed = 0  # draws the partition
    split: tuple[Fraction, Fraction, Fraction] = (0.8, 0.1, 0.1)  # train, valid, test
    holdout: Literal["auto", "split", "pool"] = "auto"  # tested on its own samples or a pool
    pool_samples: Count = 200  # per client, of a shared pool of held-out samples
    fraction: Share = 1.0  # of the training samples
    samples: Count | None = None  # number of training samples, instead of fraction
    root: str | None = None  # folder of the files; FAIRVAR_DATA by default

    def check(self) -> None:
        _check_own("data", self, DATASET_NAMES)
        if self.is_own and self.root is not None:
            raise BadInput("data.root is for data sets of fairvar; give it in data.args")

    @property
    def is_own(self) -> bool:
        return self.name not in DATASET_NAMES

    def made(self) -> tuple[Any, str]:
        """What the user's function returned, and the SHA-256 of its arrays."""
        args: Any = self.args
        return own.make_data(self.name, args, self.clients, self.seed)


class ModelConfig(Checked, frozen=True, kw_only=True):
    """The model, its loss and the parameters that it starts from."""

    __where__: ClassVar[str | None] = "model"

    name: str = "multinomial"  # by name, or package.module:function, which returns an nn.Module
    args: dict[str, Any] | None = None  # of that function
    loss: str = "cross_entropy"  # or mse
    weights: str | None = None  # a .safetensors or .pth file to start from; the last layer is new
    weights_sha256: str | None = None  # of that file

    def check(self) -> None:
        if (self.weights is None) != (self.weights_sha256 is None):
            raise BadInput(
                "model.weights and model.weights_sha256 go together: a file and its checksum"
            )
        if self.weights_sha256 is not None:
            msgspec.structs.force_setattr(self, "weights_sha256", self.weights_sha256.lower())
        _check_own("model", self, MODELS)
        if self.loss not in LOSSES:
            raise unknown("model.loss", self.loss, LOSSES)

    @property
    def is_own(self) -> bool:
        return self.name not in MODELS


def _check_own(kind: Any, section: DataConfig | ModelConfig, known: Collection[str]) -> None:
    if own.is_own(kind, section.name, known) is False and section.args is not None:
        raise BadInput(f"{kind}.args is for functions of your own; {section.name} takes none")
    if section.args is not None:
        msgspec.structs.force_setattr(section, "args", own.Arguments(section.args))


class Config(Checked, frozen=True, kw_only=True):
    """One run. Protocol "boxes": one local step, as in the paper's algorithms; "tables": one local
    epoch and local models, as the paper's tables were most likely made."""

    name: str = "run"  # `fairvar sweep` writes to runs/NAME
    protocol: Literal["boxes", "tables"] = "boxes"  # a local step or a local epoch per round
    data: DataConfig = DataConfig()
    partition: Partition = Dirichlet(alpha=0.1)
    model: ModelConfig = ModelConfig()
    method: Any = FedAvg()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    select: Criterion = Criterion()

    def check(self) -> None:
        check_component("name", self.name)  # `fairvar sweep` writes to runs/NAME
        metric = self.evaluate.metric
        if not isinstance(metric, str | None):
            raise BadInput(f"evaluate.metric = {shown(metric)}: a configuration has names; give "
                           'one, or "package.module:metric"')  # fmt: skip
        if metric is not None:
            own.is_own("metric", metric, METRICS)

    @staticmethod
    def load(
        source: Config | Mapping[str, Any] | Path | str, overrides: Sequence[str] = ()
    ) -> Config:
        """Read a TOML file or a dict, apply `key=value` overrides, check everything."""
        if isinstance(source, Config):
            if not overrides:
                return source
            source = source.to_dict()
        values = merge_overrides(read_values(source), overrides)
        for section in {"sweep", "scale"} & values.keys():
            raise BadInput(f"[{section}] describes many runs; use `fairvar sweep` for this file")
        folder = folder_of(source)
        own.load_plugins(values, folder)
        found = Config.from_dict(values)
        own.load_functions(found.functions, folder)
        return found

    @staticmethod
    def from_toml(text: str) -> Config:
        return Config.from_dict(parse_toml(text, "configuration"))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Config:
        values = {key: dict(v) if isinstance(v, Mapping) else v for key, v in values.items()}
        _check_keys(values)
        if values.get("protocol") == "tables":
            train = values.setdefault("train", {})
            if "local_steps" not in train:
                train.setdefault("local_epochs", 1)
            values.setdefault("select", {}).setdefault("model", "local")
        methods: Any = reduce(or_, METHODS.values())
        try:
            method = msgspec.convert(values.get("method", {"name": "fedavg"}), methods)
        except msgspec.ValidationError as error:
            raise located(error, values["method"], "method") from None
        try:
            return msgspec.convert({**values, "method": method}, Config)
        except msgspec.ValidationError as error:
            raise located(error, values) from None

    @property
    def functions(self) -> list[tuple[own.Kind, str]]:
        """The user's functions that it names."""
        named: list[tuple[own.Kind, Any]] = [("model", self.model), ("data", self.data)]
        found = [(kind, section.name) for kind, section in named if section.is_own]
        metric = self.evaluate.metric
        return found if metric in (None, *METRICS) else [*found, ("metric", metric)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values with all defaults, without None, which TOML lacks."""
        return _without_none(msgspec.to_builtins(self, builtin_types=()))

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())


def read_values(source: Mapping[str, Any] | Path | str) -> dict[str, Any]:
    """A TOML file, or a dict of the same form that may hold methods and other settings as such."""
    if not isinstance(source, Mapping | Path | str):
        raise BadInput(f"{shown(source)} is no configuration; give a TOML file or a dict")
    return dict(_as_toml(source)) if isinstance(source, Mapping) else read_toml(Path(source))


def folder_of(source: Mapping[str, Any] | Path | str) -> Path:
    """The folder of the code that a configuration names: that of its file; for a dict, this one."""
    return Path() if isinstance(source, Mapping) else Path(source).parent


def _as_toml(value: Any) -> Any:
    """A copy in the types that a TOML file gives."""
    if isinstance(value, msgspec.Struct):
        return _without_none(msgspec.to_builtins(value, builtin_types=()))
    if isinstance(value, Mapping):
        return {str(key): _as_toml(each) for key, each in value.items() if each is not None}
    if isinstance(value, Path):
        return str(value)
    value = as_python(value)
    listed = isinstance(value, list | tuple | range)
    return [_as_toml(each) for each in value] if listed else value


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_bytes(path, MOST_TEXT).decode(), str(path))
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; give a TOML file: {EXAMPLE}") from None
    except (OSError, ValueError) as error:  # not UTF-8, or a path with a NUL byte
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"{path} cannot be read as text: {why}; give a TOML file") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return _loads(text)
    except RecursionError:
        raise BadInput(f"{where} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        raise BadInput(f"{where} is not valid TOML: {error}") from None


def _loads(text: str) -> dict[str, Any]:
    """The time of tomllib is quadratic in the number of dots in a key."""
    if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {MOST_DOTS} dots; use several lines")
    values = tomllib.loads(text)
    if _depth(values) > MOST_LEVELS:
        raise RecursionError
    return values


def _depth(value: Any) -> int:
    """The depth of nested sections and lists."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


def merge_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`train.lr=0.5` sets values["train"]["lr"]; the right side is TOML, or otherwise a string.

    Another name of a method or partition drops the options of the former one; `method.plugin`,
    whose files may hold several methods, stays.
    """
    for text in overrides:
        key, sign, right = text.partition("=") if isinstance(text, str) else ("", "", "")
        if not sign or not key.strip():
            raise BadInput(f"override {shown(text)} must look like train.lr=0.1")
        if not text.isprintable() and text.encode(errors="replace").decode() != text:
            raise BadInput(f"override {shown(text)} is not UTF-8")
        # Quotes, as TOML has them in sweep.grid."train.batch_size", do not matter here.
        assign(values, key.strip().replace('"', "").replace("'", ""), _value(right.strip()))
    return values


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; `train.rounds` may be written with or without quotes."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key; missing sections are created."""
    *path, last = key.split(".")
    if len(path) > MOST_LEVELS:
        raise BadInput(f"override {key[:80]}… has more than {MOST_LEVELS} levels")
    section = values
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise BadInput(f"override {key}: {part} is a value, not a section")
    if path and path[-1] in ("method", "partition") and last == "name":
        for option in section.keys() - {"plugin"}:
            del section[option]
    section[last] = value


def _value(text: str) -> Any:
    try:
        return _loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError):  # a number of thousands of digits, thousands of brackets
        raise BadInput(f"override value {text[:40]}… is too long or nested too deeply") from None


def _check_keys(values: Mapping[str, Any]) -> None:
    """Refuse unknown keys of all sections."""
    refuse_unknown(values, Config.__struct_fields__, "")
    for name, section in values.items():
        if name not in ("name", "protocol"):
            refuse_unknown(section, _known_keys(name, section), name)
    for name, kind in INNER.items():
        section = values.get("train", {}).get(name)
        if isinstance(section, Mapping):
            refuse_unknown(section, _fields(kind), f"train.{name}")


def _known_keys(name: str, section: Any) -> dict[str, Any]:
    """Of a section; the `name` of a method or partition decides which keys it has."""
    kinds: dict[str, Any] | None = {"method": METHODS, "partition": PARTITIONS}.get(name)
    if kinds is None:
        if not isinstance(section, Mapping):
            raise BadInput(f"{name} = {shown(section)} must be a section: write [{name}]")
        return _fields(_fields(Config)[name])
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        raise BadInput(f'{name} needs a name, such as [{name}] name = "{next(iter(kinds))}"')
    if section["name"] not in kinds and not (name == "method" and own.find_method(section["name"])):
        raise unknown(f"{name}.name", section["name"], kinds)
    return {"name": str} | _fields(kinds[section["name"]])


@lru_cache(maxsize=200)
def _fields(kind: Any) -> dict[str, Any]:
    """Cached, because msgspec evaluates annotations at every call."""
    return {f.name: f.type for f in msgspec.structs.fields(kind)}


def refuse_unknown(section: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in section:
        if key not in known:
            dotted = f"{where}.{key}" if where else key
            text = dotted if plain(dotted) == dotted and 0 < len(dotted) < 80 else shown(dotted)
            raise BadInput(f"unknown key {text}: {_elsewhere(key, where)}{suggestion(key, known)}")


def _elsewhere(key: str, where: str) -> str:
    """A hint at the sections that have the key, not at sections within others that have it."""
    method = "sweep.method.NAME" if where == "sweep" else "method"
    found = [f"{n}.{key}" for n, kind in _structs(method) if key in _fields(kind)]
    inner = [n for n in found if any(n.startswith(o.removesuffix(key)) and n != o for o in found)]
    places = dict.fromkeys(n for n in found if n not in inner and n != f"{where}.{key}")
    if where == "sweep" and key in ("q", "lambda", "gamma"):
        places = {"sweep.strength": None}
    return f"did you mean {' or '.join(places)}? " if places else ""


def _structs(method: str = "method") -> list[tuple[str, Any]]:
    """Name and struct of all sections, methods and partitions."""
    found = [*_fields(Config).items(), *((method, kind) for kind in METHODS.values())]
    found += [("partition", kind) for kind in PARTITIONS.values()]
    found += [(f"train.{name}", kind) for name, kind in INNER.items()]
    return [(name, kind) for name, kind in found if isinstance(kind, type(Checked))]


def located(error: msgspec.ValidationError, values: Any, prefix: str = "") -> BadInput:
    """msgspec's message after the key and its value; messages of `BadInput` have both already."""
    if isinstance(error.__cause__, BadInput):
        return error.__cause__
    path = str(error).rpartition(" - at `$")[2].rstrip("`") if " - at `$" in str(error) else ""
    for name, number in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path):
        try:
            values = values[name or int(number)]
        except (KeyError, IndexError, TypeError):
            break
    where = (prefix + path).lstrip(".")
    text = "" if isinstance(values, Mapping) else f" = {shown(values)}"
    return BadInput(f"{where}{text}: {reason(error, _kind(where))}")


def _kind(where: str) -> Any:
    """The type of the field of a dotted path; in several methods or partitions, of any."""
    section, _, key = where.split("[")[0].rpartition(".")
    fields = [_fields(kind) for name, kind in [("", Config), *_structs()] if name == section]
    return reduce(or_, [f[key] for f in fields if key in f], None)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return list(value) if isinstance(value, tuple) else value
