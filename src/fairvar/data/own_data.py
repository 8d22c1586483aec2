"""The user's data as one pair of arrays per client: tables with a column of clients, torch data
sets, Hugging Face data sets. Also splits into train, valid and test, and the scale of the inputs.

`Federation` (`federation.py`) calls these functions and is not imported here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from fairvar.common import rng
from fairvar.common.files import given_path
from fairvar.common.validation import as_python, whole_number
from fairvar.errors import BadInput, cause, shown, unknown

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = (0.8, 0.1, 0.1)
MOST_CATEGORIES = 100  # of a column: more are an identifier or free text
MOST_WHOLE_NUMBERS = 50  # as classes, unless the caller says so
LARGEST_RMS, SMALLEST_RMS = 10.0, 1e-3  # of a column that is trained on as it is
UNNAMED = "Unnamed: 0"  # pandas' name of a first column without one
LOOKED_AT = 1024  # samples whose scale is looked at

Shares = tuple[float, float, float]
Rows = list[np.ndarray]  # sample indices per client
Pairs = list[tuple[Any, Any]]


# -- shares of train, valid and test ---------------------------------------------------------------
def checked_shares(split: Any) -> Shares:
    found = as_python(split)
    shares = found if isinstance(found, tuple | list) else ()
    if len(shares) != 3 or not (
        all(isinstance(share, int | float) and share >= 0 for share in shares)
        and shares[0] > 0 and abs(sum(shares) - 1) < 1e-6
    ):  # fmt: skip
        raise BadInput(f"split = {shown(split)}: the shares of train, valid and test must be at "
                       "least 0 and sum to 1, with train above 0, as (0.8, 0.1, 0.1)")  # fmt: skip
    return shares[0], shares[1], shares[2]


def held_out_counts(samples: int, valid: float, test: float) -> tuple[int, int]:
    """How many of a client's samples validate and test: the share, rounded down.

    From 3 samples on at least one each (unless the share is 0); one always stays for training.
    """
    least = 1 if samples >= 3 else 0
    counts = [
        max(int(samples * share + 1e-9), least) if share > 0 else 0 for share in (valid, test)
    ]
    while sum(counts) >= samples:  # only where the shares leave nearly nothing for training
        counts[counts.index(max(counts))] -= 1
    return counts[0], counts[1]


def split_rows(owned: Sequence[np.ndarray], seed: int, split: Shares) -> dict[str, Rows]:
    """Each client's samples, shuffled and cut by the shares; parts whose share is 0 are left out.
    A client of one or two samples trains on them."""
    rows: dict[str, Rows] = {part: [] for part in SPLITS}
    draws = rng.streams(seed, "split", of=range(len(owned)))
    for own, draw in zip(owned, draws, strict=True):
        shuffled = draw.permutation(own)
        valid, test = held_out_counts(len(own), split[1], split[2])
        pieces = np.split(shuffled, [len(own) - valid - test, len(own) - test])
        for part, piece in zip(SPLITS, pieces, strict=True):
            rows[part].append(piece)
    wanted = [part for part, share in zip(SPLITS, split, strict=True) if share > 0]
    for part in wanted:
        if not any(len(piece) for piece in rows[part]):
            raise BadInput(f"no client has the 3 samples it takes to hold out {part} data; use "
                           "fewer clients or split = (1, 0, 0)")  # fmt: skip
    return {part: rows[part] for part in wanted}


def chosen_clients(
    clients: Any, total: int, names: Sequence[str], seed: int
) -> Int64[np.ndarray, " m"]:
    """Ids, rising, of a share of the clients (drawn) or of those listed by id or name."""
    clients = as_python(clients)
    if isinstance(clients, float):
        count = round(clients * total)
        if not 0 < clients < 1 or not 0 < count < total:
            raise BadInput(f"hold_out({shown(clients)}) of {total} clients: give a share that "
                           "leaves at least one client on both sides, or a list")  # fmt: skip
        draw = rng.stream(whole_number("seed", seed), "new clients")
        return np.sort(draw.choice(total, count, replace=False))
    if isinstance(clients, str | int) or not isinstance(clients, Sequence):
        raise BadInput(f"hold_out({shown(clients)}): give a share such as 0.2, or a list of ids "
                       "or names")  # fmt: skip
    ids = [client_id(client, total, names) for client in clients]
    if len(set(ids)) < len(ids) or not 0 < len(ids) < total:
        raise BadInput(f"hold_out: {len(ids)} of {total} clients; name each once, and leave at "
                       "least one on both sides")  # fmt: skip
    return np.array(sorted(ids))


def client_id(client: Any, total: int, names: Sequence[str] = ()) -> int:
    """The number of a client, of which the number or the name is given."""
    client = as_python(client)
    if isinstance(client, str):
        if client not in names:
            raise unknown("client", client, names)
        return list(names).index(client)
    if not isinstance(client, int) or isinstance(client, bool) or not 0 <= client < total:
        raise BadInput(f"client {shown(client)}: there are clients 0 to {total - 1}")
    if str(client) in names and names[client] != str(client):
        raise BadInput(f"client {client} is the name of one client and the number of "
                       f"{names[client]!r}; give a name, as a string")  # fmt: skip
    return client


# -- tables ----------------------------------------------------------------------------------------
def read_csv(path: str | Path, client: str) -> Any:
    """The column `client` stays as written in the file ("001"), unless numbers would be written the
    same: these are read as numbers, so that 2 comes before 10."""
    if not isinstance(path, str | Path):
        raise BadInput(f"path = {shown(path)}: give the path of a CSV file")
    pandas, path = _pandas(), given_path(path)
    way = "use Federation.from_frame(pandas.read_csv(path, {}), …)"
    try:  # with a mark in front, pandas does not take a client "NA" for a gap
        table = pandas.read_csv(path, converters={str(client): lambda text: f"={text}"})
    except UnicodeDecodeError:
        other = way.format('encoding="latin-1"')
        raise BadInput(f"{path.name} is not in UTF-8: {other} with its encoding") from None
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        why = getattr(error, "strerror", None) or cause(error)
        raise BadInput(f"cannot read {path.name} as CSV ({why})") from None
    if len(table.columns) == 1 and re.search(r"[;\t|]", str(table.columns[0])):
        other = way.format('sep=";"')
        raise BadInput(f"no commas between the columns of {path.name}: {other} with its separator")
    if str(client) in table:
        written = table[str(client)].str[1:]
        table[str(client)] = written = written.where(written != "")  # a gap
        numbers = pandas.to_numeric(written, errors="coerce")
        if (numbers.astype(str) == written.str.strip()).all():
            table[str(client)] = numbers
    return table


def clients_of_frame(
    frame: Any,
    client: str,
    target: str,
    features: Sequence[str] | None,
    split: str | Shares | None,
    regression: bool | None,
    one_hot: bool,
) -> dict[str, Any]:
    """The arguments of `Federation.from_arrays`: one client per distinct value of a column."""
    pandas = _pandas()
    for option, value in (("regression", regression or False), ("one_hot", one_hot)):
        if not isinstance(value, bool):
            raise BadInput(f"{option} = {shown(value)}: give True or False")
    table = frame if isinstance(frame, pandas.DataFrame) else _as_frame(pandas, frame)
    part = [split] if isinstance(split, str) else []
    used = [client, target, *part]
    named = _columns(table, used, features)
    missing = [c for c in [*used, *named] if table[c].isna().any()]
    if missing:
        raise BadInput(f"missing values (empty, NA or None) in {_listed(missing)}; fill them, or "
                       "drop the rows with frame.dropna()")  # fmt: skip
    times = [c for c in [target, *named] if table[c].dtype.kind in "mM"]
    if times:
        raise BadInput(f"dates or times in {_listed(times)}; make numbers of them first, such as "
                       "frame[column].dt.dayofyear, or leave them out of features")  # fmt: skip
    x, coded = _inputs(pandas, table[named].infer_objects(), one_hot)
    try:
        y, labels = _targets(pandas, table[target].infer_objects(), regression)
        code, names = pandas.factorize(table[client], sort=True)
    except TypeError as error:  # lists cannot be told apart
        raise BadInput(f"columns {client!r} and {target!r} must hold words or numbers "
                       f"({cause(error)})") from None  # fmt: skip
    owned = [np.flatnonzero(code == k) for k in range(len(names))]
    facts = {"features": coded, "target": target, "client": client}
    found: dict[str, Any] = {
        "train": [(x[rows], y[rows]) for rows in owned],
        "classes": None if labels is None else len(labels),
        "client_names": [str(name) for name in names],
        "provenance": facts if labels is None else {**facts, "labels": labels},
    }
    if not isinstance(split, str):
        return found | {"split": split}
    in_part = {name: table[split].to_numpy() == name for name in SPLITS}
    if not sum(in_part.values()).all():
        raise BadInput(f"column {split!r} must hold {', '.join(SPLITS)} only")
    for name, there in in_part.items():
        if there.any():
            found[name] = [(x[r[there[r]]], y[r[there[r]]]) for r in owned]
    return found


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise BadInput(
            "tables need pandas: pip install 'fairvar[pandas]', or give arrays to "
            "Federation.from_arrays"
        ) from None
    return pandas


def _as_frame(pandas: Any, given: Any) -> Any:
    if not isinstance(given, Mapping):
        raise BadInput(f"frame must be a pandas DataFrame or a dict of columns, not a "
                       f"{type(given).__name__}")  # fmt: skip
    try:
        return pandas.DataFrame(dict(given))
    except (TypeError, ValueError) as error:
        raise BadInput(f"these columns make no table ({cause(error)})") from None


def _columns(table: Any, used: Sequence[str], features: Sequence[str] | None) -> list[str]:
    """The columns of the inputs: those listed, or all that have no other use."""
    if isinstance(features, str):
        raise BadInput(f"features = {features!r}: give a list of columns")
    there = list(table.columns)
    if len(set(there)) < len(there):
        raise BadInput("two columns have the same name; rename one of them")
    named = [c for c in there if c not in used] if features is None else list(features)
    for column in (*used, *named):
        if column not in there:
            raise unknown("column", column, map(str, there))
    if len(set(used)) < len(used):
        raise BadInput(f"client, target and split are {_listed(used)}; each needs its own")
    if len(set(named)) < len(named):
        raise BadInput(f"features names {_listed(named)}; name each column once")
    if features is None and UNNAMED in named:
        raise BadInput(f"column {UNNAMED!r} holds the row numbers that DataFrame.to_csv writes "
                       "without index=False; drop it, or name the features")  # fmt: skip
    twice = [c for c in named if c in used]
    if twice:
        raise BadInput(f"{_listed(twice)} cannot be a feature too")
    if not named or not len(table):
        raise BadInput(f"the table has {len(table)} rows and {len(named)} columns of features; "
                       "give at least one of each")  # fmt: skip
    return named


def _inputs(pandas: Any, table: Any, one_hot: bool) -> tuple[np.ndarray, list[str]]:
    """Float32 columns and their names; columns of categories are refused or coded by 0 and 1."""
    words = [c for c in table if table[c].dtype.kind == "c"
             or not pandas.api.types.is_numeric_dtype(table[c])]  # fmt: skip
    if words and not one_hot:
        raise BadInput(f"{_listed(words)} hold no numbers; leave them out of features, or set "
                       "one_hot=True to code categories by 0 and 1")  # fmt: skip
    many = [c for c in words if table[c].nunique() > MOST_CATEGORIES]
    if many:
        raise BadInput(f"{_listed(many)} hold more than {MOST_CATEGORIES} categories; leave them "
                       "out of features or group them first")  # fmt: skip
    coded = pandas.get_dummies(table, columns=words) if words else table
    with np.errstate(over="ignore"):  # infinity is refused with its client later
        return coded.to_numpy(dtype=np.float32), [str(c) for c in coded]


def _targets(pandas: Any, column: Any, regression: bool | None) -> tuple[np.ndarray, Any]:
    """Classes by their place among the sorted values, with these values; or floats and None."""
    numeric = pandas.api.types.is_numeric_dtype(column)
    if regression is None:
        regression = pandas.api.types.is_float_dtype(column)
        whole = pandas.api.types.is_integer_dtype(column)
        if whole and (count := column.nunique()) > MOST_WHOLE_NUMBERS:
            raise BadInput(f"target {column.name!r} holds {count} distinct whole numbers; say "
                           "regression=True, or regression=False if they are classes")  # fmt: skip
    if regression and not numeric:
        raise BadInput(f"target {column.name!r} holds no numbers, so it cannot be regressed on")
    if regression:
        return column.to_numpy(dtype=np.float32), None
    code, values = pandas.factorize(column, sort=True)
    return code.astype(np.int64), values.tolist()


def _listed(columns: Sequence[Any], most: int = 5) -> str:
    some = ", ".join(repr(str(c)) for c in columns[:most])
    more = f" and {len(columns) - most} more" if len(columns) > most else ""
    return f"column{'s' if len(columns) > 1 else ''} {some}{more}"


# -- data sets -------------------------------------------------------------------------------------
def pairs_of_datasets(
    part: str,
    datasets: Any,
    x: str | Sequence[str] | None,
    y: str | None,
    transform: Callable[[Tensor], Any] | None,
) -> tuple[Pairs, int | None]:
    """One pair of arrays per data set, and the number of classes where the data sets know it."""
    if isinstance(datasets, Mapping):
        raise BadInput(f"{part} must be a list with one data set per client, not a dict: give "
                       "list(d.values()), and client_names=list(d)")  # fmt: skip
    one = isinstance(datasets, str | torch.utils.data.Dataset) or hasattr(datasets, "with_format")
    if one or not hasattr(datasets, "__iter__"):
        raise BadInput(f"{part} must be a list with one data set per client, not a "
                       f"{type(datasets).__name__}")  # fmt: skip
    pairs, classes = [], []
    for client, dataset in enumerate(datasets):
        where = f"{part}, client {client}"
        table = hasattr(dataset, "with_format") and hasattr(dataset, "__len__")  # and no stream
        try:
            inputs, targets = (_columns_of if table else _items_of)(dataset, x, y)
            if transform is not None:
                inputs = transform(inputs)
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None
        except Exception as error:
            raise BadInput(
                f"{where}: the samples cannot be put into one tensor ({cause(error)})"
            ) from error
        pairs.append((inputs, targets))
        if table:
            classes.append(getattr(dataset.features[y], "num_classes", None))
    known = {number for number in classes if number is not None}
    return pairs, known.pop() if len(known) == 1 else None


def _items_of(dataset: Any, x: Any, y: Any) -> tuple[Any, Tensor]:
    """Of a torch data set, whose items are (x, y) pairs, or dicts with these keys."""
    if isinstance(dataset, torch.utils.data.DataLoader):  # its items are batches
        raise BadInput("a DataLoader holds batches; give its data set, loader.dataset")
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    items = [dataset[i] for i in range(len(dataset))] if sized else list(dataset)
    if not items:
        raise BadInput("the data set is empty")
    if isinstance(items[0], Mapping):
        items = [(item[_key(x, "x", item)], item[_key(y, "y", item)]) for item in items]
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise BadInput(f"an item is a {type(items[0]).__name__}, not an (x, y) pair")
    inputs, targets = torch.utils.data.default_collate(items)
    return tuple(inputs) if isinstance(items[0][0], tuple) else inputs, targets


def _columns_of(dataset: Any, x: Any, y: Any) -> tuple[Tensor, np.ndarray]:
    """Of a Hugging Face data set: a column, or several of numbers side by side."""
    wanted = [x] if isinstance(x, str) else list(x or [])
    for column in wanted or [None]:
        _key(column, "x", dataset.column_names)
    _key(y, "y", dataset.column_names)
    found = dataset.with_format("numpy", columns=[*wanted, y])[:]
    inputs = found[x] if isinstance(x, str) else np.stack([found[c] for c in wanted], axis=1)
    if why := why_no_numbers(inputs):
        raise BadInput(f"x cannot be read as an array of numbers ({why})")
    return torch.as_tensor(inputs), found[y]


def why_no_numbers(array: np.ndarray) -> str | None:
    """What an array of text or of objects should have been."""
    if array.dtype.kind in "US":
        return "it holds text; number classes and tokens from 0"
    if array.dtype.kind == "O":
        return "it holds text, gaps (None) or rows of different lengths"
    return None


def _key(key: Any, argument: str, known: Any) -> str:
    if key not in list(known):  # lists cannot be hashed
        raise BadInput(f"{argument} = {shown(key)}: name one of {', '.join(map(str, known))}")
    return str(key)


# -- the scale of inputs ---------------------------------------------------------------------------
def moments(x: Shaped[Tensor, " N *features"]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation by column of a table, by channel of images (four axes, channel
    first), in all of other inputs; they broadcast over samples. A constant has deviation 1."""
    over = {1: [0], 2: [0], 4: [0, 2, 3]}.get(x.dim(), list(range(x.dim())))
    values = x.double()
    mean, sd = values.mean(over, keepdim=True), values.std(over, keepdim=True, correction=0)
    constant = sd <= 1e-12 * (1 + mean.abs())
    return mean[0].to(x.dtype), torch.where(constant, 1.0, sd)[0].to(x.dtype)


def scale_problem(x: Shaped[Tensor, " N *features"], columns: Sequence[str] | None) -> str | None:
    """One line if the inputs are raw pixels or have columns far from unit scale, else None."""
    if not x.is_floating_point() or not x.numel():
        return None
    some = x[:: max(1, len(x) // LOOKED_AT)].float()
    way = "use federation.standardise(), which takes mean and deviation of the training data"
    large = some.abs().max() > LARGEST_RMS
    pixels = large and some.min() >= 0 and some.max() <= 255 and bool((some == some.round()).all())
    if pixels and some[0].numel() >= 64:
        return f"the inputs look like raw pixel values from 0 to 255; {way}, or divide by 255"
    if x.dim() != 2:
        overall = float(some.square().mean().sqrt())
        problem = f"the inputs have root mean square {overall:.3g}; {way}"
        return problem if overall > LARGEST_RMS else None
    rms, varies = some.square().mean(0).sqrt(), some.amax(0) > some.amin(0)
    bad = varies & ((rms > LARGEST_RMS) | (rms < SMALLEST_RMS))
    places = bad.nonzero().flatten().tolist()
    if not places:
        return None
    names = [columns[k] if columns and len(columns) == x.shape[1] else k for k in places]
    first = float(rms[places[0]])
    return (f"the inputs are badly scaled: {_listed(names)} (root mean square {first:.3g} in the "
            f"first); {way}")  # fmt: skip
