"""Methods that are wrong on purpose, each in one way that someone once got wrong or could.

`test_methods.py` demands that a check of the suite finds each of them.
"""

from __future__ import annotations

import random
from typing import ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

import fairvar as fv
from fairvar.methods.base import Memory, Replies
from fairvar.methods.response import CDFS


class WithoutMeanGradient(fv.FairLoss, frozen=True, tag="1"):
    """What autograd makes of f + λ/2 (f − a)²: the "− g" is lost (so is FedFDP)."""

    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, float]:
        return super().coefficients(loss, mean_loss)[0], 0.0


class WrongSign(fv.FairLoss, frozen=True, tag="2"):
    """Pulls away from the clients with a high loss."""

    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, Tensor]:
        return super().coefficients(2 * mean_loss - loss, mean_loss)


class MixedWeights(fv.FairLoss, frozen=True, tag="3"):
    """Averages a and g by size but the models uniformly."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return torch.full_like(replies.share, 1 / len(replies.share)), memory


class HalfCurvature(fv.FairGrad, frozen=True, tag="4"):
    """Takes γ/2 ‖·‖² and forgets that the square's derivative brings a 2."""

    @property
    def curvature(self) -> float:
        return self.strength / 2


class FlippedCurvature(fv.FairGrad, frozen=True, tag="5"):
    @property
    def curvature(self) -> float:
        return -self.strength


class OldGradient(fv.FairGrad, frozen=True, tag="6"):
    """Says it is exact, but uses g of the round before."""

    @property
    def probes(self) -> bool:
        return False


class Unprojected(fv.AFL, frozen=True, tag="7"):
    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        p = memory["p"] + self.step * replies.loss
        return p, {"p": p}


class LovesGoodClients(fv.AFL, frozen=True, tag="8"):
    """Descends in p where AFL ascends."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return super().weigh(memory, replies._replace(loss=-replies.loss))


class WithoutNorm(fv.QFFL, frozen=True, tag="9"):
    """h_i = f^q/η: only half of the bound."""

    def normaliser(self, replies: Replies, squared_norm: Tensor, lr: float) -> Tensor:
        return super().normaliser(replies, 0 * squared_norm, lr)


class DoublePower(fv.QFFL, frozen=True, tag="10"):
    """The box of the paper read per client: f^q twice."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        weights, memory = super().weigh(memory, replies)
        return weights * replies.loss**self.q, memory


class Erfc(fv.AAggFF, frozen=True, tag="11"):
    """The authors' code: erfc for erf, a response that falls with the loss."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        with patch.dict(CDFS, normal=lambda z: 0.5 * (1 + torch.erfc((z - 1) / 2**0.5))):
            return super().weigh(memory, replies)


class WithoutOuterProduct(fv.AAggFF, frozen=True, tag="12"):
    """The Newton step without its curvature: d·I alone."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        p, new = super().weigh(memory | {"gram": 0 * memory["gram"]}, replies)
        return p, new | {"gram": 0 * new["gram"]}


class Overweight(fv.FedAvg, frozen=True, tag="13"):
    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return replies.share * 1.01, memory


class Forgetful(fv.AFL, frozen=True, tag="14"):
    """Writes into the memory it was given."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        weights, new = super().weigh(memory, replies)
        memory["p"].copy_(new["p"])
        return weights, memory


class Dice(fv.FairLoss, frozen=True, tag="15"):
    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, Tensor]:
        own, shared = super().coefficients(loss, mean_loss)
        return own * random.uniform(0.9, 1.1), shared


class Stateful(fv.FedAvg, frozen=True, tag="16"):
    """Keeps count in the class instead of the memory."""

    calls: ClassVar[list[int]] = []

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        self.calls.append(1)
        tilt = torch.softmax(replies.loss / len(self.calls), 0)
        return tilt, memory


class SinglePrecision(fv.AFL, frozen=True, tag="17"):
    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        weights, memory = super().weigh(memory, replies)
        return weights.float(), memory


class Overflowing(fv.Method, frozen=True, tag="18"):
    """Softmax without the shift: inf / inf for a loss of a thousand."""

    tau: float = 1.0

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        tilt = torch.exp(self.tau * replies.loss)
        return tilt / tilt.sum(), memory


class PeeksAtOthers(fv.FairLoss, frozen=True, tag="19"):
    """Uses the mean of the losses at hand: another number in every engine."""

    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, Tensor]:
        return super().coefficients(loss, loss.mean())


class ByPlace(fv.AFL, frozen=True, tag="20"):
    """Remembers the place of a reply instead of the client's id."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        places = torch.arange(len(replies.ids))
        return super().weigh(memory, replies._replace(ids=places))


class Hoarder(fv.FedAvg, frozen=True, tag="21"):
    """Its memory grows in every round."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return replies.share, memory | {f"loss{len(memory)}": replies.loss}


class FirstClientOnly(fv.FedAvg, frozen=True, tag="22"):
    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return (replies.ids == 0).double(), memory


class Reversed(fv.FedAvg, frozen=True, tag="23"):
    """Climbs."""

    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[float, float]:
        return -1.0, 0.0


class Secretive(fv.FedAvg, frozen=True, tag="24"):
    sends: ClassVar[tuple[str, ...]] = ()


class Cheap(fv.FedAvg, frozen=True, tag="25"):
    """Forgets that a model with batch norm has buffers to send."""

    def traffic(self, parameters: int, buffers: int = 0) -> fv.methods.Traffic:
        return super().traffic(parameters)
