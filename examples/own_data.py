"""Your own data and your own model: one (x, y) pair of arrays per client, and any nn.Module.

Run it with `python examples/own_data.py`; it takes a few seconds. Eight made-up clinics measure six
numbers per patient. They share one rule for the label, but each has its own bias in the sensors and
a different number of patients.
"""

from __future__ import annotations

import numpy as np
from torch import nn

import fairvar as fv


def clinic(number: int, patients: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng((number, patients))
    truth = draw.normal(size=(patients, 6))
    label = (truth[:, :3].sum(1) + 0.3 * draw.normal(size=patients) > 0).astype(int)
    return truth * (1 + 0.2 * number) + 0.4 * number, label


if __name__ == "__main__":
    federation = fv.Federation.from_arrays(
        train=[clinic(i, 20 + 15 * i) for i in range(8)],
        test=[clinic(i, 200) for i in range(8)],
    )
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, federation.classes or 2))
    for method in (fv.FedAvg(), fv.FairLoss(strength=1.0, exact=True), fv.FairGrad(strength=0.1)):
        history = fv.train(model, federation, method, rounds=300, lr=0.3)
        by_client = history.accuracy["test", "global"][-1]
        found = history.fairness("test")
        print(f"{method.label:10}", " ".join(f"{a:.3f}" for a in by_client.tolist()))
        print(f"           mean {found.mean:.3f}, worst {found.smallest:.3f}, "
              f"variance over clients {found.variance_over_clients:.5f}")  # fmt: skip
