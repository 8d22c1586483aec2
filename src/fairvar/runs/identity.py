"""What a run computes, and every key that is derived from it.

An `Identity` consists of the settings that change the numbers of a run, the data set, and the code
of its method, model and loss. The keys below are projections of it: runs are stored under one,
checkpoints are checked with another, reports and batches group runs by others. Where a run happens
(device, paths, names) is in none of them, except in `batch_key`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache, reduce
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from fairvar._version import __version__
from fairvar.data import dataset_sha256
from fairvar.engine.losses import LOSSES
from fairvar.errors import IntegrityError
from fairvar.methods import FedAvg, Method
from fairvar.models import MODELS
from fairvar.models.weights import read_tensors
from fairvar.runs.config import Config, DataConfig
from fairvar.runs.records import Sha256
from fairvar.runs.source_code import cached, code_sha256

RECORD = "identity"  # the key of an identity in a manifest
PLACES = ("FAIRVAR_DATA", "FAIRVAR_CACHE", "XDG_CACHE_HOME")  # decide where data sets are found
DEPLOYED_FILE = "federation.json"  # only deployed runs have this file
NOT_IN_FINGERPRINT = ("name", "data.root", "model.weights", "train.device", "train.chunk",
                      "train.capture", "select")  # fmt: skip
# Settings of later versions. With these values a run keeps the fingerprint that it had before.
ADDED_LATER = {"train.precision": "full"}


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two runs with the same identity are the same run."""

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
    if RECORD not in manifest:
        data = manifest["passport"].get("dataset_sha256")
        deployed = manifest["sha256"].get(DEPLOYED_FILE)
        return Identity(fingerprint(config), data, deployed=deployed)
    try:
        return msgspec.convert(manifest[RECORD], Identity)
    except msgspec.ValidationError as error:
        raise IntegrityError(f"its record of what the run computes is not valid: {error}") from None


# -- projections -----------------------------------------------------------------------------------
@cached  # a sweep needs the folders of thousands of runs again and again
def fingerprint(config: Config) -> str:
    """SHA-256 of all settings that change the numbers; the same on every machine."""
    text = json.dumps(_deciding(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def trial_key(config: Config, identity: Identity) -> str:
    """Equal for runs that differ in the seed only: the repetitions of one trial."""
    return _key(_deciding(config, "train.seed"), identity.data, *identity.variant)


def group_key(config: Config, identity: Identity) -> str:
    """Equal for runs that a table compares: method, learning rate and seed may differ."""
    values = _deciding(config, "train.seed", "train.lr", "method")
    return _key(values, identity.data, identity.deployed is not None)


def batch_key(config: Config) -> tuple[Any, ...]:
    """Equal for runs that may train as one batch: the numbers of the method, the learning rate and
    the seed may differ. Device and other circumstances must be the same."""
    bare = replace(config, method=FedAvg(), train=replace(config.train, lr=1.0, seed=0))
    return bare, repr(config.method.form)


def checkpoint_key(identity: Identity) -> dict[str, str]:
    """What a checkpoint must have to be resumed. The last bits depend on the versions."""
    return {"identity": identity.sha256, "fairvar": __version__, "torch": str(torch.__version__)}


def _deciding(config: Config, *without: str) -> dict[str, Any]:
    """The settings that change the numbers of a run, in canonical form."""
    values = config.to_dict()
    for dotted in (*NOT_IN_FINGERPRINT, *without, *ADDED_LATER):
        *path, last = dotted.split(".")
        section = reduce(lambda d, k: d.get(k, {}), path, values)
        if section.get(last) == ADDED_LATER.get(dotted, section.get(last)):
            section.pop(last, None)
    return dict(_canonical(values))


def _canonical(value: Any) -> Any:
    """Floats by their bits, so that no formatting rule can change a fingerprint."""
    if isinstance(value, dict):
        return {k: _canonical(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_canonical(v) for v in value]
    return (value + 0.0).hex() if isinstance(value, float) else value  # −0.0 is 0.0


def _key(*parts: Any) -> str:
    return json.dumps(parts, sort_keys=True)


# -- parts -----------------------------------------------------------------------------------------
def version_of(method: Method) -> int:
    """1 where `version` is a field of the method, and so one of the settings."""
    found = type(method).version
    return found if isinstance(found, int) else 1


def code_of(config: Config) -> str | None:
    """Of the method, model and loss, as far as they are not part of fairvar."""
    return code_sha256(type(config.method), MODELS[config.model.name], LOSSES[config.model.loss])


def data_sha256(section: DataConfig) -> str | None:
    """Computed once per command (`forget_files`), because a sweep asks for thousands of runs."""
    return _data_sha256(section, *map(os.environ.get, PLACES))


def forget_files() -> None:
    """Check data and weights on disk again: a new command begins."""
    _data_sha256.cache_clear()
    _check_weights.cache_clear()


@lru_cache(maxsize=64)
def _data_sha256(section: DataConfig, *places: str | None) -> str | None:
    return dataset_sha256(section.name, section.root)


@lru_cache(maxsize=64)
def _check_weights(path: str | None, sha256: str | None) -> None:
    if path is not None:
        read_tensors(path, sha256)
