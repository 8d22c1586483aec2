"""`check_model` names all reasons, each in one line, and tells fatal ones from slow ones."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from fairvar.models import MODELS, Problem, build, check_model, swap_batch_norm

torch.set_num_threads(1)

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 3))


class Lambda(nn.Module):
    """A linear layer and then the function of the test."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.kind = kind
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.calls += 1
        match self.kind:
            case "branch":
                return y if y.sum() > 0 else 2 * y
            case "in place":
                kept = torch.zeros(y.shape)
                kept.add_(y)
                return kept
            case "random":
                return y + torch.randn(y.shape)
            case "remembers":
                return y * self.calls
            case "mixes":
                return y - y.mean(0)
            case "overflows":
                return y / 0
            case "tuple":
                return (y, y)  # type: ignore[return-value]
            case "scalar":
                return y.mean()
            case _:
                raise RuntimeError("first line\nsecond line")


def reasons(module: nn.Module, inputs: Tensor | None = X, classes: int | None = 3) -> list[Problem]:
    problems = check_model(module, inputs, classes=classes)
    assert all("\n" not in problem and len(problem) < 300 for problem in problems)
    return problems


@pytest.mark.parametrize("name", MODELS)
def test_the_zoo_is_fine(name: str) -> None:
    classes = 1 if name == "linear" else 10
    if name in ("lstm", "transformer"):
        tokens = torch.randint(0, classes, (4, 6))
        assert reasons(build(name, (6,), classes), tokens, classes) == []
        return
    model = build(name, (3, 32, 32), classes)
    assert reasons(model, IMAGES, classes) == []
    assert reasons(swap_batch_norm(model), IMAGES, classes) == []


@pytest.mark.parametrize(
    ("layer", "words", "fatal"),
    [
        (nn.AlphaDropout(0.1), "set it to 0", True),
        (nn.RReLU(), "LeakyReLU", True),
        (nn.SyncBatchNorm(4), "mixes the batches", True),
        (nn.BatchNorm1d(4, momentum=None), "set momentum", True),
        (nn.LazyLinear(4), "run one batch", True),
        (nn.LSTM(4, 4), "under vmap", False),
        (nn.GRU(4, 4, dropout=0.0), "under vmap", False),
        (nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats=False", False),
        (type("OwnNorm", (nn.BatchNorm1d,), {})(4), "of its own kind", False),
        (nn.MultiheadAttention(4, 1, dropout=0.1), "set it to 0", True),
        (nn.Embedding(4, 4, sparse=True), "set sparse=False", True),
        (nn.EmbeddingBag(4, 4, sparse=True), "set sparse=False", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_named_without_running_them(layer: nn.Module, words: str, fatal: bool) -> None:
    (problem,) = reasons(net(layer), inputs=None)
    assert words in problem
    assert problem.fatal is fatal


@pytest.mark.parametrize(
    ("kind", "words", "fatal"),
    [
        ("branch", "under torch.func.vmap", False),
        ("in place", "under torch.func.vmap", False),
        ("random", "second pass", True),
        ("remembers", "second pass", True),
        ("mixes", "influence each other", False),
        ("overflows", "not finite", True),
        ("tuple", "returns a tuple", True),
        ("scalar", "first axis must stay the batch", True),
        ("raises", "fails on inputs of shape (6, 4): first line second line", True),
    ],
)
def test_faults_that_show_when_it_runs(kind: str, words: str, fatal: bool) -> None:
    (problem,) = reasons(Lambda(kind))
    assert words in problem
    assert problem.fatal is fatal


def test_integers_are_for_embeddings() -> None:
    assert "give x as floats: integers are for embeddings" in check_model(net(), X.long())[0]
    tokens = nn.Sequential(nn.Embedding(2, 3), nn.Flatten(), nn.Linear(12, 3))
    (problem,) = check_model(tokens, torch.full((6, 4), 2))  # there are the tokens 0 and 1
    assert "index out of range" in problem
    assert "give x as floats" not in problem


def test_output_width_and_targets() -> None:
    assert "has 3 outputs for 5 classes" in reasons(net(), classes=5)[0]
    assert "a target is 7" in check_model(net(), X, targets=torch.tensor([0, 7, 1, 0, 0, 0]))[0]
    assert check_model(net(), X, targets=torch.tensor([0, 2, 1, 0, 0, 0])) == []
    assert check_model(net(), X, targets=torch.zeros(6, 3)) == []


def test_all_reasons_come_at_once() -> None:
    module = net(nn.AlphaDropout(0.5), nn.BatchNorm1d(4, momentum=None), nn.RReLU())
    problems = reasons(module, classes=5)
    assert [p.split(" ")[0] for p in problems] == ["1", "2", "3", "has"]


def test_parameters_of_the_wrong_kind() -> None:
    frozen = net().requires_grad_(False)
    assert "no trainable parameter" in reasons(frozen)[0]
    module = net()
    module.extra = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    module.steps = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    found = reasons(module, inputs=None)
    assert ["extra" in found[0], "steps" in found[1], len(found)] == [True, True, 2]


def test_norms_of_weights() -> None:
    spectral = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))
    assert any("remove the spectral norm" in p and p.fatal for p in reasons(spectral))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_hook = nn.utils.weight_norm(nn.Linear(4, 3))
    assert [p.fatal for p in reasons(by_hook, inputs=None)] == [False]
    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    assert check_model(parametrised, X, curvature=False) == []
    (problem,) = reasons(parametrised)  # torch has no forward derivative of it
    assert "has a second derivative that does not run under torch.func.vmap" in problem
    assert not problem.fatal


def test_what_is_fine() -> None:
    frozen = net(nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    frozen[0].requires_grad_(False)  # type: ignore[index]
    assert reasons(frozen) == []
    tied = net(nn.Linear(4, 4))
    tied[1].weight = tied[0].weight  # type: ignore[index]
    assert reasons(tied) == []
    layer = nn.Linear(4, 4)
    assert reasons(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3))) == []
    assert reasons(net(nn.Dropout(0.0), nn.LayerNorm(4), nn.GroupNorm(2, 4))) == []
    assert reasons(net(nn.Dropout(0.2), nn.Linear(4, 4), nn.Dropout(0.5))) == []
    assert reasons(nn.Sequential(nn.Conv2d(3, 3, 32), nn.Flatten()), IMAGES) == []
    tokens = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))
    assert reasons(tokens, torch.randint(0, 9, (3, 5))) == []


def test_evaluation_and_single_samples_are_tried_too() -> None:
    """Clients may have one test sample, and the last piece of any pass may hold one."""
    without = nn.BatchNorm1d(4, track_running_stats=False)  # one sample has no statistics
    assert "fails on inputs of shape (1, 4)" in reasons(net(without))[0]

    class Squeezes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze()

    (problem,) = reasons(Squeezes(4, 3))
    assert "turns 1 inputs into outputs of shape (3,)" in problem

    class TwoHeads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if self.training else (y, y)  # type: ignore[return-value]

    assert "returns a tuple" in reasons(TwoHeads(4, 3))[0]


def test_what_autograd_cannot_do() -> None:
    class Detaches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    class Overwrites(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(super().forward(x))
            return y.add_(1)

    for model in (Detaches(4, 3), Overwrites(4, 3)):
        (problem,) = reasons(model)
        assert "cannot be differentiated" in problem
        assert problem.fatal


def test_wrapped_modules_are_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(net())
    assert "is compiled: give the module that it was made from" in reasons(scripted, None)[0]
    assert "give its .module" in reasons(nn.DataParallel(net()), None)[0]


def test_a_recurrent_net_is_only_slower() -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 5, batch_first=True)
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    assert [p.fatal for p in reasons(Text(), torch.randn(3, 7, 4))] == [False]


def test_the_module_and_the_generator_are_left_alone() -> None:
    module, noisy = net(nn.BatchNorm1d(4)).train(False), Lambda("random")
    before = copy.deepcopy(module.state_dict())
    random = torch.get_rng_state()
    assert reasons(module) == []
    assert reasons(noisy) != []
    assert not module.training
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())


class Rounding(nn.Module):
    """One statistic is zero but for rounding, which differs with the size of the batch, as the
    running means behind a linear bottleneck do on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.centre = torch.full_like(self.centre, 1e-17 * len(x))
        return self.linear(x)


def test_rounding_of_a_statistic_that_is_zero_does_not_count() -> None:
    assert check_model(Rounding(), X) == []
