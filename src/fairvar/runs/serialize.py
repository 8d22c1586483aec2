"""States, checkpoints and histories as bytes in the safetensors format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fairvar.engine.history import MODELS, History, Tables, are_ids, history_from_tables
from fairvar.engine.state import State
from fairvar.engine.train import Checkpoint
from fairvar.errors import IntegrityError, cause
from fairvar.methods.base import Method
from fairvar.tree import Tree

NOT_MEASURED = -1  # in place of a number of correct answers
FIRST_LOSSES = 10  # evaluated rounds whose training losses condensed histories keep
_FLOATS, _COUNTS = (torch.float32,), (torch.int64,)
# By kind of stored table: its types, and what its dimensions count (o: observed rounds,
# e: evaluated rounds, n: clients, m: participants of a round, which may be all clients).
TABLES: dict[str, tuple[tuple[torch.dtype, ...], str]] = {
    "observed": (_COUNTS, "o"),
    "participants": (_COUNTS, "om"),
    "loss": (_FLOATS, "om"),
    "weights": (_FLOATS, "om"),
    "ascended": (_FLOATS, "o"),
    "evaluated": (_COUNTS, "e"),
    "gradient_variance": ((torch.float64,), "e"),
    "update_norm": (_FLOATS, "en"),
    "right": ((torch.int16, torch.int32), "en"),
    "evaluated_loss": (_FLOATS, "en"),
    "samples": (_COUNTS, "n"),
    "counters": (_COUNTS, "3"),
}
GROUPS = ("params", "buffers", "memory", "mean_gradient", "iterate", "personal", "moments")


def state_tensors(state: State) -> Tree:
    """A state as one flat dict."""
    flat: Tree = {"round": torch.tensor(state.round), "mean_loss": state.mean_loss}
    for group in GROUPS:
        for name, leaf in (getattr(state, group) or {}).items():
            flat[f"{group}/{name}"] = leaf
    return {name: leaf.detach().cpu().contiguous() for name, leaf in flat.items()}


def state_from_tensors(flat: Tree) -> State:
    groups: dict[str, Tree] = {group: {} for group in GROUPS}
    for name, leaf in flat.items():
        group, _, rest = name.partition("/")
        if group in groups:
            groups[group][rest] = leaf
    return State(
        round=int(flat["round"]),
        params=groups["params"],
        buffers=groups["buffers"],
        memory=groups["memory"],
        mean_loss=flat["mean_loss"],
        mean_gradient=groups["mean_gradient"] or None,
        iterate=groups["iterate"] or None,
        personal=groups["personal"] or None,
        moments=groups["moments"] or None,
    )


def pack_state(state: State) -> bytes:
    return save(state_tensors(state))


def unpack_state(content: bytes) -> State:
    with _as_written():
        return state_from_tensors(load_tensors(content))


def pack_checkpoint(checkpoint: Checkpoint, key: Mapping[str, str] | None = None) -> bytes:
    """`key` names the run and the versions that it was made with (`identity.checkpoint_key`)."""
    tables = {f"tables/{name}": table for name, table in (checkpoint.tables or {}).items()}
    return save({**state_tensors(checkpoint.state), **tables}, dict(key or {}))


def unpack_checkpoint(content: bytes, key: Mapping[str, str] | None = None) -> Checkpoint:
    """IntegrityError unless it has this key."""
    with _as_written():
        flat = load_tensors(content)
        found = _metadata(content)
        for part, wanted in (key or {}).items():
            other = str(found.get(part))
            if other != wanted and part == "identity":
                raise IntegrityError(
                    f"it belongs to another run ({other[:16]!r}, not {wanted[:16]})"
                )
            if other != wanted:
                raise IntegrityError(f"it was made with {part} {other[:40]!r}, not {wanted}")
        tables = {k.removeprefix("tables/"): v for k, v in flat.items() if k.startswith("tables/")}
        int(tables.get("diverged_at", flat["round"]))  # a number
        return Checkpoint(state_from_tensors(flat), tables)


def _metadata(content: bytes) -> dict[str, str]:
    """The texts in the header of a safetensors file that was loaded before."""
    length = int.from_bytes(content[:8], "little")
    return dict(json.loads(content[8 : 8 + length]).get("__metadata__") or {})


def pack_history(history: History) -> bytes:
    """Evaluated rounds only, because a sweep has thousands of runs. Accuracies are stored as exact
    numbers of correct answers, other tables per client as float32."""
    history = history.at_evaluations()
    flat: Tables = {
        "observed": history.observed,
        "loss": history.participant_loss.float(),
        "weights": history.participant_weights.float(),
        "ascended": history.ascended.float(),
        "evaluated": history.evaluated,
        "gradient_variance": history.gradient_variance,
        "update_norm": history.update_norm.float(),
    }
    if history.participants is not None:
        flat["participants"] = history.participants
    for (split, model), table in history.accuracy.items():
        right = (table * history.samples[split]).nan_to_num(NOT_MEASURED).round().int()
        flat[f"right/{split}/{model}"] = right
    for (split, model), table in history.evaluated_loss.items():
        flat[f"evaluated_loss/{split}/{model}"] = table.float()
    for split, counts in history.samples.items():
        flat[f"samples/{split}"] = counts
    numbers = (history.exchanges, history.bytes_down, history.bytes_up)
    flat["counters"] = torch.tensor(numbers, dtype=torch.int64)
    facts = {"rounds": history.rounds, "diverged_at": history.diverged_at}
    return save({k: v.contiguous() for k, v in flat.items()}, {"facts": json.dumps(facts)})


def condensed_history(content: bytes) -> bytes:
    """The part of a packed history that reports need, and the first training losses to three
    digits, so that others can compare their own run. Counts have as few bytes as possible."""
    flat = {k: v for k, v in load_tensors(content).items()
            if not k.startswith(("evaluated_loss/", "update_norm"))}  # fmt: skip
    for name, table in flat.items():
        if name.startswith("right/") and table.numel() and int(table.max()) < 2**15:
            flat[name] = table.short()
    flat["loss"][FIRST_LOSSES:] = torch.nan
    flat["loss"] = (flat["loss"].view(torch.int32) & ~0x1FFF).view(torch.float32)
    return save({k: v.contiguous() for k, v in flat.items()})


def unpack_history(
    content: bytes, state: State, method: Method, facts: Mapping[str, Any]
) -> History:
    with _as_written():
        flat = load_tensors(content)
        clients = _check_tables(flat)
        samples = {k.split("/")[1]: v for k, v in flat.items() if k.startswith("samples/")}
        tables = {k: v.double() if v.is_floating_point() else v for k, v in flat.items()}
        if "update_norm" not in tables:  # of a condensed history
            size = len(flat["observed"]), clients
            tables["update_norm"] = torch.full(size, torch.nan, dtype=torch.float64)
        for name in [k for k in flat if k.startswith("right/")]:
            _, split, model = name.split("/")
            right = torch.where(flat[name] == NOT_MEASURED, torch.nan, flat[name].double())
            tables[f"accuracy/{split}/{model}"] = right / samples[split]
        return history_from_tables(
            tables,
            method=method,
            state=state,
            rounds=int(facts["rounds"]),
            observed=flat["observed"],
            samples=samples,
            classifies=any(k.startswith("right/") for k in flat)
            or not any(k.startswith("evaluated_loss/") for k in flat),
            diverged_at=facts["diverged_at"],
            provenance=facts["birth"],
        )


def _check_tables(flat: Tables) -> int:
    """The number of clients, if every table has the type and shape of its kind, and possible
    values."""
    (drawn,) = flat["loss"].shape[1:]
    clients = drawn
    if "participants" in flat:
        clients = next(len(table) for name, table in flat.items() if name.startswith("samples/"))
        if flat["participants"].dim() != 2 or not are_ids(flat["participants"], clients):
            raise ValueError("participants holds something other than ids of clients")
    rounds, seen = len(flat["observed"]), len(flat["evaluated"])
    sizes = {"o": rounds, "e": seen, "n": clients, "m": drawn, "3": 3}
    for name, table in flat.items():
        kind, _, rest = name.partition("/")
        if kind not in TABLES:
            continue
        types, dimensions = TABLES[kind]
        shape = tuple(sizes[d] for d in dimensions)
        if table.dtype not in types or table.shape != shape:
            found = f"{table.dtype} of shape {tuple(table.shape)}"
            raise ValueError(f"{name[:80]} holds {found}, not {types[0]} of shape {shape}")
        least, most = torch.tensor(0 if kind in ("samples", "counters") else -torch.inf), None
        if kind in ("right", "evaluated_loss"):
            split, _, model = rest.partition("/")
            if model not in MODELS or f"samples/{split}" not in flat:
                raise ValueError(f"{name[:80]!r} is not the name of a table")
            if kind == "right":
                least, most = torch.tensor(NOT_MEASURED), flat[f"samples/{split}"]
        if bool((table < least).any()) or (most is not None and bool((table > most).any())):
            raise ValueError(f"{name[:80]} holds an impossible count")
    for name in ("observed", "evaluated"):
        if bool((flat[name].diff() < 1).any()) or bool((flat[name] < 0).any()):
            raise ValueError(f"{name} is not a column of increasing rounds")
    if bool(torch.isinf(flat["weights"]).any()):
        raise ValueError("weights holds infinity")
    return clients


@contextmanager
def _as_written() -> Iterator[None]:
    """Refuse tensors with other names or shapes than fairvar writes, whatever their checksum."""
    try:
        yield
    except (LookupError, ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        found = f"{type(error).__name__}: {cause(error)}"
        raise IntegrityError(f"it does not hold what fairvar writes: {found}") from None


def load_tensors(content: bytes) -> dict[str, Tensor]:
    """Tensors by name; IntegrityError if it is not a safetensors file."""
    try:
        return load(content)
    except SafetensorError as error:
        raise IntegrityError(f"not a valid safetensors file: {error}") from None
