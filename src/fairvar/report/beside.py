"""Every method beside FedAvg, late in training: for the tables, the picture and the sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from fairvar.report.gather import Group
from fairvar.report.paired import Late, Paired, pair
from fairvar.report.results import Result
from fairvar.report.table import UNDEFINED, Column, Row, Table

MEANT = {
    "local": "own: each client's own model after its local work",
    "global": "global: the shared model",
}
METRICS = {
    "accuracy": "accuracy",
    "variance": "variance",
    "corrected_variance": "corrected variance",
}


@lru_cache(maxsize=512)
def paired(a: Result, b: Result, model: str, late: bool) -> Paired | Late | None:
    """None where not the same was measured."""
    one, other = ((r.late(model) if late else r.seed_accuracy(model)) for r in (a, b))
    return pair(one, other, b.samples())


def federation_name(group: Group) -> str:
    alpha = "" if group.alpha is None else f", α {group.alpha:g}"
    deployed = "deployed, " * ("deployed" in group.kind)
    return f"{group.dataset}, {deployed}{group.config.protocol}{alpha}"


def beside_fedavg(groups: Sequence[Group]) -> Table | None:
    """Every method less FedAvg over the last quarter of the rounds, for both models; None without
    FedAvg, or with fewer than two evaluations there."""
    rows = [row for group in groups for row in _beside(group)]
    if not rows:
        return None
    told = {model for group in groups for r in group.results for model in r.trial.models}
    models = [two for two in (("local", "own"), ("global", "global")) if two[0] in told]
    columns = [Column("where", "federation")] + [
        Column(f"{model}_{metric}", f"{short} {head}")
        for model, short in models
        for metric, head in (("accuracy", "acc."), ("variance", "var."),
                             ("corrected_variance", "corr."))
    ]  # fmt: skip
    notes = [
        "Test data, the configurations chosen on validation data. Accuracy in points, variances "
        "×100 with what the finite test sets add (var.) and without (corr.); in brackets the 95 % "
        "interval, paired over seeds and clients. * leaves zero out.",
        "; ".join(MEANT[model] for model, _ in models) + ".",
        "Averaged over the evaluated rounds of the last quarter, the same for both sides.",
    ]
    return Table("Every method less FedAvg, late in training", columns, rows, notes)


def late_differences(results: Sequence[Result]) -> dict[tuple[str, str], Paired | Late]:
    """By method and model, less FedAvg; where both were evaluated at least twice."""
    alive = {r.label: r for r in results if r.at is not None}
    found: dict[tuple[str, str], Paired | Late] = {}
    base = alive.pop("FedAvg", None)
    if base is None:
        return found
    for label, result in alive.items():
        for model in ("local", "global"):
            both_have = all(model in r.trial.models for r in (result, base))
            if both_have and len(result.late(model)) > 1:
                both = paired(result, base, model, True)
                if both is not None:
                    found[label, model] = both
    return found


def _beside(group: Group) -> Iterator[Row]:
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
