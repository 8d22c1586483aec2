"""Methods compared with each other on the same seeds and clients: `fairvar compare`, every method
compared with FedAvg in a report, and claims of the paper and of ours, tested on these runs.

A claim becomes pairs of methods on one federation. An interval that excludes zero is a clear
difference. Every interval has 95 %: of a hundred pairs that do not differ, about five look as if
they did. Each claim is tested twice: at the chosen rounds, as in the paper's tables, and averaged
over the last quarter of the rounds, which are the same for all methods, so that fluctuations
between evaluations cancel.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64
from rich.table import Table as RichTable
from rich.text import Text

from fairvar.data.sources import SOURCES
from fairvar.errors import BadInput, unknown
from fairvar.metrics import mean_and_variance
from fairvar.report.paired import Difference, Paired, compare
from fairvar.report.table import Column, Estimate, Row, Table
from fairvar.runs.formats import is_complete
from fairvar.runs.results import gather
from fairvar.runs.stored import StoredRun
from fairvar.runs.trials import Group, Result, Trial
from fairvar.scores import ACCURACY, MISSING, UNDEFINED, Metric

SHOWN = 5  # clients listed on either side
# Models in a legend, in figures and in sentences.
MEANT = {
    "local": "local: each client's model after its local work",
    "global": "global: the shared model",
    "personal": "personal: the model that each client keeps, compared with the global one where "
    "FedAvg has no such",
}
NAMES = {"local": "local models", "global": "global model", "personal": "personal models"}
WHICH = {
    "global": "the global model",
    "local": "the local models (each client's after its local work)",
    "personal": "the personal models (each client keeps its own)",
}
TITLES = {
    "mnist_1000": "MNIST, 1000 images",
    "mnist_rotated": "MNIST, a fifth of the clients rotated",
    "digits": "Digits",
    "quadratic": "Random quadratics",
    "logistic": "Synthetic logistic regression",
    "clinics": "Synthetic clinics",
}
METRICS = {
    "accuracy": "accuracy",  # or the mean of another score
    "variance": "variance",
    "corrected_variance": "corrected variance",
}


def uncorrected(metric: Metric) -> str:
    """Why the noise floor and the corrected variance of a score are left out."""
    return (f"{MISSING}: a noise floor is known for the accuracy only. How much of the variance of "
            f"the {metric.title} comes from finite test sets is not known, so it is not "
            "corrected.")  # fmt: skip


def paired(a: Result, b: Result, model: str, late: bool) -> Paired | None:
    """A − B, both by `model` or the one that they are reported by; None if the two have too little
    in common. `late`: over the last quarter of the rounds instead of at the chosen round."""
    return _paired(a, b, (a.reported(model), b.reported(model)), late)


@lru_cache(maxsize=512)
def _paired(a: Result, b: Result, models: tuple[str, str], late: bool) -> Paired | None:
    pairs = zip((a, b), models, strict=True)
    one, other = ((r.late(model) if late else r.seed_scores(model)) for r, model in pairs)
    try:
        return compare(one, other, b.samples(), metric=a.trial.metric)
    except BadInput:
        return None


def about(results: Sequence[Result], model: str) -> str:
    """The models that a figure of these results shows, for its axis."""
    other = [r.label for r in results if r.reported(model) != model]
    if len(other) == len(results):
        return NAMES["personal"]
    return NAMES[model] + (f" ({', '.join(other)}: personal)" if other else "")


def data_title(group: Group) -> str:
    """The data set in words, for headings; own data and data sets of users keep their names."""
    source = SOURCES.get(group.source)
    title = source.title if source else TITLES.get(group.source, group.source)
    return f"{title} [{group.data}]" if group.data else title


def federation_name(group: Group) -> str:
    alpha = "" if group.alpha is None else f", α {group.alpha:g}"
    deployed = "deployed, " * ("deployed" in group.kind)
    varied = "".join(f", {setting}" for setting in group.varied)
    return f"{group.dataset}, {deployed}{group.config.protocol}{alpha}{varied}"


def shown(d: Difference, digits: int, metric: Metric = ACCURACY) -> tuple[str, str]:
    """A difference and its interval, ×100; of scores that are no fractions, as they are."""
    if not np.isfinite(d.value):
        return UNDEFINED, UNDEFINED
    form = f"+.{digits}f" if metric.factor == 100 else "+.3g"
    value, low, high = (f"{metric.factor * number:{form}}" for number in d)
    return value, f"{low} to {high}"


def texts(paired: Paired, key: str, digits: int) -> tuple[str, str]:
    """The number of this name with its interval; a dash where the metric has none."""
    if key == "corrected_variance" and not paired.metric.has_noise_floor:
        return MISSING, MISSING
    return shown(getattr(paired, key), digits, paired.metric)


# --- every method compared with FedAvg -----------------------------------------------------------
def compared_with_fedavg(groups: Sequence[Group]) -> Table | None:
    """Every method − FedAvg, averaged over the last quarter of the rounds, for all models; None
    without FedAvg, or with fewer than two evaluations in these rounds."""
    rows, scores = [], list(dict.fromkeys(group.metric for group in groups))
    for group in groups:
        cells: dict[str, dict[str, str]] = {}
        where = federation_name(group) + f", {group.metric.title}" * (len(scores) > 1)
        for (label, model), both in late_differences(group.results).items():
            row = cells.setdefault(label, {"where": where})
            for metric in METRICS:
                value, interval = texts(both, metric, 2)
                text = value if value in (UNDEFINED, MISSING) else f"{value} ({interval})"
                row[f"{model}_{metric}"] = text + " *" * getattr(both, metric).clear
        rows += [Row(label, row) for label, row in cells.items()]
    if not rows:
        return None
    known = {model for group in groups for r in group.results for model in r.trial.models}
    models = [model for model in MEANT if model in known]
    mean = scores[0].short if len(scores) == 1 else "score"
    heads = [*zip(METRICS, (mean, "var.", "corr."), strict=True)]
    columns = [Column("where", "federation")] + [
        Column(f"{model}_{metric}", f"{model} {head}") for model in models for metric, head in heads
    ]
    notes = [
        f"Test data, the configurations chosen on validation data. {_units(scores)} with what the "
        "finite test sets add (var.) and without (corr.); in brackets the 95 % interval, paired "
        "over seeds and clients. *: the interval excludes zero.",
        "; ".join(MEANT[model] for model in models) + ".",
        "Averaged over the evaluated rounds of the last quarter, the same for both methods.",
        *(uncorrected(metric) for metric in scores if not metric.has_noise_floor),
    ]
    return Table("Every method compared with FedAvg, late in training", columns, rows, notes)


def _units(scores: Sequence[Metric]) -> str:
    """The units of a table of differences, as the beginning of a sentence."""
    means = [f"{m.title}{' in points' * (m.factor == 100)}" for m in scores]
    squares = [m.squared or f" in {m.in_variances}" for m in scores]
    text = f"{', '.join(means)}, variances{', '.join(dict.fromkeys(squares))}"
    return text[0].upper() + text[1:]


def late_differences(results: Sequence[Result]) -> dict[tuple[str, str], Paired]:
    """Every method − FedAvg, late, by (method, model); only if evaluated at least twice there."""
    alive = {r.label: r for r in results if r.at is not None}
    found: dict[tuple[str, str], Paired] = {}
    base = alive.pop("FedAvg", None)
    if base is None:
        return found
    for label, result in alive.items():
        for model in (model for model in MEANT if model in result.trial.models):
            with_base = model if model in base.trial.models or model != "personal" else "global"
            if with_base in base.trial.models and len(result.late(model)) > 1:
                both = _paired(result, base, (model, with_base), True)
                if both is not None:
                    found[label, model] = both
    return found


# --- fairvar compare -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Side:
    name: str
    model: str
    passport: str  # sha256 of the partition: only equal ones can be paired
    accuracy: Float[np.ndarray, "*rounds seeds n"]  # or other scores; at the chosen round
    samples: Int64[np.ndarray, " n"]
    seeds: list[int]
    metric: Metric = ACCURACY


def side(text: str, model: str | None, late: bool = False) -> Side:
    """FOLDER:LABEL[@ALPHA] of a sweep, or the folder of one run; `late`: the last quarter of the
    rounds instead of the chosen one (of a single run, the last)."""
    if model not in (None, *NAMES):
        raise unknown("model", model, NAMES)
    folder, _, label = text.partition(":")
    if label:
        group, result = _chosen(Path(folder), *label.split("@", 1))
        passport, which = group.passport, model or result.reported(group.criterion.model)
        name = f"{result.label} ({result.trial.describe(result.at)})"
    elif is_complete(Path(folder)):
        run = StoredRun.open(Path(folder))
        trial = Trial(run.config.method, run.config.train.lr, [run.history(with_state=False)])
        result, passport = Result(trial, -1, 1), run.manifest["passport"]
        known = ["personal", run.config.select.model, *trial.models]
        which = model or next((m for m in known if m in trial.models), known[1])
        name = f"{result.label} ({run.folder.name})"
    else:
        raise BadInput(
            f"{text!r}: name a method, such as {folder}:FedAvg, or a single run's folder"
        )
    if which not in result.trial.models:
        title = result.trial.metric.title
        raise BadInput(f"{text}: no test {title} of the {which} model; the {which} model was not "
                       "measured there (see evaluate in the configuration)")  # fmt: skip
    scores = result.late(which) if late else result.seed_scores(which)
    return Side(name, which, str(passport.get("sha256")), scores, result.samples(),
                result.trial.seeds, result.trial.metric)  # fmt: skip


def _chosen(folder: Path, label: str, alpha: str = "") -> tuple[Group, Result]:
    group = pick(gather(folder), folder, alpha)
    found = {r.label: r for r in group.results}
    if label not in found:
        raise unknown("method label", label, found)
    if found[label].at is None:
        raise BadInput(f"every configuration of {label} diverged; there is nothing to compare")
    return group, found[label]


def pick(groups: Sequence[Group], folder: Path, alpha: str) -> Group:
    """By alpha, or else by the kind of partition; numbered where that does not tell them apart."""
    several = len({g.config.protocol for g in groups}) > 1
    names = [f"{g.config.protocol}/{_name(g)}" if several else _name(g) for g in groups]
    found = {
        name if names.count(name) == 1 else f"{name}-{names[: place + 1].count(name)}": group
        for place, (name, group) in enumerate(zip(names, groups, strict=True))
    }
    if alpha in found:
        return found[alpha]
    if not alpha and len(groups) == 1:
        return groups[0]
    known = ", ".join(f"{name} ({federation_name(g)})" for name, g in found.items())
    example = next(reversed(found), "0.1")
    raise BadInput(f"{folder} has results for {known}; say which, as in :FedAvg@{example}")


def _name(group: Group) -> str:
    partition = type(group.config.partition).__struct_config__.tag
    name = "own" if group.own_data else str(partition)
    name = name if group.alpha is None else f"{group.alpha:g}"
    return f"{name}/{group.data}" if group.data else name


def compare_sides(a: Side, b: Side) -> Paired:
    """Pair over the seeds that both have; another partition has other clients and is refused."""
    if a.passport != b.passport:
        raise BadInput("the two sides have different partitions: their clients cannot be paired")
    if a.metric != b.metric:
        raise BadInput(f"A is scored by {a.metric.title} and B by {b.metric.title}: they cannot be "
                       "compared")  # fmt: skip
    if a.model != b.model and "personal" not in (a.model, b.model):
        raise BadInput(f"A is about the {a.model} model and B about the {b.model} one: name one of "
                       "them with --model")  # fmt: skip
    both = (a.samples > 0) & (b.samples > 0)
    if len(a.samples) != len(b.samples) or (a.samples != b.samples)[both].any():
        raise BadInput("the two sides have other test samples: their clients cannot be paired")
    common = sorted(set(a.seeds) & set(b.seeds))
    if not common:
        raise BadInput(f"no common seed: {a.seeds} and {b.seeds}")
    rows_a, rows_b = ([s.seeds.index(seed) for seed in common] for s in (a, b))
    scores = (a.accuracy[..., rows_a, :], b.accuracy[..., rows_b, :])
    return compare(*scores, a.samples, metric=a.metric)


def numbers(paired: Paired) -> dict[str, tuple[str, Difference]]:
    """What each difference is, and its numbers."""
    metric = paired.metric
    names = {
        "accuracy": f"mean {metric.title}{metric.points}",
        "variance": f"variance over clients{metric.squared}",
        "corrected_variance": f"corrected variance{metric.squared}",
        "worst_10_percent": f"worst 10 %{metric.points}",
    }
    found = {key: (name, getattr(paired, key)) for key, name in names.items()}
    return {key: pair for key, pair in found.items() if pair[1] is not None}


def _models(a: Side, b: Side) -> str:
    return a.model if a.model == b.model else f"{a.model} (A) and {b.model} (B)"


def paired_table(a: Side, b: Side, paired: Paired) -> Iterator[Any]:
    when = ", average of the last quarter of the rounds" * paired.over_rounds
    yield Text.assemble(("A", "bold"), f" {a.name}\n", ("B", "bold"), f" {b.name}\n",
                        f"test data, {_models(a, b)} model{when}")  # fmt: skip
    table = RichTable(title="A − B, paired over seeds and clients", title_justify="left")
    for head in ("", "difference", "95 % interval", "clear?"):
        table.add_column(head, justify="right" if head else "left")
    for key, (name, d) in numbers(paired).items():
        clear = "yes" if d.clear else "within noise"
        table.add_row(name, *texts(paired, key, 3), clear if np.isfinite(d.value) else "")
    yield table
    if not paired.metric.has_noise_floor:
        yield uncorrected(paired.metric)
    if paired.over_rounds:
        return
    gain, pay = paired.gaining, paired.paying
    same = int(np.isfinite(paired.by_client).sum()) - len(gain) - len(pay)
    yield f"{len(gain)} clients gain, {len(pay)} pay, {same} are the same"
    for name, clients in (("gain most", gain), ("pay most", pay)):
        points = paired.metric.factor == 100
        form = "+.1f" if points else "+.3g"
        change = paired.metric.factor * paired.by_client
        listed = [f"{i}: {change[i]:{form}}" for i in clients[:SHOWN]]
        if listed:
            unit = "points" if points else paired.metric.title
            yield f"  {name} (client: {unit})  " + ", ".join(listed)


def paired_dict(a: Side, b: Side, paired: Paired) -> dict[str, Any]:
    late = paired.over_rounds
    found: dict[str, Any] = {"a": a.name, "b": b.name, "model": _models(a, b), "late": late}
    for key, (_, d) in numbers(paired).items():
        name = paired.metric.name if key == "accuracy" else key
        found[name] = {"difference": d.value, "interval": [d.low, d.high], "clear": d.clear}
    if late:
        return found
    clients = [None if np.isnan(v) else float(v) for v in paired.by_client]
    return found | {"by_client": clients, "gaining": paired.gaining, "paying": paired.paying}


# --- what the paper prints and claims ------------------------------------------------------------
# Names of our data sets → the paper's rows.
DATASETS = {"mnist_1000": "mnist"} | {
    name: name for name in ("mnist", "cifar10", "cifar100", "tiny_imagenet")
}
PAPER = ("FedAvg", "AFL", "q-FFL", "AAggFF", "FairLoss", "FairLoss*", "FairGrad", "FairGrad*")
ALIKE, LESS, MORE = "alike", "less", "more"
FEWEST_SEEDS = 3  # below that an interval over seeds says nothing about other seeds


@cache
def _printed() -> dict[tuple[str, float, str], dict[str, Estimate]]:
    text = resources.files("fairvar.report").joinpath("paper_tables.csv").read_text("utf-8")
    return {
        (row["dataset"], float(row["alpha"]), row["method"]): {
            "paper_accuracy": Estimate(float(row["acc"]), float(row["acc_se"])),
            "paper_variance": Estimate(float(row["var"]), float(row["var_se"])),
        }
        for row in csv.DictReader(text.splitlines())
    }


def printed(dataset: str, alpha: float | None, label: str) -> Mapping[str, Estimate]:
    """The paper's cells for a method label such as "FairGrad*", if it has any: accuracy in percent,
    variance over clients in fraction² × 100."""
    name = label.lower().replace("-", "").replace("*", "_star")
    return {} if alpha is None else _printed().get((DATASETS.get(dataset, ""), alpha, name), {})


@dataclass(frozen=True)
class PaperClaim:
    """What the paper says of `left` compared with each of `right` (all its methods if empty), or
    what we read from its tables."""

    whose: str
    text: str
    datasets: tuple[str, ...]
    left: str
    relation: str
    metric: str
    right: tuple[str, ...] = ()


VARIANCES = ("variance", "corrected_variance")
MNIST, CIFAR10, BOTH, FEDAVG = ("mnist",), ("cifar10",), ("mnist", "cifar10"), ("FedAvg",)
THEIRS, OURS = "the paper", "our reading"
POINT, SHARE = 0.01, 0.1  # margins of "alike": of the accuracy, and of FedAvg's variance
CLAIMS = tuple(
    PaperClaim(whose, text, datasets, left, relation, metric, right)
    for whose, text, datasets, left, relation, metrics, right in (
        (THEIRS, "all methods are equal", MNIST, "FedAvg", ALIKE, METRICS, ()),
        (THEIRS, "FairGrad* has the lowest variance", MNIST, "FairGrad*", LESS, VARIANCES, ()),
        (THEIRS, "FairGrad has the lowest variance", CIFAR10, "FairGrad", LESS, VARIANCES, ()),
        (THEIRS, "FairGrad has the highest accuracy", CIFAR10, "FairGrad", MORE, ("accuracy",),
         ()),
        (OURS, "AFL's variance is large", BOTH, "AFL", MORE, VARIANCES, FEDAVG),
        (OURS, "FairGrad* is like FedAvg", CIFAR10, "FairGrad*", ALIKE, METRICS, FEDAVG),
        (OURS, "FairGrad is not like FedAvg: lower variance", CIFAR10, "FairGrad", LESS, VARIANCES,
         FEDAVG),
        (OURS, "AAggFF, q-FFL and FairLoss are like FedAvg", BOTH, "FedAvg", ALIKE, METRICS,
         ("AAggFF", "q-FFL", "FairLoss")),
    )
    for metric in metrics
)  # fmt: skip


def _margin(metric: str, base: Result, model: str, late: bool) -> float:
    """How far a method may be from FedAvg and count as alike."""
    if metric == "accuracy":
        return POINT
    scores = base.late(model) if late else base.seed_scores(model)
    return SHARE * float(mean_and_variance(scores)[1].mean())


def _judged(claim: PaperClaim, group: Group, late: bool) -> dict[str, str]:
    """Cells for a claim on one federation, by the pair that decides it; none if the methods were
    not run."""
    found = {r.label: r for r in group.results if r.at is not None}
    rivals = [r for r in claim.right or PAPER if r in found and r != claim.left]
    pairs: dict[str, Difference] = {}
    for rival in rivals if claim.left in found else ():
        both = paired(found[claim.left], found[rival], group.criterion.model, late)
        if both is not None and np.isfinite((d := getattr(both, claim.metric)).value):
            pairs[rival] = d
    if not pairs:
        return {}
    margin = 0.0
    if claim.relation == ALIKE:
        base = found["FedAvg"]
        margin = _margin(claim.metric, base, base.reported(group.criterion.model), late)
    verdict, right = _verdict(claim.relation, pairs, margin)
    value, interval = shown(pairs[right], 3)
    others = "" if len(pairs) == 1 else f" (of {len(pairs)})"
    cells = {"verdict": verdict + " (few seeds)" * (_seeds(group) < FEWEST_SEEDS),
             "pair": f"{claim.left} − {right}{others}", "difference": value,
             "interval": interval}  # fmt: skip
    return {f"late_{key}" if late else key: text for key, text in cells.items()}


def _seeds(group: Group) -> int:
    return min(len(r.trial.seeds) for r in group.results)


def _verdict(relation: str, pairs: dict[str, Difference], margin: float = 0.0) -> tuple[str, str]:
    """The verdict, and the pair that contradicts the claim most. Alike: within the margin."""
    if relation == ALIKE:
        worst = max(pairs, key=lambda name: max(-pairs[name].low, pairs[name].high))
        beyond = [name for name, d in pairs.items() if d.low > margin or d.high < -margin]
        if beyond:
            return f"not reproduced: beyond the margin for {', '.join(beyond)}", beyond[0]
        if all(-margin <= d.low and d.high <= margin for d in pairs.values()):
            return "reproduced: within the margin", worst
        clear = [name for name, d in pairs.items() if d.clear]
        also = f"; clear for {', '.join(clear)}" if clear else ""
        return f"undecided: not within the margin{also}", worst
    sign = 1 if relation == MORE else -1
    worst = min(pairs, key=lambda name: sign * pairs[name].value)
    if all(d.clear and sign * d.value > 0 for d in pairs.values()):
        return "reproduced", worst
    if any(d.clear and sign * d.value < 0 for d in pairs.values()):
        return "not reproduced: the opposite is clear", worst
    return "undecided: within noise", worst


def claims_table(groups: Sequence[Group]) -> Table | None:
    """Every claim on every federation of the paper's data sets; None if none of them has enough
    seeds. Federations with fewer seeds are marked."""
    rows, counts = [], set[int]()
    for group in (group for group in groups if group.metric == ACCURACY):
        seeds, dataset = _seeds(group), DATASETS.get(group.source)
        where = {"where": federation_name(group), "seeds": str(seeds)}
        for claim in (claim for claim in CLAIMS if dataset in claim.datasets):
            about = {"whose": claim.whose, **where}
            now, late = (_judged(claim, group, late) for late in (False, True))
            if now:
                cells = {**about, "metric": METRICS[claim.metric], **now, **late}
                rows.append(Row(claim.text, cells))
                counts.add(seeds)
    if not counts or max(counts) < FEWEST_SEEDS:
        return None
    columns = [Column(k, h) for k, h in (
        ("whose", "whose"), ("where", "federation"), ("seeds", "seeds"), ("metric", "in"),
        ("verdict", "verdict"),
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
        "Whose: a sentence of the paper, in our words, or our reading of its tables.",
        "Alike (equal, like): reproduced if the 95 % interval lies within ±1 point of accuracy or "
        "±10 % of FedAvg's variance, not reproduced if it lies beyond, otherwise undecided.",
        "A row is about one federation, and no verdict is adjusted for the number of rows.",
        "Each interval has 95 %: some of so many exclude zero by chance. The choice of the "
        "configurations is not resampled.",
    ]
    if min(counts) < FEWEST_SEEDS:
        notes.append(
            f"(few seeds): fewer than {FEWEST_SEEDS}. With one seed the interval is over clients "
            "only, and another seed may give another verdict."
        )
    title = "Claims, tested on these runs"
    return Table(title, columns, rows, notes, of="claim")


def claims_overview(claims: Table) -> Table:
    """Of every claim how often it reproduced, over federations and scores, at the chosen rounds."""
    kinds = {"reproduced": "reproduced", "undecided": "undecided", "not": "not reproduced"}
    columns = [Column("whose", "whose", 0, "a sentence of the paper, or our reading of its tables"),
               Column("tests", "tests", 0, "federations × scores in which the claim was tested"),
               *(Column(key, name, 0, f"tests with this verdict: {name}")
                 for key, name in kinds.items())]  # fmt: skip
    rows = []
    for label in dict.fromkeys(row.label for row in claims.rows):
        tests = [row.cells for row in claims.rows if row.label == label]
        verdicts = [str(cells["verdict"]) for cells in tests]
        counts = {key: sum(v.startswith(name) for v in verdicts) for key, name in kinds.items()}
        counts |= {"tests": len(verdicts)}
        numbers = {key: Estimate(n) for key, n in counts.items()}
        rows.append(Row(label, {"whose": tests[0]["whose"], **numbers}))
    notes = [
        "At the chosen rounds. Undecided: the 95 % interval includes zero or, for “equal” and "
        "“like”, is neither within nor beyond ±1 point of accuracy or ±10 % of FedAvg's variance."
    ]
    return Table(claims.title, columns, rows, notes, of="claim")
