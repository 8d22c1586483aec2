"""Every key of "the same run". A key is what a run computes, without what may differ:

    key             may differ                                        equal keys
    fingerprint     names and places                                   part of an `Identity`
    Identity        the same, with data and code                       one stored run
    checkpoint_key  the same, with versions                            resumed from each other
    trial_key       names, places, seed                                repetitions of one trial
    group_key       those, learning rate, method, what a sweep varied  rows of one table
    batch_key       seed, learning rate, the method's numbers          trained as one batch
    operations_key  the same, rounds                                   one recorded round

The first five do not depend on the device, the last two do. `_without` leaves out what may differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache, reduce, wraps
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
import torch

from fairvar._version import __version__
from fairvar.common.files import Sha256
from fairvar.engine.settings import TrainSettings
from fairvar.methods.base import Method

PLACES = ("name", "data.root", "model.weights", "train.device", "train.chunk", "train.capture",
          "select")  # fmt: skip
# Settings of later versions. With these values a run keeps the fingerprint that it had before.
ADDED_LATER = {
    "train.precision": "full",
    "train.compile": "auto",  # `true` gives other last bits everywhere; `false`: see `_deciding`
    "train.schedule": {"name": "constant", "warm_up": 0, "every": 1, "least": 0.0},
    "train.drop_last": False,
    "train.weight_decay": 0.0,
    "train.momentum": 0.0,
    "train.server": {"name": "sgd", "lr": 1.0, "beta1": 0.0},
    "evaluate.metric": "accuracy",
}
# Keys, or their beginnings, that make federations, or runs that no table compares with each other.
APART = ("data.", "partition.", "evaluate.", "protocol", "train.rounds")
T = TypeVar("T")


@runtime_checkable
class Settings(Protocol):
    """`Config` (`runs/config.py`), as far as keys need it."""

    @property
    def method(self) -> Any: ...

    @property
    def train(self) -> TrainSettings: ...

    def to_dict(self) -> dict[str, Any]:
        """Nested sections of plain values."""


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run computes. Two runs with the same identity are the same run."""

    settings: str  # the fingerprint of the configuration
    data: str | None  # SHA-256 of the data set; None for generated data and data kept at nodes
    version: int = 1  # of the method
    code: Sha256 | None = None  # SHA-256 of the code that is not part of fairvar
    deployed: Sha256 | None = None  # of the further settings of a run on real nodes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.sha256[:16] + ("-flower" if self.deployed else "")

    @property
    def variant(self) -> tuple[int, str | None, str | None]:
        """What tables do not show. Runs with different variants are never averaged."""
        return self.version, self.code, self.deployed


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


@cached  # a sweep needs the folders of thousands of runs again and again
def fingerprint(config: Settings) -> str:
    """SHA-256 of all settings that change the numbers; the same on every machine."""
    return hashlib.sha256(_text(_deciding(config)).encode()).hexdigest()


def checkpoint_key(identity: Identity) -> dict[str, str]:
    """The last bits depend on the versions."""
    return {"identity": identity.sha256, "fairvar": __version__, "torch": str(torch.__version__)}


def trial_key(config: Settings, identity: Identity) -> str:
    return _text((_deciding(config, "train.seed"), identity.data, *identity.variant))


def group_key(config: Settings, identity: Identity) -> str:
    values = _deciding(config, "train.seed", "train.lr", "method", *swept(config))
    return _text((values, identity.data, identity.deployed is not None))


def batch_key(config: Settings) -> tuple[object, ...]:
    left = _text(_without(config.to_dict(), "train", "method"))
    return operations_key(config.train, config.method, config.train.rounds, left)


def operations_key(settings: TrainSettings, method: Method, *rest: object) -> tuple[object, ...]:
    """`rest`: model, data and what else must be equal."""
    left = _without(msgspec.to_builtins(settings), "rounds", "lr", "seed")
    return _text(left), type(method), repr(method.form), *rest


def swept(config: Settings, apart: bool = False) -> dict[str, Any]:
    """What a sweep varied in addition to methods and learning rates (`sweep.grid`), with values:
    what validation chooses, or with `apart` what distinguishes tables. None: not given. Of a whole
    section, its name and the values that are not the default."""
    values = config.to_dict()
    keys = values.get("select", {}).get("over", ())
    found = {key: _value(values, key) for key in keys if f"{key}.".startswith(APART) == apart}
    return {k: None if value == {} else _unusual(config, k, value) for k, value in found.items()}


def _unusual(config: Settings, key: str, value: Any) -> Any:
    """A section without its defaults, apart from its name; other values as they are."""
    section: Any = reduce(getattr, key.split("."), config) if isinstance(value, dict) else None
    if not isinstance(section, msgspec.Struct):
        return value
    usual = {
        f.name for f in msgspec.structs.fields(section) if getattr(section, f.name) == f.default
    }
    return {name: each for name, each in value.items() if name == "name" or name not in usual}


def _deciding(config: Settings, *without: str) -> dict[str, Any]:
    """The settings that change the numbers of a run."""
    values = _without(config.to_dict(), *PLACES, *without)
    if values["train"].get("compile") is False:  # as on every CPU by default
        values["train"]["compile"] = "auto"
    usual = [key for key, value in ADDED_LATER.items() if _value(values, key) == value]
    return _without(values, *usual)


def _without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    """`values`, changed in place, without those of the dotted keys."""
    for key in keys:
        section, _, last = key.rpartition(".")
        (_value(values, section) if section else values).pop(last, None)
    return values


def _value(values: dict[str, Any], key: str) -> Any:
    return reduce(lambda section, part: section.get(part, {}), key.split("."), values)


def _text(values: Any) -> str:
    return json.dumps(_canonical(values), sort_keys=True, separators=(",", ":"))


def _canonical(value: Any) -> Any:
    """Floats by their bits, so that no formatting rule can change a key."""
    if isinstance(value, dict):
        return {k: _canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    return (value + 0.0).hex() if isinstance(value, float) else value  # −0.0 is 0.0
