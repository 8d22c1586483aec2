"""The server's part of a round: whom to ask what, which replies count, what they make of the model.

A round is one exchange, or two for exact methods (probe, then train). Those whose probe was good
are asked to train; those whose training was good enter the model. Where the server can take the
clients' step itself (`server_steps`), they train in evaluated rounds only, for the scores of
their local models. If too few are left the round is
repeated from the same state, with another draw of clients, and finally the run stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fairvar.deploy.client import HELD_OUT
from fairvar.deploy.guard import (
    Arrival,
    Expected,
    length,
    limited_losses,
    limited_weights,
    median_length,
    shortened,
    sift,
)
from fairvar.deploy.messages import (
    BUFFERS,
    GRADIENT,
    LOSS,
    MEAN_LOSS,
    MODEL,
    SAMPLES,
    SCORE,
    Message,
    Number,
    Stamp,
    grouped,
    sends_loss,
)
from fairvar.deploy.notes import Notes, RoundNote
from fairvar.deploy.robust import check_average, combination, mean_loss
from fairvar.deploy.settings import OFF, FederationSettings
from fairvar.engine.batches import Participation
from fairvar.engine.kernels.reference import Probed, stepped
from fairvar.engine.server import Aggregator, Answers, aggregate
from fairvar.engine.state import Outcome, State
from fairvar.errors import RunFailed
from fairvar.methods.base import Method
from fairvar.tree import Tree, stack

Good = Mapping[int, Message]  # good replies by client, ids rising
MEMORY = 20  # rounds whose lengths are remembered


@runtime_checkable
class Transport(Protocol):
    """Carries messages to clients and back; all it may do wrong is lose, delay or spoil them."""

    name: str
    keys: dict[int, str]  # what a client is known by, where clients have keys; for good

    def present(self, at_least: int, seconds: float) -> Sequence[int]:
        """The ids of clients that can be asked, once there are enough or the time is over."""

    def exchange(
        self, requests: Sequence[Message], like: Tree, seconds: float
    ) -> Iterable[Arrival]:
        """What came back before the deadline, in any order; `like`: the arrays of a good reply."""


class TooFew(Exception):
    """Not enough good replies for this attempt."""


class _Known(NamedTuple):
    """Before training: whom to ask, and the averages that they get."""

    ids: list[int]
    probed: Good | None
    mean_loss: Tensor  # a
    mean_gradient: Tree | None  # g


@dataclass
class Server:
    method: Method
    clients: int  # all that may ever take part; ids are 0 … clients − 1
    lr: float
    participation: Participation
    settings: FederationSettings
    transport: Transport
    notes: Notes
    clip_norm: float | None = None
    limited: set[int] = field(default_factory=set)  # clients whose weight this attempt cuts
    shortened: set[int] = field(default_factory=set)  # … whose arrays it has shortened
    lengths: dict[str, float] = field(default_factory=dict)  # median lengths in this attempt
    begun: bool = False
    sums_only: ClassVar[bool] = False  # the transport delivers sums over clients only

    def __post_init__(self) -> None:
        check_average(self.settings, self.method, self.sums_only)

    def round(self, state: State, score: bool = False) -> tuple[Outcome, Good]:
        """Round `state.round`, and the replies that made it; `score`: with local models' scores."""
        before = self.notes.reasons()
        for attempt in range(self.settings.repeats + 1):
            try:
                outcome, good = self._attempt(state, attempt, score)
                made_by = [*good] if outcome.answered is None else outcome.answered.tolist()
                self._write_down(state.round, made_by)
                return outcome, good
            except TooFew as few:
                last = few
        now = self.notes.reasons() - before
        reasons = ", ".join(f"{n} × {why}" for why, n in sorted(now.items()))
        raise RunFailed(
            f"round {state.round} was given up after {self.settings.repeats + 1} attempts: {last} "
            f"({reasons or 'no client was there'})"
        )

    def _write_down(self, t: int, made_by: list[int]) -> None:
        bound = self.notes.bind(self.transport.keys)
        cut = sorted(self.limited), sorted(self.shortened)
        self.notes.rounds.append(RoundNote(t, made_by, *cut, bound))
        for group, median in self.lengths.items():
            past = self.notes.lengths.get(group, [])
            self.notes.lengths[group] = [*past, median][-MEMORY:]

    def evaluate(self, state: State) -> Good:
        """The scores of the global model, from all clients that are there."""
        present = self.transport.present(1, self.settings.deadline)
        model = grouped(**{MODEL: state.params, BUFFERS: state.buffers})
        stamp = Stamp("evaluate", state.round)
        return self._exchange(stamp, present, model, {}, {}, loss=False, scores=True)

    def _attempt(self, state: State, attempt: int, score: bool) -> tuple[Outcome, Good]:
        for found in (self.limited, self.shortened, self.lengths):
            found.clear()
        method = self.method.at_round(state.round)
        ids = self._invited(state.round, attempt)
        known = _Known(ids, None, state.mean_loss, state.mean_gradient)
        if method.probes:
            known = self._probe(state, method, attempt, ids)
        if known.probed is not None and method.server_steps and not score:
            good = self._stepped(state, method, known, known.probed)
        else:
            good = self._train(state, method, attempt, known, score)
        good = self._in_proportion(state, good)
        return self._aggregated(state, method, known, good), good

    def _probe(self, state: State, method: Method, attempt: int, ids: list[int]) -> _Known:
        stamp, buffers = Stamp("probe", state.round, attempt), None
        if method.server_steps:
            buffers = state.buffers
        wanted = grouped(**{GRADIENT: state.x, BUFFERS: buffers})
        good = self._exchange(stamp, ids, model_of(state), {}, wanted, sends_loss(method))
        good = self._in_proportion(state, self._enough(good))
        share, a = self._share(good), state.mean_loss
        if sends_loss(method):
            a = mean_loss(self._losses(good), share, self.settings)
        return _Known(list(good), good, a, self._mean_gradient(share, good))

    def _stepped(self, state: State, method: Method, known: _Known, probed: Good) -> Good:
        """The models that the clients would send, from what they saw."""
        made: dict[int, Message] = {}
        for (i, reply), loss in zip(probed.items(), self._losses(probed), strict=True):
            seen = Probed(loss, reply.group(GRADIENT), reply.group(BUFFERS))
            a, g = known.mean_loss, known.mean_gradient or {}
            x_i = stepped(method, state.x, seen, a, g, self.lr, self.clip_norm)
            arrays = grouped(**{MODEL: x_i, BUFFERS: seen.buffers})
            made[i] = replace(reply, arrays=arrays)
        return made

    def _train(
        self, state: State, method: Method, attempt: int, known: _Known, score: bool
    ) -> Good:
        numbers: dict[str, Number] = {SCORE: 1} if score else {}
        if method.uses_mean_loss:
            numbers[MEAN_LOSS] = float(known.mean_loss)
        shared = known.mean_gradient if method.uses_mean_gradient else None
        sent, wanted = model_of(state) | grouped(**{GRADIENT: shared}), model_of(state)
        if self._gradients_with_training(known):
            wanted |= grouped(**{GRADIENT: state.x})
        stamp = Stamp("train", state.round, attempt)
        loss = sends_loss(method)
        return self._enough(self._exchange(stamp, known.ids, sent, numbers, wanted, loss, score))

    def _aggregated(self, state: State, method: Method, known: _Known, good: Good) -> Outcome:
        """The outcome of the round; a and g for the next one are of those that answered in this."""
        share = self._share(good)
        loss, a, g = share * torch.nan, known.mean_loss, known.mean_gradient
        if sends_loss(method):
            loss = self._losses({i: (known.probed or good)[i] for i in good})
        if known.probed is None:
            a = state.mean_loss
            if method.uses_mean_loss:
                a = mean_loss(loss, share, self.settings)
            g = self._mean_gradient(share, good) if self._gradients_with_training(known) else None
        server = self.aggregator(method, share, list(good))
        answers = Answers(
            loss=loss,
            params=[r.group(MODEL) for r in good.values()],
            buffers=[r.group(BUFFERS) for r in good.values()],
            own=server.coefficients(loss, known.mean_loss)[0],
        )
        return aggregate(
            server,
            state,
            answers,
            a,
            g if self.method.reports_gradient else None,
            self.lr,
            lambda weights: self._limited([*good], weights, share),
            combination(self.settings),
        )

    def aggregator(self, method: Method, share: Tensor, ids: list[int]) -> Aggregator:
        """What these clients' replies become."""
        return Aggregator(method, share, torch.tensor(ids), self.clients)

    def _gradients_with_training(self, known: _Known) -> bool:
        """Approximate methods: ∇f_i(x^t) comes with x_i, unless a probe brought it already."""
        return self.method.reports_gradient and known.probed is None

    def _invited(self, t: int, attempt: int) -> list[int]:
        """Drawn from those that are there: from all clients, if all are."""
        least = self.settings.min_replies
        wanted = least if self.begun else max(self.clients, least)  # at first, wait for everyone
        present = sorted(set(self.transport.present(wanted, self.settings.patience)))
        self.begun = True
        if len(present) < least:
            raise TooFew(f"{len(present)} clients are there, {least} are needed")
        number = min(self.participation.number, len(present))
        draw = Participation(len(present), number, self.participation.seed)
        return [present[place] for place in draw.of_round(t, attempt).tolist()]

    def _exchange(
        self,
        stamp: Stamp,
        ids: Sequence[int],
        sent: Tree,
        numbers: dict[str, Number],
        wanted: Tree,
        loss: bool,
        scores: bool = False,
    ) -> Good:
        requests = [Message(stamp, i, sent, numbers) for i in ids]
        arrivals = self.transport.exchange(requests, wanted, self.settings.deadline)
        splits, largest = HELD_OUT if scores else (), self.settings.largest
        expected = Expected(stamp, frozenset(ids), wanted, loss, splits, largest)
        good, refused = sift(arrivals, expected)
        self.notes.refuse(refused)
        return good

    def _enough(self, good: Good) -> Good:
        if len(good) < self.settings.min_replies:
            raise too_few(len(good), self.settings)
        return good

    def _in_proportion(self, state: State, good: Good) -> Good:
        """The replies; one that is out of all proportion counts with the usual length."""
        if self.settings.norm_bound >= OFF:
            return good
        for group, origin in ((MODEL, state.x), (BUFFERS, state.buffers), (GRADIENT, None)):
            found = {i: length(r.group(group), origin) for i, r in good.items()}
            usual = self._usual_length(group, found)
            bound = self.settings.norm_bound * usual
            far = {i: usual / norm for i, norm in found.items() if norm > bound}
            good = {i: _shorter(r, group, far.get(i), origin) for i, r in good.items()}
            self.shortened |= far.keys()
            # What most of them send may grow from round to round, though not without a limit.
            median = median_length(min(norm, bound) for norm in found.values())
            if median is not None:
                self.lengths[group] = median
        return good

    def _usual_length(self, group: str, found: Mapping[int, float]) -> float:
        """The largest median of the past rounds; in the first one, the replies' own median."""
        past = self.notes.lengths.get(group)
        return max(past) if past else median_length(found.values()) or inf

    def _mean_gradient(self, share: Tensor, good: Good) -> Tree:
        found = stack([r.group(GRADIENT) for r in good.values()])
        return combination(self.settings)(share, found)

    def _share(self, good: Good) -> Tensor:
        """r_i over those that answered; a client that invents samples gains no more than others."""
        sizes = torch.tensor([int(r.numbers[SAMPLES]) for r in good.values()])
        share = self.method.share(sizes)
        even = torch.full_like(share, 1 / len(share))
        return self._limited([*good], share, even)

    def _limited(self, ids: list[int], weights: Tensor, share: Tensor) -> Tensor:
        found = limited_weights(weights, share, self.settings.weight_cap)
        if found is not weights:
            self.limited.add(ids[int(weights.abs().argmax())])
        return found

    def _losses(self, good: Good) -> Tensor:
        loss = torch.tensor([r.numbers[LOSS] for r in good.values()], dtype=torch.float64)
        self.notes.typical_loss = max(self.notes.typical_loss, float(loss.median()))
        return limited_losses(loss, self.settings.loss_cap * self.notes.typical_loss)


def too_few(found: int, settings: FederationSettings) -> TooFew:
    return TooFew(f"{found} good replies, {settings.min_replies} are needed")


def model_of(state: State) -> Tree:
    return grouped(**{MODEL: state.x, BUFFERS: state.buffers})


def _shorter(reply: Message, group: str, factor: float | None, origin: Tree | None) -> Message:
    if factor is None:
        return reply
    arrays = grouped(**{group: shortened(reply.group(group), factor, origin)})
    return replace(reply, arrays={**reply.arrays, **arrays})
