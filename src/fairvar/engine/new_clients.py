"""Evaluation on clients that join after training: of the global model, and of the models after some
local steps from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from fairvar.common.validation import as_python
from fairvar.data.federation import Federation
from fairvar.engine.evaluate import Scores
from fairvar.engine.history import Frame, History
from fairvar.engine.losses import LossFunction
from fairvar.engine.run import arithmetic
from fairvar.engine.settings import TrainSettings
from fairvar.engine.state import State, check_fits, first_run, stack_states
from fairvar.engine.train import Prepared, prepare
from fairvar.errors import BadInput, shown
from fairvar.methods import FedAvg
from fairvar.metrics import Fairness, fairness
from fairvar.scores import ACCURACY, LOSS, METRICS, Metric, metric_of

Place = tuple[str, int]  # (split, local steps)


@dataclass(frozen=True, eq=False, repr=False)
class NewClients:
    """Scores of every new client, by split and number of local steps; 0 is the global model."""

    method: str  # that made the global model
    steps: tuple[int, ...]
    accuracy: Mapping[Place, Float64[Tensor, " n"]]  # NaN where there are no labels
    loss: Mapping[Place, Float64[Tensor, " n"]]
    score: Mapping[Place, Float64[Tensor, " n"]]  # by the metric
    samples: Mapping[str, Int64[Tensor, " n"]]  # by split; of sequences, positions
    metric: Metric = ACCURACY
    client_names: tuple[str, ...] = ()

    def fairness(self, steps: int = 0, split: str = "test") -> Fairness:
        """The fairness of the new clients' scores after so many local steps."""
        if (split, steps) not in self.score:
            known = ", ".join(f"{k} on {part}" for part, k in self.score)
            raise BadInput(
                f"no scores of {shown(steps)} steps on {shown(split)}: there are {known}"
            )
        return fairness(self.score[split, steps], self.samples[split], metric=self.metric)

    def to_frame(self) -> Frame:
        """One row per (client, split, steps); `pandas.DataFrame(found.to_frame())` takes it."""
        n, places = len(next(iter(self.loss.values()))), list(self.loss)
        names = self.client_names or tuple(map(str, range(n)))
        scores = {self.metric.name: self.score, "accuracy": self.accuracy, "loss": self.loss}
        return Frame(
            client=np.tile(names, len(places)),
            split=np.repeat([split for split, _ in places], n),
            steps=np.repeat([steps for _, steps in places], n),
            **{name: torch.cat([by[place] for place in places]).numpy()
               for name, by in scores.items()},
        )  # fmt: skip

    def __repr__(self) -> str:
        """A table over the new clients, one line per split and number of steps."""
        by = "" if self.metric in (ACCURACY, LOSS) else f", by {self.metric.title}"
        lines = [f"{self.method}, {len(next(iter(self.loss.values())))} new clients{by}",
                 "split  steps    loss    mean   worst  variance over clients"]  # fmt: skip
        for (split, steps), loss in self.loss.items():
            line = f"{split:5} {steps:6} {float(loss.nanmean()):7.4f}"
            if not bool(self.score[split, steps].isnan().all()):
                found = self.fairness(steps, split)
                worst = found.smallest if self.metric.higher_is_better else found.largest
                line += f" {found.mean:7.4f} {worst:7.4f}"
                line += f"  {found.variance_over_clients:.5f}"
            lines.append(line)
        return "\n".join(lines)


@torch.enable_grad()
def new_clients(
    history: History,
    model: nn.Module | str,
    federation: Federation,
    steps: int | Sequence[int] = (0, 1, 10),
    lr: float = 0.1,
    *,
    batch_size: int | None = None,
    loss: str | LossFunction = "cross_entropy",
    seed: int = 0,
    device: str | torch.device = "cpu",
    engine: str = "auto",
    evaluate_splits: tuple[str, ...] = ("test",),
    metric: str | Metric | Callable[[Any, Any], Any] | None = None,
) -> NewClients:
    """How well the model of `history` serves the clients of `federation`, which took no part in its
    training (`Federation.hold_out` sets some aside).

    model: the module or name that was trained. steps: how many steps of plain gradient descent each
    client takes from the global model on its own training data; 0 is the global model itself. The
    steps are those of a round of FedAvg with `local_steps`, in the engine's own code. metric: by
    which the clients are scored, as in `fairvar.train`; by default that of `history`.
    """
    counts = _checked(history, federation, steps)
    asked = (evaluate_splits,) if isinstance(evaluate_splits, str) else evaluate_splits
    splits = tuple(split for split in asked if split in federation.splits)
    if not splits:
        raise BadInput(f"the new clients have no {' or '.join(asked)} data to be "
                       "measured on; give them some where the federation is made")  # fmt: skip
    first = next(iter(history.model.values()))
    scored_by = history.metric if metric is None else metric_of(metric)
    if scored_by.function is None and scored_by != METRICS.get(scored_by.name):
        raise BadInput(f"the function of the metric {scored_by.name} is not stored with a history; "
                       "give metric=")  # fmt: skip
    found: dict[Place, Scores] = {}
    for k in counts:
        settings = TrainSettings(
            rounds=1,
            lr=lr,
            batch_size=batch_size,
            local_steps=max(k, 1),
            seed=seed,
            dtype=str(first.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            device=str(device),
            engine=engine,  # type: ignore[arg-type]  # checked there
        )
        prepared = prepare(model, federation, FedAvg(), loss, settings, metric=scored_by)
        found |= {(s, k): scores for s, scores in _scores(prepared, history, splits, k).items()}
    places = [(split, k) for split in splits for k in counts]
    return NewClients(
        method=history.method.label,
        steps=tuple(counts),
        accuracy={place: found[place].accuracy for place in places},
        loss={place: found[place].loss for place in places},
        score={place: found[place].score for place in places},
        samples={split: federation.splits[split].answers for split in splits},
        metric=scored_by,
        client_names=federation.client_names,
    )


def _checked(history: object, federation: object, steps: int | Sequence[int]) -> list[int]:
    """The numbers of steps, each once and rising."""
    if not isinstance(history, History) or not isinstance(federation, Federation):
        raise BadInput("new_clients(history, model, federation): give what `train` returned, its "
                       "model, and a Federation of the new clients")  # fmt: skip
    if history.divergence is not None:
        raise BadInput(f"new_clients: {history.divergence}")
    given: Any = as_python(steps)
    counts = list(given) if isinstance(given, list | tuple | range) else [given]
    if not counts or any(not isinstance(k, int) or isinstance(k, bool) or k < 0 for k in counts):
        raise BadInput(f"steps = {shown(steps)}: give whole numbers, at least 0")
    return sorted(set(counts))


def _scores(
    prepared: Prepared, history: History, splits: tuple[str, ...], steps: int
) -> dict[str, Scores]:
    """Of the clients' models after `steps` local steps: the local models of one round of FedAvg."""
    run, kernel, fresh = prepared.run, prepared.kernel, prepared.start()
    trained = replace(fresh, params=history.state.params, buffers=history.state.buffers)
    state: State = stack_states([check_fits(trained, fresh, 1).to(run.device)])
    with arithmetic("full", run.device, tries=False):
        if steps == 0:
            shared = kernel.scores(state, splits)
            found = {split: shared[split, "global"] for split in splits}
        else:
            _, seen = kernel.round(state, 0, splits)
            assert seen is not None
            found = seen.local
    return {split: Scores(*(first_run(s).cpu() for s in found[split])) for split in splits}
