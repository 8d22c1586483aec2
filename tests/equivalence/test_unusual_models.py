"""Whatever PyTorch can train is trained, by every path that takes it with the same numbers.

`check_model` says beforehand which models are trained client by client; none raises later.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fairvar as fv
from checks import distance
from fairvar.models import check_model

TOLERANCE = 1e-10
TOKENS, FEATURES, CLASSES = 5, 4, 3


class Net(nn.Module):
    """(b, TOKENS, FEATURES) → (b, CLASSES), with something unusual in `between`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(torch.tanh(self.first(x))).mean(1))


class Attention(Net):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)

    def between(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Transformer(Net):
    """Its layer norm: torch's reverse over forward is silently wrong there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0, batch_first=True)

    def between(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(FEATURES, FEATURES, batch_first=True)

    def between(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Branches(Net):
    def between(self, x: Tensor) -> Tensor:
        return 2 * x if x.mean() > 0 else x


class AsksTheHost(Net):
    def between(self, x: Tensor) -> Tensor:
        return x * (1 + abs(x.detach().mean().item()))


class Selects(Net):
    """A shape that depends on the values."""

    def between(self, x: Tensor) -> Tensor:
        return x + x[x > 0].sum() / 100


class WritesInPlace(Net):
    def between(self, x: Tensor) -> Tensor:
        kept = torch.zeros(x.shape, dtype=x.dtype)
        kept += x
        return kept


class Constant(Net):
    """A buffer that nothing changes, such as positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.linspace(0.5, 2, TOKENS)[:, None])

    def between(self, x: Tensor) -> Tensor:
        return x * self.positions


class NotKept(Constant):
    """The same outside the state dict."""

    def __init__(self) -> None:
        super().__init__()
        positions = self.positions
        del self.positions
        self.register_buffer("positions", positions, persistent=False)


class Grows(Net):
    """A buffer with a new value after every training pass, which the next one uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def between(self, x: Tensor) -> Tensor:
        x = x * self.factor
        if self.training:
            self.factor = self.factor * 1.1
        return x


class Averages(Grows):
    """A buffer that depends on all samples of a batch, padding included."""

    def between(self, x: Tensor) -> Tensor:
        x = x * self.factor
        if self.training:
            self.factor = 0.9 * self.factor + x.detach().abs().mean()
        return x


class Counts(Net):
    """The same in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def between(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.first.weight

    def between(self, x: Tensor) -> Tensor:
        return self.again(x)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class WeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(self.first)


class Doubles(torch.autograd.Function):
    """As people wrote them before torch.func."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * slope


class OwnFunction(Net):
    def between(self, x: Tensor) -> Tensor:
        return Doubles.apply(x)


class Shapes(Net):
    """Parameters without axes, and without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.zeros(0, 2))

    def between(self, x: Tensor) -> Tensor:
        return self.factor * x + self.nothing.sum()


class LouderInTraining(Net):
    def between(self, x: Tensor) -> Tensor:
        return 1.5 * x if self.training else x


class Mixes(Net):
    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0) / 2


class MixesOutsideTraining(Net):
    """Such as a batch norm without running statistics."""

    def between(self, x: Tensor) -> Tensor:
        return x if self.training else x - x.mean(0) / 2


VECTORISED = (Attention, Transformer, Constant, NotKept, Grows, Unused, Tied, Frozen)
LOOPED = (Recurrent, Averages, Branches, AsksTheHost, Selects, WritesInPlace, Counts, OwnFunction)
METHODS = (fv.FedAvg(), fv.QFFL(1.0), fv.FairLoss(0.5), fv.FairGrad(0.3, exact=True))


def data() -> fv.Federation:
    draw = torch.Generator().manual_seed(0)

    def clients(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [
            (
                torch.randn(n, TOKENS, FEATURES, generator=draw, dtype=torch.float64) + i / 3,
                torch.randint(0, CLASSES, (n,), generator=draw),
            )
            for i, n in enumerate(sizes)
        ]

    return fv.Federation.from_arrays(clients([3, 7, 5]), test=clients([1, 4, 2]), classes=CLASSES)


DATA = data()


def built(kind: type[Net]) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return kind()


def run(model: nn.Module, method: fv.Method, engine: str = "auto", **more: Any) -> fv.History:
    given = {"rounds": 3, "lr": 0.3, "dtype": torch.float64, "evaluate_every": 2, **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trained client by client
        return fv.train(model, DATA, method, engine=engine, **given)


def trains(history: fv.History, model: nn.Module) -> None:
    assert history.diverged_at is None
    first, last = (float(history.loss[t].mean()) for t in (0, -1))
    assert last < first
    assert torch.isfinite(history.accuracy["test", "local"]).all()
    copy.deepcopy(model).load_state_dict(history.model, strict=type(model) not in (Tied, Frozen))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
@pytest.mark.parametrize("kind", VECTORISED, ids=lambda k: k.__name__)
def test_paths_agree(kind: type[Net], method: fv.Method) -> None:
    model = built(kind)
    assert check_model(model, DATA.train.x[:4].float()) == []
    for work in ({}, {"batch_size": 2}, {"batch_size": 2, "local_epochs": 1}):
        expected = run(model, method, "reference", **work)
        trains(expected, model)
        for path in ("auto", "vmapped", "blocked", "pooled"):
            try:
                found = run(model, method, path, **work)
            except fv.BadInput as refusal:
                assert path in str(refusal)  # noqa: PT017
                continue
            gaps = distance(found, expected)
            assert max(gaps.values()) <= TOLERANCE, (path, work, gaps)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
@pytest.mark.parametrize("kind", LOOPED, ids=lambda k: k.__name__)
def test_the_reference_loop_takes_the_rest(kind: type[Net], method: fv.Method) -> None:
    model = built(kind)
    problems = check_model(model, DATA.train.x[:4].float())
    assert problems
    assert not any(problem.fatal for problem in problems)
    for engine in ("auto", "reference"):
        history = run(model, method, engine, batch_size=3)
        assert history.provenance["engine"] == "reference"
        trains(history, model)
    with pytest.raises(fv.BadInput, match="cannot run this model"):
        run(model, method, "vmapped")


@pytest.mark.parametrize(
    "method", [fv.QFFL(1.0), fv.FairLoss(2.0, bound=0.1), fv.FedMGDA()], ids=lambda m: m.label
)
@pytest.mark.parametrize("more", [{}, {"local_steps": 2}], ids=["step", "steps"])
def test_parameters_of_any_shape(method: fv.Method, more: dict) -> None:
    model = built(Shapes)
    expected = run(model, method, "reference", clip_norm=0.5, **more)
    found = run(model, method, clip_norm=0.5, **more)
    assert found.provenance["engine"] != "reference"
    assert max(distance(found, expected).values()) <= TOLERANCE


@pytest.mark.parametrize("more", [{}, {"local_steps": 2}], ids=["step", "steps"])
def test_losses_on_all_data_are_those_of_evaluation_mode(more: dict) -> None:
    """With full batches too."""
    model = built(LouderInTraining)
    expected = run(model, fv.TERM(1.0), "reference", **more)
    found = run(model, fv.TERM(1.0), **more)
    assert found.provenance["engine"] != "reference"
    assert max(distance(found, expected).values()) <= TOLERANCE


@pytest.mark.parametrize("kind", [Mixes, MixesOutsideTraining], ids=lambda k: k.__name__)
def test_scores_are_of_a_clients_own_samples(kind: type[Net]) -> None:
    """Neither other clients' samples nor padding change them."""
    model = built(kind)
    (problem,) = check_model(model, DATA.train.x[:4].float())
    assert "samples of a batch influence each other" in problem
    history = run(model, fv.TERM(1.0), rounds=1, lr=1e-9)
    model.double().eval()
    for i in range(DATA.clients):
        x, y = DATA.test.of(i)
        loss = nn.functional.cross_entropy(model(x), y).item()
        for which in ("global", "local"):
            found = float(history.evaluated_loss["test", which][0, i])
            assert found == pytest.approx(loss, rel=1e-7), (i, which)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.*deprecated")
@pytest.mark.parametrize("work", [{}, {"batch_size": 2, "local_epochs": 1}])
def test_attention_beside_batch_norm_is_computed_for_all_clients_at_once(work: dict) -> None:
    """Without torch's warning that its attention runs client after client."""
    net = built(Transformer)
    net.head = nn.Sequential(nn.BatchNorm1d(FEATURES), net.head)  # type: ignore[assignment]
    for method in (fv.FedAvg(), fv.FairLoss(0.1)):
        expected = run(net, method, "reference", **work)
        found = fv.train(net, DATA, method, 3, 0.3, dtype=torch.float64, evaluate_every=2, **work)
        assert max(distance(found, expected).values()) <= TOLERANCE


def test_a_buffer_that_counts_passes_counts_those_of_training_only() -> None:
    """Three rounds of one step: three passes, whatever was evaluated in between."""
    history = run(built(Counts), fv.FedAvg(), evaluate_every=1)
    assert float(history.model["passes"]) == 3


def test_weight_norm_bends_in_the_reference_loop_only() -> None:
    """Torch has no forward derivative of it."""
    model = built(WeightNorm)
    (problem,) = check_model(model, DATA.train.x[:4].float())
    assert "second derivative" in problem
    assert not problem.fatal
    for method in METHODS[:3]:
        assert run(model, method).provenance["engine"] != "reference"
    assert run(model, METHODS[3]).provenance["engine"] == "reference"


def test_a_model_without_second_derivatives_is_refused_with_fairgrad() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise RuntimeError("the derivative of this slope is not implemented")
            return 2 * slope

    class Model(Net):
        def between(self, x: Tensor) -> Tensor:
            return Once.apply(x)

    model = built(Model)
    first, second = check_model(model, DATA.train.x.float())
    assert "cannot be differentiated twice" in first
    assert "under torch.func.vmap" in second
    with pytest.raises(fv.BadInput, match="cannot be differentiated twice"):
        run(model, fv.FairGrad(0.1))
    trains(run(model, fv.FairLoss(0.1)), model)


def test_losses_without_curvature() -> None:
    """The second derivative of a linear model's hinge loss is zero."""

    def hinge(outputs: Tensor, y: Tensor) -> Tensor:
        return torch.relu(5 - outputs.gather(1, y[:, None])[:, 0])

    model = nn.Sequential(nn.Flatten(), nn.Linear(TOKENS * FEATURES, CLASSES))
    expected = run(model, fv.FairGrad(0.3), "reference", loss=hinge)
    for path in ("vmapped", "blocked"):
        found = run(model, fv.FairGrad(0.3), path, loss=hinge)
        assert max(distance(found, expected).values()) <= TOLERANCE


def cross_entropies(outputs: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, y, reduction="none")


OWN_LOSSES: dict[str, tuple[Any, str]] = {
    "one-hot targets": (  # calls .item()
        lambda outputs, y: (outputs - nn.functional.one_hot(y, CLASSES)).square().sum(1),
        "has a loss that does not run under torch.func.vmap",
    ),
    "no forward derivative": (
        lambda outputs, y: nn.functional.huber_loss(
            outputs, torch.eye(CLASSES, dtype=outputs.dtype)[y], reduction="none"
        ).sum(1),
        "has a loss that has a second derivative that does not run under torch.func.vmap",
    ),
    "mixes": (
        lambda outputs, y: cross_entropies(outputs - outputs.mean(0), y),
        "has a loss that lets the samples of a batch influence each other",
    ),
    "weights from the batch": (
        lambda outputs, y: cross_entropies(outputs, y) / (y[:, None] == y).sum(1),
        "has a loss that lets the samples of a batch influence each other",
    ),
}


@pytest.mark.parametrize("kind", OWN_LOSSES)
def test_losses_for_one_client_after_another(kind: str) -> None:
    loss, reason = OWN_LOSSES[kind]
    model, given = nn.Sequential(nn.Flatten(), nn.Linear(20, CLASSES)), {"rounds": 2, "lr": 0.1}
    with pytest.warns(UserWarning, match=f"one after another: the model {reason}"):
        history = fv.train(model, DATA, fv.FairGrad(0.3), loss=loss, **given)
    assert history.provenance["engine"] == "reference"
    with pytest.raises(fv.BadInput, match="cannot run this model"):
        run(model, fv.FairGrad(0.3), "blocked", loss=loss)


def test_a_mixing_loss_is_evaluated_on_a_clients_own_samples() -> None:
    loss, _ = OWN_LOSSES["mixes"]
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, CLASSES)).double()
    history = run(model, fv.FedAvg(), rounds=1, lr=1e-9, loss=loss)
    for i in range(DATA.clients):
        x, y = DATA.test.of(i)
        expected = loss(model(x), y).mean().item()
        assert float(history.evaluated_loss["test", "global"][0, i]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda o, y: (o.argmax(1) != y).double(), "cannot be differentiated: "),
        (lambda o, y: torch.cdist(o, o).diagonal() + o.sum(1), "cannot be differentiated twice"),
        (lambda o, y: cross_entropies(o, y).squeeze(), "one value per sample"),
        (lambda o, y: cross_entropies(o + torch.rand_like(o), y), "other outputs in a second pass"),
    ],
    ids=["labels", "once", "squeezed", "random"],
)
def test_losses_that_cannot_be_trained_are_refused(loss: Any, reason: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, CLASSES))
    for engine in ("auto", "reference"):
        with pytest.raises(fv.BadInput, match=f"the loss .*{reason}"):
            run(model, fv.FairGrad(0.3), engine, loss=loss)


def test_tokens_are_trained_in_the_precision_that_was_asked_for() -> None:
    draw = torch.Generator().manual_seed(0)
    clients = [
        (torch.randint(0, 9, (6, 4), generator=draw), torch.randint(0, 3, (6,), generator=draw))
        for _ in range(3)
    ]
    tokens = fv.Federation.from_arrays(clients, test=clients)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Tanh(), nn.Linear(16, 3))
    for method in METHODS:
        given: dict = {"rounds": 3, "dtype": torch.float64}
        expected = fv.train(model, tokens, method, engine="reference", **given)
        assert {leaf.dtype for leaf in expected.model.values()} == {torch.float64}
        for engine in ("auto", "vmapped"):
            found = fv.train(model, tokens, method, engine=engine, **given)
            assert max(distance(found, expected).values()) <= TOLERANCE
