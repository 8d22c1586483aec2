"""What the paper prints: the numbers of its tables, and its claims, tested on these runs.

A claim becomes pairs of methods on one federation. Each pair is compared on the same seeds and
clients, and an interval that excludes zero is a clear difference. Every interval has 95 %: of a
hundred pairs that do not differ, about five look as if they did.

Each claim is tested twice: at the chosen rounds, as in the paper's tables, and averaged over the
last quarter of the rounds, which are the same for all methods, so that fluctuations between
evaluations cancel.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple

from fairvar.metrics.paired import Difference
from fairvar.report.compare import METRICS, federation_name, paired
from fairvar.report.table import Column, Row, Table
from fairvar.runs.results import Group
from fairvar.runs.trials import Result

# Names of our data sets → the paper's rows.
DATASETS = {"mnist_1000": "mnist", "mnist": "mnist", "cifar10": "cifar10",
            "cifar100": "cifar100", "tiny_imagenet": "tiny_imagenet"}  # fmt: skip


class Printed(NamedTuple):
    """Accuracy in percent, variance over clients in fraction² × 100, with standard errors."""

    accuracy: float
    accuracy_error: float
    variance: float
    variance_error: float


@cache
def _tables() -> dict[tuple[str, float, str], Printed]:
    text = resources.files("fairvar.report").joinpath("paper_tables.csv").read_text("utf-8")
    found = {}
    for row in csv.DictReader(text.splitlines()):
        values = (float(row[k]) for k in ("acc", "acc_se", "var", "var_se"))
        found[row["dataset"], float(row["alpha"]), row["method"]] = Printed(*values)
    return found


def printed(dataset: str, alpha: float | None, label: str) -> Printed | None:
    """The paper's cell for a method label such as "FairGrad*", if it has one."""
    name = label.lower().replace("-", "").replace("*", "_star")
    return None if alpha is None else _tables().get((DATASETS.get(dataset, ""), alpha, name))


# --- claims --------------------------------------------------------------------------------------
Metric = Literal["accuracy", "variance", "corrected_variance"]
ALIKE, LESS, MORE = "alike", "less", "more"
FEWEST_SEEDS = 3  # below that an interval over seeds says nothing about other seeds
VIEWS = (False, True)  # at the chosen rounds; late


@dataclass(frozen=True)
class PaperClaim:
    """What the paper says of `left` compared with each of `right` (all others if empty)."""

    text: str
    datasets: tuple[str, ...]
    left: str
    relation: str
    metric: Metric
    right: tuple[str, ...] = ()


VARIANCES: tuple[Metric, ...] = ("variance", "corrected_variance")
ALL: tuple[Metric, ...] = ("accuracy", *VARIANCES)
BOTH, CIFAR10, FEDAVG = ("mnist", "cifar10"), ("cifar10",), ("FedAvg",)
CLAIMS = tuple(
    PaperClaim(text, datasets, left, relation, metric, right)
    for text, datasets, left, relation, metrics, right in (
        ("FairGrad has the lowest variance", CIFAR10, "FairGrad", LESS, VARIANCES, ()),
        ("FairGrad has the highest accuracy", CIFAR10, "FairGrad", MORE, ALL[:1], ()),
        ("all methods are equal", ("mnist",), "FedAvg", ALIKE, ALL, ()),
        ("AFL's variance is large", BOTH, "AFL", MORE, VARIANCES, FEDAVG),
        ("FairGrad* is like FedAvg", CIFAR10, "FairGrad*", ALIKE, ALL, FEDAVG),
        ("FairGrad is not like FedAvg: lower variance", CIFAR10, "FairGrad", LESS, VARIANCES,
         FEDAVG),
        ("AAggFF, q-FFL and FairLoss are like FedAvg", BOTH, "FedAvg", ALIKE, ALL,
         ("AAggFF", "q-FFL", "FairLoss")),
    )
    for metric in metrics
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A claim on one federation; `difference` is left − right of the pair that decides it."""

    claim: PaperClaim
    verdict: str
    right: str
    difference: Difference
    pairs: int


def judge(
    claim: PaperClaim, results: Sequence[Result], model: str, late: bool = False
) -> Finding | None:
    """At the chosen rounds, or `late`: over the last quarter. None if the methods were not run."""
    found = {r.label: r for r in results if r.at is not None}
    rivals = [r for r in claim.right or found if r in found and r != claim.left]
    if claim.left not in found or not rivals:
        return None
    pairs = {}
    for rival in rivals:
        both = paired(found[claim.left], found[rival], model, late)
        if both is not None and math.isfinite((d := getattr(both, claim.metric)).value):
            pairs[rival] = d
    if not pairs:
        return None
    verdict, decides = _verdict(claim.relation, pairs)
    return Finding(claim, verdict, decides, pairs[decides], len(pairs))


def _verdict(relation: str, pairs: dict[str, Difference]) -> tuple[str, str]:
    """The verdict, and the pair that contradicts the claim most."""
    if relation == ALIKE:
        worst = max(pairs, key=lambda name: _signal(pairs[name]))
        clear = [name for name, d in pairs.items() if d.clear]
        against = f"not reproduced: clear for {', '.join(clear)}"
        return (against if clear else "undecided: no clear difference"), worst
    sign = 1 if relation == MORE else -1
    worst = min(pairs, key=lambda name: sign * pairs[name].value)
    if all(d.clear and sign * d.value > 0 for d in pairs.values()):
        return "reproduced", worst
    if any(d.clear and sign * d.value < 0 for d in pairs.values()):
        return "not reproduced: the opposite is clear", worst
    return "undecided: within noise", worst


def _signal(d: Difference) -> float:
    """Distance from zero in half widths of the interval."""
    return abs(d.value) / max((d.high - d.low) / 2, 1e-12)


def claims_table(groups: Sequence[Group]) -> Table | None:
    """Every claim on every federation of the paper's data sets; None if none of them has enough
    seeds. Federations with fewer seeds are marked."""
    rows, counts = [], set[int]()
    for group in groups:
        dataset = DATASETS.get(group.source)
        seeds = min(len(r.trial.seeds) for r in group.results)
        for claim in CLAIMS:
            if dataset not in claim.datasets:
                continue
            found = [judge(claim, group.results, group.criterion.model, v) for v in VIEWS]
            if found[0] is not None:
                rows.append(_row(group, found, seeds))
                counts.add(seeds)
    if not counts or max(counts) < FEWEST_SEEDS:
        return None
    columns = [Column(k, h) for k, h in (
        ("where", "federation"), ("seeds", "seeds"), ("metric", "in"), ("verdict", "verdict"),
        ("pair", "deciding pair"), ("difference", "difference"), ("interval", "95 % interval"),
        ("late_verdict", "late: verdict"), ("late_pair", "late: pair"),
        ("late_difference", "late: diff."), ("late_interval", "late: 95 %"),
    )]  # fmt: skip
    notes = [
        "Paired over seeds and clients at the chosen configurations; accuracy in points, variances "
        "×100. The deciding pair contradicts the claim most; the difference is its left minus its "
        "right side.",
        "late: averaged over the last quarter of the rounds, which are the same for every method, "
        "instead of at the chosen round of each.",
        "Each interval has 95 %: some of so many exclude zero by chance. The choice of the "
        "configurations is not resampled.",
    ]
    if min(counts) < FEWEST_SEEDS:
        notes.append(
            f"(few seeds): fewer than {FEWEST_SEEDS}. With one seed the interval is over clients "
            "only, and another seed may give another verdict."
        )
    title = "Claims of the paper, tested on these runs"
    return Table(title, columns, rows, notes, of="claim")


def _row(group: Group, found: Sequence[Finding | None], seeds: int) -> Row:
    first = found[0]
    assert first is not None
    claim = first.claim
    cells = {
        "where": federation_name(group),
        "seeds": str(seeds),
        "metric": METRICS[claim.metric],
    }
    for start, finding in zip(("", "late_"), found, strict=True):
        if finding is not None:
            d, few = finding.difference, " (few seeds)" if seeds < FEWEST_SEEDS else ""
            others = "" if finding.pairs == 1 else f" (of {finding.pairs})"
            cells[f"{start}verdict"] = finding.verdict + few
            cells[f"{start}pair"] = f"{claim.left} − {finding.right}{others}"
            cells[f"{start}difference"] = f"{100 * d.value:+.3f}"
            cells[f"{start}interval"] = f"{100 * d.low:+.3f} to {100 * d.high:+.3f}"
    return Row(claim.text, cells)
