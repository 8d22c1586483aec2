"""A table with a column of clients: from a pandas DataFrame to the clients served worst.

Run it with `python examples/table.py`, after `pip install 'fairvar[pandas]'`; it takes a few
seconds. The table is made up: patients of 30 clinics, which differ in population, prevalence and
assay. A fifth of the clinics join after training.
"""

from __future__ import annotations

import pandas
import torch

import fairvar as fv
from fairvar.data import clinics


def patients() -> pandas.DataFrame:
    """All patients in one table, as a study would have them; columns in units of their own."""
    made = clinics(30)
    parts = []
    for i in range(made.clients):
        x = torch.cat([split.of(i)[0] for split in made.splits.values()])
        frame = pandas.DataFrame(x.numpy(), columns=made.provenance["features"])
        frame["age"] = 60 + 12 * frame["age"]
        frame["readmitted"] = torch.cat([split.of(i)[1] for split in made.splits.values()]).numpy()
        parts.append(frame.assign(clinic=f"clinic {i:02}"))
    return pandas.concat(parts)


if __name__ == "__main__":
    table = patients()
    federation = fv.Federation.from_frame(
        table, client="clinic", target="readmitted", split=(0.6, 0.2, 0.2)
    )
    print(federation)
    print("before standardising:", federation.scale_problem)
    federation, later = federation.hold_out(0.2, seed=0)
    federation, later = federation.standardise(), later.standardise(like=federation)
    for method in (fv.FedAvg(), fv.TERM(5.0), fv.AFL(step=0.1)):
        history = fv.train("multinomial", federation, method, rounds=100, lr=0.3)
        accuracy = history.accuracy["test", "global"][-1]
        worst = [federation.client_names[i] for i in accuracy.argsort()[:3].tolist()]
        print(f"\n{method.label}: mean {accuracy.mean():.3f}, worst {accuracy.min():.3f} "
              f"({', '.join(worst)})")  # fmt: skip
        print(fv.new_clients(history, "multinomial", later, steps=(0, 10), lr=0.1))
