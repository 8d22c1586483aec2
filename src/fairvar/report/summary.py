"""What a report says, in a few sentences: which methods differ clearly from FedAvg, and where.

"Clearly" means that the 95 % interval of the paired difference at the chosen rounds, over seeds and
clients, excludes zero. It is the interval of `fairvar compare`, of which bold numbers are made too.
With fewer than `FEWEST_SEEDS` seeds the word is "seems".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fairvar.report.compare import FEWEST_SEEDS, about, data_title, paired
from fairvar.report.paired import Paired
from fairvar.report.style import BASELINE
from fairvar.runs.trials import Group
from fairvar.scores import ACCURACY

POINTS, VARIANCE = ("{:+.2f}", "points"), ("{:+.3f}", "variance ×100")
COMPARED = ("accuracy", "variance", "worst_10_percent")  # fields of `Paired`
# What is compared, the sign of the difference, what it means, and how it is printed.
METRICS: tuple[tuple[str, int, str, tuple[str, str]], ...] = (
    ("accuracy", 1, "clearly ahead of FedAvg in mean accuracy", POINTS),
    ("accuracy", -1, "clearly behind FedAvg in mean accuracy", POINTS),
    ("variance", -1, "clearly more even than FedAvg", VARIANCE),
    ("variance", 1, "clearly less even than FedAvg", VARIANCE),
    ("worst_10_percent", 1, "clearly better than FedAvg for the worst 10 % of clients", POINTS),
    ("worst_10_percent", -1, "clearly worse than FedAvg for the worst 10 % of clients", POINTS),
)
Found = Mapping[str, Mapping[int, Paired]]  # method → place of the federation → differences


def summarise(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Sentences by data set, protocol and model, for runs that are scored by the accuracy; the last
    ones say how sure they are."""
    kinds: dict[tuple[str, ...], list[Group]] = {}
    for group in (group for group in groups if group.metric == ACCURACY):
        kinds.setdefault((group.dataset, *group.kind, group.criterion.model), []).append(group)
    found = {_name(members): list(_about(members)) for members in kinds.values()}
    intervals = [d for members in kinds.values() for by_place in _found(members).values()
                 for both in by_place.values() for key in COMPARED
                 if (d := getattr(both, key)) is not None]  # fmt: skip
    if intervals:
        clear = sum(d.clear for d in intervals)
        enough = [_enough(members) for members in kinds.values()]
        found["How sure"] = [" ".join(part for part in (
            "“Clearly”: the 95 % interval of the paired difference, over seeds and clients, "
            "excludes zero." if any(enough) else "",
            f"“Seems”: the 95 % interval excludes zero, but there are fewer than {FEWEST_SEEDS} "
            "seeds, and another seed may give another picture." if not all(enough) else "",
            f"Of the {len(intervals)} intervals behind these sentences {clear} "
            f"exclude{'s' if clear == 1 else ''} zero. They are not corrected for their number: "
            f"if no method differed from FedAvg, about one in twenty, here "
            f"{max(1, round(len(intervals) / 20))}, would do so by chance.") if part)
        ]  # fmt: skip
    return found


def _enough(members: Sequence[Group]) -> bool:
    """Whether there are seeds enough to say what another seed would give."""
    return _seeds(members) >= FEWEST_SEEDS


def _seeds(members: Sequence[Group]) -> int:
    return min(len({int(p["seed"]) for p in group.provenances}) for group in members)


def _careful(sentence: str) -> str:
    """ "Seems" instead of "is clearly"."""
    for clearly, seems in ((" is clearly ", " seems "), (" are clearly ", " seem "),
                           ("differs clearly", "seems to differ")):  # fmt: skip
        sentence = sentence.replace(clearly, seems)
    return sentence


def _name(members: Sequence[Group]) -> str:
    first = members[0]
    deployed = "deployed, " * ("deployed" in first.kind)
    name = f"{data_title(first)}, {deployed}protocol {first.config.protocol}"
    results = {r.label: r for group in members for r in group.results}
    return f"{name}, the {about([*results.values()], first.criterion.model)}"


def _about(members: Sequence[Group]) -> Iterator[str]:
    if _enough(members):
        yield from _sentences(members)
        return
    seeds = _seeds(members)
    yield (f"{'One seed' if seeds == 1 else f'{seeds} seeds'} only: another seed may give "
           "another picture. Read the differences below as a first look.")  # fmt: skip
    yield from map(_careful, _sentences(members))


def _sentences(members: Sequence[Group]) -> Iterator[str]:
    found = _found(members)
    if not found:
        yield "There are no two methods, one of them FedAvg, to compare."
        return
    said = {metric[2]: _sentence(members, found, *metric) for metric in METRICS}
    ahead, behind, more, less, *_ = said.values()
    if not any(said.values()):
        yield ("No method differs clearly from FedAvg, in mean accuracy, in evenness, or for the "
               "worst 10 % of clients: what the tables show may be chance.")  # fmt: skip
    else:
        if not ahead:
            also = "" if behind else ", or behind it,"
            yield f"No method is clearly ahead of FedAvg{also} in mean accuracy."
        if not more:
            yield f"No method is clearly more{'' if less else ' or less'} even than FedAvg."
        yield from filter(None, said.values())
    yield from _special(members)
    lost = {r.label: [i for i, g in enumerate(members)
                      if any(o.label == r.label and o.at is None for o in g.results)]
            for g in members for r in g.results if r.at is None}  # fmt: skip
    for label, places in lost.items():
        yield f"All runs of {label} diverged{_where(members, places)}."


def _special(members: Sequence[Group]) -> Iterator[str]:
    """Where some clients are different by nature: their accuracy and that of the others, with
    FedAvg and with the method that is best for them."""
    for place, group in enumerate(members):
        special = list(group.passport.get("special") or ())
        means = {}
        for r in group.results if special else ():
            if r.at is not None:
                score = 100 * r.seed_scores(r.reported(group.criterion.model)).mean(0)
                mine = np.isin(np.arange(len(score)), special)
                means[r.label] = np.nanmean(score[mine]), np.nanmean(score[~mine])
        best = max(means, key=lambda label: means[label][0], default=BASELINE)
        if BASELINE in means and best != BASELINE:
            (here, rest), (before, others) = means[best], means[BASELINE]
            yield (f"The {len(special)} clients that are different by nature have {here:.1f} % "
                   f"with {best} and {before:.1f} % with FedAvg, the others {rest:.1f} % and "
                   f"{others:.1f} %{_where(members, [place])}.")  # fmt: skip


def _found(members: Sequence[Group]) -> Found:
    """Every method − FedAvg at the chosen rounds, where the two can be compared."""
    found: dict[str, dict[int, Paired]] = {}
    for place, group in enumerate(members):
        alive = {r.label: r for r in group.results if r.at is not None}
        base = alive.pop(BASELINE, None)
        if base is None:
            continue
        for label, result in alive.items():
            both = paired(result, base, group.criterion.model, False)
            if both is not None:
                found.setdefault(label, {})[place] = both
    return found


def _sentence(
    members: Sequence[Group], found: Found, key: str, sign: int, words: str, form: tuple[str, str]
) -> str:
    """The methods that differ clearly, those with the same federations together; "" for none."""
    by_places: dict[tuple[int, ...], list[str]] = {}
    for label, differences in found.items():
        clear = {place: d for place, both in differences.items()
                 if (d := getattr(both, key)) and d.clear and sign * d.value > 0}  # fmt: skip
        if clear:
            size = f" ({form[0].format(100 * clear[0].value)})" if len(members) == 1 else ""
            by_places.setdefault(tuple(clear), []).append(label + size)
    parts: list[str] = []
    for places, labels in by_places.items():
        verb = f" {'is' if len(labels) == 1 else 'are'} {words}" if not parts else ""
        parts.append(f"{_listed(labels)}{verb}{_where(members, places)}")
    unit = f" (in brackets: {form[1]})" if len(members) == 1 else ""
    return "; ".join(parts) + unit + "." if parts else ""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _where(members: Sequence[Group], places: Sequence[int]) -> str:
    """The federations, by α where that tells them apart; "" if there is only one."""
    if len(members) == 1:
        return ""
    alphas = [group.alpha for group in members]
    known = [a for a in alphas if a is not None]
    if len(set(known)) < len(members):
        return f" (federation {_listed([str(place + 1) for place in places])})"
    here = sorted(known[place] for place in places)
    if len(here) == len(known):
        return " at every α"
    if len(here) > 1 and here == sorted(known)[: len(here)]:
        return f" at α ≤ {here[-1]:g}"
    if len(here) > 1 and here == sorted(known)[-len(here) :]:
        return f" at α ≥ {here[0]:g}"
    return f" at α = {_listed([f'{a:g}' for a in here])}"
