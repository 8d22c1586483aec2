"""`History`: all that was observed in a run, for every client, named by its axes."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from torch import Tensor

from fairvar.engine.state import State
from fairvar.errors import BadInput
from fairvar.methods.base import Method
from fairvar.metrics import Fairness, fairness

Key = tuple[str, str]  # (split, model): ("test", "global"), ("valid", "local"), …
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


@dataclass(frozen=True)
class History:
    """Row r of `loss` and `weights` is round t = `observed[r]` (all rounds 0 … T−1, or, read from
    a stored run, those that were evaluated); row e of an evaluated quantity was seen after
    `evaluated[e]` rounds. "global" is the shared model x^{t+1}, "local" the client's own x_i^{t+1}
    before aggregation."""

    method: Method
    state: State
    rounds: int  # rounds done
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

    @property
    def model(self) -> dict[str, Tensor]:
        """The final global model as a state dict: `module.load_state_dict(history.model)`."""
        if not self.state.params:
            raise BadInput("the final model was not kept: this run was condensed; run it again")
        return {**self.state.params, **self.state.buffers}

    def fairness(self, split: str = "test", model: str = "global", at: int = -1) -> Fairness:
        """The fairness of client accuracies at one evaluated round (the last by default)."""
        if (split, model) not in self.accuracy:
            known = (
                ", ".join("/".join(k) for k in self.accuracy) or "none: regression has no accuracy"
            )
            raise BadInput(f"no accuracy of the {model} model on {split!r}; there are: {known}")
        return fairness(self.accuracy[split, model][at], self.samples[split])

    def to_frame(self) -> Frame:
        """One row per (round, client, split, model, quantity)."""
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
    )
