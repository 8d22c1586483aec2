"""A Flower app's run configuration as a `Config`: what the server and every node agree on.

Flower's run configuration is flat and has fixed keys; everything else goes into two strings:

    method = "fairgrad"                  any name of `fairvar methods`
    method-options = "strength=0.1 exact=true"
    data = "digits"                      an embedded set (node i holds part i), or "npz", "folder":
                                         every node's own files
    clients = 5                          the number of all possible clients
    rounds = 3                           in all, including those of the run to start from
    options = "train.batch_size=16 federation.deadline=60"    any other key of a fairvar file
    input-shape = "64", classes = 10     of one sample; only for nodes' own files
    out = "runs"                         where the server writes the run
    start = ""                           the folder of a finished run to start from
    secure-aggregation = false           true: the server learns sums over clients only (`secure`)
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import torch
from torch import nn

from fairvar.data.sources import OWN
from fairvar.deploy.flower.apps import Model
from fairvar.deploy.flower.privacy import PrivacySettings
from fairvar.deploy.robust import check_average
from fairvar.deploy.run import Agreement
from fairvar.deploy.settings import OFF, FederationSettings
from fairvar.deploy.summed import is_additive
from fairvar.engine.batches import Participation
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.runs.config import Config, assign, merge_overrides, refuse_unknown
from fairvar.runs.runner import federation_of, initial_model
from fairvar.validation import Checked, Positive

S = TypeVar("S", bound=Checked)
SECURE = "secure-aggregation"
FEWEST = 3  # clients in a secure sum; of two clients, each could subtract its own value
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


class SecureSettings(Checked, frozen=True, kw_only=True):
    __where__: ClassVar[str | None] = "secure"

    clipping_range: Positive = 8.0  # no value that a client adds may be larger
    # Share of the clients that must stay until the sum is recovered. Fewer clients, together with
    # the server, cannot unmask anybody.
    threshold: Annotated[float, msgspec.Meta(gt=0.5, le=1)] = 2 / 3
    max_weight: Positive = 1.0  # the largest number of samples, where weights are those


def check_carries(method: Method, asked: int, settings: SecureSettings) -> None:
    """Refuse what a secure sum cannot compute or hide; `asked` clients take part in a round."""
    if not is_additive(method):
        what = ", ".join(method.reveals)
        raise BadInput(
            f"{SECURE} = true cannot be kept for {method.label}: its server needs each client's "
            f"{what} by itself, and a secure sum hides just that; leave it out, or take FedAvg, "
            "q-FFL, FairLoss or FairGrad"
        )
    if asked < FEWEST:
        raise BadInput(f"{SECURE} = true hides nothing among {asked} clients; {FEWEST} or more")
    if method.client_weights == "size" and settings.max_weight == 1:
        raise BadInput(f"{SECURE} = true with weights by size needs secure.max_weight, the largest "
                       "number of samples of any client")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The run configuration, checked; no data are read."""

    config: Config
    rules: FederationSettings
    privacy: PrivacySettings | None
    secure: SecureSettings | None
    out: Path
    start: Path | None

    @property
    def own_data(self) -> bool:
        """Whether nodes train on their own files, which the server does not know."""
        return self.config.data.name in OWN


@dataclass(frozen=True, kw_only=True)
class Setup(Terms):
    """What the server and every node agree on."""

    agreed: Agreement
    own_model: bool  # the app's; otherwise that of the configuration


def read_setup(run_config: Mapping[str, Any], model: Model | None = None) -> Setup:
    """Check the run configuration, on the server and on every node alike."""
    terms = read_terms(run_config)
    if terms.secure is not None:  # scores of local models would be sent unmasked
        unseen = msgspec.structs.replace(terms.config.evaluate, local=False)
        terms = replace(terms, config=msgspec.structs.replace(terms.config, evaluate=unseen))
    shape, classes = str(run_config.get("input-shape", "")), run_config.get("classes")
    agreed = _agreement(terms.config, model, shape, classes)
    return Setup(**vars(terms), agreed=agreed, own_model=model is not None)


def read_terms(run_config: Mapping[str, Any]) -> Terms:
    refuse_unknown(run_config, KNOWN, "")
    values: dict[str, Any] = {"method": {}, "partition": msgspec.to_builtins(Config().partition)}
    for key, place in PLACES.items():
        if key in run_config:
            assign(values, place, run_config[key])
    texts = {key: str(run_config.get(key, "")) for key in TEXTS}
    overrides = [f"method.{text}" for text in _words(texts["method-options"], "method-options")]
    values = merge_overrides(values, [*overrides, *_words(texts["options"], "options")])
    given = values.pop("federation", {})
    private, masked = values.pop("privacy", None), values.pop("secure", None)
    rules = _section(FederationSettings, given)
    privacy = None if private is None else _section(PrivacySettings, private)
    config, secure = Config.from_dict(values), None
    if run_config.get(SECURE):
        secure = _section(SecureSettings, masked or {})
        train, clients = config.train, config.data.clients
        asked = Participation.build(clients, train.seed, train.participation, train.participants)
        check_carries(config.method, asked.number, secure)
    elif masked is not None:
        raise BadInput(f"secure.* is given without {SECURE} = true")
    check_average(rules, config.method)
    return Terms(
        config=config,
        rules=_possible_bounds(rules, given, privacy, secure),
        privacy=privacy,
        secure=secure,
        out=Path(texts["out"] or "runs"),
        start=Path(texts["start"]) if texts["start"] else None,
    )


def _possible_bounds(
    rules: FederationSettings,
    given: Mapping[str, Any],
    privacy: PrivacySettings | None,
    secure: SecureSettings | None,
) -> FederationSettings:
    """Switch off bounds on single replies, or that compare clients, where they cannot work or
    would void the promise of the noise; refuse them if they are given."""
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
        if given.get(name, OFF) != OFF:
            raise BadInput(f"federation.{name} = {given[name]}: {why}; leave it out")
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
    module: nn.Module
    if model is None:
        module = initial_model(config, shape, classes or 1)
    else:
        with torch.random.fork_rng(devices=[]):  # the initial model follows from the seed
            torch.manual_seed(config.train.seed)
            module = model()
    return Agreement(
        model=module,
        method=config.method,
        loss=config.model.loss,
        train=config.train,
        evaluate=config.evaluate,
        clients=config.data.clients,
        input_shape=shape,
        classes=classes,
    )


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
