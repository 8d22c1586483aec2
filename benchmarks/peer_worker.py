"""The rounds of one framework, in a process of its own; peers.py starts it.

    python benchmarks/peer_worker.py NAME FOLDER SCRATCH

FOLDER has job.json (what to do) and arrays.npz (data and initial weights). The weights after the
last round are written to SCRATCH/model.npy, one line of JSON to the standard output. Each framework
trains with its own clients, server and loop; only model and arrays come from here. Peers have an
environment without fairvar, so that this file needs torch and numpy alone.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLASSES = 10
Tick = Callable[[], None]
Pairs = list[tuple[Tensor, Tensor]]


class Job:
    """What all frameworks are given: arrays, initial weights, and the numbers of a case."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        told = json.loads((folder / "job.json").read_text())
        self.peers, self.scratch = Path(told["peers"]), scratch  # what peers write goes to scratch
        self.rounds: int = told["rounds"]
        self.lr: float = told["lr"]
        self.batch: int = told["batch"]  # samples per local step
        self.file = folder / "arrays.npz"
        arrays = np.load(self.file)
        self.x, self.y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
        self.clients, self.samples = self.y.shape
        self.module = network(told["model"])
        self.steps = self.used = 0  # of the clients, where `counted`
        start = torch.from_numpy(arrays["weights"])
        nn.utils.vector_to_parameters(start.clone(), self.module.parameters())

    @property
    def pairs(self) -> Pairs:
        """Samples and labels of each client."""
        return [(x.clone(), y.clone()) for x, y in zip(self.x, self.y, strict=True)]

    def counted(self) -> nn.Module:
        """The model, whose copies count how often and on how many samples they are trained."""

        def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if module.training:
                self.steps += 1
                self.used += len(inputs[0])

        self.module.register_forward_pre_hook(count)
        return self.module


def network(name: str) -> nn.Sequential:
    """avgcnn of FL-bench on 3×32×32 images, or multinomial regression on 784 numbers."""
    if name == "multinomial":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, CLASSES))
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU()),
        nn.Linear(512, CLASSES),
    )


# -- each framework: train job.rounds rounds, call tick after each, return the global model --------
def train_fairvar(job: Job, tick: Tick) -> Iterable[Tensor]:
    """The engine round by round, as `fairvar.train` computes it."""
    import fairvar as fv
    from fairvar.engine.settings import TrainSettings
    from fairvar.engine.train import prepare

    federation = fv.Federation.from_arrays(job.pairs, classes=CLASSES)
    whole = job.batch == job.samples
    settings = TrainSettings(
        lr=job.lr,
        batch_size=None if whole else job.batch,
        local_epochs=None if whole else 1,
        threads=1,
    )
    runs = prepare(job.module, federation, fv.FedAvg(), "cross_entropy", settings).runs()
    for _ in range(job.rounds):
        runs.step(due=False)
        tick()
    weights = runs.state.map(lambda leaf: leaf[0]).x
    return [weights[name] for name, _ in job.module.named_parameters()]


def train_lean(job: Job, tick: Tick) -> Iterable[Tensor]:
    """The loop over clients that is tuned by hand, of fairvar's benchmark."""
    import fairvar as fv
    from fairvar_bench.lean import Lean
    from fairvar_bench.loops import everything, shuffled

    federation = fv.Federation.from_arrays(job.pairs, classes=CLASSES)
    whole = job.batch == job.samples
    draw = everything if whole else shuffled([job.samples] * job.clients, job.batch)
    lean = Lean(job.counted(), federation, fv.FedAvg(), job.lr, draw)
    for _ in range(job.rounds):
        lean.round()
        tick()
    return lean.params


def train_pfllib(job: Job, tick: Tick) -> Iterable[Tensor]:
    """PFLlib reads each client's samples from a file in every round, and evaluates once per round
    before the clients train; the evaluation is replaced by a look at the clock."""
    sys.path.insert(0, str(job.peers / "PFLlib" / "system"))
    _write_for_pfllib(job, job.scratch / "dataset" / "arrays")
    (job.scratch / "system").mkdir(exist_ok=True)
    os.chdir(job.scratch / "system")  # it looks for ../dataset
    from flcore.servers.serveravg import FedAvg  # type: ignore[import-not-found]

    class Timed(FedAvg):  # type: ignore[misc]
        def evaluate(self, *_: object) -> None:
            self.rs_test_acc.append(0.0)
            tick()

        def save_results(self) -> None:
            pass

        def save_global_model(self) -> None:
            pass

    server = Timed(_options_of_pfllib(job), 0)
    server.train()
    return list(server.global_model.parameters())


def _write_for_pfllib(job: Job, folder: Path) -> None:
    """The files that PFLlib reads; not compressed as it would, so that it only has to read them."""
    for client, (x, y) in enumerate(job.pairs):
        for part, held in (("train", job.samples), ("test", 1)):
            (folder / part).mkdir(parents=True, exist_ok=True)
            data = np.array({"x": x[:held].numpy(), "y": y[:held].numpy()}, dtype=object)
            np.savez(folder / part / f"{client}.npz", data=data)


def _options_of_pfllib(job: Job) -> Namespace:
    """Its command's defaults, but for the case's own numbers."""
    return Namespace(
        model=job.counted(), dataset="arrays", algorithm="FedAvg", device="cpu", goal="test",
        num_clients=job.clients, num_classes=CLASSES, batch_size=job.batch,
        local_learning_rate=job.lr, local_epochs=1, global_rounds=job.rounds - 1,
        learning_rate_decay=False, learning_rate_decay_gamma=0.99, join_ratio=1.0,
        random_join_ratio=False, few_shot=0, time_select=False, time_threthold=10000.0,
        save_folder_name="items", top_cnt=100, auto_break=False, eval_gap=1, client_drop_rate=0.0,
        train_slow_rate=0.0, send_slow_rate=0.0, dlg_eval=False, dlg_gap=100,
        batch_num_per_client=2, num_new_clients=0, fine_tuning_epoch_new=0,
    )  # fmt: skip


def train_flbench(job: Job, tick: Tick) -> Iterable[Tensor]:
    """FL-bench looks for the partition in its own folder, which is not written: it gets another.
    What it shows after each round is replaced by a look at the clock."""
    sys.path.insert(0, str(job.peers / "FL-bench"))
    import src.server.fedavg as fedavg  # type: ignore[import-not-found]
    from data.utils.datasets import BaseDataset  # type: ignore[import-not-found]

    indices = np.arange(job.clients * job.samples).reshape(job.clients, job.samples).tolist()
    _write_for_flbench(indices, job.scratch / "data" / "arrays")
    fedavg.FLBENCH_ROOT = job.scratch
    output = Namespace(runtime=Namespace(output_dir=str(job.scratch)))
    fedavg.HydraConfig = Namespace(get=lambda: output)

    class Timed(fedavg.FedAvgServer):  # type: ignore[misc]
        def get_dataset(self) -> Any:
            x, y = job.x.flatten(0, 1).clone(), job.y.flatten().clone()
            return BaseDataset(x, y, range(CLASSES), **self.get_dataset_transforms())

        def display_metrics(self) -> None:
            tick()

    server = Timed(_options_of_flbench(job), init_trainer=False, init_model=False)
    server.init_model(_in_two_parts(job.counted()))
    server.init_trainer()
    server.train()
    return list(server.public_model_params.values())


def _write_for_flbench(indices: list[list[int]], folder: Path) -> None:
    everybody = list(range(len(indices)))
    separation = {"train": everybody, "val": [], "test": [], "total": len(indices)}
    held = [{"train": rows, "val": [], "test": []} for rows in indices]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text(json.dumps({"split": "sample"}))
    with open(folder / "partition.pkl", "wb") as file:
        pickle.dump({"separation": separation, "data_indices": held}, file)


def _options_of_flbench(job: Job) -> Any:
    """Its defaults, but for the case's own numbers, no evaluation and nothing written."""
    from omegaconf import DictConfig  # type: ignore[import-not-found]
    from src.utils.functional import parse_args  # type: ignore[import-not-found]

    nobody = dict.fromkeys(("train", "val", "test"), False)
    common = {
        "global_epoch": job.rounds, "local_epoch": 1, "batch_size": job.batch, "join_ratio": 1.0,
        "client_side_evaluation": False, "use_cuda": False, "save_log": False,
        "save_learning_curve_plot": False, "save_metrics": False, "verbose_gap": 10**9,
        "test": {"client": {"interval": -1, **nobody}, "server": {"interval": -1, **nobody}},
    }  # fmt: skip
    given = {"dataset": {"name": "arrays"}, "optimizer": {"lr": job.lr}, "common": common}
    return parse_args(DictConfig(given), "fedavg", None)


def _in_two_parts(module: nn.Module) -> nn.Module:
    """FL-bench's models have a base and a classifier; the parameters keep their order."""
    from src.utils.models import DecoupledModel  # type: ignore[import-not-found]

    *first, last = module.children()
    whole: nn.Module = DecoupledModel()
    whole.base, whole.classifier = nn.Sequential(*first), last
    for hook in module._forward_pre_hooks.values():
        whole.register_forward_pre_hook(hook)
    return whole


def train_fluke(job: Job, tick: Tick) -> Iterable[Tensor]:
    """fluke tells an observer when a round has ended."""
    from fluke import DDict, FlukeENV  # type: ignore[import-not-found]
    from fluke.algorithms.fedavg import FedAVG  # type: ignore[import-not-found]
    from fluke.data import (  # type: ignore[import-not-found]
        DataSplitter,
        DummyDataContainer,
        FastDataLoader,
    )
    from fluke.utils import FederationObserver  # type: ignore[import-not-found]

    class Observer(FederationObserver):  # type: ignore[misc]
        def end_round(self, round: int) -> None:
            tick()

    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [
        FastDataLoader(x, y, num_labels=CLASSES, batch_size=job.batch, shuffle=True)
        for x, y in job.pairs
    ]
    data = DummyDataContainer(loaders, [None] * job.clients, None, CLASSES)
    optimizer, constant = DDict(name="SGD", lr=job.lr), DDict(step_size=1, gamma=1)
    client = DDict(batch_size=job.batch, local_epochs=1, loss="CrossEntropyLoss",
                   optimizer=optimizer, scheduler=constant)  # fmt: skip
    options = DDict(model=job.counted(), client=client, server=DDict(weighted=False))
    algorithm = FedAVG(job.clients, DataSplitter(data), options)
    algorithm.set_callbacks(Observer())
    algorithm.run(job.rounds, 1.0)
    return list(algorithm.server.model.parameters())


CONFIG_OF_FLGO = """import numpy, torch
arrays = numpy.load({arrays!r})
x, y = (torch.from_numpy(arrays[name]).flatten(0, 1) for name in "xy")
train_data = torch.utils.data.TensorDataset(x, y)

def get_model():
    raise NotImplementedError
"""


def train_flgo(job: Job, tick: Tick) -> Iterable[Tensor]:
    """FLGo evaluates once per round and once before the first; the evaluation is replaced by a
    look at the clock. Clients are averaged by its "uniform" rule, because its default makes a new
    model for each of them."""
    os.chdir(job.scratch)  # the benchmark that it writes is imported from here
    sys.path.insert(0, ".")
    import flgo  # type: ignore[import-not-found]
    from flgo.algorithm import fedavg  # type: ignore[import-not-found]
    from flgo.benchmark.toolkits.cv.classification import (  # type: ignore[import-not-found]
        FromDatasetPipe,
    )
    from flgo.experiment.logger import BasicLogger  # type: ignore[import-not-found]

    class Timed(BasicLogger):  # type: ignore[misc]
        def log_once(self, *_: object, **__: object) -> None:
            tick()

    # torch 2.13 asks subclasses of Subset for this method, which FLGo 0.4.4 does not have.
    FromDatasetPipe.TaskDataset.__getitems__ = lambda own, rows: [own[row] for row in rows]
    module = job.counted()
    model = flgo.convert_model(lambda: copy.deepcopy(module), "arrays")
    runner = flgo.init(_task_of_flgo(job), fedavg, _options_of_flgo(job), model, Logger=Timed)
    runner.run()
    return list(runner.model.parameters())


def _task_of_flgo(job: Job) -> str:
    import flgo
    from flgo.benchmark.toolkits.partition import BasicPartitioner  # type: ignore[import-not-found]

    class InOrder(BasicPartitioner):  # type: ignore[misc]
        def __call__(self, data: Any) -> list[list[int]]:
            return np.arange(len(data)).reshape(job.clients, job.samples).tolist()

        def __str__(self) -> str:
            return "in_order"

    config = job.scratch / "config_of_flgo.py"
    config.write_text(CONFIG_OF_FLGO.format(arrays=str(job.file)))
    name = flgo.gen_benchmark_from_file("arrays_of_flgo", str(config))
    made: str = flgo.gen_task_by_(importlib.import_module(name), InOrder(), "task_of_flgo")
    return made


def _options_of_flgo(job: Job) -> dict[str, Any]:
    return {
        "num_rounds": job.rounds, "num_epochs": 1, "batch_size": float(job.batch),
        "learning_rate": job.lr, "sample": "full", "aggregate": "uniform", "train_holdout": 0.0,
        "eval_interval": 1, "no_log_console": True, "lr_scheduler": -1,
    }  # fmt: skip


TRAIN: dict[str, Callable[[Job, Tick], Iterable[Tensor]]] = {
    "fairvar": train_fairvar,
    "lean": train_lean,
    "fluke": train_fluke,
    "FLGo": train_flgo,
    "PFLlib": train_pfllib,
    "FL-bench": train_flbench,
}
PACKAGES = ("torch", "numpy", "fluke-fl", "flgo")


def main() -> None:
    name, folder, scratch = sys.argv[1], *(Path(one).resolve() for one in sys.argv[2:])
    answers = os.dup(1)
    os.dup2(2, 1)  # frameworks print progress, which is not part of the answer
    torch.set_num_threads(1)
    job = Job(folder, scratch)
    clocks: list[tuple[float, float]] = []

    def tick() -> None:
        clocks.append((time.process_time(), time.perf_counter()))

    tick()
    weights = TRAIN[name](job, tick)
    np.save(scratch / "model.npy", nn.utils.parameters_to_vector(weights).detach().numpy())
    cpu, wall = ([b - a for a, b in pairwise(one)] for one in zip(*clocks, strict=True))
    found = {
        "cpu": cpu, "wall": wall, "steps": job.steps, "samples": job.used,
        "versions": dict(_versions()),
    }  # fmt: skip
    os.write(answers, json.dumps(found).encode() + b"\n")


def _versions() -> Iterable[tuple[str, str]]:
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            yield package, version(package)


if __name__ == "__main__":
    main()
