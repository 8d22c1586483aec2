"""`runs.tar.xz`: results that are small enough to publish, instead of a sweep's gigabytes.

The archive holds the chosen runs, whose histories keep what reports show (right answers of every
client, weights, the first training losses), and for every other configuration its validation
curve. So the choice can be repeated and each table and figure made again. Final models and the
losses on validation and test data are left out.

`runs.json` in the same folder is the sealed list of its contents: the archive's own SHA-256, and
the name and SHA-256 of every file in it. An archive is read to its end and compared with this list.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
from msgspec import Meta, field, to_builtins
from msgspec.structs import replace
from safetensors.numpy import save

from fairvar.common.files import (
    MOST_ARCHIVE,
    Number,
    Record,
    Sha256,
    check,
    checksums,
    digest,
    open_regular,
    seal,
    write_bytes,
)
from fairvar.data.readers import tar_files
from fairvar.engine.keys import fingerprint
from fairvar.errors import IntegrityError, RunFailed
from fairvar.runs import formats
from fairvar.runs.config import Config
from fairvar.runs.identity import RECORD
from fairvar.runs.own import facts_of
from fairvar.runs.select import Curve
from fairvar.runs.stored import Manifest, Provenance, Stored, StoredRun
from fairvar.runs.trials import Group, Summary, Trial
from fairvar.scores import ACCURACY, metric_facts, recorded_metric

ARCHIVE, LIST = "runs.tar.xz", "runs.json"
SUMMARIES = "summaries"
# An archive may come from elsewhere: it must fill neither the disk nor the memory.
NAME = r"\A(?a:(\w[\w.-]*/){1,2}\w[\w.-]*)\Z"
MOST_BYTES = 2_000_000_000  # unpacked
MOST_FILES = 100_000
MOST_FILE_BYTES = 64 << 20
MOST_RATIO = 200  # of unpacked to packed bytes, above `ANY_RATIO` bytes
ANY_RATIO = 64 << 20
Model = Literal["global", "local", "personal"]


class SummaryManifest(Manifest, frozen=True, kw_only=True):
    """The manifest of a configuration of which only validation curves were kept."""

    diverged: bool
    last: dict[Model, tuple[float, float]]
    provenances: Annotated[list[Provenance], Meta(min_length=1)] = field(name="births")

    def __post_init__(self) -> None:
        seeds = [provenance.seed for provenance in self.provenances]
        if len(set(seeds)) < len(seeds):
            raise ValueError("two of its runs have the same seed")


class Condensed(Stored):
    """A configuration of which only the summary was kept; `config` has one of its seeds."""

    kind = SummaryManifest

    @staticmethod
    def all_in(folder: Path) -> list[Condensed]:
        found = sorted((folder / SUMMARIES).glob("*"))
        return [Condensed.open(path) for path in found if formats.is_complete(path)]

    def check_manifest(self, manifest: SummaryManifest) -> None:
        name = self.identity.name
        if RECORD not in self.manifest:  # earlier versions used the checksum of the configuration
            name = manifest.sha256["config.toml"][:16]
        formats.agree(
            f"the summary in {self.folder}",
            name=(self.folder.name, name),
            method=(manifest.method, self.config.method.label),
            seed=(manifest.provenances[0].seed, self.config.train.seed),
        )

    def summary(self) -> Summary:
        facts, where = self.manifest, self.folder / "curves.safetensors"
        try:
            content = formats.read_sealed(self.folder, facts, where.name)
            curves = {name: leaf.numpy() for name, leaf in formats.load_tensors(content).items()}
            rounds = _checked_curves(curves, self.config.train.rounds)
            models = sorted({name.split("/")[0] for name in curves} - {"rounds"})
            if facts["diverged"] != (not rounds) or facts["last"].keys() - models:
                raise ValueError("its manifest lists other curves")
            return Summary(
                rounds,
                facts["diverged"],
                {m: Curve(curves[f"{m}/mean"], curves[f"{m}/variance"]) for m in models},
                {model: tuple(two) for model, two in facts["last"].items()},
                facts["births"],
                recorded_metric(facts) or ACCURACY,
            )
        except (LookupError, ValueError, TypeError) as error:
            raise IntegrityError(f"{where} does not hold a summary: {error}") from None


def _checked_curves(curves: Mapping[str, np.ndarray], most: int) -> list[int]:
    """The evaluated rounds, after checking that every curve has one number for each of them."""
    rounds = curves["rounds"]
    if rounds.dtype != np.int64 or rounds.ndim != 1 or (np.diff(rounds) < 1).any():
        raise ValueError("rounds is no column of increasing rounds")
    if len(rounds) and not 1 <= rounds[0] <= rounds[-1] <= most:
        raise ValueError(f"rounds go from {rounds[0]} to {rounds[-1]} of {most}")
    known = [f"{model}/{part}" for model in get_args(Model) for part in ("mean", "variance")]
    for name, curve in curves.items():
        if name != "rounds" and (name not in known or curve.dtype != np.float64
                                 or curve.shape != rounds.shape):  # fmt: skip
            raise ValueError(f"{name[:80]!r} is no curve over these rounds")
    return [int(t) for t in rounds]


class ArchiveList(Record, frozen=True, kw_only=True):
    """runs.json: what runs.tar.xz is and holds."""

    archive_sha256: Sha256
    archive_bytes: Number
    count: Number
    files: dict[Annotated[str, Meta(max_length=99, pattern=NAME)], Sha256]

    def __post_init__(self) -> None:
        if self.count != len(self.files):
            raise ValueError(f"it counts {self.count} files and lists {len(self.files)}")

    @staticmethod
    def of(sha256: str, size: int, files: dict[str, str]) -> ArchiveList:
        return ArchiveList(archive_sha256=sha256, archive_bytes=size, count=len(files), files=files)


# -- writing ---------------------------------------------------------------------------------------
def condense(groups: Sequence[Group], out: Path, everything: bool = False) -> Path:
    """Write `out/runs.tar.xz` and its list. `everything` keeps the histories of all runs, also of
    configurations that were not chosen."""
    files: dict[str, bytes] = {}
    for group in groups:
        chosen = {id(result.trial) for result in group.results}
        for trial in group.trials:
            runs = [run for run in trial.source if isinstance(run, StoredRun)]
            if runs and (everything or id(trial) in chosen):
                for run in runs:
                    files |= _within(run.identity.name, _run_files(run))
            else:
                files |= _summary_files(group, trial)
        if group.federation is not None:
            name = f"federations/{group.federation['sha256'][:16]}.json"
            facts = {k: v for k, v in group.federation.items() if k != "seal"}
            files[name] = seal(facts)
    path, content = out / ARCHIVE, pack(files)
    write_bytes(path, content)
    sha256 = hashlib.sha256(content).hexdigest()
    write_list(out, ArchiveList.of(sha256, len(content), checksums(files)))
    return path


def _within(folder: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def _run_files(run: StoredRun) -> dict[str, bytes]:
    read = {name: formats.read_sealed(run.folder, run.manifest, name)
            for name in ("config.toml", "history.safetensors")}  # fmt: skip
    if run.manifest.get("condensed"):
        return {**read, "manifest.json": seal(run.manifest)}
    facts = {k: v for k, v in run.manifest.items() if k not in ("sha256", "seal")}
    read["history.safetensors"] = formats.condensed_history(read["history.safetensors"])
    return formats.with_manifest(read, {**facts, "condensed": True})


def _config_of(group: Group, trial: Trial, seed: int) -> Config:
    """That of one of the trial's runs, with this seed."""
    config = trial.config or group.config
    train = replace(config.train, lr=trial.lr, seed=seed)
    return replace(config, method=trial.method, train=train)


def _summary_files(group: Group, trial: Trial) -> dict[str, bytes]:
    summary = trial.summary
    seed = int(summary.provenances[0]["seed"])
    config = _config_of(group, trial, seed)
    tensors = {"rounds": np.array(summary.rounds, dtype=np.int64)}
    for model, curve in summary.valid.items():
        tensors |= {f"{model}/mean": curve.mean, f"{model}/variance": curve.variance}
    assert trial.identity is not None  # `gather` sets it
    identity = replace(trial.identity, settings=fingerprint(config))
    facts = {
        "method": trial.method.label,
        RECORD: to_builtins(identity),
        "passport": dict(group.passport),
        "diverged": summary.diverged,
        "last": {model: list(two) for model, two in summary.last.items()},
        "births": [dict(each) for each in summary.provenances],
    }
    facts |= metric_facts(summary.metric)
    if (about := facts_of(trial.method)) is not None:
        facts["own_method"] = to_builtins(about)
    if group.deployed is not None:
        facts["deployed"] = to_builtins(group.deployed)
    files = {"config.toml": config.to_toml().encode(), "curves.safetensors": save(tensors)}
    return _within(f"{SUMMARIES}/{identity.name}", formats.with_manifest(files, facts))


def write_list(folder: Path, contents: ArchiveList) -> Path:
    path = folder / LIST
    write_bytes(path, seal(to_builtins(contents)))
    return path


def pack(files: Mapping[str, bytes]) -> bytes:
    """The archive as bytes: without times and owners, so that the same content gives the same file.
    Files of the same name follow each other, because they are nearly equal and compress well."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=6) as archive:
        for name in sorted(files, key=lambda n: (n.rpartition("/")[2], n)):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name])
            archive.addfile(entry, io.BytesIO(files[name]))
    return buffer.getvalue()


# -- reading ---------------------------------------------------------------------------------------
def unpacked(folder: Path) -> Path:
    """The folder itself or, if it has an archive, a temporary folder with the archive's contents,
    which is deleted when this process ends."""
    both = (folder / ARCHIVE, folder / LIST)
    if not any(os.path.lexists(path) for path in both):
        return folder
    stamps = tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in both)
    return Path(_unpack(folder.resolve(), stamps).name)


@cache  # opened runs refer to the temporary folder
def _unpack(folder: Path, stamps: tuple[int, ...]) -> tempfile.TemporaryDirectory[str]:
    facts = formats.read_record(folder / LIST, ArchiveList, f"get {ARCHIVE} and {LIST} again")
    if facts is None:
        raise IntegrityError(
            f"{folder / ARCHIVE} has no list of its contents ({LIST}); get both files again, or, "
            f"if it was written before there were lists and you trust it: fairvar seal {folder}"
        )
    place = tempfile.TemporaryDirectory(prefix="fairvar-")
    try:
        extract(folder / ARCHIVE, Path(place.name), check(facts, ArchiveList))
    except BaseException:
        place.cleanup()
        raise
    return place


def extract(archive: Path, place: Path, listed: ArchiveList | None = None) -> ArchiveList:
    """Unpack an archive to its end and return its contents, which must be equal to `listed`."""
    try:
        with open_regular(archive, MOST_ARCHIVE) as file:
            sha256, size = digest(file), os.fstat(file.fileno()).st_size
        if listed and (sha256, size) != (listed.archive_sha256, listed.archive_bytes):
            raise ValueError(f"it is not the archive that {LIST} lists")
        sums: dict[str, str] = {}
        most = min(MOST_BYTES, max(ANY_RATIO, MOST_RATIO * size))
        for name, content in tar_files(archive, most, MOST_FILE_BYTES, _check_entry):
            if name in sums:
                raise ValueError(f"it holds {name} twice")
            if len(sums) == MOST_FILES:
                raise ValueError(f"{name} is one of too many files; refused")
            sums[name] = hashlib.sha256(content).hexdigest()
            _store(formats.inside(place, name, depth=3), content)
        if listed and sums != listed.files:
            odd = sorted(sums.items() ^ listed.files.items())[0][0]
            raise ValueError(f"{odd} is not as {LIST} lists it")
    except (IntegrityError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise IntegrityError(f"{archive} cannot be unpacked: {reason}") from None
    return ArchiveList.of(sha256, size, sums)


def _check_entry(entry: tarfile.TarInfo) -> bool:
    """Refuses what `pack` does not write: only plain files with plain names."""
    if entry.type != tarfile.REGTYPE or not re.match(NAME, entry.name):
        raise ValueError(f"it holds {entry.name[:80]!r}, which is no plain file; refused")
    return True


def _store(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise RunFailed(f"cannot unpack into {path.parent}: {error.strerror or error}") from None
