"""`train`: checks the settings, chooses the kernel, runs the trainer and returns a History."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn

from fairvar._version import __version__
from fairvar.common.tree import one_input
from fairvar.data.federation import Federation
from fairvar.engine.batches import Participation, Schedule
from fairvar.engine.callbacks import (
    Callback,
    OnProgress,
    ProgressBar,
    Training,
    check_callbacks,
)
from fairvar.engine.cuda_graphs import LATER, RECORDINGS, acts_alike
from fairvar.engine.history import CONTINUES, History
from fairvar.engine.kernels.compiled import repays
from fairvar.engine.kernels.linear import Linear, grams_pay
from fairvar.engine.kernels.linear.dual import is_affine
from fairvar.engine.kernels.network import Network
from fairvar.engine.kernels.personal import WithPersonal
from fairvar.engine.keys import operations_key
from fairvar.engine.losses import LossFunction
from fairvar.engine.optimiser import PLAIN, ServerOptimiser, check_optimiser
from fairvar.engine.recorder import Checkpoint as Checkpoint
from fairvar.engine.recorder import resumed, scored_keys
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
from fairvar.engine.settings import CONSTANT, EvaluateSettings, LrSchedule, TrainSettings
from fairvar.engine.state import State, initial_state
from fairvar.engine.task import Task, make_task
from fairvar.engine.trainer import Keep, Runs, train_rounds
from fairvar.engine.trainer import Progress as Progress
from fairvar.errors import LONGEST, BadInput, one_line, shown
from fairvar.methods.base import Method
from fairvar.models.weights import checksum
from fairvar.scores import Metric

DEFAULT = EvaluateSettings()
_SCALE_CHECKED: WeakSet[Federation] = WeakSet()  # warned once about the scale of their inputs


def train(
    model: nn.Module | str,
    federation: Federation,
    method: Method,
    rounds: int = 100,
    lr: float = 0.1,
    *,
    schedule: LrSchedule = CONSTANT,
    batch_size: int | None = None,
    drop_last: bool = False,
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
    metric: str | Metric | Callable[[Any, Any], Any] | None = None,
    clip_norm: float | None = None,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    server: ServerOptimiser = PLAIN,
    participation: float | None = None,
    participants: int | None = None,
    chunk: int | None = None,
    precision: str = "full",
    capture: bool | None = None,
    compile: bool | Literal["auto"] = "auto",
    state: State | History | None = None,
    progress: bool | Progress = False,
    callbacks: Sequence[Callback] = (),
) -> History:
    """Train `model` on `federation` with `method`; by default all clients take part.

    model: a module (copied, never changed) or a name from `fairvar.models.MODELS`.
    rounds: in total, including those of `state`.
    schedule: of the learning rate over the rounds, such as LrSchedule("cosine", warm_up=10); it is
    constant by default, and within a round.
    batch_size: samples per local step; None takes all of a client's samples.
    drop_last: leave out the last batch of a pass if it is smaller than the others, as torch's
    DataLoader does. Batch norm needs it where images are small: gradients of a MobileNetV2 on two
    images of 32×32 are a million times larger than on 32 (benchmarks/small_batches.py).
    local_steps: steps of every client in a round.
    local_epochs: passes over the client's samples in a round, instead of local_steps.
    loss: "cross_entropy", "mse" (½ squared error) or (outputs, targets) -> one loss per sample;
    if it depends on the other samples of a batch, clients are trained one after another.
    With labels the model has one output per class, and the largest is its prediction.
    engine: "auto" picks the linear, pooled, blocked or vmapped path; "reference" is a plain loop.
    evaluate_every: evaluate all clients after every so many rounds, and after the last.
    metric: by which clients are scored: "accuracy" (of labels, the default), "balanced_accuracy",
    "auc", "f1", "rmse", "r2", "loss" (the default of other targets), "perplexity", or a function of
    one client's outputs and targets, of which higher is better. Where lower is better, or scores
    have bounds: Metric(function, higher_is_better=False, bounds=(0, 1)).
    clip_norm: cut each client's direction to this norm (off by default); as in torch, before weight
    decay and momentum (and before the proximal term of FedProx) are added.
    weight_decay: of `torch.optim.SGD`, in local steps.
    momentum: of `torch.optim.SGD`, in local steps; it starts from zero in every round, so it
    changes nothing where a client takes one step.
    server: the server's optimiser, such as ServerOptimiser("sgd", beta1=0.9) (FedAvgM) or
    ServerOptimiser("adam", lr=0.01) (FedAdam); by default the method's update is not changed.
    participation: share of the clients sampled in each round, by default all (see
    `engine/batches.py` for the averages); the linear path needs all.
    participants: number of clients sampled in each round, instead of participation.
    chunk: clients per vectorised call, by default what fits in memory; results do not change.
    precision: "tf32" or "bfloat16" rounds the inputs of products in training to gain speed.
    capture: record a round once as a CUDA graph and repeat it; by default on CUDA.
    compile: compile the clients' steps, which takes minutes; "auto" does so on CUDA for models with
    depthwise convolutions where several local steps of all rounds save more than that.
    state: continue from here: an earlier history with the same method, or its `state`.
    progress: True shows a bar on stderr; a function is called with (rounds done, rounds in all).
    callbacks: objects of `fairvar.Callback`, such as EarlyStopping(), which see every round and may
    stop the run; they do not change its numbers.

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
        schedule=schedule,
        batch_size=batch_size,
        drop_last=drop_last,
        local_steps=local_steps,
        local_epochs=local_epochs,
        clip_norm=clip_norm,
        weight_decay=weight_decay,
        momentum=momentum,
        server=server,
        participation=participation,
        participants=participants,
        seed=seed,
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]  # checked there
        device=str(device),
        engine=engine,  # type: ignore[arg-type]
        chunk=chunk,
        precision=precision,  # type: ignore[arg-type]
        capture=capture,
        compile=compile,
    )
    when = EvaluateSettings(
        every=evaluate_every,
        splits=evaluate_splits,  # type: ignore[arg-type]
        local=evaluate_local,
        metric=metric,
    )
    start = None if state is None else _checked_start(state, rounds)
    if federation not in _SCALE_CHECKED:
        _SCALE_CHECKED.add(federation)
        if problem := federation.scale_problem:
            warnings.warn(problem, stacklevel=2)
    watching = check_callbacks(callbacks)
    if progress is True:
        watching.append(ProgressBar())
    shown_by = progress if callable(progress) else None
    history = run_rounds(model, federation, method, loss, settings, when, start, shown_by,
                         callbacks=watching)  # fmt: skip
    if start is not None:
        origin = {CONTINUES: checksum(start.state.flat())}
        history = replace(history, provenance={**history.provenance, **origin})
    if history.divergence is not None:
        warnings.warn(history.divergence, RuntimeWarning, stacklevel=2)
    return history


def _checked_start(state: object, rounds: int) -> Checkpoint:
    state = state.state if isinstance(state, History) else state
    if not isinstance(state, State):
        raise BadInput(f"state must be an earlier history or its state, not {type(state).__name__}")
    if state.round >= rounds:
        raise BadInput(
            f"rounds = {rounds}, but the state has {state.round} rounds behind it, which count: "
            f"give rounds = {state.round + rounds} to train {rounds} more"
        )
    return Checkpoint(state, None)


@torch.enable_grad()
def run_rounds(
    model: nn.Module | str,
    federation: Federation,
    method: Method,
    loss: str | LossFunction,
    settings: TrainSettings,
    when: EvaluateSettings,
    start: Checkpoint | None = None,
    progress: Progress | None = None,
    keep: Keep | None = None,
    callbacks: Sequence[Callback] = (),
) -> History:
    """`train` with its numbers already checked; continues from `start`, the same bit by bit.

    After every round `keep` may ask for a list of one checkpoint.
    """
    started = time.perf_counter()
    prepared = prepare(model, federation, method, loss, settings, metric=when.metric)
    run = prepared.run
    watching = [*callbacks, *([] if progress is None else [OnProgress(progress)])]

    def history() -> History:
        (made,) = runs.checkpoints()
        origin = provenance(prepared, settings, time.perf_counter() - started)
        return runs.recorder.history(made, 0, run.samples, origin)

    with arithmetic(settings.precision, run.device, run.few_shapes):
        runs = prepared.runs(settings.rounds, when, start)
        training = Training(runs, settings.rounds, history)
        with training.watched(watching) as after_round:
            train_rounds([runs], settings.rounds, when.every, after_round, keep)
        return replace(history(), stopped=training.stopped)


@dataclass
class Prepared:
    """A prepared run: data on the device, model and options checked, path chosen."""

    run: Run
    path: str
    captures: bool = False

    @property
    def kernel(self) -> Network | Linear | WithPersonal:
        run = replace(self.run, method=self.run.method.shared)
        shared: Network | Linear = Network(run, self.path)
        if self.path == "linear":
            shared = Linear.build(run, [run.method], [float(run.lr)])
        return shared if self.run.method.personal is None else WithPersonal(self.run, shared)

    def start(self) -> State:
        task = self.run.task
        run = self.run
        return initial_state(run.method, task.params, task.buffers, run.clients, run.optimiser)

    def runs(
        self,
        rounds: int = 1,
        when: EvaluateSettings = DEFAULT,
        start: Checkpoint | None = None,
    ) -> Runs:
        """The run for the trainer, from its initial state or from a checkpoint."""
        run, kernel = self.run, self.kernel
        splits = tuple(s for s in when.splits if s in run.federation.splits)
        scored = scored_keys(splits, when, run.method)
        begin = resumed(run, start, self.start(), rounds, scored)
        found = Runs(kernel, [begin], splits, when.local)
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
    metric: object = None,
) -> Prepared:
    """Everything before the first round; also for callers with a round loop of their own, such as
    the benchmark. `alone`: on the reference loop, for at most one client."""
    data = on_device(federation, _device(settings.device), getattr(torch, settings.dtype))
    task = make_task(model, data, loss, settings, method.uses_curvature, alone, metric)
    run = _make_run(task, data, method, settings)
    path = choose_path(replace(run, method=method.shared), settings.engine, settings.compile)
    if path in ("pooled", "blocked", "vmapped") and wants_compiling(settings, run):
        run = replace(run, compiles=path)
    elif settings.compile is True and not alone:
        _compiles_nothing(settings.engine, path)
    return Prepared(run, path, path != "reference" and wants_capture(settings, run))


def wants_compiling(settings: TrainSettings, run: Run) -> bool:
    """By default where it was measured to pay: several local steps without curvature, and enough of
    them, of models with depthwise convolutions. (Epochs of avgcnn take longer compiled: groups of
    clients waste steps. One step from shared parameters was not measured on a GPU.)"""
    if settings.compile != "auto":
        return settings.compile
    schedule = run.schedule
    work = zip(schedule.steps, schedule.lengths, strict=True)
    samples = sum(steps * length for steps, length in work) * run.participation.number
    heavy = run.device.type == "cuda" and run.task.depthwise and not schedule.one_step
    pays = repays(settings.rounds, samples // run.clients, run.task.activations)
    return heavy and not run.method.uses_curvature and pays


def _compiles_nothing(engine: str, path: str) -> None:
    """Refuse `compile = True` with an engine that has nothing to compile, or warn of it."""
    if engine != "auto":
        raise BadInput(f'engine="{engine}" compiles nothing; use "auto" with compile=True')
    warnings.warn(f"compile=True changes nothing: this run takes the {path} path", stacklevel=3)


def wants_capture(settings: TrainSettings, run: Run) -> bool:
    wanted = run.device.type == "cuda" if settings.capture is None else settings.capture
    repeats = run.shapes_stay and acts_alike(run.method, LATER)
    if (own := run.method.personal) is not None:
        # A recorded round has the shuffles of the shared model's steps and one learning rate.
        repeats &= own.steps is None and (own.lr is None or run.lr_schedule == CONSTANT)
    return wanted and repeats and not run.method.looks_at_values


@lru_cache(maxsize=2)
def on_device(federation: Federation, device: torch.device, dtype: torch.dtype) -> Federation:
    """One copy for all runs of a sweep: moving data takes longer than many rounds, and captured
    rounds refer to these tensors."""
    return federation.to(device, dtype)


NORMS = ("norms of client updates", "clip_norm", "a bound on the penalty")
BEYOND = {  # what a path cannot compute; vmapped computes all of it
    "pooled": ("several local steps", "curvature", *NORMS, "products of client updates",
               "a moving average of gradients", "buffers that change in training"),
    "blocked": ("several local steps", *(f"curvature and {name}" for name in NORMS),
                "curvature of this model", "products of client updates",
                "buffers that change in training", "norms of client updates and weight_decay",
                "averages that are no plain means"),
    "linear": ("products of client updates", "averages that are no plain means",
               "a moving average of gradients", "a penalty on some parameters", "weight_decay"),
}  # fmt: skip


def _needs(run: Run) -> dict[str, bool]:
    """Which of these a run needs."""
    method, curved, decays = run.method, run.method.uses_curvature, run.weight_decay > 0
    there = (method.uses_norms, run.clip_norm is not None, method.penalty_bound is not None)
    norms = dict(zip(NORMS, there, strict=True))
    both = {f"curvature and {name}": curved and needed for name, needed in norms.items()}
    return {
        **norms,
        **both,
        "several local steps": not run.schedule.one_step,
        "curvature": curved,
        "curvature of this model": curved and not run.task.reverse_over_forward,
        "products of client updates": method.uses_gram,
        "averages that are no plain means": not method.broadcasts_means,
        "a moving average of gradients": method.averages_gradients,
        "a penalty on some parameters": method.penalises_some,
        "buffers that change in training": run.task.moving_buffers,
        "weight_decay": decays,
        "norms of client updates and weight_decay": decays and method.uses_norms,
    }


def choose_path(run: Run, engine: str, compile: bool | Literal["auto"] = "auto") -> str:
    """The fastest path that computes this method with this amount of local work."""
    if engine == "reference":
        return "reference"
    if engine == "linear" and not run.participation.everyone:
        raise BadInput('engine="linear" trains all clients; to train some of them use "auto"')
    if run.task.loop_only:
        reasons = "; ".join(run.task.loop_only)
        if engine != "auto":
            raise BadInput(f"engine={engine!r} cannot run this model: {reasons}")
        warnings.warn(f"clients are trained one after another: the model {reasons}", stacklevel=2)
        return "reference"
    affine = is_affine(run.task, run.federation.train.x)
    if engine == "linear" and not affine:
        raise BadInput('engine="linear" is for linear models with a known loss; use "auto"')
    needs = _needs(run)
    beyond = {path: [name for name in names if needs[name]] for path, names in BEYOND.items()}
    if found := beyond.get(engine):
        raise BadInput(f'engine="{engine}" cannot do {" and ".join(found)}; use "auto"')
    if engine != "auto":
        return engine
    dual = affine and run.participation.everyone and not beyond["linear"]
    if dual and (not beyond["pooled"] or grams_pay(run)):
        return "linear"
    if not beyond["pooled"]:
        return "pooled"
    x, lengths = one_input(run.federation.train.x), run.participation.largest(run.schedule.lengths)
    # Without vmap the curvature takes three quarters of the time; exact methods need a pass more.
    curved = run.method.uses_curvature and not run.method.probes
    faster_alone = run.in_turn and curved and compile is not True
    fits = not beyond["blocked"] and fits_blocked(run.task, x, lengths, run.block)
    return "blocked" if fits and not faster_alone else "vmapped"


def _make_run(task: Task, data: Federation, method: Method, settings: TrainSettings) -> Run:
    method.check_parameters(task.params)
    schedule = Schedule.build(
        data.train,
        settings.batch_size,
        settings.local_steps,
        settings.local_epochs,
        settings.seed,
        task.batch_norm,
        settings.drop_last,
        task.dropout,
    )
    if method.only_one_step and not schedule.one_step:
        raise BadInput(f"{method.label} in this form takes one local step; set local_steps = 1")
    check_optimiser(settings.server, method)
    who = Participation.build(
        data.clients, settings.seed, settings.participation, settings.participants
    )
    x = one_input(data.train.x)
    fitting = settings.chunk or chunk_for_memory(task, x, schedule.width, method.uses_curvature)
    return Run(
        task=task,
        federation=data,
        method=method,
        schedule=schedule,
        lr=settings.lr,
        lr_schedule=settings.schedule,
        rounds=settings.rounds,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        optimiser=settings.server,
        clip_norm=settings.clip_norm,
        participation=who,
        chunk=whole_tiles(fitting),
        piece=pooled_piece(task, x),
        graphs_fit=graphs_fit(task, x, sum(who.largest(schedule.lengths))),
        block=block_width(task, schedule.lengths),
        precision=settings.precision,
        share=method.plain_weights(data.sizes).to(x.device),
        ids=torch.arange(data.clients, device=x.device),
        kind=operations_key(settings, method, *task.kind, id(data)),
    )


def provenance(prepared: Prepared, settings: TrainSettings, seconds: float) -> dict[str, object]:
    """The provenance of a result: versions, device, dtype, seed, path and time."""
    run, on_gpu = prepared.run, prepared.run.device.type == "cuda"
    names = list(run.federation.client_names)
    return {
        **({"client_names": names} if names else {}),
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
        usable = '"cpu" or "cuda"' if torch.cuda.is_available() else '"cpu"'
        raise BadInput(
            f"device {shown(str(device))} cannot be used here ({reason}); give {usable}"
        ) from None
    return found
