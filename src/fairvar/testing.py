"""The contract of all methods, as checks that can be run on third-party methods.

    from fairvar.testing import check_method
    check_method(MyMethod(strength=0.5), MyMethod(strength=5.0))

A clause is a function of one method that raises `AssertionError`. The kernels rely on all clauses:
a method that passes them gives the same model in the reference loop, the fast kernels and a
deployment, and its runs can be resumed, configured by a file and compared.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache, reduce
from operator import or_
from typing import Any

import msgspec
import tomli_w
import torch
from torch import Tensor
from torch.nn import functional

from fairvar.data import logistic
from fairvar.data.federation import Federation
from fairvar.engine.history import History
from fairvar.engine.state import initial_state
from fairvar.engine.train import train
from fairvar.errors import BadInput
from fairvar.methods import METHODS, Method, Replies
from fairvar.models import build

Clause = Callable[[Method], None]
CLAUSES: dict[str, Clause] = {}

ROUNDS = 3
TOLERANCE = 1e-10  # relative, float64, after ROUNDS rounds
LOCAL_WORK: tuple[dict[str, Any], ...] = (
    {},  # one step on all data
    {"batch_size": 3},
    {"batch_size": 3, "local_epochs": 1},
)


def check_method(*examples: Method) -> list[str]:
    """Run all clauses on each example; one `AssertionError` lists all failures.

    Give one example for each option that changes what the method computes. Returns the names of
    the clauses.
    """
    if not examples:
        raise BadInput("check_method needs an instance, such as check_method(FedAvg())")
    failures = []
    for method in examples:
        for name, clause in CLAUSES.items():
            try:
                clause(method)
            except Exception as error:
                reason = str(error) if isinstance(error, AssertionError) else repr(error)
                failures.append(f"{method!r} breaks {name}: {reason}")
    if failures:
        raise AssertionError("\n".join(failures))
    return list(CLAUSES)


def clause(function: Clause) -> Clause:
    """Add a check to the contract."""
    CLAUSES[function.__name__] = function
    return function


# -- a method is a value ---------------------------------------------------------------------------
@clause
def frozen_and_hashable(method: Method) -> None:
    """Methods are dictionary keys and parts of fingerprints."""
    copy = msgspec.structs.replace(method)
    _demand(copy == method and hash(copy) == hash(method), "an equal copy must have an equal hash")
    for name in method.__struct_fields__:
        try:
            setattr(method, name, getattr(method, name))
        except AttributeError:
            continue
        raise AssertionError(f"the field {name} can be assigned; write class …(frozen=True)")


@clause
def survives_a_configuration_file(method: Method) -> None:
    """Method → TOML → the same method, found by its tag among all registered methods."""
    kinds: Any = reduce(or_, METHODS.values())
    _demand(type(method) in METHODS.values(), "it is not registered; call fairvar.register")
    plain = {k: v for k, v in msgspec.to_builtins(method).items() if v is not None}
    again = msgspec.convert(tomllib.loads(tomli_w.dumps(plain)), kinds)
    _demand(again == method, f"it came back as {again!r}")


@clause
def describes_itself(method: Method) -> None:
    """A label for tables, what clients reveal, and a fairness knob that exists."""
    _demand(bool(method.label.strip()), "label is empty")
    words = isinstance(method.reveals, tuple) and method.reveals and all(method.reveals)
    _demand(bool(words), "reveals must name what a client sends, as a tuple of strings")
    knob = method.fairness_knob
    _demand(knob is None or hasattr(method, knob), f"fairness_knob = {knob!r} is not a field")


@clause
def counts_its_traffic(method: Method) -> None:
    """At least a model down and an update up; two exchanges only for methods that probe."""
    P, B = 10, 3
    plain, more = method.traffic(P), method.traffic(P, B)
    _demand(plain.exchanges in (1, 2), f"{plain.exchanges} exchanges in a round")
    _demand(plain.exchanges == 1 or method.probes, "two exchanges but probes is False")
    _demand(min(plain[1:]) >= P, f"{plain} is less than the model of {P} floats")
    buffers = (more.floats_down - plain.floats_down, more.floats_up - plain.floats_up)
    _demand(buffers == (B, B), f"{B} buffers add {buffers} floats; they travel with the model")
    history = _run(method)
    size = sum(p.numel() for p in history.state.params.values())
    rounds = [method.at_round(t).traffic(size) for t in range(ROUNDS)]
    totals = tuple(sum(r[k] for r in rounds) for k in range(3))
    counted = (history.exchanges, history.bytes_down // 8, history.bytes_up // 8)
    _demand(counted == totals, f"a run counted {counted}, its rounds say {totals}")


# -- its functions are pure ------------------------------------------------------------------------
@clause
def pure(method: Method) -> None:
    """Same inputs, same outputs; nothing that was passed in is changed."""
    for replies in _situations(method):
        given, memory = replies.loss, method.initial_memory(replies.clients)
        for _ in range(ROUNDS):
            kept, kept_replies = deepcopy((memory, replies))
            first, following = deepcopy(method.weigh(memory, replies))
            _demand(_equal(memory, kept), "weigh changes the memory it was given")
            before, after = (filter(torch.is_tensor, r) for r in (kept_replies, replies))
            same = all(map(torch.equal, before, after))
            _demand(same, "weigh changes the replies it was given")
            second, again = method.weigh(memory, replies)
            same = torch.equal(first, second) and _equal(following, again)
            _demand(same, "weigh gives different results for the same inputs")
            norms = given + 1
            values = {float(method.normaliser(replies, norms, 0.1)) for _ in range(2)}
            _demand(len(values) == 1, "normaliser gives different results for the same inputs")
            memory = following
        loss = given.clone()
        pairs = [_pair(method, given, given.mean()) for _ in range(2)]
        _demand(torch.equal(*pairs), "coefficients gives different results for the same inputs")
        _demand(torch.equal(given, loss), "coefficients changes the losses it was given")


@clause
def coefficients_are_elementwise(method: Method) -> None:
    """A client's coefficients depend on its own loss and the mean loss only."""
    for given in _losses():
        a = given.mean() / 2
        alone = torch.stack([_pair(method, f, a) for f in given], 1)
        together = _pair(method, given, a)
        _demand(_near(together, alone), "a client's coefficients depend on the others' losses")
        _demand(_all_finite(together), f"coefficients are not finite for losses {given.tolist()}")


@clause
def memory_keeps_its_shape(method: Method) -> None:
    """Tensors of fixed names, shapes and types, always finite: a checkpoint is a file of them."""
    for replies in _situations(method):
        memory = method.initial_memory(replies.clients)
        shape = {k: (v.shape, v.dtype) for k, v in memory.items()}
        for _ in range(ROUNDS):
            memory = method.weigh(memory, replies)[1]
            now = {k: (v.shape, v.dtype) for k, v in memory.items()}
            _demand(now == shape, f"the memory changed from {shape} to {now}")
            for name, value in memory.items():
                _demand(_all_finite(value), f"memory {name!r} is not finite")


@clause
def weights_are_numbers(method: Method) -> None:
    """Finite float64, one per reply, for small, zero and huge losses alike."""
    for given, weights in _all_weights(method):
        found = f"{weights.dtype} of shape {tuple(weights.shape)}"
        fits = weights.dtype == torch.float64 and weights.shape == given.shape
        _demand(fits, f"weigh gave {found}, not float64 of shape {tuple(given.shape)}")
        _demand(_all_finite(weights), f"weights {weights.tolist()} for losses {given.tolist()}")


@clause
def weights_sum_to_one(method: Method) -> None:
    """x ← Σ w_i x_i is an average, unless the length of the step depends on the updates. What the
    server does with g counts."""
    for loss, weights in _all_weights(method):
        term = method.server_term(_replies(method, loss, _grams()[0]))
        total = float(weights.sum() + term)
        fits = method.uses_norms or method.uses_gram or abs(total - 1) < 1e-9
        _demand(fits, f"weights sum to {total}; or set uses_norms = True")


@clause
def equal_clients_weigh_the_same(method: Method) -> None:
    equal = torch.full((5,), 0.7, dtype=torch.float64)
    for _, weights in _all_weights(method, _replies(method, equal, 4 * torch.outer(equal, equal))):
        _demand(_near(weights, weights[0].expand(5)), f"equal losses weigh {weights.tolist()}")


@clause
def weights_follow_ids(method: Method) -> None:
    """Replies arrive in any order; the server's memory belongs to the id, not the position."""
    for start in _situations(method):
        straight = shuffled = method.initial_memory(start.clients)
        for t in range(ROUNDS):
            order = torch.tensor([3, 0, 4, 2, 1]).roll(t)
            replies = start._replace(loss=start.loss.roll(t))
            mixed = _in_order(replies, order)
            weights, straight = method.weigh(straight, replies)
            others, shuffled = method.weigh(shuffled, mixed)
            _demand(_near(others, weights[order]), "weights depend on the order of the replies")


@clause
def weights_follow_the_scale_of_updates(method: Method) -> None:
    """Scaling the updates of all clients may change the length of the step, not its direction."""
    for replies in _situations(method):
        memory = method.initial_memory(replies.clients)
        expected = method.weigh(memory, replies)[0]
        for scale in (1e-6, 1e6):
            gram = None if replies.gram is None else scale * replies.gram
            found = method.weigh(memory, replies._replace(gram=gram))[0]
            along = found * expected.norm() / torch.where(found.norm() > 0, found.norm(), 1.0)
            same = bool((along - expected).abs().max() <= TOLERANCE * expected.abs().max())
            _demand(same, f"updates {scale} times as long give {found}, not along {expected}")


# -- runs ------------------------------------------------------------------------------------------
@clause
def engines_agree(method: Method) -> None:
    """Reference loop, vmapped and (where it applies) pooled path: one model, losses, weights."""
    for work in _work(method):
        expected = _run(method, engine="reference", **work)
        _demand(expected.diverged_at is None, f"it diverges in round {expected.diverged_at}")
        for engine in ("auto", "vmapped"):
            found = _run(method, engine=engine, **work)
            path = found.provenance["engine"]
            _compare(found, expected, f"the {path} path differs from the reference ({work})")
            if path == "vmapped":
                break


@clause
def personal_models_change_no_bit_of_the_shared_one(method: Method) -> None:
    """The run has the same bits as a run of the method's shared part."""
    work = _work(method)[-1]
    for options in ({"engine": "reference"}, {}, {"participants": 4}):
        found, expected = (_run(m, **work, **options) for m in (method, method.shared))
        same = torch.equal(found.weights, expected.weights)
        same &= _equal(found.state.params, expected.state.params)
        _demand(same, "personal models change the shared one")


@clause
def permuting_clients_permutes_results(method: Method) -> None:
    data = federation()
    order = torch.randperm(data.clients, generator=torch.Generator().manual_seed(3))
    pairs = [[split.of(int(i)) for i in order] for split in data.splits.values()]
    mixed = Federation.from_arrays(*pairs, classes=data.classes)
    expected, found = _run(method), _run(method, mixed)
    _compare(found, expected, "the clients' order matters", order)


@clause
def identical_clients_step_along_fedavg(method: Method) -> None:
    """With identical clients, or a single one, the step has FedAvg's direction.

    One round with a and g of this very model: the step may be longer or shorter than FedAvg's
    (q-FFL estimates a Lipschitz constant), but it has the same direction.
    """
    x, y = federation().train.of(0)
    module = build("multinomial", x.shape[1:], CLASSES).double()
    loss = functional.cross_entropy(module(x), y)
    slopes = torch.autograd.grad(loss, list(module.parameters()))
    params = {name: p.detach() for name, p in module.named_parameters()}
    gradient = dict(zip(params, slopes, strict=True))
    for clients in (1, 5):
        data = Federation.from_arrays([(x, y)] * clients, classes=CLASSES)
        state = replace(
            initial_state(method, params, {}, clients),
            round=1,  # warm starts act in round 0 only
            mean_loss=loss.detach(),
            mean_gradient=gradient if method.keeps_gradient else None,
        )
        after = _run(method, data, rounds=2, state=state).state.x
        step, along = _flat(params) - _flat(after), _flat(gradient)
        cosine = float(step @ along / (step.norm() * along.norm()))
        _demand(cosine > 1 - 1e-12, f"{clients} equal clients: cosine {cosine} with FedAvg's step")


@clause
def deterministic(method: Method) -> None:
    """The same call gives the same bytes, and torch's global generator is not used."""
    work, before = _work(method)[-1], torch.get_rng_state()
    _same_bytes(_run(method, **work), _run(method, **work), "two equal runs differ")
    _demand(torch.equal(before, torch.get_rng_state()), "it draws from torch's own generator")


@clause
def chunks_do_not_matter(method: Method) -> None:
    """The number of clients in a chunk must not change the result."""
    data, work = federation(17), _work(method)[-1]
    whole, cut = (_run(method, data, engine="vmapped", chunk=c, **work) for c in (17, 1))
    _same_bytes(cut, whole, "the size of the chunks changes the result")


@clause
def can_be_continued(method: Method) -> None:
    """A run that is resumed after a round equals one that was not interrupted."""
    whole, part = _run(method), _run(method, rounds=1)
    rest = _run(method, state=part.state)
    _demand(_equal(rest.state.params, whole.state.params), "a continued run ends elsewhere")
    _demand(_equal(rest.state.memory, whole.state.memory), "a continued run forgets its memory")
    personal = (history.state.personal or {} for history in (rest, whole))
    _demand(_equal(*personal), "a continued run has other personal models")
    _demand(torch.equal(rest.loss, whole.loss[1:]), "a continued run has other losses")


# -- the federation of the clauses -----------------------------------------------------------------
CLASSES = 3


@cache
def federation(clients: int = 10) -> Federation:
    """Heterogeneous clients with 4 to 12 training samples each, in float64."""
    return logistic(clients, dim=4, samples=8, heterogeneity=2.0, seed=1, classes=CLASSES)


def _run(method: Method, data: Federation | None = None, **options: Any) -> History:
    given: dict[str, Any] = {"rounds": ROUNDS, "dtype": torch.float64, **options}
    return train("multinomial", data or federation(), method, lr=0.1, evaluate_splits=(),
                 evaluate_local=False, **given)  # fmt: skip


def _work(method: Method) -> list[dict[str, Any]]:
    return [w for w in LOCAL_WORK if "local_epochs" not in w or not method.only_one_step]


def _losses() -> list[Tensor]:
    """Losses of five clients: ordinary, all zero, nearly equal, and far apart."""
    rows = [[0.5, 1.0, 1.5, 2.0, 0.1], [0.0] * 5, [1.0, 1.0, 1.0, 1.0, 1.0 + 1e-12],
            [1e-8, 1.0, 30.0, 1000.0, 0.0]]  # fmt: skip
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def _grams(clients: int = 5) -> list[Tensor]:
    """Products of updates: in general position, in a plane, and of equal updates."""
    draw = torch.Generator().manual_seed(2)
    updates = torch.randn(clients, 7, generator=draw, dtype=torch.float64)
    rows = (updates, updates[:, :2], torch.ones_like(updates))
    return [row @ row.T for row in rows]


def _replies(method: Method, loss: Tensor, gram: Tensor) -> Replies:
    n = len(loss)
    share = method.plain_weights(torch.full((n,), 7))
    return Replies(loss, share, torch.arange(n), n, gram if method.uses_gram else None)


def _situations(method: Method) -> list[Replies]:
    """Replies with all losses and, where the method uses them, all products of updates."""
    grams = _grams() if method.uses_gram else _grams()[:1]
    return [_replies(method, loss, gram) for loss in _losses() for gram in grams]


def _in_order(replies: Replies, order: Tensor) -> Replies:
    gram = None if replies.gram is None else replies.gram[order][:, order]
    loss, share, ids = (v[order] for v in (replies.loss, replies.share, replies.ids))
    return Replies(loss, share, ids, replies.clients, gram)


def _all_weights(method: Method, *given: Replies) -> Iterator[tuple[Tensor, Tensor]]:
    """Losses, and the weights of some rounds with them."""
    for replies in given or _situations(method):
        memory = method.initial_memory(replies.clients)
        for _ in range(ROUNDS):
            weights, memory = method.weigh(memory, replies)
            yield replies.loss, weights


def _pair(method: Method, loss: Tensor, mean_loss: Tensor) -> Tensor:
    """(own, shared) as one tensor."""
    both = method.coefficients(loss, mean_loss)
    return torch.stack([torch.as_tensor(c, dtype=loss.dtype).expand_as(loss) for c in both])


def _demand(condition: bool, message: str) -> None:
    """`assert` that also works with `python -O`."""
    if not condition:
        raise AssertionError(message)


def _all_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _near(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding, relative to the largest entry; False for NaN."""
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def _flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([leaf.flatten().double() for leaf in tree.values()])


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def _compare(a: History, b: History, message: str, order: Tensor | None = None) -> None:
    """Model, losses and weights to TOLERANCE; `order`: client i of `a` is order[i] of `b`."""
    place = torch.arange(b.loss.shape[1]) if order is None else order
    for i, j in enumerate(place.tolist() if b.state.personal else ()):
        near = _near(_flat(a.personal_model(i)), _flat(b.personal_model(j)))
        _demand(near, f"{message}: personal model of client {j}")
    for name, left, right in (
        ("model", _flat(a.state.params), _flat(b.state.params)),
        ("losses", a.loss, b.loss[:, place]),
        ("weights", a.weights, b.weights[:, place]),
    ):
        same = left.shape == right.shape and _near(left, right)
        _demand(same, f"{message}: {name}")


def _same_bytes(a: History, b: History, message: str) -> None:
    same = torch.equal(a.loss, b.loss) and torch.equal(a.weights, b.weights)
    _demand(same and _equal(a.state.params, b.state.params), message)
    _demand(_equal(a.state.memory, b.state.memory), f"{message}: memory")
    personal = (history.state.personal or {} for history in (a, b))
    _demand(_equal(*personal), f"{message}: personal models")
