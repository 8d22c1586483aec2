"""`Claim`: one statement of the theory as two numbers and a relation between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Relation = Literal["=", "<=", "!=", "> (paper: <=)", "!= (paper: =)"]
Kind = Literal["theorem", "corrected", "counterexample", "identity"]


@dataclass(frozen=True)
class Claim:
    """lhs and rhs, computed in two different ways, and whether the relation holds between them.

    "=":  |lhs − rhs| ≤ tolerance        "<=": lhs ≤ rhs + tolerance      "!=": not "="
    "> (paper: <=)" and "!= (paper: =)": the paper's relation fails here, by more than tolerance;
    such a claim *holds* when the paper's form is violated.
    Where vectors or whole trajectories are compared, lhs and rhs are the pair of entries that
    speaks most against an equality or bound (for "!=": most for it) out of `comparisons`.
    """

    name: str
    statement: str
    lhs: float
    rhs: float
    tolerance: float
    relation: Relation
    kind: Kind
    note: str = ""
    comparisons: int = 1
    holds: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", _holds(self))


def _holds(claim: Claim) -> bool:
    gap = claim.lhs - claim.rhs
    match claim.relation:
        case "=":
            return abs(gap) <= claim.tolerance
        case "<=":
            return gap <= claim.tolerance
        case "> (paper: <=)":
            return gap > claim.tolerance
        case "!=" | "!= (paper: =)":
            return abs(gap) > claim.tolerance
    raise ValueError(f"unknown relation {claim.relation!r}")


def compare(
    name: str,
    statement: str,
    sides: tuple[Tensor | float, Tensor | float],
    relation: Relation,
    kind: Kind,
    tolerance: float = 1e-12,
    note: str = "",
) -> Claim:
    """A claim about all entries of two tensors (or a tensor and a number) of one shape."""
    lhs, rhs = torch.broadcast_tensors(*(torch.as_tensor(s, dtype=torch.float64) for s in sides))
    left, right = lhs.detach().flatten(), rhs.detach().flatten()
    gap = left - right
    worst = int((gap if relation in ("<=", "> (paper: <=)") else gap.abs()).argmax())
    return Claim(name, statement, float(left[worst]), float(right[worst]), tolerance, relation,
                 kind, note, len(left))  # fmt: skip
