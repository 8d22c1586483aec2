"""Observations of R runs: per round, at evaluated rounds, and as the tables of a History."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from fairvar.common.tree import is_finite, size
from fairvar.engine.batches import Participation
from fairvar.engine.evaluate import Scores, Seen
from fairvar.engine.history import (
    MODELS,
    NO_REPLY,
    History,
    Key,
    Tables,
    are_ids,
    history_from_tables,
)
from fairvar.engine.run import Run
from fairvar.engine.settings import EvaluateSettings
from fairvar.engine.state import GOING, DoesNotFit, Outcome, State, check_fits
from fairvar.methods.base import Method
from fairvar.scores import ACCURACY, LOSS, Metric

PER_ROUND = ("loss", "weights", "ascended", "participants")
SCORES = ("accuracy/", "evaluated_loss/", "score/")  # then the split and the model


class Checkpoint(NamedTuple):
    """Enough to continue a run; without `tables` its history starts anew."""

    state: State
    tables: Tables | None

    @property
    def diverged_at(self) -> int:
        """The round in which the run diverged, while others of its grid still train; or GOING."""
        return int((self.tables or {}).get("diverged_at", torch.tensor(GOING)))


class Evaluation(NamedTuple):
    """An evaluation of all runs; NaN for clients without samples and for what was not measured."""

    scores: dict[Key, Scores]
    gradient_variance: Float64[Tensor, " runs"]
    update_norm: Float64[Tensor, "runs n"]

    @staticmethod
    def build(scores: Mapping[Key, Scores], seen: Seen | None, loss: Tensor, n: int) -> Evaluation:
        """`scores` of global and personal models of n clients; `loss` gives the number of runs and
        the device."""
        local = {} if seen is None else seen.local
        found = {**scores, **{(split, "local"): table for split, table in local.items()}}
        splits = dict.fromkeys(split for split, _ in scores)
        keys = [(split, model) for split in splits for model in MODELS]
        scores = {key: found[key] for key in keys if key in found}
        if seen is not None:
            return Evaluation(scores, seen.gradient_variance, seen.update_norm)
        nothing = loss.new_full((len(loss), n), torch.nan)
        return Evaluation(scores, nothing[:, 0], nothing)

    def is_finite(self, all_answer: bool) -> Bool[Tensor, " runs"]:
        """False for runs whose losses overflow. If all clients answer, a missing loss of all
        clients is an overflow too."""
        fine = ~torch.isinf(self.update_norm).any(1)
        for (split, model), scores in self.scores.items():
            fine &= ~torch.isinf(scores.loss).any(1)
            if model == "global" and all_answer:
                fine &= ~torch.isnan(scores.loss).all(1)
            if model == "personal" and all_answer:  # a client with samples has a loss
                has_samples = ~torch.isnan(self.scores[split, "global"].loss)
                fine &= ~(torch.isnan(scores.loss) & has_samples).any(1)
        return fine


@dataclass
class Recorder:
    """Keeps observations on the runs' device until tables are requested.

    Of a single run every round is recorded, of the runs of a grid only evaluated rounds, because a
    grid has thousands of runs. If clients are sampled, rows of losses and weights have one column
    per participant (their ids are a third table), so that the cost of a round does not grow with
    the number of clients. A participant that did not answer has the id `NO_REPLY`, loss NaN and
    weight 0.
    """

    run: Run  # of the first; all have its model and its clients
    methods: Sequence[Method]  # of each run
    before: Sequence[Tables]  # of each run, from its checkpoint
    first_round: int
    every_round: bool
    rounds: list[tuple[int, Tensor, Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    evaluations: list[tuple[int, Evaluation]] = field(default_factory=list)

    def write(self, t: int, outcome: Outcome) -> None:
        """Record round t of all runs; `tables` leaves out the rows of diverged runs."""
        loss, weights, ids = outcome.loss, outcome.weights.expand_as(outcome.loss), outcome.answered
        who = self.run.participation
        if ids is not None and len(ids) < who.number:
            place = ids if who.everyone else torch.arange(len(ids), device=ids.device)
            loss = _placed(loss, place, who.number, torch.nan)
            weights = _placed(weights, place, who.number, 0.0)
            ids = _placed(ids, place, who.number, NO_REPLY)
        drawn = None if who.everyone or ids is None else ids.expand(loss.shape)
        self.rounds.append((t, loss, weights, outcome.ascended, drawn))

    def write_evaluation(self, rounds_done: int, evaluation: Evaluation) -> None:
        self.evaluations.append((rounds_done, evaluation))

    def tables(self, diverged_at: Sequence[int], done: Sequence[int]) -> list[Tables]:
        """All observations of each run as flat tensors, for checkpoints and histories. `done`: the
        rounds that each run has done."""
        whole, ends = self._whole(), [_end(t) for t in diverged_at]
        observed = torch.tensor([t for t, *_ in self.rounds], dtype=torch.int64)
        evaluated = torch.tensor([t for t, _ in self.evaluations], dtype=torch.int64)
        found = []
        for r, (end, before) in enumerate(zip(ends, self.before, strict=True)):
            rows, seen = observed < end - (not self.every_round), evaluated < end
            new = {k: v[rows if k in PER_ROUND else seen, r] for k, v in whole.items()}
            new["evaluated"] = evaluated[seen]
            tables = _continued(before, new, self.run.participation)
            tables["counters"] = self._counters(r, done[r])
            tables["diverged_at"] = torch.tensor(diverged_at[r])
            found.append(tables)
        return found

    def _whole(self) -> Tables:
        """Tables over (rounds, runs, clients or participants) or (rounds, runs)."""
        if not self.rounds:
            return {}
        _, *columns = zip(*self.rounds, strict=True)
        found = {
            name: torch.stack(list(column)).cpu()
            for name, column in zip(PER_ROUND, columns, strict=True)
            if column[0] is not None
        }
        seen = [evaluation for _, evaluation in self.evaluations]
        if not seen:
            return found
        found["gradient_variance"] = torch.stack([e.gradient_variance for e in seen]).cpu()
        found["update_norm"] = torch.stack([e.update_norm for e in seen]).cpu()
        for split, model in seen[0].scores:
            scores = [e.scores[split, model] for e in seen]
            found[f"accuracy/{split}/{model}"] = torch.stack([s.accuracy for s in scores]).cpu()
            found[f"evaluated_loss/{split}/{model}"] = torch.stack([s.loss for s in scores]).cpu()
            if self.run.task.metric not in (ACCURACY, LOSS):
                found[f"score/{split}/{model}"] = torch.stack([s.score for s in scores]).cpu()
        return found

    def _counters(self, r: int, done: int) -> Tensor:
        """Exchanges, bytes down and bytes up of one client, over the rounds that were done."""
        before = self.before[r].get("counters", torch.zeros(3, dtype=torch.int64))
        model, buffers = size(self.run.task.params), size(self.run.task.buffers)
        exchanges = down = up = 0
        # A method acts the same in most rounds, and a checkpoint is of thousands of them.
        for method, alike in groupby(map(self.methods[r].at_round, range(self.first_round, done))):
            rounds, traffic = len(list(alike)), method.traffic(model, buffers)
            exchanges += rounds * traffic.exchanges
            down, up = down + rounds * traffic.floats_down, up + rounds * traffic.floats_up
        width = torch.finfo(self.run.dtype).bits // 8
        return before + torch.tensor([exchanges, down * width, up * width])

    def history(
        self,
        made: Checkpoint,
        r: int,
        samples: Mapping[str, Tensor],
        provenance: Mapping[str, Any],
    ) -> History:
        """Of run r, whose last checkpoint is `made`."""
        state, tables, diverged_at = made.state, made.tables or {}, made.diverged_at
        if diverged_at == GOING and not is_finite(state.params):
            diverged_at = state.round  # in a last round that was not evaluated
        rounds, observed = len(tables["loss"]), tables["evaluated"] - 1
        if self.every_round:
            observed = torch.arange(state.round - rounds, state.round)
        else:
            rounds = state.round - (0 if self.before[r] else self.first_round)
        return history_from_tables(
            tables,
            method=self.methods[r],
            state=state,
            rounds=rounds,
            observed=observed,
            samples=samples,
            classifies=self.run.task.classifies,
            metric=self.run.task.metric,
            diverged_at=None if diverged_at == GOING else diverged_at,
            provenance=provenance,
        )


def _end(diverged_at: int) -> float:
    return float("inf") if diverged_at == GOING else diverged_at


def _placed(values: Tensor, place: Tensor, width: int, absent: float) -> Tensor:
    """Values at their places in rows of this width."""
    table = values.new_full((*values.shape[:-1], width), absent)
    return table.index_copy(-1, place, values)


def _continued(before: Tables, new: Tables, who: Participation) -> Tables:
    """The rows of both; tables without rows where there are none."""
    whole = torch.zeros(0, who.clients, dtype=torch.float64)
    drawn = whole[:, : who.number]
    empty: Tables = {
        "loss": drawn,
        "weights": drawn,
        **({} if who.everyone else {"participants": drawn.long()}),
        "ascended": whole[:, 0],
        "evaluated": torch.zeros(0, dtype=torch.int64),
        "gradient_variance": whole[:, 0],
        "update_norm": whole,
    }
    scores = [name for name in {**before, **new} if name.startswith(SCORES)]
    return {
        name: torch.cat([part.get(name, empty.get(name, whole)) for part in (before, new)])
        for name in (*empty, *scores)
    }


def scored_keys(splits: Sequence[str], when: EvaluateSettings, method: Method) -> list[Key]:
    """The (split, model) pairs of an evaluation."""
    asked = {"global": True, "local": when.local, "personal": method.personal is not None}
    return [(split, model) for split in splits for model in MODELS if asked[model]]


def resumed(
    run: Run,
    start: Checkpoint | None,
    fresh: State,
    rounds: int,
    scored: Sequence[Key],
    every_round: bool = True,
) -> Checkpoint:
    """`start` on the run's device, after checking that the run can continue from it; without it the
    initial state `fresh`."""
    if start is None:
        return Checkpoint(fresh, None)
    state = check_fits(start.state, fresh, rounds)
    check_tables(start, run.participation, scored, run.task.metric, every_round)
    return start._replace(state=state.to(run.device))


def check_tables(
    start: Checkpoint,
    who: Participation,
    scored: Sequence[Key],
    metric: Metric,
    every_round: bool = True,
) -> None:
    """Refuse a checkpoint's tables unless they have the shapes of a run that scores these splits
    and models. They are read from files."""
    tables, rounds = start.tables, start.state.round
    if tables is None:
        return
    rows, seen = (len(tables[n]) if n in tables and tables[n].ndim else -1
                  for n in ("loss", "evaluated"))  # fmt: skip
    kinds = SCORES[:2] if metric in (ACCURACY, LOSS) else SCORES
    keys = [f"{what}{split}/{model}" for what in kinds for split, model in scored if seen > 0]
    wanted = {
        "loss": (rows, who.number),
        "weights": (rows, who.number),
        **({} if who.everyone else {"participants": (rows, who.number)}),
        "ascended": (rows,),
        "evaluated": (seen,),
        "gradient_variance": (seen,),
        "update_norm": (seen, who.clients),
        "counters": (3,),
        **dict.fromkeys(keys, (seen, who.clients)),
    }
    for name, shape in wanted.items():
        if name not in tables or tuple(tables[name].shape) != shape:
            found = tuple(tables[name].shape) if name in tables else "absent"
            raise DoesNotFit(f"its table {name} is {found}")
    if not who.everyone and not are_ids(tables["participants"], who.clients):
        raise DoesNotFit("its table participants holds something other than ids of clients")
    after = tables["evaluated"].tolist()
    if rows > rounds or after != sorted(set(after)) or not all(0 < t <= rounds for t in after):
        raise DoesNotFit(f"its tables are of other rounds than the {rounds} that it has done")
    unknown = {n for n in tables if n.startswith(SCORES)} - set(keys)
    if unknown:
        raise DoesNotFit(f"its table {min(unknown)} is not known")
    if not every_round and rows != seen:
        raise DoesNotFit("its tables have rows of rounds that were not evaluated")
