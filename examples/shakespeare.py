"""Next characters of Shakespeare: every speaking role is a client, with a small transformer.

Run it with `python examples/shakespeare.py` after `fairvar data fetch shakespeare` (or with
FAIRVAR_DATA set to a folder of data sets).
"""

from __future__ import annotations

import argparse

import fairvar as fv
from fairvar.models import Transformer

ROLES = 99

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--root", help="folder of the text, if it is not in the usual places")
    given = parser.parse_args()
    plays = fv.load_federation("shakespeare", ROLES, fv.Natural(), root=given.root)
    print(plays)
    model = Transformer(length=64, tokens=plays.classes or 65)
    for method in (fv.FedAvg(), fv.QFFL(1.0), fv.FairLoss(strength=0.1)):
        history = fv.train(
            model,
            plays,
            method,
            rounds=given.rounds,
            lr=0.3,
            momentum=0.9,
            clip_norm=1.0,
            batch_size=8,
            local_steps=8,
            participants=10,
            evaluate_every=given.rounds,
            evaluate_local=False,
        )
        found = history.fairness("test", "global")
        print(f"{method.label:9} accuracy: mean {found.mean:.3f}, worst role {found.smallest:.3f}, "
              f"variance over roles {found.variance_over_clients:.5f}")  # fmt: skip
