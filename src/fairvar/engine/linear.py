"""The linear path: affine models in the dual (`dual.py`), one run or many at once, no autograd.

    logits       Z = X̃ x,   D = ∂loss/∂Z · 1/m_i,   ∇f_i = X̃_iᵀ D_i,   g = X̃ᵀ (r_i D),   U = X̃ g
    direction    d_i = X̃_iᵀ B_i + s_i g,   B_i = own_i D_i + γ J_i (K_i D_i − U_i)
    its length   ‖d_i‖² = ⟨B_i, K_i B_i⟩ + 2 s_i ⟨B_i, U_i⟩ + s_i² ‖g‖²
    local steps  x_i = x − η (X̃_iᵀ A_i + c_i g): each step adds its B_i to A_i and its s_i to c_i
    server       x ← x − η X̃ᵀ (w_i A_i) − η (Σ w_i c_i) g

J is the second derivative of the loss in the logits. Two large products make a FedAvg round, four a
FairGrad* round, whatever the number of local steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fairvar.engine.batches import RoundBatches
from fairvar.engine.direction import Look, Sent, direction, squared_lengths
from fairvar.engine.dual import Batch, Dual, answer, sample_losses
from fairvar.engine.linear_steps import StepPlan, Walk
from fairvar.engine.run import Run
from fairvar.engine.server import Server
from fairvar.engine.state import Outcome, State
from fairvar.methods.base import Method
from fairvar.tree import Tree, squared_norm, tree_map


@dataclass(frozen=True)
class Work:
    """The clients after their local work: x − x_i = η (X̃_iᵀ along_i + shared_i g)."""

    batch: Batch
    first: Float[Tensor, "runs outputs P"]  # ∇f_i(x^t) = X̃_iᵀ first_i
    along: Float[Tensor, "runs outputs P"]
    shared: Float64[Tensor, "runs n"] | None
    own: Float64[Tensor, "runs n"] | None  # of the first step; None: one
    g: Tree | None  # None: unknown so far, or not used
    u: Float[Tensor, "runs outputs P"] | None  # X̃ g
    loss: Float64[Tensor, "runs n"]

    @property
    def squared_norms(self) -> Float64[Tensor, "runs n"]:
        """‖x − x_i‖² / η²"""
        squared_g = None if self.g is None else squared_norms(self.g)
        layout, grams = self.batch.layout, self.batch.grams
        return squared_lengths(layout, grams, self.along, self.shared, self.u, squared_g)


@dataclass(frozen=True)
class Group:
    """Runs that draw the same batches and differ in numbers only. A single run is a group of one.

    States and outcomes of a group are those of a run, with the run as first axis of every tensor.
    """

    run: Run  # of the first; all have its federation, its schedule and its kind of method
    methods: Sequence[Method]
    lr: Float64[Tensor, "runs 1"] | Float64[Tensor, ""] | float
    dual: Dual
    plan: StepPlan
    kept: dict[str, Any] = field(default_factory=dict)  # the numbers on the device

    @staticmethod
    def single(run: Run) -> Group:
        return Group(run, [run.method], run.lr, run.dual, run.plan)

    def server(self, t: int) -> Server:
        """The methods as they act in round t."""
        acting, run = [method.at_round(t) for method in self.methods], self.run
        numbers = self._numbers(acting) if len(acting) > 1 else None
        return Server(acting[0], numbers, run.share, run.ids)

    def _numbers(self, acting: list[Method]) -> dict[str, Tensor]:
        """Fetched again only where a round differs from the one before (after a warm start)."""
        before = self.kept.get("methods", [])
        if not before or any(a is not b for a, b in zip(acting, before, strict=True)):
            table = [method.numbers for method in acting]
            self.kept["methods"] = acting
            self.kept["numbers"] = {
                name: torch.tensor(
                    [row[name] for row in table], dtype=torch.float64, device=self.run.device
                )
                for name in table[0]
            }
        found: dict[str, Tensor] = self.kept["numbers"]
        return found

    def round(self, state: State, t: int) -> tuple[Outcome, Work]:
        server, batches = self.server(t), self.run.schedule.round(t)
        local = _one_step if self.run.schedule.one_step else _local_steps
        work = local(self, server, state, batches)
        return _finish(self, server, state, work), work

    def mean_gradient(self, batch: Batch, first: Float[Tensor, "runs outputs P"]) -> Tree:
        """Σ_i r_i ∇f_i"""
        share = batch.layout.spread(self.run.share[None])
        return batch.gradient(self.dual.model, first * share)


def _one_step(group: Group, server: Server, state: State, batches: RoundBatches) -> Work:
    run, method, batch = group.run, server.method, _drawn(group, batches)
    layout = batch.layout
    found = answer(batch.logits(group.dual.model, state.x), batch.target)
    first, loss = found.slope * layout.share, layout.means(found.loss)
    if method.loss_data == "full" and not run.schedule.full_batch:
        loss = _full_losses(group, state)
    products = method.uses_curvature or method.uses_norms or run.clip_norm is not None
    sent = _receive(group, server, state, batch, first, loss, products)
    look = Look(layout, first, found.p, sent.u, lambda: batch.grams)
    made = direction(server, look, loss, sent, run.clip_norm)
    return Work(batch, first, made.along, made.shared, made.own, sent.g, sent.u, loss)


def _receive(
    group: Group,
    server: Server,
    state: State,
    batch: Batch,
    first: Float[Tensor, "runs outputs P"],
    loss: Float64[Tensor, "runs n"],
    products: bool,
) -> Sent:
    """The averages that the clients get. An exact method's g is a sum of client gradients itself:
    without products it is not formed but joins the server's sum."""
    method, probes = server.method, server.method.probes
    mean_loss = loss @ group.run.share if probes else state.mean_loss
    g, has_g = state.mean_gradient, probes or state.mean_gradient is not None
    if server.plain and not method.uses_curvature:
        return Sent(mean_loss, has_g)
    if probes:
        g = group.mean_gradient(batch, first) if products else None
    if g is None or not products:
        return Sent(mean_loss, has_g, g)
    squared_g = None if group.run.clip_norm is None else squared_norms(g)
    return Sent(mean_loss, has_g, g, batch.logits(group.dual.model, g), squared_g)


def _drawn(group: Group, batches: RoundBatches) -> Batch:
    """This round's samples of a single step."""
    if group.run.schedule.full_batch:
        return group.dual.train
    layout, place = group.plan.first
    rows = batches.shuffled[0].index_select(0, place)
    return group.dual.batch(group.run.federation.train, layout, rows)


def _full_losses(group: Group, state: State) -> Float64[Tensor, "runs n"]:
    train = group.dual.train
    return train.layout.means(sample_losses(train.logits(group.dual.model, state.x), train.target))


def _local_steps(group: Group, server: Server, state: State, batches: RoundBatches) -> Work:
    run, method, batch, plan = group.run, server.method, group.dual.train, group.plan
    z = batch.logits(group.dual.model, state.x)
    found = answer(z, batch.target)
    share = plan.first_share(batches)
    first, full = found.slope * share, method.loss_data == "full"
    loss = batch.layout.means(found.loss) if full else batch.layout.sums(found.loss * share)
    sent = _receive(group, server, state, batch, first, loss, products=True)
    walk, fixed, own = (
        Walk(batch, z, sent.u, torch.zeros_like(z), None),
        loss if full else None,
        None,
    )
    for number, step in enumerate(plan.steps):
        columns = plan.columns(step, batches)
        made = walk.take(step, columns, server, sent, fixed, group.lr, run.clip_norm)
        if number == 0 and made.own is not None:
            own = torch.zeros_like(loss).index_copy_(1, step.ids, made.own)
    return Work(batch, first, walk.along, walk.shared, own, sent.g, sent.u, loss)


def _finish(group: Group, server: Server, state: State, work: Work) -> Outcome:
    """x ← x − Σ_i w_i (x − x_i) / normaliser"""
    run, layout, loss = group.run, work.batch.layout, work.loss
    weights, memory = server.weigh(state.memory, loss)
    if server.method.uses_norms:
        norms = group.lr**2 * work.squared_norms
        weights = weights / server.normaliser(loss, norms, group.lr)
    scaled = weights * group.lr
    slopes, spill = work.along * layout.spread(scaled), None
    if work.shared is not None:  # how much of g the weighted sum of directions contains
        spill = (scaled * work.shared).sum(1, keepdim=True)
        if work.g is None:
            slopes = torch.addcmul(slopes, work.first, layout.spread(spill * run.share))
    update = work.batch.gradient(group.dual.model, slopes)
    if spill is not None and work.g is not None:
        update = tree_map(lambda x, g: _add_scaled(x, g, spill), update, work.g)
    reports = run.method.reports_gradient
    return Outcome(
        update=update,
        buffers=state.buffers,
        memory=memory,
        loss=loss,
        weights=weights,
        mean_loss=loss @ run.share,
        mean_gradient=group.mean_gradient(work.batch, work.first) if reports else None,
        ascended=torch.zeros_like(loss[:, 0])
        if work.own is None
        else (work.own < 0).double().mean(1),
    )


def _add_scaled(x: Tensor, g: Tensor, factor: Float64[Tensor, "runs 1"]) -> Tensor:
    """x + factor · g, run by run."""
    return x + g * factor.to(g.dtype).reshape(-1, *[1] * (g.dim() - 1))


def squared_norms(tree: Tree) -> Float64[Tensor, "runs 1"]:
    return squared_norm(tree, batched=True).double()[:, None]


def linear_round(run: Run, state: State, t: int) -> tuple[Outcome, Work]:
    """A single run as a group of one. (The work is what `watch_clients` wants to see.)"""
    group = Group.single(run)
    outcome, work = group.round(state.map(_lift), t)
    return _alone(outcome), work


def _lift(leaf: Tensor) -> Tensor:
    """With an axis of one run."""
    return leaf[None]


def _alone(outcome: Outcome) -> Outcome:
    """The outcome of a group of one as that of its run."""

    def first(tree: Tree) -> Tree:
        return {name: leaf[0] for name, leaf in tree.items()}

    g = outcome.mean_gradient
    return Outcome(
        update=first(outcome.update),
        buffers=first(outcome.buffers),
        memory=first(outcome.memory),
        loss=outcome.loss[0],
        weights=outcome.weights[0],
        mean_loss=outcome.mean_loss[0],
        mean_gradient=None if g is None else first(g),
        ascended=outcome.ascended[0],
    )


def grams_pay(run: Run, runs: int = 1) -> bool:
    """Whether Gram matrices cost less than what they save, and fit: clients must be small.

    Fixed ones cost Σ m_i² per product, against Σ m_i d. Those of a single step on drawn samples are
    made anew in every round, at the price of Σ m_i² d, but serve all runs and all outputs."""
    features = run.federation.train.x[0].numel()
    outputs = len(next(iter(run.task.params.values())))
    drawn = run.schedule.one_step and not run.schedule.full_batch
    lengths = run.schedule.lengths if drawn else run.federation.sizes.tolist()
    squares, samples = sum(m * m for m in lengths), sum(lengths)
    limit = 8 * runs * outputs if drawn else 2 * max(features, 64)
    floats = (2 if run.device.type == "cuda" else 0.125) * 2**30
    return squares <= limit * samples and squares <= floats
