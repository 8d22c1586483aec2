"""`Plan`: a sweep file expanded into single configurations.

A sweep file is a configuration with two more sections. `[sweep]` holds the lists to combine.
`[scale.NAME]` holds overrides, such as `"train.rounds" = 100`, for a cheaper or larger sweep of the
same form (`--scale NAME`).
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec.structs import replace

from fairvar.common.validation import Checked, Count, NonNegative, Positive
from fairvar.data import Dirichlet
from fairvar.engine.keys import PLACES, fingerprint, swept
from fairvar.errors import BadInput, shown, unknown
from fairvar.methods import BUILT_IN, METHODS, Method
from fairvar.runs import own
from fairvar.runs.config import (
    Config,
    assign,
    flat,
    folder_of,
    located,
    merge_overrides,
    read_toml,
    read_values,
    refuse_unknown,
)
from fairvar.runs.own import find_method
from fairvar.runs.select import Criterion

PAPER_METHODS = ("fedavg", "afl", "qffl", "aaggff", "fairloss", "fairloss*", "fairgrad",
                 "fairgrad*")  # fmt: skip
SETS = ("paper", "extended", "all")
MOST_RUNS = 100_000
INSTEAD = {
    "train.lr": "sweep.lr", "train.seed": "sweep.seeds", "method.name": "sweep.methods",
}  # fmt: skip
Options = dict[str, Any]


class SweepSettings(Checked, frozen=True, kw_only=True):
    """The lists of a grid. Each method uses those that it has. A star marks the exact variant
    ("fairgrad*"). Among `methods`, "paper" stands for the paper's eight, "extended" for all further
    ones, and "all" for both. In `grid`, `"method.KEY"` is for the methods that have this option."""

    __where__: ClassVar[str | None] = "sweep"

    methods: tuple[str, ...] = PAPER_METHODS  # or "paper", "extended", "all"
    seeds: Count | tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = 5  # how many, or which
    lr: tuple[Positive, ...] = (0.1,)  # learning rates, for all methods
    strength: tuple[NonNegative, ...] = (0.1,)  # λ of FairLoss, γ of FairGrad, q of q-FFL
    step: tuple[Positive, ...] = (0.1,)  # of AFL
    cdf: tuple[str, ...] = ("logistic",)  # of AAggFF
    alpha: tuple[Positive, ...] = ()  # partitions; by default that of [partition]
    # [sweep.method.NAME] has other lists, or fixed options, for one method.
    method: dict[str, Options] = msgspec.field(default_factory=dict)
    # [sweep.grid] has lists for any other key.
    grid: dict[str, list[Any]] = msgspec.field(default_factory=dict)

    def check(self) -> None:
        names = method_names(self.methods)
        msgspec.structs.force_setattr(self, "methods", names)
        for name in (*names, *self.method):
            if not find_method(name.removesuffix("*")):
                raise unknown("sweep method", name, (*SETS, *METHODS))
            if name.endswith("*") and not self._has(name, "method.exact"):
                raise BadInput(f"sweep.methods: {name[:-1]} has no exact variant; leave the * out")
        for name in ("methods", "seeds", "lr", "strength", "step", "cdf", "alpha"):
            values = getattr(self, name)
            if isinstance(values, tuple) and (values or name != "alpha"):
                _check_list(f"sweep.{name}", values)
        for key, values in self.grid.items():
            self._check_grid(key, values)
        if self.alpha and {"partition", "partition.name", "partition.alpha"} & self.grid.keys():
            raise BadInput("sweep.alpha and sweep.grid both have the partition; give one of them")

    def _check_grid(self, key: str, values: list[Any]) -> None:
        if key in INSTEAD:
            raise BadInput(f"sweep.grid.{key}: give {INSTEAD[key]} instead")
        if key in PLACES or key.partition(".")[0] in ("select", "name"):
            raise BadInput(f"sweep.grid.{key}: it changes no result, so that all runs are the same")
        if key in ("train", "method"):
            raise BadInput(f"sweep.grid.{key}: give single keys, such as {key}.momentum")
        _check_list(f"sweep.grid.{key}", values)
        if key.startswith("method.") and not any(self._has(name, key) for name in self.methods):
            raise BadInput(f"unknown key {key} in sweep.grid: no method of this sweep has it")

    @staticmethod
    def _has(method: str, key: str) -> bool:
        kind = METHODS[method.removesuffix("*")]
        return key.removeprefix("method.") in kind.__struct_fields__

    @property
    def settings(self) -> dict[str, list[Any]]:
        """The lists of `grid` that do not belong to methods."""
        return {k: v for k, v in self.grid.items() if not k.startswith("method.")}

    @property
    def seed_list(self) -> Sequence[int]:
        return range(self.seeds) if isinstance(self.seeds, int) else self.seeds

    @property
    def runs(self) -> int:
        """The number of runs of the grid."""
        each = (prod(map(len, self.axes(name)[1].values())) for name in self.methods)
        settings = prod(map(len, self.settings.values()))
        return len(self.seed_list) * max(1, len(self.alpha)) * settings * sum(each)

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
        for key, value in self.grid.items():
            if key.startswith("method.") and self._has(name, key):
                lists[key.removeprefix("method.")] = value
        for key, value in self.method.get(name, {}).items():
            if isinstance(value, list):
                _check_list(f"sweep.method.{name}.{key}", value)
                lists[key] = value
            else:
                lists.pop(key, None)
                fixed[key] = value
        return fixed, lists


def _check_list(where: str, values: Sequence[Any]) -> None:
    if not values:
        raise BadInput(f"{where} is empty; give at least one value")
    if len({repr(value) for value in values}) < len(values):
        raise BadInput(f"{where} = {shown(list(values))} has a value twice")


def method_names(given: Sequence[str]) -> tuple[str, ...]:
    """The names of methods, with those of a set in the place of its name."""
    paper = {name.removesuffix("*") for name in PAPER_METHODS}
    extended = tuple(n for n, kind in METHODS.items() if kind in BUILT_IN and n not in paper)
    sets = {"paper": PAPER_METHODS, "extended": extended, "all": PAPER_METHODS + extended}
    return tuple(name for word in given for name in sets.get(word, (word,)))


def _refuse_methods_with_options(given: Any) -> None:
    """A method object, `fv.FairGrad(0.1)`, is its section here, with its name."""
    for each in given if isinstance(given, list) else [given]:
        if isinstance(each, dict) and isinstance(each.get("name"), str):
            name = each["name"] + ("*" if each.get("exact") is True else "")
            raise BadInput(
                f"sweep.methods takes a list of names, such as [{shown(name)}]; options go to "
                "sweep.method.NAME, each as one value or a list, such as strength = [0.1, 1.0]"
            )


@dataclass(frozen=True)
class Plan:
    """All runs of a sweep, in the order in which they are computed."""

    name: str
    settings: SweepSettings
    criterion: Criterion
    cells: Sequence[Config]

    @staticmethod
    def load(
        source: Plan | Mapping[str, Any] | Path | str,
        overrides: Sequence[str] = (),
        scale: str | None = None,
    ) -> Plan:
        """A TOML file or a dict, with the overrides of one of its scales, then those given."""
        if isinstance(source, Plan):
            if overrides or scale:
                raise BadInput("a Plan is finished: give overrides and scale with its file or dict")
            return source
        values = read_values(source)
        scales = values.pop("scale", {})
        if not isinstance(scales, dict) or not all(isinstance(s, dict) for s in scales.values()):
            raise BadInput("scale must be sections: write [scale.NAME]")
        if scale is not None:
            if scale not in scales:
                raise unknown("scale", scale, scales)
            for key, value in flat(scales[scale]):
                assign(values, key, value)
        values = merge_overrides(values, overrides)
        if "sweep" not in values:
            raise BadInput(
                "there is no section [sweep]: add one, such as sweep.methods = "
                "['fedavg', 'fairgrad'], or use `fairvar run` for a single run"
            )
        own.load_plugins(values, folder_of(source))
        if values.get("method") == {}:
            del values["method"]
        plan = Plan.from_dict(values)
        named = (name for cell in plan.cells for name in cell.functions)
        own.load_functions(named, folder_of(source))
        return plan

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Plan:
        base = copy.deepcopy(dict(values))
        section = base.pop("sweep", {})
        if not isinstance(section, dict):
            raise BadInput(f"sweep = {shown(section)} must be a section: write [sweep]")
        refuse_unknown(section, SweepSettings.__struct_fields__, "sweep")
        if isinstance(section.get("grid"), dict):
            section["grid"] = dict(flat(section["grid"]))
            for key, values in section["grid"].items():
                if not isinstance(values, list):
                    raise BadInput(f"sweep.grid.{key} = {shown(values)}: give a list of values")
        if isinstance(section.get("method"), dict):
            for name, options in section["method"].items():
                if not isinstance(options, dict):
                    where = f"sweep.method.{shown(name)} = {shown(options)}"
                    raise BadInput(f"{where} must be a section")
        _refuse_methods_with_options(section.get("methods"))
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
        try:
            firsts = [Config.from_dict(values) for values in _combined(base, settings.settings)]
        except BadInput as error:
            if "partition.name" not in settings.grid:
                raise
            # A name drops the options of the former one.
            raise BadInput(
                f"{error}; with options, give whole sections: sweep.grid.partition = "
                '[{name = "iid"}, {name = "dirichlet", alpha = 0.1}]'
            ) from None
        cells = list(_expand(firsts, settings))
        return Plan(firsts[0].name, settings, firsts[0].select, cells)


def federations(
    path: Path, overrides: Sequence[str] = (), scale: str | None = None
) -> tuple[bool, dict[str, Config]]:
    """Whether a file is a sweep, and one configuration for each federation, by name."""
    several = scale is not None or "sweep" in merge_overrides(read_toml(path), overrides)
    if not several:
        return False, {"partition": Config.load(path, overrides)}
    cells = Plan.load(path, overrides, scale).cells
    found = {(cell.data, cell.partition): cell for cell in reversed(cells)}
    names: dict[str, Config] = {}
    for (_, kind), cell in reversed(found.items()):
        name = f"partition-alpha-{kind.alpha:g}" if isinstance(kind, Dirichlet) else "partition"
        same = [n for n in names if n == name or n.startswith(f"{name}-data-")]
        names[f"{name}-data-{len(same) + 1}" if same else name] = cell
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
            **({} if alpha is None else {"alpha": alpha}), **swept(cell), **swept(cell, apart=True),
            "seed": cell.train.seed,
        })  # fmt: skip
    return rows


def _combined(base: Options, lists: Mapping[str, list[Any]]) -> Iterator[Options]:
    """The values of a file with every combination of the values of further keys. Reports need the
    names of these (`select.over`)."""
    for values in itertools.product(*lists.values()):
        found = copy.deepcopy(base)
        if any(key.startswith("partition.") for key in lists):
            found.setdefault("partition", msgspec.to_builtins(Config().partition))
        # A name first: it drops the other options.
        for key, value in sorted(zip(lists, values, strict=True), key=_is_option):
            assign(found, key, value)
        if lists:
            assign(found, "select.over", list(lists))
        yield found


def _is_option(assigned: tuple[str, Any]) -> bool:
    return not assigned[0].endswith(".name")


def _expand(firsts: Sequence[Config], settings: SweepSettings) -> Iterator[Config]:
    """All runs, seeds outermost: an unfinished sweep then has complete grids for fewer seeds."""
    methods = {name: list(_method_axis(settings, name)) for name in settings.methods}
    if settings.alpha:
        if not isinstance(firsts[0].partition, Dirichlet):
            raise BadInput("sweep.alpha needs a dirichlet partition; remove it or change "
                           "[partition]")  # fmt: skip
        firsts = [
            replace(first, partition=replace(first.partition, alpha=alpha))
            for alpha in settings.alpha
            for first in firsts
        ]
    for seed, first, name in itertools.product(settings.seed_list, firsts, settings.methods):
        for method, lr in methods[name]:
            yield replace(first, method=method, train=replace(first.train, lr=lr, seed=seed))


def _method_axis(settings: SweepSettings, name: str) -> Iterator[tuple[Method, float]]:
    """Every configuration of one method with every learning rate."""
    fixed, lists = settings.axes(name)
    for values in itertools.product(*lists.values()):
        options = fixed | dict(zip(lists, values, strict=True))
        lr = options.pop("lr")
        try:
            method = Config.from_dict({"method": options}).method
        except BadInput as error:
            where = f"sweep.method.{json.dumps(name) if name.endswith('*') else name}"
            own = "" if name in settings.method else f"; {where} has lists for this method alone"
            raise BadInput(f"{name}: {error}{own}") from None
        yield method, lr
