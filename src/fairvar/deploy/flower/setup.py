"""A Flower app's run configuration as a `Config`: what the server and every node agree on.

Flower's run configuration is flat and of fixed keys; everything else goes into two strings:

    method = "fairgrad"                  any name of `fairvar methods`
    method-options = "strength=0.1 exact=true"
    data = "digits"                      an embedded set (node i holds part i), or "npz", "folder":
                                         every node's own files
    clients = 5                          all that may ever take part
    rounds = 3                           in all; a run that starts from a state counts its rounds
    options = "train.batch_size=16 federation.deadline=60"    any other key of a fairvar file
    input-shape = "64", classes = 10     of one sample: only for nodes' own files
    out = "runs"                         where the server writes the run
    start = ""                           the folder of a finished run to start from
    secure-aggregation = false           true: the server learns sums over clients only (`secure`)
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from fairvar.data.sources import OWN
from fairvar.deploy.flower import Model
from fairvar.deploy.flower.privacy import PrivacySettings
from fairvar.deploy.flower.secure import SECURE, SecureSettings, check_carries
from fairvar.deploy.robust import check_average
from fairvar.deploy.run import Agreement
from fairvar.deploy.settings import OFF, FederationSettings
from fairvar.engine.batches import Participation
from fairvar.errors import BadInput
from fairvar.runs.config import Config, merge_overrides, refuse_unknown
from fairvar.runs.runner import federation_of, initial_model
from fairvar.validation import Checked

S = TypeVar("S", bound=Checked)
PLACES = {
    "method": "method.name",
    "data": "data.name",
    "clients": "data.clients",
    "model": "model.name",
    "rounds": "train.rounds",
    "lr": "train.lr",
    "seed": "train.seed",
}
TEXTS = ("method-options", "options", "input-shape", "out", "start")
KNOWN = dict.fromkeys((*PLACES, *TEXTS, "classes", SECURE), object)


@dataclass(frozen=True)
class Setup:
    config: Config
    rules: FederationSettings
    privacy: PrivacySettings | None
    secure: SecureSettings | None
    agreed: Agreement
    out: Path
    start: Path | None
    own_model: bool  # the app's, which the configuration does not know

    @property
    def own_data(self) -> bool:
        """The nodes' own files: nobody else knows how many samples there are, or of what."""
        return self.config.data.name in OWN


class Terms(NamedTuple):
    """What the run configuration says, before any data are looked at."""

    config: Config
    rules: FederationSettings
    privacy: PrivacySettings | None
    secure: SecureSettings | None
    texts: dict[str, str]


def read_setup(run_config: Mapping[str, Any], model: Model | None = None) -> Setup:
    """Check the run configuration, on the server and on every node alike."""
    config, rules, privacy, secure, texts = read_terms(run_config)
    agreed = _agreement(config, model, texts["input-shape"], run_config.get("classes"))
    if secure is not None:
        # Scores of clients' own models would travel beside the masked ones, in the clear.
        unseen = msgspec.structs.replace(agreed.evaluate, local=False)
        agreed = replace(agreed, evaluate=unseen)
        config = msgspec.structs.replace(config, evaluate=unseen)
    return Setup(
        config=config,
        rules=rules,
        privacy=privacy,
        secure=secure,
        agreed=agreed,
        out=Path(texts["out"] or "runs"),
        start=Path(texts["start"]) if texts["start"] else None,
        own_model=model is not None,
    )


def read_terms(run_config: Mapping[str, Any]) -> Terms:
    refuse_unknown(run_config, KNOWN, "")
    usual = msgspec.to_builtins(Config().partition)
    values: dict[str, Any] = {"method": {}, "partition": usual}
    for key, place in PLACES.items():
        if key in run_config:
            section, _, name = place.partition(".")
            values.setdefault(section, {})[name] = run_config[key]
    texts = {key: str(run_config.get(key, "")) for key in TEXTS}
    overrides = [f"method.{text}" for text in _words(texts["method-options"], "method-options")]
    values = merge_overrides(values, [*overrides, *_words(texts["options"], "options")])
    told = values.pop("federation", {})
    rules = _section(FederationSettings, told)
    private, masked = values.pop("privacy", None), values.pop("secure", None)
    config = Config.from_dict(values)
    privacy = None if private is None else _section(PrivacySettings, private)
    secure = None
    if run_config.get(SECURE):
        secure = _section(SecureSettings, masked or {})
        train, clients = config.train, config.data.clients
        asked = Participation.build(clients, train.seed, train.participation, train.participants)
        check_carries(config.method, asked.number, secure)
    elif masked is not None:
        raise BadInput(f"secure.* is given without {SECURE} = true")
    check_average(rules, config.method)
    rules = _where_they_act(rules, told, privacy, secure)
    return Terms(config, rules, privacy, secure, texts)


def _where_they_act(
    rules: FederationSettings,
    told: Mapping[str, Any],
    privacy: PrivacySettings | None,
    secure: SecureSettings | None,
) -> FederationSettings:
    """Bounds that look at single replies, or at what other clients sent, are off where they cannot
    act or would void what the noise promises; asked for, they are refused."""
    if secure is not None:
        why = "secure aggregation hides single replies"
    elif privacy is not None:
        why = "the noise of privacy.* is made for a mean of updates of clipping_norm"
    else:
        return rules
    if rules.average != "mean":
        raise BadInput(f"federation.average = {rules.average!r}: {why}; leave it out")
    names = ("norm_bound", "mean_loss_bound")
    for name in names:
        if told.get(name, OFF) != OFF:
            raise BadInput(f"federation.{name} = {told[name]}: {why}; leave it out")
    return msgspec.structs.replace(rules, **dict.fromkeys(names, OFF))


def _words(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadInput(f"{where} = {text!r} cannot be read: {error}") from None


def _section(kind: type[S], values: Any) -> S:
    name, fields = str(kind.__where__), msgspec.structs.fields(kind)
    if not isinstance(values, dict):
        raise BadInput(f"{name} = {values!r} must be keys such as {name}.{fields[0].name}=60")
    refuse_unknown(values, {f.name: f.type for f in fields}, name)
    lacking = [f.name for f in fields if f.required and f.name not in values]
    if lacking:
        raise BadInput(f"{name}.{lacking[0]} is not given")
    return kind(**values)


def _agreement(
    config: Config, model: Model | None, input_shape: str, classes: int | None
) -> Agreement:
    if config.data.name in OWN:
        shape = _shape(input_shape)
        if classes is None:
            raise BadInput("nodes with their own data need `classes` in the run configuration")
    else:
        data = federation_of(config)
        shape, classes = data.input_shape, data.classes
    return Agreement(
        model=_module(config, model, shape, classes),
        method=config.method,
        loss=config.model.loss,
        train=config.train,
        evaluate=config.evaluate,
        clients=config.data.clients,
        input_shape=shape,
        classes=classes,
    )


def _module(
    config: Config, model: Model | None, shape: tuple[int, ...], classes: int | None
) -> Any:
    if model is not None:
        with torch.random.fork_rng(devices=[]):  # the server's first model is the seed's
            torch.manual_seed(config.train.seed)
            return model()
    return initial_model(config, shape, classes or 1)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise BadInput(
            f"input-shape = {text!r}; give the shape of one sample, such as 64 or 1,28,28"
        )
    return shape
