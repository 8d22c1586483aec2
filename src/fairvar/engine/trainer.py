"""The round loop of single runs, grids of runs and deployments.

One round t of the runs that a kernel carries:

    outcome, seen = kernel.round(state, t, splits)    clients train, the server aggregates
    state = settle(state, outcome)                    x ← x − update, through the server optimiser;
                                                      diverged runs keep their state
    recorder.write(outcome)                           losses and weights
    if the round is evaluated:
        kernel.scores(state)                          the new global (and personal) models
        recorder.write_evaluation(…, seen)            with what the round showed of local models
    keep(checkpoints), progress(t + 1, rounds)        of the caller; STOP ends the run here

In states, outcomes and tables the run is the first axis. No operation mixes runs, so a run that
diverges does not change the others; its later rows are left out of its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fairvar.engine.cuda_graphs import Captured, acts_alike, try_step
from fairvar.engine.evaluate import Seen
from fairvar.engine.kernels import Kernel, Splits
from fairvar.engine.recorder import Checkpoint, Evaluation, Recorder
from fairvar.engine.state import GOING, Outcome, State, settle, stack_states

Progress = Callable[[int, int], object]  # (rounds done, rounds in all), perhaps → STOP
STOP = object()
Keep = Callable[[int, Callable[[], list[Checkpoint]]], None]  # (rounds done, make checkpoints)


def train_rounds(
    parts: Sequence[Runs],
    rounds: int,
    every: int,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> None:
    """Train all parts, round by round, and evaluate after every `every` rounds and the last.

    After every round `keep` may request checkpoints, in the order of the parts and their runs.
    `progress` may return STOP to make this round the last one.
    """
    for t in range(max(part.first_round for part in parts), rounds):
        due = (t + 1) % every == 0 or t + 1 == rounds
        for part in parts:
            part.step(due)
        alone = len(parts) == 1 and parts[0].alone
        if (alone or due) and not any(part.any_going for part in parts):
            return  # all runs have diverged
        if keep is not None:
            keep(t + 1, lambda: [made for part in parts for made in part.checkpoints()])
        if progress is not None and progress(t + 1, rounds) is STOP:
            return


class Runs:
    """The runs of one kernel: their state, recorder and captured round."""

    def __init__(
        self,
        kernel: Kernel,
        starts: Sequence[Checkpoint],
        splits: Splits,
        local: bool,
        every_round: bool = True,
        all_answer: bool = True,
    ) -> None:
        """`starts`: initial states or checkpoints; `local`: evaluate local models too;
        `every_round`: record all rounds, not only evaluated ones; `all_answer`: every client with
        samples has scores (a remote client may not answer)."""
        going = [start.state.round for start in starts if start.diverged_at == GOING]
        self.first_round = max(going, default=max(start.state.round for start in starts))
        self.kernel, self.splits, self.local = kernel, splits, local
        self.every_round, self.all_answer = every_round, all_answer
        self.state = replace(stack_states([s.state for s in starts]), round=self.first_round)
        diverged = [start.diverged_at for start in starts]
        self.diverged_at = torch.tensor(diverged, device=self.state.mean_loss.device)
        before = [start.tables or {} for start in starts]
        self.recorder = Recorder(kernel.run, kernel.methods, before, self.first_round, every_round)
        self.captured: Captured | None = None

    @property
    def alone(self) -> bool:
        return len(self.diverged_at) == 1

    @property
    def any_going(self) -> bool:
        return GOING in self.diverged_at.tolist()

    def step(self, due: bool) -> None:
        """The next round, evaluated if it is due."""
        t = self.state.round
        outcome, seen = self._round(t, self.splits if due and self.local else None)
        if self.every_round or due:
            self.recorder.write(t, outcome)
        if due and self.any_going:
            self._evaluate(outcome, seen)

    def _round(self, t: int, splits: Splits | None) -> tuple[Outcome, Seen | None]:
        """Compute round t and update `state` and `diverged_at`."""
        if self._repeats(t, splits):
            assert self.captured is not None
            found = try_step(self.captured, self.state, self.diverged_at, splits)
            if found is not None:
                made, seen = found
                self.state, self.diverged_at = made.state, made.diverged_at
                return made.outcome, seen
            self.captured = None
        outcome, seen = self.kernel.round(self.state, t, splits)
        optimiser = self.kernel.run.optimiser
        after = settle(self.state, self.diverged_at, outcome, t + 1, optimiser)
        self.state, self.diverged_at = after
        return outcome, seen

    def _repeats(self, t: int, splits: Splits | None) -> bool:
        """Whether round t is computed by repeating a recorded one."""
        if self.captured is None or not (splits is None or self.captured.kernel.shows):
            return False
        return all(acts_alike(method, t) for method in self.kernel.methods)

    def _evaluate(self, outcome: Outcome, seen: Seen | None) -> None:
        done = self.state.round
        scores = self.kernel.scores(self.state, self.splits)
        evaluation = Evaluation.build(scores, seen, outcome.loss, self.kernel.run.clients)
        bad = ~evaluation.is_finite(self.all_answer) & (self.diverged_at == GOING)
        self.diverged_at.copy_(torch.where(bad, done, self.diverged_at))
        self.kernel.methods[0].check_memory(self.state.memory)
        self.recorder.write_evaluation(done, evaluation)

    def checkpoints(self) -> list[Checkpoint]:
        """Of each run: its state, as of a single run, and its tables."""
        diverged = self.diverged_at.tolist()
        done = [self.state.round if d == GOING else d for d in diverged]
        states = [self._state_of(r, rounds) for r, rounds in enumerate(done)]
        tables = self.recorder.tables(diverged, done)
        return [Checkpoint(*made) for made in zip(states, tables, strict=True)]

    def _state_of(self, r: int, rounds: int) -> State:
        return replace(self.state.map(lambda leaf: leaf[r].clone()), round=rounds)
