"""`Run`: everything that is fixed during training, and how work is split to fit memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from fairvar.common.process import peak_bytes
from fairvar.common.tree import Tree, size
from fairvar.data.federation import Federation
from fairvar.engine.batches import Cohort, Participation, Schedule
from fairvar.engine.optimiser import PLAIN, ServerOptimiser
from fairvar.engine.server import Aggregator
from fairvar.engine.settings import CONSTANT, LrSchedule
from fairvar.engine.task import Task
from fairvar.methods.base import Method
from fairvar.models.norm import twice_differentiable

# Clients are vectorised in whole tiles. For narrower calls torch chooses other kernels on the CPU,
# and the last bits of float32 results would depend on the chunks (measured).
TILE = 8
MOST_SHAPES = 8  # cuDNN tries its kernels for up to this many shapes


@dataclass(frozen=True)
class Run:
    task: Task
    federation: Federation  # on the run's device, in its dtype
    method: Method
    schedule: Schedule
    lr: float | Tensor  # a tensor where a captured round reads it from the device
    lr_schedule: LrSchedule
    rounds: int  # in all; the schedule needs them
    weight_decay: float
    momentum: float
    clip_norm: float | None
    chunk: int  # clients per vectorised call, a multiple of TILE
    piece: int  # samples per pooled call
    graphs_fit: bool  # whether the autograd graphs of all pieces of a round fit in memory
    block: int  # samples per block of the blocked path
    participation: Participation
    precision: str  # of products inside the model
    share: Float64[Tensor, " m"]  # of all clients, or of those in `drawn`
    ids: Int64[Tensor, " m"]
    optimiser: ServerOptimiser = PLAIN  # of the server
    compiles: str = ""  # the form whose steps are compiled, such as "vmapped"
    kind: object = None  # equal for runs whose rounds consist of the same operations
    drawn: Cohort | None = None  # the participants of a round; None: all clients

    @property
    def clients(self) -> int:
        """The number of clients of the federation."""
        return self.federation.clients

    @property
    def samples(self) -> dict[str, Tensor]:
        """Number of labels of each client, by split: of its samples, or of positions in
        sequences."""
        return {name: split.answers.cpu() for name, split in self.federation.splits.items()}

    @property
    def cohort(self) -> Cohort:
        return self.schedule.everyone if self.drawn is None else self.drawn

    @cached_property
    def personal(self) -> Run:
        """The run that trains the personal models."""
        work, schedule = self.method.personal, self.schedule
        assert work is not None
        if work.steps is not None:
            schedule = replace(schedule, steps=[work.steps] * self.clients)
        lr = self.lr if work.lr is None else work.lr
        return replace(self, method=work.method, lr=lr, schedule=schedule)

    def lr_of(self, t: int) -> float | Tensor:
        """The learning rate of round t."""
        if self.lr_schedule == CONSTANT:
            return self.lr
        return self.lr * self.lr_schedule.factor(t, self.rounds)

    def of_round(self, t: int) -> Run:
        """The same run with the learning rate and the clients of round t only: `share`, `ids` and
        `cohort` are theirs."""
        if self.lr_schedule != CONSTANT:
            return replace(self, lr=self.lr_of(t), lr_schedule=CONSTANT).of_round(t)
        who = self.participation
        if who.everyone:
            return self
        asked = who.of_round(t) if who.live is None else who.live
        known = asked.tolist() if who.live is None else None
        cohort = Cohort(self.schedule, asked.to(self.device), known)
        share = self.method.plain_weights(cohort.counts)
        return replace(self, share=share, ids=cohort.ids, drawn=cohort)

    def server(self, t: int) -> Aggregator:
        """For the clients of this round (`of_round`), with the method as it acts in round t."""
        return Aggregator(
            self.method.at_round(t),
            self.share,
            self.ids,
            self.clients,
            everyone=self.drawn is None,
        )

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.task.params.values())).dtype

    @property
    def device(self) -> torch.device:
        return self.federation.train.device

    @property
    def few_shapes(self) -> bool:
        """Whether cuDNN may benchmark its kernels: not with ragged clients, where every step has
        another shape (73 steps took 50 s on an H200)."""
        return self.shapes_stay and len(set(self.schedule.steps)) <= MOST_SHAPES

    @property
    def shapes_stay(self) -> bool:
        """Shapes do not depend on the sampled clients."""
        alike = self.schedule.even and len(set(self.schedule.steps)) == 1
        return self.participation.everyone or alike

    @property
    def in_turn(self) -> bool:
        """Whether clients with parameters of their own are trained one after another."""
        return self.task.in_turn and self.compiles != "vmapped"

    def kernels(self) -> AbstractContextManager[None]:
        """Context for passes that are differentiated twice."""
        twice = self.method.uses_curvature
        return twice_differentiable(self.task.original) if twice else nullcontext()

    @property
    def blocks_at_once(self) -> int | None:
        """Limited on a CPU, as for pooled pieces: more blocks than fit its caches are slower."""
        return None if self.device.type == "cuda" else whole_tiles(self.piece // self.block)

    def chunks(self) -> list[tuple[int, int]]:
        """Ranges of `cohort.order` of whole tiles; the last also has the remainder."""
        present = len(self.ids)
        cuts = list(range(0, present, self.chunk))
        if len(cuts) > 1 and present - cuts[-1] < TILE:
            cuts.pop()
        return list(zip(cuts, [*cuts[1:], present], strict=True))


@contextmanager
def arithmetic(precision: str, device: torch.device, tries: bool = True) -> Iterator[None]:
    """Set the precision of a GPU's products. (By default torch rounds the inputs of convolutions to
    TF32.) `tries`: let cuDNN benchmark its kernels, which pays after a few rounds."""
    if device.type != "cuda":
        yield
        return
    fast = precision != "full"
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = fast
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=tries, allow_tf32=fast):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def whole_tiles(clients: int) -> int:
    return max(TILE, -(-clients // TILE) * TILE)


def pooled_piece(task: Task, x: Tensor) -> int:
    """Samples per pooled call: on a CPU as many as fit its caches (measured: 1.4 to 2 times faster
    than all at once), on a GPU as many as fit its memory. The number for CPUs is fixed, because
    torch sums over the batch, so the last bits depend on it."""
    budget = _graph_budget(x) if x.is_cuda else 24 << 20
    return max(32, budget // (task.activations * _itemsize(task.params)))


def graphs_fit(task: Task, x: Tensor, samples: int) -> bool:
    """Whether the graphs of a pass over so many samples may be kept at once."""
    return 3 * samples * task.activations * _itemsize(task.params) <= _graph_budget(x)


def _graph_budget(x: Tensor) -> int:
    if x.is_cuda:
        return int(torch.cuda.get_device_properties(x.device).total_memory) // 4
    return 2 << 30


def block_width(task: Task, lengths: list[int]) -> int:
    """Samples per block: the power of two that costs least in padding and block gradients.

    `lengths` are the clients' batch sizes. Batch norm needs a client's samples in one block.
    """
    largest = max(lengths)
    if task.batch_norm:
        return largest
    per_sample, per_block = task.activations, size(task.params)
    widths = [w for w in (4, 8, 16, 32, 64, 128) if w < largest] + [largest]

    def cost(width: int) -> int:
        blocks = sum(-(-length // width) for length in lengths)
        return blocks * (width * per_sample + per_block)

    return min(widths, key=cost)


def fits_blocked(task: Task, x: Tensor, lengths: list[int], width: int) -> bool:
    """Whether all block gradients fit in memory. On a CPU the limit is fixed, because the last bits
    depend on the path."""
    blocks = sum(-(-length // width) for length in lengths)
    activations = 6 * blocks * width * task.activations
    floats = 3 * (blocks + len(lengths)) * size(task.params) + activations
    return floats * _itemsize(task.params) <= 2 * _graph_budget(x)


def chunk_for_memory(task: Task, x: Tensor, width: int, curvature: bool) -> int:
    """Clients per vectorised call that fit a share of the free memory (results do not change). If
    clients train in turn, few models at a time, so that memory is reused."""
    if task.in_turn:
        return whole_tiles(torch.get_num_threads())
    copies, passes = (8, 6) if curvature else (5, 3)  # of the parameters; of the activations
    floats = copies * size(task.params) + passes * width * task.activations
    return whole_tiles(
        int(_memory_budget(x.device) // (floats * _itemsize(task.params))) - TILE + 1
    )


def peak_megabytes(device: torch.device) -> int | None:
    """Peak memory of this process, on the GPU if the run uses one."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_reserved(device) / 1e6)
    peak = peak_bytes()
    return None if peak is None else round(peak / 1e6)


def _itemsize(params: Tree) -> int:
    return next(iter(params.values())).element_size()


def _memory_budget(device: torch.device) -> float:
    if device.type == "cuda":
        return 0.5 * torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min(0.25 * free, 3 << 30)
