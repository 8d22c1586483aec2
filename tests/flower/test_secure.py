"""Secure aggregation by Flower's real SecAgg+ mod and workflow, over an in-process grid.

The mean of a round is off by less than one step of the quantisation in every coordinate; what the
server gets of a single client is noise; those that leave are made up for, whenever they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import bytes_to_ndarray, ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from test_in_process import _error, run, run_config

import fairvar as fv
from fairvar.deploy.client import Message as Plain
from fairvar.deploy.client import is_additive
from fairvar.deploy.flower.secure import MODULUS, UNREADABLE, quantisation
from fairvar.deploy.flower.server import run_on
from fairvar.deploy.flower.setup import read_setup
from fairvar.deploy.run import LocalTransport, federate, local_clients
from fairvar.methods.base import Memory, Method, Replies
from fairvar.runs.runner import federation_of
from fairvar.runs.stored import StoredRun
from grids import InProcessGrid, Spoil

ON = {"secure-aggregation": True}
STEP = 2 * 8.0 / quantisation(5)  # of the default clipping_range, for five clients
ROUNDS = 2
CARRIED: list[tuple[Method, float]] = [  # and its model's largest distance after ROUNDS, in steps
    (fv.FedAvg(), 5),
    (fv.QFFL(1.0), 5),
    (fv.FairLoss(0.5), 5),
    (fv.FairLoss(0.5, exact=True), 5),
    (fv.FairLoss(0.5, warm_start="exact"), 5),
    (fv.FairGrad(0.1), 5),
    (fv.FairGrad(0.1, exact=True), 5),
    (fv.PropFair(), 5),
    (fv.PropFair(losses="full"), 5),
    (fv.FedAvg(weights="size"), 20),
    (fv.FairGrad(0.1, exact=True, weights="size"), 20),
]
STAGES = {  # what a node answers in each
    "setup": Key.PUBLIC_KEY_1,
    "share keys": Key.DESTINATION_LIST,
    "collect": Key.MASKED_PARAMETERS,
    "unmask": Key.SHARE_LIST,
}


def secure(method: Method, out: Path, options: str = "", **more: object) -> dict:
    size = "secure.max_weight=500" if method.client_weights == "size" else ""
    return run_config(method, out, f"{size} {options}", **(ON | more))


def without(config: dict, absent: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """The model of the same run with every reply in the clear, and without these clients."""

    def leaves(request: Plain, reply: Plain) -> Sequence[Plain]:
        gone = request.client in absent and request.stamp.exchange != "evaluate"
        return [] if gone else [reply]

    setup = read_setup({**config, "secure-aggregation": False})
    clients = local_clients(setup.agreed, federation_of(setup.config))
    return federate(setup.agreed, setup.rules, LocalTransport(clients, leaves)).history.state.params


def distance(stored: StoredRun, params: dict[str, torch.Tensor]) -> float:
    found = stored.history().state.params
    return max(float((found[name] - leaf).abs().max()) for name, leaf in params.items())


@pytest.mark.parametrize(("method", "steps"), CARRIED, ids=repr)
def test_the_same_model_within_the_quantisation(
    method: Method, steps: float, tmp_path: Path
) -> None:
    config = secure(method, tmp_path, rounds=ROUNDS)
    stored = run(config)
    plain = without({**config, "options": config["options"].replace("secure.max_weight=500", "")})
    assert 0 < distance(stored, plain) <= steps * STEP
    assert stored.history().provenance["engine"] == "flower-secure"
    assert stored.manifest["birth"]["refused"] == {}


def test_one_round_is_off_by_less_than_one_step(tmp_path: Path) -> None:
    for options, step in (("", STEP), ("secure.clipping_range=1.0", STEP / 8)):
        config = secure(fv.FedAvg(), tmp_path, options, rounds=1)
        plain = without(secure(fv.FedAvg(), tmp_path, rounds=1))
        assert 0 < distance(run(config), plain) <= step


# -- what the server sees --------------------------------------------------------------------------
def stage_of(reply: Message) -> str | None:
    found = {} if reply.has_error() else reply.content.config_records.get(RECORD_KEY_CONFIGS, {})
    return next((stage for stage, key in STAGES.items() if key in found), None)


def masked(reply: Message) -> list[np.ndarray]:
    parts = reply.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS]
    return [bytes_to_ndarray(part) for part in parts]  # type: ignore[union-attr,arg-type]


def test_a_single_reply_tells_nothing(tmp_path: Path) -> None:
    """Masked vectors look uniform and unlike the updates; nothing else is sent with them."""
    hidden: dict[int, np.ndarray] = {}
    updates: dict[int, np.ndarray] = {}
    start = read_setup(run_config(fv.FedAvg(), tmp_path)).agreed.model.double()
    x = torch.cat([p.detach().flatten() for p in start.parameters()]).numpy()

    def watches(node: int, reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            assert "message" not in reply.content.config_records  # no number of samples, no loss
            assert all(not record for record in reply.content.array_records.values())
            if stage_of(reply) == "collect":
                weight, *arrays = masked(reply)
                assert dict(reply.content.metric_records["fitres.num_examples"]) == {
                    "num_examples": 1
                }
                assert weight[0] != quantisation(5)  # the client's part of the sum of weights
                hidden[node] = np.concatenate([a.ravel() for a in arrays])
        return reply

    def listens(node: int, reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            arrays = reply.content.array_records["arrays"].to_numpy_ndarrays()
            updates[node] = x - np.concatenate([a.ravel() for a in arrays])
        return reply

    run(secure(fv.FedAvg(), tmp_path / "a", "evaluate.every=9", rounds=1), watches)
    run(run_config(fv.FedAvg(), tmp_path / "b", "evaluate.every=9", rounds=1), listens)
    assert hidden.keys() == updates.keys()
    assert len(hidden) == 5
    for node, update in updates.items():
        assert len(hidden[node]) == len(update) == 650
        bare = np.round((update + 8.0) / STEP)  # what the mod would send without masks
        assert correlation(bare, update) > 0.999  # so that this measure would notice
        assert abs(correlation(hidden[node], update)) < 0.25  # 6 standard deviations of chance
        assert 0.4 < hidden[node].mean() / MODULUS < 0.6
        assert 0.25 < (hidden[node] / MODULUS).std() < 0.33  # uniform: 0.289


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def test_flowers_mod_lets_a_custom_action_pass_unprotected() -> None:
    """Why probes are not sent as `query.probe` or `train.phase2` here."""
    answer = RecordDict({"secret": ConfigRecord({"loss": 0.7})})

    def app(message: Message, context: Context) -> Message:
        return Message(answer, reply_to=message)

    context = Context(1, 1, {}, RecordDict(), {}, 1)
    for kind in ("train.phase2", "query.probe"):
        reply = secaggplus_mod(Message(RecordDict(), 7, kind), context, app)
        assert reply.content.config_records["secret"]["loss"] == 0.7
    with pytest.raises(KeyError, match=RECORD_KEY_CONFIGS):
        secaggplus_mod(Message(RecordDict(), 7, "train"), context, app)


def test_a_node_answers_nothing_that_is_not_masked(tmp_path: Path) -> None:
    """Neither a probe under its own name nor a plain train message, whatever the server asks."""
    method = fv.FairGrad(0.1, exact=True)
    plain, asked = run_config(method, tmp_path / "a", rounds=1), []

    class Forgetful(InProcessGrid):
        def _ask(self, message: Message) -> Message | None:
            reply = super()._ask(message)
            if message.metadata.message_type in ("query.probe", "train"):
                asked.append(reply)
            return reply

    grid = Forgetful({**plain, **ON}, {100 + i: i for i in range(5)})  # what the nodes know
    few = f"{plain['options']} federation.repeats=0"
    with pytest.raises(fv.RunFailed, match="5 × error"):
        run_on(grid, read_setup({**plain, "options": few}))  # a server that sends plain messages
    assert len(asked) == 5
    assert all("unmasked answers are not given" in reply.error.reason for reply in asked)


def test_flowers_masks_have_32_bits() -> None:
    """A limit that docs/deploy.md names: any two seeds of equal exclusive-or give one mask."""
    first = bytes(range(32))
    second = first[4:] + first[:4]
    one, other = (pseudo_rand_gen(seed, MODULUS, [(5,)])[0] for seed in (first, second))
    assert first != second
    assert np.array_equal(one, other)


def test_flowers_nodes_give_both_shares_to_a_server_that_cheats(tmp_path: Path) -> None:
    """Another limit: with the shares of its seed and of its key, one client can be unmasked."""
    given = []

    class Cheating(InProcessGrid):
        def _ask(self, message: Message) -> Message | None:
            asked = message.content.config_records.get(RECORD_KEY_CONFIGS, {})
            if Key.DEAD_NODE_ID_LIST in asked:
                asked[Key.DEAD_NODE_ID_LIST] = [100]  # which is alive, and in the other list too
            reply = super()._ask(message)
            if reply is not None and stage_of(reply) == "unmask":
                given.append(reply.content.config_records[RECORD_KEY_CONFIGS][Key.NODE_ID_LIST])
            return reply

    config = secure(fv.FedAvg(), tmp_path, "federation.repeats=0", rounds=1)
    with suppress(fv.RunFailed):  # such shares do not fit together; the server has them anyway
        run_on(Cheating(config, {100 + i: i for i in range(5)}), read_setup(config))
    assert len(given) == 5
    assert all(list(nodes).count(100) == 2 for nodes in given)


# -- those that leave ------------------------------------------------------------------------------
def leaves(stage: str, nodes: set[int], silent: bool = False) -> Spoil:
    def spoil(node: int, reply: Message) -> Message | None:
        if node not in nodes or stage_of(reply) != stage:
            return reply
        return None if silent else _error(reply)

    return spoil


@pytest.mark.parametrize("stage", ["setup", "share keys", "collect"])
@pytest.mark.parametrize("gone", [1, 2])
def test_those_that_leave_are_not_in_the_sum(stage: str, gone: int, tmp_path: Path) -> None:
    config = secure(fv.FedAvg(), tmp_path, rounds=1)
    stored = run(config, leaves(stage, {100 + 7 * i for i in range(gone)}))
    assert distance(stored, without(config, range(gone))) <= STEP * 5 / (5 - gone)
    assert stored.manifest["birth"]["refused"] == {"error": gone}
    weights = stored.history().weights[0]
    assert weights[:gone].tolist() == [0.0] * gone
    assert torch.allclose(weights[gone:].double(), torch.tensor(1 / (5 - gone)).double())


def test_a_silent_node_is_left_out(tmp_path: Path) -> None:
    config = secure(fv.FedAvg(), tmp_path, "federation.deadline=0.3", rounds=1)
    stored = run(config, leaves("collect", {107}, silent=True))
    assert distance(stored, without(config, [1])) <= STEP * 5 / 4
    assert stored.manifest["birth"]["refused"] == {"no reply": 1}


def test_who_leaves_last_is_still_in_the_sum(tmp_path: Path) -> None:
    config = secure(fv.FedAvg(), tmp_path, rounds=1)
    stored = run(config, leaves("unmask", {107}))
    assert distance(stored, without(config)) <= STEP
    assert stored.manifest["birth"]["refused"] == {}


def test_below_the_threshold_there_is_no_sum(tmp_path: Path) -> None:
    config = secure(fv.FedAvg(), tmp_path, "federation.repeats=1", rounds=1)
    with pytest.raises(fv.RunFailed, match=r"given up after 2 attempts.*6 × error"):
        run(config, leaves("collect", {100, 107, 114}))


def test_a_masked_vector_of_another_shape_is_left_out(tmp_path: Path) -> None:
    """(1,) would broadcast into the sum and spoil it for everybody."""

    def shrinks(node: int, reply: Message) -> Message:
        if node == 107 and stage_of(reply) == "collect":
            parts = [ndarray_to_bytes(a.ravel()[:1]) for a in masked(reply)]
            reply.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS] = parts
        return reply

    config = secure(fv.FedAvg(), tmp_path, rounds=1)
    stored = run(config, shrinks)
    assert stored.manifest["birth"]["refused"] == {"shape": 1}
    assert distance(stored, without(config, [1])) <= STEP * 5 / 4


# -- one hostile node ------------------------------------------------------------------------------
def told(reply: Message) -> ConfigRecord:
    return reply.content.config_records[RECORD_KEY_CONFIGS]


def says(key: str, value: object) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        told(reply)[key] = value  # type: ignore[assignment]

    return spoil


def cleared(reply: Message) -> None:
    told(reply).clear()


def without_record(reply: Message) -> None:
    del reply.content[RECORD_KEY_CONFIGS]


def from_another(reply: Message) -> None:
    reply.metadata.__dict__["_src_node_id"] = 100


def complains_of_nobody(reply: Message) -> None:
    told(reply).clear()
    told(reply)[UNREADABLE] = []


def same_key_twice(reply: Message) -> None:
    told(reply)[Key.PUBLIC_KEY_2] = told(reply)[Key.PUBLIC_KEY_1]


def no_weight(reply: Message) -> None:
    del reply.content["fitres.num_examples"]


def weight(value: float) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        reply.content.metric_records["fitres.num_examples"]["num_examples"] = value

    return spoil


def each(key: str, change: Callable[[bytes], bytes]) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        told(reply)[key] = [change(part) for part in told(reply)[key]]  # type: ignore[union-attr,arg-type]

    return spoil


def noise(content: bytes) -> bytes:
    """Of the same length, with the index that a share begins with."""
    return content[:4] + np.random.default_rng(len(content)).bytes(len(content) - 4)


CURVE = public_key_to_bytes(ec.generate_private_key(ec.SECP256R1()).public_key())
NONSENSE: list[tuple[str, Callable[[Message], None]]] = [
    *((stage, change) for stage in STAGES for change in (cleared, without_record, from_another)),
    ("setup", says(Key.PUBLIC_KEY_1, b"no key")),
    ("setup", says(Key.PUBLIC_KEY_2, "text")),
    ("setup", says(Key.PUBLIC_KEY_2, CURVE)),
    ("setup", same_key_twice),
    ("share keys", says(Key.DESTINATION_LIST, [1, 2, 3, 4])),
    ("share keys", says(Key.DESTINATION_LIST, [100, 100, 114, 121])),
    ("share keys", says(Key.CIPHERTEXT_LIST, [b"x"])),
    ("share keys", says(Key.CIPHERTEXT_LIST, ["x"] * 4)),
    ("share keys", each(Key.CIPHERTEXT_LIST, noise)),
    ("collect", says(Key.MASKED_PARAMETERS, [b"\x93NUMPY"])),
    ("collect", says(Key.MASKED_PARAMETERS, "text")),
    ("collect", each(Key.MASKED_PARAMETERS, lambda b: ndarray_to_bytes(bytes_to_ndarray(b) * 0.5))),
    ("collect", complains_of_nobody),
    ("collect", no_weight),
    ("collect", weight(10**9)),
    ("collect", weight(float("nan"))),
    ("unmask", says(Key.NODE_ID_LIST, [100] * 5)),
    ("unmask", each(Key.SHARE_LIST, lambda b: b"")),
    ("unmask", each(Key.SHARE_LIST, noise)),
]


@pytest.mark.parametrize(("stage", "change"), NONSENSE)
def test_one_hostile_node_is_left_out_by_name(
    stage: str, change: Callable[[Message], None], tmp_path: Path
) -> None:
    def spoil(node: int, reply: Message) -> Message:
        if node == 107 and stage_of(reply) == stage:
            change(reply)
        return reply

    config = secure(fv.FedAvg(), tmp_path, "federation.repeats=0 evaluate.every=9", rounds=1)
    stored = run(config, spoil)
    absent = [1] if bool(stored.history().weights[0, 1] == 0) else []
    assert absent or stage == "unmask"  # its vector is in the sum by then
    assert distance(stored, without(config, absent)) <= STEP * 5 / 4
    named = (stored.folder / "refused.csv").read_text().splitlines()[1:]
    assert [row.split(",")[3] for row in named] == ["1"] * len(absent)


def test_one_word_against_another(tmp_path: Path) -> None:
    """Shares that a single node cannot read, or says that it cannot: both are left out. Complaints
    in other stages mean nothing."""

    def spoil(node: int, reply: Message) -> Message:
        if node == 114 and stage_of(reply) == "setup":
            told(reply)[UNREADABLE] = [5]
        if node == 107 and stage_of(reply) == "collect":
            told(reply).clear()
            told(reply)[UNREADABLE] = [100, 114, 121, 128]
        return reply

    config = secure(fv.FedAvg(), tmp_path, "federation.repeats=0", rounds=1)
    stored = run(config, spoil)
    assert (stored.history().weights[0] != 0).tolist() == [False, False, True, True, True]
    assert stored.manifest["birth"]["refused"] == {"format": 2}


# -- what is refused -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "method",
    [
        fv.AFL(),
        fv.AAggFF(),
        fv.FairLoss(0.1, exact=True, collapsed=True),
        fv.TERM(),
        fv.Superquantile(),
        fv.GIFAIR(),
        fv.SemiVRed(0.5),
        fv.FedEBA(),
    ],
    ids=repr,
)
def test_methods_that_need_each_client_are_refused(method: Method, tmp_path: Path) -> None:
    with pytest.raises(fv.BadInput, match="by itself, and a secure sum hides just that") as caught:
        read_setup(secure(method, tmp_path))
    assert method.label in str(caught.value)
    assert "\n" not in str(caught.value)


class Softmax(Method, frozen=True, tag="softmax_of_losses"):
    """Its author forgot to say `each_separately`."""

    def weigh(self, memory: Memory, replies: Replies) -> tuple[torch.Tensor, Memory]:
        return replies.loss.softmax(0), memory


def test_whether_sums_are_enough_is_tried() -> None:
    assert all(is_additive(method) for method, _ in CARRIED)
    assert is_additive(fv.QFFL(0.5, weights="size"))
    assert Softmax().sums_suffice
    assert not is_additive(Softmax())


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        (fv.FedAvg(weights="size"), {}, "needs secure.max_weight"),
        (fv.FedAvg(), {"clients": 2}, "hides nothing among 2 clients"),
        (fv.FedAvg(), {"options": "train.participants=2"}, "hides nothing among 2 clients"),
        (fv.FedAvg(), {"options": "secure.threshold=0.4"}, "secure.threshold"),
        (fv.FedAvg(), {"options": "secure.treshold=0.9"}, "unknown key secure.treshold"),
        (fv.FedAvg(), {"secure-aggregation": False, "options": "secure.threshold=0.9"}, "without"),
    ],
)
def test_a_bad_configuration_is_refused(
    method: Method, change: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(fv.BadInput, match=message):
        read_setup(run_config(method, tmp_path) | ON | change)


def test_batch_norm_is_refused(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        flat, norm = torch.nn.Flatten(), torch.nn.BatchNorm1d(64)
        return torch.nn.Sequential(flat, norm, torch.nn.Linear(64, 10))

    config = secure(fv.FedAvg(), tmp_path)
    with pytest.raises(fv.BadInput, match="batch norm"):
        run_on(InProcessGrid(config, {}), read_setup(config, model))


def test_values_beyond_the_range_are_not_cut_in_silence(tmp_path: Path) -> None:
    config = secure(fv.FedAvg(), tmp_path, "secure.clipping_range=1e-4 federation.repeats=0")
    with pytest.raises(fv.RunFailed, match="5 × error"):
        run(config)
    seen = []

    def listens(node: int, reply: Message) -> Message:
        seen.extend([reply.error.reason] if reply.has_error() else [])
        return reply

    with pytest.raises(fv.RunFailed):
        run(config, listens)
    assert "beyond secure.clipping_range = 0.0001" in seen[0]


def test_more_samples_than_the_largest_weight_are_left_out(tmp_path: Path) -> None:
    sizes = federation_of(read_setup(run_config(fv.FedAvg(), tmp_path)).config).sizes
    top, second = sizes.argsort(descending=True)[:2].tolist()
    assert sizes[top] > sizes[second]
    options = f"secure.max_weight={int(sizes[second])}.0"
    config = run_config(fv.FedAvg(weights="size"), tmp_path, options, rounds=1) | ON
    stored = run(config)
    assert stored.manifest["birth"]["refused"] == {"error": 1}
    assert f",train,{top},error," in (stored.folder / "refused.csv").read_text()


def test_clipping_and_noise_under_the_masks(tmp_path: Path) -> None:
    """Cut at the node, then masked; the sum gets the noise. No cut update is sent unmasked."""
    cut = "privacy.clipping_norm=0.01 privacy.noise_multiplier=0.0"
    plain = run(run_config(fv.FedAvg(), tmp_path / "plain", cut, rounds=1))
    masked_too = run(secure(fv.FedAvg(), tmp_path / "masked", cut, rounds=1))
    assert 0 < distance(masked_too, plain.history().state.params) <= STEP
