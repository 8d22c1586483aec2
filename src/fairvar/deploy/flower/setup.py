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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from fairvar.data.sources import OWN
from fairvar.deploy.client import Agreement, is_additive
from fairvar.deploy.guard import OFF, FederationSettings, check_average
from fairvar.engine.batches import Participation
from fairvar.errors import BadInput
from fairvar.runs.config import Config, assign, merge_overrides, refuse_unknown
from fairvar.runs.runner import federation_of, initial_model
from fairvar.validation import Checked, NonNegative, Positive

Model = Callable[[], nn.Module]  # gives the same architecture on the server and on every node
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


class PrivacySettings(Checked, frozen=True, kw_only=True):
    """Differential privacy with Flower's functions, for methods whose clients send only a model.

    Every node clips its update to the norm with Flower's `fixedclipping_mod`, and the server adds
    Gaussian noise of noise_multiplier · clipping_norm / (number of replies) to the mean. Flower
    draws it from numpy's global generator. Evaluations are not covered: the scores that nodes
    report are exact.
    """

    __where__: ClassVar[str | None] = "privacy"

    clipping_norm: Positive
    noise_multiplier: NonNegative = 1.0
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None  # of (ε, δ); None: no ε

    def check(self) -> None:
        if self.delta is not None and self.noise_multiplier == 0:
            raise BadInput("privacy.delta is given, but without noise ε is infinite")


class SecureSettings(Checked, frozen=True, kw_only=True):
    __where__: ClassVar[str | None] = "secure"

    clipping_range: Positive = 8.0  # no value that a client adds may be larger
    # Share of the clients that must stay until the sum is recovered. Fewer clients, together with
    # the server, cannot unmask anybody.
    threshold: Annotated[float, msgspec.Meta(gt=0.5, le=1)] = 2 / 3
    max_weight: Positive = 1.0  # the largest number of samples, where weights are those


def check_carries(config: Config, settings: SecureSettings) -> None:
    """Refuse what a secure sum cannot compute or hide."""
    method, train = config.method, config.train
    if not is_additive(method):
        what = ", ".join(method.reveals)
        raise BadInput(
            f"{SECURE} = true cannot be kept for {method.label}: its server needs each client's "
            f"{what} by itself, and a secure sum hides just that; leave it out, or take FedAvg, "
            "q-FFL, FairLoss, FairGrad or PropFair"
        )
    asked = Participation.build(
        config.data.clients, train.seed, train.participation, train.participants
    ).number
    if asked < FEWEST:
        raise BadInput(f"{SECURE} = true hides nothing among {asked} clients; {FEWEST} or more")
    if method.client_weights == "size" and settings.max_weight == 1:
        raise BadInput(f"{SECURE} = true with weights by size needs secure.max_weight, the largest "
                       "number of samples of any client")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The run configuration, checked: what the server and every node agree on."""

    config: Config
    rules: FederationSettings
    privacy: PrivacySettings | None
    secure: SecureSettings | None
    out: Path
    start: Path | None
    model: Model | None  # the app's; None: that of the configuration
    input_shape: tuple[int, ...]  # of nodes' own files, as are the classes
    classes: int | None

    @property
    def own_data(self) -> bool:
        """Whether nodes train on their own files, which the server does not know."""
        return self.config.data.name in OWN

    @property
    def own_model(self) -> bool:
        return self.model is not None

    @cached_property
    def agreed(self) -> Agreement:
        """Reads the data of the configuration and builds the model."""
        config, shape, classes = self.config, self.input_shape, self.classes
        if not self.own_data:
            data = federation_of(config)
            shape, classes = data.input_shape, data.classes
        if self.model is None:
            module = initial_model(config, shape, classes or 1)
        else:
            with torch.random.fork_rng(devices=[]):  # the initial model follows from the seed
                torch.manual_seed(config.train.seed)
                module = self.model()
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


def read_setup(run_config: Mapping[str, Any], model: Model | None = None) -> Setup:
    """Check the run configuration, on the server and on every node alike."""
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
        check_carries(config, secure)
        unseen = replace(config.evaluate, local=False)  # their scores would be sent unmasked
        config = replace(config, evaluate=unseen)
    elif masked is not None:
        raise BadInput(f"secure.* is given without {SECURE} = true")
    check_average(rules, config.method)
    own, classes = config.data.name in OWN, run_config.get("classes")
    shape = _shape(texts["input-shape"]) if own else ()
    if own and classes is None:
        raise BadInput("nodes with their own data need `classes` in the run configuration")
    return Setup(
        config=config,
        rules=_possible_bounds(rules, given, privacy, secure),
        privacy=privacy,
        secure=secure,
        out=Path(texts["out"] or "runs"),
        start=Path(texts["start"]) if texts["start"] else None,
        model=model,
        input_shape=shape,
        classes=classes,
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
    return replace(rules, **dict.fromkeys(names, OFF))


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
