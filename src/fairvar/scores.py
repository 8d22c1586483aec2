"""How good a model is for one client: a `Metric` makes one number from its outputs and targets.

`METRICS` holds the metrics by name. Their functions take lists, numpy arrays or torch tensors with
the samples first, and compute in float64. NaN says that a client's score is not defined, such as
the AUC of samples of one class; such clients count as not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairvar.errors import BadInput, cause, shown, unknown

Floats = NDArray[np.float64]
MISSING = "–"  # in tables: never measured
UNDEFINED = "undef."  # measured, but the formula ends in 0/0
Labels = NDArray[np.int64]
Numbers = ArrayLike | Any  # Any: a torch tensor; torch is not imported here
TITLES = {"auc": "AUC", "f1": "F1", "rmse": "RMSE", "r2": "R²"}
# Columns of tables and tables of a history; a metric of this name would take their place.
TAKEN = ("chosen", "corrected", "evaluated_loss", "interval", "noise_floor", "right", "seeds",
         "tried", "variance", "weight", "worst")  # fmt: skip
ROUNDING = 1e-6  # float32 sums may end a little outside the bounds


@dataclass(frozen=True)
class Metric:
    """function(outputs, targets) → one number, from all samples that a client has in a split.

    The function gets torch tensors with the samples first, on the device of the run, and gives a
    number or a tensor of one element; NaN where the score is not defined. `bounds` are the smallest
    and the largest score, such as (0, 1), which is shown in percent; None: it has no bounds. A
    plain function in place of a Metric is Metric(function): higher is better, without bounds.
    """

    # None: follows from the loss, or was read from a file. Metrics are equal by name and facts, so
    # that a stored history and its continuation can be joined and compared.
    function: Callable[[Any, Any], Any] | None = field(repr=False, compare=False)
    name: str = field(default="", kw_only=True)  # by default that of the function
    higher_is_better: bool = field(default=True, kw_only=True)
    bounds: tuple[float, float] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.function is not None and not callable(self.function):
            raise BadInput(
                f"metric = {shown(self.function)}: give a function of (outputs, targets)"
            )
        name = self.name or getattr(self.function, "__name__", "")
        if not (
            isinstance(name, str) and name.isidentifier() and name.isascii() and len(name) < 41
        ):
            raise BadInput(f"metric name {shown(name)}: give name=, of letters, digits and _, as "
                           'in Metric(function, name="my_score")')  # fmt: skip
        if not isinstance(self.higher_is_better, bool):
            raise BadInput(f"metric {name}: higher_is_better must be True or False")
        object.__setattr__(self, "name", name)
        if self.bounds is not None:
            object.__setattr__(self, "bounds", _checked_bounds(name, self.bounds))

    def __call__(self, outputs: Any, targets: Any) -> float:
        """The score of one client with at least one sample."""
        if self.function is None:
            raise BadInput(f"{self.name} follows from the loss of a run; it has no function")
        try:  # of copies: the targets are the federation's, and may be changed in place
            value = float(self.function(_copied(outputs), _copied(targets)))
        except Exception as error:
            shapes = " and ".join(str(tuple(np.shape(part))) for part in (outputs, targets))
            raise BadInput(
                f"metric {self.name} must give one number for outputs and targets of shapes "
                f"{shapes}: {cause(error)}"
            ) from error
        if self.bounds is not None and not math.isnan(value):
            low, high = self.bounds
            if not low - ROUNDING <= value <= high + ROUNDING:
                raise BadInput(f"metric {self.name} gives {value:g}, outside its bounds {low:g} … "
                               f"{high:g}; give other bounds, or None")  # fmt: skip
            value = min(max(value, low), high)
        return value

    @property
    def title(self) -> str:
        """In sentences, headings and axis labels."""
        return TITLES.get(self.name, self.name.replace("_", " "))

    @property
    def has_noise_floor(self) -> bool:
        """Whether chance alone adds a known amount to the variance: binomial, of right answers."""
        return self.name == "accuracy"

    @property
    def has_shares(self) -> bool:
        """Whether ratios of scores mean something, and so Gini and its relatives."""
        return self.bounds is not None and self.bounds[0] >= 0

    @property
    def sign(self) -> int:
        """Times the score: higher is better."""
        return 1 if self.higher_is_better else -1

    @property
    def factor(self) -> float:
        """Tables and figures show the score times this: in percent if it is a fraction."""
        return 100.0 if self.bounds == (0.0, 1.0) else 1.0

    @property
    def unit(self) -> str:
        return " %" if self.factor == 100 else ""

    @property
    def short(self) -> str:
        """In heads of narrow columns."""
        return "acc." if self.name == "accuracy" else self.title

    @property
    def in_variances(self) -> str:
        """The unit of a variance."""
        return "fraction² × 100" if self.factor == 100 else f"{self.title}²"

    @property
    def points(self) -> str:
        """The unit of a difference of scores."""
        return " (points)" if self.factor == 100 else ""

    @property
    def squared(self) -> str:
        """After "variance": what it is multiplied by where scores are shown in percent."""
        return " ×100" if self.factor == 100 else ""

    def worst_first(self, scores: Floats) -> Floats:
        """Sorted along the last axis."""
        rising = np.sort(scores)
        return rising if self.higher_is_better else rising[..., ::-1]


def _copied(values: Any) -> Any:
    return values.clone() if hasattr(values, "clone") else values


def _checked_bounds(name: str, bounds: Any) -> tuple[float, float]:
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise BadInput(
            f"metric {name}: bounds = {shown(bounds)}: give (smallest, largest), or None"
        )
    return low, high


def metric_of(given: object) -> Metric:
    """A metric: by name, by "package.module:attribute", as it is, or of a function, whose scores
    are then better the higher they are."""
    if isinstance(given, str) and given in METRICS:
        return METRICS[given]
    if isinstance(given, str) and ":" in given:
        given = _imported(given)
    if callable(given) and not isinstance(given, Metric):
        given = Metric(given)
    if isinstance(given, Metric):
        known = METRICS.get(given.name, given)
        if given.name in TAKEN or given != known or given.function is not known.function:
            raise BadInput(f"metric name {given.name!r} is taken; give the function another name")
        return given
    raise unknown("metric", given, [*METRICS, "a function", "package.module:metric"])


def _imported(text: str) -> object:
    module, _, attribute = text.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # the module is the user's code
        raise BadInput(f"metric {shown(text)} cannot be imported: {cause(error)}") from error


# -- functions -------------------------------------------------------------------------------------
def as_array(values: Numbers, name: str) -> Floats:
    """A list, numpy array or torch tensor in float64."""
    values = values.detach().cpu().numpy() if hasattr(values, "detach") else values
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise BadInput(f"{name} cannot be read as an array of numbers") from None


def _labelled(outputs: Numbers, targets: Numbers) -> tuple[Floats, Labels]:
    """By (label, class). A sequence has several labels per sample, those below 0 are none."""
    z, y = as_array(outputs, "outputs"), as_array(targets, "targets")
    if z.ndim < 2 or y.shape != z.shape[:-1]:
        raise BadInput(
            f"outputs {z.shape} and targets {y.shape}: give the classes as last axis of the outputs"
        )
    z, y = z.reshape(-1, z.shape[-1]), y.reshape(-1)
    return (z, y.astype(np.int64)) if (y >= 0).all() else (z[y >= 0], y[y >= 0].astype(np.int64))


def _numbers(outputs: Numbers, targets: Numbers) -> tuple[Floats, Floats]:
    """Both by (sample, output)."""
    z, y = as_array(outputs, "outputs"), as_array(targets, "targets")
    if z.shape[:1] != y.shape[:1] or z.size != y.size:
        raise BadInput(f"outputs {z.shape} and targets {y.shape}: give equally many")
    return z.reshape(len(y), -1), y.reshape(len(y), -1)


def accuracy(outputs: Numbers, targets: Numbers) -> float:
    """The share of samples whose label has the largest output."""
    z, y = _labelled(outputs, targets)
    return float((z.argmax(1) == y).mean())


def balanced_accuracy(outputs: Numbers, targets: Numbers) -> float:
    """The mean over the client's classes of the share of their samples that are right."""
    z, y = _labelled(outputs, targets)
    right = z.argmax(1) == y
    return float(np.mean([right[y == label].mean() for label in np.unique(y)]))


def f1(outputs: Numbers, targets: Numbers) -> float:
    """The mean of 2 TP / (2 TP + FP + FN) over the classes that occur or are predicted."""
    z, y = _labelled(outputs, targets)
    found = z.argmax(1)
    both = [(found == label, y == label) for label in np.union1d(found, y)]
    return float(np.mean([2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in both]))


def auc(outputs: Numbers, targets: Numbers) -> float:
    """The area under the ROC curve of each of the client's classes against its others, averaged
    over these classes. Samples are ranked by the probability of the class, the softmax of the
    outputs. NaN if the client has one class only, or outputs that are not finite."""
    z, y = _labelled(outputs, targets)
    with np.errstate(invalid="ignore"):  # of infinite outputs
        z = z - z.max(1, keepdims=True)
        # Logarithms, which tie less often than probabilities near 1; rounded, so that numbers tie
        # that are equal but for rounding.
        logarithm = np.round(z - np.log(np.exp(z).sum(1, keepdims=True)), 12)
    labels = np.unique(y)
    if len(labels) < 2 or np.isnan(logarithm).any():
        return math.nan
    return float(np.mean([_area(logarithm[:, label], y == label) for label in labels]))


def _area(value: Floats, positive: NDArray[np.bool_]) -> float:
    """The share of pairs (positive, negative) in the right order; a tie counts half."""
    _, place, times = np.unique(value, return_inverse=True, return_counts=True)
    rank = (np.cumsum(times) - (times - 1) / 2)[place]
    m = int(positive.sum())
    return float((rank[positive].sum() - m * (m + 1) / 2) / (m * (len(value) - m)))


def rmse(outputs: Numbers, targets: Numbers) -> float:
    """√ of the mean squared error; the mean over the outputs if there are several."""
    z, y = _numbers(outputs, targets)
    return float(np.sqrt(np.square(z - y).mean(0)).mean())


def r2(outputs: Numbers, targets: Numbers) -> float:
    """1 − Σ (output − target)² / Σ (target − mean)², averaged over the outputs whose targets
    differ; NaN if a client's targets are all the same."""
    z, y = _numbers(outputs, targets)
    differ = (y != y[0]).any(0)
    total = np.square(y - y.mean(0)).sum(0)[differ]
    return float((1 - np.square(z - y).sum(0)[differ] / total).mean()) if differ.any() else math.nan


FRACTION = (0.0, 1.0)
METRICS = {
    metric.name: metric
    for metric in (
        *(Metric(f, higher_is_better=True, bounds=FRACTION)
          for f in (accuracy, balanced_accuracy, auc, f1)),
        Metric(rmse, higher_is_better=False),
        Metric(r2, higher_is_better=True),
        Metric(None, name="loss", higher_is_better=False),
        Metric(None, name="perplexity", higher_is_better=False),
    )
}  # fmt: skip
ACCURACY, LOSS = METRICS["accuracy"], METRICS["loss"]
OF_LABELS, OF_NUMBERS = ("accuracy", "balanced_accuracy", "auc", "f1"), ("rmse", "r2")


def metric_facts(metric: Metric) -> dict[str, Any]:
    """For a manifest; nothing for the accuracy, as in manifests of earlier versions."""
    if metric == ACCURACY:
        return {}
    bounds = None if metric.bounds is None else list(metric.bounds)
    facts = {"name": metric.name, "higher_is_better": metric.higher_is_better, "bounds": bounds}
    return {"metric": facts}


def recorded_metric(facts: Mapping[str, Any]) -> Metric | None:
    """The metric that a manifest names, if it names one."""
    found = facts.get("metric")
    if found is None or found["name"] in METRICS:
        return found and METRICS[found["name"]]
    better, bounds = found["higher_is_better"], found.get("bounds")
    return Metric(None, name=found["name"], higher_is_better=better, bounds=bounds)
