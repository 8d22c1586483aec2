"""What the project promised of its speed, as data, and whether a measurement keeps the promise.

Set from prototypes before the engine was written. They are shown, met or missed; no test fails on
them, because a noisy machine would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fairvar_bench.cases import ALL, EPOCHS, METHODS, SIX, Kind, Local
from fairvar_bench.contenders import OURS
from fairvar_bench.run import BenchResult, BenchRow

# Ratios to the loops are to be at least the bound; all other quantities at most.
Quantity = Literal["bare", "naive", "lean", "central", "ms", "padding", "clients", "gigabytes"]
WORDS: dict[str, str] = {
    "bare": "× bare loop",
    "naive": "× naive loop",
    "lean": "× lean loop",
    "central": "of central",
    "ms": "ms per round",
    "padding": "% of work on padding",
    "clients": "cost of 1000 ÷ 50 clients",
    "gigabytes": "GB of the whole process",
}
MANY, FEW = 1000, 50  # clients whose cost is compared


@dataclass(frozen=True)
class Target:
    """A bound on a quantity of one case."""

    device: str  # "cpu" or "cuda"
    model: str
    clients: int
    samples: int
    method: str
    quantity: Quantity
    bound: float
    local: Local = "step"
    kind: Kind = "rounds"

    def applies(self, row: BenchRow, device: str) -> bool:
        case = row.case
        return (self.device, self.model, self.clients, self.samples, self.method, self.local,
                self.kind) == (device, case.model, case.clients, case.samples, case.method,
                               case.local, case.kind)  # fmt: skip

    @property
    def at_least(self) -> bool:
        return self.quantity in ("bare", "naive", "lean")


@dataclass(frozen=True)
class Verdict:
    target: Target
    value: float

    @property
    def place(self) -> str:
        """The case in few words."""
        t = self.target
        size = f"{t.model} {t.clients} × {t.samples}"
        kind = "" if t.kind in ("rounds", "epochs") else f", {t.kind}"
        return f"{size}, epoch{kind}" if t.local == "epoch" else size + kind

    @property
    def met(self) -> bool:
        bound = self.target.bound
        return self.value >= bound if self.target.at_least else self.value <= bound

    def as_dict(self) -> dict[str, Any]:
        return {
            "case": self.place,
            "method": METHODS[self.target.method].label,
            "quantity": WORDS[self.target.quantity],
            "bound": self.target.bound,
            "measured": self.value,
            "met": self.met,
        }


Bounds = dict[str, float]  # by method
LINEAR, LENET, CNN = ("multinomial", 50, 16), ("lenet5", 50, 32), ("avgcnn", 50, 32)
EPOCH_CNN = ("avgcnn", 50, 64)
MOBILE = ("mobilenet_v2", 100, 32)
CONVOLUTIONS: Bounds = dict.fromkeys(ALL, 1.0) | {"fedavg": 1.5, "fairloss*": 2.5}
OF_CENTRAL: Bounds = {
    "fedavg": 1.15, "fairloss*": 1.15, "fairloss": 1.7, "fairgrad": 4.5, "fairgrad*": 4.5
}  # fmt: skip


def _four(fedavg: float, fairloss: float, qffl: float, fairgrad: float) -> Bounds:
    return {"fedavg": fedavg, "fairloss*": fairloss, "qffl": qffl, "fairgrad*": fairgrad}


def _targets(
    device: str,
    place: tuple[str, int, int],
    quantity: Quantity,
    bounds: Bounds,
    local: Local = "step",
    kind: Kind = "rounds",
) -> list[Target]:
    return [Target(device, *place, m, quantity, b, local, kind) for m, b in bounds.items()]


TARGETS: tuple[Target, ...] = (
    *_targets("cpu", LINEAR, "bare", dict(zip(SIX, (15, 20, 10, 7, 8, 10), strict=True))),
    *_targets("cpu", LINEAR, "naive", {"fedavg": 80, "fairgrad": 30}),
    *_targets("cpu", LENET, "bare", CONVOLUTIONS),
    *_targets("cpu", LENET, "naive", {"fedavg": 2}),
    *_targets("cpu", CNN, "bare", CONVOLUTIONS),
    *_targets("cpu", CNN, "naive", {"fedavg": 2}),
    *_targets("cpu", CNN, "central", OF_CENTRAL),
    *_targets("cpu", ("multinomial", MANY, 16), "clients", dict.fromkeys(ALL, 22.0)),
    *_targets("cpu", LINEAR, "bare", dict.fromkeys(SIX, 80.0), kind="grid"),
    *_targets("cpu", ("avgcnn", 1000, 50), "gigabytes", {"fedavg": 6}, "epoch", "memory"),
    *_targets("cpu", EPOCH_CNN, "ms", {"fedavg": 2000}, "epoch", "epochs"),
    *_targets("cpu", EPOCH_CNN, "lean", dict.fromkeys(EPOCHS.methods, 1.0), "epoch", "epochs"),
    *_targets("cuda", LENET, "bare", _four(75, 150, 60, 85)),
    *_targets("cuda", LENET, "naive", {"fedavg": 120}),
    *_targets("cuda", CNN, "bare", _four(30, 70, 30, 25)),
    *_targets("cuda", CNN, "naive", {"fedavg": 90}),
    *_targets("cuda", CNN, "central", OF_CENTRAL),
    *_targets("cuda", ("multinomial", MANY, 16), "clients", dict.fromkeys(ALL, 22.0)),
    *_targets("cuda", LINEAR, "ms", dict.fromkeys(SIX, 1.0), kind="grid"),
    *_targets("cuda", ("avgcnn", 50, 800), "padding", {"fedavg": 10}, "epoch", "ragged"),
    *_targets("cuda", ("avgcnn", 50, 800), "ms", {"fedavg": 200}, "epoch", "ragged"),
    *_targets("cuda", ("lenet5", 50, 800), "bare", {"fedavg": 40}, "epoch"),
    *_targets("cuda", ("lenet5", 50, 800), "naive", {"fedavg": 60}, "epoch"),
    *_targets("cuda", ("avgcnn", 50, 800), "bare", {"fedavg": 15}, "epoch"),
    *_targets("cuda", ("avgcnn", 50, 800), "naive", {"fedavg": 28}, "epoch"),
    *_targets("cuda", MOBILE, "bare", _four(45, 60, 45, 100)),
)


def verdicts(result: BenchResult, targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """Of all targets whose case was measured."""
    device = result.facts["device_type"]
    found = []
    for target in targets:
        for row in result.rows:
            value = _value(target.quantity, row, result) if target.applies(row, device) else None
            if value is not None:
                found.append(Verdict(target, value))
    return found


def _value(quantity: Quantity, row: BenchRow, result: BenchResult) -> float | None:
    if quantity == "ms":
        return 1000 * row.seconds
    if quantity == "padding":
        return None if row.padding is None else 100 * row.padding
    if quantity == "gigabytes":
        peak = row.timings[OURS].process_bytes
        return None if peak is None else peak / 1e9
    if quantity == "clients":
        return cost_of_many(row, result)
    ratio = row.against(quantity)
    if ratio is None:
        return None
    return 1 / ratio.median if quantity == "central" else ratio.median


def cost_of_many(row: BenchRow, result: BenchResult) -> float | None:
    """Time with 1000 clients over that with 50, each with as many samples."""
    case = row.case
    few = [
        other for other in result.rows
        if other.case.clients == FEW
        and (other.case.kind, other.case.model, other.case.samples, other.case.method,
             other.case.local) == (case.kind, case.model, case.samples, case.method, case.local)
    ]  # fmt: skip
    return row.seconds / few[0].seconds if few and case.clients == MANY else None
