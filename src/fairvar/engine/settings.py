"""Settings of a training run, checked here for the Python interface and configuration files."""

from __future__ import annotations

import re
from math import cos, pi
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from fairvar.common.validation import Checked, Count, Fraction, NonNegative, Positive, Share
from fairvar.engine.optimiser import PLAIN, ServerOptimiser
from fairvar.errors import BadInput, shown
from fairvar.scores import metric_of

Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class LrSchedule(Checked, frozen=True):
    """How the learning rate changes over the rounds.

    In round t of T it is lr · factor(t, T), with w = warm_up:

        t < w      (t + 1) / w
        constant   1
        cosine     least + (1 − least) (1 + cos(π s)) / 2,   s = (t − w) / (T − w)
        step       decay ^ ⌊(t − w) / every⌋;   every = 1 is exponential decay

    With "cosine" the learning rates depend on the total number of rounds.
    """

    __where__: ClassVar[str | None] = "train.schedule"

    name: Literal["constant", "cosine", "step"] = "constant"  # its course after the warm-up
    warm_up: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)] = 0  # rounds
    decay: Share | None = None  # of step: the factor
    every: Count = 1  # of step: rounds between two factors
    least: Fraction = 0.0  # of cosine: the share of lr at the end

    def check(self) -> None:
        if (self.decay is None) == (self.name == "step"):
            raise BadInput('train.schedule: give decay with name = "step", and only there')
        if (self.every != 1 and self.name != "step") or (self.least and self.name != "cosine"):
            raise BadInput('train.schedule: every belongs to name = "step", least to "cosine"')

    def factor(self, t: int, rounds: int) -> float:
        if t < self.warm_up:
            return (t + 1) / self.warm_up
        since = t - self.warm_up
        if self.name == "cosine":
            share = since / max(1, rounds - self.warm_up)
            return self.least + (1 - self.least) * (1 + cos(pi * share)) / 2
        return 1.0 if self.decay is None else self.decay ** (since // self.every)


CONSTANT = LrSchedule()


class TrainSettings(Checked, frozen=True, kw_only=True):
    """Local work, participation, device and path of a run. `fairvar.train` explains each field."""

    __where__: ClassVar[str | None] = "train"

    rounds: Count = 100
    lr: Positive = 0.1  # learning rate of the clients
    schedule: LrSchedule = CONSTANT  # of the learning rate over the rounds
    batch_size: Count | None = None
    drop_last: bool = False  # leave out the smaller last batch of a pass
    local_steps: Count = 1
    local_epochs: Count | None = None
    clip_norm: Positive | None = None
    weight_decay: NonNegative = 0.0
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0  # over the local steps of a round
    server: ServerOptimiser = PLAIN  # applied to the method's update
    participation: Share | None = None  # of the clients in a round; None: all
    participants: Count | None = None  # number of clients in a round, instead of participation
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0  # draws model, batches, participants
    dtype: Literal["float32", "float64"] = "float32"  # of parameters and data
    precision: Literal["full", "tf32", "bfloat16"] = "full"  # of products in training passes
    device: str = "cpu"  # or cuda; of several, cuda:1
    engine: Literal["auto", "reference", "pooled", "blocked", "vmapped", "linear"] = "auto"
    chunk: Count | None = None
    capture: bool | None = None  # record rounds as CUDA graphs; by default wherever possible
    compile: Literal["auto"] | bool = "auto"  # compile clients' steps; "auto": where it pays
    threads: Threads = 1  # per run; the last bits may depend on it

    def check(self) -> None:
        if not re.fullmatch(r"(cpu|cuda|mps|xpu)(:[0-9]{1,4})?", self.device):
            raise BadInput(
                f'train.device = {shown(self.device)}: give "cpu", "cuda" or, of several, "cuda:1"'
            )
        if self.local_epochs is not None and self.local_steps != 1:
            raise BadInput("train.local_steps and train.local_epochs are both given; give one")
        if self.participation is not None and self.participants is not None:
            raise BadInput("train.participation and train.participants are both given; give one")
        if self.precision != "full" and self.dtype != "float32":
            raise BadInput(f'train.precision = "{self.precision}" needs train.dtype = "float32"')

    def lr_of(self, t: int) -> float:
        """The learning rate of round t."""
        return self.lr * self.schedule.factor(t, self.rounds)


class EvaluateSettings(Checked, frozen=True, kw_only=True):
    """When and on which splits all clients are evaluated."""

    __where__: ClassVar[str | None] = "evaluate"

    every: Count = 10  # after every so many rounds, and after the last
    splits: tuple[Literal["train", "valid", "test"], ...] = ("valid", "test")  # of which data
    local: bool = True  # evaluate local models as well as the global one
    # What clients are scored by: a name, "package.module:metric" or, in Python, a function or
    # Metric. By default the accuracy of labels, and the loss where there are none.
    metric: Any = None

    def check(self) -> None:
        if isinstance(self.metric, str) and ":" in self.metric:
            return  # imported later, because reports read stored runs without it
        if self.metric is not None:
            metric_of(self.metric)
