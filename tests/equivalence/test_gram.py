"""Weights from the products of client updates: reference loop = vmapped, in all its forms."""

from __future__ import annotations

import pytest
import torch
from test_engines import TOLERANCE_64, run

import fairvar as fv
from checks import distance, images, same_bytes
from fairvar.common.tree import gram
from fairvar.engine.kernels import compiled
from fairvar.engine.settings import TrainSettings
from fairvar.engine.train import prepare
from fairvar.methods import Memory, Replies

METHODS: list[fv.Method] = [
    fv.FedMGDA(step=0.05),
    fv.FedMGDA(eps=1.0, scale="mean", decay=0.9, weights="size"),
    fv.FedFV(),
    fv.FedFV(alpha=0.5, external="off", losses="batch"),
    fv.AdaFed(),
    fv.AdaFed(normalise=True, losses="batch"),
]
CASES = [("multinomial", work) for work in ("step", "mini_batch", "epoch", "steps")]
CASES += [(model, work) for model in ("cnn", "batch_norm") for work in ("mini_batch", "epoch")]
# torch's own first use of forward-mode differentiation
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.*deprecated")


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize(("model", "work"), CASES)
@pytest.mark.parametrize("participants", [None, 4])
def test_engines_agree(method: fv.Method, model: str, work: str, participants: int | None) -> None:
    expected = run(model, method, "reference", work, participants=participants)
    assert expected.diverged_at is None
    found = run(model, method, "auto", work, participants=participants)
    assert found.provenance["engine"] == "vmapped"
    gaps = distance(found, expected)
    assert max(gaps.values()) <= TOLERANCE_64, gaps


@pytest.mark.parametrize("method", METHODS[::2], ids=repr)
@pytest.mark.parametrize("model", ["multinomial", "cnn", "batch_norm"])
def test_compiled_steps(method: fv.Method, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    expected = run(model, method, "reference", "epoch")
    found = run(model, method, "vmapped", "epoch", compile=True)
    assert max(distance(found, expected).values()) <= TOLERANCE_64


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("model", ["multinomial", "cnn"])
def test_bits_do_not_depend_on_the_chunks(method: fv.Method, model: str) -> None:
    more: dict = {"data": images(27), "dtype": torch.float32, "evaluate_local": False}
    whole, cut = (run(model, method, "vmapped", "epoch", chunk=c, **more) for c in (27, 8))
    same_bytes(cut, whole)


@pytest.mark.parametrize("engine", ["pooled", "blocked", "linear"])
def test_paths_without_a_model_per_client_refuse(engine: str) -> None:
    with pytest.raises(fv.BadInput, match=r"cannot do products of client updates; use \"auto\""):
        run("multinomial", fv.FedFV(), engine)


def test_a_solver_that_asks_the_host_is_not_recorded() -> None:
    data = images(4)
    for method, expected in ((fv.FedMGDA(), False), (fv.AdaFed(), False), (fv.FedFV(), True)):
        settings = TrainSettings(capture=True, dtype="float64")
        found = prepare("multinomial", data, method, "cross_entropy", settings)
        assert found.captures == expected, method


def test_a_recorded_round_is_an_ordinary_one() -> None:
    found, expected = (
        run("multinomial", fv.FedFV(), "vmapped", "epoch", capture=c) for c in (True, False)
    )
    assert max(distance(found, expected).values()) <= TOLERANCE_64


class Spy(fv.Method, frozen=True, tag="spy"):
    """Remembers the products that it was given."""

    uses_gram = True
    each_separately = True

    def initial_memory(self, clients: int) -> Memory:
        return {"seen": torch.zeros(clients, clients, dtype=torch.float64)}

    def weigh(self, memory: Memory, replies: Replies) -> tuple[torch.Tensor, Memory]:
        assert replies.gram is not None
        return replies.share, {"seen": replies.gram}


@pytest.mark.parametrize("engine", ["reference", "vmapped"])
@pytest.mark.parametrize("model", ["multinomial", "batch_norm"])
def test_products_are_those_of_the_parameters(engine: str, model: str) -> None:
    """Of x − x_i, computed here from the clients' own models; buffers do not count."""
    data = images(6)
    history = run(model, Spy(), engine, "epoch", data=data, rounds=1)
    start = run(model, fv.FedAvg(), "reference", data=data, rounds=1, lr=1e-300).state.params
    updates = []
    for i in range(data.clients):
        only = run(model, Only(client=i), "reference", "epoch", data=data, rounds=1)
        updates.append(torch.cat([(start[k] - v).flatten() for k, v in only.state.params.items()]))
    U = torch.stack(updates)
    torch.testing.assert_close(history.state.memory["seen"], U @ U.T, rtol=1e-9, atol=1e-12)


class Only(fv.Method, frozen=True, tag="only"):
    """The model of one client."""

    client: int = 0

    def weigh(self, memory: Memory, replies: Replies) -> tuple[torch.Tensor, Memory]:
        return (replies.ids == self.client).double(), memory


def test_sums_over_columns_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"a": torch.randn(4, 3, 5), "b": torch.randn(4, 2), "c": torch.randn(4)}
    flat = torch.cat([leaf.reshape(4, -1) for leaf in tree.values()], 1).double()
    for columns in (1, 4, 1 << 16):
        monkeypatch.setattr("fairvar.common.tree.COLUMNS", columns)
        torch.testing.assert_close(gram(tree), flat @ flat.T, rtol=0, atol=1e-13)
