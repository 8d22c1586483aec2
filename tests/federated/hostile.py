"""Hostile replies: about 200 kinds, sent by one client of five through Flower's messages to the
server of a federation. Every one must be left out and named; the model must be that of the run
without that client, bit by bit.

    PYTHONPATH=tests python tests/federated/hostile.py --seed 0 --count 200

prints a table and ends with 1 if a reply came through. `campaign` is one method and one exchange;
`count` replies are `count` rounds, each with another kind. (For greetings they are as many nodes.)
Run as a script the types of arguments are not checked, as they are under pytest: like a real
server.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from federations import TINY, agreement
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.app import Message as Envelope
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

import fairvar as fv
from checks import METHODS
from fairvar.common.process import peak_bytes
from fairvar.deploy.client import Agreement, Client, Message, Stamp
from fairvar.deploy.flower.transport import (
    ARRAYS,
    FACTS,
    HELLO,
    KINDS,
    GridTransport,
    from_records,
    to_records,
)
from fairvar.deploy.guard import LONGEST, FederationSettings
from fairvar.deploy.run import Federated, LocalTransport, federate, local_clients
from fairvar.engine.settings import EvaluateSettings

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # as Flower does
LIAR = 2  # the client that is hostile
EXCHANGES = ("train", "probe", "evaluate", "hello")
LONG = 1_000_000  # characters
Draw = np.random.Generator
Spoilt = RecordDict | Exception | Error | None  # None: a message without anything in it
Kind = Callable[[RecordDict, Draw], Spoilt]


# -- what a client can say about itself ------------------------------------------------------------
def fact(name: str, value: Callable[[Any, Draw], object]) -> Kind:
    def spoil(records: RecordDict, draw: Draw) -> Spoilt:
        facts = records.config_records[FACTS]
        facts[name] = value(facts.get(name, 0), draw)  # type: ignore[assignment]
        return records

    return spoil


def without_fact(name: str) -> Kind:
    def spoil(records: RecordDict, draw: Draw) -> Spoilt:
        records.config_records[FACTS].pop(name, None)
        return records

    return spoil


def wrongs() -> dict[str, Callable[[Any, Draw], object]]:
    """No right answer to any question about a round, a client or a number of samples."""
    return {
        "as a float": lambda v, d: float(v) if isinstance(v, int) else 1.5,
        "a float": lambda v, d: float(d.normal()) + 0.5,
        "not a number": lambda v, d: float("nan"),
        "infinity": lambda v, d: float("inf"),
        "a truth": lambda v, d: bool(d.integers(2)),
        "text": lambda v, d: str(v),
        "long text": lambda v, d: "\x1b[31m\n=1+1" * (LONG // 9),
        "bytes": lambda v, d: d.bytes(9),
        "a list": lambda v, d: [v, v],
        "an empty list": lambda v, d: [],
        "a long list": lambda v, d: [1.5] * 100_000,
        "negative": lambda v, d: -int(d.integers(2, 2**40)),
        "enormous": lambda v, d: 2**62 + int(d.integers(1000)),
    }


def fact_kinds() -> Iterator[tuple[str, Kind]]:
    for name in ("client", "exchange", "round", "attempt", "format", "number/samples"):
        yield f"{name} missing", without_fact(name)
        for what, value in wrongs().items():
            if (name, what) == ("exchange", "text"):
                continue  # which it is
            yield f"{name} is {what}", fact(name, value)
    yield "another client", fact("client", lambda v, d: (v + 1 + int(d.integers(TINY - 1))) % TINY)
    yield "an older round", fact("round", lambda v, d: v - 1 - int(d.integers(99)))
    yield "a later round", fact("round", lambda v, d: v + 1 + int(d.integers(99)))
    yield "another attempt", fact("attempt", lambda v, d: v + 1 + int(d.integers(9)))
    yield "another exchange", fact("exchange", lambda v, d: "hello" if v == "test" else v + "x")
    yield "another format", fact("format", lambda v, d: 7 + int(d.integers(99)))
    yield "no samples", fact("number/samples", lambda v, d: 0)
    for bad in (float("nan"), float("inf"), -0.1, 1e30, 1, True, "x", b"x", [0.5]):
        yield f"a loss of {bad!r}", fact("number/loss", lambda v, d, b=bad: b)
    for split in ("valid", "test"):
        for name, values in {
            "accuracy": (1.5, -0.1, float("nan"), 1, "1", [0.5]),
            "loss": (-1.0, float("nan"), float("inf"), 2, "1"),
            "samples": (0, -4, 2.5, 2**50, True, "9"),
        }.items():
            for bad in values:
                yield (
                    f"{split} {name} of {bad!r}",
                    fact(f"number/{split}/{name}", lambda v, d, b=bad: b),
                )
    for name in ("", "other", "train/accuracy", "test/other", "test/", "x" * LONG, "\x1b[2J\r\n"):
        yield f"a number called {name[:20]!r}", fact(f"number/{name}", lambda v, d: 0.5)
    yield "ten thousand numbers", many_numbers


def many_numbers(records: RecordDict, draw: Draw) -> Spoilt:
    for i in range(10_000):
        records.config_records[FACTS][f"number/{i}"] = 1.0
    return records


# -- arrays ----------------------------------------------------------------------------------------
def npy(array: np.ndarray) -> bytes:
    file = BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def headed(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """An .npy with this header."""
    text = header.encode() + b"\n"
    size = len(text).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + size + text + data


def described(dtype: str = "'<f8'", order: str = "False", shape: str = "(7,)") -> str:
    return f"{{'descr': {dtype}, 'fortran_order': {order}, 'shape': {shape}, }}"


def content(make: Callable[[np.ndarray, Draw], bytes], stype: str = "numpy.ndarray") -> Kind:
    """The bytes of one array of the reply; of a new one where the reply has none."""

    def spoil(records: RecordDict, draw: Draw) -> Spoilt:
        arrays = records.array_records[ARRAYS]
        names = sorted(arrays) or ["x/weight"]
        name = names[int(draw.integers(len(names)))]
        old = arrays[name].numpy() if name in arrays else np.ones(3)
        arrays[name] = Array("float64", old.shape, stype, make(old, draw))
        return records

    return spoil


def changed(make: Callable[[np.ndarray], np.ndarray]) -> Kind:
    return content(lambda old, draw: npy(make(old)))


def one_number(value: float) -> Kind:
    def put(old: np.ndarray, draw: Draw) -> bytes:
        new = old.copy().reshape(-1)
        new[int(draw.integers(new.size))] = value
        return npy(new.reshape(old.shape))

    return content(put)


def zipped(old: np.ndarray, draw: Draw) -> bytes:
    file = BytesIO()
    np.savez(file, old)
    return file.getvalue()


def array_kinds() -> Iterator[tuple[str, Kind]]:
    for shape in (
        f"({10**12},)", f"({10**6}, {10**6})", f"({2**62},)", f"({2**63},)", f"({2**32}, {2**32})",
        f"({10**30},)", "(-1,)", "(-3, -3)", "(True,)", "(3.0,)", "('3',)", "3", "None", "(0,)",
        "()", "(4,)", "((3,),)", f"({'1, ' * 65})", "[3]", f"({'9' * 4000},)",
    ):  # fmt: skip
        yield (
            f"shape {shape[:25]}",
            content(lambda o, d, s=shape: headed(described(shape=s), bytes(24))),
        )
    for dtype in (
        "'|O'", "'<U9'", "'|S8'", "'>f8'", "'<c16'", "'<f2'", "'<i8'", "'|b1'", "'<M8[s]'",
        "'<f16'", "[('a', '<f8')]", "'nonsense'", "''", "None", "7", "[('a', '|O', (10,))]",
    ):  # fmt: skip
        yield (
            f"dtype {dtype}",
            content(lambda o, d, t=dtype: headed(described(t, shape="(1,)"), bytes(16))),
        )
    for what, header in {
        "no header": "", "deep": "(" * 5000, "deep lists": "[" * 900 + "]" * 900,
        "a call": "exit()", "garbage": "\0\1\2", "an expression": "{'descr': 1 + 1}",
        "not a dict": "[1, 2]", "other keys": "{'a': 1}", "order": described(order="'yes'"),
        "long": " " * 60_000, "long number": described(shape=f"({'1' * 9000},)"),
        "Python 2": described(shape="(7L,)"),
    }.items():  # fmt: skip
        yield f"header: {what}", content(lambda o, d, h=header: headed(h, bytes(56)))
    yield (
        "a header longer than the file",
        content(lambda o, d: b"\x93NUMPY\x01\x00\xff\xff{'descr'"),
    )
    yield "a header of 4 GB", content(lambda o, d: b"\x93NUMPY\x02\x00\xff\xff\xff\xff{'descr'")
    for version in (b"\x03\x00", b"\x00\x00", b"\xff\xff"):
        yield (
            f"version {version!r}",
            content(lambda o, d, v=version: headed(described(), bytes(56), v)),
        )
    yield "nothing", content(lambda o, d: b"")
    yield "garbage", content(lambda o, d: d.bytes(int(d.integers(1, 4096))))
    yield "garbage after the magic", content(lambda o, d: b"\x93NUMPY\x01\x00" + d.bytes(500))
    yield "an .npz", content(zipped)
    yield "a zip's first bytes", content(lambda o, d: b"PK\x03\x04" + d.bytes(60))
    yield "a pickle", content(lambda o, d: b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00N.")
    yield "cut short", content(lambda o, d: npy(o)[: -int(d.integers(1, 9))])
    yield "bytes behind it", content(lambda o, d: npy(o) + d.bytes(int(d.integers(1, 99))))
    for stype in ("", "torch", "pickle", "numpy.ndarray " * 1000):
        yield f"stored as {stype[:12]!r}", content(lambda o, d: npy(o), stype)
    yield "flat or deeper", changed(lambda o: o.reshape(-1) if o.ndim > 1 else o[None])
    yield "one more axis", changed(lambda o: o[None])
    yield "one value for all", changed(lambda o: o.reshape(-1)[:1])
    yield "one row more", changed(lambda o: np.concatenate([o, o[:1]]))
    yield "an empty one", changed(lambda o: o[:0])
    yield "too precise", changed(lambda o: o.astype(np.complex128))
    yield "too coarse", changed(lambda o: o.astype(np.float32))
    yield "integers", changed(lambda o: o.astype(np.int64))
    yield "reversed bytes", changed(lambda o: o.astype(">f8"))
    yield "text", changed(lambda o: np.array(["a", "b"]))
    for value in (float("nan"), float("inf"), -float("inf"), 1e300, -1e30):
        yield f"a value of {value}", one_number(value)


# -- records and messages --------------------------------------------------------------------------
def extra_array(name: str) -> Kind:
    def spoil(records: RecordDict, draw: Draw) -> Spoilt:
        records.array_records[ARRAYS][name] = Array(np.ones(3))
        return records

    return spoil


def renamed_array(records: RecordDict, draw: Draw) -> Spoilt:
    arrays = records.array_records[ARRAYS]
    arrays["x/other"] = arrays.pop(next(iter(arrays), ""), Array(np.ones(3)))
    return records


def many_arrays(records: RecordDict, draw: Draw) -> Spoilt:
    for i in range(300):
        records.array_records[ARRAYS][f"x/{i}"] = Array(np.ones(1))
    return records


def without_record(name: str) -> Kind:
    def spoil(records: RecordDict, draw: Draw) -> Spoilt:
        del records[name]
        return records

    return spoil


def swapped(records: RecordDict, draw: Draw) -> Spoilt:
    return RecordDict({FACTS: ArrayRecord(), ARRAYS: ConfigRecord({"client": LIAR})})


def metrics_only(records: RecordDict, draw: Draw) -> Spoilt:
    return RecordDict({FACTS: MetricRecord({"client": LIAR})})


def record_kinds() -> Iterator[tuple[str, Kind]]:
    for name in ("x/other", "", "x" * LONG, "\x1b]0;title\x07", "=cmd()", "../../x"):
        yield f"an array called {name[:12]!r}", extra_array(name)
    yield "an array by another name", renamed_array
    yield "three hundred arrays", many_arrays
    yield "no arrays", without_record(ARRAYS)
    yield "no facts", without_record(FACTS)
    yield "nothing", lambda records, draw: RecordDict()
    yield "records of other kinds", swapped
    yield "metrics", metrics_only
    yield "an empty message", lambda records, draw: None
    for code in (0, 2, 5, 999):
        yield f"error {code}", lambda records, draw, c=code: Error(c, "\x1b[31mno\n,\"'" * 20_000)
    yield "an error without a reason", lambda records, draw: Error(2, "")
    for error in (
        MemoryError(), OverflowError("x" * LONG), RecursionError(), KeyError("x" * LONG),
        ValueError(), IndexError(), AttributeError("a"), AssertionError(), TypeError("\x1b"),
        RuntimeError(), ZeroDivisionError(), StopIteration(), EOFError(), NotImplementedError(),
        LookupError(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), OSError(5, "x"),
        TimeoutError(), SyntaxError(),
    ):  # fmt: skip
        yield f"{type(error).__name__} when it is fetched", lambda records, draw, e=error: e


@cache
def kinds() -> dict[str, Kind]:
    found = {}
    families = {"fact": fact_kinds(), "array": array_kinds(), "record": record_kinds()}
    for family, members in families.items():
        found |= {f"{family}: {name}": kind for name, kind in members}
    return found


def greetings() -> dict[str, Kind]:
    """In a hello only the client's id counts, and that there are no arrays."""
    ignored = ("fact: round", "fact: exchange", "fact: attempt", "fact: format", "fact: number")
    rest = ("fact: a", "fact: no", "fact: valid", "fact: test", "fact: ten", "fact: an")
    fits = {n: k for n, k in kinds().items() if not n.startswith((*ignored, *rest))}
    lacking = {f"{name} missing": without_fact(name) for name in ("round", "exchange", "client")}
    return fits | lacking


# -- a federation in this process ------------------------------------------------------------------
class HostileGrid(Grid):
    """Clients behind Flower's messages. `script` says what becomes of the reply to a message, by
    node and exchange, of which it gets each reply."""

    run = None  # type: ignore[assignment]

    def __init__(
        self, clients: dict[int, Client], script: Callable[[int, str, RecordDict], Spoilt]
    ):
        self.clients, self.script = clients, script
        self.kinds = {text: exchange for exchange, text in KINDS.items()}
        self.replies: dict[str, Envelope | Exception] = {}
        self.sent = 0

    def set_run(self, run: object) -> None: ...

    def create_message(self, *args: object, **kwargs: object) -> Envelope:
        raise AssertionError

    def send_and_receive(self, messages: object, *, timeout: float | None = None) -> list[Envelope]:
        raise AssertionError

    def get_node_ids(self) -> list[int]:
        return list(self.clients)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=n, public_key=f"key of {n}".encode()) for n in self.clients]

    def push_messages(self, messages: Iterable[Envelope]) -> list[str]:
        ids = []
        for message in messages:
            self.sent += 1
            message.metadata.__dict__["_message_id"] = f"message-{self.sent}"
            ids.append(f"message-{self.sent}")
            self.replies[ids[-1]] = self._answer(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Envelope]:
        found = [self.replies.pop(i) for i in list(message_ids) if i in self.replies]
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return found  # type: ignore[return-value]

    def _answer(self, message: Envelope) -> Envelope | Exception:
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        client = self.clients[node]
        if kind == HELLO:
            exchange, reply = "hello", Message(Stamp("probe", -1), client.number)
        else:
            asked = from_records(travelled(message).content)
            exchange, reply = self.kinds[kind], client.answer(asked)
        found = self.script(node, exchange, to_records(reply))
        if isinstance(found, Exception):
            return found
        if found is None:
            empty = Envelope(RecordDict(), reply_to=message)
            empty.__dict__["_content"] = None
            return empty
        return travelled(Envelope(found, reply_to=message))


def travelled(message: Envelope) -> Envelope:
    """What remains of a message after the wire, where it can be written there."""
    try:
        raw = message_to_proto(message).SerializeToString()
        return message_from_proto(ProtoMessage.FromString(raw))
    except (TypeError, ValueError):
        return message


@cache
def data() -> fv.Federation:
    """Five clients of five to nine samples, and three more to test on each."""
    draw = torch.Generator().manual_seed(0)

    def client(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, 4, generator=draw, dtype=torch.float64)
        return x, torch.randint(0, 3, (n,), generator=draw)

    held_out = [client(3) for _ in range(TINY)]
    return fv.Federation.from_arrays([client(5 + i) for i in range(TINY)], test=held_out, classes=3)


@cache
def prepared(method: fv.Method, rounds: int, every: int) -> tuple[Agreement, list[Client]]:
    agreed = agreement(method, data(), rounds=rounds)
    agreed = replace(agreed, evaluate=EvaluateSettings(every=every, splits=("test",)))
    return agreed, local_clients(agreed, data())


class Sent(NamedTuple):
    """What a campaign has tried."""

    method: str
    exchange: str
    replies: int
    came_through: list[str]  # the kinds that were not left out, or changed something
    seconds: float


def campaign(method: fv.Method, exchange: str, seed: int, count: int) -> Sent | None:
    """None where the method has no such exchange."""
    if exchange == "probe" and not method.probes:
        return None
    started, draw = time.perf_counter(), np.random.default_rng([seed, *method.label.encode()])
    known = greetings() if exchange == "hello" else kinds()
    chosen: list[str] = []
    while len(chosen) < count:
        chosen += [list(known)[i] for i in draw.permutation(len(known))]
    names = chosen[:count]
    rounds = 2 if exchange == "hello" else count
    every = 1 if exchange == "evaluate" else 7
    agreed, clients = prepared(method, rounds, every)
    nodes = {10 + c.number: c for c in clients}
    if exchange == "hello":
        nodes |= {1000 + i: clients[LIAR] for i in range(count)}
    turns = iter(names)

    def script(node: int, asked: str, records: RecordDict) -> Spoilt:
        guilty = node >= 1000 if exchange == "hello" else node == 10 + LIAR
        return known[next(turns)](records, draw) if guilty and asked == exchange else records

    transport = GridTransport(HostileGrid(nodes, script), TINY)
    found = federate(agreed, FederationSettings(deadline=60.0), transport)
    bad = differences(found, expected(method, exchange, rounds, every), exchange, names)
    assert next(turns, None) is None, "not every kind was sent"
    return Sent(method.label, exchange, count, bad, time.perf_counter() - started)


def expected(method: fv.Method, exchange: str, rounds: int, every: int) -> Federated:
    """The same run in which the hostile client says nothing."""
    agreed, clients = prepared(method, rounds, every)

    def silent(request: Message, reply: Message) -> list[Message]:
        gone = request.client == LIAR and request.stamp.exchange == exchange
        return [] if gone else [reply]

    return federate(agreed, FederationSettings(), LocalTransport(clients, silent))


def differences(found: Federated, right: Federated, exchange: str, names: list[str]) -> list[str]:
    bad = []
    if exchange != "hello":
        refused = {r.round - (exchange == "evaluate"): r for r in found.refused}
        bad += [
            n for t, n in enumerate(names) if t not in refused or not told(refused[t], exchange)
        ]
        bad += ["more was refused"] * (len(found.refused) != len(names))
    mine, theirs = found.history, right.history
    if [n.clients for n in found.notes.rounds] != [n.clients for n in right.notes.rounds]:
        bad.append("others took part")
    for group in ("params", "memory"):
        a, b = getattr(mine.state, group), getattr(theirs.state, group)
        if a.keys() != b.keys() or not all(torch.equal(a[k], b[k]) for k in a):
            bad.append(f"{group} of the model differ")
    for key, table in theirs.accuracy.items():
        if not torch.equal(table.nan_to_num(-1), mine.accuracy[key].nan_to_num(-1)):
            bad.append(f"the accuracies {key} differ")
    return bad


def told(refused: Any, exchange: str) -> bool:
    good = (refused.client, refused.exchange) == (LIAR, exchange)
    return good and len(refused.detail) <= LONGEST and refused.detail.isprintable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="replies per method and exchange")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tried = [campaign(m, e, options.seed, options.count) for m in METHODS for e in EXCHANGES]
    done = [sent for sent in tried if sent is not None]
    came = sum(len(sent.came_through) for sent in done)
    peak = (peak_bytes() or 0) >> 20
    total = {"kinds": len(kinds()), "replies": sum(s.replies for s in done), "came_through": came,
             "peak_megabytes": peak, "seed": options.seed}  # fmt: skip
    if options.json:
        print(json.dumps({**total, "campaigns": [sent._asdict() for sent in done]}))
    else:
        for sent in done:
            came_through = f"{len(sent.came_through)} came through {sent.came_through[:3]}"
            print(f"{sent.method:10} {sent.exchange:9} {sent.replies:5} replies, {came_through}")
        print(total)
    sys.exit(came > 0)


if __name__ == "__main__":
    main()
