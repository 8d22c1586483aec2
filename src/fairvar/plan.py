"""`Plan`: a sweep file expanded into single configurations.

A sweep file is a configuration with two more sections. `[sweep]` holds the lists to combine;
`[scale.NAME]` holds overrides, such as `"train.rounds" = 100`, that give the same shape at another
cost (`--scale NAME`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec

from fairvar.checked import Checked, Count, NonNegative, Positive
from fairvar.config import Config, merge_overrides, read_toml, refuse_unknown
from fairvar.errors import BadInput, unknown
from fairvar.methods import METHODS
from fairvar.select import Criterion

PAPER_METHODS = ("fedavg", "afl", "qffl", "aaggff", "fairloss", "fairloss*", "fairgrad",
                 "fairgrad*")  # fmt: skip
Options = dict[str, Any]


class SweepSettings(Checked, frozen=True, kw_only=True):
    """The lists of a grid. Each method takes those that it knows: `strength` is λ of FairLoss, γ of
    FairGrad and q of q-FFL; `step` is AFL's, `cdf` AAggFF's. `[sweep.method.NAME]` replaces lists
    for one method, or fixes any of its options. A star marks the exact variant ("fairgrad*")."""

    __where__: ClassVar[str | None] = "sweep"

    methods: tuple[str, ...] = PAPER_METHODS
    seeds: Count | tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = 5
    lr: tuple[Positive, ...] = (0.1,)
    strength: tuple[NonNegative, ...] = (0.1,)
    step: tuple[Positive, ...] = (0.1,)
    cdf: tuple[str, ...] = ("logistic",)
    alpha: tuple[Positive, ...] = ()
    method: dict[str, Options] = msgspec.field(default_factory=dict)

    def check(self) -> None:
        for name in (*self.methods, *self.method):
            if name.removesuffix("*") not in METHODS:
                raise unknown("sweep method", name, METHODS)
        for name in ("methods", "seeds", "lr", "strength", "step", "cdf"):
            if not getattr(self, name) and getattr(self, name) != 0:
                raise BadInput(f"sweep.{name} is empty; give at least one value")

    @property
    def seed_list(self) -> list[int]:
        return list(range(self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)

    def axes(self, name: str) -> tuple[Options, dict[str, list[Any]]]:
        """A method's fixed options, and the lists to combine for it (its knob and lr)."""
        kind = METHODS[name.removesuffix("*")]
        knob = kind.fairness_knob
        lists: dict[str, list[Any]] = {"lr": list(self.lr)}
        fixed: Options = {"name": name.removesuffix("*")}
        if name.endswith("*"):
            fixed["exact"] = True
        shared = {"strength": self.strength, "q": self.strength, "step": self.step, "cdf": self.cdf}
        if knob in shared:
            lists[knob] = list(shared[knob])
        for key, value in self.method.get(name, {}).items():
            if isinstance(value, list):
                lists[key] = value
            else:
                lists.pop(key, None)
                fixed[key] = value
        return fixed, lists


@dataclass(frozen=True)
class Plan:
    """All runs of a sweep, in the order in which they are computed."""

    name: str
    settings: SweepSettings
    criterion: Criterion
    cells: Sequence[Config]

    @staticmethod
    def load(path: Path, overrides: Sequence[str] = (), scale: str | None = None) -> Plan:
        values = read_toml(path)
        scales = values.pop("scale", {})
        if scale is not None:
            if scale not in scales:
                raise unknown("scale", scale, scales)
            changes = [f"{key}={_toml(value)}" for key, value in scales[scale].items()]
            merge_overrides(values, changes)
        return Plan.from_dict(merge_overrides(values, overrides))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Plan:
        base = copy.deepcopy(dict(values))
        section = base.pop("sweep", {})
        if not isinstance(section, dict):
            raise BadInput(f"sweep = {section!r} must be a section: write [sweep]")
        known = {f.name: f.type for f in msgspec.structs.fields(SweepSettings)}
        refuse_unknown(section, known, "sweep")
        try:
            settings = msgspec.convert(section, SweepSettings)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, BadInput):
                raise error.__cause__ from None
            raise BadInput(f"sweep: {str(error).replace('`', '')}") from None
        if "method" in base:
            raise BadInput("a sweep takes its methods from sweep.methods; remove [method]")
        first = Config.from_dict(base)
        return Plan(first.name, settings, first.select, list(_expand(base, settings)))


def _toml(value: Any) -> str:
    """A value as it would be written behind `key=` on the command line."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)


def _expand(base: dict[str, Any], settings: SweepSettings) -> Iterator[Config]:
    """Seeds outermost: an unfinished sweep then has whole grids for fewer seeds."""
    for seed, alpha in itertools.product(settings.seed_list, settings.alpha or (None,)):
        for name in settings.methods:
            fixed, lists = settings.axes(name)
            for values in itertools.product(*lists.values()):
                options = fixed | dict(zip(lists, values, strict=True))
                cell = copy.deepcopy(base)
                cell.setdefault("train", {}).update(lr=options.pop("lr"), seed=seed)
                cell["method"] = options
                if alpha is not None:
                    cell.setdefault("partition", {"name": "dirichlet"})["alpha"] = alpha
                yield Config.from_dict(cell)
