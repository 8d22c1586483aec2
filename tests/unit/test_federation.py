"""`Federation.from_arrays` is the door: every kind of wrong data ends in one line there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fairvar.data.federation import Federation
from fairvar.errors import BadInput


def pair(samples: int = 3, features: int = 2) -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(samples * features, dtype=np.float32).reshape(samples, features)
    return x, np.arange(samples) % 2


def with_bad(value: float) -> np.ndarray:
    x = pair()[0]
    x[1, 0] = value
    return x


X, Y = pair()
WRONG = {
    "no client": ({"train": []}, "no client"),
    "lengths": ({"train": [(X, Y), (X, Y[:2])]}, "train, client 1: 3 samples but 2 targets"),
    "NaN": ({"train": [(X, Y), (with_bad(np.nan), Y)]}, "client 1: x holds NaN.* sample 1"),
    "infinity": ({"train": [(with_bad(np.inf), Y)]}, "client 0: x holds NaN or inf.* sample 1"),
    "NaN target": (
        {"train": [(X, np.array([0.5, np.nan, 1.0]))]}, "client 0: y holds NaN.* sample 1"),
    "NaN in test": ({"train": [(X, Y)], "test": [(with_bad(np.nan), Y)]}, "^test, client 0"),
    "label too large": (
        {"train": [(X, Y), (X, Y + 4)], "classes": 5},
        "train, client 1, sample 1: label 5 is outside 0 … 4"),
    "label negative": ({"train": [(X, Y), (X, Y - 1)]}, "client 1, sample 0: label -1 is outside"),
    "label in test": (
        {"train": [(X, Y)], "test": [(X, Y + 1)], "classes": 2}, "test, client 0, sample 1: lab"),
    "empty client": ({"train": [(X, Y), (X[:0], Y[:0])]}, "train, client 1 is empty"),
    "empty test": ({"train": [(X, Y)], "test": [(X[:0], Y[:0])]}, "test holds no sample at all"),
    "uint8": ({"train": [(X.astype(np.uint8), Y)]}, "client 0: x is uint8; scale"),
    "mixed shapes": ({"train": [(X, Y), pair(3, 4)]}, r"differ in shape: x \(4,\)"),
    "mixed target shapes": ({"train": [(X, Y * 1.0), (X, Y[:, None] * 1.0)]}, "differ in shape"),
    "mixed target kinds": ({"train": [(X, Y), (X, Y * 1.0)]}, "targets mix"),
    "fewer valid clients": (
        {"train": [(X, Y), (X, Y)], "valid": [(X, Y)]}, "valid has 1 clients but train has 2"),
    "ragged list": ({"train": [([[1.0], [2.0, 3.0], [1.0]], Y)]}, "cannot be read as an array"),
    "words": ({"train": [(X, np.array(["a", "b", "c"]))]}, "client 0: y cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_data_end_in_one_line(case):
    arguments, message = WRONG[case]
    with pytest.raises(BadInput, match=message) as error:
        Federation.from_arrays(**arguments)
    assert "\n" not in str(error.value)


def test_layout_is_flat_and_sorted_by_client():
    pairs = [pair(3), pair(1), pair(4)]
    federation = Federation.from_arrays(pairs, test=[pair(1), (X[:0], Y[:0]), pair(2)])
    assert federation.clients == 3
    assert federation.sizes.tolist() == [3, 1, 4]
    assert federation.train.offsets == [0, 3, 4, 8]
    assert federation.train.client.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert federation.test.counts.tolist() == [1, 0, 2]
    assert federation.input_shape == (2,)
    assert list(federation.splits) == ["train", "test"]
    for i, (x, y) in enumerate(pairs):
        found_x, found_y = federation.train.of(i)
        assert np.array_equal(found_x, x)
        assert np.array_equal(found_y, y)


def test_classes_are_counted_over_all_splits():
    federation = Federation.from_arrays([(X, Y)], test=[(X, Y + 3)])
    assert federation.classes == 5


def test_float_targets_mean_regression():
    federation = Federation.from_arrays([(X, Y * 0.5)], classes=7)
    assert federation.classes is None
    assert federation.train.y.is_floating_point()


def test_moving_changes_numbers_but_not_labels():
    federation = Federation.from_arrays([(X, Y)], test=[(X, Y)]).to("cpu", torch.float64)
    for split in federation.splits.values():
        assert split.x.dtype == torch.float64
        assert split.y.dtype == torch.int64


def test_the_callers_arrays_stay_untouched_and_apart():
    x, y = pair()
    federation = Federation.from_arrays([(x, y)])
    x[:] = -1
    y[:] = 0
    assert torch.equal(federation.train.x, torch.tensor(X))
    assert torch.equal(federation.train.y, torch.tensor(Y))


def test_tensors_and_lists_are_taken_too():
    given = [(torch.tensor(X), torch.tensor(Y)), (X.tolist(), Y.tolist())]
    federation = Federation.from_arrays([given[0], (X, Y)])
    assert torch.equal(federation.train.of(0)[0], federation.train.of(1)[0])
    only_lists = Federation.from_arrays([given[1]])
    assert torch.equal(only_lists.train.x.float(), torch.tensor(X))
