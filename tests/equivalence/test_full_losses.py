"""`losses = "full"`: every path measures f_i on all data, whichever function of the method uses it.

The methods here use it where the built-in ones do not: in `coefficients`, in `weigh` or in
`normaliser` alone, without saying so by `uses_losses`; and one of them only shows it.
"""

from __future__ import annotations

import pytest
import torch
from msgspec import structs
from test_engines import TOLERANCE_64, WORK, paths, run
from torch import Tensor

from checks import distance, images
from fairvar.deploy.client import Agreement
from fairvar.deploy.guard import FederationSettings
from fairvar.deploy.run import LocalTransport, federate, local_clients
from fairvar.engine.grid import Member, train_grid
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.methods.base import LossData, Memory, Method, Replies
from fairvar.testing import CLAUSES


class Pulls(Method, frozen=True, tag="test_pulls"):
    """Directions by the client's own loss: `coefficients` only."""

    pull: float = 0.5
    losses: LossData = "full"

    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, float]:
        return self.pull * loss, 0.0


class Bends(Pulls, frozen=True, tag="test_bends"):
    """The same with curvature, for the blocked path."""

    @property
    def curvature(self) -> float:
        return 0.1


class Weighs(Method, frozen=True, tag="test_weighs"):
    losses: LossData = "full"

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return replies.loss / replies.loss.sum(), memory


class Scales(Method, frozen=True, tag="test_scales"):
    uses_norms = True
    losses: LossData = "full"

    def normaliser(self, replies: Replies, squared_norm: Tensor, lr: float | Tensor) -> Tensor:
        return 1 + (replies.share * replies.loss).sum()


class Shows(Method, frozen=True, tag="test_shows"):
    """FedAvg whose history tells the losses on all data."""

    losses: LossData = "full"


KINDS = [Pulls(), Bends(), Weighs(), Scales(), Shows()]
by_kind = pytest.mark.parametrize("method", KINDS, ids=lambda m: m.label)


@by_kind
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("model", ["multinomial", "batch_norm"])
def test_every_path(model: str, method: Method, work: str) -> None:
    expected = run(model, method, "reference", work)
    on_batches = run(model, structs.replace(method, losses="batch"), "reference", work)
    same = work == "step" and model == "multinomial"
    assert torch.equal(expected.loss[0], on_batches.loss[0]) is same  # so that the test can fail
    for path in paths(model, method, work):
        gaps = distance(run(model, method, path, work), expected)
        assert max(gaps.values()) <= TOLERANCE_64, (path, gaps)


@by_kind
def test_some_clients_and_captured_rounds(method: Method) -> None:
    for more in ({"participants": 4}, {"capture": True}):
        for model, path in (("multinomial", "vmapped"), ("cnn", "auto")):
            expected = run(
                model, method, "reference", "epoch", participants=more.get("participants")
            )
            gaps = distance(run(model, method, path, "epoch", **more), expected)
            assert max(gaps.values()) <= TOLERANCE_64, (more, model, gaps)


@by_kind
def test_runs_trained_together(method: Method) -> None:
    data, when = images(10), EvaluateSettings(every=1)
    settings = TrainSettings(rounds=3, dtype="float64", batch_size=4, local_epochs=1)
    members = [Member("multinomial", method, structs.replace(settings, lr=lr)) for lr in (0.1, 0.2)]
    for member, found in zip(
        members, train_grid(members, data, "cross_entropy", when), strict=True
    ):
        expected = run("multinomial", method, "reference", "epoch", lr=member.settings.lr,
                       evaluate_every=1)  # fmt: skip
        assert max(distance(found, expected).values()) <= TOLERANCE_64


@pytest.mark.parametrize("method", [Pulls(), Bends()], ids=lambda m: m.label)
def test_a_federation_of_nodes(method: Method) -> None:
    """The clients keep their losses: no other function of the method asks for them."""
    data = images(5)
    for work in ("mini_batch", "epoch"):
        settings = TrainSettings(rounds=3, lr=0.1, dtype="float64", **WORK[work])
        agreed = Agreement("multinomial", method, "cross_entropy", settings,
                           EvaluateSettings(every=2), 5, data.input_shape, 3)  # fmt: skip
        transport = LocalTransport(local_clients(agreed, data))
        found = federate(agreed, FederationSettings(), transport).history
        expected = run("multinomial", method, "reference", work, data=data)
        gap = max(float((found.model[k] - v).norm() / v.norm()) for k, v in expected.model.items())
        assert gap <= TOLERANCE_64
        assert bool(found.ascended.isnan().all())  # only the clients know


@by_kind
def test_the_contract_holds(method: Method) -> None:
    CLAUSES["engines_agree"](method)
