"""A first study in Python: own data, own model, own metric; compare, save, continue.

Run it with `python researcher.py`; it takes some seconds. Nothing of the repository is needed.
Twelve made-up workshops measure eight numbers per workpiece; each has other sensors and another
number of workpieces. The question: how even is the quality of the model over the workshops?
It writes tables and figures to the folder `study`, and one history beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fairvar as fv

ROUNDS = 60
STUDY = Path("study")


def workshop(number: int, pieces: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng((number, pieces))
    truth = draw.normal(size=(pieces, 8)).astype(np.float32)
    label = (truth[:, 0] + truth[:, 1] * truth[:, 2] > 0).astype(int)
    return truth * (1 + 0.1 * number) + 0.2 * (number % 4), label


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)  # a module brings its first weights with it
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def faults_found(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    """Of the faulty pieces (label 1) the share that the model finds; NaN where there are none."""
    return (outputs.argmax(1)[targets == 1] == 1).double().mean()


if __name__ == "__main__":
    # Own data: a pair of arrays per client and part.
    parts = {"train": 30, "valid": 40, "test": 100}
    federation = fv.Federation.from_arrays(
        **{part: [workshop(i, n + 5 * i) for i in range(12)] for part, n in parts.items()},
        name="workshops",
    )

    # Own model and own metric.
    problems = fv.check_model(network(seed=0))
    assert not problems, problems  # what must be changed in a model
    metric = fv.Metric(faults_found, higher_is_better=True, bounds=(0, 1))

    def train(method: fv.Method, seed: int, rounds: int, **more: Any) -> fv.History:
        return fv.train(network(seed), federation, method, rounds, lr=0.3, seed=seed,
                        metric=metric, evaluate_every=20, **more)  # fmt: skip

    # Compare: two seeds of each method.
    methods = (fv.FedAvg(), fv.TERM(tilt=2.0), fv.FairLoss(strength=1.0, exact=True))
    runs = {method.label: [train(method, seed, ROUNDS) for seed in range(2)] for method in methods}
    comparison = fv.compare(runs)
    print(comparison)
    written = comparison.save(STUDY)
    print(f"{len(written)} tables and figures in {STUDY}")

    # Save and load: every number comes back.
    first = runs["TERM"][0]
    first.save(STUDY / "term.fairvar")
    loaded = fv.load(STUDY / "term.fairvar")
    for table, scores in first.score.items():
        assert np.array_equal(loaded.score[table], scores, equal_nan=True)
    print(f"loaded {loaded}")

    # Continue, and join the two parts.
    later = train(methods[1], 0, 2 * ROUNDS, state=loaded)
    whole = loaded + later
    print(f"continued to round {whole.rounds}: {metric.title} {whole.fairness('test').mean:.3f}, "
          f"worst tenth {whole.fairness('test').worst_10_percent:.3f}")  # fmt: skip
    print("done")
