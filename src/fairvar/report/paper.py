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
from collections.abc import Iterator, Sequence
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
PLAIN = ("AAggFF", "q-FFL", "FairLoss")


@dataclass(frozen=True)
class Sentence:
    """`left` against each of `right` (all others if empty), in one metric."""

    text: str
    datasets: tuple[str, ...]
    left: str
    relation: str
    metric: Metric
    right: tuple[str, ...] = ()


def _sentences() -> Iterator[Sentence]:
    variances: tuple[Metric, ...] = ("variance", "corrected_variance")
    for metric in variances:
        yield Sentence("FairGrad has the lowest variance", ("cifar10",), "FairGrad", LESS, metric)
    yield Sentence("FairGrad has the highest accuracy", ("cifar10",), "FairGrad", MORE, "accuracy")
    metrics: tuple[Metric, ...] = ("accuracy", *variances)
    for metric in metrics:
        yield Sentence("all methods are equal", ("mnist",), "FedAvg", ALIKE, metric)
    for metric in variances:
        yield Sentence(
            "AFL's variance is large", ("mnist", "cifar10"), "AFL", MORE, metric, ("FedAvg",)
        )
    for metric in metrics:
        yield Sentence(
            "FairGrad* is like FedAvg", ("cifar10",), "FairGrad*", ALIKE, metric, ("FedAvg",)
        )
    for metric in variances:
        yield Sentence(
            "FairGrad is not like FedAvg: lower variance",
            ("cifar10",), "FairGrad", LESS, metric, ("FedAvg",),
        )  # fmt: skip
    for metric in metrics:
        yield Sentence(
            "AAggFF, q-FFL and FairLoss are like FedAvg",
            ("mnist", "cifar10"), "FedAvg", ALIKE, metric, PLAIN,
        )  # fmt: skip


SENTENCES = tuple(_sentences())


@dataclass(frozen=True)
class Finding:
    """A sentence on one federation; `difference` is left − right of the pair that decides it."""

    sentence: Sentence
    verdict: str
    right: str
    difference: Difference
    pairs: int


def judge(
    sentence: Sentence, results: Sequence[Result], model: str, late: bool = False
) -> Finding | None:
    """At the chosen rounds, or `late`: over the last quarter. None if the methods were not run."""
    found = {r.label: r for r in results if r.at is not None}
    rivals = [r for r in sentence.right or found if r in found and r != sentence.left]
    if sentence.left not in found or not rivals:
        return None
    pairs = {}
    for rival in rivals:
        both = paired(found[sentence.left], found[rival], model, late)
        if both is not None and math.isfinite((d := getattr(both, sentence.metric)).value):
            pairs[rival] = d
    if not pairs:
        return None
    verdict, decides = _verdict(sentence.relation, pairs)
    return Finding(sentence, verdict, decides, pairs[decides], len(pairs))


def _verdict(relation: str, pairs: dict[str, Difference]) -> tuple[str, str]:
    """And the pair that speaks most against the sentence."""
    if relation == ALIKE:
        worst = max(pairs, key=lambda name: _signal(pairs[name]))
        clear = [name for name, d in pairs.items() if d.clear]
        told = f"not reproduced: clear for {', '.join(clear)}"
        return (told if clear else "reproduced: no clear difference"), worst
    sign = 1 if relation == MORE else -1
    worst = min(pairs, key=lambda name: sign * pairs[name].value)
    if all(d.clear and sign * d.value > 0 for d in pairs.values()):
        return "reproduced", worst
    if any(d.clear and sign * d.value < 0 for d in pairs.values()):
        return "not reproduced: the opposite is clear", worst
    return "within noise", worst


def _signal(d: Difference) -> float:
    """How far from zero, in half widths of the interval."""
    return abs(d.value) / max((d.high - d.low) / 2, 1e-12)


def claims_table(groups: Sequence[Group]) -> Table | None:
    """Every sentence on every federation of the paper's data sets; None if none of them has seeds
    enough. Those that have fewer are marked."""
    rows, counts = [], set[int]()
    for group in groups:
        dataset = DATASETS.get(group.source)
        seeds = min(len(r.trial.seeds) for r in group.results)
        for sentence in SENTENCES:
            if dataset not in sentence.datasets:
                continue
            found = [judge(sentence, group.results, group.criterion.model, v) for v in VIEWS]
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
        "×100. The deciding pair speaks most against the sentence, and the difference is its left "
        "less its right side.",
        "late: averaged over the last quarter of the rounds, the same ones for every method, "
        "instead of each at its chosen round.",
        "Every interval by itself has 95 %: some of so many look clear by chance. The choice of "
        "the configurations is not resampled.",
    ]
    if min(counts) < FEWEST_SEEDS:
        notes.append(
            f"(few seeds): fewer than {FEWEST_SEEDS}. With one seed the interval is over clients "
            "alone, and another seed may well give another verdict."
        )
    title = "The paper's sentences, held against these runs"
    return Table(title, columns, rows, notes, of="sentence")


def _row(group: Group, found: Sequence[Finding | None], seeds: int) -> Row:
    first = found[0]
    assert first is not None
    sentence = first.sentence
    cells = {
        "where": federation_name(group),
        "seeds": str(seeds),
        "metric": METRICS[sentence.metric],
    }
    for start, finding in zip(("", "late_"), found, strict=True):
        if finding is not None:
            d, few = finding.difference, " (few seeds)" if seeds < FEWEST_SEEDS else ""
            others = "" if finding.pairs == 1 else f" (of {finding.pairs})"
            cells[f"{start}verdict"] = finding.verdict + few
            cells[f"{start}pair"] = f"{sentence.left} − {finding.right}{others}"
            cells[f"{start}difference"] = f"{100 * d.value:+.3f}"
            cells[f"{start}interval"] = f"{100 * d.low:+.3f} to {100 * d.high:+.3f}"
    return Row(sentence.text, cells)
