"""`History`: all observations of a run, for every client."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from jaxtyping import Float64, Int64
from safetensors.torch import save
from torch import Tensor

from fairvar.common import display
from fairvar.common.files import csv_text, given_path, pack_files, write_bytes
from fairvar.common.validation import as_python
from fairvar.data.federation import SPLITS
from fairvar.data.own_data import client_id
from fairvar.engine.state import State
from fairvar.errors import BadInput, shown
from fairvar.methods.base import Method
from fairvar.metrics import RESAMPLES, Fairness, fairness
from fairvar.models.weights import CHECKSUM, checksum
from fairvar.scores import ACCURACY, LOSS, Metric, metric_facts

Key = tuple[str, str]  # (split, model): ("test", "global"), ("valid", "local"), …
MODELS = ("global", "local", "personal")
FACTS = ("rounds", "diverged_at", "stopped", "classifies")  # stored with the tables
BY_MODEL = ("accuracy", "evaluated_loss")  # quantities with a table for each (split, model)
CONTINUES = "continues"  # in the provenance: the SHA-256 of the state that `train` was given
NO_REPLY = -1  # in place of the id of a participant that did not answer
Tables = dict[str, Tensor]  # observations as flat tensors, named "loss", "accuracy/test/global", …


class Frame(dict[str, np.ndarray]):
    """A tidy table as equally long columns; `pandas.DataFrame(frame)` takes it as it is."""

    def __len__(self) -> int:
        return len(next(iter(self.values()))) if self.keys() else 0

    @property
    def columns(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return f"<Frame of {len(self)} rows: {', '.join(self)}>"

    def to_pandas(self) -> Any:
        """As a pandas.DataFrame."""
        try:
            import pandas
        except ImportError:
            raise BadInput("to_pandas needs pandas: pip install pandas") from None
        return pandas.DataFrame(dict(self))

    def to_csv(self) -> str:
        rows = zip(*(column.tolist() for column in self.values()), strict=True)
        return csv_text([tuple(self), *rows])


class Measured(dict[Key, Tensor]):
    """Tables by (split, model); the error for a missing one says why it is missing."""

    def __init__(self, tables: Mapping[Key, Tensor], why: Callable[[object], str]) -> None:
        super().__init__(tables)
        self.why = why

    def __repr__(self) -> str:
        shapes = ", ".join(f"{key}: {tuple(table.shape)}" for key, table in self.items())
        return f"<tables over (evaluation, client): {shapes or 'none'}>"

    def __missing__(self, key: object) -> Tensor:
        raise BadInput(self.why(key))


@dataclass(frozen=True, eq=False, repr=False)
class History:
    """Row r of `loss` and `weights` is round t = `observed[r]`: all rounds from 0 on or, if `state`
    was given to `train`, from `state.round` on; of a stored run, the evaluated rounds. If clients
    are sampled, the tables have only the participants' columns: `participants`, `participant_loss`
    and `participant_weights` (T, m). `loss` and `weights` (T, n) are computed from them, with NaN
    and 0 for the other clients.

    Row e of an evaluated quantity was measured after `evaluated[e]` rounds. "global" is the shared
    model x^{t+1}, "local" the client's x_i^{t+1} before aggregation, "personal" the model v_i^{t+1}
    that the client keeps, if the method has personal models.

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
    accuracy: Mapping[Key, Float64[Tensor, "E n"]]  # of labels; `score` is by the run's metric
    evaluated_loss: Mapping[Key, Float64[Tensor, "E n"]]
    gradient_variance: Float64[Tensor, " E"]  # Σ r_i ‖∇f_i − ∇F‖² at x^t of the evaluated round
    update_norm: Float64[Tensor, "E n"]  # ‖x^t − x_i‖
    samples: Mapping[str, Int64[Tensor, " n"]]  # by split and client; of sequences, positions
    exchanges: int  # message pairs between the server and one client, in all
    bytes_down: int  # per client, in all
    bytes_up: int
    diverged_at: int | None = None  # the first round whose losses or model were not finite
    stopped: str | None = None  # why a callback ended the run before its last round
    provenance: Mapping[str, Any] = field(default_factory=dict)  # version, device, seed, wall time
    classifies: bool = True  # there are labels, so that accuracies can be measured
    # The client of each column, round by round; `NO_REPLY` if it did not answer. None: client i.
    participants: Int64[Tensor, "T m"] | None = None
    metric: Metric = ACCURACY  # of the clients' scores
    own_score: Mapping[Key, Float64[Tensor, "E n"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for quantity in (*BY_MODEL, "own_score"):
            tables = Measured(getattr(self, quantity), partial(self._why_not, quantity))
            object.__setattr__(self, quantity, tables)

    @property
    def clients(self) -> int:
        return self.update_norm.shape[1]

    @property
    def score(self) -> Mapping[Key, Float64[Tensor, "E n"]]:
        """Scores by `metric`; NaN for clients without samples, or whose score is not defined. With
        the default metrics these are the tables `accuracy` and `evaluated_loss`."""
        if self.metric == ACCURACY:
            return self.accuracy
        return self.evaluated_loss if self.metric == LOSS and not self.own_score else self.own_score

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
        table = values.new_full((len(values), n + 1), absent)  # column n: of `NO_REPLY`
        places = torch.where(self.participants == NO_REPLY, n, self.participants)
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
        size = [display.plural(self.rounds, "round"), display.plural(self.clients, "client")]
        text = ", ".join([self.method.label, *size])
        why = self.divergence or (f"stopped: {self.stopped}" if self.stopped else "")
        return f"<History: {text}{'; ' + why if why else ''}>"

    def _repr_html_(self) -> str:
        """The scores at the last evaluation, and a curve of the reported model's mean score."""
        named = {q: getattr(self, q) for q in BY_MODEL}
        scores = {self.metric.name: self.score, **named} if len(self.evaluated) else {}
        rows, lines = list[tuple[object, ...]](), dict[str, list[float]]()
        shown = next((q for q, tables in scores.items() if tables), "")
        for quantity, tables in scores.items():
            for (split, model), table in tables.items():
                now = table[-1][table[-1].isfinite()]
                numbers = (now.mean(), now.var(), now.min(), now.max()) if len(now) > 1 else ()
                rows.append((f"{quantity}, {split}, {model}", *map(float, numbers)))
                if quantity == shown and model == self.method.reported_model:
                    lines[split] = table.nanmean(1).tolist()
        head = ("after the last evaluation", "mean", "variance", "lowest", "highest")
        picture = display.curves(f"mean {shown} over clients", self.evaluated.tolist(), lines)
        parts = [display.table(head, rows), picture] if rows else []
        return display.card(repr(self)[1:-1], *parts)

    def save(self, path: str | Path) -> None:
        """Write one file with everything, from which `fairvar.load` makes this history again."""
        kind = type(self.method)
        facts = {
            "method": msgspec.to_builtins(self.method),
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "made_by": self.state.made_by,
            **{name: getattr(self, name) for name in FACTS},
            **metric_facts(self.metric),
            "birth": dict(self.provenance),
        }
        tables = {f"tables/{name}": table.contiguous() for name, table in self.tables().items()}
        content = save({**self.state.flat(), **tables}, {"facts": json.dumps(facts)})
        write_bytes(given_path(path, to_write=True), pack_files({"history.safetensors": content}))

    def save_model(self, path: str | Path) -> None:
        """Write the final global model (`model`) as a plain .safetensors file, whose metadata hold
        the SHA-256 of its tensors."""
        path = given_path(path, to_write=True)
        if path.suffix != ".safetensors":
            raise BadInput(f"{path}: give a model's file a name that ends in .safetensors")
        tensors = {name: leaf.detach().cpu().contiguous() for name, leaf in self.model.items()}
        write_bytes(path, save(tensors, {CHECKSUM: checksum(tensors)}))

    def tables(self) -> Tables:
        """All observations as flat tensors; `history_from_tables` reverses it."""
        flat: Tables = {
            "observed": self.observed,
            "loss": self.participant_loss,
            "weights": self.participant_weights,
            "ascended": self.ascended,
            "evaluated": self.evaluated,
            "gradient_variance": self.gradient_variance,
            "update_norm": self.update_norm,
        }
        if self.participants is not None:
            flat["participants"] = self.participants
        named = {name: getattr(self, name) for name in BY_MODEL} | {"score": self.own_score}
        for quantity, tables in named.items():
            for (split, model), table in tables.items():
                flat[f"{quantity}/{split}/{model}"] = table
        flat |= {f"samples/{split}": counts for split, counts in self.samples.items()}
        flat["counters"] = torch.tensor([self.exchanges, self.bytes_down, self.bytes_up])
        return flat

    def __add__(self, later: History) -> History:
        """This history and its continuation, `train(…, state=this)`, as one."""
        return join(self, later) if isinstance(later, History) else NotImplemented

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
        """The reason why a table is missing."""
        there = getattr(self, quantity)
        named = isinstance(key, tuple) and all(isinstance(part, str) for part in key)
        if not (isinstance(key, tuple) and named and len(key) == 2):
            return f'{quantity}[{shown(key)}]: give (split, model), for example ("test", "global")'
        split, model = key
        what = self.metric.title if quantity == "own_score" else quantity
        start = f"no {what} of the {model} model on {shown(split)}"
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

    def personal_model(self, client: int | str) -> dict[str, Tensor]:
        """The final personal model of a client, by id or name, as a state dict, as `model`."""
        models = self.state.personal
        if models is None:
            raise BadInput(
                f"{self.method.label} has no personal models"
                if self.method.personal is None
                else "the personal models are not here: they stay on the nodes of a deployed run, "
                "and condensed runs keep no models"
            )
        place = client_id(client, self.clients, self.provenance.get("client_names", ()))
        return {name: leaf[place] for name, leaf in models.items()}

    def fairness(
        self,
        split: str = "test",
        model: str | None = None,
        at: int = -1,
        resamples: int = RESAMPLES,
    ) -> Fairness:
        """The fairness of client scores at one evaluated round (the last by default). By default
        of the model that the method is reported by: personal models where it has such, the global
        model otherwise."""
        model = self.method.reported_model if model is None else model
        if not (isinstance(split, str) and isinstance(model, str)):
            raise BadInput(self._why_not("accuracy", (split, model)))
        table, at = self.score[split, model], as_python(at)
        if not len(table):
            raise BadInput(self._why_not("own_score", (split, model)))
        if not isinstance(at, int) or not -len(table) <= at < len(table):
            raise BadInput(f"at = {shown(at)}: there are {len(table)} evaluations; -1 is the last")
        scores, counts = table[at], self.samples[split]
        return fairness(scores, counts, resamples=resamples, metric=self.metric)

    def to_frame(self) -> Frame:
        """One row per (round, client, split, model, quantity); losses and weights of participants.

        `round` is the number of rounds that the model has behind it: in row r "loss" is f_i(x^r),
        "weight" was used to make x^{r+1}, "accuracy", "evaluated_loss" and the score (named as its
        metric) are those of x^r (or of the local models from which x^r was made)."""
        drawn, at = self.participants, self.observed
        blocks = [("train", "global", "loss", at, self.participant_loss, drawn),
                  ("", "", "weight", at, self.participant_weights, drawn)]  # fmt: skip
        tables = {"accuracy": self.accuracy, "evaluated_loss": self.evaluated_loss}
        if self.metric != LOSS:
            tables[self.metric.name] = self.score
        for quantity, by_key in tables.items():
            for (split, model), table in by_key.items():
                blocks.append((split, model, quantity, self.evaluated, table, None))
        columns: dict[str, list[Any]] = {
            k: [] for k in ("round", "client", "split", "model", "quantity", "value")
        }
        for split, model, quantity, at, table, ids in blocks:
            clients = torch.arange(table.shape[1]).expand(table.shape) if ids is None else ids
            there = (clients != NO_REPLY).numpy()
            columns["round"].append(np.repeat(at.numpy(), there.sum(1)))
            columns["client"].append(clients.numpy()[there])
            columns["value"].append(table.numpy()[there])
            for name, text in (("split", split), ("model", model), ("quantity", quantity)):
                columns[name].append(np.full(there.sum(), text))
        return Frame({name: np.concatenate(parts) for name, parts in columns.items()})


def join(first: History, later: History) -> History:
    """Both as one history, if `later` continues `first`: the same method and clients, and the
    rounds right after."""
    start = later.state.round - later.rounds
    differ = [
        (first.method == later.method, f"{later.method!r} is not {first.method!r}"),
        (sizes_of(first) == sizes_of(later), "they have other clients"),
        (first.metric == later.metric, "they are scored by other metrics"),
        (first.participant_loss.shape[1] == later.participant_loss.shape[1],
         "other numbers of clients take part in a round"),
        (first.diverged_at is None, "the first has diverged"),
        (first.state.round == start,
         f"the first ends after round {first.state.round}, the second starts after {start}"),
        (not len(first.evaluated) or not len(later.evaluated)
         or all(getattr(first, q).keys() == getattr(later, q).keys() for q in BY_MODEL),
         "they evaluate other splits or models"),
        (not first.state.params
         or later.provenance.get(CONTINUES) in (None, checksum(first.state.flat())),
         "the second continues another run"),
    ]  # fmt: skip
    for fine, why in differ:
        if not fine:
            raise BadInput(f"these histories cannot be joined: {why}; the second must come from "
                           "train(…, state=first) with the same options")  # fmt: skip
    rows = ("observed", "participant_loss", "participant_weights", "ascended", "evaluated",
            "gradient_variance", "update_norm")  # fmt: skip
    whole: dict[str, Any] = {n: torch.cat([getattr(h, n) for h in (first, later)]) for n in rows}
    pairs = {name: (getattr(first, name), getattr(later, name)) for name in BY_MODEL}
    if first.metric != ACCURACY:
        pairs["own_score"] = first.score, later.score
    for name, (one, other) in pairs.items():
        whole[name] = {key: torch.cat([h[key] for h in (one, other) if key in h])
                       for key in {**one, **other}}  # fmt: skip
    if first.participants is not None and later.participants is not None:
        whole["participants"] = torch.cat([first.participants, later.participants])
    for name in ("rounds", "exchanges", "bytes_down", "bytes_up"):
        whole[name] = getattr(first, name) + getattr(later, name)
    seconds = sum(float(h.provenance.get("seconds", 0.0)) for h in (first, later))
    facts = {**later.provenance, "seconds": seconds, CONTINUES: first.provenance.get(CONTINUES)}
    known = {name: fact for name, fact in facts.items() if fact is not None}
    return replace(later, **whole, provenance=known)


def sizes_of(history: History) -> dict[str, list[int]]:
    """The clients' numbers of samples, by split."""
    return {split: counts.tolist() for split, counts in history.samples.items()}


def are_ids(table: Tensor, clients: int) -> bool:
    """Whether its rows hold ids of clients, rising, and `NO_REPLY` after the last."""
    if table.dtype != torch.int64 or bool(((table < NO_REPLY) | (table >= clients)).any()):
        return False
    now, then = table[:, :-1], table[:, 1:]
    return bool(((then == NO_REPLY) | ((now != NO_REPLY) & (then > now))).all())


def history_from_tables(tables: Tables, classifies: bool, **facts: Any) -> History:
    """The History of a run that has just ended, or of one that was stored. `facts`: its fields that
    are not in the tables."""

    def group(quantity: str) -> dict[Key, Tensor]:
        # In this order, also if a file has another one.
        places = [(split, model) for split in SPLITS for model in MODELS]
        named = {place: "/".join((quantity, *place)) for place in places}
        return {place: tables[name] for place, name in named.items() if name in tables}

    exchanges, bytes_down, bytes_up = tables["counters"].tolist()
    for name in ("ascended", "evaluated", "gradient_variance", "update_norm"):
        facts[name] = tables[name]
    return History(
        participant_loss=tables["loss"],
        participant_weights=tables["weights"],
        participants=tables.get("participants"),
        accuracy=group("accuracy") if classifies else {},
        evaluated_loss=group("evaluated_loss"),
        own_score=group("score"),
        exchanges=exchanges,
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        classifies=classifies,
        **facts,
    )
