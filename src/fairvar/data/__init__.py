"""Data sets, partitions and the way from both to a `Federation`."""

from fairvar.data.dataset import Dataset
from fairvar.data.load import DATASETS, build_federation, load_federation
from fairvar.data.partition import IID, Assignment, Dirichlet, Natural, Partition, Shards
from fairvar.data.synthetic import (
    gradient_variance_minimiser,
    logistic,
    quadratics,
    random_quadratics,
)

__all__ = [
    "DATASETS",
    "IID",
    "Assignment",
    "Dataset",
    "Dirichlet",
    "Natural",
    "Partition",
    "Shards",
    "build_federation",
    "gradient_variance_minimiser",
    "load_federation",
    "logistic",
    "quadratics",
    "random_quadratics",
]
