"""The files of a report: tables in every format, figures, and one page that shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fairvar.common.display import plural
from fairvar.common.process import Report
from fairvar.engine.keys import swept
from fairvar.metrics import mean_and_variance
from fairvar.report import figures
from fairvar.report.compare import (
    NAMES,
    WHICH,
    about,
    claims_overview,
    claims_table,
    compared_with_fedavg,
    data_title,
    late_differences,
    printed,
)
from fairvar.report.figures import Point
from fairvar.report.html import PageFigure, Section, render_page
from fairvar.report.result_tables import (
    WithTables,
    clients_csv,
    noise_floor,
    overview_files,
    overviews,
    result_table,
)
from fairvar.report.style import BASELINE, Figure, save, svg
from fairvar.report.summary import summarise
from fairvar.report.table import Table, mean_and_standard_error, render
from fairvar.runs.formats import write_text
from fairvar.runs.runner import start_note
from fairvar.runs.trials import Group, Result, Trial
from fairvar.scores import ACCURACY, Metric

FORMATS = {"md": "markdown", "tex": "latex", "csv": "csv", "txt": "terminal"}
LONGEST_NAME = 120  # of a federation, in names of files
CAPTIONS = {
    "client_accuracies": "Test {score} of {model} from the client with the {worst} to the one with "
    "the {best} {score}, at the chosen configuration; each rank is a mean over seeds. Grey: "
    "FedAvg.",
    "front": "Test {score} of {model} against its variance over clients; lower {side} is better. "
    "Dots are all configurations after their last round, marks the chosen ones with standard "
    "errors over seeds.",
    "curves": "Mean test {score} of {model} over clients by round at the chosen configurations; "
    "bands span the seeds.",
    "compared_with_fedavg": "Every method minus FedAvg, averaged over the last quarter of the "
    "rounds, with 95 % intervals, paired over seeds and clients; filled: the interval excludes "
    "zero.",
    "who_gains": "Every client's change of test accuracy compared with FedAvg, by its accuracy "
    "under FedAvg; means over seeds. Above zero a client gains, below it pays. The numbers above a "
    "panel are mean changes.",
    "weights": "The server's weights in the evaluated rounds, in one run of the chosen "
    "configuration.",
    "partition": "Training samples by client and class.",
}


def _caption(kind: str, group: Group) -> str:
    metric, model = group.metric, WHICH[group.criterion.model]
    worst, best, side = "lowest", "highest", "right"
    if not metric.higher_is_better:
        worst, best, side = best, worst, "left"
    words = {"worst": worst, "best": best, "side": side, "score": metric.title, "model": model}
    return CAPTIONS[kind].format(**words)


def group_name(group: Group) -> str:
    """For file names: the data set, the protocol if it is not the default, and alpha."""
    parts = [group.source, *([group.data] if group.data else []), *group.kind]
    if group.alpha is not None:
        parts.append(f"alpha-{group.alpha:g}")
    return re.sub(r"[^\w.+-]+", "-", "-".join(parts))[:LONGEST_NAME]


def group_names(groups: Sequence[Group]) -> list[str]:
    """Unique names: federations may differ in what is not part of a name, such as rounds."""
    names = [group_name(group) for group in groups]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}-{n + 1}" if n else name for name, n in zip(names, before, strict=True)]


def group_table(group: Group) -> Table:
    return result_table(
        group.results,
        _title(group),
        list(_notes(group)),
        group.criterion.model,
        {r.label: printed(group.source, group.alpha, r.label) for r in group.results}
        if group.metric == ACCURACY
        else None,
        group.validated,
    )


def _notes(group: Group) -> Iterator[str]:
    """How the runs were made and chosen, and what to know about the numbers."""
    train, primary = group.config.train, group.criterion.model
    work = plural(train.local_epochs, "local epoch") if train.local_epochs else (
        plural(train.local_steps, "local step"))  # fmt: skip
    batch = "all samples" if train.batch_size is None else f"{train.batch_size}"
    yield (f"Protocol {group.config.protocol}: {work} per round, batch {batch}, "
           f"{plural(train.rounds, 'round')}; the table is about {WHICH[primary]}.")  # fmt: skip
    if varied := list(swept(group.config)):
        yield f"Also chosen for every method: {', '.join(varied)}. The line above is of one run."
    seeds = sorted({int(p["seed"]) for p in group.provenances})
    how = "Without validation data: every method after its last round, on test data."
    how = "Chosen on validation data, reported on test data." if group.validated else how
    runs = plural(len(group.provenances), "run")
    yield (f"Seeds {', '.join(map(str, seeds))}; {runs}. ± is the standard error over seeds. "
           f"{how}")  # fmt: skip
    floor = 100 * noise_floor(group.results, primary)
    if np.isfinite(floor):
        yield f"Noise floor of the variance ×100: {floor:.3f}."
    for r in group.results:
        if "personal" in r.trial.models:
            shown = "and reported by them, since its clients use these" if r.model else (
                f"and reported by {WHICH[primary]}, as asked for")  # fmt: skip
            yield f"{r.label}: chosen by {WHICH['personal']}, {shown}."
    alive = [result.trial.models for result in group.results if result.at is not None]
    if alive and not any("local" in models for models in alive):
        yield "Local models were not evaluated (evaluate.local = false)."
    yield "Bold: ahead of every other method by more than the paired 95 % interval."
    if train.precision == "bfloat16":
        yield 'Trained with train.precision = "bfloat16": products of the model are rounded.'
    start = None if group.deployed else start_note(group.config)
    if start:
        yield start
    labels = sorted({trial.label for trial in group.trials if trial.version})
    if labels:
        yield (f"{', '.join(labels)}: runs of different versions of a method's code, or of "
               "different rules of a deployment, under one name. They are not mixed.")  # fmt: skip


def _title(group: Group) -> str:
    """Data, clients, partition and model, as far as they are known."""
    if group.own_data:
        return f"{group.dataset}, {group.model}"
    parts = [group.dataset, plural(group.config.data.clients, "client")]
    if group.alpha is not None:
        parts.append(f"Dirichlet {group.alpha:g}")
    parts += [group.model, *group.varied]
    if group.deployed is not None:
        parts.append(f"deployed on {group.deployed.where}")
    return ", ".join(parts)


def write_files(
    groups: Sequence[Group], out: Path, title: str, report: Report = lambda *_: None
) -> tuple[list[Table], list[Path]]:
    """All tables and figures, and index.html; returns the tables and the files."""
    tables = [group_table(group) for group in groups]
    texts: dict[str, str] = {}
    drawn: list[Path] = []
    sections: list[Section] = []
    for group, name, table in zip(groups, group_names(groups), tables, strict=True):
        report(len(sections), len(groups), f"drawing {name}")
        texts |= {f"table-{name}.{end}": render(table, kind) for end, kind in FORMATS.items()}
        shown = []
        for kind, figure in _figures(group):
            files = save(figure, out, f"{kind}-{name}")
            drawn += files
            # The page links only the PNG: results are often published without the PDFs.
            shown.append(PageFigure(svg(figure), _caption(kind, group), files[0].name))
        sections.append(_section(group, name, table, shown))
    with_tables = list(zip(groups, tables, strict=True))
    texts |= {"clients.csv": clients_csv(groups), **overview_files(with_tables)}
    sections = [*_overviews(with_tables), *sections]
    claims, compared = claims_table(groups), compared_with_fedavg(groups)
    if claims is not None:
        texts["claims.md"] = render(claims, "markdown")
        every = replace(claims, title="Every test of a claim")
        sections.append(Section(claims.title, "claims", claims_overview(claims), rest=every))
    if compared is not None:
        texts["compared_with_fedavg.md"] = render(compared, "markdown")
        sections.append(Section(compared.title, "compared_with_fedavg", compared))
    runs = sum(len(group.provenances) for group in groups)
    subtitle = f"{plural(runs, 'run')} on {plural(len(groups), 'federation')}"
    scores = list(dict.fromkeys(group.metric for group in groups))
    origin, summary = _provenance(groups), summarise(groups)
    index = render_page(title, subtitle, sections, origin, summary, scores)
    for file, content in {**texts, "index.html": index}.items():
        write_text(out / file, content)
    return tables, [*(out / file for file in texts), *drawn, out / "index.html"]


def _overviews(with_tables: WithTables) -> Iterable[Section]:
    """Sections over several federations, before those of single ones."""
    seen: list[str] = []
    for table in overviews(with_tables):
        short = table.title.partition(":")[0]
        name = table.title if short in seen else short  # the same for another model
        seen.append(name)
        anchor = "".join(c if c.isascii() and c.isalnum() else "-" for c in name)
        yield Section(table.title, f"all-{anchor}", table)


def _figures(group: Group) -> Iterable[tuple[str, Any]]:
    special = group.passport.get("special") or ()
    yield from result_figures(group.trials, group.results, group.criterion.model, special)
    if group.federation is not None:
        counts = np.array(group.federation["class_counts"])
        yield "partition", partition_figure(data_title(group), counts, group.federation)


def result_figures(
    trials: Sequence[Trial], results: Sequence[Result], primary: str, special: Sequence[int] = ()
) -> Iterable[tuple[str, Figure]]:
    """Names and figures of the methods on one federation; `special`: clients that are different by
    nature."""
    alive = [r for r in results if r.at is not None]
    gains = who_gains_figure(alive, primary, special)
    if gains is not None:
        yield "who_gains", gains
    if alive:
        yield "client_accuracies", accuracy_figure(alive, primary)
        spread = [r.trial.summary.last[r.reported(primary)][1] for r in alive]
        if np.isfinite(spread).all():  # several clients
            yield "front", front_figure(trials, alive, primary)
        yield "curves", curves_figure(alive, primary)
        differences = fedavg_figure(alive)
        if differences is not None:
            yield "compared_with_fedavg", differences
    weighted = [r for r in alive if r.trial.method.uses_losses]
    if weighted:
        yield "weights", weights_figure(weighted[0])


def _section(group: Group, name: str, table: Table, figures: Sequence[PageFigure]) -> Section:
    chosen = "\n".join(f"{r.label}: {r.trial.describe(r.at)}" for r in group.results)
    parts = [data_title(group), *group.kind]
    if group.alpha is not None:
        parts.append(f"α = {group.alpha:g}")
    again = name.removeprefix(group_name(group)).strip("-")
    return Section(
        ", ".join(parts) + (f" ({again})" if again else ""),
        name,
        table,
        figures,
        {
            "Chosen on validation" if group.validated else "After the last round": chosen,
            "Configuration of one run": tomli_w.dumps(group.settings),
        },
    )


def _provenance(groups: Sequence[Group]) -> dict[str, str]:
    """What all the runs were made with."""
    found = [each for g in groups for each in g.provenances]

    def values(key: str) -> str:
        return ", ".join(sorted({str(each[key]) for each in found}))

    seconds = float(np.sum([each["seconds"] for each in found]))
    return {
        "fairvar": values("fairvar"),
        "torch": values("torch"),
        "device": values("device"),
        "dtype": values("dtype"),
        "seeds": values("seed"),
        "computing time of all runs": f"{seconds / 60:.1f} min",
    }


# --- figures -------------------------------------------------------------------------------------
def accuracy_figure(results: Sequence[Result], model: str = "global") -> Figure:
    """Test accuracy from the worst to the best served client, a panel per method."""
    found = {r.label: r.seed_scores(r.reported(model)) for r in results}
    metric = results[0].trial.metric
    label = f"test {metric.title} on the client{_percent(metric)}, {about(results, model)}"
    return figures.client_accuracies(found, label, metric)


def _percent(metric: Metric) -> str:
    return " (%)" if metric.factor == 100 else ""


def front_figure(
    trials: Sequence[Trial], results: Sequence[Result], model: str = "global"
) -> Figure:
    """Every configuration after its last round, and the chosen ones at the chosen round."""
    alive = [trial for trial in trials if not trial.diverged]
    by = {r.label: r.reported(model) for r in results}
    points = [Point(t.label, *t.summary.last[by.get(t.label, model)]) for t in alive]
    for result in results:
        if result.at is not None:
            found = result.trial.test(by[result.label], result.at)
            mean = mean_and_standard_error(f.mean for f in found)
            variance = mean_and_standard_error(f.variance_over_clients for f in found)
            errors = mean.standard_error, variance.standard_error
            points.append(Point(result.label, mean.value, variance.value, True, *errors))
    metric = results[0].trial.metric
    return figures.front(points, noise_floor(results, model), about(results, model), metric)


def curves_figure(results: Sequence[Result], model: str = "global") -> Figure:
    """Mean test accuracy over clients by round, with the range over seeds."""
    rounds, metric = results[0].trial.histories[0].evaluated.numpy(), results[0].trial.metric
    mean, low, high = {}, {}, {}
    for result in results:
        scores = result.trial.scores(result.reported(model))
        by_seed = metric.factor * mean_and_variance(scores)[0]
        mean[result.label] = by_seed.mean(0)
        low[result.label], high[result.label] = by_seed.min(0), by_seed.max(0)
    label = f"mean test {metric.title}{_percent(metric)}, {about(results, model)}"
    return figures.learning_curves(rounds, mean, low, high, label)


def who_gains_figure(
    results: Sequence[Result], model: str, special: Sequence[int]
) -> Figure | None:
    """Who gains and who pays; None unless some clients are different by nature."""
    found = {r.label: r.seed_scores(r.reported(model)).mean(0) for r in results}
    baseline = found.pop(BASELINE, None)
    if baseline is None or not found or not special:
        return None
    return figures.who_gains(baseline, found, special)


def fedavg_figure(results: Sequence[Result]) -> Figure | None:
    """Every method − FedAvg, late; None if there is nothing to draw."""
    found, score = late_differences(results), results[0].trial.metric
    in_percent, factor = score.factor == 100, score.factor
    names = {
        "accuracy": (score.title, "points" if in_percent else score.title),
        "variance": ("variance", f"variance {'× 100' if in_percent else score.in_variances}"),
    }
    panels, units = {}, {}
    for model in NAMES:
        pairs = {label: pair for (label, seen), pair in found.items() if seen == model}
        if not pairs:
            continue
        for metric, (name, unit) in names.items():
            title = f"{NAMES[model]}, {name}"
            values = {label: getattr(pair, metric) for label, pair in pairs.items()}
            panels[title] = {k: (factor * d.value, factor * d.low, factor * d.high)
                             for k, d in values.items()}  # fmt: skip
            units[title] = unit
    return figures.differences(panels, units) if found else None


def weights_figure(result: Result) -> Figure:
    """The server's weights of the first seed, in the rounds whose weights were stored."""
    history = result.trial.histories[0]
    title = f"{result.label}, weights, seed {result.trial.seeds[0]}"
    return figures.weights_over_rounds(history.weights.numpy(), title, history.observed.numpy() + 1)


def partition_figure(name: str, counts: np.ndarray, passport: Mapping[str, Any]) -> Figure:
    """Training samples of each class at each client, with the heterogeneity numbers."""
    sizes = counts.sum(1)
    numbers = {"training samples per client": f"{sizes.min()} to {sizes.max()}"}
    for key, label, form in (
        ("mean_total_variation", "total variation from pooled labels", "{:.2f}"),
        ("effective_classes", "effective classes per client", "{:.1f}"),
        ("majority_share", "share of the main class", "{:.0%}"),
    ):
        if key in passport:
            numbers[label] = form.format(passport[key]).replace("%", " %")
    return figures.partition(counts, f"{name}, {len(counts)} clients", numbers)
