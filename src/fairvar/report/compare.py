"""Methods compared with each other on the same seeds and clients: `fairvar compare`, and every
method compared with FedAvg in a report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64
from rich.table import Table as RichTable
from rich.text import Text

from fairvar.errors import BadInput, unknown
from fairvar.metrics.paired import Late, Paired, compare, compare_rounds, pair
from fairvar.report.table import UNDEFINED, Column, Row, Table
from fairvar.runs.results import Group, gather
from fairvar.runs.store import is_complete
from fairvar.runs.stored import StoredRun
from fairvar.runs.trials import Result, late_rounds

SHOWN = 5  # clients listed on either side
MODELS = ("global", "local")
MEANT = {
    "local": "local: each client's model after its local work",
    "global": "global: the shared model",
}
METRICS = {
    "accuracy": "accuracy",
    "variance": "variance",
    "corrected_variance": "corrected variance",
}


@lru_cache(maxsize=512)
def paired(a: Result, b: Result, model: str, late: bool) -> Paired | Late | None:
    """A − B; None if the two have too little in common. `late`: over the last quarter of the rounds
    instead of at the chosen round."""
    one, other = ((r.late(model) if late else r.seed_accuracy(model)) for r in (a, b))
    return pair(one, other, b.samples())


def federation_name(group: Group) -> str:
    alpha = "" if group.alpha is None else f", α {group.alpha:g}"
    deployed = "deployed, " * ("deployed" in group.kind)
    return f"{group.dataset}, {deployed}{group.config.protocol}{alpha}"


def compared_with_fedavg(groups: Sequence[Group]) -> Table | None:
    """Every method − FedAvg, averaged over the last quarter of the rounds, for both models; None
    without FedAvg, or with fewer than two evaluations in these rounds."""
    rows = [row for group in groups for row in _differences(group)]
    if not rows:
        return None
    known = {model for group in groups for r in group.results for model in r.trial.models}
    models = [model for model in MEANT if model in known]
    columns = [Column("where", "federation")] + [
        Column(f"{model}_{metric}", f"{model} {head}")
        for model in models
        for metric, head in (("accuracy", "acc."), ("variance", "var."),
                             ("corrected_variance", "corr."))
    ]  # fmt: skip
    notes = [
        "Test data, the configurations chosen on validation data. Accuracy in points, variances "
        "×100 with what the finite test sets add (var.) and without (corr.); in brackets the 95 % "
        "interval, paired over seeds and clients. *: the interval excludes zero.",
        "; ".join(MEANT[model] for model in models) + ".",
        "Averaged over the evaluated rounds of the last quarter, the same for both methods.",
    ]
    return Table("Every method compared with FedAvg, late in training", columns, rows, notes)


def late_differences(results: Sequence[Result]) -> dict[tuple[str, str], Paired | Late]:
    """Every method − FedAvg, late, by (method, model); only if evaluated at least twice there."""
    alive = {r.label: r for r in results if r.at is not None}
    found: dict[tuple[str, str], Paired | Late] = {}
    base = alive.pop("FedAvg", None)
    if base is None:
        return found
    for label, result in alive.items():
        for model in MEANT:
            both_have = all(model in r.trial.models for r in (result, base))
            if both_have and len(result.late(model)) > 1:
                both = paired(result, base, model, True)
                if both is not None:
                    found[label, model] = both
    return found


def _differences(group: Group) -> Iterator[Row]:
    rows: dict[str, dict[str, str]] = {}
    for (label, model), both in late_differences(group.results).items():
        cells = rows.setdefault(label, {"where": federation_name(group)})
        for metric in METRICS:
            d = getattr(both, metric)
            if not math.isfinite(d.value):
                cells[f"{model}_{metric}"] = UNDEFINED
                continue
            text = f"{100 * d.value:+.2f} ({100 * d.low:+.2f} to {100 * d.high:+.2f})"
            cells[f"{model}_{metric}"] = text + (" *" if d.clear else "")
    yield from (Row(label, cells) for label, cells in rows.items())


# --- fairvar compare -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Side:
    name: str
    model: str
    passport: str  # sha256 of the partition: only equal ones can be paired
    accuracy: Float[np.ndarray, "*rounds seeds n"]  # without rounds: at the chosen one
    samples: Int64[np.ndarray, " n"]
    seeds: list[int]


def side(text: str, model: str | None, late: bool = False) -> Side:
    """FOLDER:LABEL[@ALPHA] of a sweep, or the folder of one run; `late`: the last quarter of the
    rounds instead of the chosen one (of a single run, the last)."""
    if model not in (None, *MODELS):
        raise unknown("model", model, MODELS)
    folder, _, label = text.partition(":")
    if not label and is_complete(Path(folder)):
        return _single(StoredRun.open(Path(folder)), model, late)
    if not label:
        raise BadInput(
            f"{text!r}: name a method, such as {folder}:FedAvg, or a single run's folder"
        )
    label, _, alpha = label.partition("@")
    group = _group(Path(folder), alpha)
    found = {r.label: r for r in group.results}
    if label not in found:
        raise unknown("method label", label, found)
    result = found[label]
    if result.at is None:
        raise BadInput(f"every configuration of {label} diverged; there is nothing to compare")
    which = model or group.criterion.model
    if which not in result.trial.models:
        raise BadInput(f"{text}: the {which} model was not measured there (evaluate.local)")
    return Side(
        f"{label} ({result.trial.describe(result.at)})",
        which,
        str(group.passport.get("sha256")),
        result.late(which) if late else result.seed_accuracy(which),
        result.samples(),
        result.trial.seeds,
    )


def _group(folder: Path, alpha: str) -> Group:
    groups = gather(folder)
    names = _names(groups)
    if alpha in names:
        return names[alpha]
    if not alpha and len(groups) == 1:
        return groups[0]
    known = ", ".join(f"{name} ({federation_name(g)})" for name, g in names.items())
    example = next(reversed(names), "0.1")
    raise BadInput(f"{folder} has results for {known}; say which, as in :FedAvg@{example}")


def _names(groups: Sequence[Group]) -> dict[str, Group]:
    """By alpha, or else by the kind of partition; numbered where that does not tell them apart."""
    several = len({g.config.protocol for g in groups}) > 1
    names = [f"{g.config.protocol}/{_name(g)}" if several else _name(g) for g in groups]
    return {
        name if names.count(name) == 1 else f"{name}-{names[: place + 1].count(name)}": group
        for place, (name, group) in enumerate(zip(names, groups, strict=True))
    }


def _name(group: Group) -> str:
    partition = type(group.config.partition).__struct_config__.tag
    name = "own" if group.own_data else str(partition)
    name = name if group.alpha is None else f"{group.alpha:g}"
    return f"{name}/{group.data}" if group.data else name


def _single(run: StoredRun, model: str | None, late: bool) -> Side:
    history, which = run.history(with_state=False), model or run.config.select.model
    known = [m for split, m in history.accuracy if split == "test"]
    if model is None and known and which not in known:
        which = known[0]
    if which not in known or not len(history.evaluated):
        raise BadInput(f"{run.folder}: no test accuracy of the {which} model was measured")
    accuracy = history.accuracy["test", which].numpy()
    return Side(
        f"{run.config.method.label} ({run.folder.name})",
        which,
        str(run.manifest["passport"].get("sha256")),
        accuracy[late_rounds(history.evaluated.numpy())][:, None] if late else accuracy[-1:],
        history.samples["test"].numpy(),
        [run.config.train.seed],
    )


def versus(a: Side, b: Side) -> Paired | Late:
    """Pair over the seeds that both have; another partition has other clients and is refused."""
    if a.passport != b.passport:
        raise BadInput("the two sides have different partitions: their clients cannot be paired")
    if a.model != b.model:
        raise BadInput(f"A is about the {a.model} model and B about the {b.model} one: name one of "
                       "them with --model")  # fmt: skip
    both = (a.samples > 0) & (b.samples > 0)
    if len(a.samples) != len(b.samples) or (a.samples != b.samples)[both].any():
        raise BadInput("the two sides have other test samples: their clients cannot be paired")
    common = sorted(set(a.seeds) & set(b.seeds))
    if not common:
        raise BadInput(f"no common seed: {a.seeds} and {b.seeds}")
    rows_a, rows_b = ([s.seeds.index(seed) for seed in common] for s in (a, b))
    one, other = a.accuracy[..., rows_a, :], b.accuracy[..., rows_b, :]
    return (compare if one.ndim == 2 else compare_rounds)(one, other, a.samples)


NUMBERS = (
    ("accuracy", "mean accuracy (points)"),
    ("variance", "variance over clients ×100"),
    ("corrected_variance", "corrected variance ×100"),
    ("worst_10_percent", "worst 10 % (points)"),
)


def paired_table(a: Side, b: Side, paired: Paired | Late) -> Iterator[Any]:
    when = "" if isinstance(paired, Paired) else ", average of the last quarter of the rounds"
    yield Text.assemble(("A", "bold"), f" {a.name}\n", ("B", "bold"), f" {b.name}\n",
                        f"test data, {a.model} model{when}")  # fmt: skip
    table = RichTable(title="A − B, paired over seeds and clients", title_justify="left")
    for head in ("", "difference", "95 % interval", "clear?"):
        table.add_column(head, justify="left" if not head else "right")
    for key, name in NUMBERS:
        d = getattr(paired, key, None)
        if d is None:
            continue
        if not math.isfinite(d.value):
            table.add_row(name, UNDEFINED, UNDEFINED, "")
            continue
        table.add_row(name, f"{100 * d.value:+.3f}", f"{100 * d.low:+.3f} to {100 * d.high:+.3f}",
                      "yes" if d.clear else "within noise")  # fmt: skip
    yield table
    if not isinstance(paired, Paired):
        return
    gain, pay = paired.gaining, paired.paying
    same = int(np.isfinite(paired.by_client).sum()) - len(gain) - len(pay)
    yield f"{len(gain)} clients gain, {len(pay)} pay, {same} are the same"
    for name, clients in (("gain most", gain), ("pay most", pay)):
        shown = [f"{i}: {100 * paired.by_client[i]:+.1f}" for i in clients[:SHOWN]]
        if shown:
            yield f"  {name} (client: points)  " + ", ".join(shown)


def paired_dict(a: Side, b: Side, paired: Paired | Late) -> dict[str, Any]:
    late = not isinstance(paired, Paired)
    found: dict[str, Any] = {"a": a.name, "b": b.name, "model": a.model, "late": late}
    for key, _ in NUMBERS:
        d = getattr(paired, key, None)
        if d is not None:
            found[key] = {"difference": d.value, "interval": [d.low, d.high], "clear": d.clear}
    if not isinstance(paired, Paired):
        return found
    clients = [None if np.isnan(v) else float(v) for v in paired.by_client]
    return found | {"by_client": clients, "gaining": paired.gaining, "paying": paired.paying}
