"""Callbacks: user code that is called after every round, and may stop the run.

    class Print(fv.Callback):
        def on_evaluate(self, run: fv.Training) -> None:
            print(run.done, run.fairness("valid").worst_10_percent)

    fv.train(model, federation, method, callbacks=[Print(), fv.EarlyStopping()])

Callbacks read copies, so a run computes the same bits with and without them. The rounds of a
stopped run are the first rounds of the complete one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jaxtyping import Float64
from torch import Tensor

from fairvar.common.files import given_path
from fairvar.common.process import progress as progress_bar
from fairvar.common.validation import as_python
from fairvar.engine.history import MODELS, History
from fairvar.engine.kernels.compiled import with_compiling
from fairvar.engine.state import State
from fairvar.engine.trainer import STOP, Progress, Runs
from fairvar.errors import BadInput, shown, unknown
from fairvar.methods.base import Method
from fairvar.metrics import Fairness
from fairvar.scores import Metric

LOSS = "loss"
# Scores of which a smaller value is better.
LESS = (LOSS, "variance_over_clients", "corrected_variance", "sd_over_clients",
        "coefficient_of_variation", "range_over_clients", "gini", "kl_to_uniform")  # fmt: skip
PAIRS = ("variance_interval", "corrected_variance_interval")  # two numbers, of which none is best
EVEN = ("jain", "normalised_entropy", "cosine_to_ones")  # higher is better for every metric
WRITTEN = ("mean", "variance_over_clients", "worst_10_percent")  # by TensorBoard


class Training:
    """A run in progress: what callbacks can read, and `stop`."""

    def __init__(self, runs: Runs, rounds: int, history: Callable[[], History]) -> None:
        self._runs, self._make = runs, history
        self.rounds = rounds  # in all, unless it is stopped
        self.stopped: str | None = None  # the reason that was given to `stop`
        self._known: tuple[int, History] | None = None

    @property
    def method(self) -> Method:
        return self._runs.kernel.methods[0]

    @property
    def metric(self) -> Metric:
        """The metric of the clients' scores."""
        return self.history().metric

    @property
    def done(self) -> int:
        """The number of rounds done, including those before a continuation."""
        return self._runs.state.round

    @property
    def evaluated(self) -> bool:
        """Whether all clients were evaluated after the last round."""
        found = self._runs.recorder.evaluations
        return bool(found) and found[-1][0] == self.done

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that are evaluated."""
        return tuple(self._runs.splits)

    @property
    def loss(self) -> Float64[Tensor, " m"]:
        """f_i(x^t) of the last round's participants on training data."""
        if not self._runs.recorder.rounds:
            raise BadInput("no round is done yet, so there is no loss; use it in on_round")
        return self._runs.recorder.rounds[-1][1][0].detach().cpu().clone()

    @property
    def state(self) -> State:
        """A copy, from which `train` can continue."""
        return self._runs.checkpoints()[0].state

    def history(self) -> History:
        """The history so far. Its cost grows with the number of rounds."""
        if self._known is None or self._known[0] != self.done:
            self._known = self.done, self._make()
        return self._known[1]

    def fairness(self, split: str = "valid", model: str | None = None) -> Fairness:
        """The fairness over clients at the last evaluation, without bootstrap intervals; by default
        of the method's reported model."""
        return self.history().fairness(split, model, resamples=0)

    def mean_loss(self, split: str = "valid", model: str | None = None) -> float:
        """The mean over clients of the loss at the last evaluation."""
        history = self.history()
        table = history.evaluated_loss[split, model or self.method.reported_model]
        return float(table[-1].nanmean()) if len(table) else math.nan

    def __repr__(self) -> str:
        return f"<Training: {self.method.label}, {self.done} of {self.rounds} rounds>"

    def stop(self, reason: str = "by a callback") -> None:
        """End the run after this round; `history.stopped` will hold the first reason given."""
        self.stopped = self.stopped or str(reason) or "by a callback"

    @contextmanager
    def watched(self, callbacks: Sequence[Callback]) -> Iterator[Progress | None]:
        """The function that the trainer calls after every round; None without callbacks."""

        def after_round(done: int, rounds: int) -> object:
            for callback in callbacks:
                callback.on_round(self)
                if self.evaluated:
                    callback.on_evaluate(self)
            return None if self.stopped is None else STOP

        with ExitStack() as ending:
            for callback in callbacks:
                callback.on_start(self)
                ending.callback(callback.on_end, self)
            yield after_round if callbacks else None
        if self.done == self.rounds:
            self.stopped = None  # all rounds are done


class Callback:
    """Base of all callbacks; override what you need."""

    def on_start(self, run: Training) -> None:
        """Before the first round."""

    def on_round(self, run: Training) -> None:
        """After every round."""

    def on_evaluate(self, run: Training) -> None:
        """After every round in which all clients were evaluated, after `on_round`."""

    def on_end(self, run: Training) -> None:
        """After the last round, or after an error."""


def check_callbacks(given: object) -> list[Callback]:
    if isinstance(given, Callback):
        return [given]
    if not isinstance(given, list | tuple) or not all(isinstance(c, Callback) for c in given):
        raise BadInput(f"callbacks = {shown(given)}: give a list of fairvar.Callback objects")
    return list(given)


class ProgressBar(Callback):
    """A bar on stderr in a terminal, otherwise a line every ten seconds: `progress=True`."""

    def on_start(self, run: Training) -> None:
        self._open = ExitStack()
        bar = self._open.enter_context(progress_bar(run.method.label))
        shows = with_compiling(bar, run.done, run.rounds)
        self._report = self._open.enter_context(shows)

    def on_round(self, run: Training) -> None:
        self._report(run.done, run.rounds, "rounds")

    def on_end(self, run: Training) -> None:
        self._open.close()


class OnProgress(Callback):
    """Calls a function with (rounds done, rounds in all)."""

    def __init__(self, function: Callable[[int, int], object]) -> None:
        self.function = function

    def on_round(self, run: Training) -> None:
        self.function(run.done, run.rounds)


class EarlyStopping(Callback):
    """Stop when a score has not become better in `patience` evaluations.

    score: a number of `Fairness`, such as "mean", "worst_10_percent" or "variance_over_clients";
    "loss", the mean loss over clients; or a function of the `Training`.
    split, model: where the score is measured; by default of the method's reported model.
    min_delta: the smallest improvement that counts, in the units of the score.
    higher_is_better: by default known from the score's name; True for a function.

    Afterwards `best`, `best_round` and `best_state` (to continue from, or to save) are those of the
    best evaluation; nan is never the best.
    """

    def __init__(
        self,
        score: str | Callable[[Training], float] = "mean",
        split: str = "valid",
        model: str | None = None,
        *,
        patience: int = 5,
        min_delta: float = 0.0,
        higher_is_better: bool | None = None,
    ) -> None:
        names = [name for name in (*Fairness.__dataclass_fields__, LOSS) if name not in PAIRS]
        if not callable(score) and score not in names:
            raise unknown("score", score, names)
        patience, min_delta = as_python(patience), as_python(min_delta)
        if model not in (None, *MODELS):
            raise unknown("model", model, MODELS)
        if not isinstance(patience, int) or patience < 1:
            raise BadInput(f"patience = {shown(patience)}: give a number of evaluations, from 1 on")
        if not isinstance(min_delta, int | float) or not min_delta >= 0:
            raise BadInput(f"min_delta = {shown(min_delta)}: give a number, at least 0")
        if higher_is_better not in (None, True, False):
            raise BadInput(f"higher_is_better = {shown(higher_is_better)}: give True or False")
        self.score, self.split, self.model = score, split, model
        self.patience, self.min_delta = patience, min_delta
        self.higher_is_better = higher_is_better
        self._reset()

    def _reset(self) -> None:
        self.best, self.best_round, self.waited = math.nan, 0, 0
        self.best_state: State | None = None

    def __repr__(self) -> str:
        return f"<EarlyStopping: best {self.name} {self.best:.6g} after round {self.best_round}>"

    @property
    def name(self) -> str:
        return self.score if isinstance(self.score, str) else getattr(self.score, "__name__", "it")

    def on_start(self, run: Training) -> None:
        if not callable(self.score) and self.split not in run.splits:
            raise BadInput(
                f"EarlyStopping needs the split {shown(self.split)}, but evaluated are "
                f"{', '.join(run.splits) or 'none'}: see evaluate_splits, or give another split"
            )
        self._reset()

    def on_evaluate(self, run: Training) -> None:
        value = self._value(run)
        gain = value - self.best if self._higher(run) else self.best - value
        first = math.isnan(self.best) and not math.isnan(value)  # nan is never better
        if first or gain > self.min_delta:
            self.best, self.best_round, self.waited = value, run.done, 0
            self.best_state = run.state
            return
        self.waited += 1
        if self.waited >= self.patience:
            what = self.name if callable(self.score) else f"{self.name} ({self.split})"
            since = f"become better than {self.best:.6g} since round {self.best_round}"
            run.stop(f"{what} has not {since if self.best_round else 'been a number'}")

    def _higher(self, run: Training) -> bool:
        if self.higher_is_better is not None or callable(self.score):
            return self.higher_is_better is not False
        # For measures of evenness the metric does not matter; for means and tails it does.
        return self.score not in LESS and (self.score in EVEN or run.metric.higher_is_better)

    def _value(self, run: Training) -> float:
        if callable(self.score):
            value = self.score(run)
            try:
                return float(value)
            except (TypeError, ValueError, RuntimeError):
                raise BadInput(f"EarlyStopping: {self.name} must return a number, not "
                               f"{shown(value)}") from None  # fmt: skip
        if self.score == LOSS:
            return run.mean_loss(self.split, self.model)
        value = float(run.fairness(self.split, self.model)[self.score])
        if math.isnan(value):
            raise BadInput(f"EarlyStopping: {self.score} of the {run.metric.title} is not defined "
                           f"on {self.split}; watch another score")  # fmt: skip
        return value


class TensorBoard(Callback):
    """Writes curves for TensorBoard (`pip install "fairvar[tensorboard]"`, then
    `tensorboard --logdir FOLDER`): at evaluations, the mean training loss and for each split and
    model the mean, the variance and the worst tenth over clients, and the mean loss."""

    def __init__(self, folder: str | Path = "tensorboard") -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            way = 'pip install "fairvar[tensorboard]"'
            raise BadInput(f"TensorBoard needs the package tensorboard: {way}") from None
        self.folder, self._new = given_path(folder), SummaryWriter
        if self.folder.is_file():
            raise BadInput(f"{self.folder} is a file; give TensorBoard a folder")
        self._writer: Any = None

    def on_start(self, run: Training) -> None:
        self._writer = self._new(str(self.folder))

    def on_evaluate(self, run: Training) -> None:
        history = run.history()
        self._write(f"train/{LOSS}", float(run.loss.nanmean()), run.done)
        for split, model in history.score:
            scores = run.fairness(split, model)
            for name in WRITTEN:
                self._write(f"{split}/{model}/{name}", scores[name], run.done)
        for split, model in history.evaluated_loss:
            self._write(f"{split}/{model}/{LOSS}", run.mean_loss(split, model), run.done)

    def _write(self, name: str, value: float, done: int) -> None:
        self._writer.add_scalar(name, value, done)

    def on_end(self, run: Training) -> None:
        self._writer.close()
