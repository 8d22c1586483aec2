"""Small runs of every method on every path, to compare two commits number by number.

    python tools/pin.py --store FILE      train all cases and store what they observed
    python tools/pin.py --compare FILE    train them again and print the largest differences

To compare with an earlier commit: check it out elsewhere, copy this file into its tools/, run it
there with --store, and here with --compare.

All runs are on the CPU in float64. A case whose bytes differ is listed with its largest difference,
relative to the largest number of the table. Cases that only one of the commits trains are listed
and not compared. The exit status is 0 if no compared case differs by more than 1e-12.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "federated")]

from federations import run as federated  # noqa: E402

import fairvar as fv  # noqa: E402
from checks import (  # noqa: E402
    METHODS,
    MODELS,
    OPTIONS,
    golden_federation,
    images,
    observed,
    quadratic_run,
)
from fairvar.engine.grid import Member, train_grid  # noqa: E402
from fairvar.engine.settings import EvaluateSettings, TrainSettings  # noqa: E402
from fairvar.errors import BadInput  # noqa: E402

Tables = dict[str, Tensor]
Cases = dict[str, Tables | str]  # a message where the case is refused
Case = tuple[str, Callable[[], list[fv.History]]]
WORK: dict[str, dict[str, Any]] = {
    "step": {},
    "mini_batch": {"batch_size": 4},
    "epoch": {"batch_size": 4, "local_epochs": 1},
    "steps": {"batch_size": 5, "local_steps": 3},
}
EXTRA: dict[str, dict[str, Any]] = {
    "clip": {"clip_norm": 0.05},
    "some": {"batch_size": 4, "participants": 6},
    "global_only": {"evaluate_local": False},
    "twin": {"capture": True, "batch_size": 4},
    "twin_steps": {"capture": True, "batch_size": 4, "local_steps": 2},
    "chunk": {"chunk": 8, "batch_size": 4, "local_epochs": 1},
}
DATA = images(10)
EVEN = images(10, sizes=(8, 8))
SMALL, NORM = images(5, sizes=(3, 13)), MODELS["batch_norm"]
SOME: dict[str, Any] = {"batch_size": 4, "participants": 3, "clip_norm": 0.1}


def trained(model: str, method: fv.Method, engine: str, **more: Any) -> list[fv.History]:
    given: dict[str, Any] = {"rounds": 4, "lr": 0.1, "evaluate_every": 2, "seed": 3, **more}
    data = given.pop("data", DATA)
    return [
        fv.train(MODELS[model], data, method, engine=engine, dtype=torch.float64, **given)
    ]  # fmt: skip


def continued(model: str, method: fv.Method, engine: str, **more: Any) -> list[fv.History]:
    """Two rounds, and two more from the state after them."""
    (first,) = trained(model, method, engine, rounds=2, **more)
    return trained(model, method, engine, state=first.state, **more)


def diverged(method: fv.Method, engine: str) -> list[fv.History]:
    """A step so long that losses overflow, in a round that is evaluated and in one that is not."""
    return [
        quadratic_run(golden_federation(), method, (0.5, 0.5), 99, lr=lr, engine=engine)
        for lr in (1e6, 1e8)
    ]


def together(method: fv.Method, **more: Any) -> list[fv.History]:
    """Runs that differ in the learning rate, the seed and the method's numbers."""
    knob = method.fairness_knob
    members = []
    for lr, seed, strength in ((0.1, 3, 1.0), (0.05, 3, 1.3), (0.1, 4, 0.7)):
        numbers = method.numbers
        own = method
        if knob in numbers:
            own = msgspec.structs.replace(method, **{knob: strength * numbers[knob]})
        settings = TrainSettings(rounds=4, lr=lr, seed=seed, dtype="float64", **more)
        members.append(Member("multinomial", own, settings))
    return train_grid(members, DATA, "cross_entropy", EvaluateSettings(every=2))


def label_of(method: fv.Method) -> str:
    """Only fields without their default value: an option that came later changes no label."""
    given = [
        f"{field.name}={getattr(method, field.name)!r}"
        for field in msgspec.structs.fields(method)
        if field.default is msgspec.NODEFAULT or getattr(method, field.name) != field.default
    ]
    return f"{type(method).__name__}({', '.join(given)})"


def cases() -> Iterator[Case]:
    for method in METHODS + OPTIONS:
        of = label_of(method)
        for model in MODELS:
            for engine in ("reference", "auto", "linear", "pooled", "blocked", "vmapped"):
                for name, work in (WORK | EXTRA).items():
                    more = work | ({"data": EVEN} if name in ("twin", "some") else {})
                    label = f"{model} {of} {engine} {name}"
                    yield label, _late(trained, model, method, engine, more)
                if model == "multinomial":
                    label = f"quadratics {of} {engine} diverges"
                    yield label, _late(diverged, method, engine, {})
                label = f"{model} {of} {engine} continued"
                yield label, _late(continued, model, method, engine, WORK["mini_batch"])
        for name, work in WORK.items():
            for capture in (False, True):
                more = {**work, "capture": capture}
                label = f"grid {of} {name} {capture}"
                yield label, lambda m=method, more=more: together(m, **more)  # type: ignore[misc]
            label = f"federated {of} {name}"
            yield label, lambda m=method, w=work: [federated(m, DATA, **w).history]  # type: ignore[misc]
        label = f"federated {of} batch norm, some clients, clip"
        yield label, lambda m=method: [federated(m, SMALL, model=NORM, **SOME).history]  # type: ignore[misc]


def _late(function: Any, *given: Any) -> Callable[[], list[fv.History]]:
    *positional, more = given
    return lambda: function(*positional, **more)  # type: ignore[no-any-return]


def tables(histories: list[fv.History]) -> Tables:
    found: Tables = {}
    for number, history in enumerate(histories):
        found |= {f"{number} {name}": value.clone() for name, value in observed(history).items()}
        diverged = -1 if history.diverged_at is None else history.diverged_at
        counted = [history.rounds, history.exchanges, history.bytes_down, history.bytes_up]
        found[f"{number} counted"] = torch.tensor([*counted, diverged, history.state.round])
        found[f"{number} rounds"] = torch.cat([history.observed, history.evaluated])
    return found


def all_cases(only: str) -> Cases:
    torch.set_num_threads(1)
    found: Cases = {}
    for name, compute in cases():
        if only not in name:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = tables(compute())
            except BadInput as error:
                found[name] = str(error)
    return found


def difference(left: Tables, right: Tables) -> float:
    """0: equal bytes; inf: other tables or shapes."""
    if left.keys() != right.keys():
        return float("inf")
    worst = 0.0
    for name, x in left.items():
        y = right[name]
        if x.shape != y.shape or x.dtype != y.dtype or not torch.equal(x.isnan(), y.isnan()):
            return float("inf")
        if x.numpy().tobytes() == y.numpy().tobytes():
            continue
        x, y = x.double().nan_to_num(), y.double().nan_to_num()
        gap = float((x - y).abs().max()) / max(float(y.abs().max()), 1e-300)
        worst = max(worst, gap, 5e-324)
    return worst


def compared(found: Cases, before: Cases) -> float:
    """Print how the cases differ; returns the largest difference of those that both have."""
    gaps, once, refused = dict[str, float](), list[str](), 0
    for name in sorted({*found, *before}):
        now, then = found.get(name, "no such case"), before.get(name, "no such case")
        if isinstance(now, str) and isinstance(then, str):
            refused += 1  # messages may be reworded
        elif isinstance(now, str):
            once.append(f"   before  {name} (now: {now[:60]})")
        elif isinstance(then, str):
            once.append(f"      now  {name} (before: {then[:60]})")
        else:
            gaps[name] = difference(now, then)
    for name, gap in gaps.items():
        if gap:
            print(f"{gap:9.2g}  {name}")
    print(*once, sep="\n")
    worst, equal = max(gaps.values(), default=0.0), sum(not gap for gap in gaps.values())
    print(
        f"{len(gaps)} cases trained by both, {equal} with equal bytes, the others differ by at "
        f"most {worst:.2g}; {len(once)} trained by one only, {refused} refused by both"
    )
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--store", type=Path)
    choice.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args()
    found = all_cases(given.only)
    if given.store is not None:
        torch.save(found, given.store)
        print(f"{len(found)} cases stored")
        return
    before = {k: v for k, v in torch.load(given.compare).items() if given.only in k}
    sys.exit(not compared(found, before) <= 1e-12)


if __name__ == "__main__":
    main()
