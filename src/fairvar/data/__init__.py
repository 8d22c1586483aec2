"""Data sets, partitions and the way from both to a `Federation`."""

from fairvar.data.build import (
    DATASET_NAMES,
    DATASETS,
    build_federation,
    dataset_sha256,
    deal,
    load_federation,
)
from fairvar.data.builtin import (
    clinics,
    logistic,
    quadratics,
    random_quadratics,
)
from fairvar.data.dataset import Dataset, Scale
from fairvar.data.partition import IID, Assignment, Dirichlet, Natural, Partition, Shards
from fairvar.data.sources import SOURCES, describe, verify

__all__ = [
    "DATASETS",
    "DATASET_NAMES",
    "IID",
    "SOURCES",
    "Assignment",
    "Dataset",
    "Dirichlet",
    "Natural",
    "Partition",
    "Scale",
    "Shards",
    "build_federation",
    "clinics",
    "dataset_sha256",
    "deal",
    "describe",
    "load_federation",
    "logistic",
    "quadratics",
    "random_quadratics",
    "verify",
]
