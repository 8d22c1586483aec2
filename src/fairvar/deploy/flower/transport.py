"""Messages over a Flower grid, with our own polling loop (Flower's polls every 3 seconds only).

Every new node is asked once for its client id (`hello`), and a node that did not reply in time is
asked again before it gets further requests. From its first hello on, a client id is bound to the
key with which that node is registered, also after a restart of the server: another node with the
same id is left out until the operator releases the id (`federation.rebind`).

A message is one ArrayRecord and one ConfigRecord in each direction, nothing pickled. Flower's
privacy mods require exactly one record of arrays and act only on messages of type `train`.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from math import inf, prod
from typing import Any, Literal, NamedTuple, TypeVar
from warnings import catch_warnings

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as Envelope
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.constant import ErrorCode, SType
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid
from httpx import TransportError
from numpy.lib import format as npy
from torch import Tensor

from fairvar.common.tree import Tree
from fairvar.deploy.client import Message, Number, Stamp
from fairvar.deploy.guard import (
    Arrival,
    BadMessage,
    Form,
    Reason,
    brief,
    check_forms,
    labelled,
    listed,
)
from fairvar.errors import BadInput

T = TypeVar("T")
LOG = logging.getLogger("flwr.fairvar")
PAUSE = 0.1  # seconds between two polls for replies; a poll takes about 10 ms
POLL_NODES = 2.0  # seconds between two polls for new nodes during an exchange
REPORT_WAITING = 20.0  # seconds before the log says which clients are missing
RETRY = 15.0  # seconds before a refused node is asked again
HELLO_LIFE = 3600.0  # seconds; a busy node may reply late
Reply = Envelope | Exception  # a reply, or Flower's error when it read one
ARRAYS, FACTS, NUMBER = "arrays", "message", "number/"
KINDS = {"probe": "query.probe", "train": "train", "evaluate": "evaluate"}  # message types
HELLO = "query.hello"
NAMES, WANTED = "names", "wanted"  # in the older interface arrays have no names: "x/weight x/bias"
SITE = "site"  # in an answer to hello: the node's name
# How Flower quotes the exception of an app: <class 'module.Name'>:<'text'>
QUOTED = re.compile(r"<class '(?:\w+\.)*(\w+)'>:<'(.*)'>", re.DOTALL)
UNREADABLE = "unreadable"  # in a node's reply: the nodes whose shares it cannot decrypt
_NAMES = ("float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
DTYPES: dict[np.dtype[Any], torch.dtype] = {np.dtype(n): getattr(torch, n) for n in _NAMES}


class GridTransport:
    """Clients behind a Flower grid."""

    name = "flower"

    def __init__(self, grid: Grid, clients: int, facts: Mapping[str, float] | None = None) -> None:
        """`facts` are added to every train request, for Flower's mods on the node."""
        self.grid, self.clients, self.facts = grid, clients, facts or {}
        self.nodes: dict[int, int] = {}  # client id → node id
        self.keys: dict[int, str] = {}  # client id → the key of its node
        self.names: dict[int, str] = {}  # client id → the name of its site
        self.listed: dict[int, str] = {}  # node id → its key
        self.greeted: dict[str, int] = {}  # unanswered hello messages → node id
        self.refused: dict[int, float] = {}  # node id → when to ask it again

    def present(self, at_least: int, seconds: float) -> Sequence[int]:
        self._check_simulated()
        end, report = time.monotonic() + seconds, time.monotonic() + REPORT_WAITING
        while True:
            self._welcome()
            if len(self.nodes) >= min(at_least, self.clients) or time.monotonic() >= end:
                return sorted(self.nodes)
            if time.monotonic() >= report:
                report = end
                missing = [c for c in range(self.clients) if c not in self.nodes]
                LOG.info("waiting for %s, up to %.0f s", listed(missing, self.names), seconds)
            time.sleep(PAUSE)

    def _check_simulated(self) -> None:
        """Raise if fewer nodes are simulated than clients: their number does not grow."""
        nodes = len(list(self.grid.get_node_ids())) if isinstance(self.grid, InMemoryGrid) else 0
        if 0 < nodes < self.clients:
            raise BadInput(
                f"{nodes} nodes are simulated, but the run has {self.clients} clients; start it "
                "with `fairvar flower run`, or give `flwr run` --federation-config "
                f"num-supernodes={self.clients}"
            )

    def exchange(
        self, requests: Sequence[Message], like: Tree, seconds: float
    ) -> Iterator[Arrival]:
        sent = {r.client: self._envelope(r, seconds) for r in requests if r.client in self.nodes}
        asked = {client: self.nodes[client] for client in sent}

        def read(client: int, reply: Envelope) -> Message:
            return from_records(reply.content, like)

        for client, found in self.collect(sent, seconds, read):
            if isinstance(found, BadMessage) and found.reason in (Reason.NO_REPLY, Reason.ERROR):
                self._lose(client, asked[client], found)  # ask for its id again
            yield Arrival(client, found)

    def collect(
        self, sent: Mapping[int, Envelope], seconds: float, read: Callable[[int, Envelope], T]
    ) -> Iterator[tuple[int, T | BadMessage]]:
        """Send messages to clients; yields `read(reply)`, or the reason why there is no reply."""
        waiting = self._push(sent.items())
        silent = sent.keys() - waiting.values()
        for message, reply in self._replies(set(waiting), seconds):
            client = waiting.pop(message)
            yield client, opened(reply, partial(read, client))
        for client in sorted([*silent, *waiting.values()]):
            yield client, BadMessage()

    def _push(self, envelopes: Iterable[tuple[int, Envelope]]) -> dict[str, int]:
        """Message id → recipient. Sent one by one, so that only refused messages are lost."""
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

    def _lose(self, client: int, node: int, why: BadMessage) -> None:
        if self.nodes.get(client) == node:  # not if another node has replaced it
            del self.nodes[client]
            name = labelled(client, self.names)
            LOG.warning("%s is lost: %s", name, why.detail or "no reply in time")

    def _welcome(self) -> None:
        """Ask new nodes for their client ids, without waiting for the replies."""
        self.listed = {info.node_id: self._key(info) for info in self.grid.get_nodes()}
        for client, node in list(self.nodes.items()):
            if node not in self.listed:
                self._lose(client, node, BadMessage(detail="its node is offline"))
        waiting = {n for n, until in self.refused.items() if time.monotonic() < until}
        known = {*self.nodes.values(), *self.greeted.values(), *waiting}
        new = sorted(self.listed.keys() - known)
        self.greeted |= self._push(
            (n, Envelope(RecordDict(), n, HELLO, ttl=HELLO_LIFE)) for n in new
        )
        for message, reply in self._pull(self.greeted):
            self._meet(self.greeted.pop(message), reply)

    def _meet(self, node: int, reply: Reply) -> None:
        client = opened(reply, lambda r: from_records(r.content, {}).client)
        site = opened(reply, lambda r: brief(str(r.content.config_records[FACTS].get(SITE, ""))))
        again = time.monotonic() + RETRY
        if isinstance(client, BadMessage):
            why = f"did not say who it is ({client.detail})"
        elif type(client) is not int or not 0 <= client < self.clients:
            why, again = f"says it is client {client!r} of {self.clients}", inf
        elif client in self.nodes:
            why = f"says it is {labelled(client, self.names)}, which node {self.nodes[client]} is"
        elif node not in self.listed:
            why = "has left again"
        elif (other := self._of_another(client, self.listed[node])) is not None:
            why = f"says it is {labelled(client, self.names)}, but {other}"
        else:
            self.nodes[client] = node
            self.keys |= {client: key} if (key := self.listed[node]) else {}
            self.names |= {client: site} if site and isinstance(site, str) else {}
            LOG.info("%s is there: node %s", labelled(client, self.names), node)
            return
        self.refused[node] = again
        LOG.warning("node %s %s; it is left out", node, brief(why))

    def _key(self, info: NodeInfo) -> str:
        """The fingerprint of the node's registered key, or its node id without one. Empty in
        simulations, which draw new keys at every start."""
        if isinstance(self.grid, InMemoryGrid):
            return ""
        if not info.public_key:
            return f"node-{info.node_id}"
        return hashlib.sha256(info.public_key).hexdigest()[:32]

    def _of_another(self, client: int, key: str) -> str | None:
        """The reason why this client id cannot be bound to this key; None if it can."""
        if not key:
            return None
        bound = self.keys.get(client, key)
        if bound != key:
            return (f"it has key {key}, and the client belongs to {bound}; "
                    f"federation.rebind=[{client}] releases it")  # fmt: skip
        theirs = [c for c, k in self.keys.items() if k == key and c != client]
        return f"its key {key} belongs to client {theirs[0]}" if theirs else None

    def _pull(self, ids: Iterable[str]) -> Iterator[tuple[str, Reply]]:
        """Replies that have arrived, each with the id of its request (the id inside the reply is
        not trusted). Fetched one by one: an error of Flower in one reply would lose the others."""
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


def opened(reply: Reply, read: Callable[[Envelope], T]) -> T | BadMessage:
    """`read(reply)`, or the reason why it failed. Replies are read only here: any exception makes
    the reply a bad one."""
    try:
        if isinstance(reply, Exception):
            raise reply
        return error_of(reply) if reply.has_error() else read(reply)
    except BadMessage as error:
        return error
    except Exception as error:
        return BadMessage(Reason.FORMAT, repr(error))


def error_of(reply: Envelope) -> BadMessage:
    # Late by the SuperLink's clock, which may be ahead of this machine's.
    late = reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    text = reply.error.reason or ""
    raised = QUOTED.search(text)
    text = f"{raised[1]}: {raised[2]}" if raised else f"Flower's error {reply.error.code}: {text}"
    return BadMessage(Reason.NO_REPLY if late else Reason.ERROR, text)


def to_records(message: Message, more: Mapping[str, float | str] | None = None) -> RecordDict:
    """`more`: numbers for Flower's mods, or the name of a site."""
    arrays = {name: Array(leaf.numpy(force=True)) for name, leaf in message.arrays.items()}
    facts: dict[str, Any] = {"client": message.client, **message.stamp._asdict()}
    facts |= {f"{NUMBER}{name}": value for name, value in message.numbers.items()}
    return RecordDict({ARRAYS: ArrayRecord(arrays), FACTS: ConfigRecord({**facts, **(more or {})})})


def from_records(records: RecordDict, like: Mapping[str, Tensor] | None = None) -> Message:
    """Raises `BadMessage` for any defect of form; the guard checks the values. Arrays whose shapes
    and types differ from `like` are refused by their headers, before memory is allocated."""
    try:
        facts: dict[str, Any] = dict(records.config_records[FACTS])
        stamp = Stamp(facts["exchange"], facts["round"], facts["attempt"], facts["format"])
        given = records.array_records[ARRAYS]
        if any(array.stype != SType.NUMPY for array in given.values()):
            raise ValueError("arrays in another format than numpy's")
        found = {name: header_of(array.data) for name, array in given.items()}
        if like is not None:
            check_forms({name: header.form for name, header in found.items()}, like)
        arrays = {name: header.tensor() for name, header in found.items()}
        numbers: dict[str, Number] = {
            name.removeprefix(NUMBER): value
            for name, value in facts.items()
            if name.startswith(NUMBER)
        }
        return Message(stamp, facts["client"], arrays, numbers)
    except BadMessage:
        raise
    except Exception as error:  # also MemoryError, OverflowError, RecursionError
        raise BadMessage(Reason.FORMAT, repr(error)) from None


def pack_request(records: RecordDict, wanted: Iterable[str]) -> FitIns:
    """A request in Flower's older interface, for secure aggregation; `wanted` names the sums."""
    arrays = records.array_records[ARRAYS]
    facts: dict[str, Any] = dict(records.config_records[FACTS])
    facts |= {NAMES: " ".join(arrays), WANTED: " ".join(wanted)}
    return FitIns(ndarrays_to_parameters([a.numpy() for a in arrays.values()]), facts)


def unpack_request(asked: FitIns) -> tuple[RecordDict, list[str]]:
    facts: dict[str, Any] = dict(asked.config)
    names, wanted = (str(facts.pop(key)).split() for key in (NAMES, WANTED))
    arrays = zip(names, parameters_to_ndarrays(asked.parameters), strict=True)
    record = ArrayRecord({name: Array(array) for name, array in arrays})
    return RecordDict({ARRAYS: record, FACTS: ConfigRecord(facts)}), wanted


class Header(NamedTuple):
    """The header of an array, and its bytes."""

    form: Form
    dtype: np.dtype[Any]
    columns_first: bool
    data: memoryview

    def tensor(self) -> Tensor:
        order: Literal["F", "C"] = "F" if self.columns_first else "C"
        seen = np.ndarray(self.form[1], self.dtype, self.data, order=order)
        return torch.from_numpy(seen.copy(order="C"))


def header_of(content: bytes) -> Header:
    """Read the .npy format; raises ValueError and others. (numpy's reader would first allocate the
    size that the header claims, and would open an .npz as well.)"""
    file = BytesIO(content)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    with catch_warnings(action="error"):  # for headers that only Python 2 wrote
        shape, columns_first, dtype = read[npy.read_magic(file)](file)
    data = memoryview(content)[file.tell() :]
    if dtype not in DTYPES or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"an array of {dtype} and shape {shape}")
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of {dtype} and shape {shape}")
    return Header((DTYPES[dtype], shape), dtype, columns_first, data)
