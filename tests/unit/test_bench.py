"""The benchmark: its loops compute what the reference does, its ratios compare like with like."""

from __future__ import annotations

import json

import pytest
import torch

import fairvar as fv
from fairvar import cli
from fairvar.bench import BenchSettings, run_bench
from fairvar.bench.cases import ALL, EPOCH_STEPS, METHODS, Case, cases
from fairvar.bench.loops import Central, Draw, Lean, Rows, everything
from fairvar.bench.measure import PeakMemory, Timing, alternate, matmul_limit, ratio
from fairvar.bench.naive import Naive
from fairvar.bench.run import BenchResult, BenchRow
from fairvar.bench.show import bench_tables, clients_figure, write_bench
from fairvar.engine.settings import TrainSettings
from fairvar.engine.state import advance
from fairvar.engine.train import prepare

CPU = torch.device("cpu")
LR = 0.1
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
    state, schedule = reference.start(), reference.run.schedule

    def same_batches(client: int) -> Rows:
        drawn, first = schedule.round(state.round), data.train.offsets[client]
        found: Rows = []
        for step in range(schedule.steps[client]):
            rows, real = drawn.rows(step, torch.tensor([client]))
            found.append(rows[real] - first)
        return found

    draw: Draw = everything if local == "step" else same_batches
    lean, naive = (kind(net, data, method, LR, draw) for kind in (Lean, Naive))
    for _ in range(2):
        lean.round()
        naive.round()
        state = advance(state, reference.round(state, state.round))
        expected = state.x | {k: v for k, v in state.buffers.items() if v.is_floating_point()}
        for found in (lean.module.state_dict(), naive.model):
            gap = max(float((found[k] - v).abs().max()) for k, v in expected.items())
            assert gap < 1e-10
    start = {k: p.detach() for k, p in net.named_parameters()}
    assert max(float((state.x[k] - start[k]).abs().max()) for k in start) > 1e-3


@pytest.mark.parametrize("loop", [Lean, Naive])
def test_loops_tell_methods_apart(loop: type) -> None:
    """Or the comparison above could not fail."""
    found = {}
    for name, method in STRONG.items():
        made = loop(small_net(), small_federation(), method, LR, everything)
        made.round()
        made.round()
        model = made.model if loop is Naive else made.module.state_dict()
        found[name] = torch.cat([v.flatten() for k, v in sorted(model.items()) if k[0] != "1"])
    names = list(found)
    gaps = [float((found[a] - found[b]).abs().max()) for a in names for b in names if a < b]
    assert min(gaps) > 1e-6


def test_centralised_step_is_sgd_on_the_pooled_batch() -> None:
    data, net = small_federation(), small_net()
    central = Central(net, data, LR, None)
    central.round()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    torch.nn.functional.cross_entropy(net(data.train.x), data.train.y).backward()
    optimizer.step()
    for a, b in zip(central.module.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_loops_refuse_what_they_do_not_implement() -> None:
    for method in (fv.FedAvg(weights="size"), fv.QFFL(1.0)):
        with pytest.raises(fv.BadInput, match="no plain loop"):
            Lean(small_net(), small_federation(), method, LR, everything)


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
    now = 0.0

    def step(cost: float):
        def work() -> None:
            nonlocal now
            now += cost

        return work

    assert len(alternate({"a": step(5.0)}, CPU, 9, 1.0, lambda: now)["a"].times) == 3
    assert len(alternate({"a": step(5.0)}, CPU, 2, 1.0, lambda: now)["a"].times) == 2
    calls = []
    alternate({"a": lambda: (step(0.001)(), calls.append(1))}, CPU, 3, 1.0, lambda: now)
    assert len(calls) == 2 + 3 * 20


def test_ratio_of_turns_is_not_the_ratio_of_medians() -> None:
    a, b = Timing(0, (1.0, 4.0, 9.0)), Timing(0, (1.0, 1.0, 9.0))
    spread = ratio(a, b)
    assert (spread.median, spread.low, spread.high) == (1.0, 1.0, 4.0)


def test_peak_memory_sees_a_large_tensor() -> None:
    with PeakMemory(CPU) as memory:
        held = torch.ones(16 << 20)
        del held
    if memory.bytes is None:
        pytest.skip("this system does not tell")
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
    gpu = cases(BenchSettings(device="cuda", model="mobilenet_v2"))
    assert {(c.clients, c.samples) for c in gpu} == {(100, 32)}


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        ({"model": "lenet"}, "lenet5"),
        ({"model": "linear"}, "multinomial"),
        ({"method": "fairgrd"}, "fairgrad"),
        ({"local": "epochs"}, "bench.local"),
        ({"repeat": 0}, "bench.repeat"),
    ],
)
def test_bad_options_are_told(arguments: dict, mentioned: str) -> None:
    with pytest.raises(fv.BadInput, match=mentioned):
        BenchSettings(**arguments)


def test_a_device_that_is_not_there_is_told_before_any_work() -> None:
    with pytest.raises(fv.BadInput, match="cuda:99"):
        run_bench(BenchSettings(device="cuda:99"))


TINY = ("--model", "multinomial", "--clients", "2", "--batch", "4", "--repeat", "2")


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["bench", *TINY, "--method", "qffl", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__
    assert found["matmul_flops_per_second"] > 0
    assert {(row["method"], row["local"]) for row in found["rows"]} == {
        ("q-FFL", "step"), ("q-FFL", "epoch")
    }  # fmt: skip
    for row in found["rows"]:
        assert set(row["milliseconds"]) == {"naive", "lean", "central", "fairvar"}
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
    cli.main(["bench", *TINY, "--method", "fairgrad*", "--local", "step", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "multinomial, 2 clients × 4 samples, one step" in shown
    assert {p.name for p in tmp_path.iterdir()} == {"table.md", "bench.json"}
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "FairGrad\\*" in text
    assert "naive ms" in text
    assert torch.__version__ in text


def test_picture_of_cost_against_clients(tmp_path) -> None:
    timing = {
        k: Timing(0.1, (0.01, 0.02, 0.03), 5) for k in ("naive", "lean", "central", "fairvar")
    }
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
    return words | {"cores": 2, "threads": 1, "matmul_flops_per_second": 1e11, "load_before": 0.1,
                    "load_after": 1.0, "quick": True}  # fmt: skip
