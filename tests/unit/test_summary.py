"""The summary of a report: sentences from paired intervals, with the federations they are about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jaxtyping import config

from fairvar.report import summary
from fairvar.report.paired import Difference, Paired
from fairvar.scores import ACCURACY

UP, DOWN, NOISE = (
    Difference(0.02, 0.01, 0.03),
    Difference(-0.02, -0.03, -0.01),
    Difference(0, -1, 1),
)


def pair(accuracy: Difference = NOISE, variance: Difference = NOISE) -> Paired:
    return Paired(accuracy, variance, variance, np.zeros(2), np.zeros(2), NOISE)


def group(
    alpha: float | None, found: dict[str, Paired | None], seeds: int = 3, **passport: Any
) -> Any:
    """A stand-in for `Group` whose comparisons are known; a method with None diverged."""
    names = ["FedAvg", *found]
    results = [
        SimpleNamespace(label=name, at=None if name != "FedAvg" and found[name] is None else 0,
                        both=found.get(name), reported=lambda model: model,
                        seed_scores=lambda model, n=i: np.array([[0.8, 0.6 + n / 10]]))
        for i, name in enumerate(names)
    ]  # fmt: skip
    return SimpleNamespace(
        alpha=alpha, results=results, source="data", dataset="data", data="", metric=ACCURACY,
        kind=[], passport=passport,
        provenances=[{"seed": seed} for seed in range(seeds)],
        criterion=SimpleNamespace(model="global"), config=SimpleNamespace(protocol="boxes"),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def known(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config.update("jaxtyping_disable", True)  # stand-ins are not of the declared types
    monkeypatch.setattr(summary, "paired", lambda a, b, model, late: a.both)


def said(*groups: Any) -> list[str]:
    found = summary.summarise(groups)
    assert next(iter(found)) == "data, protocol boxes, the global model"
    return next(iter(found.values()))


def test_methods_are_told_with_their_federations() -> None:
    even = pair(variance=DOWN)
    sentences = said(
        group(0.05, {"AFL": even, "q-FFL": even, "TERM": pair()}),
        group(0.1, {"AFL": even, "q-FFL": even, "TERM": pair()}),
        group(0.5, {"AFL": pair(), "q-FFL": pair(), "TERM": pair(accuracy=DOWN, variance=UP)}),
    )
    assert sentences == [
        "No method is clearly ahead of FedAvg in mean accuracy.",
        "TERM is clearly behind FedAvg in mean accuracy at α = 0.5.",
        "AFL and q-FFL are clearly more even than FedAvg at α ≤ 0.1.",
        "TERM is clearly less even than FedAvg at α = 0.5.",
    ]


def test_a_single_federation_shows_sizes() -> None:
    (first, second) = said(group(None, {"AFL": pair(accuracy=UP)}))
    assert (
        second == "AFL (+2.00) is clearly ahead of FedAvg in mean accuracy (in brackets: points)."
    )
    assert first == "No method is clearly more or less even than FedAvg."


def test_nothing_clear_one_seed_and_divergence_are_said() -> None:
    sentences = said(group(0.1, {"AFL": pair(), "TERM": None}, seeds=1))
    assert sentences[0].startswith("One seed only")
    assert sentences[1].startswith("No method seems to differ from FedAvg")
    assert sentences[2] == "All runs of TERM diverged."


def test_without_a_comparison() -> None:
    found = summary.summarise([group(0.1, {})])
    assert found == {
        "data, protocol boxes, the global model":
        ["There are no two methods, one of them FedAvg, to compare."]
    }  # fmt: skip


def test_methods_that_are_reported_by_personal_models_are_named() -> None:
    both = group(0.1, {"AFL": pair(), "Ditto": pair(accuracy=UP)})
    both.results[2].reported = lambda model: "personal"
    (name, sentences), _ = summary.summarise([both, both]).items()
    assert name == "data, protocol boxes, the global model (Ditto: personal)"
    assert sentences[1].startswith("Ditto is clearly ahead of FedAvg in mean accuracy")


def test_clients_that_are_different_by_nature() -> None:
    sentences = said(group(None, {"AFL": pair(variance=DOWN)}, special=[1]))
    assert sentences[-1] == (
        "The 1 clients that are different by nature have 70.0 % with AFL and 60.0 % with FedAvg, "
        "the others 80.0 % and 80.0 %."
    )


def test_how_many_intervals_would_be_clear_by_chance() -> None:
    (sentence,) = summary.summarise([group(0.1, {"AFL": pair(variance=DOWN)})])["How sure"]
    assert "Of the 3 intervals behind these sentences 1 excludes zero." in sentence
    assert "about one in twenty, here 1, would do so by chance" in sentence


def test_few_seeds_are_never_clear() -> None:
    found = summary.summarise([group(0.1, {"AFL": pair(UP), "TERM": pair(UP, DOWN)}, seeds=2)])
    sentences, (sure,) = found.values()
    assert "AFL (+2.00) and TERM (+2.00) seem ahead of FedAvg" in sentences[1]
    assert "TERM (-2.000) seems more even than FedAvg" in sentences[2]
    assert "clearly" not in " ".join([*sentences, sure]).lower()
