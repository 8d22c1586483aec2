"""Messages between server and client, and the client's replies.

| exchange | down | up |
|---|---|---|
| probe | x, buffers | ∇f_i(x), f_i(x) where the method uses losses; buffers if the server steps |
| train | x, buffers, a and g where the method uses them | x_i, buffers, f_i and ∇f_i if needed |
| evaluate | x, buffers | loss, accuracy, score of x on the client's held-out samples, and of v_i |

A reply carries the stamp of its request, so that an answer to an older request is recognised. The
exchanges share no memory on the client: a reply depends on the request and the client's data only,
and on the personal model v_i where the method has one. v_i stays with the client
(`PersonalModels`). The client's samples are client i of a federation whose other clients have none,
so batches, losses and steps come from the engine's code and its random streams.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from msgspec.structs import replace as with_fields
from safetensors.torch import save
from torch import Tensor, nn

from fairvar.common.files import MOST_TENSORS, read_bytes, write_bytes
from fairvar.common.tree import Tree, is_finite, scale, squared_norm, subtract, tree_map
from fairvar.data.federation import Federation, Split
from fairvar.engine.evaluate import evaluate_shared
from fairvar.engine.kernels import reference as own
from fairvar.engine.losses import LossFunction, choose_metric
from fairvar.engine.run import Run
from fairvar.engine.server import weighed
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.task import split_model
from fairvar.engine.train import prepare
from fairvar.errors import BadInput, IntegrityError
from fairvar.methods.base import Method, Replies
from fairvar.runs.formats import load_tensors
from fairvar.scores import Metric

FORMAT = 1  # of messages; server and client must have the same
ExchangeKind = Literal["probe", "train", "evaluate"]
Number = int | float
MODEL, BUFFERS, GRADIENT = "x", "buffer", "g"  # groups of arrays: "x/weight"
MEAN_LOSS, LOSS, SAMPLES, ACCURACY = "a", "loss", "samples", "accuracy"  # numbers; "test/loss"
PERSONAL = "personal"  # prefix of a personal model's scores: "personal/test/loss"
TRAINING = "training"  # a number in requests: the id of the run, for stored personal models
SCORE = "score"  # a number in train requests: 1 asks for scores of the local model
METRIC = "metric"  # a number in replies: the score, if it is neither accuracy nor loss
STEP = "step"  # a client's part of the normaliser, in sums over clients
HELD_OUT = ("valid", "test")
ROUNDS = "/rounds"  # in the file of a personal model; no parameter has such a name


class Stamp(NamedTuple):
    """Identifies a request; a reply carries the stamp of its request."""

    exchange: ExchangeKind
    round: int
    attempt: int = 0
    format: int = FORMAT


@dataclass(frozen=True)
class Message:
    """A request to `client` or its reply. `numbers` are Python numbers and are sent exactly."""

    stamp: Stamp
    client: int
    arrays: Tree = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)

    def group(self, name: str) -> Tree:
        """The arrays of one group, by their own names."""
        return group_of(self.arrays, name)


def group_of(arrays: Tree, name: str) -> Tree:
    mark = f"{name}/"
    return {k.removeprefix(mark): v for k, v in arrays.items() if k.startswith(mark)}


def grouped(**groups: Tree | None) -> Tree:
    """Several trees in one flat dict: `grouped(x=…, g=…)` gives the names "x/…" and "g/…"."""
    return {f"{g}/{k}": v for g, tree in groups.items() for k, v in (tree or {}).items()}


def sends_score(metric: Metric) -> bool:
    """Whether a client reports a score in addition to its loss and accuracy."""
    return metric.name not in (ACCURACY, LOSS)


def sends_loss(method: Method) -> bool:
    """Whether a client sends its loss: only if the method needs it."""
    return method.uses_losses or method.uses_mean_loss


@dataclass(frozen=True)
class Agreement:
    """The settings that server and clients share before the first round."""

    model: nn.Module | str
    method: Method
    loss: str | LossFunction
    train: TrainSettings
    evaluate: EvaluateSettings
    clients: int
    input_shape: tuple[int, ...]
    classes: int | None  # None: regression
    like: Split | None = None  # blank samples, unless a sample is one tensor of floats and a label

    @property
    def metric(self) -> Metric:
        return choose_metric(self.evaluate.metric, self.loss, self.classes)


class Client:
    """One client with its own data; answers requests."""

    def __init__(
        self, number: int, data: Federation, agreed: Agreement, folder: Path | None = None
    ) -> None:
        """`data`: a federation of this client alone; `number`: its id among all clients; `folder`:
        for its personal models, which are otherwise kept in memory."""
        if data.clients != 1:
            raise BadInput(f"a client holds its own data only, not that of {data.clients} clients")
        placed = {name: _placed(split, number) for name, split in data.splits.items()}
        own_data = replace(data, **placed)  # type: ignore[arg-type]
        settings = with_fields(
            agreed.train, engine="reference", participation=None, participants=None
        )
        self.number = number
        given = (agreed.model, own_data, agreed.method, agreed.loss, settings)
        self.whole: Run = prepare(*given, alone=True, metric=agreed.evaluate.metric).run
        self.run = replace(self.whole, method=agreed.method.shared)
        self.personal = None if agreed.method.personal is None else PersonalModels(folder)

    def answer(self, request: Message) -> Message:
        """The reply to a request. The transport reports exceptions to the server."""
        if request.stamp.format != FORMAT:
            raise BadInput(
                f"the server's messages have format {request.stamp.format}, this client's format "
                f"{FORMAT}; install the same version of fairvar on both"
            )
        act = {"probe": self._probe, "train": self._train, "evaluate": self._evaluate}
        arrays, numbers = act[request.stamp.exchange](request)
        samples = int(self.run.federation.sizes[self.number])
        return Message(request.stamp, self.number, arrays, {SAMPLES: samples, **numbers})

    def _probe(self, request: Message) -> tuple[Tree, dict[str, Number]]:
        t = request.stamp.round
        method = self.run.method.at_round(t)
        probed = own.probe(self.run, method, self._model(request), t, self.number)
        buffers = probed.buffers if method.server_steps else None
        return grouped(g=probed.gradient, buffer=buffers), _loss(method, probed.loss)

    def _train(self, request: Message) -> tuple[Tree, dict[str, Number]]:
        run, t = self.run, request.stamp.round
        method, sent = run.method.at_round(t), self._model(request)
        reports = run.method.reports_gradient and not method.probes
        loss, gradient = None, None
        if method.needs_losses or reports:
            loss, gradient, _ = own.probe(run, method, sent, t, self.number)
        a = torch.tensor(request.numbers.get(MEAN_LOSS, 0.0), dtype=torch.float64)
        g = self._arrays(request, GRADIENT) or None
        module, _ = own.train(run, method, sent, t, self.number, loss, a.to(run.device), g)
        params, buffers = own.params_of(run, module), own.buffers_of(run, module)
        scores = self._scores({**params, **buffers}) if request.numbers.get(SCORE) else {}
        if self.personal is not None:
            self._train_personal(self.personal, request, sent)
        arrays = grouped(x=params, buffer=buffers, g=gradient if reports else None)
        return arrays, {**_loss(method, loss), **scores}

    def _train_personal(self, kept: PersonalModels, request: Message, sent: nn.Module) -> None:
        """The round's steps of v_i. They are taken once, even if the server repeats the round or
        resumes from an older checkpoint. A v_i that is not finite is not stored."""
        t, name = request.stamp.round, self._name(request)
        v, rounds = kept.load(name, self._received(request))
        if t >= rounds:
            v = own.train_personal(self.whole, v, sent, t, self.number)
            if is_finite(v):
                kept.save(name, v, t + 1)

    def _evaluate(self, request: Message) -> tuple[Tree, dict[str, Number]]:
        x = self._received(request)
        found = self._scores(x)
        if self.personal is not None:
            scores = self._scores(self.personal.load(self._name(request), x)[0])
            mine = {k: v for k, v in scores.items() if not k.endswith(SAMPLES) and isfinite(v)}
            found |= {f"{PERSONAL}/{name}": value for name, value in mine.items()}
        return {}, found

    def _name(self, request: Message) -> str:
        """The name under which the personal model of this run is stored."""
        if TRAINING not in request.numbers:
            raise BadInput("the server does not say which run this is; install the same version of "
                           "fairvar on both")  # fmt: skip
        return f"{int(request.numbers[TRAINING]):x}-client-{self.number}"

    def _model(self, request: Message) -> nn.Module:
        return own.load(self.run, self._received(request), {})

    def _received(self, request: Message) -> Tree:
        """Parameters and buffers."""
        return self._arrays(request, MODEL) | self._arrays(request, BUFFERS)

    def _arrays(self, request: Message, group: str) -> Tree:
        return {k: v.to(self.run.device) for k, v in request.group(group).items()}

    def _scores(self, model: Tree) -> dict[str, Number]:
        """The model's scores on the client's held-out samples, split by split."""
        found: dict[str, Number] = {}
        task = self.run.task
        params, buffers = split_model(task, model)
        for name, split in self.run.federation.splits.items():
            samples = int(split.answers[self.number])
            if name in HELD_OUT and samples:
                scores = evaluate_shared(task, params, buffers, split, self.run.piece)
                found[f"{name}/{SAMPLES}"] = samples
                found[f"{name}/{LOSS}"] = float(scores.loss[self.number])
                if task.classifies:
                    found[f"{name}/{ACCURACY}"] = float(scores.accuracy[self.number])
                score = float(scores.score[self.number])
                if sends_score(task.metric) and isfinite(score):  # it may be undefined
                    found[f"{name}/{METRIC}"] = score
        return found


def _loss(method: Method, loss: Tensor | None) -> dict[str, Number]:
    return {LOSS: float(loss)} if loss is not None and sends_loss(method) else {}


def _placed(split: Split, number: int) -> Split:
    counts = torch.zeros(number + 1, dtype=torch.int64)
    counts[number] = split.counts[0]
    return replace(split, counts=counts)


# -- personal models -------------------------------------------------------------------------------
class PersonalModels:
    """The personal models v_i of one client, one file per run in a folder, or in memory.

    A run that starts anew has a new number (`TRAINING` in requests), under which v_i is kept. So a
    run that continues, and a client that restarts, find the model again, and another run does not.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.memory = folder, dict[str, bytes]()

    def load(self, name: str, received: Tree) -> tuple[Tree, int]:
        """v_i and the number of rounds it was trained for. A client that is new to the run starts
        from the model that it received."""
        content = self._read(name)
        if content is None:
            self.save(name, received, 0)
            return received, 0
        try:
            found = load_tensors(content)
            rounds = int(found.pop(ROUNDS))
        except (IntegrityError, LookupError, ValueError, RuntimeError) as error:
            raise BadInput(f"the personal model {self._place(name)} is damaged ({error}); delete "
                           "it to start again from the global model") from None  # fmt: skip
        forms = [{k: (v.shape, v.dtype) for k, v in tree.items()} for tree in (found, received)]
        if forms[0] != forms[1]:
            raise BadInput(f"the personal model {self._place(name)} is of another architecture; "
                           "delete it")  # fmt: skip
        device = next(iter(received.values())).device
        return {k: v.to(device) for k, v in found.items()}, rounds

    def save(self, name: str, model: Tree, rounds: int) -> None:
        flat = {k: leaf.detach().cpu().contiguous() for k, leaf in model.items()}
        content = save({**flat, ROUNDS: torch.tensor(rounds)})
        if self.folder is None:
            self.memory[name] = content
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # readable by this user only
        except OSError as error:
            why = error.strerror or error
            raise BadInput(f"the folder {self.folder} cannot be made: {why}") from None
        write_bytes(self._place(name), content)

    def _read(self, name: str) -> bytes | None:
        if self.folder is None:
            return self.memory.get(name)
        try:
            return read_bytes(self._place(name), MOST_TENSORS, follow=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            what = f"the personal model {self._place(name)} cannot be read"
            raise BadInput(f"{what}: {error.strerror or error}") from None

    def _place(self, name: str) -> Path:
        return (self.folder or Path()) / f"{name}.safetensors"


# -- sums over clients only (secure aggregation) ---------------------------------------------------
def contribution(request: Message, reply: Message, method: Method, lr: float) -> Tree:
    """The client's terms of the sums, in float64: w(f_i) (x − x_i) instead of its model, its part
    of the normaliser, and f_i and ∇f_i if the method needs them."""
    method = method.shared.at_round(request.stamp.round)
    loss = torch.tensor([float(reply.numbers.get(LOSS, torch.nan))], dtype=torch.float64)
    found = grouped(g=tree_map(Tensor.double, reply.group(GRADIENT)))
    if method.uses_mean_loss:
        found[LOSS] = loss
    if request.stamp.exchange == "train":
        x, x_i = (tree_map(Tensor.double, message.group(MODEL)) for message in (request, reply))
        moved = subtract(x, x_i)
        weight, step = _alone(method, loss, squared_norm(moved), lr)
        found |= grouped(x=scale(moved, weight))
        found[STEP] = step.reshape(1)
    return found


def is_additive(method: Method) -> bool:
    """Whether weights and normaliser are sums of one term per client; tested on three clients."""
    method = method.shared
    if not method.sums_suffice or method.initial_memory(3):
        return False
    loss, share, norms = torch.tensor(
        [[0.3, 1.1, 2.7], [0.2, 0.5, 0.3], [0.4, 0.01, 1.9]], dtype=torch.float64
    )
    together = Replies(loss, share, torch.arange(3), 3)
    weights, _ = weighed(method, {}, together)
    parts = [_alone(method, loss[i : i + 1], norms[i], 0.1) for i in range(3)]
    own, steps = (torch.stack([torch.as_tensor(p[k]) for p in parts]).double() for k in (0, 1))
    norm = torch.as_tensor(method.normaliser(together, norms, 0.1)).double()
    return torch.allclose(weights, share * own) and torch.allclose(norm, share @ steps)


def _alone(method: Method, loss: Tensor, norm: Tensor, lr: float) -> tuple[float, Tensor]:
    """A client's weight and its part of the normaliser for a plain weight of one."""
    one = Replies(loss, torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), 1)
    weight, _ = weighed(method, {}, one)
    step = torch.as_tensor(method.normaliser(one, norm.double().reshape(1), lr)).double()
    return float(weight), step
