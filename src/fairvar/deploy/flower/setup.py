"""A Flower app's run configuration as a `Config`, shared by the server and every node.

Flower's run configuration is flat and has fixed keys; everything else goes into two strings:

    method = "fairgrad"                  any name of `fairvar methods`
    method-options = "strength=0.1 exact=true"
    data = "digits"                      an embedded set (node i holds part i), or "own": the data
                                         that the app's function `data` reads at every node
    clients = 5                          the number of all possible clients …
    sites = "berlin lyon"                … or their names; a client's id is its place here
    folder = ""                          to simulate own data: a file or folder for each site
    rounds = 3                           in all, including those of the run to start from
    options = "train.batch_size=16 federation.deadline=60"    any other key of a fairvar file
    input-shape = "64", classes = 10     of one sample; for own data only; 0 classes: regression
    out = "runs"                         where the server writes the run
    start = ""                           the folder of a finished run to start from
    secure-aggregation = false           true: the server receives sums over clients only
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from fairvar.common.validation import Checked, NonNegative, Positive
from fairvar.data.federation import Split
from fairvar.data.sources import OWN
from fairvar.deploy.client import Agreement, is_additive
from fairvar.deploy.guard import OFF, FederationSettings, check_average
from fairvar.engine.batches import Participation
from fairvar.engine.losses import LossFunction
from fairvar.errors import BadInput
from fairvar.runs.config import Config, ModelConfig, assign, merge_overrides, refuse_unknown
from fairvar.runs.own import load_plugins
from fairvar.runs.runner import federation_of, initial_model

# The same architecture on the server and on every node; with a loss, unless the configuration
# names it.
Model = Callable[[], nn.Module | tuple[nn.Module, str | LossFunction]]
# Of several inputs: the shape of one sample, and whether it holds integers.
Inputs = dict[str, tuple[tuple[int, ...], bool]]
S = TypeVar("S", bound=Checked)
SECURE = "secure-aggregation"
OWN_DATA = "own"
USUAL = ModelConfig()
FEWEST = 3  # clients in a secure sum; with two, each could subtract its own value
PLACES = {
    "method": "method.name",
    "data": "data.name",
    "clients": "data.clients",
    "model": "model.name",
    "rounds": "train.rounds",
    "lr": "train.lr",
    "seed": "train.seed",
}
TEXTS = ("method-options", "options", "input-shape", "out", "start", "sites", "folder")
KNOWN = dict.fromkeys((*PLACES, *TEXTS, "classes", SECURE), object)


class PrivacySettings(Checked, frozen=True, kw_only=True):
    """Differential privacy with Flower's functions, for methods whose clients send only a model.

    Every node clips its update to the norm with Flower's `fixedclipping_mod`, and the server adds
    Gaussian noise of noise_multiplier · clipping_norm / (number of replies) to the mean. Flower
    draws it from numpy's global generator. Evaluations are not covered: the scores that nodes
    report are exact.
    """

    __where__: ClassVar[str | None] = "privacy"

    clipping_norm: Positive  # the largest norm of an update
    noise_multiplier: NonNegative = 1.0  # sd of the noise in the sum, in clipping norms
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None  # of (ε, δ); None: no ε

    def check(self) -> None:
        if self.delta is not None and self.noise_multiplier == 0:
            raise BadInput("privacy.delta is given, but without noise ε is infinite")


class SecureSettings(Checked, frozen=True, kw_only=True):
    """Secure aggregation, with Flower's SecAgg+."""

    __where__: ClassVar[str | None] = "secure"

    clipping_range: Positive = 8.0  # largest absolute value in a client's terms of the sums
    # Share of the clients that must answer all stages. Fewer clients cannot, together with the
    # server, unmask another client.
    threshold: Annotated[float, msgspec.Meta(gt=0.5, le=1)] = 2 / 3
    max_weight: Positive = 1.0  # the largest number of samples, where weights are those


def check_carries(config: Config, settings: SecureSettings) -> None:
    """Refuse configurations that a secure sum cannot compute or hide."""
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
    """The checked run configuration, the same on the server and every node."""

    config: Config
    rules: FederationSettings
    privacy: PrivacySettings | None
    secure: SecureSettings | None
    out: Path
    start: Path | None
    model: Model | None  # the app's; None: that of the configuration
    own_data: bool  # nodes train on their own data, which the server does not know
    input_shape: tuple[int, ...]  # of own data, as are the classes; of the first of several inputs
    inputs: Inputs  # of own data with several inputs; otherwise empty
    classes: int | None
    sites: tuple[str, ...]  # names of the clients; empty: they have numbers only
    folder: Path | None  # of the data of simulated sites
    reads: Callable[..., Any] | None  # the app's function for own data, which is part of the run

    @property
    def own_model(self) -> bool:
        return self.model is not None

    @cached_property
    def agreed(self) -> Agreement:
        """Reads the data of the configuration and builds the model."""
        config, shape, classes, like = self.config, self.input_shape, self.classes, None
        if not self.own_data:
            data = federation_of(config)
            shape, classes, like = data.input_shape, data.classes, data.train.blank(4)
        elif self.inputs:
            like = _blank(self.inputs, classes)
        if self.model is None:
            made: Any = initial_model(config, shape, classes or 1)
        else:
            with torch.random.fork_rng(devices=[]):  # the initial model follows from the seed
                torch.manual_seed(config.train.seed)
                made = self.model()
        module, loss = made if isinstance(made, tuple) else (made, config.model.loss)
        if config.model.loss not in (loss, USUAL.loss):
            raise BadInput(f"model.loss = {config.model.loss!r}: the app's function `model` gives "
                           "another loss; change it there")  # fmt: skip
        return Agreement(
            model=module,
            method=config.method,
            loss=loss,
            train=config.train,
            evaluate=config.evaluate,
            clients=config.data.clients,
            input_shape=shape,
            classes=classes,
            like=like,
        )


def read_setup(
    run_config: Mapping[str, Any],
    model: Model | None = None,
    data: Callable[..., Any] | None = None,
) -> Setup:
    """Check the run configuration, on the server and on every node alike. `model` and `data` are
    the app's functions."""
    refuse_unknown(run_config, KNOWN, "")
    partition = msgspec.to_builtins(Config().partition)
    values: dict[str, Any] = {"method": {}, "data": {}, "partition": partition}
    for key, place in PLACES.items():
        if key in run_config:
            assign(values, place, run_config[key])
    texts = {key: str(run_config.get(key, "")) for key in TEXTS}
    own, sites = _own_data(values["data"]), sites_of(run_config)
    if sites:
        values["data"]["clients"] = len(sites)
    overrides = [f"method.{text}" for text in _words(texts["method-options"], "method-options")]
    values = merge_overrides(values, [*overrides, *_words(texts["options"], "options")])
    given = values.pop("federation", {})
    private, masked = values.pop("privacy", None), values.pop("secure", None)
    rules = _section(FederationSettings, given)
    privacy = None if private is None else _section(PrivacySettings, private)
    load_plugins(values, Path(), *map(Path, sys.path))  # Flower puts the app's folder there
    asked = run_config.get(SECURE, False)
    if not isinstance(asked, bool):  # the text "false" would be true
        raise BadInput(f"{SECURE} = {asked!r} must be true or false")
    config, secure = _secured(Config.from_dict(values), asked, masked)
    check_average(rules, config.method)
    if model is not None and replace(config.model, loss=USUAL.loss) != USUAL:
        raise BadInput("model.* is set, but the model is what the app's function `model` gives; "
                       "change it there")  # fmt: skip
    classes, inputs = run_config.get("classes"), _inputs(texts["input-shape"]) if own else {}
    shape = next((shape for shape, _ in inputs.values()), ())
    if own and (type(classes) is not int or classes < 0):
        raise BadInput(f"classes = {classes!r}: own data need their number of classes, or 0 for a "
                       "regression")  # fmt: skip
    return Setup(
        config=config,
        rules=_possible_bounds(rules, given, privacy, secure),
        privacy=privacy,
        secure=secure,
        out=Path(texts["out"] or "runs"),
        start=Path(texts["start"]) if texts["start"] else None,
        model=model,
        own_data=own,
        input_shape=shape,
        inputs={} if "" in inputs else inputs,
        classes=classes or None,
        sites=sites,
        folder=Path(texts["folder"]) if texts["folder"] else None,
        reads=data if own else None,
    )


def _secured(config: Config, asked: bool, masked: Any) -> tuple[Config, SecureSettings | None]:
    """With secure aggregation, if it is asked for: local models are then not scored, because their
    scores would be sent unmasked."""
    if not asked and masked is not None:
        raise BadInput(f"secure.* is given without {SECURE} = true")
    if not asked:
        return config, None
    secure = _section(SecureSettings, masked or {})
    check_carries(config, secure)
    return replace(config, evaluate=replace(config.evaluate, local=False)), secure


def _own_data(data: dict[str, Any]) -> bool:
    """Whether nodes use their own data. The stored configuration must name some data set, and then
    names .npz files without a path."""
    if data.get("name") in OWN:
        raise BadInput(f'data = "{data["name"]}": the function `data` of the app reads a node\'s '
                       f'files; write it there and set data = "{OWN_DATA}"')  # fmt: skip
    own = data.get("name") == OWN_DATA
    if own:
        data["name"] = "npz"
    return own


def sites_of(run_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the clients by id; none if they have numbers only."""
    text = str(run_config.get("sites", ""))
    names = tuple(_words(text, "sites"))
    if len(set(names)) < len(names) or not all(name.isprintable() for name in names):
        raise BadInput(f"sites = {text!r}: every site needs a name of its own")
    return names


def _possible_bounds(
    rules: FederationSettings,
    given: Mapping[str, Any],
    privacy: PrivacySettings | None,
    secure: SecureSettings | None,
) -> FederationSettings:
    """Switch off limits on single replies with secure aggregation, which hides them, and with
    differential privacy, whose noise assumes a mean; refuse them if they are given."""
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


def _inputs(text: str) -> Inputs:
    """Of one input, without a name: "1,28,28". Of several: "note=6:int values=2"."""
    if "=" not in text:
        return {"": (_shape(text, text), False)}
    found: Inputs = {}
    for word in text.split():
        name, _, form = word.partition("=")
        shape, _, kind = form.partition(":")
        if not name.isidentifier() or name in found or kind not in ("", "int"):
            raise BadInput(f"input-shape = {text!r}; name each input once, such as "
                           "note=6:int values=2")  # fmt: skip
        found[name] = _shape(shape, text), kind == "int"
    return found


def _shape(form: str, text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in form.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise BadInput(f"input-shape = {text!r}; give the shape of one sample, such as 64 or "
                       "1,28,28, or of each of several inputs, note=6:int values=2")  # fmt: skip
    return shape


def _blank(inputs: Inputs, classes: int | None) -> Split:
    """Samples of zeros, for a server that has none."""
    x = {name: torch.zeros(4, *shape, dtype=torch.int64 if whole else torch.float32)
         for name, (shape, whole) in inputs.items()}  # fmt: skip
    y = torch.zeros(4, dtype=torch.float32 if classes is None else torch.int64)
    return Split(x, y, torch.tensor([4]))
