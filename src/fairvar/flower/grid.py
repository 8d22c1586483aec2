"""Flower's grid as a transport: our own push and pull, since the stock loop looks every 3 seconds.

Nodes are known by their client id, which is theirs for good: a node that is started anew may get
another node id. So every new node is asked once who it is (`hello`), and one that did not answer in
time is asked again before it gets more work. Nobody waits for nodes that are not needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from flwr.app import Message as Envelope
from flwr.app import RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fairvar.federated.guard import Arrival, Reason
from fairvar.federated.messages import Message
from fairvar.flower.wire import HELLO, KINDS, from_records, to_records

LOG = logging.getLogger("flwr.fairvar")
PAUSE = 0.1  # seconds between looks for replies; a look costs about 10 ms
LOOK_ROUND = 2.0  # seconds between looks for new nodes during an exchange
RETRY = 15.0  # seconds before a node that could not be used is asked again
HELLO_LIFE = 3600.0  # seconds; a node that is busy or away may answer late


class GridTransport:
    """Clients behind a Flower grid."""

    name = "flower"

    def __init__(self, grid: Grid, clients: int, facts: Mapping[str, float] | None = None) -> None:
        """`facts` go with every train request, for Flower's mods on the node."""
        self.grid, self.clients, self.facts = grid, clients, facts or {}
        self.nodes: dict[int, int] = {}  # client id → node id
        self.greeted: dict[str, int] = {}  # hello messages under way → node id
        self.shunned: dict[int, float] = {}  # node id → when to ask it again

    def present(self, at_least: int, seconds: float) -> Sequence[int]:
        end = time.monotonic() + seconds
        while True:
            self._welcome()
            if len(self.nodes) >= min(at_least, self.clients) or time.monotonic() >= end:
                return sorted(self.nodes)
            time.sleep(PAUSE)

    def exchange(self, requests: Sequence[Message], seconds: float) -> Iterator[Arrival]:
        asked = {r.client: self.nodes[r.client] for r in requests if r.client in self.nodes}
        envelopes = [self._envelope(r, seconds) for r in requests if r.client in asked]
        waiting = dict(zip(self.grid.push_messages(envelopes), asked, strict=True))
        for reply in self._replies(set(waiting), seconds):
            client = waiting.pop(reply.metadata.reply_to_message_id)
            yield self._arrival(client, reply, asked[client])
        for client in waiting.values():
            self._lose(client, asked[client], "no reply in time")  # it must say hello again

    def _replies(self, ids: set[str], seconds: float) -> Iterator[Envelope]:
        """Those that come before the time is over."""
        end, welcome = time.monotonic() + seconds, time.monotonic() + LOOK_ROUND
        while ids and time.monotonic() < end:
            for reply in self._pull(ids):
                ids.discard(reply.metadata.reply_to_message_id)
                yield reply
            if ids:
                time.sleep(PAUSE)
            if time.monotonic() > welcome:  # who comes now can be asked in the next exchange
                self._welcome()
                welcome = time.monotonic() + LOOK_ROUND

    def _envelope(self, request: Message, seconds: float) -> Envelope:
        kind = request.stamp.exchange
        records = to_records(request, self.facts if kind == "train" else None)
        return Envelope(records, self.nodes[request.client], KINDS[kind], ttl=seconds)

    def _lose(self, client: int, node: int, why: str) -> None:
        if self.nodes.get(client) == node:  # not another one that came in its place
            del self.nodes[client]
            LOG.warning("client %s is lost: %s", client, why)

    def _arrival(self, client: int, reply: Envelope, node: int) -> Arrival:
        if reply.has_error():
            self._lose(client, node, short(reply))
            # The deadline by the SuperLink's clock, where that is first.
            late = reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE
            return Arrival(client, None, Reason.NO_REPLY if late else Reason.ERROR, short(reply))
        try:
            return Arrival(client, from_records(reply.content))
        except ValueError as error:
            return Arrival(client, None, Reason.FORMAT, str(error))

    def _welcome(self) -> None:
        """Find out who the new nodes are, without waiting for any of them."""
        listed = set(self.grid.get_node_ids())
        for client, node in list(self.nodes.items()):
            if node not in listed:
                self._lose(client, node, "its node is offline")
        shunned = {n for n, until in self.shunned.items() if time.monotonic() < until}
        known = {*self.nodes.values(), *self.greeted.values(), *shunned}
        hello = [Envelope(RecordDict(), n, HELLO, ttl=HELLO_LIFE) for n in sorted(listed - known)]
        if hello:
            nodes = [e.metadata.dst_node_id for e in hello]
            self.greeted |= dict(zip(self.grid.push_messages(hello), nodes, strict=True))
        for reply in self._pull(self.greeted):
            self._meet(self.greeted.pop(reply.metadata.reply_to_message_id), reply)

    def _meet(self, node: int, reply: Envelope) -> None:
        arrival = self._arrival(-1, reply, node)
        client = None if arrival.reply is None else arrival.reply.client
        again = time.monotonic() + RETRY
        if client is None:
            why = f"did not say who it is ({arrival.detail})"
        elif type(client) is not int or not 0 <= client < self.clients:
            why, again = f"says it is client {client!r} of {self.clients}", inf
        elif client in self.nodes:
            why = f"says it is client {client}, which node {self.nodes[client]} is"
        else:
            self.nodes[client] = node
            LOG.info("client %s is there: node %s", client, node)
            return
        self.shunned[node] = again
        LOG.warning("node %s %s; it is left out", node, why)

    def _pull(self, ids: Iterable[str]) -> list[Envelope]:
        """Replies that have come, one for each message; matched by what they answer (never by their
        sender: an error may come from the SuperLink)."""
        asked = set(ids)
        if not asked:
            return []
        found: dict[str, Envelope] = {}
        for reply in self.grid.pull_messages(asked):
            found.setdefault(reply.metadata.reply_to_message_id, reply)
        return [reply for answers, reply in found.items() if answers in asked]


def short(reply: Envelope) -> str:
    return f"Flower's error {reply.error.code}: {reply.error.reason or ''}"[:300].strip()
