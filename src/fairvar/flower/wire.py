"""Messages as Flower's records: one ArrayRecord and one ConfigRecord each way, nothing pickled.

One record of arrays, because Flower's privacy mods demand exactly one; the train exchange is a
plain `train` message, because they act on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fairvar.federated.messages import Message, Number, Stamp

ARRAYS, FACTS, NUMBER = "arrays", "message", "number/"
KINDS = {"probe": "query.probe", "train": "train", "evaluate": "evaluate"}  # message types
HELLO = "query.hello"


def to_records(message: Message, more: Mapping[str, float] | None = None) -> RecordDict:
    """`more` are facts for Flower's own mods."""
    arrays = {name: Array(leaf.numpy(force=True)) for name, leaf in message.arrays.items()}
    facts: dict[str, Any] = {"client": message.client, **message.stamp._asdict()}
    facts |= {f"{NUMBER}{name}": value for name, value in message.numbers.items()}
    return RecordDict({ARRAYS: ArrayRecord(arrays), FACTS: ConfigRecord({**facts, **(more or {})})})


def from_records(records: RecordDict) -> Message:
    """ValueError if it is no message of fairvar's; what it says is for the guard to judge."""
    try:
        facts: dict[str, Any] = dict(records.config_records[FACTS])
        arrays = {
            str(name): torch.from_numpy(_writable(array.numpy()))
            for name, array in records.array_records[ARRAYS].items()
        }
        stamp = Stamp(facts["exchange"], facts["round"], facts["attempt"], facts["format"])
        numbers: dict[str, Number] = {
            name.removeprefix(NUMBER): value
            for name, value in facts.items()
            if name.startswith(NUMBER)
        }
        return Message(stamp, facts["client"], arrays, numbers)
    except (KeyError, TypeError, ValueError, OSError, EOFError) as error:
        raise ValueError(f"not a message of fairvar's: {error!r}"[:200]) from None


def _writable(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else array.copy()
