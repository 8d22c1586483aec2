"""The ten sentences of the paper, in our words, tested on runs over several pairs of (partition,
seed); and apart from them what we read from its tables ourselves. The rules are those of
docs/protocol.md, which was written before the runs of the second edition.

A sentence consists of checks, a check of comparisons; a comparison has a p-value for its direction
and one for the other. All comparisons must hold (the largest p-value), some may contradict
(Simes). Holm's rule takes ten p-values per protocol, for and, apart from it, against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fairvar.errors import BadInput
from fairvar.metrics import mean_and_variance
from fairvar.report.compare import DATASETS, FEDAVG, PAPER, POINT, SHARE, printed
from fairvar.report.table import Column, Row, Table
from fairvar.runs.trials import Group
from over_pairs import CORRECTED, DRAWS, QUANTITIES, OverPairs, Tested, Window, holm, simes

Verdict = Literal["reproduced", "not reproduced", "undecided", "not measured"]
Where = tuple[str, float]  # data set, alpha
LEVEL = 0.05
PRIMARY = {"boxes": "global", "tables": "local"}
ALPHAS = (0.05, 0.1, 0.5)
REGULARISED = ("FairLoss", "FairLoss*", "FairGrad", "FairGrad*")
GRADIENT = ("FairGrad", "FairGrad*")
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100",
          "tiny_imagenet": "Tiny ImageNet"}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    text: str  # "FairGrad − FedAvg, variance"
    quantity: str
    tested: Tested
    holds: float  # p-value
    fails: float  # p-value of the other direction


@dataclass(frozen=True)
class Check:
    """What a sentence says on one federation about `methods`; `needs` must have been run, too."""

    methods: Sequence[str]
    compare: Callable[[OverPairs], list[Comparison]]
    needs: Sequence[str] = FEDAVG


@dataclass(frozen=True)
class Sentence:
    name: str
    text: str
    checks: Sequence[tuple[Where, Check]]


@dataclass(frozen=True)
class Evidence:
    """The windows of one federation by method and pair, and the methods that diverged."""

    windows: Mapping[str, Mapping[int, Window]]
    diverged: frozenset[str] = frozenset()
    configurations: Mapping[str, str] = field(default_factory=dict)  # by method, in words
    tried: Mapping[str, int] = field(default_factory=dict)  # configurations by method
    draws: int = DRAWS
    _over: list[OverPairs] = field(default_factory=list, init=False, compare=False)

    def over_pairs(self) -> OverPairs:
        if not self._over:
            self._over.append(OverPairs.of(self.windows, self.draws))
        return self._over[0]

    @property
    def repeats(self) -> str:
        """Over what the pairs go, such as "5 × 1": partitions × seeds in each."""
        found = {w.partition for by_pair in self.windows.values() for w in by_pair.values()}
        pairs = max((len(by_pair) for by_pair in self.windows.values()), default=0)
        return f"{len(found)} × {pairs // max(len(found), 1)}"

    @property
    def run(self) -> frozenset[str]:
        return self.diverged | frozenset(self.windows)


@dataclass(frozen=True)
class Judged:
    """`decides`: the weakest comparison, or the one that contradicts most, with its federation."""

    sentence: Sentence
    verdict: Verdict
    holds: float
    fails: float
    decides: tuple[Where, Comparison] | None = None
    diverged: Sequence[str] = ()
    missing: Sequence[Where] = ()


# --- checks --------------------------------------------------------------------------------------
def best(method: str, quantity: str) -> Check:
    """Higher accuracy, or lower variance, than every other method of the paper."""

    def compare(over: OverPairs) -> list[Comparison]:
        rivals = [m for m in PAPER if m != method and m in over.methods]
        return [_ahead(over, quantity, (method,), rival) for rival in rivals]

    return Check((method,), compare, [m for m in PAPER if m != method])


def more_even(methods: Sequence[str]) -> Check:
    """Lower variance than FedAvg, in the mean of these methods."""
    return Check(methods, lambda over: [_ahead(over, "variance", methods, *FEDAVG)])


def less_even(method: str) -> Check:
    def compare(over: OverPairs) -> list[Comparison]:
        c = _ahead(over, "variance", (method,), *FEDAVG)
        return [Comparison(c.text, c.quantity, c.tested, c.fails, c.holds)]

    return Check((method,), compare)


def kept(methods: Sequence[str]) -> Check:
    """Accuracy not more than a point below FedAvg's."""

    def compare(over: OverPairs) -> list[Comparison]:
        weights = _weights(methods, "FedAvg")
        shown, bound = (over.test("accuracy", weights, b) for b in (0.0, -POINT))
        text = f"{_name(methods)} − FedAvg, accuracy"
        return [Comparison(text, "accuracy", shown, bound.above, bound.below)]

    return Check(methods, compare)


def improves(methods: Sequence[str]) -> Check:
    """Clearly better than FedAvg in accuracy or variance, and not clearly worse in the other."""

    def compare(over: OverPairs) -> list[Comparison]:
        one, two = (_ahead(over, q, methods, *FEDAVG) for q in ("accuracy", "variance"))

        def either(p: float, other: float, q: float, counter: float) -> float:
            """The smaller p-value, doubled, of those that the other quantity does not veto."""
            allowed = [x for x, veto in ((p, counter), (q, other)) if veto > LEVEL]
            return min(1.0, 2 * min(allowed, default=0.5))

        holds = either(one.holds, one.fails, two.holds, two.fails)
        fails = either(one.fails, one.holds, two.fails, two.holds)
        shown = min((one, two), key=lambda c: min(c.holds, c.fails))
        return [Comparison(shown.text, shown.quantity, shown.tested, holds, fails)]

    return Check(methods, compare)


def alike(methods: Sequence[str]) -> Check:
    """Within the margins around FedAvg, in accuracy and variance."""

    def compare(over: OverPairs) -> list[Comparison]:
        return [c for method in methods for c in _within(over, method)]

    return Check(methods, compare)


def _within(over: OverPairs, method: str) -> Iterator[Comparison]:
    for quantity in ("accuracy", "variance"):
        shown = over.test(quantity, {method: 1, "FedAvg": -1})
        if quantity == "accuracy":
            low, high = (over.test(quantity, {method: 1, "FedAvg": -1}, b) for b in (-POINT, POINT))
        else:
            low, high = (over.test(quantity, {method: 1, "FedAvg": -(1 + s)})
                         for s in (-SHARE, SHARE))  # fmt: skip
        beyond = min(1.0, 2 * min(low.below, high.above))
        text = f"{method} − FedAvg, {quantity}"
        yield Comparison(text, quantity, shown, max(low.above, high.below), beyond)


def _ahead(over: OverPairs, quantity: str, methods: Sequence[str], rival: str) -> Comparison:
    tested = over.test(quantity, _weights(methods, rival))
    p = (tested.above, tested.below)
    holds, fails = p if quantity == "accuracy" else p[::-1]
    return Comparison(f"{_name(methods)} − {rival}, {quantity}", quantity, tested, holds, fails)


def _weights(methods: Sequence[str], rival: str) -> dict[str, float]:
    return {**dict.fromkeys(methods, 1 / len(methods)), rival: -1.0}


def _name(methods: Sequence[str]) -> str:
    return methods[0] if len(methods) == 1 else f"mean of {', '.join(methods)}"


# --- the sentences -------------------------------------------------------------------------------
def _at(data: str, alphas: Sequence[float], *checks: Check) -> list[tuple[Where, Check]]:
    return [((data, alpha), check) for alpha in alphas for check in checks]


_OTHERS = [m for m in PAPER if m not in FEDAVG]
_GRAD, _STAR = GRADIENT
_ACC, _VAR = "accuracy", "variance"
SENTENCES = (
    Sentence("1", "MNIST: all methods perform alike", _at("mnist", ALPHAS, alike(_OTHERS))),
    Sentence("2", "MNIST: the regularised variants are slightly more even than FedAvg",
             _at("mnist", ALPHAS, more_even(REGULARISED))),
    Sentence("3", "MNIST: FairGrad* has the lowest variance at every α",
             _at("mnist", ALPHAS, best(_STAR, _VAR))),
    Sentence("4", "CIFAR-10: FairGrad has the lowest variance at every α",
             _at("cifar10", ALPHAS, best(_GRAD, _VAR))),
    Sentence("5", "CIFAR-10: FairGrad has the highest accuracy at α 0.1 and 0.5",
             _at("cifar10", (0.1, 0.5), best(_GRAD, _ACC))),
    Sentence("6", "CIFAR-100: FairGrad* has the best accuracy and the lowest variance at α 0.05 "
             "and 0.1, and the lowest variance at 0.5, where FairGrad is the most accurate",
             [*_at("cifar100", (0.05, 0.1), best(_STAR, _ACC), best(_STAR, _VAR)),
              *_at("cifar100", (0.5,), best(_STAR, _VAR), best(_GRAD, _ACC))]),
    Sentence("7", "CIFAR-100: regularised methods improve on FedAvg in accuracy, variance or both",
             _at("cifar100", ALPHAS, improves(REGULARISED))),
    Sentence("8", "Tiny ImageNet: FairGrad* has the lowest variance at 0.05 and 0.5 and the best "
             "accuracy at 0.1 and 0.5; FairGrad has the best accuracy at 0.05",
             [*_at("tiny_imagenet", (0.05, 0.5), best(_STAR, _VAR)),
              *_at("tiny_imagenet", (0.1, 0.5), best(_STAR, _ACC)),
              *_at("tiny_imagenet", (0.05,), best(_GRAD, _ACC))]),
    Sentence("9", "Tiny ImageNet: regularised methods improve fairness or accuracy",
             _at("tiny_imagenet", ALPHAS, improves(REGULARISED))),
    Sentence("10", "All data: the gradient variants are consistently more even than FedAvg at kept "
             "accuracy", [c for data in TITLES
                          for c in _at(data, ALPHAS, more_even(GRADIENT), kept(GRADIENT))]),
)  # fmt: skip
OURS = tuple(
    Sentence("ours", f"{TITLES[data]}: {text}", _at(data, ALPHAS, check))
    for text, check, about in (
        ("AFL's variance is larger than FedAvg's", less_even("AFL"), ("mnist", "cifar10")),
        ("FairGrad* is like FedAvg", alike((_STAR,)), ("cifar10",)),
        ("FairGrad is more even than FedAvg", more_even((_GRAD,)), ("cifar10",)),
        ("AAggFF, q-FFL and FairLoss are like FedAvg", alike(("AAggFF", "q-FFL", "FairLoss")),
         ("mnist", "cifar10")),
    )
    for data in about
)  # fmt: skip


# --- verdicts ------------------------------------------------------------------------------------
def judge(
    evidence: Mapping[Where, Evidence], sentences: Sequence[Sentence] = SENTENCES
) -> list[Judged]:
    """Verdicts on the runs of one protocol, adjusted by Holm's rule over these sentences."""
    raw = [_weighed(sentence, evidence) for sentence in sentences]
    holds, fails = holm([j.holds for j in raw]), holm([j.fails for j in raw])
    return [_decided(j, *p) for j, *p in zip(raw, holds, fails, strict=True)]


def judge_apart(evidence: Mapping[Where, Evidence]) -> list[Judged]:
    """Our own readings, each by itself and not adjusted."""
    return [judge(evidence, [sentence])[0] for sentence in OURS]


def _weighed(sentence: Sentence, evidence: Mapping[Where, Evidence]) -> Judged:
    """With p-values that are not adjusted yet."""
    found: list[tuple[Where, Comparison]] = []
    missing, diverged = list[Where](), list[str]()
    for where, check in sentence.checks:
        seen = evidence.get(where)
        if seen is None or not {*check.methods, *check.needs} <= seen.run:
            missing.append(where)
        elif gone := seen.diverged & set(check.methods):
            diverged += [f"{m} ({_place(where)})" for m in sorted(gone)]
        elif "FedAvg" in seen.diverged:
            missing.append(where)
        else:
            found += [(where, c) for c in check.compare(seen.over_pairs())]
    holds = max((c.holds for _, c in found), default=1.0) if not missing else 1.0
    fails = 0.0 if diverged else simes([c.fails for _, c in found])
    weakest = max(found, key=lambda pair: pair[1].holds, default=None)
    missing, diverged = list(dict.fromkeys(missing)), list(dict.fromkeys(diverged))
    judged = Judged(sentence, "undecided", holds, fails, weakest, diverged, missing)
    if fails <= LEVEL and found:
        return _with(judged, decides=min(found, key=lambda pair: pair[1].fails))
    return judged


def _with(judged: Judged, **new: object) -> Judged:
    return Judged(**{**judged.__dict__, **new})


def _decided(judged: Judged, holds: float, fails: float) -> Judged:
    verdict: Verdict = "undecided"
    if judged.diverged or fails <= LEVEL:
        verdict = "not reproduced"
    elif judged.missing:
        verdict = "not measured"
    elif holds <= LEVEL:
        verdict = "reproduced"
    return _with(judged, verdict=verdict, holds=holds, fails=fails)


# --- from stored runs ----------------------------------------------------------------------------
def evidence_of(groups: Sequence[Group]) -> dict[str, dict[Where, Evidence]]:
    """By protocol: the windows of the primary model of the configurations that validation chose;
    the federations of one data set and α are pairs of (partition, seed)."""
    found: dict[str, dict[Where, list[Group]]] = {}
    for group in groups:
        data = DATASETS.get(group.source)
        if data is not None and group.alpha is not None:
            by_place = found.setdefault(group.config.protocol, {})
            by_place.setdefault((data, group.alpha), []).append(group)
    return {protocol: {where: _evidence(members, PRIMARY[protocol])
                       for where, members in by_place.items()}
            for protocol, by_place in found.items()}  # fmt: skip


def _evidence(groups: Sequence[Group], model: str) -> Evidence:
    windows: dict[str, dict[int, Window]] = {}
    diverged, used, tried = set[str](), dict[str, str](), dict[str, int]()
    for group in groups:
        partition = str(group.passport.get("sha256"))
        for result in group.results:
            used[result.label] = result.trial.describe()
            tried[result.label] = result.configurations
            if result.at is None:
                diverged.add(result.label)
                continue
            late, samples = result.late(model), result.samples()
            by_pair = windows.setdefault(result.label, {})
            for place, seed in enumerate(result.trial.seeds):
                pair = 1_000_000 * group.config.data.seed + seed
                if pair in by_pair:
                    raise BadInput(f"{result.label}: pair {seed} of α {group.alpha:g} is there "
                                   "twice; give the final runs alone")  # fmt: skip
                by_pair[pair] = Window(late[:, place], samples, partition)
    kept_windows = {m: w for m, w in windows.items() if m not in diverged}
    return Evidence(kept_windows, frozenset(diverged), used, tried)


# --- tables --------------------------------------------------------------------------------------
def _place(where: Where) -> str:
    return f"{TITLES[where[0]]}, α {where[1]:g}"


def sentences_table(judged: Sequence[Judged], title: str, notes: Sequence[str]) -> Table:
    rows = []
    for j in judged:
        cells: dict[str, str] = {"verdict": j.verdict}
        if j.decides is not None:
            where, c = j.decides
            value, low, high = (100 * x for x in (c.tested.value, c.tested.low, c.tested.high))
            unit = " points" if c.quantity == "accuracy" else " ×100"
            digits = 2 if c.quantity == "accuracy" else 3
            span = f"{low:+.{digits}f} to {high:+.{digits}f}" if np.isfinite(low) else "one pair"
            cells |= {"where": _place(where), "pair": f"{c.text}{unit}",
                      "number": f"{value:+.{digits}f}", "interval": span,
                      "holds": _p(j.holds), "fails": _p(j.fails)}  # fmt: skip
        if j.diverged:
            cells["pair"] = f"diverged: {', '.join(j.diverged)}"
        rows.append(Row(f"{j.sentence.name}. {j.sentence.text}".removeprefix("ours. "), cells))
    columns = [Column(key, head) for key, head in (
        ("verdict", "verdict"), ("where", "decided at"), ("pair", "by"), ("number", "difference"),
        ("interval", "95 % interval"), ("holds", "p, for"), ("fails", "p, against"),
    )]  # fmt: skip
    return Table(title, columns, rows, list(notes), of="sentence")


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def scoreboard(evidence: Mapping[str, Mapping[Where, Evidence]]) -> Table:
    """The ten sentences with a verdict for each protocol and the difference that decides."""
    judged = {protocol: judge(evidence.get(protocol, {})) for protocol in PRIMARY}
    rows = [
        Row(
            f"{s.name}. {s.text}", {protocol: _told(found[i]) for protocol, found in judged.items()}
        )
        for i, s in enumerate(SENTENCES)
    ]
    columns = [Column(p, f"{p}, {model} model") for p, model in PRIMARY.items()]
    return Table("The ten sentences", columns, rows, [], of="sentence")


def _told(j: Judged) -> str:
    if j.diverged:
        return f"{j.verdict}: diverged: {', '.join(j.diverged)}"
    if j.decides is None or j.verdict == "not measured":
        return j.verdict
    where, c = j.decides
    text = c.text if c.quantity == "accuracy" else f"{c.text} ×100"
    return f"{j.verdict}: {_place(where)}: {text} {_span(c.tested, 2 if c.quantity == _ACC else 3)}"


def cells_table(evidence: Mapping[str, Mapping[Where, Evidence]]) -> Table:
    """The paper's 96 cells in both protocols: accuracy % / variance ×100 (corrected) in the window;
    with the numbers of partitions × seeds, and of configurations tried, where runs are."""
    rows = []
    for data in TITLES:
        for method in PAPER:
            cells = {}
            for protocol in PRIMARY:
                seen = [evidence.get(protocol, {}).get((data, alpha)) for alpha in ALPHAS]
                for alpha, one in zip(ALPHAS, seen, strict=True):
                    cells[f"{protocol}{alpha:g}"] = _cell(one, method)
                told = {f"{one.repeats}; {one.tried.get(method, 1)}" for one in seen
                        if one is not None and method in one.run}  # fmt: skip
                cells[f"{protocol}n"] = ", ".join(sorted(told)) or "not measured"
            rows.append(Row(f"{TITLES[data]}, {method}", cells))
    columns = []
    for protocol in PRIMARY:
        columns += [Column(f"{protocol}{alpha:g}", f"{protocol}, α {alpha:g}") for alpha in ALPHAS]
        columns += [Column(f"{protocol}n", f"{protocol}: partitions × seeds; tried")]
    return Table("The cells", columns, rows, [], of="cell")


def _cell(seen: Evidence | None, method: str) -> str:
    if seen is None or method not in seen.run:
        return "not measured"
    if method in seen.diverged:
        return "div."
    over = seen.over_pairs()
    accuracy, variance, corrected = (100 * over.mean(q, method) for q in (*QUANTITIES, CORRECTED))
    return f"{accuracy:.2f} / {variance:.3f} ({corrected:.3f})"


def differences_table(
    evidence: Mapping[Where, Evidence], title: str, notes: Sequence[str]
) -> Table:
    """Every method minus FedAvg at every place, with the wider of both 95 % intervals."""
    columns, cells = [], {method: dict[str, str]() for method in _OTHERS}
    for where, seen in sorted(evidence.items()):
        for quantity, digits, unit in ((_ACC, 2, ""), (_VAR, 3, " ×100")):
            columns.append(Column(f"{where}{quantity}", f"{_place(where)}: {quantity}{unit}"))
            for method in _OTHERS:
                if {method, *FEDAVG} <= seen.windows.keys():
                    tested = seen.over_pairs().test(quantity, _weights((method,), *FEDAVG))
                    star = " *" if tested.low > 0 or tested.high < 0 else ""
                    cells[method][f"{where}{quantity}"] = _span(tested, digits) + star
    return Table(title, columns, [Row(m, cells[m]) for m in _OTHERS], list(notes))


def _span(tested: Tested, digits: int) -> str:
    value, low, high = (f"{100 * x:+.{digits}f}" for x in (tested.value, tested.low, tested.high))
    return f"{value} ({low} to {high})" if np.isfinite(tested.low) else f"{value} (one seed)"


def paper_table(groups: Sequence[Group], evidence: Mapping[Where, Evidence]) -> Table:
    """The paper's numbers and ours, at the rounds that validation chose: tables, local models. A
    method that diverged, on one of the pairs or in all of tuning, has none, as in the cells."""
    found: dict[tuple[Where, str], list[np.ndarray]] = {}
    for group in groups:
        data = DATASETS.get(group.source)
        if data is None or group.alpha is None or group.config.protocol != "tables":
            continue
        for r in group.results:
            ours = [] if r.at is None else [np.stack(mean_and_variance(r.seed_scores("local")))]
            found.setdefault(((data, group.alpha), r.label), []).extend(ours)
    rows = []
    for data in TITLES:
        for method in PAPER:
            cells = {}
            for alpha in ALPHAS:
                theirs = printed(data, alpha, method)
                cells[f"paper{alpha:g}"] = " / ".join(f"{theirs[k].value:.2f}" for k in theirs)
                seen = found.get(((data, alpha), method))
                here = evidence.get((data, alpha))
                diverged = here is not None and method in here.diverged
                cells[f"ours{alpha:g}"] = "div." if diverged else "not measured"
                if seen and not diverged:
                    accuracy, variance = 100 * np.concatenate(seen, axis=1).mean(1)
                    cells[f"ours{alpha:g}"] = f"{accuracy:.2f} / {variance:.3f}"
            rows.append(Row(f"{TITLES[data]}, {method}", cells))
    columns = [Column(f"{whose}{alpha:g}", f"α {alpha:g}, {whose}")
               for alpha in ALPHAS for whose in ("paper", "ours")]  # fmt: skip
    return Table("The paper's numbers and ours (tables, local models)", columns, rows, [],
                 of="cell")  # fmt: skip
