"""Sweep files: what they expand to, fingerprints, shards and budgets."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from fairvar.engine.keys import fingerprint
from fairvar.errors import BadInput
from fairvar.methods import METHODS, FairLoss, Method, register
from fairvar.runs.config import Config, merge_overrides
from fairvar.runs.plan import MOST_RUNS, PAPER_METHODS, Plan
from fairvar.runs.sweep import parse_budget, parse_shard

PAPER = Path(__file__).parents[2] / "configs" / "paper"
BASE = {
    "data": {"name": "digits", "clients": 10},
    "model": {"name": "multinomial"},
    "method": {"name": "fairloss", "strength": 0.5},
    "train": {"rounds": 50, "lr": 0.2, "seed": 1},
}

CHANGES = ["train.lr=0.3", "train.rounds=51", "train.seed=2", "train.batch_size=8",
           "train.dtype='float64'", "train.local_epochs=2", "train.clip_norm=1.0",
           "train.weight_decay=0.1", "train.momentum=0.9", "train.schedule.name='cosine'",
           "train.schedule={name='cosine', warm_up=5}", "train.schedule.warm_up=5",
           "train.schedule={name='step', decay=0.5}",
           "train.engine='reference'", "train.precision='tf32'", "train.compile=true",
           "data.seed=1", "data.clients=11",
           "data.fraction=0.5", "data.name='mnist_1000'", "partition.name='iid'",
           "model.name='2nn'", "method.strength=0.6", "method.exact=true", "method.name='fedavg'",
           "evaluate.every=5", "evaluate.local=false", "protocol='tables'"]  # fmt: skip
SAME = ["name='other'", "data.root='/elsewhere'", "train.device='cuda:1'", "train.chunk=3",
        "train.capture=false", "train.compile=false", "select.t=0", "select.m=7",
        "select.unit='mixed'"]  # fmt: skip


def changed(*overrides: str) -> Config:
    values = {k: dict(v) for k, v in BASE.items()}
    return Config.from_dict(merge_overrides(values, overrides))


def test_every_change_of_the_computation_changes_the_fingerprint() -> None:
    marks = [fingerprint(changed()), *(fingerprint(changed(text)) for text in CHANGES)]
    assert len(set(marks)) == len(CHANGES) + 1


@pytest.mark.parametrize("text", SAME)
def test_where_and_how_a_run_happens_does_not(text: str) -> None:
    assert changed(text) != changed()
    assert fingerprint(changed(text)) == fingerprint(changed())


def test_fingerprint_does_not_depend_on_how_it_is_written() -> None:
    """Order of keys, whole numbers for fractions, defaults spelt out, minus zero."""
    shuffled = {k: dict(reversed(v.items())) for k, v in reversed(BASE.items())}
    assert fingerprint(Config.from_dict(shuffled)) == fingerprint(changed())
    assert fingerprint(changed("train.lr=1")) == fingerprint(changed("train.lr=1.0"))
    assert fingerprint(changed("train.local_steps=1")) == fingerprint(changed())
    minus = [fingerprint(changed(f"method.strength={v}")) for v in ("-0.0", "0.0", "0")]
    assert len(set(minus)) == 1
    again = Config.from_toml(changed().to_toml())
    assert fingerprint(again) == fingerprint(changed())


def test_fingerprint_is_fixed() -> None:
    """Written down: a release that changes it would orphan every stored run without a word."""
    assert fingerprint(changed())[:16] == "24697d114bb93438"


def test_methods_of_ones_own_may_hold_lists() -> None:
    @register
    class Own(Method, frozen=True, tag="own_for_fingerprints"):
        table: list[float]

    try:
        marks = {
            fingerprint(Config.from_dict({"method": {"name": "own_for_fingerprints", "table": t}}))
            for t in ([], [1.0], [2.0], [1, 2])
        }
    finally:
        METHODS.pop("own_for_fingerprints")
    assert len(marks) == 4


def test_methods_get_the_lists_that_they_know() -> None:
    plan = Plan.from_dict({"sweep": {
        "methods": list(PAPER_METHODS), "seeds": 1, "lr": [0.1, 0.2], "strength": [0.3, 0.4, 0.5],
        "step": [0.6], "cdf": ["normal", "gumbel"]}})  # fmt: skip
    count = Counter(cell.method.label for cell in plan.cells)
    assert count == {"FedAvg": 2, "AFL": 2, "q-FFL": 6, "AAggFF": 4, "FairLoss": 6,
                     "FairLoss*": 6, "FairGrad": 6, "FairGrad*": 6}  # fmt: skip
    assert {c.method.q for c in plan.cells if c.method.label == "q-FFL"} == {0.3, 0.4, 0.5}
    assert all(c.method.exact for c in plan.cells if c.method.label.endswith("*"))
    assert len({fingerprint(c) for c in plan.cells}) == len(plan.cells)


def test_lists_and_options_for_one_method() -> None:
    plan = Plan.from_dict({"sweep": {
        "methods": ["fedavg", "fairloss", "fairloss*"], "seeds": 1, "strength": [0.1, 0.2],
        "method": {"fairloss": {"strength": [0.5], "losses": "full"},
                   "fairloss*": {"lr": 0.7, "collapsed": [False]}}}})  # fmt: skip
    assert [(c.method.label, c.train.lr) for c in plan.cells] == [
        ("FedAvg", 0.1), ("FairLoss", 0.1), ("FairLoss*", 0.7), ("FairLoss*", 0.7)]  # fmt: skip
    assert plan.cells[1].method == FairLoss(strength=0.5, losses="full")
    assert [c.method.strength for c in plan.cells[2:]] == [0.1, 0.2]


def test_seeds_come_first_and_every_cell_is_new() -> None:
    plan = Plan.from_dict({"sweep": {
        "methods": ["fedavg", "afl"], "seeds": [4, 2], "alpha": [0.1, 1.0]}})  # fmt: skip
    assert [c.train.seed for c in plan.cells] == [4] * 4 + [2] * 4
    assert [c.partition.alpha for c in plan.cells] == [0.1, 0.1, 1.0, 1.0] * 2
    assert len({fingerprint(c) for c in plan.cells}) == 8


def test_protocol_tables_sets_what_it_means() -> None:
    plan = Plan.from_dict({"protocol": "tables", "sweep": {"methods": ["fedavg"], "seeds": 1}})
    assert plan.cells[0].train.local_epochs == 1
    assert plan.criterion.model == "local"
    steps = Config.from_dict({"protocol": "tables", "train": {"local_steps": 3}})
    assert (steps.train.local_steps, steps.train.local_epochs) == (3, None)


def test_scales_with_quoted_and_plain_keys(tmp_path: Path) -> None:
    """Both spellings of a dotted key; strings with quotes and backslashes arrive unharmed."""
    path = tmp_path / "p.toml"
    path.write_text(
        'name = "p"\n[train]\nrounds = 100\n[sweep]\nmethods = ["fedavg"]\nseeds = 5\n'
        '[scale.quoted]\n"train.rounds" = 7\n"sweep.seeds" = [1, 2]\n'
        '"data.root" = \'C:\\new "x"\'\n'
        "[scale.plain]\ntrain.rounds = 7\nsweep.seeds = [1, 2]\n"
    )
    assert len(Plan.load(path).cells) == 5
    quoted, plain = Plan.load(path, scale="quoted"), Plan.load(path, scale="plain")
    assert [fingerprint(c) for c in quoted.cells] == [fingerprint(c) for c in plain.cells]
    assert quoted.cells[0].data.root == 'C:\\new "x"'
    assert [c.train.seed for c in plain.cells] == [1, 2]
    assert plain.cells[0].train.rounds == 7
    # The command line has the last word.
    assert Plan.load(path, ["train.rounds=3"], "plain").cells[0].train.rounds == 3
    with pytest.raises(BadInput, match="did you mean 'plain'"):
        Plan.load(path, scale="plan")


@pytest.mark.parametrize(("scale", "budget"), [(None, 12), ("small", 6)])
def test_the_first_table_of_all_methods_has_equal_budgets(scale: str | None, budget: int) -> None:
    """Different configurations of each method, every one with all seeds."""
    cells = Plan.load(PAPER / "mnist_all.toml", scale=scale).cells
    tried = Counter((c.method.label, c.method, c.train.lr) for c in cells)
    seeds = {None: 5, "small": 2}[scale]
    assert set(tried.values()) == {seeds}
    assert Counter(label for label, *_ in tried) == {label: budget for label, *_ in tried}
    assert len({label for label, *_ in tried}) == len(PAPER_METHODS + EXTENDED)


@pytest.mark.parametrize("path", sorted(PAPER.glob("*.toml")), ids=lambda p: p.stem)
def test_the_papers_sweeps_load(path: Path) -> None:
    plan, small = Plan.load(path), Plan.load(path, scale="small")
    assert {c.method.label for c in plan.cells} >= {"FedAvg", "FairLoss*", "FairGrad*"}
    assert len({fingerprint(c) for c in small.cells}) == len(small.cells) < len(plan.cells)


def test_a_plan_of_too_many_runs_is_refused_before_it_is_made() -> None:
    """The lists alone would take gigabytes."""
    tracemalloc.start()
    for seeds in (100_000_000, MOST_RUNS + 1):
        with pytest.raises(BadInput, match=f"{seeds:,} runs, more than {MOST_RUNS:,}"):
            Plan.from_dict({"sweep": {"methods": ["fedavg"], "seeds": seeds}})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24
    for path in PAPER.glob("*.toml"):
        plan = Plan.load(path)
        assert plan.settings.runs == len(plan.cells)


def test_values_that_a_sweep_would_not_use_are_refused() -> None:
    for key, named in (("lr", "sweep.lr"), ("seed", "sweep.seeds")):
        with pytest.raises(BadInput, match=f"train.{key} means nothing in a sweep: give {named}"):
            Plan.from_dict({"train": {key: 1}, "sweep": {}})
    for lists in ({"lr": [0.1, 0.1]}, {"seeds": [1, 1]}, {"methods": ["afl", "afl"]}):
        with pytest.raises(BadInput, match="has a value twice"):
            Plan.from_dict({"sweep": lists})
    for methods in ([FairLoss(0.1), FairLoss(0.1, exact=True)], FairLoss(0.1)):
        with pytest.raises(BadInput, match=r"\['fairloss'\]; options go to sweep.method.NAME"):
            Plan.load({"sweep": {"methods": methods}})
    with pytest.raises(BadInput, match=r"such as \['fairloss\*'\]"):
        Plan.load({"sweep": {"methods": [FairLoss(0.1, exact=True)]}})


EXTENDED = ("term", "propfair", "superquantile", "gifair", "semivred", "fedmgda", "fedfv", "adafed",
            "fedeba", "fedprox", "ditto")  # fmt: skip


def test_sets_of_methods() -> None:
    def names(*methods: str) -> tuple[str, ...]:
        listed = {"sweep": {"methods": list(methods), "seeds": 1}} if methods else {}
        given = {"method": {"semivred": {"strength": [0.1]}}} | listed.get("sweep", {})
        return Plan.from_dict({"sweep": given}).settings.methods

    assert names() == names("paper") == PAPER_METHODS
    assert names("extended") == EXTENDED
    assert names("all") == PAPER_METHODS + EXTENDED
    assert names("term", "paper") == ("term", *PAPER_METHODS)
    with pytest.raises(BadInput, match="has a value twice"):
        names("term", "all")
    with pytest.raises(BadInput, match="did you mean 'extended'"):
        names("extend")


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "tiny_imagenet"])
def test_the_papers_files_have_grids_for_all_methods(name: str) -> None:
    """The paper's runs stay as they are, and come first."""
    one = ["sweep.seeds=1", "sweep.alpha=[0.1]", "sweep.lr=[0.1]"]
    paper = Plan.load(PAPER / f"{name}.toml", one).cells
    every = Plan.load(PAPER / f"{name}.toml", [*one, 'sweep.methods=["all"]']).cells
    assert [fingerprint(c) for c in every[: len(paper)]] == [fingerprint(c) for c in paper]
    assert {type(c.method) for c in paper} == {METHODS[m.removesuffix("*")] for m in PAPER_METHODS}
    count = Counter(type(c.method) for c in every[len(paper) :])
    assert set(count) == {METHODS[m] for m in EXTENDED}
    assert min(count.values()) >= 2


def test_a_sweep_file_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    for section in ("sweep", "scale"):
        path.write_text(f"[{section}]\n")
        with pytest.raises(BadInput, match="use `fairvar sweep`"):
            Config.load(path)


def test_a_single_configuration_is_no_sweep(tmp_path: Path) -> None:
    """Unasked it would be 40 runs."""
    path = tmp_path / "c.toml"
    path.write_text("[train]\nrounds = 3\n")
    for source in (path, {"train": {"rounds": 3}}, PAPER.parent / "quick.toml"):
        with pytest.raises(BadInput, match=r"no section \[sweep\]: add one"):
            Plan.load(source)
    assert len(Plan.load(path, ["sweep.seeds=1"]).cells) == len(PAPER_METHODS)
    assert len(Plan.load({"sweep": {}}).cells) == 5 * len(PAPER_METHODS)


def test_overrides() -> None:
    values = {"method": {"name": "qffl", "q": 2}, "train": {"lr": 0.1}}
    merge_overrides(values, ["method.name=afl", "train.lr = 1e-3", "name=a=b", "data.clients=7"])
    assert values == {"method": {"name": "afl"}, "train": {"lr": 0.001}, "name": "a=b",
                      "data": {"clients": 7}}  # fmt: skip
    for wrong in ("train.lr", "=3", ""):
        with pytest.raises(BadInput, match=r"must look like train\.lr=0\.1"):
            merge_overrides({}, [wrong])
    with pytest.raises(BadInput, match="name is a value, not a section"):
        merge_overrides({"name": "x"}, ["name.deep=1"])


@pytest.mark.parametrize(("text", "seconds"), [("30min", 1800), ("45s", 45), ("2h", 7200),
                                               ("1.5 h", 5400), (" 3 m ", 180), ("0.5s", 0.5),
                                               ("10sec", 10)])  # fmt: skip
def test_budgets(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "min", "0s", "-1s", "1e3s", "infh", "nan s", "1d",
                                  "1 s s"])  # fmt: skip
def test_wrong_budgets(text: str) -> None:
    with pytest.raises(BadInput, match="must look like 30min"):
        parse_budget(text)


@pytest.mark.parametrize("text", ["", "1", "3/3", "4/3", "-1/3", "0/0", "1/2/3", "a/b", " 0/3"])
def test_wrong_shards(text: str) -> None:
    with pytest.raises(BadInput, match="must look like 0/4"):
        parse_shard(text)


def test_shards_partition_the_cells() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        cells, parts = list(range(draw.randrange(40))), draw.randrange(1, 9)
        shards = [parse_shard(f"{i}/{parts}") for i in range(parts)]
        assert shards == [(i, parts) for i in range(parts)]
        found = [cells[part::of] for part, of in shards]
        assert sorted(c for shard in found for c in shard) == cells
        assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.schedule='cosine'", ["train.schedule = 'cosine'", "must be a section"]),
        ("train.schedule.name='cosin'", ["train.schedule.name", "did you mean 'cosine'?"]),
        ("train.schedule={warmup=3}", ["train.schedule.warmup", "did you mean 'warm_up'?"]),
        ("train.warm_up=3", ["train.warm_up", "did you mean train.schedule.warm_up?"]),
        ("train.schedule={name='step'}", ["train.schedule", "give decay"]),
        ("train.schedule={name='cosine', every=3}", ["train.schedule", "every belongs to"]),
    ],
)  # fmt: skip
def test_bad_schedules_are_refused_in_one_line(text: str, words: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        changed(text)
    assert all(word in str(caught.value) for word in words), str(caught.value)
