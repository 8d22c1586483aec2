"""`Trial`: one configuration of a method with all its seeds, and `Summary`: what choosing needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fairvar.engine.history import History
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.metrics import Fairness
from fairvar.runs.identity import Identity
from fairvar.runs.select import Curve, Validation
from fairvar.runs.stored import StoredRun


@dataclass(frozen=True)
class Summary:
    """A trial without its clients: small enough to keep for every configuration of a grid."""

    rounds: Sequence[int]  # evaluated rounds; none if a seed diverged
    diverged: bool
    valid: Mapping[str, Curve]  # by model
    last: Mapping[str, tuple[float, float]]  # by model: test mean and variance after the last round
    births: Sequence[Mapping[str, Any]]  # of every seed's run

    @staticmethod
    def of(histories: Sequence[History]) -> Summary:
        births = [history.birth for history in histories]
        if any(history.diverged_at is not None for history in histories):
            return Summary((), True, {}, {}, births)
        first = histories[0]
        curves = {
            (split, model): Curve.of(
                np.stack([h.accuracy[split, model].numpy() for h in histories])
            )
            for split, model in first.accuracy
            if split in ("valid", "test") and all((split, model) in h.accuracy for h in histories)
        }
        return Summary(
            first.evaluated.tolist(),
            False,
            {model: curve for (split, model), curve in curves.items() if split == "valid"},
            {
                model: (float(curve.mean[-1]), float(curve.variance[-1]))
                for (split, model), curve in curves.items()
                if split == "test" and len(curve.mean)
            },
            births,
        )


@dataclass(frozen=True, eq=False)
class Trial:
    """One configuration, trained with every seed. `source`: its runs in memory or on disk, read
    when they are asked for; empty where only the summary was kept."""

    method: Method
    lr: float
    source: Sequence[History] | Sequence[StoredRun]
    kept: Summary | None = None
    identity: Identity | None = None  # of one of its stored runs
    version: str = ""  # tells it from runs of other code under the same label, where there are any

    @cached_property
    def histories(self) -> Sequence[History]:
        if not self.source:
            raise BadInput(
                f"only a summary was kept of {self.label}, {self.describe()}; report with the "
                "options that the runs were condensed with, or condense the runs again"
            )
        return [run.history() if isinstance(run, StoredRun) else run for run in self.source]

    @cached_property
    def summary(self) -> Summary:
        return self.kept or Summary.of(self.histories)

    @property
    def label(self) -> str:
        return f"{self.method.label} [{self.version}]" if self.version else self.method.label

    @property
    def knob(self) -> tuple[str, Any] | None:
        """The method's fairness hyper-parameter and its value."""
        name = self.method.fairness_knob
        return None if name is None else (name, getattr(self.method, name))

    @property
    def diverged(self) -> bool:
        return self.summary.diverged

    @property
    def seeds(self) -> list[int]:
        return [int(birth["seed"]) for birth in self.summary.births]

    @property
    def models(self) -> list[str]:
        """Those whose test accuracy was measured; none if a seed diverged."""
        return list(self.summary.last)

    def validated(self, model: str) -> bool:
        """Whether any client validated this model."""
        curve = self.summary.valid.get(model)
        return curve is not None and bool(np.isfinite(curve.mean).any())

    def validation(self, model: str) -> Validation:
        """The part of the trial that selection may see."""
        strength = self.knob[1] if self.knob and isinstance(self.knob[1], float) else 0.0
        known = self.summary
        curve = None if known.diverged else known.valid[model]
        return Validation(known.rounds, curve, len(known.births), strength)

    def test(self, model: str, at: int) -> list[Fairness]:
        """Test fairness of every seed at one evaluated round."""
        return [h.fairness("test", model, at) for h in self.histories]

    def describe(self, at: int | None = None) -> str:
        parts = [f"lr {self.lr:g}"]
        if self.knob is not None:
            name, value = self.knob
            parts.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
        if at is not None:
            parts.append(f"round {self.summary.rounds[at]}")
        return ", ".join(parts)
