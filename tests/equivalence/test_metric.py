"""A score by any metric is the same in every kernel, in a grid and through a deployment's messages,
and the same as the metric's function on the outputs of the final model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fairvar as fv
from fairvar.deploy.client import METRIC, Agreement, Message
from fairvar.deploy.guard import FederationSettings
from fairvar.deploy.run import Federated, LocalTransport, federate, local_clients
from fairvar.engine.grid import Member, train_grid
from fairvar.engine.settings import EvaluateSettings, TrainSettings
from fairvar.engine.state import DoesNotFit
from fairvar.engine.train import run_rounds

TOLERANCE = 1e-10
SIZES = (5, 12, 3, 8, 1, 7)


def arrays(seed: int, sizes: tuple[int, ...], regression: bool) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for i, n in enumerate(sizes):
        x = torch.randn(n, 4, generator=draw, dtype=torch.float64)
        y = x @ torch.arange(4.0).double() + i if regression else (x[:, :3] + i / 3).argmax(1)
        found.append((x, torch.zeros_like(y) if i == 2 and not regression else y))
    return found


def federation(regression: bool = False) -> fv.Federation:
    """Ragged; client 1 has no test samples, client 2 has one class, client 4 one sample."""
    tested = (6, 0, 4, 9, 1, 5)
    train, test = (arrays(s, sizes, regression) for s, sizes in ((0, SIZES), (1, tested)))
    return fv.Federation.from_arrays(train, test=test, classes=None if regression else 3)


LABELS, NUMBERS = federation(), federation(regression=True)


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of the right class over the mean, at its median sample: not a mean over samples."""
    return (outputs.gather(1, targets[:, None])[:, 0] - outputs.mean(1)).median()


MARGIN = fv.Metric(margin, higher_is_better=True)
NET = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
ENGINES = ("reference", "pooled", "blocked", "vmapped", "linear")
OPTIONS: dict = {"dtype": torch.float64, "evaluate_every": 2, "evaluate_splits": ("train", "test")}


def gap(one: fv.History, other: fv.History) -> float:
    assert one.score.keys() == other.score.keys()
    worst = 0.0
    for key, table in one.score.items():
        assert torch.equal(table.isnan(), other.score[key].isnan()), key
        worst = max(worst, float((table - other.score[key]).abs().nan_to_num().max()))
    return worst


def model_of(engine: str, data: fv.Federation) -> nn.Module | str:
    if engine == "linear":
        return "multinomial" if data.classes else "linear"
    torch.manual_seed(0)
    return NET if data.classes else nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.parametrize("metric", [MARGIN, "auc", "perplexity", "rmse", "r2"],
                         ids=["own", "auc", "perplexity", "rmse", "r2"])  # fmt: skip
def test_kernels_agree(metric: str | fv.Metric) -> None:
    data = NUMBERS if metric in ("rmse", "r2") else LABELS
    loss = "mse" if data is NUMBERS else "cross_entropy"
    for engine in ENGINES[1:]:
        steps = 2 if engine in ("vmapped", "linear") else 1
        given = {**OPTIONS, "metric": metric, "loss": loss, "local_steps": steps}
        model = model_of(engine, data)
        want = fv.train(model, data, fv.FedAvg(), 4, 0.1, engine="reference", **given)
        found = fv.train(model, data, fv.FedAvg(), 4, 0.1, engine=engine, **given)
        assert gap(found, want) <= TOLERANCE, engine
        assert len(want.score["test", "local"]) == 2


def test_personal_models_and_chunks() -> None:
    for options in ({}, {"chunk": 8}, {"participants": 3}):
        given = {**OPTIONS, **options, "metric": MARGIN}
        want = fv.train(NET, LABELS, fv.Ditto(), 2, 0.1, engine="reference", **given)
        found = fv.train(NET, LABELS, fv.Ditto(), 2, 0.1, **given)
        assert gap(found, want) <= TOLERANCE
        assert ("test", "personal") in found.score


@pytest.mark.parametrize("name", ["auc", "f1", "balanced_accuracy"])
def test_the_table_is_the_function_of_the_final_models_outputs(name: str) -> None:
    """With pieces that end within clients."""
    for metric in (name, MARGIN):
        history = fv.train(NET, LABELS, fv.FedAvg(), 2, 0.1, metric=metric, **OPTIONS)
        module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        module.load_state_dict(history.model)
        found = history.score["test", "global"][-1]
        function = history.metric
        for i in range(LABELS.clients):
            x, y = LABELS.splits["test"].of(i)
            expected = function(module(x.double()).detach(), y) if len(y) else math.nan
            np.testing.assert_allclose(float(found[i]), expected, rtol=1e-12, equal_nan=True)


def test_outputs_of_a_client_are_joined_over_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    want = fv.train(NET, LABELS, fv.FedAvg(), 2, 0.1, metric=MARGIN, **OPTIONS)
    for piece, block in ((1, 1), (4, 3)):
        with monkeypatch.context() as patch:
            patch.setattr("fairvar.engine.train.pooled_piece", lambda task, x, n=piece: n)
            patch.setattr("fairvar.engine.evaluate.BLOCK", block)
            found = fv.train(NET, LABELS, fv.FedAvg(), 2, 0.1, metric=MARGIN, **OPTIONS)
        assert gap(found, want) <= TOLERANCE


def test_clients_without_a_score_are_nan_and_counted() -> None:
    history = fv.train("multinomial", LABELS, fv.FedAvg(), 2, metric="auc")
    table = history.score["test", "global"][-1]
    assert table.isnan().tolist() == [False, True, True, False, True, False]
    found = history.fairness()
    assert (found.clients, found.dropped_clients) == (3, 3)
    assert math.isnan(found.noise_floor)
    assert not bool(history.accuracy["test", "global"][-1, [0, 2, 3, 4, 5]].isnan().any())


def test_defaults_and_what_follows_from_the_loss() -> None:
    plain = fv.train("multinomial", LABELS, fv.FedAvg(), 2)
    assert plain.metric == fv.METRICS["accuracy"]
    assert plain.score is plain.accuracy
    assert not plain.own_score
    for name in ("loss", "perplexity"):
        scored = fv.train("multinomial", LABELS, fv.FedAvg(), 2, metric=name)
        table = plain.evaluated_loss["test", "global"]
        wanted = table if name == "loss" else table.exp()
        assert torch.equal(scored.score["test", "global"].nan_to_num(), wanted.nan_to_num())
        assert torch.equal(plain.state.params["1.weight"], scored.state.params["1.weight"])
    regression = fv.train("linear", NUMBERS, fv.FedAvg(), 2, loss="mse", metric="rmse")
    squares = (2 * regression.evaluated_loss["test", "global"]).sqrt()  # the loss is ½ (z − y)²
    torch.testing.assert_close(regression.score["test", "global"], squares, equal_nan=True,
                               rtol=1e-5, atol=1e-6)  # fmt: skip


def test_the_frame_names_the_score() -> None:
    frame = fv.train("multinomial", LABELS, fv.FedAvg(), 2, metric="f1").to_frame()
    rows = frame["quantity"] == "f1"
    assert rows.sum() == 2 * LABELS.clients  # global and local models on test data
    assert set(frame["quantity"]) == {"loss", "weight", "accuracy", "evaluated_loss", "f1"}


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("rmse", "needs float targets"),
        ("acuracy", "did you mean 'accuracy'"),
        (fv.Metric(lambda z, y: z, name="many", higher_is_better=True), "must give one number"),
        ("nowhere:metric", "cannot be imported"),
    ],
)
def test_metrics_that_do_not_fit_are_refused_before_training(metric: object, words: str) -> None:
    with pytest.raises(fv.BadInput, match=words):
        fv.train("multinomial", LABELS, fv.FedAvg(), 2, metric=metric)  # type: ignore[arg-type]


def test_metrics_of_labels_are_refused_for_numbers() -> None:
    for metric, words in (("auc", "needs one label"), ("perplexity", "exp\\(loss\\)")):
        with pytest.raises(fv.BadInput, match=words):
            fv.train("linear", NUMBERS, fv.FedAvg(), 2, loss="mse", metric=metric)


def test_runs_of_a_grid_and_their_checkpoints() -> None:
    when = EvaluateSettings(every=1, metric=MARGIN)
    settings = [TrainSettings(rounds=3, lr=lr, dtype="float64") for lr in (0.1, 0.5)]
    members = [Member("multinomial", fv.FedAvg(), s) for s in settings]
    kept: list = []
    grid = train_grid(members, LABELS, "cross_entropy", when,
                      keep=lambda t, make: kept.append(make()))  # fmt: skip
    for found, s in zip(grid, settings, strict=True):
        single = run_rounds("multinomial", LABELS, fv.FedAvg(), "cross_entropy", s, when)
        assert gap(found, single) <= TOLERANCE
    after = [replace(m, start=start) for m, start in zip(members, kept[1], strict=True)]
    again = train_grid(after, LABELS, "cross_entropy", when)
    assert gap(again[0], grid[0]) == 0
    with pytest.raises(DoesNotFit, match="score/"):
        train_grid(after, LABELS, "cross_entropy", EvaluateSettings(every=1))


# -- deployments -----------------------------------------------------------------------------------
def deployed(
    metric: object, data: fv.Federation, fault: object = None, **more: object
) -> Federated:
    agreed = Agreement(
        model=model_of("linear", data), method=fv.FedAvg(),
        loss="cross_entropy" if data.classes else "mse",
        train=TrainSettings(rounds=3, lr=0.1, dtype="float64"),
        evaluate=EvaluateSettings(every=2, splits=("test",), metric=metric), clients=data.clients,
        input_shape=data.input_shape, classes=data.classes, **more,  # type: ignore[arg-type]
    )  # fmt: skip
    transport = LocalTransport(local_clients(agreed, data))
    if fault is not None:
        transport.fault = fault  # type: ignore[assignment]
    return federate(agreed, FederationSettings(), transport)


@pytest.mark.parametrize("metric", [MARGIN, "auc", "rmse"], ids=["own", "auc", "rmse"])
def test_nodes_send_one_number_and_it_is_the_same(metric: str | fv.Metric) -> None:
    data = NUMBERS if metric == "rmse" else LABELS
    found = deployed(metric, data)
    loss = "mse" if metric == "rmse" else "cross_entropy"
    want = fv.train(model_of("linear", data), data, fv.FedAvg(), 3, 0.1, dtype=torch.float64,
                    evaluate_every=2, evaluate_splits=("test",), metric=metric, loss=loss,
                    engine="reference")  # fmt: skip
    assert not found.refused
    assert gap(found.history, want) <= TOLERANCE
    assert found.history.metric == want.metric


def test_a_false_score_is_refused() -> None:
    def lie(request: Message, reply: Message) -> list[Message]:
        name = f"test/{METRIC}"
        if reply.client == 0 and name in reply.numbers:
            return [replace(reply, numbers={**reply.numbers, name: 1.5})]
        return [reply]

    found = deployed("auc", LABELS, lie)
    assert {r.client for r in found.refused} == {0}
    assert bool(found.history.score["test", "global"][:, 0].isnan().all())

    def more(request: Message, reply: Message) -> list[Message]:
        extra = {f"test/{METRIC}": 0.5} if reply.client == 0 else {}
        return [replace(reply, numbers={**reply.numbers, **extra})]

    found = deployed("accuracy", LABELS, more)  # such a number was not requested
    assert {r.client for r in found.refused} == {0}
