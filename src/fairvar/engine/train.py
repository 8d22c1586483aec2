"""The round loop: one call trains a model with a method on a federation and returns its History."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from fairvar._version import __version__
from fairvar.data.federation import Federation
from fairvar.engine.batches import Participation, Schedule
from fairvar.engine.cuda_graphs import LATER, RECORDINGS, acts_alike
from fairvar.engine.history import History
from fairvar.engine.kernels.linear import Linear, grams_pay
from fairvar.engine.kernels.linear.dual import is_affine
from fairvar.engine.kernels.network import Network
from fairvar.engine.losses import LossFunction
from fairvar.engine.recorder import Checkpoint as Checkpoint
from fairvar.engine.recorder import check_tables, scored_keys
from fairvar.engine.run import (
    Run,
    arithmetic,
    block_width,
    chunk_for_memory,
    fits_blocked,
    graphs_fit,
    peak_megabytes,
    pooled_piece,
    whole_tiles,
)
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.state import State, check_fits, initial_state
from fairvar.engine.task import Task, make_task
from fairvar.engine.trainer import Keep, Runs, train_rounds
from fairvar.engine.trainer import Progress as Progress
from fairvar.errors import LONGEST, BadInput, one_line, shown
from fairvar.methods.base import Method

KeepOne = Callable[[int, Callable[[], Checkpoint]], None]  # (rounds done, make a checkpoint)
DEFAULT = EvaluateSettings()


def train(
    model: nn.Module | str,
    federation: Federation,
    method: Method,
    rounds: int = 100,
    lr: float = 0.1,
    *,
    batch_size: int | None = None,
    local_steps: int = 1,
    local_epochs: int | None = None,
    loss: str | LossFunction = "cross_entropy",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    engine: str = "auto",
    evaluate_every: int = 10,
    evaluate_splits: tuple[str, ...] = ("valid", "test"),
    evaluate_local: bool = True,
    clip_norm: float | None = None,
    participation: float | None = None,
    participants: int | None = None,
    chunk: int | None = None,
    precision: str = "full",
    capture: bool | None = None,
    state: State | None = None,
    progress: bool | Progress = False,
) -> History:
    """Train `model` on `federation` with `method`; by default all clients take part.

    model: a module (copied, never changed) or a name from `fairvar.models.MODELS`.
    rounds: in all; those that `state` has behind it count.
    batch_size: samples per local step; None takes all of a client's samples.
    local_steps, local_epochs: work per client and round; give one of them.
    loss: "cross_entropy", "mse" (½ squared error) or (outputs, targets) -> one loss per sample.
    With labels the model has one output per class, and the largest is its prediction.
    engine: "auto" picks the linear, pooled, blocked or vmapped path; "reference" is a plain loop.
    evaluate_every: evaluate all clients after every so many rounds, and after the last.
    clip_norm: cut each client's direction to this norm (off by default).
    participation, participants: share or number of clients drawn for each round, by default all
    (`engine/batches.py` says what averages then mean); some of them on every path but linear.
    chunk: clients per vectorised call, by default what fits in memory; results do not change.
    precision: "tf32" or "bfloat16" rounds the inputs of products in training to gain speed.
    capture: record a round once and repeat it; by default on CUDA, where launching costs most.
    state: continue from here (`history.state` of an earlier call with the same method).
    progress: True shows a bar on stderr; a function is called with (rounds done, rounds in all).

    A run whose losses stop being finite ends there: with a warning, and `history.diverged_at`.
    """
    if not isinstance(federation, Federation):
        raise BadInput(
            f"federation must be a fairvar Federation, not {type(federation).__name__}; make one "
            "with Federation.from_arrays([(x, y), …]) from one pair per client"
        )
    if not isinstance(method, Method):
        raise BadInput(f"method must be a fairvar Method such as FedAvg(), not {shown(method)}")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise BadInput(f"progress = {shown(progress)}: give True or a function of (done, in all)")
    settings = TrainSettings(
        rounds=rounds,
        lr=lr,
        batch_size=batch_size,
        local_steps=local_steps,
        local_epochs=local_epochs,
        clip_norm=clip_norm,
        participation=participation,
        participants=participants,
        seed=seed,
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]  # checked there
        device=str(device),
        engine=engine,  # type: ignore[arg-type]
        chunk=chunk,
        precision=precision,  # type: ignore[arg-type]
        capture=capture,
    )
    when = EvaluateSettings(
        every=evaluate_every,
        splits=evaluate_splits,  # type: ignore[arg-type]
        local=evaluate_local,
    )
    start = None if state is None else _checked_start(state, rounds)
    with _shown(progress, method.label) as report:
        history = run_rounds(model, federation, method, loss, settings, when, start, report)
    if history.divergence is not None:
        warnings.warn(history.divergence, RuntimeWarning, stacklevel=2)
    return history


def _checked_start(state: object, rounds: int) -> Checkpoint:
    if not isinstance(state, State):
        raise BadInput(
            f"state must be the `state` of an earlier history, not {type(state).__name__}"
        )
    if state.round >= rounds:
        raise BadInput(
            f"rounds = {rounds}, but the state has {state.round} rounds behind it, which count: "
            f"give rounds = {state.round + rounds} to train {rounds} more"
        )
    return Checkpoint(state, None)


@contextmanager
def _shown(progress: bool | Progress | None, title: str) -> Iterator[Progress | None]:
    if progress is True:
        from fairvar.system.progress import progress as bar  # rich takes a while to load

        with bar(title) as report:
            yield lambda done, total: report(done, total, "rounds")
    else:
        yield progress or None


def run_rounds(
    model: nn.Module | str,
    federation: Federation,
    method: Method,
    loss: str | LossFunction,
    settings: TrainSettings,
    when: EvaluateSettings,
    start: Checkpoint | None = None,
    progress: Progress | None = None,
    keep: KeepOne | None = None,
) -> History:
    """`train` with its numbers already checked; continues from `start`, the same bit by bit.

    After every round `keep` may ask for a checkpoint. `progress` may raise to stop the run.
    """
    started = time.perf_counter()
    prepared = prepare(model, federation, method, loss, settings)
    run = prepared.run
    with arithmetic(settings.precision, run.device, run.few_shapes):
        runs = prepared.runs(settings.rounds, when, start)
        train_rounds([runs], settings.rounds, when.every, progress, one_by_one(keep))
        (made,) = runs.checkpoints()
    birth = provenance(prepared, settings, time.perf_counter() - started)
    return runs.recorder.history(made, 0, run.samples, birth)


def one_by_one(keep: KeepOne | None) -> Keep | None:
    """For a trainer of one run."""
    return keep and (lambda done, make: keep(done, lambda: make()[0]))


@dataclass
class Prepared:
    """A run before its first round: data on the device, model and options checked, path chosen."""

    run: Run
    path: str
    captures: bool = False

    @property
    def kernel(self) -> Network | Linear:
        if self.path == "linear":
            return Linear.build(self.run, [self.run.method], [float(self.run.lr)])
        return Network(self.run, self.path)

    def start(self) -> State:
        task = self.run.task
        return initial_state(self.run.method, task.params, task.buffers, self.run.clients)

    def runs(
        self,
        rounds: int = 1,
        when: EvaluateSettings = DEFAULT,
        start: Checkpoint | None = None,
    ) -> Runs:
        """The run on its way, from its beginning or from a checkpoint."""
        run, fresh = self.run, self.start()
        splits = tuple(s for s in when.splits if s in run.federation.splits)
        if start is not None:
            check_fits(start.state, fresh, rounds)
            check_tables(start, run.clients, scored_keys(splits, when))
            start = start._replace(state=start.state.to(run.device))
        kernel = self.kernel
        found = Runs(kernel, [start or Checkpoint(fresh, None)], splits, when.local)
        if self.captures:
            found.captured = RECORDINGS.find(kernel, self.path, found.state, found.diverged_at)
        return found


def prepare(
    model: nn.Module | str,
    federation: Federation,
    method: Method,
    loss: str | LossFunction,
    settings: TrainSettings,
    alone: bool = False,
) -> Prepared:
    """All that happens once. For those who drive the rounds themselves, such as the benchmark.
    `alone`: on the reference loop, for one client or none."""
    data = on_device(federation, _device(settings.device), getattr(torch, settings.dtype))
    task = make_task(model, data, loss, settings, method.uses_curvature, alone)
    run = _make_run(task, data, method, settings)
    path = choose_path(run, settings.engine)
    return Prepared(run, path, path != "reference" and wants_capture(settings, run))


def wants_capture(settings: TrainSettings, run: Run) -> bool:
    wanted = run.device.type == "cuda" if settings.capture is None else settings.capture
    repeats = run.shapes_stay and acts_alike(run.method, LATER)
    return wanted and repeats and not run.method.looks_at_values


@lru_cache(maxsize=2)
def on_device(federation: Federation, device: torch.device, dtype: torch.dtype) -> Federation:
    """One copy for all runs of a sweep: moving data sets takes longer than many rounds, and what
    was captured for one run belongs to these tensors."""
    return federation.to(device, dtype)


def choose_path(run: Run, engine: str) -> str:
    """The fastest path that computes this method with this amount of local work."""
    method, task = run.method, run.task
    if engine == "reference":
        return "reference"
    if engine == "linear" and not run.participation.everyone:
        raise BadInput('engine="linear" trains all clients; to train some of them use "auto"')
    if task.loop_only:
        if engine == "auto":
            reasons = "; ".join(task.loop_only)
            warnings.warn(
                f"clients are trained one after another: the model {reasons}", stacklevel=2
            )
            return "reference"
        raise BadInput(f"engine={engine!r} cannot run this model: " + "; ".join(task.loop_only))
    norms = method.uses_norms or run.clip_norm is not None
    needs = [
        (not run.schedule.one_step, "several local steps"),
        (method.uses_curvature, "curvature"),
        (method.uses_norms, "norms of client updates"),
        (run.clip_norm is not None, "clip_norm"),
        (task.moving_buffers, "buffers that change in training"),
    ]
    found = [why for applies, why in needs if applies]
    bends = method.uses_curvature and not norms and task.reverse_over_forward
    blockable = run.schedule.one_step and not task.moving_buffers
    blockable &= bends or not method.uses_curvature
    if engine == "pooled" and found:
        raise BadInput(f'engine="pooled" cannot do {" and ".join(found)}; use "auto"')
    if engine == "blocked" and not blockable:
        raise BadInput(f'engine="blocked" cannot do {" and ".join(found)}; use "auto"')
    affine = is_affine(task, run.federation.train.x)
    if engine == "linear" and not affine:
        raise BadInput('engine="linear" is for linear models with a known loss; use "auto"')
    if engine != "auto":
        return engine
    if affine and run.participation.everyone and (not found or grams_pay(run)):
        return "linear"
    if not found:
        return "pooled"
    x, lengths = run.federation.train.x, run.participation.largest(run.schedule.lengths)
    fits = blockable and fits_blocked(task, x, lengths, run.block)
    return "blocked" if fits else "vmapped"


def _make_run(task: Task, data: Federation, method: Method, settings: TrainSettings) -> Run:
    schedule = Schedule.build(
        data.train,
        settings.batch_size,
        settings.local_steps,
        settings.local_epochs,
        settings.seed,
        task.batch_norm,
    )
    if method.only_one_step and not schedule.one_step:
        raise BadInput(f"{method.label} in this form takes one local step; set local_steps = 1")
    who = Participation.build(
        data.clients, settings.seed, settings.participation, settings.participants
    )
    x = data.train.x
    fitting = settings.chunk or chunk_for_memory(task, x, schedule.width, method.uses_curvature)
    return Run(
        task=task,
        federation=data,
        method=method,
        schedule=schedule,
        lr=settings.lr,
        clip_norm=settings.clip_norm,
        participation=who,
        chunk=whole_tiles(fitting),
        piece=pooled_piece(task, x),
        graphs_fit=graphs_fit(task, x, sum(who.largest(schedule.lengths))),
        block=block_width(task, x, schedule.lengths),
        precision=settings.precision,
        share=method.share(data.sizes).to(x.device),
        ids=torch.arange(data.clients, device=x.device),
    )


def provenance(prepared: Prepared, settings: TrainSettings, seconds: float) -> dict[str, object]:
    """Where a result comes from."""
    run, on_gpu = prepared.run, prepared.run.device.type == "cuda"
    return {
        "fairvar": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(run.device) if on_gpu else str(run.device),
        "dtype": settings.dtype,
        "seed": settings.seed,
        "precision": settings.precision,
        "engine": prepared.path,
        "captured": prepared.captures,
        "seconds": round(seconds, 3),
        "peak_megabytes": peak_megabytes(run.device),
    }


def _device(device: str) -> torch.device:
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()  # "meta" has no values to compute with
    except Exception as error:
        reason = one_line(str(error).partition("\n")[0].removesuffix("."))[:LONGEST]
        raise BadInput(
            f'device {shown(str(device))} cannot be used here ({reason}); give "cpu" or "cuda"'
        ) from None
    return found
