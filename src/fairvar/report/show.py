"""Results of the commands as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from fairvar.catalogue import catalogue
from fairvar.federation import Federation
from fairvar.theory import Claim


def facts_table(facts: Mapping[str, Any], title: str | None = None) -> RichTable:
    table = RichTable(show_header=False, box=None, title=title, title_justify="left")
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table


def run_table(folder: Path, manifest: Mapping[str, Any]) -> RichTable:
    """One row per evaluated split and model of a run."""
    diverged = manifest["diverged_at"]
    state = "" if diverged is None else f", diverged in round {diverged}"
    table = RichTable(
        title=f"{manifest['method']}: {manifest['rounds']} rounds{state}",
        caption=f"variances over clients in fraction² × 100; stored in {folder}",
        title_justify="left",
        caption_justify="left",
    )
    heads = ("split/model", "accuracy %", "variance", "noise floor", "corrected", "worst 10 %")
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right")
    for name, scores in sorted(manifest["result"].items()):
        table.add_row(
            name,
            f"{100 * scores['mean']:.2f}",
            *(f"{100 * scores[k]:.3f}" for k in ("variance_over_clients", "noise_floor",
                                                 "corrected_variance")),
            f"{100 * scores['worst_10_percent']:.2f}",
        )  # fmt: skip
    return table


def passport_table(federation: Federation) -> RichTable:
    """Where a partition came from and how uneven it is."""
    passport, sizes = dict(federation.passport), federation.sizes
    facts: dict[str, Any] = {
        "data set": passport.get("dataset", federation.name),
        "clients": federation.clients,
        "training samples": f"min {int(sizes.min())}, median {int(sizes.median())}, "
        f"max {int(sizes.max())}, total {int(sizes.sum())}",
        "validation and test": ", ".join(
            f"{name} {int(s.counts.sum())}"
            for name, s in federation.splits.items()
            if name != "train"
        ),
    }
    for key in ("mean_total_variation", "effective_classes", "majority_share"):
        if key in passport:
            facts[key.replace("_", " ")] = f"{passport[key]:.3f}"
    for key in ("attempts", "moved", "sha256"):
        if key in passport:
            facts[{"moved": "samples moved to reach the minimum"}.get(key, key)] = passport[key]
    return facts_table(facts, "Partition")


def methods_table() -> RichTable:
    table = RichTable(
        title="Methods: what a client and the server exchange in one round",
        title_justify="left",
        caption="d: floats of the model, s: one scalar. sums: the server needs no client's value by "
        "itself, so secure aggregation could carry it.",
        caption_justify="left",
    )
    for head in ("method", "exchanges", "down", "up", "reveals", "sums"):
        table.add_column(head, overflow="fold")
    for entry in catalogue():
        table.add_row(
            entry["label"], str(entry["exchanges"]), entry["down"], entry["up"],
            ", ".join(entry["reveals"]), "yes" if entry["sums_suffice"] else "no",
        )  # fmt: skip
    return table


def options_table() -> RichTable:
    """How each method is written in a configuration: its name and its options with defaults."""
    table = RichTable(title="[method] in a configuration", title_justify="left", box=None)
    table.add_column("name", style="bold")
    table.add_column("option = default", overflow="fold")
    seen = {entry["name"]: entry["options"] for entry in catalogue()}
    for name, options in seen.items():
        table.add_row(name, ", ".join(f"{k} = {v}" for k, v in options.items()))
    return table


def claims_table(claims: Sequence[Claim]) -> RichTable:
    """Every claim with both sides; a claim that fails is written in capitals."""
    table = RichTable(title="The theory, in numbers", title_justify="left")
    table.add_column("claim", overflow="fold", ratio=2)
    table.add_column("statement", overflow="fold", ratio=5)
    for head in ("left side", "relation", "right side", "tolerance", "verdict"):
        table.add_column(head, justify="left" if head == "relation" else "right", overflow="fold")
    for claim in claims:
        table.add_row(
            claim.name, claim.statement, f"{claim.lhs:.6g}", claim.relation, f"{claim.rhs:.6g}",
            f"{claim.tolerance:.0e}", "holds" if claim.holds else "FAILS",
        )  # fmt: skip
    return table
