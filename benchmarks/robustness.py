"""What the server's defences hold against clients that lie, and what they cost honest ones.

python benchmarks/robustness.py --out robustness      # the tables of docs/robustness.md
python benchmarks/robustness.py --quick               # one federation, one method: a minute

Digits, multinomial regression, one full-batch step a round, in this process: clients, messages,
guard and server are those of a real federation. The tables go to the standard output as Markdown;
`--out` also stores them and all single results as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

import fairvar as fv
from fairvar.common.tree import Tree, add, scale, squared_norm, subtract, tree_map
from fairvar.deploy.client import GRADIENT, LOSS, MODEL, Agreement, Client, Message, grouped
from fairvar.deploy.guard import OFF, FederationSettings, dishonest_among, mean_loss, median_length
from fairvar.deploy.run import Federated, LocalTransport, federate, local_clients
from fairvar.deploy.server import MEMORY
from fairvar.engine.settings import EvaluateSettings, TrainSettings

METHODS: dict[str, fv.Method] = {
    m.label: m
    for m in (
        fv.FedAvg(), fv.AFL(), fv.QFFL(1.0), fv.AAggFF(), fv.FairLoss(0.5),
        fv.FairLoss(0.5, exact=True), fv.FairGrad(0.1), fv.FairGrad(0.1, exact=True),
    )
}  # fmt: skip
PLAIN = tuple(m for m in METHODS if m not in ("AFL", "q-FFL", "AAggFF"))  # averages that can change
BARE = {"norm_bound": OFF, "mean_loss_bound": OFF}
DEFENCES: dict[str, dict[str, object]] = {
    "none": BARE,
    "default": {},
    "strict": {"norm_bound": 3.0, "mean_loss_bound": 1.0, "loss_cap": 5.0},
    "trimmed": {"average": "trimmed"},
    "median": {"average": "median"},
}
Lie = Callable[["Liar", Message, Message], Message]


# -- lies ------------------------------------------------------------------------------------------
def moved(change: Callable[[Tree], Tree]) -> Lie:
    """Another update x_i − x and, where one is sent, another gradient."""

    def lie(liar: Liar, request: Message, reply: Message) -> Message:
        x, groups = request.group(MODEL), {}
        if own := reply.group(MODEL):
            groups[MODEL] = add(x, change(subtract(own, x)))
        if gradient := reply.group(GRADIENT):
            groups[GRADIENT] = change(gradient)
        return replace(reply, arrays={**reply.arrays, **grouped(**groups)})

    return lie


def noise(tree: Tree) -> Tree:
    """Of the same length."""
    drawn = tree_map(torch.randn_like, tree)
    return scale(drawn, float((squared_norm(tree) / squared_norm(drawn)).sqrt()))


def told(loss: float) -> Lie:
    return lambda liar, request, reply: replace(reply, numbers={**reply.numbers, LOSS: loss})


def copied(liar: Liar, request: Message, reply: Message) -> Message:
    """What client 0 has just answered."""
    other = liar.first[request.stamp.exchange]
    return replace(reply, arrays=other.arrays, numbers=other.numbers)


def stale(liar: Liar, request: Message, reply: Message) -> Message:
    """The answer to the first round, again and again, under this round's stamp."""
    old = liar.old.setdefault((request.client, request.stamp.exchange), reply)
    return replace(reply, arrays=old.arrays, numbers=old.numbers)


LIES: dict[str, Lie | None] = {
    "no dishonest clients": None,
    "update × 1e6": moved(lambda u: scale(u, 1e6)),
    "update × 100": moved(lambda u: scale(u, 100.0)),
    "update × −10": moved(lambda u: scale(u, -10.0)),
    "update × −1": moved(lambda u: scale(u, -1.0)),
    "update of zero": moved(lambda u: scale(u, 0.0)),
    "update of ones": moved(lambda u: tree_map(torch.ones_like, u)),
    "update of noise": moved(noise),
    "copied": copied,
    "stale": stale,
    "loss 1e9": told(1e9),
    "loss 1e3": told(1e3),
    "loss 20": told(20.0),
    "loss 0": told(0.0),
    "loss −1": told(-1.0),
    "loss NaN": told(float("nan")),
}
ABOUT_LOSS = tuple(name for name in LIES if name.startswith("loss"))


class Liar:
    """The last `number` of all clients lie in every probe and training; the others are honest."""

    def __init__(self, lie: Lie | None, clients: int, number: int) -> None:
        self.lie, self.liars = lie, range(clients - number, clients)
        self.first: dict[str, Message] = {}
        self.old: dict[tuple[int, str], Message] = {}

    def __call__(self, request: Message, reply: Message) -> Sequence[Message]:
        kind = request.stamp.exchange
        if request.client == 0:
            self.first[kind] = reply
        if self.lie is None or kind == "evaluate" or request.client not in self.liars:
            return [reply]
        return [self.lie(self, request, reply)]


# -- runs ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    method: str
    lie: str
    defence: str
    clients: int
    liars: int
    alpha: float
    seed: int
    rounds: int
    lr: float = 0.5


@dataclass(frozen=True)
class Result:
    case: Case
    accuracy: float  # mean over honest clients of the global model's test accuracy
    worst: float  # mean of the worst tenth
    variance: float
    cut: list[float]  # share of rounds in which a client was shortened; clients by rising loss
    refused: int  # replies that were left out
    failed: str = ""


@lru_cache(maxsize=4)
def federation(clients: int, alpha: float, seed: int) -> fv.Federation:
    partition = fv.Dirichlet(alpha=alpha)
    return fv.load_federation("digits", clients=clients, partition=partition, seed=seed)


@lru_cache(maxsize=16)
def parties(
    method: str, clients: int, alpha: float, seed: int, rounds: int, lr: float
) -> tuple[Agreement, list[Client]]:
    data = federation(clients, alpha, seed)
    agreed = Agreement(
        model="multinomial",
        method=METHODS[method],
        loss="cross_entropy",
        train=TrainSettings(rounds=rounds, lr=lr, seed=seed),
        evaluate=EvaluateSettings(every=rounds, local=False),
        clients=clients,
        input_shape=data.input_shape,
        classes=data.classes,
    )
    return agreed, local_clients(agreed, data)


def measure(case: Case) -> Result:
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    agreed, clients = parties(
        case.method, case.clients, case.alpha, case.seed, case.rounds, case.lr
    )
    rules = FederationSettings(repeats=0, **DEFENCES[case.defence])  # type: ignore[arg-type]
    liar = Liar(LIES[case.lie], case.clients, case.liars)
    try:
        found = federate(agreed, rules, LocalTransport(clients, liar))
    except fv.RunFailed as error:
        return Result(case, 0.0, 0.0, 0.0, [], 0, str(error))
    return summarised(case, found)


def summarised(case: Case, found: Federated) -> Result:
    history, rounds = found.history, found.notes.rounds
    if history.diverged_at is not None:
        return Result(case, 0.0, 0.0, 0.0, [], len(found.refused), "diverged")
    honest = case.clients if LIES[case.lie] is None else case.clients - case.liars
    accuracy = history.accuracy["test", "global"][-1][:honest]
    seen: Tensor = accuracy[~accuracy.isnan()]
    order = history.evaluated_loss["test", "global"][-1].nan_to_num(0.0).argsort().tolist()
    cut = [fmean(i in note.shortened for note in rounds) for i in order]
    worst = float(seen.sort().values[: max(1, len(seen) // 10)].mean())
    return Result(case, float(seen.mean()), worst, float(seen.var()), cut, len(found.refused))


def cases(quick: bool) -> list[Case]:
    found = []
    for alpha in (0.1,) if quick else (0.05, 0.1, 0.5):
        for seed in range(1 if quick else 3):
            found += [Case(m, "no dishonest clients", d, 10, 0, alpha, seed, 25)
                      for m in METHODS for d in DEFENCES if defined(m, d)]  # fmt: skip
    for clients, liars, rounds, methods, lies in attacks(quick):
        for method in methods:
            found += [Case(method, lie, d, clients, liars, 0.5, 0, rounds)
                      for lie in lies for d in DEFENCES
                      if defined(method, d) and sends(method, lie)]  # fmt: skip
    return list(dict.fromkeys(found))


def attacks(quick: bool) -> list[tuple[int, int, int, tuple[str, ...], tuple[str, ...]]]:
    everything = tuple(METHODS), tuple(LIES)
    if quick:
        return [(5, 1, 20, ("FairLoss",), tuple(LIES))]
    few = ("no dishonest clients", "update × 1e6", "update × −10", "update × −1", "loss 1e9")
    return [
        (5, 1, 25, *everything),
        (10, 2, 25, *everything),
        (50, 5, 15, ("FedAvg", "AFL", "FairLoss"), few),
    ]


def defined(method: str, defence: str) -> bool:
    return defence not in ("trimmed", "median") or method in PLAIN


def sends(method: str, lie: str) -> bool:
    kind = METHODS[method]
    return lie not in ABOUT_LOSS or kind.uses_losses or kind.uses_mean_loss


# -- how long honest updates are ---------------------------------------------------------------
WORK: dict[str, dict[str, object]] = {
    "regression, one step": {"model": "multinomial", "lr": 0.5, "rounds": 100},
    "regression, two epochs": {
        "model": "multinomial", "lr": 0.1, "rounds": 15, "batch_size": 8, "local_epochs": 2,
    },
    "two hidden layers, one step": {"model": "2nn", "lr": 0.2, "rounds": 60},
}  # fmt: skip
STRONG = fv.FairLoss(3.0, exact=True)


def honest_lengths(named: tuple[str, str]) -> dict[str, object]:
    """How much longer than usual honest updates are, Dirichlet 0.05, by the engine: `usual` is the
    largest median of the past rounds, as for the server."""
    work, label = named
    torch.set_num_threads(1)
    method = STRONG if label == f"{STRONG}, λ = 3" else METHODS[label]
    given: dict = {"evaluate_every": 1, "seed": 0, **WORK[work]}
    norms = fv.train(given.pop("model"), federation(10, 0.05, 0), method, **given).update_norm
    medians = [median_length(row) or inf for row in norms.tolist()]
    past = [max(medians[max(0, t - MEMORY) : t] or medians[:1]) for t in range(len(medians))]
    times = norms / torch.tensor(past, dtype=torch.float64)[:, None]
    over = {str(b): float((times > b).double().mean()) for b in (3, 5, 10)}
    return {"work": work, "method": label, "longest": float(times.max()), "over": over}


def length_table(found: Sequence[dict]) -> str:
    lines = ["**Honest updates, Dirichlet 0.05, ten clients**: the longest, in usual lengths; in "
             "brackets the percentage that is above 3, 5 and 10", "",
             row("method", *WORK), rule(1 + len(WORK))]  # fmt: skip
    for method in dict.fromkeys(f["method"] for f in found):
        cells = {
            f["work"]: f"{f['longest']:.1f} "
            f"({', '.join(f'{100 * share:.2g}' for share in f['over'].values())})"
            for f in found
            if f["method"] == method
        }
        lines.append(row(method, *cells.values()))
    return "\n".join(lines)


# -- which mean of losses ----------------------------------------------------------------------
def bounded_mean(bound: float) -> Callable[[Tensor], float]:
    rules = FederationSettings(mean_loss_bound=bound)
    return lambda loss: float(mean_loss(loss, torch.full_like(loss, 1 / len(loss)), rules))


def trimmed_mean(loss: Tensor) -> float:
    k = dishonest_among(len(loss), 0.2)
    return float(loss.sort().values[k : len(loss) - k].mean())


def median_of_means(loss: Tensor) -> float:
    """Five groups of two, drawn anew."""
    groups = loss[torch.randperm(len(loss))].reshape(5, -1)
    return float(groups.mean(1).median())


MEANS: dict[str, Callable[[Tensor], float]] = {
    "mean": lambda loss: float(loss.mean()),
    "bound 5 (default)": bounded_mean(5.0),
    "bound 1 (winsorised)": bounded_mean(1.0),
    "trimmed": trimmed_mean,
    "median of means": median_of_means,
}


def loss_table() -> str:
    """How far each estimate is from the true mean of ten clients' losses, over rounds and seeds."""
    torch.manual_seed(0)
    columns = [(alpha, lie) for alpha in (0.05, 0.1, 0.5) for lie in (False, True)]
    names = [f"Dirichlet {a}{', two tell 1e9' if lie else ''}" for a, lie in columns]
    lines = ["**Estimates of the mean loss, ten clients, FairLoss**: mean distance from the mean "
             "that honest clients would give, in percent of it", "",
             row("estimate", *names), rule(1 + len(names))]  # fmt: skip
    seen = {alpha: torch.cat([fv.train("multinomial", federation(10, alpha, seed),
            METHODS["FairLoss"], rounds=60, lr=0.5, seed=seed).loss for seed in range(3)])
            for alpha in (0.05, 0.1, 0.5)}  # fmt: skip
    for name, estimate in MEANS.items():
        cells = []
        for alpha, lie in columns:
            off = []
            for loss in seen[alpha]:
                told = loss.index_fill(0, torch.tensor([8, 9]), 1e9) if lie else loss
                off.append(abs(estimate(told) / float(loss.mean()) - 1))
            cells.append(f"{100 * fmean(off):.3g}")
        lines.append(row(name, *cells))
    return "\n".join(lines)


# -- tables ----------------------------------------------------------------------------------------
def tables(results: Sequence[Result]) -> str:
    return "\n\n".join([*honest_tables(results), *attack_tables(results)]) + "\n"


def honest_tables(results: Sequence[Result]) -> list[str]:
    """Mean over seeds; `cut`: in how many rounds the worst-off client, and any other, was cut."""
    found = []
    honest = [r for r in results if r.case.liars == 0]
    for alpha in sorted({r.case.alpha for r in honest}):
        lines = [f"**No dishonest clients, Dirichlet {alpha}, ten clients**: mean accuracy / worst "
                 "tenth / variance; in brackets: percent of rounds in which the worst-off client, "
                 "and the mean of the others, was cut", "", row("method", *DEFENCES),
                 rule(1 + len(DEFENCES))]  # fmt: skip
        for method in METHODS:
            here = [r for r in honest if (r.case.alpha, r.case.method) == (alpha, method)]
            cells = [honest_cell([r for r in here if r.case.defence == d]) for d in DEFENCES]
            lines.append(row(method, *cells))
        found.append("\n".join(lines))
    return found


def honest_cell(found: Sequence[Result]) -> str:
    fine = [r for r in found if not r.failed]
    if not fine:
        return found[0].failed if found else "–"
    three = (fmean(100 * r.accuracy for r in fine), fmean(100 * r.worst for r in fine),
             fmean(100 * r.variance for r in fine))  # fmt: skip
    worst = fmean(100 * r.cut[-1] for r in fine)
    others = fmean(100 * fmean(r.cut[:-1]) for r in fine)
    return f"{three[0]:.1f} / {three[1]:.1f} / {three[2]:.2f} ({worst:.1f}, {others:.1f})"


def attack_tables(results: Sequence[Result]) -> list[str]:
    found = []
    attacked = [r for r in results if r.case.liars]
    for clients in sorted({r.case.clients for r in attacked}):
        here = [r for r in attacked if r.case.clients == clients]
        for defence in DEFENCES:
            methods = [m for m in METHODS if defined(m, defence)
                       and any(r.case.method == m for r in here)]  # fmt: skip
            if not methods:
                continue
            title = f"**{here[0].case.liars} of {clients} lie, `{defence}`**"
            lines = [f"{title}: mean accuracy of the honest clients", ""]
            lines += [row("lie", *methods), rule(1 + len(methods))]
            for lie in LIES:
                cells = {r.case.method: attack_cell(r) for r in here
                         if (r.case.defence, r.case.lie) == (defence, lie)}  # fmt: skip
                if cells:
                    lines.append(row(lie, *(cells.get(m, "") for m in methods)))
            found.append("\n".join(lines))
    return found


def attack_cell(result: Result) -> str:
    if result.failed:
        return "diverged" if result.failed == "diverged" else "failed"
    return f"{100 * result.accuracy:.1f}"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def rule(columns: int) -> str:
    return "|" + "---|" * columns


def as_json(result: Result) -> dict[str, object]:
    return {**vars(result.case), **{k: v for k, v in vars(result).items() if k != "case"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for robustness.md and robustness.json")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    started, todo = time.perf_counter(), cases(given.quick)
    named = [(w, m) for w in WORK for m in (*METHODS, f"{STRONG}, λ = 3")]
    with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
        lengths = [] if given.quick else list(pool.map(honest_lengths, named))
        results = list(pool.map(measure, todo, chunksize=8))
    seconds = time.perf_counter() - started
    about = (f"fairvar {fv.__version__}, torch {torch.__version__}, Python "
             f"{platform.python_version()}, {platform.machine()}, {given.workers} workers, "
             f"{len(todo)} runs, {seconds:.0f} s")  # fmt: skip
    parts = [
        tables(results),
        *([length_table(lengths), "", loss_table(), ""] if lengths else []),
        about,
        "",
    ]
    text = "\n".join(parts)
    sys.stdout.write(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "robustness.md").write_text(text)
        content = {"about": about, "lengths": lengths, "results": [as_json(r) for r in results]}
        (given.out / "robustness.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
