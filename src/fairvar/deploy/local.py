"""Clients in this process: a federation without a network, whose clients can be made to misbehave.

For tests and for trying settings out: the messages, the guard and the rounds are those of a real
federation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fairvar.data.federation import Federation
from fairvar.deploy.client import Client
from fairvar.deploy.guard import Arrival, Reason
from fairvar.deploy.messages import Message
from fairvar.deploy.run import Agreement
from fairvar.errors import FairvarError
from fairvar.tree import Tree

Fault = Callable[[Message, Message], Sequence[Message]]  # (request, reply) → what arrives


def honest(request: Message, reply: Message) -> Sequence[Message]:
    return [reply]


class LocalTransport:
    """One after another, without deadline; `fault` decides what becomes of each reply."""

    name = "local"

    def __init__(self, clients: Sequence[Client], fault: Fault = honest) -> None:
        self.clients = {c.number: c for c in clients}
        self.keys: dict[int, str] = {}
        self.fault = fault

    def present(self, at_least: int, seconds: float) -> Sequence[int]:
        return list(self.clients)

    def exchange(
        self, requests: Sequence[Message], like: Tree, seconds: float
    ) -> Iterator[Arrival]:
        for request in requests:
            try:
                reply = self.clients[request.client].answer(request)
            except FairvarError as error:
                yield Arrival(request.client, None, Reason.ERROR, str(error))
                continue
            for message in self.fault(request, reply):
                yield Arrival(request.client, message)


def local_clients(agreed: Agreement, federation: Federation) -> list[Client]:
    """Each client of a federation by itself, as if the others' data were elsewhere."""
    return [
        Client(i, only(federation, i), agreed.model, agreed.method, agreed.loss, agreed.train)
        for i in range(federation.clients)
    ]


def only(federation: Federation, client: int) -> Federation:
    """The federation that this client sees: its own."""
    kept = {}
    for name, split in federation.splits.items():
        x, y = split.of(client)
        kept[name] = replace(split, x=x, y=y, counts=split.counts[client : client + 1])
    return replace(federation, **kept)  # type: ignore[arg-type]
