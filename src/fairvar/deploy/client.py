"""What a client does with a message. Pure: the answer depends on the request and the client's data.

A node holds its samples where the engine would hold them: in a federation whose other clients have
none. So batches, losses and steps are computed by the same code, from the same random streams.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from msgspec.structs import replace as with_fields
from torch import Tensor, nn

from fairvar.data.federation import Federation, Split
from fairvar.deploy.messages import (
    ACCURACY,
    BUFFERS,
    FORMAT,
    GRADIENT,
    LOSS,
    MEAN_LOSS,
    MODEL,
    SAMPLES,
    SCORE,
    Message,
    Number,
    grouped,
    sends_loss,
)
from fairvar.engine.evaluate import evaluate_shared
from fairvar.engine.kernels import reference as own
from fairvar.engine.losses import LossFunction
from fairvar.engine.run import Run
from fairvar.engine.settings import TrainSettings
from fairvar.engine.train import prepare
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.tree import Tree

HELD_OUT = ("valid", "test")


class Client:
    """One client and its own data, ready to answer."""

    def __init__(
        self,
        number: int,
        data: Federation,
        model: nn.Module | str,
        method: Method,
        loss: str | LossFunction,
        settings: TrainSettings,
    ) -> None:
        """`data` is a federation of this client alone; `number` its id among all clients."""
        if data.clients != 1:
            raise BadInput(f"a client holds its own data only, not that of {data.clients} clients")
        placed = {name: _placed(split, number) for name, split in data.splits.items()}
        plain = with_fields(settings, engine="reference", participation=None, participants=None)
        own_data = replace(data, **placed)  # type: ignore[arg-type]
        self.number = number
        self.run: Run = prepare(model, own_data, method, loss, plain, alone=True).run

    def answer(self, request: Message) -> Message:
        """The reply to a request; whatever goes wrong here is for the transport to report."""
        if request.stamp.format != FORMAT:
            raise BadInput(
                f"the server speaks format {request.stamp.format}, this client {FORMAT}; "
                "install the same version of fairvar on both"
            )
        act = {"probe": self._probe, "train": self._train, "evaluate": self._evaluate}
        arrays, numbers = act[request.stamp.exchange](request)
        samples = int(self.run.federation.sizes[self.number])
        return Message(request.stamp, self.number, arrays, {SAMPLES: samples, **numbers})

    def _probe(self, request: Message) -> tuple[Tree, dict[str, Number]]:
        method = self.run.method.at_round(request.stamp.round)
        probed = self._probed(request, self._model(request))
        buffers = probed.buffers if method.server_steps else None
        return grouped(**{GRADIENT: probed.gradient, BUFFERS: buffers}), _loss(method, probed.loss)

    def _train(self, request: Message) -> tuple[Tree, dict[str, Number]]:
        run, t = self.run, request.stamp.round
        method, sent = run.method.at_round(t), self._model(request)
        reports = run.method.reports_gradient and not method.probes
        loss, gradient = None, None
        if method.needs_losses or reports:
            loss, gradient, _ = self._probed(request, sent)
        a = torch.tensor(request.numbers.get(MEAN_LOSS, 0.0), dtype=torch.float64)
        g = self._arrays(request, GRADIENT) or None
        module, _ = own.train(run, method, sent, t, self.number, loss, a.to(run.device), g)
        params, buffers = own.params_of(run, module), own.buffers_of(run, module)
        scores = self._scores(params, buffers) if request.numbers.get(SCORE) else {}
        kept = gradient if reports else None
        arrays = grouped(**{MODEL: params, BUFFERS: buffers, GRADIENT: kept})
        return arrays, {**_loss(method, loss), **scores}

    def _evaluate(self, request: Message) -> tuple[Tree, dict[str, Number]]:
        return {}, self._scores(self._arrays(request, MODEL), self._arrays(request, BUFFERS))

    def _probed(self, request: Message, sent: nn.Module) -> own.Probed:
        t = request.stamp.round
        return own.probe(self.run, self.run.method.at_round(t), sent, t, self.number)

    def _model(self, request: Message) -> nn.Module:
        params, buffers = self._arrays(request, MODEL), self._arrays(request, BUFFERS)
        return own.load(self.run, params, buffers)

    def _arrays(self, request: Message, group: str) -> Tree:
        return {k: v.to(self.run.device) for k, v in request.group(group).items()}

    def _scores(self, params: Tree, buffers: Tree) -> dict[str, Number]:
        """Of a model on the client's held-out samples, split by split."""
        found: dict[str, Number] = {}
        for name, split in self.run.federation.splits.items():
            samples = int(split.counts[self.number])
            if name in HELD_OUT and samples:
                scores = evaluate_shared(self.run.task, params, buffers, split, self.run.piece)
                found[f"{name}/{SAMPLES}"] = samples
                found[f"{name}/{LOSS}"] = float(scores.loss[self.number])
                if self.run.task.classifies:
                    found[f"{name}/{ACCURACY}"] = float(scores.accuracy[self.number])
        return found


def _loss(method: Method, loss: Tensor | None) -> dict[str, Number]:
    return {LOSS: float(loss)} if loss is not None and sends_loss(method) else {}


def _placed(split: Split, number: int) -> Split:
    counts = torch.zeros(number + 1, dtype=torch.int64)
    counts[number] = split.counts[0]
    return replace(split, counts=counts)
