"""The kernel of one run of any model: a reference loop, or one of three vectorised forms.

- reference: client after client, as in the papers' boxes; the oracle of the tests
- pooled: one step without client gradients; one weighted backward pass over all samples
- blocked: one step with client gradients or curvature; parameters are shared
- vmapped: every client has its own parameters; several local steps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairvar.common.tree import squared_norm, tree_map
from fairvar.engine.cuda_graphs import live_run
from fairvar.engine.evaluate import Scores, Seen, evaluate_local, evaluate_shared
from fairvar.engine.history import Key
from fairvar.engine.kernels import Splits
from fairvar.engine.kernels.one_step import blocked_round, pooled_round
from fairvar.engine.kernels.reference import reference_round
from fairvar.engine.kernels.vmapped import TileSums, Trained, client_norms, vmapped_round
from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State, first_run, one_run
from fairvar.methods.base import Method


@dataclass(frozen=True)
class Network:
    """A single run: the axis of runs has length one."""

    run: Run
    form: str  # "reference", "pooled", "blocked" or "vmapped"

    @property
    def methods(self) -> Sequence[Method]:
        return [self.run.method]

    def round(self, state: State, t: int, splits: Splits | None) -> tuple[Outcome, Seen | None]:
        run, state = self.run, state.map(first_run)
        seen = None if splits is None else LocalModels(run, state, splits)
        if self.form == "reference":
            outcome = reference_round(run, state, t, seen)
        elif self.form == "vmapped":
            outcome = vmapped_round(run, state, t, seen)
        else:
            if seen is not None:
                # These forms do not compute local models. They are computed in addition, so that
                # evaluation does not change the training.
                vmapped_round(run, state, t, seen)
            outcome = (pooled_round if self.form == "pooled" else blocked_round)(run, state, t)
        return outcome.map(one_run), None if seen is None else seen.result()

    def scores(self, state: State, splits: Splits) -> dict[Key, Scores]:
        state, found = state.map(first_run), {}
        for name in splits:
            split = self.run.federation.splits[name]
            scores = evaluate_shared(
                self.run.task, state.params, state.buffers, split, self.run.piece
            )
            found[name, "global"] = Scores(*map(one_run, scores))
        return found

    # -- recorded rounds ---------------------------------------------------------------------------
    @property
    def shows(self) -> bool:
        return self.form != "vmapped" or len(self.run.chunks()) == 1

    def numbers(self) -> dict[str, list[float]]:
        return {"lr": [float(self.run.lr)], **{k: [v] for k, v in self.run.method.numbers.items()}}

    def live(self, names: Tensor, numbers: dict[str, Tensor]) -> Network:
        return replace(self, run=live_run(self.run, names, {k: v[0] for k, v in numbers.items()}))

    def compute(self, state: State, t: int) -> tuple[Outcome, list[Trained]]:
        trained: list[Trained] = []
        if self.form == "vmapped" and self.shows:
            outcome = vmapped_round(self.run, state.map(first_run), t, trained.append)
            return outcome.map(one_run), trained
        return self.round(state, t, None)[0], trained

    def see(self, before: State, t: int, work: list[Trained], splits: Splits) -> Seen:
        before = before.map(first_run)
        seen = LocalModels(self.run, before, splits)
        for trained in work:
            seen(trained)
        if not work:
            vmapped_round(self.run, before, t, seen)
        return seen.result()


class LocalModels:
    """Observer that scores the clients' local models chunk by chunk."""

    def __init__(self, run: Run, before: State, splits: Splits) -> None:
        self.run, self.before = run, before
        nothing = torch.full_like(run.share, torch.nan)
        self.update_norm, self.squared_gradient_norm = nothing.clone(), nothing.clone()
        self.sums = TileSums()
        self.local = {s: Scores.nothing(nothing) for s in splits}

    def __call__(self, trained: Trained) -> None:
        ids, run = trained.ids, self.run
        moved = tree_map(lambda x, xi: xi - x, self.before.x, trained.params)
        self.update_norm[ids] = client_norms(moved).sqrt()
        self.squared_gradient_norm[ids] = client_norms(trained.gradient)
        self.sums.add("gradient", run.share[ids], trained.gradient)
        for split, table in self.local.items():
            data = run.federation.splits[split]
            scores = evaluate_local(run.task.apart, trained.params, trained.buffers, data, ids)
            table.loss[ids], table.accuracy[ids], table.score[ids] = scores

    def result(self) -> Seen:
        # Over the participants, whose shares may sum to less than one.
        share = torch.where(self.squared_gradient_norm.isnan(), 0.0, self.run.share)
        mean = squared_norm(self.sums.trees["gradient"]).double() / share.sum() ** 2
        squares = self.squared_gradient_norm.nan_to_num(0.0, posinf=torch.inf)
        variance = share @ squares / share.sum() - mean
        local = {split: Scores(*map(one_run, scores)) for split, scores in self.local.items()}
        return Seen(self.update_norm[None], variance[None], local)
