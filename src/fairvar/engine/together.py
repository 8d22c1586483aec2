"""Runs in lockstep: one stacked state, and what is observed of it, kept on the device until asked.

A run that diverges stays as it was: its rows of the state are no longer written, and its rows of
later pages no longer count. Rows never mix, so it does not disturb the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from fairvar.engine.captured import LATER, Recorded, acts_alike, tell_unrecorded
from fairvar.engine.evaluate import Scores
from fairvar.engine.history import Key, Tables
from fairvar.engine.linear import Group
from fairvar.engine.linear_eval import Watched, shared_scores, watch_clients
from fairvar.engine.settings import EvaluateSettings
from fairvar.engine.state import Outcome, State, advance
from fairvar.tree import size, stack

GOING = -1  # no run diverges in this round


class Page(NamedTuple):
    """What was observed of all runs in one evaluated round."""

    rounds_done: int
    going: Bool[Tensor, " runs"]  # those that had not diverged
    loss: Float64[Tensor, "runs n"]
    weights: Float64[Tensor, "runs n"]
    ascended: Float64[Tensor, " runs"]
    scores: dict[Key, Scores]
    gradient_variance: Float64[Tensor, " runs"]
    update_norm: Float64[Tensor, "runs n"]

    def is_finite(self) -> Bool[Tensor, " runs"]:
        """As `Evaluation.is_finite`, run by run."""
        fine = ~torch.isinf(self.update_norm).any(1)
        for (_, model), scores in self.scores.items():
            fine &= ~torch.isinf(scores.loss).any(1)
            if model == "global":
                fine &= ~torch.isnan(scores.loss).all(1)
        return fine

    def tables(self) -> Tables:
        """By the names that a History has for them."""
        found = {
            "loss": self.loss,
            "weights": self.weights,
            "ascended": self.ascended,
            "gradient_variance": self.gradient_variance,
            "update_norm": self.update_norm,
        }
        for (split, model), scores in self.scores.items():
            found[f"accuracy/{split}/{model}"] = scores.accuracy
            found[f"evaluated_loss/{split}/{model}"] = scores.loss
        return found


class Lockstep:
    """Runs of one group on their way."""

    def __init__(
        self,
        group: Group,
        states: Sequence[State],
        diverged: Sequence[int],
        captures: bool = False,
    ) -> None:
        going = [s.round for s, d in zip(states, diverged, strict=True) if d == GOING]
        self.group, self.pages = group, list[Page]()
        self.first_round = max(going, default=max(s.round for s in states))
        self.state = replace(stack_states(states), round=self.first_round)
        self.diverged_at = torch.tensor(diverged, device=group.run.device)
        self.traffic = [torch.zeros(3, dtype=torch.int64)]  # after so many rounds, per client
        self.recorded = self._record() if captures else None

    def _record(self) -> Recorded[tuple[Outcome, State]]:
        """A round without evaluation, from the fixed tensors of the state to themselves."""
        run = self.group.run
        self.names = torch.zeros(
            1 + len(run.schedule.keys(LATER)), dtype=torch.int64, device=run.device
        )  # rounds done after this one, shuffles
        live = replace(run, schedule=replace(run.schedule, live_keys=self.names[1:]))
        group = replace(self.group, run=live)

        def compute() -> tuple[Outcome, State]:
            outcome, _ = group.round(self.state, LATER)
            return outcome, advance(self.state, outcome, self.names[0].double())

        def store(found: tuple[Outcome, State]) -> None:
            outcome, after = found
            self._stop(~torch.isfinite(outcome.loss).all(1), self.names[0] - 1)
            self._write(after)

        return Recorded(compute, store, run.device)

    @property
    def going(self) -> Bool[Tensor, " runs"]:
        return self.diverged_at == GOING

    def _repeat(self, t: int) -> bool:
        """Round t as it was recorded; False if there is no recording, or none can be made."""
        if self.recorded is None:
            return False
        self.names.copy_(torch.tensor([t + 1, *self.group.run.schedule.keys(t)]))
        try:
            self.recorded()
        except RuntimeError as error:
            if self.group.run.device.type != "cuda" or self.recorded.graph is not None:
                raise
            tell_unrecorded(error)
            self.recorded = None
        return self.recorded is not None

    def step(self, when: EvaluateSettings | None) -> None:
        """The next round; `when` if it is evaluated."""
        before, t = self.state, self.state.round
        alike = all(acts_alike(method, t) for method in self.group.methods)
        if when is None and alike and self._repeat(t):
            self.state = replace(before, round=t + 1)
            self.traffic.append(self.traffic[-1] + self._traffic(t))
            return
        outcome, work = self.group.round(before, t)
        seen = None
        if when is not None and when.local:
            seen = watch_clients(self.group, before, work, self._splits(when))
        self._stop(~torch.isfinite(outcome.loss).all(1), t)
        self._write(advance(before, outcome))
        self.traffic.append(self.traffic[-1] + self._traffic(t))
        if when is not None:
            self._evaluate(when, outcome, seen)

    def _write(self, after: State) -> None:
        """Runs that have diverged keep the state that they had."""
        for mine, new in zip(self.state.tensors(), after.tensors(), strict=True):
            going = self.going.reshape(-1, *[1] * (new.dim() - 1))
            torch.where(going, new, mine, out=mine)
        self.state = replace(self.state, round=after.round)

    def _stop(self, bad: Bool[Tensor, " runs"], t: int | Tensor) -> None:
        self.diverged_at.copy_(torch.where(bad & self.going, t, self.diverged_at))

    def _evaluate(self, when: EvaluateSettings, outcome: Outcome, seen: Watched | None) -> None:
        nothing = torch.full_like(outcome.loss, torch.nan)
        scores: dict[Key, Scores] = {}
        for split in self._splits(when):
            scores[split, "global"] = shared_scores(self.group.dual, self.state.params, split)
            if seen is not None:
                scores[split, "local"] = seen.local[split]
        page = Page(
            self.state.round,
            self.going,
            outcome.loss,
            outcome.weights.expand_as(outcome.loss),
            outcome.ascended,
            scores,
            nothing[:, 0] if seen is None else seen.gradient_variance,
            nothing if seen is None else seen.update_norm,
        )
        self._stop(~page.is_finite(), self.state.round)
        self.pages.append(page._replace(going=self.going))

    def _splits(self, when: EvaluateSettings) -> tuple[str, ...]:
        return tuple(s for s in when.splits if s in self.group.run.federation.splits)

    def _traffic(self, t: int) -> Int64[Tensor, " 3"]:
        """Exchanges, bytes down, bytes up. They depend on the kind of method, not its numbers."""
        run = self.group.run
        told = self.group.methods[0].at_round(t).traffic(size(run.task.params), 0)
        width = torch.finfo(run.dtype).bits // 8
        return torch.tensor([told.exchanges, told.floats_down * width, told.floats_up * width])

    # -- what became of each run -------------------------------------------------------------------
    def states(self) -> list[State]:
        """The runs' own states, as their single runs would have left them."""
        rounds = [self.state.round if d == GOING else d for d in self.diverged_at.tolist()]
        return [
            replace(self.state.map(lambda leaf, r=r: leaf[r].clone()), round=rounds_done)  # type: ignore[misc]
            for r, rounds_done in enumerate(rounds)
        ]

    def tables(self) -> list[Tables]:
        """Of each run, the pages of rounds in which it had not diverged."""
        runs = range(len(self.diverged_at))
        if not self.pages:
            return [{} for _ in runs]
        each = [page.tables() for page in self.pages]
        whole = {name: torch.stack([page[name] for page in each]).cpu() for name in each[0]}
        going = torch.stack([page.going for page in self.pages]).cpu()
        evaluated = torch.tensor([page.rounds_done for page in self.pages])
        return [
            {name: table[going[:, r], r] for name, table in whole.items()}
            | {"evaluated": evaluated[going[:, r]]}
            for r in runs
        ]


def stack_states(states: Sequence[State]) -> State:
    """One state with the run as first axis; every tensor is new."""

    def trees(name: str) -> dict[str, Tensor] | None:
        found = [getattr(state, name) for state in states]
        return None if found[0] is None else stack(found)

    return State(
        round=states[0].round,
        params=stack([state.params for state in states]),
        buffers={},
        memory=stack([state.memory for state in states]),
        mean_loss=torch.stack([state.mean_loss for state in states]),
        mean_gradient=trees("mean_gradient"),
        iterate=trees("iterate"),
        made_by=states[0].made_by,
    )
