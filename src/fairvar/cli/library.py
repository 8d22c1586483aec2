"""What the commands call, and the tables that they print. It is imported after the arguments are
parsed (`common.lib`)."""

# mypy: implicit-reexport
# ruff: noqa: F401

import importlib.metadata
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from fairvar import data, theory
from fairvar._version import __version__
from fairvar.common.display import plural
from fairvar.common.process import progress, stop_signals
from fairvar.data.federation import Federation
from fairvar.data.fetch import fetch
from fairvar.engine import keys
from fairvar.engine.train import train
from fairvar.methods import FairGrad, catalogue
from fairvar.report import compare, files, in_python, result_tables, style
from fairvar.report.table import Estimate, to_rich
from fairvar.runs import archive, config, formats, own, plan, results, runner, select
from fairvar.scores import ACCURACY, MISSING, recorded_metric

from fairvar.runs import experiments, stored, verify, sweep  # isort: skip
from fairvar.theory import Claim


def load_plugin(path: Path | None) -> None:
    """What --plugin names: a Python file that registers methods, or a configuration file, of which
    the code that it names is loaded."""
    if path is not None and path.suffix == ".toml":
        plan.federations(path)
    else:
        own.load_plugin(path)


PACKAGES = ("torch", "numpy", "msgspec", "safetensors", "matplotlib", "flwr", "ray")
THEOREMS = {
    "T1": "q-FFL against the loss variance",
    "T2": "when fair and plain stationary points coincide",
    "T3": "when they differ",
    "T4": "a perturbation that moves them apart",
    "T5": "the variance falls as the strength grows",
    "T6": "approximate against exact algorithms",
    "": "identities behind the methods and the engine",
}


def examine() -> dict[str, Any]:
    """Facts about the installation, for bug reports."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    first, second = (_small_run("auto", torch.float32) for _ in range(2))
    engine, reference = (_small_run(name, torch.float64) for name in ("auto", "reference"))
    gap = float((engine - reference).abs().max())
    return {
        "fairvar": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **versions,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "two runs give identical bytes": torch.equal(first, second),
        "engine agrees with the reference": f"{'yes' if gap < 1e-10 else 'NO'}, "
        f"largest difference {gap:.1e}",
        "free disk here": f"{shutil.disk_usage('.').free / 2**30:.1f} GiB",
        "telemetry": "none",
    }


def _small_run(engine: str, dtype: torch.dtype) -> torch.Tensor:
    federation, method = data.load_federation("logistic", clients=10), FairGrad(strength=0.1)
    history = train("multinomial", federation, method, 3, engine=engine, dtype=dtype)
    return torch.cat([leaf.flatten() for leaf in history.state.params.values()])


# -- tables ----------------------------------------------------------------------------------------
def _table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    caption: str | None = None,
    **options: Any,
) -> Table:
    """`options`: of the columns after the first. No character is left out in narrow terminals."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for place, head in enumerate(heads):
        table.add_column(head, overflow="fold", **(options if place else {}))
    for row in rows:
        table.add_row(*map(str, row))
    return table


def facts_table(facts: Mapping[str, Any], title: str | None = None) -> Table:
    table = Table(show_header=False, box=None, title=title, title_justify="left")
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table


def run_table(folder: Path, manifest: Mapping[str, Any]) -> Table:
    """One row per evaluated split and model of a run."""
    diverged, origin = manifest["diverged_at"], manifest["birth"]
    state = "" if diverged is None else f", diverged in round {diverged}"
    peak = f", peak memory {origin['peak_megabytes']} MB" if origin.get("peak_megabytes") else ""
    spent = f"{origin.get('seconds', 0):.1f} s on {origin.get('device')}"
    cost = f"{spent} ({origin.get('engine')}){peak}"
    metric, (heads, rows) = recorded_metric(manifest) or ACCURACY, stored.score_rows(manifest)
    return _table(
        f"{manifest['method']}: {plural(manifest['rounds'], 'round')}{state}",
        ("split/model", *heads),
        rows,
        f"variances over clients in {metric.in_variances}; {cost}; stored in {folder}",
        justify="right",
    )


def agreement_table(found: Sequence[verify.Rerun], seed: int) -> Table:
    """Stored runs compared with their first rounds, run again."""

    def row(each: verify.Rerun) -> Sequence[object]:
        facts, allowed = each.to_dict(), verify.tolerance(each.run.config)
        alpha = "" if facts["alpha"] is None else f"alpha {facts['alpha']:g}, "
        name = f"{facts['method']}, {facts['protocol']}, {alpha}lr {facts['lr']:g}"
        answers = MISSING if each.answers is None else f"{each.answers:.2%}"
        gaps = (f"{100 * each.accuracy:.3f}", answers, f"{each.loss:.2%}")
        return (f"{name}, seed {facts['seed']}", facts["made_on"], each.rounds, *gaps, allowed,
                "agrees" if each.holds else "DIFFERS")  # fmt: skip

    metrics = list(dict.fromkeys(each.metric for each in found)) or [ACCURACY]
    titles = [metric.title for metric in metrics]
    others = any(metric.factor != 100 for metric in metrics)
    percent = "; % of its size, of scores that are no fractions" * others
    return _table(
        f"Run again on this machine, drawn with seed {seed}",
        ("run", "made on", "rounds", " / ".join(titles), "answers", "loss", "allowed", ""),
        map(row, found),
        f"largest differences: mean {' / '.join(titles)} over clients (points{percent}), share of "
        f"all answers, training loss of a client; allowed: of {' / '.join(titles)} and loss",
        justify="right",
    )


def passport_table(federation: Federation, title: str = "partition") -> Table:
    """Where a partition came from and how uneven it is."""
    passport, sizes = dict(federation.provenance), federation.sizes
    facts: dict[str, Any] = {
        "data set": passport.get("dataset", federation.name),
        "clients": federation.clients,
        "training samples": f"min {int(sizes.min())}, median {int(sizes.median())}, "
        f"max {int(sizes.max())}, total {int(sizes.sum())}",
        "samples in all": ", ".join(
            f"{name} {int(split.counts.sum())}" for name, split in federation.splits.items()
        ),
    }
    for key in ("mean_total_variation", "effective_classes", "majority_share"):
        if key in passport:
            facts[key.replace("_", " ")] = f"{passport[key]:.3f}"
    for key in ("attempts", "moved", "sha256"):
        if key in passport:
            facts[{"moved": "samples moved to reach the minimum"}.get(key, key)] = passport[key]
    return facts_table(facts, title.capitalize())


def when_table() -> Table:
    """Which method for which purpose, in one line each."""
    table = Table(title="When to use which", title_justify="left", box=None, caption_justify="left")
    table.add_column("method", style="bold")
    table.add_column("when", overflow="fold")
    for entry in catalogue():
        if not entry["label"].endswith("*"):
            table.add_row(entry["label"], entry["when"])
    table.caption = (
        "A star marks exact variants: one more exchange per round. docs/methods compares them."
    )
    return table


def methods_table() -> Table:
    return _table(
        "Methods: what a client and the server exchange in one round",
        ("method", "exchanges", "down", "up", "reveals", "sums"),
        [
            (m["label"], m["exchanges"], m["down"], m["up"], ", ".join(m["reveals"]),
             "yes" if m["sums_suffice"] else "no")
            for m in catalogue()
        ],
        "d: floats of the model, s: one scalar. sums: the server needs only sums over clients, so "
        "that secure aggregation is possible.",
    )  # fmt: skip


def options_table() -> Table:
    """How each method is written in a configuration: its name and its options with defaults."""
    table = Table(title="[method] in a configuration", title_justify="left", box=None)
    table.add_column("name", style="bold")
    table.add_column("option = default", overflow="fold")
    for name, options in {entry["name"]: entry["options"] for entry in catalogue()}.items():
        table.add_row(name, ", ".join(f"{k} = {v}" for k, v in options.items()))
    return table


def datasets_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    heads = ("name", "what", "found", "licence")
    return _table("Data sets", heads, ([row[key] for key in heads] for row in rows))


def claims_text(claims: Sequence[Claim]) -> Iterator[Table | Text]:
    """Every claim with both sides, tolerance and verdict, by theorem."""
    for theorem, title in THEOREMS.items():
        yield Text.assemble("\n", (theorem or "Also", "bold"), f"  {title}")
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="bold")
        grid.add_column(overflow="fold")
        for claim in claims:
            if (claim.name[:2] if claim.name[:2] in THEOREMS else "") == theorem:
                grid.add_row(_verdict(claim), _sentence(claim))
        yield grid


def _verdict(claim: Claim) -> str:
    """A counterexample to the paper's printed form holds by refuting it."""
    if not claim.holds:
        return "FAILS"
    return "refutes" if "paper" in claim.relation else "holds"


def _sentence(claim: Claim) -> str:
    many = f", worst of {claim.comparisons}" if claim.comparisons > 1 else ""
    note = f"\n({claim.note})" if claim.note else ""
    sides = f"{claim.lhs:.7g} {claim.relation} {claim.rhs:.7g}"
    return f"{claim.name}: {claim.statement}\n{sides}   tolerance {claim.tolerance:.0e}{many}{note}"
