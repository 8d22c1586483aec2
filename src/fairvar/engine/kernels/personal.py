"""The kernel for methods in which every client also trains a personal model v_i.

    shared     x^{t+1} by the fastest kernel for the method's shared part
    personal   v_i ← v_i − η_v (∇f_i(v_i) + λ (v_i − x^t)), step by step on the same batches

Personal models depend on the shared model only through x^t, which is fixed during the round. So the
shared model is trained by its own kernel, with the same bits as without personal models, and the
personal models as local models are.

Buffers (batch-norm statistics) belong to v_i: its training passes update them, and they are not
averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fairvar.common.tree import Tree, concatenate, stack, tree_map
from fairvar.engine.cuda_graphs import live_run
from fairvar.engine.evaluate import Scores, Seen, evaluate_local
from fairvar.engine.history import Key
from fairvar.engine.kernels import Splits
from fairvar.engine.kernels.linear import Linear
from fairvar.engine.kernels.network import Network
from fairvar.engine.kernels.reference import load, train_personal
from fairvar.engine.kernels.vmapped import Sent, train_in_turn, train_stacked
from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State, first_run, one_run
from fairvar.engine.task import split_model
from fairvar.methods.base import Method


@dataclass(frozen=True)
class WithPersonal:
    """A single run of a method with personal models: the axis of runs has length one."""

    run: Run
    shared: Network | Linear  # of the method's shared part

    @property
    def methods(self) -> Sequence[Method]:
        return [self.run.method]

    def round(self, state: State, t: int, splits: Splits | None) -> tuple[Outcome, Seen | None]:
        outcome, seen = self.shared.round(state, t, splits)
        return self._train(outcome, state, t), seen

    def scores(self, state: State, splits: Splits) -> dict[Key, Scores]:
        found, personal = self.shared.scores(state, splits), state.map(first_run).personal
        assert personal is not None
        for split in splits:
            found[split, "personal"] = Scores(*map(one_run, _scores(self.run, personal, split)))
        return found

    def _train(self, outcome: Outcome, state: State, t: int) -> Outcome:
        reference = isinstance(self.shared, Network) and self.shared.form == "reference"
        personal_round = _one_by_one if reference else _vectorised
        found = personal_round(self.run, state.map(first_run), t)
        return replace(outcome, personal=tree_map(one_run, found))

    # -- recorded rounds ---------------------------------------------------------------------------
    @property
    def shows(self) -> bool:
        return self.shared.shows

    def numbers(self) -> dict[str, list[float]]:
        return {"lr": [float(self.run.lr)], **{k: [v] for k, v in self.run.method.numbers.items()}}

    def live(self, names: Tensor, numbers: dict[str, Tensor]) -> WithPersonal:
        shared = self.shared.live(names, {k: numbers[k] for k in self.shared.numbers()})
        run = live_run(self.run, names, {k: v[0] for k, v in numbers.items()})
        return WithPersonal(run, shared)

    def compute(self, state: State, t: int) -> tuple[Outcome, Any]:
        outcome, work = self.shared.compute(state, t)
        return self._train(outcome, state, t), work

    def see(self, before: State, t: int, work: Any, splits: Splits) -> Seen:
        return self.shared.see(before, t, work, splits)


def _one_by_one(run: Run, state: State, t: int) -> Tree:
    """The personal models after round t, client after client."""
    before, sent = state.personal, load(run, state.x, state.buffers)
    assert before is not None
    models = [{name: leaf[i] for name, leaf in before.items()} for i in range(run.clients)]
    for i in run.participation.of_round(t).tolist():
        models[i] = train_personal(run, models[i], sent, t, i)
    return stack(models)


def _vectorised(run: Run, state: State, t: int) -> Tree:
    """The same with all clients of a chunk at once, or one after another where that is faster."""
    before = state.personal
    assert before is not None
    run = run.personal.of_round(t)
    batches, parts = run.cohort.round(t), []
    sent = Sent(run.method, state.mean_loss.to(run.dtype), None, None)
    for chunk in run.chunks():
        ids = run.ids[run.cohort.order_on_device[slice(*chunk)]]
        own = split_model(run.task, tree_map(lambda leaf, ids=ids: leaf[ids], before))
        if run.in_turn:
            trained = train_in_turn(run, state, sent, batches, chunk, False, own)
        else:
            trained = train_stacked(run, state, sent, batches, chunk, own)
        parts.append({**trained.params, **trained.buffers})
    after, ids = concatenate(parts), run.ids[run.cohort.order_on_device]
    return tree_map(lambda old, new: old.index_copy(0, ids, new), before, after)


def _scores(run: Run, personal: Tree, split: str) -> Scores:
    """Scores of all personal models on their clients' samples, sampled in the round or not."""
    parts, data = [], run.federation.splits[split]
    for start in range(0, run.clients, run.chunk):
        ids = torch.arange(run.clients, device=run.device)[start : start + run.chunk]
        own = split_model(run.task, tree_map(lambda leaf, ids=ids: leaf[ids], personal))
        parts.append(evaluate_local(run.task.apart, *own, data, ids))
    return Scores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
