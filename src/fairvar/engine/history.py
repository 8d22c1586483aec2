"""`History`: all that was observed in a run, for every client, named by its axes."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from fairvar.data.federation import SPLITS
from fairvar.engine.state import State
from fairvar.errors import BadInput, shown
from fairvar.methods.base import Method
from fairvar.metrics import Fairness, fairness

Key = tuple[str, str]  # (split, model): ("test", "global"), ("valid", "local"), …
MODELS = ("global", "local", "personal")
NOBODY = -1  # in place of the id of a participant that did not answer
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
    Where some clients were drawn for each round, only theirs are kept: `participants`,
    `participant_loss` and `participant_weights` (T, m); `loss` and `weights` (T, n) are then made
    when they are asked for, with NaN and 0 for the other clients.

    Row e of an evaluated quantity was seen after `evaluated[e]` rounds. "global" is the shared
    model x^{t+1}, "local" the client's x_i^{t+1} before aggregation, "personal" the model v_i^{t+1}
    that the client keeps, where the method has such.

    Rounds are numbered from the first round of training. `rounds`, `exchanges` and the bytes count
    what this history covers: of a run that `train` continued from a state, the
    rounds since then; `state.round` is the number of all.
    """

    method: Method
    state: State
    rounds: int  # that this history covers
    observed: Int64[Tensor, " T"]
    participant_loss: Float64[Tensor, "T m"]  # f_i(x^t) on training data
    participant_weights: Float64[Tensor, "T m"]  # aggregation weights as used
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
    provenance: Mapping[str, Any] = field(default_factory=dict)  # version, device, seed, wall time
    classifies: bool = True  # there are labels, so that accuracies can be measured
    # Whose column it is, round by round; `NOBODY` if the client did not answer. None: client i's.
    participants: Int64[Tensor, "T m"] | None = None

    def __post_init__(self) -> None:
        for quantity in ("accuracy", "evaluated_loss"):
            tables = Measured(getattr(self, quantity), partial(self._why_not, quantity))
            object.__setattr__(self, quantity, tables)

    @property
    def clients(self) -> int:
        return self.update_norm.shape[1]

    @property
    def loss(self) -> Float64[Tensor, "T n"]:
        """f_i(x^t) on training data; NaN for clients that did not take part."""
        return self._of_all(self.participant_loss, torch.nan)

    @property
    def weights(self) -> Float64[Tensor, "T n"]:
        """Aggregation weights as used; 0 for clients that did not take part."""
        return self._of_all(self.participant_weights, 0.0)

    def _of_all(self, values: Tensor, absent: float) -> Tensor:
        if self.participants is None:
            return values
        n = self.clients
        table = values.new_full((len(values), n + 1), absent)  # column n: of `NOBODY`
        places = torch.where(self.participants == NOBODY, n, self.participants)
        return table.scatter_(1, places, values)[:, :n]

    def at_evaluations(self) -> History:
        """The same history with the losses and weights of evaluated rounds only."""
        kept = torch.isin(self.observed + 1, self.evaluated)
        who = self.participants
        return replace(
            self,
            observed=self.observed[kept],
            participant_loss=self.participant_loss[kept],
            participant_weights=self.participant_weights[kept],
            ascended=self.ascended[kept],
            participants=None if who is None else who[kept],
        )

    def __repr__(self) -> str:
        text = f"{self.method.label}, {self.rounds} rounds, {self.clients} clients"
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
        if model == "personal" and self.method.personal is None:
            return f"{start}: {self.method.label} has none; Ditto has"
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

    def personal_model(self, client: int) -> dict[str, Tensor]:
        """The final personal model of a client as a state dict, as `model`."""
        models = self.state.personal
        if models is None:
            raise BadInput(
                f"{self.method.label} has no personal models"
                if self.method.personal is None
                else "the personal models are not here: they stay on the nodes of a deployed run, "
                "and condensed runs keep no models"
            )
        clients = self.loss.shape[1]
        if not isinstance(client, int) or not 0 <= client < clients:
            raise BadInput(f"client = {shown(client)}: there are clients 0 to {clients - 1}")
        return {name: leaf[client] for name, leaf in models.items()}

    def fairness(self, split: str = "test", model: str | None = None, at: int = -1) -> Fairness:
        """The fairness of client accuracies at one evaluated round (the last by default). By
        default of the model that the method is reported by: personal models where it has such, the
        global model otherwise."""
        model = self.method.reported_model if model is None else model
        if not (isinstance(split, str) and isinstance(model, str)):
            raise BadInput(self._why_not("accuracy", (split, model)))
        table = self.accuracy[split, model]
        if not isinstance(at, int) or not -len(table) <= at < len(table):
            raise BadInput(f"at = {shown(at)}: there are {len(table)} evaluations; -1 is the last")
        return fairness(table[at], self.samples[split])

    def to_frame(self) -> Frame:
        """One row per (round, client, split, model, quantity); losses and weights of participants.

        `round` is the number of rounds that the model has behind it: in row r "loss" is f_i(x^r),
        "weight" was used to make x^{r+1}, "accuracy" and "evaluated_loss" are those of x^r (or of
        the local models from which x^r was made)."""
        drawn, at = self.participants, self.observed
        blocks = [("train", "global", "loss", at, self.participant_loss, drawn),
                  ("", "", "weight", at, self.participant_weights, drawn)]  # fmt: skip
        for quantity in ("accuracy", "evaluated_loss"):
            for (split, model), table in getattr(self, quantity).items():
                blocks.append((split, model, quantity, self.evaluated, table, None))
        columns: dict[str, list[Any]] = {
            k: [] for k in ("round", "client", "split", "model", "quantity", "value")
        }
        for split, model, quantity, at, table, ids in blocks:
            clients = torch.arange(table.shape[1]).expand(table.shape) if ids is None else ids
            there = (clients != NOBODY).numpy()
            columns["round"].append(np.repeat(at.numpy(), there.sum(1)))
            columns["client"].append(clients.numpy()[there])
            columns["value"].append(table.numpy()[there])
            for name, text in (("split", split), ("model", model), ("quantity", quantity)):
                columns[name].append(np.full(there.sum(), text))
        return Frame({name: np.concatenate(parts) for name, parts in columns.items()})


def are_ids(table: Tensor, clients: int) -> bool:
    """Whether its rows hold ids of clients, rising, and `NOBODY` after the last."""
    if table.dtype != torch.int64 or bool(((table < NOBODY) | (table >= clients)).any()):
        return False
    now, then = table[:, :-1], table[:, 1:]
    return bool(((then == NOBODY) | ((now != NOBODY) & (then > now))).all())


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
    provenance: Mapping[str, Any],
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
        participant_loss=tables["loss"],
        participant_weights=tables["weights"],
        participants=tables.get("participants"),
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
        provenance=provenance,
        classifies=classifies,
    )
