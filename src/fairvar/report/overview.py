"""All federations of a report side by side, as a paper prints them: methods by heterogeneity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fairvar.report.gather import Group
from fairvar.report.render import render
from fairvar.report.table import Cell, Column, Row, Table

SHOWN = (("accuracy", "acc. %", 2), ("variance", "var. ×100", 3), ("corrected", "corr.", 3))
FORMULAS = {"accuracy": "mean", "variance": "variance_over_clients",
            "corrected": "corrected_variance"}  # fmt: skip
MEANING = {
    "accuracy": "mean over clients on test data ± standard error over seeds",
    "variance": "sample variance over clients, fraction² × 100",
    "corrected": "the variance less what finite test sets add by chance",
}
WHICH = {"global": "the global model", "local": "each client's own model after its local work"}

Numbered = Sequence[tuple[Group, Table]]  # groups with the tables that were made of them


def overviews(groups: Numbered) -> list[Table]:
    """A table for every data set, protocol and model that has several federations."""
    kinds: dict[tuple[str, ...], list[tuple[Group, Table]]] = {}
    for group, table in groups:
        kind = (group.dataset, *group.kind, group.criterion.model)
        kinds.setdefault(kind, []).append((group, table))
    return [_overview(members) for members in kinds.values() if len(members) > 1]


def _overview(members: Numbered) -> Table:
    first = members[0][0]
    columns: list[Column] = []
    cells: dict[str, dict[str, Cell]] = {}
    alphas = [group.alpha for group, _ in members]
    for place, (group, table) in enumerate(members):
        told = group.alpha is not None and alphas.count(group.alpha) == 1
        name = f"α {group.alpha:g}" if told else f"federation {place + 1}"
        for key, header, digits in SHOWN:
            column = Column(f"{key}-{place}", f"{name}: {header}", digits, metric=FORMULAS[key])
            columns.append(column)
            for row in table.rows:
                cells.setdefault(row.label, {})[f"{key}-{place}"] = row.cells.get(key)
    runs = sum(len(group.births) for group, _ in members)
    return Table(
        f"{first.dataset}, {'deployed, ' * ('deployed' in first.kind)}protocol "
        f"{first.config.protocol}: {WHICH[first.criterion.model]}",
        columns,
        [Row(label, found) for label, found in cells.items()],
        [*(f"{header}: {MEANING[key]}" for key, header, _ in SHOWN),
         f"{runs} runs. Bold: ahead of every other method by more than the paired 95 % interval."],
    )  # fmt: skip


def overview_files(groups: Numbered) -> dict[str, str]:
    """`table.md` and `table.tex` as a paper has them, `table.csv` with every number of every
    federation, one method a line."""
    found = overviews(groups)
    if not found:
        return {}
    return {
        "table.md": "\n".join(render(table, "markdown") for table in found),
        "table.tex": "\n".join(render(table, "latex") for table in found),
        "table.csv": _long(groups),
    }


def _long(groups: Numbered) -> str:
    names = list(dict.fromkeys(column.key for _, table in groups for column in table.columns))
    lines: list[str] = []
    for group, table in groups:
        known = {column.key: column for column in table.columns}
        same = Table(table.title, [known.get(n, Column(n, n)) for n in names], table.rows)
        head, *rows = render(same, "csv").splitlines()
        about = _about(group)
        if not lines:
            lines.append(f"{','.join(about)},{head}")
        lines += [f"{','.join(about.values())},{row}" for row in rows]
    return "\n".join(lines) + "\n"


def _about(group: Group) -> Mapping[str, str]:
    return {
        "dataset": group.dataset,
        "protocol": group.config.protocol,
        "model": group.criterion.model,
        "alpha": "" if group.alpha is None else f"{group.alpha:g}",
    }
