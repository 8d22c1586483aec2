"""`History`: all that was observed in a run, for every client, named by its axes."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from torch import Tensor

from fairvar.data.federation import SPLITS
from fairvar.engine.state import State
from fairvar.errors import BadInput, shown
from fairvar.methods.base import Method
from fairvar.metrics import Fairness, fairness

Key = tuple[str, str]  # (split, model): ("test", "global"), ("valid", "local"), …
MODELS = ("global", "local")
Tables = dict[str, Tensor]  # observations as flat tensors, named "loss", "accuracy/test/global", …


class Frame(dict[str, np.ndarray]):
    """A tidy table as equally long columns; `pandas.DataFrame(frame)` takes it as it is."""

    def __len__(self) -> int:
        return len(next(iter(self.values()))) if self.keys() else 0

    @property
    def columns(self) -> list[str]:
        return list(self)

    def to_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.keys())
        writer.writerows(zip(*(column.tolist() for column in self.values()), strict=True))
        return text.getvalue()


class Measured(dict[Key, Tensor]):
    """Tables by (split, model); for one that is not there it says why."""

    def __init__(self, tables: Mapping[Key, Tensor], why: Callable[[object], str]) -> None:
        super().__init__(tables)
        self.why = why

    def __missing__(self, key: object) -> Tensor:
        raise BadInput(self.why(key))


@dataclass(frozen=True, repr=False)
class History:
    """Row r of `loss` and `weights` is round t = `observed[r]` (all rounds from 0 on or, if `state`
    was given to `train`, from `state.round` on; read from a stored run, those that were evaluated).
    Row e of an evaluated quantity was seen after `evaluated[e]` rounds. "global" is the shared
    model x^{t+1}, "local" the client's x_i^{t+1} before aggregation.

    Rounds are numbered from the first round of training. `rounds`, `exchanges` and the bytes count
    what this history covers: of a run that `train` continued from a state, the
    rounds since then; `state.round` is the number of all.
    """

    method: Method
    state: State
    rounds: int  # that this history covers
    observed: Int64[Tensor, " T"]
    loss: Float64[Tensor, "T n"]  # f_i(x^t) on training data
    weights: Float64[Tensor, "T n"]  # aggregation weights as used
    ascended: Float64[Tensor, " T"]  # share of clients whose own gradient had a negative factor
    evaluated: Int64[Tensor, " E"]
    accuracy: Mapping[Key, Float64[Tensor, "E n"]]
    evaluated_loss: Mapping[Key, Float64[Tensor, "E n"]]
    gradient_variance: Float64[Tensor, " E"]  # Σ r_i ‖∇f_i − ∇F‖² at x^t of the evaluated round
    update_norm: Float64[Tensor, "E n"]  # ‖x^t − x_i‖
    samples: Mapping[str, Int64[Tensor, " n"]]  # per split and client
    exchanges: int  # message pairs between the server and one client, in all
    bytes_down: int  # per client, in all
    bytes_up: int
    diverged_at: int | None = None  # the first round whose losses or model were not finite
    birth: Mapping[str, Any] = field(default_factory=dict)  # version, device, seed, wall time
    classifies: bool = True  # there are labels, so that accuracies can be measured

    def __post_init__(self) -> None:
        for quantity in ("accuracy", "evaluated_loss"):
            tables = Measured(getattr(self, quantity), partial(self._why_not, quantity))
            object.__setattr__(self, quantity, tables)

    def __repr__(self) -> str:
        clients = self.loss.shape[1]
        text = f"{self.method.label}, {self.rounds} rounds, {clients} clients"
        return f"<History: {text}{'; ' + self.divergence if self.divergence else ''}>"

    @property
    def divergence(self) -> str | None:
        """If the run diverged: when, and what to try."""
        if self.diverged_at is None:
            return None
        knob = self.method.fairness_knob
        value = getattr(self.method, knob) if knob else None
        strong = isinstance(value, float) and value > 0
        less = f"a smaller lr × {knob} ({knob} = {value:g} here)" if strong else "a smaller lr"
        return (
            f"the run diverged in round {self.diverged_at}: losses or model were no longer finite; "
            f"try {less}, or clip_norm"
        )

    def _why_not(self, quantity: str, key: object) -> str:
        """Why a table is not there."""
        there = getattr(self, quantity)
        named = isinstance(key, tuple) and all(isinstance(part, str) for part in key)
        if not (isinstance(key, tuple) and named and len(key) == 2):
            return f'{quantity}[{shown(key)}]: give (split, model), for example ("test", "global")'
        split, model = key
        start = f"no {quantity} of the {model} model on {shown(split)}"
        if split not in SPLITS or model not in MODELS:
            return f"{start}: splits are {', '.join(SPLITS)}, models {', '.join(MODELS)}"
        if self.divergence and not len(self.evaluated):
            return f"{start}: {self.divergence}"
        if quantity == "accuracy" and not self.classifies:
            return f"{start}: regression has no accuracy, only labels have; see evaluated_loss"
        if self.samples and split not in self.samples:
            return f"{start}: the federation has no {split} data; give {split}=… where it is made"
        if model == "local" and (split, "global") in there:
            return f"{start}: local models were not evaluated; set evaluate_local=True"
        known = ", ".join("/".join(k) for k in there) or "none"
        return f"{start}: it was not evaluated; there are: {known}"

    @property
    def model(self) -> dict[str, Tensor]:
        """The final global model as a state dict: `module.load_state_dict(history.model)`, with
        strict=False if some of its parameters are frozen or tied. Of a run that diverged it is the
        last model that was computed."""
        if not self.state.params:
            raise BadInput("the final model was not kept: this run was condensed; run it again")
        return {**self.state.params, **self.state.buffers}

    def fairness(self, split: str = "test", model: str = "global", at: int = -1) -> Fairness:
        """The fairness of client accuracies at one evaluated round (the last by default)."""
        if not (isinstance(split, str) and isinstance(model, str)):
            raise BadInput(self._why_not("accuracy", (split, model)))
        table = self.accuracy[split, model]
        if not isinstance(at, int) or not -len(table) <= at < len(table):
            raise BadInput(f"at = {shown(at)}: there are {len(table)} evaluations; -1 is the last")
        return fairness(table[at], self.samples[split])

    def to_frame(self) -> Frame:
        """One row per (round, client, split, model, quantity).

        `round` is the number of rounds that the model has behind it: in row r "loss" is f_i(x^r),
        "weight" was used to make x^{r+1}, "accuracy" and "evaluated_loss" are those of x^r (or of
        the local models from which x^r was made)."""
        blocks: list[tuple[str, str, str, Tensor, Tensor]] = []
        blocks.append(("train", "global", "loss", self.observed, self.loss))
        blocks.append(("", "", "weight", self.observed, self.weights))
        for quantity, values in (
            ("accuracy", self.accuracy),
            ("evaluated_loss", self.evaluated_loss),
        ):
            for (split, model), table in values.items():
                blocks.append((split, model, quantity, self.evaluated, table))
        columns: dict[str, list[Any]] = {
            k: [] for k in ("round", "client", "split", "model", "quantity", "value")
        }
        for split, model, quantity, at, table in blocks:
            clients = table.shape[1]
            columns["round"].append(np.repeat(at.numpy(), clients))
            columns["client"].append(np.tile(np.arange(clients), len(at)))
            columns["value"].append(table.numpy().ravel())
            for name, text in (("split", split), ("model", model), ("quantity", quantity)):
                columns[name].append(np.full(table.numel(), text))
        return Frame({name: np.concatenate(parts) for name, parts in columns.items()})


def history_from_tables(
    tables: Tables,
    *,
    method: Method,
    state: State,
    rounds: int,
    observed: Tensor,
    samples: Mapping[str, Tensor],
    classifies: bool,
    diverged_at: int | None,
    birth: Mapping[str, Any],
) -> History:
    """The History of a run that has just ended, or of one that was stored."""

    def group(quantity: str) -> dict[Key, Tensor]:
        names = [name.split("/") for name in tables if name.startswith(quantity + "/")]
        return {(split, model): tables[f"{quantity}/{split}/{model}"] for _, split, model in names}

    exchanges, bytes_down, bytes_up = tables["counters"].tolist()
    return History(
        method=method,
        state=state,
        rounds=rounds,
        observed=observed,
        loss=tables["loss"],
        weights=tables["weights"],
        ascended=tables["ascended"],
        evaluated=tables["evaluated"],
        accuracy=group("accuracy") if classifies else {},
        evaluated_loss=group("evaluated_loss"),
        gradient_variance=tables["gradient_variance"],
        update_norm=tables["update_norm"],
        samples=samples,
        exchanges=exchanges,
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        diverged_at=diverged_at,
        birth=birth,
        classifies=classifies,
    )
