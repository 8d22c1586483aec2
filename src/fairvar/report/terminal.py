"""What the commands print: facts, runs, partitions, methods, data sets, claims of the theory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from fairvar.data.federation import Federation
from fairvar.methods.catalogue import catalogue
from fairvar.report.table import UNDEFINED, Estimate, parts
from fairvar.runs.verify import Agreement, tolerance
from fairvar.theory import Claim


def _table(title: str, heads: Sequence[str], caption: str = "", **options: Any) -> RichTable:
    """`options`: of the columns after the first."""
    table = RichTable(
        title=title, caption=caption or None, title_justify="left", caption_justify="left"
    )
    for place, head in enumerate(heads):
        table.add_column(head, **(options if place else {"overflow": "fold"}))
    return table


def facts_table(facts: Mapping[str, Any], title: str | None = None) -> RichTable:
    table = RichTable(show_header=False, box=None, title=title, title_justify="left")
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table


def run_table(folder: Path, manifest: Mapping[str, Any]) -> RichTable:
    """One row per evaluated split and model of a run."""
    diverged = manifest["diverged_at"]
    state = "" if diverged is None else f", diverged in round {diverged}"
    birth = manifest["birth"]
    peak = f", peak memory {birth['peak_megabytes']} MB" if birth.get("peak_megabytes") else ""
    cost = f"{birth.get('seconds', 0):.1f} s on {birth.get('device')} ({birth.get('engine')}){peak}"
    table = _table(
        f"{manifest['method']}: {manifest['rounds']} rounds{state}",
        ("split/model", "accuracy %", "variance", "noise floor", "corrected", "worst 10 %"),
        f"variances over clients in fraction² × 100; {cost}; stored in {folder}",
        justify="right",
    )
    columns = (("mean", 2), ("variance_over_clients", 3), ("noise_floor", 3),
               ("corrected_variance", 3), ("worst_10_percent", 2))  # fmt: skip
    for name, scores in sorted(manifest["result"].items()):
        cells = [Estimate(100 * scores[key]) for key, _ in columns]
        shown = [
            UNDEFINED if cell.diverged else parts([cell], digits)[0][0]
            for cell, (_, digits) in zip(cells, columns, strict=True)
        ]
        table.add_row(name, *shown)
    return table


def agreement_table(found: Sequence[Agreement], seed: int) -> RichTable:
    """Stored runs compared with their first rounds, run again."""
    table = _table(
        f"Run again on this machine, drawn with seed {seed}",
        ("run", "made on", "rounds", "accuracy", "answers", "loss", "allowed", ""),
        "largest differences: mean accuracy over clients (points), share of all answers, training "
        "loss of a client; allowed: of accuracy and loss",
        justify="right",
    )
    for each in found:
        facts = each.to_dict()
        alpha = "" if facts["alpha"] is None else f"alpha {facts['alpha']:g}, "
        name = f"{facts['method']}, {facts['protocol']}, {alpha}lr {facts['lr']:g}"
        table.add_row(
            f"{name}, seed {facts['seed']}", str(facts["made_on"]), str(each.rounds),
            f"{100 * each.accuracy:.3f}", f"{each.answers:.2%}", f"{each.loss:.2%}",
            str(tolerance(each.run.config)), "agrees" if each.holds else "DIFFERS",
        )  # fmt: skip
    return table


def passport_table(federation: Federation, title: str = "partition") -> RichTable:
    """Where a partition came from and how uneven it is."""
    passport, sizes = dict(federation.provenance), federation.sizes
    facts: dict[str, Any] = {
        "data set": passport.get("dataset", federation.name),
        "clients": federation.clients,
        "training samples": f"min {int(sizes.min())}, median {int(sizes.median())}, "
        f"max {int(sizes.max())}, total {int(sizes.sum())}",
        "samples in all": ", ".join(
            f"{name} {int(split.counts.sum())}" for name, split in federation.splits.items()
        ),
    }
    for key in ("mean_total_variation", "effective_classes", "majority_share"):
        if key in passport:
            facts[key.replace("_", " ")] = f"{passport[key]:.3f}"
    for key in ("attempts", "moved", "sha256"):
        if key in passport:
            facts[{"moved": "samples moved to reach the minimum"}.get(key, key)] = passport[key]
    return facts_table(facts, title.capitalize())


def methods_table() -> RichTable:
    table = _table(
        "Methods: what a client and the server exchange in one round",
        ("method", "exchanges", "down", "up", "reveals", "sums"),
        "d: floats of the model, s: one scalar. sums: the server needs only sums over clients, so "
        "that secure aggregation is possible.",
        overflow="fold",
    )
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


def datasets_table(rows: Sequence[Mapping[str, Any]]) -> RichTable:
    heads = ("name", "what", "found", "licence")
    table = _table("Data sets", heads, overflow="fold")
    for row in rows:
        table.add_row(*(str(row[key]) for key in heads))
    return table


THEOREMS = {
    "T1": "q-FFL against the loss variance",
    "T2": "when fair and plain stationary points coincide",
    "T3": "when they differ",
    "T4": "a perturbation that moves them apart",
    "T5": "the variance falls as the strength grows",
    "T6": "approximate against exact algorithms",
    "": "identities behind the methods and the engine",
}


def claims_text(claims: Sequence[Claim]) -> Iterator[RichTable | Text]:
    """Every claim with both sides, tolerance and verdict, by theorem."""
    for theorem, title in THEOREMS.items():
        yield Text.assemble("\n", (theorem or "Also", "bold"), f"  {title}")
        grid = RichTable.grid(padding=(0, 1))
        grid.add_column(style="bold")
        grid.add_column(overflow="fold")
        for claim in claims:
            if (claim.name[:2] if claim.name[:2] in THEOREMS else "") == theorem:
                grid.add_row(_verdict(claim), _sentence(claim))
        yield grid


def _verdict(claim: Claim) -> str:
    """A counterexample to the paper's printed form holds by refuting it."""
    if not claim.holds:
        return "FAILS"
    return "refutes" if "paper" in claim.relation else "holds"


def _sentence(claim: Claim) -> str:
    many = f", worst of {claim.comparisons}" if claim.comparisons > 1 else ""
    note = f"\n({claim.note})" if claim.note else ""
    sides = f"{claim.lhs:.7g} {claim.relation} {claim.rhs:.7g}"
    return f"{claim.name}: {claim.statement}\n{sides}   tolerance {claim.tolerance:.0e}{many}{note}"
