"""Experiments from Python: `fairvar.run` and `fairvar.sweep`, which the command line calls, too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fairvar.common.display import plural
from fairvar.common.files import given_path
from fairvar.common.process import Report, note, stop_signals
from fairvar.common.process import progress as progress_bar
from fairvar.common.validation import as_python
from fairvar.engine.history import History
from fairvar.engine.kernels.compiled import announcing, with_compiling
from fairvar.errors import BadInput, RunFailed, shown
from fairvar.runs import cluster
from fairvar.runs.config import Config
from fairvar.runs.formats import check_writable, is_complete
from fairvar.runs.identity import forget_files
from fairvar.runs.own import load_plugin
from fairvar.runs.plan import Plan, differences
from fairvar.runs.runner import RunGroup, Watch, arrange, missing, run_cell, run_folder, start_note
from fairvar.runs.stored import StoredRun
from fairvar.runs.sweep import Status, crowding, parse_budget, parse_shard, project, run_sweep

MANY_RUNS = 40  # from this number on, a sweep says how long it will take before it starts
Source = Mapping[str, Any] | str | Path


def run(
    config: Config | Source,
    *overrides: str,
    out: str | Path = "runs",
    plugin: str | Path | None = None,
    progress: bool = False,
) -> History:
    """Train one configuration, store it in its own folder in `out` and return its history, at
    evaluated rounds. A run that is stored there already is read and not computed again.

    config: a TOML file, or the same as a dict, {"train": {"lr": 0.1}, "method": TERM(2.0), …}.
    overrides: such as "train.lr=0.5".
    plugin: a Python file to load first, for methods of your own.
    """
    load_plugin(None if plugin is None else Path(plugin))
    settings, out = Config.load(config, overrides), given_path(out)
    forget_files()
    folder = run_folder(settings, out)  # needs readable data
    check_writable(out)
    note(start_note(settings))
    with (
        _threads_as_before(),
        shown_if(progress, settings.name) as bar,
        with_compiling(bar, 0, settings.train.rounds) as report,
        stop_signals() as asked,
    ):
        what = f"rounds of {settings.method.label}"
        run_cell(settings, out, Watch(lambda done, total: report(done, total, what), asked))
    if not is_complete(folder):
        raise RunFailed(f"another process is computing {folder}; wait for it or use another --out")
    return StoredRun.open(folder).history()


@dataclass(frozen=True)
class Sweep:
    """The runs of a plan, and where they are stored."""

    folder: Path
    status: Status
    cells: Sequence[Config]

    def __repr__(self) -> str:
        some = f"{self.status.done} of {self.status.cells} runs are done in {self.folder}"
        why = f"; stopped because {self.status.reason}" if self.status.reason else ""
        return f"<Sweep: {some}{why}>"

    @property
    def names(self) -> set[str]:
        """The folders of its runs."""
        return {run_folder(cell, self.folder).name for cell in self.cells}

    def histories(self) -> dict[str, list[History]]:
        """The finished runs, all seeds of a configuration together. Their name is the method's
        label, with what distinguishes them where a method has several configurations."""
        about = [{k: v for k, v in row.items() if k not in ("run", "seed")}
                 for row in differences(self.cells)]  # fmt: skip
        first = {row["method"]: row for row in reversed(about)}
        varying = {(row["method"], key) for row in about for key in {**row, **first[row["method"]]}
                   if row.get(key) != first[row["method"]].get(key)}  # fmt: skip
        found: dict[str, list[History]] = {}
        for cell, row in zip(self.cells, about, strict=True):
            folder, label = run_folder(cell, self.folder), row["method"]
            more = [f"{key} {value}" for key, value in row.items() if (label, key) in varying]
            if is_complete(folder):
                name = f"{label} ({', '.join(more)})" if more else label
                found.setdefault(name, []).append(StoredRun.open(folder).history())
        return found


def sweep(
    plan: Plan | Source,
    *overrides: str,
    out: str | Path | None = None,
    scale: str | None = None,
    workers: int = 1,
    budget: str | None = None,
    shard: str | None = None,
    ray: str | None = None,
    ray_cpus: float | None = None,
    ray_gpus: float | None = None,
    save_every: int | None = None,
    batch: bool = True,
    estimate: bool = False,
    plugin: str | Path | None = None,
    progress: bool = False,
) -> Sweep:
    """Compute all missing runs of a grid; the same call again continues where it stopped.

    plan: a TOML file with a section [sweep], or the same as a dict.
    out: folder for the runs; runs/NAME by default.
    workers: processes. With several, a script needs `if __name__ == "__main__":` around its calls,
    and methods of your own come from a `plugin`.
    The others are the options of `fairvar sweep`.
    """
    if not isinstance(plan, Plan):  # it was made with the plugin's methods
        load_plugin(None if plugin is None else Path(plugin))
    plan = Plan.load(plan, overrides, scale)
    workers, save_every = as_python(workers), as_python(save_every)
    every = 1 if save_every is None else save_every
    for name, number in (("--workers", workers), ("--save-every", every)):
        if not isinstance(number, int) or number < 1:
            raise BadInput(f"{name} = {shown(number)}: it must be a whole number, at least 1")
    if ray is None and (ray_cpus, ray_gpus) != (None, None):
        raise BadInput("--ray-cpus and --ray-gpus are for --ray ADDRESS; give that too")
    seconds = None if budget is None else parse_budget(budget)
    folder = Path("runs") / plan.name if out is None else given_path(out)
    groups = part_of(plan, shard, batch)
    cells = [cell for group in groups for cell in group]
    forget_files()
    for cell in cells:
        run_folder(cell, folder)  # unreadable data must write nothing
    check_writable(folder)
    note(start_note(cells[0]) if cells else None)
    todo = len(missing(cells, folder))
    with _threads_as_before(), shown_if(progress, plan.name) as report:
        if todo and shard is None:  # not earlier: it prepares one run of each kind
            groups = arrange(plan.cells, batch)
        if cells and ray is None:
            train = cells[0].train
            note(crowding(workers, train.threads, train.device, os.cpu_count() or 1))
            if estimate and todo > MANY_RUNS:
                with announcing(lambda text: report(0, len(cells), text)):
                    cost = duration(project(groups, folder, workers))
                note(f"{plural(todo, 'run')} to do: about {cost} with "
                     f"{plural(workers, 'worker')}, from a few timed rounds")  # fmt: skip
        if ray is not None:
            cluster.run_on_ray(groups, folder, ray, report, cluster.Needs(ray_cpus, ray_gpus))
        status = run_sweep(groups, folder, report, workers, seconds, save_every)
    return Sweep(folder, status, cells)


def part_of(plan: Plan, shard: str | None, batch: bool = True) -> list[RunGroup]:
    """The groups of runs of one part, such as "0/4"; of all without. Parts are whole groups, so
    that batches do not depend on them."""
    part, parts = (0, 1) if shard is None else parse_shard(shard)
    return arrange(plan.cells, batch and parts > 1)[part::parts]


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def shown_if(progress: bool, title: str) -> AbstractContextManager[Report]:
    return progress_bar(title) if progress else nullcontext(lambda done, total, what: None)


@contextmanager
def _threads_as_before() -> Iterator[None]:
    """Runs set the number of threads that their configuration names."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
