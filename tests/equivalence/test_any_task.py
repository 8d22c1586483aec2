"""Several inputs, sequences of different lengths and dropout: the reference loop, every kernel that
can run them and the messages of a deployment give the same numbers."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fairvar as fv
from checks import distance, same_bytes
from fairvar.common import rng
from fairvar.deploy.client import Agreement
from fairvar.deploy.guard import FederationSettings
from fairvar.deploy.run import LocalTransport, federate, local_clients
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.models import check_model, swap_dropout
from fairvar.models.norm import apply

TOLERANCE = 1e-10
LENGTH, TOKENS, CLASSES = 5, 7, 4
METHODS = (fv.FedAvg(), fv.QFFL(1.0), fv.FairLoss(0.5, exact=True), fv.FairGrad(0.3))
EPOCH: dict[str, Any] = {"batch_size": 2, "local_epochs": 1}
KINDS = ("dict", "image", "sequence")


class TwoInputs(nn.Module):
    """Tokens and numbers → one class."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.numbers = nn.Embedding(TOKENS, 3), nn.Linear(2, 3)
        self.drop, self.head = nn.Dropout(0.4), nn.Linear(3, CLASSES)

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        hidden = torch.tanh(self.words(tokens).mean(1) + self.drop(self.numbers(numbers)))
        return self.head(self.drop(hidden))  # the same layer again: another mask


class Tagger(nn.Module):
    """Tokens → a class for every position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attend = (
            nn.Embedding(TOKENS, 4),
            nn.MultiheadAttention(4, 2, batch_first=True),
        )
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.words(tokens))
        return self.head(x + self.attend(x, x, x, need_weights=False)[0])


class Image(nn.Module):
    """Convolutions train client by client on a CPU; dropout of whole channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(16, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


SIZES, TESTED = (3, 7, 1, 5), (2, 0, 3, 1)


def clients(kind: str, sizes: tuple[int, ...], seed: int) -> list[tuple[Any, Tensor]]:
    draw = torch.Generator().manual_seed(seed)

    def client(n: int) -> tuple[Any, Tensor]:
        tokens = torch.randint(0, TOKENS, (n, LENGTH), generator=draw)
        numbers = torch.randn(n, 2, generator=draw, dtype=torch.float64)
        label = torch.randint(0, CLASSES, (n,), generator=draw)
        if kind == "dict":
            return {"tokens": tokens, "numbers": numbers}, label
        if kind == "tuple":
            return (tokens, numbers), label
        if kind == "image":
            return torch.randn(n, 1, 4, 4, generator=draw, dtype=torch.float64), label
        tags = torch.randint(0, CLASSES, (n, LENGTH), generator=draw)
        length = torch.randint(1, LENGTH + 1, (n, 1), generator=draw)
        return tokens, torch.where(torch.arange(LENGTH) < length, tags, -100)

    return [client(n) for n in sizes]


def federation(kind: str) -> fv.Federation:
    return fv.Federation.from_arrays(
        clients(kind, SIZES, 0), test=clients(kind, TESTED, 1), classes=CLASSES
    )


DATA = {kind: federation(kind) for kind in ("dict", "tuple", "image", "sequence")}
MODELS = {"dict": TwoInputs, "tuple": TwoInputs, "image": Image, "sequence": Tagger}


def built(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MODELS[kind]()


def run(kind: str, method: fv.Method, engine: str = "auto", **more: Any) -> fv.History:
    given = {"rounds": 2, "lr": 0.3, "dtype": torch.float64, "evaluate_every": 2, **more}
    return fv.train(built(kind), DATA[kind], method, engine=engine, **given)


def deployed(kind: str, method: fv.Method, **train: Any) -> fv.History:
    data = DATA[kind]
    settings = TrainSettings(rounds=2, lr=0.3, dtype="float64", **train)
    agreed = Agreement(
        model=built(kind),
        method=method,
        loss="cross_entropy",
        train=settings,
        evaluate=EvaluateSettings(every=2),
        clients=data.clients,
        input_shape=data.input_shape,
        classes=data.classes,
        like=data.train.blank(4),
    )
    transport = LocalTransport(local_clients(agreed, data))
    return federate(agreed, FederationSettings(weight_cap=1.0), transport).history


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
@pytest.mark.parametrize("kind", KINDS)
def test_one_step_in_every_kernel(kind: str, method: fv.Method) -> None:
    """Pooled for FedAvg and FairLoss, blocked for q-FFL and FairGrad (vmapped with attention, whose
    curvature torch gets wrong there)."""
    for work in ({}, {"batch_size": 2})[: 2 if method == METHODS[0] else 1]:
        expected, found = (run(kind, method, engine, **work) for engine in ("reference", "auto"))
        assert found.provenance["engine"] in ("pooled", "blocked", "vmapped")
        assert max(distance(found, expected).values()) <= TOLERANCE
        if method == METHODS[0]:
            for engine in ("blocked", "vmapped"):
                found = run(kind, method, engine, **work)
                assert max(distance(found, expected).values()) <= TOLERANCE


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
@pytest.mark.parametrize("kind", KINDS)
def test_epochs_captured_and_deployed(kind: str, method: fv.Method) -> None:
    """Captured rounds are those of the vmapped kernel on fixed tensors."""
    expected = run(kind, method, "reference", **EPOCH)
    assert expected.diverged_at is None
    captured = run(kind, method, capture=True, **EPOCH)
    assert captured.provenance["captured"]
    assert captured.provenance["engine"] == "vmapped"
    assert max(distance(captured, expected).values()) <= TOLERANCE
    found = deployed(kind, method, **EPOCH)
    state, other = found.state.params, expected.state.params
    assert max(float((state[k] - other[k]).abs().max()) for k in other) <= TOLERANCE
    for key, table in expected.accuracy.items():
        assert torch.equal(found.accuracy[key].nan_to_num(), table.nan_to_num())


def test_chunks_and_participants_change_no_mask() -> None:
    whole, cut = (run("tuple", fv.FedAvg(), "vmapped", chunk=c, **EPOCH) for c in (None, 1))
    same_bytes(whole, cut)
    some = {"participants": 2, "batch_size": 2, "local_epochs": 2}
    expected = run("dict", fv.FedAvg(), "reference", **some)
    assert max(distance(run("dict", fv.FedAvg(), **some), expected).values()) <= TOLERANCE


def test_compiled_steps_drop_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairvar.engine.kernels.compiled.BACKEND", "eager")
    found = run("dict", fv.FairLoss(0.5), compile=True, **EPOCH)
    expected = run("dict", fv.FairLoss(0.5), "reference", **EPOCH)
    assert max(distance(found, expected).values()) <= TOLERANCE


def test_personal_models_drop_the_same() -> None:
    found, expected = (
        run("dict", fv.Ditto(0.5), engine, **EPOCH) for engine in ("auto", "reference")
    )
    assert max(distance(found, expected).values()) <= TOLERANCE


# -- dropout ---------------------------------------------------------------------------------------
def by_hand(key: int, layer: int, call: int, unit: int, p: float) -> bool:
    """Whether a unit is kept, in Python's integers."""
    bits, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & bits
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & bits
        return value ^ (value >> 31)

    of_call = mix(key + (layer * (1 << 20) + call + 1) * golden & bits)
    return mix(of_call + (unit + 1) * golden & bits) >> 11 >= round(p * (1 << 53))


def test_the_mask_is_the_hash_that_the_docs_name() -> None:
    layers = swap_dropout(nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.6))).train()
    keys = torch.tensor([rng.signed(rng.key(0, "sample", i)) for i in range(3)])
    found = apply(layers, torch.ones(3, 2, 4), keys)
    for i, key in enumerate(keys.tolist()):
        for unit, value in enumerate(found[i].flatten().tolist()):
            kept = all(by_hand(key % (1 << 64), n, 0, unit, p) for n, p in ((0, 0.3), (1, 0.6)))
            assert value == pytest.approx(1 / 0.7 / 0.4 if kept else 0)


def test_shares_and_independence() -> None:
    """The dropped share is p; samples, calls and steps have masks that do not know each other."""
    layer = swap_dropout(nn.Sequential(nn.Dropout(0.25)))
    keys = rng.sample_keys(torch.tensor(7), torch.zeros(400, dtype=torch.int64), torch.arange(400))
    ones = torch.ones(400, 500, dtype=torch.float64)
    masks = [
        apply(layer, ones, k) > 0 for k in (keys, rng.numbered(keys, 0), rng.numbered(keys, 1))
    ]
    again = layer(ones) > 0  # another call of the same pass
    for mask in (*masks, again):
        assert abs(float(mask.double().mean()) - 0.75) < 5 * math.sqrt(0.75 * 0.25 / mask.numel())
        assert abs(float(apply(layer, ones, keys).mean()) - 1) < 0.01
    for other in (*masks[1:], again, masks[0].roll(1, 0), masks[0].roll(1, 1)):
        both = float((masks[0] & other).double().mean())
        assert abs(both - 0.75**2) < 0.005


def test_dropout_is_for_training_only_and_asks_no_generator() -> None:
    before = torch.get_rng_state()
    history = run("dict", fv.FedAvg())
    assert torch.equal(torch.get_rng_state(), before)
    module = built("dict").double().eval()
    module.load_state_dict(history.model)
    x, y = DATA["dict"].test.of(2)  # type: ignore[union-attr]
    right = float((module(**x).argmax(1) == y).double().mean())
    assert float(history.accuracy["test", "global"][-1, 2]) == pytest.approx(right)
    other = run("dict", fv.FedAvg(), seed=1)
    assert not torch.equal(history.loss, other.loss)


def test_losses_on_all_data_are_those_without_dropout() -> None:
    class OnAllData(fv.FairLoss, tag="on-all-data"):
        loss_data = "full"

    method = OnAllData(0.5)
    expected = run("dict", method, "reference")
    module = built("dict").double().eval()
    x, y = DATA["dict"].train.of(1)
    loss = nn.functional.cross_entropy(module(**x), y).detach()
    assert float(expected.loss[0, 1]) == pytest.approx(float(loss))
    assert max(distance(run("dict", method), expected).values()) <= TOLERANCE


def test_samples_must_stay_on_the_first_axis() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.head = nn.Dropout(0.5), nn.Linear(LENGTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(x.T).T)

    (problem,) = check_model(Turned(), torch.ones(3, LENGTH))
    assert "keep the samples on the first axis" in problem
    assert problem.fatal


INSIDE = [nn.TransformerEncoderLayer(4, 2, dropout=0.1), nn.LSTM(4, 4, 2, dropout=0.1)]


@pytest.mark.parametrize("layer", INSIDE, ids=["attention", "lstm"])
def test_dropout_inside_layers_of_torch_is_refused(layer: nn.Module) -> None:
    fatal = [p for p in check_model(nn.Sequential(layer)) if p.fatal]
    assert ["use nn.Dropout layers" in p for p in fatal] == [True]


# -- sequences -------------------------------------------------------------------------------------
def test_losses_and_accuracies_of_sequences_by_hand() -> None:
    data, module = DATA["sequence"], built("sequence").double()
    history = run("sequence", fv.FedAvg(), rounds=1, evaluate_every=1)
    trained = copy.deepcopy(module).eval()
    trained.load_state_dict(history.model)
    test = data.test
    assert test is not None
    for i in (0, 2, 3):
        x, y = test.of(i)
        outputs, losses, right, answers = trained(x).detach(), [], 0, 0
        for sample in range(len(y)):
            real = y[sample] != -100
            losses.append(
                float(nn.functional.cross_entropy(outputs[sample][real], y[sample][real]))
            )
            right += int((outputs[sample].argmax(1) == y[sample])[real].sum())
            answers += int(real.sum())
        key = ("test", "global")
        assert float(history.evaluated_loss[key][0, i]) == pytest.approx(sum(losses) / len(losses))
        assert float(history.accuracy[key][0, i]) == pytest.approx(right / answers)
        assert int(history.samples["test"][i]) == answers
    assert bool(history.accuracy["test", "global"][0, 1].isnan())


def test_padding_of_sequences_changes_nothing() -> None:
    """More padding of inputs and targets: the same losses, as the model does not look there."""
    model = nn.Sequential(nn.Embedding(TOKENS, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    data = DATA["sequence"]

    def longer(split: Any) -> Any:
        more = (nn.functional.pad(split.x, (0, 3)), nn.functional.pad(split.y, (0, 3), value=-100))
        return replace(split, x=more[0], y=more[1])

    padded = replace(data, train=longer(data.train), test=longer(data.test))
    given: dict[str, Any] = {"rounds": 2, "dtype": torch.float64, "evaluate_every": 1}
    for engine in ("reference", "auto", "vmapped"):
        a, b = (
            fv.train(model, d, fv.FairGrad(0.3), engine=engine, **given) for d in (data, padded)
        )
        assert max(distance(a, b).values()) <= TOLERANCE


# -- what is refused -------------------------------------------------------------------------------
def test_inputs_that_do_not_fit_each_other() -> None:
    (a, y), *_ = clients("dict", (3,), 0)
    for x, words in (
        ({"tokens": a["tokens"]}, "client 1: x is several inputs ['tokens'], but"),
        (a["tokens"], "client 1: x is one array, but several inputs"),
        ({**a, "numbers": a["numbers"][:2]}, "client 1: 2 samples in x['numbers'] but 3 targets"),
        ({**a, "numbers": a["numbers"][:, :1]}, "x['numbers'] (1,) in client 1, (2,) in the first"),
        ({**a, "numbers": a["numbers"] / 0}, "client 1: x['numbers'] holds NaN or infinity"),
    ):
        with pytest.raises(fv.BadInput) as caught:
            fv.Federation.from_arrays([(a, y), (x, y)])
        assert words in str(caught.value)
    with pytest.raises(fv.BadInput, match="takes one input, but samples have several"):
        fv.train("multinomial", DATA["dict"], fv.FedAvg(), 1)
    empty = torch.tensor([[1, -100], [-100, -100]])
    with pytest.raises(fv.BadInput, match="sample 1: all targets are -100"):
        fv.Federation.from_arrays([(torch.ones(2, 2), empty)])


def test_integers_stay_integers() -> None:
    moved = DATA["dict"].to("cpu", torch.float32).train.x
    assert (moved["tokens"].dtype, moved["numbers"].dtype) == (torch.int64, torch.float32)
    assert check_model(built("dict"), DATA["dict"].to("cpu", torch.float32).train.x) == []
    history = run("dict", fv.FedAvg(), dtype=torch.float32, precision="bfloat16")
    assert {leaf.dtype for leaf in history.model.values()} == {torch.float32}
