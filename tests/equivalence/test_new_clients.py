"""Clients that join later: their local steps are the engine's, and those of torch's own SGD."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn

import fairvar as fv
from fairvar.data import clinics
from fairvar.errors import BadInput

STEPS = (0, 1, 4)
EXACT: dict[str, Any] = {"dtype": torch.float64}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


@pytest.fixture(scope="module")
def parts() -> tuple[fv.Federation, fv.Federation]:
    return clinics(12, seed=2).hold_out(0.4, seed=0)


def trained(model: nn.Module | str, federation: fv.Federation) -> fv.History:
    return fv.train(model, federation, fv.FedAvg(), rounds=5, lr=0.2, evaluate_every=5, **EXACT)


@pytest.mark.parametrize("model", ["multinomial", network(), normed()], ids=["linear", "mlp", "bn"])
@pytest.mark.parametrize("batch_size", [None, 16])
def test_every_engine_takes_the_same_steps(parts, model, batch_size):
    train, later = parts
    history = trained(model, train)
    found, plain = (
        fv.new_clients(history, model, later, STEPS, 0.3, batch_size=batch_size, engine=engine,
                       evaluate_splits=("valid", "test"))
        for engine in ("auto", "reference")
    )  # fmt: skip
    assert list(found.loss) == [(part, k) for part in ("valid", "test") for k in STEPS]
    for place in found.loss:
        assert torch.allclose(found.loss[place], plain.loss[place], rtol=0, atol=1e-10), place
        assert torch.equal(found.accuracy[place], plain.accuracy[place]), place
    assert not torch.allclose(found.loss["test", 0], found.loss["test", 4], atol=1e-3)


def by_hand(history: fv.History, federation: fv.Federation, client: int, steps: int) -> Tensor:
    """The test loss after full-batch steps of torch's own optimiser."""
    model = network().double()
    model.load_state_dict(history.model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = federation.train.of(client)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    assert federation.test is not None
    x, y = federation.test.of(client)
    return nn.functional.cross_entropy(model(x), y).detach()


def test_the_steps_are_those_of_torch(parts):
    train, later = parts
    history = trained(network(), train)
    found = fv.new_clients(history, network(), later, STEPS, lr=0.3)
    for k in STEPS:
        expected = torch.stack([by_hand(history, later, i, k) for i in range(later.clients)])
        assert torch.allclose(found.loss["test", k], expected, rtol=0, atol=1e-10), k


def test_batches_are_those_of_a_round_of_training(parts):
    """One round of FedAvg on the new clients from the same model shows the same local models."""
    train, later = parts
    history = trained(network(), train)
    start = network().double()
    start.load_state_dict(history.model)
    found = fv.new_clients(history, network(), later, 3, lr=0.1, batch_size=8, seed=5)
    again = fv.train(start, later, fv.FedAvg(), rounds=1, lr=0.1, local_steps=3, batch_size=8,
                     seed=5, **EXACT)  # fmt: skip
    assert torch.equal(found.accuracy["test", 3], again.accuracy["test", "local"][-1])
    assert torch.allclose(found.loss["test", 3], again.evaluated_loss["test", "local"][-1],
                          rtol=0, atol=1e-12)  # fmt: skip
    other = fv.new_clients(history, network(), later, 3, lr=0.1, batch_size=8, seed=6)
    assert not torch.equal(found.loss["test", 3], other.loss["test", 3])


def test_zero_steps_are_the_global_model(parts):
    train, later = parts
    history = trained("multinomial", train)
    same = fv.new_clients(history, "multinomial", train, 0)
    assert torch.equal(same.accuracy["test", 0], history.accuracy["test", "global"][-1])
    assert same.fairness() == history.fairness("test")
    assert same.steps == (0,)
    new = fv.new_clients(history, "multinomial", later, 0)
    assert torch.equal(new.samples["test"], later.test.counts)


def test_methods_with_personal_models_give_their_global_one(parts):
    train, later = parts
    history = fv.train("multinomial", train, fv.Ditto(), rounds=2, **EXACT)
    found = fv.new_clients(history, "multinomial", later, (0, 2))
    assert found.fairness(2).clients == later.clients


def test_the_table_has_names_and_every_client(parts):
    pairs = [(np.eye(4) * (i + 1), np.arange(4) % 2) for i in range(3)]
    whole = fv.Federation.from_arrays(pairs, test=pairs, client_names=["a", "b", "c"])
    train, later = whole.hold_out(["b", "c"])
    history = fv.train("multinomial", train, fv.FedAvg(), rounds=1)
    found = fv.new_clients(history, "multinomial", later, (2, 0))
    frame = found.to_frame()
    assert frame["client"].tolist() == ["b", "c", "b", "c"]
    assert frame["steps"].tolist() == [0, 0, 2, 2]
    assert frame["accuracy"].tolist() == [*found.accuracy["test", 0], *found.accuracy["test", 2]]
    lines = repr(found).splitlines()
    assert lines[0] == "FedAvg, 2 new clients"
    assert [line.split()[1] for line in lines[2:]] == ["0", "2"]
    assert f"{found.fairness(2).mean:.4f}" in lines[-1]


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_scores_are_by_the_metric_of_the_history(engine):
    draw = np.random.default_rng(0)
    slope = np.array([1.0, -2.0, 0.5])
    pairs = [(x, x @ slope + 0.1 * i) for i in range(5) for x in [draw.normal(size=(8 + i, 3))]]
    train, later = fv.Federation.from_arrays(pairs, test=pairs).hold_out([3, 4])
    history = fv.train("linear", train, fv.Ditto(), rounds=2, loss="mse", metric="r2", **EXACT)
    found = fv.new_clients(history, "linear", later, (0, 2), loss="mse", engine=engine)
    for client, (x, y) in enumerate(pairs[3:]):
        weight = history.model["1.weight"][0].numpy()
        for steps in (0, 2):
            error = y - x @ weight
            expected = 1 - (error**2).sum() / ((y - y.mean()) ** 2).sum()
            assert float(found.score["test", steps][client]) == pytest.approx(expected, abs=1e-10)
            for _ in range(2):  # plain gradient descent on ½ squared errors
                weight = weight + 0.1 * x.T @ (y - x @ weight) / len(y)
    assert found.fairness(2).worst_10_percent == float(found.score["test", 2].min())
    assert repr(found).startswith("Ditto, 2 new clients, by R²\n")
    frame = found.to_frame()
    assert list(frame) == ["client", "split", "steps", "r2", "accuracy", "loss"]
    by_error = fv.new_clients(history, "linear", later, 2, loss="mse", metric="rmse")
    assert f"{by_error.fairness(2).largest:.4f}" in repr(by_error)  # the worst


def test_an_own_metric_is_asked_for_where_it_is_not_stored(parts, tmp_path):
    def bias(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) - targets).double().mean()

    train, later = parts
    fv.train("multinomial", train, fv.FedAvg(), 1, metric=bias, **EXACT).save(tmp_path / "h")
    loaded = fv.load(tmp_path / "h")
    with pytest.raises(BadInput, match="function of the metric bias is not stored"):
        fv.new_clients(loaded, "multinomial", later)
    assert fv.new_clients(loaded, "multinomial", later, metric=bias).metric.name == "bias"


def test_positions_of_sequences_are_counted():
    x, tags = torch.arange(8).reshape(4, 2), torch.tensor([[0, 1], [1, -100], [0, 1], [1, -100]])
    pairs = [(x, tags), (x, tags)]
    train, later = fv.Federation.from_arrays(pairs, test=pairs).hold_out([1])
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
    found = fv.new_clients(fv.train(model, train, fv.FedAvg(), 1), model, later, np.int64(0))
    assert found.samples["test"].tolist() == [6]


def test_regression_is_scored_by_its_loss():
    pairs = [(np.eye(3), np.ones((3, 1)) * i) for i in range(4)]
    train, later = fv.Federation.from_arrays(pairs, test=pairs).hold_out(0.5)
    history = fv.train("linear", train, fv.FedAvg(), rounds=1, loss="mse")
    found = fv.new_clients(history, "linear", later, (0, 3), loss="mse")
    assert bool((found.loss["test", 3] <= found.loss["test", 0]).all())
    assert len(repr(found).splitlines()) == 4
    assert found.fairness(3).mean == float(found.loss["test", 3].mean())
    assert bool(found.accuracy["test", 3].isnan().all())


@pytest.mark.parametrize(("options", "message"), [
    ({"history": None}, "give what `train` returned"),
    ({"federation": None}, "a Federation of the new clients"),
    ({"steps": -1}, "whole numbers, at least 0"),
    ({"steps": ()}, "whole numbers"),
    ({"steps": (0, 1.5)}, "whole numbers"),
    ({"steps": 1.5}, "whole numbers"),
    ({"steps": None}, "whole numbers"),
    ({"lr": 0.0}, "train.lr"),
    ({"model": "2nn"}, "another model"),
    ({"evaluate_splits": ("exam",)}, "no exam data"),
    ({"engine": "quick"}, "train.engine"),
])  # fmt: skip
def test_bad_input_ends_in_one_line(parts, options, message):
    config.update("jaxtyping_disable", True)  # it would refuse None by itself
    given = {"history": trained("multinomial", parts[0]), "model": "multinomial",
             "federation": parts[1], **options}  # fmt: skip
    with pytest.raises(BadInput, match=message):
        fv.new_clients(**given)
    with pytest.raises(BadInput, match="no scores of 7 steps on 'test': there are 0 on test"):
        fv.new_clients(trained("multinomial", parts[0]), "multinomial", parts[1], 0).fairness(7)


def test_a_run_that_diverged_is_refused(parts):
    history = replace(trained("multinomial", parts[0]), diverged_at=3)
    with pytest.raises(BadInput, match="diverged in round 3"):
        fv.new_clients(history, "multinomial", parts[1], 0)
