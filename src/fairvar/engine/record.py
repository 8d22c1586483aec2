"""What is observed in a run: every round (`Book`) and at evaluated rounds (`Observation`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairvar.engine.evaluate import Scores, evaluate_own, evaluate_shared
from fairvar.engine.history import History, Key, Tables, history_from_tables
from fairvar.engine.linear_eval import Watched
from fairvar.engine.run import Run
from fairvar.engine.settings import EvaluateSettings
from fairvar.engine.state import DoesNotFit, Outcome, State
from fairvar.engine.vmapped import TileSums, Trained, client_norms
from fairvar.tree import is_finite, size, squared_norm, tree_map


class Evaluation(NamedTuple):
    scores: dict[Key, Scores]
    gradient_variance: Tensor  # ()
    update_norm: Tensor  # (clients,)

    def is_finite(self) -> bool:
        """False if the model is so far off that its losses overflow (clients without samples, and
        what was not watched, are NaN and do not count)."""
        values = [s.loss for s in self.scores.values()] + [self.update_norm]
        return not any(bool(torch.isinf(v).any()) for v in values) and self._model_is_finite()

    def _model_is_finite(self) -> bool:
        return not any(
            bool(torch.isnan(s.loss).all()) for (_, m), s in self.scores.items() if m == "global"
        )


class Observation:
    """Sees the clients' own models while a round is computed, chunk by chunk, and scores them."""

    def __init__(self, run: Run, state: State, splits: tuple[str, ...], local: bool) -> None:
        self.run, self.before, self.splits, self.watches_clients = run, state, splits, local
        nothing = torch.full_like(run.share, torch.nan)
        self.update_norm = nothing.clone()
        self.squared_gradient_norm = nothing.clone()
        self.sums = TileSums()
        self.local = {s: Scores(nothing.clone(), nothing.clone()) for s in splits}
        self.gradient_variance: Tensor | None = None

    def take(self, seen: Watched) -> None:
        """All clients at once, where the path has formed no models: a group of one run."""
        self.update_norm, self.gradient_variance = seen.update_norm[0], seen.gradient_variance[0]
        self.local = {s: Scores(*(table[0] for table in seen.local[s])) for s in self.splits}

    def __call__(self, trained: Trained) -> None:
        ids, run = trained.ids, self.run
        moved = tree_map(lambda x, xi: xi - x, self.before.x, trained.params)
        self.update_norm[ids] = client_norms(moved).sqrt()
        self.squared_gradient_norm[ids] = client_norms(trained.gradient)
        self.sums.add("gradient", run.share[ids], trained.gradient)
        for split, table in self.local.items():
            data = run.federation.splits[split]
            scores = evaluate_own(run.task.apart, trained.params, trained.buffers, data, ids)
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
        variance = self.gradient_variance
        if variance is None:
            variance = torch.full((), torch.nan, dtype=torch.float64, device=run.device)
        if "gradient" in self.sums.trees:
            # Over those that took part: their shares may sum to less than one.
            seen = torch.where(self.squared_gradient_norm.isnan(), 0.0, run.share)
            mean = squared_norm(self.sums.trees["gradient"]).double() / seen.sum() ** 2
            squares = self.squared_gradient_norm.nan_to_num(0.0, posinf=torch.inf)
            variance = seen @ squares / seen.sum() - mean
        return Evaluation(scores, variance, self.update_norm)


class Book:
    """Keeps everything on the run's device until the run ends; `tables` is what is kept of it."""

    def __init__(self, run: Run, tables: Tables | None = None, rounds_done: int = 0) -> None:
        """Continues `tables`, if given, after so many rounds in all."""
        self.run = run
        self.diverged_at: int | None = None
        self.outcomes: list[tuple[Tensor, Tensor, Tensor]] = []  # loss, weights, ascended
        self.evaluations: list[tuple[int, Evaluation]] = []
        self.exchanges = self.bytes_down = self.bytes_up = 0
        if tables is not None:
            self._reopen(tables)
        self.first_round = rounds_done - len(self.outcomes)

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

    def tables(self) -> Tables:
        """All observations as flat tensors: the content of a checkpoint and of a History."""
        n, seen = self.run.clients, [e for _, e in self.evaluations]
        rows = list(zip(*self.outcomes, strict=True)) or [(), (), ()]
        counters = (self.exchanges, self.bytes_down, self.bytes_up)
        found = {
            "loss": _table(rows[0], n),
            "weights": _table(rows[1], n),
            "ascended": _table(rows[2]),
            "evaluated": torch.tensor([t for t, _ in self.evaluations], dtype=torch.int64),
            "gradient_variance": _table([e.gradient_variance for e in seen]),
            "update_norm": _table([e.update_norm for e in seen], n),
            "counters": torch.tensor(counters, dtype=torch.int64),
        }
        for split, model in seen[0].scores if seen else ():
            scores = [e.scores[split, model] for e in seen]
            found[f"accuracy/{split}/{model}"] = _table([s.accuracy for s in scores], n)
            found[f"evaluated_loss/{split}/{model}"] = _table([s.loss for s in scores], n)
        return found

    def _reopen(self, tables: Tables) -> None:
        """Continue where `tables` left off."""
        on = {name: table.to(self.run.device) for name, table in tables.items()}
        self.outcomes = list(zip(on["loss"], on["weights"], on["ascended"], strict=True))
        self.exchanges, self.bytes_down, self.bytes_up = tables["counters"].tolist()
        keys = [(*name.split("/")[1:],) for name in tables if name.startswith("accuracy/")]
        for e, rounds_done in enumerate(tables["evaluated"].tolist()):
            scores = {
                (split, model): Scores(
                    on[f"evaluated_loss/{split}/{model}"][e], on[f"accuracy/{split}/{model}"][e]
                )
                for split, model in keys
            }
            seen = Evaluation(scores, on["gradient_variance"][e], on["update_norm"][e])
            self.evaluations.append((rounds_done, seen))

    def close(self, state: State, birth: Mapping[str, Any]) -> History:
        tables = self.tables()
        rounds, diverged_at = len(tables["loss"]), self.diverged_at
        if diverged_at is None and not is_finite(state.params):
            diverged_at = state.round  # in the last round, where no evaluation has seen it
        return history_from_tables(
            tables,
            method=self.run.method,
            state=state,
            rounds=rounds,
            observed=torch.arange(self.first_round, self.first_round + rounds),
            samples={name: s.counts for name, s in self.run.federation.splits.items()},
            classifies=self.run.task.classifies,
            diverged_at=diverged_at,
            birth=birth,
        )


def check_tables(tables: Tables, clients: int, rounds: int, scored: Sequence[Key]) -> None:
    """Whether the tables of a checkpoint after so many rounds are what a run would have written
    that scores these splits and models."""
    rows, seen = (len(tables[n]) if n in tables and tables[n].ndim else -1
                  for n in ("loss", "evaluated"))  # fmt: skip
    keys = [f"{what}/{split}/{model}" for what in ("accuracy", "evaluated_loss")
            for split, model in scored if seen > 0]  # fmt: skip
    wanted = {
        "loss": (rows, clients),
        "weights": (rows, clients),
        "ascended": (rows,),
        "evaluated": (seen,),
        "gradient_variance": (seen,),
        "update_norm": (seen, clients),
        "counters": (3,),
        **dict.fromkeys(keys, (seen, clients)),
    }
    for name, shape in wanted.items():
        if name not in tables or tuple(tables[name].shape) != shape:
            found = tuple(tables[name].shape) if name in tables else "absent"
            raise DoesNotFit(f"its table {name} is {found}")
    after = tables["evaluated"].tolist()
    if rows > rounds or after != sorted(set(after)) or not all(0 < t <= rounds for t in after):
        raise DoesNotFit(f"its tables tell of other rounds than the {rounds} that it has done")
    unknown = {n for n in tables if n.startswith(("accuracy/", "evaluated_loss/"))} - set(keys)
    if unknown:
        raise DoesNotFit(f"its table {min(unknown)} is not known")


def scored_keys(run: Run, when: EvaluateSettings) -> list[Key]:
    models = ("global", "local") if when.local else ("global",)
    return [(s, m) for s in when.splits if s in run.federation.splits for m in models]


def _table(rows: Sequence[Tensor], *width: int) -> Tensor:
    if not rows:
        return torch.zeros(0, *width, dtype=torch.float64)
    return torch.stack(list(rows)).cpu()
