"""The linear kernel: affine models in the dual (`dual.py`), one run or many at once, no autograd.

    logits       Z = X̃ x,   D = ∂loss/∂Z · 1/m_i,   ∇f_i = X̃_iᵀ D_i,   g = X̃ᵀ (r_i D),   U = X̃ g
    direction    d_i = X̃_iᵀ B_i + s_i g,   B_i = own_i D_i + γ J_i (K_i D_i − U_i)
    its length   ‖d_i‖² = ⟨B_i, K_i B_i⟩ + 2 s_i ⟨B_i, U_i⟩ + s_i² ‖g‖²
    local steps  x_i = x − η (X̃_iᵀ A_i + c_i g): each step adds its B_i to A_i and its s_i to c_i;
                 x_i − x lies in this span, so a proximal term and momentum do not leave it
    server       x ← x − η X̃ᵀ (w_i A_i) − η (Σ w_i c_i) g

J is the second derivative of the loss in the logits. Two large products make a FedAvg round, four a
FairGrad* round, whatever the number of local steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fairvar.common.tree import Tree, one_input, squared_norm, tree_map
from fairvar.engine.batches import RoundBatches
from fairvar.engine.cuda_graphs import live_run
from fairvar.engine.evaluate import Scores, Seen, needs_outputs
from fairvar.engine.history import Key
from fairvar.engine.kernels import Splits
from fairvar.engine.kernels.linear.dual import (
    Columns,
    Dual,
    answer,
    by_client,
    dual_of,
    gram,
    sample_losses,
)
from fairvar.engine.kernels.linear.steps import (
    Averages,
    Slopes,
    StepPlan,
    Walk,
    direction,
    per_run,
    squared_lengths,
)
from fairvar.engine.kernels.network import Network
from fairvar.engine.run import Run
from fairvar.engine.server import Aggregator, PerRun
from fairvar.engine.settings import CONSTANT
from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Method


@dataclass(frozen=True)
class Work:
    """The clients after their local steps: x − x_i = η (X̃_iᵀ along_i + shared_i g)."""

    batch: Columns
    first: Float[Tensor, "runs outputs P"]  # ∇f_i(x^t) = X̃_iᵀ first_i
    along: Float[Tensor, "runs outputs P"]
    shared: Float64[Tensor, "runs n"] | None
    own: Float64[Tensor, "runs n"] | None  # of the first step; None: one
    g: Tree | None  # None: not computed, or not used
    u: Float[Tensor, "runs outputs P"] | None  # X̃ g
    loss: Float64[Tensor, "runs n"]
    lr: PerRun  # η of this round

    @property
    def squared_norms(self) -> Float64[Tensor, "runs n"]:
        """‖x − x_i‖² / η²"""
        squared_g = None if self.g is None else squared_norms(self.g)
        layout, grams = self.batch.layout, self.batch.grams
        return squared_lengths(layout, grams, self.along, self.shared, self.u, squared_g)


@dataclass(frozen=True)
class Linear:
    """The kernel of runs that draw the same batches and differ in numbers only."""

    run: Run  # of the first; all have its federation, its schedule and its kind of method
    methods: Sequence[Method]
    rates: Sequence[float]
    lr: PerRun
    live_numbers: dict[str, Tensor] | None = None  # a captured round reads the methods' from here

    @staticmethod
    def build(run: Run, methods: Sequence[Method], rates: Sequence[float]) -> Linear:
        lr = torch.tensor(rates, dtype=torch.float64, device=run.device)[:, None]
        return Linear(run, methods, rates, lr if len(rates) > 1 else rates[0])

    @cached_property
    def dual(self) -> Dual:
        return dual_of(self.run.task, self.run.federation)

    @cached_property
    def plan(self) -> StepPlan:
        return StepPlan(self.run.schedule, self.dual.groups, self.dual.train.layout)

    def round(self, state: State, t: int, splits: Splits | None) -> tuple[Outcome, Seen | None]:
        outcome, work = self.compute(state, t)
        return outcome, None if splits is None else self.see(state, t, work, splits)

    def scores(self, state: State, splits: Splits) -> dict[Key, Scores]:
        found = {}
        for name in splits:
            split = self.dual.split(name)
            logits = split.logits(self.dual.model, state.params)
            found[name, "global"] = _scores(self, name, logits)
        return found

    def compute(self, state: State, t: int) -> tuple[Outcome, Work]:
        server, batches = self._server(t), self.run.schedule.round(t)
        local = _one_step if self.run.schedule.one_step else _local_steps
        work = local(self, server, state, batches, self.lr_of(t))
        return _finish(self, server, state, work), work

    def see(self, before: State, t: int, work: Work, splits: Splits) -> Seen:
        if work.g is not None and not self.methods[0].at_round(t).probes:
            work = replace(work, g=before.mean_gradient)  # a captured round overwrites its own
        if len(self.methods) > 1 or grams_pay(self.run):
            return _see(self, before, work, splits)
        return Network(self.run, "vmapped").see(before, t, [], splits)

    def lr_of(self, t: int) -> PerRun:
        """The learning rates of round t."""
        scheduled = self.run.lr_schedule != CONSTANT
        return self.lr * self.run.lr_schedule.factor(t, self.run.rounds) if scheduled else self.lr

    def mean_gradient(self, batch: Columns, first: Float[Tensor, "runs outputs P"]) -> Tree:
        """Σ_i r_i ∇f_i"""
        share = batch.layout.spread(self.run.share[None])
        return batch.gradient(self.dual.model, first * share)

    def _server(self, t: int) -> Aggregator:
        """The methods as they act in round t."""
        acting, run = [method.at_round(t) for method in self.methods], self.run
        numbers = (self.live_numbers or self._numbers(acting)) if len(acting) > 1 else {}
        runs = len(acting)
        return Aggregator(acting[0], run.share, run.ids, run.clients, runs, numbers, everyone=True)

    def _numbers(self, acting: list[Method]) -> dict[str, Tensor]:
        """The methods' numbers, on the device."""
        table, kind = [method.numbers for method in acting], torch.float64
        return {name: torch.tensor([row[name] for row in table], dtype=kind, device=self.run.device)
                for name in table[0]}  # fmt: skip

    # -- recorded rounds ---------------------------------------------------------------------------
    @property
    def shows(self) -> bool:
        return True

    def numbers(self) -> dict[str, list[float]]:
        names = self.methods[0].numbers
        return {"lr": list(self.rates), **{k: [m.numbers[k] for m in self.methods] for k in names}}

    def live(self, names: Tensor, numbers: dict[str, Tensor]) -> Linear:
        if len(self.methods) == 1:
            run = live_run(self.run, names, {k: v[0] for k, v in numbers.items()})
            return Linear(run, [run.method], self.rates, run.lr)
        own = {name: value for name, value in numbers.items() if name != "lr"}
        run = live_run(self.run, names, {})
        return Linear(run, self.methods, self.rates, numbers["lr"][:, None], own)


def _one_step(
    kernel: Linear, server: Aggregator, state: State, batches: RoundBatches, lr: Tensor | float
) -> Work:
    run, method, batch = kernel.run, server.method, _drawn(kernel, batches)
    layout = batch.layout
    found = answer(batch.logits(kernel.dual.model, state.x), batch.target)
    first, loss = found.slope * layout.share, layout.means(found.loss)
    if method.loss_data == "full" and not run.schedule.full_batch:
        train = kernel.dual.train
        logits = train.logits(kernel.dual.model, state.x)
        loss = train.layout.means(sample_losses(logits, train.target))
    products = method.uses_curvature or method.uses_norms
    products |= run.clip_norm is not None or method.penalty_bound is not None
    sent = _receive(kernel, server, state, batch, first, loss, products)
    slopes = Slopes(layout, first, found.p, sent.u, lambda: batch.grams)
    made = direction(server, slopes, loss, sent, run.clip_norm)
    return Work(batch, first, made.along, made.shared, made.own, sent.g, sent.u, loss, lr)


def _receive(
    kernel: Linear,
    server: Aggregator,
    state: State,
    batch: Columns,
    first: Float[Tensor, "runs outputs P"],
    loss: Float64[Tensor, "runs n"],
    products: bool,
) -> Averages:
    """What the clients receive. An exact method's g is a weighted sum of client gradients; unless
    products with g are needed, it is not computed but added to the server's sum (`_total`)."""
    method, probes = server.method, server.method.probes
    mean_loss = loss @ kernel.run.share if probes else state.mean_loss
    g, has_g = state.mean_gradient, probes or state.mean_gradient is not None
    if server.plain and not method.uses_curvature:
        return Averages(mean_loss, has_g)
    if probes:
        g = kernel.mean_gradient(batch, first) if products else None
    if g is None or not products:
        return Averages(mean_loss, has_g, g)
    measured = kernel.run.clip_norm is not None or method.penalty_bound is not None
    squared_g = squared_norms(g) if measured else None
    return Averages(mean_loss, has_g, g, batch.logits(kernel.dual.model, g), squared_g)


def _drawn(kernel: Linear, batches: RoundBatches) -> Columns:
    """This round's samples of a single step."""
    if kernel.run.schedule.full_batch:
        return kernel.dual.train
    layout, place = kernel.plan.first
    rows = batches.shuffled[0].index_select(0, place)
    return kernel.dual.batch(kernel.run.federation.train, layout, rows)


def _local_steps(
    kernel: Linear, server: Aggregator, state: State, batches: RoundBatches, lr: Tensor | float
) -> Work:
    run, method, batch, plan = kernel.run, server.method, kernel.dual.train, kernel.plan
    z = batch.logits(kernel.dual.model, state.x)
    found = answer(z, batch.target)
    share = plan.first_share(batches)
    first, full = found.slope * share, method.loss_data == "full"
    loss = batch.layout.means(found.loss) if full else batch.layout.sums(found.loss * share)
    sent = _receive(kernel, server, state, batch, first, loss, products=True)
    walk, fixed, own = (
        Walk(batch, z, sent.u, torch.zeros_like(z), None, run.momentum),
        loss if full else None,
        None,
    )
    for number, step in enumerate(plan.steps):
        columns = plan.columns(step, batches)
        made = walk.take(step, columns, server, sent, fixed, lr, run.clip_norm)
        if number == 0 and made.own is not None:
            own = torch.zeros_like(loss).index_copy_(1, step.ids, made.own)
    return Work(batch, first, walk.along, walk.shared, own, sent.g, sent.u, loss, lr)


def _finish(kernel: Linear, server: Aggregator, state: State, work: Work) -> Outcome:
    """x ← x − Σ_i w_i (x − x_i) / normaliser"""
    weights, memory = server.weigh(state.memory, work.loss)
    reports, norms = kernel.run.method.reports_gradient, server.method.uses_norms
    return server.finish(
        lambda divided, _: _total(kernel, work, divided),
        work.loss,
        weights,
        memory,
        lr=work.lr,
        buffers=state.buffers,
        own=work.own,
        mean_gradient=kernel.mean_gradient(work.batch, work.first) if reports else None,
        squared_norms=work.lr**2 * work.squared_norms if norms else None,
    )


def _total(kernel: Linear, work: Work, weights: Float64[Tensor, "runs n"]) -> Tree:
    """Σ_i w_i (x − x_i)"""
    layout, scaled = work.batch.layout, weights * work.lr
    slopes, spill = work.along * layout.spread(scaled), None
    if work.shared is not None:  # how much of g the weighted sum of directions contains
        spill = (scaled * work.shared).sum(1, keepdim=True)
        if work.g is None:
            slopes = torch.addcmul(slopes, work.first, layout.spread(spill * kernel.run.share))
    update = work.batch.gradient(kernel.dual.model, slopes)
    if spill is None or work.g is None:
        return update
    return tree_map(lambda x, g: _add_scaled(x, g, spill), update, work.g)


def _add_scaled(x: Tensor, g: Tensor, factor: Float64[Tensor, "runs 1"]) -> Tensor:
    """x + factor · g, run by run."""
    return x + g * factor.to(g.dtype).reshape(-1, *[1] * (g.dim() - 1))


def squared_norms(tree: Tree) -> Float64[Tensor, "runs 1"]:
    return squared_norm(tree, batched=True).double()[:, None]


def _see(kernel: Linear, before: State, work: Work, splits: Splits) -> Seen:
    """Observations without forming local models: on samples X̃_e the logits of a local model are
    X̃_e x − η (C_i A_i + c_i X̃_e g), with C_i = X̃_e X̃_iᵀ."""
    batch, model = work.batch, kernel.dual.model
    mean = kernel.mean_gradient(batch, work.first)
    if work.shared is not None:
        g = mean if work.g is None else work.g  # an exact method's g is this round's mean
        work = replace(work, g=g, u=batch.logits(model, g))
    lengths = squared_lengths(batch.layout, batch.grams, work.first, None, None, None)
    return Seen(
        update_norm=work.lr * work.squared_norms.sqrt(),
        gradient_variance=lengths @ kernel.run.share - squared_norms(mean)[:, 0],
        local={name: _local_scores(kernel, before, work, name) for name in splits},
    )


def _local_scores(kernel: Linear, before: State, work: Work, name: str) -> Scores:
    dual, parts = kernel.dual, []
    split = dual.split(name)
    for number, tile in enumerate(work.batch.layout.tiles):
        fixed = work.batch is dual.train
        matrix = dual.cross(name)[number] if fixed else gram(work.batch, split, number)
        product = by_client(work.along, tile) @ matrix
        parts.append(product.transpose(0, 1).reshape(*work.along.shape[:2], -1))
    moved = torch.cat(parts, -1)
    if work.shared is not None and work.g is not None:
        along_g = split.logits(dual.model, work.g)
        moved = torch.addcmul(moved, along_g, split.layout.spread(work.shared))
    logits = split.logits(dual.model, before.x) - per_run(work.lr, moved.dtype) * moved
    return _scores(kernel, name, logits)


def _scores(kernel: Linear, name: str, logits: Float[Tensor, "runs outputs P"]) -> Scores:
    split, metric = kernel.dual.split(name), kernel.run.task.metric
    loss = split.layout.means(sample_losses(logits, split.target))
    made = _by_function(kernel, name, logits) if needs_outputs(metric) else None
    if split.target.label is None:
        return Scores.build(metric, loss, torch.full_like(loss, torch.nan), made)
    # The index of the first maximum, as argmax, which is five times slower over this axis.
    right = (logits.max(1).indices == split.target.label).to(logits.dtype)
    return Scores.build(metric, loss, split.layout.means(right), made)


def _by_function(
    kernel: Linear, name: str, logits: Float[Tensor, "runs outputs P"]
) -> Float64[Tensor, "runs n"]:
    """Scores by the metric's function, client by client and run by run."""
    data, layout = kernel.run.federation.splits[name], kernel.dual.split(name).layout
    found = torch.full((len(logits), len(data.counts)), torch.nan, dtype=torch.float64)
    for tile in layout.tiles:
        for place, client in enumerate(tile.ids.tolist()):
            start, count = tile.start + place * tile.width, int(data.counts[client])
            for r, outputs in enumerate(logits[..., start : start + count] if count else ()):
                found[r, client] = kernel.run.task.metric(outputs.T, data.targets(client))
    return found.to(logits.device)


def grams_pay(run: Run, runs: int = 1) -> bool:
    """Whether Gram matrices cost less than what they save, and fit: clients must be small.

    Fixed ones cost Σ m_i² per product, against Σ m_i d. Those of a single step on drawn samples are
    made anew in every round, at the price of Σ m_i² d, but serve all runs and all outputs."""
    features = one_input(run.federation.train.x)[0].numel()
    outputs = len(next(iter(run.task.params.values())))
    drawn = run.schedule.one_step and not run.schedule.full_batch
    lengths = run.schedule.lengths if drawn else run.federation.sizes.tolist()
    squares, samples = sum(m * m for m in lengths), sum(lengths)
    limit = 8 * runs * outputs if drawn else 2 * max(features, 64)
    floats = (2 if run.device.type == "cuda" else 0.125) * 2**30
    return squares <= limit * samples and squares <= floats
