"""`Plan`: a sweep file expanded into single configurations.

A sweep file is a configuration with two more sections. `[sweep]` holds the lists to combine.
`[scale.NAME]` holds overrides, such as `"train.rounds" = 100`, for a cheaper or larger sweep of the
same form (`--scale NAME`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec.structs import replace

from fairvar.data import Dirichlet, Partition
from fairvar.errors import BadInput, shown, unknown
from fairvar.methods import BUILT_IN, METHODS, Method
from fairvar.runs.config import Config, assign, located, merge_overrides, read_toml, refuse_unknown
from fairvar.runs.identity import fingerprint
from fairvar.runs.select import Criterion
from fairvar.validation import Checked, Count, NonNegative, Positive

PAPER_METHODS = ("fedavg", "afl", "qffl", "aaggff", "fairloss", "fairloss*", "fairgrad",
                 "fairgrad*")  # fmt: skip
SETS = ("paper", "extended", "all")
MOST_RUNS = 100_000
Options = dict[str, Any]


class SweepSettings(Checked, frozen=True, kw_only=True):
    """The lists of a grid. Each method uses those that it has: `strength` is λ of FairLoss, γ of
    FairGrad and q of q-FFL; AFL has `step`, AAggFF has `cdf`. `[sweep.method.NAME]` replaces lists
    for one method, or fixes any of its options. A star marks the exact variant ("fairgrad*").
    Among `methods`, "paper" stands for the paper's eight, "extended" for all further ones, and
    "all" for both."""

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
        names = method_names(self.methods)
        msgspec.structs.force_setattr(self, "methods", names)
        for name in (*names, *self.method):
            if name.removesuffix("*") not in METHODS:
                raise unknown("sweep method", name, (*SETS, *METHODS))
        for name in ("methods", "seeds", "lr", "strength", "step", "cdf", "alpha"):
            values = getattr(self, name)
            if values == () and name != "alpha":
                raise BadInput(f"sweep.{name} is empty; give at least one value")
            if isinstance(values, tuple) and len(set(values)) < len(values):
                raise BadInput(f"sweep.{name} = {shown(list(values))} has a value twice")

    @property
    def seed_list(self) -> Sequence[int]:
        return range(self.seeds) if isinstance(self.seeds, int) else self.seeds

    @property
    def runs(self) -> int:
        """The number of runs of the grid."""
        each = (prod(map(len, self.axes(name)[1].values())) for name in self.methods)
        return len(self.seed_list) * max(1, len(self.alpha)) * sum(each)

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
                if not value:
                    raise BadInput(f"sweep.method.{name}.{key} is empty; give at least one value")
                lists[key] = value
            else:
                lists.pop(key, None)
                fixed[key] = value
        return fixed, lists


def method_names(given: Sequence[str]) -> tuple[str, ...]:
    """The names of methods, with those of a set in the place of its name."""
    paper = {name.removesuffix("*") for name in PAPER_METHODS}
    extended = tuple(n for n, kind in METHODS.items() if kind in BUILT_IN and n not in paper)
    sets = {"paper": PAPER_METHODS, "extended": extended, "all": PAPER_METHODS + extended}
    return tuple(name for word in given for name in sets.get(word, (word,)))


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
        if not isinstance(scales, dict) or not all(isinstance(s, dict) for s in scales.values()):
            raise BadInput("scale must be sections: write [scale.NAME]")
        if scale is not None:
            if scale not in scales:
                raise unknown("scale", scale, scales)
            for key, value in _flat(scales[scale]):
                assign(values, key, value)
        return Plan.from_dict(merge_overrides(values, overrides))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Plan:
        base = copy.deepcopy(dict(values))
        section = base.pop("sweep", {})
        if not isinstance(section, dict):
            raise BadInput(f"sweep = {shown(section)} must be a section: write [sweep]")
        refuse_unknown(section, SweepSettings.__struct_fields__, "sweep")
        if isinstance(section.get("method"), dict):
            for name, options in section["method"].items():
                if not isinstance(options, dict):
                    where = f"sweep.method.{shown(name)} = {shown(options)}"
                    raise BadInput(f"{where} must be a section")
        try:
            settings = msgspec.convert(section, SweepSettings)
        except msgspec.ValidationError as error:
            raise located(error, section, "sweep") from None
        if "method" in base:
            raise BadInput("a sweep takes its methods from sweep.methods; remove [method]")
        for key, lists in (("lr", "sweep.lr"), ("seed", "sweep.seeds")):
            if isinstance(base.get("train"), dict) and key in base["train"]:
                raise BadInput(f"train.{key} means nothing in a sweep: give {lists} instead")
        if settings.runs > MOST_RUNS:
            raise BadInput(
                f"this sweep has {settings.runs:,} runs, more than {MOST_RUNS:,}; "
                "give fewer seeds or shorter lists"
            )
        first = Config.from_dict(base)
        return Plan(first.name, settings, first.select, list(_expand(first, settings)))


def federations(
    path: Path, overrides: Sequence[str] = (), scale: str | None = None
) -> tuple[bool, dict[str, Config]]:
    """Whether a file is a sweep, and one configuration for each federation, by name."""
    several = scale is not None or "sweep" in merge_overrides(read_toml(path), overrides)
    if not several:
        return False, {"partition": Config.load(path, overrides)}
    found = {cell.partition: cell for cell in reversed(Plan.load(path, overrides, scale).cells)}
    names = {
        f"partition-alpha-{kind.alpha:g}" if isinstance(kind, Dirichlet) else "partition": cell
        for kind, cell in reversed(found.items())
    }
    return True, names


def differences(cells: Sequence[Config]) -> list[dict[str, Any]]:
    """What distinguishes each run: method, knob, lr, alpha and seed, and other options of methods
    that are not the same in all runs."""
    options = [cell.to_dict()["method"] for cell in cells]
    seen: dict[str, set[str]] = {}
    for each in options:
        for key, value in each.items():
            seen.setdefault(key, set()).add(str(value))
    varying = [key for key in seen if key not in ("name", "exact") and len(seen[key]) > 1]
    rows = []
    for cell, each in zip(cells, options, strict=True):
        alpha = getattr(cell.partition, "alpha", None)
        keys = dict.fromkeys([cell.method.fairness_knob, *varying])
        rows.append({
            "run": fingerprint(cell)[:16], "method": cell.method.label,
            **{key: each[key] for key in keys if key in each}, "lr": cell.train.lr,
            **({} if alpha is None else {"alpha": alpha}), "seed": cell.train.seed,
        })  # fmt: skip
    return rows


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; `train.rounds` may be written with or without quotes."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _expand(first: Config, settings: SweepSettings) -> Iterator[Config]:
    """All runs, seeds outermost: an unfinished sweep then has complete grids for fewer seeds."""
    methods = {name: list(_method_axis(settings, name)) for name in settings.methods}
    partitions: list[Partition] = [first.partition]
    if settings.alpha:
        if not isinstance(first.partition, Dirichlet):
            raise BadInput("sweep.alpha needs a dirichlet partition; remove it or change "
                           "[partition]")  # fmt: skip
        partitions = [replace(first.partition, alpha=alpha) for alpha in settings.alpha]
    for seed, partition, name in itertools.product(
        settings.seed_list, partitions, settings.methods
    ):
        for method, lr in methods[name]:
            train = replace(first.train, lr=lr, seed=seed)
            yield replace(first, method=method, train=train, partition=partition)


def _method_axis(settings: SweepSettings, name: str) -> Iterator[tuple[Method, float]]:
    """Every configuration of one method with every learning rate."""
    fixed, lists = settings.axes(name)
    for values in itertools.product(*lists.values()):
        options = fixed | dict(zip(lists, values, strict=True))
        lr = options.pop("lr")
        yield Config.from_dict({"method": options}).method, lr
