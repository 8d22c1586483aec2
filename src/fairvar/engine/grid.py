"""Runs that differ in numbers and seeds only, trained together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from fairvar.engine.losses import LossFunction
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.train import Checkpoint, Progress, run_rounds
from fairvar.federation import Federation
from fairvar.history import History
from fairvar.methods.base import Method


@dataclass(frozen=True)
class Member:
    """One run of a grid."""

    model: nn.Module | str
    method: Method
    settings: TrainSettings
    start: Checkpoint | None = None


KeepAll = Callable[[int, Callable[[], list[Checkpoint]]], None]  # (rounds done, make checkpoints)


def trains_together(members: Sequence[Member], federation: Federation, loss: str) -> bool:
    """Whether these runs may be given to `train_grid`, and gain by it."""
    return False


def train_grid(
    members: Sequence[Member],
    federation: Federation,
    loss: str | LossFunction,
    when: EvaluateSettings,
    progress: Progress | None = None,
    keep: KeepAll | None = None,
) -> list[History]:
    """The histories of the single runs, at evaluated rounds, within rounding."""
    return [
        run_rounds(m.model, federation, m.method, loss, m.settings, when, m.start, progress)
        for m in members
    ]
