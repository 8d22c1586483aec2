"""What is measured: models, sizes, methods and local work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch

from fairvar.common.validation import Checked, Count, Positive
from fairvar.data.federation import Federation
from fairvar.data.partition import Dirichlet
from fairvar.errors import BadInput, unknown
from fairvar.methods import AFL, QFFL, AAggFF, FairGrad, FairLoss, FedAvg, Method
from fairvar.models import MODELS

Local = Literal["step", "epoch"]
Kind = Literal["rounds", "grid", "ragged", "memory", "epochs", "flower"]
Precision = Literal["full", "tf32", "bfloat16"]  # as in the engine's settings
EPOCH_STEPS = 4  # a local epoch is so many steps over the same samples, unless a case says more
CLIENT_LOOPS = ("naive", "bare", "lean")
RIVALS = (*CLIENT_LOOPS, "central")
CONFIGURATIONS, SEEDS = 55, 5  # of a grid
ALPHA = 0.05  # of the Dirichlet partition into ragged clients

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
SIX = ("fedavg", "fairloss*", "fairloss", "qffl", "fairgrad", "fairgrad*")
SHAPES: dict[str, tuple[int, ...]] = {"multinomial": (1, 28, 28), "2nn": (1, 28, 28)}
IMAGE = (3, 32, 32)
CLASSES = 10


class BenchSettings(Checked, frozen=True, kw_only=True):
    """`quick` None: on the CPU only. The others narrow the table of cases or change its sizes.

    `precision` None: "full" on the CPU, "tf32" on a GPU. `seconds` bounds the turns of a case.
    """

    __where__: ClassVar[str | None] = "bench"

    quick: bool | None = None
    case: Kind | None = None
    model: str | None = None
    method: str | None = None
    clients: Count | None = None
    batch: Count | None = None
    local: Local | None = None
    device: str = "cpu"
    precision: Precision | None = None
    repeat: Count = 7
    seconds: Positive | None = None
    threads: Count = 1

    def check(self) -> None:
        if self.model is not None and self.model not in MODELS:
            raise unknown("model", self.model, MODELS)
        if self.model == "linear":
            raise BadInput('bench.model = "linear" has no classes; take multinomial')
        if self.method is not None and self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        if self.case == "flower" and (self.device != "cpu" or self.local == "epoch"):
            raise BadInput('bench.case = "flower" is measured on the CPU, with one local step')
        if self.device == "cpu" and self.precision == "tf32":
            raise BadInput('bench.precision = "tf32" is a format of NVIDIA GPUs; leave it out')

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def is_quick(self) -> bool:
        return self.on_cpu if self.quick is None else self.quick

    @property
    def numbers(self) -> Precision:
        """The precision that all contenders use."""
        return self.precision or ("full" if self.on_cpu else "tf32")

    @property
    def limit(self) -> float:
        """Seconds for the turns of one case."""
        return self.seconds or (3.0 if self.is_quick else 20.0 if self.on_cpu else 0.5)


@dataclass(frozen=True)
class Case:
    """A round of `method`: every client has `samples`, used in one step or in one epoch.

    Kinds: "rounds"; a "grid" of runs that differ in numbers and seeds; "ragged" clients, which have
    `samples` on average; "memory", one round for its peak alone; "epochs" of a CNN on a CPU, where
    vectorising the clients gains least; and "flower", rounds beside those of Flower's simulation
    runtime.
    """

    model: str
    clients: int
    samples: int
    method: str
    local: Local = "step"
    step: int | None = None  # samples per step; None: all of them, in an epoch a quarter
    rivals: tuple[str, ...] = RIVALS  # those that take part
    kind: Kind = "rounds"

    @property
    def batch(self) -> int | None:
        """Samples per local step; None: all of them. Batch norm needs two."""
        if self.local == "step" or self.step is not None:
            return self.step
        return max(2, -(-self.samples // EPOCH_STEPS))

    @property
    def shape(self) -> tuple[int, ...]:
        return SHAPES.get(self.model, IMAGE)

    @property
    def runs(self) -> int:
        return CONFIGURATIONS * SEEDS if self.kind == "grid" else 1

    @property
    def used(self) -> int:
        """Samples that a round uses."""
        each = (
            self.samples if self.local == "epoch" else min(self.step or self.samples, self.samples)
        )
        return self.runs * self.clients * each

    @property
    def group(self) -> str:
        some = "" if self.batch is None else f" on {self.batch} of them"
        steps = f"one step{some}" if self.local == "step" else f"one epoch in steps of {self.batch}"
        clients = f"{self.clients} clients × {self.samples} samples"
        if self.kind == "grid":
            clients = f"{CONFIGURATIONS} configurations × {SEEDS} seeds, {clients}"
        if self.kind == "ragged":
            total = self.clients * self.samples
            clients = f"{self.clients} clients, {total} samples by Dirichlet({ALPHA})"
        return f"{self.model}, {clients}, {steps}"

    def federation(self) -> Federation:
        """Random samples: no claim about accuracy is made."""
        generator = torch.Generator().manual_seed(0)
        pairs = [
            (torch.randn(size, *self.shape, generator=generator),
             torch.randint(0, CLASSES, (size,), generator=generator))
            for size in self._sizes()
        ]  # fmt: skip
        return Federation.from_arrays(pairs, classes=CLASSES)

    def _sizes(self) -> list[int]:
        """Equal clients, or as uneven as the partition of random labels makes them."""
        if self.kind != "ragged":
            return [self.samples] * self.clients
        draw = np.random.default_rng(0)
        labels = draw.integers(0, CLASSES, self.clients * self.samples)
        return Dirichlet(ALPHA).assign(labels, self.clients, draw).sizes.tolist()


@dataclass(frozen=True)
class Group:
    model: str
    clients: int
    samples: int
    methods: tuple[str, ...]
    locals: tuple[Local, ...] = ("step",)
    step: int | None = None
    rivals: tuple[str, ...] = RIVALS
    kind: Kind = "rounds"


BOTH: tuple[Local, ...] = ("step", "epoch")
EPOCH: tuple[Local, ...] = ("epoch",)
NO_NAIVE = ("bare", "lean", "central")
GRID = Group("multinomial", 50, 16, SIX, rivals=("bare", "gemm"), kind="grid")
RAGGED = Group("avgcnn", 50, 800, ("fedavg",), EPOCH, 64, ("bare",), "ragged")
MEMORY = Group("avgcnn", 1000, 50, ("fedavg",), EPOCH, 10, (), "memory")
EPOCHS = Group(
    "avgcnn", 50, 64, ("fedavg", "qffl", "fairloss*", "fairgrad"), EPOCH, 32, ("lean",), "epochs"
)
BESIDE_FLOWER = ("flower", "reference", "bare")
FLOWER = (
    Group("multinomial", 50, 16, ("fedavg", "fairgrad*"), rivals=BESIDE_FLOWER, kind="flower"),
    Group("avgcnn", 50, 32, ("fedavg",), rivals=BESIDE_FLOWER, kind="flower"),
)
# Clients with more samples than they use: nothing about a batch can be known before the round.
DRAWN = Group("multinomial", 50, 800, FOUR, step=16, rivals=NO_NAIVE)
SIZES = tuple(Group("multinomial", n, 16, FOUR, rivals=NO_NAIVE) for n in (10, 200, 1000))

QUICK = (
    Group("multinomial", 50, 16, ALL),
    Group("multinomial", 50, 16, FOUR, EPOCH),
    DRAWN,
    Group("lenet5", 10, 32, FOUR),
    Group("avgcnn", 10, 32, ("fedavg", "fairloss*")),
    Group("mobilenet_v2", 2, 8, ("fedavg",)),
    *SIZES,
    replace(GRID, methods=("fedavg", "fairloss*", "fairgrad*")),
)
ON_CPU = (
    Group("multinomial", 50, 16, ALL, BOTH),
    DRAWN,
    Group("lenet5", 50, 32, ALL, BOTH),
    Group("avgcnn", 50, 32, ALL, BOTH),
    *(replace(size, methods=ALL) for size in SIZES),
    Group("mobilenet_v2", 4, 8, ALL),
    EPOCHS,
    GRID,
    MEMORY,
)
# The GPU's table is to end within six minutes, and some of its loops take minutes: those come last,
# and the naive loop, which FL-bench has for FedAvg, runs there for few others.
PLAIN = ("bare", "central")
WITH_NAIVE = ("naive", *PLAIN)
ON_GPU = (
    Group("multinomial", 50, 16, ALL),
    DRAWN,
    *(
        Group(model, 50, 32, methods, rivals=rivals)
        for model in ("lenet5", "avgcnn")
        for methods, rivals in (
            (("fedavg", "fairgrad*"), WITH_NAIVE),
            (tuple(m for m in ALL if m not in ("fedavg", "fairgrad*")), PLAIN),
        )
    ),
    GRID,
    RAGGED,
    *(replace(size, rivals=PLAIN) for size in SIZES),
    *(
        Group(model, 50, 800, methods, EPOCH, 32, rivals)
        for model in ("lenet5", "avgcnn")
        for methods, rivals in ((("fedavg",), WITH_NAIVE), (("fairloss*", "fairgrad*"), PLAIN))
    ),
    Group("mobilenet_v2", 100, 32, FOUR, rivals=PLAIN),
)


def cases(settings: BenchSettings) -> list[Case]:
    """The table, with what was asked for put in; the same case is never measured twice."""
    found = [
        Case(
            group.model,
            settings.clients or group.clients,
            settings.batch or group.samples,
            method,
            local,
            group.step,
            group.rivals,
            group.kind,
        )
        for group in _groups(settings)
        for local in ((settings.local,) if settings.local else group.locals)
        for method in ((settings.method,) if settings.method else group.methods)
    ]
    first: dict[tuple[object, ...], Case] = {}
    for case in found:
        key = (case.kind, case.model, case.clients, case.samples, case.method, case.local)
        first.setdefault(key, case)
    return list(first.values())


def _groups(settings: BenchSettings) -> tuple[Group, ...]:
    if settings.case is not None and settings.case != "rounds":
        return tuple(g for g in (GRID, RAGGED, MEMORY, EPOCHS, *FLOWER) if g.kind == settings.case)
    table = QUICK if settings.is_quick else ON_CPU if settings.on_cpu else ON_GPU
    sized = settings.clients or settings.batch or settings.local
    if settings.case == "rounds" or sized:
        table = tuple(g for g in table if g.kind == "rounds")
    if settings.local is not None:  # a step of its own belongs to the group's own kind of work
        table = tuple(g for g in table if g.step is None or settings.local in g.locals)
    if settings.model is None:
        return table
    known = tuple(g for g in table if g.model == settings.model)
    return known or (Group(settings.model, 10, 32, ALL),)
