"""Schemas of stored JSON records, checked whenever one is read.

A seal shows that a record was not damaged. It is not a signature: anybody can change a record and
seal it again. So fields have types and bounds, and two records of one fact must agree. Fields that
are not listed are ignored, so that later versions can add some.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from fairvar.errors import IntegrityError

MOST_VALUES = 4_000_000  # in one record: they take about 60 bytes each

Text = Annotated[str, Meta(max_length=1000, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Digits = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z]{1,64}\Z")]  # becomes part of a path
FileName = Annotated[str, Meta(max_length=255, pattern=r"\A[^/\\\x00-\x1f\x7f]+\Z")]
EntryName = Annotated[str, Meta(max_length=99, pattern=r"\A(?a:(\w[\w.-]*/){1,2}\w[\w.-]*)\Z")]
ScoreName = Annotated[str, Meta(pattern=r"\A(train|valid|test)/(global|local)\Z")]
Number = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**62)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Model = Literal["global", "local"]
Split = Literal["train", "valid", "test"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records."""


class Provenance(Record, frozen=True, kw_only=True):
    """`birth`: where a run was computed, with which versions, for how long."""

    fairvar: Text
    torch: Text
    device: Text
    dtype: Text
    seed: Number
    engine: Text
    seconds: Amount
    precision: Text = "full"
    captured: bool = False
    peak_megabytes: Amount | None = None
    together: Positive = 1
    refused: dict[Text, Number] = {}
    weight_capped_rounds: Number = 0


class Normalisation(Record, frozen=True, kw_only=True):
    mean: list[float]
    sd: list[float]


class Partition(Record, frozen=True, kw_only=True):
    """`passport`: how the samples were divided among the clients. If the data are at nodes, only
    their name and the number of clients are known."""

    dataset: Text | None = None
    clients: Positive | None = None
    sha256: Digits | None = None
    dataset_sha256: Digits | None = None
    provenance: Text | None = None
    sizes: list[Count] | None = None
    classes_by_client: list[Count] | None = None
    mean_total_variation: Share | None = None
    effective_classes: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    majority_share: Share | None = None
    attempts: Number | None = None
    moved: Number | None = None
    seed: Number | None = None
    holdout: Text | None = None
    split: list[Share] | None = None
    split_sizes: dict[Split, list[Count]] | None = None
    normalisation: Normalisation | None = None
    partition: dict[Text, Any] | None = None
    fraction: Share | None = None
    samples: Positive | None = None
    pool_samples: Positive | None = None

    def __post_init__(self) -> None:
        tables = {"sizes": self.sizes, "classes_by_client": self.classes_by_client}
        tables |= {f"split_sizes.{k}": v for k, v in (self.split_sizes or {}).items()}
        known = {name: len(table) for name, table in tables.items() if table is not None}
        if self.clients is not None and set(known.values()) - {self.clients}:
            raise ValueError(f"it has {self.clients} clients, but {known}")
        if self.sizes is not None and self.split_sizes is not None:
            own = [self.split_sizes.get("train", [])]  # other splits come from a pool
            if self.holdout == "split":
                own = list(self.split_sizes.values())
            if [sum(parts) for parts in zip(*own, strict=True)] != self.sizes:
                raise ValueError("split_sizes do not add up to sizes")


class FederationRecord(Partition, frozen=True, kw_only=True):
    """federations/*.json: a partition with the training samples of each class at each client."""

    sha256: Digits
    class_counts: list[list[Count]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({len(row) for row in self.class_counts}) != 1 or not self.class_counts[0]:
            raise ValueError("class_counts is not a table")
        if self.clients not in (None, len(self.class_counts)):
            raise ValueError(f"class_counts has {len(self.class_counts)} rows")
        train = (self.split_sizes or {}).get("train")
        if train is not None and train != [sum(row) for row in self.class_counts]:
            raise ValueError("class_counts do not add up to the clients' training samples")


class Manifest(Record, frozen=True, kw_only=True):
    """The fields of all manifests."""

    sha256: dict[FileName, Sha256]
    method: Annotated[str, Meta(max_length=1000)]  # a label of any form, also of a plugin
    passport: Partition


class Scores(Record, frozen=True, kw_only=True):
    """The main numbers of one split and model after the last round; NaN where there are none."""

    mean: float
    variance_over_clients: float
    noise_floor: float
    corrected_variance: float
    worst_10_percent: float
    smallest: float


class RunManifest(Manifest, frozen=True, kw_only=True):
    name: Text
    fingerprint: Sha256
    protocol: Text
    starts_from: Text
    rounds: Number
    diverged_at: Number | None
    exchanges_per_client: Number
    bytes_down_per_client: Number
    bytes_up_per_client: Number
    result: dict[ScoreName, Scores]
    birth: Provenance
    condensed: bool = False


class SummaryManifest(Manifest, frozen=True, kw_only=True):
    """Of a configuration of which only validation curves were kept."""

    diverged: bool
    last: dict[Model, tuple[float, float]]
    births: Annotated[list[Provenance], Meta(min_length=1)]

    def __post_init__(self) -> None:
        seeds = [birth.seed for birth in self.births]
        if len(set(seeds)) < len(seeds):
            raise ValueError("two of its runs have the same seed")


class ArchiveList(Record, frozen=True, kw_only=True):
    """runs.json: what runs.tar.xz is and holds."""

    archive_sha256: Sha256
    archive_bytes: Number
    count: Number
    files: dict[EntryName, Sha256]

    def __post_init__(self) -> None:
        if self.count != len(self.files):
            raise ValueError(f"it counts {self.count} files and lists {len(self.files)}")


R = TypeVar("R", bound=Record)


def parse_json(raw: bytes) -> dict[str, Any]:
    """A JSON object of bounded size; ValueError says what is wrong."""
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES} values")
    try:
        found = json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


def check(facts: Mapping[str, Any], kind: type[R]) -> R:
    """The record, if it has all fields in the right form; ValueError otherwise."""
    try:
        return msgspec.convert(facts, kind)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        where = place.strip(".`[]")
        raise ValueError(f"{where}: {text.replace('`', '')}" if where else text) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def agree(where: object, **pairs: tuple[object, object]) -> None:
    """Raise unless both values of each fact are equal."""
    for fact, (one, other) in pairs.items():
        if one != other:
            raise IntegrityError(
                f"{where} contradicts itself: {fact} is {str(one)[:80]} and {str(other)[:80]}"
            )
