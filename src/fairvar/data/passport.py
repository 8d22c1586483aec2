"""A partition's birth certificate: its checksum, and how uneven it is."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from jaxtyping import Integer

from fairvar.data.partition import Assignment


def passport(labels: Integer[np.ndarray, " N"], assignment: Assignment) -> dict[str, Any]:
    """JSON-able facts about a partition.

    `mean_total_variation`: distance of a client's label law to the pooled one (0: alike).
    `effective_classes`: 1 / Σ share². `majority_share`: the accuracy of always answering the
    client's most frequent class. All three are means over clients.
    """
    count = _label_counts(labels, assignment)
    share = count / count.sum(1, keepdims=True)
    pooled = count.sum(0) / count.sum()
    return {
        "sha256": assignment_sha256(assignment),
        "clients": len(assignment.indices),
        "sizes": [len(rows) for rows in assignment.indices],
        "classes_by_client": (count > 0).sum(1).tolist(),
        "mean_total_variation": float(0.5 * np.abs(share - pooled).sum(1).mean()),
        "effective_classes": float((1 / (share**2).sum(1)).mean()),
        "majority_share": float(share.max(1).mean()),
        "attempts": assignment.attempts,
        "moved": assignment.moved,
    }


def assignment_sha256(assignment: Assignment) -> str:
    """Of clients, sizes and indices as little-endian int64, so that boundaries count too."""
    digest = hashlib.sha256()
    sizes = [len(rows) for rows in assignment.indices]
    for part in ([len(sizes)], sizes, *assignment.indices):
        digest.update(np.asarray(part, dtype="<i8").tobytes())
    return digest.hexdigest()


def _label_counts(
    labels: Integer[np.ndarray, " N"], assignment: Assignment
) -> Integer[np.ndarray, "n labels"]:
    names, code = np.unique(labels, return_inverse=True)
    return np.stack([np.bincount(code[rows], minlength=len(names)) for rows in assignment.indices])
