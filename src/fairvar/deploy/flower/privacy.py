"""Differential privacy with Flower's functions, for methods whose clients send only a model.

`options = "privacy.clipping_norm=1.0 privacy.noise_multiplier=1.0"`: every node clips its update to
the norm with Flower's `fixedclipping_mod`, and the server adds Gaussian noise of noise_multiplier ·
clipping_norm / (number of replies) to the mean. With `privacy.delta`, Flower's accountant computes
the ε of all rounds. Evaluations are not covered: the scores that nodes report are exact. Flower
draws the noise from numpy's global generator.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

import msgspec
import torch
from flwr.app import Context, Message
from flwr.clientapp.mod import fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.supercore.differential_privacy import (
    KEY_CLIPPING_NORM,
    add_gaussian_noise_inplace,
    compute_stdv,
)

from fairvar.deploy.flower.wire import FACTS
from fairvar.deploy.messages import sends_loss
from fairvar.engine.state import Outcome, State
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.validation import Checked, NonNegative, Positive


class PrivacySettings(Checked, frozen=True, kw_only=True):
    __where__: ClassVar[str | None] = "privacy"

    clipping_norm: Positive
    noise_multiplier: NonNegative = 1.0
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = (
        None  # of (ε, δ); None: ε is not computed
    )

    def check(self) -> None:
        if self.delta is not None and self.noise_multiplier == 0:
            raise BadInput("privacy.delta is given, but without noise ε is infinite")


def clipped(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower's clipping mod, if the server asks for it."""
    if KEY_CLIPPING_NORM not in message.content.config_records.get(FACTS, {}):
        return call_next(message, context)
    replies = []

    def remember(asked: Message, ctx: Context) -> Message:
        replies.append(call_next(asked, ctx))
        return replies[-1]

    try:
        return fixedclipping_mod(message, context, remember)
    except ZeroDivisionError:  # Flower divides by the norm, which is 0 for an update of zeros
        return replies[-1]


def request_facts(settings: PrivacySettings | None) -> dict[str, float]:
    """The clipping norm, which is added to every train request."""
    return {} if settings is None else {KEY_CLIPPING_NORM: settings.clipping_norm}


def check_fits(settings: PrivacySettings, method: Method, state: State) -> None:
    """Refuse methods that also send losses, gradients or statistics, which get no noise."""
    more = sends_loss(method) or method.uses_mean_gradient or method.client_weights == "size"
    if more or state.buffers:
        what = "batch-norm statistics" if state.buffers else ", ".join(method.reveals)
        raise BadInput(
            f"privacy.clipping_norm covers the model alone, but the clients of {method.label} send "
            f"{what}; use FedAvg with uniform weights and a model without batch norm"
        )
    if settings.delta is not None and find_spec("dp_accounting") is None:
        raise BadInput("privacy.delta needs Flower's accountant: pip install 'fairvar[privacy]'")


def noisy(outcome: Outcome, settings: PrivacySettings) -> Outcome:
    """The mean update with Flower's Gaussian noise."""
    replies = int((outcome.weights != 0).sum())
    spread = compute_stdv(settings.noise_multiplier, settings.clipping_norm, replies)
    arrays = {name: leaf.numpy(force=True).copy() for name, leaf in outcome.update.items()}
    add_gaussian_noise_inplace(list(arrays.values()), spread)
    return replace(outcome, update={name: torch.from_numpy(a) for name, a in arrays.items()})


def spent(settings: PrivacySettings | None, clients: int, releases: int) -> dict[str, Any] | None:
    """The privacy cost of so many noisy means by Flower's accountant: for the presence of a client,
    against anybody who sees the models but not the updates, without amplification by sampling."""
    if settings is None or settings.delta is None or not releases:
        return None
    from flwr.serverapp import RdpAccountant

    relation, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    accountant = RdpAccountant(PrivacyConfig(settings.delta, clients, relation, sampling))
    event = GaussianPrivacyEvent(float(settings.noise_multiplier), clients, clients)
    accountant.compose(event, releases)
    found = accountant.get_privacy_spent()
    return {"epsilon": found.epsilon, "delta": found.delta, "releases": releases,
            "neighbours": relation.value, "sampling": sampling.value}  # fmt: skip
