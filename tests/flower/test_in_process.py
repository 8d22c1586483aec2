"""fairvar's ServerApp and ClientApp over Flower's messages, without Flower's processes.

Reference loop = Flower for every method and option, on ragged clients: bit by bit in float64 with
full batches, 1e-10 with epochs of mini-batches and some of the clients. (tests/equivalence compares
the reference loop with the engines, test_personal_nodes.py has Ditto.)
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, Context, Error, Message, RecordDict
from httpx import ConnectTimeout

import fairvar as fv
from checks import FURTHER, FURTHER_OPTIONS, METHODS, OPTIONS
from fairvar.cli import main
from fairvar.deploy import guard
from fairvar.deploy.flower import (
    client_app,
    embedded_part,
    place_of,
    server,
    site_of,
    transport,
)
from fairvar.deploy.flower.client import Data, node_client
from fairvar.deploy.flower.server import folder_of, run_on
from fairvar.deploy.flower.setup import read_setup
from fairvar.engine.keys import checkpoint_key, fingerprint
from fairvar.report.files import group_table
from fairvar.runs.formats import (
    pack_checkpoint,
    read_checkpoints,
    unpack_checkpoint,
    write_checkpoint,
)
from fairvar.runs.results import gather
from fairvar.runs.runner import Watch, federation_of, model_of, run_cell
from fairvar.runs.stored import StoredRun
from fairvar.runs.verify import draw as draw_runs
from grids import BARE, InProcessGrid, Spoil, as_options, run_config


def run(
    config: dict, spoil: Spoil | None = None, clients: dict[int, int] | None = None
) -> StoredRun:
    nodes = clients or {100 + 7 * i: i for i in range(5)}
    return StoredRun.open(run_on(InProcessGrid(config, nodes, spoil), read_setup(config)))


def expected(stored: StoredRun, engine: str = "reference", **more: object) -> fv.History:
    config, data = stored.config, federation_of(stored.config)
    given: dict = {"rounds": 3, "lr": 0.1, "dtype": torch.float64, "engine": engine, **more}
    return fv.train(model_of(config, data), data, config.method, **given)


def own(context: Context) -> fv.ClientData:
    """The function `data` of an app whose nodes have .npz files."""
    with np.load(place_of(context)) as arrays:
        return fv.ClientData.from_arrays(arrays["x"], arrays["y"], name=site_of(context))


def run_own(config: dict, grid: InProcessGrid, data: Data = own) -> StoredRun:
    grid.app = client_app(None, data)
    return StoredRun.open(run_on(grid, read_setup(config, None, data)))


COLLAPSED = fv.FairLoss(0.5, exact=True, collapsed=True)
# Mini-batches and epochs of ragged clients, some of which take part in a round.
SOME: dict = {"batch_size": 16, "local_epochs": 1, "participants": 3}
RULE = {"momentum": 0.8, "weight_decay": 0.3, "schedule": fv.LrSchedule("cosine", warm_up=1)}
EVERY: list[fv.Method] = [
    *METHODS,
    *OPTIONS,
    *FURTHER,
    *FURTHER_OPTIONS,
    fv.FairLoss(3.0, bound=0.2),
    fv.FairLoss(3.0, exact=True, bound=0.2),
    fv.FairGrad(1.0, bound=0.2),
    fv.FairGrad(0.2, ema=0.9),
    fv.FairGrad(0.2, exact=True, ema=0.9, only="*bias"),
    fv.FedProx(1.5),
    fv.FedMGDA(step=0.05),
    fv.FedMGDA(eps=1.0, scale="mean", decay=0.9, weights="size"),
    fv.FedFV(),
    fv.FedFV(alpha=0.5, external="off", losses="batch"),
    fv.AdaFed(),
    fv.AdaFed(normalise=True, losses="batch"),
    fv.FedEBA(temperature=0.5, alpha=0.3, angle=8.0),
    fv.FedEBA(temperature=0.5, alpha=0.7, angle=90.0, weights="size", losses="batch"),
]
CASES: list[tuple[fv.Method, dict]] = [
    *((method, SOME) for method in EVERY),
    (COLLAPSED, {"batch_size": 16, "participants": 3}),
    (fv.FedProx(1.5), SOME | RULE),
    (fv.FairLoss(0.5), SOME | {"server": fv.ServerOptimiser("sgd", beta1=0.9)}),
    (fv.GIFAIR(0.4), SOME | {"server": fv.ServerOptimiser("adam", lr=0.1)}),
]


def through_flower(method: fv.Method, train: dict, rules: str, out: Path) -> StoredRun:
    stored = run(run_config(method, out, f"{as_options(train)} {rules}", rounds=2))
    assert stored.config.method == method
    assert stored.history().provenance["engine"] == "flower"
    assert (stored.folder / "refused.csv").read_text().count("\n") == 1
    return stored


@pytest.mark.parametrize("method", [*METHODS, COLLAPSED], ids=repr)
def test_full_batches_are_equal_bit_by_bit(method: fv.Method, tmp_path: Path) -> None:
    stored = through_flower(method, {}, "", tmp_path)
    found = stored.history().state.params
    for name, leaf in expected(stored, rounds=2).state.params.items():
        assert torch.equal(found[name], leaf), name


@pytest.mark.parametrize(("method", "train"), CASES, ids=str)
def test_reference_and_flower_agree(method: fv.Method, train: dict, tmp_path: Path) -> None:
    """Sums over the samples of a batch are in another order."""
    stored = through_flower(method, train, BARE, tmp_path)
    found = stored.history().state.params
    for name, leaf in expected(stored, rounds=2, **train).state.params.items():
        assert float((found[name] - leaf).norm() / leaf.norm()) <= 1e-10, name


@pytest.mark.parametrize("method", [fv.FedMGDA(), fv.FedFV(), fv.AdaFed()], ids=repr)
def test_products_of_updates_cannot_be_masked(method: fv.Method, tmp_path: Path) -> None:
    with pytest.raises(fv.BadInput, match="cannot be kept for") as refused:
        read_setup(run_config(method, tmp_path, **{"secure-aggregation": True}))
    assert "\n" not in str(refused.value)


def test_an_error_belongs_to_the_message_it_answers(tmp_path: Path) -> None:
    """Flower sends some errors in the SuperLink's name; the round goes on without that client."""

    def fails(node: int, reply: Message) -> Message:
        if node == 107 and reply.metadata.message_type == "train":
            return _error(reply)
        return reply

    stored = run(run_config(fv.AFL(), tmp_path), fails)
    weights = stored.history().weights
    assert bool((weights[:, 1] == 0).all())
    assert bool((weights[:, [0, 2, 3, 4]] > 0).all())
    rows = (stored.folder / "refused.csv").read_text().splitlines()[1:]
    assert len(rows) == 3
    assert all(",train,1,error," in row and "Flower's error 5" in row for row in rows)


def _error(reply: Message) -> Message:
    lost = Message(Error(5, "node unavailable"), reply_to=reply)
    lost.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    lost.metadata.__dict__["_src_node_id"] = 1
    return lost


@pytest.mark.parametrize("kind", ["pickle", "strings", "no records", "text for a number"])
def test_replies_that_are_no_messages(kind: str, tmp_path: Path) -> None:
    def spoils(node: int, reply: Message) -> Message:
        if node == 107 and reply.metadata.message_type == "train":
            arrays = reply.content.array_records["arrays"]
            name = next(iter(arrays))
            if kind == "pickle":
                arrays[name] = Array("float64", (1,), "numpy.ndarray", b"\x80\x04N.")
            elif kind == "strings":
                arrays[name] = Array(np.array(["a"]))
            elif kind == "no records":
                del reply.content["arrays"]
            else:
                reply.content.config_records["message"]["number/samples"] = "many"
        return reply

    stored = run(run_config(fv.FedAvg(), tmp_path), spoils)
    assert set(stored.manifest["birth"]["refused"]) <= {"format", "samples"}
    assert sum(stored.manifest["birth"]["refused"].values()) == 3
    assert bool((stored.history().weights[:, 1] == 0).all())


def test_two_nodes_of_one_client_and_an_impossible_one(tmp_path: Path) -> None:
    clients = {10: 0, 11: 1, 12: 2, 13: 3, 14: 4, 15: 2, 16: 77}
    stored = run(run_config(fv.FedAvg(), tmp_path), clients=clients)
    for name, leaf in expected(stored).state.params.items():
        assert torch.equal(stored.history().state.params[name], leaf)


def test_from_simulation_to_deployment(tmp_path: Path) -> None:
    """A run that starts from a stored state ends where an uninterrupted one does."""
    method = fv.FairLoss(0.5)
    first = run(run_config(method, tmp_path / "a", rounds=2))
    second = run(run_config(method, tmp_path / "b", rounds=5, start=str(first.folder)))
    for name, leaf in expected(second, rounds=5).state.params.items():
        assert torch.equal(second.history().state.params[name], leaf)


def test_nodes_with_their_own_files(tmp_path: Path) -> None:
    """Three .npz files that only their nodes read; the report reads the run like any other."""
    places = {}
    for i in range(3):
        draw = np.random.default_rng(i)
        x = draw.standard_normal((30 + 10 * i, 6)).astype(np.float32)
        places[i] = str(tmp_path / f"ward{i}.npz")
        np.savez(places[i], x=x, y=(x.sum(1) > 0.3 * i).astype(np.int64))
    more: dict = {"data": "own", "clients": 3, "input-shape": "6", "classes": 2, "rounds": 4}
    config = run_config(fv.FairLoss(0.5), tmp_path / "runs", **more)
    nodes = InProcessGrid(config, {7: 0, 8: 1, 9: 2}, data=places)
    stored = run_own(config, nodes)
    history = stored.history()
    assert stored.manifest["birth"]["refused"] == {}
    assert history.samples["train"].tolist() == [24, 32, 40]
    assert history.samples["test"].tolist() == [3, 4, 5]
    main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")])
    page = (tmp_path / "report" / "index.html").read_text()
    assert "own data of 3 nodes, multinomial (14 parameters)" in page
    # What is not known is not shown: neither a partition nor its alpha.
    for guess in ("Dirichlet", "dirichlet", "α", "alpha", "[partition]", "npz, "):
        assert guess not in page
    assert (tmp_path / "report" / "table-own-data-of-3-nodes.csv").exists()
    with pytest.raises(fv.BadInput, match="not here"):
        draw_runs([stored], 1, 0)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.flatten(1))


def test_a_deployed_run_tells_its_own_model_and_stands_apart(tmp_path: Path) -> None:
    """The configuration names the usual model and the parts of digits; the app brought its own."""
    out = tmp_path / "runs"
    config = run_config(fv.FedAvg(), out, rounds=2)
    nodes = InProcessGrid(config, {100 + 7 * i: i for i in range(5)})
    nodes.app = client_app(Net)
    own = StoredRun.open(run_on(nodes, read_setup(config, Net)))
    usual = run(config)
    run_cell(usual.config, out, Watch())  # simulated: the same configuration and seed
    titles = {group.deployed and group.deployed.model: group_table(group) for group in gather(out)}
    assert {k: t.title for k, t in titles.items()} == {
        None: "digits, 5 clients, Dirichlet 0.3, multinomial",
        "multinomial": "digits, 5 clients, Dirichlet 0.3, multinomial (650 parameters), "
        "deployed on 5 nodes",
        "Net": "digits, 5 clients, Dirichlet 0.3, Net (650 parameters), deployed on 5 nodes",
    }
    assert [t.rows[0].cells["seeds"] for t in titles.values()] == ["1"] * 3
    (mine,) = (g for g in gather(out) if g.deployed and g.deployed.own_model)
    assert "name" not in mine.settings["model"]
    assert fingerprint(own.config) == fingerprint(usual.config)


def test_a_node_with_a_single_class_takes_part(tmp_path: Path) -> None:
    """Honest, and usual in skewed splits: the run says how many classes there are."""
    places = {}
    for i in range(2):
        x = np.random.default_rng(i).standard_normal((20, 6)).astype(np.float32)
        places[i] = str(tmp_path / f"ward{i}.npz")
        np.savez(places[i], x=x, y=np.full(20, 2 * i))
    more: dict = {"data": "own", "clients": 2, "input-shape": "6", "classes": 3, "rounds": 2}
    config = run_config(fv.AFL(), tmp_path / "runs", **more)
    stored = run_own(config, InProcessGrid(config, {7: 0, 8: 1}, data=places))
    assert stored.manifest["birth"]["refused"] == {}
    assert stored.history().samples["train"].tolist() == [16, 16]
    few = run_config(fv.AFL(), tmp_path / "few", "federation.repeats=0", **more | {"classes": 2})
    stored = run_own(few, InProcessGrid(few, {7: 0, 8: 1}, data=places))
    rows = (stored.folder / "refused.csv").read_text()
    assert "sample 0: label 2 is outside 0 … 1" in rows


def test_another_model_is_another_run(tmp_path: Path) -> None:
    """The app's own model is not in the configuration: an edited one must not find the old run."""
    config = run_config(fv.FedAvg(), tmp_path)
    wide, deep = (
        read_setup(config, lambda m=m: torch.nn.Sequential(torch.nn.Flatten(), *m))
        for m in ([torch.nn.Linear(64, 10)], [torch.nn.Linear(64, 64), torch.nn.Linear(64, 10)])
    )
    assert len({folder_of(s) for s in (wide, deep, read_setup(config))}) == 3
    own: dict = {"data": "own", "input-shape": "6"}
    folders = {folder_of(read_setup(config | own | {"classes": n})) for n in (2, 3)}
    assert len(folders) == 2


SITES: dict = {"data": "own", "sites": "berlin lyon", "input-shape": "2", "classes": 2, "rounds": 2}


def table_of(context: Context) -> fv.ClientData:
    return fv.ClientData.from_csv(place_of(context), target="ill", name=site_of(context))


def two_sites(folder: Path) -> Path:
    folder.mkdir()
    for number, site in enumerate(("berlin", "lyon")):
        x = np.random.default_rng(number).standard_normal((40, 2))
        lines = [f"{a},{b},{int(a > b)}" for a, b in x]
        (folder / f"{site}.csv").write_text("\n".join(["age,pulse,ill", *lines]))
    return folder


def test_sites_have_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A node says its site, and its number follows from the run's list; the same in a simulation,
    which finds the files by the names."""
    folder = two_sites(tmp_path / "tables")
    config = run_config(fv.FairLoss(0.5), tmp_path / "runs", **SITES)
    there = {
        n: {"site": s, "data": str(folder / f"{s}.csv")} for n, s in enumerate(("lyon", "berlin"))
    }
    deployed = run_own(config, InProcessGrid(config, {7: 0, 8: 1}, node_config=there), table_of)
    told = capsys.readouterr().out
    simulated = run_config(fv.FairLoss(0.5), tmp_path / "runs", **SITES, folder=str(folder))
    again = run_own(simulated, InProcessGrid(simulated, {7: 0, 8: 1}), table_of)
    assert deployed.folder != again.folder  # the files of a simulation are part of what it is
    for run in (deployed, again):
        assert b'"sites":{"0":"berlin","1":"lyon"}' in (run.folder / "federation.json").read_bytes()
    for name, leaf in deployed.history().state.params.items():
        assert torch.equal(again.history().state.params[name], leaf)
    rows = [line.split() for line in told.splitlines()]
    assert [row[:3] for row in rows if row[:1] in (["berlin"], ["lyon"])] == [
        ["berlin", "32", "4"], ["lyon", "32", "4"]]  # fmt: skip
    assert "FairLoss after 2 rounds" in told


def test_a_node_that_fails_is_told_by_name_and_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = two_sites(tmp_path / "tables")
    (folder / "lyon.csv").write_text("age,pulse,ill\n1.0,,1\n")
    options = "federation.repeats=1"
    config = run_config(fv.FedAvg(), tmp_path / "a", options, **SITES, folder=str(folder))
    with caplog.at_level("INFO", "flwr.fairvar"):
        stored = run_own(config, InProcessGrid(config, {7: 0, 8: 1}), table_of)
    why = "lyon.csv, line 2: pulse is '', not a number"
    assert f"lyon (client 1) is lost: BadInput: {folder}/{why}" in caplog.text
    assert "round 2 of 2: 1 of 2 clients, test loss" in caplog.text
    refused = (stored.folder / "refused.csv").read_text().splitlines()
    assert refused[0].endswith(",site")
    assert all(why in row and row.endswith(",lyon") for row in refused[1:])
    (folder / "berlin.csv").unlink()
    config = run_config(fv.FedAvg(), tmp_path / "b", options, **SITES, folder=str(folder))
    with pytest.raises(fv.RunFailed) as failed:
        run_own(config, InProcessGrid(config, {7: 0, 8: 1}), table_of)
    text = (folder_of(read_setup(config, None, table_of)) / "failed.txt").read_text()
    assert text == f"{failed.value}\n"
    assert "4 × error" in text
    assert "berlin (client 0): BadInput: this node does not know where its data are" in text
    assert why in text
    assert "(2 times)" in text


def unnamed(context: Context) -> fv.ClientData:
    if site_of(context) == "rome":
        raise ZeroDivisionError("nobody is ill")
    return fv.ClientData.from_csv(place_of(context), target="ill")


def test_files_of_one_name_at_all_sites(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A site is called as its node or the run says, not as its file, from which `from_csv` takes a
    name. The node's log has the traceback of an exception that is not about its input."""
    for site in ("berlin", "lyon"):
        (two_sites(tmp_path / site) / f"{site}.csv").rename(tmp_path / site / "ward.csv")
    there = {
        0: {"site": "berlin", "data": str(tmp_path / "berlin" / "ward.csv")},
        1: {"client": 1, "data": str(tmp_path / "lyon" / "ward.csv")},
        2: {"site": "berlin", "data": "elsewhere.csv"},
        3: {"site": "rome"},
        4: {"site": "bonn", "data": "elsewhere.csv"},
    }
    more = SITES | {"sites": "berlin lyon rome bonn", "rounds": 1}
    config = run_config(fv.FedAvg(), tmp_path / "runs", "evaluate.every=1", **more)
    grid_ = InProcessGrid(config, {7 + i: i for i in there}, node_config=there)
    with caplog.at_level("INFO", "flwr.fairvar"):
        stored = run_own(config, grid_, unnamed)
    names = b'"sites":{"0":"berlin","1":"lyon","2":"rome","3":"bonn"}'
    assert names in (stored.folder / "federation.json").read_bytes()
    for text in (
        "lyon (client 1) is there: node 8",
        "node 9 says it is berlin (client 0), which node 7 is; it is left out",
        "rome (client 2) is lost: ZeroDivisionError: nobody is ill",
        "bonn (client 3) is lost: BadInput: elsewhere.csv cannot be read",
    ):
        assert text in caplog.text
    failed = [record for record in caplog.records if record.levelname == "ERROR"]
    assert {(r.message.split(":")[0], bool(r.exc_info)) for r in failed} == {
        ("ZeroDivisionError", True), ("BadInput", False)}  # fmt: skip


def test_the_log_says_who_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "REPORT_WAITING", 0.0)
    channel = transport.GridTransport(InProcessGrid(run_config(fv.FedAvg(), tmp_path), {7: 1}), 20)
    channel.names[0] = "berlin"
    with caplog.at_level("INFO", "flwr.fairvar"):
        assert channel.present(20, 0.25) == [1]
    (record,) = (r for r in caplog.records if "waiting" in r.message)
    assert record.message.startswith("waiting for berlin (client 0), client 2, client 3, ")
    assert record.message.endswith("client 10, and 9 more, up to 0 s")


@pytest.mark.parametrize(
    ("change", "node", "message"),
    [
        ({}, {"site": "turin"}, "started as site 'turin', the run has berlin, lyon"),
        ({}, {}, "start it with --node-config 'site=\"berlin\"'"),
        ({"input-shape": "3"}, {"site": "berlin"}, "samples have shape (2,), the run expects (3,)"),
        ({"data": "digits"}, {"site": "berlin"}, 'but the run says data = "digits"'),
    ],
)  # fmt: skip
def test_a_node_that_does_not_fit(change: dict, node: dict, message: str, tmp_path: Path) -> None:
    config = run_config(fv.FedAvg(), tmp_path, **SITES | change)
    place = {"data": str(two_sites(tmp_path / "tables") / "berlin.csv")}
    context = Context(1, 7, {**node, **place}, RecordDict(), config, 1)
    with pytest.raises(fv.BadInput) as refused:
        node_client(context, table_of, None)
    assert message in str(refused.value)


def test_the_template_reads_no_own_data(tmp_path: Path) -> None:
    config = run_config(fv.FedAvg(), tmp_path, **SITES)
    with pytest.raises(fv.BadInput, match="must read the data of this node"):
        embedded_part(Context(1, 7, {"partition-id": 0}, RecordDict(), config, 1))


def test_a_model_with_its_loss(tmp_path: Path) -> None:
    """A regression: 0 classes, and the loss comes with the model. An edited loss is another run."""

    def model() -> tuple[torch.nn.Module, str]:
        return torch.nn.Linear(2, 1), "mse"

    def absolute() -> tuple[torch.nn.Module, Callable]:
        return torch.nn.Linear(2, 1), lambda out, y: (out[:, 0] - y).abs()

    folder = two_sites(tmp_path / "tables")
    more = SITES | {"classes": 0, "folder": str(folder)}
    config = run_config(fv.FairGrad(0.1), tmp_path / "runs", **more)
    grid = InProcessGrid(config, {7: 0, 8: 1})
    grid.app = client_app(model, table_of)
    setup = read_setup(config, model, table_of)
    history = StoredRun.open(run_on(grid, setup)).history()
    assert not history.classifies
    sites = [fv.ClientData.from_csv(folder / f"{s}.csv", "ill") for s in ("berlin", "lyon")]
    parts = {p: [getattr(s, p) for s in sites] for p in ("train", "valid", "test")}
    floats = {p: [(x, y.astype(np.float32)) for x, y in pairs] for p, pairs in parts.items()}
    data = fv.Federation.from_arrays(**floats)
    more = {"rounds": 2, "lr": 0.1, "dtype": torch.float64, "engine": "reference", "loss": "mse"}
    alone = fv.train(setup.agreed.model, data, fv.FairGrad(0.1), **more)
    for name, leaf in alone.state.params.items():
        assert torch.equal(history.state.params[name], leaf)
    assert folder_of(read_setup(config, absolute, table_of)) != folder_of(setup)


def test_a_model_in_the_configuration_as_well_is_refused(tmp_path: Path) -> None:
    def model() -> tuple[torch.nn.Module, str]:
        return Net(), "cross_entropy"

    config = run_config(fv.FedAvg(), tmp_path)
    with pytest.raises(fv.BadInput, match=r"model\.\* is set, but the model is what the app's"):
        read_setup(config | {"model": "2nn"}, model)
    with pytest.raises(fv.BadInput, match=r"model\.loss = 'mse': the app's function `model` gives"):
        read_setup(config | {"options": "model.loss=mse"}, model).agreed  # noqa: B018
    assert read_setup(config | {"options": "model.loss=mse"}, Net).agreed.loss == "mse"


def test_a_model_of_another_method_is_a_start(tmp_path: Path) -> None:
    """Its weights are used; what the other method remembered is not."""
    first = run(run_config(fv.FedAvg(), tmp_path / "a", rounds=2))
    second = run(run_config(fv.AFL(), tmp_path / "b", rounds=3, start=str(first.folder)))
    state, data = first.history().state, federation_of(first.config)
    module = model_of(first.config, data).double()
    module.load_state_dict(state.params)
    more: dict = {"lr": 0.1, "dtype": torch.float64, "engine": "reference"}
    alone = fv.train(module, data, fv.AFL(), rounds=1, **more)
    for name, leaf in alone.state.params.items():
        assert torch.equal(second.history().state.params[name], leaf)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rounds": 2}, "give more than 2"), ({"model": "2nn"}, "is not the app's")],
)
def test_a_start_that_does_not_fit_is_refused(change: dict, message: str, tmp_path: Path) -> None:
    first = run(run_config(fv.FedAvg(), tmp_path / "a", rounds=2))
    config = run_config(fv.FedAvg(), tmp_path / "b", rounds=3, start=str(first.folder)) | change
    with pytest.raises(fv.BadInput, match=message):
        run(config)


def half_way(config: dict) -> Path:
    """The folder of a run whose server was killed in its third round."""

    class Killed(Exception):
        pass

    calls = 0

    def dies(node: int, reply: Message) -> Message:
        nonlocal calls
        calls += reply.metadata.message_type == "train"
        if calls == 12:
            raise Killed
        return reply

    with pytest.raises(Killed):
        run(config, dies)
    return folder_of(read_setup(config))


def test_a_killed_server_is_resumed(tmp_path: Path) -> None:
    config = run_config(fv.AFL(), tmp_path, rounds=5)
    half_way(config)
    stored = run(config)
    for name, leaf in expected(stored, rounds=5).state.params.items():
        assert torch.equal(stored.history().state.params[name], leaf)
    assert stored.history().rounds == 5
    assert not (stored.folder / "failed.txt").exists()


def checkpoints_in(folder: Path) -> list[bytes]:
    return [part for files in read_checkpoints(folder) for part in files.values()]


@pytest.mark.parametrize("kind", ["another run", "another model", "notes", "version"])
def test_only_its_own_checkpoint_is_continued(kind: str, tmp_path: Path) -> None:
    """Rounds on real nodes are precious: the run is refused by name, not started again. Another
    version of torch may go on."""
    config = run_config(fv.AFL(), tmp_path / "a", rounds=5)
    folder = half_way(config)
    key = checkpoint_key(server._identity(read_setup(config)))
    payloads = checkpoints_in(folder)
    if kind == "another run":
        payloads = checkpoints_in(half_way(config | {"out": str(tmp_path / "b"), "lr": 0.2}))
    elif kind == "another model":
        other = half_way(config | {"out": str(tmp_path / "b"), "model": "2nn"})
        payloads = [pack_checkpoint(unpack_checkpoint(p), key) for p in checkpoints_in(other)]
    elif kind == "notes":
        text = torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8)
        made = [unpack_checkpoint(p) for p in payloads]
        made = [c._replace(tables={**(c.tables or {}), "federation": text}) for c in made]
        payloads = [pack_checkpoint(c, key) for c in made]
    else:
        made = [unpack_checkpoint(p) for p in payloads]
        payloads = [pack_checkpoint(c, key | {"torch": "1.0"}) for c in made]
    for number, payload in enumerate(payloads):
        write_checkpoint(folder, number, {folder.name: payload})
    if kind == "version":
        assert run(config).history().rounds == 5
        return
    with pytest.raises(fv.RunFailed, match=f"{folder.name} cannot be continued") as error:
        run(config)
    assert "\n" not in str(error.value)
    assert "cannot be continued" in (folder / "failed.txt").read_text()


def test_an_edited_model_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same layers: what it computes from them is in its code."""
    config, folders = run_config(fv.FedAvg(), tmp_path / "runs"), set()
    text = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
    def forward(self, x):
        return {sign}self.layer(x.flatten(1))
"""
    monkeypatch.syspath_prepend(str(tmp_path))
    for sign in ("", "-"):
        (tmp_path / f"net{len(sign)}_for_tests.py").write_text(text.format(sign=sign))
        module = importlib.import_module(f"net{len(sign)}_for_tests")
        folders.add(folder_of(read_setup(config, module.Net)))
    assert len(folders) == 2


def test_a_server_that_dies_before_it_stores_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(fv.AFL(), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(server.formats, "store_run", _no_disk)
        with pytest.raises(OSError, match="no space"):
            run(config)
    assert not (folder_of(read_setup(config)) / "manifest.json").exists()
    again, whole = run(config), run(config | {"out": str(tmp_path / "whole")})
    found, expected = again.history(), whole.history()
    assert torch.equal(found.accuracy["test", "global"], expected.accuracy["test", "global"])
    assert torch.equal(found.samples["test"], expected.samples["test"])


def _no_disk(*_: object) -> None:
    raise OSError("no space")


def test_a_superlink_that_does_not_answer(tmp_path: Path) -> None:
    class Lost(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            raise ConnectTimeout("_ssl.c:989: The handshake operation timed out")

    config = run_config(fv.FedAvg(), tmp_path)
    with pytest.raises(fv.RunFailed, match=r"the SuperLink does not answer \(ConnectTimeout: _ssl"):
        run_on(Lost(config, {7: 0}), read_setup(config))
    (failed,) = tmp_path.rglob("failed.txt")
    assert "start the run again, and it continues from its last round" in failed.read_text()


def test_two_servers_never_write_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SECONDS_FOR_ANOTHER", 0.1)
    config = run_config(fv.FedAvg(), tmp_path)

    def starts_another(node: int, reply: Message) -> Message:
        with pytest.raises(fv.RunFailed, match="another server works on this run"):
            run(config)
        return reply

    stored = run(config, starts_another)
    assert stored.history().rounds == 3


class Twice(InProcessGrid):
    """Every reply comes twice at once."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return 2 * super().pull_messages(message_ids)


def test_a_reply_that_comes_twice_counts_once(tmp_path: Path) -> None:
    config = run_config(fv.FedAvg(), tmp_path)
    nodes = Twice(config, {10 + i: i for i in range(5)})
    stored = StoredRun.open(run_on(nodes, read_setup(config)))
    for name, leaf in expected(stored).state.params.items():
        assert torch.equal(stored.history().state.params[name], leaf)


class Meanwhile(InProcessGrid):
    """Node 14 comes while the others' first training is under way."""

    def get_node_ids(self) -> list[int]:
        late = {} if self.trained else {14}
        return [n for n in self.clients if n not in late]

    trained = False

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.waits = 3  # looks without an answer
        sent = list(messages)
        self.trained |= any(m.metadata.message_type == "train" for m in sent)
        return super().push_messages(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.waits -= 1
        return [] if self.waits > 0 else super().pull_messages(message_ids)


def test_a_node_that_comes_during_a_round_is_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "POLL_NODES", 0.0)
    config = run_config(fv.FedAvg(), tmp_path, "federation.patience=1")
    nodes = {10 + i: i for i in range(5)}
    stored = StoredRun.open(run_on(Meanwhile(config, nodes), read_setup(config)))
    rows = (stored.folder / "rounds.csv").read_text().splitlines()
    assert [row.rsplit(",", 1)[0] for row in rows] == [
        "round,clients,limited,shortened",
        "0,0 1 2 3,,",
        "1,0 1 2 3 4,,",
        "2,0 1 2 3 4,,",
    ]


# -- what one client can do to a run ---------------------------------------------------------------
@pytest.mark.parametrize("options", ["", "evaluate.local=false", "evaluate.every=9"])
def test_nobody_answers_the_last_evaluation(options: str, tmp_path: Path) -> None:
    """The run is stored with what is known; before, it could not be, each time it was started."""

    def mute(node: int, reply: Message) -> Message:
        return _error(reply) if reply.metadata.message_type == "evaluate" else reply

    stored = run(run_config(fv.FedAvg(), tmp_path, options), mute)
    history = stored.history()
    assert history.rounds == 3
    assert bool(history.accuracy["test", "global"].isnan().all())
    assert "test/global" not in stored.manifest["result"]
    assert min(history.samples["train"].tolist()) > 0


def test_a_run_that_cannot_be_stored_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.formats, "store_run", _no_disk)
    config = run_config(fv.FedAvg(), tmp_path)
    with pytest.raises(OSError, match="no space"):
        run(config)
    assert (folder_of(read_setup(config)) / "failed.txt").read_text() == "no space\n"


def test_details_of_refusals_have_a_bound(tmp_path: Path) -> None:
    """A name of ten million characters, with control characters, for an array and for a number."""
    sizes = []

    def names(node: int, reply: Message) -> Message:
        sizes.extend(p.stat().st_size for p in tmp_path.rglob("checkpoint*"))
        if node == 107 and reply.metadata.message_type == "train":
            reply.content.config_records["message"]["number/" + '\x1b\n,"x' * 2_000_000] = 1.0
        if node == 107 and reply.metadata.message_type == "evaluate":
            reply.content.array_records["arrays"]["y" * 10_000_000] = Array(np.ones(1))
        return reply

    stored = run(run_config(fv.FedAvg(), tmp_path, "evaluate.every=1"), names)
    text = (stored.folder / "refused.csv").read_text()
    assert text.count("\n") == 7
    assert len(text) < 3000
    assert "\x1b" not in text
    assert 0 < max(sizes) < 100_000
    assert bool((stored.history().weights[:, 1] == 0).all())


def test_only_so_many_refusals_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(guard, "MOST_REFUSALS", 2)

    def fails(node: int, reply: Message) -> Message:
        return _error(reply) if node == 107 else reply

    def trains(node: int, reply: Message) -> Message:
        return fails(node, reply) if reply.metadata.message_type == "train" else reply

    stored = run(run_config(fv.FedAvg(), tmp_path), trains)
    assert (stored.folder / "refused.csv").read_text().count("\n") == 3
    assert stored.manifest["birth"]["refused"] == {"error": 3}


class Broken(InProcessGrid):
    """As Flower's own grid: it fetches replies once, and breaks if one cannot be opened."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = super().pull_messages(message_ids)
        if any(m.metadata.src_node_id == 107 and _is(m, "train") for m in found):
            raise KeyError("arraychunk_ids")
        return found


def _is(message: Message, kind: str) -> bool:
    return message.metadata.message_type == kind


def test_a_reply_that_flower_cannot_open_takes_no_others_along(tmp_path: Path) -> None:
    config = run_config(fv.FedAvg(), tmp_path)
    nodes = Broken(config, {100 + 7 * i: i for i in range(5)})
    stored = StoredRun.open(run_on(nodes, read_setup(config)))
    assert ((stored.history().weights != 0).tolist()) == [[True, False, True, True, True]] * 2
    assert stored.manifest["birth"]["refused"] == {"format": 3}


class Forging(InProcessGrid):
    """Node 107 does not reply; it replies in the name of node 100, whose own reply is later."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = super().push_messages(messages)
        for message in (self.replies.get(i) for i in ids):
            if message is not None and _is(message, "train"):
                self.mine[message.metadata.src_node_id] = message
        if 107 in self.mine and 100 in self.mine:
            asked = self.mine[100].metadata.reply_to_message_id
            forged = self.mine.pop(107)
            forged.content.config_records["message"]["client"] = 0
            forged.metadata.__dict__["_reply_to_message_id"] = asked
        return ids

    mine: dict[int, Message] = {}  # noqa: RUF012


def test_a_reply_counts_for_the_message_that_was_asked(tmp_path: Path) -> None:
    """Whatever it says itself about what it answers."""
    config = run_config(fv.AFL(), tmp_path, "federation.deadline=1 federation.patience=1", rounds=1)
    nodes = Forging(config, {107: 1, 100: 0, 114: 2, 121: 3, 128: 4})
    stored = StoredRun.open(run_on(nodes, read_setup(config)))
    assert (stored.folder / "rounds.csv").read_text().splitlines()[1].startswith("0,0 2 3 4,")
    assert stored.manifest["birth"]["refused"] == {"unknown client": 1}


class Killed(Exception):
    pass


class Thief(InProcessGrid):
    """After the first training node 11 is gone, and node 15 says that it is client 1, too."""

    def __init__(self, config: dict, gone: bool = False, dies_at: int = 99) -> None:
        super().__init__(config, {10: 0, 11: 1, 12: 2, 13: 3, 14: 4, 15: 1})
        self.gone, self.dies_at, self.rounds = gone, dies_at, 0

    def get_node_ids(self) -> list[int]:
        away = 11 if self.gone else 15
        return [n for n in self.clients if n != away]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        self.gone |= any(_is(m, "evaluate") for m in sent)
        self.rounds += any(_is(m, "evaluate") for m in sent)
        if self.rounds > 5 * self.dies_at:
            raise Killed
        return super().push_messages(sent)


def test_a_client_id_belongs_to_the_key_that_had_it_first(tmp_path: Path) -> None:
    config = run_config(fv.FedAvg(), tmp_path, "evaluate.every=1 federation.patience=1", rounds=3)
    with pytest.raises(Killed):
        run_on(Thief(config, dies_at=1), read_setup(config))
    again = {**config, "rounds": 3}
    stored = StoredRun.open(run_on(Thief(again, gone=True), read_setup(again)))
    rows = [row.split(",") for row in (stored.folder / "rounds.csv").read_text().splitlines()]
    assert [row[1] for row in rows[1:]] == ["0 1 2 3 4", "0 2 3 4", "0 2 3 4"]
    bound = dict(text.split(":") for text in rows[1][-1].split())
    assert bound.keys() == set("01234")
    assert bound["1"] == hashlib.sha256(b"key 11").hexdigest()[:32]
    assert [row[-1] for row in rows[2:]] == ["", ""]


def test_the_operator_can_give_a_client_id_to_another_key(tmp_path: Path) -> None:
    config = run_config(fv.FedAvg(), tmp_path, "evaluate.every=1 federation.patience=1", rounds=3)
    with pytest.raises(Killed):
        run_on(Thief(config, dies_at=1), read_setup(config))
    again = {**config, "options": config["options"] + " federation.rebind=[1]"}
    stored = StoredRun.open(run_on(Thief(again, gone=True), read_setup(again)))
    rows = [row.split(",") for row in (stored.folder / "rounds.csv").read_text().splitlines()]
    assert [row[1] for row in rows[1:]] == ["0 1 2 3 4"] * 3
    assert rows[2][-1] == "1:" + hashlib.sha256(b"key 15").hexdigest()[:32]


def test_a_node_has_one_client_id(tmp_path: Path) -> None:
    """A key that belongs to client 3 does not get client 1 as well, while that one is away."""
    config = run_config(fv.FedAvg(), tmp_path, rounds=1)
    grid_ = InProcessGrid(config, {13: 3})
    channel = transport.GridTransport(grid_, 5)
    assert channel.present(1, 0) == [3]
    grid_.clients = {13: 1}
    channel.nodes.clear()
    assert channel.present(1, 0) == []


def test_a_liar_on_flower_is_held_and_named(tmp_path: Path) -> None:
    """Client 1 sends an update a million times as long; the server's rules are the in-process
    ones, the record names it, and other bounds make another folder."""

    def lies(node: int, reply: Message) -> Message:
        if (
            reply.metadata.message_type != "train"
            or reply.content.config_records["message"]["client"] != 1
        ):
            return reply
        arrays = reply.content.array_records["arrays"]
        for name, array in list(arrays.items()):
            arrays[name] = Array(1e6 * array.numpy())
        return reply

    config = run_config(fv.FedAvg(), tmp_path)
    stored = run(config, lies)
    assert (stored.folder / "refused.csv").read_text().count("\n") == 1
    rows = (stored.folder / "rounds.csv").read_text().splitlines()[1:]
    assert [row.rsplit(",", 1)[0] for row in rows] == [f"{t},0 1 2 3 4,,1" for t in range(3)]
    model = torch.cat([p.flatten() for p in stored.history().state.params.values()])
    assert float(model.abs().max()) < 10
    strict = config | {"options": f"{config['options']} federation.norm_bound=3"}
    assert folder_of(read_setup(strict)) != folder_of(read_setup(config)) == stored.folder


def test_what_a_run_reveals(tmp_path: Path) -> None:
    """Losses travel only where the method says that it needs them."""
    seen = set()

    def listens(node: int, reply: Message) -> Message:
        if reply.metadata.message_type != "evaluate" and not reply.has_error():
            seen.update(reply.content.config_records["message"])
        return reply

    run(run_config(fv.FairGrad(0.1, exact=True), tmp_path, "evaluate.local=false"), listens)
    assert "number/loss" not in seen
    run(run_config(fv.AFL(), tmp_path, "evaluate.local=false"), listens)
    assert "number/loss" in seen


def test_updates_are_cut_by_flower_and_the_mean_gets_its_noise(tmp_path: Path) -> None:
    """Without noise, the mean of updates cut to a norm, by hand; with noise, of the right size."""
    cut = "privacy.clipping_norm=0.01 privacy.noise_multiplier=0.0"
    stored = run(run_config(fv.FedAvg(), tmp_path, cut, rounds=1))
    start = read_setup(run_config(fv.FedAvg(), tmp_path)).agreed.model.double()
    x, data, updates = dict(start.named_parameters()), federation_of(stored.config), []
    for i in range(5):
        inputs, targets = data.train.of(i)
        loss = torch.nn.functional.cross_entropy(start(inputs.double()), targets)
        update = [0.1 * g for g in torch.autograd.grad(loss, list(x.values()))]
        norm = torch.cat([u.flatten() for u in update]).norm()
        assert float(norm) > 0.01
        updates.append([u * 0.01 / norm for u in update])
    for k, (name, leaf) in enumerate(x.items()):
        wanted = leaf.detach() - torch.stack([u[k] for u in updates]).mean(0)
        torch.testing.assert_close(
            stored.history().state.params[name], wanted, rtol=1e-10, atol=1e-12
        )
    noise = "privacy.clipping_norm=0.01 privacy.noise_multiplier=50.0"
    loud = run(run_config(fv.FedAvg(), tmp_path / "loud", noise, rounds=1)).history().state.params
    quiet = stored.history().state.params
    gap = torch.cat([(loud[n] - quiet[n]).flatten() for n in quiet])
    assert 0.08 < float(gap.std()) < 0.12  # 50 · 0.01 / 5 replies


@pytest.mark.parametrize(
    "method", [fv.AFL(), fv.FairGrad(0.1), fv.FedAvg(weights="size")], ids=repr
)
def test_privacy_is_refused_where_it_would_not_cover(method: fv.Method, tmp_path: Path) -> None:
    config = run_config(method, tmp_path, "privacy.clipping_norm=1.0")
    with pytest.raises(fv.BadInput, match="covers the model alone"):
        run(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": "privacy.noise_multiplier=1"}, "privacy.clipping_norm is not given"),
        ({"method": "fairgrod"}, "did you mean 'fairgrad'"),
        ({"method-options": "strengh=1"}, "unknown key method.strengh"),
        ({"options": "federation.dedline=3"}, "unknown key federation.dedline"),
        ({"rond": 3}, "unknown key rond"),
        ({"data": "own"}, "input-shape = ''"),
        ({"data": "own", "input-shape": "6", "classes": -1}, "or 0 for a regression"),
        ({"data": "npz"}, 'write it there and set data = "own"'),
        ({"sites": "berlin berlin"}, "every site needs a name of its own"),
        ({"rounds": 0}, "train.rounds"),
        ({"options": "'"}, "cannot be read"),
        ({"secure-aggregation": "false"}, "secure-aggregation = 'false' must be true or false"),
        (
            {"method": "afl", "method-options": "", "options": "federation.average=median"},
            "AFL gives every client a weight of its own",
        ),
        (
            {"options": "federation.average=trimmed", "secure-aggregation": True},
            "federation.average = 'trimmed': secure aggregation hides single replies",
        ),
        (
            {"options": "federation.norm_bound=3", "secure-aggregation": True},
            "federation.norm_bound = 3: secure aggregation hides single replies",
        ),
        (
            {"options": "federation.mean_loss_bound=2", "secure-aggregation": True},
            "federation.mean_loss_bound = 2: secure aggregation hides",
        ),
        (
            {"options": "federation.norm_bound=3 privacy.clipping_norm=1"},
            "federation.norm_bound = 3: the noise of privacy",
        ),
        (
            {"options": "federation.average=median privacy.clipping_norm=1"},
            "federation.average = 'median': the noise of privacy",
        ),
    ],
)
def test_a_bad_run_configuration_is_refused(change: dict, message: str, tmp_path: Path) -> None:
    config = run_config(fv.FairGrad(0.1), tmp_path) | change
    with pytest.raises(fv.BadInput, match=message):
        read_setup(config)
