"""Bad input through `train`: one line that says what to change. Odd input: defined numbers."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn

import fairvar as fv
from checks import images, small_cnn
from fairvar.deploy.client import is_additive
from fairvar.engine.settings import EvaluateSettings
from fairvar.methods import Replies

METHODS = [
    fv.FedAvg(),
    fv.AFL(),
    fv.QFFL(1.0),
    fv.AAggFF(),
    fv.FairLoss(0.5),
    fv.FairLoss(0.5, exact=True),
    fv.FairGrad(0.1),
    fv.FairGrad(0.1, exact=True),
]
by_label = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)


def arrays(sizes: list[int], labels: list[int] | None = None) -> list[tuple[np.ndarray, list[int]]]:
    """Clients of these sizes with four features; `labels`: all samples of client i get label i."""
    draw = np.random.default_rng(0)
    found = []
    for i, size in enumerate(sizes):
        y = [labels[i]] * size if labels else draw.integers(0, 3, size).tolist()
        found.append((draw.standard_normal((size, 4)), y))
    return found


DATA = fv.Federation.from_arrays(arrays([5, 3]), classes=3)
REGRESSION = fv.Federation.from_arrays([(x, x.sum(1, keepdims=True)) for x, _ in arrays([5, 3])])


def refused(*words: str, data: fv.Federation = DATA, **options: object) -> None:
    """`train` refuses in exactly one line that holds all these words."""
    given: dict = {"model": "multinomial", "method": fv.FedAvg(), "rounds": 2, **options}
    with pytest.raises(fv.BadInput) as caught:
        fv.train(given.pop("model"), data, **given)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.0}, ["train.lr", "0.0", "> 0"]),
        ({"lr": -1.0}, ["train.lr", "> 0"]),
        ({"lr": float("nan")}, ["train.lr", "nan"]),
        ({"lr": float("inf")}, ["train.lr", "inf"]),
        ({"rounds": 0}, ["train.rounds", ">= 1"]),
        ({"batch_size": 0}, ["train.batch_size", ">= 1"]),
        ({"local_steps": 0}, ["train.local_steps", ">= 1"]),
        ({"local_epochs": -1}, ["train.local_epochs", ">= 1"]),
        ({"local_steps": 2, "local_epochs": 1}, ["local_steps", "local_epochs", "give one"]),
        ({"clip_norm": 0.0}, ["train.clip_norm", "> 0"]),
        ({"weight_decay": -0.1}, ["train.weight_decay", ">= 0"]),
        ({"momentum": 1.0}, ["train.momentum", "< 1"]),
        ({"engine": "linear", "weight_decay": 0.1}, ["linear", "weight_decay", "auto"]),
        (
            {"engine": "blocked", "weight_decay": 0.1, "method": fv.QFFL(1.0)},
            ["blocked", "norms of client updates and weight_decay", "auto"],
        ),
        ({"chunk": 0}, ["train.chunk", ">= 1"]),
        ({"seed": -1}, ["train.seed", ">= 0"]),
        ({"evaluate_every": 0}, ["evaluate.every", ">= 1"]),
        ({"evaluate_splits": ("tests",)}, ["evaluate.splits", "tests"]),
        ({"engine": "vmaped"}, ["train.engine", "did you mean 'vmapped'?", "pooled"]),
        ({"loss": "cross_entrop"}, ["unknown loss", "did you mean 'cross_entropy'?"]),
        ({"model": "multinomal"}, ["unknown model", "did you mean 'multinomial'?"]),
        ({"dtype": torch.float16}, ["train.dtype", "float32", "float64"]),
        ({"device": "gpu"}, ["device", "gpu", "cpu"]),
        ({"device": "cuda:99"}, ["device", "cuda:99", "cpu"]),
        ({"method": fv.FairGrad(0.1), "engine": "pooled"}, ["pooled", "curvature", "auto"]),
        (
            {"method": fv.QFFL(1.0), "engine": "pooled"},
            ["pooled", "norms of client", "auto"],
        ),
        ({"engine": "pooled", "local_steps": 2}, ["pooled", "several local steps"]),
        ({"engine": "blocked", "local_steps": 2}, ["blocked", "several local steps"]),
        (
            {"method": fv.FairGrad(0.1), "engine": "blocked", "clip_norm": 1.0},
            ["blocked", "curvature and clip_norm", "auto"],
        ),
        ({"engine": "pooled", "clip_norm": 1.0}, ["pooled", "clip_norm", "auto"]),
        (
            {"method": fv.FairLoss(0.5, exact=True, collapsed=True), "local_steps": 2},
            ["FairLoss*", "local_steps = 1"],
        ),
        ({"model": nn.Linear(4, 2)}, ["2 outputs", "3 classes", "3 wide"]),
        ({"model": nn.Linear(5, 3)}, ["shape", "4"]),
        (
            {"model": nn.Sequential(nn.Linear(4, 3), nn.AlphaDropout(0.5))},
            ["Dropout", "set it to 0"],
        ),
        ({"model": nn.Sequential(nn.Flatten())}, ["no trainable parameter"]),
        ({"loss": "mse"}, ["mse", "float targets"]),
        ({"loss": lambda outputs, y: outputs.mean()}, ["one value per sample"]),
        ({"loss": lambda outputs, y: outputs}, ["one value per sample", "(4, 3)"]),
        ({"loss": lambda outputs, y: 1.0}, ["one value per sample", "float"]),
        ({"loss": lambda outputs, y: outputs[:, 0] * torch.inf}, ["not finite"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_refused(options: dict, words: list[str]) -> None:
    refused(*words, **options)


# Every argument gets values of all kinds; whatever is refused is refused by BadInput, in one line.
WRONG_TYPES = """
import warnings
import numpy as np, torch, fairvar as fv
from torch import nn
warnings.simplefilter("ignore")
x, y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
data = fv.Federation.from_arrays([(x, y)] * 3, test=[(x, y)] * 3)
history = fv.train("multinomial", data, fv.FedAvg(), 1)
dataset = fv.Dataset("d", x, y, 2)
values = [None, True, -1, 2.5, float("nan"), "text", [1], (1, 2, 3), {"a": 1}, object(), b"x", {1},
          np.ones(1), torch.ones(2), fv.FedAvg(), data, history]
calls = [
    (fv.train, {"model": "multinomial", "federation": data, "method": fv.FedAvg(), "rounds": 1},
     ["lr", "batch_size", "local_steps", "local_epochs", "loss", "seed", "dtype", "device",
      "engine", "evaluate_every", "evaluate_splits", "evaluate_local", "clip_norm",
      "schedule", "weight_decay", "momentum", "participation", "participants", "chunk",
      "precision", "capture", "state", "progress", "callbacks"]),
    (fv.Federation.from_arrays, {"train": [(x, y)]},
     ["valid", "test", "classes", "name", "provenance"]),
    (fv.load_federation, {"name": "digits", "clients": 3},
     ["partition", "seed", "split", "holdout", "pool_samples", "fraction", "samples", "root"]),
    (fv.build_federation, {"dataset": dataset, "clients": 2, "partition": fv.IID()}, ["split"]),
    (fv.Dataset, {"name": "d", "x": x, "y": y, "classes": 2},
     ["pool_x", "pool_y", "groups", "sha256", "provenance", "scale"]),
    (fv.check_model, {"module": nn.Linear(4, 2), "inputs": x},
     ["targets", "classes", "together", "curvature"]),
    (fv.fairness, {"accuracy": [0.5, 0.6]}, ["samples", "ddof", "interval", "resamples", "seed"]),
    (history.fairness, {}, ["split", "model", "at", "resamples"]),
]
for function, given, more in calls:
    for name in [*given, *more]:
        refused = 0
        for value in values:
            try:
                function(**{**given, name: value})
            except fv.BadInput as error:
                refused += 1
                assert "\\n" not in str(error) and len(str(error)) < 400, str(error)
            except Exception as error:
                print(function.__qualname__, name, repr(value)[:40], repr(error)[:80])
        assert refused > 5, (function, name)
for options in ({"lr": "fast"}, {"rounds": 2.5}, {"model": 3}, {"method": "fedavg"}, {"loss": 3}):
    try:
        fv.train(**{"model": "multinomial", "federation": data, "method": fv.FedAvg(), **options})
    except fv.BadInput as error:
        print(error)
"""


def test_wrong_types_are_refused() -> None:
    """In a process of its own: here the shape checks of the test run would answer first."""
    done = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    expected = ["train.lr = 'fast'", "train.rounds = 2.5", "nn.Module", "FedAvg()", "loss"]
    assert len(lines) == len(expected), done.stdout
    for line, word in zip(lines, expected, strict=True):
        assert word in line


# -- labels and outputs ----------------------------------------------------------------------------
BINARY = fv.Federation.from_arrays(
    [(x, [label % 2 for label in y]) for x, y in arrays([5, 3])], classes=2
)


def one_logit(outputs: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(
        outputs.reshape(y.shape), y.to(outputs.dtype), reduction="none"
    )


class Reshaped(nn.Linear):
    """Outputs with more axes, or fewer."""

    def __init__(self, *shape: int) -> None:
        super().__init__(4, int(np.prod(shape)))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(len(x), *self.shape)


@pytest.mark.parametrize("model", [nn.Linear(4, 1), Reshaped()], ids=["(b, 1)", "(b,)"])
def test_a_single_logit_has_no_accuracy(model: nn.Module) -> None:
    """The largest of one output is always class 0: that share was called accuracy."""
    refused("largest output", "2 wide", "float targets", data=BINARY, model=model, loss=one_logit)
    pairs = [[BINARY.train.of(i)[0] for i in range(2)], [BINARY.train.of(i)[1] for i in range(2)]]
    floats = [(x, y.float()) for x, y in zip(*pairs, strict=True)]
    data = fv.Federation.from_arrays(floats, test=floats)
    history = fv.train(model, data, fv.FedAvg(), 3, loss=one_logit)  # as the refusal says
    assert not history.accuracy
    assert torch.isfinite(history.evaluated_loss["test", "global"]).all()


def test_a_loss_of_ones_own_needs_one_output_per_class() -> None:
    def first(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.flatten(1)[:, 0] - y).square()

    for width in (1, 2, 5):
        refused("largest output", "3 wide", model=nn.Linear(4, width), loss=first)
    refused("classes = 5", model=nn.Linear(4, 5), loss=first)
    refused("outputs of shape (3, 2)", model=Reshaped(3, 2), loss=first)
    alone = fv.Federation.from_arrays(arrays([3, 3], labels=[0, 0]))  # a single class
    refused("2 wide", data=alone, model=nn.Linear(4, 1), loss=first)
    fv.train(nn.Linear(4, 3), DATA, fv.FedAvg(), 1, loss=first)


def test_cross_entropy_takes_classes_that_the_data_lack() -> None:
    fv.train(nn.Linear(4, 5), DATA, fv.FedAvg(), 1)
    refused("2 outputs", "3 classes", "3 wide", model=nn.Linear(4, 2))
    refused("outputs of shape (3, 2)", model=Reshaped(3, 2))


def test_losses_that_fail_say_so() -> None:
    refused("reduction", model="multinomial", loss=nn.CrossEntropyLoss())
    refused("the loss fails on outputs of shape (4, 3), targets of shape (4,)",
            loss=lambda outputs, y: outputs @ y)  # fmt: skip


def entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, y, reduction="none")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda outputs, y: entropy(outputs, y) * torch.rand(len(y)), ["what is random"]),
        (lambda outputs, y: entropy(outputs.squeeze(), y), ["one value per sample (1,), not ()"]),
        (lambda outputs, y: entropy(outputs.detach(), y), ["cannot be differentiated"]),
        (lambda outputs, y: (outputs.argmax(1) != y).float(), ["cannot be differentiated"]),
        (lambda outputs, y: entropy(outputs, y.clamp_(min=1)), ["changes outputs or targets"]),
        (lambda outputs, y: entropy(outputs.mul_(2), y), ["changes outputs or targets"]),
    ],
)  # fmt: skip
def test_a_loss_of_ones_own_is_tested(loss: Callable, words: list[str]) -> None:
    before = DATA.train.y.clone()
    for engine in ("auto", "reference"):
        refused(*words, loss=loss, engine=engine)
    assert torch.equal(DATA.train.y, before)


def test_a_loss_that_vmap_refuses_is_trained_client_by_client() -> None:
    def one_hot(outputs: Tensor, y: Tensor) -> Tensor:
        return -(nn.functional.one_hot(y, 3) * outputs.log_softmax(1)).sum(1)

    given = {"rounds": 3, "evaluate_splits": ("train",), "dtype": torch.float64, "local_steps": 2}
    with pytest.warns(UserWarning, match="has a loss that does not run under torch.func.vmap"):
        found = fv.train("multinomial", DATA, fv.FairGrad(0.1), loss=one_hot, **given)
    expected = fv.train("multinomial", DATA, fv.FairGrad(0.1), **given)
    assert found.provenance["engine"] == "reference"
    for name, leaf in expected.model.items():
        assert float((found.model[name] - leaf).abs().max()) <= 1e-10
    refused("has a loss that", loss=one_hot, engine="vmapped")


def test_next_tokens() -> None:
    """Targets (b, T) are labels of positions; a loss of one's own trains on them as well."""
    draw = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(4, 6, 4, generator=draw), torch.randint(0, 5, (4, 6), generator=draw))
        for _ in range(3)
    ]
    data = fv.Federation.from_arrays(pairs, test=pairs)
    assert data.classes == 5
    model = nn.Linear(4, 5)
    refused(
        "shape (6, 5), classes last, not (5,)",
        data=data,
        model=nn.Sequential(nn.Flatten(), nn.Linear(24, 5)),
    )

    def mean_over_positions(outputs: Tensor, y: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(outputs.transpose(1, 2), y, reduction="none")
        return losses.mean(1)

    for engine in ("reference", "auto", "vmapped", "blocked"):
        history = fv.train(
            model, data, fv.FairGrad(0.1), 3, loss=mean_over_positions, engine=engine
        )
        finite(history)
        assert torch.isfinite(history.evaluated_loss["test", "local"]).all()
    y = pairs[0][1].clone()
    y[1, 3] = 9
    with pytest.raises(fv.BadInput, match="client 0, sample 1: label 9 is outside 0 … 4"):
        fv.Federation.from_arrays([(pairs[0][0], y)], classes=5)


def test_tokens_that_the_embedding_lacks() -> None:
    """In any sample and split, before training; corrected data are trained on at once, which were
    refused with the findings of the wrong ones."""

    def data(train: int, test: int) -> fv.Federation:
        tokens = [torch.ones(9, 4, dtype=torch.int64) for _ in range(2)]
        tokens[0][7, 2], tokens[1][8, 1] = train, test
        pairs = [[(x, torch.arange(9) % 2)] * 2 for x in tokens]
        return fv.Federation.from_arrays(pairs[0], test=pairs[1])

    model = nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(16, 2))
    refused("fails on train data", "1 … 3: index out of range", model=model, data=data(3, 1))
    refused("fails on test data", "-1 … 1: index out of range", model=model, data=data(1, -1))
    finite(fv.train(model, data(2, 0), fv.FedAvg(), 1))
    huge = fv.Federation.from_arrays([(1e38 * torch.ones(5, 3), torch.arange(5) % 2)])
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2))
    model[0].weight.data.fill_(9.0)
    refused("outputs that are not finite", model=model, data=huge)
    small = fv.Federation.from_arrays([(torch.ones(5, 3), torch.arange(5) % 2)] * 2)
    finite(fv.train(model, small, fv.FedAvg(), 1))


# -- data of the wrong form ------------------------------------------------------------------------
PAIRS = """
import numpy as np, torch, fairvar as fv
x, y = np.ones((2, 4)), [0, 1]
long_x, long_y = np.ones((5, 4)), [0, 1, 0, 1, 0]
for wrong, word in (
    ((x, y), "of one client give"),
    ((long_x, long_y), "of one client give [(x, y)]"),
    ((torch.tensor(x), torch.tensor(y)), "of one client give"),
    ({"a": (x, y)}, "not a dict"),
    ([(x, y, y)], "client 0 is a tuple of 3"),
    ([x, x, x], "client 0 is a ndarray"),
    ([(x, 1)], "client 0: y is a single number"),
    ([(x, ["a", "b"])], "cannot be read"),
    ([(x, np.array([1j, 2j]))], "complex"),
    ([], "holds no client"),
    (iter(()), "holds no client"),
):
    try:
        fv.Federation.from_arrays(wrong)
    except fv.BadInput as error:
        assert word in str(error), (word, str(error))
    else:
        raise AssertionError(word)
assert fv.Federation.from_arrays(iter([(x, y)])).clients == 1
x, y = torch.randn(40, 2), torch.arange(40) % 4
found, expected = fv.Dataset("d", x, y, 4), fv.Dataset("d", x.numpy(), y.numpy(), 4)
assert found.sha256 == expected.sha256
deal = [fv.build_federation(d, 3, fv.IID()) for d in (found, expected)]
assert torch.equal(deal[0].train.x, deal[1].train.x)
"""


def test_pairs_of_the_wrong_form_and_data_sets_of_tensors() -> None:
    done = subprocess.run([sys.executable, "-c", PAIRS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_splits_of_another_shape_than_the_training_samples() -> None:
    pairs = arrays([3, 3])
    with pytest.raises(fv.BadInput, match=r"test: samples of x have shape \(2,\), but \(4,\)"):
        fv.Federation.from_arrays(pairs, test=[(x[:, :2], y) for x, y in pairs])
    with pytest.raises(fv.BadInput, match="test: y is torch"):
        fv.Federation.from_arrays(pairs, test=[(x, np.array(y, float)) for x, y in pairs])


# -- states and progress ---------------------------------------------------------------------------
def test_states_that_do_not_fit() -> None:
    of = {m.label: fv.train("multinomial", DATA, m, 2, evaluate_local=False).state for m in METHODS}
    refused("state is one of AFL", "AAggFF cannot continue", method=fv.AAggFF(), rounds=4,
            state=of["AFL"])  # fmt: skip
    refused("state is one of FedAvg", method=fv.FairLoss(0.5), rounds=4, state=of["FedAvg"])
    refused("state is one of FairGrad", method=fv.FedAvg(), rounds=4, state=of["FairGrad"])
    more = fv.Federation.from_arrays(arrays([5, 3, 2]), classes=3)
    refused("other clients", "(2,)", "(3,)", data=more, method=fv.AFL(), rounds=4, state=of["AFL"])
    refused("another model", "1.bias is (3,)", model="2nn", rounds=4, state=of["FedAvg"])
    refused(
        "another model", "torch.float32, not", rounds=4, state=of["FedAvg"], dtype=torch.float64
    )
    refused("2 rounds behind it", "rounds = 4", rounds=2, state=of["FedAvg"])
    fv.train("multinomial", DATA, fv.QFFL(1.0), 4, state=of["FedAvg"])  # only a model: fine


class WithoutMemory(fv.Method, frozen=True):
    """An author forgot what `weigh` returns."""

    def weigh(self, memory: dict, replies: Replies) -> Tensor:  # type: ignore[override]
        return replies.share


@pytest.mark.parametrize("engine", ["reference", "linear", "vmapped", "pooled"])
def test_a_method_that_returns_weights_alone_is_refused(engine: str) -> None:
    config.update("jaxtyping_disable", True)  # it would refuse them by itself
    pair = torch.eye(2), torch.arange(2)
    data = fv.Federation.from_arrays([pair] * 2)  # two weights could be taken for the two things
    with pytest.raises(fv.BadInput, match="must return two things: weights, memory"):
        fv.train("multinomial", data, WithoutMemory(), rounds=1, engine=engine)


@pytest.mark.parametrize("memory", [{"last": torch.ones(1)}, None, ["last"]])
def test_memory_that_a_run_could_not_continue_from_is_refused(memory: object) -> None:
    """It was trained, and stored, and the error of the continuation contradicted itself."""
    config.update("jaxtyping_disable", True)

    class Remembers(fv.Method, frozen=True):
        def weigh(self, before: dict, replies: Replies) -> tuple:  # type: ignore[override]
            return replies.share, memory

    for engine in ("auto", "reference"):
        refused("names that initial_memory gives, []", method=Remembers(), engine=engine)


def test_a_method_that_returns_weights_alone_is_refused_for_secure_sums() -> None:
    config.update("jaxtyping_disable", True)
    with pytest.raises(fv.BadInput, match="must return two things: weights, memory"):
        is_additive(WithoutMemory())


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    fv.train("multinomial", DATA, fv.FedAvg(), 3, progress=True)
    told = capsys.readouterr()
    assert "FedAvg: 3/3" in told.err
    assert not told.out
    seen: list[tuple[int, int]] = []
    fv.train("multinomial", DATA, fv.FedAvg(), 3, progress=lambda *done: seen.append(done))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    fv.train("multinomial", DATA, fv.FedAvg(), 1, progress=False)
    assert not capsys.readouterr().err


def test_cross_entropy_of_float_targets_is_refused() -> None:
    refused("cross_entropy", "mse", data=REGRESSION, model="linear")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fv.FairLoss(-1.0), ["FairLoss.strength", "-1.0", ">= 0"]),
        (lambda: fv.FairGrad(float("nan")), ["FairGrad.strength", "nan"]),
        (lambda: fv.FairGrad(float("inf")), ["FairGrad.strength", "inf"]),
        (lambda: fv.QFFL(q=-0.1), ["QFFL.q", ">= 0"]),
        (lambda: fv.AFL(step=0.0), ["AFL.step", "> 0"]),
        (lambda: fv.AFL(order="dual"), ["AFL.order", "did you mean 'dual_first'?"]),
        (lambda: fv.AAggFF(cdf="gaussian"), ["AAggFF.cdf", "normal", "logistic"]),
        (lambda: fv.FedAvg(weights="sizes"), ["FedAvg.weights", "did you mean 'size'?"]),
        (lambda: fv.FairLoss(0.5, collapsed=True), ["FairLoss.collapsed", "exact=True"]),
    ],
)
def test_bad_methods_are_refused_when_they_are_made(make, words: list[str]) -> None:
    with pytest.raises(fv.BadInput) as caught:
        make()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_labels_outside_are_refused_with_the_place() -> None:
    with pytest.raises(fv.BadInput, match=r"client 1, sample 0: label 7 is outside 0 … 2"):
        fv.Federation.from_arrays(arrays([2, 1], labels=[0, 7]), classes=3)


@pytest.mark.parametrize("engine", ["reference", "pooled", "vmapped", "blocked"])
def test_batch_norm_refuses_batches_of_one(engine: str) -> None:
    options: dict = {"model": small_cnn(batch_norm=True), "engine": engine}
    refused("batch_size = 1", "2 or more", data=images(4), batch_size=1, **options)
    lonely = images(3, sizes=(1, 1))
    refused("client 0", "one training sample", "min_samples", data=lonely, **options)


def test_the_collapsed_form_refuses_an_epoch_of_several_batches() -> None:
    method = fv.FairLoss(0.5, exact=True, collapsed=True)
    refused("local_steps = 1", method=method, batch_size=2, local_epochs=1)


def test_an_epoch_of_one_batch_is_one_step() -> None:
    one = fv.train("multinomial", DATA, fv.FedAvg(), rounds=2, local_epochs=1)
    step = fv.train("multinomial", DATA, fv.FedAvg(), rounds=2)
    assert one.provenance["engine"] == step.provenance["engine"] == "linear"
    assert torch.equal(one.loss, step.loss)


# -- odd but fine ----------------------------------------------------------------------------------
def finite(history: fv.History) -> None:
    assert history.diverged_at is None
    for value in (history.loss, history.weights, *history.state.params.values()):
        assert bool(torch.isfinite(value).all())


@by_label
@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("engine", ["reference", "auto"])
def test_few_clients(method: fv.Method, clients: int, engine: str) -> None:
    data = fv.Federation.from_arrays(
        arrays([4] * clients), test=arrays([2] * clients), classes=3
    )  # fmt: skip
    history = fv.train("multinomial", data, method, rounds=3, engine=engine)
    finite(history)
    if clients == 1:
        assert math.isnan(history.fairness().variance_over_clients)  # of one client


@by_label
def test_clients_with_one_sample_of_one_class(method: fv.Method) -> None:
    labels = [0, 1, 2, 1]
    data = fv.Federation.from_arrays(arrays([1, 1, 1, 1], labels), test=arrays([1] * 4, labels))
    history = fv.train("multinomial", data, method, rounds=3, batch_size=2, local_epochs=1)
    finite(history)
    assert np.isfinite(history.fairness().mean)


@by_label
def test_a_client_without_test_samples_counts_in_no_mean(method: fv.Method) -> None:
    test = arrays([3, 0, 2])
    data = fv.Federation.from_arrays(arrays([4, 3, 2]), test=test, classes=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = fv.train("multinomial", data, method, rounds=2)
        found = history.fairness()
    finite(history)
    table = history.accuracy["test", "global"]
    assert table.isnan().any(0).tolist() == [False, True, False]
    assert (found.clients, found.dropped_clients) == (2, 1)
    assert found.mean == pytest.approx(float(table[-1, [0, 2]].mean()))


def test_a_federation_of_one_class() -> None:
    """Its loss goes to zero, where AAggFF divides by the mean loss and q-FFL takes powers of it."""
    data = fv.Federation.from_arrays(arrays([3, 3], labels=[0, 0]), classes=1)
    for method in METHODS:
        history = fv.train("multinomial", data, method, rounds=3)
        finite(history)
        assert float(history.loss.abs().max()) == 0


def test_regression_has_losses_and_no_accuracy() -> None:
    history = fv.train("linear", REGRESSION, fv.FairGrad(0.1), rounds=3, lr=0.05, loss="mse")
    finite(history)
    assert not history.accuracy
    with pytest.raises(fv.BadInput, match="no test data"):
        history.fairness()
    with pytest.raises(fv.BadInput, match="regression has no accuracy"):
        history.accuracy["test", "global"]


def test_a_loss_of_ones_own() -> None:
    def squared_hinge(outputs: Tensor, y: Tensor) -> Tensor:
        return torch.relu(1 - outputs.gather(1, y[:, None])[:, 0]) ** 2

    for engine in ("reference", "pooled", "vmapped", "blocked"):
        history = fv.train("multinomial", DATA, fv.FedAvg(), 5, loss=squared_hinge, engine=engine)
        assert float(history.loss[-1].mean()) < float(history.loss[0].mean())


@pytest.mark.parametrize("device", ["meta", "tpu", "", "cuda:x", "cpu\n", "xla", "cuda:99999"])
def test_devices_that_cannot_compute(device: str) -> None:
    with pytest.raises(fv.BadInput, match="device") as caught:
        fv.train("multinomial", fv.load_federation("logistic", 3), fv.FedAvg(), 1, device=device)
    assert str(caught.value).isprintable()
    if "cannot be used here" in str(caught.value) and not torch.cuda.is_available():
        assert str(caught.value).endswith('give "cpu"')


def test_choices_inside_a_list_are_listed() -> None:
    with pytest.raises(fv.BadInput, match=r"did you mean 'valid'[?] known are test, train, valid"):
        EvaluateSettings(splits=("valdi",))


def test_the_first_forward_derivative_warns_of_nothing() -> None:
    """torch's own rules use what torch deprecates: users would see a FutureWarning of 2.15."""
    code = (
        "import warnings; warnings.simplefilter('error'); import fairvar as fv; "
        "fv.train('multinomial', fv.load_federation('logistic', 3), fv.FairGrad(0.1), 1, "
        "engine='vmapped')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-800:]


@pytest.mark.parametrize("kind", [fv.BadInput, fv.IntegrityError, fv.RunFailed])
def test_every_error_is_one_printable_line(kind: type[Exception]) -> None:
    error = kind("a\x1b[31m\n\x00\x7f name " + "x" * 5000)
    assert str(error).isprintable()
    assert len(str(error)) < 1300
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    config.update("jaxtyping_disable", True)
    pairs = [(np.eye(4) * (i + 1), np.arange(4) % 2) for i in range(3)]
    data = fv.Federation.from_arrays(pairs, test=pairs)
    history = fv.train("multinomial", data, fv.TERM(np.float32(2)), np.int64(2), torch.tensor(0.5),
                       seed=np.int32(3), batch_size=np.int64(2), evaluate_every=1)  # fmt: skip
    same = fv.train("multinomial", data, fv.TERM(2.0), 2, 0.5, seed=3, batch_size=2,
                    evaluate_every=1)  # fmt: skip
    assert history.method == same.method
    assert all(map(torch.equal, history.state.tensors(), same.state.tensors()))


def test_labels_in_a_column_are_explained() -> None:
    pairs = [(np.eye(4), np.arange(4)[:, None] % 2)]
    with pytest.raises(fv.BadInput, match="if a sample has one label, give y as an array"):
        fv.train("multinomial", fv.Federation.from_arrays(pairs), fv.FedAvg(), 1)


@by_label
def test_training_where_gradients_are_switched_off(method: fv.Method) -> None:
    """As notebooks do for evaluation. Threads of clients had gradients, one thread had none."""
    net = small_cnn(batch_norm=True)
    data, options = images(3), {"rounds": 2, "lr": 0.1, "batch_size": 4, "local_epochs": 1}
    expected = fv.train(net, data, method, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        found = fv.train(net, data, method, **options)  # type: ignore[arg-type]
        fv.new_clients(found, net, data, evaluate_splits=("train",))
        assert fv.check_model(net, data.train.x[:4].float()) == []
        assert not torch.is_grad_enabled()
    assert all(torch.equal(found.model[k], leaf) for k, leaf in expected.model.items())
