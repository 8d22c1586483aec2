"""How evenly a model serves its clients: numbers over clients, named so that they tell the axis.

Everything takes lists, numpy arrays or torch tensors and computes in float64. `DEFINITIONS` says
in one line what each number is.
"""

from fairvar.metrics.comparison import (
    FairOrder,
    epsilon_fair_order,
    hypervolume,
    pareto_front,
    worse_than,
    worst_class_of_client,
)
from fairvar.metrics.definitions import DEFINITIONS
from fairvar.metrics.evenness import (
    Fairness,
    binomial_noise,
    fairness,
    gradient_variance,
    loss_variance,
    mean_and_variance,
    variance_in_units,
)

__all__ = [
    "DEFINITIONS",
    "FairOrder",
    "Fairness",
    "binomial_noise",
    "epsilon_fair_order",
    "fairness",
    "gradient_variance",
    "hypervolume",
    "loss_variance",
    "mean_and_variance",
    "pareto_front",
    "variance_in_units",
    "worse_than",
    "worst_class_of_client",
]
