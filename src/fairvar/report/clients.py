"""`clients.csv`: every client's test accuracy at the chosen round, for every seed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

import numpy as np

from fairvar.report.gather import Group

HEAD = ("dataset", "protocol", "alpha", "method", "chosen", "seed", "client", "test_samples",
        "right_global", "right_local")  # fmt: skip


def clients_csv(groups: Sequence[Group]) -> str:
    """Right answers as counts: exact, and short."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEAD)
    for group in groups:
        writer.writerows(_rows(group))
    return out.getvalue()


def _rows(group: Group) -> Iterator[tuple[object, ...]]:
    alpha = "" if group.alpha is None else f"{group.alpha:g}"
    for result in group.results:
        if result.at is None:
            continue
        about = (group.dataset, group.config.protocol, alpha, result.label)
        chosen, samples = result.trial.describe(result.at), result.samples()
        for seed, history in zip(result.trial.seeds, result.trial.histories, strict=True):
            nothing = np.full(len(samples), np.nan)  # of a model that was not measured
            tables = [
                history.accuracy["test", model][result.at].numpy()
                if ("test", model) in history.accuracy else nothing
                for model in ("global", "local")
            ]  # fmt: skip
            for client, count in enumerate(samples.tolist()):
                right = (_count(table[client], count) for table in tables)
                yield (*about, chosen, seed, client, count, *right)


def _count(accuracy: float, samples: int) -> int | str:
    """Empty for a client that has no test samples, or was not there."""
    return "" if accuracy != accuracy else round(float(accuracy) * samples)
