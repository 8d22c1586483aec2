"""Groups of runs: who trains with whom, and that storing them one by one loses nothing.

Most tests put a slow stand-in for the engine's batch: the single runs in lock-step. Its bytes are
those of single runs, so that a sweep in groups must equal one without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from filelock import FileLock
from msgspec.structs import replace

from fairvar.cli import main
from fairvar.common.files import pack_files, seal, unpack_files
from fairvar.engine.grid import Member
from fairvar.engine.kernels import compiled
from fairvar.engine.keys import batch_key, fingerprint
from fairvar.engine.train import Checkpoint, run_rounds
from fairvar.errors import BadInput
from fairvar.runs import formats, runner, sweep
from fairvar.runs.formats import MANIFEST, SLOTS
from fairvar.runs.plan import Plan
from fairvar.runs.runner import (
    Interrupted,
    Watch,
    arrange,
    missing,
    run_cell,
    run_folder,
    run_group,
)
from fairvar.runs.stored import StoredRun
from fairvar.runs.sweep import crowding, device_for, project, run_sweep

PAPER = Path(__file__).parents[2] / "configs" / "paper"
ROUNDS = 6
PLAN: dict[str, Any] = {
    "data": {"name": "digits", "clients": 4, "samples": 200},
    "train": {"rounds": ROUNDS},
    "evaluate": {"every": 1, "local": False},
    "sweep": {"methods": ["fairloss*", "afl"], "seeds": 2, "lr": [0.1, 0.5]},
}


def plan(**sections: dict[str, Any]) -> Plan:
    return Plan.from_dict({k: {**v, **sections.get(k, {})} for k, v in PLAN.items()})


class Lockstep:
    """`train_grid` from single runs that advance round by round."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []  # (members, first round)

    def __call__(
        self, members: Sequence[Member], federation: Any, loss: Any, when: Any,
        progress: Any = None, keep: Any = None,
    ) -> list[Any]:  # fmt: skip
        at: list[Checkpoint | None] = [m.start for m in members]
        first = at[0].state.round if at[0] else 0
        rounds = members[0].settings.rounds
        self.calls.append((len(members), first))

        def advance(i: int, rounds: int) -> Any:
            def take(done: int, make: Callable[[], list[Checkpoint]]) -> None:
                (at[i],) = make()

            m = members[i]
            settings = replace(m.settings, rounds=rounds)
            return run_rounds(
                m.model, federation, m.method, loss, settings, when, at[i], None, take
            )

        for t in range(first, rounds):
            for i in range(len(members)):
                advance(i, t + 1)
            if keep is not None:
                keep(t + 1, lambda: list(at))
            if progress is not None:
                progress(t + 1, rounds)
        return [advance(i, rounds) for i in range(len(members))]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Lockstep:
    fake = Lockstep()
    monkeypatch.setattr(runner, "SECONDS_BETWEEN_CHECKPOINTS", 1e9)  # however slow the machine
    monkeypatch.setattr(runner, "train_grid", fake)
    monkeypatch.setattr(runner, "trains_together", lambda members, federation, loss: True)
    monkeypatch.setattr(runner, "members_that_fit", lambda members, federation: 1000)
    return fake


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The runs of the plan, each by itself."""
    out = tmp_path_factory.mktemp("calm")
    for cell in plan().cells:
        run_cell(cell, out, Watch())
    return contents(out)


def contents(out: Path) -> dict[str, bytes]:
    """All files of runs but the manifests, which tell the time."""
    found = [p for p in out.rglob("*") if p.is_file() and ".locks" not in p.parts]
    return {str(p.relative_to(out)): p.read_bytes() for p in found if p.name != MANIFEST}


def quiet(done: int, total: int, what: str) -> None:
    pass


# -- who trains with whom -------------------------------------------------------------------------
@pytest.fixture
def all_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_most", lambda family: runner.MOST_TOGETHER)


@pytest.mark.usefixtures("all_fit")
def test_the_papers_grid_in_groups():
    cells = Plan.load(PAPER / "mnist.toml").cells
    found = arrange(cells)
    assert sorted(fingerprint(c) for g in found for c in g) == sorted(fingerprint(c) for c in cells)
    assert all(len({batch_key(cell) for cell in group}) == 1 for group in found)
    assert max(map(len, found)) == runner.MOST_TOGETHER
    assert len(found) < 100
    assert all(len(group) > 20 for group in found)
    firsts = [cells.index(group[0]) for group in found]
    assert firsts == sorted(firsts)
    assert all([cells.index(c) for c in g] == sorted(cells.index(c) for c in g) for g in found[:9])
    assert {c.train.seed for c in found[0]} == {0, 1, 2, 3, 4}  # FedAvg: 5 lr x 5 seeds


@pytest.mark.usefixtures("all_fit")
def test_what_is_not_a_number_separates():
    sizes = {
        "plain": ({}, [4, 4]),
        "seeds draw their own batches": ({"train": {"batch_size": 8}}, [2, 2, 2, 2]),
        "a word": ({"sweep": {"methods": ["aaggff"], "cdf": ["normal", "gumbel"]}}, [4, 4]),
        "zero switches curvature off": (
            {"sweep": {"methods": ["fairgrad"], "strength": [0.0, 0.1, 0.2]}}, [4, 8]),
    }  # fmt: skip
    for name, (sections, expected) in sizes.items():
        assert [len(g) for g in arrange(plan(**sections).cells)] == expected, name
    cells = plan(sweep={"methods": ["afl"]}).cells
    assert [len(g) for g in arrange([*cells, *cells])] == [4]  # the same twice


def test_runs_with_some_clients_train_each_by_itself(tmp_path: Path):
    """Their seeds differ in who takes part; a sweep stores the single runs, byte by byte."""
    some = plan(train={"participants": 2}, sweep={"methods": ["afl"]})
    assert all(len(group) == 1 for group in arrange(some.cells))
    assert [len(group) for group in arrange(plan(sweep={"methods": ["afl"]}).cells)] == [4]
    run_sweep(arrange(some.cells), tmp_path / "sweep", quiet)
    for cell in some.cells:
        run_cell(cell, tmp_path / "single", Watch())
    found = contents(tmp_path / "sweep")
    alone = contents(tmp_path / "single")
    assert {name: found[name] for name in alone} == alone


def test_each_by_itself_in_the_order_of_the_plan():
    cells = plan().cells
    assert arrange(cells, batch=False) == [(cell,) for cell in cells]


@pytest.mark.usefixtures("all_fit")
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_shards_are_whole_groups(parts: int, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "MOST_TOGETHER", 3)
    values = {**PLAN, "sweep": {**PLAN["sweep"], "seeds": 5}}
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(values))
    shards = []
    for part in range(parts):
        main(
            ["sweep", str(tmp_path / "plan.toml"), "--dry", "--json", "--shard", f"{part}/{parts}"]
        )
        shards.append([row["run"] for row in json.loads(capsys.readouterr().out)])
    cells = Plan.from_dict(values).cells
    for group in arrange(cells):
        names = {fingerprint(cell)[:16] for cell in group}
        assert [len(names & set(part)) for part in shards].count(len(names)) == 1
    assert sorted(name for part in shards for name in part) == sorted(
        fingerprint(cell)[:16] for cell in cells
    )


def test_the_engine_decides_what_pays(monkeypatch: pytest.MonkeyPatch):
    """What it refuses runs by itself, what is too large is cut."""
    asked: list[int] = []

    def fits(answer: bool) -> Callable[..., bool]:
        def together(members: Sequence[Member], federation: Any, loss: str) -> bool:
            asked.append(len(members))
            return answer

        return together

    cells = plan().cells
    monkeypatch.setattr(runner, "trains_together", fits(False))
    assert arrange(cells) == [(cell,) for cell in cells]
    monkeypatch.setattr(runner, "trains_together", fits(True))
    monkeypatch.setattr(runner, "members_that_fit", lambda members, federation: 3)
    assert [len(group) for group in arrange(cells)] == [3, 3, 1, 1]
    assert asked == [4, 4, 3, 3]


# -- the same folders -----------------------------------------------------------------------------
def test_a_sweep_in_groups_leaves_the_same_runs(engine, calm, tmp_path):
    shown: list[tuple[int, int, str]] = []
    status = run_sweep(arrange(plan().cells), tmp_path, lambda *now: shown.append(now))
    assert (status.cells, status.done, status.elsewhere) == (8, 8, 0)
    assert engine.calls == [(4, 0), (4, 0)]
    assert contents(tmp_path) == calm
    assert shown[-1][:2] == (8, 8)
    assert not (tmp_path / ".groups").exists()
    run_sweep(arrange(plan().cells), tmp_path, quiet)
    assert len(engine.calls) == 2


def test_only_what_is_missing_is_computed(engine, calm, tmp_path):
    cells = plan().cells
    for cell in cells[:3]:  # two of FairLoss*, one of AFL
        run_cell(cell, tmp_path, Watch())
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/*.*")}
    run_sweep(arrange(cells), tmp_path, quiet)
    assert engine.calls == [(2, 0), (3, 0)]
    assert contents(tmp_path) == calm
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_the_last_missing_run_runs_by_itself(engine, calm, tmp_path):
    group = arrange(plan().cells)[0]
    for cell in group[1:]:
        run_cell(cell, tmp_path, Watch())
    assert run_group(group, tmp_path, Watch())
    assert engine.calls == []
    assert contents(tmp_path).items() <= calm.items()


def stop_after(rounds: int) -> Watch:
    asked = iter([False] * (rounds - 1) + [True])
    return Watch(stopping=lambda: next(asked))


@pytest.mark.parametrize("stored", [0, 1])
def test_an_interrupted_group_continues_as_a_whole(stored, engine, calm, tmp_path):
    """Also when somebody else stored one of its runs meanwhile: the others must not notice."""
    group = arrange(plan().cells)[0]
    with pytest.raises(Interrupted, match=f"after round 4 of {ROUNDS}"):
        run_group(group, tmp_path, stop_after(4))
    assert [p.name for p in tmp_path.glob(".groups/*/*")] == [SLOTS[0]]
    assert missing(group, tmp_path) == list(group)
    for cell in group[:stored]:
        run_cell(cell, tmp_path, Watch())
    assert run_group(group, tmp_path, Watch())
    assert engine.calls == [(4, 0), (4, 4)]
    assert contents(tmp_path).items() <= calm.items()
    assert missing(group, tmp_path) == []


@pytest.mark.parametrize("damage", ["none", "bits", "content", "other runs"])
def test_death_between_two_stores(damage, engine, calm, tmp_path, monkeypatch):
    """The rest is stored from the last checkpoint; if that is damaged, it is trained again."""
    group, real, count = arrange(plan().cells)[0], formats.store_run, 0

    def dies(folder: Path, files: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        real(folder, files)

    with monkeypatch.context() as patch:
        patch.setattr(formats, "store_run", dies)
        with pytest.raises(KeyboardInterrupt):
            run_group(group, tmp_path, Watch())
    assert len(missing(group, tmp_path)) == 2
    (last,) = tmp_path.glob(".groups/*/checkpoint-a")
    if damage == "bits":
        last.write_bytes(last.read_bytes()[:-1])
    elif damage == "content":
        last.write_bytes(seal({"sizes": {"a": 1.5}, "sha256": {}}) + b"x")
    elif damage == "other runs":
        formats.write_checkpoint(last.parent, 0, {"0" * 16: b"x"})
    assert run_group(group, tmp_path, Watch())
    first = ROUNDS if damage == "none" else 0
    assert engine.calls == [(4, 0), (4, first)]  # with whom they trained first
    assert contents(tmp_path).items() <= calm.items()
    assert not (tmp_path / ".groups").exists()


@pytest.mark.parametrize("payload", [b"", b"x", b"[]\n", b'{"a": -1}\n', b'{"a": 9}\nx', b"\xff\n",
                                     b'{"a": "1"}\nx', b"[" * 100_000])  # fmt: skip
def test_what_is_no_pack_of_files_is_empty(payload: bytes):
    assert unpack_files(payload) == {}
    assert unpack_files(pack_files({"b": b"\n{}", "a": b"", "c": b"xy"})) == {
        "b": b"\n{}", "a": b"", "c": b"xy"}  # fmt: skip


def test_a_run_that_another_holds_leaves_its_group_to_it(engine, calm, tmp_path):
    group = arrange(plan().cells)[0]
    (tmp_path / ".locks").mkdir()
    with FileLock(tmp_path / ".locks" / run_folder(group[2], tmp_path).name):
        assert not run_group(group, tmp_path, Watch())
        status = run_sweep(arrange(plan().cells), tmp_path, quiet)
        assert (status.done, status.elsewhere) == (4, 4)
        assert missing(group, tmp_path) == list(group)
    assert engine.calls == [(4, 0)]
    assert run_group(group, tmp_path, Watch())
    assert contents(tmp_path) == calm


def test_what_is_left_of_other_plans_is_tidied_up(engine, tmp_path):
    """A group that was interrupted and then computed in another way."""
    cells = plan().cells
    with pytest.raises(Interrupted):
        run_group(arrange(cells)[0], tmp_path, stop_after(2))
    run_sweep(arrange(cells[:2]), tmp_path, quiet)
    assert (tmp_path / ".groups").exists()  # two of the four are still to come
    run_sweep(arrange(cells, batch=False), tmp_path, quiet)
    assert not (tmp_path / ".groups").exists()


def test_one_that_diverges_does_not_disturb_the_others(engine, calm, tmp_path):
    cells = plan(sweep={"lr": [0.1, 0.5, 1e9], "methods": ["fairloss*"]}, train={"rounds": 6}).cells
    with pytest.raises(Interrupted):
        run_group(arrange(cells)[0], tmp_path, stop_after(4))
    run_sweep(arrange(cells), tmp_path, quiet)
    assert {k: v for k, v in contents(tmp_path).items() if k in calm}.items() <= calm.items()
    for cell in cells:
        found = StoredRun.open(run_folder(cell, tmp_path)).manifest
        assert (found["diverged_at"] is not None) == (cell.train.lr == 1e9)


def test_bad_input_names_the_run_and_leaves_nothing(engine, tmp_path, monkeypatch):
    cells = plan(model={}).cells
    real = runner.prepare

    def prepare(model: Any, data: Any, method: Any, loss: Any, settings: Any, **more: Any) -> Any:
        if settings.lr == 0.5:
            raise BadInput("half is too much")
        return real(model, data, method, loss, settings, **more)

    def train(members: Any, *rest: Any) -> Any:
        for m in members:
            prepare(m.model, rest[0], m.method, rest[1], m.settings)

    monkeypatch.setattr(runner, "prepare", prepare)
    monkeypatch.setattr(runner, "train_grid", train)
    out = tmp_path / "out"
    with pytest.raises(BadInput, match=r"^FairLoss\*, strength 0.1, lr 0.5, seed 0: half is too m"):
        run_sweep(arrange(cells), out, quiet)
    assert not out.exists()


# -- time -----------------------------------------------------------------------------------------
def test_progress_counts_rounds_of_all_runs(engine, tmp_path, monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(sweep.Meter, "show", lambda self, force=False: shown.append(
        list(self.numbers)))  # fmt: skip
    run_sweep(arrange(plan().cells), tmp_path, quiet)
    total = 4 * ROUNDS
    assert shown[:2] == [[4, 4, total, 0], [8, 8, total, 0]]
    assert shown[-2:] == [[2 * total, total, total, 0], [2 * total, 0, 0, 0]]


def test_what_is_under_way_is_shown(tmp_path):
    shown: list[str] = []
    meter = sweep.Meter(plan().cells, tmp_path, lambda done, total, what: shown.append(what), 2)
    sweep.Pulse(meter.numbers, 0, lambda: None).beat(4, 3, 6)
    other = sweep.Pulse(meter.numbers, 1, lambda: None)
    other.beat(4, 6, 6)
    meter.show(force=True)
    other.rest()
    meter.show(force=True)
    assert [text.split(", ", 2)[2] for text in shown] == ["75% of those under way",
                                                          "50% of those under way"]  # fmt: skip
    assert list(meter.numbers) == [4, 12, 24, 0, 4, 0, 0, 0]


def test_a_worker_that_compiles_is_shown_at_once(tmp_path):
    shown: list[str] = []
    meter = sweep.Meter(plan().cells, tmp_path, lambda done, total, what: shown.append(what), 1)
    pulse = sweep.Pulse(meter.numbers, 0, meter.show)
    pulse.beat(1, 1, 2)
    with compiled.announcing(pulse.compiling):
        compiled.announce("compiling")
    pulse.beat(1, 2, 2)
    meter.show(force=True)
    assert [text.split("; ")[0] == "compiling" for text in shown] == [False, True, False]
    assert "compiling" not in shown[-1]


def test_the_cost_is_that_of_groups(engine, tmp_path):
    """Each kind of group is timed once, with as many runs as are missing."""
    cells = plan(train={"rounds": 100}).cells
    run_cell(plan(train={"rounds": 100}).cells[0], tmp_path, Watch())
    one = project(arrange(cells), tmp_path, 1)
    assert engine.calls == [(3, 0), (4, 0)]
    assert one > 0
    assert project([], tmp_path, 1) == 0.0
    engine.calls.clear()
    assert project(arrange(cells, batch=False), tmp_path, 1) > 0
    assert engine.calls == []


def test_slow_writes_are_rare(monkeypatch):
    """Ten seconds apart, or twenty times as long as a write takes."""
    now, writes = 0.0, list[float]()
    monkeypatch.setattr(runner.time, "monotonic", lambda: now)

    def write(number: int, made: int) -> None:
        nonlocal now
        writes.append(now)
        now += 2.0 if len(writes) > 2 else 0.1

    keep = runner.keeper(Watch(), 1000, write)
    for t in range(150):
        now += 1.0
        keep(t + 1, lambda: 0)
    gaps = [round(b - a) for a, b in pairwise(writes)]
    assert gaps[:2] == [11, 11]
    assert set(gaps[2:]) == {43}


# -- where ----------------------------------------------------------------------------------------
def test_workers_take_turns_over_gpus():
    assert [device_for(k, "cuda", 3) for k in range(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert device_for(1, "cuda", 1) == device_for(1, "cuda", 0) == "cuda"
    assert device_for(1, "cuda:2", 3) == "cuda:2"
    assert device_for(1, "cpu", 3) == "cpu"


def test_too_many_threads_are_said_once():
    assert crowding(2, 1, "cpu", 2) is None
    assert crowding(4, 1, "cuda", 2) is None
    text = crowding(2, 2, "cpu", 2)
    assert text is not None
    assert "\n" not in text
    assert "train.threads=1" in text
