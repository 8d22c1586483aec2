"""The demo: the paper's MNIST experiment scaled to about a minute, on data inside the package."""

from __future__ import annotations

from pathlib import Path

from fairvar.checked import Checked, Count, Positive
from fairvar.data import Dirichlet, load_federation
from fairvar.engine.train import train
from fairvar.federation import Federation
from fairvar.methods import AFL, QFFL, AAggFF, FairGrad, FairLoss, FedAvg, Method
from fairvar.progress import Report
from fairvar.report import render
from fairvar.report.look import save
from fairvar.report.pictures import accuracy_figure, front_figure, partition_figure
from fairvar.report.results import Result, Trial, choose, noise_floor, result_table
from fairvar.report.table import Table
from fairvar.select import Criterion
from fairvar.store import write_text

# A corner of the paper's grid: two learning rates, two values of each method's own knob.
LEARNING_RATES = (0.05, 0.2)
GRID: tuple[Method, ...] = (
    FedAvg(),
    AFL(step=0.01), AFL(step=0.1),
    QFFL(q=0.1), QFFL(q=1.0),
    AAggFF(cdf="logistic"), AAggFF(cdf="exponential"),
    FairLoss(strength=0.1), FairLoss(strength=1.0),
    FairLoss(strength=0.1, exact=True), FairLoss(strength=1.0, exact=True),
    FairGrad(strength=0.01), FairGrad(strength=0.1),
    FairGrad(strength=0.01, exact=True), FairGrad(strength=0.1, exact=True),
)  # fmt: skip


class DemoSettings(Checked, frozen=True, kw_only=True):
    alpha: Positive = 0.1
    clients: Count = 50
    rounds: Count = 100
    seeds: Count = 3


def demo_federation(settings: DemoSettings) -> Federation:
    """Fewer than 1000 training images over 50 clients; 200 test images with each client's mix."""
    partition = Dirichlet(alpha=settings.alpha, min_samples=2)
    return load_federation("mnist_1000", settings.clients, partition)


def run_demo(settings: DemoSettings, federation: Federation, report: Report) -> list[Trial]:
    """Train every configuration with every seed."""
    cells = [(method, lr) for method in GRID for lr in LEARNING_RATES]
    total, done, trials = len(cells) * settings.seeds, 0, []
    for method, lr in cells:
        histories = []
        for seed in range(settings.seeds):
            report(done, total, f"{method.label}, lr {lr:g}, seed {seed}")
            histories.append(
                train("multinomial", federation, method, settings.rounds, lr, seed=seed)
            )
            done += 1
        trials.append(Trial(method, lr, histories))
    report(done, total, "done")
    return trials


def demo_table(settings: DemoSettings, results: list[Result]) -> Table:
    floor = 100 * noise_floor(results)
    return result_table(
        results,
        f"MNIST, {settings.clients} clients, Dirichlet {settings.alpha:g}, multinomial regression",
        [
            f"{settings.seeds} seeds, {settings.rounds} rounds, one full-batch step per round; "
            "± is the standard error over seeds. Chosen on validation, reported on test.",
            f"Noise floor: {floor:.3f} of the variance ×100 would be there if clients were equal.",
            "A small grid on 1000 images: it shows the tool, not the last word on the methods.",
        ],
    )


def write_demo(
    folder: Path, settings: DemoSettings, federation: Federation, trials: list[Trial]
) -> tuple[Table, list[Path]]:
    """Table and pictures into `folder`; returns the table and the files written."""
    results = choose(trials, Criterion())
    table = demo_table(settings, results)
    written = []
    for suffix, kind in (("md", "markdown"), ("csv", "csv")):
        written.append(folder / f"table.{suffix}")
        write_text(written[-1], render(table, kind))
    written += save(partition_figure(federation), folder, "partition")
    written += save(accuracy_figure(results), folder, "client_accuracies")
    written += save(front_figure(trials, results), folder, "front")
    return table, written
