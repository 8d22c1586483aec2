"""`State`: everything that changes between rounds. `Outcome`: the result of one round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int64
from safetensors.torch import save
from torch import Tensor

from fairvar.common import display
from fairvar.common.files import given_path, pack_files, write_bytes
from fairvar.common.tree import Tree, add, expand, rows, scale, size, subtract, zeros_like
from fairvar.engine.optimiser import PLAIN, ServerOptimiser
from fairvar.errors import BadInput
from fairvar.methods.base import Memory, Method

GROUPS = ("params", "buffers", "memory", "mean_gradient", "iterate", "personal", "moments")


@dataclass(frozen=True, eq=False, repr=False)
class State:
    """Tensors only, so that a state can be saved, sent and compared bit by bit."""

    round: int  # rounds done
    params: Tree  # the global model
    buffers: Tree  # batch-norm statistics
    memory: Memory  # the method's own server-side tensors
    mean_loss: Tensor  # a: zero until the first report
    mean_gradient: Tree | None  # g for the next round, if the method uses it
    iterate: Tree | None = None  # x^t, if the resulting model is an average of iterates
    # v_i: parameters and buffers of every client's personal model, the client as first axis.
    personal: Tree | None = None
    moments: Tree | None = None  # of the server's optimiser
    made_by: str = ""  # the method's label; not stored with a run

    def __repr__(self) -> str:
        by = f" of {self.made_by}" if self.made_by else ""
        rounds = display.plural(self.round, "round")
        return f"<State after {rounds}{by}: {size(self.params):,} parameters>"

    def _repr_html_(self) -> str:
        trees = {group: getattr(self, group) or {} for group in GROUPS}
        rows = [(g, len(tree), size(tree)) for g, tree in trees.items() if tree]
        return display.card(repr(self)[1:-1], display.table(("part", "tensors", "numbers"), rows))

    def save(self, path: str | Path) -> None:
        """Write one file, from which `fairvar.load` makes this state again."""
        content = save(self.flat(), {"made_by": self.made_by})
        write_bytes(given_path(path, to_write=True), pack_files({"state.safetensors": content}))

    def flat(self) -> Tree:
        """All tensors on the CPU by one name each; `from_flat` reverses it."""
        flat: Tree = {"round": torch.tensor(self.round), "mean_loss": self.mean_loss}
        for group in GROUPS:
            for name, leaf in (getattr(self, group) or {}).items():
                flat[f"{group}/{name}"] = leaf
        return {name: leaf.detach().cpu().contiguous() for name, leaf in flat.items()}

    @staticmethod
    def from_flat(flat: Tree, made_by: str = "") -> State:
        groups: dict[str, Tree] = {group: {} for group in GROUPS}
        for name, leaf in flat.items():
            group, _, rest = name.partition("/")
            if group in groups:
                groups[group][rest] = leaf
        found: dict[str, Any] = {
            group: tree if tree or group in ("params", "buffers", "memory") else None
            for group, tree in groups.items()
        }
        return State(int(flat["round"]), mean_loss=flat["mean_loss"], made_by=made_by, **found)

    def to(self, device: torch.device | str) -> State:
        return self.map(lambda leaf: leaf.to(device))

    def map(self, function: Callable[..., Tensor], *others: State) -> State:
        """The same state with every tensor replaced: function(tensor, *those of the others)."""
        return replace(self, **_mapped(self, function, *others))

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        trees: list[Tree | None] = [getattr(self, group) for group in GROUPS]
        return [self.mean_loss, *(tree[name] for tree in trees if tree for name in sorted(tree))]

    @property
    def x(self) -> Tree:
        """Where the next round starts."""
        return self.params if self.iterate is None else self.iterate


@dataclass(frozen=True)
class Outcome:
    """The result of a round on the server: x^{t+1} = x^t − update, without a server optimiser."""

    update: Tree
    buffers: Tree
    memory: Memory
    loss: Tensor  # (…, m) f_i(x^t) of those that answered, float64
    weights: Tensor  # (…, m) as used, float64
    mean_loss: Tensor
    mean_gradient: Tree | None
    ascended: Tensor  # share of clients whose own gradient had a negative factor
    answered: Tensor | None = None  # (m,) ids of those that took part; None: all clients
    losses_known: bool = True  # False: clients need not send them
    personal: Tree | None = None  # the clients' personal models after the round

    def map(self, function: Callable[[Tensor], Tensor]) -> Outcome:
        """The same outcome with every tensor over runs replaced."""
        return replace(self, **_mapped(self, function))


def _mapped(
    record: State | Outcome, function: Callable[..., Tensor], *others: State | Outcome
) -> dict[str, Any]:
    """The fields that are tensors or trees of tensors, with every tensor replaced."""
    found: dict[str, Any] = {}
    for field in fields(record):
        name = field.name
        value, rest = getattr(record, name), [getattr(other, name) for other in others]
        if name == "answered":  # ids: the same in all runs
            continue
        if isinstance(value, Tensor):
            found[name] = function(value, *rest)
        elif isinstance(value, dict):
            found[name] = {k: function(v, *(tree[k] for tree in rest)) for k, v in value.items()}
    return found


def no_state(rounds: int) -> State:
    """The state of a run whose tensors were not kept."""
    return State(rounds, {}, {}, {}, torch.zeros((), dtype=torch.float64), None)


def initial_state(
    method: Method,
    params: Tree,
    buffers: Tree,
    clients: int,
    optimiser: ServerOptimiser = PLAIN,
) -> State:
    some = next(iter(params.values()))
    return State(
        round=0,
        params=params,
        buffers=buffers,
        memory={k: v.to(some.device) for k, v in method.initial_memory(clients).items()},
        mean_loss=torch.zeros((), dtype=torch.float64, device=some.device),
        mean_gradient=zeros_like(params) if method.keeps_gradient else None,
        iterate=params if method.averages_iterates else None,
        personal=expand({**params, **buffers}, clients) if method.personal else None,
        moments=optimiser.start(params),
        made_by=method.label,
    )


def first_run(leaf: Tensor) -> Tensor:
    """Remove the axis of a single run."""
    return leaf[0]


def one_run(leaf: Tensor) -> Tensor:
    """Add the axis of a single run."""
    return leaf[None]


def stack_states(states: Sequence[State]) -> State:
    """One state with the run as first axis; every tensor is new."""
    return states[0].map(lambda *leaves: torch.stack(leaves), *states[1:])


class DoesNotFit(BadInput):
    """The run cannot continue from this state or checkpoint."""


def check_fits(state: State, fresh: State, rounds: int) -> State:
    """Raise `DoesNotFit` unless a run of so many rounds, with initial state `fresh`, can continue
    from this state. Returns it with its tensors in the order of `fresh`: norms are sums in this
    order, and a stored state has another one."""
    if not 0 <= state.round <= rounds:
        raise DoesNotFit(f"the state has {state.round} rounds behind it, of {rounds}")
    if not state.params:
        raise DoesNotFit("the state holds no model: the run was condensed; run it again")
    for group in ("params", "buffers"):
        _compare(state, fresh, group, "the state is one of another model")
    owner, asked = state.made_by or "another method", fresh.made_by
    way = (
        f"continue it with {state.made_by or 'the method that made it'}, or load its model into a "
        "module and train that without state"
    )
    groups = ("memory", "mean_gradient", "iterate", "personal")
    names = [{f: set(getattr(s, f) or {}) for f in groups} for s in (state, fresh)]
    if names[0] != names[1] or (state.memory and state.made_by not in ("", asked)):
        raise DoesNotFit(f"the state is one of {owner}, which {asked} cannot continue; {way}")
    for group in ("memory", "personal"):
        _compare(state, fresh, group, "the state remembers other clients than this federation has")
    for group in ("mean_gradient", "iterate"):
        _compare(state, fresh, group, "the state is one of another model")
    _compare(state, fresh, "moments", "the state was made with another server optimiser")
    if state.mean_loss.shape != fresh.mean_loss.shape:
        raise DoesNotFit(f"the state's mean_loss has shape {tuple(state.mean_loss.shape)}")
    ordered = fresh.map(lambda _, mine: mine, state)
    return replace(ordered, round=state.round, made_by=state.made_by)


def _compare(state: State, fresh: State, group: str, problem: str) -> None:
    """Names, shapes and types of one part of the states."""
    found, wanted = (
        {k: f"{tuple(leaf.shape)} {leaf.dtype}" for k, leaf in (getattr(s, group) or {}).items()}
        for s in (state, fresh)
    )
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            both = (each.get(name, "missing") for each in (found, wanted))
            raise DoesNotFit(f"{problem}: {group} {name} is {', not '.join(both)}")


GOING = -1  # `diverged_at` of a run that has not diverged


def settle(
    state: State,
    diverged_at: Int64[Tensor, " runs"],
    outcome: Outcome,
    done: int | Tensor,
    optimiser: ServerOptimiser = PLAIN,
) -> tuple[State, Int64[Tensor, " runs"]]:
    """States and divergence of all runs after a round, when `done` rounds are done. A run that
    diverges in it, or did so before, keeps the state that it had."""
    rounds = done.double() if isinstance(done, Tensor) else None
    after = advance(state, outcome, rounds, optimiser)
    going, fine = diverged_at == GOING, stays_finite(outcome, after)
    kept = going & fine
    if isinstance(done, int) and not kept.is_cuda and bool(kept.all()):
        return after, diverged_at  # the usual case; on a CPU this test is cheap

    def choose(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(kept.reshape(-1, *[1] * (new.dim() - 1)), new, old)

    return after.map(choose, state), torch.where(going & ~fine, done - 1, diverged_at)


def stays_finite(outcome: Outcome, after: State) -> Bool[Tensor, " runs"]:
    """The test for divergence of every round, run by run and on the device: finite losses and
    personal models or, where losses are not known, a finite global model."""
    if not outcome.losses_known:
        return _finite_runs(after.params)
    fine = torch.isfinite(outcome.loss).all(-1)
    return fine if outcome.personal is None else fine & _finite_runs(outcome.personal)


def _finite_runs(tree: Tree) -> Bool[Tensor, " runs"]:
    found = [rows(torch.isfinite(leaf)).all(1) for leaf in tree.values()]
    return torch.stack(found).all(0)


def advance(
    state: State,
    outcome: Outcome,
    rounds: Tensor | None = None,
    optimiser: ServerOptimiser = PLAIN,
) -> State:
    """The state after the round; for methods that average their iterates, `iterate` is the last
    one.

    `rounds`: of a captured round, the number of rounds done after it, as a tensor."""
    t = state.round + 1 if rounds is None else rounds
    update, moments = optimiser.step(outcome.update, state.moments)
    x = subtract(state.x, update)
    averaged = state.iterate is not None
    mean = add(state.params, scale(subtract(x, state.params), 1 / t)) if averaged else x
    return State(
        round=state.round + 1,
        params=mean,
        buffers=outcome.buffers,
        memory=outcome.memory,
        mean_loss=outcome.mean_loss,
        mean_gradient=outcome.mean_gradient,
        iterate=x if averaged else None,
        personal=outcome.personal,
        moments=moments,
        made_by=state.made_by,
    )
