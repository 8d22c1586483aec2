"""What a bound on the penalty of FairLoss and FairGrad saves, and what it costs.

FAIRVAR_DATA=FOLDER python benchmarks/bounded_penalty.py --rounds 200 --out bounded.json

The paper's MNIST experiment (configs/paper/mnist.toml: 50 clients, multinomial regression, all of a
client's samples in one step), alpha 0.1: every learning rate and strength of its grid, without a
bound and with each of them. All runs of a method train together. Markdown to the standard output;
numbers are of validation data, accuracy in percent, variance over clients times 100 as the paper
prints it.

A run failed if it diverged or ended more than 10 points below FedAvg with the same learning rate;
"saved" are those of them that do not fail with the bound. Differences, as mean (worst, best), are
over the runs that did not fail without a bound; "unchanged" counts those with the same numbers;
"best" is the most accurate run. `--out` also stores all single results, of which `--show` prints
the table again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from msgspec.structs import replace

import fairvar as fv
from fairvar.engine.grid import Member, train_grid
from fairvar.engine.settings import EvaluateSettings
from fairvar.runs.config import Config
from fairvar.runs.plan import Plan
from fairvar.runs.runner import federation_of, model_of

PLAN = Path(__file__).parents[1] / "configs" / "paper" / "mnist.toml"
METHODS = ("fairloss", "fairloss*", "fairgrad", "fairgrad*")
BOUNDS = (None, 0.5, 1.0, 2.0)
FAR = 10.0  # points of accuracy


class Result(NamedTuple):
    method: str
    bound: float | None
    lr: float
    strength: float
    seed: int
    diverged_at: int | None
    accuracy: float  # of the global model after the last round that was evaluated
    variance: float

    @property
    def key(self) -> tuple[str, float, float, int]:
        return self.method, self.lr, self.strength, self.seed


def cells(rounds: int, seeds: int) -> list[Config]:
    changes = [
        f"train.rounds={rounds}", f"evaluate.every={rounds}", "evaluate.local=false",
        "evaluate.splits=['valid']", "sweep.alpha=[0.1]", f"sweep.seeds={seeds}",
        f"sweep.methods={json.dumps(['fedavg', *METHODS])}",
    ]  # fmt: skip
    return list(Plan.load(PLAN, changes).cells)


def trained(configs: Sequence[Config], bound: float | None) -> Iterator[Result]:
    """All runs of one method and bound, together."""
    data = federation_of(configs[0])
    methods = [replace(c.method, bound=bound) if bound else c.method for c in configs]
    members = [
        Member(model_of(config, data), method, config.train)
        for config, method in zip(configs, methods, strict=True)
    ]
    when: EvaluateSettings = configs[0].evaluate
    for config, history in zip(
        configs, train_grid(members, data, "cross_entropy", when), strict=True
    ):
        table = history.accuracy["valid", "global"]
        last = table[-1] if len(table) else torch.full((data.clients,), torch.nan)
        yield Result(
            config.method.label, bound, config.train.lr, getattr(config.method, "strength", 0.0),
            config.train.seed, history.diverged_at, 100 * float(last.nanmean()),
            100 * float(last.var()),
        )  # fmt: skip


def fails(result: Result, fedavg: Result) -> bool:
    """Losses cease to be finite, or the model is far worse than FedAvg's at the same rate."""
    return result.diverged_at is not None or result.accuracy < fedavg.accuracy - FAR


def table(results: Sequence[Result]) -> Iterator[str]:
    plain = {r.key: r for r in results if r.bound is None}
    fedavg = {(r.lr, r.seed): r for r in results if r.method == "FedAvg"}
    heads = ("method", "bound", "diverged", "failed", "saved", "lr ≥ 0.1: Δ accuracy",
             "Δ variance", "lr < 0.1: Δ accuracy", "Δ variance", "unchanged",
             "best: accuracy, variance")  # fmt: skip
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for name in dict.fromkeys(r.method for r in results if r.method != "FedAvg"):
        failed = set[object]()
        for bound in BOUNDS:
            mine = [r for r in results if (r.method, r.bound) == (name, bound)]
            lost = sum(r.diverged_at is not None for r in mine)
            bad = {r.key for r in mine if fails(r, fedavg[r.lr, r.seed])}
            best = max(mine, key=lambda r: -1.0 if r.key in bad else r.accuracy)
            if bound is None:
                failed, rest = bad, [""] * 6
            else:
                pairs = [(r, plain[r.key]) for r in mine if r.key not in failed]
                large = [(r, p) for r, p in pairs if r.lr >= 0.1]
                small = [(r, p) for r, p in pairs if r.lr < 0.1]
                same = sum(r[6:] == p[6:] for r, p in pairs)
                rest = [f"{len(failed - bad)} of {len(failed)}", *changes(large), *changes(small),
                        f"{same} of {len(pairs)}"]  # fmt: skip
            cells = [name, "–" if bound is None else f"{bound:g}", str(lost),
                     f"{len(bad)} of {len(mine)}", *rest,
                     f"{best.accuracy:.2f}, {best.variance:.3f}"]  # fmt: skip
            yield f"| {' | '.join(cells)} |"


def changes(pairs: Sequence[tuple[Result, Result]]) -> Iterator[str]:
    """Of accuracy and variance by the bound: mean (worst, best)."""
    accuracy = [r.accuracy - p.accuracy for r, p in pairs]
    variance = [r.variance - p.variance for r, p in pairs]
    yield f"{fmean(accuracy):+.2f} ({min(accuracy):+.2f}, {max(accuracy):+.2f})"
    yield f"{fmean(variance):+.3f} ({max(variance):+.3f}, {min(variance):+.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of stored results")
    given = parser.parse_args()
    if given.show is not None:
        print("\n".join(table([Result(**r) for r in json.loads(given.show.read_text())])))
        return
    torch.set_num_threads(1)
    started, results = time.process_time(), list[Result]()
    for name in ("fedavg", *METHODS):
        mine = [c for c in cells(given.rounds, given.seeds) if _name(c.method) == name]
        for bound in BOUNDS if name != "fedavg" else (None,):
            results += trained(mine, bound)
    print(f"{len(results)} runs of {given.rounds} rounds, {time.process_time() - started:.0f} s of "
          f"one core, torch {torch.__version__}\n")  # fmt: skip
    print("\n".join(table(results)))
    if given.out is not None:
        given.out.write_text(json.dumps([r._asdict() for r in results], indent=1))


def _name(method: fv.Method) -> str:
    return type(method).__struct_config__.tag + "*" * method.probes  # type: ignore[operator]


if __name__ == "__main__":
    main()
