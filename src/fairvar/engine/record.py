"""What is observed in a run: every round (`Book`) and at evaluated rounds (`Observation`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairvar.engine.evaluate import Scores, evaluate_own, evaluate_shared
from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State
from fairvar.engine.vmapped import Trained
from fairvar.history import History, Key
from fairvar.tree import add, size, squared_norm, tree_map, weighted_sum


class Evaluation(NamedTuple):
    scores: dict[Key, Scores]
    gradient_variance: Tensor  # ()
    update_norm: Tensor  # (clients,)


class Observation:
    """Sees the clients' own models while a round is computed, chunk by chunk, and scores them."""

    def __init__(self, run: Run, state: State, splits: tuple[str, ...], local: bool) -> None:
        self.run, self.before, self.splits, self.watches_clients = run, state, splits, local
        nothing = torch.full_like(run.share, torch.nan)
        self.update_norm = nothing.clone()
        self.squared_gradient_norm = nothing.clone()
        self.mean_gradient: dict[str, Tensor] | None = None
        self.local = {s: Scores(nothing.clone(), nothing.clone()) for s in splits}

    def __call__(self, trained: Trained) -> None:
        ids, run = trained.ids, self.run
        moved = tree_map(lambda x, xi: xi - x, self.before.x, trained.params)
        self.update_norm[ids] = squared_norm(moved, batched=True).double().sqrt()
        self.squared_gradient_norm[ids] = squared_norm(trained.gradient, batched=True).double()
        part = weighted_sum(run.share[ids], trained.gradient)
        self.mean_gradient = part if self.mean_gradient is None else add(self.mean_gradient, part)
        for split, table in self.local.items():
            data = run.federation.splits[split]
            scores = evaluate_own(run.task, trained.params, trained.buffers, data, ids)
            table.loss[ids], table.accuracy[ids] = scores

    def finish(self, state: State) -> Evaluation:
        """The scores of the new global model beside those of the clients' own models."""
        run, scores = self.run, dict[Key, Scores]()
        for split in self.splits:
            data = run.federation.splits[split]
            scores[split, "global"] = evaluate_shared(
                run.task, state.params, state.buffers, data, run.piece
            )
            if self.watches_clients:
                scores[split, "local"] = self.local[split]
        variance = torch.full((), torch.nan, dtype=torch.float64, device=run.device)
        if self.mean_gradient is not None:
            mean = squared_norm(self.mean_gradient).double()
            variance = run.share @ self.squared_gradient_norm - mean
        return Evaluation(scores, variance, self.update_norm)


class Book:
    """Keeps everything on the run's device until the run ends."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.diverged_at: int | None = None
        self.exchanges = self.bytes_down = self.bytes_up = 0
        self.outcomes: list[tuple[Tensor, Tensor, Tensor]] = []  # loss, weights, ascended
        self.evaluations: list[tuple[int, Evaluation]] = []

    def write(self, outcome: Outcome, t: int) -> None:
        self.outcomes.append((outcome.loss, outcome.weights, outcome.ascended))
        task = self.run.task
        traffic = self.run.method.at_round(t).traffic(size(task.params), size(task.buffers))
        width = torch.finfo(self.run.dtype).bits // 8
        self.exchanges += traffic.exchanges
        self.bytes_down += traffic.floats_down * width
        self.bytes_up += traffic.floats_up * width

    def write_evaluation(self, rounds_done: int, evaluation: Evaluation) -> None:
        self.evaluations.append((rounds_done, evaluation))

    def close(self, state: State, birth: Mapping[str, Any]) -> History:
        n = self.run.clients
        loss, weights, ascended = (
            zip(*self.outcomes, strict=True) if self.outcomes else ((), (), ())
        )
        seen = [e for _, e in self.evaluations]
        keys = list(seen[0].scores) if seen else []
        classifies = self.run.task.classifies
        return History(
            method=self.run.method,
            state=state,
            loss=_table(loss, n),
            weights=_table(weights, n),
            ascended=_table(ascended),
            evaluated=torch.tensor([t for t, _ in self.evaluations], dtype=torch.int64),
            accuracy={
                k: _table([e.scores[k].accuracy for e in seen], n) for k in keys if classifies
            },
            evaluated_loss={k: _table([e.scores[k].loss for e in seen], n) for k in keys},
            gradient_variance=_table([e.gradient_variance for e in seen]),
            update_norm=_table([e.update_norm for e in seen], n),
            samples={name: s.counts for name, s in self.run.federation.splits.items()},
            exchanges=self.exchanges,
            bytes_down=self.bytes_down,
            bytes_up=self.bytes_up,
            diverged_at=self.diverged_at,
            birth=birth,
        )


def _table(rows: list[Tensor] | tuple[Tensor, ...], *width: int) -> Tensor:
    if not rows:
        return torch.zeros(0, *width, dtype=torch.float64)
    return torch.stack(list(rows)).cpu()
