"""The benchmark: its loops compute what the reference does, its ratios compare like with like."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fairvar as fv
from fairvar import cli
from fairvar.engine.settings import TrainSettings
from fairvar.engine.train import prepare
from fairvar_bench import BenchSettings, contenders, flower, many, run_bench
from fairvar_bench import cases as cases_module
from fairvar_bench.bare import Bare
from fairvar_bench.cases import ALL, EPOCH_STEPS, METHODS, SIX, Case, cases
from fairvar_bench.contenders import padded_share
from fairvar_bench.lean import Lean
from fairvar_bench.loops import Central, Draw, Rows, drawn, everything, shuffled
from fairvar_bench.measure import (
    PATIENCE,
    PeakMemory,
    Timing,
    alternate,
    in_precision,
    matmul_limit,
    ratio,
)
from fairvar_bench.naive import Naive
from fairvar_bench.run import BenchResult, BenchRow
from fairvar_bench.show import (
    bench_tables,
    clients_figure,
    targets_table,
    write_bench,
    write_numbers,
)
from fairvar_bench.targets import TARGETS, Target, verdicts

CPU = torch.device("cpu")
LR = 0.1
LOOPS = (Bare, Lean, Naive)
STRONG: dict[str, fv.Method] = METHODS | {
    "fairloss": fv.FairLoss(0.5), "fairloss*": fv.FairLoss(0.5, exact=True),
    "fairgrad": fv.FairGrad(0.2), "fairgrad*": fv.FairGrad(0.2, exact=True),
}  # fmt: skip


def small_net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Tanh(), torch.nn.Flatten(),
        torch.nn.Linear(3 * 4 * 4, 4),
    ).double()  # fmt: skip


def small_federation(sizes: tuple[int, ...] = (6, 9, 12)) -> fv.Federation:
    generator = torch.Generator().manual_seed(3)
    pairs = [
        (torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.float64) * (1 + i),
         torch.randint(0, 4, (n,), generator=generator))
        for i, n in enumerate(sizes)
    ]  # fmt: skip
    return fv.Federation.from_arrays(pairs, classes=4)


@pytest.mark.parametrize("local", ["step", "epoch"])
@pytest.mark.parametrize("name", ALL)
def test_loops_compute_what_the_reference_computes(name: str, local: str) -> None:
    """Two rounds: in the first one the approximate methods still have a = g = 0."""
    method, data, net = STRONG[name], small_federation(), small_net()
    epoch = {"batch_size": 3, "local_epochs": 1} if local == "epoch" else {}
    settings = TrainSettings(lr=LR, dtype="float64", engine="reference", **epoch)
    reference = prepare(net, data, method, "cross_entropy", settings)
    runs, schedule = reference.runs(), reference.run.schedule

    def same_batches(client: int) -> Rows:
        drawn, first = schedule.round(runs.state.round), data.train.offsets[client]
        found: Rows = []
        for step in range(schedule.steps[client]):
            rows, real = drawn.rows(step, torch.tensor([client]))
            found.append(rows[real] - first)
        return found

    draw: Draw = everything if local == "step" else same_batches
    loops = [kind(net, data, method, LR, draw) for kind in LOOPS]
    for _ in range(2):
        for loop in loops:
            loop.round()
        runs.step(due=False)
        state = runs.state.map(lambda leaf: leaf[0])
        expected = state.x | {k: v for k, v in state.buffers.items() if v.is_floating_point()}
        for loop in loops:
            gap = max(float((loop.model[k] - v).abs().max()) for k, v in expected.items())
            assert gap < 1e-10
    start = {k: p.detach() for k, p in net.named_parameters()}
    assert max(float((state.x[k] - start[k]).abs().max()) for k in start) > 1e-3


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_tell_methods_apart(loop: type) -> None:
    """Or the comparison above could not fail."""
    found = {}
    for name, method in STRONG.items():
        made = loop(small_net(), small_federation(), method, LR, everything)
        made.round()
        made.round()
        model = sorted(made.model.items())
        found[name] = torch.cat([v.flatten() for k, v in model if k[0] != "1"])
    names = list(found)
    gaps = [float((found[a] - found[b]).abs().max()) for a in names for b in names if a < b]
    assert min(gaps) > 1e-6


def test_centralised_step_is_sgd_on_the_pooled_batch() -> None:
    data, net = small_federation(), small_net()
    central = Central(net, data, LR, everything)
    central.round()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    torch.nn.functional.cross_entropy(net(data.train.x), data.train.y).backward()
    optimizer.step()
    for a, b in zip(central.module.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_draws_use_each_sample_once_and_differ_between_rounds() -> None:
    epoch, some = shuffled([5, 7], 3), drawn([5, 7], 3)
    first, second = epoch(1), epoch(1)
    assert [len(rows) for rows in first] == [3, 3, 1]
    assert sorted(torch.cat(first).tolist()) == list(range(7))
    assert torch.cat(first).tolist() != torch.cat(second).tolist()
    (rows,) = some(0)
    assert len(set(rows.tolist())) == 3
    assert max(some(1)[0].max() for _ in range(20)) == 6


def test_loops_refuse_what_they_do_not_implement() -> None:
    for method in (fv.FedAvg(weights="size"), fv.QFFL(1.0)):
        with pytest.raises(fv.BadInput, match="no plain loop"):
            Bare(small_net(), small_federation(), method, LR, everything)


def test_contenders_take_turns_and_ratios_are_formed_within_a_turn() -> None:
    """The clock is a machine that gets ten times slower in every turn: ratios must not notice."""
    now, order = 0.0, []

    def worker(name: str, cost: float):
        def work() -> None:
            nonlocal now
            order.append(name)
            now += cost * 10 ** ((len(order) - 1) // 2)

        return work

    contenders = {"slow": worker("slow", 3.0), "fast": worker("fast", 1.0)}
    found = alternate(contenders, CPU, 4, clock=lambda: now)
    timed = order[4:]  # after the first call and the warm-up of each
    assert order[:4] == ["slow", "slow", "fast", "fast"]
    assert [sorted(timed[i : i + 2]) for i in range(0, 8, 2)] == [["fast", "slow"]] * 4
    assert found["slow"].first == 3.0
    spread = ratio(found["slow"], found["fast"])
    assert (spread.low, spread.median, spread.high) == pytest.approx((3, 3, 3))
    assert found["slow"].seconds.high / found["slow"].seconds.low == pytest.approx(1000)


def test_long_work_gets_fewer_turns_and_short_work_more_calls() -> None:
    now, calls = 0.0, []

    def step(cost: float):
        def work() -> None:
            nonlocal now
            now += cost
            calls.append(cost)

        return work

    def turns(cost: float, repeat: int) -> int:
        return len(alternate({"a": step(cost)}, CPU, repeat, 1.0, lambda: now)["a"].times)

    assert [turns(0.1, 9), turns(0.5, 9), turns(5.0, 9), turns(0.5, 2)] == [9, 3, 1, 2]
    calls.clear()
    turns(0.001, 3)
    assert len(calls) == 2 + 3 * 20
    calls.clear()
    # Short work is repeated more often than slow work; a slow plain loop runs once.
    both = {"slow": step(2 * PATIENCE), "quick": step(0.05)}
    found = alternate(both, CPU, 9, 0.1, lambda: now, plain=("slow",))
    assert (calls.count(2 * PATIENCE), calls.count(0.05)) == (1, 2 + 3)
    assert found["slow"].times == pytest.approx((2 * PATIENCE,))
    calls.clear()
    assert len(alternate(both, CPU, 2, 9.0, lambda: now, plain=("slow",))["slow"].times) == 2
    assert calls.count(2 * PATIENCE) == 1 + 2


def test_ratio_of_turns_is_not_the_ratio_of_medians() -> None:
    a, b = Timing(0, (1.0, 4.0, 9.0)), Timing(0, (1.0, 1.0, 9.0))
    spread = ratio(a, b)
    assert (spread.median, spread.low, spread.high) == (1.0, 1.0, 4.0)


def test_peak_memory_sees_a_large_tensor() -> None:
    with PeakMemory(CPU) as memory:
        held = torch.ones(16 << 20)
        del held
    if memory.bytes is None:
        pytest.skip("this system cannot reset the peak of resident memory")
    assert 60e6 < memory.bytes < 90e6


def test_matmul_limit_is_plausible() -> None:
    assert 1e9 < matmul_limit(CPU, repeat=1) < 1e14


def test_the_table_of_cases_follows_the_options() -> None:
    quick, full = (cases(BenchSettings(quick=q)) for q in (True, False))
    assert len(quick) < len(full)
    for table in (quick, full):
        assert {c.model for c in table} == {"multinomial", "lenet5", "avgcnn", "mobilenet_v2"}
        assert {c.clients for c in table if c.model == "multinomial"} == {10, 50, 200, 1000}
        assert {c.method for c in table} == set(ALL)
        assert {c.local for c in table} == {"step", "epoch"}
    some = cases(BenchSettings(model="multinomial", method="qffl", clients=3, local="epoch"))
    assert some == [Case("multinomial", 3, 16, "qffl", "epoch")]
    assert cases(BenchSettings(model="2nn", batch=8))[0].samples == 8
    assert Case("lenet5", 2, 32, "afl", "epoch").batch == 32 // EPOCH_STEPS
    assert Case("lenet5", 2, 32, "afl", "epoch", 5).batch == 5
    assert (Case("lenet5", 2, 32, "afl").used, Case("lenet5", 2, 32, "afl", step=8).used) == (
        64,
        16,
    )
    gpu = cases(BenchSettings(device="cuda", model="mobilenet_v2"))
    assert {(c.clients, c.samples) for c in gpu} == {(100, 32)}
    assert not any("naive" in c.rivals for c in gpu)
    assert {c.method for c in cases(BenchSettings(case="grid"))} == set(SIX)
    assert {c.kind for c in cases(BenchSettings(device="cuda"))} == {"rounds", "grid", "ragged"}
    assert [c.kind for c in cases(BenchSettings(case="memory"))] == ["memory"]
    beside = cases(BenchSettings(case="flower"))
    assert {(c.kind, c.clients) for c in beside} == {("flower", 50)}
    assert {(c.model, c.method) for c in beside} >= {
        ("multinomial", "fairgrad*"),
        ("avgcnn", "fedavg"),
    }


def test_every_target_has_a_case_in_the_tables() -> None:
    """Or a promise would silently never be looked at."""
    timing = dict.fromkeys(("naive", "bare", "lean", "central", "fairvar"), Timing(0, (1.0,), 1, 1))
    for device in ("cpu", "cuda"):
        rows = [
            BenchRow(case, "", timing, 1.0, 1.0, 0.1)
            for case in cases(BenchSettings(device=device, quick=False))
        ]
        own = [t for t in TARGETS if t.device == device]
        found = verdicts(BenchResult(run_facts() | {"device_type": device}, rows))
        missing = set(own) - {v.target for v in found}
        # On the GPU growth with the clients is measured for four methods.
        assert {t.quantity for t in missing} <= {"clients"}


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        ({"model": "lenet"}, "lenet5"),
        ({"model": "linear"}, "multinomial"),
        ({"method": "fairgrd"}, "fairgrad"),
        ({"local": "epochs"}, "bench.local"),
        ({"repeat": 0}, "bench.repeat"),
        ({"precision": "tf32"}, "NVIDIA"),
        ({"case": "grids"}, "grid"),
        ({"case": "flower", "device": "cuda"}, "on the CPU"),
        ({"case": "flower", "local": "epoch"}, "one local step"),
    ],
)
def test_bad_options_are_told(arguments: dict, mentioned: str) -> None:
    with pytest.raises(fv.BadInput, match=mentioned):
        BenchSettings(**arguments)


@pytest.mark.parametrize("missing", ["flwr", "ray"])
def test_flower_is_told_to_be_missing_before_any_work(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(fv.BadInput, match=rf"needs {missing}, not.*fairvar\[simulation\]"):
        run_bench(BenchSettings(case="flower"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_processor_time_counts_processes_of_processes() -> None:
    busy = "import time; t = time.process_time\nwhile t() < 0.3: pass\nprint(flush=True); input()"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    command = [sys.executable, "-c", inner]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as outer:
        assert outer.stdout is not None
        outer.stdout.readline()
        alone, both = flower.processor_time({outer.pid}), flower.tree_of(outer.pid)
        together = flower.processor_time(both)
        outer.communicate(b"\n")
    assert len(both) == 2
    assert 0.29 <= together - alone < 5
    assert flower.tree_of(2**30) == set()


def test_a_device_that_is_not_there_is_told_before_any_work() -> None:
    with pytest.raises(fv.BadInput, match="cuda:99"):
        run_bench(BenchSettings(device="cuda:99"))


COMMAND = "fairvar_bench.command"
TINY = ("--model", "multinomial", "--clients", "2", "--batch", "4", "--repeat", "2")


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([*TINY, "--method", "qffl", "--json"], COMMAND)
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__
    assert found["matmul_flops_per_second"] > 0
    assert {(row["method"], row["local"]) for row in found["rows"]} == {
        ("q-FFL", "step"), ("q-FFL", "epoch")
    }  # fmt: skip
    for row in found["rows"]:
        assert set(row["milliseconds"]) == {"naive", "bare", "lean", "central", "fairvar"}
        for spread in row["times_faster_than"].values():
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert row["turns"] == 2
        assert row["first_call_milliseconds"]["fairvar"] > 0
        seconds = row["milliseconds"]["fairvar"]["median"] / 1000
        assert row["samples_per_second"] == pytest.approx(8 / seconds)
        # multinomial regression: forward and weight gradient, two operations per weight and sample
        flops = 2 * 2 * 784 * 10 * 8
        expected = flops / seconds / found["matmul_flops_per_second"]
        assert row["share_of_matmul_limit"] == pytest.approx(expected)


def test_command_prints_tables_and_writes_files(
    capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    cli.main([*TINY, "--method", "fairgrad*", "--local", "step", "--out", str(tmp_path)], COMMAND)
    shown = capsys.readouterr().out
    assert "multinomial, 2 clients × 4 samples, one step" in shown
    assert {p.name for p in tmp_path.iterdir()} == {"table.md", "bench.json"}
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "FairGrad\\*" in text
    assert "naive ms" in text
    assert torch.__version__ in text


def test_a_killed_run_keeps_what_it_has(tmp_path) -> None:
    class Killed(Exception):
        pass

    def keep(result: BenchResult) -> None:
        write_numbers(result, tmp_path)
        if len(result.rows) == 2:
            raise Killed

    settings = BenchSettings(model="multinomial", clients=2, batch=4, local="step", repeat=1)
    with pytest.raises(Killed):
        run_bench(settings, keep=keep)
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert [row["method"] for row in found["rows"]] == ["FedAvg", "FairLoss*"]
    assert "FairLoss" in (tmp_path / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("method", ["fedavg", "fairgrad*"])
def test_grid_beside_its_loop_and_its_products(
    method: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cases_module, contenders):
        monkeypatch.setattr(module, "CONFIGURATIONS", 5)
        monkeypatch.setattr(module, "SEEDS", 2)
    sizes = ("--clients", "2", "--batch", "4", "--repeat", "1")
    cli.main(["--case", "grid", "--method", method, *sizes, "--json"], COMMAND)
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["runs"] == 10
    assert set(row["milliseconds"]) == {"bare", "gemm", "fairvar"}
    # Two rounds of the loop in the first calls and one turn, each counted for all runs.
    assert row["milliseconds"]["bare"]["median"] > 10 * 0.05


def test_ragged_clients_and_what_their_padding_costs(capsys: pytest.CaptureFixture[str]) -> None:
    data = small_federation()
    settings = TrainSettings(batch_size=4, local_epochs=1, dtype="float64")
    run = prepare(small_net(), data, fv.FedAvg(), "cross_entropy", settings).run
    # Clients of 6, 9 and 12; batch norm leaves out the ninth sample of the second.
    assert padded_share(run.schedule) == pytest.approx((2 + 2 + 3) * 4 / (6 + 8 + 12) - 1)
    sizes = ("--clients", "3", "--batch", "20", "--repeat", "1")
    cli.main(["--case", "ragged", *sizes, "--json"], COMMAND)
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["padding"] > 0
    assert set(row["milliseconds"]) == {"bare", "fairvar"}
    counts = Case("multinomial", 50, 800, "fedavg", kind="ragged").federation().sizes
    assert int(counts.sum()) == 40_000
    assert counts.max() > 50 * counts.min()


def test_memory_of_the_process_is_told_beside_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--case", "memory", "--clients", "8", "--batch", "4", "--json"], COMMAND)
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert set(row["milliseconds"]) == {"fairvar"}
    if row["peak_bytes_of_process"] is not None:
        assert row["peak_bytes_of_process"] > 5e7  # torch alone takes more


def test_loops_in_bfloat16_see_their_own_steps() -> None:
    """Autocast would keep the first cast of a weight that SGD then changes in place."""
    data, net = small_federation().to(CPU, torch.float32), small_net().float()

    def steps(_client: int) -> Rows:
        return [None] * 3

    found = {}
    for precision in ("full", "bfloat16"):
        loop = Bare(net, data, fv.FedAvg(), LR, steps)
        in_precision(loop.round, CPU, precision)()
        found[precision] = loop.model["4.weight"] - net.state_dict()["4.weight"]
    gap = float((found["full"] - found["bfloat16"]).norm() / found["full"].norm())
    assert 1e-5 < gap < 0.05


def test_targets_are_judged_by_what_was_measured() -> None:
    def timing(seconds: float) -> Timing:
        return Timing(0.1, (seconds,), 5, 7_000_000_000)

    def row(clients: int, seconds: float) -> BenchRow:
        times = {"bare": timing(1.0), "central": timing(0.1), "fairvar": timing(seconds)}
        return BenchRow(Case("multinomial", clients, 16, "fedavg"), "", times, 1.0, 1.0, 0.2)

    result = BenchResult(run_facts(), [row(50, 0.1), row(1000, 2.5)])
    assert {(v.target.quantity, v.value, v.met) for v in verdicts(result)} == {
        ("bare", 10.0, False), ("clients", 25.0, False)
    }  # fmt: skip
    place = ("cpu", "multinomial", 50, 16, "fedavg")
    mine = [Target(*place, "bare", 10), Target(*place, "central", 1.1), Target(*place, "ms", 99),
            Target(*place, "padding", 20), Target(*place, "gigabytes", 6),
            Target(*place, "naive", 1), Target("cuda", *place[1:], "bare", 1)]  # fmt: skip
    assert [v.met for v in verdicts(result, mine)] == [True, True, False, True, False]
    table = targets_table(result)
    assert table is not None
    assert table.title == "Targets: 0 of 2 met"
    other = BenchResult(run_facts() | {"device_type": "cuda"}, result.rows[:1])
    assert targets_table(other) is None
    assert any("25.0" in note for note in bench_tables(result)[-1].notes)


def test_picture_of_cost_against_clients(tmp_path) -> None:
    names = ("naive", "bare", "lean", "central", "fairvar")
    timing = {k: Timing(0.1, (0.01, 0.02, 0.03), 5) for k in names}
    rows = [
        BenchRow(Case("multinomial", n, 16, "fedavg"), "pooled", timing, 1e6, 1e9) for n in (10, 2)
    ]
    facts = run_facts()
    result = BenchResult(facts, rows)
    files = write_bench(result, tmp_path)
    assert {p.name for p in files} == {"table.md", "bench.json", "clients.png", "clients.pdf"}
    figure = clients_figure({"FedAvg": rows})
    assert len(figure.axes) == 1
    last = bench_tables(BenchResult(facts | {"load_before": 3.0}, rows))[-1]
    assert any("do not quote" in note for note in last.notes)
    assert not any("do not quote" in note for note in bench_tables(result)[-1].notes)


def run_facts() -> dict:
    words = dict.fromkeys(("processor", "device", "fairvar", "torch", "python", "clock"), "x")
    return words | {
        "device_type": "cpu", "precision": "full", "cores": 2, "threads": 1, "quick": True,
        "matmul_flops_per_second": 1e11, "load_before": 0.1, "load_after": 1.0,
    }  # fmt: skip


def test_the_case_of_many_clients() -> None:
    row = many.measure(120)
    assert row["clients"] == 120
    assert all(row[name] > 0 for name in (*many.SHOWN, "evaluation_s", "peak_mb", "synthetic_s"))
    head, _, line = many.lines([row])
    assert head.count("|") == line.count("|") == 7
