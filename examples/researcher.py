"""A first study in Python: own data, own model, several methods and seeds, and who gains.

Run it with `python researcher.py`; it takes some seconds. Nothing of the repository is needed.
Twelve made-up workshops measure eight numbers per workpiece; each has other sensors and another
number of workpieces. The question: how even is the quality of the model over the workshops?
"""

from __future__ import annotations

import numpy as np
from torch import nn

import fairvar as fv

ROUNDS = 60


def workshop(number: int, pieces: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng((number, pieces))
    truth = draw.normal(size=(pieces, 8)).astype(np.float32)
    label = (truth[:, 0] + truth[:, 1] * truth[:, 2] > 0).astype(int)
    return truth * (1 + 0.1 * number) + 0.2 * (number % 4), label


if __name__ == "__main__":
    parts = {"train": 30, "valid": 40, "test": 100}
    federation = fv.Federation.from_arrays(
        **{part: [workshop(i, n + 5 * i) for i in range(12)] for part, n in parts.items()},
        name="workshops",
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, federation.classes or 2))
    assert not fv.check_model(model), "check_model lists what must be changed in a model"
    for method in (fv.FedAvg(), fv.TERM(tilt=2.0), fv.FairLoss(strength=1.0, exact=True)):
        found = [
            fv.train(model, federation, method, ROUNDS, lr=0.3, seed=seed, evaluate_every=20)
            for seed in range(2)
        ]
        scores = [history.fairness("test") for history in found]
        print(f"{method.label:10} accuracy {np.mean([s.mean for s in scores]):.3f}, worst client "
              f"{np.mean([s.smallest for s in scores]):.3f}, variance less its noise "
              f"{np.mean([s.corrected_variance for s in scores]):.5f}")  # fmt: skip
    more = fv.train(model, federation, method, 2 * ROUNDS, lr=0.3, state=found[0].state)
    print(f"continued to round {more.state.round}: accuracy {more.fairness('test').mean:.3f}")
    print("done")
