"""What is measured: models, sizes, methods and local work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fairvar.checked import Checked, Count
from fairvar.errors import BadInput, unknown
from fairvar.federation import Federation
from fairvar.methods import AFL, QFFL, AAggFF, FairGrad, FairLoss, FedAvg, Method
from fairvar.models import MODELS

Local = Literal["step", "epoch"]
EPOCH_STEPS = 4  # a local epoch is so many steps over the same samples

# The numbers of the methods hardly matter for time. Losses come from the batch, as in the boxes of
# the papers: a second pass over all data would be the same work for everybody.
METHODS: dict[str, Method] = {
    "fedavg": FedAvg(),
    "fairloss*": FairLoss(0.1, exact=True),
    "fairloss": FairLoss(0.1),
    "qffl": QFFL(1.0, losses="batch"),
    "fairgrad": FairGrad(0.001),
    "fairgrad*": FairGrad(0.001, exact=True),
    "afl": AFL(losses="batch"),
    "aaggff": AAggFF(losses="batch"),
}
ALL = tuple(METHODS)
FOUR = ("fedavg", "fairloss*", "qffl", "fairgrad*")
SHAPES: dict[str, tuple[int, ...]] = {"multinomial": (1, 28, 28), "2nn": (1, 28, 28)}
IMAGE = (3, 32, 32)
CLASSES = 10


class BenchSettings(Checked, frozen=True, kw_only=True):
    """`quick` None: on the CPU only. The others narrow the table of cases or change its sizes."""

    __where__: ClassVar[str | None] = "bench"

    quick: bool | None = None
    model: str | None = None
    method: str | None = None
    clients: Count | None = None
    batch: Count | None = None
    local: Local | None = None
    device: str = "cpu"
    repeat: Count = 7
    threads: Count = 1

    def check(self) -> None:
        if self.model is not None and self.model not in MODELS:
            raise unknown("model", self.model, MODELS)
        if self.model == "linear":
            raise BadInput('bench.model = "linear" has no classes; take multinomial')
        if self.method is not None and self.method not in METHODS:
            raise unknown("method", self.method, METHODS)

    @property
    def is_quick(self) -> bool:
        return self.device == "cpu" if self.quick is None else self.quick


@dataclass(frozen=True)
class Case:
    """A round of `method`: every client has `samples`, used in one step or in one epoch."""

    model: str
    clients: int
    samples: int
    method: str
    local: Local = "step"
    naive: bool = True  # whether the slowest contender takes part

    @property
    def batch(self) -> int | None:
        """Samples per local step; None: all of them. Batch norm needs two."""
        return None if self.local == "step" else max(2, -(-self.samples // EPOCH_STEPS))

    @property
    def shape(self) -> tuple[int, ...]:
        return SHAPES.get(self.model, IMAGE)

    @property
    def group(self) -> str:
        steps = "one step" if self.batch is None else f"one epoch in steps of {self.batch}"
        return f"{self.model}, {self.clients} clients × {self.samples} samples, {steps}"

    def federation(self) -> Federation:
        """Equal clients with random samples: no claim about accuracy is made."""
        generator = torch.Generator().manual_seed(0)
        pairs = [
            (torch.randn(self.samples, *self.shape, generator=generator),
             torch.randint(0, CLASSES, (self.samples,), generator=generator))
            for _ in range(self.clients)
        ]  # fmt: skip
        return Federation.from_arrays(pairs, classes=CLASSES)


@dataclass(frozen=True)
class Group:
    model: str
    clients: int
    samples: int
    methods: tuple[str, ...]
    locals: tuple[Local, ...] = ("step",)
    naive: bool = True


QUICK = (
    Group("multinomial", 50, 16, ALL),
    Group("multinomial", 50, 16, FOUR, ("epoch",)),
    Group("lenet5", 10, 32, FOUR),
    Group("avgcnn", 10, 32, ("fedavg", "fairloss*")),
    Group("mobilenet_v2", 2, 8, ("fedavg",)),
    Group("multinomial", 10, 16, FOUR),
    Group("multinomial", 200, 16, FOUR, naive=False),
    Group("multinomial", 1000, 16, FOUR, naive=False),
)
BOTH: tuple[Local, ...] = ("step", "epoch")
FULL = (
    Group("multinomial", 50, 16, ALL, BOTH),
    Group("lenet5", 50, 32, ALL, BOTH),
    Group("avgcnn", 50, 32, ALL, BOTH),
    *(Group("multinomial", n, 16, ALL) for n in (10, 200, 1000)),
)
ON_CPU, ON_GPU = Group("mobilenet_v2", 4, 8, ALL), Group("mobilenet_v2", 100, 32, ALL, BOTH)


def cases(settings: BenchSettings) -> list[Case]:
    """The table, with what was asked for put in; the same case is never measured twice."""
    table: tuple[Group, ...] = QUICK
    if not settings.is_quick:
        table = (*FULL, ON_CPU if settings.device == "cpu" else ON_GPU)
    if settings.model is not None:
        known = tuple(g for g in table if g.model == settings.model)
        table = known or (Group(settings.model, 10, 32, ALL),)
    found = [
        Case(
            group.model,
            settings.clients or group.clients,
            settings.batch or group.samples,
            method,
            local,
            group.naive,
        )
        for group in table
        for local in ((settings.local,) if settings.local else group.locals)
        for method in ((settings.method,) if settings.method else group.methods)
    ]
    first: dict[tuple[object, ...], Case] = {}
    for case in found:
        key = (case.model, case.clients, case.samples, case.method, case.local)
        first.setdefault(key, case)
    return list(first.values())
