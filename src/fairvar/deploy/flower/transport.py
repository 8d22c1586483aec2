"""Messages over a Flower grid, with our own loop: Flower's polls every 3 seconds only.

Every new node is asked once which client it is (`hello`), and a node that did not answer in time is
asked again before it gets more work. The server never waits for nodes that it does not need. From
its first hello on, a client id belongs to the key with which that node is registered, also after a
restart of the server: another node with the same id is left out until the operator releases the id.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from flwr.app import Message as Envelope
from flwr.app import RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid
from httpx import TransportError

from fairvar.deploy.flower.wire import HELLO, KINDS, Unreadable, from_records, to_records
from fairvar.deploy.guard import Arrival, Reason, brief
from fairvar.deploy.messages import Message
from fairvar.tree import Tree

LOG = logging.getLogger("flwr.fairvar")
PAUSE = 0.1  # seconds between two polls for replies; a poll takes about 10 ms
POLL_NODES = 2.0  # seconds between two polls for new nodes during an exchange
RETRY = 15.0  # seconds before a node that could not be used is asked again
HELLO_LIFE = 3600.0  # seconds; a busy node may answer late
Reply = Envelope | Exception  # a reply, or the error that Flower raised when it opened one


class GridTransport:
    """Clients behind a Flower grid."""

    name = "flower"

    def __init__(self, grid: Grid, clients: int, facts: Mapping[str, float] | None = None) -> None:
        """`facts` are added to every train request, for Flower's mods on the node."""
        self.grid, self.clients, self.facts = grid, clients, facts or {}
        self.nodes: dict[int, int] = {}  # client id → node id
        self.keys: dict[int, str] = {}  # client id → the key of its node
        self.listed: dict[int, str] = {}  # node id → its key
        self.greeted: dict[str, int] = {}  # unanswered hello messages → node id
        self.refused: dict[int, float] = {}  # node id → when to ask it again

    def present(self, at_least: int, seconds: float) -> Sequence[int]:
        end = time.monotonic() + seconds
        while True:
            self._welcome()
            if len(self.nodes) >= min(at_least, self.clients) or time.monotonic() >= end:
                return sorted(self.nodes)
            time.sleep(PAUSE)

    def exchange(
        self, requests: Sequence[Message], like: Tree, seconds: float
    ) -> Iterator[Arrival]:
        asked = {r.client: self.nodes[r.client] for r in requests if r.client in self.nodes}
        sent = [(r.client, self._envelope(r, seconds)) for r in requests if r.client in asked]
        waiting = self._push(sent)
        for message, reply in self._replies(set(waiting), seconds):
            client = waiting.pop(message)
            yield self._arrival(client, reply, asked[client], like)
        for client in waiting.values():
            self._lose(client, asked[client], "no reply in time")  # it must say hello again

    def _push(self, envelopes: Iterable[tuple[int, Envelope]]) -> dict[str, int]:
        """Message id → recipient. One by one, so that a message that Flower refuses is alone."""
        sent = {}
        for whom, envelope in envelopes:
            (*ids,) = self.grid.push_messages([envelope])
            if ids and ids[0]:
                sent[ids[0]] = whom
        return sent

    def _replies(self, ids: set[str], seconds: float) -> Iterator[tuple[str, Reply]]:
        """Replies that arrive in time, each with the id of the message that it answers."""
        end, welcome = time.monotonic() + seconds, time.monotonic() + POLL_NODES
        while ids and time.monotonic() < end:
            for message, reply in self._pull(ids):
                ids.discard(message)
                yield message, reply
            if ids:
                time.sleep(PAUSE)
            if time.monotonic() > welcome:  # new nodes can take part in the next exchange
                self._welcome()
                welcome = time.monotonic() + POLL_NODES

    def _envelope(self, request: Message, seconds: float) -> Envelope:
        kind = request.stamp.exchange
        records = to_records(request, self.facts if kind == "train" else None)
        return Envelope(records, self.nodes[request.client], KINDS[kind], ttl=seconds)

    def _lose(self, client: int, node: int, why: str) -> None:
        if self.nodes.get(client) == node:  # and not a node that replaced it
            del self.nodes[client]
            LOG.warning("client %s is lost: %s", client, why)

    def _arrival(self, client: int, reply: Reply, node: int, like: Tree) -> Arrival:
        """The only place where a reply is opened; any exception that it causes is its own fault."""
        try:
            if isinstance(reply, Exception):
                raise reply
            if not reply.has_error():
                return Arrival(client, from_records(reply.content, like))
            why, late = error_of(reply), reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE
        except Unreadable as error:
            return Arrival(client, None, error.reason, brief(error.detail))
        except Exception as error:
            return Arrival(client, None, Reason.FORMAT, brief(repr(error)))
        self._lose(client, node, why)
        # `late`: the deadline passed by the SuperLink's clock, which may be ahead of ours.
        return Arrival(client, None, Reason.NO_REPLY if late else Reason.ERROR, why)

    def _welcome(self) -> None:
        """Ask new nodes which clients they are, without waiting for answers."""
        self.listed = {info.node_id: self._key(info) for info in self.grid.get_nodes()}
        for client, node in list(self.nodes.items()):
            if node not in self.listed:
                self._lose(client, node, "its node is offline")
        waiting = {n for n, until in self.refused.items() if time.monotonic() < until}
        known = {*self.nodes.values(), *self.greeted.values(), *waiting}
        new = sorted(self.listed.keys() - known)
        self.greeted |= self._push(
            (n, Envelope(RecordDict(), n, HELLO, ttl=HELLO_LIFE)) for n in new
        )
        for message, reply in self._pull(self.greeted):
            self._meet(self.greeted.pop(message), reply)

    def _meet(self, node: int, reply: Reply) -> None:
        arrival = self._arrival(-1, reply, node, {})
        client = None if arrival.reply is None else arrival.reply.client
        again = time.monotonic() + RETRY
        if arrival.reply is None:
            why = f"did not say who it is ({arrival.detail})"
        elif type(client) is not int or not 0 <= client < self.clients:
            why, again = f"says it is client {client!r} of {self.clients}", inf
        elif client in self.nodes:
            why = f"says it is client {client}, which node {self.nodes[client]} is"
        elif node not in self.listed:
            why = "has left again"
        elif (other := self._of_another(client, self.listed[node])) is not None:
            why = f"says it is client {client}, but {other}"
        else:
            self.nodes[client] = node
            self.keys |= {client: key} if (key := self.listed[node]) else {}
            LOG.info("client %s is there: node %s", client, node)
            return
        self.refused[node] = again
        LOG.warning("node %s %s; it is left out", node, brief(why))

    def _key(self, info: NodeInfo) -> str:
        """The fingerprint of the key that a node is registered with; without one, its node id.
        Empty in simulations, which draw new keys at every start."""
        if isinstance(self.grid, InMemoryGrid):
            return ""
        if not info.public_key:
            return f"node-{info.node_id}"
        return hashlib.sha256(info.public_key).hexdigest()[:32]

    def _of_another(self, client: int, key: str) -> str | None:
        """Why this client cannot belong to this key; None if it can."""
        if not key:
            return None
        bound = self.keys.get(client, key)
        if bound != key:
            return (f"it has key {key}, and the client belongs to {bound}; "
                    f"federation.rebind=[{client}] releases it")  # fmt: skip
        theirs = [c for c, k in self.keys.items() if k == key and c != client]
        return f"its key {key} belongs to client {theirs[0]}" if theirs else None

    def _pull(self, ids: Iterable[str]) -> Iterator[tuple[str, Reply]]:
        """Replies that have arrived, each with the id of the message that was asked for. One by
        one: Flower opens a reply when it fetches it, and an error there would lose the others. What
        a reply itself says that it answers is not trusted."""
        for message in list(ids):
            try:
                found = next(iter(self.grid.pull_messages([message])), None)
            except TransportError:
                raise  # the SuperLink cannot be reached
            except Exception as error:
                yield message, error
                continue
            if found is not None:
                yield message, found


def error_of(reply: Envelope) -> str:
    return brief(f"Flower's error {reply.error.code}: {reply.error.reason or ''}")
