"""How far rounding alone carries a CNN's epochs: a stored run again, and again from parameters that
were moved once by at most 2⁻¹¹ of themselves, which is how TF32 rounds.

FAIRVAR_DATA=FOLDER python benchmarks/drift.py         # five epochs of CIFAR-10, twice: 10 minutes
"""

from __future__ import annotations

from pathlib import Path

import torch
from msgspec.structs import replace

from fairvar.engine.history import History
from fairvar.engine.train import run_rounds
from fairvar.runs.results import stored_runs
from fairvar.runs.runner import federation_of, model_of
from fairvar.runs.stored import StoredRun

RESULTS = Path(__file__).resolve().parent.parent / "results" / "cifar10"


def again(run: StoredRun, moved: bool) -> History:
    """Up to the first evaluation, on the CPU in full precision."""
    config = run.config
    federation = federation_of(config)
    model = model_of(config, federation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters() if moved else ():
            p.mul_(1 + 2**-11 * (2 * torch.rand(p.shape, generator=generator) - 1))
    rounds = int(run.history().evaluated[0])
    settings = replace(config.train, rounds=rounds, device="cpu", precision="full")
    loss, when = config.model.loss, config.evaluate
    return run_rounds(model, federation, config.method, loss, settings, when)


def tell(name: str, a: History, b: History) -> None:
    points = answers = 0.0
    for (split, model), table in a.accuracy.items():
        gap, samples = table[0] - b.accuracy[split, model][0], a.samples[split].double()
        points = max(points, 100 * float(gap.nanmean().abs()))
        answers = max(answers, 100 * float((gap.abs() * samples).nansum() / samples.sum()))
    print(f"{name}: {points:.2f} points of mean accuracy, {answers:.2f} % of the answers")


def main() -> None:
    (run,) = (r for r in stored_runs(RESULTS) if (r.config.protocol, r.config.method.label) ==
              ("tables", "FedAvg") and getattr(r.config.partition, "alpha", 0) == 0.05)  # fmt: skip
    plain, moved = again(run, False), again(run, True)
    tell("CPU less CPU from moved parameters", plain, moved)
    tell("CPU less the stored run", plain, run.history())


if __name__ == "__main__":
    main()
