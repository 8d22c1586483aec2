"""The linear path = the reference loop, where it applies; and it applies only there.

Measured after three rounds on ragged clients, over all methods and kinds of local work: 7e-16
relative in float64 (allowed: 1e-12), 2e-7 in float32 (`test_engines.py` allows 2e-6 everywhere).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_engines import METHODS, OPTIONS, WORK, run
from torch import nn

import fairvar as fv
from checks import FURTHER, FURTHER_OPTIONS, distance, images
from fairvar.engine.kernels.linear import Linear, grams_pay
from fairvar.engine.kernels.linear.dual import groups_by_size
from fairvar.engine.settings import TrainSettings
from fairvar.engine.state import State
from fairvar.engine.train import choose_path, prepare

TOLERANCE = 1e-12
CASES = [(m, w) for m in METHODS + OPTIONS + FURTHER + FURTHER_OPTIONS for w in WORK]


def uneven() -> fv.Federation:
    """Sizes from 1 to 40, so that there are several tiles; some clients lack other samples."""
    draw = np.random.default_rng(5)

    def part(sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(draw.standard_normal((s, 2, 3)), draw.integers(0, 4, s)) for s in sizes]

    return fv.Federation.from_arrays(
        part([3, 40, 1, 17, 5, 38, 2, 18, 9]),
        part([0, 2, 3, 0, 1, 7, 2, 1, 1]),
        part([4, 0, 1, 2, 2, 9, 0, 1, 3]),
        classes=4,
    )


def agree(model: object, method: fv.Method, work: str = "step", **more: object) -> None:
    expected = run(model, method, "reference", work, **more)
    found = run(model, method, "linear", work, **more)
    assert found.provenance["engine"] == "linear"
    gaps = distance(found, expected)
    assert max(gaps.values()) <= TOLERANCE, gaps


@pytest.mark.parametrize(("method", "work"), CASES, ids=[f"{m!r}-{w}" for m, w in CASES])
def test_clients_of_all_sizes(method: fv.Method, work: str) -> None:
    agree("multinomial", method, work, data=uneven())


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(
    "method",
    [fv.FedAvg(), fv.QFFL(1.0), fv.FairLoss(0.5), fv.FairLoss(2.0, exact=True), fv.FairGrad(0.1)],
    ids=repr,
)
def test_cut_directions(method: fv.Method, work: str) -> None:
    agree("multinomial", method, work, clip_norm=0.3)


@pytest.mark.parametrize("method", [fv.FedAvg(), *METHODS[4:]], ids=repr)
def test_full_batches_in_several_steps(method: fv.Method) -> None:
    agree("multinomial", method, "step", data=uneven(), local_steps=3)
    agree("multinomial", method, "epoch", data=uneven(), local_epochs=3)


def layer(outputs: int, bias: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Linear(4, outputs, bias=bias)


def regression(*targets: int) -> fv.Federation:
    draw = np.random.default_rng(3)
    pairs = [
        (draw.standard_normal((s, 4)), draw.standard_normal((s, *targets))) for s in (5, 3, 9, 5)
    ]
    return fv.Federation.from_arrays(pairs, test=pairs)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_regression(method: fv.Method, work: str) -> None:
    for bias, data in ((True, regression(1)), (False, regression())):
        agree(layer(1, bias), method, work, data=data, loss="mse")
    agree(layer(2), method, work, data=regression(2), loss="mse")


def test_layers_without_bias_and_more_outputs_than_classes() -> None:
    pairs = [regression(1).train.of(i)[0] for i in range(4)]
    data = fv.Federation.from_arrays([(x, torch.arange(len(x)) % 3) for x in pairs], classes=3)
    for method in (fv.QFFL(1.0), fv.FairGrad(0.1, exact=True)):
        agree(layer(3, bias=False), method, "epoch", data=data)
        agree(layer(5), method, "epoch", data=data)


def chosen(model: object, data: fv.Federation, method: fv.Method, **options: object) -> str:
    loss = options.pop("loss", "cross_entropy")
    return prepare(model, data, method, loss, TrainSettings(**options)).path  # type: ignore[arg-type]


def test_it_is_chosen_for_affine_models_only() -> None:
    data, method = images(4), fv.FairGrad(0.1)
    assert chosen("multinomial", data, method) == "linear"
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 3))
    frozen = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    frozen[1].bias.requires_grad_(False)
    hooked = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    hooked.register_forward_hook(lambda module, given, output: 2 * output)
    for other in (hidden, frozen, hooked):
        assert chosen(other, data, method) == "blocked"
        with pytest.raises(fv.BadInput, match=r'engine="linear" .*"auto"'):
            chosen(other, data, method, engine="linear")

    def halved(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, y, reduction="none") / 2

    assert chosen("multinomial", data, method, loss=halved) == "blocked"
    assert chosen("multinomial", data, fv.FedAvg(), precision="bfloat16") == "pooled"


def large() -> fv.Federation:
    """Two clients of 300 samples with four features."""
    draw = np.random.default_rng(1)
    pairs = [(draw.standard_normal((300, 4)), draw.integers(0, 3, 300)) for _ in range(2)]
    return fv.Federation.from_arrays(pairs, test=pairs, classes=3)


def test_gram_matrices_must_pay() -> None:
    """Methods that need none take the linear path for large clients too."""
    data = large()
    assert chosen("multinomial", data, fv.FedAvg()) == "linear"
    assert chosen("multinomial", data, fv.FairGrad(0.1)) == "blocked"
    assert chosen("multinomial", data, fv.FairGrad(0.1), batch_size=16) == "linear"
    assert chosen("multinomial", data, fv.FedAvg(), batch_size=16, local_epochs=1) == "vmapped"
    prepared = prepare("multinomial", data, fv.FedAvg(), "cross_entropy", TrainSettings())
    assert not grams_pay(prepared.run)
    assert choose_path(prepared.run, "linear") == "linear"
    agree("multinomial", fv.FedAvg(), data=data)


@pytest.mark.parametrize("sizes", [[3, 40, 1, 17, 5, 38, 2, 18, 9], [7] * 5, list(range(1, 300))])
def test_tiles_hold_every_client_and_waste_little(sizes: list[int]) -> None:
    groups = groups_by_size(sizes)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    padded = sum(len(group) * max(sizes[i] for i in group) for group in groups)
    assert padded <= 1.3 * sum(sizes)
    assert len(groups) <= 16
    flat = [sizes[i] for group in groups for i in group]
    assert flat == sorted(flat, reverse=True)


def test_labels_are_compared_with_the_first_of_several_largest_logits() -> None:
    """All logits are zero: the answer is class 0, as argmax says."""
    module = layer(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    pairs = [(np.ones((3, 4)), [0, 1, 2])]
    data = fv.Federation.from_arrays(pairs, test=pairs, classes=3)
    for engine in ("reference", "linear"):
        found = fv.train(module, data, fv.FedAvg(), 1, 1e-9, engine=engine, dtype=torch.float64)
        assert float(found.accuracy["test", "local"]) == pytest.approx(1 / 3)


def test_an_evaluated_round_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local models are scored from what the round has left."""
    rounds, compute = [], Linear.compute

    def counted(kernel: Linear, state: State, t: int) -> object:
        rounds.append(t)
        return compute(kernel, state, t)

    monkeypatch.setattr(Linear, "compute", counted)
    history = fv.train("multinomial", images(5), fv.FairLoss(0.5), 10, evaluate_every=1)
    assert history.provenance["engine"] == "linear"
    assert ("test", "local") in history.accuracy
    assert rounds == list(range(10))
