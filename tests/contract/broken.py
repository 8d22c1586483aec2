"""Methods that are wrong on purpose, each in one way that someone once got wrong or could.

`test_methods.py` demands that a check of the suite finds each of them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fairvar as fv
from fairvar.common.tree import Tree, scale, subtract, tree_map
from fairvar.engine.kernels import reference
from fairvar.engine.run import Run
from fairvar.methods.aaggff import CDFS
from fairvar.methods.base import Memory, Replies
from fairvar.methods.simplex import minimise_within


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


class Overflowing(fv.TERM, frozen=True, tag="18"):
    """Softmax without the shift: inf / inf for a loss of a thousand."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        tilted = replies.share * torch.exp(self.tilt * replies.loss)
        return tilted / tilted.sum(), memory


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


class AveragedTwice(fv.TERM, frozen=True, tag="26"):
    """The authors' code: weights that sum to one, and then the mean of the m weighted models."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        weights, memory = super().weigh(memory, replies)
        return weights / len(weights), memory


class TiltWithoutShare(fv.TERM, frozen=True, tag="27"):
    """The tilt of uniform clients, whatever their plain weights."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return torch.softmax(self.tilt * replies.loss, 0), memory


class Uncapped(fv.PropFair, frozen=True, tag="28"):
    """1 / (M − f) without ε: it grows without bound, and behind M it climbs."""

    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, float]:
        return 1 / (self.base - loss), 0.0


class UtilityOfTheMean(fv.PropFair, frozen=True, tag="29"):
    """All clients get the factor of the mean loss: FedAvg with another step."""

    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, float]:
        return super().coefficients(mean_loss + 0 * loss, mean_loss)


class TiesToTheFirst(fv.Superquantile, frozen=True, tag="30"):
    """Sorts, and takes of equal clients the first."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        order = torch.argsort(replies.loss, descending=True, stable=True)
        worst = replies.share[order].cumsum(0) <= self.share + 1e-12
        kept = torch.zeros_like(replies.share).index_copy(0, order, worst.double())
        return kept / kept.sum(), memory


class BestShare(fv.Superquantile, frozen=True, tag="31"):
    """The mean loss of the best clients."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return super().weigh(memory, replies._replace(loss=-replies.loss))


class StaleIndex(fv.GIFAIR, frozen=True, tag="32"):
    """FedFB's copy: a loop variable that kept its last value gives all clients one share."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        weights, memory = super().weigh(memory, replies)
        last = (weights - replies.share)[-1] + 0 * weights
        return (replies.share + last) / (replies.share + last).sum(), memory


class BareStrength(fv.GIFAIR, frozen=True, tag="33"):
    """λ itself instead of a share of its bound: good clients are ascended."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        signs = torch.sign(replies.loss[:, None] - replies.loss).sum(1)
        return replies.share + self.strength * signs, memory


class TwoSided(fv.SemiVRed, frozen=True, tag="34"):
    """V-REx: clients better than the mean are penalised too."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        f, r = replies.loss, replies.share
        return r * (1 + 2 * self.strength * (f - r @ f)), memory


class MeanHeldFixed(fv.SemiVRed, frozen=True, tag="35"):
    """Forgets that F moves with the model: the weights do not sum to one."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        f, r = replies.loss, replies.share
        return r * (1 + 2 * self.strength * torch.relu(f - r @ f)), memory


class DoublePull(fv.FedProx, frozen=True, tag="36"):
    """Takes μ ‖y − x‖² for the proximal term, without the ½."""

    def at_round(self, t: int) -> fv.Method:
        return fv.FedProx(2 * self.pull, self.weights)


class Pushes(fv.FedProx, frozen=True, tag="37"):
    """x − y for y − x: away from the global model."""

    def at_round(self, t: int) -> fv.Method:
        return self.with_numbers({"pull": torch.tensor(-self.pull, dtype=torch.float64)})


class RawLengths(fv.FedMGDA, frozen=True, tag="60"):
    """The least norm of the updates as they are: the shortest one decides."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        assert replies.gram is not None
        low, high = (replies.share - self.eps).clamp(min=0), (replies.share + self.eps).clamp(max=1)
        chosen = minimise_within(replies.gram, replies.share, low, high)
        return self.step * chosen / (chosen @ replies.gram @ chosen).sqrt(), memory


class Unbounded(fv.FedMGDA, frozen=True, tag="61"):
    """FedLab's: MGDA without eps."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return fv.FedMGDA(eps=1.0, step=self.step).weigh(memory, replies)


class OnChangedUpdates(fv.FedFV, frozen=True, tag="62"):
    """Projects on updates that were projected before, in the place of the original ones."""

    def _projected(self, K: Tensor) -> Tensor:
        C = super()._projected(K)
        return super()._projected(C @ K @ C.T)


class WithoutLength(fv.FedFV, frozen=True, tag="63"):
    """Leaves the step as short as the projections make it."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        assert replies.gram is not None
        weights, memory = super().weigh(memory, replies)
        return weights / (weights @ replies.gram @ weights).sqrt(), memory


class TiesByPlace(fv.FedFV, frozen=True, tag="64"):
    """Orders clients with equal losses by the place of their replies."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        place = torch.arange(len(replies.loss), dtype=torch.float64)
        return super().weigh(memory, replies._replace(loss=replies.loss + 1e-9 * place))


class SumsToOne(fv.AdaFed, frozen=True, tag="65"):
    """An average of the clients' models, which takes the prescribed rates away."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        weights, memory = super().weigh(memory, replies)
        return weights / weights.sum(), memory


class Ridge(fv.AdaFed, frozen=True, tag="66"):
    """A small constant against division by zero: small for one learning rate only."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        assert replies.gram is not None
        more = 1e-6 * torch.eye(len(replies.gram), dtype=torch.float64)
        return super().weigh(memory, replies._replace(gram=replies.gram + more))


class PlainMean(fv.FedEBA, frozen=True, tag="67"):
    """Aligns with the plain mean of the gradients in unfair rounds."""

    def broadcast(self, replies: Replies) -> tuple[Tensor, Tensor]:
        return super().broadcast(replies)[0], replies.share


class WithoutTerm(fv.FedEBA, frozen=True, tag="68"):
    """Takes 1 − α of the step in fair rounds and forgets the rest."""

    def server_term(self, replies: Replies) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def weigh(self, memory: Memory, replies: Replies) -> tuple[Tensor, Memory]:
        return (1 - super().server_term(replies)) * self._tilted(replies), memory


class AlwaysAligned(fv.FedEBA, frozen=True, tag="69"):
    """Clients mix g into their steps in fair rounds too."""

    def coefficients(self, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, Tensor]:
        return super().coefficients(loss, torch.ones_like(mean_loss))


# -- options of FairLoss and FairGrad --------------------------------------------------------------
class NeverStored(fv.FairGrad, frozen=True, tag="70"):
    """FL-bench's port: the average of the round before is lost, and 1 − ema of the mean is sent."""

    def smoothed(self, before: Tree | None, fresh: Tree) -> Tree:
        return super().smoothed(before and tree_map(torch.zeros_like, before), fresh)


class SwappedAverage(fv.FairGrad, frozen=True, tag="71"):
    """(1 − ema) of the old average and ema of the new mean."""

    def smoothed(self, before: Tree | None, fresh: Tree) -> Tree:
        return super().smoothed(fresh, before or fresh)


class AllParameters(fv.FairGrad, frozen=True, tag="72"):
    """Penalises the body too."""

    def penalised(self, away: Tree) -> Tree:
        return away


class OtherParameters(fv.FairGrad, frozen=True, tag="73"):
    """Penalises what `only` leaves out."""

    def penalised(self, away: Tree) -> Tree:
        return subtract(away, super().penalised(away))


class BoundIgnored(fv.FairLoss, frozen=True, tag="74"):
    @property
    def penalty_bound(self) -> None:
        return None


class BoundOnTheDirection(fv.FairLoss, frozen=True, tag="75"):
    """Takes b for a bound on ‖d_i‖ / ‖∇f_i‖, which 1 + b is."""

    @property
    def penalty_bound(self) -> float:
        assert self.bound is not None
        return 1 + self.bound


# -- the server's optimiser: in the place of `ServerOptimiser.step` and `start` -------------------
right_step, right_start = fv.ServerOptimiser.step, fv.ServerOptimiser.start
Step = tuple[Tree, Tree | None]


def damped(optimiser: fv.ServerOptimiser, update: Tree, moments: Tree | None) -> Step:
    """m ← β1 m + (1 − β1) Δ in sgd too: steps a tenth as long."""
    assert optimiser.beta1 is not None
    return right_step(optimiser, scale(update, 1 - optimiser.beta1), moments)


def forgotten(optimiser: fv.ServerOptimiser, update: Tree, moments: Tree | None) -> Step:
    """The moments stay those of the start."""
    return right_step(optimiser, update, moments)[0], moments


def from_zero(optimiser: fv.ServerOptimiser, params: Tree) -> Tree | None:
    """v starts at 0 instead of τ²."""
    moments = right_start(optimiser, params)
    return moments and {k: 0 * v for k, v in moments.items()}


# -- local steps: in the place of `reference._move` and `LrSchedule.factor` ------------------------
right_move, right_factor = reference._move, fv.LrSchedule.factor


def dampened(
    run: Run, method: fv.Method, module: nn.Module, sent: nn.Module, d: Tree, speed: Tree, lr: float
) -> None:
    """v ← m v + (1 − m) d, from the first step on."""
    right_move(run, method, module, sent, scale(d, 1 - run.momentum), speed, lr)


def without_speed(
    run: Run, method: fv.Method, module: nn.Module, sent: nn.Module, d: Tree, speed: Tree, lr: float
) -> None:
    """v starts anew in every step."""
    right_move(run, method, module, sent, d, {}, lr)


def decayed_twice(run: Run, *rest: object) -> None:
    """Takes weight_decay ‖y‖² for the penalty, without the ½."""
    right_move(replace(run, weight_decay=2 * run.weight_decay), *rest)  # type: ignore[arg-type]


def decayed_at_once(
    run: Run, method: fv.Method, module: nn.Module, sent: nn.Module, d: Tree, speed: Tree, lr: float
) -> None:
    """Shrinks y by weight_decay whatever the learning rate."""
    right_move(replace(run, weight_decay=run.weight_decay / lr), method, module, sent, d, speed, lr)


def a_round_early(schedule: fv.LrSchedule, t: int, rounds: int) -> float:
    return right_factor(schedule, t + 1, rounds)


def constant(schedule: fv.LrSchedule, t: int, rounds: int) -> float:
    """The learning rate stays that of the first round."""
    return 1.0
