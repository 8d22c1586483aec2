"""Server side of a round: sample clients, send requests, filter replies, aggregate.

A round is one exchange, or two for exact methods (probe, then train). Clients whose probe reply was
accepted are asked to train; those whose train reply was accepted are aggregated. Where the server
can take the clients' step itself (`server_steps`), they train in evaluated rounds only, for the
scores of their local models. If too few replies are accepted, the round is repeated from the same
state with another sample of clients; after `repeats` such rounds the run stops.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fairvar.common.tree import Tree, is_finite, stack, zeros_like
from fairvar.deploy import guard
from fairvar.deploy.client import (
    BUFFERS,
    GRADIENT,
    HELD_OUT,
    LOSS,
    MEAN_LOSS,
    MODEL,
    PERSONAL,
    SAMPLES,
    SCORE,
    STEP,
    TRAINING,
    Agreement,
    Message,
    Number,
    Stamp,
    group_of,
    grouped,
    sends_loss,
    sends_score,
)
from fairvar.deploy.guard import Arrival, BadMessage, FederationSettings, Notes, RoundNote
from fairvar.engine.batches import Participation
from fairvar.engine.kernels.reference import Probed, stepped
from fairvar.engine.server import Aggregator, Answers, aggregate
from fairvar.engine.state import Outcome, State
from fairvar.errors import RunFailed
from fairvar.methods.base import Method

Good = Mapping[int, Message]  # good replies by client, ids rising
MEMORY = 20  # rounds of median lengths that are kept


@runtime_checkable
class Transport(Protocol):
    """Carries messages to clients and back. It may lose, delay or corrupt them."""

    name: str
    keys: dict[int, str]  # client → its key, if clients have keys; never removed
    names: dict[int, str]  # client → the name of its site, where it has one

    def present(self, at_least: int, seconds: float) -> Sequence[int]:
        """The ids of available clients, once there are `at_least` so many or the time is over."""

    def exchange(
        self, requests: Sequence[Message], like: Tree, seconds: float
    ) -> Iterable[Arrival]:
        """What came back before the deadline, in any order; `like`: the arrays of a good reply."""


class TooFew(Exception):
    """Too few accepted replies in this attempt."""


class _Known(NamedTuple):
    """Known before training: the clients to ask, and the averages that they receive."""

    ids: list[int]
    mean_loss: Tensor  # a
    mean_gradient: Tree | None  # g
    probed: Good | None = None


@dataclass
class Server:
    """`agreed.clients` is the number of all clients that may ever take part; ids start at 0."""

    agreed: Agreement
    settings: FederationSettings
    transport: Transport
    notes: Notes
    limited: set[int] = field(default_factory=set)  # clients whose weight was cut in this attempt
    shortened: set[int] = field(default_factory=set)  # clients whose arrays were shortened
    lengths: dict[str, float] = field(default_factory=dict)  # median norms in this attempt
    begun: bool = False

    def __post_init__(self) -> None:
        self.method = self.agreed.method.shared
        guard.check_average(self.settings, self.method)

    def round(self, state: State, score: bool = False) -> tuple[Outcome, Good]:
        """Round `state.round` and the accepted replies; `score`: ask for local models' scores."""
        before, recorded = self.notes.reasons(), len(self.notes.refused)
        for attempt in range(self.settings.repeats + 1):
            for found in (self.limited, self.shortened, self.lengths):
                found.clear()
            try:
                outcome, good = self._attempt(state, attempt, score)
                made_by = [*good] if outcome.answered is None else outcome.answered.tolist()
                self._write_down(state.round, made_by)
                return outcome, good
            except TooFew as few:
                last = few
        now = self.notes.reasons() - before
        reasons = ", ".join(f"{n} × {why}" for why, n in sorted(now.items()))
        by_client = guard.reasons_by_client(self.notes.refused[recorded:], self.transport.names)
        raise RunFailed(
            f"round {state.round} was given up after {self.settings.repeats + 1} attempts: {last} "
            f"({reasons or 'no client was there'}){'; ' * bool(by_client)}{by_client}"
        )

    def _write_down(self, t: int, made_by: list[int]) -> None:
        bound = self.notes.bind(self.transport.keys)
        self.notes.names |= self.transport.names
        cut = sorted(self.limited), sorted(self.shortened)
        self.notes.rounds.append(RoundNote(t, made_by, *cut, bound))
        for group, median in self.lengths.items():
            past = self.notes.lengths.get(group, [])
            self.notes.lengths[group] = [*past, median][-MEMORY:]

    def evaluate(self, state: State) -> Good:
        """Replies with the scores of the global model, and of personal models where there are some,
        from all available clients."""
        present = self.transport.present(1, self.settings.deadline)
        model = grouped(x=state.params, buffer=state.buffers)
        stamp, splits = Stamp("evaluate", state.round), tuple[str, ...](HELD_OUT)
        if self.agreed.method.personal is not None:
            splits += tuple(f"{PERSONAL}/{split}" for split in HELD_OUT)
        return self._exchange(stamp, present, model, {}, {}, loss=False, scores=splits)

    def begin_personal(self, state: State) -> None:
        """Draw the number of a new run, under which the clients keep their personal models. If only
        some clients are sampled in a round, all receive x^0 before the first: v_i^0 = x^0. Clients
        that join later start from the first model that they receive."""
        self.notes.training = secrets.randbits(48) + 1
        train = self.agreed.train
        if train.participation is not None or train.participants is not None:
            self.transport.present(self.agreed.clients, self.settings.patience)
            self.begun = True
            self.evaluate(state)

    def _attempt(self, state: State, attempt: int, score: bool) -> tuple[Outcome, Good]:
        method = self.method.at_round(state.round)
        ids = self._invited(state.round, attempt)
        known = _Known(ids, state.mean_loss, state.mean_gradient)
        if method.probes:
            known = self._probe(state, method, attempt, ids)
        if known.probed is not None and method.server_steps and not score:
            good = self._stepped(state, method, known, known.probed)
        else:
            good = self._train(state, method, attempt, known, score)
        good = self._in_proportion(state, good)
        return self._aggregated(state, method, known, good), good

    def _probe(self, state: State, method: Method, attempt: int, ids: list[int]) -> _Known:
        stamp, loss = Stamp("probe", state.round, attempt), sends_loss(method)
        wanted = grouped(g=state.x, buffer=state.buffers if method.server_steps else None)
        good = self._exchange(stamp, ids, model_of(state), {}, wanted, loss)
        good = self._in_proportion(state, good)
        share, a = self._share(good), state.mean_loss
        if not method.broadcasts_means:
            a, weights = self.aggregator(method, share, [*good]).broadcast(self._losses(good))
            share = self._limited([*good], weights, share)
        elif loss:
            a = guard.mean_loss(self._losses(good), share, self.settings)
        return _Known(list(good), a, self._mean_gradient(state, share, good), good)

    def _stepped(self, state: State, method: Method, known: _Known, probed: Good) -> Good:
        """The local models after one step, computed by the server from the probe's replies."""
        made, train = dict[int, Message](), self.agreed.train
        for (i, reply), loss in zip(probed.items(), self._losses(probed), strict=True):
            seen = Probed(loss, reply.group(GRADIENT), reply.group(BUFFERS))
            a, g = known.mean_loss, known.mean_gradient or {}
            x_i = stepped(method, state.x, seen, a, g, train, state.round)
            made[i] = replace(reply, arrays=grouped(x=x_i, buffer=seen.buffers))
        return made

    def _train(
        self, state: State, method: Method, attempt: int, known: _Known, score: bool
    ) -> Good:
        sent, numbers = train_request(state, method, known)
        if score:
            numbers[SCORE] = 1
        wanted = model_of(state)
        if self._gradients_with_training(known):
            wanted |= grouped(g=state.x)
        stamp, loss = Stamp("train", state.round, attempt), sends_loss(method)
        splits = HELD_OUT if score else ()
        return self._exchange(stamp, known.ids, sent, numbers, wanted, loss, splits)

    def _aggregated(self, state: State, method: Method, known: _Known, good: Good) -> Outcome:
        """The outcome of the round. a and g for the next round average this round's replies."""
        share = self._share(good)
        loss, a, g = share * torch.nan, known.mean_loss, known.mean_gradient
        if sends_loss(method):
            loss = self._losses({i: (known.probed or good)[i] for i in good})
        if known.probed is None:
            a = state.mean_loss
            if method.uses_mean_loss:
                a = guard.mean_loss(loss, share, self.settings)
            fresh = self._gradients_with_training(known)
            g = self._mean_gradient(state, share, good) if fresh else None
        server = self.aggregator(method, share, list(good))
        answers = Answers(
            loss=loss,
            params=[r.group(MODEL) for r in good.values()],
            buffers=[r.group(BUFFERS) for r in good.values()],
            own=self._factors(server, loss, known.mean_loss),
        )
        return aggregate(
            server,
            state,
            answers,
            a,
            g if self.method.keeps_gradient else None,
            self.agreed.train.lr_of(state.round),
            lambda weights: self._limited([*good], weights, share),
            guard.combination(self.settings),
            known.mean_gradient,
        )

    def _factors(self, server: Aggregator, loss: Tensor, mean_loss: Tensor) -> Tensor:
        """The factors of the clients' own gradients; NaN for methods with a bound, because clients
        do not report by how much they shortened their penalty."""
        own = server.coefficients(loss, mean_loss)[0]
        return own if server.method.penalty_bound is None else own * torch.nan

    def aggregator(self, method: Method, share: Tensor, ids: list[int]) -> Aggregator:
        """For the replies of these clients."""
        return Aggregator(method, share, torch.tensor(ids), self.agreed.clients)

    def _gradients_with_training(self, known: _Known) -> bool:
        """Approximate methods: ∇f_i(x^t) comes with x_i, unless a probe brought it already."""
        return self.method.reports_gradient and known.probed is None

    def _invited(self, t: int, attempt: int) -> list[int]:
        """The clients to ask, sampled from those that are available."""
        least, clients, train = self.settings.min_replies, self.agreed.clients, self.agreed.train
        wanted = least if self.begun else max(clients, least)  # at first, wait for all clients
        present = sorted(set(self.transport.present(wanted, self.settings.patience)))
        self.begun = True
        if len(present) < least:
            raise TooFew(f"{len(present)} clients are available, {least} are needed")
        asked = Participation.build(clients, train.seed, train.participation, train.participants)
        draw = Participation(len(present), min(asked.number, len(present)), asked.seed)
        return [present[place] for place in draw.of_round(t, attempt).tolist()]

    def _exchange(
        self,
        stamp: Stamp,
        ids: Sequence[int],
        sent: Tree,
        numbers: dict[str, Number],
        wanted: Tree,
        loss: bool,
        scores: tuple[str, ...] = (),
    ) -> Good:
        requests = [Message(stamp, i, sent, self._numbers(numbers)) for i in ids]
        arrivals = self.transport.exchange(requests, wanted, self.settings.deadline)
        largest = self.settings.largest
        metric = self.agreed.metric
        within = (metric.bounds or (-largest, largest)) if sends_score(metric) else None
        expected = guard.Expected(stamp, frozenset(ids), wanted, loss, scores, largest, within)
        good, bad = guard.sift(arrivals, expected)
        self.notes.refuse(stamp, bad)
        self.notes.count_samples(good)
        if stamp.exchange != "evaluate":
            self._check_enough(len(good))
        return good

    def _numbers(self, numbers: dict[str, Number]) -> dict[str, Number]:
        training = self.notes.training
        return {**numbers, TRAINING: training} if training else numbers

    def _check_enough(self, found: int) -> None:
        if found < self.settings.min_replies:
            raise TooFew(f"{found} accepted replies, {self.settings.min_replies} are needed")

    def _in_proportion(self, state: State, good: Good) -> Good:
        """The replies; updates, gradients and buffers that are much longer than usual are shortened
        to the usual length (`norm_bound`)."""
        if self.settings.norm_bound >= guard.OFF:
            return good
        origins = {MODEL: state.x, BUFFERS: state.buffers, GRADIENT: zeros_like(state.x)}
        for group, origin in origins.items():
            found = {i: guard.length(r.group(group), origin) for i, r in good.items()}
            # The largest median of the past rounds; in the first one, the replies' own median.
            past = self.notes.lengths.get(group)
            usual = max(past) if past else guard.median_length(found.values()) or inf
            bound = self.settings.norm_bound * usual
            far = {i: usual / norm for i, norm in found.items() if norm > bound}
            for i, factor in far.items():
                arrays = grouped(**{group: guard.shortened(good[i].group(group), factor, origin)})
                good = {**good, i: replace(good[i], arrays={**good[i].arrays, **arrays})}
            self.shortened |= far.keys()
            # The usual length may grow from round to round, by at most the factor `norm_bound`.
            median = guard.median_length(min(norm, bound) for norm in found.values())
            if median is not None:
                self.lengths[group] = median
        return good

    def _mean_gradient(self, state: State, share: Tensor, good: Good) -> Tree:
        found = stack([r.group(GRADIENT) for r in good.values()])
        mean = guard.combination(self.settings)(share, found)
        return self.method.smoothed(state.mean_gradient, mean)

    def _share(self, good: Good) -> Tensor:
        """r_i over the clients that answered, limited by `weight_cap`: a client may report more
        samples than it has."""
        sizes = torch.tensor([int(r.numbers[SAMPLES]) for r in good.values()])
        share = self.method.plain_weights(sizes)
        return self._limited([*good], share, torch.full_like(share, 1 / len(share)))

    def _limited(self, ids: list[int], weights: Tensor, share: Tensor) -> Tensor:
        found = guard.limited_weights(weights, share, self.settings.weight_cap)
        if found is not weights:
            self.limited.add(ids[int(weights.abs().argmax())])
        return found

    def _losses(self, good: Good) -> Tensor:
        loss = torch.tensor([r.numbers[LOSS] for r in good.values()], dtype=torch.float64)
        self.notes.typical_loss = max(self.notes.typical_loss, float(loss.median()))
        return loss.clamp(max=self.settings.loss_cap * self.notes.typical_loss)


def model_of(state: State) -> Tree:
    return grouped(x=state.x, buffer=state.buffers)


def train_request(state: State, method: Method, known: _Known) -> tuple[Tree, dict[str, Number]]:
    """The content of a train request: the model, and a and g if the method uses them."""
    shared = known.mean_gradient if method.uses_mean_gradient else None
    numbers: dict[str, Number] = {}
    if method.uses_mean_loss:
        numbers[MEAN_LOSS] = float(known.mean_loss)
    return model_of(state) | grouped(g=shared), numbers


# -- sums over clients only ------------------------------------------------------------------------
class Mean(NamedTuple):
    """Over those that took part. Empty if secure aggregation failed; `lost` says why."""

    ids: list[int]
    share: Tensor  # r_i, as far as it is known; float64
    arrays: Tree  # Σ r_i v_i, float64
    lost: Mapping[int, BadMessage]


@runtime_checkable
class MeanTransport(Transport, Protocol):
    """Returns only the mean of the clients' contributions; evaluations are ordinary exchanges."""

    def mean(self, requests: Sequence[Message], like: Tree, seconds: float) -> Mean:
        """Of arrays with these names and shapes."""


@dataclass
class SummingServer(Server):
    """The server under secure aggregation, which receives only sums over clients.

    It receives the mean of the participants' `contribution`s, weighted by r_i.
    That is enough for a method whose weights and normaliser are sums of what each client adds to
    them (`is_additive`). The server never sees a single reply, so it cannot limit losses, weights
    and lengths.
    """

    transport: MeanTransport

    def _attempt(self, state: State, attempt: int, score: bool) -> tuple[Outcome, Good]:
        method, ids = self.method.at_round(state.round), self._invited(state.round, attempt)
        known = _Known(ids, state.mean_loss, state.mean_gradient)
        # Averaged with the update: ∇f_i for this round's g or the next one's, f_i for a.
        by_gradient = self.method.reports_gradient or method.probes
        averages = grouped(g=state.x if by_gradient else None)
        if method.uses_mean_loss:
            averages[LOSS] = torch.zeros(1)
        if method.probes:
            stamp = Stamp("probe", state.round, attempt)
            found = self._mean(stamp, ids, model_of(state), {}, averages)
            known, averages = _after(found, state, method), {}
        sent, numbers = train_request(state, method, known)
        wanted = grouped(x=state.x) | averages
        if type(method).normaliser is not Method.normaliser:
            wanted[STEP] = torch.zeros(1)
        stamp = Stamp("train", state.round, attempt)
        found = self._mean(stamp, known.ids, sent, numbers, wanted)
        if averages:
            known = _after(found, state, method)
        return self._outcome(state, found, method, known), {}

    def _outcome(self, state: State, found: Mean, method: Method, known: _Known) -> Outcome:
        step, update = found.arrays.get(STEP, torch.ones(1)), group_of(found.arrays, MODEL)
        unknown = torch.full_like(found.share, torch.nan)
        plain = type(method).weigh is Method.weigh  # weights that depend on losses are not known
        return self.aggregator(method, found.share, found.ids).finish(
            lambda _, step: {k: (v / step).to(state.x[k].dtype) for k, v in update.items()},
            loss=unknown,
            weights=found.share if plain else unknown,
            memory=state.memory,
            lr=self.agreed.train.lr_of(state.round),
            buffers={},
            own=unknown if method.uses_mean_loss else None,
            mean_gradient=known.mean_gradient if self.method.keeps_gradient else None,
            mean_loss=known.mean_loss,
            normaliser=step,
        )

    def _mean(
        self, stamp: Stamp, ids: list[int], sent: Tree, numbers: dict[str, Number], wanted: Tree
    ) -> Mean:
        requests = [Message(stamp, i, sent, self._numbers(numbers)) for i in ids]
        found = self.transport.mean(requests, wanted, self.settings.deadline)
        self.notes.refuse(stamp, found.lost.items())
        self._check_enough(len(found.ids))
        if not is_finite(found.arrays):
            raise TooFew("the sum over clients is not finite")
        return found


def _after(found: Mean, state: State, method: Method) -> _Known:
    """Those that answered, and their a and g."""
    a = found.arrays[LOSS][0] if LOSS in found.arrays else state.mean_loss
    mean = group_of(found.arrays, GRADIENT)
    if not mean:
        return _Known(found.ids, a, None)
    mean = {name: leaf.to(state.x[name].dtype) for name, leaf in mean.items()}
    return _Known(found.ids, a, method.smoothed(state.mean_gradient, mean))
