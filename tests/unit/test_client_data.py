"""`ClientData`: what one node brings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fairvar as fv

TABLE = "age,pulse,ill\n" + "".join(
    f"{20 + k},{60.5 + k},{['no', 'yes'][k % 2]}\n" for k in range(20)
)


def test_a_table_is_split(tmp_path: Path) -> None:
    path = tmp_path / "berlin.csv"
    path.write_text(TABLE, encoding="utf-8-sig")  # as spreadsheets write it
    found = fv.ClientData.from_csv(path, "ill", labels=["no", "yes"])
    again = fv.ClientData.from_csv(path, "ill", labels=["no", "yes"])
    assert found.name == "berlin"
    assert [len(pair[1]) for pair in (found.train, found.valid, found.test)] == [16, 2, 2]
    np.testing.assert_array_equal(found.test[0], again.test[0])
    x = np.concatenate([pair[0] for pair in (found.train, found.valid, found.test)])
    y = np.concatenate([pair[1] for pair in (found.train, found.valid, found.test)])
    assert x.dtype == np.float32
    assert sorted(x[:, 0].tolist()) == list(range(20, 40))
    np.testing.assert_array_equal(x[:, 1] - x[:, 0], np.full(20, 40.5))
    np.testing.assert_array_equal(x[:, 0] % 2, y)
    fed = found.federation(2)
    assert (fed.clients, fed.classes, fed.input_shape) == (1, 2, (2,))


def test_a_folder_of_parts(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("y,a,b\n1.5,1,2\n2,3,4\n")
    (tmp_path / "test.csv").write_text("b,a,y\n6,5,1\n")
    found = fv.ClientData.from_csv(tmp_path, "y", columns=["a", "b"])
    assert found.valid is None
    np.testing.assert_array_equal(found.test[0], [[5, 6]])  # by name, not by place
    fed = found.federation()  # whole numbers in one part are floats in the other
    assert fed.classes is None
    assert fed.test.y.tolist() == [1.0]


def test_a_scale(tmp_path: Path) -> None:
    x = np.array([[1.0, 7.0], [3.0, 7.0]])
    data = fv.ClientData((x, [0, 1]), test=(x + 2, [0, 1]))
    own, agreed = data.scaled(), data.scaled(mean=[1.0, 7.0], sd=2.0)
    np.testing.assert_array_equal(own.train[0], [[-1, 0], [1, 0]])
    np.testing.assert_array_equal(own.test[0], [[1, 2], [3, 2]])  # by the training samples'
    np.testing.assert_array_equal(agreed.test[0], [[1, 1], [2, 1]])
    # A site whose file lacks a column must not get it from the numbers of the others.
    short = fv.ClientData((x[:, :1], [0, 1]))
    with pytest.raises(fv.BadInput, match=r"mean has shape \(2,\), a sample has \(1,\)"):
        short.scaled(mean=[1.0, 7.0], sd=2.0)
    with pytest.raises(fv.BadInput, match="sd has shape"):
        data.scaled(mean=1.0, sd=[1.0, 2.0, 3.0])
    with pytest.raises(fv.BadInput, match=r"sd = \[1.0, 0.0\] must be positive"):
        data.scaled(mean=1.0, sd=[1.0, 0.0])
    with pytest.raises(fv.BadInput, match="mean = nan must be finite"):
        data.scaled(mean=np.nan, sd=1.0)


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (
            "a,ill\n1,maybe\n",
            {"labels": ["no", "yes"]},
            "line 2: ill is 'maybe'; the labels are no",
        ),
        ("a,ill\n1,0\n,1\n", {}, "line 3: a is '', not a number"),
        ("a,ill\n1\n", {}, "line 2 has 1 values for 2 columns"),
        ("a,ill\n1,0\n62,5,1\n", {}, "line 3 has 3 values for 2 columns; commas separate"),
        ("a;ill\n1;0\n", {}, "it has a;ill; columns are separated by commas"),
        ("a,b\n1,0\n", {}, "has no column 'ill'; it has a, b"),
        ("a,ill\n1,0\n", {"columns": ["c"]}, "has no column 'c'"),
        ("a,ill\n", {}, "has no samples"),
        ("", {}, "has no column"),
        ("a, ill\n1, 0\n", {}, "has no column 'ill'; it has a, ' ill'"),
        ("a,a,ill\n1,2,0\n", {}, "has several columns 'a'; each needs its own name"),
        ("a,ill,ill\n1,2,0\n", {}, "has several columns 'ill'"),
        ("a,ill\n1,0\n", {"columns": ["a", "ill"]}, "'ill' is the target, and cannot be an input"),
        ("a,ill\n1,0\nnan,1\n", {}, "line 3: a is 'nan', not a number"),
        ("a,ill\n1,0\n", {"split": (0.5, 0.5, 0.5)}, "test must be at least 0 and sum to 1"),
    ],
)
def test_tables_that_cannot_be_used(text: str, more: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(fv.BadInput) as refused:
        fv.ClientData.from_csv(tmp_path / "t.csv", "ill", **more)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("form", [dict, lambda parts: tuple(parts.values())])
def test_several_inputs_are_split_together(form) -> None:
    rows = np.arange(20)
    parts = {"note": np.stack([rows, rows], 1), "values": rows[:, None] / 2}
    found = fv.ClientData.from_arrays(form(parts), rows.astype(np.float32))
    assert repr(found) == "<ClientData: 16 train, 2 valid, 2 test>"
    federation = found.federation()
    (note, values), y = [*federation.train.of(0)[0].values()] if form is dict else (
        federation.train.of(0)[0]), federation.train.y  # fmt: skip
    assert note[:, 0].tolist() == (2 * values[:, 0]).tolist() == y.tolist()
    with pytest.raises(fv.BadInput, match=r"x has shape \(19, 1\) and y \(20,\)"):
        fv.ClientData.from_arrays({**parts, "values": parts["values"][1:]}, rows)
    with pytest.raises(fv.BadInput, match="several inputs; scale them"):
        found.scaled()


def test_a_short_repr() -> None:
    data = fv.ClientData((np.zeros((500, 9)), np.zeros(500)), name="berlin")
    assert repr(data) == "<ClientData berlin: 500 train>"


def test_what_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(fv.BadInput, match="cannot be read as a CSV file: No such file"):
        fv.ClientData.from_csv(tmp_path / "none.csv", "ill")
    with pytest.raises(fv.BadInput, match="a row of x and an element of y"):
        fv.ClientData.from_arrays(np.zeros((3, 2)), np.zeros(2))
    with pytest.raises(fv.BadInput, match=r"^train: x holds NaN or infinity"):  # of no client 0
        fv.ClientData((np.full((3, 2), np.nan), np.zeros(3))).federation()
    with pytest.raises(fv.BadInput, match="targets are floats, but the run has 2 classes"):
        fv.ClientData((np.zeros((3, 2)), np.array([0.5, 1.0, 0.0]))).federation(2)
