"""Results small enough to publish: `runs.tar.xz` in place of a sweep's gigabytes.

It holds the chosen runs, whose histories keep what reports show (right answers of every client,
weights, the first training losses), and of every other configuration its validation curve. So
choosing can be repeated and each table and figure drawn again; final models and the losses on
validation and test data are left out.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace
from safetensors.numpy import load, save

from fairvar.archive import condensed_history
from fairvar.config import Config
from fairvar.errors import IntegrityError
from fairvar.experiment import StoredRun
from fairvar.report.trial import Summary
from fairvar.select import Curve
from fairvar.store import is_complete, read_manifest, read_sealed, seal, with_manifest, write_bytes

if TYPE_CHECKING:
    from fairvar.report.gather import Group

ARCHIVE = "runs.tar.xz"
SUMMARIES = "summaries"
NAME = re.compile(r"(\w[\w.-]*/){1,2}\w[\w.-]*")
MOST_BYTES = 2_000_000_000  # unpacked: an archive from elsewhere must not fill the disk


@dataclass(frozen=True)
class Condensed:
    """A configuration of which the summary alone was kept."""

    folder: Path
    config: Config  # with one of its seeds
    manifest: Mapping[str, Any]

    @staticmethod
    def all_in(folder: Path) -> Iterator[Condensed]:
        for path in sorted((folder / SUMMARIES).glob("*")):
            if is_complete(path):
                manifest = read_manifest(path) or {}
                text = read_sealed(path, manifest, "config.toml").decode()
                yield Condensed(path, Config.from_toml(text), manifest)

    def summary(self) -> Summary:
        facts = self.manifest
        curves = load(read_sealed(self.folder, facts, "curves.safetensors"))
        models = sorted({name.split("/")[0] for name in curves} - {"rounds"})
        try:
            return Summary(
                curves["rounds"].tolist(),
                facts["diverged"],
                {m: Curve(curves[f"{m}/mean"], curves[f"{m}/variance"]) for m in models},
                {model: tuple(two) for model, two in facts["last"].items()},
                facts["births"],
            )
        except KeyError as error:
            raise IntegrityError(f"{self.folder} does not hold a summary: {error}") from None


def condense(groups: Sequence[Group], out: Path, everything: bool = False) -> Path:
    """Write `out/runs.tar.xz`; `everything` keeps the histories of all runs, chosen or not."""
    files: dict[str, bytes] = {}
    for group in groups:
        chosen = {id(result.trial) for result in group.results}
        for trial in group.trials:
            runs = [run for run in trial.source if isinstance(run, StoredRun)]
            if runs and (everything or id(trial) in chosen):
                for run in runs:
                    files |= _within(run.folder.name, _run_files(run))
            else:
                files |= _summary_files(group, trial.method, trial.lr, trial.summary)
        if group.federation is not None:
            name = f"federations/{group.federation['sha256'][:16]}.json"
            facts = {k: v for k, v in group.federation.items() if k != "seal"}
            files[name] = seal(facts)
    path = out / ARCHIVE
    write_bytes(path, _packed(files))
    return path


def _within(folder: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def _run_files(run: StoredRun) -> dict[str, bytes]:
    read = {name: read_sealed(run.folder, run.manifest, name)
            for name in ("config.toml", "history.safetensors")}  # fmt: skip
    if run.manifest.get("condensed"):
        return {**read, "manifest.json": (run.folder / "manifest.json").read_bytes()}
    facts = {k: v for k, v in run.manifest.items() if k not in ("sha256", "seal")}
    read["history.safetensors"] = condensed_history(read["history.safetensors"])
    return with_manifest(read, {**facts, "condensed": True})


def _summary_files(group: Group, method: Any, lr: float, summary: Summary) -> dict[str, bytes]:
    seed = int(summary.births[0]["seed"])
    config = replace(
        group.config, method=method, train=replace(group.config.train, lr=lr, seed=seed)
    )
    tensors = {"rounds": np.array(summary.rounds, dtype=np.int64)}
    for model, curve in summary.valid.items():
        tensors |= {f"{model}/mean": curve.mean, f"{model}/variance": curve.variance}
    facts = {
        "method": method.label,
        "passport": dict(group.passport),
        "diverged": summary.diverged,
        "last": {model: list(two) for model, two in summary.last.items()},
        "births": [dict(birth) for birth in summary.births],
    }
    if group.deployed is not None:
        facts["deployed"] = to_builtins(group.deployed)
    text = config.to_toml().encode()
    files = {"config.toml": text, "curves.safetensors": save(tensors)}
    name = hashlib.sha256(text).hexdigest()[:16]
    return _within(f"{SUMMARIES}/{name}", with_manifest(files, facts))


def _packed(files: Mapping[str, bytes]) -> bytes:
    """Without times and owners: the same content is the same file. Like stands beside like, since
    thousands of manifests and configurations say nearly the same."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=6) as archive:
        for name in sorted(files, key=lambda n: (n.rpartition("/")[2], n)):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name])
            archive.addfile(entry, io.BytesIO(files[name]))
    return buffer.getvalue()


def unpacked(folder: Path) -> Path:
    """The folder itself, or what its archive holds, unpacked until this process ends."""
    archive = folder / ARCHIVE
    if not archive.exists():
        return folder
    return Path(_unpack(archive.resolve(), archive.stat().st_mtime_ns).name)


@cache  # runs that were opened refer to it for as long as they live
def _unpack(archive: Path, changed: int) -> tempfile.TemporaryDirectory[str]:
    place = tempfile.TemporaryDirectory(prefix="fairvar-")
    try:
        with tarfile.open(archive, "r:xz") as content:
            _extract(content, archive, Path(place.name))
    except IntegrityError:
        place.cleanup()
        raise
    except (tarfile.TarError, lzma.LZMAError, OSError, EOFError) as error:
        place.cleanup()
        raise IntegrityError(f"{archive} cannot be unpacked: {error}") from None
    return place


def _extract(content: tarfile.TarFile, archive: Path, place: Path) -> None:
    """Plain files with plain names, and not too many bytes: an archive may come from elsewhere."""
    room = MOST_BYTES
    for entry in content:
        target, room = place / entry.name, room - entry.size
        if not entry.isfile() or not NAME.fullmatch(entry.name):
            raise IntegrityError(f"{archive} holds {entry.name!r}; refused")
        if room < 0:
            raise IntegrityError(f"{archive} holds more than {MOST_BYTES:,} bytes; refused")
        target.parent.mkdir(parents=True, exist_ok=True)
        read = content.extractfile(entry)
        assert read is not None
        target.write_bytes(read.read())
