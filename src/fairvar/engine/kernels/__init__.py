"""Kernels, which compute a round. All give the same results up to rounding; tests compare them.

A kernel carries R ≥ 1 runs: in its states, outcomes and observations the run is the first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from fairvar.engine.evaluate import Scores, Seen
from fairvar.engine.history import Key
from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Method

Splits = tuple[str, ...]


@runtime_checkable
class Kernel(Protocol):
    """The interface for the trainer, of the kernels here and of deployments (`deploy/run.py`)."""

    @property
    def run(self) -> Run: ...

    @property
    def methods(self) -> Sequence[Method]: ...  # of each run

    def round(self, state: State, t: int, splits: Splits | None) -> tuple[Outcome, Seen | None]:
        """Round t of all runs, from `state`. With `splits`, also observations of the clients, with
        their local models' scores on these splits."""

    def scores(self, state: State, splits: Splits) -> dict[Key, Scores]:
        """Scores of the global models on the clients' samples, and of personal models if any."""


@runtime_checkable
class Recordable(Kernel, Protocol):
    """A kernel whose rounds can be recorded once and repeated (`cuda_graphs.py`)."""

    @property
    def shows(self) -> bool: ...  # whether `see` works, so that evaluated rounds are repeated too

    def numbers(self) -> dict[str, list[float]]:
        """The numbers that may differ between runs, for each run: learning rate, strengths."""

    def live(self, names: Tensor, numbers: dict[str, Tensor]) -> Recordable:
        """The same kernel, which reads these values from tensors on the device."""

    def compute(self, state: State, t: int) -> tuple[Outcome, Any]:
        """Round t, and intermediate results for `see`."""

    def see(self, before: State, t: int, work: Any, splits: Splits) -> Seen:
        """Observations of the clients in round t, which started from `before`."""
