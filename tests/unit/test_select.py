"""Choosing on validation data: the rule, its ties, divergence, and that test data has no say."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from fairvar.data.builtin import logistic
from fairvar.data.federation import Federation
from fairvar.engine.history import History
from fairvar.engine.train import train
from fairvar.errors import BadInput
from fairvar.methods import AFL, FairLoss, FedAvg, FedMGDA, FedProx, Method
from fairvar.report.result_tables import result_table
from fairvar.report.table import render
from fairvar.runs.select import Choice, Criterion, Curve, Validation, best
from fairvar.runs.trials import Result, Trial, choose, with_varied

SEEDS, ROUNDS, CLIENTS = 3, 4, 6
NOTHING = Choice(0, -1, -math.inf)


def accuracies(seed: int, seeds: int = SEEDS) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, 1, (seeds, ROUNDS, CLIENTS))


def candidate(accuracy: np.ndarray | None, strength: float = 0.0) -> Validation:
    curve = None if accuracy is None else Curve.of(accuracy)
    return Validation(
        range(1, ROUNDS + 1), curve, SEEDS if accuracy is None else len(accuracy), strength
    )


def scores(accuracy: np.ndarray, criterion: Criterion | None = None) -> np.ndarray:
    return (criterion or Criterion()).score(Curve.of(accuracy), len(accuracy))


def flat(*rounds: tuple[float, float]) -> np.ndarray:
    """One seed; each round has a mean and half the clients this far above, half below."""
    sign = np.resize([1.0, -1.0], CLIENTS)
    return np.array([[mean + spread * sign for mean, spread in rounds]])


def test_score_is_the_papers_formula() -> None:
    accuracy = accuracies(0)
    expected = []
    for r in range(ROUNDS):
        means = [accuracy[s, r].mean() for s in range(SEEDS)]
        variances = [((accuracy[s, r] - means[s]) ** 2).sum() / (CLIENTS - 1) for s in range(SEEDS)]
        expected.append(np.mean(means) - 1.96 * math.sqrt(np.mean(variances) / SEEDS))
    np.testing.assert_allclose(scores(accuracy), expected, rtol=1e-12)
    other = scores(accuracy, Criterion(t=1.96, m=12))
    gap = accuracy.mean((0, 2)) - np.array(expected)
    np.testing.assert_allclose(other, accuracy.mean((0, 2)) - gap / 2, rtol=1e-12)


def test_mixed_unit_is_percent_with_variance_x100() -> None:
    """√(100 v) in percent is a tenth of √v in fractions."""
    accuracy = accuracies(1)
    percent = 100 * accuracy.mean((0, 2))
    x100 = 100 * accuracy.var(2, ddof=1).mean(0)
    expected = (percent - 1.96 * np.sqrt(x100 / SEEDS)) / 100
    np.testing.assert_allclose(scores(accuracy, Criterion(unit="mixed")), expected, rtol=1e-12)


def test_clients_without_validation_samples_do_not_count() -> None:
    accuracy = accuracies(2)
    padded = np.concatenate([accuracy, np.full((SEEDS, ROUNDS, 2), np.nan)], axis=2)
    np.testing.assert_array_equal(scores(padded), scores(accuracy))


def test_the_best_is_the_highest_score_by_brute_force() -> None:
    for seed in range(50):
        tables = [accuracies(100 * seed + i) for i in range(5)]
        found = best([candidate(t) for t in tables], Criterion())
        every = np.array([scores(t) for t in tables])
        assert (found.number, found.at) == np.unravel_index(every.argmax(), every.shape)
        assert found.score == every.max()


def test_ties_lower_variance_then_strength_then_round() -> None:
    none = Criterion(t=0.0)  # the score is the mean: ties can be made
    spread, calm = flat((0.5, 0.25)), flat((0.5, 0.125))
    assert best([candidate(spread), candidate(calm)], none).number == 1
    assert best([candidate(calm), candidate(spread)], none).number == 0
    assert best([candidate(calm, 0.2), candidate(calm, 0.1)], none).number == 1
    assert best([candidate(spread, 0.0), candidate(calm, 9.0)], none).number == 1
    twice = flat((0.25, 0.0), (0.5, 0.125), (0.5, 0.125), (0.5, 0.25))
    assert best([candidate(twice)], none).at == 1
    assert best([candidate(twice, 0.2), candidate(twice, 0.1)], none)[:2] == (1, 1)
    assert best([candidate(calm), candidate(calm)], none).number == 0
    early, late = (Validation([at], Curve.of(calm), 1) for at in (5, 3))
    assert best([early, late], none).number == 1


def test_diverged_configurations_are_never_chosen() -> None:
    bad = np.zeros((SEEDS, ROUNDS, CLIENTS))
    for seed in range(20):
        draw = random.Random(seed)
        diverged = [draw.random() < 0.5 for _ in range(6)]
        options = [candidate(None if d else bad) for d in diverged]
        found = best(options, Criterion())
        assert found == NOTHING if all(diverged) else not diverged[found.number]
    assert best([candidate(None)] * 3, Criterion()) == NOTHING
    assert best([Validation([], Curve.of(np.zeros((2, 0, 3))), 2)], Criterion()) == NOTHING
    nan = candidate(np.full((SEEDS, ROUNDS, CLIENTS), np.nan))
    assert best([nan, candidate(bad)], Criterion()).number == 1


def test_a_single_client_has_no_spread_to_be_penalised_for() -> None:
    """Its variance is undefined: the mean decides, then the strength."""
    alone = np.full((SEEDS, ROUNDS, CLIENTS), np.nan)
    alone[:, :, 2] = [0.5, 0.75, 0.75, 0.25]
    np.testing.assert_array_equal(scores(alone), [0.5, 0.75, 0.75, 0.25])
    assert np.isnan(Curve.of(alone).variance).all()
    assert best([candidate(alone, 0.2), candidate(alone, 0.1)], Criterion())[:2] == (1, 1)


def test_nothing_to_choose_from_is_said() -> None:
    with pytest.raises(BadInput, match="nothing to choose from"):
        best([], Criterion())


def test_selection_cannot_see_test_data() -> None:
    """By construction: there is no field that could hold it, and the trial fills only these."""
    assert {f.name for f in dataclasses.fields(Validation)} == {
        "rounds", "curve", "seeds", "strength"
    }  # fmt: skip


@pytest.fixture(scope="module")
def histories() -> list[History]:
    """A few trained histories as templates: their tables are replaced below."""
    return [train("multinomial", logistic(CLIENTS), FedAvg(), ROUNDS, evaluate_every=1)]


def random_trials(template: History, draw: np.random.Generator) -> list[Trial]:
    """A sweep's worth: three methods, several configurations, some of them diverged."""
    methods: list[Method] = [FedAvg(), AFL(step=0.1), AFL(step=1.0)]
    methods += [FairLoss(strength=s) for s in (0.1, 0.5, 1.0)]
    trials = []
    for method in methods:
        for lr in (0.1, 0.5):
            made = []
            diverged = 2 if draw.random() < 0.2 else None
            for _ in range(SEEDS):
                # Few distinct values, so that ties happen and are broken, too.
                tables = {
                    key: torch.from_numpy(draw.integers(0, 4, table.shape) / 4)
                    for key, table in template.accuracy.items()
                }
                changes = {"accuracy": tables, "method": method, "diverged_at": diverged}
                made.append(dataclasses.replace(template, **changes))
            trials.append(Trial(method, lr, made))
    return trials


def poisoned(trial: Trial, kind: str, draw: np.random.Generator) -> Trial:
    """The same trial with other test numbers: shuffled, replaced, or missing."""
    made = []
    for history in trial.histories:
        tables = dict(history.accuracy)
        for model in ("global", "local"):
            table = tables["test", model].numpy()
            tables["test", model] = torch.from_numpy(
                {
                    "shuffled": draw.permutation(table.ravel()).reshape(table.shape),
                    "opposite": 1 - table,
                    "nan": np.full(table.shape, np.nan),
                }[kind]
            )
        if kind == "nan":
            for model in ("global", "local"):
                del tables["test", model]
        made.append(dataclasses.replace(history, accuracy=tables))
    return Trial(trial.method, trial.lr, made)


@pytest.mark.parametrize("kind", ["shuffled", "opposite", "nan"])
@pytest.mark.parametrize("model", ["global", "local"])
def test_poisoned_test_numbers_change_no_choice(kind, model, histories) -> None:
    """For 20 random sweeps: the same configuration and the same round for every method."""
    for seed in range(20):
        draw = np.random.default_rng(seed)
        trials = random_trials(histories[0], draw)
        other = [poisoned(t, kind, draw) for t in trials]
        criterion = Criterion(model=model)
        before, after = choose(trials, criterion), choose(other, criterion)
        chosen = [(trials.index(r.trial), r.at) for r in before]
        assert chosen == [(other.index(r.trial), r.at) for r in after]
        assert len(chosen) == 3


def relabelled(federation: Federation, draw: np.random.Generator) -> Federation:
    """All test labels replaced by random ones."""
    split = federation.splits["test"]
    labels = torch.from_numpy(draw.integers(0, 2, tuple(split.y.shape)))
    poison = dataclasses.replace(split, y=labels.to(split.y.dtype))
    return dataclasses.replace(federation, test=poison)


def test_the_label_names_every_option_that_the_sweep_varied() -> None:
    methods = [FedMGDA(step=0.5), FedMGDA(step=1.0), FedProx(0.0), FedProx(0.1), FedAvg(),
               FedAvg()]  # fmt: skip
    trials = with_varied([Trial(method, 0.1, []) for method in methods])
    assert [trial.describe() for trial in trials] == [
        "lr 0.1, eps 0.1, step 0.5", "lr 0.1, eps 0.1, step 1", "lr 0.1, pull 0",
        "lr 0.1, pull 0.1", "lr 0.1", "lr 0.1",
    ]  # fmt: skip


def test_poisoned_test_labels_change_no_choice() -> None:
    """The whole way from labels to the chosen round, with trainings that see the poisoned data."""
    for seed in range(3):
        clean = logistic(CLIENTS, seed=seed)
        dirty = relabelled(clean, np.random.default_rng(seed))
        chosen = []
        for data in (clean, dirty):
            trials = [
                Trial(method, lr, [train("multinomial", data, method, 4, lr, seed=s,
                                         evaluate_every=1) for s in range(2)])
                for method in (FedAvg(), AFL()) for lr in (0.1, 1.0)
            ]  # fmt: skip
            results = choose(trials, Criterion())
            chosen.append([(r.trial.describe(r.at), r.label) for r in results])
            tested = [h.accuracy["test", "global"] for t in trials for h in t.histories]
            chosen[-1].append(("test mean differs", str(float(torch.stack(tested).mean()))))
        assert chosen[0][:-1] == chosen[1][:-1]
        assert chosen[0][-1] != chosen[1][-1]  # the poison did reach the test numbers


def test_all_diverged_is_div_in_every_table(histories) -> None:
    gone = [dataclasses.replace(histories[0], diverged_at=1)] * SEEDS
    fine = [histories[0]] * SEEDS
    results = choose([Trial(AFL(), 9.0, gone), Trial(FedAvg(), 0.1, fine)], Criterion())
    assert [r.at is None for r in results] == [True, False]
    table = result_table(results, "t")
    assert table.rows[0].cells["accuracy"] == "div."
    for kind in ("markdown", "latex", "csv", "terminal"):
        assert "div." in render(table, kind)
    only = result_table(choose([Trial(AFL(), 9.0, gone)], Criterion()), "t")
    assert only.rows[0].cells["chosen"] == "all diverged"


def test_one_diverged_seed_rules_a_configuration_out(histories) -> None:
    """A mean over the seeds that happened to survive would be a biased one."""
    mixed = [dataclasses.replace(histories[0], diverged_at=2), histories[0], histories[0]]
    trials = [Trial(FedAvg(), 0.1, mixed), Trial(FedAvg(), 0.2, [histories[0]] * 3)]
    (result,) = choose(trials, Criterion())
    assert result.trial.lr == 0.2
    assert result.configurations == 2


def test_the_window_is_an_eighth_of_the_run_on_either_side(histories) -> None:
    """Sixteen evaluated rounds, the ninth chosen: rounds 7 to 11 count."""
    accuracy = np.random.default_rng(0).uniform(0, 1, (2, 16, CLIENTS))
    made = [
        dataclasses.replace(
            histories[0], evaluated=torch.arange(1, 17),
            update_norm=torch.zeros(16, CLIENTS).double(),
            gradient_variance=torch.zeros(16).double(), evaluated_loss={},
            accuracy={(s, "global"): torch.from_numpy(table) for s in ("valid", "test")},
        )
        for table in accuracy
    ]  # fmt: skip
    means, variances = Result(Trial(FedAvg(), 0.1, made), 8, 1).window("global")
    np.testing.assert_allclose(means, accuracy[:, 6:11].mean((1, 2)))
    np.testing.assert_allclose(variances, accuracy[:, 6:11].var(2, ddof=1).mean(1))
