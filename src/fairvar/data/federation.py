"""A `Federation`: the data of all clients on one device, split into train, valid and test.

The samples of all clients are rows of one flat tensor, sorted by client; the number
of samples of each client is kept separately. Nothing is padded, and one gather builds any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from fairvar.common import display
from fairvar.common.tree import Inputs, input_parts, map_inputs
from fairvar.common.validation import as_python, whole_number
from fairvar.data import own_data
from fairvar.data.dataset import IGNORED, first_not_finite
from fairvar.data.own_data import DEFAULT_SPLIT, Shares
from fairvar.data.own_data import SPLITS as SPLITS
from fairvar.errors import BadInput, cause, shown


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """One part (train, valid or test) of all clients' data; client i owns `counts[i]` rows.

    x may be several tensors in a tuple or dict, with the same rows. Integer targets with further
    axes are labels of positions in a sequence; `IGNORED` marks positions without one.
    """

    x: Any  # `Inputs`: nearly always one tensor, so that users need not ask which
    y: Shaped[Tensor, " N *targets"]
    counts: Int64[Tensor, " n"]  # always on the CPU: it steers Python loops

    def __repr__(self) -> str:
        shapes = " and ".join(str(tuple(part.shape[1:])) for part in input_parts(self.x).values())
        held = f"{int(self.counts.sum()):,} samples of shape {shapes}"
        return f"<Split: {display.plural(len(self.counts), 'client')}, {held}>"

    def _repr_html_(self) -> str:
        sizes = [[count] for count in self.counts.tolist()]
        return display.card(repr(self)[1:-1], display.bars("samples by client", sizes, "samples"))

    @cached_property
    def offsets(self) -> list[int]:
        """Client i's rows are offsets[i] … offsets[i + 1] - 1."""
        return [0, *torch.cumsum(self.counts, 0).tolist()]

    @cached_property
    def client(self) -> Int64[Tensor, " N"]:
        """The client of each row, on the data's device."""
        n = torch.arange(len(self.counts))
        return torch.repeat_interleave(n, self.counts).to(self.device)

    @cached_property
    def counts_there(self) -> Int64[Tensor, " n"]:
        """The counts on the data's device: a round that is being recorded cannot copy them."""
        return self.counts.to(self.device)

    @cached_property
    def answers(self) -> Int64[Tensor, " n"]:
        """Labels of each client, on the data's device: its samples, or positions of sequences."""
        if self.y.dim() == 1 or self.y.is_floating_point():
            return self.counts_there
        real = (self.y != IGNORED).flatten(1).sum(1)
        return torch.zeros_like(self.counts_there).index_add_(0, self.client, real)

    @property
    def device(self) -> torch.device:
        return self.y.device

    def take(self, rows: Tensor | slice) -> tuple[Any, Tensor]:
        """x and y of some rows."""
        return map_inputs(lambda part: part[rows], self.x), self.y[rows]

    def of(self, client: int) -> tuple[Any, Tensor]:
        return self.take(slice(self.offsets[client], self.offsets[client + 1]))

    def blank(self, samples: int) -> Split:
        """Zeros of the same form, all of one client."""

        def zeros(part: Tensor) -> Tensor:
            return part.new_zeros(samples, *part.shape[1:])

        return Split(map_inputs(zeros, self.x), zeros(self.y), torch.tensor([samples]))

    def targets(self, client: int) -> Tensor:
        return self.y[self.offsets[client] : self.offsets[client + 1]]

    def dealt(self, rows: Sequence[np.ndarray]) -> Split:
        """Some samples: of each client that is left, the numbers of its rows here."""
        every = torch.from_numpy(np.concatenate([*rows, np.empty(0, dtype=np.int64)]))
        counts = torch.tensor([len(r) for r in rows], dtype=torch.int64)
        return Split(*self.take(every), counts)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Split:
        """Moved, with floating-point values in `dtype` (labels and tokens keep theirs)."""

        def move(t: Tensor) -> Tensor:
            return t.to(device, dtype if t.is_floating_point() else t.dtype)

        return Split(map_inputs(move, self.x), move(self.y), self.counts)


@dataclass(frozen=True, eq=False, repr=False)  # compared by identity
class Federation:
    """All clients' data. `provenance`: data set, partition and seed, if it was drawn."""

    train: Split
    valid: Split | None = None
    test: Split | None = None
    name: str = "arrays"
    classes: int | None = None  # None: regression
    provenance: Mapping[str, Any] = field(default_factory=dict)
    client_names: tuple[str, ...] = ()  # empty: they are numbers

    def __repr__(self) -> str:
        held = ", ".join(f"{len(split.y)} {part}" for part, split in self.splits.items())
        more = ", …" if len(self.client_names) > 4 else ""
        who = f" ({', '.join(self.client_names[:4])}{more})" if self.client_names else ""
        return f"<Federation {self.name}: {display.plural(self.clients, 'client')}{who}, {held}>"

    def _repr_html_(self) -> str:
        """A picture of who holds what."""
        counts = self.sizes[:, None] if self.classes is None else self.class_counts
        picture = display.bars("training samples by client", counts.tolist(), "training samples")
        return display.card(repr(self)[1:-1], picture)

    @property
    def class_counts(self) -> Int64[Tensor, "n classes"]:
        """Training samples of each class at each client; of sequences, positions."""
        split, classes = self.train, self.classes or 1
        labels = split.y.reshape(len(split.y), -1)
        cells = (split.client[:, None] * classes + labels)[labels != IGNORED]
        counts = torch.bincount(cells, minlength=self.clients * classes)
        return counts.reshape(self.clients, classes).cpu()

    @property
    def clients(self) -> int:
        return len(self.train.counts)

    @property
    def sizes(self) -> Int64[Tensor, " n"]:
        """Training samples per client."""
        return self.train.counts

    @property
    def splits(self) -> dict[str, Split]:
        found = {name: getattr(self, name) for name in SPLITS}
        return {name: split for name, split in found.items() if split is not None}

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of a sample; () if it has several inputs."""
        x = self.train.x
        return tuple(x.shape[1:]) if isinstance(x, Tensor) else ()

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Federation:
        moved: dict[str, Any] = {k: split.to(device, dtype) for k, split in self.splits.items()}
        return replace(self, **moved)

    def only(self, clients: Sequence[int | str]) -> Federation:
        """Some of the clients, by id or name, numbered from 0 in this order."""
        clients = as_python(clients)
        if isinstance(clients, str) or not isinstance(clients, Iterable):
            raise BadInput(f"only({shown(clients)}): give a list of ids or names")
        ids = [own_data.client_id(i, self.clients, self.client_names) for i in clients]
        if not ids:
            raise BadInput("no client is left; name at least one")
        return self._only(ids)

    def _only(self, ids: Sequence[int]) -> Federation:
        kept: dict[str, Any] = {}
        for part, split in self.splits.items():
            start = split.offsets
            kept[part] = split.dealt([np.arange(start[i], start[i + 1]) for i in ids])
            if not kept[part].counts.any():
                kept[part] = None
        names = tuple(self.client_names[i] for i in ids) if self.client_names else ()
        return replace(self, **kept, client_names=names)

    def hold_out(
        self, clients: float | Sequence[int | str], seed: int = 0
    ) -> tuple[Federation, Federation]:
        """Two federations: of the clients that train, and of those that join later, which are a
        share of all (drawn with `seed`) or listed by id or name. See `fairvar.new_clients`."""
        new = own_data.chosen_clients(clients, self.clients, self.client_names, seed).tolist()
        rest = np.setdiff1d(np.arange(self.clients), new).tolist()
        kept = {k: v for k, v in self.provenance.items() if k in ("features", "labels")}
        facts: dict[str, Any] = {**kept, "whole": dict(self.provenance)}
        train, later = (replace(self._only(ids), provenance={**facts, "ids": ids})
                        for ids in (rest, new))  # fmt: skip
        return train, later

    @property
    def scale_problem(self) -> str | None:
        """What `train` warns about: raw pixels or columns far from unit scale."""
        columns = self.provenance.get("features")
        for name, x in input_parts(self.train.x).items():
            if problem := own_data.scale_problem(x, columns):
                return problem if name == "x" else f"{name}: {problem}"
        return None

    def standardise(self, like: Federation | None = None) -> Federation:
        """Inputs with mean 0 and standard deviation 1 in the training data of all clients together,
        by column of a table, by channel of images, and by one number for other shapes. `like`: with
        the numbers of that federation, for clients that took no part in training. Constant columns
        become 0. Of several inputs each is standardised by itself; integers stay as they are."""
        like = self if like is None else like
        if not isinstance(like, Federation):
            raise BadInput(f"standardise: like = {shown(like)}: give a Federation")
        parts = input_parts(like.train.x)
        shapes, own = ([(name, tuple(part.shape[1:])) for name, part in of.items()]
                       for of in (parts, input_parts(self.train.x)))  # fmt: skip
        if shapes != own:
            there, here = (
                pairs[0][1] if len(pairs) == 1 else dict(pairs) for pairs in (shapes, own)
            )
            raise BadInput(f"standardise: `like` has inputs of shape {there}, but here "
                           f"they have {here}")  # fmt: skip
        found = [own_data.moments(part) if part.is_floating_point() else None
                 for part in parts.values()]  # fmt: skip
        known = [pair for pair in found if pair is not None]
        if not known:
            kinds = ", ".join(sorted({str(part.dtype) for part in parts.values()}))
            raise BadInput(f"standardise: the inputs are {kinds}; give one array of floats")

        def scaled(x: Inputs) -> Inputs:
            numbers = iter(found)
            return map_inputs(
                lambda part: part if (m := next(numbers)) is None else (part - m[0]) / m[1], x
            )

        done: dict[str, Any] = {k: replace(s, x=scaled(s.x)) for k, s in self.splits.items()}
        mean, sd = (torch.cat([pair[k].flatten() for pair in known]).tolist() for k in (0, 1))
        facts = {**self.provenance, "normalisation": {"mean": mean, "sd": sd}}
        return replace(self, **done, provenance=facts)

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[tuple[Any, Any]],
        valid: Sequence[tuple[Any, Any]] | None = None,
        test: Sequence[tuple[Any, Any]] | None = None,
        *,
        split: Shares | None = None,
        seed: int = 0,
        classes: int | None = None,
        name: str = "arrays",
        client_names: Sequence[str] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Federation:
        """One (x, y) pair of arrays or tensors per client. x may be a tuple or dict of arrays, for
        models with several inputs. Integer y: classes, one per sample, or one per position of a
        sequence (-100 where there is none); float y: regression.

        split: shares of train, valid and test, as (0.8, 0.1, 0.1), by which each client's samples
        in `train` are divided at random with `seed`; without it they all train. From three samples
        on a client has some in every part.

        Everything is checked here, once: lengths, shapes, finite values, label range. A client
        may lack validation or test samples (it then counts in no average), never training samples.
        """
        if classes is not None:
            classes = whole_number("classes", classes, least=1)
        if not isinstance(name, str):
            raise BadInput(f"name = {shown(name)}: give a string")
        if not isinstance(provenance, Mapping | None):
            raise BadInput(f"provenance must be a dict, not {type(provenance).__name__}")
        given = {"train": train, "valid": valid, "test": test}
        pairs = {part: _pairs(part, v) for part, v in given.items() if v is not None}
        if not pairs.get("train"):
            raise BadInput("train holds no client; give one (x, y) pair per client")
        splits = {part: _join(part, v, len(pairs["train"])) for part, v in pairs.items()}
        if split is not None:
            split, seed = own_data.checked_shares(split), whole_number("seed", seed)
            splits = _divided(splits, split, seed)
            provenance = {**(provenance or {}), "split": list(split), "seed": seed}
        made = cls.from_splits(splits, classes, name, provenance)
        return replace(made, client_names=_names(client_names, made.clients))

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        client: str,
        target: str,
        features: Sequence[str] | None = None,
        split: str | Shares | None = DEFAULT_SPLIT,
        seed: int = 0,
        regression: bool | None = None,
        one_hot: bool = False,
        name: str = "frame",
    ) -> Federation:
        """A pandas DataFrame (or a dict of columns), one client per distinct value of the column
        `client`, in sorted order; their names are kept.

        target: the column to predict. Floats are regressed on; words, categories, booleans and
        whole numbers are classes in sorted order. `regression` says so where that is not meant.
        features: columns of the inputs, by default all others. one_hot: code columns of words by 0
        and 1; without it they are refused.
        split: shares as in `from_arrays`, or a column that holds "train", "valid" and "test".
        """
        found = own_data.clients_of_frame(
            frame, client, target, features, split, regression, one_hot
        )
        return cls.from_arrays(**found, seed=seed, name=name)

    @classmethod
    def from_csv(cls, path: str | Path, *, client: str, target: str, **options: Any) -> Federation:
        """A CSV file with a line of column names, read by pandas; options as in `from_frame`. The
        clients' names are as written in the file, such as 001."""
        frame = own_data.read_csv(path, client)
        options = {"name": Path(path).stem, **options}
        return cls.from_frame(frame, client=client, target=target, **options)

    @classmethod
    def from_datasets(
        cls,
        train: Sequence[Any],
        valid: Sequence[Any] | None = None,
        test: Sequence[Any] | None = None,
        *,
        x: str | Sequence[str] | None = None,
        y: str | None = None,
        transform: Callable[[Tensor], Any] | None = None,
        classes: int | None = None,
        **options: Any,
    ) -> Federation:
        """One data set per client: PyTorch's (also `Subset`s) with items (x, y), or Hugging Face's
        (also partitions of flwr-datasets), where `x` names the column of the inputs, or several
        columns of numbers, and `y` that of the targets.

        transform: of all inputs of a client at once, such as lambda x: x / 255. Other options as in
        `from_arrays`.
        """
        given = {"train": train, "valid": valid, "test": test}
        found: dict[str, Any] = {}
        for part, sets in given.items():
            if sets is not None:
                found[part], known = own_data.pairs_of_datasets(part, sets, x, y, transform)
                classes = classes or known
        return cls.from_arrays(**found, classes=classes, **options)

    @classmethod
    def from_splits(
        cls, splits: Mapping[str, Split], classes: int | None, name: str, provenance: Any = None
    ) -> Federation:
        """Clients' data that are laid out already: values, shapes and labels are checked."""
        first = splits["train"]
        for part, split in splits.items():
            for values, own, trained in _tensors(split, first):
                row = first_not_finite(own)
                if row is not None:
                    client, sample = _place(split, row)
                    raise BadInput(f"{part}, client {client}: {values} holds NaN or infinity first "
                                   f"in sample {sample}; clean the data first")  # fmt: skip
                if own.shape[1:] != trained.shape[1:]:
                    raise BadInput(f"{part}: samples of {values} have shape {tuple(own.shape[1:])},"
                                   f" but {tuple(trained.shape[1:])} in train")  # fmt: skip
                if own.is_floating_point() != trained.is_floating_point():
                    raise BadInput(f"{part}: {values} is {own.dtype}, but {trained.dtype} in train")
        if first.y.is_floating_point():
            classes = None
        else:
            largest = max(int(s.y.max()) for s in splits.values() if s.y.numel())
            known = classes or max(largest, 0) + 1
            for part, split in splits.items():
                _check_labels(part, split, known)
            classes = known
        found: dict[str, Any] = dict(splits)
        return cls(**found, name=name, classes=classes, provenance=dict(provenance or {}))


def _divided(splits: Mapping[str, Split], split: Shares, seed: int) -> dict[str, Split]:
    """The training samples of each client divided into train, valid and test."""
    if len(splits) > 1:
        raise BadInput("give split or valid and test, not both")
    whole = splits["train"]
    rows = [np.arange(a, b) for a, b in pairwise(whole.offsets)]
    return {part: whole.dealt(of) for part, of in own_data.split_rows(rows, seed, split).items()}


def _names(given: Any, clients: int) -> tuple[str, ...]:
    """The clients' names as text; () if they have none."""
    found = as_python(() if given is None else given)
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise BadInput(f"client_names = {shown(given)}: give a list of names, one per client")
    names = tuple(found)
    if names and len(names) != clients:
        raise BadInput(
            f"client_names has {len(names)} entries for {clients} clients; give one each"
        )
    for name in names:
        if not isinstance(name, str):
            raise BadInput(f"client_names: {shown(name)} is a {type(name).__name__}; give one "
                           "string each")  # fmt: skip
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"client_names: {shown(twice)} names two clients; give each its own name")
    return names


def _pairs(part: str, given: Any) -> list[tuple[Any, Any]]:
    """The clients' (x, y) pairs, whatever holds them."""
    way = f"{part} must be a list with one (x, y) pair of arrays per client"
    if isinstance(given, Mapping):
        raise BadInput(f"{way}, not a dict: give list(d.values()), and client_names=list(d)")
    if isinstance(given, Tensor | np.ndarray | str | bytes):
        raise BadInput(f"{way}, not a {type(given).__name__}")
    try:
        found = list(given)
    except TypeError:
        raise BadInput(f"{way}, not a {type(given).__name__}") from None
    for i, pair in enumerate(found):
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            if len(found) == 2 and isinstance(given, tuple):
                raise BadInput(f"{way}; of one client give [(x, y)]")
            length = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
            raise BadInput(f"{way}, but client {i} is a {type(pair).__name__}{length}")
    return found


def _join(part: str, pairs: Sequence[tuple[Any, Any]], clients: int) -> Split:
    """One split's pairs as flat rows. Per client only lengths and shapes are looked at: a hundred
    thousand clients take a second."""
    if len(pairs) != clients:
        raise BadInput(f"{part} has {len(pairs)} clients but train has {clients}; give one pair "
                       "each")  # fmt: skip
    ys = [_array(pair[1], part, i, "y") for i, pair in enumerate(pairs)]
    counts = [len(y) for y in ys]
    if not all(counts) and part == "train":
        raise BadInput(f"train, client {counts.index(0)} is empty; drop it or give it at least one "
                       "sample")  # fmt: skip
    if not any(counts):
        raise BadInput(f"{part} holds no sample at all; leave it out instead")
    x, y = _joined_inputs([pair[0] for pair in pairs], counts, part), _flat(ys, part, "y")
    return Split(x, y if y.is_floating_point() else y.long(), torch.tensor(counts))


def _joined_inputs(xs: list[Any], counts: list[int], part: str) -> Inputs:
    """One tensor of all clients' samples, or each of several."""
    kinds = [_form(x) for x in xs]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise BadInput(f"{part}, client {i}: x is {_said(kind)}, but {_said(kinds[0])} in "
                           "client 0; give all clients the same inputs")  # fmt: skip

    def joined(name: str, of_clients: list[Any]) -> Tensor:
        arrays = [_array(x, part, i, name) for i, x in enumerate(of_clients)]
        for i, (x, count) in enumerate(zip(arrays, counts, strict=True)):
            if len(x) != count:
                what = "samples" if name == "x" else f"samples in {name}"
                raise BadInput(f"{part}, client {i}: {len(x)} {what} but {count} targets")
        return _flat(arrays, part, name)

    if kinds[0] is None:
        return joined("x", xs)
    found = {k: joined(f"x[{k!r}]", [x[k] for x in xs]) for k in kinds[0]}
    return found if isinstance(xs[0], Mapping) else tuple(found.values())


def _form(x: Any) -> list[Any] | None:
    """The names or numbers of several inputs; None for a single one."""
    if isinstance(x, Mapping):
        if not x or not all(isinstance(name, str) for name in x):
            raise BadInput("x as a dict must have the names of the model's inputs as keys")
        return sorted(x)
    several = isinstance(x, tuple) and x and all(isinstance(v, Tensor | np.ndarray) for v in x)
    return list(range(len(x))) if several else None


def _said(form: list[Any] | None) -> str:
    return "one array" if form is None else f"several inputs {form}"


def _tensors(split: Split, first: Split) -> list[tuple[str, Tensor, Tensor]]:
    """Name, tensor and the one in train of all inputs, then of the targets."""
    own, trained = input_parts(split.x), input_parts(first.x)
    if own.keys() != trained.keys():
        raise BadInput(f"x has the inputs {list(own)}, but {list(trained)} in train")
    return [*((name, own[name], trained[name]) for name in own), ("y", split.y, first.y)]


def _array(values: Any, part: str, client: int, name: str) -> np.ndarray | Tensor:
    where = f"{part}, client {client}: {name}"
    try:
        own = isinstance(values, Tensor)
        array = values.detach().cpu() if own else np.asarray(values)
        if own and values.layout != torch.strided:
            raise ValueError("it is sparse; give x.to_dense()")
        if np.ma.is_masked(values):  # numpy would take what is below the mask
            raise ValueError("some of its values are masked; fill or drop them")
        if not own:
            if array.dtype.kind == "O":  # numbers, or arrays of equal length, as objects
                array = np.asarray(array.tolist())
            if why := own_data.why_no_numbers(array):
                raise ValueError(why)
            _torch_type(array.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        why = "it holds rows of different lengths" if "inhomogen" in str(error) else cause(error)
        raise BadInput(f"{where} cannot be read as an array of numbers ({why})") from None
    if array.ndim == 0:
        raise BadInput(f"{where} is a single number; give an array with one row per sample")
    if array.dtype in COMPLEX:
        raise BadInput(f"{where} holds complex numbers; give real ones")
    if name != "y" and array.dtype in BYTES:
        raise BadInput(f"{where} is uint8; scale pixels to floats (x / 255)")
    return array


COMPLEX = (np.complex64, np.complex128, torch.complex32, torch.complex64, torch.complex128)
BYTES = (np.uint8, torch.uint8)


@cache
def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _flat(arrays: Sequence[np.ndarray | Tensor], part: str, name: str) -> Tensor:
    """All samples of a split, of clients that have any, in one new tensor."""
    filled = [(i, array) for i, array in enumerate(arrays) if len(array)]
    first = filled[0][1]
    kinds = {}
    for i, array in filled:
        if array.shape[1:] != first.shape[1:]:
            raise BadInput(f"{part}: samples differ in shape: {name} {tuple(array.shape[1:])} in "
                           f"client {i}, {tuple(first.shape[1:])} in the first")  # fmt: skip
        kinds[array.dtype] = array
    if len(kinds) == 1 and isinstance(first, np.ndarray):
        return torch.from_numpy(np.concatenate([array for _, array in filled]))
    tensors = [array if isinstance(array, Tensor) else torch.tensor(array) for _, array in filled]
    found = {t.dtype if t.is_floating_point() else torch.int64 for t in tensors}
    if name == "y" and len(found) > 1:
        raise BadInput(f"{part}: targets mix {' and '.join(map(str, found))}; use one of them")
    return torch.cat(tensors)


def _place(split: Split, row: int) -> tuple[int, int]:
    """The client of a row and the number of the sample there."""
    client = int(split.client[row])
    return client, row - split.offsets[client]


def _check_labels(part: str, split: Split, classes: int) -> None:
    outside = (split.y < 0) | (split.y >= classes)
    if split.y.dim() > 1:
        ignored = split.y == IGNORED
        empty = ignored.flatten(1).all(1).nonzero()
        if len(empty):
            client, sample = _place(split, int(empty[0]))
            raise BadInput(f"{part}, client {client}, sample {sample}: all targets are {IGNORED}, "
                           "which marks positions without target; drop this sample")  # fmt: skip
        outside &= ~ignored
    bad = outside.nonzero()
    if len(bad):
        client, sample = _place(split, int(bad[0, 0]))
        raise BadInput(f"{part}, client {client}, sample {sample}: label "
                       f"{int(split.y[tuple(bad[0])])} is outside 0 … {classes - 1}")  # fmt: skip
