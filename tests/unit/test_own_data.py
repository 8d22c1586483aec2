"""Federations from tables, data sets and lists: who holds what, splits, scale, held-out clients."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from jaxtyping import config
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import fairvar as fv
from fairvar.data import clinics, own_data
from fairvar.data.builtin import ASSAY
from fairvar.errors import BadInput

FRAME = pandas.DataFrame({
    "ward": ["north", "east", "north", "east", "north", "east", "east", "north"],
    "age": [50, 61, 40, 33, 70, 52, 45, 66],
    "dose": [0.1, 0.5, 0.3, 0.9, 0.2, 0.4, 0.8, 0.6],
    "drug": ["b", "a", "a", "c", "b", "a", "c", "b"],
    "ill": ["yes", "no", "no", "yes", "yes", "no", "no", "yes"],
    "part": ["train", "train", "train", "train", "test", "test", "valid", "valid"],
})  # fmt: skip
WAY: dict[str, Any] = {"client": "ward", "target": "ill", "features": ["age", "dose"]}


def made(**options: Any) -> fv.Federation:
    return fv.Federation.from_frame(FRAME, **{**WAY, "split": None, **options})


def arrays(*sizes: int, features: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    return [(draw.normal(size=(n, features)), np.arange(n) % 2) for n in sizes]


# -- shares of train, valid and test ---------------------------------------------------------------
def test_a_split_divides_every_clients_samples():
    pairs = arrays(10, 40, 3, 2, 1)
    federation = fv.Federation.from_arrays(pairs, split=(0.6, 0.2, 0.2), seed=3)
    counts = {part: split.counts.tolist() for part, split in federation.splits.items()}
    assert counts == {"train": [6, 24, 1, 2, 1], "valid": [2, 8, 1, 0, 0], "test": [2, 8, 1, 0, 0]}
    for i, (x, _) in enumerate(pairs):
        rows = np.concatenate([split.of(i)[0] for split in federation.splits.values()])
        assert {tuple(row) for row in rows} == {tuple(row) for row in x}


def test_a_split_is_drawn_with_its_seed():
    def train(seed: int) -> list[float]:
        drawn = fv.Federation.from_arrays(arrays(20), split=(0.5, 0.25, 0.25), seed=seed)
        return drawn.train.x.flatten().tolist()

    assert train(1) == train(1) != train(2)


def test_without_a_split_all_samples_train():
    federation = fv.Federation.from_arrays(arrays(5, 6))
    assert list(federation.splits) == ["train"]
    assert federation.sizes.tolist() == [5, 6]


def test_a_share_of_zero_leaves_the_part_out():
    federation = fv.Federation.from_arrays(arrays(5), split=(0.5, 0.0, 0.5))
    assert list(federation.splits) == ["train", "test"]


@pytest.mark.parametrize(("options", "message"), [
    ({"split": (0.5, 0.4)}, "shares of train, valid and test"),
    ({"split": (0.5, 0.4, 0.4)}, "sum to 1"),
    ({"split": 0.8}, "shares of train, valid and test"),
    ({"split": (0.8, 0.1, 0.1), "seed": -1}, "seed = -1"),
    ({"split": (0.8, 0.1, 0.1), "test": arrays(4, 4)}, "split or valid and test, not both"),
    ({"train": arrays(2, 1), "split": (0.8, 0.1, 0.1)}, "no client has the 3 samples"),
    ({"client_names": ["a"]}, "1 entries for 2 clients"),
    ({"client_names": [1, 2]}, "one string each"),
    ({"client_names": ["a", "a"]}, "'a' names two clients"),
    ({"train": {"a": arrays(2)[0]}}, "client_names=list"),
])  # fmt: skip
def test_a_wrong_split_ends_in_one_line(options, message):
    config.update("jaxtyping_disable", True)  # it would refuse some by itself
    with pytest.raises(BadInput, match=message):
        fv.Federation.from_arrays(**{"train": arrays(4, 4), **options})


# -- tables ----------------------------------------------------------------------------------------
def test_a_frame_has_one_client_per_value_of_a_column():
    federation = made()
    assert federation.client_names == ("east", "north")
    assert federation.classes == 2
    assert federation.provenance["labels"] == ["no", "yes"]
    assert federation.provenance["features"] == ["age", "dose"]
    x, y = federation.train.of(1)
    assert x.tolist() == [pytest.approx(r) for r in ([50, 0.1], [40, 0.3], [70, 0.2], [66, 0.6])]
    assert y.tolist() == [1, 0, 1, 1]
    assert repr(federation) == "<Federation frame: 2 clients (east, north), 8 train>"


def test_a_history_has_the_names_of_its_clients():
    federation = made(features=["dose"])
    history = fv.train("multinomial", federation, fv.FedAvg(), rounds=1)
    assert history.provenance["client_names"] == ["east", "north"]
    assert "client_names" not in fv.train("multinomial", clinics(2), fv.FedAvg(), 1).provenance


def test_a_frame_is_split_by_default_or_by_a_column():
    assert list(made(split=(0.5, 0.25, 0.25)).splits) == ["train", "valid", "test"]
    default = fv.Federation.from_frame(FRAME, **WAY)
    assert default.test is not None
    assert default.test.counts.tolist() == [1, 1]
    given = made(split="part")
    assert {part: split.x[:, 0].tolist() for part, split in given.splits.items()} == {
        "train": [61, 33, 50, 40], "valid": [45, 66], "test": [52, 70]}  # fmt: skip


def test_all_other_columns_are_features():
    bare = FRAME.drop(columns=["drug", "part"])
    found = fv.Federation.from_frame(bare, client="ward", target="ill")
    assert found.provenance["features"] == ["age", "dose"]


def test_words_become_columns_of_zeros_and_ones_when_asked_for():
    coded = made(features=["dose", "drug"], one_hot=True)
    assert coded.provenance["features"] == ["dose", "drug_a", "drug_b", "drug_c"]
    assert coded.train.of(0)[0][:, 1:].tolist() == [[1, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(("values", "options", "classes", "y"), [
    ([0.5, 1.5] * 4, {}, None, [1.5, 1.5, 1.5, 0.5]),
    ([3, 7] * 4, {}, 2, [1, 1, 1, 0]),
    ([3, 7] * 4, {"regression": True}, None, [7.0, 7.0, 7.0, 3.0]),
    ([1.0, 2.0] * 4, {"regression": False}, 2, [1, 1, 1, 0]),
    ([True, False] * 4, {}, 2, [0, 0, 0, 1]),
])  # fmt: skip
def test_floats_are_regressed_on_and_the_rest_are_classes(values, options, classes, y):
    frame = FRAME.assign(ill=values)
    federation = fv.Federation.from_frame(frame, **WAY, split=None, **options)
    assert federation.classes == classes
    assert federation.train.of(0)[1].tolist() == y


def test_a_dict_of_columns_is_a_frame():
    columns = {name: FRAME[name].to_numpy() for name in FRAME}
    federation = fv.Federation.from_frame(columns, **WAY, split=None)
    assert torch.equal(federation.train.x, made().train.x)


WRONG = {
    "column": ({"target": "sick"}, "unknown column 'sick'"),
    "feature": ({"features": ["age", "agee"]}, "did you mean 'age'"),
    "one name": ({"features": "age"}, "give a list of columns"),
    "target as feature": ({"features": ["age", "ill"]}, "column 'ill' cannot be a feature too"),
    "no features": ({"features": []}, "0 columns of features"),
    "words": ({"features": ["age", "drug", "part"]}, "columns 'drug', 'part' hold no numbers"),
    "part": ({"split": "drug"}, "column 'drug' must hold train, valid, test only"),
    "words as numbers": ({"regression": True}, "cannot be regressed on"),
    "one for two": ({"client": "ill"}, "columns 'ill', 'ill'; each needs its own"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_column_ends_in_one_line(case):
    options, message = WRONG[case]
    with pytest.raises(BadInput, match=message):
        made(**options)


def test_missing_values_are_named_by_column():
    frame = FRAME.assign(dose=[None, *FRAME["dose"][1:]])
    with pytest.raises(BadInput, match=r"\(empty, NA or None\) in column 'dose'"):
        fv.Federation.from_frame(frame, **WAY)


@pytest.mark.parametrize("column", ["age", "ill"])
def test_dates_are_neither_categories_nor_classes(column):
    frame = FRAME.assign(**{column: pandas.date_range("2026-01-01", periods=len(FRAME))})
    with pytest.raises(BadInput, match=f"dates or times in column '{column}'; make numbers"):
        fv.Federation.from_frame(frame, **WAY, one_hot=True)


def test_identifiers_are_no_categories_and_prices_no_classes():
    frame = pandas.DataFrame({"who": ["a", "b"] * 60, "id": [f"p{i}" for i in range(120)],
                              "price": range(120)})  # fmt: skip
    with pytest.raises(BadInput, match="'id' hold more than 100 categories"):
        fv.Federation.from_frame(frame, client="who", target="price", one_hot=True)
    with pytest.raises(BadInput, match="120 distinct whole numbers; say regression=True"):
        fv.Federation.from_frame(frame[["who", "price"]].assign(x=1.0), client="who",
                                 target="price")  # fmt: skip


def test_a_csv_file_is_its_frame(tmp_path: Path):
    FRAME.to_csv(tmp_path / "wards.csv", index=False)
    found = fv.Federation.from_csv(tmp_path / "wards.csv", **WAY, split=None)
    assert found.name == "wards"
    assert found.client_names == ("east", "north")
    assert torch.equal(found.train.x, made().train.x)
    assert torch.equal(found.train.y, made().train.y)


@pytest.mark.parametrize("names", [
    ("001", "002", "010"), ("1", "2", "10"), ("01", "1"), ("1.50", "2"), ("0.5", "10.5"),
    ("NA", "US"), ("None", "nan", "null"),
])  # fmt: skip
def test_clients_of_a_csv_file_keep_their_names_as_written(tmp_path: Path, names):
    """Those that are numbers as Python writes them are in their order."""
    rows = [f"{name},{k},{k % 2}\n" for k in range(4) for name in reversed(names)]
    (tmp_path / "wards.csv").write_text("ward,age,ill\n" + "".join(rows))
    found = fv.Federation.from_csv(tmp_path / "wards.csv", client="ward", target="ill")
    assert found.client_names == names


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00\x80,\n"])
def test_a_file_that_is_no_csv_ends_in_one_line(tmp_path: Path, content):
    if content is not None:
        (tmp_path / "wards.csv").write_bytes(content)
    with pytest.raises(BadInput, match=r"wards\.csv"):
        fv.Federation.from_csv(tmp_path / "wards.csv", client="ward", target="ill")


def test_row_numbers_of_a_csv_file_are_no_feature(tmp_path: Path):
    FRAME.drop(columns=["drug", "part"]).to_csv(tmp_path / "wards.csv")
    way = {"client": "ward", "target": "ill"}
    with pytest.raises(BadInput, match="holds the row numbers that"):
        fv.Federation.from_csv(tmp_path / "wards.csv", **way)
    chosen = fv.Federation.from_csv(tmp_path / "wards.csv", **WAY)
    assert chosen.provenance["features"] == ["age", "dose"]


@pytest.mark.parametrize(("form", "message"), [
    ({"sep": ";"}, 'no commas between the columns of wards.csv: use .*sep=";"'),
    ({"sep": "\t"}, "no commas between the columns"),
    ({"encoding": "latin-1"}, "wards.csv is not in UTF-8: use .*encoding="),
    ({"encoding": "utf-16"}, "wards.csv is not in UTF-8: use .*encoding="),
])  # fmt: skip
def test_other_forms_of_csv_end_in_one_line_that_says_how_to_read_them(tmp_path, form, message):
    FRAME.assign(ward="Süd").to_csv(tmp_path / "wards.csv", index=False, **form)
    with pytest.raises(BadInput, match=message):
        fv.Federation.from_csv(tmp_path / "wards.csv", **WAY)


def test_a_path_must_be_one_and_columns_differ_in_name():
    config.update("jaxtyping_disable", True)  # it would refuse 3 by itself
    with pytest.raises(BadInput, match="give the path of a CSV file"):
        fv.Federation.from_csv(3, client="ward", target="ill")
    twice = pandas.concat([FRAME, FRAME[["age"]]], axis=1)
    with pytest.raises(BadInput, match="two columns have the same name"):
        fv.Federation.from_frame(twice, **WAY)


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(BadInput, match=r"fairvar\[pandas\]"):
        made()


# -- data sets -------------------------------------------------------------------------------------
def torch_set() -> TensorDataset:
    return TensorDataset(torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"image": np.full((2, 2), k, np.uint8), "label": k} for k in (0, 1)])


def test_subsets_of_a_torch_data_set_are_clients():
    parts = [Subset(torch_set(), [0, 4]), Subset(torch_set(), [5, 1, 2])]
    federation = fv.Federation.from_datasets(parts, client_names=["a", "b"])
    assert federation.sizes.tolist() == [2, 3]
    assert federation.classes == 3
    assert federation.train.of(1)[0].tolist() == [[10, 11], [2, 3], [4, 5]]
    assert federation.train.of(1)[1].tolist() == [2, 1, 2]


def test_streams_of_dicts_and_images_are_read_too():
    federation = fv.Federation.from_datasets(
        [Stream()], test=[Stream()], x="image", y="label", transform=lambda x: x[:, None] / 255
    )
    assert federation.input_shape == (1, 2, 2)
    assert float(federation.train.x.max()) == pytest.approx(1 / 255)
    assert list(federation.splits) == ["train", "test"]


@pytest.mark.parametrize(("sets", "options", "message"), [
    (torch_set, {}, "one data set per client, not a function"),
    ({"train": torch_set()}, {}, "not a dict"),
    ({"a": torch_set()}, {}, "client_names=list"),
    ([DataLoader(torch_set(), batch_size=2)], {}, "client 0: a DataLoader holds batches; give its"),
    ([torch_set(), Subset(torch_set(), [])], {}, "train, client 1: the data set is empty"),
    ([TensorDataset(torch.zeros(2, 2))], {}, "client 0: an item is a tuple, not an"),
    ([[(object(), 1)]], {}, "cannot be put into one tensor"),
    (Stream(), {}, "one data set per client, not a Stream"),
    ([[(1.0, "yes")]], {}, "y cannot be read as an array of numbers .it holds text; number"),
    ([Stream()], {"x": "image"}, "y = None: name one of image, label"),
    ([Stream()], {"x": "image", "y": "label"}, "x is uint8; scale"),
])  # fmt: skip
def test_a_wrong_data_set_ends_in_one_line(sets, options, message):
    config.update("jaxtyping_disable", True)  # it would refuse some by itself
    with pytest.raises(BadInput, match=message):
        fv.Federation.from_datasets(sets, **options)


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["no", "yes", "perhaps"])
    features = datasets.Features({"age": datasets.Value("float32"), "dose": datasets.Value(
        "float32"), "pixels": datasets.List(datasets.Value("float32")), "ill": label,
        "site": datasets.Value("string")})  # fmt: skip
    return datasets.Dataset.from_dict(
        {"age": [1.0, 2.0, 3.0, 4.0], "dose": [0.0, 0.5, 1.0, 1.5],
         "pixels": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]], "ill": [0, 1, 0, 1],
         "site": ["b", "a", "b", "a"]}, features=features)  # fmt: skip


@pytest.mark.extra
def test_hugging_face_data_sets_are_clients():
    whole = hugging_face()
    parts = [whole.select([0, 2]), whole.select([1, 3])]
    federation = fv.Federation.from_datasets(parts, x=["age", "dose"], y="ill")
    assert federation.classes == 3  # the data set declares one more than it holds
    assert federation.train.of(1)[0].tolist() == [[2, 0.5], [4, 1.5]]
    assert federation.train.of(1)[1].tolist() == [1, 1]
    one_column = fv.Federation.from_datasets(parts, x="pixels", y="ill")
    assert one_column.train.of(0)[0].tolist() == [[0, 1], [4, 5]]
    with pytest.raises(BadInput, match="one data set per client, not a Dataset"):
        fv.Federation.from_datasets(whole, x="pixels", y="ill")
    with pytest.raises(BadInput, match="client 0: x cannot be read as an array of numbers"):
        fv.Federation.from_datasets(parts, x="site", y="ill")
    streams = [part.to_iterable_dataset() for part in parts]
    streamed = fv.Federation.from_datasets(streams, x="age", y="ill")
    assert streamed.train.x.tolist() == [1, 3, 2, 4]
    for wrong in ({"x": "pixels"}, {"y": "ill"}, {"x": "age", "y": "sick"}):
        with pytest.raises(BadInput, match="name one of age, dose, pixels, ill, site"):
            fv.Federation.from_datasets(parts, **wrong)


@pytest.mark.extra
def test_partitions_of_flwr_datasets_are_clients():
    partitioner = pytest.importorskip("flwr_datasets.partitioner").NaturalIdPartitioner("site")
    partitioner.dataset = hugging_face()
    parts = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
    federation = fv.Federation.from_datasets(parts, x=["age", "dose"], y="ill")
    assert sorted(federation.train.x[:, 0].tolist()) == [1, 2, 3, 4]
    assert federation.sizes.tolist() == [2, 2]


# -- scale -----------------------------------------------------------------------------------------
def unscaled() -> fv.Federation:
    return made(features=["dose", "age"])


def test_training_on_unscaled_columns_warns_once_and_names_them():
    federation = unscaled()
    message = r"badly scaled: column 'age' \(root mean square 53"
    with pytest.warns(UserWarning, match=message) as told:
        fv.train("multinomial", federation, fv.FedAvg(), rounds=1, lr=1e-4)
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    fv.train("multinomial", federation, fv.FedAvg(), rounds=1, lr=1e-4)  # warnings are errors here


def test_raw_pixels_are_recognised():
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (5, 1, 8, 8)).astype(np.float32)
    federation = fv.Federation.from_arrays([(images, np.arange(5) % 2)])
    with pytest.warns(UserWarning, match="raw pixel values from 0 to 255"):
        fv.train("multinomial", federation, fv.FedAvg(), rounds=1, lr=1e-6)
    flat = images.reshape(5, 64)
    assert "raw pixel" in str(own_data.scale_problem(torch.from_numpy(flat), None))
    assert own_data.scale_problem(torch.from_numpy(images / 255), None) is None


@pytest.mark.parametrize(("x", "message"), [
    (torch.tensor([[1.0, 1e-5], [0.0, -2e-5]]), "column '1'"),
    (torch.full((3, 4, 5), 1e3), "root mean square 1e"),
    (torch.tensor([[1.0, 99.0], [0.0, 99.0]]), None),  # a constant tells nothing about samples
    (torch.tensor([[2, 9000]]), None),  # tokens
    (torch.ones(3, 4, 5), None),
])  # fmt: skip
def test_what_counts_as_badly_scaled(x, message):
    found = own_data.scale_problem(x, None)
    assert found is None if message is None else message in str(found)


def test_standardising_uses_training_data_only():
    given = made(features=["dose", "age"], split="part")
    federation = given.standardise()
    x = given.train.x.double()
    mean, sd = x.mean(0), x.std(0, correction=0)
    for part, split in federation.splits.items():
        expected = (given.splits[part].x - mean) / sd
        assert torch.allclose(split.x.double(), expected, atol=1e-5), part
    assert federation.provenance["normalisation"]["mean"] == pytest.approx(mean.tolist())
    assert federation.scale_problem is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fv.train("multinomial", federation, fv.FedAvg(), rounds=1)


def test_standardising_images_by_channel_and_constants_to_zero():
    x = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(0)) * 5 + 2
    x[:, 1] = 7.0
    done = fv.Federation.from_arrays([(x, torch.arange(6) % 2)]).standardise().train.x
    assert float(done[:, 0].mean()) == pytest.approx(0, abs=1e-5)
    assert float(done[:, 0].std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert done[:, 1].abs().max() == 0


def test_several_inputs_are_looked_at_and_standardised_one_by_one():
    draw = np.random.default_rng(0)
    x = {"note": draw.integers(0, 9, (8, 4)), "values": draw.normal(300, 20, (8, 2))}
    pairs = [(x, np.arange(8) % 2)]
    federation = fv.Federation.from_arrays(pairs, test=pairs)
    assert str(federation.scale_problem).startswith("x['values']: the inputs are badly scaled")
    done = federation.standardise()
    assert done.scale_problem is None
    for split in done.splits.values():
        assert torch.equal(split.x["note"], torch.from_numpy(x["note"]))
        expected = (x["values"] - x["values"].mean(0)) / x["values"].std(0)
        np.testing.assert_allclose(split.x["values"], expected, atol=1e-12)
    with pytest.raises(BadInput, match="like = 'all': give a Federation"):
        federation.standardise(like="all")  # type: ignore[arg-type]


def test_new_clients_are_standardised_like_those_that_trained():
    train, later = unscaled().hold_out(["north"])
    scaled = later.standardise(like=train)
    mean, sd = own_data.moments(train.train.x)
    assert torch.equal(scaled.train.x, (later.train.x - mean) / sd)
    with pytest.raises(BadInput, match=r"`like` has inputs of shape \(2,\)"):
        clinics(2).standardise(like=train)
    tokens = fv.Federation.from_arrays([(torch.zeros(2, 3, dtype=torch.int64), [0, 1])])
    with pytest.raises(BadInput, match=r"torch\.int64; give one array of floats"):
        tokens.standardise()


def test_numbers_of_numpy_and_torch_are_taken():
    config.update("jaxtyping_disable", True)
    shares = np.array([0.5, 0.25, 0.25])
    found = fv.Federation.from_arrays(arrays(8, 8, 8, 8), classes=np.int64(3), split=shares,
                                      seed=np.int64(4))  # fmt: skip
    same = fv.Federation.from_arrays(arrays(8, 8, 8, 8), split=(0.5, 0.25, 0.25), seed=4)
    assert found.classes == 3
    assert torch.equal(found.train.x, same.train.x)
    ids = [found.hold_out(given)[1].provenance["ids"]
           for given in ([1], [np.int64(1)], np.array([1]), torch.tensor([1]))]  # fmt: skip
    assert ids == [[1]] * 4
    assert found.hold_out(np.float32(0.25))[1].clients == 1
    one = fv.load_federation("digits", np.int64(4), seed=np.int32(1), fraction=np.float32(0.5))
    two = fv.load_federation("digits", 4, seed=1, fraction=0.5)
    assert one.provenance == two.provenance


def test_arrays_of_objects_are_read_if_they_hold_numbers():
    ((x, y),) = arrays(6)
    rows = np.empty(6, dtype=object)
    rows[:] = list(x)
    found = fv.Federation.from_arrays([(rows, y.astype(object))])
    assert torch.equal(found.train.x, torch.from_numpy(x))
    table = FRAME.astype({"age": object, "dose": object})
    again = fv.Federation.from_frame(table, **WAY, split=None)
    assert torch.equal(again.train.x, made().train.x)


@pytest.mark.parametrize(("options", "message"), [
    ({"train": [(torch.eye(4).to_sparse(), [0, 1, 0, 1])]}, "it is sparse; give x.to_dense"),
    ({"train": [([[1, 2], [1]], [0, 1])]}, "rows of different lengths"),
    ({"train": [(np.ma.masked_less([[1.0], [-9.0]], 0), [0, 1])]}, "some of its values are masked"),
    ({"client_names": 3}, "give a list of names"),
    ({"client_names": "ab"}, "give a list of names"),
    ({"client_names": [1, 2]}, "1 is a int; give one string each"),
])  # fmt: skip
def test_other_kinds_of_arrays_and_names_end_in_one_line(options, message):
    config.update("jaxtyping_disable", True)
    with pytest.raises(BadInput, match=message):
        fv.Federation.from_arrays(**{"train": arrays(4, 4), **options})


@pytest.mark.parametrize(("frame", "options", "message"), [
    (FRAME.assign(age=1j), {}, "'age' hold no numbers"),
    (FRAME, {"features": ["age", "age"]}, "name each column once"),
    (FRAME.assign(ward=[[1]] * 8), {}, "must hold words or numbers"),
    (FRAME, {"regression": "yes"}, "give True or False"),
    (FRAME, {"one_hot": "yes"}, "give True or False"),
])  # fmt: skip
def test_other_kinds_of_columns_end_in_one_line(frame, options, message):
    config.update("jaxtyping_disable", True)
    with pytest.raises(BadInput, match=message):
        fv.Federation.from_frame(frame, **{**WAY, **options})


def test_items_of_a_data_set_may_have_several_inputs():
    items = [((torch.ones(3) * i, torch.tensor(i)), i % 2) for i in range(4)]
    found = fv.Federation.from_datasets([items, items])
    assert [tuple(part.shape) for part in found.train.x] == [(8, 3), (8,)]


# -- clients set aside -----------------------------------------------------------------------------
def test_held_out_clients_and_the_rest_are_the_federation():
    whole = clinics(10)
    train, later = whole.hold_out(0.3, seed=1)
    assert (train.clients, later.clients) == (7, 3)
    ids = [*train.provenance["ids"], *later.provenance["ids"]]
    assert sorted(ids) == list(range(10))
    for part, made in ((train, train.provenance["ids"]), (later, later.provenance["ids"])):
        for place, i in enumerate(made):
            for name, split in part.splits.items():
                assert torch.equal(split.of(place)[0], whole.splits[name].of(i)[0])
    assert whole.hold_out(0.3, seed=1)[1].provenance["ids"] == later.provenance["ids"]
    assert {tuple(whole.hold_out(0.3, seed=s)[1].provenance["ids"]) for s in range(5)} != {tuple(
        later.provenance["ids"])}  # fmt: skip


def test_clients_are_held_out_by_name_or_id():
    train, later = made().hold_out(["north"])
    assert (train.client_names, later.client_names) == (("east",), ("north",))
    assert made().hold_out([1])[1].client_names == ("north",)
    assert made().only(["north"]).client_names == ("north",)
    assert later.provenance["features"] == ["age", "dose"]


@pytest.mark.parametrize(("clients", "message"), [
    (0.0, "leaves at least one client"), (0.1, "leaves at least one"), (1.0, "leaves at least"),
    ([0, 1], "at least one on both sides"), ([], "at least one"), ([0, 0], "name each once"),
    (["west"], "unknown client 'west'"), ([2], "clients 0 to 1"), ([True], "clients 0 to 1"),
    ("north", "a list of ids or names"), (1, "give a share such as 0.2"), (None, "give a share"),
])  # fmt: skip
def test_clients_that_cannot_be_held_out(clients, message):
    with pytest.raises(BadInput, match=message):
        made().hold_out(clients)


def test_which_clients_is_never_guessed():
    config.update("jaxtyping_disable", True)
    whole = fv.Federation.from_frame(FRAME.assign(ward=[1, 2] * 4), **WAY, split=None)
    assert whole.hold_out(["1"])[1].client_names == ("1",)
    with pytest.raises(BadInput, match="client 1 is the name of one client and the number of '2'"):
        whole.hold_out([1])
    for wrong, message in (([], "no client is left"), ([9], "clients 0 to 1"),
                           ("12", "give a list of ids"), (1, "give a list of ids")):  # fmt: skip
        with pytest.raises(BadInput, match=message):
            whole.only(wrong)
    with pytest.raises(BadInput, match="seed = -1"):
        whole.hold_out(0.5, seed=-1)


# -- the table by name -----------------------------------------------------------------------------
def test_clinics_do_not_depend_on_each_other():
    few, many = clinics(2, seed=4), clinics(5, seed=4)
    for part in ("train", "valid", "test"):
        assert torch.equal(few.splits[part].of(1)[0], many.splits[part].of(1)[0])
    assert not torch.equal(clinics(2, seed=5).train.x[:20], few.train.x[:20])


def test_clinics_differ_in_population_prevalence_assay_and_size():
    federation = fv.load_federation("clinics", 40)
    assert federation.test is not None
    means = torch.stack([federation.test.of(i)[0].mean(0) for i in range(40)])
    spread = torch.stack([federation.test.of(i)[0].std(0) for i in range(40)])
    other = spread[:, ASSAY].mean(1) < 0.75  # half the gain
    assert 4 <= int(other.sum()) <= 16
    assert float(means[other][:, ASSAY].mean()) > 0.7
    assert 0.3 < float(means[:, :3].std(0).mean()) < 0.7
    share = torch.stack([federation.test.of(i)[1].double().mean() for i in range(40)])
    assert float(share.std()) > 0.1
    assert len(set(federation.sizes.tolist())) > 20
    assert federation.test.counts.tolist() == [150] * 40
    assert federation.scale_problem is None


def test_clinics_need_a_client():
    with pytest.raises(BadInput, match="clients ≥ 1"):
        clinics(0)


# -- the pages -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [
    pytest.param("data.md", marks=pytest.mark.extra), "new_clients.md",
])  # fmt: skip
def test_the_code_of_the_page_works(name, tmp_path: Path, monkeypatch, capsys):
    """Also the blocks that need Hugging Face `datasets`, where it is installed."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / name).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert blocks
    space: dict[str, Any] = {}
    for block in blocks:
        if "datasets.Dataset" not in block or importlib.util.find_spec("datasets"):
            exec(compile(block, name, "exec"), space)


def test_the_example_with_a_table_names_the_clinics_served_worst(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "table.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "30 clients (clinic 00, " in said
    assert "badly scaled: column 'age'" in said
    assert len(re.findall(r"worst 0\.\d+ \(clinic \d\d, clinic \d\d, clinic \d\d\)", said)) == 3
