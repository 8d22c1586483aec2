"""The files of a report: tables in every format, figures, and one page that shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fairvar.report.compare import compared_with_fedavg
from fairvar.report.html import Page, PageFigure, Section, figure_svg, write_page
from fairvar.report.paper import claims_table, printed
from fairvar.report.render import render
from fairvar.report.result_figures import (
    accuracy_figure,
    curves_figure,
    fedavg_figure,
    front_figure,
    partition_figure,
    weights_figure,
)
from fairvar.report.result_tables import (
    WHICH,
    WithTables,
    clients_csv,
    noise_floor,
    overview_files,
    overviews,
    result_table,
)
from fairvar.report.style import save
from fairvar.report.table import Table
from fairvar.runs.results import Group
from fairvar.runs.runner import start_note
from fairvar.runs.store import write_text

FORMATS = {"md": "markdown", "tex": "latex", "csv": "csv", "txt": "terminal"}
CAPTIONS = {
    "client_accuracies": "Test accuracy of {model} from the client with the lowest to the one with "
    "the highest accuracy, at the chosen configuration; each rank is a mean over seeds. Grey: "
    "FedAvg.",
    "front": "Test accuracy of {model} against its variance over clients; lower right is better. "
    "Dots are all configurations after their last round, marks the chosen ones with standard "
    "errors over seeds.",
    "curves": "Mean test accuracy of {model} over clients by round at the chosen configurations; "
    "bands span the seeds.",
    "compared_with_fedavg": "Every method minus FedAvg, averaged over the last quarter of the "
    "rounds, with 95 % intervals, paired over seeds and clients; filled: the interval excludes "
    "zero.",
    "weights": "The server's weights in the evaluated rounds, in one run of the chosen "
    "configuration.",
    "partition": "Training samples by client and class.",
}


def group_name(group: Group) -> str:
    """For file names: the data set, the protocol if it is not the default, and alpha."""
    parts = [group.source, *([group.data] if group.data else []), *group.kind]
    if group.alpha is not None:
        parts.append(f"alpha-{group.alpha:g}")
    return "-".join(parts).replace(" ", "-")


def group_names(groups: Sequence[Group]) -> list[str]:
    """Unique names: federations may differ in what is not part of a name, such as rounds."""
    names = [group_name(group) for group in groups]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}-{n + 1}" if n else name for name, n in zip(names, before, strict=True)]


def group_table(group: Group) -> Table:
    cells = {r.label: printed(group.source, group.alpha, r.label) for r in group.results}
    return result_table(
        group.results,
        _title(group),
        list(_notes(group)),
        group.criterion.model,
        {label: cell for label, cell in cells.items() if cell is not None},
        group.validated,
    )


def _notes(group: Group) -> Iterator[str]:
    """How the runs were made and chosen, and what to know about the numbers."""
    train, primary = group.config.train, group.criterion.model
    work = f"{train.local_epochs} local epoch" if train.local_epochs else (
        f"{train.local_steps} local step")  # fmt: skip
    batch = "all samples" if train.batch_size is None else f"{train.batch_size}"
    yield (f"Protocol {group.config.protocol}: {work} per round, batch {batch}, {train.rounds} "
           f"rounds; the table is about {WHICH[primary]}.")  # fmt: skip
    seeds = sorted({int(birth["seed"]) for birth in group.births})
    how = "Without validation data: every method after its last round, on test data."
    how = "Chosen on validation data, reported on test data." if group.validated else how
    yield (f"Seeds {', '.join(map(str, seeds))}; {len(group.births)} runs. ± is the standard error "
           f"over seeds. {how}")  # fmt: skip
    floor = 100 * noise_floor(group.results, primary)
    if np.isfinite(floor):
        yield f"Noise floor of the variance ×100: {floor:.3f}."
    alive = [result.trial.models for result in group.results if result.at is not None]
    if alive and not any("local" in models for models in alive):
        yield "Local models were not evaluated (evaluate.local = false)."
    yield "Bold: ahead of every other method by more than the paired 95 % interval."
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
    parts = [group.dataset, f"{group.config.data.clients} clients"]
    if group.alpha is not None:
        parts.append(f"Dirichlet {group.alpha:g}")
    parts.append(group.model)
    if group.deployed is not None:
        parts.append(f"deployed on {group.deployed.where}")
    return ", ".join(parts)


def write_report(groups: Sequence[Group], out: Path, title: str) -> tuple[list[Table], list[Path]]:
    """All tables and figures, and index.html; returns the tables and the files."""
    tables = [group_table(group) for group in groups]
    texts: dict[str, str] = {}
    figures: list[Path] = []
    sections: list[Section] = []
    for group, name, table in zip(groups, group_names(groups), tables, strict=True):
        texts |= {f"table-{name}.{end}": render(table, kind) for end, kind in FORMATS.items()}
        shown = []
        for kind, figure in _figures(group):
            files = save(figure, out, f"{kind}-{name}")
            figures += files
            # The page links only the PNG: results are often published without the PDFs.
            links = [file.name for file in files if file.suffix == ".png"]
            caption = CAPTIONS[kind].format(model=WHICH[group.criterion.model])
            shown.append(PageFigure(figure_svg(figure), caption, links))
        sections.append(_section(group, name, table, shown))
    with_tables = list(zip(groups, tables, strict=True))
    texts |= {"clients.csv": clients_csv(groups), **overview_files(with_tables)}
    sections = [*_overviews(with_tables), *sections]
    for name, head, found in (
        ("claims", "Claims of the paper", claims_table(groups)),
        ("compared_with_fedavg", "Compared with FedAvg", compared_with_fedavg(groups)),
    ):
        if found is not None:
            texts[f"{name}.md"] = render(found, "markdown")
            sections.append(Section(head, name, "", found))
    for file, content in texts.items():
        write_text(out / file, content)
    page = Page(title, _subtitle(groups), sections, _provenance(groups))
    index = write_page(out / "index.html", page)
    return tables, [*(out / file for file in texts), *figures, index]


def _overviews(with_tables: WithTables) -> Iterable[Section]:
    """Sections over several federations, before those of single ones."""
    seen: list[str] = []
    for table in overviews(with_tables):
        title = table.title.partition(":")[0]
        title = table.title if title in seen else title  # the same for another model
        seen.append(title)
        anchor = "".join(c if c.isascii() and c.isalnum() else "-" for c in title)
        yield Section(title, f"all-{anchor}", "", table)


def _figures(group: Group) -> Iterable[tuple[str, Any]]:
    primary = group.criterion.model
    alive = [r for r in group.results if r.at is not None]
    if alive:
        yield "client_accuracies", accuracy_figure(alive, primary)
        if all(np.isfinite(r.trial.summary.last[primary][1]) for r in alive):  # several clients
            yield "front", front_figure(group.trials, alive, primary)
        yield "curves", curves_figure(alive, primary)
        differences = fedavg_figure(alive)
        if differences is not None:
            yield "compared_with_fedavg", differences
    weighted = [r for r in alive if r.trial.method.uses_losses]
    if weighted:
        yield "weights", weights_figure(weighted[0])
    if group.federation is not None:
        counts = np.array(group.federation["class_counts"])
        yield "partition", partition_figure(group.dataset, counts, group.federation)


def _section(group: Group, name: str, table: Table, figures: Sequence[PageFigure]) -> Section:
    chosen = "\n".join(f"{r.label}: {r.trial.describe(r.at)}" for r in group.results)
    parts = [group.dataset, *group.kind]
    if group.alpha is not None:
        parts.append(f"α = {group.alpha:g}")
    again = name.removeprefix(group_name(group)).strip("-")
    return Section(
        ", ".join(parts) + (f" ({again})" if again else ""),
        name.replace(".", "_"),
        table.title,
        table,
        figures,
        {
            "Chosen on validation" if group.validated else "After the last round": chosen,
            "Configuration of one run": tomli_w.dumps(group.settings),
        },
    )


def _subtitle(groups: Sequence[Group]) -> str:
    runs = sum(len(g.births) for g in groups)
    return f"{runs} runs on {len(groups)} federation{'s' if len(groups) != 1 else ''}"


def _provenance(groups: Sequence[Group]) -> dict[str, str]:
    """What all the runs were made with."""
    births = [birth for g in groups for birth in g.births]

    def values(key: str) -> str:
        return ", ".join(sorted({str(b[key]) for b in births}))

    seconds = float(np.sum([b["seconds"] for b in births]))
    return {
        "fairvar": values("fairvar"),
        "torch": values("torch"),
        "device": values("device"),
        "dtype": values("dtype"),
        "seeds": values("seed"),
        "computing time of all runs": f"{seconds / 60:.1f} min",
    }
