"""What is saved is loaded again bit by bit; what is damaged, foreign or unknown is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn

import fairvar as fv
from checks import same_bytes
from fairvar.common.files import pack_files
from fairvar.methods import Replies
from fairvar.testing import federation

DATA = federation()
NET = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))


class Unregistered(fv.Method, frozen=True):
    """A method of a notebook."""

    power: float = 1.0

    def weigh(self, memory: dict, replies: Replies) -> tuple[Tensor, dict]:
        return replies.loss**self.power / (replies.loss**self.power).sum(), memory


def trained(method: fv.Method, rounds: int = 4, **given: object) -> fv.History:
    options: dict = {"evaluate_every": 2, "seed": 3, **given}
    return fv.train("multinomial", DATA, method, rounds, **options)


def same(a: fv.History, b: fv.History) -> None:
    same_bytes(a, b)
    assert (a.method, a.rounds, a.stopped, a.diverged_at) == (
        b.method, b.rounds, b.stopped, b.diverged_at)  # fmt: skip
    assert (a.provenance, a.classifies) == (b.provenance, b.classifies)
    assert a.state.made_by == b.state.made_by
    for name, table in a.tables().items():
        assert table.numpy().tobytes() == b.tables()[name].numpy().tobytes(), name


@pytest.mark.parametrize("method", [fv.FedAvg(), fv.AFL(), fv.FairGrad(0.1), fv.Ditto(),
                                    Unregistered(2.0)], ids=str)  # fmt: skip
def test_a_loaded_history_is_the_same_and_continues(method: fv.Method, tmp_path: Path) -> None:
    path, whole = tmp_path / "some.fairvar", trained(method, 7)
    before = trained(method)
    before.save(path)
    loaded = fv.load(path)
    assert isinstance(loaded, fv.History)
    same(loaded, before)
    rest = trained(method, 7, state=loaded)
    assert all(map(torch.equal, rest.state.tensors(), whole.state.tensors()))
    joined = loaded + rest
    assert torch.equal(joined.loss, whole.loss)
    assert joined.exchanges == whole.exchanges
    joined.save(path)
    again = fv.load(path)
    assert isinstance(again, fv.History)
    same(again, joined)


def test_histories_of_some_participants_regression_and_divergence_are_saved(tmp_path: Path) -> None:
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    numbers = fv.Federation.from_arrays([(x, x.sum(1, keepdim=True))] * 3, test=[(x, x[:, :1])] * 3)
    with pytest.warns(RuntimeWarning, match="diverged"):
        lost = fv.train("linear", numbers, fv.FedAvg(), 60, lr=1e9, loss="mse", evaluate_every=1)
    stopped = replace(trained(fv.FedAvg()), stopped="<why>")
    fine = fv.train("linear", numbers, fv.FedAvg(), 3, loss="mse", evaluate_every=1)
    for place, history in enumerate((trained(fv.TERM(2.0), participants=2), lost, fine, stopped)):
        history.save(tmp_path / str(place))
        found = fv.load(tmp_path / str(place))
        assert isinstance(found, fv.History)
        same(found, history)


def test_a_state_and_a_model_are_loaded_as_such(tmp_path: Path) -> None:
    history = trained(fv.AFL())
    history.state.save(tmp_path / "state")
    state = fv.load(tmp_path / "state")
    assert isinstance(state, fv.State)
    assert state.made_by == "AFL"
    assert all(map(torch.equal, state.tensors(), history.state.tensors()))
    with pytest.raises(fv.BadInput, match="state is one of AFL"):
        trained(fv.FedAvg(), 9, state=state)
    history.save_model(tmp_path / "model.safetensors")
    model = fv.load(tmp_path / "model.safetensors")
    assert isinstance(model, dict)
    assert model.keys() == history.model.keys()
    assert all(torch.equal(model[name], history.model[name]) for name in model)
    with pytest.raises(fv.BadInput, match=r"ends in \.safetensors"):
        history.save_model(tmp_path / "model.bin")


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    trained(fv.FedAvg()).save_model(path)
    content = path.read_bytes()
    for place in (
        len(content) - 1,
        len(content) - 40,
    ):  # values, which the library takes as they are
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(fv.IntegrityError, match="its tensors are not those that were written"):
            fv.load(path)


def test_what_is_no_path_or_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.update("jaxtyping_disable", True)  # it would refuse them by itself
    history = trained(fv.FedAvg())
    for save in (history.save, history.state.save, history.save_model):
        with pytest.raises(fv.BadInput, match="path = 3: give the path of a file"):
            save(3)  # type: ignore[arg-type]
        with pytest.raises(fv.BadInput, match="is a folder; give the name of a file"):
            save(tmp_path)
    with pytest.raises(fv.BadInput, match="path = None: give the path"):
        fv.load(None)  # type: ignore[arg-type]
    monkeypatch.setenv("HOME", str(tmp_path))
    history.save("~/at-home")
    assert (tmp_path / "at-home").is_file()
    assert isinstance(fv.load("~/at-home"), fv.History)


def test_a_run_folder_is_loaded(tmp_path: Path) -> None:
    config = {"data": {"name": "logistic", "clients": 4}, "partition": {"name": "natural"},
              "train": {"rounds": 6}, "evaluate": {"every": 3}, "method": fv.TERM(2.0)}  # fmt: skip
    history = fv.run(config, out=tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if (path / "manifest.json").exists())
    loaded = fv.load(folder)
    assert isinstance(loaded, fv.History)
    same(loaded, history)
    loaded.save(tmp_path / "again")
    again = fv.load(tmp_path / "again")
    assert isinstance(again, fv.History)
    same(again, history)
    assert isinstance(fv.load(folder / "state.safetensors"), fv.State)
    with pytest.raises(fv.BadInput, match="holds 1 runs"):
        fv.load(tmp_path)


def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "history"
    trained(fv.FedAvg()).save(path)
    content = path.read_bytes()
    for place in (10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(fv.IntegrityError):
            fv.load(path)
    path.write_bytes(content[:-5])
    with pytest.raises(fv.IntegrityError, match="damaged"):
        fv.load(path)
    path.write_bytes(pack_files({"history.safetensors": b"{}"}))
    with pytest.raises(fv.IntegrityError, match="not a valid safetensors"):
        fv.load(path)
    path.write_bytes(b"PK")
    for bad, why in ((path, "weight files end in"), (tmp_path / "none", "No such file"),
                     (tmp_path, "no finished run")):  # fmt: skip
        with pytest.raises(fv.BadInput, match=why):
            fv.load(bad)


def test_a_history_of_an_unknown_method_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history"
    trained(Unregistered(2.0)).save(path)
    monkeypatch.setattr("fairvar.runs.stored._subclasses", lambda kind: iter(()))
    with pytest.raises(fv.BadInput, match=r"test_saved\.Unregistered', which is not known here"):
        fv.load(path)


def test_saving_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history"
    trained(fv.FedAvg()).save(path)
    assert [found.name for found in path.parent.iterdir()] == ["history"]
    with pytest.raises(fv.RunFailed, match="cannot write"):
        trained(fv.FedAvg()).save(path / "below")


# -- joining ---------------------------------------------------------------------------------------
def test_only_a_continuation_can_be_joined() -> None:
    first = trained(fv.FedAvg())
    rest = trained(fv.FedAvg(), 6, state=first.state)
    joined = first + rest
    assert joined.observed.tolist() == list(range(6))
    assert joined.evaluated.tolist() == [2, 4, 6]
    assert (joined.rounds, joined.state) == (6, rest.state)
    other = fv.train("multinomial", fv.Federation.from_arrays(
        [DATA.train.of(i) for i in range(2)], test=[DATA.train.of(i) for i in range(2)]),
        fv.FedAvg(), 2)  # fmt: skip
    for one, two, why in (
        (rest, first, "ends after round 6, the second starts after 0"),
        (first, first, "starts after 0"),
        (first, replace(rest, method=fv.AFL()), "AFL"),
        (first, other, "other clients"),
        (replace(first, diverged_at=3), rest, "diverged"),
        (first, replace(rest, accuracy={}), "other splits"),
    ):
        with pytest.raises(fv.BadInput, match=f"cannot be joined: .*{why}"):
            one + two
    with pytest.raises(TypeError):
        first + 3  # type: ignore[operator]


def test_a_continuation_of_another_run_is_not_joined(tmp_path: Path) -> None:
    first = trained(fv.FedAvg())
    rest = trained(fv.FedAvg(), 6, state=first)
    with pytest.raises(fv.BadInput, match="the second continues another run"):
        trained(fv.FedAvg(), seed=4) + rest
    first.state.save(tmp_path / "state")
    again = trained(fv.FedAvg(), 6, state=fv.load(tmp_path / "state"))
    last = trained(fv.FedAvg(), 8, state=rest)
    for whole in ((first + again) + last, first + (again + last)):
        assert whole.rounds == 8
        assert "continues" not in whole.provenance


def test_tables_are_in_one_order_and_histories_are_compared_by_identity(tmp_path: Path) -> None:
    first = trained(fv.FedAvg(), evaluate_splits=("test", "valid"))
    first.save(tmp_path / "first")
    loaded = fv.load(tmp_path / "first")
    assert loaded.to_frame().to_csv() == first.to_frame().to_csv()
    assert list(loaded.score) == list(first.score)
    assert first == first
    assert first not in [loaded, loaded]
    assert len({first, loaded, first.state, loaded.state}) == 4


def test_clients_are_named_by_id_or_name() -> None:
    config.update("jaxtyping_disable", True)
    pairs = [DATA.train.of(i) for i in range(3)]
    named = fv.Federation.from_arrays(pairs, test=pairs, client_names=["a", "b", "c"])
    history = fv.train("multinomial", named, fv.Ditto(), 1)
    for client in (1, "b", torch.tensor(1)):
        assert torch.equal(history.personal_model(client)["1.bias"],
                           history.state.personal["1.bias"][1])  # fmt: skip
    assert history.fairness(at=torch.tensor(0)).mean == history.fairness().mean


def share_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def test_a_loaded_history_of_an_own_metric_is_joined_and_compared(tmp_path: Path) -> None:
    first = trained(fv.FedAvg(), metric=share_right)
    first.save(tmp_path / "first")
    loaded = fv.load(tmp_path / "first")
    rest = trained(fv.FedAvg(), 6, state=loaded, metric=share_right)
    assert (loaded + rest).score["test", "global"].shape[0] == 3
    assert fv.compare({"loaded": loaded, "trained": first}).paired["trained"].accuracy.value == 0


def test_fewer_rounds_than_done_say_so() -> None:
    first = trained(fv.FedAvg())
    for rounds in (3, 4):
        with pytest.raises(fv.BadInput, match="the state has 4 rounds behind it"):
            trained(fv.FedAvg(), rounds, state=first)
