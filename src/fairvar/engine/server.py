"""A method's functions for several runs at once; for a single run they are called as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from torch.func import vmap

from fairvar.methods.base import Memory, Method, Replies


@dataclass(frozen=True)
class Server:
    """All tables have the run as first axis."""

    method: Method  # of the first run, as it acts in this round
    numbers: dict[str, Float64[Tensor, " runs"]] | None  # of all runs; None: there is one only
    share: Float64[Tensor, " n"]
    ids: Int64[Tensor, " n"]

    def each(self, function: Callable[..., Any], *tables: Any) -> Any:
        """function(method, *rows) of every run."""
        if self.numbers is None:
            return _lift(function(self.method, *(_drop(table) for table in tables)))
        return vmap(lambda numbers, *rows: function(self.method.with_numbers(numbers), *rows))(
            self.numbers, *tables
        )

    @property
    def plain(self) -> bool:
        """Every direction is the client's own gradient (and curvature): own = 1, shared = 0."""
        return type(self.method).coefficients is Method.coefficients

    @cached_property
    def curvature(self) -> Float64[Tensor, "runs 1"] | Float64[Tensor, ""] | float:
        """γ; of a captured run a single tensor."""
        if not self.numbers:
            return self.method.curvature
        some = next(iter(self.numbers.values()))
        return self.each(lambda method, number: _like(method.curvature, number), some)[:, None]

    def coefficients(
        self, loss: Float64[Tensor, "runs m"], mean_loss: Float64[Tensor, " runs"]
    ) -> tuple[Float64[Tensor, "runs m"], Float64[Tensor, "runs m"]]:
        def both(method: Method, loss: Tensor, mean_loss: Tensor) -> tuple[Tensor, Tensor]:
            own, shared = method.coefficients(loss, mean_loss)
            return _like(own, loss), _like(shared, loss)

        found: tuple[Tensor, Tensor] = self.each(both, loss, mean_loss)
        return found

    def weigh(
        self, memory: Memory, loss: Float64[Tensor, "runs n"]
    ) -> tuple[Float64[Tensor, "runs n"], Memory]:
        def weigh(method: Method, memory: Memory, loss: Tensor) -> tuple[Tensor, Memory]:
            return method.weigh(memory, self._replies(loss))

        found: tuple[Tensor, Memory] = self.each(weigh, memory, loss)
        return found

    def normaliser(
        self,
        loss: Float64[Tensor, "runs n"],
        squared_norms: Float64[Tensor, "runs n"],
        lr: Float64[Tensor, "runs 1"] | Float64[Tensor, ""] | float,
    ) -> Float64[Tensor, "runs 1"]:
        def normaliser(method: Method, loss: Tensor, norms: Tensor, lr: Tensor | float) -> Tensor:
            return _like(method.normaliser(self._replies(loss), norms, lr), loss[:1])

        found: Tensor = self.each(normaliser, loss, squared_norms, lr)
        return found

    def _replies(self, loss: Tensor) -> Replies:
        return Replies(loss, self.share, self.ids, len(self.ids))


def _like(value: Tensor | float, other: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(other.dtype).expand_as(other)
    return torch.full_like(other, value)


def _drop(value: Any) -> Any:
    """Without the axis of runs; numbers have none."""
    if isinstance(value, dict):
        return {name: leaf[0] for name, leaf in value.items()}
    return value[0] if isinstance(value, Tensor) and value.dim() else value


def _lift(value: Any) -> Any:
    """With an axis of one run."""
    if isinstance(value, tuple):
        return tuple(_lift(part) for part in value)
    if isinstance(value, dict):
        return {name: leaf[None] for name, leaf in value.items()}
    return value[None]
