"""The demo: the paper's MNIST experiment scaled to about a minute, on data inside the package."""

from __future__ import annotations

from typing import Any

from fairvar.runs.plan import Plan

TITLE = "Fair federated learning on MNIST: a demo"
NOTE = "A small grid on 1000 images: it shows the tool, not the last word on the methods."


def demo_plan(alpha: float = 0.1, seeds: int = 3, rounds: int = 100) -> Plan:
    """Fewer than 1000 training images over 50 clients, multinomial regression, one full-batch step
    per round, and a corner of the paper's grid: two learning rates, two values of each knob."""
    values: dict[str, Any] = {
        "name": "demo",
        "data": {"name": "mnist_1000", "clients": 50},
        "partition": {"name": "dirichlet", "alpha": alpha, "min_samples": 2},
        "model": {"name": "multinomial"},
        "train": {"rounds": rounds},
        "evaluate": {"every": 10},
        "sweep": {
            "seeds": seeds,
            "lr": [0.05, 0.2],
            "strength": [0.1, 1.0],
            "step": [0.01, 0.1],
            "cdf": ["logistic", "exponential"],
            "method": {
                "fairgrad": {"strength": [0.01, 0.1]},
                "fairgrad*": {"strength": [0.01, 0.1]},
            },
        },
    }
    return Plan.from_dict(values)
