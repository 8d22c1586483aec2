"""The numbers of a training run, checked in one place for Python and configuration files."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

import msgspec

from fairvar.errors import BadInput, shown
from fairvar.validation import Checked, Count, Positive, Share

Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class TrainSettings(Checked, frozen=True, kw_only=True):
    """How much work a round is, and where it runs. See `fairvar.train` for the meaning of each."""

    __where__: ClassVar[str | None] = "train"

    rounds: Count = 100
    lr: Positive = 0.1
    batch_size: Count | None = None
    local_steps: Count = 1
    local_epochs: Count | None = None
    clip_norm: Positive | None = None
    participation: Share | None = None  # of the clients in a round; None: all
    participants: Count | None = None  # the same as a number
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    dtype: Literal["float32", "float64"] = "float32"
    precision: Literal["full", "tf32", "bfloat16"] = "full"  # of products inside; never silently
    device: str = "cpu"
    engine: Literal["auto", "reference", "pooled", "blocked", "vmapped", "linear"] = "auto"
    chunk: Count | None = None
    capture: bool | None = None  # record rounds and repeat them: by default on CUDA where possible
    threads: Threads = 1  # per run; the last bits may depend on it. Several runs at once fill a CPU

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


class EvaluateSettings(Checked, frozen=True, kw_only=True):
    """When and on what all clients are evaluated."""

    __where__: ClassVar[str | None] = "evaluate"

    every: Count = 10
    splits: tuple[Literal["train", "valid", "test"], ...] = ("valid", "test")
    local: bool = True  # evaluate local models as well as the global one
