"""A Flower grid in this process: messages go through Flower's own serialisation to a ClientApp."""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import fairvar as fv
from checks import Start, module_of, with_personal
from fairvar.deploy.flower import client_app
from fairvar.deploy.flower.client import client_id
from fairvar.deploy.flower.server import run_on
from fairvar.deploy.flower.setup import read_setup
from fairvar.runs.stored import StoredRun

# Flower sets these in the processes that it starts.
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
EXAMPLE = Path(__file__).parents[1] / "examples" / "flower_app"
DEFAULT = {"model": "multinomial"} | tomllib.loads((EXAMPLE / "pyproject.toml").read_text())[
    "tool"
]["flwr"]["app"]["config"]
BARE = "federation.weight_cap=1.0 federation.norm_bound=1e9"  # nothing is limited
Spoil = Callable[[int, Message], Message | None]  # (node, reply) → what arrives


class InProcessGrid(Grid):
    """Nodes answer at once. `spoil` may change or lose a reply; `clients` maps node to client."""

    run = None  # type: ignore[assignment]

    def __init__(
        self,
        run_config: dict,
        clients: dict[int, int],
        spoil: Spoil | None = None,
        data: dict[int, str] | None = None,
        node_config: dict[int, dict] | None = None,
    ):
        """`data`: where a client's own data lie; `node_config`: of a client, instead of Flower's
        in a simulation."""
        self.run_config, self.clients, self.spoil = run_config, clients, spoil
        self.data, self.node_config = data or {}, node_config or {}
        self.app = client_app()
        self.replies: dict[str, Message] = {}
        self.sent = 0
        self.states: dict[int, RecordDict] = {}  # what Flower keeps for a node during a run

    def set_run(self, run: object) -> None:
        raise AssertionError("fairvar never asks for this")

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise AssertionError("fairvar never asks for this")

    def send_and_receive(self, messages: object, *, timeout: float | None = None) -> list[Message]:
        raise AssertionError("fairvar has its own loop")

    def get_node_ids(self) -> list[int]:
        return list(self.clients)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=n, public_key=f"key {n}".encode()) for n in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self.sent += 1
            message.metadata.__dict__["_message_id"] = f"message-{self.sent}"
            ids.append(message.metadata.message_id)
            reply = self._ask(message)
            if reply is not None:
                self.replies[ids[-1]] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(i) for i in list(message_ids) if i in self.replies]

    def _ask(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        client = self.clients[node]
        config: dict = {"partition-id": client}
        if client in self.data:
            config = {"client": client, "data": str(self.data[client])}
        config = self.node_config.get(client, config)
        state = self.states.setdefault(node, RecordDict())
        context = Context(1, node, config, state, dict(self.run_config), 1)
        try:
            reply = self.app(_travelled(message), context)
        except Exception as error:  # as Flower does with any exception of an app
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        reply = _travelled(reply)
        return reply if self.spoil is None else self.spoil(node, reply)


def _travelled(message: Message) -> Message:
    """What remains of a message after the wire."""
    raw = message_to_proto(message).SerializeToString()
    return message_from_proto(ProtoMessage.FromString(raw))


# -- runs ------------------------------------------------------------------------------------------
def run_config(method: fv.Method, out: Path, options: str = "", **more: object) -> dict:
    fields = {f: getattr(method, f) for f in method.__struct_fields__}
    fields = {
        f: v for f, v in fields.items() if v is not None
    }  # the default, which TOML cannot say
    given = " ".join(
        f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in fields.items()
    )
    tag = type(method).__struct_config__.tag
    few = f"train.dtype=float64 partition.alpha=0.3 evaluate.every=2 {options}"
    return {
        **DEFAULT,
        "method": tag,
        "method-options": given,
        "out": str(out),
        "options": few,
        **more,
    }


def as_options(train: dict[str, object]) -> str:
    """`train.key=value` of settings; those of the optimiser and schedule are nested."""
    pairs = {k: v for k, v in train.items() if not isinstance(v, msgspec.Struct)}
    for part in train.keys() - pairs.keys():
        given = msgspec.structs.asdict(train[part])
        pairs |= {f"{part}.{k}": v for k, v in given.items() if v is not None}
    return " ".join(f"train.{k}={v}" for k, v in pairs.items())


def flower_run(
    data: fv.Federation, method: fv.Method, start: Start, rounds: int, **train: object
) -> fv.History:
    """A regression whose clients bring their own data; personal models are read from the disk."""

    def model() -> tuple:
        return module_of(start), "mse"

    def own(context: Context) -> fv.ClientData:
        return fv.ClientData(train=data.train.of(client_id(context)))

    options = f"{BARE} {as_options(train)}"
    shape = ",".join(map(str, data.input_shape))
    more = {"data": "own", "clients": data.clients, "input-shape": shape, "classes": 0}
    numbers = range(data.clients)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        config = run_config(method, home / "runs", options, rounds=rounds, **more)
        nodes = {i: {"client": i, "personal": str(home / f"node{i}")} for i in numbers}
        grid = InProcessGrid(config, {10 + i: i for i in numbers}, node_config=nodes)
        grid.app = client_app(model, own)
        history = StoredRun.open(run_on(grid, read_setup(config, model, own))).history()
        kept = [file.read_bytes() for i in numbers for file in (home / f"node{i}").glob("*")]
    return with_personal(history, kept)
